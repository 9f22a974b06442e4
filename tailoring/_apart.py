"""Does a tailoring loss keep the queries apart? Its own graph tells."""

from __future__ import annotations

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


def are_apart(losses: Tensor, adapted: list[Tensor], x: Any) -> bool | None:
    """Whether no query's loss has a gradient in another's rows of what is adapted; None if these queries cannot tell.

    The queries are cut in two by each bit of their numbers, so any two of them are apart in one of the cuts.
    """
    if first_other(x) is None:
        return None  # a mean over queries that are alike has no gradient
    rows = torch.arange(len(losses), device=losses.device)
    for bit in range((len(losses) - 1).bit_length()):
        half = (rows >> bit) % 2 == 0
        for own, others in ((half, ~half), (~half, half)):
            # not of losses[own], which would save an index where a checkpoint counts what is saved
            grads = torch.autograd.grad(losses, adapted, own.to(losses.dtype), retain_graph=True, allow_unused=True)
            found = [g for g in grads if g is not None]
            if not all(bool(g.isfinite().all()) for g in found):
                return None
            if any(bool((g.reshape(len(g), -1) != 0).any(1)[others.to(g.device)].any()) for g in found):
                return False
    return True
