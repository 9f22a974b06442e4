"""What the step itself brings on validation images, setting by setting: the tables of the probes, the search and the regimes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from ._report import Table
from ._rows import Row
from ._smoothing_probe import Probed
from ._smoothing_results import LABELS, Certified, Results, difference, interval


def tables(results: Results) -> Iterator[Table]:
    yield from (_probes(results), _angles(results), _search(results), _regimes(results))


def _probes(results: Results) -> Table:
    """All settings of the search and of the regimes, on single noisy images."""
    found = list(results.probes.values())
    asked = f"{len(found[0]['right'])} images, {found[0]['copies']} noisy copies each" if found else ""
    table = Table(
        f"Does the step itself help single noisy images? Validation, {asked}: with the step minus without it, in points",
        ("setting", "% right without", "gain", "95 % interval", "right class's probability", "95 % interval", "moves"),
        note="Both with the same noise of deviation sigma' and the same weights; bootstrap over images, * if clear. moves: the mean size "
        "of the change of an image's probability, whichever way. alone: on the trained network.",
    )
    for row in found:
        p = _probed(row)
        gains, moves = (*_points(p.accuracy_gain), *_points(p.probability_gain)), sum(map(abs, p.gained)) / len(p.gained)
        table.rows.append((_setting(row), f"{100 * p.accuracy_0:.2f}", *gains, f"{100 * moves:.2f}"))
    return table


def _angles(results: Results) -> Table:
    """Where the steps of the probes point to."""
    found = [row for row in results.probes.values() if row.get("cosines")]
    groups = ("all images", "always right", "never right")
    table = Table(
        "Where does the step point to? Cosine of the tailoring and the task gradient, validation images",
        ("setting", *(word for group in groups for word in (group, "95 % interval"))),
        note="Gradients in the query's own state, where nothing is adapted yet; mean over an image's noisy copies, bootstrap over images. "
        "always, never right: of those whose copies the network all gets right, or all wrong, without the step.",
    )
    for row in found:
        p = _probed(row)
        cells = [_cosine(p.cosine(right)) for right in (None, p.copies, 0)]
        table.rows.append((_setting(row), *(cell for pair in cells for cell in pair)))
    return table


def _cosine(found: tuple[float, float, float]) -> tuple[str, str]:
    mean, low, high = found
    return f"{mean:+.3f}", f"{low:+.3f} to {high:+.3f}"


def _probed(row: Row) -> Probed:
    return Probed(**{f.name: row[f.name] for f in fields(Probed) if f.name in row})


def _setting(row: Row) -> str:
    role: str = row["role"]
    return LABELS.get(role) or role.removeprefix("regime ").replace("search", "alone:")


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
            cells += interval(difference(c, zero))[:2] if c and zero else ("", "")
        table.rows.append((name, *cells, f"{meta.acr():.4f}" if meta else ""))
    return table


def _is_regime(role: str) -> bool:
    return role.startswith("regime ") and not role.endswith("0 steps")
