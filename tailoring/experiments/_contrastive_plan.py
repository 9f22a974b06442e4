"""The settings of the contrastive experiment, and what is tried on validation data."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from ._checks import at_least_one, not_empty, not_used
from ._contrastive_views import Augment
from ._images import data_folder

Encoder = Literal["resnet18", "resnet50", "resnet8", "resnet20"]
Use = Literal["anchor", "shared", "mean", "each"]


@dataclass(frozen=True)
class Variant:
    """What the paper leaves open of the loss on one query. `negatives` = 0: the views' agreement alone."""

    use: Use = "anchor"
    """what moves, and what is classified. anchor: h of the image, towards its views, which stay. shared: one offset for h of the image
    and of all views, whose agreement counts. mean: the same, the views' mean is classified. each: an offset for each view, then the mean"""
    negatives: int = 0
    """views of other training images in the denominator of NT-Xent"""

    @property
    def averages(self) -> bool:
        """Whether views are classified, in place of the image: then a gain may be that of averaging alone."""
        return self.use in ("mean", "each")

    @property
    def name(self) -> str:
        return f"{self.use}, {f'{self.negatives} negatives' if self.negatives else 'no negatives'}"


@dataclass(frozen=True)
class Config:
    """Settings of the contrastive experiment; beside each, where it comes from."""

    HOW: ClassVar = frozenset({"out", "data", "accelerator", "compile", "chunk", "cn_chunk"})

    out: Path = Path("runs/contrastive")
    """folder of the rows, weights and figures"""
    data: Path | None = None
    """folder of cifar-10-batches-bin; TAILORING_DATA by default"""
    images: Literal["cifar10", "made"] = "cifar10"
    """made: patterns of ten kinds, to run everything where CIFAR-10 is not at hand"""
    train: int = 50000
    """training images: all"""
    test: int = 10000
    """test images: all"""
    validation: int = 5000
    """the last so many training images, on which everything is chosen; the final linear layers are then trained on all training images"""
    encoder: Encoder = "resnet18"
    """the paper's is a ResNet-50, which costs several times as much"""
    epochs: int = 150
    """of SimCLR; the paper's code base has 500"""
    batch: int = 512
    """of SimCLR, images; code base"""
    lr: float = 1e-3
    """of SimCLR: Adam, code base, with a cosine decay to 0, which is ours"""
    temperature: float = 0.5
    """of NT-Xent; code base"""
    hidden: int = 512
    """width of the projection head's hidden layer; code base"""
    features: int = 128
    """outputs of the projection head; code base"""
    augment: Augment = field(default_factory=Augment)
    """SimCLR's augmentations, in pre-training and in tailoring"""
    seed: int = 0
    """of the encoder's initial weights, batches and views"""
    views: tuple[int, ...] = (4, 8, 16)
    """augmented views of a query, App.; as many as the largest are stored"""
    steps: int = 3
    """inner steps at most, App.; fewer are evaluated on the way"""
    lrs: tuple[float, ...] = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
    """inner step sizes, App."""
    paper_lr: float = 10.0
    """the one that the paper chose, with all steps and views"""
    variants: tuple[Variant, ...] = tuple(Variant(use, n) for use in ("anchor", "shared", "mean", "each") for n in (0, 1024))
    """ablation of what the paper leaves open, on validation, with the most views; 1,024 negatives are about as many as in pre-training"""
    labels: tuple[int, ...] = (50, 100, 200, 500, 1000, 2000, 5000)
    """labelled images of each class, Figure 4"""
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    """trainings of the linear layer, App.: which images are labelled, in which order they come"""
    grid_labels: tuple[int, ...] = (50, 500, 5000)
    """numbers of labels with which variants, views, steps and step sizes are chosen"""
    grid_seeds: tuple[int, ...] = (0, 1)
    """trainings with which these are chosen"""
    decays: tuple[float, ...] = (1e-4, 1e-3, 1e-2, 1e-1)
    """weight decay of the linear layer, chosen on validation for each method and number of labels: in place of early stopping"""
    linear_steps: int = 3000
    """Adam's, of the linear layer, with a cosine decay to 0"""
    linear_batch: int = 512
    """code base"""
    linear_lr: float = 1e-2
    """for standardised representations; the code base has 1e-3 for longer training"""
    rotation_epochs: int = 20
    """of the rotation head, on the frozen encoder's representations"""
    ttt_lrs: tuple[float, ...] = (0.0, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
    """step sizes of TTT, App."""
    cn_lrs: tuple[float, ...] = (1e-3, 1e-2, 1e-1, 1.0)
    """step sizes of the alternative, CN on the encoder; the paper gives the range above and which of them were stable is not said"""
    cn_train: int = 5000
    """training images (the first) of the comparison of CN with Shift, as CN goes through the encoder in every step; 0: no comparison"""
    cn_validation: int = 2000
    """validation images of that comparison (the first)"""
    cn_test: int = 10000
    """test images of that comparison (the first)"""
    accelerator: str = "auto"
    precision: Literal["32-true", "bf16-mixed"] = "bf16-mixed"
    """of the encoder; representations are kept in float16, and tailored and classified in float32"""
    compile: bool = True
    """torch.compile the encoder for pre-training"""
    chunk: int = 4000
    """queries tailored at once, and images encoded at once"""
    cn_chunk: int = 256
    """queries tailored at once with CN"""

    def __post_init__(self) -> None:
        _check(self)

    @property
    def most_views(self) -> int:
        return max(self.views)

    @property
    def pool(self) -> int:
        """How many images there are to label while choosing."""
        return self.train - self.validation


def _check(c: Config) -> None:
    """Refuse before an hour of pre-training what would fail after it."""
    not_empty(c, "views", "lrs", "variants", "labels", "seeds", "grid_labels", "grid_seeds", "decays", "ttt_lrs")
    at_least_one(c, "batch", "labels", "grid_labels", "test", "hidden", "features", "linear_steps", "linear_batch")
    if c.images == "made":
        not_used(c, "data", "as the images are made ones: give --images cifar10")
    if not 0 < c.validation < c.train:
        raise ValueError(f"validation must be some of the {c.train} training images, not {c.validation}")
    if min(c.views) < 2:
        raise ValueError(f"agreement takes at least two views, not {min(c.views)}")
    if c.steps < 1:
        raise ValueError(f"at least one inner step is needed, not {c.steps}")
    if c.epochs < 1 or c.rotation_epochs < 1:
        raise ValueError(f"at least one epoch is needed, not {c.epochs} (encoder) and {c.rotation_epochs} (rotation head)")
    if 0.0 not in c.ttt_lrs:
        raise ValueError("ttt_lrs must hold 0, which TTT is compared with")
    if c.cn_train > c.pool or c.cn_validation > c.validation or c.cn_test > c.test:
        limits = f"{c.pool}, {c.validation} and {c.test}"
        raise ValueError(f"cn_train, cn_validation, cn_test are at most {limits}, not {c.cn_train}, {c.cn_validation}, {c.cn_test}")
    if c.train < max((v.negatives for v in c.variants), default=0):
        raise ValueError(f"there are {c.train} training images, too few for as many negatives as asked")


def quick() -> Config:
    """Everything in small: two minutes on two cores. On made images where CIFAR-10 is not at hand. A demonstration, not evidence."""
    folder = data_folder(None)
    there = any((f / "test_batch.bin").exists() for f in (folder, folder / "cifar-10-batches-bin"))
    return Config(
        out=Path("runs/contrastive-quick"),
        images="cifar10" if there else "made",
        train=2000,
        test=800,
        validation=400,
        encoder="resnet8",
        epochs=6,
        batch=250,
        hidden=64,
        features=32,
        views=(4, 8),
        lrs=(1.0, 10.0),
        variants=(Variant("anchor"), Variant("shared"), Variant("anchor", 128)),
        labels=(10, 30, 100),
        seeds=(0, 1, 2),
        grid_labels=(10, 100),
        decays=(1e-3, 1e-1),
        linear_steps=200,
        linear_batch=128,
        rotation_epochs=5,
        ttt_lrs=(0.0, 0.1, 10.0),
        cn_lrs=(1e-1,),
        cn_train=200,
        cn_validation=100,
        cn_test=200,
        precision="32-true",
        compile=False,
        chunk=250,
        cn_chunk=50,
    )
