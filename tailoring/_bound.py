"""The model that a tailoring loss is given: the user's, with the current state bound to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ._sites import Function, intercepted
from ._trees import first_tensor
from .random import fold, seeds_of


class Bound:
    """Called like the model, it answers as adapted by the state. On `queries * k` rows each query's state serves k rows.

    Submodules are reached as attributes (`model.encoder(x)`) and run with the same state. `output_of("layer3", x)` and
    `input_of("fc", x)` give what passes through a submodule while the model answers `x`. `seeds` (queries,) are the queries' own
    seeds for noise (`tailoring.random`), anew at each inner step if the loss asks for `fresh_seeds`.
    """

    def __init__(
        self, module: nn.Module, run: Callable[[Function, Any, Any], Any], query: Any, seeds: Tensor | None, step: int, path: str = ""
    ):
        self._module, self._run, self._query, self._seeds, self._step, self._path = module, run, query, seeds, step, path

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(_CallAt(self._path), args, kwargs)

    def output_of(self, name: str, *args: Any, **kwargs: Any) -> Tensor:
        """The (first) tensor that the submodule `name` puts out, at its last call, while the model answers."""
        return self._run(_Capture(self._path, self._known(name), "output"), args, kwargs)

    def input_of(self, name: str, *args: Any, **kwargs: Any) -> Tensor:
        """The (first) tensor that the submodule `name` is given, at its last call, while the model answers."""
        return self._run(_Capture(self._path, self._known(name), "input"), args, kwargs)

    @property
    def seeds(self) -> Tensor:
        if self._seeds is None:
            self._seeds = seeds_of(self._query)
        return self._seeds

    @property
    def fresh_seeds(self) -> Tensor:
        return fold(self.seeds, self._step)

    def _known(self, name: str) -> str:
        try:
            self._module.get_submodule(name)
        except AttributeError:
            known = ", ".join(n for n, _ in self._module.named_modules() if n)
            raise ValueError(f"the model has no module {name!r}; it has: {known}") from None
        return name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        value = getattr(self._module, name)
        if isinstance(value, nn.Module):
            path = f"{self._path}.{name}" if self._path else name
            return Bound(value, self._run, self._query, self._seeds, self._step, path)
        return value


class _CallAt:
    """`function(model, ...)` that calls the submodule at a path."""

    def __init__(self, path: str):
        self.path = path

    def __call__(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return model.get_submodule(self.path)(*args, **kwargs)


class _Capture:
    """`function(model, ...)` that calls the submodule at a path and returns what passes through one below it."""

    def __init__(self, path: str, name: str, side: str):
        self.path, self.name, self.side = path, name, side

    def __call__(self, model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        base = model.get_submodule(self.path)
        caught: list[Tensor] = []

        def catch(_module: nn.Module, inputs: Any, out: Any) -> None:
            caught.append(first_tensor(out if self.side == "output" else inputs))

        with intercepted(base, {self.name: catch}):
            base(*args, **kwargs)
        if not caught:
            raise ValueError(f"module {self.name!r} did not run in this forward pass")
        return caught[-1]
