"""Uniform stability, parameter stability and what tailoring does to them (Sec. 3, `def:stability`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity
from torch.utils import _pytree as pytree

Params = Any  # a tree of tensors: theta


@dataclass(frozen=True)
class Stability:
    """What happened to a trained (and tailored) model when one training point was replaced.

    loss_changes, parameter_changes: (points replaced, replacements, probes)
    """

    n: int
    loss_changes: Tensor  # |L(theta_{x,S}, x, y) - L(theta_{x,S'}, x, y)|
    parameter_changes: Tensor  # |theta_{x,S} - theta_{x,S'}|, Euclidean, over all parameters

    @property
    def zeta(self) -> float:
        """n times the largest change of a loss: an estimate of uniform stability (`def:stability`), from below."""
        return self.n * float(self.loss_changes.max())

    @property
    def zeta_theta(self) -> float:
        """n times the largest change of the parameters: an estimate of parameter stability, from below."""
        return self.n * float(self.parameter_changes.max())

    @property
    def lipschitz(self) -> float:
        """The least C with |change of loss| <= C |change of parameters| in all that was seen, so that zeta <= C zeta_theta."""
        moved = ~(self.parameter_changes <= 0)  # of a training that diverged it is nan, and so is the answer
        return float((self.loss_changes[moved] / self.parameter_changes[moved]).max()) if moved.any() else 0.0


def measure_stability(
    train: Callable[[Tensor, Tensor], Params],
    task_loss: Callable[[Params, Tensor, Tensor], Tensor],
    data: tuple[Tensor, Tensor],
    *,
    replacements: tuple[Tensor, Tensor],
    probes: tuple[Tensor, Tensor],
    tailor: Callable[[Params, Tensor], Params] | None = None,
    how: Literal["vmap", "loop"] = "vmap",
    chunk: int | None = None,
) -> Stability:
    """Estimate zeta (`def:stability`) and zeta_theta (Sec. 3) by training again with one point replaced, all replacements in parallel.

        zeta = n max |L(theta_{x,S}, x, y) - L(theta_{x,S'}, x, y)|,      zeta_theta = n max |theta_{x,S} - theta_{x,S'}|

    train(x, y) -> theta       trains on one data set, (n, ...) and (n, ...); theta is a tensor or a tree of them
    tailor(theta, x) -> theta_x   adapts to one query; None: no tailoring
    task_loss(theta, x, y) -> ()   of one query
    data (n, ...), replacements (r, ...), probes (p, ...): pairs (x, y). n * r trainings are made, each of the r takes each point's place.

    A maximum over what was tried is at most the supremum that the theorems ask for. With `how="vmap"` `train` must be a function that
    `torch.func.vmap` can run (fixed steps, no `backward()`: use `torch.func.grad`), `chunk` at a time; `how="loop"` takes any.
    """
    if how not in ("vmap", "loop"):
        raise ValueError(f"how must be 'vmap' or 'loop', not {how!r}")
    (x, y), (new_x, new_y) = data, replacements
    n, r = len(x), len(new_x)
    if len(y) != n or len(new_y) != r or len(probes[0]) != len(probes[1]):
        raise ValueError("data, replacements and probes are pairs (x, y) with as many x as y")
    changed_x, changed_y = _replaced(x, new_x), _replaced(y, new_y)  # (n * r, n, ...)
    own = tailor if tailor is not None else lambda theta, _: theta

    def changes(reference: Params, other: Params) -> tuple[Tensor, Tensor]:
        """Of one training on another data set: the changes at each probe, (p,) and (p,)."""

        def at(px: Tensor, py: Tensor) -> tuple[Tensor, Tensor]:
            before, after = own(reference, px), own(other, px)
            return (task_loss(after, px, py) - task_loss(before, px, py)).abs(), (_flat(after) - _flat(before)).norm()

        return _each(at, probes, how)

    reference = train(x, y)
    if how == "vmap":
        one = torch.func.vmap(lambda cx, cy: changes(reference, train(cx, cy)), chunk_size=chunk)
        losses, moves = one(changed_x, changed_y)
    else:
        found = [changes(reference, train(cx, cy)) for cx, cy in zip(changed_x, changed_y, strict=True)]
        losses, moves = (torch.stack(part) for part in zip(*found, strict=True))
    return Stability(n, losses.detach().reshape(n, r, -1), moves.detach().reshape(n, r, -1))


@dataclass(frozen=True)
class Pull:
    """How one tailoring step moves two trained models towards each other, or apart."""

    ratio: Tensor  # cos(v1, v2) |v1| / |v2|, (queries,)
    before: Tensor  # |theta_S - theta_S'|, ()
    after: Tensor  # |theta_{x,S} - theta_{x,S'}|, (queries,)

    @property
    def closer(self) -> Tensor:
        """Are the two closer after the step? True exactly where `ratio` is above 1/2, (queries,)."""
        return self.ratio > 0.5


def pulls_closer(tailoring_loss: Callable[[Params, Tensor], Tensor], theta: Params, other: Params, queries: Tensor, *, lr: float) -> Pull:
    """The cosine condition of Sec. 3: a tailoring step brings theta_S and theta_S' closer if cos(v1, v2) |v1| / |v2| > 1/2.

        v1 = theta_S - theta_S',      v2 = lr (grad L_tailor(x, theta_S) - grad L_tailor(x, theta_S'))

    tailoring_loss(theta, x) -> () of one query; queries: (queries, ...). The paper says "ensured if": it is also "only if", because
    |v1 - v2|^2 < |v1|^2 is |v2|^2 < 2 v1 . v2. Where v2 = 0 nothing moves, and `ratio` is 0.
    """

    def one(x: Tensor) -> tuple[Tensor, Tensor]:
        grad = torch.func.grad(tailoring_loss)
        v1 = _flat(theta) - _flat(other)
        v2 = lr * (_flat(grad(theta, x)) - _flat(grad(other, x)))
        size = v2.norm()
        ratio = cosine_similarity(v1, v2, dim=0, eps=0.0) * v1.norm() / size
        return torch.where(size > 0, ratio, torch.zeros_like(ratio)), (v1 - v2).norm()

    ratio, after = torch.func.vmap(one)(queries)
    return Pull(ratio, (_flat(theta) - _flat(other)).norm(), after)


def _replaced(values: Tensor, new: Tensor) -> Tensor:
    """(n, ...) and (r, ...) -> (n * r, n, ...): in entry i * r + j, the i-th is the j-th new one."""
    n, r = len(values), len(new)
    all_sets = values.expand(n, r, *values.shape).clone()
    all_sets[torch.arange(n), :, torch.arange(n)] = new.to(values).expand(n, *new.shape)
    return all_sets.flatten(0, 1)


def _each(function: Callable[..., Any], inputs: tuple[Tensor, Tensor], how: str) -> tuple[Tensor, Tensor]:
    if how == "vmap":
        return torch.func.vmap(function)(*inputs)
    found = [function(*pair) for pair in zip(*inputs, strict=True)]
    first, second = (torch.stack(part) for part in zip(*found, strict=True))
    return first, second


def _flat(tree: Params) -> Tensor:
    return torch.cat([leaf.flatten() for leaf in pytree.tree_leaves(tree)])
