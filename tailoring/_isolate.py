"""Finding the queries for which a model or a loss raises, once a step has moved them: a bad query harms only itself."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

_TRIES = 512  # parts of a batch that are run; where these do not tell, something else is wrong
_BY_NUMBERS = (ValueError, ArithmeticError, AssertionError, IndexError, RuntimeError)  # what a query's own may bring about


def _may_be_of_some(error: Exception) -> bool:
    """Whether some queries' numbers may have raised it. Mistakes in the code, too little memory, a checkpoint's control flow have not."""
    return isinstance(error, _BY_NUMBERS) and not isinstance(error, NotImplementedError | torch.OutOfMemoryError)


def rows_that_run(error: Exception, run: Callable[[Tensor], object], rows: int, device: torch.device) -> Tensor:
    """Those of a batch that raised `error` for which `run(rows)` raises nothing, found by halving. If that is all of them, so does this."""
    if not _may_be_of_some(error):
        raise error
    left = list(torch.arange(rows, device=device).chunk(2))
    fine = [left[0][:0]]
    for _ in range(_TRIES):
        if not left:
            break
        part = left.pop()
        try:
            run(part)
            fine.append(part)
        except Exception:
            left += part.chunk(2) if len(part) > 1 else ()
    found = torch.cat(fine).sort().values
    if left or len(found) == rows:
        raise error
    told = f"{type(error).__name__}: {error}".splitlines()[0]
    warnings.warn(
        f"{rows - len(found)} of {rows} queries are answered untailored: after a step their loss or model raised {told}", stacklevel=2
    )
    return found
