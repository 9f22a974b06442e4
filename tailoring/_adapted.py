"""The model that a tailoring loss is given: the user's, with the current state bound to it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import GeneratorType
from typing import Any, NamedTuple, Self, cast

from torch import Tensor, nn
from torch._C._functorch import get_unwrapped, is_batchedtensor, is_functorch_wrapped_tensor  # pyright: ignore[reportMissingImports]
from torch.compiler import is_dynamo_compiling

from ._sites import WHOLE, Reading
from ._trees import first_tensor
from .random import fold, seeds_of

_LISTING = (
    *(nn.Module.children, nn.Module.named_children, nn.Module.modules, nn.Module.named_modules),
    *(nn.ModuleDict.values, nn.ModuleDict.items),
)


def is_mapped(t: Any) -> bool:
    """Whether torch.func.vmap has made one of many out of it, be it below derivatives."""
    while isinstance(t, Tensor) and is_functorch_wrapped_tensor(t):
        if is_batchedtensor(t):
            return True
        t = get_unwrapped(t)
    return False


def _is_one_of(t: Tensor, queries: Tensor) -> bool:
    return not is_mapped(queries) and t.shape in (queries.shape[1:], (1, *queries.shape[1:]))


class _InTurn(list["AdaptedModel"]):
    """Several modules of a Sequential."""

    def __call__(self, x: Any) -> Any:
        for part in self:
            x = part(x)
        return x


class Binding(NamedTuple):
    """What a `AdaptedModel` knows."""

    module: nn.Module
    run: Callable[[Reading, Any, Any], Any]
    query: Any
    seeds: Tensor | None
    step: int
    path: str = ""
    keep: Callable[[Callable[[], Any]], Any] | None = None
    shares: bool = False


class AdaptedModel:
    """Called like the model, it answers as adapted by the state. On `queries * k` rows each query's state serves k rows.

    Submodules and methods are reached as ever (`model.encoder(x)`, `model.blocks[0](x)`) and run with the same state.
    `output_of("layer3", x)` and `input_of("fc", x)` give what passes through a submodule while the model answers `x`. `seeds` (queries,)
    are the queries' own seeds for noise (`tailoring.random`), anew at each inner step if the loss asks for `fresh_seeds`.
    """

    __slots__ = ("_bound",)  # so that no loss can set an attribute here, which the model would not see; all other names are the model's

    def __init__(self, *binding: Any, **settings: Any):
        self._bound = Binding(*binding, **settings)

    @classmethod
    def of(cls, other: AdaptedModel) -> Self:
        """The same model, as this kind of `AdaptedModel`."""
        return cls(*other._bound)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._answer(Reading(self._bound.path) if self._bound.path else WHOLE, args, kwargs)

    def _answer(self, reading: Reading, args: Any, kwargs: Any) -> Any:
        if args and not is_dynamo_compiling() and is_mapped(args[0]) and _is_one_of(args[0], first_tensor(self._bound.query)):
            raise ValueError(
                "the tailoring loss maps the model over single queries by torch.func.vmap, which tells it nothing of whose state is meant: "
                "call it on the whole batch, and differentiate it so, too: jacrev(lambda z: model(z).sum(0))(x)"
            )
        return self._bound.run(reading, args, kwargs)

    def output_of(self, name: str, *args: Any, **kwargs: Any) -> Tensor:
        """The (first) tensor that the submodule `name` puts out, at its last call, while the model answers."""
        return self._answer(Reading(self._bound.path, self._known(name), "output"), args, kwargs)

    def input_of(self, name: str, *args: Any, **kwargs: Any) -> Tensor:
        """The (first) tensor that the submodule `name` is given, at its last call, while the model answers."""
        return self._answer(Reading(self._bound.path, self._known(name), "input"), args, kwargs)

    @property
    def seeds(self) -> Tensor:
        if self._bound.seeds is None:
            self._bound = self._bound._replace(seeds=seeds_of(self._bound.query))
        return cast(Tensor, self._bound.seeds)

    @property
    def fresh_seeds(self) -> Tensor:
        return fold(self.seeds, self._bound.step)

    def once(self, make: Callable[[], Any]) -> Any:
        """`make()`, which must depend on the query alone: made at the first inner step and kept for the others.

        What the model is given twice, the very same tensor, does not go through its unadapted first part again. A loss asks for the
        same things in the same order at every step.
        """
        return make() if self._bound.keep is None else self._bound.keep(make)

    @property
    def shares_passes(self) -> bool:
        """Whether a pass of the query by itself saves another one, or a part of it, which the answer takes. Else rows go in together."""
        return self._bound.keep is not None or self._bound.shares

    def _known(self, name: str) -> str:
        try:
            self._bound.module.get_submodule(name)
        except AttributeError:
            known = ", ".join(n for n, _ in self._bound.module.named_modules() if n)
            raise ValueError(f"the model has no module {name!r}; it has: {known}") from None
        return name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "forward":  # of any adapted module that is its call
            return self
        value = getattr(self._bound.module, name)
        if isinstance(value, nn.Module):
            return self._below(name, value)
        if getattr(value, "__func__", None) in _LISTING:  # bound, too: a module that is found there runs with the state
            return lambda: self._listed(name)
        if inspect.ismethod(value) and value.__self__ is self._bound.module:  # a method of the model runs with the state, too
            return lambda *args, **kwargs: self._returned(name, self._answer(Reading(self._bound.path, method=name), args, kwargs))
        return self._inside(value)

    def _returned(self, method: str, value: Any) -> Any:
        """What a method gave, which is used when the model is no longer adapted."""
        if isinstance(value, GeneratorType) and not hasattr(nn.Module, method):
            raise ValueError(f"the model's {method!r} is a generator, which runs after the loss has asked for it: let it return a list")
        return self._inside(value)

    def _part(self, module: nn.Module) -> Any:
        """One of the model's modules as adapted; any other as it is."""
        path = next((name for name, own in self._bound.module.named_modules() if own is module), None)
        return module if path is None else self if path == "" else self._below(path, module)

    def _inside(self, value: Any) -> Any:
        """Modules of this one as bound ones, in lists and the like too."""
        if isinstance(value, nn.Module):
            return self._part(value)
        if type(value) in (list, tuple) and any(isinstance(part, nn.Module) for part in value):
            return type(value)(self._inside(part) for part in value)
        if type(value) is dict and any(isinstance(part, nn.Module) for part in value.values()):
            return {key: self._inside(part) for key, part in value.items()}
        return value

    def __getitem__(self, index: Any) -> Any:
        """An entry of a Sequential, ModuleList or ModuleDict, or several of the first two."""
        value = cast(Any, self._bound.module)[index]
        if isinstance(index, slice):
            parts = [self._child(child) for child in value]
            return _InTurn(parts) if isinstance(self._bound.module, nn.Sequential) else parts
        return self._child(value)

    def __iter__(self) -> Iterator[Any]:
        """As the module does: over the entries of a Sequential or ModuleList, the names of a ModuleDict."""
        for part in cast(Any, self._bound.module):
            yield self._child(part) if isinstance(part, nn.Module) else part

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        return len(cast(Any, self._bound.module))

    def _child(self, module: nn.Module) -> AdaptedModel:
        return self._below(next(name for name, child in self._bound.module.named_children() if child is module), module)

    def _listed(self, how: str) -> Iterator[Any]:
        every = self._bound.module.named_modules() if how.endswith("modules") else self._bound.module.named_children()
        named = [(name, self._below(name, module) if name else self) for name, module in every]
        return iter(named if how in ("items", "named_children", "named_modules") else [bound for _, bound in named])

    def _below(self, name: str, module: nn.Module) -> AdaptedModel:
        path = f"{self._bound.path}.{name}" if self._bound.path else name
        return AdaptedModel(*self._bound._replace(module=module, path=path))
