"""The settings of the pendulum experiment, and how one of its networks is trained."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from ._cache import cached
from ._pendulum_data import Labels, Motion, Name
from ._pendulum_nets import HNN, MLP, fit, tailored

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

    def network(self) -> nn.Module:
        torch.manual_seed(self.seed)
        return (MLP if self.kind == "mlp" else HNN)(1, self.width)


def train(t: Training, motion: Motion, folder: Path) -> dict[str, Tensor]:
    """The weights at every mark, under `ITERATION.NAME`, with `seconds` and `losses`; from `folder` where they were left before."""
    return cached(folder, t.name, t, lambda: _train(t, motion))


def _train(t: Training, motion: Motion) -> dict[str, Tensor]:
    net = t.network()
    model = tailored(net, motion.law, steps=t.steps, lr=t.lr, backprop=t.backprop) if t.steps else net
    x, y = (part.float() for part in motion.pairs(t.labels, "train"))
    gaps = motion.gaps().float() if t.labels == "through" else None
    kept: dict[str, Tensor] = {}
    began, found = time.perf_counter(), []
    for iteration, loss in enumerate(fit(model, x, y, t.iterations, gaps), 1):
        found.append(loss)
        if iteration in t.at:
            kept |= {f"{iteration}.{name}": value.detach().clone() for name, value in net.state_dict().items()}
    return kept | {"seconds": torch.tensor([time.perf_counter() - began]), "losses": torch.tensor(found)}


def restore(t: Training, weights: dict[str, Tensor], iteration: int) -> nn.Module:
    """The network as it was after so many iterations."""
    net, prefix = t.network(), f"{iteration}."
    net.load_state_dict({name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)})
    return net
