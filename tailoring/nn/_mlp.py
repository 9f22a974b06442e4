"""A feed-forward network around a skip connection."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn


class ResidualMLP(nn.Module):
    """`x + f(x)`, with f a feed-forward network of `depth` hidden layers: the network of the planets experiment (App. E).

    x: (..., features) -> (..., features).
    """

    def __init__(self, features: int, width: int = 512, depth: int = 3, activation: type[nn.Module] = nn.ReLU):
        super().__init__()
        sizes = [features] + [width] * depth
        hidden = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), activation())]
        self.layers = nn.Sequential(*hidden, nn.Linear(sizes[-1], features))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)
