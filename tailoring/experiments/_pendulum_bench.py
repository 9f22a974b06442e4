"""What is asked of a trained network of the pendulum experiment: in which way it predicts, and how well."""

from __future__ import annotations

import math
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from ._pendulum_data import load
from ._pendulum_nets import Norm, Projected, by_member, side_by_side, tailored
from ._pendulum_plan import Training, in_order, restore, train
from ._rollout import roll_out
from ._rows import Row, Rows
from ._train import Progress


@dataclass(frozen=True)
class Way:
    """How a trained network predicts: as it is, tailored by some steps, or with a part of its drift of energy projected away."""

    how: Literal["plain", "tailor", "project"] = "plain"
    steps: int = 0
    lr: float = 0.0
    norm: Norm = "l1"
    amount: float = 0.0


@dataclass(frozen=True)
class Job:
    """Networks that differ in their seeds, used in one way, after `at` iterations; with a label the course of the prediction is kept."""

    trainings: tuple[Training, ...]
    way: Way = field(default_factory=Way)
    at: int = 0  # 0: the last
    label: str = ""

    @property
    def key(self) -> Row:
        first = self.trainings[0]
        return {
            "kind": "curve" if self.label else "result",
            "training": {name: value for name, value in asdict(first).items() if name != "seed"},
            "seeds": [t.seed for t in self.trainings],
            "way": asdict(self.way),
            "at": self.at or first.iterations,
            **({"label": self.label} if self.label else {}),
        }


class Bench:
    """Trains networks and measures their predictions, `workers` at a time; what was done before is read back."""

    def __init__(self, config: Any, judge: Judge, rows: Rows, progress: Progress):
        self.config, self.judge, self.rows, self.progress = config, judge, rows, progress
        self._pool: ProcessPoolExecutor | None = None

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def train(self, trainings: Sequence[Training]) -> None:
        todo = in_order(t for t in trainings if not self.rows.has(kind="training", name=t.name))
        for t, weights in zip(todo, self._each(self.judge.weights, todo, "training"), strict=True):
            about = {"seconds": round(float(weights["seconds"]), 1), "loss": float(weights["losses"][-1])}
            self.rows.add(kind="training", name=t.name, training=asdict(t), **about)

    def measure(self, jobs: Sequence[Job]) -> list[Row]:
        """The errors of each job, one value for each seed; appended to the rows if they are not there yet."""
        self.train([t for job in jobs for t in job.trainings])
        todo = [job for job in dict.fromkeys(jobs) if self._found(job) is None]
        for job, found in zip(todo, self._each(self.judge.measure, todo, "predictions"), strict=True):
            self.rows.add(**job.key, **found)
        return [row for job in jobs if (row := self._found(job)) is not None]

    def _found(self, job: Job) -> Row | None:
        key = job.key
        return next((row for row in self.rows if all(row.get(name) == value for name, value in key.items())), None)

    def _each(self, function: Callable[[Any], Any], todo: Sequence[Any], what: str) -> Iterator[Any]:
        if self.config.workers == 1 or len(todo) < 2:
            results = map(function, todo)
        else:
            if self._pool is None:  # torch dislikes fork
                self._pool = ProcessPoolExecutor(self.config.workers, get_context("spawn"), _begin_to_work)
            results = self._pool.map(function, todo)
        yield from self._counted(results, len(todo), what)

    def _counted(self, results: Iterator[Any], total: int, what: str) -> Iterator[Any]:
        for done, result in enumerate(results, 1):
            yield result
            self.progress(what, done, total)


def _begin_to_work() -> None:
    """In a process of its own, which ends with the one that started it, even if that was killed."""
    torch.set_num_threads(1)
    if (parent := parent_process()) is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def _end_with(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)


class Judge:
    """A measured motion, and the long-term predictions of networks on its training and test segments."""

    def __init__(self, config: Any):
        self.config = config
        self.motion = load(config.motion, config.data)
        self.law = self.motion.law

    def weights(self, t: Training) -> dict[str, Tensor]:
        return train(t, self.motion, self.config.out / "weights", self.config.compiled and _has_compiler())

    def rates(self) -> Row:
        """The mean rate of change of energy, as measured and as the labels have it."""
        m, found = self.motion, {}
        energy, parts = self.law.energy(m.states), {"train": (0, m.cut - 1), "test": (m.cut, len(m.time) - 1)}
        for part, (first, last) in parts.items():
            found[part] = {"measured": float((energy[last] - energy[first]) / (m.time[last] - m.time[first]))}
            for labels in ("forward", "central"):
                x, y = m.pairs(labels, part)  # type: ignore[arg-type]
                found[part][labels] = float((self.law.gradient(x) * y).sum(1).mean())
        return found

    def measure(self, job: Job) -> Row:
        nets = [restore(t, self.weights(t), job.key["at"]) for t in job.trainings]
        joined = self.wrap(side_by_side(nets), job.way)
        # Meta-trained fields can be rough for some seeds only. The others are rough for all, or none, and a second try costs a minute.
        again = nets if job.trainings[0].steps and len(nets) > 1 else []
        alone = [self.wrap(side_by_side([net]), job.way) for net in again]
        segments = [*self.motion.train, self.motion.test]
        paths = roll_out(joined, alone, segments, members=len(nets), rtol=self.config.rtol, evaluations=self.config.evaluations)
        errors = torch.stack([(path - s.states).square().mean((1, 2)) for path, s in zip(paths, segments, strict=True)])  # (5, members)
        test = self.motion.test
        energy, true = self.law.energy(paths[-1]), self.law.energy(test.states)
        found: Row = {
            "train": _numbers(errors[:4].mean(0)),
            "test": _numbers(errors[4]),
            "energy": _numbers((energy - true).square().mean(1)),
            **self._one_step(joined, len(nets), job.trainings[0].labels),
        }
        if job.label:
            squared = (paths[-1] - test.states).square().mean(2)
            found |= {"time": _numbers(test.time), "error": _numbers(squared.mean(0))}
            found |= {"mean_energy": _numbers(energy.mean(0)), "true_energy": _numbers(true)}
        return found

    @torch.no_grad()
    def _one_step(self, model: nn.Module, members: int, labels: Any) -> Row:
        """The error in the labels of the test segment, and the mean rate of change of energy there."""
        x, y = self.motion.pairs(labels, "test")
        f = by_member(model(x.repeat(1, members)))  # (rows, members, 2)
        rate = (self.law.gradient(x)[:, None] * f).sum(-1).mean(0)
        return {"one_step": [float(mse_loss(f[:, i], y)) for i in range(members)], "rate": _numbers(rate)}

    def wrap(self, net: nn.Module, way: Way) -> nn.Module:
        if way.how == "project":
            return Projected(net, self.law, way.amount)
        return tailored(net, self.law, steps=way.steps, lr=way.lr, norm=way.norm) if way.how == "tailor" else net


def _has_compiler() -> bool:
    """Whether torch can compile for the CPU; without, training takes twice as long and gives the same to rounding."""
    return any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "clang++"))


def _numbers(values: Tensor) -> list[float]:
    """Four digits are enough for a row; what diverged is infinite."""
    return [math.inf if math.isnan(v) or math.isinf(v) else float(f"{v:.4g}") for v in values.tolist()]


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def others(t: Training, seeds: Sequence[int]) -> tuple[Training, ...]:
    """The same training from each of these seeds."""
    return tuple(replace(t, seed=seed) for seed in seeds)
