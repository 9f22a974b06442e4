"""What all losses share: sums, weights, and reading features."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from .._adapted import AdaptedModel
from .._trees import first_tensor

Features = str | Callable[..., Tensor] | None  # a module's name, a function features(model, x), or None: the prediction


def of_model(model: Any, module: nn.Module) -> Any:
    """A module that a loss holds: as adapted, if it is one of the model's."""
    return model._part(module) if isinstance(model, AdaptedModel) else module


class Loss(nn.Module):
    """A tailoring loss that composes: `a + b` and `2 * a` are losses again. `Loss(function)` makes one of a plain function."""

    def __init__(self, function: Callable[..., Tensor] | None = None):
        super().__init__()
        if function is not None and not callable(function):
            raise TypeError(f"a tailoring loss is a function loss(model, x) -> (queries,), not {function!r}")
        self.function = function

    def forward(self, model: Any, *args: Any, **kwargs: Any) -> Tensor:
        if self.function is None:
            raise NotImplementedError(f"{type(self).__name__} needs a function or a forward method")
        return self.function(model, *args, **kwargs)

    def __add__(self, other: Callable[..., Tensor]) -> Loss:
        return _Sum(self, other)

    def __radd__(self, other: Any) -> Loss:
        return self if isinstance(other, Real) and other == 0 else _Sum(other, self)  # sum() starts from 0

    def __mul__(self, weight: float | Tensor) -> Loss:
        return _Weighted(self, weight)

    __rmul__ = __mul__


class _Sum(Loss):
    def __init__(self, first: Any, second: Any):
        super().__init__()
        for part in (first, second):
            if not callable(part):
                raise TypeError(f"a loss can be added to a loss only, not to {part!r}")
        self.first: Any = first
        self.second: Any = second

    def forward(self, model: Any, *args: Any, **kwargs: Any) -> Tensor:
        first, second = self.first(model, *args, **kwargs), self.second(model, *args, **kwargs)
        same_shape("the first loss of a sum", first, "the second", second)  # a mean over the batch would be added to every query
        return first + second


class _Weighted(Loss):
    weight: float | Tensor

    def __init__(self, loss: Callable[..., Tensor], weight: float | Tensor):
        super().__init__()
        if not (weight.ndim == 0 if isinstance(weight, Tensor) else isinstance(weight, Real)):
            raise TypeError(f"a loss can be multiplied by a number only, not by {weight!r}")
        self.loss = loss
        if isinstance(weight, Tensor) and not isinstance(weight, nn.Parameter):
            self.register_buffer("weight", weight, persistent=False)
        else:
            self.weight = weight

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


def per_query(t: Tensor, queries: int | None = None) -> Tensor:
    """(queries * k, ...) -> (queries, everything else); by default every row is a query."""
    if t.ndim == 0:
        raise ValueError("a value for each query is needed, shape (queries, ...), not one number: keep the rows in a mean or sum")
    return t.reshape(t.shape[0] if queries is None else queries, -1)


def grouped(t: Tensor, rows: Tensor, copies: int) -> Tensor:
    """(queries * copies, ...) -> (queries, copies, features), of features `t` that were read of so many `rows`."""
    if t.shape[0] != rows.shape[0]:
        raise ValueError(
            f"features of shape {tuple(t.shape)} were read of {rows.shape[0]} rows, one for each view of a query: they need these in their "
            "first dimension (of a layer that has them in another, read what comes after it, or give `at` a function)"
        )
    return t.reshape(t.shape[0] // copies, copies, -1)


def check_functions(**given: Any) -> None:
    """Each must be a function, or None where it may be left out."""
    for name, function in given.items():
        if function is not None and not callable(function):
            raise TypeError(f"{name} must be a function, not {type(function).__name__}")


def same_shape(what: str, first: Any, other: str, second: Any) -> None:
    """Refuse shapes that differ, where broadcasting would mix queries without a word."""
    for name, value in ((what, first), (other, second)):
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a tensor, not {type(value).__name__}")
    if first.shape != second.shape:
        raise ValueError(f"{what} has shape {tuple(first.shape)}, but {other} has shape {tuple(second.shape)}")


def class_logits(prediction: Any, classes: int | None = None) -> Tensor:
    """(queries, ..., classes), from logits that have the classes in dimension `classes`."""
    logits = first_tensor(prediction)
    if classes is None and logits.ndim > 2:
        raise ValueError(
            f"which dimension of logits of shape {tuple(logits.shape)} holds the classes? Say classes=1 (images) or classes=-1 (sequences)"
        )
    if classes is not None:
        if classes % logits.ndim == 0:
            raise ValueError(
                f"dimension {classes} of logits of shape {tuple(logits.shape)} holds the queries, and cannot hold the classes too"
            )
        logits = logits.movedim(classes, -1)
    if logits.ndim < 2 or logits.shape[-1] < 2:
        raise ValueError(f"class probabilities need logits of shape (queries, ..., at least 2 classes), not {tuple(logits.shape)}")
    return logits


def floored(log_p: Tensor) -> Tensor:
    """Without -inf: a class of probability zero must add nothing to sums of p log p, but 0 * -inf is nan."""
    return log_p.clamp(min=torch.finfo(log_p.dtype).min)


def entropy(log_p: Tensor) -> Tensor:
    """(queries, ..., classes) -> (queries,), summed over what is between"""
    return -(log_p.exp() * floored(log_p)).flatten(1).sum(1)
