"""Activation checkpointing: what an inner step keeps for the outer backward pass is thrown away, and computed again there.

`torch.utils.checkpoint` does the same for functions that take no derivatives. An inner step does, and would there run its forward pass
twice already on the way in; on CUDA in autograd's own thread, which waits forever for a model that takes derivatives itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor

from ._kernels import may_look
from ._trees import tensors

Out = TypeVar("Out", bound=tuple[Any, ...])
_SAME = 1e-3  # how far, relative to the largest of its row, a number may be from that of the first time, which came from the same kernels
_SMALL = 1e-4


class _Saved:
    """What stands in autograd's graph in place of a tensor: it, or, between the two passes, nothing."""

    def __init__(self, tensor: Tensor):
        self.hold(tensor)

    def hold(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor.detach()  # without its graph, of which this is a part
        self.version = tensor._version


class _Recomputed:
    def __init__(self, compute: Callable[[], tuple[Any, ...]], needed: Callable[[], Iterable[Tensor]], device: torch.device):
        self.compute, self.needed = compute, needed
        self.versions = [(id(t), t._version) for t in needed()]
        self.autocast = device.type, torch.get_autocast_dtype(device.type), torch.is_autocast_enabled(device.type)
        self.saved: list[weakref.ref[_Saved]] = []  # in the order of saving; they live as long as the graph needs them
        self.first: list[Tensor] = []  # losses, or an answer
        self.digests: list[Tensor] = []  # of a gradient, which is as large as the state

    def run(self) -> tuple[Any, ...]:
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            out = self.compute()
        for saved in filter(None, (ref() for ref in self.saved)):
            saved.tensor = None
        self.first, self.digests = [t.detach() for t in tensors(out[0])], _digests(out[1:])
        return out

    def _pack(self, tensor: Tensor) -> _Saved:
        saved = _Saved(tensor)
        self.saved.append(weakref.ref(saved))
        return saved

    def _unpack(self, saved: _Saved) -> Tensor:
        if saved.tensor is None:
            self._again()
        assert saved.tensor is not None
        if saved.tensor._version != saved.version:  # with hooks, autograd does not look
            raise RuntimeError("a tensor that the outer gradient needs was changed in place")
        return saved.tensor

    def _again(self) -> None:
        if [(id(t), t._version) for t in self.needed()] != self.versions:
            raise RuntimeError(
                "weights changed before backward(), or the queries, and recompute=True computes the inner steps again with what there is: "
                "call backward() before the optimiser steps"
            )
        made: list[Tensor] = []
        keep = torch.autograd.graph.saved_tensors_hooks(lambda t: made.append(t.detach()) or t.detach(), lambda t: t)
        device, dtype, enabled = self.autocast
        with torch.enable_grad(), torch.autocast(device, dtype, enabled), keep:
            out = self.compute()
        if len(made) != len(self.saved) or not self._same(out):
            raise RuntimeError(
                "an inner step computed again came out otherwise, so recompute=True would give wrong outer gradients: let the loss draw "
                "its noise from model.seeds (see tailoring.random), and let neither loss nor model remember earlier calls"
            )
        for ref, tensor in zip(self.saved, made, strict=True):
            if (saved := ref()) is not None:
                saved.hold(tensor)

    def _same(self, again: tuple[Any, ...]) -> bool:
        """Number by number, up to what rounding may do to a small one; a query's are not to be hidden by the large ones of another.

        Losses alone would not do: a constant in them hides what noise does to them, and not to their gradient.
        """
        if not may_look():
            return True
        found, digests = [t.detach() for t in tensors(again[0])], _digests(again[1:])
        if len(found) != len(self.first) or [t.shape for t in digests] != [t.shape for t in self.digests]:
            return False
        largest: dict[int, Tensor] = {}  # by rows: a tensor much smaller than the others of a row may be nothing but rounding
        for t in self.digests:
            largest[len(t)] = torch.maximum(t[:, :1], largest.get(len(t), t[:, :1]))
        same = all(map(_alike, found, self.first))
        return same and all(_alike(a, b, _SMALL * largest[len(b)]) for a, b in zip(digests, self.digests, strict=True))


def _digests(parts: tuple[Any, ...]) -> list[Tensor]:
    """Of each tensor, (rows, 2): the sizes of a row's numbers added up, and the numbers, each with a weight of its own."""
    return [_digest(t.detach()) for t in tensors(parts) if t.numel() and t.is_floating_point()]


def _digest(t: Tensor) -> Tensor:
    rows = t.reshape(t.shape[0] if t.ndim else 1, -1).to(torch.float64)
    weights = torch.arange(1, rows.shape[1] + 1, dtype=rows.dtype, device=rows.device).cos()
    return torch.stack([rows.abs().sum(1), rows @ weights], 1)


def _alike(a: Tensor, b: Tensor, least: Tensor | None = None) -> bool:
    if not b.is_floating_point() or not b.numel():
        return a.shape == b.shape
    rows = b.reshape(b.shape[0] if b.ndim else 1, -1)
    size = rows.nan_to_num(0.0, 0.0, 0.0).abs().amax(1, keepdim=True)  # of the row's largest number
    size = (size if least is None else torch.maximum(size, least.nan_to_num(0.0, 0.0, 0.0))).clamp(min=torch.finfo(b.dtype).tiny)
    there, here = ((t.reshape(rows.shape) / size) for t in (b, a))
    return torch.allclose(here, there, rtol=0.0, atol=_SAME, equal_nan=True)


def recomputed(compute: Callable[[], Out], needed: Callable[[], Iterable[Tensor]], device: torch.device) -> Out:
    """`compute()`, whose graph keeps no activations: a backward pass through it computes them again, if what is `needed()` is unchanged."""
    return _Recomputed(compute, needed, device).run()  # type: ignore[return-value]
