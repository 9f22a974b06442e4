"""Tables 2 to 5 from result rows, with the paper's numbers, the controls, and what the step itself brings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tailoring.smoothing import average_radius, bootstrap_difference, certified_accuracy

from ._report import Picture, Table, about, new_figure, write
from ._rows import Row, read_folder
from ._smoothing_paper import CLASSES, PAPER, RADII, TITLES
from ._smoothing_probe import Probed

CONVENTION = "paper's convention"
LABELS = {
    "plain": "plain",
    "control": "control: the same extra training, no tailoring",
    "control-frozen": "control at sigma': meta-tailoring's training, 0 steps",
    "tailored": "tailored only",
    "tailored-0": "tailored only, 0 steps",
    "meta": "meta-tailored",
    "meta-0": "meta-tailored, 0 steps",
    "scratch": "meta-tailored from scratch",
    "scratch-0": "meta-tailored from scratch, 0 steps",
    "scratch-control": "control from scratch, at sigma', 0 steps",
    "macer": "MACER",
    "macer-control": "MACER at sigma', 0 steps",
    "macer-meta": "MACER, meta-tailored",
    "macer-meta-0": "MACER, meta-tailored, 0 steps",
    "smoothadv": "SmoothAdv",
    "smoothadv-control": "SmoothAdv at sigma', 0 steps",
    "smoothadv-meta": "SmoothAdv, meta-tailored",
    "smoothadv-meta-0": "SmoothAdv, meta-tailored, 0 steps",
}
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


@dataclass(frozen=True)
class Certified:
    """The images of one certification, by index."""

    about: Row
    rows: dict[int, Row]
    finished: bool

    @property
    def tailored(self) -> bool:
        return self.about["inner"]["nu"] > 0

    def tensors(self, convention: str = "sound") -> tuple[Tensor, Tensor, Tensor]:
        """Truth, answer and radius of each image."""
        key = "radius" if convention == "sound" else "paper_radius"
        rows = [self.rows[index] for index in sorted(self.rows)]
        truth, label = (torch.tensor([row[name] for row in rows]) for name in ("label", "predict"))
        return truth, label, torch.tensor([row[key] for row in rows], dtype=torch.float64)

    def acr(self, convention: str = "sound") -> float:
        return average_radius(*self.tensors(convention))

    def counted(self, indices: Sequence[int], convention: str = "sound") -> Tensor:
        """What each of these images adds to the sum of radii."""
        key = "radius" if convention == "sound" else "paper_radius"
        rows = [self.rows[index] for index in indices]
        return torch.tensor([row[key] if row["label"] == row["predict"] else 0.0 for row in rows], dtype=torch.float64)


class Results:
    def __init__(self, folder: Path):
        self.rows = read_folder(folder, "smoothing")
        self.config = self.rows[0]["config"]
        self.classes: int = next((row["classes"] for row in self.rows if row["kind"] == "data"), 0)
        self.trainings = {row["name"]: row for row in self.rows if row["kind"] == "trained"}
        self.probes = {row["role"]: row for row in self.rows if row["kind"] == "probed"}
        self.found: dict[str, Certified] = {}
        finished = {row["name"] for row in self.rows if row["kind"] == "certified"}
        for row in self.rows:
            if row["kind"] == "certification" and (images := _images(folder / "certified" / row["name"])):
                self.found[row["name"]] = Certified(row, images, row["name"] in finished)

    def test(self, sigma: float, n: int, *, begun: bool = False) -> dict[str, Certified]:
        """By role: the finished certifications, or also those that are `begun`. Half of the images may be easier than the other half."""
        asked = [c for c in self._part("test") if (c.about["sigma"], c.about["n"]) == (sigma, n)]
        return {c.about["role"]: c for c in asked if c.finished or begun}

    def validation(self) -> dict[str, Certified]:
        return {c.about["role"]: c for c in self._part("validation") if c.finished}

    def settings(self, *, begun: bool = False) -> list[tuple[float, int]]:
        """(sigma, N) of the certifications on test images, in the order in which they were made."""
        return list(dict.fromkeys((c.about["sigma"], c.about["n"]) for c in self._part("test") if c.finished or begun))

    def _part(self, part: str) -> list[Certified]:
        return [c for c in self.found.values() if c.about["part"] == part]


def _images(folder: Path) -> dict[int, Row]:
    if not folder.is_dir():
        return {}
    return {row["index"]: row for row in read_folder(folder) if row["kind"] == "image"}


def difference(a: Certified, b: Certified, convention: str = "sound") -> tuple[float, float, float]:
    """ACR of a minus that of b, over the images that both have, and the ends of its 95 % bootstrap interval."""
    both = sorted(a.rows.keys() & b.rows.keys())
    return bootstrap_difference(a.counted(both, convention), b.counted(both))


def _interval(found: tuple[float, float, float]) -> tuple[str, str, str]:
    mean, low, high = found
    return f"{mean:+.4f}", f"{low:+.4f} to {high:+.4f}", "" if low <= 0 <= high else "yes"


def tables(results: Results) -> list[Table]:
    made = [_methods(results, sigma, n) for sigma, n in results.settings(begun=True)]
    made += [table for sigma, n in results.settings() if (table := _differences(results, sigma, n)).rows]
    if results.config["data"] != "made":
        made += [_paper(results, kind, n) for kind in TITLES[_kind(results)] for n in sorted({n for _, n in results.settings()})]
    made += [table for table in (_probes(results), _search(results), _regimes(results), _trainings(results)) if table.rows]
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
            table.rows.append((label, a, b, *_interval(difference(found[a], found[b]))))
    for label, a in (("all of meta-tailoring", "meta"), ("without any step", "control-frozen")):
        if a in found and "plain" in found:
            table.rows.append((f"{label}, {CONVENTION}", a, "plain", *_interval(difference(found[a], found["plain"], CONVENTION))))
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


def _probes(results: Results) -> Table:
    """All settings of the search and of the regimes, on single noisy images."""
    found = list(results.probes.values())
    angles = any(row.get("cosines") for row in found)
    asked = f"{len(found[0]['right'])} images, {found[0]['copies']} noisy copies each" if found else ""
    table = Table(
        f"Does the step itself help single noisy images? Validation, {asked}: with the step minus without it, in points",
        ("setting", "% right without", "gain", "95 % interval", "right class's probability", "95 % interval", "moves")
        + (("cosine", "95 % interval") if angles else ()),
        note="Both with the same noise of deviation sigma' and the same weights; bootstrap over images, * if clear. moves: the mean size "
        "of the change of an image's probability, whichever way. alone: on the trained network."
        + (" cosine: of the tailoring and the task gradient, in hundredths." if angles else ""),
    )
    for row in found:
        p = Probed(**{f.name: row[f.name] for f in fields(Probed) if f.name in row})
        gains, moves = (*_points(p.accuracy_gain), *_points(p.probability_gain)), sum(map(abs, p.gained)) / len(p.gained)
        angle = () if not angles else _points(p.cosine) if p.cosines else ("", "")
        role: str = row["role"]
        setting = LABELS.get(role) or role.removeprefix("regime ").replace("search", "alone:")
        table.rows.append((setting, f"{100 * p.accuracy_0:.2f}", *gains, f"{100 * moves:.2f}", *angle))
    return table


def _points(found: tuple[float, float, float]) -> tuple[str, str]:
    mean, low, high = (100 * number for number in found)
    return f"{mean:+.2f}{'' if low <= 0 <= high else '*'}", f"{low:+.2f} to {high:+.2f}"


def _search(results: Results) -> Table:
    """The paper's search of nu and the step size, with tailoring alone."""
    found, config = results.validation(), results.config
    lrs = config["lrs"]
    table = Table(
        f"Search on validation images, tailoring alone, sigma {config['sigmas'][0]:g}: ACR, and what the step brings",
        ("nu", "0 steps", *(f"lr {lr:g}" for lr in lrs)),
        note=f"ACR with the sound radius, N = {config['validation_n']}; in brackets the difference to 0 steps, * if clear.",
    )
    for nu in config["nus"]:
        zero = found.get(f"search nu {nu:g} 0 steps")
        cells = []
        for lr in lrs:
            c = found.get(f"search nu {nu:g} lr {lr:g}")
            cells.append("" if c is None or zero is None else _beside(c, zero))
        if zero is not None and any(cells):
            table.rows.append((f"{nu:g}", f"{zero.acr():.4f}", *cells))
    return table


def _beside(c: Certified, zero: Certified) -> str:
    mean, low, high = difference(c, zero)
    return f"{c.acr():.4f} ({mean:+.4f}{'' if low <= 0 <= high else '*'})"


def _regimes(results: Results) -> Table:
    found, config = results.validation(), results.config
    table = Table(
        f"Does the step itself help? Validation images, sigma {config['sigmas'][0]:g}: ACR with the step minus ACR with 0 steps",
        ("setting", "alone", "interval", "meta-tailored", "interval", "ACR"),
        note=f"alone: on the trained network; meta-tailored: after {config['regime_epochs']} epochs with that setting, against the same "
        "weights. Of many settings some look good by chance: one that does must be certified anew on other images.",
    )
    names = dict.fromkeys(role.removeprefix("regime ").removesuffix(" alone") for role in found if _is_regime(role))
    for name in names:
        alone, meta = found.get(f"regime {name} alone"), found.get(f"regime {name}")
        cells: list[str] = []
        for c, zeros in ((alone, "search"), (meta, f"regime {name}")):
            zero = c and found.get(f"{zeros} nu {c.about['inner']['nu']:g} 0 steps")
            cells += _interval(difference(c, zero))[:2] if c and zero else ("", "")
        table.rows.append((name, *cells, f"{meta.acr():.4f}" if meta else ""))
    return table


def _is_regime(role: str) -> bool:
    return role.startswith("regime ") and not role.endswith("0 steps")


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
    write(folder, "Certified robustness: Tables 2 to 5", about(results.rows), made, _pictures(results))
    return "\n\n".join(table.text() for table in made)
