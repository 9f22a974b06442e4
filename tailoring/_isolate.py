"""Finding the queries for which a model or a loss raises, once a step has moved them: a bad query harms only itself."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from ._apart import UnfitLossError
from ._kernels import may_look
from ._states import State, device_of, rows_of, take

_TRIES = 512  # parts of a batch in which there must be a query that runs; else something else is wrong
_BY_NUMBERS = (ValueError, ArithmeticError, AssertionError, IndexError, RuntimeError)  # what a query's own may bring about


def told_apart(error: Exception, run: Callable[[Tensor, State], object], state: State, *, moved: bool) -> Tensor:
    """The rows that can go on without those that raised `error`, of which a warning tells.

    What is raised before a step has `moved` the state is the user's mistake, and so is what `rows_that_run` cannot blame on some rows.
    """
    if not moved or not may_look():
        raise error
    rows, total = rows_that_run(error, run, state), rows_of(state)
    told = f"{type(error).__name__}: {error}".splitlines()[0]
    whose = f"{total - len(rows)} of {total} queries are" if len(rows) else "the whole batch is"
    warnings.warn(f"{whose} answered untailored: after a step the loss or the model raised {told}", stacklevel=2)
    return rows


def rows_that_run(error: Exception, run: Callable[[Tensor, State], object], state: State) -> Tensor:
    """The rows of a batch that raised `error` for which `run` raises nothing, found by halving. If that is all of them, so does this.

    They are halved in a fixed disorder: if no query runs of some hundreds that come from everywhere, none does.
    """
    if not may_be_of_some(error):
        raise error
    total = rows_of(state)
    everyone = torch.randperm(total, generator=torch.Generator().manual_seed(0)).to(device_of(state))
    left = list(everyone.chunk(2))
    fine = [everyone[:0]]
    tries = 0
    while left:
        if (tries := tries + 1) > _TRIES and len(fine) == 1:
            error.add_note(f"tailoring: after a step it is raised by every query of {_TRIES} parts of the batch that were tried")
            raise error
        rows = left.pop()
        try:
            run(rows, take(state, rows))
            fine.append(rows)
        except Exception:
            left += rows.chunk(2) if len(rows) > 1 else ()
    found = torch.cat(fine).sort().values
    if len(found) == total:
        raise error
    return found


def infinite_elsewhere(values: Tensor | None, rows: Tensor, total: int) -> Tensor:
    """(total,): the values at their rows, if there are any; infinite elsewhere."""
    if values is None:
        return torch.full((total,), torch.inf, device=rows.device)
    return values.new_full((total,), torch.inf).index_copy(0, rows, values)


def may_be_of_some(error: Exception) -> bool:
    """Whether some queries' numbers may have raised it. Mistakes in the code, too little memory, a checkpoint's control flow have not."""
    return isinstance(error, _BY_NUMBERS) and not isinstance(error, NotImplementedError | torch.OutOfMemoryError | UnfitLossError)
