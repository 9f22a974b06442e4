"""`Weights`: every query has weights of its own (MAMmoTh, Alg. 1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils import _pytree as pytree

from ._adapt import Adapter, Site
from ._recurrent import unrolled_layers
from ._rules import State
from ._sites import At, Reading, alone, check_at, describe, matching
from ._trees import copies_per_query, count_rows


class Weights(Adapter):
    """The chosen parameters, one copy per query; by default all floating-point parameters of the model.

        theta_x = theta - lr * d/dtheta loss(theta, x)

    Modules are chosen as for `CN`, with everything below them; a pattern may also name parameters (`"*.bias"`). The state holds
    each parameter under its own name, (queries, *its shape). The model runs under `torch.func.vmap`, as if once for each query,
    so it must allow that: rows first, no change of buffers, no control flow that depends on the numbers. With `loop`, it does run
    once for each query, which is as exact, slower, and asks for nothing.
    """

    plain_kernels = True  # vmap has no rule for fused attention

    def __init__(self, *at: At, loop: bool = False):
        self.at, self.loop = check_at(at), loop

    def sites(self, model: nn.Module, x: Any) -> tuple[Site, ...]:
        named = {name: p for name, p in model.named_parameters() if p.is_floating_point()}
        chosen = [name for name in named if name in self._chosen(model, named)]
        if not chosen:
            raise ValueError(f"{self!r} chooses no parameters; the model has: {', '.join(named) or 'none'}")
        return tuple(Site(name, name.rpartition(".")[0], 0, 0, 0, -1, tuple(named[name].shape), named[name].dtype) for name in chosen)

    def _chosen(self, model: nn.Module, named: dict[str, nn.Parameter]) -> set[str]:
        modules = dict(model.named_modules())
        if not self.at:
            return set(named)
        chosen: set[str] = set()
        for entry in self.at:
            parts = {**modules, **named} if isinstance(entry, str) else modules
            try:
                found = matching((entry,), parts)  # type: ignore[arg-type]
            except ValueError as error:
                raise ValueError(f"no module or parameter matches {entry!r}; the model has: {describe(modules)}") from error
            chosen |= {p for p in named if p in found or any(p.startswith(f"{m}.") for m in found if m) or "" in found}
        return chosen

    def init(self, model: nn.Module, sites: tuple[Site, ...], queries: int, device: torch.device | None = None) -> State:
        with alone():
            named = dict(model.named_parameters())
        return {s.key: named[s.key].expand(queries, *s.shape) for s in sites}

    def call(self, model: nn.Module, sites: tuple[Site, ...], state: State, reading: Reading, args: Any, kwargs: Any) -> Any:
        queries = next(iter(state.values())).shape[0]
        copies = copies_per_query(count_rows((args, kwargs)), queries, "input of the model")
        leaves, spec = pytree.tree_flatten((args, kwargs))
        rowed = [isinstance(leaf, Tensor) and leaf.ndim > 0 for leaf in leaves]
        grouped = [leaf.unflatten(0, (queries, copies)) for leaf, has_rows in zip(leaves, rowed, strict=True) if has_rows]
        found: list[Any] = []  # the output's structure, told by the (single) run under vmap

        def one(own: State, *inputs: Tensor) -> list[Tensor]:
            inputs_left = iter(inputs)
            filled = [next(inputs_left) if has_rows else leaf for leaf, has_rows in zip(leaves, rowed, strict=True)]
            own_args, own_kwargs = pytree.tree_unflatten(filled, spec)
            out = reading(model, lambda module: functional_call(module, _below(own, reading.path), own_args, own_kwargs))
            flat, out_spec = pytree.tree_flatten(out)
            found.append((flat, out_spec))
            return [t for t in flat if isinstance(t, Tensor)]

        with alone():  # functional_call swaps the module's weights while it runs
            results = _in_turn(one, state, *grouped) if self.loop else _at_once(model, one, state, *grouped)
        flat, out_spec = found[-1]
        outputs = iter(t.flatten(0, 1) if t.ndim > 1 else t for t in results)  # (queries, copies, ...) -> (queries * copies, ...)
        return pytree.tree_unflatten([next(outputs) if isinstance(t, Tensor) else t for t in flat], out_spec)


def _at_once(model: nn.Module, one: Callable[..., list[Tensor]], state: State, *inputs: Tensor) -> list[Tensor]:
    with unrolled_layers(model):
        try:
            return vmap(one)(state, *inputs)
        except RuntimeError as error:
            if "vmap" not in str(error) and "atching rule" not in str(error):
                raise
            raise RuntimeError(
                f"torch.func.vmap cannot run this model: {error}\nUse Weights(..., loop=True), one query after another"
            ) from error


def _in_turn(one: Callable[..., list[Tensor]], state: State, *inputs: Tensor) -> list[Tensor]:
    queries = inputs[0].shape[0]
    outputs = [one({name: t[i] for name, t in state.items()}, *(t[i] for t in inputs)) for i in range(queries)]
    return [torch.stack(parts) for parts in zip(*outputs, strict=True)]


def _below(state: State, path: str) -> State:
    """The part of a state that belongs to the submodule at `path`, by the names it has there."""
    prefix = f"{path}." if path else ""
    return {name.removeprefix(prefix): t for name, t in state.items() if name.startswith(prefix)}
