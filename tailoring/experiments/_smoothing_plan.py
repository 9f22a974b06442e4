"""Which networks the certified-robustness experiment trains, and how each is certified."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

from tailoring.smoothing import outer_sigma

from ._classifiers import Inner
from ._smoothing_config import Config, check
from ._smoothing_losses import Method

SCRATCH_CLIP = 1.0  # three times the longest gradient that a trained ResNet-110 was seen to have


@dataclass(frozen=True)
class Training:
    """One network to train. `inner.steps` = 0 is training without tailoring."""

    role: str
    sigma: float
    method: Method
    epochs: int
    rate: float
    batch: int
    inner: Inner
    start: str | None = None  # the name of the training it goes on from
    frozen: bool = False  # BatchNorm keeps the statistics it came with

    @property
    def noise(self) -> float:
        """sigma, or sigma' where the tailoring loss adds the rest (or where what is compared with that must see the same images)."""
        return outer_sigma(self.sigma, self.inner.nu) if self.inner.nu else self.sigma

    @property
    def fields(self) -> dict[str, Any]:
        return asdict(self) | {"noise": self.noise}

    @property
    def name(self) -> str:
        return _file_name(f"s{self.sigma:g}-{self.role}")


@dataclass(frozen=True)
class Certification:
    """One network, asked in one way. `inner.nu` = 0 is the plain network at sigma; `inner.steps` = 0 the plain network at sigma'."""

    training: Training
    role: str
    inner: Inner
    n: int
    part: Literal["test", "validation"] = "test"

    @property
    def fields(self) -> dict[str, Any]:
        return {"role": self.role, "training": self.training.name, "sigma": self.training.sigma, "n": self.n, "part": self.part} | {
            "inner": asdict(self.inner)
        }

    @property
    def name(self) -> str:
        kind = f"n{self.n}" if self.part == "test" else "validation"
        return _file_name(f"s{self.training.sigma:g}-{self.role}-{kind}")


@dataclass(frozen=True)
class Probe:
    """One network and one setting, whose step is tried on single noisy validation images."""

    training: Training
    role: str
    inner: Inner

    @property
    def noise(self) -> float:
        return outer_sigma(self.training.sigma, self.inner.nu)

    @property
    def fields(self) -> dict[str, Any]:
        return {"role": self.role, "training": self.training.name, "sigma": self.training.sigma, "noise": self.noise} | {
            "inner": asdict(self.inner)
        }

    @property
    def name(self) -> str:
        return _file_name(f"s{self.training.sigma:g}-{self.role}-probe")


def _file_name(words: str) -> str:
    return words.replace(" ", "_").replace("'", "").replace(",", "")


def regimes(paper: Inner) -> dict[str, Inner]:
    """Settings in which the step may help where the paper's does not, each a change of one thing (or what that needs).

    Their step sizes move a trained ResNet-110's logits by 3 to 20 % (the paper's by 3 %); ten times that ruins them, as "lr 10" shows.
    """
    return {
        "paper's": paper,
        "lr 1": replace(paper, lr=1.0),
        "lr 10": replace(paper, lr=10.0),
        "normalised 0.03": replace(paper, lr=0.03, normalised=True),
        "normalised 0.1": replace(paper, lr=0.1, normalised=True),
        "second order": replace(paper, lr=1.0, backprop="all"),
        "second order, normalised 0.03": replace(paper, lr=0.03, normalised=True, backprop="all"),
        "3 steps": replace(paper, lr=0.3, steps=3),
        "4 views": replace(paper, lr=0.3, views=4),
        "logits": replace(paper, features="logits"),
        "middle features": replace(paper, lr=1.0, features="middle", where="lower"),
        "lower blocks": replace(paper, lr=0.3, where="lower"),
        "upper blocks": replace(paper, lr=1.0, where="upper"),
        "nu 0.3": replace(paper, nu=0.3),
        "last block's weights": replace(paper, lr=10.0, adapt="weights"),
    }


def plan(config: Config) -> Iterator[Certification | Probe]:
    """Everything that a run finds out, the most important first; each names the training it needs."""
    check(config)
    first, *others = config.sigmas
    yield from _controls(config, first, config.n)
    for sigma in others:
        yield from _controls(config, sigma, config.n)
    if "more" in config.extras:
        for sigma in config.more_sigmas:
            yield from _controls(config, sigma, config.more_n)
    if "macer" in config.extras:
        yield from _other_method(config, first, "macer", config.macer_epochs)
    if "smoothadv" in config.extras:
        yield from _other_method(config, first, "smoothadv", config.smoothadv_epochs)
    if "scratch" in config.extras:
        yield from _scratch(config, first)
    if "probes" in config.extras:
        yield from _probes(config, first)
    if "search" in config.extras:
        yield from _search(config, first)
    if "regimes" in config.extras:
        yield from _regimes(config, first)


def base(config: Config, sigma: float) -> Training:
    return Training("base", sigma, "noise", config.epochs, config.rate, config.batch, _plain())


def from_scratch(config: Config, sigma: float) -> Training:
    """Meta-tailored from the first epoch on, with short steps.

    An untrained ResNet-110 has gradients of any length, and some thirty updates with such steps ruined it.
    """
    bounded = config.inner.normalised or config.inner.clip is not None
    return replace(base(config, sigma), role="scratch", inner=config.inner if bounded else replace(config.inner, clip=SCRATCH_CLIP))


def on_top(config: Config, sigma: float, role: str, **changes: Any) -> Training:
    """Further training of the base network, meta-tailored unless told otherwise; all have the same number of updates."""
    trained = base(config, sigma)
    extra = {"epochs": config.extra_epochs, "rate": config.extra_rate, "batch": config.extra_batch, "inner": config.inner, "frozen": True}
    return replace(trained, role=role, start=trained.name, **(extra | changes))


def _plain(nu: float = 0.0) -> Inner:
    return Inner(nu=nu, steps=0)


def _controls(config: Config, sigma: float, n: int) -> Iterator[Certification]:
    inner, plain, trained = config.inner, _plain(), base(config, sigma)
    zero = replace(inner, steps=0)
    meta = on_top(config, sigma, "meta")
    yield Certification(trained, "plain", plain, n)
    yield Certification(on_top(config, sigma, "control", inner=plain, frozen=False), "control", plain, n)
    yield Certification(meta, "meta", inner, n)
    yield Certification(meta, "meta-0", zero, n)
    yield Certification(trained, "tailored", inner, n)
    yield Certification(trained, "tailored-0", zero, n)
    yield Certification(on_top(config, sigma, "control-frozen", inner=zero), "control-frozen", zero, n)


def _other_method(config: Config, sigma: float, method: Method, epochs: int) -> Iterator[Certification]:
    """MACER or SmoothAdv on top of the trained network; BatchNorm trains, as in their papers."""
    zero = replace(config.inner, steps=0)

    def training(role: str, inner: Inner) -> Training:
        return on_top(config, sigma, role, method=method, epochs=epochs, batch=config.copies_batch, inner=inner, frozen=False)

    meta = training(f"{method}-meta", config.inner)
    yield Certification(training(method, _plain()), method, _plain(), config.n)
    yield Certification(meta, f"{method}-meta", config.inner, config.n)
    yield Certification(meta, f"{method}-meta-0", zero, config.n)
    yield Certification(training(f"{method}-control", zero), f"{method}-control", zero, config.n)


def _scratch(config: Config, sigma: float) -> Iterator[Certification]:
    """Meta-tailored from the first epoch on, and the very same training without any step."""
    zero, scratch = replace(config.inner, steps=0), from_scratch(config, sigma)
    yield Certification(scratch, "scratch", scratch.inner, config.n)
    yield Certification(scratch, "scratch-0", zero, config.n)
    yield Certification(replace(scratch, role="scratch-control", inner=zero), "scratch-control", zero, config.n)


def _search(config: Config, sigma: float) -> Iterator[Certification]:
    """The paper's: tailoring alone, on the trained network."""
    for role, inner in _searched(config, sigma):
        yield _zero_steps(config, base(config, sigma), "search", inner.nu)
        yield _validated(config, base(config, sigma), role, inner)


def _searched(config: Config, sigma: float) -> Iterator[tuple[str, Inner]]:
    for nu in config.nus:
        if nu < sigma:
            yield from ((f"search nu {nu:g} lr {lr:g}", replace(config.inner, nu=nu, lr=lr)) for lr in config.lrs)


def _regimes(config: Config, sigma: float) -> Iterator[Certification]:
    """Each setting with tailoring alone and with meta-tailoring, beside its own zero steps."""
    for training, role, inner in _tried(config, sigma):
        yield _validated(config, training, role, inner)
        yield _zero_steps(config, training, role if training.start else "search", inner.nu)


def _probes(config: Config, sigma: float) -> Iterator[Probe]:
    """All that the search and the regimes try, and the meta-tailored networks of the main table."""
    trained = base(config, sigma)
    for role, inner in _searched(config, sigma):
        yield Probe(trained, role, inner)
    yield Probe(on_top(config, sigma, "meta"), "meta", config.inner)
    if "scratch" in config.extras:
        scratch = from_scratch(config, sigma)
        yield Probe(scratch, "scratch", scratch.inner)
    for training, role, inner in _tried(config, sigma):
        yield Probe(training, role, inner)


def _tried(config: Config, sigma: float) -> Iterator[tuple[Training, str, Inner]]:
    """The regimes, each on the trained network alone, and after meta-tailoring with it."""
    known = regimes(config.inner)
    for pattern in config.regimes:
        if not any(fnmatchcase(name, pattern) for name in known):
            raise ValueError(f"no regime matches {pattern!r}; there are: {', '.join(known)}")
    for name, inner in known.items():
        if not any(fnmatchcase(name, pattern) for pattern in config.regimes) or inner.nu >= sigma:
            continue
        if inner.backprop == "none":  # without training, its order does not matter
            yield base(config, sigma), f"regime {name} alone", inner
        yield on_top(config, sigma, f"regime {name}", inner=inner, epochs=config.regime_epochs), f"regime {name}", inner


def _validated(config: Config, training: Training, role: str, inner: Inner) -> Certification:
    return Certification(training, role, inner, config.validation_n, "validation")


def _zero_steps(config: Config, training: Training, role: str, nu: float) -> Certification:
    return _validated(config, training, f"{role} nu {nu:g} 0 steps", _plain(nu))
