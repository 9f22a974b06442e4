"""What all losses share: sums, weights, and reading features."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from .._trees import first_tensor

Features = str | Callable[..., Tensor] | None  # a module's name, a function features(model, x), or None: the prediction


class Loss(nn.Module):
    """A tailoring loss that composes: `a + b` and `2 * a` are losses again. `Loss(function)` makes one of a plain function."""

    def __init__(self, function: Callable[..., Tensor] | None = None):
        super().__init__()
        self.function = function

    def forward(self, model: Any, *args: Any, **kwargs: Any) -> Tensor:
        if self.function is None:
            raise NotImplementedError(f"{type(self).__name__} needs a function or a forward method")
        return self.function(model, *args, **kwargs)

    def __add__(self, other: Callable[..., Tensor]) -> Loss:
        return _Sum(self, other)

    def __radd__(self, other: Any) -> Loss:
        return _Sum(other, self) if callable(other) or other != 0 else self  # sum() starts from 0

    def __mul__(self, weight: float | Tensor) -> Loss:
        return _Weighted(self, weight)

    __rmul__ = __mul__


class _Sum(Loss):
    def __init__(self, first: Any, second: Any):
        super().__init__()
        if not callable(first) or not callable(second):
            raise TypeError("a loss can be added to a loss only")
        self.first: Any = first
        self.second: Any = second

    def forward(self, model: Any, *args: Any, **kwargs: Any) -> Tensor:
        return self.first(model, *args, **kwargs) + self.second(model, *args, **kwargs)


class _Weighted(Loss):
    def __init__(self, loss: Callable[..., Tensor], weight: float | Tensor):
        super().__init__()
        if callable(weight) and not isinstance(weight, Tensor):
            raise TypeError("a loss can be multiplied by a number only")
        self.loss, self.weight = loss, weight

    def forward(self, model: Any, *args: Any, **kwargs: Any) -> Tensor:
        return self.weight * self.loss(model, *args, **kwargs)


class input_of:  # noqa: N801 - reads as the function it is: features at `input_of("fc")`
    """Features that enter a module: `Smooth(0.1, at=input_of("fc"))` is the penultimate layer wherever the pooling is done."""

    def __init__(self, name: str):
        self.name = name

    def __call__(self, model: Any, *args: Any, **kwargs: Any) -> Tensor:
        return model.input_of(self.name, *args, **kwargs)


def read(model: Any, at: Features, x: Any) -> Tensor:
    """The features of `x` at `at`."""
    if at is None:
        return first_tensor(model(x))
    return model.output_of(at, x) if isinstance(at, str) else at(model, x)


def per_query(t: Tensor, queries: int) -> Tensor:
    """(queries * k, ...) -> (queries, everything else)"""
    return t.reshape(queries, -1)


def grouped(t: Tensor, copies: int) -> Tensor:
    """(queries * copies, ...) -> (queries, copies, features)"""
    return t.reshape(t.shape[0] // copies, copies, -1)
