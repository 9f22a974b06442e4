"""States: what belongs to each query, and the little algebra that the inner loop needs of it.

A state is a dict of entries with one row per query. An entry is a tensor, or a `LowRank`: a matrix for each query that is kept as
the outer products it is a sum of.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors
from torch.utils import _pytree as pytree

from ._kernels import may_look
from ._trees import has_fractions

START, ZERO = -1, -2  # the keys of the blocks that a state starts with, and of a zero
_FEW = 1 << 16  # numbers that are copied side by side in less time than is spent on another operation, and kept for little


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
        return torch.nn.functional.one_hot(right, table).to(left.dtype).mT @ left

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
State = dict[str, Entry]


def without_autocast(t: Tensor) -> AbstractContextManager[Any]:
    device = t.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def joined(factors: Sequence[Tensor]) -> Tensor:
    """Factors (rows, r, n) of one side as one."""
    return factors[0] if len(factors) == 1 else torch.cat(tuple(factors), 1)


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


def dense(entry: Entry, shape: tuple[int, ...]) -> Tensor:
    """The entry of a parameter of this shape as one tensor, (rows, *shape)."""
    matrices = entry.dense(shape[0]) if isinstance(entry, LowRank) else entry
    return matrices.reshape(-1, *shape)


def zero_like(state: State) -> State:
    return {name: _none_of(e) if isinstance(e, LowRank) else torch.zeros_like(e) for name, e in state.items()}


def _none_of(entry: LowRank) -> LowRank:
    _, left, right = entry.blocks[0]
    return LowRank(((ZERO, left[:, :0].detach(), right[:, :0].detach()),))


def compact(state: State) -> State:
    """The same state with every matrix in one block, fit to be the start of another loop; or as it is, where that is smaller."""
    return {name: _compact(e) if isinstance(e, LowRank) else e for name, e in state.items()}


def _compact(entry: LowRank) -> Entry:
    left, right = entry.factors()
    if has_fractions(right) and not products_pay(left.shape[1], left.shape[2], right.shape[2]):
        return entry.dense()
    return LowRank(((START, left, right),))


def products_pay(rank: int, outputs: int, inputs: int) -> bool:
    """Whether outer products of this rank cost less than the matrix: rank (in + out) operations for each row against in * out."""
    return rank * (inputs + outputs) <= inputs * outputs


def add(a: State, b: State) -> State:
    return {name: _add(entry, b[name]) for name, entry in a.items()}


def _add(a: Entry, b: Entry) -> Entry:
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


def scale(state: State, by: Callable[[str], float | Tensor]) -> State:
    """Every entry times `by(name)`: a number, or one for each row."""

    def scaled(entry: Tensor, factor: float | Tensor) -> Tensor:
        return entry * (per_row(factor, entry) if isinstance(factor, Tensor) and factor.ndim else factor)

    return {name: _map(e, lambda t, name=name: scaled(t, by(name))) for name, e in state.items()}


def _map(entry: Entry, f: Callable[[Tensor], Tensor]) -> Entry:
    return entry.map_left(f) if isinstance(entry, LowRank) else f(entry)


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
    return {name: _where(rows, entry, None if no is None else no[name]) for name, entry in yes.items()}


def _where(rows: Tensor, yes: Entry, no: Entry | None) -> Entry:
    if isinstance(yes, LowRank) and isinstance(no, LowRank):
        return _where_products(rows, yes, no)
    if isinstance(yes, LowRank):
        return _masked(rows, yes) if no is None else _add(_masked(rows, yes), _where(~rows, no, None))
    if isinstance(no, LowRank):
        return _add(_masked(~rows, no), _where(rows, yes, None))
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
    parts = [_square_norms(entry) for entry in state.values()]
    return torch.stack(parts).sum(0)


def dots(a: State, b: State) -> Tensor:
    """(rows,): the scalar product of each row of the one with the same row of the other; a complex number counts as its two parts."""
    parts = [_dots(entry, b[name]) for name, entry in a.items()]
    return torch.stack(parts).sum(0)


def _dots(a: Entry, b: Entry) -> Tensor:
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


def _square_norms(entry: Entry) -> Tensor:
    if isinstance(entry, Tensor):
        return by_row(squares(entry)).sum(1)
    left, right = entry.factors()
    if left.shape[1] == 1 and has_fractions(right):
        return squares(left).flatten(1).sum(1) * squares(right).flatten(1).sum(1)
    return _dots_of_products(entry, entry)


def largest(state: State) -> Tensor:
    """(rows,): the largest size of a number of the row, as a constant; of a matrix in outer products a bound."""
    return torch.stack([_largest(entry) for entry in state.values()]).amax(0)


def _largest(entry: Entry) -> Tensor:
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
