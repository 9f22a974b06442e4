"""What is asked of a trained network of the pendulum experiment: in which way it predicts, and how well."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from ._pendulum_data import load
from ._pendulum_nets import Norm, Projected, by_member, side_by_side, tailored
from ._pendulum_plan import Training, restore, train
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


class Bench:
    """A measured motion, and the long-term predictions of networks on its training and test segments."""

    def __init__(self, config: Any, rows: Rows, progress: Progress):
        self.config, self.rows, self.progress = config, rows, progress
        self.motion = load(config.motion, config.data)
        self.law = self.motion.law
        self._weights: dict[Training, dict[str, Tensor]] = {}

    def train(self, trainings: Sequence[Training]) -> None:
        """Train what has not been trained yet, `workers` networks at a time."""
        folder, todo = self.config.out / "weights", [t for t in dict.fromkeys(trainings) if t not in self._weights]
        work = partial(_train, self.config.data, folder)
        if self.config.workers == 1 or len(todo) < 2:
            for done, t in enumerate(todo):
                self.progress(f"training {t.name}", done, len(todo))
                self._weights[t] = train(t, self.motion, folder, self.progress)
        else:
            with ProcessPoolExecutor(self.config.workers, get_context("spawn")) as pool:  # fork and torch's threads do not agree
                for done, (t, weights) in enumerate(zip(todo, pool.map(work, todo), strict=True), 1):
                    self._weights[t] = weights
                    self.progress(f"training {t.name}", done, len(todo))
        for t in todo:
            if not self.rows.has(kind="training", name=t.name):
                weights = self._weights[t]
                about = {"seconds": round(float(weights["seconds"]), 1), "loss": float(weights["losses"][-1])}
                self.rows.add(kind="training", name=t.name, training=asdict(t), **about)

    def measure(self, trainings: Sequence[Training], way: Way, at: int | None = None, label: str | None = None) -> Row:
        """Append (once) and return the errors of these networks, one for each seed, after `at` iterations (the last, if not given).

        With a label the row also holds the course of the test prediction, for the figure.
        """
        self.train(trainings)
        first = trainings[0]
        key = {
            "kind": "curve" if label else "result",
            "training": {n: v for n, v in asdict(first).items() if n != "seed"},
            "seeds": [t.seed for t in trainings],
            "way": asdict(way),
            "at": at or first.iterations,
            **({"label": label} if label else {}),
        }
        for row in self.rows:
            if all(row.get(name) == value for name, value in key.items()):
                return row
        nets = [restore(t, self._weights[t], key["at"]) for t in trainings]
        self.rows.add(**key, **self._measure(nets, way, first.labels, meta=first.steps > 0, course=label is not None))
        return list(self.rows)[-1]

    def _measure(self, nets: list[nn.Module], way: Way, labels: Any, *, meta: bool, course: bool) -> Row:
        joined = self.wrap(side_by_side(nets), way)
        # Meta-trained fields can be rough for some seeds only. The others are rough for all, or none, and a second try costs a minute.
        alone = [self.wrap(side_by_side([net]), way) for net in nets] if meta and len(nets) > 1 else []
        segments = [*self.motion.train, self.motion.test]
        paths = roll_out(joined, alone, segments, members=len(nets), rtol=self.config.rtol, evaluations=self.config.evaluations)
        errors = torch.stack([(path - s.states).square().mean((1, 2)) for path, s in zip(paths, segments, strict=True)])  # (5, members)
        test = self.motion.test
        energy, true = self.law.energy(paths[-1]), self.law.energy(test.states)
        found: Row = {
            "train": _numbers(errors[:4].mean(0)),
            "test": _numbers(errors[4]),
            "energy": _numbers((energy - true).square().mean(1)),
            **self._one_step(joined, len(nets), labels),
        }
        if course:
            squared = (paths[-1] - test.states).square().mean(2)
            found |= {"time": _numbers(test.time), "error": _numbers(squared.mean(0)), "mean_energy": _numbers(energy.mean(0))}
            found |= {"energy_deviation": _numbers(energy.std(0)) if len(nets) > 1 else [], "true_energy": _numbers(true)}
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


def _train(data: Path | None, folder: Path, t: Training) -> dict[str, Tensor]:
    torch.set_num_threads(1)
    return train(t, load(t.motion, data), folder, lambda what, done, total: None)


def _numbers(values: Tensor) -> list[float]:
    """Four digits are enough for a row; what diverged is infinite."""
    return [math.inf if math.isnan(v) or math.isinf(v) else float(f"{v:.4g}") for v in values.tolist()]


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def others(t: Training, seeds: Sequence[int]) -> list[Training]:
    """The same training from each of these seeds."""
    return [replace(t, seed=seed) for seed in seeds]
