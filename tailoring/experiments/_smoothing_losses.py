"""What robust classifiers are trained for: Gaussian noise (Cohen), MACER (Zhai), SmoothAdv (Salman), each plain or meta-tailored."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tailoring import Tailored, random
from tailoring.smoothing import descend_within

Method = Literal["noise", "macer", "smoothadv"]


@dataclass(frozen=True)
class Macer:
    """Zhai et al. (2020), CIFAR-10; they train from scratch, for 440 epochs with 16 copies."""

    copies: int = 16
    """noisy copies of each image, k"""
    weight: float = 12.0
    """of the radius, lambda"""
    margin: float = 8.0
    """radii beyond this (in units of sigma / 2) are large enough, gamma"""
    sharpness: float = 16.0
    """inverse temperature of the probabilities that the radius is computed from, beta"""


@dataclass(frozen=True)
class SmoothAdv:
    """Salman et al. (2019), whose grid over these contains ours; they let the radius grow over the first 10 of 150 epochs."""

    copies: int = 2
    """noisy copies of each image, m"""
    steps: int = 2
    """of the attack"""
    radius: float = 1.0
    """of the attack, in L2; 255/255, one of theirs"""


class RobustLoss(nn.Module):
    """The loss of a batch of images (n, 3, H, W), uint8, and labels (n,). An `Objective` for `_train`.

    Images are shifted, flipped and made noisy by numbers that depend on the image, the seed and the epoch alone: not on its batch, nor on
    the process or device that holds it, nor on what was drawn before.

    BatchNorm: while a state is fitted its statistics are fixed, since a query's own would let queries see each other. The prediction that
    is then trained uses the batch's statistics, as ordinary training does, unless they are `frozen` (a network that was trained before).
    """

    draw: Tensor

    def __init__(
        self,
        model: nn.Module,  # Tailored, or a network as it is
        method: Method,
        noise: float,
        *,
        seed: int,
        frozen: bool,
        augment: bool = True,
        macer: Macer | None = None,
        smoothadv: SmoothAdv | None = None,
    ):
        super().__init__()
        self.model, self.method, self.noise, self.seed, self.frozen, self.augment = model, method, noise, seed, frozen, augment
        self.macer, self.smoothadv = macer or Macer(), smoothadv or SmoothAdv()
        self.register_buffer("draw", torch.zeros((), dtype=torch.int64), persistent=False)
        self.start_epoch(0)

    def start_epoch(self, epoch: int) -> None:
        digest = hashlib.sha256(f"{self.seed} {epoch}".encode()).digest()
        self.draw.fill_(int.from_bytes(digest[:8], "little", signed=True))

    @property
    def copies(self) -> int:
        """Noisy copies of each image."""
        return {"noise": 1, "macer": self.macer.copies, "smoothadv": self.smoothadv.copies}[self.method]

    def losses(self, x: Tensor, y: Tensor) -> Iterator[Tensor]:
        yield self(x, y)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        seeds = random.fold(random.seeds_of(x) + self.draw, 0)
        images = (shifted(x, seeds) if self.augment else x).float() / 255
        copies = self.copies
        noise = self.noise * random.normal(random.fold(seeds, 1), (copies, *images.shape[1:]))  # (n, copies, 3, H, W)
        if self.method == "smoothadv":
            attack = self.smoothadv
            images = adversarial(lambda x: self.logits(x, frozen=True), images, y, noise, attack.radius, attack.steps)
        logits = self.logits((images[:, None] + noise).flatten(0, 1), self.frozen).float().unflatten(0, (-1, copies))
        if self.method == "macer":
            return macer_loss(logits, y, self.noise, self.macer)
        return F.cross_entropy(logits.flatten(0, 1), y.repeat_interleave(copies))

    def logits(self, x: Tensor, frozen: bool) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        if not isinstance(self.model, Tailored):
            _fix_statistics(self.model, frozen)
            return self.model(x)
        _fix_statistics(self.model.net, True)
        *_, state = self.model.states(x)
        _fix_statistics(self.model.net, frozen)
        return self.model.predict(x, state)


def _fix_statistics(net: nn.Module, fixed: bool) -> None:
    for module in net.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.train(not fixed)


def shifted(x: Tensor, seeds: Tensor) -> Tensor:
    """Each image moved by up to an eighth of its size, black where nothing was, and mirrored or not: (n, C, H, W) -> the same."""
    n, _, height, width = x.shape
    most = height // 8
    down, right, mirror = random.uniform(random.fold(seeds, 2), (3,)).T  # (n,) each
    rows = (down * (2 * most + 1)).long()[:, None] + torch.arange(height, device=x.device)  # (n, H)
    columns = torch.arange(width, device=x.device).expand(n, width)
    columns = torch.where((mirror < 0.5)[:, None], columns, width - 1 - columns) + (right * (2 * most + 1)).long()[:, None]
    padded = F.pad(x, (most, most, most, most))
    picked = padded.permute(0, 2, 3, 1)[torch.arange(n, device=x.device)[:, None, None], rows[:, :, None], columns[:, None, :]]
    return picked.permute(0, 3, 1, 2)


def macer_loss(logits: Tensor, y: Tensor, sigma: float, settings: Macer) -> Tensor:
    """-log p_y  +  lambda sigma/2 max(gamma - (Phi^-1(q_y) - Phi^-1(q_other)), 0) for images that q gets right; mean over images.

    p is the mean of the copies' probabilities, q that of their sharpened ones (beta times the logits), q_other its largest wrong class:
    sigma/2 times the difference of quantiles is the certified radius. logits (n, copies, classes), y (n,).
    """
    log_p = logits.log_softmax(-1).logsumexp(1) - math.log(logits.shape[1])
    q = (settings.sharpness * logits).softmax(-1).mean(1)
    own = q.gather(1, y[:, None]).squeeze(1)
    other = q.scatter(1, y[:, None], 0.0).amax(1)
    own_quantile, other_quantile = (torch.special.ndtri(p.clamp(1e-7, 1 - 1e-7)) for p in (own, other))  # beyond, no float32 goes
    missing = (settings.margin - (own_quantile - other_quantile)).clamp(min=0)
    return F.nll_loss(log_p, y) + settings.weight * sigma / 2 * torch.where(own > other, missing, 0.0).mean()


def adversarial(classify: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, noise: Tensor, radius: float, steps: int) -> Tensor:
    """Images within `radius` of x that the smoothed classifier should get wrong, by ascent on -log mean_j p(y | x + delta + noise_j).

    The noise (n, copies, ...) stays the same at all steps, and serves the training step that follows (Salman et al., Sec. 3). Steps have
    length 2 radius / steps; images stay in [0, 1].
    """

    def log_probability(moved: Tensor) -> Tensor:
        logits = classify((moved[:, None] + noise).flatten(0, 1)).float().unflatten(0, noise.shape[:2])
        return logits.log_softmax(-1).logsumexp(1).gather(1, y[:, None])

    return descend_within(log_probability, x, radius, steps=steps, length=2.0, after=lambda moved: moved.clamp(0, 1))
