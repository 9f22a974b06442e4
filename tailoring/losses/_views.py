"""Losses on several views of each query. All views of all queries go through the model in one batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import random
from .._trees import repeat_rows
from ._base import Features, Loss, class_logits, entropy, floored, grouped, of_model, read

Augment = Callable[[Tensor, Tensor], Tensor]  # augment(rows, seeds): one augmented view of each row, from the row's own seed


def _views(model: Any, augment: Augment, views: int, x: Tensor, fresh: bool) -> Tensor:
    """(queries * views, ...)"""

    def make() -> Tensor:
        seeds = random.per_row(model.fresh_seeds if fresh else model.seeds, views)
        rows = augment(repeat_rows(x, views), seeds)
        if rows.shape[0] != seeds.shape[0]:
            raise ValueError(f"augment must return one view for each of its {seeds.shape[0]} rows, not {rows.shape[0]} rows")
        return rows

    return make() if fresh else model.once(make)


class Agree(Loss):
    """Augmented views of a query must agree in their features (the contrastive loss of Sec. 5.3).

        loss = 1 - mean over pairs a != b of cos(z_a, z_b),   z = head(features of the view)

    With `negatives` (n, d), features of other inputs, it is the NT-Xent loss of SimCLR with those in the denominator.
    """

    negatives: Tensor | None

    def __init__(
        self,
        augment: Augment,
        views: int = 2,
        *,
        at: Features = None,
        head: nn.Module | None = None,
        negatives: Tensor | None = None,
        temperature: float = 0.5,
        fresh: bool = False,
    ):
        super().__init__()
        if views < 2:
            raise ValueError(f"agreement takes at least two views, not {views}")
        if not temperature > 0:
            raise ValueError(f"temperature must be positive, not {temperature}")
        if negatives is not None and (negatives.ndim != 2 or not negatives.numel()):
            raise ValueError(f"negatives are features of other inputs, shape (n, d), not {tuple(negatives.shape)}")
        self.augment, self.views, self.at, self.head, self.temperature, self.fresh = augment, views, at, head, temperature, fresh
        self.register_buffer("negatives", negatives, persistent=False)

    def forward(self, model: Any, x: Tensor) -> Tensor:
        rows = _views(model, self.augment, self.views, x, self.fresh)
        features = read(model, self.at, rows).flatten(1)
        features = features if self.head is None else of_model(model, self.head)(features)
        z = F.normalize(grouped(features, rows, self.views), dim=-1)  # (queries, views, d)
        pairs = z @ z.mT
        off_diagonal = ~torch.eye(self.views, dtype=torch.bool, device=z.device)
        if self.negatives is None:
            return 1 - pairs[:, off_diagonal].mean(1)
        others = (z @ F.normalize(self.negatives, dim=-1).mT / self.temperature).logsumexp(-1, keepdim=True)  # (queries, views, 1)
        positive = pairs / self.temperature
        return (torch.logaddexp(positive, others) - positive)[:, off_diagonal].mean(1)


class Smooth(Loss):
    """Features must not change under noise (Sec. 5.4).

    loss = E[1 - cos(g(x), g(x + delta))],   delta ~ N(0, nu^2),   from `views` draws
    """

    def __init__(self, nu: float, *, at: Features = None, views: int = 1, fresh: bool = False):
        super().__init__()
        if not nu > 0 or views < 1:
            raise ValueError(f"Smooth needs nu > 0 and at least one view, not {nu} and {views}")
        self.nu, self.at, self.views, self.fresh = nu, at, views, fresh

    def forward(self, model: Any, x: Tensor) -> Tensor:
        noisy = self._noisy(model, x) if self.fresh else model.once(lambda: self._noisy(model, x))  # (queries * views, ...)
        if model.shares_passes:  # then x goes in by itself, as it will for the answer
            clean, others = grouped(read(model, self.at, x), x, 1), grouped(read(model, self.at, noisy), noisy, self.views)
        else:
            rows = torch.cat([x[:, None], noisy.unflatten(0, (-1, self.views))], 1).flatten(0, 1)
            clean, others = grouped(read(model, self.at, rows), rows, 1 + self.views).split([1, self.views], 1)
        return (1 - F.cosine_similarity(clean, others, dim=-1)).mean(1)

    def _noisy(self, model: Any, x: Tensor) -> Tensor:
        noise = random.normal(model.fresh_seeds if self.fresh else model.seeds, (self.views, *x.shape[1:]), x.dtype)
        return (x[:, None] + self.nu * noise).flatten(0, 1)


class MarginalEntropy(Loss):
    """The entropy of the class probabilities averaged over augmented views (MEMO, Zhang et al. 2022); `classes` as in `Entropy`."""

    def __init__(self, augment: Augment, views: int = 16, *, fresh: bool = False, classes: int | None = None):
        super().__init__()
        if views < 1:
            raise ValueError(f"MarginalEntropy takes at least one view, not {views}")
        self.augment, self.views, self.fresh, self.classes = augment, views, fresh, classes

    def forward(self, model: Any, x: Tensor) -> Tensor:
        log_p = class_logits(model(_views(model, self.augment, self.views, x, self.fresh)), self.classes).log_softmax(-1)
        log_p = floored(log_p).unflatten(0, (-1, self.views))  # (queries, views, ..., classes)
        return entropy(log_p.logsumexp(1) - math.log(self.views))


class Rotation(Loss):
    """Predict by how many right angles an image is turned (test-time training, Sun et al. 2020).

    `at` gives the features and `head` the four logits; without a head the features are the logits. A head that is a module of the model
    is adapted with it. x: (queries, C, H, W), H = W.
    """

    def __init__(self, head: nn.Module | None = None, *, at: Features = None):
        super().__init__()
        if not isinstance(head, nn.Module | None):
            raise TypeError(f"the head must be a module from features to four logits, not {head!r}; where features are read is told by at=")
        self.head, self.at = head, at

    def forward(self, model: Any, x: Tensor) -> Tensor:
        if x.ndim < 3 or x.shape[-1] != x.shape[-2]:
            raise ValueError(f"rotation prediction takes square images, shape (queries, C, H, H), not {tuple(x.shape)}")
        turned = torch.stack([x.rot90(quarters, (-2, -1)) for quarters in range(4)], 1).flatten(0, 1)
        features = read(model, self.at, turned).flatten(1)
        logits = features if self.head is None else of_model(model, self.head)(features)
        logits = grouped(logits, turned, 4)  # (queries, 4 turns, 4 classes)
        if logits.shape[-1] != 4:
            raise ValueError(f"rotation prediction takes four logits, not {logits.shape[-1]}: give a head with four outputs")
        return -logits.log_softmax(-1).diagonal(dim1=1, dim2=2).mean(1)
