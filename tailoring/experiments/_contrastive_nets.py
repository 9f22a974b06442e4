"""SimCLR: an encoder, a projection head, and the loss by which both learn without labels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tailoring import nn as networks

from ._contrastive_plan import Config
from ._contrastive_views import Augment, make_views


class SimCLR(nn.Module):
    """Images (n, 3, 32, 32) in [0, 1] -> projections g(f(x)), (n, features). The representations h = f(x) are the encoder's output."""

    clock: Tensor

    def __init__(self, config: Config):
        super().__init__()
        encoder = _encoder(config)
        width = encoder.fc.in_features
        assert isinstance(width, int)
        encoder.fc = nn.Identity()  # type: ignore[assignment] - what it is given are the representations
        self.encoder = encoder
        self.head = mlp(width, config.hidden, config.features)
        self.width = width
        self.register_buffer("clock", torch.zeros((), dtype=torch.int64))  # batches seen: new views each time, and after a restart too

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x))


def _encoder(config: Config) -> networks.ResNet:
    if config.encoder in ("resnet18", "resnet50"):
        return getattr(networks, config.encoder)(classes=1, stem="cifar")
    return networks.cifar_resnet(int(config.encoder[6:]), classes=1)


def mlp(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    """The projection head of the paper's code base; with four outputs, the rotation head."""
    return nn.Sequential(nn.Linear(inputs, hidden, bias=False), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, outputs))


def nt_xent(z: Tensor, temperature: float) -> Tensor:
    """The normalised, temperature-scaled cross entropy of SimCLR. z: (2 n, d), the two views of an image follow each other.

    loss_i = -log exp(cos(z_i, z_j) / t) / sum over k != i of exp(cos(z_i, z_k) / t),   j the other view;   the mean over i
    """
    z = F.normalize(z.float(), dim=1)
    rows = torch.arange(len(z), device=z.device)
    logits = (z @ z.T / temperature).masked_fill(rows[:, None] == rows, -torch.inf)
    return F.cross_entropy(logits, rows ^ 1)


class Pretraining(nn.Module):
    """What SimCLR minimises on a batch: x, images with values 0 to 255; y, their numbers, from which their views are drawn."""

    def __init__(self, net: SimCLR, augment: Augment, config: Config):
        super().__init__()
        self.net, self.augment, self.temperature, self.seed = net, augment, config.temperature, config.seed
        self._encode: list[Any] = [torch.compile(net.encoder, dynamic=False) if config.compile else net.encoder]  # a list: no second owner

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.net.clock.add_(1)
        views = make_views(self.augment, x / 255, y.long(), 2, self.net.clock * 1009 + self.seed)
        z = self.net.head(self._encode[0](channels_last(views)))
        with torch.autocast(z.device.type, enabled=False):
            return nt_xent(z, self.temperature)

    def losses(self, x: Tensor, y: Tensor) -> Iterator[Tensor]:
        yield self(x, y)


class Turned(nn.Module):
    """What the rotation head minimises: x, representations of images turned by 0 to 3 right angles, (n, 4, d); y is not used."""

    def __init__(self, head: nn.Module):
        super().__init__()
        self.head = head

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.head(x.flatten(0, 1))
        return F.cross_entropy(logits.float(), torch.arange(4, device=x.device).repeat(len(x)))

    def losses(self, x: Tensor, y: Tensor) -> Iterator[Tensor]:
        yield self(x, y)


def channels_last(images: Tensor) -> Tensor:
    return images.contiguous(memory_format=torch.channels_last)
