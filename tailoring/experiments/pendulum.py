"""A real pendulum that nearly conserves its energy: Sec. 5.2 and Figure 3, with controls, and a second real oscillator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import ClassVar

from ._checks import at_least_one, not_empty, not_used
from ._pendulum_bench import Bench, Job, Judge, Way, mean, others
from ._pendulum_data import Labels, Name
from ._pendulum_plan import Kind, Training
from ._pendulum_report import report as report
from ._rows import Rows
from ._train import Progress


@dataclass(frozen=True)
class Config:
    """Settings of the pendulum experiment; beside each, where it comes from."""

    HOW: ClassVar = frozenset({"out", "data", "workers", "compiled"})

    out: Path = Path("runs/pendulum")
    """folder of the rows, weights and figures"""
    data: Path | None = None
    """folder that holds pendulum/real_pend_h_1.txt; else the variable TAILORING_DATA, else ../shared/data"""
    motion: Name = "pendulum"
    """the paper's; "spring" is a cart on a spring, measured by the same authors, which loses energy too"""
    seeds: tuple[int, ...] = tuple(range(10))
    """of initial weights; the paper shows one run"""
    meta_seeds: tuple[int, ...] = tuple(range(10))
    """of meta-tailoring with the chosen setting, first order"""
    order_seeds: tuple[int, ...] = tuple(range(10))
    """of the second order, which takes more than twice as long to train"""
    free_seeds: tuple[int, ...] = tuple(range(10))
    """of the setting chosen with the number of prediction steps free"""
    central_seeds: tuple[int, ...] = tuple(range(10))
    """of meta-tailoring on central labels, a control"""
    through_seeds: tuple[int, ...] = tuple(range(10))
    """of networks trained through a Runge-Kutta step, a control that takes three times as long"""
    grid_seeds: tuple[int, ...] = (0,)
    """with which the settings of meta-tailoring are chosen: the paper's grid of 12 with all seeds would take as long as everything else"""
    iterations: int = 2000
    """as the code of Hamiltonian Neural Networks"""
    marks: int = 8
    """how often on the way weights are kept, to see what the length of training does"""
    width: int = 200
    """as the code of Hamiltonian Neural Networks"""
    lrs: tuple[float, ...] = (1e-3, 1e-2, 1e-1, 1e0)
    """inner step sizes to choose from, App. F"""
    steps: tuple[int, ...] = (1, 2, 3)
    """inner steps to choose from, App. F"""
    more_steps: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 8)
    """at prediction, of networks that were trained with fewer (or more)"""
    long_steps: tuple[int, ...] = (1, 2, 3, 5, 7, 10, 12, 15, 20)
    """of the squared loss on the trained baseline: from no to full conservation"""
    long_lr: float = 1e-2
    """small enough for the squared loss to converge; 1e-1 diverges"""
    amounts: tuple[float, ...] = (0.0, 0.25, 0.5, 0.7, 0.8, 0.85, 0.9, 0.925, 0.95, 0.975, 1.0)
    """of the closed-form projection: from none to full conservation"""
    rtol: float = 1e-3
    """of scipy's integrator: its default"""
    evaluations: int = 600
    """of the field, after which a prediction counts as diverged; smooth ones take 150 to 200"""
    workers: int = 2
    """processes, each on one core"""
    compiled: bool = True
    """compile the training steps, if there is a C++ compiler: half the time, the same to rounding"""


def quick() -> Config:
    """Everything in small, on a simulated pendulum, in under a minute. A demonstration, not evidence."""
    return Config(
        out=Path("runs/pendulum-quick"),
        motion="simulated",
        seeds=(0, 1),
        meta_seeds=(0, 1),
        order_seeds=(0, 1),
        free_seeds=(0, 1),
        central_seeds=(0, 1),
        through_seeds=(0, 1),
        iterations=200,
        marks=2,
        width=32,
        lrs=(1e-2, 1e-1),
        steps=(1, 2),
        more_steps=(0, 2, 4),
        long_steps=(2, 8),
        amounts=(0.0, 0.5, 0.9, 1.0),
        evaluations=400,
        workers=1,
        compiled=False,  # takes longer than so few iterations
    )


def run(config: Config, progress: Progress = lambda what, done, total: None) -> Path:
    """Run what has not been run yet; the rows are in `config.out`."""
    at_least_one(config, "iterations", "marks", "width", "steps", "evaluations", "workers")
    not_empty(config, "seeds", "meta_seeds", "grid_seeds", "lrs", "steps", "amounts")
    if config.motion == "simulated":
        not_used(config, "data", "as the motion is a simulated one: give --motion pendulum")
    judge = Judge(config)  # data that are missing are told before anything is written
    rows = Rows(config.out, "pendulum", config)
    with closing(Bench(config, judge, rows, progress)) as bench:
        if not rows.has(kind="data"):
            rows.add(kind="data", rates=bench.judge.rates())
        parts = [partial(_train, bench), partial(_plain, bench, "forward"), partial(_plain, bench, "central"), partial(_meta, bench)]
        parts += [partial(_beyond, bench), partial(_plain, bench, "through"), partial(_courses, bench)]
        for number, part in enumerate(parts):
            progress("groups", number, len(parts))
            part()
    return config.out


def base(bench: Bench, labels: Labels, kind: Kind = "mlp") -> Training:
    c = bench.config
    return Training(c.motion, labels, kind, c.seeds[0], width=c.width, iterations=c.iterations, marks=c.marks)


def grid(bench: Bench) -> Iterator[Training]:
    c = bench.config
    for steps, lr in product(c.steps, c.lrs):
        yield replace(base(bench, "forward"), steps=steps, lr=lr)


def paper_setting(bench: Bench) -> Training:
    """As the paper chooses: the long-term loss on training segments, with as many steps in training as in prediction."""
    tried = [(t, t.steps) for t in grid(bench)]
    return _best(bench, tried)[0]


def free_setting(bench: Bench) -> tuple[Training, int]:
    """The same with the number of prediction steps free."""
    return _best(bench, [(t, steps) for t in grid(bench) for steps in bench.config.more_steps])


def _best(bench: Bench, tried: list[tuple[Training, int]]) -> tuple[Training, int]:
    rows = bench.measure([Job(others(t, bench.config.grid_seeds), Way("tailor", steps, t.lr)) for t, steps in tried])
    losses = [mean(row["train"]) for row in rows]
    return tried[losses.index(min(losses))]


def best_way(bench: Bench, labels: Labels, ways: list[Way]) -> Way:
    """The best way of using the trained baseline, by the same loss."""
    nets = others(base(bench, labels), bench.config.seeds)
    losses = [mean(row["train"]) for row in bench.measure([Job(nets, way) for way in ways])]
    return ways[losses.index(min(losses))]


def grid_ways(bench: Bench) -> list[Way]:
    return [Way("tailor", steps, lr) for steps, lr in product(bench.config.steps, bench.config.lrs)]


def long_ways(bench: Bench) -> list[Way]:
    return [Way("tailor", steps, bench.config.long_lr, "l2") for steps in bench.config.long_steps]


def projections(bench: Bench) -> list[Way]:
    return [Way("project", amount=amount) for amount in bench.config.amounts]


def _train(bench: Bench) -> None:
    """All networks, in two batches, so that no core waits: those that need no choice, and those with the settings then chosen."""
    c = bench.config
    plain = [(base(bench, labels, kind), c.seeds) for labels in ("forward", "central") for kind in ("mlp", "hnn")]
    plain += [(base(bench, "through"), c.through_seeds)] + [(t, c.grid_seeds) for t in grid(bench)]
    bench.train([t for one, seeds in plain for t in others(one, seeds)])
    chosen, free = paper_setting(bench), free_setting(bench)[0]
    meta = [(chosen, c.meta_seeds), (replace(chosen, backprop="all"), c.order_seeds)]
    meta += [(free, c.free_seeds), (replace(chosen, labels="central"), c.central_seeds)]
    bench.train([t for one, seeds in meta for t in others(one, seeds)])


def _plain(bench: Bench, labels: Labels) -> None:
    """Ordinary training, with forward labels at every mark; then ways of softening the trained baseline."""
    c = bench.config
    kinds: list[Kind] = ["mlp"] if labels == "through" else ["mlp", "hnn"]
    seeds = c.through_seeds if labels == "through" else c.seeds
    ways = projections(bench) + (long_ways(bench) if labels != "through" else [])
    marks = base(bench, labels).at if labels == "forward" else [c.iterations]
    ways += grid_ways(bench) if labels == "forward" else []
    if seeds:
        bench.measure([Job(others(base(bench, labels, kind), seeds), at=at) for kind in kinds for at in marks])
        bench.measure([Job(others(base(bench, labels), seeds), way) for way in ways])


def _meta(bench: Bench) -> None:
    """The paper's grid; the chosen setting with all seeds at every mark, first and second order."""
    c, chosen = bench.config, paper_setting(bench)
    nets = [others(chosen, c.meta_seeds), others(replace(chosen, backprop="all"), c.order_seeds)]
    bench.measure([Job(some, Way("tailor", chosen.steps, chosen.lr), at) for some in nets if some for at in chosen.at])


def _beyond(bench: Bench) -> None:
    """More steps at prediction than in training, and meta-training on central labels."""
    c, chosen = bench.config, paper_setting(bench)
    cases = [(chosen, c.meta_seeds), (free_setting(bench)[0], c.free_seeds), (replace(chosen, labels="central"), c.central_seeds)]
    bench.measure(
        [Job(others(t, seeds), Way("tailor", steps, t.lr)) for t, seeds in cases if seeds for steps in sorted({*c.more_steps, t.steps})]
    )


def _courses(bench: Bench) -> None:
    """The course of the test prediction for Figure 3."""
    c, chosen = bench.config, paper_setting(bench)
    free, steps = free_setting(bench)
    same = Way("tailor", chosen.steps, chosen.lr)
    plain = others(base(bench, "forward"), c.seeds)
    jobs = [
        Job(plain, label="baseline"),
        Job(others(base(bench, "forward", "hnn"), c.seeds), label="HNN"),
        Job(others(base(bench, "central"), c.seeds), label="baseline, central labels"),
        Job(plain, best_way(bench, "forward", grid_ways(bench)), label="tailoring"),
        Job(plain, best_way(bench, "forward", projections(bench)), label="soft projection"),
        Job(others(chosen, c.meta_seeds), same, label="meta-tailoring"),
        Job(others(replace(chosen, backprop="all"), c.order_seeds), same, label="meta-tailoring, second order"),
        Job(others(free, c.free_seeds), Way("tailor", steps, free.lr), label="meta-tailoring, more steps"),
    ]
    bench.measure([job for job in jobs if job.trainings])
