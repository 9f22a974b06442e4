"""Images as users have them on disk: CIFAR-10's binary version, and folders of image files."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from ._cache import make_folder

MD5 = {
    "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
    "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
}
CIFAR10 = tuple(map(str, range(10)))  # its classes
SUFFIXES = {".jpeg", ".jpg", ".png"}


class Images(Protocol):
    """What is certified: an image (3, H, W) in [0, 1] and its label, by index."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> tuple[Tensor, int]: ...


@dataclass(frozen=True)
class TensorImages:
    images: Tensor  # (n, 3, H, W), uint8
    labels: Tensor  # (n,)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index].float() / 255, int(self.labels[index])


def image_folder(root: Path | None, size: int) -> ImageFolder:
    if root is None:
        raise ValueError("--data imagenet needs --root, a folder with one folder of images per class")
    return ImageFolder.open(root, size)


def data_folder(given: Path | None) -> Path:
    """Where unpacked data sets lie: what was given, or $TAILORING_DATA, or ./data."""
    return given or Path(os.environ.get("TAILORING_DATA", "data"))


def cifar10(folder: Path, part: Literal["train", "test"]) -> tuple[Tensor, Tensor]:
    """Images (n, 3, 32, 32), uint8, and labels (n,), from the official binary files."""
    root = next((f for f in (folder / "cifar-10-batches-bin", folder) if (f / "test_batch.bin").exists()), None)
    if root is None:
        raise FileNotFoundError(
            f"no cifar-10-batches-bin in {folder}: get the binary version of CIFAR-10 from https://www.cs.toronto.edu/~kriz/cifar.html, "
            "unpack it, and give its folder by --data-dir (contrastive: --data) or in TAILORING_DATA"
        )
    rows = []
    for name in [name for name in MD5 if name.startswith("data" if part == "train" else "test")]:
        content = (root / name).read_bytes() if (root / name).exists() else b""
        if hashlib.md5(content).hexdigest() != MD5[name]:
            raise ValueError(f"{root / name} is missing or not the original file (its md5 differs): download it again")
        rows.append(torch.frombuffer(bytearray(content), dtype=torch.uint8).view(-1, 3073))
    table = torch.cat(rows)
    return table[:, 1:].reshape(-1, 3, 32, 32), table[:, 0].long()


@dataclass(frozen=True)
class ImageFolder:
    """Images of a folder with one subfolder per class, sorted; the label is the rank among those with images. Read one by one."""

    files: tuple[Path, ...]
    labels: tuple[int, ...]
    classes: tuple[str, ...]
    size: int

    @classmethod
    def open(cls, root: Path, size: int = 224) -> ImageFolder:
        files = {f.name: sorted(file for file in _visible(f) if file.suffix.lower() in SUFFIXES) for f in class_folders(root)}
        classes = tuple(name for name in files if files[name])
        if not classes:
            raise FileNotFoundError(
                f"no images in {root}: it must hold one folder per class with .jpeg, .jpg or .png files, such as ImageNet's val/"
            )
        found = [(file, label) for label, name in enumerate(classes) for file in files[name]]
        return cls(tuple(f for f, _ in found), tuple(i for _, i in found), classes, size)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """The image (3, size, size) in [0, 1] and its label. One of another size is cut out of its centre, the shorter side size * 8/7."""
        import numpy as np
        from PIL import Image

        image = Image.open(self.files[index]).convert("RGB")
        if image.size != (self.size, self.size):
            scale = self.size * 8 / 7 / min(image.size)
            image = image.resize(
                (max(self.size, round(image.width * scale)), max(self.size, round(image.height * scale))), Image.Resampling.BILINEAR
            )
            left, top = (image.width - self.size) // 2, (image.height - self.size) // 2
            image = image.crop((left, top, left + self.size, top + self.size))
        pixels = torch.from_numpy(np.asarray(image).copy())
        return pixels.permute(2, 0, 1).float() / 255, self.labels[index]


def class_folders(root: Path) -> list[Path]:
    return sorted(f for f in _visible(root) if f.is_dir()) if root.is_dir() else []


def _visible(folder: Path) -> Iterator[Path]:
    """Without what programs leave behind, such as .ipynb_checkpoints."""
    return (f for f in folder.iterdir() if not f.name.startswith("."))


class Splits:
    """Images to train on, to choose settings with, and to certify in the end. The first two are loaded when they are asked for."""

    def __init__(self, training: Callable[[], TensorImages], held_out: int, test: Images, classes: tuple[str, ...]):
        self._training, self.held_out, self.test, self.classes = training, held_out, test, classes

    @functools.cached_property
    def _parts(self) -> tuple[TensorImages, TensorImages]:
        """The last `held_out` are for validation."""
        whole = self._training()
        kept = len(whole) - _checked(self.held_out, len(whole))
        return TensorImages(whole.images[:kept], whole.labels[:kept]), TensorImages(whole.images[kept:], whole.labels[kept:])

    @property
    def train(self) -> TensorImages:
        return self._parts[0]

    @property
    def validation(self) -> TensorImages:
        return self._parts[1]


def cifar10_splits(folder: Path, held_out: int, size: int = 32) -> Splits:
    """Sizes other than 32 are for trials."""

    def part(which: Literal["train", "test"]) -> TensorImages:
        images, labels = cifar10(folder, which)
        if size != images.shape[-1]:
            smaller = [F.interpolate(some.float(), size, mode="area").round().to(torch.uint8) for some in images.split(1000)]
            images = torch.cat(smaller)
        return TensorImages(images, labels)

    return Splits(lambda: part("train"), held_out, part("test"), CIFAR10)


def folder_splits(root: Path | None, held_out: int, size: int, cache: Path, progress: Callable[[str, int, int], None]) -> Splits:
    """Of `root/train`, images spread over all classes are held out; those of `root/val` are certified."""
    if root is None:
        raise ValueError("--data imagenet needs --root, a folder that holds train/ and val/, each with one folder of images per class")
    train, test = ImageFolder.open(root / "train", size), ImageFolder.open(root / "val", size)
    if train.classes != test.classes:
        raise ValueError(f"{root / 'train'} and {root / 'val'} must hold the same folders, one per class")
    every = len(train) // _checked(held_out, len(train))
    order = sorted(range(len(train)), key=lambda i: i % every == 0 and i // every < held_out)  # held out come last: no copy is needed
    train = replace(train, files=tuple(train.files[i] for i in order), labels=tuple(train.labels[i] for i in order))
    return Splits(lambda: TensorImages(_decoded(train, cache, progress), torch.tensor(train.labels)), held_out, test, train.classes)


def made_splits(held_out: int, size: int, *, classes: int = 4, train: int = 600, test: int = 200, seed: int = 0) -> Splits:
    """Blotches: each class has a smooth pattern of its own, each image a shade, a contrast and other blotches over it. No download."""
    random = torch.Generator().manual_seed(seed)
    patterns = torch.randn(classes, 3, 4, 4, generator=random)

    def part(count: int) -> TensorImages:
        labels = torch.arange(count) % classes
        own = patterns[labels] * (0.7 + 0.6 * torch.rand(count, 1, 1, 1, generator=random))
        mixed = own + 0.5 * torch.randn(own.shape, generator=random) + 0.3 * torch.randn(count, 3, 1, 1, generator=random)
        smooth = F.interpolate(mixed, size, mode="bilinear", align_corners=False)
        return TensorImages((0.5 + 0.18 * smooth).clamp(0, 1).mul(255).round().to(torch.uint8), labels)

    training = part(train)
    return Splits(lambda: training, held_out, part(test), tuple(map(str, range(classes))))


def _checked(held_out: int, images: int) -> int:
    if not 0 < held_out < images:
        raise ValueError(f"of {images} training images, {held_out} cannot be held out for validation: set --held-out")
    return held_out


def _decoded(folder: ImageFolder, cache: Path, progress: Callable[[str, int, int], None]) -> Tensor:
    """All images of a folder, (n, 3, size, size), uint8, in a file that memory pages in as needed: ImageNet itself takes 190 GB of disk."""
    listed = "\n".join([str(folder.size), *map(str, folder.files)])
    path = cache / f"images-{hashlib.sha256(listed.encode()).hexdigest()[:12]}.u8"
    shape = (len(folder), 3, folder.size, folder.size)
    count = len(folder) * 3 * folder.size**2
    if not path.exists():
        make_folder(cache)
        part = path.with_suffix(f".{os.getpid()}.part")
        images = torch.from_file(str(part), shared=True, size=count, dtype=torch.uint8).view(shape)
        for i in range(len(folder)):
            images[i] = (folder[i][0] * 255).round().to(torch.uint8)
            progress("decoding images", i + 1, len(folder))
        part.replace(path)
    return torch.from_file(str(path), shared=False, size=count, dtype=torch.uint8).view(shape)
