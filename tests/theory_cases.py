"""What tests of the theory ask about: small smooth networks in double precision, and views."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

ACTIVATIONS = [nn.Sigmoid, nn.Tanh, nn.Softplus]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def network(units: tuple[int, ...] = (6, 6), outputs: int = 1, act: type[nn.Module] = nn.Tanh, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    sizes = [4, *units]
    hidden = [layer for a, b in itertools.pairwise(sizes) for layer in (nn.Linear(a, b), act())]
    return nn.Sequential(*hidden, nn.Linear(sizes[-1], outputs)).double()


def views_of(x: Tensor) -> Tensor:
    """(queries, 4) -> (queries, 3, 4), views of equal norm"""
    return torch.stack([x, -x, x.flip(1)], 1)


VIEWS = views_of(randn(1, 4, seed=1))[0]
