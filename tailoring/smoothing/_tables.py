"""From certificates to the numbers of the tables."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

_MOST_NUMBERS = 1 << 23  # that a bootstrap holds at once


def certified_accuracy(truth: Tensor, label: Tensor, radius: Tensor, radii: Sequence[float]) -> list[float]:
    """For each of `radii`, the share of queries with the right label and at least that radius. All (queries,)."""
    _check_shapes(truth, label, radius)
    right = truth == label
    return [float((right & (radius >= r)).double().mean()) for r in radii]


def average_radius(truth: Tensor, label: Tensor, radius: Tensor) -> float:
    """ACR: the mean radius, a query with a wrong label or none counting 0."""
    _check_shapes(truth, label, radius)
    return float(torch.where(truth == label, radius.double(), 0.0).mean())


def _check_shapes(*of_queries: Tensor) -> None:
    if len({t.shape for t in of_queries}) > 1 or of_queries[0].ndim != 1:
        raise ValueError(f"truth, label and radius must have the shape (queries,) each, not {[tuple(t.shape) for t in of_queries]}")


def bootstrap_difference(a: Tensor, b: Tensor, *, level: float = 0.95, draws: int = 10_000, seed: int = 0) -> tuple[float, float, float]:
    """The mean of a - b over queries, (queries,) each, and the ends of its bootstrap interval: both methods saw the same queries."""
    if a.shape != b.shape or a.ndim != 1:
        raise ValueError(f"two values for each query are compared, shapes (queries,) twice, not {tuple(a.shape)} and {tuple(b.shape)}")
    if not len(a) or draws < 1 or not 0 < level < 1:
        raise ValueError(f"an interval takes queries, draws and a level between 0 and 1, not {len(a)}, {draws} and {level}")
    difference = (a.double() - b.double()).cpu()
    resamples = _kept if len(difference) * draws <= 2 * _MOST_NUMBERS else _resamples
    means = torch.cat([drawn.double() @ difference / len(difference) for drawn in resamples(len(difference), draws, seed)])
    low, high = torch.quantile(means, torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)).tolist()
    return float(difference.mean()), low, high


def _resamples(queries: int, draws: int, seed: int) -> Iterator[Tensor]:
    """How often each query is drawn, (draws, queries), in parts."""
    random = torch.Generator().manual_seed(seed)
    at_once = max(1, _MOST_NUMBERS // queries)
    for start in range(0, draws, at_once):
        drawn = torch.randint(queries, (min(at_once, draws - start), queries), generator=random)
        yield torch.zeros(drawn.shape, dtype=torch.int16).scatter_add_(1, drawn, torch.ones_like(drawn, dtype=torch.int16))


@lru_cache(maxsize=2)
def _kept(queries: int, draws: int, seed: int) -> list[Tensor]:
    """A table compares many pairs of methods on the same queries."""
    return list(_resamples(queries, draws, seed))


def read_log(path: Path | str) -> dict[str, Tensor]:
    """A log of Cohen et al.'s `certify.py`: idx, label, predict, radius of each image; a line that was cut off is left out."""
    with Path(path).open(newline="") as file:
        rows = [row for row in csv.DictReader(file, delimiter="\t") if row.get("radius") and row.get("time")]
    if not rows:
        raise ValueError(f"{path} holds no certificates: a log has columns idx, label, predict, radius, correct, time, parted by tabs")
    whole = {name: torch.tensor([int(row[name]) for row in rows]) for name in ("idx", "label", "predict")}
    return {**whole, "radius": torch.tensor([float(row["radius"]) for row in rows], dtype=torch.float64)}
