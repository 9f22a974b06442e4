"""Draws how the cost of tailoring grows with the batch, the steps, the depth and the width, from rows of `depth.py`.

    python benchmarks/_plots.py benchmarks/rows/growth-*.jsonl [--out docs/performance]

One picture for each device: above, time relative to the plain forward pass at the same setting; below, peak memory.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure  # not pyplot: no display, no global state

AXES = {"queries": "queries in the batch", "steps": "inner steps", "layers": "layers", "width": "width"}
CASES = ("plain", "CN everywhere", "CN last layer", "Weights")  # each has its colour; dashed if compiled
Row = dict[str, Any]


def sweep(rows: Iterable[Row], axis: str) -> list[Row]:
    """The rows that differ in `axis` and in no other setting: of several such sweeps, that with the most values."""
    found: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        found[tuple(row[other] for other in AXES if other != axis)].append(row)
    return max(found.values(), key=lambda rows: len({row[axis] for row in rows}))


def read(paths: Iterable[Path]) -> list[Row]:
    """The rows with their `ratio` to the plain forward pass that ran beside them. What was measured twice counts as measured last."""
    latest: dict[tuple[Any, ...], Row] = {}
    plain: dict[tuple[Any, ...], float] = {}
    for row in (json.loads(line) for path in paths for line in path.read_text().splitlines()):
        if row.get("program") != "depth" or "failed" in row:
            continue
        setting = tuple(row[key] for key in ("device", *AXES))
        if row["name"] == "plain":
            plain[setting] = row["seconds"]
        if setting in plain and row["name"].removesuffix(" compiled") in CASES:
            latest[(*setting, row["name"])] = row | {"ratio": row["seconds"] / plain[setting]}
    return list(latest.values())


def _mebibytes(size: int | None) -> float:
    return math.nan if size is None else size / 2**20  # where memory was not measured, nothing is drawn


def draw(rows: list[Row]) -> Figure:
    figure = Figure(figsize=(4 * len(AXES), 7), layout="constrained")
    panels = figure.subplots(2, len(AXES))
    for column, (axis, label) in enumerate(AXES.items()):
        time, memory = panels[:, column]
        swept = sweep(rows, axis)
        for name in dict.fromkeys(row["name"] for row in swept):
            case = name.removesuffix(" compiled")
            points = sorted((row[axis], row["ratio"], _mebibytes(row["peak_bytes"])) for row in swept if row["name"] == name)
            values, ratios, peaks = zip(*points, strict=True)
            style = {"color": f"C{CASES.index(case)}", "marker": ".", "linestyle": "-" if case == name else "--", "label": name}
            time.plot(values, ratios, **style)
            if case == name:  # a compiled program's memory is its CUDA graph's, or lost in the compiler's own
                memory.plot(values, peaks, **style)
        fixed = ", ".join(f"{swept[0][other]} {other}" for other in AXES if other != axis)
        time.set(title=fixed, yscale="log", ylabel="time / plain forward pass")
        memory.set(xlabel=label, yscale="log", ylabel="peak memory (MiB)")
        for ax in (time, memory):
            ax.set_xscale("log", base=2)
            ax.grid(True, alpha=0.25)
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2 * len(CASES))
    figure.suptitle(f"Tailoring beside the plain forward pass, {rows[0]['device']}, torch {rows[0]['torch']}")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rows", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=Path("docs/performance"))
    options = parser.parse_args()
    rows = read(options.rows)
    if not rows:
        raise SystemExit(f"no rows of depth.py in {', '.join(map(str, options.rows))}")
    options.out.mkdir(parents=True, exist_ok=True)
    for device in dict.fromkeys(row["device"] for row in rows):
        path = options.out / f"{device.lower().replace(' ', '-')}.png"
        draw([row for row in rows if row["device"] == device]).savefig(path, dpi=100)
        print(path)


if __name__ == "__main__":
    main()
