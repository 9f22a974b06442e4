"""Figure 3 and the sweep from no to full conservation. A curve without one finite value is left out: a log axis has no place for it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from ._report import Picture, new_figure
from ._rows import Row


def pictures(rows: Sequence[Row]) -> list[Picture]:
    made = (_courses(rows), _sweep(rows), _lengths(rows))
    return [p for p in made if p is not None]


def _finite(values: Sequence[float]) -> bool:
    return any(map(math.isfinite, values))


def _courses(rows: Sequence[Row]) -> Picture | None:
    """Figure 3: error and energy along the test prediction."""
    found = [r for r in rows if r["kind"] == "curve" and _finite(r["error"])]
    if not found:
        return None
    figure, (left, right) = new_figure(11, 4.2, columns=2)
    for r in found:
        left.semilogy(r["time"], [max(e, 1e-7) for e in r["error"]], linewidth=1.2, label=r["label"])
        right.plot(r["time"], r["mean_energy"], linewidth=1.2)
    right.plot(found[0]["time"], found[0]["true_energy"], "k.", markersize=2.5, label="measured")
    left.set(xlabel="time (s)", ylabel="squared error, mean over seeds")
    right.set(xlabel="time (s)", ylabel="energy, mean over seeds", ylim=(0, 1.6 * max(found[0]["true_energy"])))
    left.legend(frameon=False, fontsize=7)
    right.legend(frameon=False, fontsize=7)
    return Picture("figure3", "Figure 3: error and energy of the long-term test prediction.", figure)


def _sweep(rows: Sequence[Row]) -> Picture | None:
    """Test and training loss against how much of the baseline's drift of energy is taken away."""
    found = [r for r in rows if r["kind"] == "result" and r["at"] == r["training"]["iterations"]]
    softened = [r["training"]["labels"] for r in found if r["way"]["how"] == "project" and _finite(r["test"])]
    kinds = [labels for labels in ("forward", "central", "through") if labels in softened]
    if not kinds:
        return None
    figure, axes = new_figure(4.7 * len(kinds), 4.2, columns=len(kinds))
    for ax, labels in zip(axes, kinds, strict=True):
        mine = [r for r in found if r["training"]["labels"] == labels]
        _projection(ax, [r for r in mine if r["way"]["how"] == "project"])
        for kind, color, text in (("mlp", "tab:gray", "baseline"), ("hnn", "tab:red", "HNN")):
            plain = [r for r in mine if r["way"]["how"] == "plain" and r["training"]["kind"] == kind]
            if plain and math.isfinite(statistics.fmean(plain[0]["test"])):
                ax.axhline(statistics.fmean(plain[0]["test"]), color=color, linestyle=":", label=f"{text}, test")
        ax.set(xlabel="share of the drift of energy taken away", ylabel="long-term squared error", yscale="log", title=f"{labels} labels")
        ax.legend(frameon=False, fontsize=7)
    caption = "From no (0) to full (1) conservation: soft projection of the trained baseline, mean and range over seeds."
    return Picture("sweep", caption, figure)


def _projection(ax: Any, rows: Sequence[Row]) -> None:
    rows = sorted((r for r in rows if _finite(r["test"]) and _finite(r["train"])), key=lambda r: r["way"]["amount"])
    amounts = [r["way"]["amount"] for r in rows]
    for part, color in (("test", "tab:blue"), ("train", "tab:orange")):
        ax.plot(amounts, [statistics.fmean(r[part]) for r in rows], ".-", color=color, label=f"soft projection, {part}")
        ax.fill_between(amounts, [min(r[part]) for r in rows], [max(r[part]) for r in rows], color=color, alpha=0.15)


def _lengths(rows: Sequence[Row]) -> Picture | None:
    """What the length of training does to each method."""
    found = [r for r in rows if r["kind"] == "result" and r["training"]["labels"] == "forward"]
    figure, (ax,) = new_figure(6.5, 4.2)
    drawn = 0
    for label, kind, meta, backprop in (
        ("baseline", "mlp", False, "none"),
        ("HNN", "hnn", False, "none"),
        ("meta-tailoring, first order", "mlp", True, "none"),
        ("meta-tailoring, second order", "mlp", True, "all"),
    ):
        mine = [
            r
            for r in found
            if r["training"]["kind"] == kind
            and bool(r["training"]["steps"]) == meta
            and r["training"]["backprop"] == backprop
            and (
                r["way"]["how"] == "plain"
                if not meta
                else (r["way"]["steps"], r["way"]["lr"]) == (r["training"]["steps"], r["training"]["lr"])
            )
        ]
        one = next(((r["training"], r["seeds"]) for r in mine if r["at"] < r["training"]["iterations"]), None)
        mine = sorted((r for r in mine if (r["training"], r["seeds"]) == one), key=lambda r: r["at"])
        if len(mine) > 1 and _finite([statistics.median(r["test"]) for r in mine]):
            at = [r["at"] for r in mine]
            ax.semilogy(at, [statistics.median(r["test"]) for r in mine], ".-", label=label)
            ax.fill_between(at, [min(r["test"]) for r in mine], [max(r["test"]) for r in mine], alpha=0.12)
            drawn += 1
    if not drawn:
        return None
    ax.set(xlabel="training iterations", ylabel="long-term test error, median and range of seeds")
    ax.legend(frameon=False, fontsize=8)
    return Picture("lengths", "The length of training (forward labels).", figure)
