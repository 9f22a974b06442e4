"""Figure 4, the gains beside their controls, and the TTT figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ._report import Estimate, Picture, new_figure

if TYPE_CHECKING:
    from ._contrastive_report import Results

SHOWN = {
    "plain": "plain",
    "meta": "meta-tailored",
    "mean": "mean of the views",
    "meta-image": "meta-tailored, without averaging",
    "augmented": "trained on views",
    "tailored": "tailored at prediction only",
}


def pictures(results: Results) -> list[Picture]:
    return [p for p in (_figure_4(results), _ttt(results)) if p is not None]


def _figure_4(results: Results) -> Picture | None:
    if "plain" not in results.methods:
        return None
    figure, (ax, gains) = new_figure(11, 4.2, columns=2)
    for number, (name, label) in enumerate(SHOWN.items()):
        if name in results.methods:
            _curve(ax, results.labels, results.accuracy(name), number, label)
            if name != "plain":
                _curve(gains, results.labels, results.gain(name, "plain"), number, label)
    gains.axhline(0, color="C0", linewidth=1)
    _finish(ax, results.labels, "test accuracy (%)")
    _finish(gains, results.labels, "points above plain")
    caption = (
        "Figure 4: test accuracy against labels per class, and what each method gains over the plain linear layer, with 95 % intervals "
        f"over {len(results.config['seeds'])} trainings of the linear layer (left: of the accuracy; right: of the paired difference)."
    )
    return Picture("figure4", caption, figure)


def _ttt(results: Results) -> Picture | None:
    row = results.one("ttt")
    if row is None:
        return None
    figure, (ax, meta) = new_figure(11, 4.2, columns=2)
    for axis, how in ((ax, "plain"), (meta, "meta")):
        for number, lr in enumerate(row["lrs"]):
            found = [Estimate(tuple(seeds)) for seeds in row[how][number]]
            _curve(axis, results.labels, found, number, f"lr {lr:g}" + (" (plain)" if not lr else ""))
        _finish(axis, results.labels, "test accuracy (%)")
    meta.sharey(ax)
    ax.set_title("TTT: layer trained on plain h", fontsize=9)
    meta.set_title("layer trained on rotation-tailored h", fontsize=9)
    caption = f"Test-time training by rotation prediction, {row['steps']} steps on h, with 95 % intervals."
    return Picture("ttt", caption, figure)


def _curve(ax: Any, labels: Sequence[int], found: Sequence[Estimate], number: int, label: str) -> None:
    beside = [n * 1.02**number for n in labels]  # intervals would hide each other
    mean = [100 * e.mean for e in found]
    spread = [100 * e.interval if len(e.values) > 1 else 0.0 for e in found]
    ax.errorbar(beside, mean, spread, color=f"C{number}", label=label, marker="o", markersize=3, linewidth=1.2, capsize=2)


def _finish(ax: Any, labels: Sequence[int], what: str) -> None:
    ax.set_xscale("log")
    ax.set_xticks(labels, [str(n) for n in labels])
    ax.minorticks_off()
    ax.set(xlabel="labels per class", ylabel=what)
    ax.legend(frameon=False, fontsize=8)
