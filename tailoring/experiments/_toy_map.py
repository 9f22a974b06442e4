"""Maps of decisions in the plane, and the accuracy that the worst attack within a radius leaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy import ndimage, optimize, stats
from torch import Tensor


@dataclass(frozen=True)
class Gaussians:
    """Two classes y = -1, 1 with x ~ N(y mean, diag(deviation^2)), equally often."""

    mean: tuple[float, float] = (5.0, 1.5)
    deviation: tuple[float, float] = (6.0, 1.0)


@dataclass(frozen=True)
class Window:
    """A grid of pixels around the origin, (2 half / pixel) along each axis."""

    half: tuple[float, float] = (29.0, 8.5)
    """four deviations and the largest attack beyond both means"""
    pixel: float = 0.15
    """a logit map is interpolated to a quarter of this before distances are measured"""

    def axes(self, refine: int = 1) -> tuple[Tensor, Tensor]:
        """The coordinates of the columns and of the rows; symmetric around 0."""
        made = []
        for half in self.half:
            count = round(half / self.pixel)
            made.append(torch.linspace(-count * self.pixel, count * self.pixel, 2 * count * refine + 1))
        return made[0], made[1]

    def grid(self, function: Callable[[Tensor], Tensor], progress: Callable[[int, int], None] = lambda done, total: None) -> Tensor:
        """The values of `function`, (points, 2) -> (points,), at every pixel: (rows, columns)."""
        x, y = self.axes()
        parts = torch.cartesian_prod(y, x).flip(1).split(4000)
        values = []
        for i, points in enumerate(parts):
            values.append(function(points))
            progress(i + 1, len(parts))
        return torch.cat(values).view(len(y), len(x))

    def boundary(self, z: Tensor, every: int = 2) -> list[list[float]]:
        """Where z changes sign between two pixels of a column, [x, y] by linear interpolation."""
        x, y = self.axes()
        found = []
        for column in range(0, len(x), every):
            values = z[:, column]
            for i in ((values[1:] > 0) != (values[:-1] > 0)).nonzero().flatten().tolist():
                a, b = float(values[i]), float(values[i + 1])
                at = float(y[i]) + (float(y[i + 1]) - float(y[i])) * a / (a - b)
                found.append([round(float(x[column]), 3), round(at, 3)])
        return found


def accuracies(data: Gaussians, window: Window, z: Tensor, radii: Sequence[float], refine: int = 4) -> list[float]:
    """Of a classifier with the logit difference z, the share of points that no attack within each radius turns.

    Exact for the map: a point counts if its own label is right and the nearest point of the other label is further than the radius;
    points are weighed by their density. The attacker knows everything, the tailoring included.
    """
    fine = np.asarray(ndimage.zoom(z.double().numpy(), [(refine * (n - 1) + 1) / n for n in z.shape], order=1, grid_mode=False))
    x, y = (axis.double().numpy() for axis in window.axes(refine))
    step = window.pixel / refine
    total = np.zeros(len(radii))
    for label in (-1, 1):
        right = (fine > 0) == (label > 0)
        distance = np.asarray(ndimage.distance_transform_edt(right)) * step
        log_p = [stats.norm.logpdf(v, label * m, s) for v, m, s in zip((x, y), data.mean, data.deviation, strict=True)]
        weight = np.exp(log_p[1][:, None] + log_p[0][None, :])
        weight /= weight.sum()
        total += [weight[right & (distance - step / 2 > radius)].sum() / 2 for radius in radii]  # the border is half a pixel nearer
    return [round(float(value), 4) for value in total]


def linear(data: Gaussians, radii: Sequence[float], angle: float | None = None) -> list[float]:
    """The same for a line through the origin with the normal at `angle` (by default the discriminant's), by formula."""
    mean, variance = np.array(data.mean), np.square(data.deviation)
    normal = mean / variance if angle is None else np.array([np.cos(angle), np.sin(angle)])
    normal = normal / np.linalg.norm(normal)
    spread = np.sqrt((normal**2 * variance).sum())
    return [round(float(stats.norm.cdf((normal @ mean - radius) / spread)), 4) for radius in radii]


def best_linear(data: Gaussians, radii: Sequence[float]) -> list[float]:
    """The best line for each radius: a control that knows the attack's size beforehand."""

    def loss(angle: float, radius: float) -> float:
        normal = np.array([np.cos(angle), np.sin(angle)])
        return -(normal @ np.array(data.mean) - radius) / np.sqrt((normal**2 * np.square(data.deviation)).sum())

    best = [optimize.minimize_scalar(loss, (0.0, np.pi / 2), args=(r,), bounds=(0.0, np.pi / 2), method="bounded").x for r in radii]
    return [linear(data, (radius,), angle)[0] for radius, angle in zip(radii, best, strict=True)]
