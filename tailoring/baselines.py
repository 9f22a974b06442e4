"""The rivals of tailoring, as adapters: they go through the same loop with the same losses and optimisers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ._adapt import CN, Adapter, Evaluate, Shift
from ._adapted import AdaptedModel
from ._casts import Site, Sited
from ._kernels import may_look
from ._sites import Reading
from ._states import State
from ._trees import as_call, tensors

__all__ = ["Output", "Shared"]


class Output(Shift):
    """Optimise the prediction itself: a free offset added to the model's output, no parameter of the model moves.

    It serves losses that use `model(x)` only. With an optimiser of its own class (`optimizer=LBFGS()`) it is a strong rival.
    """

    def __init__(self) -> None:
        super().__init__("")

    def sites(self, model: nn.Module, x: Any) -> tuple[Site, ...]:
        return tuple(replace(site, key=f"output{site.key}") for site in super().sites(model, x))

    def bind(self, model: AdaptedModel) -> AdaptedModel:
        return _AnswersOnly.of(model)

    def __repr__(self) -> str:
        return "Output()"


class _AnswersOnly(AdaptedModel):
    """A bound model that refuses whatever an offset of the prediction cannot reach."""

    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given, own = tensors((args, kwargs)), tensors(as_call(self._bound.query))
        if len(given) != len(own) or not all(a is b or (may_look() and torch.equal(a, b)) for a, b in zip(given, own, strict=True)):
            self._refuse("calls the model on other inputs than the query (views, noise)")
        return super().__call__(*args, **kwargs)

    def output_of(self, name: str, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse(f"uses the output of {name!r}")

    def input_of(self, name: str, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse(f"uses the input of {name!r}")

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        other = value is not self and (isinstance(value, AdaptedModel) or callable(value))
        return self._refuse(f"uses {name!r}") if other else value

    def _below(self, name: str, module: nn.Module) -> NoReturn:
        self._refuse(f"uses {name!r}")

    def _refuse(self, what: str) -> NoReturn:
        raise ValueError(
            f"Output optimises the prediction itself, but the tailoring loss {what}, which that never reaches; use CN, Weights or Shift"
        )


class Shared(Adapter):
    """Batch test-time training: one state for all queries of the batch, fitted to the mean of their losses.

    Queries see each other here, by definition: the exception to the law of independence.
    """

    shared = True

    def __init__(self, adapter: Adapter | None = None):
        self.adapter = CN() if adapter is None else adapter
        self.learned_start, self.plain_kernels = self.adapter.learned_start, self.adapter.plain_kernels
        self.outer_products = self.adapter.outer_products

    def depends_on(self, model: nn.Module) -> Any:
        return self.adapter.depends_on(model)

    def reduce(self, losses: Tensor) -> Tensor:
        return losses.mean(0, keepdim=True)

    def bind(self, model: AdaptedModel) -> AdaptedModel:
        return self.adapter.bind(model)

    def sites(self, model: nn.Module, x: Any) -> tuple[Site, ...]:
        return self.adapter.sites(model, x)

    def init(self, model: nn.Module, sites: tuple[Site, ...], queries: int, device: torch.device | None = None) -> State:
        return self.adapter.init(model, sites, queries, device)

    def call(self, sited: Sited, state: State, reading: Reading, args: Any, kwargs: Any, taps: Any = None) -> Any:
        return self.adapter.call(sited, state, reading, args, kwargs, taps)

    def gradient(
        self, evaluate: Evaluate, sites: tuple[Site, ...], state: State, step: tuple[int, int], graph: bool
    ) -> tuple[Tensor, State]:
        return self.adapter.gradient(evaluate, sites, state, step, graph)

    def __repr__(self) -> str:
        return f"Shared({self.adapter!r})"
