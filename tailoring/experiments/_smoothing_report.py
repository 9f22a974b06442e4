"""Tables 2 to 5 from result rows, with the paper's numbers, the controls, and what the step itself brings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tailoring.smoothing import certified_accuracy

from ._report import Picture, Table, about, new_figure, write
from ._smoothing_paper import CLASSES, PAPER, RADII, TITLES
from ._smoothing_results import LABELS, Certified, Results, difference, interval
from ._smoothing_step import tables as of_the_step

CONVENTION = "paper's convention"
# what is compared with what: a - b
COMPARISONS = (
    ("extra training alone", "control", "plain"),
    ("meta-tailoring's training at sigma', without any step", "control-frozen", "plain"),
    ("tailoring alone", "tailored", "plain"),
    ("tailoring alone: the step itself", "tailored", "tailored-0"),
    ("all of meta-tailoring", "meta", "plain"),
    ("meta-tailoring beyond extra training", "meta", "control"),
    ("meta-tailoring beyond the same training at sigma'", "meta", "control-frozen"),
    ("the step itself", "meta", "meta-0"),
    ("from scratch: all", "scratch", "plain"),
    ("from scratch: beyond the same training without a step", "scratch", "scratch-control"),
    ("from scratch: the step itself", "scratch", "scratch-0"),
    ("MACER beyond plain", "macer", "plain"),
    ("MACER: meta-tailoring", "macer-meta", "macer"),
    ("MACER: beyond the same training at sigma'", "macer-meta", "macer-control"),
    ("MACER: the step itself", "macer-meta", "macer-meta-0"),
    ("SmoothAdv beyond plain", "smoothadv", "plain"),
    ("SmoothAdv: meta-tailoring", "smoothadv-meta", "smoothadv"),
    ("SmoothAdv: beyond the same training at sigma'", "smoothadv-meta", "smoothadv-control"),
    ("SmoothAdv: the step itself", "smoothadv-meta", "smoothadv-meta-0"),
)
# in the tables of the paper: our row beside its row
PAPER_ROWS = (
    ("RandSmooth", ("plain", "control")),
    ("Salman", ("smoothadv",)),
    ("MACER", ("macer",)),
    ("Meta-tailored", ("meta", "macer-meta", "smoothadv-meta")),
)


def tables(results: Results) -> list[Table]:
    made = [_methods(results, sigma, n) for sigma, n in results.settings(begun=True)]
    made += [table for sigma, n in results.settings() if (table := _differences(results, sigma, n)).rows]
    if results.config["data"] != "made":
        made += [_paper(results, kind, n) for kind in TITLES[_kind(results)] for n in sorted({n for _, n in results.settings()})]
    made += [table for table in (*of_the_step(results), _trainings(results)) if table.rows]
    return made


def _kind(results: Results) -> str:
    return "imagenet" if results.config["data"] == "imagenet" else "cifar"


def _methods(results: Results, sigma: float, n: int) -> Table:
    table = Table(
        f"sigma {sigma:g}, N = {n}: average certified radius (ACR) and accuracy of the smoothed classifiers",
        ("classifier", "images", "accuracy %", "ACR", f"ACR, {CONVENTION}", "seconds"),
        note="ACR: with the sound radius, sigma' Phi^-1(p). The paper's convention is sigma Phi^-1(p): no certificate if sigma' < sigma.",
    )
    for role, c in _ordered(results.test(sigma, n, begun=True)):
        accuracy = certified_accuracy(*c.tensors(), [0.0])[0]
        seconds = sum(row["seconds"] for row in c.rows.values())
        other = f"{c.acr(CONVENTION):.4f}" if c.tailored else ""
        images = f"{len(c.rows)}{'' if c.finished else ', unfinished'}"
        table.rows.append((LABELS[role], images, f"{100 * accuracy:.1f}", f"{c.acr():.4f}", other, f"{seconds:.0f}"))
    return table


def _ordered(found: dict[str, Certified]) -> list[tuple[str, Certified]]:
    return [(role, found[role]) for role in LABELS if role in found]


def _differences(results: Results, sigma: float, n: int) -> Table:
    table = Table(
        f"sigma {sigma:g}, N = {n}: differences of ACR, image by image",
        ("what it tells", "a", "b", "ACR of a - b", "95 % interval", "clear"),
        note="Bootstrap over the images that both certified, with the same noise. Sound radii, except where told. "
        "One training each: the interval does not hold the spread over trainings.",
    )
    found = results.test(sigma, n)
    for label, a, b in COMPARISONS:
        if a in found and b in found:
            table.rows.append((label, a, b, *interval(difference(found[a], found[b]))))
    for label, a in (("all of meta-tailoring", "meta"), ("without any step", "control-frozen")):
        if a in found and "plain" in found:
            table.rows.append((f"{label}, {CONVENTION}", a, "plain", *interval(difference(found[a], found["plain"], CONVENTION))))
    return table


def _paper(results: Results, kind: str, n: int) -> Table:
    """A table of the paper: its rows, and ours beside them."""
    radii = RADII[_kind(results)]
    other = f" (ours: {results.classes} classes, not the paper's task)" if results.classes != CLASSES[_kind(results)] else ""
    table = Table(
        f"{TITLES[_kind(results)][kind]}{other}, N = {n}",
        ("sigma, classifier", *(f"{r:g}" for r in radii), "ACR"),
        note=f"Share of images that are certified at a radius. paper: its numbers (radius sigma Phi^-1(p)); ours ({CONVENTION}): the same.",
    )
    for sigma in sorted({sigma for sigma, count in results.settings() if count == n}):
        table.rows.append(())
        found = results.test(sigma, n)
        for method, roles in PAPER_ROWS:
            numbers = PAPER[_kind(results)].get((sigma, method))
            if kind == "own" and method in ("Salman", "MACER"):
                continue
            if numbers:
                table.rows.append((f"{sigma:g} paper: {method}", *(f"{v:.2f}" for v in numbers[:-1]), f"{numbers[-1]:.3f}"))
            for role in roles:
                if role in found and (kind != "own" or role in ("plain", "control", "meta")):
                    table.rows.extend(_our_rows(sigma, role, found[role], radii))
    return Table(table.title, table.columns, [row for i, row in enumerate(table.rows) if i or row], table.note)


def _our_rows(sigma: float, role: str, c: Certified, radii: Sequence[float]) -> list[Sequence[str]]:
    made: list[Sequence[str]] = []
    for convention in ("sound", CONVENTION) if c.tailored else ("sound",):
        accuracy = certified_accuracy(*c.tensors(convention), radii)
        words = f" ({convention})" if c.tailored else ""
        made.append((f"{sigma:g} ours: {role}{words}", *(f"{a:.2f}" for a in accuracy), f"{c.acr(convention):.3f}"))
    return made


def _trainings(results: Results) -> Table:
    table = Table("Trainings", ("network", "method", "noise", "inner steps", "epochs", "updates", "noisy accuracy %", "seconds"))
    for name, row in results.trainings.items():
        t: dict[str, Any] = row["training"]
        numbers = (f"{t['noise']:.3f}", str(t["inner"]["steps"]), str(t["epochs"]), str(row["updates"]))
        table.rows.append((name, t["method"], *numbers, f"{100 * row['noisy_accuracy']:.1f}", f"{row['seconds']:.0f}"))
    return table


def _pictures(results: Results) -> list[Picture]:
    made = []
    for sigma, n in results.settings():
        figure, (ax,) = new_figure(6, 4)
        for i, (role, c) in enumerate(_ordered(results.test(sigma, n))):
            truth, label, radius = c.tensors()
            radii = torch.linspace(0, max(0.1, float(radius.max()) * 1.05), 200).tolist()
            style = "-" if i < 10 else "--"  # there are ten colours
            ax.plot(radii, certified_accuracy(truth, label, radius, radii), style, label=role, linewidth=1.2)
        ax.set(xlabel="radius", ylabel="certified accuracy", ylim=(0, 1))
        ax.legend(frameon=False, fontsize=8)
        made.append(
            Picture(f"certified-s{sigma:g}-n{n}", f"Certified accuracy against the (sound) radius; sigma {sigma:g}, N = {n}.", figure)
        )
    return made


def report(folder: Path) -> str:
    """Write figures and the page beside the rows; the tables as text."""
    results = Results(folder)
    made = tables(results)
    if not results.found:
        return "\n\n".join([*(table.text() for table in made), "No image is certified yet."])
    write(folder, "Certified robustness: Tables 2 to 5", about(results.rows), made, lambda: _pictures(results))
    return "\n\n".join(table.text() for table in made)
