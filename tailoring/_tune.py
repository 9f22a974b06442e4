"""`tune`: the step size and the number of steps, chosen on validation data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from ._optimisers import Descent
from ._tailored import Tailored
from ._trees import count_rows

_DEFAULT = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1e0)


@dataclass(frozen=True)
class Tuned:
    """The outcome of `tune`: the mean task loss (and tailoring loss) for every step size after 0, 1, ... steps."""

    lr: float | None  # None where the optimiser has none to choose
    steps: int
    lrs: tuple[float | None, ...]
    task: Tensor  # (step sizes, steps + 1)
    tailoring: Tensor  # (step sizes, steps + 1)
    model: Tailored  # the same model with the chosen lr and steps

    @property
    def gain(self) -> float:
        """The relative fall of the task loss against the same model with 0 steps."""
        before, fall = float(self.task[0, 0]), float(self.task[0, 0] - self.task.min())
        if not math.isfinite(before):
            return float("inf") if self.steps else 0.0
        return fall / abs(before) if before else float("inf") if fall else 0.0

    def __str__(self) -> str:
        best = self.task.min()
        lines = [
            "mean task loss (tailoring loss) on the validation data",
            "lr \\ steps " + "".join(f"{s:>21}" for s in range(self.task.shape[1])),
        ]
        for lr, task, tailoring in zip(self.lrs, self.task, self.tailoring, strict=True):
            cells = [f"{t:.4g} ({u:.3g}){'*' if t == best else ' '}" for t, u in zip(task.tolist(), tailoring.tolist(), strict=True)]
            lines.append((f"{'-':<11}" if lr is None else f"{lr:<11g}") + "".join(f"{cell:>21}" for cell in cells))
        chosen = f"steps={self.steps}" if self.lr is None else f"lr={self.lr:g}, steps={self.steps}"
        helps = f"best: {chosen}, {100 * self.gain:.1f} % below 0 steps"
        verdict = helps if self.steps else "best: 0 steps, tailoring does not help here"
        return "\n".join([*lines, verdict])


def tune(
    model: Tailored,
    data: Iterable[tuple[Any, Any]],
    task_loss: Callable[[Any, Any], Tensor],
    *,
    lrs: Sequence[float] = _DEFAULT,
    steps: int = 10,
) -> Tuned:
    """Try every step size for 0 to `steps` steps on the labelled `data`, batches (x, y), and keep the best.

    0 steps are always among the candidates, so the outcome is never worse than the plain model on these data. `task_loss` is a
    mean over its batch, or one value per query; a setting whose loss is not finite anywhere loses. With another optimiser than gradient
    descent only the number of steps is chosen.
    """
    if isinstance(lrs, Real):
        raise TypeError(f"lrs are the step sizes to choose from, such as [{lrs}], not a number")
    if steps < 1 or not lrs:
        raise ValueError(f"tune needs at least one step and one step size, not {steps} and {list(lrs)}")
    batches: list[tuple[Any, Any]] = list(data)
    if not all(isinstance(batch, list | tuple) and len(batch) == 2 for batch in batches):
        raise TypeError("the data of tune are batches (x, y), one after another, as a DataLoader gives them; a single one is [(x, y)]")
    if not batches:
        raise ValueError("tune needs data: no batch was given")
    rates: tuple[float | None, ...] = tuple(lrs) if isinstance(model.rule, Descent) else (None,)
    curves = [_curves(_with(model, rate, steps), batches, task_loss) for rate in rates]
    task, tailoring = (torch.stack(parts) for parts in zip(*curves, strict=True))
    task = torch.where(task.isfinite(), task, torch.inf)
    row, column = divmod(int(task.argmin()), task.shape[1])
    rate = rates[row if column else 0]
    return Tuned(rate, column, rates, task, tailoring, _with(model, rate, column))


def _with(model: Tailored, rate: float | None, steps: int) -> Tailored:
    return model.replace(steps=steps) if rate is None else model.replace(lr=rate, steps=steps)


@torch.no_grad()
def _curves(model: Tailored, batches: list[tuple[Any, Any]], task_loss: Callable[[Any, Any], Tensor]) -> tuple[Tensor, Tensor]:
    """The mean task loss and tailoring loss after 0, 1, ... steps, (steps + 1,) each."""
    sizes = torch.tensor([count_rows(x) for x, _ in batches], dtype=torch.float64)
    task = torch.tensor([[float(task_loss(y_hat, y).mean()) for y_hat in _answers(model, x)] for x, y in batches], dtype=torch.float64)
    tailoring = torch.stack([model.trace(x).losses.double().mean(1).cpu() for x, _ in batches])
    return (sizes @ task) / sizes.sum(), (sizes @ tailoring) / sizes.sum()


def _answers(model: Tailored, x: Any) -> Iterator[Any]:
    """The answers with 0, 1, ... steps: those along the path, unless the best of it is kept."""
    return model.path(x) if model.keep == "last" else (model.replace(steps=steps)(x) for steps in range(model.steps + 1))
