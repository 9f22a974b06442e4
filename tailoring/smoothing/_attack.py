"""An adversary for smoothed classifiers, to try certificates against."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Real

import torch
from torch import Tensor

from ._certify import Smoothed, logits_of


def attack(
    smoothed: Smoothed, x: Tensor, label: Tensor, radius: Tensor | float, *, steps: int = 20, samples: int = 64, seed: int = 0
) -> Tensor:
    """Queries within `radius` (in L2) of x that the smoothed classifier should answer wrongly, found by projected gradient ascent on

        -log mean over noise of p(label | x + delta + noise)          (Salman et al. 2019)

    The gradient goes through the classifier as it is, its tailoring included (exactly with backprop="all"), with fresh noise at every step.
    x (queries, ...), label (queries,), radius a number or (queries,).
    """
    if steps < 1 or samples < 1:
        raise ValueError(f"an attack takes at least one step and one sample, not {steps} and {samples}")
    queries = len(x)
    if not isinstance(label, Tensor) or label.shape != (queries,):
        given = f"of shape {tuple(label.shape)}" if isinstance(label, Tensor) else repr(label)
        raise ValueError(f"label must be a tensor with one class for each of the {queries} queries, not {given}")
    if isinstance(radius, Tensor) and radius.shape not in ((), (queries,)):
        raise ValueError(f"radius must be a number, or a tensor of {queries} (one for each query), not of shape {tuple(radius.shape)}")
    if not isinstance(radius, Tensor | Real):
        raise TypeError(f"radius must be a number, or a tensor with one for each query, not {radius!r}")
    if bool((torch.as_tensor(radius) < 0).any()) or bool((label < 0).any()):
        raise ValueError("an attack takes classes and radii that are not negative: leave out queries where a certificate abstains")
    random = torch.Generator(x.device).manual_seed(seed)

    def log_probability(moved: Tensor) -> Tensor:
        noise = torch.randn((queries, samples, *x.shape[1:]), generator=random, dtype=x.dtype, device=x.device)
        logits = logits_of(smoothed.classifier, (moved[:, None] + smoothed.outer_sigma * noise).flatten(0, 1))
        logits = logits.unflatten(0, (queries, samples))
        return logits.log_softmax(-1).logsumexp(1).gather(1, label[:, None])

    return descend_within(log_probability, x, radius, steps=steps, length=2.5)  # far enough to cross the ball and turn


def descend_within(
    objective: Callable[[Tensor], Tensor],
    x: Tensor,
    radius: Tensor | float,
    *,
    steps: int,
    length: float,
    after: Callable[[Tensor], Tensor] = lambda moved: moved,
) -> Tensor:
    """Rows within `radius` (in L2) of x's where `objective`, a number for each, is small: `steps` down its gradient, `length` radii in all.

    `after` each step, what has moved may be put where it is allowed to be.
    """
    # a number stays one: to make it a tensor would wait for the device, which a training that is recorded as a CUDA graph must not
    size = radius.to(x).expand(len(x)).view(-1, *[1] * (x.ndim - 1)) if isinstance(radius, Tensor) else radius
    delta = torch.zeros_like(x)
    for _ in range(steps):
        with torch.enable_grad():
            moved = (x + delta).detach().requires_grad_()
            (gradient,) = torch.autograd.grad(objective(moved).sum(), moved)
        delta = delta - length / steps * size * gradient / _norm(gradient).clamp(min=1e-12)
        delta = delta * (size / _norm(delta).clamp(min=1e-12)).clamp(max=1)
        delta = after(x + delta) - x
    return (x + delta).detach()


def _norm(t: Tensor) -> Tensor:
    return t.flatten(1).norm(dim=1).view(-1, *[1] * (t.ndim - 1))
