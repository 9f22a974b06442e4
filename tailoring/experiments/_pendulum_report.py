"""Tables and figures of the pendulum experiment."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from ._pendulum_figures import pictures
from ._report import Table, about, write
from ._rows import Row, last_of_each, read_folder

COLUMNS = ("method", "one-step", "train", "test", "energy", "dH/dt", "below HNN", "setting")
NOTE = (
    "one-step: squared error of dx/dt on test labels; train, test: squared error of long-term predictions, mean ± standard deviation over "
    "seeds; energy: squared error of the energy along the test prediction; dH/dt: mean rate of energy at the test states; below HNN: seeds "
    "with a lower test error than the HNN of the same seed. What has a setting was chosen by the long-term loss on the training segments."
)


JOB = ("training", "seeds", "way", "at")
KEYS = {"result": JOB, "curve": (*JOB, "label"), "training": ("name",), "data": ()}


class Results:
    """Result rows, asked by what they hold."""

    def __init__(self, rows: Iterable[Row]):
        self.rows = last_of_each(rows, KEYS)
        self.config: Row = self.rows[0]["config"]
        self.title = self.config["motion"].capitalize()
        self.results = [r for r in self.rows if r["kind"] == "result"]

    def find(self, labels: str, kind: str = "mlp", *, seeds: Sequence[int] | None = None, last: bool = True, **way: Any) -> list[Row]:
        """Rows of networks trained in the ordinary way; only those after the last iteration, unless `last` is False."""
        trained = {"labels": labels, "kind": kind, "steps": 0}
        return [
            r
            for r in self.results
            if (seeds is None or r["seeds"] == list(seeds))
            and (not last or r["at"] == r["training"]["iterations"])
            and all(r["training"][n] == v for n, v in trained.items())
            and all(r["way"][n] == v for n, v in way.items())
        ]

    def meta(self, labels: str = "forward", *, seeds: Sequence[int] | None = None, backprop: str = "none", last: bool = True) -> list[Row]:
        """Rows of meta-tailored networks."""
        found = [
            r for r in self.results if r["training"]["steps"] and r["training"]["backprop"] == backprop and r["way"]["how"] == "tailor"
        ]
        return [
            r
            for r in found
            if r["training"]["labels"] == labels
            and (seeds is None or r["seeds"] == list(seeds))
            and (not last or r["at"] == r["training"]["iterations"])
        ]


def chosen(rows: Sequence[Row]) -> Row | None:
    """The row with the lowest long-term loss on the training segments."""
    return min(rows, key=lambda r: statistics.fmean(r["train"]), default=None)


def same_steps(rows: Iterable[Row]) -> list[Row]:
    """Those that predict with as many steps, of the same size, as they were trained with."""
    return [r for r in rows if r["way"]["steps"] == r["training"]["steps"] and r["way"]["lr"] == r["training"]["lr"]]


def stopped(rows: Sequence[Row]) -> Row | None:
    """From rows of the same networks after more and more iterations, each seed where its own training segments were predicted best."""
    if len(rows) < 2:
        return None
    best = [min(rows, key=lambda r, i=i: r["train"][i]) for i in range(len(rows[0]["seeds"]))]
    values = {name: [r[name][i] for i, r in enumerate(best)] for name in ("train", "test", "energy", "one_step", "rate")}
    return rows[0] | values | {"at": sorted({r["at"] for r in best})}


def spread(values: Sequence[float]) -> str:
    lost = sum(not math.isfinite(v) for v in values)
    if lost:
        return f"{lost} of {len(values)} diverged"
    deviation = f" ± {statistics.stdev(values):.2g}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.3g}{deviation}"


def line(label: str, row: Row | None, hnn: Row | None, setting: str = "") -> list[Sequence[str]]:
    if row is None:
        return []
    mean = {name: f"{statistics.fmean(row[name]):.3g}" for name in ("one_step", "rate")}
    below = ""
    if hnn is not None and hnn is not row:
        other = dict(zip(hnn["seeds"], hnn["test"], strict=True))
        below = f"{sum(test < other[seed] for seed, test in zip(row['seeds'], row['test'], strict=True))}/{len(row['seeds'])}"
    return [(label, mean["one_step"], spread(row["train"]), spread(row["test"]), spread(row["energy"]), mean["rate"], below, setting)]


def setting(row: Row | None) -> str:
    if row is None:
        return ""
    way, trained = row["way"], row["training"]["steps"]
    if way["how"] == "project":
        return f"{way['amount']:g} of it"
    norm = "" if way["norm"] == "l1" else ", squared"
    steps = (
        f"{way['steps']} step{'s' * (way['steps'] != 1)}"
        if trained in (0, way["steps"])
        else f"trained {trained}, predicts {way['steps']} steps"
    )
    return f"{steps}, lr {way['lr']:g}{norm}"


def _first(rows: Sequence[Row]) -> Row | None:
    return rows[0] if rows else None


def _marks(rows: Sequence[Row], like: Row | None) -> Row | None:
    """`stopped` of the rows that share network, seeds and way with `like`."""
    if like is None:
        return None
    return stopped([r for r in rows if all(r[n] == like[n] for n in ("training", "seeds", "way"))])


def _paper(results: Results) -> Table:
    """The paper's protocol: forward-difference labels, the last iteration, its grid."""
    c, seeds = results.config, results.config["seeds"]
    hnn = _first(results.find("forward", "hnn", seeds=seeds, how="plain"))
    first = chosen(same_steps(results.meta(seeds=c["meta_seeds"])))
    second = chosen(same_steps(results.meta(seeds=c["order_seeds"], backprop="all")))
    grid = [r for r in results.find("forward", how="tailor", norm="l1") if r["way"]["steps"] in c["steps"]]
    rows = line("baseline MLP", _first(results.find("forward", seeds=seeds, how="plain")), hnn)
    rows += line("HNN", hnn, hnn)
    rows += line("tailoring (no meta-training)", chosen(grid), hnn, setting(chosen(grid)))
    rows += line("meta-tailoring, first order", first, hnn, setting(first))
    rows += line("meta-tailoring, second order", second, hnn, setting(second))
    rows += [()]
    for label, kind in (("baseline MLP", "mlp"), ("HNN", "hnn")):
        marks = results.find("forward", kind, seeds=seeds, last=False, how="plain")
        rows += line(f"{label}, stopped early", stopped(marks), hnn, _when(stopped(marks)))
    for label, row, order in (("first", first, "none"), ("second", second, "all")):
        early = _marks(results.meta(seeds=row["seeds"] if row else None, backprop=order, last=False), row)
        rows += line(f"meta-tailoring, {label} order, stopped early", early, hnn, _when(early))
    return Table(f"{results.title}: the paper's protocol (forward-difference labels)", COLUMNS, rows, NOTE)


def _when(row: Row | None) -> str:
    return "" if row is None else f"{row['at'][0]} to {row['at'][-1]} iterations" if len(row["at"]) > 1 else f"{row['at'][0]} iterations"


def _soft(results: Results, labels: str, title: str) -> Table:
    """From no conservation to full conservation of one trained baseline, and what meta-training adds."""
    c, seeds = results.config, results.config["through_seeds" if labels == "through" else "seeds"]
    hnn = _first(results.find(labels, "hnn", seeds=seeds, how="plain"))
    projections = results.find(labels, how="project")
    long = results.find(labels, how="tailor", norm="l2")
    grid = [r for r in results.find(labels, how="tailor", norm="l1") if r["way"]["steps"] in results.config["steps"]]
    full = (c["meta_seeds"], c["free_seeds"]) if labels == "forward" else (c["central_seeds"],)
    free = [r for r in results.meta(labels) if r["seeds"] in full]
    rows = line("baseline MLP: no conservation", _first(results.find(labels, seeds=seeds, how="plain")), hnn)
    rows += line("HNN: a conserved energy of its own", hnn, hnn)
    rows += line("projection: full conservation", _first([r for r in projections if r["way"]["amount"] == 1]), hnn)
    rows += [()]
    for label, found in (("soft projection", projections), ("tailoring, the paper's grid", grid), ("tailoring, squared loss", long)):
        rows += line(label, chosen(found), hnn, setting(chosen(found)))
    rows += line("meta-tailoring, same steps", chosen(same_steps(free)), hnn, setting(chosen(same_steps(free))))
    rows += line("meta-tailoring, steps at prediction free", chosen(free), hnn, setting(chosen(free)))
    return Table(f"{results.title}: {title}", COLUMNS, rows)


def _grid(results: Results) -> Table:
    """Long-term loss, train and test, for every inner step size and number of steps."""
    c = results.config
    cells = {(r["training"]["steps"], r["training"]["lr"]): r for r in same_steps(results.meta(seeds=c["grid_seeds"]))}
    table = Table(
        f"{results.title}: the grid of meta-tailoring, seed {', '.join(map(str, c['grid_seeds']))}: long-term loss train / test",
        ("steps", *(f"lr {lr:g}" for lr in c["lrs"])),
    )
    for steps in c["steps"]:
        found = [cells.get((steps, lr)) for lr in c["lrs"]]
        table.rows.append((str(steps), *("" if r is None else f"{spread(r['train'])} / {spread(r['test'])}" for r in found)))
    return table


def _sweeps(results: Results, labels: str) -> Table:
    """The whole way from no to full conservation."""
    table = Table(f"{results.title}, {labels} labels: from no to full conservation", ("softening", "train", "test", "energy", "dH/dt"))
    families = [
        ("projection", sorted(results.find(labels, how="project"), key=lambda r: r["way"]["amount"])),
        ("squared loss", sorted(results.find(labels, how="tailor", norm="l2"), key=lambda r: r["way"]["steps"])),
    ]
    meta = sorted(
        (r for r in results.meta(labels) if len(r["seeds"]) > 1),
        key=lambda r: (r["training"]["lr"], r["training"]["steps"], r["way"]["steps"]),
    )
    for (lr, steps), group in groupby(meta, key=lambda r: (r["training"]["lr"], r["training"]["steps"])):
        families.append((f"meta-trained, {steps} steps of {lr:g}", list(group)))
    for name, rows in families:
        if table.rows and rows:
            table.rows.append(())
        for r in rows:
            way = r["way"]
            what = f"{name}, amount {way['amount']:g}" if way["how"] == "project" else f"{name}, predicts with {way['steps']} steps"
            table.rows.append((what, spread(r["train"]), spread(r["test"]), spread(r["energy"]), f"{statistics.fmean(r['rate']):.3g}"))
    return table


def _labels(results: Results) -> list[Table]:
    """How fast energy is lost, in truth and in the labels."""
    columns = ("mean dH/dt", "measured", "forward labels", "central labels", "forward / measured")
    rows: list[Sequence[str]] = [
        (part, *(f"{of[name]:.4f}" for name in ("measured", "forward", "central")), f"{of['forward'] / of['measured']:.0f}")
        for row in results.rows
        if row["kind"] == "data"
        for part, of in row["rates"].items()
    ]
    return [Table(f"{results.title}: the energy that the labels lose", columns, rows)] if rows else []


def _times(results: Results) -> Table:
    """What training took, by kind of network."""
    groups: dict[str, list[float]] = {}
    for row in results.rows:
        if row["kind"] == "training":
            t = row["training"]
            how = f", {t['steps']} inner steps{', second order' * (t['backprop'] == 'all')}" if t["steps"] else ""
            groups.setdefault(f"{t['kind'].upper()}{how}{', through Runge-Kutta' * (t['labels'] == 'through')}", []).append(row["seconds"])
    rows: list[Sequence[str]] = [(name, str(len(v)), f"{statistics.fmean(v):.0f}", f"{sum(v):.0f}") for name, v in groups.items()]
    total = sum(sum(v) for v in groups.values())
    return Table(f"{results.title}: training, {total:.0f} core-seconds in all", ("network", "trained", "seconds each", "seconds"), rows)


def tables(results: Results) -> list[Table]:
    made = [
        *_labels(results),
        _paper(results),
        _soft(results, "forward", "softening the forward-label networks"),
        _soft(results, "central", "central-difference labels, a control"),
        _soft(results, "through", "trained through a Runge-Kutta step, a control"),
        _grid(results),
    ]
    made += [_sweeps(results, labels) for labels in ("forward", "central", "through")] + [_times(results)]
    return [table for table in made if any(table.rows)]


def report(folder: Path) -> str:
    """Write figures and the page beside the rows; the tables as text."""
    results = Results(read_folder(folder, "pendulum"))
    made = tables(results)
    write(folder, "Pendulum: Figure 3", about(results.rows), made, lambda: pictures(results.rows))
    return "\n\n".join(table.text() for table in made)
