"""A real pendulum that nearly conserves its energy: Sec. 5.2 and Figure 3, with controls, and a second real oscillator."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from ._pendulum_bench import Bench, Way, mean, others
from ._pendulum_data import Labels, Name
from ._pendulum_plan import Training
from ._pendulum_report import report as report
from ._rows import Rows
from ._train import Progress


@dataclass(frozen=True)
class Config:
    """Settings of the pendulum experiment; beside each, where it comes from."""

    out: Path = Path("runs/pendulum")
    """folder of the rows, weights and figures"""
    data: Path | None = None
    """folder that holds pendulum/real_pend_h_1.txt; else the variable TAILORING_DATA, else ../shared/data"""
    motions: tuple[Name, ...] = ("pendulum", "spring")
    """the paper's pendulum; and a cart on a spring, measured by the same authors, which loses energy too"""
    seeds: tuple[int, ...] = tuple(range(10))
    """of initial weights; the paper shows one run"""
    grid_seeds: tuple[int, ...] = (0,)
    """with which the settings of meta-tailoring are chosen: a grid of all seeds would take hours"""
    extra_seeds: tuple[int, ...] = tuple(range(5))
    """of meta-tailoring beyond the paper's protocol (central labels, second motion), to save time"""
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
    more_steps: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 8, 12, 20)
    """at prediction, of networks that were trained with fewer (or more)"""
    long_steps: tuple[int, ...] = (1, 2, 3, 5, 7, 10, 15, 20, 30, 50)
    """of the squared loss on the trained baseline: from no to full conservation"""
    long_lr: float = 1e-2
    """small enough for the squared loss to converge; 1e-1 diverges"""
    amounts: tuple[float, ...] = (0.0, 0.25, 0.5, 0.7, 0.8, 0.85, 0.9, 0.925, 0.95, 0.975, 1.0)
    """of the closed-form projection: from none to full conservation"""
    rtol: float = 1e-3
    """of scipy's integrator: its default"""
    evaluations: int = 3000
    """after which a prediction counts as diverged; smooth fields take 300"""
    workers: int = 2
    """networks trained at a time, each on one core"""


def quick() -> Config:
    """Everything in small, on a simulated pendulum, in under a minute. A demonstration, not evidence."""
    return Config(
        out=Path("runs/pendulum-quick"),
        motions=("simulated",),
        seeds=(0, 1),
        extra_seeds=(0,),
        iterations=300,
        marks=2,
        width=64,
        lrs=(1e-2, 1e-1),
        steps=(1, 2),
        more_steps=(0, 2, 4),
        long_steps=(1, 5, 20),
        amounts=(0.0, 0.5, 0.9, 1.0),
        evaluations=1000,
        workers=1,
    )


def run(config: Config, progress: Progress = lambda what, done, total: None) -> Path:
    """Run what has not been run yet; the rows are in `config.out`."""
    rows = Rows(config.out, "pendulum", replace(config, workers=1))
    parts = [part for name in config.motions for part in _parts(Bench(config, name, rows, progress))]
    for number, part in enumerate(parts):
        progress("groups", number, len(parts))
        part()
    return config.out


def _parts(bench: Bench) -> list:
    main = bench.name != "spring"
    settings = Settings(bench)
    made = [lambda: _plain(bench, "forward"), lambda: _plain(bench, "central")]
    made += [lambda: _meta(bench, settings)] if main else []
    return [*made, lambda: _beyond(bench, settings, main), lambda: _courses(bench, settings)]


def base(bench: Bench, labels: Labels, kind: str = "mlp") -> Training:
    c = bench.config
    return Training(bench.name, labels, kind, c.seeds[0], width=c.width, iterations=c.iterations, marks=c.marks)  # type: ignore[arg-type]


class Settings:
    """What was chosen, always by the long-term loss on the training segments."""

    def __init__(self, bench: Bench):
        self.bench = bench

    def grid(self) -> Iterator[Training]:
        c = self.bench.config
        for steps, lr in product(c.steps, c.lrs):
            yield replace(base(self.bench, "forward"), steps=steps, lr=lr)

    def paper(self) -> Training:
        """As the paper: inner step size and number of steps, the same in training and prediction."""
        return min(self.grid(), key=lambda t: self._loss(t, t.steps))

    def free(self) -> tuple[Training, int]:
        """The same with the number of prediction steps free."""
        pairs = product(self.grid(), self.bench.config.more_steps)
        return min(pairs, key=lambda pair: self._loss(*pair))

    def _loss(self, t: Training, steps: int) -> float:
        found = self.bench.measure(others(t, self.bench.config.grid_seeds), Way("tailor", steps, t.lr))
        return mean(found["train"])

    def way(self, labels: Labels, ways: list[Way]) -> Way:
        """The best way of using the trained baseline."""
        nets = others(base(self.bench, labels), self.bench.config.seeds)
        return min(ways, key=lambda way: mean(self.bench.measure(nets, way)["train"]))


def grid_ways(bench: Bench) -> list[Way]:
    return [Way("tailor", steps, lr) for steps, lr in product(bench.config.steps, bench.config.lrs)]


def long_ways(bench: Bench) -> list[Way]:
    return [Way("tailor", steps, bench.config.long_lr, "l2") for steps in bench.config.long_steps]


def projections(bench: Bench) -> list[Way]:
    return [Way("project", amount=amount) for amount in bench.config.amounts]


def _plain(bench: Bench, labels: Labels) -> None:
    """Ordinary training, at every mark; then all ways of softening the trained baseline."""
    for kind in ("mlp", "hnn"):
        t = base(bench, labels, kind)
        for at in t.at:
            bench.measure(others(t, bench.config.seeds), Way(), at)
    for way in grid_ways(bench) + long_ways(bench) + projections(bench):
        bench.measure(others(base(bench, labels), bench.config.seeds), way)


def _meta(bench: Bench, settings: Settings) -> None:
    """The paper's grid; the chosen setting with all seeds at every mark, first and second order."""
    for t in settings.grid():
        bench.train(others(t, bench.config.grid_seeds))
    chosen = settings.paper()
    for t in (chosen, replace(chosen, backprop="all")):
        bench.train(others(t, bench.config.seeds))
        for at in t.at:
            bench.measure(others(t, bench.config.seeds), Way("tailor", t.steps, t.lr), at)


def _beyond(bench: Bench, settings: Settings, main: bool) -> None:
    """More steps at prediction than in training, and meta-training on central labels; on another motion with the pendulum's settings."""
    c = bench.config
    cases = []
    if main:
        cases += [(settings.paper(), c.seeds), (settings.free()[0], c.seeds), (replace(settings.paper(), labels="central"), c.extra_seeds)]
    else:
        first = replace(base(bench, "forward"), steps=max(c.steps), lr=1e-1)
        cases += [(first, c.extra_seeds)]
    for t, seeds in cases:
        nets = others(t, seeds)
        bench.train(nets)
        for steps in sorted({*c.more_steps, t.steps}):
            bench.measure(nets, Way("tailor", steps, t.lr))


def _courses(bench: Bench, settings: Settings) -> None:
    """The course of the test prediction for Figure 3."""
    c = bench.config

    def draw(label: str, t: Training, way: Way, seeds: tuple[int, ...] = c.seeds) -> None:
        bench.measure(others(t, seeds), way, label=label)

    draw("baseline", base(bench, "forward"), Way())
    draw("HNN", base(bench, "forward", "hnn"), Way())
    draw("baseline, central labels", base(bench, "central"), Way())
    draw("tailoring", base(bench, "forward"), settings.way("forward", grid_ways(bench)))
    draw("soft projection", base(bench, "forward"), settings.way("forward", projections(bench)))
    if bench.name != "spring":
        chosen = settings.paper()
        draw("meta-tailoring", chosen, Way("tailor", chosen.steps, chosen.lr))
        draw("meta-tailoring, second order", replace(chosen, backprop="all"), Way("tailor", chosen.steps, chosen.lr))
        free, steps = settings.free()
        draw("meta-tailoring, more steps", free, Way("tailor", steps, free.lr))
