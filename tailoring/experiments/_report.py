"""Tables, figures and pages from result rows; shared by all experiments."""

from __future__ import annotations

import html
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from scipy import stats

from ._cache import make_folder, write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Estimate:
    """The mean of a few values, one for each seed, and how far it may be off."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return math.fsum(self.values) / len(self.values)

    @property
    def error(self) -> float:
        """The standard error of the mean; nan for a single value."""
        n = len(self.values)
        return math.sqrt(math.fsum((v - self.mean) ** 2 for v in self.values) / (n - 1) / n) if n > 1 else math.nan

    @property
    def interval(self) -> float:
        """Half the width of the 95 % interval of Student's t; nan for a single value."""
        return float(stats.t.ppf(0.975, len(self.values) - 1)) * self.error if len(self.values) > 1 else math.nan

    @property
    def clear(self) -> bool:
        """Whether the mean differs from 0 by more than the seeds' spread explains (95 % interval)."""
        return abs(self.mean) > self.interval

    def percent(self) -> str:
        if not math.isfinite(self.mean):
            return "diverged"
        if len(self.values) == 1:
            return f"{100 * self.mean:.1f}"
        return f"{100 * self.mean:.1f} ± {100 * self.error:.1f}{'' if self.clear else ' ?'}"

    def __str__(self) -> str:
        return f"{self.mean:.4g}" if math.isfinite(self.mean) else "diverged"


@dataclass(frozen=True)
class Table:
    title: str
    columns: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)  # an empty row is a rule between groups
    note: str = ""

    def text(self) -> str:
        full = [list(self.columns), *[list(row) for row in self.rows if row]]
        widths = [max(len(row[i]) for row in full) for i in range(len(self.columns))]

        def line(row: Sequence[str]) -> str:
            return "  ".join(
                cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
            ).rstrip()

        rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
        body = [line(row) if row else rule for row in self.rows]
        return "\n".join([self.title, rule, line(self.columns), rule, *body, rule, *([self.note] if self.note else [])])

    def markdown(self) -> str:
        def line(row: Sequence[str]) -> str:
            return "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"

        rows = [line(row) for row in self.rows if row]
        rule = "|" + "|".join("---" if i == 0 else "--:" for i in range(len(self.columns))) + "|"
        return "\n".join([line(self.columns), rule, *rows, *(["", self.note] if self.note else [])])

    def html(self) -> str:
        def cells(row: Sequence[str], tag: str) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) + "</tr>"

        body = "\n".join(cells(row, "td") if row else f'<tr class="rule"><td colspan="{len(self.columns)}"></td></tr>' for row in self.rows)
        note = f"<p>{html.escape(self.note)}</p>" if self.note else ""
        return f"<h2>{html.escape(self.title)}</h2>\n<table>\n{cells(self.columns, 'th')}\n{body}\n</table>\n{note}"


_STYLE = """body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}td,th{padding:.15rem .8rem;text-align:right}
td:first-child,th:first-child{text-align:left}th{border-bottom:2px solid #222}tr.rule td{border-bottom:1px solid #aaa;padding:0}
figure{margin:2rem 0}figcaption{color:#555}svg{max-width:100%;height:auto}pre{background:#f6f6f6;padding:.8rem;overflow:auto}"""


@dataclass(frozen=True)
class Picture:
    name: str
    caption: str
    figure: Figure

    def svg(self) -> str:
        out = io.StringIO()
        self.figure.savefig(out, format="svg", bbox_inches="tight", metadata={"Date": None})
        return out.getvalue()


class NotWrittenError(OSError):
    """The tables are there all the same, to be shown."""

    def __init__(self, why: str, tables: str):
        super().__init__(f"the figures and the page were not written: {why}")
        self.tables = tables


def write(folder: Path, title: str, about: str, tables: Sequence[Table], draw: Callable[[], Sequence[Picture]]) -> list[Path]:
    """The figures as PNG and SVG, and one HTML page that holds everything."""
    try:
        return _written(folder, title, about, tables, draw())
    except Exception as error:  # whatever a figure cannot draw, the tables took the time
        why = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        raise NotWrittenError(why, "\n\n".join(table.text() for table in tables)) from error


def _written(folder: Path, title: str, about: str, tables: Sequence[Table], pictures: Sequence[Picture]) -> list[Path]:
    make_folder(folder)
    written = []
    figures = ""
    for picture in pictures:
        svg = picture.svg()
        png = io.BytesIO()
        picture.figure.savefig(png, format="png", dpi=150, bbox_inches="tight")
        for suffix, content in (("svg", svg.encode()), ("png", png.getvalue())):
            written.append(folder / f"{picture.name}.{suffix}")
            write_whole(written[-1], content)
        drawn = svg[svg.index("<svg") :]
        figures += f"<figure>{drawn}<figcaption>{html.escape(picture.caption)}</figcaption></figure>\n"
    body = "\n".join(table.html() for table in tables)
    page = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title><style>{_STYLE}</style></head>\n'
        f"<body><h1>{html.escape(title)}</h1>\n<pre>{html.escape(about)}</pre>\n{body}\n{figures}</body></html>\n"
    )
    written.append(folder / "report.html")
    write_whole(written[-1], page.encode())
    return written


def about(rows: Sequence[dict]) -> str:
    """Where the rows come from, a line for each session that differs."""
    lines = [f"commit {r['commit']}, torch {r['versions']['torch']}, {r['device']}: {r['command']}" for r in rows if r["kind"] == "session"]
    lines += [f"trained before, with settings that these rows do not tell: {', '.join(r['weights'])}" for r in rows if r["kind"] == "found"]
    return "\n".join(dict.fromkeys(lines))


def new_figure(width: float, height: float, columns: int = 1) -> tuple[Figure, list]:
    from matplotlib.figure import Figure  # not pyplot: no display, no global state

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = [figure.add_subplot(1, columns, i + 1) for i in range(columns)]
    for ax in axes:
        ax.grid(True, alpha=0.25)
        ax.spines[["top", "right"]].set_visible(False)
    return figure, axes
