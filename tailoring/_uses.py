"""What the rule of a layer has to go by: its input, its parameters' entries of the state, and the taps that listen.

For a linear layer z = W h + b, the gradient of a query's loss with respect to W is g h^T, with g its gradient with respect to z, so

    after s steps   W_x h' + b_x = W h' + b - lr * sum_s g_s (h_s . h' + 1)

The shared product W h' is one for the whole batch, and a query owns s pairs of vectors (`LowRank`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from ._entries import Entry, LowRank, as_tensor
from ._states import State
from ._taps import Tap, Taps
from ._trees import copies_per_query, has_fractions


@dataclass(frozen=True)
class Use:
    """A module with adapted parameters: their names in the state, by their names in the module."""

    names: dict[str, str]
    rows: int  # the dimension of its inputs and outputs that holds the queries
    queries: int
    state: State
    tapped: frozenset[str]  # the names whose gradients come from taps
    taps: Taps | None

    def entry(self, local: str) -> Entry | None:
        return self.state[self.names[local]] if local in self.names else None

    def by_query(self, t: Tensor) -> Tensor:
        """(queries * k, ..., C), the queries in dimension `rows`, -> (queries, all other rows, C)"""
        t = t.movedim(self.rows, 0)
        copies_per_query(t.shape[0], self.queries, "input of a layer with adapted weights")
        return t.reshape(self.queries, -1, t.shape[-1])

    def back(self, t: Tensor, like: Tensor) -> Tensor:
        """The inverse of `by_query`, to the shape of `like`."""
        return laid_out_as(like, t.reshape(like.movedim(self.rows, 0).shape).movedim(0, self.rows))

    def own(self, local: str, shared: Tensor) -> Tensor:
        """Every query's copy of a (small) parameter, (queries, *its shape)."""
        entry = self.entry(local)
        return shared.expand(self.queries, *shared.shape) if entry is None else shared + as_tensor(entry)

    def corrected(
        self, out: Tensor, given: Tensor, shape: tuple[int, ...], prefix: str = "", first: int = 0, skip: int | None = None
    ) -> Tensor:
        """The shared output, (queries, rows, out), plus what the query's own weight and bias add to it."""
        weight, bias = f"{prefix}weight", f"{prefix}bias"
        change, offset = self.entry(weight), self.entry(bias)
        if change is not None:
            out = _add_product(out, given, change, first, skip)
        if offset is not None:
            out = out + _part(as_tensor(offset), 1, first, out)[:, None].to(out.dtype)
        names = [self.names[n] if self.names.get(n) in self.tapped else None for n in (weight, bias)]
        if self.taps is not None and any(names):
            out = self.taps.listen(Tap(names[0], names[1], given, shape, first, skip), out)
        return out


def laid_out_as(out: Tensor, new: Tensor) -> Tensor:
    """The model may go on with `.view`, which asks for numbers in their order."""
    return new.contiguous() if out.is_contiguous() else new


def _add_product(out: Tensor, given: Tensor, change: Entry, first: int, skip: int | None) -> Tensor:
    """out + given @ change^T for each query, with change (out, in) given as outer products or as it is; no gradient at the index `skip`."""
    if isinstance(change, LowRank):
        if not change.rank:
            return out
        if is_dynamo_compiling() and given.is_floating_point() and given.shape[1] == 1:
            return _add_products_one_by_one(out, given, change, first)
        left, right = change.factors()  # (queries, rank, out), (queries, rank, in)
        dots = torch.bmm(given, right.mT.to(given.dtype)) if has_fractions(right) else given[:, :, None] == right[:, None, :]
        return torch.baddbmm(out, dots.to(out.dtype), _part(left, 2, first, out).to(out.dtype))  # sum_r left_r (right_r . h')
    if not has_fractions(given):  # a table that other layers share: (queries, rows of the table, out)
        picked = torch.take_along_dim(change, given[..., None], 1)
        return out + (picked if skip is None else torch.where(given[..., None] == skip, picked.detach(), picked))
    change = _part(change.flatten(2), 1, first, out).to(out.dtype)
    groups = given.shape[-1] // change.shape[-1]
    if groups == 1:
        return torch.baddbmm(out, given.to(out.dtype), change.mT)
    return out + torch.einsum("qpgi,qgoi->qpgo", given.unflatten(-1, (groups, -1)), change.unflatten(1, (groups, -1))).flatten(2)


def _part(t: Tensor, dim: int, first: int, out: Tensor) -> Tensor:
    """Of all outputs of a weight, along `dim`, those that `out` has."""
    return t if t.shape[dim] == out.shape[-1] else t.narrow(dim, first, out.shape[-1])


def _add_products_one_by_one(out: Tensor, given: Tensor, change: LowRank, first: int) -> Tensor:
    """The same for one row per query in compiled code, which fuses all of it: no factors are copied together, no tiny products made."""
    for _, left, right in change.blocks:
        if left.shape[1]:
            dots = (right.to(given.dtype) * given).sum(-1, keepdim=True)  # (queries, rank, 1)
            out = out + (dots.to(out.dtype) * _part(left, 2, first, out).to(out.dtype)).sum(1, keepdim=True)
    return out
