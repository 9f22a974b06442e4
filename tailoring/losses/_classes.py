"""Losses on class probabilities and on feature statistics."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from .. import random
from .._entries import squares
from .._kernels import plain_kernels
from .._sites import Reading, describe
from .._trees import first_tensor, model_call, repeat_rows
from .._validate import refuse_mixing_modules
from ._base import Features, Loss, class_logits, entropy, floored, read


class Entropy(Loss):
    """The entropy of the predicted class probabilities: be decided.

    Of logits with more than two dimensions `classes` is the one that holds the classes, 1 or -1; the entropies of all places are summed.
    """

    def __init__(self, *, classes: int | None = None):
        super().__init__()
        self.classes = classes

    def forward(self, model: Any, *args: Any, **kwargs: Any) -> Tensor:
        return entropy(class_logits(model(*args, **kwargs), self.classes).log_softmax(-1))


class Align(Loss):
    """The channel means and deviations of a query's features must be those of the training set.

        loss = mean over channels of |(mean - mu) / s|^2 + ((std - s) / s)^2

    Features are (queries, C, positions...), statistics over the positions. `Align.measured` finds mu and s.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Tensor, std: Tensor, *, at: Features = None):
        super().__init__()
        if mean.ndim != 1 or mean.shape != std.shape or not bool((std > 0).all()):
            given = f"of shapes {tuple(mean.shape)} and {tuple(std.shape)}, smallest deviation {std.min()}"
            raise ValueError(f"Align needs a mean and a positive deviation for each channel, not those {given}")
        self.at = at
        self.register_buffer("mean", mean, persistent=False)
        self.register_buffer("std", std, persistent=False)

    @classmethod
    @torch.no_grad()
    def measured(cls, net: nn.Module, batches: Iterable[Any], *, at: str) -> Align:
        """The statistics of `net`'s features at module `at`, averaged over the inputs of all batches."""
        if isinstance(batches, Tensor):
            raise TypeError("batches must be an iterable of batches; for a single batch x give [x]")
        names = dict(net.named_modules())
        if at not in names:
            raise ValueError(f"the model has no module {at!r}; it has: {describe(names)}")
        refuse_mixing_modules(net)
        totals, count = torch.zeros(()), 0
        for x in batches:
            features = _features(net, at, x)
            statistics = torch.stack(_statistics(features)).sum(1)  # (2, C)
            totals, count = totals.to(statistics) + statistics, count + len(features)
        if not count:
            raise ValueError("no batch to measure the statistics on")
        mean, std = totals / count
        return cls(mean, std.real, at=at)  # beside complex means deviations are complex, too

    def forward(self, model: Any, x: Any) -> Tensor:
        mean, std = _statistics(read(model, self.at, x))
        if mean.shape[1] != len(self.mean):
            raise ValueError(f"Align has the statistics of {len(self.mean)} channels, but the features have {mean.shape[1]}")
        return (squares((mean - self.mean) / self.std) + ((std - self.std) / self.std).square()).mean(1)


def _features(net: nn.Module, at: str, x: Any) -> Tensor:
    args, kwargs = model_call(x)
    with plain_kernels(net, graph=False):
        return Reading(below=at)(net, lambda module: module(*args, **kwargs))


def _statistics(features: Tensor) -> tuple[Tensor, Tensor]:
    if features.ndim < 3:
        raise ValueError(
            f"feature statistics need positions to average over, (queries, C, positions...), not shape {tuple(features.shape)}"
        )
    flat = features.flatten(2).to(torch.promote_types(features.dtype, torch.float32))  # 1e-12 is nothing in float16
    return flat.mean(2), (flat.var(2, unbiased=False) + 1e-12).sqrt()


class WorstCase(Loss):
    """The prediction at x must agree with that at the most likely point nearby (the toy example of the appendix).

        loss = KL(p(x) || p(x + delta)),   delta = argmax over |delta| <= eps of log sum_j exp f_j(x + delta)

    The argmax is sought by gradient ascent from several starts (`grid` x `grid` in the plane, else `grid`^2 random ones), and held fixed
    with its prediction while x is tailored. `weighted` takes the mean of all ascents' predictions, weighted by exp f, in place of the best.
    """

    def __init__(self, eps: float, *, grid: int = 5, ascent: int = 30, weighted: bool = False):
        super().__init__()
        if not eps > 0 or grid < 1 or ascent < 0:
            raise ValueError(f"WorstCase needs eps > 0, grid >= 1 and ascent >= 0, not {eps}, {grid}, {ascent}")
        self.eps, self.grid, self.ascent, self.weighted = eps, grid, ascent, weighted

    def forward(self, model: Any, x: Tensor) -> Tensor:
        starts = self._starts(model, x)  # (queries, starts, features)
        points = self._climb(model, x, starts)
        with torch.no_grad():
            logits = _flat_logits(model(points)).unflatten(0, starts.shape[:2])  # (queries, starts, classes)
            energy = logits.logsumexp(-1)
            best = nn.functional.one_hot(energy.argmax(1), starts.shape[1]).to(logits)
            log_weight = energy.log_softmax(1) if self.weighted else best.log()
            log_q = (log_weight[..., None] + logits.log_softmax(-1)).logsumexp(1)  # log-densities differ by more than exp can hold
        log_p = _flat_logits(model(x)).log_softmax(-1)
        return (log_p.exp() * (floored(log_p) - floored(log_q))).sum(-1)

    def _starts(self, model: Any, x: Tensor) -> Tensor:
        """Offsets in the ball of radius eps."""
        size = x[0].numel()
        if self.grid == 1:
            offsets = x.new_zeros(x.shape[0], 1, size)
        elif size == 2:
            line = torch.linspace(-1, 1, self.grid, dtype=x.dtype, device=x.device)
            offsets = torch.cartesian_prod(line, line).expand(x.shape[0], -1, -1)
        else:
            offsets = random.normal(model.seeds, (self.grid**2, size), x.dtype) / size**0.5
        return self._inside(self.eps * offsets)

    def _inside(self, offsets: Tensor) -> Tensor:
        return offsets * (self.eps / offsets.norm(dim=-1, keepdim=True).clamp(min=self.eps))

    def _climb(self, model: Any, x: Tensor, offsets: Tensor) -> Tensor:
        """The ends of the ascents as inputs, (queries * starts, ...)."""
        centre = repeat_rows(x.detach(), offsets.shape[1])

        def energy(flat: Tensor) -> Tensor:
            return first_tensor(model(centre + flat.reshape(centre.shape))).logsumexp(-1).sum()

        for step in range(self.ascent):
            slope = _gradient(energy, offsets)
            slope = slope / slope.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(slope.dtype).tiny)
            offsets = self._inside(offsets + 2 * self.eps / (step + 2) * slope)
        return centre + offsets.reshape(centre.shape)


def _flat_logits(prediction: Any) -> Tensor:
    logits = class_logits(prediction, -1)
    if logits.ndim != 2:
        raise ValueError(f"WorstCase needs logits of shape (queries, classes), not {tuple(logits.shape)}")
    return logits


def _gradient(function: Any, at: Tensor) -> Tensor:
    if is_dynamo_compiling():  # dynamo traces torch.func.grad but not torch.autograd.grad
        return torch.func.grad(function)(at).detach()
    with torch.enable_grad():
        at = at.detach().requires_grad_()
        return torch.autograd.grad(function(at), at)[0]
