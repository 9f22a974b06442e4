"""`Weights`: every query has weights of its own (MAMmoTh, Alg. 1)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from . import _entries as entries
from . import _states as states
from ._adapt import Adapter, Evaluate
from ._adapted import AdaptedModel
from ._casts import Pass, Site, Sited
from ._copies import call_with_copies
from ._doubt import doubt
from ._entries import Entry, LowRank, as_tensor
from ._inner import differentiate
from ._kernels import all_modules
from ._layers import TAPPED, rule_for
from ._listening import collect, listen, listen_compiled
from ._recurrent import in_plain_operations, is_patched
from ._sites import Around, At, Reading, alone, check_at, describe, matching
from ._states import State
from ._taps import Taps, transformed
from ._trees import count_rows, map_tensors, tensors
from ._unseen import unseen_weight
from ._uses import Use
from ._watch import checkpoint_error, refuse_checkpoints, refuse_disorder, watch
from ._weight_sites import apart_if_tied, by_rule, differs_by_call, site_of, with_own_kernels, with_rows

_MATRICES = ("outer products", "own kernels")  # kept as (out, all other dimensions)


class Weights(Adapter):
    """The chosen parameters, one set for each query; by default all floating-point parameters of the model.

        theta_x = theta - lr * d/dtheta loss(theta, x)

    Modules are chosen as for `CN`, with everything below them; a pattern may also name parameters (`"*.bias"`). The state holds, under
    each parameter's name, how far the query's own has moved from the shared one.

    With `how="rules"` linear layers, convolutions, embeddings and attention keep that as the outer products it is a sum of and never
    build a query's own matrix, unless that is the smaller; what has no rule runs under `torch.func.vmap`. `how="vmap"` runs the whole
    model so, and `how="loop"` runs it once for each query: as exact, slower, and with nearly any model.
    """

    plain_kernels = True  # vmap has no rule for fused attention

    @property
    def outer_products(self) -> bool:  # type: ignore[override]
        return self.how == "rules"

    def __init__(self, *at: At, how: Literal["rules", "vmap", "loop"] = "rules"):
        if how not in ("rules", "vmap", "loop"):
            raise ValueError(f"how must be 'rules', 'vmap' or 'loop', not {how!r}")
        self.at, self.how = check_at(at), how

    def depends_on(self, model: nn.Module) -> Any:
        """Which weights are the same, under which names, and by which rules the layers run, or by something of their own."""
        modules = all_modules(model)
        with alone():  # else a layer that another thread adapts just now would look like one that was patched
            patched = [id(module.__dict__["forward"]) for module in modules if is_patched(module)]
        weights = [(name, id(p), p is not None and p.device.type) for module in modules for name, p in module._parameters.items()]
        rules = [(type(module), rule_for(module)) for module in modules] if self.how == "rules" else []
        return *weights, *rules, *patched

    def sites(self, model: nn.Module, x: Any) -> tuple[Site, ...]:
        named = {name: p for name, p in model.named_parameters() if p.is_floating_point() or p.is_complex()}
        chosen = self._chosen(model, named)
        if not chosen:
            raise ValueError(f"{self!r} chooses no parameters; the model has: {', '.join(named) or 'none'}")
        rerun: set[int] = set()
        seen = watch(model, x, rerun)
        own = {id(named[name]): name for name in chosen}
        refuse_checkpoints(s for s in seen if not own.keys().isdisjoint(map(id, model.get_submodule(s.name).parameters())))
        if used := own.keys() & rerun:
            raise checkpoint_error(f"parameter {min(own[key] for key in used)!r} is used")
        whole = with_rows([site_of(name, "", name, named[name], "copies", copied=True) for name in named if name in chosen], seen)
        if self.how != "rules":
            return whole
        ruled = with_own_kernels(apart_if_tied(by_rule(model, chosen)), model, seen)
        sites = with_rows(ruled, seen)
        refuse_disorder(s for s in seen if s.name in {site.module for site in sites})
        if _is_whole(sites):
            _warn_of_the_models_own(chosen)
            return sites
        different = differs_by_call(ruled, seen)
        if different is None:
            reason = doubt(model, (self, sites), (Weights(how="loop"), whole), x)
        else:
            reason = f"{different!r} is called with the queries in different dimensions, or also with what all of them share"
        if reason is None:
            return sites
        warnings.warn(f"Weights runs all of this model under torch.func.vmap, exactly but slowly: {reason}", stacklevel=2)
        return whole

    def bind(self, model: AdaptedModel) -> AdaptedModel:
        return (_OneByOne if self.how == "loop" else _OwnWeights).of(model)

    def _chosen(self, model: nn.Module, named: dict[str, nn.Parameter]) -> set[str]:
        modules, first = dict(model.named_modules()), {id(p): name for name, p in named.items()}
        if not self.at:
            return set(named)
        places = {place: first[id(p)] for place, p in model.named_parameters(remove_duplicate=False) if id(p) in first}  # of tied ones, all
        chosen: set[str] = set()
        for entry in self.at:
            parts: Any = {**modules, **places} if isinstance(entry, str) else modules
            try:
                found = matching((entry,), parts)
            except ValueError as error:
                raise ValueError(f"no module or parameter matches {entry!r}; the model has: {describe(modules)}") from error
            chosen |= {name for p, name in places.items() if p in found or any(p.startswith(f"{m}.") for m in found if m) or "" in found}
        return chosen

    def init(self, model: nn.Module, sites: tuple[Site, ...], queries: int, device: torch.device | None = None) -> State:
        return {s.key: _nothing_moved(s, queries, device) for s in sites}

    def call(self, sited: Sited, state: State, reading: Reading, args: Any, kwargs: Any, taps: Taps | None = None) -> Any:
        model, sites = sited.model, sited.sites
        if self.how != "rules" or _is_whole(sites):
            changes = {name: as_tensor(entry) for name, entry in state.items()}
            rows = _rows_of(reading, sites[0], by_row=reading.is_part and _have_rows((args, kwargs), states.rows_of(state)))
            return call_with_copies(model, reading, changes, args, kwargs, loop=self.how == "loop", rows=rows)
        _refuse_looking_inside(reading, sites)
        now, at_work = cast = sited.cast(_stand_in, state)
        now.queries, now.taps, now.given = states.rows_of(state), taps, (args, kwargs)
        with at_work:
            out = reading(model, lambda module: module(*args, **kwargs))
        sited.dismiss(cast)
        return out

    def gradient(
        self, evaluate: Evaluate, sites: tuple[Site, ...], state: State, step: tuple[int, int], graph: bool
    ) -> tuple[Tensor, State]:
        if self.how != "rules" or _is_whole(sites):
            return differentiate(evaluate, state, graph)
        tapped = {s.key for s in sites if s.how in TAPPED}
        free = {name: entries.matrices(entry) for name, entry in state.items() if name not in tapped}
        hear = listen_compiled if is_dynamo_compiling() else listen
        with torch.enable_grad():
            found = hear(evaluate, state, free, graph)
        if found is None:  # a second derivative uses the weights twice: let autograd see them
            values, grads = differentiate(evaluate, {s.key: entries.dense(state[s.key], s.shape) for s in sites}, graph)
            kernels = {s.key for s in sites if s.how in _MATRICES and len(s.shape) > 2}
            return values, {name: as_tensor(g).flatten(2) if name in kernels else g for name, g in grads.items()}
        values, grads, heard = found
        return values, {name: grads[name] if name in free else collect(name, heard, entry, step) for name, entry in state.items()}

    def unseen_weight(self, model: nn.Module, losses: Tensor, state: State, taps: Taps | None) -> tuple[str | None, bool]:
        """With the gradient of the shared weights, wherever they are used, the sum of the queries' own is compared."""
        if self.how != "rules" or taps is None or taps.differentiated or taps.disturbed:
            return None, self.how != "rules"
        return unseen_weight(dict(model.named_parameters()), losses, state, taps)


def _stand_in(module: nn.Module, sites: list[Site], now: Pass) -> Around:
    return _copied(sites, now) if sites[0].copied else _ruled(module, sites, now)


def _ruled(module: nn.Module, sites: list[Site], now: Pass) -> Around:
    """Answers by the rule of the layer."""
    names, rows = {s.local: s.key for s in sites}, sites[0].rows
    tapped = frozenset(s.key for s in sites if s.how in TAPPED)
    found = rule_for(module)
    assert found is not None
    _, rule = found

    def around(forward: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        if rows is None and not (_is_given(now.given, (args, kwargs)) and _have_rows(args, now.queries)):
            whole = count_rows(now.given)  # what all queries share (positions) goes through for each of them
            args, kwargs = map_tensors(lambda t: _for_all(t, now.queries if whole % now.queries else whole), (args, kwargs))
        return rule(Use(names, rows or 0, now.queries, now.state, tapped, now.taps), forward, module, args, kwargs)

    return around


def _copied(sites: list[Site], now: Pass) -> Around:
    """Runs the layer with a copy of its weights for each query."""
    names, all_rows, inside = {s.local: s.key for s in sites}, dict(sites[0].all_rows), [False]

    def around(forward: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        if inside[0]:  # called by functional_call, with a query's own weights
            return forward(*args, **kwargs)
        inside[0] = True
        try:
            changes = {local: as_tensor(now.state[key]) for local, key in names.items()}
            run = in_plain_operations(module, forward)
            bare = None if is_dynamo_compiling() and run is forward else run
            return call_with_copies(module, Reading(), changes, args, kwargs, rows=all_rows, forward=bare)
        finally:
            inside[0] = False

    return around


def _is_given(whole: Any, here: Any) -> bool:
    """Whether a module is given what the loss has given, which has a row for each query, and not what the model has for all of them."""
    return [id(t) for t in tensors(here)] == [id(t) for t in tensors(whole)]


def _for_all(t: Tensor, rows: int) -> Tensor:
    """(1, ...) or (...) -> (rows, ...)"""
    t = t if t.ndim > 1 and t.shape[0] == 1 else t.unsqueeze(0)
    return t.expand(rows, *t.shape[1:])


class _OwnWeights(AdaptedModel):
    """A bound model that does not give away shared weights as if they were the query's own."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        if isinstance(value, nn.Parameter) or name in ("parameters", "named_parameters", "state_dict"):
            what = f"the weight {name!r} itself" if isinstance(value, nn.Parameter) else f"weights by {name}()"
            raise ValueError(f"the tailoring loss reads {what}, but every query has its own: use the model's outputs")
        if not isinstance(value, AdaptedModel) and any(map(self._is_of_one, tensors(value))):
            raise ValueError(
                f"the tailoring loss reads {name!r}, which the model sets while it runs: with copies of its weights that is what one query "
                "left there. Let the model return it, or read it with model.output_of"
            )
        return value

    @staticmethod
    def _is_of_one(t: Tensor) -> bool:
        return transformed(t)  # by vmap, which has ended

    def _below(self, name: str, module: nn.Module) -> AdaptedModel:
        return type(self).of(super()._below(name, module))


class _OneByOne(_OwnWeights):
    """The same of a model that runs for one query after another."""

    __slots__ = ()

    @staticmethod
    def _is_of_one(t: Tensor) -> bool:
        return t.grad_fn is not None  # no constant of the model


def _warn_of_the_models_own(chosen: set[str]) -> None:
    own, others = (sorted(name for name in chosen if ("." in name) is below) for below in (False, True))
    if own and others:  # else there is nothing that rules could serve
        modules = ", ".join(repr(name) for name in dict.fromkeys(name.split(".")[0] for name in others))
        warnings.warn(
            f"Weights runs all of this model under torch.func.vmap, exactly but slowly: {', '.join(own)} belong to the model itself, to no "
            f"module below it. Weights({modules}) adapts all others by their rules",
            stacklevel=3,
        )


def _is_whole(sites: tuple[Site, ...]) -> bool:
    """Whether the whole model runs with copies."""
    return any(s.module == "" and s.copied for s in sites)


def _have_rows(given: Any, queries: int) -> bool:
    return all(t.ndim and t.shape[0] % queries == 0 for t in tensors(given))


def _rows_of(reading: Reading, site: Site, *, by_row: bool) -> dict[int, int | None]:
    """Of a model with copies: the dimensions of the queries in what a part of it is given, and in what is read there.

    What the model has for all queries (positions) a loss may give `by_row`, for each.
    """
    parts = {name: dict(rows) for name, rows in site.parts}
    here = {leaf: 0 if dim is None and by_row else dim for leaf, dim in parts.get(reading.path, {}).items()}
    if reading.below is None:
        return here
    read = parts.get(f"{reading.path}.{reading.below}" if reading.path else reading.below, {})
    return {leaf: dim for leaf, dim in here.items() if leaf < 0} | {0: read.get(0 if reading.side == "output" else -1, 0)}


def _refuse_looking_inside(reading: Reading, sites: tuple[Site, ...]) -> None:
    target = ".".join(part for part in (reading.path, reading.below) if part)
    for s in sites:
        if s.copied and target.startswith(f"{s.module}."):
            raise ValueError(f"the loss reads {target!r} inside {s.module!r}, which runs under vmap: read {s.module!r} itself")


def _nothing_moved(site: Site, queries: int, device: torch.device | None) -> Entry:
    def zeros(*shape: int, dtype: torch.dtype = site.dtype) -> Tensor:
        return torch.zeros(queries, *shape, dtype=dtype, device=device)

    if site.how == "rows of a table":
        return LowRank(((entries.START, zeros(0, site.shape[1]), zeros(0, dtype=torch.int64)),))
    if site.how == "own kernels" and len(site.shape) > 1:
        return zeros(site.shape[0], math.prod(site.shape[1:]))
    if site.how == "outer products" and len(site.shape) > 1:
        return LowRank(((entries.START, zeros(0, site.shape[0]), zeros(0, math.prod(site.shape[1:]))),))
    return zeros(*site.shape)
