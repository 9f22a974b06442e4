"""Losses that state a law, a symmetry, or a measurement."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, Literal

import torch
from torch import Tensor

from .._entries import squares
from .._trees import Support, as_call, count_rows, first_tensor, flat_rows
from ._base import Loss, check_functions, per_query, same_shape


class Conserve(Loss):
    """A quantity of the prediction must equal that of the query.

        loss = sum_j weight_j |q_j(model(x)) - q_j(x)|        (norm="l1"; "l2" squares)

    `quantity` maps (queries, ...) to (queries,) or (queries, d); `before` is the same for the query, if that is written otherwise. Of a
    model with several inputs, `before` is given all of them; without it the quantity is that of the first.
    """

    def __init__(
        self,
        quantity: Callable[[Any], Tensor],
        *,
        before: Callable[..., Tensor] | None = None,
        norm: Literal["l1", "l2"] = "l1",
        weights: Sequence[float] | None = None,
    ):
        super().__init__()
        if norm not in ("l1", "l2"):
            raise ValueError(f"norm must be 'l1' or 'l2', not {norm!r}")
        check_functions(quantity=quantity, before=before)
        if isinstance(weights, Real):
            raise TypeError(f"weights are one for each quantity, such as [{weights}], not a number: for one of all, multiply the loss")
        self.quantity, self.before, self.norm = quantity, before, norm
        self.weights = None if weights is None else [float(w) for w in weights]

    def forward(self, model: Any, x: Any, *args: Any, **kwargs: Any) -> Tensor:
        now = self.quantity(model(x, *args, **kwargs))
        then = self.quantity(x) if self.before is None else self.before(x, *args, **kwargs)
        same_shape("the quantity of the prediction", now, "that of the query", then)
        change = per_query(now - then)
        size = change.abs() if self.norm == "l1" else squares(change)
        if self.weights is None:
            return size.sum(1)
        if len(self.weights) != size.shape[1]:
            raise ValueError(f"there are {len(self.weights)} weights for {size.shape[1]} quantities")
        return torch.stack([w * column for w, column in zip(self.weights, size.unbind(1), strict=True)]).sum(0)


class Equivariant(Loss):
    """The model must commute with the given actions of a group.

        loss = mean over g and outputs of |model(g x) - g model(x)|^2

    `actions` are pairs (on the input, on the output); an output action of None means that the prediction is invariant.
    """

    def __init__(self, actions: Sequence[tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor] | None]]):
        super().__init__()
        if not actions:
            raise ValueError("at least one action of the group is needed")
        for pair in actions:
            if not (isinstance(pair, Sequence) and len(pair) == 2 and callable(pair[0]) and (pair[1] is None or callable(pair[1]))):
                raise TypeError(f"an action is a pair (on the input, on the output or None), not {pair!r}")
        self.actions = tuple(actions)

    def forward(self, model: Any, x: Tensor) -> Tensor:
        rows = torch.stack([x, *(on_input(x) for on_input, _ in self.actions)], 1)  # (queries, 1 + actions, ...)
        plain, *moved = first_tensor(model(rows.flatten(0, 1))).unflatten(0, rows.shape[:2]).unbind(1)
        errors = []
        for y, (_, on_output) in zip(moved, self.actions, strict=True):
            expected = plain if on_output is None else on_output(plain)
            same_shape("the prediction", y, "its image under the action on the output", expected)
            errors.append(squares(per_query(y - expected)).mean(1))
        return torch.stack(errors).mean(0)


class Residual(Loss):
    """An equation must hold: the mean square of `precondition(equation(model(x), x))`; the equation is given all inputs of the model.

    A raw residual can fall while the error rises, since it weighs fine scales most; a preconditioner (an approximate inverse of the
    linearised equation) makes the two agree.
    """

    def __init__(self, equation: Callable[..., Tensor], *, precondition: Callable[[Tensor], Tensor] | None = None):
        super().__init__()
        self.equation, self.precondition = equation, precondition

    def forward(self, model: Any, *args: Any, **kwargs: Any) -> Tensor:
        residual = self.equation(model(*args, **kwargs), *args, **kwargs)
        if self.precondition is not None:
            residual = self.precondition(residual)
        return squares(per_query(residual)).mean(1)


class Misfit(Loss):
    """Measurements that come with the query must be met.

        loss = mean_j |(observe(model(x), x)_j - measured(x)_j) / sigma|^2

    A measurement that is nan is missing and does not count. Both functions are given all inputs of the model.
    """

    def __init__(self, observe: Callable[..., Tensor], measured: Callable[..., Tensor], *, sigma: float = 1.0):
        super().__init__()
        if not (sigma.ndim == 0 if isinstance(sigma, Tensor) else isinstance(sigma, Real)):
            raise TypeError(f"sigma must be a number, not {sigma!r}: where measurements have deviations of their own, divide both by them")
        if not sigma > 0:
            raise ValueError(f"sigma must be positive, not {sigma}")
        check_functions(observe=observe, measured=measured)
        self.observe, self.measured, self.sigma = observe, measured, sigma

    def forward(self, model: Any, *args: Any, **kwargs: Any) -> Tensor:
        target, observed = self.measured(*args, **kwargs), self.observe(model(*args, **kwargs), *args, **kwargs)
        same_shape("what is observed", observed, "what was measured", target)
        there = per_query(~target.isnan())
        error = per_query((observed - target.nan_to_num()) / self.sigma)
        return squares(torch.where(there, error, 0.0)).sum(1) / there.sum(1).clamp(min=1)


class Supervised(Loss):
    """The task loss on a task's support set, a mean over its examples: the inner loss of few-shot learning (Alg. 4)."""

    def __init__(self, task_loss: Callable[..., Tensor]):
        super().__init__()
        self.task_loss = task_loss  # with reduction="none", as in torch.nn.functional

    def forward(self, model: Any, support: Support) -> Tensor:
        if not isinstance(support, Support):
            raise TypeError(f"Supervised reads a Support(x, y), a task with its labels, not {type(support).__name__}")
        args, kwargs = as_call(model.once(lambda: flat_rows(support.x)))
        targets = flat_rows(support.y)
        losses = self.task_loss(model(*args, **kwargs), targets, reduction="none")
        if isinstance(targets, Tensor) and losses.shape != targets.shape[: losses.ndim]:  # broadcasting would mix tasks without a word
            raise ValueError(
                f"the task loss of targets of shape {tuple(targets.shape)} has shape {tuple(losses.shape)}, and must have a value for each "
                "target or for each example: have the model's answers the targets' shape?"
            )
        return per_query(losses, count_rows(support)).mean(1)
