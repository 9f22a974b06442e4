"""Weights that a loss uses elsewhere than in the calls of their modules: there no query's own would go."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from ._states import State
from ._taps import Tap, Taps

_ROUNDING = 100  # times eps, of the largest gradient of all: what two uses of a weight leave of each other, as in losses of agreement


@torch.no_grad()
def unseen_weight(shared: dict[str, Tensor], losses: Tensor, state: State, taps: Taps) -> tuple[str | None, bool]:
    """The name of one, or None, and whether these losses have a gradient that could tell.

    A query's own weights are the shared ones plus its entry of the state, so over all queries the entries' gradients add up to that of the
    shared weights, if all uses of these are seen. It is the same pass, so rounding differs in the last sum only.
    """
    asked = {name: p for name, p in shared.items() if name in state and p.requires_grad}
    free = {name: entry for name in asked if isinstance(entry := state[name], Tensor) and entry.requires_grad}
    listened = list(zip(taps.heard, taps.outs, strict=True))  # now: of a loss that runs the model within a checkpoint they will hear more
    inputs = [*asked.values(), *free.values(), *(out for _, out in listened)]
    if not asked:
        return None, True  # frozen, so nothing is known of them
    grads = torch.autograd.grad(losses, inputs, torch.ones_like(losses), retain_graph=True, allow_unused=True)
    everywhere = dict(zip(asked, grads, strict=False))
    of_free = dict(zip(free, grads[len(asked) :], strict=False))
    heard = [(tap, g) for (tap, _), g in zip(listened, grads[len(asked) + len(free) :], strict=True) if g is not None]
    sizes = [float(g.abs().max()) for g in grads[: len(asked)] if g is not None and g.numel()]
    largest_of_all = max((size for size in sizes if math.isfinite(size)), default=0.0)
    told = False
    for name, whole in everywhere.items():
        if whole is None or not bool(whole.isfinite().all()):
            continue
        if torch.finfo(whole.dtype).bits < 32:  # PyTorch's own sums over a batch are off by percents
            told = True
            continue
        own = of_free.get(name)
        parts = [] if own is None else [(own.sum(0), own.abs().sum(0))]
        parts += [both for tap, g in heard if name in (tap.weight, tap.bias) for both in _summed(tap, g, name)]
        seen, size = (sum((part[i].reshape(whole.shape).to(whole.dtype) for part in parts), torch.zeros_like(whole)) for i in (0, 1))
        largest = float(whole.abs().max()) if whole.numel() else 0.0
        told = told or largest > 0
        rounding = _ROUNDING * torch.finfo(whole.dtype).eps * largest_of_all
        if float((seen - whole).abs().max()) > max(rounding, _share(losses, whole) * max(float(size.abs().max()), largest)):
            return name, True
    return None, told


def _summed(tap: Tap, g: Tensor, name: str) -> list[tuple[Tensor, Tensor]]:
    """The gradient by one use of a weight, or bias, over all queries, and the sum of its terms' sizes."""
    one, g = replace(tap, given=tap.given.flatten(0, 1)[None]), g.flatten(0, 1)[None]  # as if all rows were of one query
    found = []
    if tap.weight == name and tap.is_table:
        found.append((_gathered(one, g), _gathered(one, g.abs())))
    elif tap.weight == name:
        found.append((one.matrices(g)[0], replace(one, given=one.given.abs()).matrices(g.abs())[0]))
    if tap.bias == name:
        found.append((one.offsets(g)[0], one.offsets(g.abs())[0]))
    return found


def _gathered(tap: Tap, g: Tensor) -> Tensor:
    """The gradient of a table, (inputs, outputs): one-hot vectors of all rows would be large."""
    (left,), (index,) = tap.factors(g)
    return left.new_zeros(tap.inputs, tap.outputs).index_add(0, index, left)


def _share(losses: Tensor, whole: Tensor) -> float:
    """How much of the terms' sizes rounding may be, TF32 and autocast included."""
    if torch.is_autocast_enabled(losses.device.type):
        return 5e-2
    return 1e-2 if torch.finfo(whole.dtype).bits < 64 else 1e-6
