"""States: what belongs to each query, and the little algebra that the inner loop needs of it.

A state is a dict of entries (`_entries`): tensors with one row per query, or matrices kept as outer products.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors
from torch.utils import _pytree as pytree

from . import _entries as entries
from ._entries import Entry, LowRank, by_row, in_parts
from ._kernels import may_look
from ._trees import has_fractions

State = dict[str, Entry]
_FEW = 1 << 16  # numbers that are copied side by side in less time than is spent on another operation, and kept for little


def rows_of(state: State) -> int:
    entry = next(iter(state.values()))
    return entry.rows if isinstance(entry, LowRank) else entry.shape[0]


def device_of(state: State) -> torch.device:
    return pytree.tree_leaves(state)[0].device


def zero_like(state: State) -> State:
    return {name: entries.zero_like(entry) for name, entry in state.items()}


def compact(state: State) -> State:
    """The same state with every matrix in one block, fit to be the start of another loop; or as it is, where that is smaller."""
    return {name: entries.compact(entry) for name, entry in state.items()}


def cat(parts: Sequence[State]) -> State:
    """The states of parts of a batch as one."""
    return parts[0] if len(parts) == 1 else {name: entries.cat([part[name] for part in parts]) for name in parts[0]}


def add(a: State, b: State) -> State:
    return {name: entries.add(entry, b[name]) for name, entry in a.items()}


def scale(state: State, by: Callable[[str], float | Tensor]) -> State:
    """Every entry times `by(name)`: a number, or one for each row."""
    return {name: entries.scale(entry, by(name)) for name, entry in state.items()}


def detached(state: State) -> State:
    return pytree.tree_map(lambda t: t.detach(), state)


def leaves(state: State, graph: bool) -> dict[str, Tensor]:
    """The entries of a state of tensors, ready to be differentiated by; with `graph`, what they depend on stays known.

    As views: the query itself may have come from the same tensors (a roll-out that carries its state on), and is held fixed.
    """
    return {
        name: t.view_as(t) if graph and t.requires_grad else t.detach().requires_grad_()
        for name, t in state.items()
        if isinstance(t, Tensor)
    }


def take(state: State, rows: Tensor) -> State:
    return pytree.tree_map(lambda t: t[rows], state)


def spread(state: State, rows: Tensor, total: int) -> State:
    """The rows of `state` at the places `rows` of a state with `total` rows; zero elsewhere."""
    return pytree.tree_map(lambda t: t.new_zeros(total, *t.shape[1:]).index_copy(0, rows, t), state)


def where(rows: Tensor, yes: State, no: State | None = None) -> State:
    """The rows of `yes` where `rows` holds; elsewhere those of `no`, or zero."""
    if may_look() and bool(rows.all()):  # as nearly always
        return yes
    return {name: entries.where(rows, entry, None if no is None else no[name]) for name, entry in yes.items()}


def finite(state: State) -> Tensor:
    """(rows,): whether every number of the row is finite, told by their sum (in which nan and inf stay)."""
    numbers = [in_parts(t.detach()) for t in pytree.tree_leaves(state) if t.numel() and has_fractions(t)]
    if not numbers:
        return torch.ones(rows_of(state), dtype=torch.bool, device=device_of(state))
    wide = torch.promote_types(numbers[0].dtype, torch.float32)
    return torch.stack([by_row(t).sum(1, dtype=wide) for t in numbers]).sum(0).isfinite()


def numbers(state: State) -> list[Tensor]:
    """All numbers of the state; indices are none. (`pytree.tree_leaves` takes ten times as long, which a small step would notice.)"""
    found: list[Tensor] = []
    for entry in state.values():
        found += [t for _, *pair in entry.blocks for t in pair if has_fractions(t)] if isinstance(entry, LowRank) else [entry]
    return found


def all_finite(numbers: list[Any]) -> bool:
    """Whether all of them are: surely so if it says so, since a sum or a norm may overflow."""
    if is_small(numbers):
        flat = _flatten_dense_tensors(numbers)
        total = flat.sum() if flat.dtype == torch.float32 else flat.sum(dtype=torch.promote_types(flat.dtype, torch.float32))
        return cmath.isfinite(total.item())
    with torch.no_grad():
        return math.isfinite(torch.stack(torch._foreach_norm(numbers)).sum().item())  # pyright: ignore[reportPrivateImportUsage]


def is_small(numbers: Iterable[Any]) -> bool:
    return sum(map(Tensor.numel, numbers)) <= _FEW


def square_norms(state: State) -> Tensor:
    """(rows,): the sum of the squares of all numbers of the row."""
    parts = [entries.square_norms(entry) for entry in state.values()]
    return torch.stack(parts).sum(0)


def dots(a: State, b: State) -> Tensor:
    """(rows,): the scalar product of each row of the one with the same row of the other; a complex number counts as its two parts."""
    parts = [entries.dots(entry, b[name]) for name, entry in a.items()]
    return torch.stack(parts).sum(0)


def largest(state: State) -> Tensor:
    """(rows,): the largest size of a number of the row, as a constant; of a matrix in outer products a bound."""
    return torch.stack([entries.largest(entry) for entry in state.values()]).amax(0)
