"""The settings of the pendulum experiment, and how one of its networks is trained."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from ._cache import cached
from ._compiled_step import Step, compiled_step, plain_step
from ._pendulum_data import Labels, Law, Motion, Name
from ._pendulum_fit import Error, OuterError, fit
from ._pendulum_nets import HNN, MLP, tailored

Kind = Literal["mlp", "hnn"]


@dataclass(frozen=True)
class Training:
    """One network to train. `steps` = 0 is ordinary training."""

    motion: Name
    labels: Labels
    kind: Kind
    seed: int
    steps: int = 0
    lr: float = 0.0
    backprop: Literal["none", "all"] = "none"
    width: int = 200
    iterations: int = 2000
    marks: int = 8

    @property
    def name(self) -> str:
        tailored = f"-{self.steps}x{self.lr:g}-{self.backprop}" if self.steps else ""
        return f"{self.motion}-{self.labels}-{self.kind}{tailored}-seed{self.seed}"

    @property
    def at(self) -> list[int]:
        """The iterations whose weights are kept, the last among them."""
        return [self.iterations * (i + 1) // self.marks for i in range(self.marks)]

    @property
    def shape(self) -> Training:
        """What trainings have in common that compute the same, from other weights and with another step size."""
        return replace(self, seed=0, lr=0.0)

    @property
    def work(self) -> int:
        """Roughly how long it takes, in evaluations of a network."""
        inner = 3 * self.steps * (2 if self.backprop == "all" else 1)
        return inner + (4 if self.labels == "through" else 1) * (2 if self.kind == "hnn" else 1)

    def network(self) -> nn.Module:
        torch.manual_seed(self.seed)
        return (MLP if self.kind == "mlp" else HNN)(1, self.width)


def in_order(trainings: Iterable[Training]) -> list[Training]:
    """Long ones first, so that all cores end together; before them one of each shape, so that no two cores compile the same."""
    longest = sorted(dict.fromkeys(trainings), key=lambda t: -t.work)
    first = {t.shape: t for t in reversed(longest)}
    return sorted(longest, key=lambda t: first[t.shape] is not t)


def train(t: Training, motion: Motion, folder: Path, compiled: bool = False) -> dict[str, Tensor]:
    """The weights at every mark, under `ITERATION.NAME`, with `seconds` (of a core) and `losses`; from `folder` if they are there."""
    return cached(folder, t.name, t, lambda: _train(t, motion, compiled))


def _train(t: Training, motion: Motion, compiled: bool) -> dict[str, Tensor]:
    began = time.process_time()
    data = [part.float() for part in motion.pairs(t.labels, "train")]
    if t.labels == "through":
        data.append(motion.gaps().float())
    made = _make(t.shape, motion.law, len(data[0]), compiled)
    made.lr.fill_(t.lr)
    made.net.load_state_dict(t.network().state_dict())
    kept: dict[str, Tensor] = {}
    found = []
    for iteration, loss in enumerate(fit(made.step, dict(made.objective.named_parameters()), tuple(data), t.iterations), 1):
        found.append(loss)
        if iteration in t.at:
            kept |= {f"{iteration}.{name}": value.detach().clone() for name, value in made.net.state_dict().items()}
    return kept | {"seconds": torch.tensor([time.process_time() - began]), "losses": torch.tensor(found)}


class _Made(NamedTuple):
    net: nn.Module
    lr: Tensor  # a number would be compiled in
    objective: nn.Module
    step: Step


@functools.cache
def _make(shape: Training, law: Law, rows: int, compiled: bool) -> _Made:
    """What trains networks of this shape. Compiling takes as long as a training or two, so it is done once."""
    net, lr = shape.network(), torch.zeros(())
    if shape.steps:
        one_step = tailored(net, law, steps=1, lr=lr, backprop=shape.backprop).prepare(torch.zeros(rows, 2))
        objective: nn.Module = OuterError(one_step, shape.steps)
    else:
        objective = Error(net)
    pays = compiled and shape.work > 1  # a plain MLP trains as fast without
    return _Made(net, lr, objective, (compiled_step if pays else plain_step)(objective))


def restore(t: Training, weights: dict[str, Tensor], iteration: int) -> nn.Module:
    """The network as it was after so many iterations."""
    net, prefix = t.network(), f"{iteration}."
    net.load_state_dict({name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)})
    return net
