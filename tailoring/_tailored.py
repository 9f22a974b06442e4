"""`Tailored`: a model that looks at each query before it answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from . import _states as states
from ._adapt import CN, Adapter
from ._adapted import AdaptedModel
from ._answering import answer_is_finite
from ._batch import Batch, Trace
from ._compiled import Compiled
from ._compiling import Compiling
from ._fitting import Starts
from ._inner import Backprop, Keep
from ._kernels import Structure, may_look
from ._learned import Learned
from ._losing import TailoringLoss
from ._modes import in_inference_mode, leaves_inference_mode
from ._optimisers import LBFGS, Descent, Functional, Rates
from ._sites import Reading, alone
from ._states import State, compact
from ._trees import Inputs, cat_rows, count_rows, model_call
from ._validate import check_rule, check_settings, check_state


class Tailored(Compiling):
    """A model that minimises `loss` on each query, with parameters of the query's own, before it answers.

        state = adapt.init(...)                           # the model as it is
        state = state - lr * grad(sum_i loss_i)(state)    # `steps` times; each row depends on its own query only
        y     = adapt.call(net, state, x)

    `loss(model, x) -> (queries,)` sees the adapted model and no labels; its values are summed over the queries, never averaged.

    adapt      which tensors move: `CN` (default), `Weights`, `Shift`, or one of `tailoring.baselines`
    lr         a number (1e-3), one per step, a tensor (an `nn.Parameter` trains with the model), or a dict of these by name
    momentum, clip, proximal   of the inner gradient descent, see `Descent`
    optimizer  in place of all these: `LBFGS`, or any with `init(params)` and `update(grads, state)`
    backprop   which inner gradients an outer gradient differentiates: "none" (first order), "last" (WarpGrad's), "all"
    recompute  with "all", compute each inner step again in the backward pass instead of keeping its activations (checkpointing)
    keep       answer with the "last" state or with the "best" one seen (by each query's own tailoring loss)
    stop       a query whose tailoring loss is at most this stops moving
    chunk      how many queries to tailor at once, for batches that do not fit the memory
    compile    answer (without gradients) by compiled programs, CUDA graphs included; or options of `torch.compile`

    `parameters()` and `state_dict()` are the model's own, under its own names; what else trains in the outer loop (a learned start,
    a learned `lr`, the parameters of a loss) follows under `tailoring.`.
    """

    def __init__(
        self,
        net: nn.Module,
        loss: TailoringLoss,
        *,
        adapt: Adapter | None = None,
        steps: int = 1,
        lr: Rates | None = None,
        momentum: float = 0.0,
        clip: float | None = None,
        proximal: float = 0.0,
        optimizer: Any = None,
        backprop: Backprop = "none",
        recompute: bool = False,
        keep: Keep = "last",
        stop: float | None = None,
        chunk: int | None = None,
        compile: bool | Mapping[str, Any] = False,
    ):
        super().__init__(net)
        self.adapt: Adapter = CN() if adapt is None else adapt
        settings = {"adapt": self.adapt, "steps": steps, "backprop": backprop, "keep": keep, "stop": stop, "chunk": chunk}
        check_settings(net, loss, **settings, compile=compile)
        self.training = net.training  # what is made of a model in eval mode is in eval mode, too
        if optimizer is not None and (lr is not None or (momentum, clip, proximal) != (0.0, None, 0.0)):
            raise ValueError(f"lr, momentum, clip and proximal are gradient descent's; {optimizer!r} in its place has settings of its own")
        if optimizer is None:
            optimizer = Descent(1e-3 if lr is None else lr, momentum=momentum, clip=clip, proximal=proximal)
        self.rule = optimizer if isinstance(optimizer, Descent | LBFGS) else Functional(optimizer)
        check_rule(self.rule, **settings, recompute=recompute)
        self.backprop: Backprop = backprop
        self.recompute = recompute
        self.steps, self.stop, self.chunk = int(steps), stop, None if chunk is None else int(chunk)
        self.keep: Keep = "best" if self.rule.searches else keep
        self._modules["tailoring"] = Learned(loss, getattr(self.rule, "lr", None), self.adapt.learned_start)
        self.register_load_state_dict_post_hook(_take_rates)
        self._starts = Starts()
        self._loss_structure: Structure | None = None
        self.compile_options: Mapping[str, Any] | None = None if compile is False else {} if compile is True else compile
        self._compiled: Compiled | None = None

    @leaves_inference_mode
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The tailored prediction. Called like the model itself."""
        x = args[0] if len(args) == 1 and not kwargs else Inputs(*args, **kwargs)
        if count_rows(x) == 0 or (self.steps == 0 and not self.adapt.learned_start):
            return self._untailored(x)
        if self.compile_options is not None and may_look() and not torch.is_grad_enabled():
            out, sure = self._compiled_answer(x)
            if sure or answer_is_finite(out):
                return out  # else let the guards of eager mode look at it
        return self._eager_answer(x)

    @leaves_inference_mode
    def tailor(self, x: Any, *, start: State | None = None, seeds: Tensor | None = None) -> State:
        """The state fitted to `x`, from the identity or from `start` (a warm start). `seeds` (queries,) replace the queries' own."""
        if count_rows(x) == 0:
            return {}
        return states.cat([self._fitted(b) for b in self._batches(x, start, seeds)])

    @leaves_inference_mode
    def predict(self, x: Any, state: State) -> Any:
        """The answers to `x` with a state from before; on `queries * k` rows each query's state serves k rows."""
        if count_rows(x) == 0:
            return self._untailored(x)
        batch = Batch(x, count_rows(x), self._find_places(x))
        check_state(state, self._identity(batch, 1), serves=batch.queries)
        return self._keeping_little(lambda: self._answer(batch, state), batch, state)[0]

    def adapted(self, x: Any, state: State) -> AdaptedModel:
        """The model with a state from before, as a loss is given it: its features, methods and submodules, at `x` or `queries * k` rows."""
        batch = Batch(x, count_rows(x), self._find_places(x))
        check_state(state, self._identity(batch, 1), serves=batch.queries)

        def run(reading: Reading, args: Any, kwargs: Any) -> Any:
            with self._plain_kernels():
                return self._call(batch, state, False, None, reading, args, kwargs)

        return self.adapt.bind(AdaptedModel(self.net, run, x, None, self.steps))

    @leaves_inference_mode
    def trace(self, x: Any, *, start: State | None = None, seeds: Tensor | None = None) -> Trace:
        """The prediction, with what happened to each query on the way."""
        if count_rows(x) == 0:
            raise ValueError("an empty batch leaves no trace")
        batches = self._batches(x, start, seeds)
        parts = [self._trace(b) for b in batches]
        joined = {name: cat_rows([getattr(p, name) for p in parts]) for name in ("steps", "stopped", "failed")}
        joined["state"] = states.cat([p.state for p in parts])
        joined["prediction"] = cat_rows([p.prediction for p in parts], self._find_places(x).answer_rows)
        return Trace(losses=torch.cat([p.losses for p in parts], 1), sites=parts[0].sites, ran_once=parts[0].ran_once, **joined)

    def states(self, x: Any, *, start: State | None = None, seeds: Tensor | None = None) -> Iterator[State]:
        """The state before the first and after each inner step, with the graph that `backprop` keeps."""
        if in_inference_mode():  # a generator must not yield from inside a mode, so this one runs ahead
            yield from _all_states(self, x, start=start, seeds=seeds)
            return
        if count_rows(x) == 0:
            yield from ({} for _ in range(self.steps + 1))
            return
        loops = [self._moments(b) for b in self._batches(x, start, seeds)]
        for moments in zip(*loops, strict=True):
            yield states.cat([compact(moment.state) for moment in moments])

    def path(self, x: Any, *, start: State | None = None, seeds: Tensor | None = None) -> Iterator[Any]:
        """The prediction before tailoring and after each inner step."""
        for state in self.states(x, start=start, seeds=seeds):
            yield self.predict(x, state)

    def replace(self, **changes: Any) -> Tailored:
        """The same model with other settings, or another loss, e.g. `model.replace(steps=10)`. Weights and learned parts are shared.

        (Of a subclass, too, it is a plain `Tailored`.)
        """
        settings: dict[str, Any] = {name: getattr(self, name) for name in ("loss", "recompute", *_SETTINGS)}
        if self.rule.searches and "optimizer" in changes:
            del settings["keep"]  # its own, not the user's
        settings["compile"] = False if self.compile_options is None else self.compile_options
        if isinstance(self.rule, Descent) and "optimizer" not in changes:
            settings |= {name: getattr(self.rule, name) for name in _OF_THE_DESCENT}
        elif not isinstance(self.rule, Descent) and "optimizer" not in changes:
            if foreign := sorted(changes.keys() & _OF_THE_DESCENT):
                raise ValueError(f"{foreign[0]} belongs to gradient descent; this model uses {self.rule!r}")
            settings["optimizer"] = self.rule.optimizer if isinstance(self.rule, Functional) else self.rule
        other = Tailored(self.net, **(settings | changes))
        other.training = self.training
        if other.adapt is self.adapt:
            other.tailoring.start = self.tailoring.start
        return other

    def extra_repr(self) -> str:
        return f"adapt={self.adapt!r}, steps={self.steps}, rule={self.rule!r}, backprop={self.backprop!r}, keep={self.keep!r}"

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OF_THE_DESCENT | {"loss", "optimizer"}:
            raise AttributeError(f"model.{name} = ... would change nothing: model.replace({name}=...) is the same model with another")
        if name in (*_SETTINGS, "recompute") and "_compiled" in self.__dict__:  # it is made
            settings = {other: getattr(self, other) for other in (*_SETTINGS, "recompute")} | {name: value}
            check_rule(self.rule, **settings)
            del settings["recompute"]
            check_settings(self.net, self.loss, **settings)
        super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        of_this_process = {"_compiled": None, "_structure": None, "_loss_structure": None, "_starts": Starts()}  # and of these very modules
        return self.__dict__ | of_this_process

    def _untailored(self, x: Any) -> Any:
        """The model as it is; not while another thread has put a query's weights in it."""
        args, kwargs = model_call(x)
        with alone():
            return self.net(*args, **kwargs)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        self._forget_places()  # the state's dtype follows the model's
        super()._apply(fn, recurse)
        _take_rates(self)
        return self


def _take_rates(model: Tailored, *_: Any) -> None:
    """Loading (`assign=True`) and conversions may put others in the place of parameters: the rule takes those that train."""
    if isinstance(model.rule, Descent):
        model.rule.lr = model.tailoring.rates(model.rule.lr)


_OF_THE_DESCENT = {"lr", "momentum", "clip", "proximal"}
_SETTINGS = ("adapt", "steps", "backprop", "keep", "stop", "chunk")  # that may be set to something else later


@leaves_inference_mode
def _all_states(model: Tailored, x: Any, **options: Any) -> list[State]:
    return list(model.states(x, **options))
