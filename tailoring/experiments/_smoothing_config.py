"""The settings of the certified-robustness experiment."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from ._checks import at_least_one, not_used
from ._classifiers import Inner, Network, check_tailoring
from ._images import data_folder
from ._smoothing_losses import Macer, SmoothAdv

AT_LEAST_ONE = (
    *("size", "batch", "extra_batch", "copies_batch", "certify_batch", "every", "images", "validation_images"),
    *("probe_images", "probe_copies"),
    *("epochs", "extra_epochs", "macer_epochs", "smoothadv_epochs", "regime_epochs", "n0", "n", "more_n", "validation_n"),
)
Extra = Literal["more", "macer", "smoothadv", "scratch", "probes", "search", "regimes"]


@dataclass(frozen=True)
class Config:
    """Settings of the certified-robustness experiment; beside each, where it comes from."""

    HOW: ClassVar = frozenset(
        {"out", "data_dir", "classes", "extras", "only", "compile", "autotune"}
        | {"accelerator", "devices", "strategy", "engine", "address", "workers"}
    )

    out: Path = Path("runs/smoothing")
    """folder of the rows, weights and figures"""
    data: Literal["cifar10", "imagenet", "made"] = "cifar10"
    """made: blotches, for trials without a download"""
    data_dir: Path | None = None
    """folder of cifar-10-batches-bin; TAILORING_DATA by default"""
    root: Path | None = None
    """of the data set imagenet: a folder with train/ and val/, each with one folder of images per class"""
    size: int = 32
    """pixels of an image's side; 224 for ImageNet's networks"""
    held_out: int = 1000
    """training images kept for validation (Cohen et al. keep none)"""
    network: Network = "resnet110"
    """Cohen et al.'s for CIFAR-10; resnet50 is theirs for ImageNet"""
    pretrained: Path | None = None
    """weights that the training with noise starts from; of efficientnet-lite0, by default those of its package"""
    classes: Path | None = None
    """where pre-trained weights know more classes than the data: a file or folder that names all of theirs, as ImageNet's val/ does"""
    sigmas: tuple[float, ...] = (0.5, 0.25, 1.0)
    """Sec. 5.4, the one with all the controls first"""
    inner: Inner = field(default_factory=Inner)
    """the tailoring"""
    epochs: int = 90
    """of the training with noise, Cohen et al.; the step size falls by 10 after each third"""
    rate: float = 0.1
    """its step size, Cohen et al.; SGD, momentum 0.9, weight decay 1e-4"""
    extra_epochs: int = 8
    """on top of the trained network, with and without tailoring; those of the sketch"""
    extra_rate: float = 0.01
    """their step size: the middle one of the training before"""
    batch: int = 256
    """Cohen et al.'s for CIFAR-10"""
    extra_batch: int = 256
    """on top of the trained network"""
    copies_batch: int = 64
    """of MACER and SmoothAdv, which hold several copies of each image; Zhai et al.'s"""
    augment: bool = True
    """shift and mirror training images, as Cohen et al. do"""
    macer: Macer = field(default_factory=Macer)
    """settings of MACER"""
    macer_epochs: int = 4
    """on top of the trained network; Zhai et al. train 440 from scratch"""
    smoothadv: SmoothAdv = field(default_factory=SmoothAdv)
    """settings of SmoothAdv"""
    smoothadv_epochs: int = 4
    """on top of the trained network; Salman et al. train 150 from scratch"""
    seed: int = 0
    """of weights, batches and noise; an image's noise is the same for all classifiers"""
    n0: int = 100
    """samples for the guess, Cohen et al."""
    n: int = 10_000
    """samples for the bound; the paper's 100,000 are `more_n`"""
    more_n: int = 100_000
    """samples for the bound, Cohen et al. and the paper"""
    more_sigmas: tuple[float, ...] = (0.5,)
    """for which `more_n` samples are drawn, too (extra "more")"""
    alpha: float = 0.001
    """probability that a certificate is wrong"""
    every: int = 20
    """test images that are certified, as Cohen et al."""
    images: int = 500
    """how many at most"""
    nus: tuple[float, ...] = (0.05, 0.1, 0.2)
    """the paper's search, with tailoring alone, for the first sigma"""
    lrs: tuple[float, ...] = (1e-3, 1e-2, 1e-1, 1.0)
    """the paper's search"""
    validation_images: int = 200
    """that settings are compared with"""
    validation_n: int = 1000
    """samples for each"""
    probe_images: int = 1000
    """validation images that probes ask: whether a setting's step helps single noisy images"""
    probe_copies: int = 4
    """noisy copies of each"""
    regimes: tuple[str, ...] = ("*",)
    """which settings to search for one where the step itself helps; names or patterns"""
    regime_epochs: int = 2
    """of meta-tailoring with each"""
    extras: tuple[Extra, ...] = ("more", "macer", "smoothadv", "scratch", "probes", "search", "regimes")
    """what is done besides the plain, control, tailored and meta-tailored classifiers, in this order"""
    only: tuple[str, ...] = ("*",)
    """train and certify only what matches these patterns, e.g. 's0.5-*'; what these need is trained, too"""
    accelerator: str = "auto"
    devices: int = 1
    strategy: str = "auto"
    precision: Literal["32-true", "bf16-mixed"] = "32-true"
    """of trainings and certifications; networks are channels-last in any case"""
    compile: bool = False
    """torch.compile the long trainings and the certification of test images, on CUDA (a minute or more each, the first time)"""
    autotune: bool = False
    """with --compile, search for the fastest kernels of a certification, which takes minutes more"""
    certify_batch: int = 1000
    """samples at once"""
    engine: Literal["local", "ray"] = "local"
    """of the certification; ray spreads images over a cluster"""
    address: str | None = None
    workers: int | None = None


def quick() -> Config:
    """All of it in small, in under three minutes on two cores: a small network and few images, made ones where CIFAR-10 is not there."""
    there = (data_folder(None) / "cifar-10-batches-bin" / "test_batch.bin").exists()
    return Config(
        out=Path("runs/smoothing-quick"),
        data="cifar10" if there else "made",
        size=16,
        held_out=49000 if there else 100,
        network="resnet8",
        sigmas=(0.5, 0.25),
        epochs=12,
        extra_epochs=3,
        batch=50,
        extra_batch=50,
        copies_batch=50,
        macer=Macer(copies=4),
        macer_epochs=2,
        smoothadv=SmoothAdv(radius=0.5),
        smoothadv_epochs=2,
        n=200,
        more_n=500,
        n0=20,
        every=4,
        images=20,
        nus=(0.1, 0.2),
        lrs=(0.1, 1.0),
        validation_images=20,
        validation_n=100,
        probe_images=20,
        probe_copies=2,
        regimes=("normalised 0.1", "logits", "last block's weights"),
        regime_epochs=1,
        certify_batch=200,
        accelerator="cpu",
    )


def check(config: Config) -> None:
    """Refuse now what would fail after hours of training."""
    if not config.sigmas:
        raise ValueError("--sigmas names no noise to train with: give one or more, the one with all the controls first")
    for sigma in (*config.sigmas, *config.more_sigmas):
        if not 0 < config.inner.nu < sigma:
            raise ValueError(f"the tailoring's noise, nu = {config.inner.nu}, must be above 0 and below every sigma, but one is {sigma}")
    if config.data != "cifar10":
        not_used(config, "data_dir", f"as the images are those of --data {config.data}: give --data cifar10")
    if config.data != "imagenet":
        not_used(config, "root", f"as the images are those of --data {config.data}: give --data imagenet")
    at_least_one(config, *AT_LEAST_ONE)
    for name in ("rate", "extra_rate"):
        if not getattr(config, name) > 0:
            raise ValueError(f"--{name.replace('_', '-')} must be above 0, not {getattr(config, name)}")
    if not 0 < config.alpha < 1:
        raise ValueError(f"--alpha must lie between 0 and 1, not {config.alpha}")
    check_tailoring(config.inner)
    if config.autotune and not config.compile:
        raise ValueError("--autotune searches for the kernels of compiled classifiers: give --compile, too")
    if config.inner.steps < 1:
        raise ValueError("--inner.steps must be at least 1: networks without tailoring are trained and certified in any case")
