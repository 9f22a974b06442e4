"""States: what belongs to each query, and the little algebra that the inner loop needs of it.

A state is a dict of entries with one row per query. An entry is a tensor, or a `LowRank`: a matrix for each query that is kept as
the outer products it is a sum of.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

START, ZERO = -1, -2  # the keys of the blocks that a state starts with, and of a zero


@dataclass(frozen=True)
class LowRank:
    """One matrix per query, (rows, out, in), as sum over blocks and r of left_r right_r^T.

    A block is (key, left, right): left (rows, r, out), right (rows, r, in). Blocks with the same key share their right factors, so
    adding two matrices adds the left ones of equal key and keeps the others: a sum over s steps has the rank of s gradients, with
    momentum too. Where a matrix is a table of embeddings, `right` holds indices, (rows, r), in place of one-hot vectors.
    """

    blocks: tuple[tuple[int, Tensor, Tensor], ...]

    @property
    def rank(self) -> int:
        return sum(left.shape[1] for _, left, _ in self.blocks)

    @property
    def rows(self) -> int:
        return self.blocks[0][1].shape[0]

    def factors(self) -> tuple[Tensor, Tensor]:
        """All of it as one pair, left (rows, rank, out) and right (rows, rank, in)."""
        parts = [(left, right) for _, left, right in self.blocks if left.shape[1]] or [self.blocks[0][1:]]
        lefts, rights = zip(*parts, strict=True)
        return (lefts[0], rights[0]) if len(parts) == 1 else (torch.cat(lefts, 1), torch.cat(rights, 1))

    def dense(self) -> Tensor:
        """The matrices themselves, (rows, out, in)."""
        left, right = self.factors()
        return left.mT @ right

    def map_left(self, f: Callable[[Tensor], Tensor]) -> LowRank:
        return LowRank(tuple((key, f(left), right) for key, left, right in self.blocks))


pytree.register_pytree_node(
    LowRank,
    lambda m: ([t for _, *pair in m.blocks for t in pair], tuple(key for key, *_ in m.blocks)),
    lambda parts, keys: _unflatten(list(parts), keys),
    serialized_type_name="tailoring.LowRank",
)


def _unflatten(parts: list, keys: tuple[int, ...]) -> LowRank:
    return LowRank(tuple(zip(keys, parts[::2], parts[1::2], strict=True)))


Entry = Tensor | LowRank
State = dict[str, Entry]


def as_tensor(entry: Entry) -> Tensor:
    assert isinstance(entry, Tensor)
    return entry


def rows_of(state: State) -> int:
    entry = next(iter(state.values()))
    return entry.rows if isinstance(entry, LowRank) else entry.shape[0]


def device_of(state: State) -> torch.device:
    return pytree.tree_leaves(state)[0].device


def own_shape(entry: Entry) -> tuple[int, ...]:
    """What one query owns: of a matrix in outer products, (out, in)."""
    if not isinstance(entry, LowRank):
        return tuple(entry.shape[1:])
    _, left, right = entry.blocks[0]
    return (left.shape[2], *right.shape[2:])


def zero_like(state: State) -> State:
    return {name: _none_of(e) if isinstance(e, LowRank) else torch.zeros_like(e) for name, e in state.items()}


def _none_of(entry: LowRank) -> LowRank:
    _, left, right = entry.blocks[0]
    return LowRank(((ZERO, left[:, :0].detach(), right[:, :0].detach()),))


def compact(state: State) -> State:
    """The same state with every matrix in one block, fit to be the start of another loop."""
    return {name: LowRank(((START, *e.factors()),)) if isinstance(e, LowRank) else e for name, e in state.items()}


def add(a: State, b: State) -> State:
    return {name: _add(entry, b[name]) for name, entry in a.items()}


def _add(a: Entry, b: Entry) -> Entry:
    if isinstance(a, LowRank) and isinstance(b, LowRank):
        other = {key: left for key, left, _ in b.blocks}
        mine = tuple((key, left + other[key] if key in other else left, right) for key, left, right in a.blocks)
        known = {key for key, *_ in mine}
        return LowRank(mine + tuple(block for block in b.blocks if block[0] not in known))
    if isinstance(a, LowRank) or isinstance(b, LowRank):  # a loop that found the matrices themselves to be cheaper
        a, b = (b, a) if isinstance(a, LowRank) else (a, b)
        assert isinstance(a, Tensor)
        assert isinstance(b, LowRank)
        return a + b.dense() if b.rank else a
    return a + b


def scale(state: State, by: Callable[[str], float | Tensor]) -> State:
    """Every entry times `by(name)`: a number, or one for each row."""

    def scaled(entry: Tensor, factor: float | Tensor) -> Tensor:
        return entry * (_fit(factor, entry) if isinstance(factor, Tensor) and factor.ndim else factor)

    return {name: _map(e, lambda t, name=name: scaled(t, by(name))) for name, e in state.items()}


def _map(entry: Entry, f: Callable[[Tensor], Tensor]) -> Entry:
    return entry.map_left(f) if isinstance(entry, LowRank) else f(entry)


def detached(state: State) -> State:
    return pytree.tree_map(lambda t: t.detach(), state)


def leaves(state: State, graph: bool) -> dict[str, Tensor]:
    """The entries of a state of tensors, ready to be differentiated by; with `graph`, what they depend on stays known."""
    tensors = {name: e for name, e in state.items() if isinstance(e, Tensor)}
    return {name: t if graph and t.requires_grad else t.detach().requires_grad_() for name, t in tensors.items()}


def take(state: State, rows: Tensor) -> State:
    return pytree.tree_map(lambda t: t[rows], state)


def spread(state: State, rows: Tensor, total: int) -> State:
    """The rows of `state` at the places `rows` of a state with `total` rows; zero elsewhere."""
    return pytree.tree_map(lambda t: t.new_zeros(total, *t.shape[1:]).index_copy(0, rows, t), state)


def where(rows: Tensor, yes: State, no: State | None = None) -> State:
    """The rows of `yes` where `rows` holds; elsewhere those of `no`, or zero."""
    if not torch.compiler.is_compiling() and bool(rows.all()):  # as nearly always
        return yes
    return {name: _where(rows, entry, None if no is None else no[name]) for name, entry in yes.items()}


def _where(rows: Tensor, yes: Entry, no: Entry | None) -> Entry:
    if isinstance(yes, Tensor) and not isinstance(no, LowRank):
        return torch.where(_fit(rows, yes), yes, 0.0 if no is None else no)
    if isinstance(yes, LowRank) and no is None:  # the right factors too, since 0 * nan = nan
        return LowRank(tuple((key, torch.where(_fit(rows, a), a, 0), torch.where(_fit(rows, b), b, 0)) for key, a, b in yes.blocks))
    assert no is not None
    return _add(_where(rows, yes, None), _where(~rows, no, None))


def finite(state: State) -> Tensor:
    """(rows,): whether every number of the row is finite, told by their sum (in which nan and inf stay)."""
    numbers = [t.detach() for t in pytree.tree_leaves(state) if t.is_floating_point() and t.numel()]
    if not numbers:
        return torch.ones(rows_of(state), dtype=torch.bool, device=device_of(state))
    wide = torch.promote_types(numbers[0].dtype, torch.float32)
    return torch.stack([t.flatten(1).sum(1, dtype=wide) for t in numbers]).sum(0).isfinite()


def square_norms(state: State) -> Tensor:
    """(rows,): the sum of the squares of all numbers of the row; of a matrix in outer products without building it,

    |sum_r left_r right_r^T|^2 = sum_rs (left_r . left_s) (right_r . right_s)
    """
    parts = [_square_norms(entry) for entry in state.values()]
    return torch.stack(parts).sum(0)


def _square_norms(entry: Entry) -> Tensor:
    if isinstance(entry, Tensor):
        return entry.flatten(1).square().sum(1)
    left, right = entry.factors()
    if left.shape[1] == 1 and right.is_floating_point():
        return left.flatten(1).square().sum(1) * right.flatten(1).square().sum(1)
    gram = right @ right.mT if right.is_floating_point() else (right[:, :, None] == right[:, None, :]).to(left.dtype)
    return ((left @ left.mT) * gram).sum((1, 2))


def _fit(per_row: Tensor, t: Tensor) -> Tensor:
    return per_row.reshape(-1, *[1] * (t.ndim - 1))
