"""Finding the queries for which a model or a loss raises, once a step has moved them: a bad query harms only itself."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from ._kernels import may_look
from ._states import State, device_of, rows_of, take

Found = TypeVar("Found")
_TRIES = 512  # parts of a batch that are run; where these do not tell, something else is wrong
_BY_NUMBERS = (ValueError, ArithmeticError, AssertionError, IndexError, RuntimeError)  # what a query's own may bring about


def run_apart(run: Callable[[Tensor | None, State], Found], state: State, *, moved: bool) -> tuple[Found | None, Tensor | None]:
    """`run(None, state)`, of all rows. If that raises, `run(rows, their state)` of those rows that raise nothing, and which these are.

    What is raised before a step has `moved` the state is the user's mistake.
    """
    try:
        return run(None, state), None
    except Exception as error:
        if not moved or not may_look():
            raise
        rows = rows_that_run(error, run, state)
    return (run(rows, take(state, rows)) if len(rows) else None), rows


def rows_that_run(error: Exception, run: Callable[[Tensor, State], object], state: State) -> Tensor:
    """The rows of a batch that raised `error` for which `run` raises nothing, found by halving. If that is all of them, so does this."""
    if not _may_be_of_some(error):
        raise error
    total = rows_of(state)
    left = list(torch.arange(total, device=device_of(state)).chunk(2))
    fine = [left[0][:0]]
    for _ in range(_TRIES):
        if not left:
            break
        rows = left.pop()
        try:
            run(rows, take(state, rows))
            fine.append(rows)
        except Exception:
            left += rows.chunk(2) if len(rows) > 1 else ()
    found = torch.cat(fine).sort().values
    if left or len(found) == total:
        raise error
    told = f"{type(error).__name__}: {error}".splitlines()[0]
    warnings.warn(
        f"{total - len(found)} of {total} queries are answered untailored: after a step their loss or model raised {told}", stacklevel=2
    )
    return found


def infinite_elsewhere(values: Tensor | None, rows: Tensor, total: int) -> Tensor:
    """(total,): the values at their rows, if there are any; infinite elsewhere."""
    if values is None:
        return torch.full((total,), torch.inf, device=rows.device)
    return values.new_full((total,), torch.inf).index_copy(0, rows, values)


def _may_be_of_some(error: Exception) -> bool:
    """Whether some queries' numbers may have raised it. Mistakes in the code, too little memory, a checkpoint's control flow have not."""
    return isinstance(error, _BY_NUMBERS) and not isinstance(error, NotImplementedError | torch.OutOfMemoryError)
