"""Images as users have them on disk: CIFAR-10's binary version, and folders of image files."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor

MD5 = {
    "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
    "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
}
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
            "unpack it, and give the folder with --data-dir or TAILORING_DATA"
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
    """Images of a folder with one subfolder per class, sorted; the label is the rank of its folder. Read one by one."""

    files: tuple[Path, ...]
    labels: tuple[int, ...]
    classes: tuple[str, ...]
    size: int

    @classmethod
    def open(cls, root: Path, size: int = 224) -> ImageFolder:
        folders = sorted(f for f in root.iterdir() if f.is_dir()) if root.is_dir() else []
        found = [(file, i) for i, f in enumerate(folders) for file in sorted(f.iterdir()) if file.suffix.lower() in SUFFIXES]
        if not found:
            raise FileNotFoundError(
                f"no images in {root}: it must hold one folder per class with .jpeg, .jpg or .png files, such as ImageNet's val/"
            )
        return cls(tuple(f for f, _ in found), tuple(i for _, i in found), tuple(f.name for f in folders), size)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """The image (3, size, size) in [0, 1], its shorter side brought to size * 8/7 and the centre cut out; and its label."""
        import numpy as np
        from PIL import Image

        image = Image.open(self.files[index]).convert("RGB")
        scale = self.size * 8 / 7 / min(image.size)
        image = image.resize(
            (max(self.size, round(image.width * scale)), max(self.size, round(image.height * scale))), Image.Resampling.BILINEAR
        )
        left, top = (image.width - self.size) // 2, (image.height - self.size) // 2
        pixels = torch.from_numpy(np.asarray(image.crop((left, top, left + self.size, top + self.size))).copy())
        return pixels.permute(2, 0, 1).float() / 255, self.labels[index]
