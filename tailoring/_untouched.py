"""Trial passes leave a model as they found it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """What passes change beside their answers is put back: buffers, as BatchNorm's statistics, and the state of random generators."""
    kept = [(module, name, t, t.clone()) for module in model.modules() for name, t in module._buffers.items() if t is not None]
    cards = {p.device.index for p in model.parameters() if p.is_cuda}
    try:
        with torch.random.fork_rng(sorted(cards)):
            yield
    finally:
        with torch.no_grad():
            for module, name, t, before in kept:
                module._buffers[name] = t
                if not _is_same(t, before):  # others are not written to: a graph of the user's may have saved them
                    t.copy_(before)


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Not a number counts as the same as itself."""
    if torch.equal(a, b):
        return True
    has_nan = a.is_complex() or (a.is_floating_point() and a.element_size() > 1)  # PyTorch compares numbers of eight bits by `equal` only
    return has_nan and bool(torch.isclose(a, b, rtol=0.0, atol=0.0, equal_nan=True).all())
