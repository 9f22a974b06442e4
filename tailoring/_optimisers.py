"""How a state moves, given the gradient of each query's tailoring loss.

A rule is a pair of pure functions over states:

    memory = rule.init(moved)
    move, memory = rule.update(grads, memory, moved=..., values=..., step=...)

where `moved` is how far the state has come from its start and `values` (queries,) are the losses there.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from numbers import Real
from typing import Any, Protocol

import torch
from torch import Tensor

from . import _states as states
from ._entries import as_tensor, by_row, in_parts, per_row
from ._states import State

Rate = float | Sequence[float] | Tensor  # one for all steps, or one per step
Rates = Rate | Mapping[str, Rate]  # one for all of the state, or by (pattern of) name


class Rule(Protocol):
    general: bool  # works on every state; else on tensors only
    searches: bool  # takes back a step that made a loss infinite, so that is no failure
    differentiable: bool

    @property
    def moves_tell(self) -> bool:
        """Whether a gradient that is not finite makes the move of its own row not finite, and of no other: a look at the moves will do."""
        ...

    def init(self, moved: State) -> Any: ...

    def update(self, grads: State, memory: Any, *, moved: State, values: Tensor, step: int) -> tuple[State, Any]: ...


class Descent:
    """Gradient descent: `move = -lr * v`, `v = momentum * v + clip(grad + proximal * moved)`.

    `clip` bounds the norm of each query's own gradient, over all of its state. `proximal` is the weight rho of
    rho/2 |state - start|^2, which keeps the state near its start (the paper's theta' ~ theta).
    """

    general = True
    searches = False
    differentiable = True

    def __init__(self, lr: Rates, *, momentum: float = 0.0, clip: float | None = None, proximal: float = 0.0):
        lr = _plain(lr)
        self.lr, self.momentum, self.clip, self.proximal = lr, momentum, clip, proximal
        self._keys: dict[str, str] = {}  # of a dict of step sizes, which of them a name has
        for rate in lr.values() if isinstance(lr, Mapping) else [lr]:
            _check_rate(rate)
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum must lie in [0, 1), not {momentum}")
        if clip is not None and not 0 < clip < math.inf:
            raise ValueError(f"clip must be positive and finite, not {clip}; None clips nothing")
        if not proximal >= 0:
            raise ValueError(f"proximal must not be negative, but it is {proximal}")

    def init(self, moved: State) -> State:
        return states.zero_like(moved) if self.momentum else {}

    def update(self, grads: State, memory: State, *, moved: State, values: Tensor, step: int) -> tuple[State, State]:
        if self.proximal:
            grads = states.add(grads, states.scale(moved, lambda _: self.proximal))
        if self.clip is not None:
            grads = _clipped(grads, self.clip)
        if self.momentum:
            grads = memory = states.add(states.scale(memory, lambda _: self.momentum), grads)
        return states.scale(grads, lambda name: -self.rate(name, step)), memory

    @property
    def is_plain(self) -> bool:
        """Whether a step is -lr * grad, the lr being numbers."""
        numbers = type(self.lr) is float or self.moves_tell  # the first is quickly asked, and nearly always so
        return numbers and not (self.momentum or self.clip or self.proximal)

    @property
    def moves_tell(self) -> bool:
        """With numbers for lr. One that is learned has grad for its derivative, and 0 * inf = nan."""
        rates = self.lr.values() if isinstance(self.lr, Mapping) else [self.lr]
        return not any(isinstance(rate, Tensor) for rate in rates)

    def rates(self, names: Iterable[str], step: int) -> dict[str, float | Tensor]:
        """The step sizes of some tensors of the state at one step."""
        return dict.fromkeys(names, self.lr) if type(self.lr) is float else {name: self.rate(name, step) for name in names}

    def rate(self, name: str, step: int) -> float | Tensor:
        """The step size of one tensor of the state at one step."""
        rate = self.lr
        if type(rate) is float:
            return rate
        if isinstance(rate, Mapping):
            if name not in self._keys:  # dynamo cannot follow patterns: whoever compiles has asked before
                self._keys[name] = self._key(name, rate)
            rate = rate[self._keys[name]]
        if isinstance(rate, Sequence) or (isinstance(rate, Tensor) and rate.ndim):
            if step >= len(rate):
                raise ValueError(f"lr has {len(rate)} step sizes, one for each step, and the model takes more steps")
            return rate[step]
        return rate

    def _key(self, name: str, rates: Mapping[str, Any]) -> str:
        found = [key for key in rates if key == name or fnmatchcase(name, key)]
        if not found:
            pattern = f"*.{name.split('.')[-1]}"
            raise ValueError(
                f"lr names no step size for {name!r}; it has: {list(rates)} (these are names, or patterns such as {pattern!r})"
            )
        return name if name in rates else found[0]

    def check_names(self, names: Iterable[str]) -> None:
        """Refuse a step size of nothing: a slip of the pen, or one behind a pattern that takes all."""
        if isinstance(self.lr, Mapping):
            used = {self._key(name, self.lr) for name in names}
            if unused := [key for key in self.lr if key not in used]:
                raise ValueError(
                    f"lr[{unused[0]!r}] is the step size of nothing (of several patterns that match, the first counts); the state has: "
                    f"{', '.join(names)}"
                )

    @property
    def learned(self) -> list[Tensor]:
        rates = self.lr.values() if isinstance(self.lr, Mapping) else [self.lr]
        return [rate for rate in rates if isinstance(rate, Tensor) and rate.requires_grad]

    def __repr__(self) -> str:
        return f"Descent(lr={self.lr}, momentum={self.momentum}, clip={self.clip}, proximal={self.proximal})"

    def check_steps(self, steps: int) -> None:
        for rate in self.lr.values() if isinstance(self.lr, Mapping) else [self.lr]:
            count = len(rate) if isinstance(rate, Sequence) or (isinstance(rate, Tensor) and rate.ndim) else steps
            if count < steps:
                raise ValueError(f"lr has {count} step sizes for {steps} steps")


def _clipped(grads: State, most: float) -> State:
    """Gradients no longer than `most`. A row is divided by its largest number first, so that no square is too large or too small."""
    largest = states.largest(grads)
    largest = torch.where(largest > 0, largest, 1.0)
    squares = states.square_norms(states.scale(grads, lambda _: 1 / largest))
    norms = squares.clamp(min=torch.finfo(squares.dtype).tiny).sqrt()  # whose slope at zero is infinite
    inside = largest * norms <= most
    grads = states.scale(grads, lambda _: torch.where(inside, 1.0, 1 / largest))
    return states.scale(grads, lambda _: torch.where(inside, 1.0, most / norms))


def _plain(lr: Any) -> Any:
    """With numbers of Python's own: a Fraction, or one of numpy's, is no number to PyTorch."""
    if isinstance(lr, Mapping):
        return {name: _plain(rate) for name, rate in lr.items()}
    if isinstance(lr, list | tuple):
        return type(lr)(map(_plain, lr))
    return float(lr) if isinstance(lr, Real) and not isinstance(lr, int) else lr


def _check_rate(rate: Rate) -> None:
    if isinstance(rate, Tensor) and rate.ndim > 1:
        raise ValueError(f"a tensor lr has no dimension (one for all steps) or one (a step size per step), not shape {tuple(rate.shape)}")
    numbers: Iterable[Any] = (
        rate.detach().reshape(-1).tolist() if isinstance(rate, Tensor) else rate if isinstance(rate, Sequence) else [rate]
    )
    if not all(isinstance(number, Real) for number in numbers):
        raise TypeError(f"lr must be a number, or one for each step, not {rate!r}")
    if not isinstance(rate, torch.nn.Parameter) and not all(number >= 0 for number in numbers):  # what is learned may go anywhere
        raise ValueError(f"lr must not be negative, but it is {rate}")


class Functional:
    """Any optimiser with pure `init(params)` and `update(grads, state)`, such as torchopt's."""

    general = False
    searches = False
    differentiable = True
    moves_tell = False

    def __init__(self, optimizer: Any):
        if isinstance(optimizer, type):
            raise TypeError(f"an inner optimizer is an object, {optimizer.__name__}(...), not the class")
        missing = [name for name in ("init", "update") if not callable(getattr(optimizer, name, None))]
        if missing:
            raise TypeError(
                f"an inner optimizer needs init(params) and update(grads, state); {type(optimizer).__name__} has no {missing[0]}"
            )
        self.optimizer = optimizer
        self.accepts = set(inspect.signature(optimizer.update).parameters)

    def init(self, moved: State) -> Any:
        return self.optimizer.init(moved)

    def update(self, grads: State, memory: Any, *, moved: State, values: Tensor, step: int) -> tuple[State, Any]:
        options = {"params": moved, "inplace": False}  # torchopt works in place unless told otherwise
        return self.optimizer.update(grads, memory, **{k: v for k, v in options.items() if k in self.accepts})

    def __repr__(self) -> str:
        return f"Functional({type(self.optimizer).__name__})"


class LBFGS:
    """Limited-memory BFGS with a line search of each query's own (Nocedal and Wright, Algorithm 7.5), at prediction time.

    All queries share every evaluation of the loss, and each makes of it what its own search needs: where the loss fell enough
    (Armijo's condition) the point is accepted and a new direction chosen, elsewhere the trial step is halved. So `steps` is the
    number of evaluations, and the best point seen is the answer. The first step, before any curvature is known, has length
    `first_step` (in the 1-norm), or that of the gradient if it is shorter.
    """

    general = False
    searches = True
    differentiable = False
    moves_tell = False

    def __init__(self, *, first_step: float = 1.0, history: int = 10, armijo: float = 1e-4):
        if not (first_step > 0 and history > 0 and 0 < armijo < 1):
            raise ValueError(f"LBFGS needs first_step > 0, history > 0 and 0 < armijo < 1, not {first_step}, {history}, {armijo}")
        self.first_step, self.history, self.armijo = first_step, history, armijo

    def __repr__(self) -> str:
        return f"LBFGS(first_step={self.first_step}, history={self.history}, armijo={self.armijo})"

    def init(self, moved: State) -> dict[str, Tensor]:
        point = _flat(moved)  # (queries, numbers)
        past = point.new_zeros(self.history, *point.shape)
        return {"point": point, "s": past, "y": past.clone(), "rho": past[..., 0].clone()}

    def update(
        self, grads: State, memory: dict[str, Tensor], *, moved: State, values: Tensor, step: int
    ) -> tuple[State, dict[str, Tensor]]:
        trial, grad = _flat(moved), _flat(grads)
        if step == 0:
            direction = -grad
            length = self.first_step / grad.abs().sum(1).clamp(min=self.first_step)
            memory = memory | {"value": values, "grad": grad, "direction": direction, "length": length}
        else:
            memory = self._judge(trial, grad, values, memory)
        move = memory["point"] + memory["length"][:, None] * memory["direction"] - trial
        return _like(move, moved), memory

    def _judge(self, trial: Tensor, grad: Tensor, values: Tensor, old: dict[str, Tensor]) -> dict[str, Tensor]:
        slope = (old["grad"] * old["direction"]).sum(1)
        accept = (values <= old["value"] + self.armijo * old["length"] * slope) & grad.isfinite().all(1)
        s, y = trial - old["point"], grad - old["grad"]
        curvature = (s * y).sum(1)
        learn = accept & (curvature > 1e-10 * y.square().sum(1).clamp(min=1e-30))  # keeps the inverse Hessian positive
        new = {"point": trial, "value": values, "grad": grad, "length": torch.ones_like(values)}
        new = {name: torch.where(per_row(accept, t), t, old[name]) for name, t in new.items()}
        new["length"] = torch.where(accept, new["length"], old["length"] / 2)
        pairs = {"s": s, "y": y, "rho": torch.where(learn, 1 / curvature, 0.0)}
        for name, t in pairs.items():  # newest last
            new[name] = torch.where(per_row(learn, t), torch.cat([old[name][1:], t[None]]), old[name])
        direction = self._direction(new)
        downhill = (direction * new["grad"]).sum(1) < 0
        direction = torch.where(downhill[:, None], direction, -new["grad"])
        new["direction"] = torch.where(accept[:, None], direction, old["direction"])
        return new

    def _direction(self, m: dict[str, Tensor]) -> Tensor:
        """The two-loop recursion, -H grad; an empty place in the history has rho = 0 and does nothing."""
        q, alphas = m["grad"], []
        for i in reversed(range(self.history)):
            alphas.append(m["rho"][i] * (m["s"][i] * q).sum(1))
            q = q - alphas[-1][:, None] * m["y"][i]
        last = m["rho"][-1] * m["y"][-1].square().sum(1)
        q = q / torch.where(last > 0, last, 1.0)[:, None]  # the newest pair scales the first guess of H
        for i, alpha in enumerate(reversed(alphas)):
            q = q + m["s"][i] * (alpha - m["rho"][i] * (m["y"][i] * q).sum(1))[:, None]
        return -q


def _flat(state: State) -> Tensor:
    """(rows, all numbers of the row), real: a complex number is two of them, and its gradient those by its two parts."""
    return torch.cat([by_row(in_parts(as_tensor(t))) for t in state.values()], 1)


def _like(flat: Tensor, state: State) -> State:
    shapes = {name: in_parts(as_tensor(t)).shape for name, t in state.items()}
    parts = flat.split([shape[1:].numel() for shape in shapes.values()], 1)
    moved = {name: part.reshape(shape) for part, (name, shape) in zip(parts, shapes.items(), strict=True)}
    return {name: torch.complex(*t.unbind(-1)) if as_tensor(state[name]).is_complex() else t for name, t in moved.items()}
