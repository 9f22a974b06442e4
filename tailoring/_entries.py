"""Entries of a state: what every query owns of one parameter.

An entry is a tensor with one row per query, or a `LowRank`: a matrix for each query that is kept as the outer products it is a sum of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ._trees import has_fractions

START, ZERO = -1, -2  # the keys of the blocks that a state starts with, and of a zero


Key = int | tuple[str, "Key"]
Block = tuple[Key, Tensor, Tensor]


@dataclass(frozen=True, repr=False)
class LowRank:
    """One matrix per query, (rows, out, in), as sum over blocks and r of left_r right_r^T.

    A block is (key, left, right): left (rows, r, out), right (rows, r, in). Blocks with the same key share their right factors, so
    adding two matrices adds the left ones of equal key and keeps the others: a sum over s steps has the rank of s gradients, with
    momentum too. Where a matrix is a table of embeddings, `right` holds indices, (rows, r), in place of one-hot vectors.
    """

    blocks: tuple[Block, ...]

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
        return joined(lefts), joined(rights)

    def dense(self, table: int = 0) -> Tensor:
        """The matrices themselves, (rows, out, in); of a table, which has `table` rows, (rows, in, out) as the table is."""
        left, right = self.factors()
        if has_fractions(right):
            with without_autocast(left):  # what is summed over steps must not be rounded at each
                return torch.bmm(left.mT, right.to(left.dtype))  # `@` expands both first, in four operations more
        return torch.nn.functional.one_hot(right.long(), table).to(left.dtype).mT @ left

    def __repr__(self) -> str:
        return f"LowRank(rows={self.rows}, shape={own_shape(self)}, rank={self.rank})"

    def map_left(self, f: Callable[[Tensor], Tensor]) -> LowRank:
        return LowRank(tuple((key, f(left), right) for key, left, right in self.blocks))

    # What one does with the entries of a state between two queries, whether they are tensors or these:

    def detach(self) -> LowRank:
        return pytree.tree_map(Tensor.detach, self)

    def to(self, *args: Any, **kwargs: Any) -> LowRank:
        """Elsewhere, or in another precision; indices stay whole numbers."""

        def moved(t: Tensor) -> Tensor:
            return t.to(*args, **kwargs) if has_fractions(t) else t.to(t.new_empty(0, dtype=torch.float32).to(*args, **kwargs).device)

        return pytree.tree_map(moved, self)

    def __getitem__(self, rows: Any) -> LowRank:
        """The rows that a slice, a mask or indices choose."""
        if isinstance(rows, int):
            raise TypeError(f"a row is chosen as [{rows}:{rows + 1}], so that there are rows still")
        return pytree.tree_map(lambda t: t[rows], self)


pytree.register_pytree_node(
    LowRank,
    lambda m: ([t for _, *pair in m.blocks for t in pair], tuple(key for key, *_ in m.blocks)),
    lambda parts, keys: _unflatten(list(parts), keys),
    serialized_type_name="tailoring.LowRank",
)


def _unflatten(parts: list, keys: tuple[Key, ...]) -> LowRank:
    return LowRank(tuple(zip(keys, parts[::2], parts[1::2], strict=True)))


torch.serialization.add_safe_globals([LowRank])  # a saved state loads without pickle
Entry = Tensor | LowRank


def without_autocast(t: Tensor) -> AbstractContextManager[Any]:
    device = t.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def joined(factors: Sequence[Tensor]) -> Tensor:
    """Factors (rows, r, n) of one side as one."""
    return factors[0] if len(factors) == 1 else torch.cat(tuple(factors), 1)


def as_tensor(entry: Entry) -> Tensor:
    assert isinstance(entry, Tensor)
    return entry


def own_shape(entry: Entry) -> tuple[int, ...]:
    """What one query owns: of a matrix in outer products, (out, in)."""
    if not isinstance(entry, LowRank):
        return tuple(entry.shape[1:])
    _, left, right = entry.blocks[0]
    return (left.shape[2], *right.shape[2:])


def matrices(entry: Entry, table: int = 0) -> Tensor:
    """An entry as one tensor: outer products as the matrices that they are, or the table of so many rows."""
    return entry.dense(table) if isinstance(entry, LowRank) else entry


def dense(entry: Entry, shape: tuple[int, ...]) -> Tensor:
    """The entry of a parameter of this shape as one tensor, (rows, *shape)."""
    return matrices(entry, shape[0]).reshape(-1, *shape)


def zero_like(entry: Entry) -> Entry:
    if isinstance(entry, Tensor):
        return torch.zeros_like(entry)
    _, left, right = entry.blocks[0]
    return LowRank(((ZERO, left[:, :0].detach(), right[:, :0].detach()),))


def compact(entry: Entry) -> Entry:
    """The same with a matrix in one block, or as it is, where that is smaller."""
    if isinstance(entry, Tensor):
        return entry
    left, right = entry.factors()
    if has_fractions(right) and not products_pay(left.shape[1], left.shape[2], right.shape[2]):
        return entry.dense()
    return LowRank(((START, left, right),))


def cat(parts: Sequence[Entry]) -> Entry:
    """One below the other. Matrices of different rank (of a part in which all rows failed, say) are filled up with zeros."""
    tensors = [part for part in parts if isinstance(part, Tensor)]
    if len(tensors) == len(parts):
        return torch.cat(tensors)
    if tensors:  # where the matrices themselves were found to be cheaper
        return torch.cat([part.dense(tensors[0].shape[1]) if isinstance(part, LowRank) else part for part in parts])
    factors = [part.factors() for part in parts if isinstance(part, LowRank)]
    rank = max(left.shape[1] for left, _ in factors)
    left, right = (torch.cat([_filled(pair[side], rank) for pair in factors]) for side in (0, 1))
    return LowRank(((START, left, right),))


def _filled(factor: Tensor, rank: int) -> Tensor:
    """(rows, r, ...) -> (rows, rank, ...)"""
    missing = factor.new_zeros(factor.shape[0], rank - factor.shape[1], *factor.shape[2:])
    return torch.cat([factor, missing], 1) if missing.shape[1] else factor


def products_pay(rank: int, outputs: int, inputs: int) -> bool:
    """Whether outer products of this rank cost less than the matrix: rank (in + out) operations for each row against in * out."""
    return rank * (inputs + outputs) <= inputs * outputs


def add(a: Entry, b: Entry) -> Entry:
    if isinstance(a, LowRank) and isinstance(b, LowRank):
        other = {key: left for key, left, _ in b.blocks}
        mine = tuple((key, _same_rank(left, other[key]) if key in other else left, right) for key, left, right in a.blocks)
        known = {key for key, *_ in mine}
        return LowRank(mine + tuple(block for block in b.blocks if block[0] not in known))
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a + b
    matrices, products = (b, a) if isinstance(a, LowRank) else (a, b)  # a loop that found the matrices themselves to be cheaper
    assert isinstance(matrices, Tensor)
    assert isinstance(products, LowRank)
    return matrices + products.dense(matrices.shape[1]) if products.rank else matrices


def _same_rank(left: Tensor, other: Tensor) -> Tensor:
    assert left.shape == other.shape, "blocks of one key share their right factors"
    return left + other


def scale(entry: Entry, by: float | Tensor) -> Entry:
    """Times a number, or one for each row."""

    def scaled(t: Tensor) -> Tensor:
        return t * (per_row(by, t) if isinstance(by, Tensor) and by.ndim else by)

    return entry.map_left(scaled) if isinstance(entry, LowRank) else scaled(entry)


def where(rows: Tensor, yes: Entry, no: Entry | None) -> Entry:
    if isinstance(yes, LowRank) and isinstance(no, LowRank):
        return _where_products(rows, yes, no)
    if isinstance(yes, LowRank):
        return _masked(rows, yes) if no is None else add(_masked(rows, yes), where(~rows, no, None))
    if isinstance(no, LowRank):
        return add(_masked(~rows, no), where(rows, yes, None))
    return torch.where(per_row(rows, yes), yes, 0.0 if no is None else no)


def _where_products(rows: Tensor, yes: LowRank, no: LowRank) -> LowRank:
    """Of blocks that both have, each row takes one's factors; of others, or if one's is empty like the identity's, each keeps its own."""
    others = {key: (left, right) for key, left, right in no.blocks if left.shape[1]}
    blocks: list[Block] = []
    for key, left, right in yes.blocks:
        if key in others and not left.shape[1]:
            continue
        other = others.pop(key, None)
        if other is None or other[0].shape != left.shape:
            blocks += _masked(rows, LowRank(((key if other is None else ("yes", key), left, right),))).blocks
            others |= {} if other is None else {("no", key): other}
        else:
            chosen = right if other[1] is right else torch.where(per_row(rows, right), right, other[1])
            blocks.append((key, torch.where(per_row(rows, left), left, other[0]), chosen))
    blocks += _masked(~rows, LowRank(tuple((key, *pair) for key, pair in others.items()))).blocks
    return LowRank(tuple(blocks))


def _masked(rows: Tensor, entry: LowRank) -> LowRank:
    """The right factors are masked too, since 0 * nan = nan."""
    return LowRank(tuple((key, torch.where(per_row(rows, a), a, 0), torch.where(per_row(rows, b), b, 0)) for key, a, b in entry.blocks))


def dots(a: Entry, b: Entry) -> Tensor:
    if isinstance(a, LowRank) and isinstance(b, LowRank):
        return _dots_of_products(a, b)
    table = next((entry.shape[1] for entry in (a, b) if isinstance(entry, Tensor)), 0)
    mine, other = (by_row(entry.dense(table) if isinstance(entry, LowRank) else entry) for entry in (a, b))
    return (mine * other.conj()).real.sum(1)


def _dots_of_products(a: LowRank, b: LowRank) -> Tensor:
    """Of matrices in outer products without building them: sum_rs (left_r . other left_s) (right_r . other right_s)."""
    (left, right), (other_left, other_right) = a.factors(), b.factors()
    gram = right @ other_right.mH if has_fractions(right) else (right[:, :, None] == other_right[:, None, :]).to(left.dtype)
    return ((left @ other_left.mH) * gram).sum((1, 2)).real


def square_norms(entry: Entry) -> Tensor:
    if isinstance(entry, Tensor):
        return by_row(squares(entry)).sum(1)
    left, right = entry.factors()
    if left.shape[1] == 1 and has_fractions(right):
        return squares(left).flatten(1).sum(1) * squares(right).flatten(1).sum(1)
    return _dots_of_products(entry, entry)


def largest(entry: Entry) -> Tensor:
    if isinstance(entry, Tensor):
        return by_row(entry.detach().abs()).amax(1)
    left, right = (t.detach().abs().flatten(1) for t in entry.factors())
    if left.shape[1] == 0:
        return left.new_zeros(len(left))
    return left.amax(1) * (right.amax(1) if right.is_floating_point() else entry.rank)


def in_parts(t: Tensor) -> Tensor:
    """Complex numbers by their two parts, in a last dimension; real ones as they are."""
    return torch.view_as_real(t.resolve_conj()) if t.is_complex() else t


def squares(t: Tensor) -> Tensor:
    """|t|^2 of every number, real. (By `abs`, that of a complex 0 would have no second derivative.)"""
    return t.real.square() + t.imag.square() if t.is_complex() else t.square()


def by_row(t: Tensor) -> Tensor:
    """(rows, all numbers of the row); one if a query owns a single number."""
    return t.flatten(1) if t.ndim > 1 else t[:, None]


def per_row(values: Tensor, t: Tensor) -> Tensor:
    """(rows,) -> such that it multiplies or chooses the rows of `t`."""
    return values.reshape(-1, *[1] * (t.ndim - 1))
