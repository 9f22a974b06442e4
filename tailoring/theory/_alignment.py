"""Does a tailoring step point to where the task loss falls? A look at two gradients, before any training and any step size."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import _states as states
from .._modes import leaves_inference_mode
from .._outer import TaskLoss
from .._places import Asked
from .._states import State
from .._tailored import Tailored

Interval = tuple[float, float, float]  # a mean over queries, and the ends of its 95 % interval


@dataclass(frozen=True)
class Alignment:
    """Of each query, (queries,): how the tailoring loss's gradient lies to the task loss's, both in the state, at its start."""

    cosine: Tensor  # of the angle between the two; 0 where one of them is zero
    fall: Tensor  # their scalar product: a step of size lr lowers the query's task loss by lr times this, to first order

    @property
    def mean_cosine(self) -> Interval:
        return _interval(self.cosine)

    @property
    def mean_fall(self) -> Interval:
        """What small steps bring on average: above zero they help, below zero they harm."""
        return _interval(self.fall)

    @property
    def agreeing(self) -> float:
        """The share of queries whose two gradients are less than a right angle apart."""
        return float((self.cosine > 0).double().mean())

    def __str__(self) -> str:
        (cosine, low, high), (fall, least, most) = self.mean_cosine, self.mean_fall
        verdict = "help" if least > 0 else "harm" if most < 0 else "neither help nor harm clearly"
        return (
            f"tailoring and task gradients of {len(self.cosine)} queries: cosine {cosine:+.3f} (95 %: {low:+.3f} to {high:+.3f}), "
            f"positive for {100 * self.agreeing:.0f} %\n"
            f"small steps {verdict}: a step changes the task loss by {-fall:+.3g} lr (95 %: {-most:+.3g} to {-least:+.3g})"
        )


def alignment(model: Tailored, data: Iterable[tuple[Any, Any]], task_loss: TaskLoss) -> Alignment:
    """Compare the directions in which the tailoring loss and the task loss fall, on labelled `data`, batches (x, y).

        cos(g, g'),    g . g'    with g = grad L^tailor, g' = grad L^sup, in the query's own state, where nothing is adapted yet

    A tailoring step of size lr changes a query's task loss by -lr g . g' + O(lr^2). Where that is zero on average, no small step helps, and
    a long one can only by luck; meta-tailoring would have to turn the gradients first. (For test-time training Sun et al., 2020, show that
    a convex loss falls where g . g' is large enough.) `tune` tells what steps of which size bring; this tells why.

    task_loss(prediction, target) -> the mean over its batch, or one value per query. One backward pass of each loss. Means are over the
    queries whose numbers are finite.
    """
    batches = list(data)
    if not all(isinstance(batch, list | tuple) and len(batch) == 2 for batch in batches):
        raise TypeError("the data of alignment are batches (x, y), one after another, as a DataLoader gives them; a single one is [(x, y)]")
    parts = [_of_batch(model, x, y, task_loss) for x, y in batches]
    if not parts:
        raise ValueError("alignment needs data: no batch was given")
    cosines, falls = zip(*parts, strict=True)
    return Alignment(torch.cat(cosines), torch.cat(falls))


@leaves_inference_mode
def _of_batch(model: Tailored, x: Any, y: Any, task_loss: TaskLoss) -> tuple[Tensor, Tensor]:
    asked = model.replace(chunk=None, backprop="none", recompute=False)
    (batch,) = asked._batches(x)

    def labelled(bound: Any, *args: Any, **kwargs: Any) -> Tensor:
        found = task_loss(bound(*args, **kwargs), y)
        if found.shape not in ((), (batch.queries,)):
            raise ValueError(f"the task loss must be a mean over the batch, or ({batch.queries},), not of shape {tuple(found.shape)}")
        return found.expand(batch.queries)  # a mean, once for each query, sums to the total

    supervised = asked.replace(loss=labelled)
    places = batch.places._replace(asked=Asked(enough=True))  # as a mean may not: it is no tailoring loss
    same = batch._replace(places=places, reuse=supervised._reuse(places, batch.queries))
    start = asked._identity(batch, asked.adapt.rows(batch.queries))
    start = {name: entry.detach() if isinstance(entry, Tensor) else entry for name, entry in start.items()}
    _, ours = asked._gradient(batch, start, None, 0, False)
    _, tasks = supervised._gradient(same, start, None, 0, False)
    (ours, size), (tasks, other_size) = _unit(states.detached(ours)), _unit(states.detached(tasks))
    cosine = states.dots(ours, tasks)
    return cosine, cosine * size * other_size


def _unit(grads: State) -> tuple[State, Tensor]:
    """Gradients of length 1, or 0, and their lengths. Divided by its largest number first, no row has squares too large or too small."""
    largest = states.largest(grads)
    grads = states.scale(grads, lambda _: 1 / torch.where(largest > 0, largest, 1.0))
    norms = states.square_norms(grads).sqrt()
    return states.scale(grads, lambda _: 1 / torch.where(norms > 0, norms, 1.0)), largest * norms


def _interval(of_queries: Tensor) -> Interval:
    values = of_queries.double()
    values = values[values.isfinite()]
    mean, reach = float(values.mean()), 1.96 * float(values.std()) / len(values) ** 0.5 if len(values) > 1 else float("inf")
    return mean, mean - reach, mean + reach
