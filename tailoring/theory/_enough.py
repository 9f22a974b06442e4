"""`enough`: is CN enough for my model and my loss, or do I need Weights?"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .._adapt import CN, Adapter
from .._adapted import AdaptedModel
from .._batch import Batch
from .._entries import in_parts
from .._losing import TailoringLoss
from .._modes import leaves_inference_mode
from .._tailored import Tailored
from .._taps import has_tangent, transformed
from .._trees import count_rows, has_fractions, take_rows, tensors
from .._validate import refuse_mixing_modules
from .._weights import Weights
from ._expressivity import equal as _equal

_MOST = 4096  # numbers read per query: the Jacobians are (numbers, parameters)


@dataclass(frozen=True)
class Enough:
    """What an adapter and all weights can do to the numbers a tailoring loss reads from the model; (queries,) each. True if CN is enough.

    numbers          how many the loss reads of one query: answers to all its views, features; a complex number is two
    rank, weights_rank   in how many independent directions the adapter, and all weights, can move them to first order
    missing          how many directions are open to the weights and not to the adapter
    share, weights_share   which part (0 to 1) of the loss's gradient in these numbers they can follow, as a share of its squared norm
    condition        largest over smallest singular value that counts towards the rank
    everywhere       can the *last* site alone give the numbers any values whatever (`thm:expresivity`), not only to first order?
    """

    adapt: Adapter
    numbers: Tensor
    rank: Tensor
    weights_rank: Tensor
    missing: Tensor
    share: Tensor
    weights_share: Tensor
    condition: Tensor
    everywhere: Tensor

    def __bool__(self) -> bool:
        return not bool(self.missing.any())

    def __str__(self) -> str:
        many = len(self.rank)
        free = int(self.everywhere.sum())
        some = int((self.missing == 0).sum())
        lines = [
            f"the loss reads {_span(self.numbers)} numbers of a query; {self.adapt!r} moves them in {_span(self.rank)} independent "
            f"directions, all weights in {_span(self.weights_rank)}",
            f"of the loss's gradient {self.adapt!r} can follow {_span(self.share)}, all weights {_span(self.weights_share)}",
            f"{some} of {many} queries: every direction open to the weights is open to {self.adapt!r}; "
            f"{free} of {many}: the last site alone reaches any values",
        ]
        if self:
            lines.append(
                f"{self.adapt!r} is enough" + ("" if free == many else ", to first order") + f" (condition {_span(self.condition)})"
            )
        else:
            lines.append(
                f"{self.adapt!r} cannot do all that Weights() can: widen the last hidden layer, adapt more layers, or use Weights() "
                "(if the share is near 1 the missing directions do not matter to this loss at the start)"
            )
        return "\n".join(lines)


def enough(net: nn.Module, loss: TailoringLoss, x: Any, *, adapt: Adapter | None = None, weights: Adapter | None = None) -> Enough:
    """Is CN enough for this model, this tailoring loss and these queries, or are there changes that only Weights can make?

        J = d(numbers that the loss reads from the model) / d(state),      rank J,      |P_J g|^2 / |g|^2

    with g the loss's gradient in these numbers and P_J the projection on what J reaches. Where J of CN
    reaches all that J of the weights does, CN moves the model's answers in every direction that they do; where its rank is all the
    numbers, a state at which the loss cannot be lowered is one where better answers could not lower it. `thm:expresivity` is the case
    where the last site does it alone, and exactly.

    x: a batch of queries; `adapt` is `CN()` by default, `weights` all of them. Ranks are at the start, where nothing is adapted, and to
    the precision of the model: use double. What the loss computes *besides* the model (a mean over views, say) counts in g only, and
    expressivity is not speed: it says what can be reached, not in how many steps.
    """
    refuse_mixing_modules(net)
    adapt = CN() if adapt is None else adapt
    weights = Weights(how="loop") if weights is None else weights
    found = _all(net, loss, x, adapt, weights)
    if not found:
        raise ValueError("an empty batch holds no query to look at")
    return Enough(adapt, *(torch.tensor(column) for column in zip(*found, strict=True)))


@leaves_inference_mode
def _all(net: nn.Module, loss: TailoringLoss, x: Any, adapt: Adapter, weights: Adapter) -> list[tuple[float | bool, ...]]:
    return [_one(net, loss, take_rows(x, slice(i, i + 1)), adapt, weights) for i in range(count_rows(x))]


def _one(net: nn.Module, loss: TailoringLoss, query: Any, adapt: Adapter, weights: Adapter) -> tuple[float | bool, ...]:
    own, all_weights = _Read(net, loss, query, adapt), _Read(net, loss, query, weights)
    rank, share, condition = own.describe(own.jacobian)
    weights_rank, weights_share, _ = own.describe(all_weights.jacobian)
    together, _, _ = own.describe(torch.cat([own.jacobian, all_weights.jacobian], 1))
    reaches = own.last_site_reaches_all()
    return len(own.jacobian), rank, weights_rank, together - rank, share, weights_share, condition, reaches


class _Read:
    """The numbers that a loss reads from an adapted model for one query, and how they depend on the state."""

    def __init__(self, net: nn.Module, loss: TailoringLoss, query: Any, adapt: Adapter):
        self.notes = _Notes()
        self.model = Tailored(net, _noting(loss, self.notes), adapt=adapt)
        places = self.model._find_places(query)
        self.sites, self.batch = places.sited.sites, Batch(query, 1, places)
        start = adapt.init(net, self.sites, adapt.rows(1), tensors(query)[0].device)
        tensors_only = {name: t for name, t in start.items() if isinstance(t, Tensor)}
        if len(tensors_only) < len(start):
            raise ValueError(f"{adapt!r} keeps outer products; Weights(how='loop') or how='vmap' has the tensors that are needed here")
        self.state = {name: t.detach().clone().requires_grad_() for name, t in tensors_only.items()}
        with torch.enable_grad():
            losses, self.read = self.evaluate(self.state)
            sizes = sum(in_parts(t).numel() for t in self.read)
            if not sizes:
                raise ValueError("the tailoring loss reads nothing from the model: it must call it")
            if sizes > _MOST:
                raise ValueError(
                    f"the loss reads {sizes} numbers of a query, and ranks are computed for at most {_MOST}: try smaller inputs"
                )
            self.jacobian = self._rows()
            if not all(t.isfinite().all() for t in (*self.read, self.jacobian)):
                raise ValueError("what the loss reads from the model, or its slope, is nan or infinite for a query: leave that query out")
            used = [t for t in self.read if t.requires_grad]
            grads = torch.autograd.grad(losses.sum(), used, allow_unused=True) if used and losses.requires_grad else [None] * len(used)
        wanted = {id(t): g for t, g in zip(used, grads, strict=True) if g is not None}
        self.gradient = _vector(wanted.get(id(t), torch.zeros_like(t)) for t in self.read)

    def evaluate(self, state: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
        self.notes.read, self.notes.differentiated = [], False
        with torch.enable_grad():  # whatever the loss differentiates
            losses = self.model._losses(self.batch, 0, {**state})
        if self.notes.differentiated:
            raise ValueError(
                "the tailoring loss differentiates the model, so it reads slopes, too; what CN can do to these is not counted here: "
                "compare what CN() and Weights() make of the loss (tailoring.tune)"
            )
        return losses, self.notes.read

    def _rows(self) -> Tensor:
        """J, (numbers, size of the state): one backward pass for each number."""
        entries, rows = list(self.state.values()), []
        for value in _vector(self.read):
            grads = (
                torch.autograd.grad(value, entries, retain_graph=True, allow_unused=True) if value.requires_grad else [None] * len(entries)
            )
            rows.append(_vector(torch.zeros_like(e) if g is None else g for g, e in zip(grads, entries, strict=True)))
        return torch.stack(rows)

    def describe(self, jacobian: Tensor) -> tuple[int, float, float]:
        """Rank of a J, share of the loss's gradient that it can follow, condition."""
        left, values, _ = torch.linalg.svd(jacobian, full_matrices=False)
        rank = int((values > max(jacobian.shape) * torch.finfo(values.dtype).eps * values[0]).sum())
        size = float(self.gradient.square().sum())
        share = float((left[:, :rank].mT @ self.gradient.to(left)).square().sum()) / size if size else 1.0
        return rank, min(share, 1.0), float(values[0] / values[rank - 1]) if rank else float("inf")

    @torch.no_grad()
    def last_site_reaches_all(self) -> bool:
        """`thm:expresivity` for the last site of the state: full rank, in a model that is affine in it."""
        last = [name for name in self.state if self.sites[-1].key in (name, name.rpartition(".")[0])]  # a parameter has its own name
        places = torch.arange(self.jacobian.shape[1]).split([in_parts(t).numel() for t in self.state.values()])
        columns = [own for own, name in zip(places, self.state, strict=True) if name in last]
        jacobian = self.jacobian[:, torch.cat(columns)]
        if torch.linalg.matrix_rank(jacobian) < len(jacobian):
            return False
        return all(self._is_affine(last, jacobian, size) for size in (1.0, -1.0, 1e3, -1e3))  # a final ReLU is, on one side

    def _is_affine(self, last: list[str], jacobian: Tensor, size: float) -> bool:
        """Whether the Jacobian tells what a random step of this size does."""
        generator = torch.Generator().manual_seed(0)
        steps = {name: size * torch.randn(self.state[name].shape, generator=generator).to(self.state[name]) for name in last}
        moved = self.state | {name: self.state[name] + steps[name] for name in last}
        before, after = _vector(self.read), _vector(self.evaluate(moved)[1])
        expected = before + jacobian @ _vector(steps.values())
        scale = float((after - before).abs().max())
        return after.shape == expected.shape and bool((after - expected).abs().max() <= scale * torch.finfo(after.dtype).eps ** 0.5)


def _vector(parts: Iterable[Tensor]) -> Tensor:
    """All numbers as one vector of real ones: of a complex number, and of its gradient, the two parts."""
    return torch.cat([in_parts(t).flatten() for t in parts])


@dataclass
class _Notes:
    """What a loss has read from the model, and whether it has differentiated that."""

    read: list[Tensor] = field(default_factory=list)
    differentiated: bool = False

    def add(self, t: Tensor) -> None:
        self.read.append(t)
        if has_tangent(t) or transformed(t):  # by torch.func
            self.differentiated = True
        elif t.requires_grad:
            t.register_hook(self._passed)

    def _passed(self, _gradient: Tensor) -> None:
        self.differentiated = True


def _noting(loss: TailoringLoss, notes: _Notes) -> TailoringLoss:
    """The same loss; all floating-point numbers that it reads from the model are noted, those that it asks for twice once."""

    def noted(model: AdaptedModel, *args: Any, **kwargs: Any) -> Tensor:
        asked: list[tuple[Any, Any, Any]] = []

        def run(reading: Any, given: Any, named: Any) -> Any:
            for before, what, out in asked:
                if before == reading and _same(what, (given, named)):
                    return out
            out = model._bound.run(reading, given, named)
            asked.append((reading, (given, named), out))
            for t in tensors(out):
                if has_fractions(t):
                    notes.add(t)
            return out

        return loss(AdaptedModel(*model._bound._replace(run=run, keep=None, shares=False)), *args, **kwargs)

    return noted


def _same(a: Any, b: Any) -> bool:
    (leaves, spec), (others, other) = pytree.tree_flatten(a), pytree.tree_flatten(b)
    return spec == other and all(
        x is y or (type(x) is type(y) and (_equal(x, y) if isinstance(x, Tensor) else x == y)) for x, y in zip(leaves, others, strict=True)
    )


def _span(values: Tensor) -> str:
    form: Callable[[float], str] = lambda value: f"{value:.3g}"  # noqa: E731
    low, high = form(float(values.min())), form(float(values.max()))
    return low if low == high else f"{low} to {high}"
