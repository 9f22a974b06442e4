"""Linear layers on representations, many at once: all seeds, numbers of labels, weight decays and ways of tailoring in one product."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from tailoring import random

from ._contrastive_data import CLASSES


@dataclass(frozen=True)
class Task:
    """One linear layer to train: on which representations (`of`), with how many labels, which of them (`seed`), and which weight decay."""

    of: int
    labels: int
    seed: int
    decay: float


@dataclass(frozen=True)
class Layers:
    """Trained layers, one for each task: weights (layers, d, classes) for representations standardised by those of the training images."""

    tasks: tuple[Task, ...]
    weight: Tensor
    bias: Tensor
    mean: Tensor
    std: Tensor

    def accuracy(self, features: Tensor, labels: Tensor, chunk: int = 2000) -> list[float]:
        """Of every layer, on representations (n, d), or (sets, n, d) if every task shall see its own."""
        right = torch.zeros(len(self.tasks), dtype=torch.float64, device=features.device)
        of = torch.tensor([task.of for task in self.tasks], device=features.device)
        for layers in torch.arange(len(self.tasks), device=features.device).split(64):
            for start in range(0, features.shape[-2], chunk):
                part = features[..., start : start + chunk, :].float()
                h = part if features.ndim == 2 else part[of[layers]]
                h = (h - self.mean[layers, None]) / self.std[layers, None]
                found = torch.baddbmm(self.bias[layers, None], h, self.weight[layers]).argmax(2)
                right[layers] += (found == labels[start : start + chunk]).double().sum(1)
        return (right / features.shape[-2]).tolist()


def fit(
    features: Tensor,
    labels: Tensor,
    subsets: Sequence[Tensor],
    tasks: Sequence[Task],
    *,
    steps: int,
    batch: int,
    lr: float,
) -> Layers:
    """Train a layer for every task on its `subsets[i]` of the rows: softmax regression with L2 decay, by Adam, a cosine decay to 0.

    features: (sets, n, d), or (sets, n, views, d) where a random view of the image is taken each time. Batches are drawn with
    replacement, from seed and number of labels alone: tasks that differ in the representations or the decay see the same images.
    """
    if features.ndim == 3:
        features = features[:, :, None]
    device, (_, n, views, d) = features.device, features.shape
    counts = torch.tensor([len(rows) for rows in subsets], device=device)
    table = torch.zeros(len(tasks), int(counts.max()), dtype=torch.int64, device=device)
    for row, subset in zip(table, subsets, strict=True):
        row[: len(subset)] = subset.to(device)
    of = torch.tensor([task.of for task in tasks], device=device)
    statistics = [_statistics(one) for one in features]
    mean, std = (torch.stack([s[i] for s in statistics])[of] for i in (0, 1))  # (layers, d)
    seeds = random.seeds_of(torch.tensor([[task.seed, task.labels] for task in tasks], device=device))
    decay = torch.tensor([task.decay for task in tasks], device=device)[:, None, None]
    flat, labels = features.reshape(-1, d), labels.to(device)
    weight, bias = torch.zeros(len(tasks), d, CLASSES, device=device), torch.zeros(len(tasks), CLASSES, device=device)
    rule = _Adam([weight, bias], steps, lr)
    for step in range(steps):
        which, view = random.uniform(random.fold(seeds, step), (2, batch)).unbind(1)  # (layers, batch)
        rows = table.gather(1, (which * counts[:, None]).long())
        place = (of[:, None] * n + rows) * views + (view * views).long()
        h = (flat[place].float() - mean[:, None]) / std[:, None]
        surplus = torch.baddbmm(bias[:, None], h, weight).softmax(2) - F.one_hot(labels[rows], CLASSES)  # gradient of the cross entropy
        rule.step([h.mT @ surplus / batch + decay * weight, surplus.mean(1)])
    return Layers(tuple(tasks), weight, bias, mean, std)


def _statistics(features: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each unit over all training images, labelled or not; a unit that never varies is left as it is."""
    rows = features.reshape(-1, features.shape[-1]).float()
    std, mean = torch.std_mean(rows, dim=0)
    return mean, torch.where(std > 1e-6, std, 1.0)


class _Adam:
    """Adam on whole stacks of layers, the gradients being at hand: without autograd a step is a dozen kernels."""

    def __init__(self, parameters: list[Tensor], steps: int, lr: float):
        self.parameters, self.steps, self.lr, self.done = parameters, steps, lr, 0
        self.first, self.second = ([torch.zeros_like(p) for p in parameters] for _ in range(2))

    def step(self, gradients: list[Tensor]) -> None:
        rate = self.lr * (1 + math.cos(math.pi * self.done / self.steps)) / 2
        self.done += 1
        for p, g, m, v in zip(self.parameters, gradients, self.first, self.second, strict=True):
            m.lerp_(g, 0.1)
            v.mul_(0.999).addcmul_(g, g, value=0.001)
            scale = (v / (1 - 0.999**self.done)).sqrt_().add_(1e-8)
            p.addcdiv_(m, scale, value=-rate / (1 - 0.9**self.done))
