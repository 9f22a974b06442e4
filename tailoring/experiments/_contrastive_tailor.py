"""Representations of every image and of its views, computed once; and tailoring them by the views' agreement, or by rotation (TTT)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tailoring import CN, Shift, Tailored
from tailoring.losses import Agree, Loss
from tailoring.nn import BasicBlock, Bottleneck

from ._contrastive_nets import SimCLR, channels_last
from ._contrastive_plan import Config, Use, Variant
from ._contrastive_views import make_views, view_seeds

Encode = Callable[[Tensor], Tensor]
Progress = Callable[[int, int], None]
STORED = -1  # the "time" of the views that are stored: no batch of pre-training has it


@dataclass(frozen=True)
class Representations:
    """float16, on the device: h of each image (n, d), of its views (n, views, d), and turned by 1 to 3 right angles (n, 3, d)."""

    plain: Tensor
    views: Tensor
    turned: Tensor

    def __getitem__(self, rows: Any) -> Representations:
        return Representations(self.plain[rows], self.views[rows], self.turned[rows])

    def beside_views(self, views: int) -> Tensor:
        """(n, 1 + views, d), the image itself first: what is tailored by agreement."""
        return torch.cat([self.plain[:, None], self.views[:, :views]], 1).float()

    def beside_turned(self) -> Tensor:
        """(n, 4, d): what is tailored by rotation."""
        return torch.cat([self.plain[:, None], self.turned], 1).float()


@torch.no_grad()
def represent(encode: Encode, images: Tensor, ids: Tensor, config: Config, progress: Progress) -> Representations:
    """All that the experiment needs of the images, uint8 (n, 3, H, W), each passed through the encoder once. `ids` name their views."""
    chunk = max(1, config.chunk // 4)
    made: dict[str, list[Tensor]] = {"plain": [], "views": [], "turned": []}
    for start in range(0, len(images), chunk):
        part = images[start : start + chunk].float() / 255
        views = make_views(config.augment, part, ids[start : start + chunk], config.most_views, STORED - config.seed)
        turned = torch.stack([part.rot90(quarters, (2, 3)) for quarters in (1, 2, 3)], 1).flatten(0, 1)
        for name, rows in (("plain", part), ("views", views), ("turned", turned)):
            made[name].append(encode(channels_last(rows)).half().unflatten(0, (len(part), -1)))
        progress(start + len(part), len(images))
    whole = {name: torch.cat(rows) for name, rows in made.items()}
    return Representations(whole["plain"].squeeze(1), whole["views"], whole["turned"])


class Classifier(nn.Module):
    """A linear layer on the representation of a query. x: (queries, 1 + others, d), that of the image first, then of its views.

    `h` is where `Shift` acts: on the image's own representation, or (use "each") on all the views'. Without a layer the answer is the
    (tailored) representation itself.
    """

    def __init__(self, use: Use, fc: nn.Module | None = None):
        super().__init__()
        self.use, self.h, self.fc = use, nn.Identity(), nn.Identity() if fc is None else fc

    def forward(self, x: Tensor) -> Tensor:
        if self.use == "each":
            return self.fc(self.h(x[:, 1:]).mean(1))
        return self.fc(self.h(x[:, 1:].mean(1) if self.use == "mean" else x[:, 0]))


class StoredAgreement(Loss):
    """`losses.Agree` on representations that are there already: back-propagation goes through the projection head only.

        loss = 1 - mean over pairs of cos(z_a, z_b),   z = head(h);   with negatives, NT-Xent with those in the denominator

    The pairs are those of different views, or (use "anchor") of the image with each of its views, which do not move.
    """

    negatives: Tensor | None

    def __init__(self, head: nn.Module, use: Use, negatives: Tensor | None = None, temperature: float = 0.5):
        super().__init__()
        self.head, self.use, self.temperature = head, use, temperature
        self.register_buffer("negatives", None if negatives is None else F.normalize(negatives.float(), dim=1), persistent=False)

    def forward(self, model: Any, x: Tensor) -> Tensor:
        count = x.shape[1] - 1
        if self.use == "anchor":
            moved = self._project(model.h(x[:, 0]))[:, None]  # (queries, 1, features)
            with torch.no_grad():
                others = self._project(x[:, 1:])
        else:
            h = model.h(x[:, 1:]) if self.use == "each" else model.h(x[:, 1:].flatten(0, 1)).unflatten(0, (-1, count))
            moved = others = self._project(h)
        cosines = moved @ others.mT  # (queries, 1 or views, views)
        terms = 1 - cosines
        if self.negatives is not None:
            positive = cosines / self.temperature
            terms = torch.logaddexp(positive, (moved @ self.negatives.mT / self.temperature).logsumexp(-1, keepdim=True)) - positive
        if self.use == "anchor":
            return terms.mean((1, 2))
        return terms[:, ~torch.eye(count, dtype=torch.bool, device=x.device)].mean(1)

    def _project(self, h: Tensor) -> Tensor:
        z = self.head(h.reshape(-1, h.shape[-1])).view(*h.shape[:-1], -1)
        return F.normalize(z, dim=-1)


class StoredRotation(Loss):
    """`losses.Rotation` on stored representations, (queries, 4, d), that of the image as it is first. One offset serves all four."""

    def __init__(self, head: nn.Module):
        super().__init__()
        self.head = head

    def forward(self, model: Any, x: Tensor) -> Tensor:
        logits = self.head(model.h(x.flatten(0, 1))).unflatten(0, (-1, 4))  # (queries, 4 turns, 4 classes)
        return -logits.log_softmax(-1).diagonal(dim1=1, dim2=2).mean(1)


def agreement_model(head: nn.Module, variant: Variant, negatives: Tensor | None, config: Config, fc: nn.Module | None = None) -> Tailored:
    """`negatives`: projections of other images' views, from which the variant takes as many as it wants. The head must be in eval mode."""
    others = None if not variant.negatives or negatives is None else negatives[: variant.negatives]
    loss = StoredAgreement(head, variant.use, others, config.temperature)
    return Tailored(Classifier(variant.use, fc), loss, adapt=Shift("h"), steps=config.steps)


def rotation_model(head: nn.Module, config: Config) -> Tailored:
    return Tailored(Classifier("anchor"), StoredRotation(head), adapt=Shift("h"), steps=config.steps)


class Encoder(nn.Module):
    """Images -> representations, of which `CN` scales and shifts the channels after each block."""

    def __init__(self, net: SimCLR):
        super().__init__()
        self.encoder = net.encoder

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x)


def encoder_model(net: SimCLR, config: Config, adapt: Literal["cn", "shift"] = "cn") -> Tailored:
    """Tailoring the encoder itself by the agreement of views that are made from the images; with `image_seeds`, of the stored ones."""
    loss = Agree(lambda rows, seeds: channels_last(config.augment(rows, seeds)), config.most_views, at="encoder", head=net.head)
    block = next(type(module) for module in net.encoder.modules() if isinstance(module, BasicBlock | Bottleneck))
    return Tailored(Encoder(net), loss, adapt=CN(block) if adapt == "cn" else Shift("encoder"), steps=config.steps)


def image_seeds(ids: Tensor, config: Config) -> Tensor:
    """The seeds from which `losses.Agree` draws the very views that are stored."""
    return view_seeds(ids, STORED - config.seed)


def after_each_step(
    model: Tailored,
    inputs: Callable[[slice], Tensor],
    count: int,
    chunk: int,
    *,
    seeds: Tensor | None = None,
    autocast: Callable[[], AbstractContextManager] = nullcontext,
) -> Tensor:
    """The tailored representations of `count` queries after 1, 2, ... steps: (steps, count, d), float16."""
    parts = []
    for start in range(0, count, chunk):
        rows = slice(start, min(start + chunk, count))
        with torch.no_grad(), autocast():
            _, *answers = model.path(inputs(rows), seeds=None if seeds is None else seeds[rows])
        parts.append(torch.stack(answers).half())  # outside of autocast, which knows one kind of half precision at a time
    return torch.cat(parts, 1)
