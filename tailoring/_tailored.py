"""`Tailored`: a model that looks at each query before it answers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ._adapt import CN, Adapter
from ._bound import Bound
from ._compiled import Compiled
from ._inner import Backprop, Keep, Moment, descend, hurry, hurry_by_row
from ._kernels import may_look, plain_kernels, precision_of, structure_of
from ._learned import Learned, OwnNames
from ._recompute import recomputed
from ._records import Batch, Fit, Places, Trace, all_finite, better, finite_rows, leaves_inference_mode, rows_where
from ._recurrent import NEEDS_TRACEABLE, make_traceable
from ._reuse import Reuse, find_prefix, held_by, multiplications, serving, worth_keeping
from ._rules import LBFGS, Descent, Functional, Rates
from ._sites import Reading, alone, watch
from ._states import State, compact, device_of, rows_of, where
from ._trees import (
    Inputs,
    as_call,
    cat_rows,
    count_rows,
    model_call,
    split_rows,
    take_rows,
    tensors,
)
from ._validate import check_losses, check_settings, check_state, refuse_mixing_modules

Loss = Callable[..., Tensor]  # loss(model, x) -> (queries,)


class Tailored(OwnNames):
    """A model that minimises `loss` on each query, with parameters of the query's own, before it answers.

        state = adapt.init(...)                           # the model as it is
        state = state - lr * grad(sum_i loss_i)(state)    # `steps` times; each row depends on its own query only
        y     = adapt.call(net, state, x)

    `loss(model, x) -> (queries,)` sees the adapted model and no labels; its values are summed over the queries, never averaged.

    adapt      which tensors move: `CN` (default), `Weights`, `Shift`, or one of `tailoring.baselines`
    lr         a number, one per step, a tensor (trained in the outer loop if it needs gradients), or a dict of these by name
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
        loss: Loss,
        *,
        adapt: Adapter | None = None,
        steps: int = 1,
        lr: Rates = 1e-3,
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
        check_settings(net, loss, self.adapt, steps, backprop, keep, chunk)
        if optimizer is None:
            optimizer = Descent(lr, momentum=momentum, clip=clip, proximal=proximal)
        self.rule = optimizer if isinstance(optimizer, Descent | LBFGS) else Functional(optimizer)
        if isinstance(self.rule, Descent):
            self.rule.check_steps(steps)
        if not self.rule.general and self.adapt.outer_products:
            raise ValueError(
                f"{self.rule!r} needs a state of tensors, and {self.adapt!r} keeps outer products: use lr=, or Weights(how='vmap')"
            )
        if not self.rule.differentiable and backprop != "none":
            raise ValueError(f"{self.rule!r} cannot be differentiated; use it with backprop='none'")
        if recompute and backprop != "all":
            raise ValueError(
                f"recompute=True saves the activations that backprop='all' keeps; backprop={backprop!r} keeps those of one step only"
            )
        self.backprop: Backprop = backprop
        self.recompute = recompute
        self.steps, self.stop, self.chunk = steps, stop, chunk
        self.keep: Keep = "best" if self.rule.searches else keep
        self.tailoring = Learned(loss, getattr(self.rule, "lr", None), self.adapt.learned_start)
        self._places: dict[Any, Places] = {}
        self._structure: object = None
        self._prepared = False
        self.compile_options: Mapping[str, Any] | None = None if compile is False else {} if compile is True else compile
        self._compiled: Compiled | None = None
        plain = isinstance(self.rule, Descent) and self.rule.is_plain and self.keep == "last" and stop is None
        self._may_hurry = plain and not self.adapt.outer_products

    @property
    def loss(self) -> Loss:
        return self.tailoring.loss

    @leaves_inference_mode
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The tailored prediction. Called like the model itself."""
        x = args[0] if len(args) == 1 and not kwargs else Inputs(*args, **kwargs)
        if count_rows(x) == 0 or (self.steps == 0 and not self.adapt.learned_start):
            args, kwargs = model_call(x)
            return self.net(*args, **kwargs)
        if self.compile_options is not None and may_look() and not torch.is_grad_enabled():
            out = self._compiled_answer(x)
            if self._may_hurry or all_finite(out):
                return out  # else let the guards of eager mode look at it
        answers = [self._answer(b, self._fitted(b))[0] for b in self._batches(x)]
        return answers[0] if len(answers) == 1 else cat_rows(answers, self._find_places(x).answer_rows)

    @leaves_inference_mode
    def tailor(self, x: Any, *, start: State | None = None, seeds: Tensor | None = None) -> State:
        """The state fitted to `x`, from the identity or from `start` (a warm start). `seeds` (queries,) replace the queries' own."""
        if count_rows(x) == 0:
            return {}
        return cat_rows([self._fitted(b) for b in self._batches(x, start, seeds)])

    @leaves_inference_mode
    def predict(self, x: Any, state: State) -> Any:
        """The answers to `x` with a state from before; on `queries * k` rows each query's state serves k rows."""
        args, kwargs = model_call(x)
        if count_rows(x) == 0:
            return self.net(*args, **kwargs)
        batch = Batch(x, count_rows(x), self._find_places(x).sites)
        check_state(state, self._identity(batch, 1))
        return self._keeping_little(lambda: self._answer(batch, state), state)[0]

    @leaves_inference_mode
    def trace(self, x: Any, *, start: State | None = None, seeds: Tensor | None = None) -> Trace:
        """The prediction, with what happened to each query on the way."""
        if count_rows(x) == 0:
            raise ValueError("an empty batch leaves no trace")
        batches = self._batches(x, start, seeds)
        parts = [self._trace(b) for b in batches]
        joined = {name: cat_rows([getattr(p, name) for p in parts]) for name in ("steps", "stopped", "failed", "state")}
        joined["prediction"] = cat_rows([p.prediction for p in parts], self._find_places(x).answer_rows)
        return Trace(losses=torch.cat([p.losses for p in parts], 1), sites=parts[0].sites, ran_once=parts[0].ran_once, **joined)

    def states(self, x: Any, *, start: State | None = None, seeds: Tensor | None = None) -> Iterator[State]:
        """The state before the first and after each inner step, with the graph that `backprop` keeps."""
        if torch.is_inference_mode_enabled():  # a generator must not yield from inside a mode, so this one runs ahead
            yield from _all_states(self, x, start=start, seeds=seeds)
            return
        if count_rows(x) == 0:
            yield from ({} for _ in range(self.steps + 1))
            return
        loops = [self._moments(b) for b in self._batches(x, start, seeds)]
        for moments in zip(*loops, strict=True):
            yield cat_rows([compact(moment.state) for moment in moments])

    def path(self, x: Any, *, start: State | None = None, seeds: Tensor | None = None) -> Iterator[Any]:
        """The prediction before tailoring and after each inner step."""
        for state in self.states(x, start=start, seeds=seeds):
            yield self.predict(x, state)

    def prepare(self, x: Any) -> Self:
        """Look at an example input: find the sites (and give a learned start its shape) before compiling or training."""
        self._identity(Batch(x, count_rows(x), self._find_places(x).sites), 1)
        make_traceable(self.net)
        self._prepared = True
        return self

    def replace(self, **changes: Any) -> Tailored:
        """The same model and loss with other settings, e.g. `model.replace(steps=10)`. Weights and learned parts are shared."""
        settings: dict[str, Any] = {
            name: getattr(self, name) for name in ("adapt", "steps", "backprop", "recompute", "keep", "stop", "chunk")
        }
        settings["compile"] = False if self.compile_options is None else self.compile_options
        descent = {"lr", "momentum", "clip", "proximal"}
        if isinstance(self.rule, Descent) and "optimizer" not in changes:
            settings |= {name: getattr(self.rule, name) for name in descent}
        elif not isinstance(self.rule, Descent) and "optimizer" not in changes:
            if changes.keys() & descent:
                raise ValueError(f"{sorted(changes.keys() & descent)[0]} belongs to gradient descent; this model uses {self.rule!r}")
            settings["optimizer"] = self.rule if isinstance(self.rule, LBFGS) else self.rule.optimizer
        other = Tailored(self.net, self.loss, **(settings | changes))
        if other.adapt is self.adapt:
            other.tailoring.start = self.tailoring.start
        return other

    def extra_repr(self) -> str:
        return f"adapt={self.adapt!r}, steps={self.steps}, rule={self.rule!r}, backprop={self.backprop!r}, keep={self.keep!r}"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_compiled": None}  # a compiled program belongs to this process

    def _compiled_answer(self, x: Any) -> Any:
        def answer(part: Any) -> Any:
            (batch,) = self._batches(part)
            return self._rescued(batch) if self._may_hurry else self._answer(batch, self._fit(batch).state)[0]

        with alone():  # neither may dynamo see what another thread has put in a module's place, nor `_places` grow while it looks
            self._batches(x)  # what it refuses must be refused here, with its own words
            if not self._prepared:
                self.prepare(x)
            self._compiled = self._compiled or Compiled(answer, self.compile_options or {}, fills=self.adapt.rows(2) == 2)
            self._places["compiled"] = self._find_places(x)
            return self._compiled(self._key(x), x, self.chunk, self._places["compiled"].answer_rows)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        self._places.clear()  # the state's dtype follows the model's
        return super()._apply(fn, recurse)

    def _batches(self, x: Any, start: State | None = None, seeds: Tensor | None = None) -> list[Batch]:
        """The queries in parts of `chunk`, checked before anything runs."""
        refuse_mixing_modules(self.net)
        if isinstance(self.loss, nn.Module):
            refuse_mixing_modules(self.loss)
        queries = count_rows(x)
        places = self._find_places(x)
        sites = places.sites
        if start is not None:
            check_state(start, self._identity(Batch(x, queries, sites), 1), self.adapt.rows(queries))
        if seeds is not None and (seeds.shape != (queries,) or seeds.dtype != torch.int64):
            raise ValueError(f"seeds must be int64 of shape ({queries},), not {seeds.dtype} of shape {tuple(seeds.shape)}")
        start = None if start is None else compact(start)
        if self.chunk is None or queries <= self.chunk:
            return [Batch(x, queries, sites, seeds, start, self._reuse(places, queries))]
        parts = split_rows([x, start, seeds], self.chunk)
        sizes = [count_rows(part) for part, *_ in parts]
        return [
            Batch(part, n, sites, own_seeds, own, self._reuse(places, n)) for n, (part, own, own_seeds) in zip(sizes, parts, strict=True)
        ]

    def _reuse(self, places: Places, queries: int) -> Reuse | None:
        """Weights in training need the graph of every pass, and may move between two; frozen ones, or without gradients, need not."""
        prefix = places.prefix
        if not worth_keeping(places.multiplications * queries):
            return None
        if prefix and torch.is_grad_enabled():
            if torch.compiler.is_compiling():
                return None
            weights = {name: [t for t in held_by(self.net.get_submodule(name)) if isinstance(t, Tensor)] for name in prefix}
            prefix = {name: prefix[name] for name in prefix if not any(t.requires_grad for t in weights[name])}
            prefix = prefix if any(weights[name] for name in prefix) else {}  # else nothing but activation functions is left
        return Reuse(self.net, prefix) if prefix else None

    def _find_places(self, x: Any) -> Places:
        key = "compiled" if torch.compiler.is_compiling() else self._key(x)
        if key != "compiled" and self._structure is not (structure := structure_of(self.net)):
            self._structure = structure
            self._places.clear()
        if key not in self._places or (key == "compiled" and NEEDS_TRACEABLE and not self._prepared):
            if torch.compiler.is_compiling():
                raise RuntimeError("the sites of this model are not known yet: call model.prepare(x) once before compiling it")
            sites, seen = self.adapt.sites(self.net, x), watch(self.net, x)
            prefix = find_prefix(self.adapt, self.net, sites, seen, x)
            answer_rows = {s.leaf: s.rows for s in seen if s.name == "" and s.leaf >= 0}
            self._places[key] = self._places["compiled"] = Places(sites, prefix, multiplications(self.net, prefix, seen) / 2, answer_rows)
        return self._places[key]

    def _key(self, x: Any) -> Any:
        """What the sites may depend on: shapes and types of a query, what else the model is called with, its precision."""
        precision = precision_of(self.net)
        if isinstance(x, Tensor):
            return precision, x.shape[1:], x.dtype
        leaves, spec = pytree.tree_flatten(x)
        parts = [(leaf.shape[1:], leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves]
        return precision, tuple(parts), str(spec)

    def _identity(self, batch: Batch, rows: int) -> State:
        """The state that answers as an untailored model does: the adapter's identity, or the learned start."""
        learned = self.tailoring
        device = tensors(batch.x)[0].device
        if learned.wants_start and not learned.start:
            learned.set_start(self.adapt.init(self.net, batch.sites, 1, device))
        state = self.adapt.init(self.net, batch.sites, rows, device)
        return learned.start_for(rows, state) if learned.wants_start else state

    def _moments(self, batch: Batch) -> Iterator[Moment]:
        """The inner loop on a batch, watching that nothing it still needs is changed between two steps."""
        rows = self.adapt.rows(batch.queries)
        needed = self._needed_unchanged()
        versions = [p._version for p in needed]
        start = self._identity(batch, rows) if batch.start is None else batch.start
        learned = batch.start is None and self.tailoring.wants_start  # then it may train between two steps, and is asked for afresh
        loop = descend(
            functools.partial(self._gradient, batch),
            lambda: self._identity(batch, rows) if learned else start,
            self.rule,
            steps=self.steps,
            backprop=self.backprop,
            stop=self.stop,
            home=None if batch.start is None else self._identity(batch, rows),
        )
        for moment in loop:
            yield moment
            if needed and versions != [p._version for p in needed]:
                raise RuntimeError(
                    "weights changed between two inner steps, but later losses still need the graph of the earlier steps "
                    "(backprop='all', or a learned lr): sum the outer losses, call backward() once, then step"
                )

    def _needed_unchanged(self) -> list[Tensor]:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return []
        return list(self.parameters()) if self.backprop == "all" else list(self.tailoring.lr.values())

    def _gradient(self, batch: Batch, state: State, rows: Tensor | None, step: int, graph: bool) -> tuple[Tensor, State]:
        if torch.compiler.is_compiling() and batch.reuse is not None and step == 0:
            with torch.no_grad():  # nothing made inside torch.func.grad may leave it; all else of this pass is dead code
                self._losses(batch, rows, step, state, keep=True)
        evaluate = functools.partial(self._losses, batch, rows, step)
        return self._keeping_little(lambda: self.adapt.gradient(evaluate, batch.sites, state, (step, self.steps), graph), state)

    def _keeping_little(self, compute: Callable[[], tuple[Any, Any]], state: State) -> tuple[Any, Any]:
        """`compute()`; with `recompute`, its graph keeps no activations. (A compiler decides itself what to keep.)"""
        if not self.recompute or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return compute()
        return recomputed(compute, self.parameters, device_of(state))

    def _losses(self, batch: Batch, rows: Tensor | None, step: int, state: State, taps: Any = None, keep: bool | None = None) -> Tensor:
        """The tailoring loss for each row of the state."""
        x, seeds, reuse = (batch.x, batch.seeds, batch.reuse) if rows is None else (*take_rows((batch.x, batch.seeds), rows), None)
        queries = count_rows(x)
        keep = not torch.compiler.is_compiling() if keep is None else keep

        def run(reading: Reading, args: Any, kwargs: Any) -> Any:
            with serving(reuse, keep=keep):
                return self.adapt.call(self.net, batch.sites, state, reading, args, kwargs, taps)

        args, kwargs = as_call(x)
        once = None if reuse is None else functools.partial(reuse.once, keep=keep)
        if reuse is not None:
            reuse.begin()
        with plain_kernels(self.net, graph=self.adapt.plain_kernels or self.backprop != "none"):
            losses = self.loss(self.adapt.bind(Bound(self.net, run, x, seeds, step, keep=once), x), *args, **kwargs)
        check_losses(losses, queries)
        return self.adapt.reduce(losses, rows_of(state))

    def _fitted(self, batch: Batch) -> State:
        first_order = self.backprop == "none" or not torch.is_grad_enabled()
        if self._may_hurry and first_order and may_look() and isinstance(self.rule, Descent):
            start = self._identity(batch, self.adapt.rows(batch.queries)) if batch.start is None else batch.start
            state = hurry(functools.partial(self._gradient, batch), cast(dict[str, Tensor], start), self.rule.rate, self.steps)
            if state is not None:
                return dict(state)
        return self._fit(batch).state

    def _rescued(self, batch: Batch) -> Any:
        """The answers, those of rows that failed untailored, without a look at any number: for compiled code, which need not wait then."""
        start = cast(dict[str, Tensor], self._identity(batch, self.adapt.rows(batch.queries)))
        rule = cast(Descent, self.rule)
        state, fine = hurry_by_row(functools.partial(self._gradient, batch), start, rule.rate, self.steps)
        out, home = (self._answer(batch, cast(State, s))[0] for s in (state, start))
        return rows_where(fine, out, home, self._find_places(batch.x).answer_rows)

    def _fit(self, batch: Batch, record: bool = False) -> Fit:
        best: tuple[Tensor, State, Tensor] | None = None
        before: Moment | None = None
        losses: list[Tensor] = []
        for moment in self._moments(batch):
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
            with torch.no_grad():
                values = self._losses(batch, None, self.steps, state)
            losses += [values] * (self.steps + 1 - len(losses))
            if self.keep == "best":
                _, state, steps = better(best, torch.where(values.isnan(), torch.inf, values), before)
                state = where(~before.failed, state, before.state)  # what failed is home in `before`
                steps = torch.where(before.failed, 0, steps)
        return Fit(compact(state), steps, before.stopped, before.failed, losses)

    def _answer(self, batch: Batch, state: State) -> tuple[Any, Tensor | None]:
        """The prediction, and which rows of the state were not fit to answer with (None: no one, or that was not looked at)."""
        args, kwargs = model_call(batch.x)

        def run(state: State) -> Any:
            with plain_kernels(self.net, graph=self.adapt.plain_kernels or self.backprop != "none"), serving(batch.reuse, keep=False):
                return self.adapt.call(self.net, batch.sites, state, Reading(), args, kwargs)

        out = run(state)
        if not may_look() or all_finite(out):
            return out, None
        rows = rows_of(state)
        bad = ~finite_rows(out, rows).to(device_of(state))
        if bad.any():  # a state may be finite and yet too far out to answer with
            identity = self._identity(batch, rows)
            with torch.no_grad():
                bad = bad & finite_rows(run(identity), rows)  # else the untailored answer is no better
            if bad.any():
                out = run(where(~bad, state, identity))
        return out, bad

    def _trace(self, batch: Batch) -> Trace:
        fit = self._fit(batch, record=True)
        prediction, bad = self._answer(batch, fit.state)
        failed = fit.failed if bad is None else fit.failed | bad
        per_query = [t.expand(batch.queries) for t in (torch.where(failed, 0, fit.steps), fit.stopped, failed, *fit.losses)]
        steps, stopped, failed, *losses = per_query
        once = () if batch.reuse is None else tuple(name for name in batch.reuse.names if name in batch.reuse.used)
        return Trace(prediction, torch.stack(losses), steps, stopped, failed, fit.state, batch.sites, once)


@leaves_inference_mode
def _all_states(model: Tailored, x: Any, **options: Any) -> list[State]:
    return list(model.states(x, **options))
