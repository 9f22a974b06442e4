"""What the user's model and loss say of a batch of queries that are adapted by a state."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.compiler import is_dynamo_compiling

from . import _states as states
from ._adapt import Adapter
from ._adapted import AdaptedModel
from ._apart import MixingError, UnfitLossError, all_cuts, are_apart
from ._batch import Batch
from ._kernels import may_look
from ._places import Placing
from ._sites import Reading
from ._states import State
from ._trees import as_call, tensors, told, versions
from ._validate import check_losses

TailoringLoss = Callable[..., Tensor]  # loss(model, x) -> (queries,)

_CALLED = (
    "The tailoring loss {!r} was called as loss(model, x), with the adapted model and {}; it gets no labels and no prediction, and sets no "
    "attribute of the model"
)
_CHANGES = (
    "the tailoring loss {} changes the query in place (x[...] = ..., x += ...), so every step, and the answer, would see another one: let "
    "it make a new tensor"
)
_UNSEEN = (
    "the tailoring loss {} uses the weight {!r} otherwise than by a call of its module (in a method, or a part that borrows it), where no "
    "query's own weights go: let it call the module, adapt with Weights(how='vmap'), or leave that weight out; what is to stay the plain "
    "model's (an anchor) belongs under torch.no_grad()"
)
_LOOKS = 8  # passes that are looked at


class Losing(Placing):
    """The part of `Tailored` that asks the loss, and runs the model, with a state."""

    adapt: Adapter

    @property
    def loss(self) -> TailoringLoss:
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

    def _losses(self, batch: Batch, step: int, state: State, taps: Any = None, keep: bool = False) -> Tensor:
        """The tailoring loss for each row of the state. (What all steps have in common compiled code must `keep` in a pass apart.)"""
        keep = batch.reuse is not None and (keep or not is_dynamo_compiling())
        run = functools.partial(self._call, batch, state, keep, taps)
        once = None
        if batch.reuse is not None:
            once = functools.partial(batch.reuse.once, keep=keep)
            batch.reuse.begin()
        with batch.places.kernels or self._plain_kernels():
            bound = AdaptedModel(self.net, run, batch.x, batch.seeds, step, keep=once, shares=batch.rescued)
            losses = self._ask(self.adapt.bind(bound), batch)
        check_losses(losses, batch.queries)
        asked = batch.places.asked
        known = asked.enough or (asked.sees_weights and batch.queries == 1)
        if not known and losses.requires_grad and may_look():
            self._look_at_graph(batch, losses, state, taps)
        return self.adapt.reduce(losses)

    def _ask(self, model: Any, batch: Batch) -> Tensor:
        """What the user's loss says; it must leave the query as it is."""
        args, kwargs = as_call(batch.x)
        if is_dynamo_compiling():
            return self.loss(model, *args, **kwargs)
        before = versions(batch.x)
        try:
            losses = self.loss(model, *args, **kwargs)
        except (TypeError, AttributeError) as error:  # how one looks that was written for other arguments
            error.add_note(_CALLED.format(self._name_of_loss, told(batch.x)))
            raise
        if before != versions(batch.x):
            raise UnfitLossError(_CHANGES.format(self._name_of_loss))
        return losses

    def _look_at_graph(self, batch: Batch, losses: Tensor, state: State, taps: Any) -> None:
        """Raise if one query's loss depends on another's state, or uses a weight where the adapter does not see it.

        Asked of the first passes for each kind of input: thoroughly once, then by one cut each, since a term may be zero at first.
        """
        asked = batch.places.asked
        adapted = [t for t in (*states.numbers(state), *getattr(taps, "outs", ())) if t.requires_grad]
        if not adapted:
            return  # it is only asked how large the loss is
        upstream = [*tensors(batch.x), *states.numbers(state)]
        if not asked.sees_weights and all(t.grad_fn is None for t in upstream):  # else the weights' gradient may come by another way
            unseen, asked.sees_weights = self.adapt.unseen_weight(self.net, losses, state, taps)
            if unseen is not None:
                raise UnfitLossError(_UNSEEN.format(self._name_of_loss, unseen))
        if self.adapt.shared or batch.queries == 1 or asked.looks >= _LOOKS:
            return
        cuts = all_cuts(batch.queries)
        apart = are_apart(losses, adapted, batch.x, cuts if asked.looks == 0 else [asked.looks % len(cuts)])
        if apart is False:
            raise MixingError(self._name_of_loss)
        asked.looks += apart is True
        asked.enough = asked.sees_weights and asked.looks >= _LOOKS

    def _call(self, batch: Batch, state: State, keep: bool, taps: Any, reading: Reading, args: Any, kwargs: Any) -> Any:
        """A reading of the model as adapted by the state."""
        if batch.reuse is None:
            return self.adapt.call(batch.places.sited, state, reading, args, kwargs, taps)
        with batch.reuse.serving(keep=keep):
            return self.adapt.call(batch.places.sited, state, reading, args, kwargs, taps)
