"""The inner loop on one batch of queries."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from . import _entries as entries
from . import _states as states
from ._apart import UnfitLossError
from ._batch import Batch
from ._inner import Backprop, Keep, Moment, descend, hurry
from ._isolate import infinite_elsewhere, told_apart
from ._kernels import may_look
from ._losing import Losing
from ._optimisers import Descent, Rule
from ._places import Places
from ._recompute import recomputed
from ._states import State, compact, device_of, is_small, rows_of, where
from ._trees import count_rows, first_other, first_tensor, take_rows, tensors, versions
from ._untouched import untouched
from ._validate import refuse_mixing_modules

_TRANSFORMED = (
    "tailoring: torch.func cannot transform a Tailored, which differentiates by torch.autograd itself. torch.autograd.grad and backward() "
    "go through it, by its weights and by its inputs"
)


def _freed(state: State) -> list[bool]:
    """Empty until a backward pass comes by that frees the graph on its way."""
    found: list[bool] = []

    def note(_: Tensor) -> None:
        if not torch._C._autograd._get_current_graph_task_keep_graph():  # pyright: ignore[reportAttributeAccessIssue]
            found.append(True)

    for entry in states.numbers(state):
        if entry.requires_grad and not entry.is_leaf:
            entry.register_hook(note)
    return found


class Fitting(Losing):
    """The part of `Tailored` that fits a state to a `Batch`; the settings are told there."""

    rule: Rule
    steps: int
    backprop: Backprop
    recompute: bool
    keep: Keep
    stop: float | None
    chunk: int | None
    _starts: Starts

    @property
    def _is_plain(self) -> bool:
        """Plain gradient descent: what fails stays so, hence all numbers can be looked at in the end."""
        return isinstance(self.rule, Descent) and self.rule.is_plain and self.keep == "last" and self.stop is None

    def _moments(self, batch: Batch, only_last: bool = False) -> Iterator[Moment]:
        """The inner loop on a batch, watching that nothing it still needs is changed between two steps."""
        rows = self.adapt.rows(batch.queries)
        start = self._identity(batch, rows) if batch.start is None else batch.start  # first: a learned start has its shape from then on
        needed = self._needed_unchanged()
        before = versions(needed)
        learned = batch.start is None and self.tailoring.wants_start  # then it may train between two steps, and is asked for afresh
        loop = descend(
            functools.partial(self._gradient, batch),
            lambda: self._identity(batch, rows) if learned else start,
            self.rule,
            steps=self.steps,
            backprop=self.backprop,
            stop=self.stop,
            home=None if batch.start is None else self._identity(batch, rows),
            only_last=only_last,
        )
        for taken, moment in enumerate(loop):
            freed = _freed(moment.state) if needed else []
            yield moment
            changed = before != versions(needed)
            if taken < self.steps and (changed or freed):
                what = "weights changed" if changed else "backward() freed the graph"
                raise RuntimeError(
                    f"{what} between two inner steps, but later losses still need the graph of the earlier steps "
                    "(backprop='all', or a learned lr): sum the outer losses, call backward() once, then step"
                )

    def _needed_unchanged(self) -> list[Tensor]:
        if is_dynamo_compiling() or not torch.is_grad_enabled():
            return []
        learned = self.rule.learned if isinstance(self.rule, Descent) else []
        return [*self.parameters(), *learned] if self.backprop == "all" else learned

    def _gradient(self, batch: Batch, state: State, rows: Tensor | None, step: int, graph: bool) -> tuple[Tensor, State]:
        batch = batch if rows is None else batch.part(rows, self.adapt.rows(batch.queries))
        if batch.reuse is not None and step == 0 and is_dynamo_compiling():
            with torch.no_grad():  # nothing made inside torch.func.grad may leave it; all else of this pass is dead code
                self._losses(batch, step, state, keep=True)
        evaluate = functools.partial(self._losses, batch, step)
        compute = functools.partial(self.adapt.gradient, evaluate, batch.places.sited.sites, state, (step, self.steps), graph)
        try:
            return self._keeping_little(compute, batch, state) if self.recompute else compute()
        except RuntimeError as error:
            if "functorch transform" in str(error):
                error.add_note(_TRANSFORMED)
            raise

    def _keeping_little(self, compute: Callable[[], tuple[Any, Any]], batch: Batch, state: State) -> tuple[Any, Any]:
        """`compute()`; with `recompute`, its graph keeps no activations. (A compiler decides itself what to keep.)"""
        if not self.recompute or not torch.is_grad_enabled() or is_dynamo_compiling():
            return compute()
        return recomputed(compute, lambda: [*self.parameters(), *self.buffers(), *tensors((batch.x, batch.seeds))], device_of(state))

    def _try_loss(self, x: Any, places: Places) -> None:
        """The loss of two queries, or of all if it wants more, once for compiled code, in which no value can be looked at."""
        asked = places.asked
        if asked.looks or asked.fails or self.adapt.shared:
            return
        other = first_other(x)
        if other is None or self._mixes_by_itself():
            return  # asked another time, or refused when it is called
        for some in (take_rows(x, torch.tensor([0, other])), x):
            batch = Batch(some, count_rows(some), places)
            start = self._identity(batch, batch.queries)  # first: a learned start has its shape from then on
            with untouched(self):  # the loss may have buffers, too
                try:
                    self._gradient(batch, start, None, 0, False)
                    return
                except UnfitLossError:
                    raise
                except Exception:  # to be raised when it is called
                    asked.fails = some is x

    def _mixes_by_itself(self) -> bool:
        try:
            refuse_mixing_modules(self.net)
        except ValueError:
            return True
        return False

    def _fitted(self, batch: Batch) -> State:
        first_order = self.backprop == "none" or not torch.is_grad_enabled()
        if self.steps > 0 and self._is_plain and first_order and may_look() and isinstance(self.rule, Descent):
            kept = batch.start if batch.start is not None else self._starts.kept_for(batch)
            start = self._identity(batch, self.adapt.rows(batch.queries)) if kept is None else kept
            warm = batch.start is not None
            state = hurry(functools.partial(self._gradient, batch), start, self.rule.rates, self.steps, moved=warm)
            if state is not None:
                if kept is None and self.adapt.constant_start and not self.tailoring.wants_start:
                    self._starts.keep(batch, start)  # now, that it is known to be sound
                if self.adapt.outer_products:  # one after another: all factors twice would be the most memory of all
                    state = {name: entries.compact(state.pop(name)) for name in tuple(state)}
                return state
        return self._fit(batch).state

    def _fit(self, batch: Batch, record: bool = False) -> Fit:
        best: tuple[Tensor, State, Tensor] | None = None
        before: Moment | None = None
        losses: list[Tensor] = []
        for moment in self._moments(batch, only_last=self.keep == "last" and self.stop is None):
            if before is not None and moment.values is not None:
                losses.append(moment.values)
                best = better(best, moment.values, before) if self.keep == "best" else None
            before = moment
            early = self.stop is not None and self.chunk is None and may_look()  # all chunks take as many steps
            if early and bool((moment.stopped | moment.failed).all()):
                break
        assert before is not None
        state, steps = before.state, before.taken
        if record or self.keep == "best":
            with torch.set_grad_enabled(not is_dynamo_compiling()):  # a loss may differentiate the model, as at every step
                values = self._last_losses(batch, state)
            losses += [values] * (self.steps + 1 - len(losses))
            if self.keep == "best":
                _, state, steps = better(best, torch.where(values.isnan(), torch.inf, values), before)
                state = where(~before.failed, state, before.state)  # what failed is home in `before`
                steps = torch.where(before.failed, 0, steps)
        return Fit(compact(state), steps, before.stopped, before.failed, losses)

    def _last_losses(self, batch: Batch, state: State) -> Tensor:
        """The losses after the last step, infinite where the loss refuses what that has led to."""

        def of(rows: Tensor, some: State) -> Tensor:
            return self._losses(batch.part(rows, rows_of(state)), self.steps, some).detach()

        try:
            return self._losses(batch, self.steps, state).detach()
        except Exception as error:
            rows = told_apart(error, of, state, moved=self.steps > 0)
        values = of(rows, states.take(state, rows)) if len(rows) else None
        return infinite_elsewhere(values, rows, rows_of(state))


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
