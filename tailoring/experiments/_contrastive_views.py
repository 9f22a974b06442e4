"""SimCLR's augmentations, batched on the device: every row is augmented by itself, from a seed of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from kornia.color import rgb_to_grayscale
from kornia.enhance import (
    adjust_brightness_accumulative,
    adjust_contrast_with_mean_subtraction,
    adjust_hue,
    adjust_saturation_with_gray_subtraction,
)
from torch import Tensor
from torch.nn import functional as F

from tailoring import random


@dataclass(frozen=True)
class Augment:
    """`augment(images, seeds)`: one view of each row, (n, 3, H, W) in [0, 1] -> the same shape.

    A crop of random area and aspect ratio brought back to full size, a flip, a colour jitter, grey. All numbers come from the row's
    seed, so a view can be made again, and does not depend on the batch. Crop and flip are one grid_sample; kornia's colour functions
    take a factor for each row. There is no copy from the host and no look at a value: a CUDA graph can hold all of it.
    """

    area: tuple[float, float] = (0.08, 1.0)
    """of the crop; torchvision's default, which the paper's code base uses"""
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """aspect ratio of the crop, likewise"""
    jitter: tuple[float, float, float, float] = (0.4, 0.4, 0.4, 0.1)
    """brightness, contrast, saturation, hue of the code base: SimCLR's strength 0.5"""
    jitter_probability: float = 0.8
    grey_probability: float = 0.2

    def __call__(self, images: Tensor, seeds: Tensor) -> Tensor:
        if images.ndim != 4 or images.shape[1] != 3 or not images.is_floating_point():
            raise ValueError(f"images are (n, 3, H, W), floating-point in [0, 1], not {images.dtype} of shape {tuple(images.shape)}")
        with torch.autocast(images.device.type, enabled=False):  # places in an image are too fine for bfloat16
            return self._augment(images.float(), random.uniform(seeds, (11,)).unbind(1)).to(images.dtype)

    def _augment(self, images: Tensor, draws: Sequence[Tensor]) -> Tensor:
        views = self._crop(images, *draws[:5])
        strength = [1 + amount * (2 * u - 1) for amount, u in zip(self.jitter[:3], draws[5:8], strict=True)]
        turn = 2 * math.pi * self.jitter[3] * (2 * draws[8] - 1)
        jittered = adjust_brightness_accumulative(views, strength[0])
        jittered = adjust_contrast_with_mean_subtraction(jittered, strength[1])
        jittered = adjust_saturation_with_gray_subtraction(jittered, strength[2])
        jittered = adjust_hue(jittered, turn)
        views = torch.where(_column(draws[9] < self.jitter_probability), jittered, views)
        return torch.where(_column(draws[10] < self.grey_probability), rgb_to_grayscale(views), views)

    def _crop(self, images: Tensor, area: Tensor, ratio: Tensor, across: Tensor, down: Tensor, flip: Tensor) -> Tensor:
        """A box of the image, in grid_sample's coordinates from -1 to 1: width and height as fractions of it, at most all of it."""
        low, high = self.area
        size = low + (high - low) * area
        shape = (math.log(self.ratio[0]) + math.log(self.ratio[1] / self.ratio[0]) * ratio).exp()
        width, height = (size * shape).sqrt().clamp(max=1), (size / shape).sqrt().clamp(max=1)
        x, y = (1 - width) * (2 * across - 1), (1 - height) * (2 * down - 1)
        zero = torch.zeros_like(x)
        mirrored = torch.where(flip < 0.5, -width, width)
        affine = torch.stack([torch.stack([mirrored, zero, x], 1), torch.stack([zero, height, y], 1)], 1)  # (n, 2, 3)
        grid = F.affine_grid(affine, list(images.shape), align_corners=False)
        return F.grid_sample(images, grid, mode="bilinear", padding_mode="reflection", align_corners=False).clamp(0, 1)


def view_seeds(ids: Tensor, when: Tensor | int) -> Tensor:
    """A seed for each image's views at a time (an epoch's number, a seed): `when` is a number or (n,), both int64."""
    number = torch.as_tensor(when, dtype=torch.int64, device=ids.device) if isinstance(when, int) else when
    return random.seeds_of(torch.stack([ids, number.expand_as(ids)], 1))


def make_views(augment: Augment, images: Tensor, ids: Tensor, views: int, when: Tensor | int) -> Tensor:
    """(n, 3, H, W) -> (n * views, 3, H, W); the first k of an image's views are the same however many are made."""
    return augment(images.repeat_interleave(views, 0), random.per_row(view_seeds(ids, when), views))


def _column(of_rows: Tensor) -> Tensor:
    return of_rows.view(-1, 1, 1, 1)
