"""The images of the contrastive experiment, and which of them are labelled."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ._contrastive_plan import Config
from ._images import cifar10, data_folder

CLASSES = 10
Part = Literal["train", "test"]


@dataclass(frozen=True)
class Images:
    """uint8, (n, 3, 32, 32), and labels (n,). The validation images are the last of `train`."""

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor


def load(config: Config) -> Images:
    parts: list[Tensor] = []
    sizes: dict[Part, int] = {"train": config.train, "test": config.test}
    for part, wanted in sizes.items():
        images, labels = made(part, wanted) if config.images == "made" else cifar10(data_folder(config.data), part)
        if len(images) < wanted:
            raise ValueError(f"there are {len(images)} {part} images, not {wanted}: set --{part}")
        parts += [images[:wanted], labels[:wanted]]
    return Images(*parts)


def made(part: Part, count: int) -> tuple[Tensor, Tensor]:
    """Gratings of ten directions in random colours, brighter at the top, with noise: easy images for a run without CIFAR-10."""
    random = torch.Generator().manual_seed(("train", "test").index(part))

    def uniform(*shape: int) -> Tensor:
        return torch.rand(count, *shape, generator=random)

    labels = torch.arange(count) % CLASSES
    angle = (labels + 0.5 * uniform()) * math.pi / CLASSES
    place = torch.linspace(-1, 1, 32)
    along = angle.cos()[:, None, None] * place + angle.sin()[:, None, None] * place[:, None]  # (n, 32, 32)
    wave = (2 * math.pi * ((1.5 + uniform(1, 1)) * along + uniform(1, 1))).sin()
    colour = uniform(3, 1, 1)
    images = 0.5 + 0.3 * wave[:, None] * colour - 0.15 * place[:, None] + 0.05 * torch.randn(count, 3, 32, 32, generator=random)
    return (255 * images.clamp(0, 1)).byte(), labels


def draw(labels: Tensor, per_class: int, seed: int, *, at_most: bool = False) -> Tensor:
    """Which images are labelled: `per_class` of each class, sorted. Those of fewer labels are among those of more, for the same seed.

    `at_most`: as many as the smallest class has, where there are fewer.
    """
    least = int(torch.bincount(labels, minlength=CLASSES).min())
    if per_class > least and not at_most:
        raise ValueError(f"{per_class} labelled images of each class are wanted, but a class has {least} only: set --labels")
    random = torch.Generator().manual_seed(seed)
    chosen = []
    for k in range(CLASSES):
        members = (labels == k).nonzero().squeeze(1)
        chosen.append(members[torch.randperm(len(members), generator=random)[: min(per_class, least)]])
    return torch.cat(chosen).sort().values
