"""The contrastive tailoring loss of Appendix B, for two classes, and what is proved of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import relu, softplus

MarginLoss = Callable[[Tensor], Tensor]  # convex, 1 at 0, of the margin f_y - f_not_y


def hinge(margin: Tensor) -> Tensor:
    """max(0, 1 - z): convex, 1 at 0."""
    return relu(1 - margin)


def logistic(margin: Tensor) -> Tensor:
    """log2(1 + exp(-z)): convex, 1 at 0. Appendix B prints exp(z), which would reward wrong answers."""
    return softplus(-margin) / math.log(2)


@dataclass(frozen=True)
class Contrastive:
    """L_cont of each query, in its parts; all (queries,).

    value = (examples + labels - rho_low) / (1 - rho_high)
    """

    examples: Tensor  # L_cont^{x+,x-}: positives against negatives; does not depend on the head
    labels: Tensor  # L_cont^{x+,x-,y-}: the head against the mean positive and the mean negative
    rho_low: Tensor
    rho_high: Tensor
    means: Tensor  # psi_{x,1,2}(u+, u-), the margin loss of the mean positive and negative; at most `examples` (Jensen)
    infimum: Tensor  # of examples + labels, over all heads (thm:cont_3)

    @property
    def value(self) -> Tensor:
        """L_cont(x, theta)."""
        return (self.examples + self.labels - self.rho_low) / (1 - self.rho_high)

    @property
    def holds(self) -> Tensor:
        """Does the inequality of `thm:cont_3` hold: infimum over the heads <= examples?"""
        return self.infimum <= self.examples


def contrastive_tailoring_loss(
    features: Tensor,
    head: Tensor,
    *,
    positives: Tensor,
    negatives: Tensor,
    negative_labels: Tensor,
    loss: MarginLoss = hinge,
    labels: Sequence[int] | Tensor = (0, 1),
    infimum_of_loss: float = 0.0,
) -> Contrastive:
    """The meta-tailoring contrastive loss L_cont of Appendix B, with the bounds rho on P(y- = y), and the infimum of `thm:cont_3`.

        examples = E_{x+,x-}[l(h . (h+ - h-))]
        labels   = max_y E_{y-}[l((z_y - z_{y-}) . h)] - l((u+ - u-) . h),      u+ = E[h+], u- = E[h-]
        L_cont   = (examples + labels - rho_low) / (1 - rho_high)

    features (queries, units): h(x), with a constant 1 if the head has a bias; head (2, units): z = theta^(H+1), or (queries, 2, units);
    positives (queries, P, units), negatives (queries, N, units): their features, drawn independently; negative_labels (queries, 2): the
    probabilities of y-, so that rho_y is its y-th entry. `labels`: what the maximum runs over; one label for each query, (queries,), where
    the labels are known. rho_low and rho_high are the least and the largest rho_y of those labels.

    What surprises: with both labels allowed, L_cont is at least 1, the loss of a model that always answers 0, whatever the head and the
    features, since l(m) + l(-m) >= 2 l(0). So `lemma:contrastive` never promises less than 1 there; see docs/theory.md.
    `infimum_of_loss` is the infimum of l, used for the infimum over heads.
    """
    queries, units = features.shape
    head = head.expand(queries, 2, units)
    rho = negative_labels.to(features)
    _check_shapes(features, positives, negatives, rho)
    zero = loss(torch.zeros_like(features[:, 0]))
    if not torch.allclose(zero, torch.ones_like(zero)):
        raise ValueError(
            f"the margin loss must be 1 at margin 0, as the hinge and log2(1 + exp(-z)) are, not {float(zero[0]):.4g}; rescale it"
        )
    differences = positives[:, :, None] - negatives[:, None]  # (queries, P, N, units)
    examples = loss(torch.einsum("qu,qpnu->qpn", features, differences)).mean((1, 2))
    means = loss(((positives.mean(1) - negatives.mean(1)) * features).sum(1))
    margin = ((head[:, 0] - head[:, 1]) * features).sum(1)
    margins = torch.stack([margin, -margin], 1)  # (queries, 2): z_y - z_other, times h
    psi = rho + (1 - rho) * loss(margins)  # y- = y has margin 0, and loses 1
    allowed = _allowed(labels, queries).to(features.device)
    worst = psi.masked_fill(~allowed, -math.inf).max(1).values
    # a head of zeros loses 1 for either label; no head does better for both at once, since l(m) + l(-m) >= 2 l(0)
    one = (rho + (1 - rho) * infimum_of_loss).masked_fill(~allowed, -math.inf).max(1).values
    lowest = torch.where(allowed.all(1), zero, one)
    low, high = rho.masked_fill(~allowed, 1).min(1).values, rho.masked_fill(~allowed, 0).max(1).values
    if not (high < 1).all():
        raise ValueError("rho_high must be below 1: negatives that all have the query's label say nothing (negative_labels)")
    return Contrastive(examples, worst - means, low, high, means, examples - means + lowest)


def expected_task_loss(features: Tensor, head: Tensor, label_probabilities: Tensor, loss: MarginLoss = hinge) -> Tensor:
    """E_y[L_sup(f(x), y)] of each query, the left side of `lemma:contrastive`: E_{x,y}[L_sup] <= E_x[L_cont].

        sum_y p(y | x) l((z_y - z_not_y) . h)

    features (queries, units), head (2, units) or (queries, 2, units), label_probabilities (queries, 2) -> (queries,). The lemma
    holds at every single query, so it also holds when each query has parameters of its own.
    """
    head = head.expand(len(features), 2, features.shape[1])
    margin = ((head[:, 0] - head[:, 1]) * features).sum(1)
    return (label_probabilities.to(features) * loss(torch.stack([margin, -margin], 1))).sum(1)


def convexity_gap(function: Callable[[Tensor], Tensor], at: Tensor, *, directions: int = 64, scale: float = 1.0, seed: int = 0) -> float:
    """`thm:cont_3`, first part, for any function of a tensor: the largest failure of convexity on random segments around `at`.

        max over directions d of   f(a) - (f(a + d) + f(a - d)) / 2

    function(t) -> (), `at` any shape. At most zero (to rounding) for a convex function; above zero proves that it is not convex.
    """
    if directions < 1:
        raise ValueError(f"convexity is looked at along at least one direction, not {directions}")
    generator = torch.Generator().manual_seed(seed)
    gaps = []
    for _ in range(directions):
        center, step = (scale * torch.randn(at.shape, generator=generator, dtype=torch.float64).to(at) for _ in range(2))
        middle = at + center
        gaps.append(function(middle) - (function(middle + step) + function(middle - step)) / 2)
    return float(torch.stack(gaps).max())


def _allowed(labels: Sequence[int] | Tensor, queries: int) -> Tensor:
    """(queries, 2): which labels the maximum runs over."""
    if isinstance(labels, Tensor):
        if labels.shape != (queries,):
            raise ValueError(f"labels as a tensor are one for each of the {queries} queries, not {tuple(labels.shape)}")
        return torch.nn.functional.one_hot(labels.long(), 2).bool()
    if len(set(labels)) < len(labels):
        raise ValueError(
            f"a list of labels names those that the maximum runs over, each once, not {labels!r}; a tensor has one for each query"
        )
    if not set(labels) <= {0, 1} or not labels:
        raise ValueError(f"labels must be chosen from 0 and 1, not {labels!r}")
    return torch.tensor([y in labels for y in (0, 1)]).expand(queries, 2)


def _check_shapes(features: Tensor, positives: Tensor, negatives: Tensor, rho: Tensor) -> None:
    queries, units = features.shape
    for name, t in (("positives", positives), ("negatives", negatives)):
        if t.ndim != 3 or t.shape[0] != queries or t.shape[2] != units or not t.shape[1]:
            raise ValueError(f"{name} must have shape ({queries}, examples, {units}), not {tuple(t.shape)}")
    if rho.shape != (queries, 2) or not torch.allclose(rho.sum(1), torch.ones_like(rho[:, 0]), atol=1e-5) or (rho < 0).any():
        raise ValueError(
            f"negative_labels must be probabilities of shape ({queries}, 2), not {tuple(rho.shape)} with row sums {rho.sum(-1)}"
        )
