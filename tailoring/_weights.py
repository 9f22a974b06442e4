"""`Weights`: every query has weights of its own (MAMmoTh, Alg. 1)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from . import _states as states
from ._adapt import Adapter, Evaluate, Site, by_module
from ._copies import call_with_copies
from ._inner import differentiate, gradients
from ._layers import TAPPED, How, Tap, Taps, Use, rule_for
from ._recurrent import Unrolled
from ._sites import Around, At, Reading, Seen, check_at, describe, intercepted, matching, watch
from ._states import Entry, LowRank, State, as_tensor


class Weights(Adapter):
    """The chosen parameters, one set for each query; by default all floating-point parameters of the model.

        theta_x = theta - lr * d/dtheta loss(theta, x)

    Modules are chosen as for `CN`, with everything below them; a pattern may also name parameters (`"*.bias"`). The state holds, under
    each parameter's name, how far the query's own has moved from the shared one.

    With `how="rules"` linear layers, convolutions, embeddings and attention keep that as the outer products it is a sum of and never
    build a query's own matrix, unless that is the smaller; what has no rule runs under `torch.func.vmap`. `how="vmap"` runs the whole
    model so, and `how="loop"` runs it once for each query: as exact, slower, and asking for nothing.
    """

    plain_kernels = True  # vmap has no rule for fused attention

    def __init__(self, *at: At, how: Literal["rules", "vmap", "loop"] = "rules"):
        if how not in ("rules", "vmap", "loop"):
            raise ValueError(f"how must be 'rules', 'vmap' or 'loop', not {how!r}")
        self.at, self.how = check_at(at), how

    def sites(self, model: nn.Module, x: Any) -> tuple[Site, ...]:
        named = {name: p for name, p in model.named_parameters() if p.is_floating_point()}
        chosen = self._chosen(model, named)
        if not chosen:
            raise ValueError(f"{self!r} chooses no parameters; the model has: {', '.join(named) or 'none'}")
        if self.how != "rules":
            return tuple(_site(name, "", name, named[name], "copies") for name in named if name in chosen)
        sites = [site for site in _by_rule(model) if site.key in chosen]
        return _with_rows(_apart_if_tied(sites), watch(model, x))

    def _chosen(self, model: nn.Module, named: dict[str, nn.Parameter]) -> set[str]:
        modules = dict(model.named_modules())
        if not self.at:
            return set(named)
        chosen: set[str] = set()
        for entry in self.at:
            parts: Any = {**modules, **named} if isinstance(entry, str) else modules
            try:
                found = matching((entry,), parts)
            except ValueError as error:
                raise ValueError(f"no module or parameter matches {entry!r}; the model has: {describe(modules)}") from error
            chosen |= {p for p in named if p in found or any(p.startswith(f"{m}.") for m in found if m) or "" in found}
        return chosen

    def init(self, model: nn.Module, sites: tuple[Site, ...], queries: int, device: torch.device | None = None) -> State:
        return {s.key: _nothing_moved(s, queries, device) for s in sites}

    def call(
        self, model: nn.Module, sites: tuple[Site, ...], state: State, reading: Reading, args: Any, kwargs: Any, taps: Taps | None = None
    ) -> Any:
        if self.how != "rules":
            changes = {name: as_tensor(entry) for name, entry in state.items()}
            return call_with_copies(model, reading, changes, args, kwargs, loop=self.how == "loop")
        with intercepted(model, {name: _around(group, state, taps) for name, group in by_module(sites).items()}):
            return reading(model, lambda module: module(*args, **kwargs))

    def gradient(
        self, evaluate: Evaluate, sites: tuple[Site, ...], state: State, step: tuple[int, int], graph: bool
    ) -> tuple[Tensor, State]:
        if self.how != "rules":
            return differentiate(evaluate, state, graph)
        tapped = {s.key for s in sites if s.how in TAPPED}
        free = {name: as_tensor(entry) for name, entry in state.items() if name not in tapped}
        listen = _listen_compiled if torch.compiler.is_compiling() else _listen
        with torch.enable_grad():
            values, grads, heard = listen(evaluate, state, free, graph)
        return values, {name: grads[name] if name in free else _collect(name, heard, entry, step) for name, entry in state.items()}

    def __repr__(self) -> str:
        names = [a if isinstance(a, str) else a.__name__ for a in self.at]
        return f"Weights({', '.join(names if self.how == 'rules' else [*names, f'how={self.how!r}'])})"


Heard = list[tuple[Tap, Tensor]]  # taps, each with the gradient of its outputs


def _listen(evaluate: Evaluate, state: State, free: dict[str, Tensor], graph: bool) -> tuple[Tensor, dict[str, Tensor], Heard]:
    """The losses, the gradient by the free entries, and the gradients at the taps."""
    leaves = states.leaves(dict(free), graph)
    taps = Taps(graph)
    values = evaluate({**state, **leaves}, taps)
    if taps.disturbed:
        taps = Taps(graph, cloned=True)
        values = evaluate({**state, **leaves}, taps)
    outs = {f"{i}: {tap.weight or tap.bias}": out for i, (tap, out) in enumerate(zip(taps.heard, taps.outs, strict=True))}
    grads = gradients(values, {**leaves, **outs}, graph)
    return values, {name: grads[name] for name in free}, list(zip(taps.heard, (grads[name] for name in outs), strict=True))


def _listen_compiled(evaluate: Evaluate, state: State, free: dict[str, Tensor], graph: bool) -> tuple[Tensor, dict[str, Tensor], Heard]:
    """The same by torch.func.grad. It differentiates by inputs, so a first pass, dead code in the end, tells the shapes of the probes."""
    first = Taps(graph)
    evaluate(state, first)

    def total(free: dict[str, Tensor], probes: list[Tensor]) -> tuple[Tensor, tuple[Tensor, list[Tensor]]]:
        taps = Taps(graph, probes=probes)
        values = evaluate({**state, **free}, taps)
        return values.sum(), (values, [tap.given for tap in taps.heard])

    probes = [torch.zeros_like(out) for out in first.outs]
    (grads, slopes), (values, given) = torch.func.grad(total, argnums=(0, 1), has_aux=True)(free, probes)
    taps = [replace(tap, given=h) for tap, h in zip(first.heard, given, strict=True)]
    return values, grads, list(zip(taps, slopes, strict=True))


def _collect(name: str, heard: Heard, entry: Entry, step: tuple[int, int]) -> Entry:
    """The gradient of one parameter, from all the places where it was used."""
    offsets = [tap.offsets(g) for tap, g in heard if tap.bias == name]
    uses = [(tap, g) for tap, g in heard if tap.weight == name]
    if not uses:
        return sum(offsets, torch.zeros_like(entry)) if isinstance(entry, Tensor) else states.zero_like({name: entry})[name]
    rank = step[1] * sum(g.shape[1] for _, g in uses)
    if isinstance(entry, LowRank) and all(_products_pay(tap, rank) for tap, _ in uses):
        lefts, rights = zip(*(tap.factors(g) for tap, g in uses), strict=True)
        return LowRank(((step[0], torch.cat(lefts, 1), torch.cat(rights, 1)),))
    first, *rest = (tap.matrices(g) for tap, g in uses)
    return sum(rest, first)


def _products_pay(tap: Tap, rank: int) -> bool:
    """Whether outer products of this rank cost less than the matrix: rank (in + out) operations for each row against in * out."""
    if tap.is_table:  # to look up indices costs nothing
        return True
    return tap.groups == 1 and rank * (tap.inputs + tap.outputs) <= tap.inputs * tap.outputs


def _around(sites: list[Site], state: State, taps: Taps | None) -> Around:
    names, rows = {s.local: s.key for s in sites}, sites[0].rows
    tapped = frozenset(s.key for s in sites if s.how in TAPPED)

    def by_rule(forward: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        found = rule_for(module)
        assert found is not None
        return found[1](Use(names, rows, states.rows_of(state), state, tapped, taps), forward, module, args, kwargs)

    inside = [False]

    def by_copies(forward: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        if inside[0]:  # called by functional_call, with a query's own weights
            return (Unrolled(module) if isinstance(module, nn.RNNBase) else forward)(*args, **kwargs)
        inside[0] = True
        try:
            changes = {local: as_tensor(state[key]) for local, key in names.items()}
            return call_with_copies(module, Reading(), changes, args, kwargs, rows=dict(sites[0].all_rows))
        finally:
            inside[0] = False

    return by_copies if sites[0].call else by_rule


def _site(key: str, module: str, local: str, parameter: nn.Parameter, how: How, copied: bool = False) -> Site:
    return Site(key, module, int(copied), 0, 0, -1, tuple(parameter.shape), parameter.dtype, how, local)


def _by_rule(model: nn.Module) -> list[Site]:
    """Every parameter in every place where it is used; below a module with parameters and no rule, all is that module's."""
    names = {id(p): name for name, p in model.named_parameters()}
    sites: list[Site] = []
    covered: list[str] = []
    for path, module in model.named_modules():
        if any(path.startswith(above) for above in covered) or not list(module.parameters(recurse=False)):
            continue
        found = rule_for(module)
        whole = found is None or isinstance(module, nn.MultiheadAttention)  # its output projection is not called as a module
        if whole:
            covered.append(f"{path}." if path else "")
        local = module.named_parameters(recurse=whole, remove_duplicate=False)
        sites += [
            _site(names[id(p)], path, name, p, found[0] if found else "copies", found is None) for name, p in local if p.is_floating_point()
        ]
    return sites


def _apart_if_tied(sites: list[Site]) -> list[Site]:
    """A parameter that layers of different kinds share has copies, which all of them can use."""
    kinds: dict[str, set[str]] = {}
    for s in sites:
        kinds.setdefault(s.key, set()).add(s.how)
    return [s if len(kinds[s.key]) == 1 else replace(s, how="copies") for s in sites]


def _with_rows(sites: list[Site], seen: list[Seen]) -> tuple[Site, ...]:
    """The sites with the dimensions that hold the queries, as far as the trial passes saw their modules run (else the first)."""
    found: dict[str, dict[int, int]] = {}
    for s in seen:
        found.setdefault(s.name, {}).setdefault(s.leaf, s.rows or 0)
    rows = {name: tuple(sorted(leaves.items())) for name, leaves in found.items()}
    return tuple(replace(s, rows=found.get(s.module, {}).get(0, 0), all_rows=rows.get(s.module, ())) for s in sites)


def _nothing_moved(site: Site, queries: int, device: torch.device | None) -> Entry:
    def zeros(*shape: int, dtype: torch.dtype = site.dtype) -> Tensor:
        return torch.zeros(queries, *shape, dtype=dtype, device=device)

    if site.how == "rows of a table":
        return LowRank(((states.START, zeros(0, site.shape[1]), zeros(0, dtype=torch.int64)),))
    if site.how == "outer products" and len(site.shape) > 1:
        return LowRank(((states.START, zeros(0, site.shape[0]), zeros(0, math.prod(site.shape[1:]))),))
    return zeros(*site.shape)
