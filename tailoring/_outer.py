"""The outer loop's losses: training the model that will be used, tailored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from ._tailored import Tailored
from ._trees import Support, count_rows, flat_rows, shapes, tensors

TaskLoss = Callable[[Any, Any], Tensor]  # task_loss(prediction, target)


def outer_losses(model: Tailored, task_loss: TaskLoss, x: Any, y: Any) -> Iterator[Tensor]:
    """The task loss of the prediction after each inner step (Alg. 2); with no steps, that of the plain model.

    Summed, they are the main text's outer loop: `sum(outer_losses(model, mse_loss, x, y)).backward()`. The appendix's (Alg. 3) steps
    the optimiser on each as it arrives, which also frees its memory: `for loss in outer_losses(...): loss.backward(); ...`. That is
    refused with `backprop="all"`.
    """
    _check(model)
    if model.steps == 0:
        yield task_loss(model(x), y)
        return
    for step, state in enumerate(model.states(x)):
        if step:
            yield task_loss(model.predict(x, state), y)


def task_losses(model: Tailored, task_loss: TaskLoss, support: Any, query: Any) -> Iterator[Tensor]:
    """Few-shot learning (Alg. 4): adapt to each task's support set, score on its query set, after each inner step.

    `support` and `query` are pairs (x, y) of tensors (tasks, k, ...); k may differ between the two. The model's tailoring loss must
    read a `Support`, as `tailoring.losses.Supervised` does.
    """
    _check(model)
    tasks = [count_rows(part) for part in (*support, *query)]
    if len(set(tasks)) > 1:
        raise ValueError(f"as many tasks are needed in each of support x, y and query x, y, shape (tasks, k, ...), not {tasks}")
    for name, (inputs, targets) in {"support": support, "query": query}.items():
        sizes = {t.shape[1] if t.ndim > 1 else None for t in tensors((inputs, targets))}
        if len(sizes) > 1 or None in sizes:
            raise ValueError(f"{name} x and y must have shape (tasks, k, ...) with the same k, not {shapes((inputs, targets))}")
    x, y = (flat_rows(part) for part in query)
    for step, state in enumerate(model.states(Support(*support))):
        if step or not model.steps:
            yield task_loss(model.predict(x, state), y)


def _check(model: Any) -> None:
    if not hasattr(model, "states"):
        raise TypeError(f"outer losses are those of a model that tailors, Tailored(net, loss), not of a plain {type(model).__name__}")


class OuterLoss(nn.Module):
    """The summed outer losses as a module: what to wrap for data-parallel training, `DistributedDataParallel(OuterLoss(...))`.

    DDP reduces the gradients of one forward and backward pass of the module it wraps, so that pass must be the whole outer loss.
    `forward(x, y)` returns `sum(outer_losses(...))`, and `sum(task_losses(...))` if x is a `Support`, y being the query set.
    """

    def __init__(self, model: Tailored, task_loss: TaskLoss):
        super().__init__()
        self.model, self.task_loss = model, task_loss

    def forward(self, x: Any, y: Any) -> Tensor:
        losses = task_losses if isinstance(x, Support) else outer_losses
        first, *rest = losses(self.model, self.task_loss, x, y)
        return sum(rest, start=first)
