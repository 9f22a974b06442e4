"""Does a step help? Single noisy images, each answered with the step and without it: a hundredth of a certification's cost."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from tailoring import Tailored, random, theory
from tailoring.smoothing import bootstrap_difference

from ._images import TensorImages

Interval = tuple[float, float, float]  # a mean, and the ends of its 95 % bootstrap interval


@dataclass(frozen=True)
class Probed:
    """For each image, over its noisy copies: the right answers with and without the step, and what the right class's probability gained."""

    copies: int
    right: list[int]
    right_0: list[int]
    gained: list[float]
    cosines: list[float] = field(default_factory=list)  # of the tailoring and the task gradient; older rows have none

    @property
    def accuracy_0(self) -> float:
        return sum(self.right_0) / (self.copies * len(self.right_0))

    @property
    def accuracy_gain(self) -> Interval:
        with_step, without = (torch.tensor(right, dtype=torch.float64) / self.copies for right in (self.right, self.right_0))
        return bootstrap_difference(with_step, without)

    @property
    def probability_gain(self) -> Interval:
        gained = torch.tensor(self.gained, dtype=torch.float64)
        return bootstrap_difference(gained, torch.zeros_like(gained))

    def cosine(self, right_0: int | None = None) -> Interval:
        """Of all images, or of those that are right in so many copies without the step: has it a direction of its own, or confirms it?"""
        chosen = [c for c, right in zip(self.cosines, self.right_0, strict=True) if right_0 in (None, right)]
        cosines = torch.tensor(chosen, dtype=torch.float64)
        return bootstrap_difference(cosines, torch.zeros_like(cosines)) if chosen else (math.nan, math.nan, math.nan)


@torch.no_grad()
def probe(model: Tailored, part: TensorImages, sigma: float, *, copies: int, seed: int, batch: int, device: torch.device) -> Probed:
    """`copies` noisy copies of each image; the noise depends on the image's number and `seed` only, so all settings see the same."""
    right, right_0, gained, cosines = (torch.zeros(copies, len(part), dtype=torch.float64) for _ in range(4))
    for first in range(0, len(part), batch):
        rows = slice(first, first + batch)
        images, labels = part.images[rows].to(device).float() / 255, part.labels[rows].to(device)
        seeds = random.fold(torch.arange(first, first + len(images), device=device), seed)
        for copy in range(copies):
            noise = random.normal(random.fold(seeds, copy), images.shape[1:])
            noisy = (images + sigma * noise).contiguous(memory_format=torch.channels_last)
            answers = [answer(noisy).float() for answer in (model, model.net)]
            probabilities = [logits.softmax(1).gather(1, labels[:, None])[:, 0] for logits in answers]
            right[copy, rows], right_0[copy, rows] = (_votes(logits, labels) for logits in answers)
            gained[copy, rows] = (probabilities[0] - probabilities[1]).double().cpu()
            with torch.autocast(device.type, enabled=False):  # bfloat16 would lose the angle between short gradients
                cosines[copy, rows] = theory.alignment(model, [(noisy, labels)], F.cross_entropy).cosine.double().cpu()
    counts, zeros = ([int(n) for n in votes.sum(0)] for votes in (right, right_0))
    gains, angles = ([round(number, 6) for number in numbers.mean(0).tolist()] for numbers in (gained, cosines))
    return Probed(copies, counts, zeros, gains, angles)


def _votes(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits.argmax(1) == labels).double().cpu()
