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
    """Stripes across and down, checks, rings and frames, each with soft and with hard edges, in random colours: no crop, flip or change
    of colour makes one kind another. Brighter at the top, so that turns can be told; with noise."""
    random = torch.Generator().manual_seed(("train", "test").index(part))

    def uniform(*shape: int) -> Tensor:
        return torch.rand(count, *shape, generator=random)

    labels = torch.arange(count) % CLASSES
    place = torch.linspace(-1, 1, 32)
    across, down = place + 0.5 * uniform(1, 1) - 0.25, place[:, None] + 0.5 * uniform(1, 1) - 0.25  # (n, 1, 32), (n, 32, 1)
    often = 2 * math.pi * (1.5 + uniform(1, 1))
    ways = [(often * across).sin() + 0 * down, (often * down).sin() + 0 * across, (often * across).sin() * (often * down).sin()]
    ways += [(often * (across.square() + down.square()).sqrt()).sin(), (often * torch.maximum(across.abs(), down.abs())).sin()]
    wave = torch.stack(ways, 1)[torch.arange(count), labels // 2]  # (n, 32, 32)
    wave = torch.where((labels % 2 == 0)[:, None, None], wave, (8 * wave).tanh())
    images = 0.5 + 0.3 * wave[:, None] * uniform(3, 1, 1) - 0.15 * place[:, None] + 0.05 * torch.randn(count, 3, 32, 32, generator=random)
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
