"""Does a tailoring loss keep the queries apart? Its own graph tells."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ._trees import first_other


class UnfitLossError(ValueError):
    """A loss that would make wrong answers."""


class MixingError(UnfitLossError):
    """A loss that does not keep the queries apart."""

    def __init__(self, loss: str):
        super().__init__(
            f"the tailoring loss {loss} makes one query's value depend on another query's state: let it, and what the model answers, "
            "depend on its own rows only. If it gives the model several rows of each query, these must follow each other: "
            "torch.stack([x, -x], 1).flatten(0, 1) or x.repeat_interleave(k, 0), not torch.cat([x, -x])"
        )


def all_cuts(queries: int) -> range:
    """The queries are cut in two by each bit of their numbers, so any two of them are apart in one of the cuts."""
    return range((queries - 1).bit_length())


def are_apart(losses: Tensor, adapted: list[Tensor], x: Any, cuts: Iterable[int]) -> bool | None:
    """Whether no query's loss has a gradient in the rows of one beyond a cut, of all that is adapted; None if these cannot tell."""
    if first_other(x) is None:
        return None  # a mean over queries that are alike has no gradient
    rows = torch.arange(len(losses), device=losses.device)
    for bit in cuts:
        half = (rows >> bit) % 2 == 0
        for own, others in ((half, ~half), (~half, half)):
            # not of losses[own], which would save an index where a checkpoint counts what is saved
            grads = torch.autograd.grad(losses, adapted, own.to(losses.dtype), retain_graph=True, allow_unused=True)
            found = [_sizes(g) for g in grads if g is not None]
            if not all(bool(sizes.isfinite().all()) for sizes in found):
                return None
            inside = [float(sizes[own.to(sizes.device)].max()) for sizes in found]
            beyond = [float(sizes[others.to(sizes.device)].max()) for sizes in found]
            if any(b > _rounding(g, len(losses)) * i for b, i, g in zip(beyond, inside, (g for g in grads if g is not None), strict=True)):
                return False
            if not any(inside):
                return None  # a head that begins at zero, say, lets nothing through
    return True


def _sizes(g: Tensor) -> Tensor:
    """(rows,): the largest number of each."""
    return g.reshape(len(g), -1).abs().amax(1)


def _rounding(g: Tensor, queries: int) -> float:
    """A part of the gradient that may be left of what cancels (the batch's largest value, subtracted before `exp` and added again).

    What is left of all queries meets in the row of the largest one: measured, 1.2 eps for each. A mean over 16,384 queries gives 3e-3.
    """
    return min(2 * queries * torch.finfo(g.dtype).eps, 1e-3)
