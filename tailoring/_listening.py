"""The gradient of exact weights, heard at their layers: g h^T of every use, at first order and beyond, eager and compiled."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from . import _entries as entries
from . import _states as states
from ._adapt import Evaluate
from ._entries import Entry, LowRank
from ._inner import found_gradients
from ._states import State
from ._taps import Tap, Taps

Heard = list[tuple[Tap, Tensor]]  # taps, each with the gradient of its outputs
Listened = tuple[Tensor, dict[str, Tensor], Heard]  # losses, gradient by the free entries, gradients at the taps


def listen(evaluate: Evaluate, state: State, free: dict[str, Tensor], graph: bool) -> Listened | None:
    """None if the loss differentiates the model, since g h^T is then not all of the gradient."""
    leaves = states.leaves(dict(free), graph)
    taps = Taps(graph)
    values = evaluate({**state, **leaves}, taps)
    if taps.disturbed:
        taps = Taps(graph, cloned=True)
        values = evaluate({**state, **leaves}, taps)
    if taps.differentiated:
        return None
    uses = {f"{i}: {tap.weight or tap.bias}": (tap, out) for i, (tap, out) in enumerate(zip(taps.heard, taps.outs, strict=True))}
    # From here on the taps may hear more, of a loss that runs the model within `torch.utils.checkpoint`: the same once again.
    grads = found_gradients(values, {**leaves, **{name: out for name, (_, out) in uses.items()}}, graph)
    heard = [(tap, grads[name]) for name, (tap, _) in uses.items() if name in grads]  # else its graph may be gone
    return values, {name: grads[name] if name in grads else torch.zeros_like(t) for name, t in free.items()}, heard


def listen_compiled(evaluate: Evaluate, state: State, free: dict[str, Tensor], graph: bool) -> Listened:
    """The same by torch.func.grad. It differentiates by inputs, so a first pass, dead code in the end, tells the shapes of the probes."""
    first = Taps(graph)
    evaluate(state, first)

    def total(free: dict[str, Tensor], probes: list[Tensor]) -> tuple[Tensor, tuple[Tensor, list[Tensor]]]:
        taps = Taps(graph, probes=probes)
        values = evaluate({**state, **free}, taps)
        return values.sum(), (values, [tap.given for tap in taps.heard])

    probes = [torch.zeros_like(out) for out in first.outs]
    (grads, slopes), (values, given) = torch.func.grad(total, argnums=(0, 1), has_aux=True)(free, probes)
    taps = [replace(tap, given=h) for tap, h in zip(first.heard, given, strict=True)]
    return values, grads, list(zip(taps, slopes, strict=True))


def collect(name: str, heard: Heard, entry: Entry, step: tuple[int, int]) -> Entry:
    """The gradient of one parameter, from all the places where it was used, in the numbers that the state is kept in."""
    own = entry.blocks[0][1].dtype if isinstance(entry, LowRank) else entry.dtype
    heard = [(tap, g.to(own)) for tap, g in heard if name in (tap.weight, tap.bias)]  # under autocast g has fewer digits
    offsets = [tap.offsets(g) for tap, g in heard if tap.bias == name]
    uses = [(tap, g) for tap, g in heard if tap.weight == name]
    if not uses:
        return sum(offsets, torch.zeros_like(entry)) if isinstance(entry, Tensor) else states.zero_like({name: entry})[name]
    rank = step[1] * sum(g.shape[1] for _, g in uses)
    if isinstance(entry, LowRank) and all(_products_pay(tap, rank) for tap, _ in uses):
        lefts, rights = zip(*(tap.factors(g) for tap, g in uses), strict=True)
        return LowRank(((step[0], entries.joined(lefts), entries.joined(rights)),))
    first, *rest = (tap.matrices(g) for tap, g in uses)
    return sum(rest, first)


def _products_pay(tap: Tap, rank: int) -> bool:
    if tap.is_table:  # to look up indices costs nothing
        return True
    return tap.groups == 1 and entries.products_pay(rank, tap.outputs, tap.inputs)
