"""Running what lies below the first adapted module once, not at every inner step.

A module that is given the very tensors that it was given before, and holds nothing that is adapted, would answer what it answered before.
So its answer is kept, and the next module is given the very tensor again: the whole prefix of a network of submodule calls
runs once for each input. What stands between two such calls in plain functions breaks the chain, and costs time, never truth.
So does whatever lets a module be more than a function of its tensors: attributes that change, lists and objects that it is given, hooks
inside. (An object that it holds counts as the same while it is: one that changes inside, without a tensor, is not noticed.)
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor  # pyright: ignore[reportMissingImports]
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.utils import _pytree as pytree

from ._adapt import Adapter
from ._casts import Sited
from ._kernels import all_modules, plain_kernels
from ._sites import Reading, StandIn, intercepted
from ._trees import map_tensors, model_call, tensors
from ._untouched import untouched
from ._watch import Seen, first_and_another

Prefix = Mapping[str, tuple[str, ...]]  # modules whose answers can be kept; of each, where the numbers are that it may look at
WORTH_IT = 0.1  # of the multiplications of a forward pass; a smaller prefix costs more to look after than it saves,
WORTH_KEEPING = 1_000_000  # as does, in eager mode, one with fewer multiplications in the whole batch: those take 0.1 ms on a CPU


# Of what else a module is given, or answers, only what cannot change may be kept: a list or an object may be another one later.
_CONSTANTS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)


@dataclass
class _Kept:
    """One answer of a module. It holds while the module is what it was then, and no tensor has been changed in place since."""

    given: list[Any]
    out: list[Any]
    out_spec: Any
    held: list[Any]
    versions: list[int]
    circumstances: Any
    asked: int  # the last pass that asked for it

    def answers(self, given: list[Any], held: list[Any], circumstances: Any) -> bool:
        alike = circumstances == self.circumstances and len(given) == len(self.given) and all(map(_same, given, self.given))
        unchanged = len(held) == len(self.held) and all(map(operator.is_, held, self.held))
        return alike and unchanged and self.versions == _versions([*self.given, *self.out, *self.held])


def _same(a: Any, b: Any) -> bool:
    """The very same tensor, or the same view (`x.flatten(1)`) of the same memory; of what else a module is given, equal."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return type(a) is type(b) and a == b
    return a is b or (_in_memory(a) and _in_memory(b) and _place(a) == _place(b))


def _in_memory(t: Tensor) -> bool:
    return not is_dynamo_compiling() and type(t) is Tensor and t.layout == torch.strided


def _place(t: Tensor) -> tuple[Any, ...]:
    return t.data_ptr(), t.shape, t.stride(), t.dtype, t.device, *_versions([t]), t.is_conj(), t.is_neg()


def _versions(found: list[Any]) -> list[int]:
    if is_dynamo_compiling():
        return []
    return [0 if t.is_inference() else t._version for t in found if isinstance(t, Tensor)]  # inference tensors cannot change here


def _constant(leaf: Any) -> bool:
    if not isinstance(leaf, Tensor):
        return isinstance(leaf, _CONSTANTS)
    return is_dynamo_compiling() or not is_functorch_wrapped_tensor(leaf)


def _circumstances(spec: Any, given: list[Any]) -> Any:
    """On what else an answer depends: how the module is called, and in which precision."""
    if is_dynamo_compiling():
        return spec
    device = next((t.device.type for t in given if isinstance(t, Tensor)), "cpu")
    return spec, torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)


def held_by(module: nn.Module) -> list[Any]:
    """All that a module and those below it own: a module with another attribute than before may answer otherwise."""
    found: list[Any] = []
    for m in all_modules(module) if module._modules else (module,):
        for key, value in vars(m).items():
            if isinstance(value, dict):  # many are, and nearly all are empty
                if value:
                    found += value.values()
            elif isinstance(value, list | set | tuple):
                found += value
            elif key != "forward" or m is not module:  # what stands in its own way is ours
                found.append(value)
    return found


class Reuse:
    """What the passes of one batch have in common: answers of the modules named, and what the loss makes of the queries alone."""

    def __init__(self, model: nn.Module, prefix: Prefix):
        self.model, self._prefix = model, prefix
        self.names = tuple(name for name in prefix if not _hooked_below(model.get_submodule(name)))
        self.used: set[str] = set()
        self._kept: dict[str, list[_Kept]] = {}
        self._made: list[tuple[Any, list[int]]] = []
        self._next = self._pass = 0

    def begin(self) -> None:
        """A new pass of the loss, or of the answer. What the last pass did not ask for (fresh noise) need not be kept any longer."""
        self._next = 0
        self._pass += 1
        self._kept = {name: [kept for kept in all_kept if kept.asked >= self._pass - 1] for name, all_kept in self._kept.items()}

    def serving(self, *, keep: bool) -> AbstractContextManager[None]:
        """Within the block, modules answer from before where they can; with `keep`, new answers are kept."""
        return intercepted([StandIn(self.model.get_submodule(name), functools.partial(self._answer, name, keep)) for name in self.names])

    def once(self, make: Callable[[], Any], *, keep: bool) -> Any:
        """`make()`, as it came out when a pass first got here."""
        place = self._next
        self._next += 1
        if place < len(self._made):
            made, versions = self._made[place]
            if versions == _versions(tensors(made)):  # else the model worked in place
                return made
        made = make()
        if keep and place <= len(self._made):
            self._made[place:] = [(made, _versions(tensors(made))), *self._made[place + 1 :]]
        return made

    def _answer(self, name: str, keep: bool, forward: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        given, spec = _flat_call(args, kwargs)
        if not _keepable(given):
            return forward(*args, **kwargs)
        held, circumstances = self._held(name, module), _circumstances(spec, given)
        for kept in self._kept.get(name, ()):
            if kept.answers(given, held, circumstances):
                kept.asked = self._pass
                self.used.add(name)
                return kept.out[0] if kept.out_spec is None else pytree.tree_unflatten(kept.out, kept.out_spec)
        if not keep:
            return forward(*args, **kwargs)
        before = _versions([*given, *held])
        own_args, own_kwargs = args, kwargs
        if getattr(module, "inplace", False):  # it would overwrite an answer that is kept
            own_args, own_kwargs = map_tensors(torch.clone, (args, kwargs))
        with torch.no_grad():
            out = forward(*own_args, **own_kwargs)
        leaves, out_spec = ([out], None) if isinstance(out, Tensor) else pytree.tree_flatten(out)
        now = _Kept(given, leaves, out_spec, held, _versions([*given, *leaves, *held]), circumstances, self._pass)
        after, after_spec = _flat_call(args, kwargs)
        untouched = (
            spec == after_spec and before == _versions([*given, *held]) and now.answers(after, self._held(name, module), circumstances)
        )
        if untouched and all(map(_constant, leaves)):
            self._kept.setdefault(name, []).append(now)
        return out

    def _held(self, name: str, module: nn.Module) -> list[Any]:
        if is_dynamo_compiling():  # numbers at least, which dynamo follows; tensors were watched when the prefix was found
            return [_at(self.model, path) for path in self._prefix[name]]
        return held_by(module)


def _flat_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
    """As `tree_flatten`, which takes longer than a small layer, does; None is the structure of a single tensor, as nearly always."""
    if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):
        return [args[0]], None
    return pytree.tree_flatten((args, kwargs))


def _keepable(given: list[Any]) -> bool:
    """Whether an answer can be kept for other passes. What needs gradients may come from the state, or wants one of its own."""
    if is_dynamo_compiling():
        return not any(isinstance(t, Tensor) and t.requires_grad for t in given)
    differentiated = forward_ad._current_level >= 0 or any(isinstance(t, Tensor) and t.requires_grad for t in given)
    return not differentiated and all(map(_constant, given))


def _hooked_below(module: nn.Module) -> bool:
    """Whether someone listens inside, and would hear nothing from a module that does not run."""
    return any(m._forward_hooks or m._forward_pre_hooks for m in all_modules(module)[1:])


def find_prefix(adapt: Adapter, here: Sited, seen: list[Seen], x: Any) -> Prefix:
    """The modules whose answers can be kept from pass to pass, if they are worth it: found by trying it on two queries."""
    model, sites = here.model, here.sites
    outputs = {model.get_submodule(s.module) for s in sites if not s.local}  # whose answers are edited
    weights = {model.get_submodule(s.module) for s in sites if s.local}  # whose parameters are each query's own
    names = tuple(_outermost(model, "", outputs, weights))
    if _share(model, names, seen) < WORTH_IT:
        return {}
    with untouched(model):
        x = first_and_another(model, x)
    args, kwargs = model_call(x)
    state = adapt.init(model, sites, adapt.rows(2), tensors(x)[0].device)

    def passes(reuse: Reuse, times: int) -> Reuse:
        for _ in range(times):
            reuse.begin()
            with reuse.serving(keep=True):
                adapt.call(here, state, Reading(), args, kwargs)
        return reuse

    with torch.no_grad(), untouched(model), plain_kernels(model, graph=adapt.plain_kernels):
        every = {name: _numbers(model, name) for name in names}
        found, again = passes(Reuse(model, every), 2), passes(Reuse(model, every), 1)
    prefix = {name: every[name] for name in names if name in found.used and _alike(found._kept[name], again._kept.get(name, []))}
    return prefix if _share(model, tuple(prefix), seen) >= WORTH_IT else {}


def _numbers(model: nn.Module, name: str) -> tuple[str, ...]:
    """Where a module and those below it hold numbers, or what may become one, that a loss may change between two passes."""
    below = model.get_submodule(name).named_modules(prefix=name)
    held = [(f"{path}.{key}", value) for path, module in below for key, value in vars(module).items() if not key.startswith("_")]
    return tuple(path for path, value in held if isinstance(value, (*_CONSTANTS, tuple)))


def _at(model: nn.Module, path: str) -> Any:
    owner, _, name = path.rpartition(".")
    return getattr(model.get_submodule(owner), name)


def _outermost(module: nn.Module, name: str, outputs: set[nn.Module], weights: set[nn.Module]) -> Iterator[str]:
    """The largest modules with nothing adapted inside (under whatever name), neither the `outputs` of modules nor the `weights`."""
    if module in weights:
        return
    below = all_modules(module)[1:]
    if not isinstance(module, nn.ModuleList | nn.ModuleDict) and (outputs | weights).isdisjoint(below):  # those are never called themselves
        yield name
        return
    for child, inner in module.named_children():
        yield from _outermost(inner, f"{name}.{child}" if name else child, outputs, weights)


def worth_keeping(multiplications: float) -> bool:
    """Whether a prefix that makes so many of them for a batch is worth its keep: always in compiled code, which looks after nothing."""
    return is_dynamo_compiling() or multiplications >= WORTH_KEEPING


def _share(model: nn.Module, names: tuple[str, ...], seen: list[Seen]) -> float:
    """The part of a forward pass's multiplications that these modules make."""
    return multiplications(model, names, seen) / max(1, multiplications(model, ("",), seen))


def multiplications(model: nn.Module, names: Iterable[str], seen: list[Seen]) -> int:
    """How many these modules make, for as many queries as were seen."""
    modules = dict(model.named_modules())
    costs = [(s.name, _multiplications(modules[s.name], s.shape)) for s in seen if s.leaf == 0]
    return sum(cost for name, cost in costs if any(name == n or not n or name.startswith(f"{n}.") for n in names))


def _multiplications(module: nn.Module, out: tuple[int, ...]) -> int:
    weights = [p for p in module.parameters(recurse=False) if p.ndim > 1]
    return 0 if isinstance(module, nn.Embedding) else math.prod(out) * sum(math.prod(p.shape[1:]) for p in weights)


def _alike(first: list[_Kept], second: list[_Kept]) -> bool:
    """Whether a module answered alike twice: one that draws random numbers does not."""
    pairs = [(tensors(a.out), tensors(b.out)) for a, b in zip(first, second, strict=False)]
    return bool(pairs) and all(torch.allclose(a, b, equal_nan=True) for left, right in pairs for a, b in zip(left, right, strict=True))
