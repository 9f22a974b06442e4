"""Adapters: which tensors belong to a query, and how the model is called with them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.utils import _pytree as pytree

from ._adapted import AdaptedModel
from ._casts import Pass, Site, Sited
from ._channels import ask_layer, channel_dimension, comes_second, default_names, is_last_hidden
from ._entries import as_tensor
from ._inner import differentiate
from ._sites import WHOLE, Around, At, Reading, check_at, describe, matching
from ._states import State
from ._trees import copies_per_query, repeat_rows
from ._watch import Seen, refuse_checkpoints, refuse_disorder, watch

Evaluate = Callable[..., Tensor]  # evaluate(state, taps=None) -> losses, (rows,); `taps` reaches `Adapter.call`


class Adapter:
    """What every adapter offers to the inner loop.

    `sites(model, x)` tells where it acts, `init(model, sites, queries)` makes the state that changes nothing, and
    `call(sited, state, reading, args, kwargs)` computes a `Reading` of the model as adapted by the state. `gradient` is the
    loss and its gradient; an adapter that needs to listen to the model for it passes `taps` through `evaluate` to its `call`.
    """

    shared = False  # one state for the whole batch, in which queries see each other
    learned_start = False
    plain_kernels = False  # cannot do with fused kernels even at first order
    outer_products = False  # its states are not all tensors
    constant_start = False  # `init` makes the same numbers, whatever the model's weights are; whoever brings an `init` says so anew

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "init" in cls.__dict__ and "constant_start" not in cls.__dict__:
            cls.constant_start = False

    def depends_on(self, model: nn.Module) -> Any:
        """What the sites depend on besides the model's modules and the shapes of its input; to be compared."""
        return None

    def rows(self, queries: int) -> int:
        """How many rows a state has for so many queries."""
        return 1 if self.shared else queries

    def reduce(self, losses: Tensor) -> Tensor:
        """The loss of each row of the state, from that of each query."""
        return losses

    def bind(self, model: AdaptedModel) -> AdaptedModel:
        """What the loss is given in place of the model; an adapter may refuse there what it cannot serve."""
        return model

    def sites(self, model: nn.Module, x: Any) -> tuple[Site, ...]:
        raise NotImplementedError

    def init(self, model: nn.Module, sites: tuple[Site, ...], queries: int, device: torch.device | None = None) -> State:
        raise NotImplementedError

    def call(self, sited: Sited, state: State, reading: Reading, args: Any, kwargs: Any, taps: Any = None) -> Any:
        """By default, edit the outputs of the modules at the sites."""
        now, at_work = cast = sited.cast(self._editor, state)
        whole = reading is WHOLE
        with at_work:
            out = sited.model(*args, **kwargs) if whole else reading(sited.model, lambda module: module(*args, **kwargs))
        if not whole and reading.is_part:
            _refuse_half(now.ran, sited.sites)
        sited.dismiss(cast)
        return out

    def _editor(self, module: nn.Module, sites: list[Site], now: Pass) -> Around:
        """Edits the module's outputs: of its n-th call by its n-th sites."""
        name, calls, edit = sites[0].module, sites[0].calls, self.edit
        only = sites[0] if calls == 1 else None

        def around(forward: Callable[..., Any], _module: nn.Module, args: Any, kwargs: Any) -> Any:
            out = forward(*args, **kwargs)
            ran = now.ran.get(name, 0)
            now.ran[name] = ran + 1
            if ran == calls:
                raise RuntimeError(
                    f"module {name!r} ran more often than in the first forward pass ({calls} times); adapt a module that runs "
                    "a fixed number of times, or give each use a module of its own"
                )
            if only is not None and isinstance(out, Tensor):  # as nearly always
                return edit(out, only, now.state)
            here = sites if calls == 1 else [site for site in sites if site.call == ran]
            if isinstance(out, Tensor):
                return edit(out, here[0], now.state) if here else out
            leaves, spec = pytree.tree_flatten(out)
            at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
            for site in here:
                leaves[at[site.leaf]] = edit(leaves[at[site.leaf]], site, now.state)
            return pytree.tree_unflatten(leaves, spec)

        return around

    def gradient(
        self, evaluate: Evaluate, sites: tuple[Site, ...], state: State, step: tuple[int, int], graph: bool
    ) -> tuple[Tensor, State]:
        """The losses at a state, (rows,), and the gradient of their sum; `step` is (which, of how many)."""
        return differentiate(evaluate, state, graph)

    def unseen_weight(self, model: nn.Module, losses: Tensor, state: State, taps: Any) -> tuple[str | None, bool]:
        """A weight that these losses use where the adapter does not see it, or None; and whether their graph could tell."""
        return None, True

    def edit(self, out: Tensor, site: Site, state: State) -> Tensor:
        raise NotImplementedError

    def __repr__(self) -> str:
        at = [a if isinstance(a, str) else a.__name__ for a in getattr(self, "at", ())]
        usual = {name: p.default for name, p in inspect.signature(type(self)).parameters.items() if p.kind is p.KEYWORD_ONLY}
        set_otherwise = [f"{name}={getattr(self, name)!r}" for name, default in usual.items() if getattr(self, name, default) != default]
        return f"{type(self).__name__}({', '.join(at + set_otherwise)})"


class CN(Adapter):
    """Conditional normalisation: a scale and a shift of each channel after the chosen modules.

        h_k  ->  gamma_k h_k + beta_k,   gamma = 1 and beta = 0 at the start

    Modules are chosen by type, name or fnmatch pattern; with none given, all normalisation layers, or, in a model without any,
    all hidden activations. Gamma and beta of a module are (queries, channels). A module that runs several times in a forward pass
    has a pair for each of its calls. `learned_start` trains what gamma and beta start from in the outer loop. `channels` names
    the dimension of the channels where it cannot be told from the layers around (a 3-dimensional output of unknown origin).
    """

    constant_start = True

    def __init__(self, *at: At, learned_start: bool = False, channels: int | None = None):
        self.at, self.learned_start, self.channels = check_at(at), learned_start, channels

    def sites(self, model: nn.Module, x: Any) -> tuple[Site, ...]:
        modules = dict(model.named_modules())
        seen = [s for s in watch(model, x) if s.leaf >= 0]
        ran = {s.name for s in seen}
        chosen = matching(self.at, modules) & ran if self.at else default_names(seen, modules)
        refuse_checkpoints(s for s in seen if s.name in chosen)
        refuse_disorder(s for s in seen if s.name in chosen)
        sites = [
            _site(s, seen, modules, channels=self.channels, ask=functools.partial(ask_layer, model, x))
            for s in seen
            if s.name in chosen and s.floating and (s.leaf == 0 or is_last_hidden(s, modules))
        ]
        if not self.at:
            sites = [site for site in sites if site is not None]
        if not sites:
            asked = f"chosen by {self!r}" if self.at else "that is a normalisation layer or a hidden activation"
            hint = " with an output of real floating-point numbers"
            if not self.at:
                functions = "activations called as functions, torch.tanh or F.relu, are none: name the layers before them"
                hint = f" ({functions}; nor is one whose output the model returns: name it if it is to be adapted)"
            raise ValueError(
                f"no module {asked} runs in this forward pass{hint}; name the modules to adapt, the model has: {describe(modules)}"
            )
        found = tuple(s for s in sites if s is not None)
        if len(found) < len(sites):
            raise ValueError(f"{self!r} chooses a module whose output has no row per query; the model has: {describe(modules)}")
        adapted = {s.module for s in found}
        for entry in self.at:
            if adapted.isdisjoint(chosen := matching((entry,), modules)):
                raise ValueError(
                    f"{', '.join(sorted(chosen))} of {self!r} cannot be adapted: it does not run when the model answers (a head that only "
                    "the loss uses?), or has no output of real floating-point numbers"
                )
        return found

    def init(self, model: nn.Module, sites: tuple[Site, ...], queries: int, device: torch.device | None = None) -> State:
        state: State = {}
        for s in sites:
            gamma, beta = s.names
            state.setdefault(gamma, torch.ones(queries, *s.shape, dtype=s.dtype, device=device))
            state.setdefault(beta, torch.zeros(queries, *s.shape, dtype=s.dtype, device=device))
        return state

    def edit(self, out: Tensor, site: Site, state: State) -> Tensor:
        own_gamma, own_beta = site.names
        gamma: Any = state[own_gamma]
        beta: Any = state[own_beta]
        if site.rows == 0 and out.shape == gamma.shape and out.dtype == gamma.dtype:  # as nearly always
            if torch.is_grad_enabled() or is_dynamo_compiling():
                return gamma * out + beta
            return torch.addcmul(beta, gamma, out)  # one operation, but a derivative of more; and compiled passes must be alike to merge
        assert site.rows is not None
        channels = site.channels
        if out.ndim != site.dims:  # the loss calls a layer with more rows in more dimensions
            channels = out.ndim - 1 if site.channels_last else channels
            if site.rows != 0 or out.ndim < 2 or channels >= out.ndim:
                raise ValueError(_changed(site, f"has {out.ndim} dimensions", f"had {site.dims}"))
        if out.shape[channels] != gamma.shape[1]:
            raise ValueError(_changed(site, f"has {out.shape[channels]} channels", f"had {gamma.shape[1]}"))
        rows = out.shape[site.rows]
        copies = copies_per_query(rows, gamma.shape[0], f"output of {site.module!r}")
        shape = [1] * out.ndim
        shape[site.rows], shape[channels] = rows, gamma.shape[1]
        gamma, beta = (repeat_rows(t, copies).reshape(shape) for t in (gamma, beta))  # (queries, C) -> (queries * copies, 1, C, 1)
        return (gamma * out + beta).to(out.dtype)  # gamma_k h_k(x) + beta_k, Sec. 4


class Shift(Adapter):
    """A free offset added to the output of one module: tailoring a representation itself (Sec. 5.3).

    The offset has the shape of the output for one query; several rows of a query (augmented views) share it.
    """

    constant_start = True

    def __init__(self, at: At, *, learned_start: bool = False):
        self.at, self.learned_start = check_at((at,)), learned_start

    def sites(self, model: nn.Module, x: Any) -> tuple[Site, ...]:
        modules = dict(model.named_modules())
        chosen = matching(self.at, modules)
        if len(chosen) > 1:
            raise ValueError(f"Shift moves the output of one module, but {self.at[0]!r} chooses {sorted(chosen)}")
        seen = [s for s in watch(model, x) if s.name in chosen and s.leaf >= 0]
        refuse_checkpoints(seen)
        refuse_disorder(seen)
        found = [s for s in seen if s.floating and s.rows is not None]
        if not found:
            raise ValueError(f"{self!r}: the module has no floating-point output with a row per query in this forward pass")
        single = len(found) == 1
        calls = 1 + max(s.call for s in seen)
        return tuple(replace(_owned(s, s.name if single else f"{s.name}:{i}"), calls=calls) for i, s in enumerate(found))

    def init(self, model: nn.Module, sites: tuple[Site, ...], queries: int, device: torch.device | None = None) -> State:
        return {f"{s.key}.shift": torch.zeros(queries, *s.shape, dtype=s.dtype, device=device) for s in sites}

    def edit(self, out: Tensor, site: Site, state: State) -> Tensor:
        assert site.rows is not None
        shift = as_tensor(state[f"{site.key}.shift"])
        copies = copies_per_query(out.shape[site.rows], shift.shape[0], f"output of {site.module!r}")
        here = out.shape[: site.rows] + out.shape[site.rows + 1 :]
        if here != shift.shape[1:]:
            raise ValueError(_changed(site, f"is {tuple(here)} for a row", f"was {tuple(shift.shape[1:])}"))
        return (out + repeat_rows(shift, copies).movedim(0, site.rows)).to(out.dtype)


def _changed(site: Site, now: str, before: str) -> str:
    return f"the output of {site.module!r} {now}, and {before} when the model was first seen: make a new Tailored of what has changed"


def _refuse_half(ran: dict[str, int], sites: tuple[Site, ...]) -> None:
    """Raise if a part of the model ran some of a module's calls: which of them, and so which of its sites, is not known."""
    for site in sites:
        if ran.get(site.module, site.calls) != site.calls:
            raise ValueError(
                f"the tailoring loss runs a part of the model in which module {site.module!r} runs {ran[site.module]} of its {site.calls} "
                "times, so it is not known which: call the whole model, or give each use a module of its own"
            )


def _site(s: Seen, seen: list[Seen], modules: dict[str, nn.Module], channels: int | None, ask: Callable[[Seen], int | None]) -> Site | None:
    if s.rows is None:
        return None
    dim = channel_dimension(s, seen, modules, ask) if channels is None else channels % len(s.shape)
    if dim == s.rows:
        raise ValueError(f"dimension {dim} of the output of {s.name!r} holds the queries and cannot hold the channels too")
    last = dim == len(s.shape) - 1 if channels is None else channels < 0
    last = last and not comes_second(s, seen, modules)
    calls = 1 + max(other.call for other in seen if other.name == s.name)
    key = s.name if calls == 1 else f"{s.name}:{s.call}"
    names = f"{key}.gamma", f"{key}.beta"
    place = {"dims": len(s.shape), "channels_last": last}
    return Site(key, s.name, s.call, s.leaf, s.rows, dim, (s.shape[dim],), _state_dtype(s), calls=calls, names=names, **place)


def _owned(s: Seen, key: str) -> Site:
    assert s.rows is not None
    shape = s.shape[: s.rows] + s.shape[s.rows + 1 :]
    return Site(key, s.name, s.call, s.leaf, s.rows, -1, shape, _state_dtype(s))


def _state_dtype(s: Seen) -> torch.dtype:
    return torch.promote_types(s.dtype, torch.float32)  # a step of 1e-3 from gamma = 1 is lost in bfloat16
