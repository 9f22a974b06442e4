"""The inner loop on one batch of queries."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from . import _states as states
from ._adapt import Adapter
from ._apart import MixingError, UnfitLossError, are_apart
from ._batch import Batch, Fit, Starts, better
from ._bound import Bound
from ._inner import Backprop, Keep, Moment, descend, hurry
from ._isolate import infinite_elsewhere, run_apart
from ._kernels import may_look
from ._optimisers import Descent, Rule
from ._places import Places, Placing
from ._recompute import recomputed
from ._reuse import Reuse
from ._sites import Reading
from ._states import State, compact, device_of, rows_of, where
from ._trees import as_call, first_other, take_rows, tensors, told, versions
from ._untouched import untouched
from ._validate import check_losses, refuse_mixing_modules

Loss = Callable[..., Tensor]  # loss(model, x) -> (queries,)


_CALLED = (
    "The tailoring loss {!r} was called as loss(model, x), with the adapted model and {}; it gets no labels and no prediction, and sets no "
    "attribute of the model"
)
_TRANSFORMED = (
    "tailoring: torch.func cannot transform a Tailored, which differentiates by torch.autograd itself. torch.autograd.grad and backward() "
    "go through it, by its weights and by its inputs"
)
_CHANGES = (
    "the tailoring loss {} changes the query in place (x[...] = ..., x += ...), so every step, and the answer, would see another one: let "
    "it make a new tensor"
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


class Fitting(Placing):
    """The part of `Tailored` that fits a state to a `Batch`; the settings are told there."""

    adapt: Adapter
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

    @property
    def loss(self) -> Loss:
        return self.tailoring.loss

    @property
    def _name_of_loss(self) -> str:
        return getattr(self.loss, "__name__", type(self.loss).__name__)

    def _identity(self, batch: Batch, rows: int) -> State:
        """The state that answers as an untailored model does: the adapter's identity, or the learned start."""
        learned, device = self.tailoring, tensors(batch.x)[0].device
        state = self.adapt.init(self.net, batch.places.sited.sites, rows, device)
        if not learned.wants_start:
            return state
        if not learned.start:
            learned.set_start(self.adapt.init(self.net, batch.places.sited.sites, 1, device))
        return learned.start_for(rows, state)

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

    def _losses(self, batch: Batch, step: int, state: State, taps: Any = None, keep: bool | None = None) -> Tensor:
        """The tailoring loss for each row of the state."""
        x, reuse = batch.x, batch.reuse
        compiling = is_dynamo_compiling()
        keep = reuse is not None and not compiling if keep is None else keep
        run = functools.partial(self._call, batch, state, reuse, keep, taps)
        args, kwargs = as_call(x)
        once = None if reuse is None else functools.partial(reuse.once, keep=keep)
        if reuse is not None:
            reuse.begin()
        with batch.places.kernels or self._plain_kernels():
            bound = Bound(self.net, run, x, batch.seeds, step, keep=once, shares=batch.rescued)
            model = self.adapt.bind(bound)
            if compiling:
                losses = self.loss(model, *args, **kwargs)
            else:
                asked = batch.places.asked
                before = None if asked.leaves_query else versions(x)
                try:
                    losses = self.loss(model, *args, **kwargs)
                except (TypeError, AttributeError) as error:  # how one looks that was written for other arguments
                    error.add_note(_CALLED.format(self._name_of_loss, told(x)))
                    raise
                if before is not None and before != versions(x):
                    raise UnfitLossError(_CHANGES.format(self._name_of_loss))
                asked.leaves_query = True
        check_losses(losses, batch.queries)
        unknown = batch.queries > 1 and not compiling and not batch.places.asked.keeps_apart
        if unknown and losses.requires_grad and may_look():
            self._ask_whether_apart(batch, losses, state, taps)
        return self.adapt.reduce(losses)

    def _try_loss(self, x: Any, places: Places) -> None:
        """The loss of two queries, once for compiled code, in which no value can be looked at."""
        if places.asked.keeps_apart or places.asked.fails_in_two or self.adapt.shared:
            return
        other = first_other(x)
        if other is None or self._mixes_by_itself():
            return  # asked another time, or refused when it is called
        pair = Batch(take_rows(x, torch.tensor([0, other])), 2, places)
        start = self._identity(pair, self.adapt.rows(2))  # first: a learned start has its shape from then on
        with untouched(self):  # the loss may have buffers, too
            try:
                self._gradient(pair, start, None, 0, False)
            except UnfitLossError:
                raise
            except Exception:
                places.asked.fails_in_two = True

    def _mixes_by_itself(self) -> bool:
        try:
            refuse_mixing_modules(self.net)
        except ValueError:
            return True
        return False

    def _ask_whether_apart(self, batch: Batch, losses: Tensor, state: State, taps: Any) -> None:
        """Raise if one query's loss depends on another's state. Asked once for each kind of input."""
        adapted = [t for t in (*states.numbers(state), *getattr(taps, "outs", ())) if t.requires_grad]
        if self.adapt.shared or not adapted:
            return  # they share a state; or it is only asked how large the loss is
        apart = are_apart(losses, adapted, batch.x)
        if apart is False:
            raise MixingError(self._name_of_loss)
        batch.places.asked.keeps_apart = apart is True

    def _call(
        self, batch: Batch, state: State, reuse: Reuse | None, keep: bool, taps: Any, reading: Reading, args: Any, kwargs: Any
    ) -> Any:
        """A reading of the model as adapted by the state."""
        if reuse is None:
            return self.adapt.call(batch.places.sited, state, reading, args, kwargs, taps)
        with reuse.serving(keep=keep):
            return self.adapt.call(batch.places.sited, state, reading, args, kwargs, taps)

    def _fitted(self, batch: Batch) -> State:
        first_order = self.backprop == "none" or not torch.is_grad_enabled()
        if self.steps > 0 and self._is_plain and first_order and may_look() and isinstance(self.rule, Descent):
            kept = batch.start if batch.start is not None else self._starts.kept_for(batch)
            start = self._identity(batch, self.adapt.rows(batch.queries)) if kept is None else kept
            state = hurry(functools.partial(self._gradient, batch), start, self.rule.rates, self.steps)
            if state is not None:
                if kept is None and self.adapt.constant_start and not self.tailoring.wants_start:
                    self._starts.keep(batch, start)  # now, that it is known to be sound
                return compact(state) if self.adapt.outer_products else state
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

        before = state

        def run(rows: Tensor | None, state: State) -> Tensor:
            part = batch if rows is None else batch.part(rows, rows_of(before))
            return self._losses(part, self.steps, state).detach()

        values, rows = run_apart(run, state, moved=self.steps > 0)
        if rows is None:
            assert values is not None
            return values
        return infinite_elsewhere(values, rows, rows_of(state))
