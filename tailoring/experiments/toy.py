"""Two Gaussians and a linear separator, made robust at prediction time: the appendix "Toy adversarial examples experiment"."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from tailoring import Tailored, Weights, losses

from ._cache import cached
from ._checks import at_least_one, not_empty
from ._rows import Row, Rows
from ._toy_map import Gaussians, Window, accuracies, best_linear, linear
from ._toy_report import report as report
from ._train import Progress


@dataclass(frozen=True)
class Config:
    """Settings of the toy experiment; beside each, where it comes from."""

    HOW: ClassVar = frozenset({"out"})

    out: Path = Path("runs/toy")
    """folder of the rows, maps and figures"""
    data: Gaussians = field(default_factory=Gaussians)
    """two classes as in Ilyas et al. (2019), whose numbers the paper does not give: ours, one wide and one narrow direction"""
    window: Window = field(default_factory=Window)
    """where the decisions are mapped"""
    eps: tuple[float, ...] = (0.5, 1.0, 2.0, 3.0, 4.0)
    """radii of the ball in which the most likely point is sought: several, as in the figure; the values are ours"""
    radii: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0)
    """of the attack"""
    variants_eps: float = 2.0
    """with which the variants are compared"""
    grids: tuple[int, ...] = (1, 5, 10)
    """starts along each side, appendix; 5 is the paper's choice"""
    lrs: tuple[float, ...] = (0.1, 1.0, 10.0, 30.0)
    """sizes of the one tailoring step, appendix; 10 is the paper's choice"""
    ascent: int = 30
    """steps to the most likely point; not given. With none, the points are the starts themselves"""


def quick() -> Config:
    """The same in small, in under a minute: a coarse map, few settings."""
    return Config(
        out=Path("runs/toy-quick"), window=Window(pixel=0.6), eps=(1.0, 2.0), grids=(1, 5), lrs=(1.0, 10.0), radii=(0.0, 1.0, 2.0)
    )


@dataclass(frozen=True)
class Setting:
    """One way of tailoring the classifier."""

    eps: float
    grid: int = 5
    lr: float = 10.0
    weighted: bool = False
    ascent: int = 30
    theta: Literal["separator", "means"] = "separator"


class Separator(nn.Module):
    """Log-densities of both classes, (queries, 2) -> (queries, 2), of which the difference is linear.

        f_j(x) = log p(x; mu_j, sigma) = common(x) +- z(x) / 2,    z(x) = w . x + b = 2 mu . x / sigma^2

    Only the separator z can be tailored; what both classes share, which says how likely x is, stays.
    """

    mean: Tensor
    variance: Tensor

    def __init__(self, data: Gaussians):
        super().__init__()
        self.separator = nn.Linear(2, 1)
        self.register_buffer("mean", torch.tensor(data.mean))
        self.register_buffer("variance", torch.tensor(data.deviation).square())
        with torch.no_grad():
            self.separator.weight.copy_(2 * self.mean / self.variance)
            self.separator.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        common = -((x.square() + self.mean.square()) / self.variance).sum(1, keepdim=True) / 2
        z = self.separator(x) / 2
        return torch.cat([common - z, common + z], 1)


class Means(nn.Module):
    """The same log-densities, with the two means as what can be tailored: f_j(x) = -sum_k ((x - mu_j) / sigma)_k^2 / 2."""

    variance: Tensor

    def __init__(self, data: Gaussians):
        super().__init__()
        mean = torch.tensor(data.mean)
        self.means = nn.Parameter(torch.stack([-mean, mean]))
        self.register_buffer("variance", torch.tensor(data.deviation).square())

    def forward(self, x: Tensor) -> Tensor:
        return -((x[:, None] - self.means).square() / self.variance).sum(2) / 2


def classifier(config: Config, setting: Setting) -> Tailored:
    """The classifier that tailors itself to each query: one step on KL(p(x) || p(x')), x' the most likely point near x."""
    loss = losses.WorstCase(setting.eps, grid=setting.grid, ascent=setting.ascent, weighted=setting.weighted)
    net, adapt = (Separator(config.data), Weights("separator")) if setting.theta == "separator" else (Means(config.data), Weights())
    return Tailored(net.requires_grad_(False), loss, adapt=adapt, steps=1, lr=setting.lr)


def plan(config: Config) -> Iterator[Setting]:
    """Every setting, the paper's first."""
    yield from (Setting(eps, ascent=config.ascent) for eps in config.eps)
    base = Setting(config.variants_eps, ascent=config.ascent)
    yield from (replace(base, grid=grid) for grid in config.grids)
    yield from (replace(base, lr=lr) for lr in config.lrs)
    yield replace(base, weighted=True)
    yield replace(base, weighted=True, ascent=0)
    yield from (replace(base, theta="means", lr=lr) for lr in config.lrs)


def run(config: Config, progress: Progress = lambda what, done, total: None) -> Path:
    """Run what has not been run yet; the rows are in `config.out`. Nothing is drawn at random: there are no seeds."""
    _check(config)
    rows = Rows(config.out, "toy", config)
    if not rows.has(kind="linear"):
        rows.add(kind="linear", plain=linear(config.data, config.radii), best=best_linear(config.data, config.radii))
    todo = list(dict.fromkeys(plan(config)))
    for number, setting in enumerate(todo):
        progress("groups", number, len(todo))
        if not rows.has(kind="result", setting=asdict(setting)):
            rows.add(kind="result", setting=asdict(setting), **_map(config, setting, progress))
    plain = config.window.grid(lambda x: Separator(config.data)(x).diff(dim=1).squeeze(1).detach())
    if not rows.has(kind="check"):  # the map's own error: the linear separator, for which there is a formula
        rows.add(kind="check", accuracy=accuracies(config.data, config.window, plain, config.radii))
    return config.out


def _check(config: Config) -> None:
    not_empty(config, "eps", "radii")
    at_least_one(config, "grids")
    if min(config.radii) < 0:
        raise ValueError(f"--radii are those of attacks, at least 0, not {min(config.radii)}")
    for name, values in (("eps", config.eps), ("variants-eps", (config.variants_eps,)), ("lrs", config.lrs)):
        if not all(value > 0 for value in values):
            raise ValueError(f"--{name} must be above 0, not {' '.join(map(str, values))}")
    if config.ascent < 0:
        raise ValueError(f"--ascent is a number of steps, at least 0, not {config.ascent}")
    if not min(config.data.deviation) > 0:
        raise ValueError(f"--data.deviation must be above 0 in both directions, not {' '.join(map(str, config.data.deviation))}")
    if not any(config.data.mean):
        raise ValueError("--data.mean 0 0 makes both classes the same: no line parts them")
    if not 0 < config.window.pixel <= min(config.window.half):
        half = " ".join(map(str, config.window.half))
        raise ValueError(f"--window.pixel must be above 0 and at most --window.half ({half}) in both directions, not {config.window.pixel}")


def _map(config: Config, setting: Setting, progress: Progress) -> Row:
    """The tailored difference of the logits at every pixel, kept on disk; its accuracies under attack; labels that tailoring changed."""
    model, window = classifier(config, setting), config.window
    began = time.perf_counter()

    def make() -> dict[str, Tensor]:
        def z(x: Tensor) -> Tensor:
            with torch.no_grad():
                return model(x).diff(dim=1).squeeze(1)

        return {"z": window.grid(z, lambda done, total: progress(f"map {setting}", done, total))}

    found = cached(config.out / "maps", "map", _Key(config.data, window, setting), make)["z"]
    plain = window.grid(lambda x: Separator(config.data)(x).diff(dim=1).squeeze(1).detach())
    return {
        "accuracy": accuracies(config.data, window, found, config.radii),
        "changed": float(((found > 0) != (plain > 0)).float().mean()),
        "not_finite": int((~found.isfinite()).sum()),
        "boundary": window.boundary(found),
        "seconds": round(time.perf_counter() - began, 1),
    }


@dataclass(frozen=True)
class _Key:
    data: Gaussians
    window: Window
    setting: Setting
