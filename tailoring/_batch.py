"""What is known of a batch of queries before, during and after its tailoring."""

from __future__ import annotations

import cmath
import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from ._casts import Site
from ._inner import Moment
from ._places import Asked, Places
from ._reuse import Reuse
from ._states import State, is_small, where
from ._trees import first_tensor, has_fractions, map_tensors, repeat_rows, take_rows, tensors


@dataclass(frozen=True)
class Trace:
    """What happened to each query of a batch."""

    prediction: Any
    losses: Tensor  # (steps + 1, queries): the tailoring loss before the first step and after each
    steps: Tensor  # (queries,): the steps taken by the state that answered
    stopped: Tensor  # (queries,): its loss came down to `stop`
    failed: Tensor  # (queries,): not finite on the way, so answered untailored
    state: State
    sites: tuple[Site, ...]
    ran_once: tuple[str, ...] = ()  # modules below the first adapted one that were not run again at each step

    def __str__(self) -> str:
        curve = " ".join(f"{value:.4g}" for value in self.losses.double().mean(1).tolist())
        places = ", ".join(dict.fromkeys(site.key or "the output" for site in self.sites))
        once = ", ".join(name or "all of it" for name in self.ran_once) or "nothing"
        return (
            f"{self.losses.shape[1]} queries, mean tailoring loss by step: {curve}\n"
            f"mean steps of the answer {self.steps.double().mean():.2f}, stopped early {int(self.stopped.sum())}, "
            f"fell back {int(self.failed.sum())}\nadapted: {places}\nof the model, run once for all steps: {once}"
        )


class Batch(NamedTuple):
    """A batch of queries on its way through the inner loop."""

    x: Any
    queries: int
    places: Places
    seeds: Tensor | None = None
    start: State | None = None  # a warm start
    reuse: Reuse | None = None
    rescued: bool = False  # answered untailored, too, in case the tailored answer fails

    @property
    def sites(self) -> tuple[Site, ...]:
        return self.places.sited.sites

    def part(self, rows: Tensor, total: int) -> Batch:
        """The queries that these rows of a state serve, of `total` rows that serve equally many each; nothing is asked or kept of it."""
        each = self.queries // total
        own = rows if each == 1 else (rows[:, None] * each + torch.arange(each, device=rows.device)).flatten()
        x, seeds = take_rows((self.x, self.seeds), own)
        places = self.places._replace(asked=Asked(leaves_query=True, keeps_apart=True))
        return Batch(x, len(own), places, seeds)


class Starts:
    """The identity that the last batch started from, kept for the next one like it: a twentieth of a small model's step.

    For loops that neither change their start nor hand it on. Kept are small ones on a CPU: a GPU's streams would have to wait for it.
    """

    def __init__(self) -> None:
        self._last: tuple[Places, int, State] | None = None

    def kept_for(self, batch: Batch) -> State | None:
        if self._last is None:
            return None
        places, queries, state = self._last
        return state if places is batch.places and queries == batch.queries and first_tensor(batch.x).is_cpu else None

    def keep(self, batch: Batch, state: State) -> None:
        if first_tensor(batch.x).is_cpu and is_small(state.values()):
            self._last = batch.places, batch.queries, state


@dataclass(frozen=True)
class Fit:
    state: State
    steps: Tensor
    stopped: Tensor
    failed: Tensor
    losses: list[Tensor]


def better(best: tuple[Tensor, State, Tensor] | None, values: Tensor, moment: Moment) -> tuple[Tensor, State, Tensor]:
    """The best (losses, state, steps) so far, given the losses at one more moment."""
    if best is None:
        return values, moment.state, moment.taken
    wins = values < best[0]
    return torch.where(wins, values, best[0]), where(wins, moment.state, best[1]), torch.where(wins, moment.taken, best[2])


def all_finite(out: Any) -> bool:
    """Surely so if it says so: a sum may overflow."""
    return all([cmath.isfinite(t.sum().item()) for t in tensors(out) if has_fractions(t)])  # noqa: C419 - a list takes less time


def finite_rows(out: Any, rows: int, dimensions: Mapping[int, int | None]) -> Tensor:
    """(rows,): whether all numbers of the row are finite, in all tensors that have rows; `dimensions` says where."""
    found = [(t.detach(), dim) for t, dim in _with_dimensions(out, dimensions) if dim is not None and has_fractions(t)]
    checks = [t.movedim(dim, 0).reshape(rows, -1).isfinite().all(1) for t, dim in found if t.shape[dim] % rows == 0]
    return torch.stack(checks).all(0) if checks else torch.ones(rows, dtype=torch.bool, device=first_tensor(out).device)


def rows_where(rows: Tensor, yes: Any, no: Any, dimensions: Mapping[int, int | None]) -> Any:
    """The `rows` of `yes`, and the others of `no`, in all tensors, each of which has rows, those of a query in a row."""
    pairs = iter(zip(tensors(no), _with_dimensions(yes, dimensions), strict=True))

    def choose(t: Tensor) -> Tensor:
        instead, (_, dim) = next(pairs)
        assert dim is not None
        mask = repeat_rows(rows, t.shape[dim] // len(rows)).view([-1 if d == dim else 1 for d in range(t.ndim)])
        return torch.where(mask, t, instead)

    return map_tensors(choose, yes)


def _with_dimensions(out: Any, dimensions: Mapping[int, int | None]) -> list[tuple[Tensor, int | None]]:
    return [(t, dimensions.get(place, 0) if t.ndim else None) for place, t in enumerate(tensors(out))]


def in_inference_mode() -> bool:
    """Never while dynamo looks, which leaves its graph at the question."""
    return not is_dynamo_compiling() and torch.is_inference_mode_enabled()


def leaves_inference_mode(method: Callable[..., Any]) -> Callable[..., Any]:
    """Inference tensors cannot take part in the inner gradients, so leave that mode and clone them."""
    kinds = [p.kind for p in inspect.signature(method).parameters.values()]
    most = math.inf if inspect.Parameter.VAR_POSITIONAL in kinds else kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD) - 1

    @functools.wraps(method)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) > most:
            raise TypeError(f"{method.__name__} takes all inputs of the model as one, Inputs(ids, mask=mask), not one by one")
        if not in_inference_mode():
            return method(self, *args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            args, kwargs = map_tensors(lambda t: t.clone() if t.is_inference() else t, (args, kwargs))
            return method(self, *args, **kwargs)

    return wrapped
