"""Running what lies below the first adapted module once, not at every inner step.

A module that is given the very tensors that it was given before, and holds nothing that is adapted, would answer what it answered before.
So its answer is kept, and the next module is given the very tensor again: the whole prefix of a network of submodule calls
runs once for each input. What stands between two such calls in plain functions breaks the chain, and costs time, never truth.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor  # pyright: ignore[reportMissingImports]
from torch.utils import _pytree as pytree

from ._kernels import plain_kernels
from ._sites import Reading, Seen, first_and_another, intercepted
from ._trees import map_tensors, model_call, tensors

WORTH_IT = 0.1  # of the multiplications of a forward pass; a smaller prefix costs more to look after than it saves


@dataclass(frozen=True)
class _Kept:
    """One answer of a module. Tensors that were changed in place since are not what they were."""

    given: list[Any]
    spec: Any
    out: Any
    versions: list[int]

    def answers(self, leaves: list[Any], spec: Any) -> bool:
        same = spec == self.spec and all(_same(a, b) for a, b in zip(leaves, self.given, strict=True))
        return same and self.versions == _versions(self.given, self.out)


def _same(a: Any, b: Any) -> bool:
    """The very same tensor, or the same view (`x.flatten(1)`) of the same memory; of what else a module is given, equal."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return type(a) is type(b) and a == b
    return a is b or (_in_memory(a) and _in_memory(b) and _place(a) == _place(b))


def _in_memory(t: Tensor) -> bool:
    return not torch.compiler.is_compiling() and type(t) is Tensor and t.layout == torch.strided and not is_functorch_wrapped_tensor(t)


def _place(t: Tensor) -> tuple[Any, ...]:
    return t.data_ptr(), t.shape, t.stride(), t.dtype, t.device, t._version, t.is_conj(), t.is_neg()


def _versions(given: Any, out: Any) -> list[int]:
    return [] if torch.compiler.is_compiling() else [t._version for t in tensors((given, out))]


class Reuse:
    """What the passes of one batch have in common: answers of the modules named, and what the loss makes of the queries alone."""

    def __init__(self, model: nn.Module, names: tuple[str, ...]):
        self.model, self.names = model, names
        self.used: set[str] = set()
        self._kept: dict[str, list[_Kept]] = {}
        self._made: list[Any] = []
        self._next = 0
        self._weights = [p for name in names for p in model.get_submodule(name).parameters()]
        self._weights_were = self._weights_are()

    @contextmanager
    def pass_through(self, *, keep: bool) -> Iterator[None]:
        """One pass: within the block, modules answer from before where they can; with `keep`, new answers are kept."""
        self._next = 0
        if self._weights_were != (now := self._weights_are()):  # trained between two steps
            self._weights_were = now
            self._kept.clear()
        with intercepted(self.model, {name: functools.partial(self._answer, name, keep) for name in self.names}):
            yield

    def once(self, make: Callable[[], Any], *, keep: bool) -> Any:
        """`make()`, as it came out when a pass first got here."""
        place = self._next
        self._next += 1
        if place < len(self._made):
            return self._made[place]
        made = make()
        if keep and place == len(self._made):
            self._made.append(made)
        return made

    def _answer(self, name: str, keep: bool, forward: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        for kept in self._kept.get(name, ()):
            if kept.answers(leaves, spec):
                self.used.add(name)
                return kept.out
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if not keep or any(t.requires_grad for t in given):  # what needs gradients may come from the state
            return forward(*args, **kwargs)
        if getattr(module, "inplace", False):  # it would overwrite an answer that is kept
            args, kwargs = map_tensors(torch.clone, (args, kwargs))
        before = _versions(leaves, ())
        with torch.no_grad():
            out = forward(*args, **kwargs)
        if before == _versions(leaves, ()):
            self._kept.setdefault(name, []).append(_Kept(leaves, spec, out, _versions(leaves, out)))
        return out

    def _weights_are(self) -> list[int]:
        return _versions(self._weights, ())


def passing(reuse: Reuse | None, *, keep: bool) -> AbstractContextManager[None]:
    return nullcontext() if reuse is None else reuse.pass_through(keep=keep)


def find_prefix(adapt: Any, model: nn.Module, sites: Any, seen: list[Seen], x: Any) -> tuple[str, ...]:
    """The modules whose answers can be kept from pass to pass, if they are worth it: found by trying it on two queries."""
    outputs, weights = {s.module for s in sites if not s.local}, {s.module for s in sites if s.local}
    names = tuple(_outermost(model, "", outputs, weights))
    if _share(model, names, seen) < WORTH_IT:
        return ()
    x = first_and_another(x)
    args, kwargs = model_call(x)
    state = adapt.init(model, sites, adapt.rows(2), tensors(x)[0].device)

    def passes(reuse: Reuse, times: int) -> Reuse:
        for _ in range(times):
            with reuse.pass_through(keep=True):
                adapt.call(model, sites, state, Reading(), args, kwargs)
        return reuse

    with torch.no_grad(), plain_kernels(model, graph=adapt.plain_kernels):
        found, again = passes(Reuse(model, names), 2), passes(Reuse(model, names), 1)
    prefix = tuple(name for name in names if name in found.used and _alike(found._kept[name], again._kept.get(name, [])))
    return prefix if _share(model, prefix, seen) >= WORTH_IT else ()


def _outermost(model: nn.Module, name: str, outputs: set[str], weights: set[str]) -> Iterator[str]:
    """The largest modules with nothing adapted inside, neither the `outputs` of modules nor the `weights`."""
    below = f"{name}." if name else ""
    if name in weights:
        return
    if not isinstance(model, nn.ModuleList | nn.ModuleDict) and not any(  # these are never called themselves
        site != name and site.startswith(below) for site in outputs | weights
    ):
        yield name
        return
    for child, module in model.named_children():
        yield from _outermost(module, f"{below}{child}", outputs, weights)


def _share(model: nn.Module, names: tuple[str, ...], seen: list[Seen]) -> float:
    """The part of a forward pass's multiplications that these modules make."""
    modules = dict(model.named_modules())
    costs = [(s.name, _multiplications(modules[s.name], s.shape)) for s in seen if s.leaf == 0]
    mine = sum(cost for name, cost in costs if any(name == n or not n or name.startswith(f"{n}.") for n in names))
    return mine / max(1, sum(cost for _, cost in costs))


def _multiplications(module: nn.Module, out: tuple[int, ...]) -> int:
    weights = [p for p in module.parameters(recurse=False) if p.ndim > 1]
    return 0 if isinstance(module, nn.Embedding) else math.prod(out) * sum(p[0].numel() for p in weights)


def _alike(first: list[_Kept], second: list[_Kept]) -> bool:
    """Whether a module answered alike twice: one that draws random numbers does not."""
    pairs = [(tensors(a.out), tensors(b.out)) for a, b in zip(first, second, strict=False)]
    return bool(pairs) and all(torch.allclose(a, b, equal_nan=True) for left, right in pairs for a, b in zip(left, right, strict=True))
