"""An adversary for smoothed classifiers, to try certificates against."""

from __future__ import annotations

import torch
from torch import Tensor

from ._certify import Smoothed


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
    queries, ones = len(x), [1] * (x.ndim - 1)
    size = torch.as_tensor(radius, dtype=x.dtype, device=x.device).expand(queries).view(-1, *ones)
    random = torch.Generator(x.device).manual_seed(seed)
    delta = torch.zeros_like(x)
    for _ in range(steps):
        noise = torch.randn((queries, samples, *x.shape[1:]), generator=random, dtype=x.dtype, device=x.device)
        with torch.enable_grad():
            moved = delta.detach().requires_grad_()
            noisy = (x + moved)[:, None] + smoothed.outer_sigma * noise
            logits = smoothed.classifier(noisy.flatten(0, 1)).unflatten(0, (queries, samples))
            log_p = logits.log_softmax(-1).gather(2, label.view(-1, 1, 1).expand(-1, samples, 1))
            (gradient,) = torch.autograd.grad(-log_p.logsumexp(1).sum(), moved)
        uphill = gradient / _norm(gradient).clamp(min=1e-12)
        delta = delta + (2.5 / steps) * size * uphill  # far enough to cross the ball and turn
        delta = delta * (size / _norm(delta).clamp(min=1e-12)).clamp(max=1)
    return x + delta.detach()


def _norm(t: Tensor) -> Tensor:
    return t.flatten(1).norm(dim=1).view(-1, *[1] * (t.ndim - 1))
