"""Residual networks for images, with the layer names of the public checkpoints (Cohen et al., torchvision, akamaster)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

Shortcut = Literal["conv", "pad"]
Stem = Literal["cifar", "imagenet"]

# Cohen et al.'s statistics of CIFAR-10; those of ImageNet, which the public ResNet-20/32/56 weights for CIFAR-10 use too
CIFAR = ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


class _Standardise(nn.Module):
    """(x - mean) / std of each channel. A module, so that what is not adapted above it need not run again."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]):
        super().__init__()
        for name, values in (("mean", mean), ("std", std)):
            self.register_buffer(name, torch.tensor(values).view(-1, 1, 1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.std


def _checked(statistics: Any) -> tuple[Sequence[float], Sequence[float]]:
    parts = list(statistics) if isinstance(statistics, Iterable) and not isinstance(statistics, str) else []
    if len(parts) != 2 or not all(isinstance(part, Sized) and len(part) == 3 for part in parts):
        raise ValueError(
            f"statistics are a pair (means, deviations), three numbers each, such as ((.5, .5, .5), (.2, .2, .2)), not {statistics!r}"
        )
    if not all(deviation > 0 for deviation in parts[1]):
        raise ValueError(f"statistics have deviations above 0, not {parts[1]}")
    return parts[0], parts[1]


class _PadShortcut(nn.Module):
    """A skip connection without weights: every `stride`-th pixel, new channels zero (He et al.'s option A)."""

    def __init__(self, channels: int, stride: int):
        super().__init__()
        self.channels, self.stride = channels, stride

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, :, :: self.stride, :: self.stride]
        missing = self.channels - x.shape[1]
        return pad(x, (0, 0, 0, 0, missing // 2, missing - missing // 2))


class _Block(nn.Module):
    """relu(shortcut(x) + layers(x)). A module of its own, so that `CN(BasicBlock)` scales and shifts after each block."""

    expansion = 1
    downsample: nn.Module | None
    relu: nn.Module

    def _shortcut(self, inputs: int, outputs: int, stride: int, shortcut: Shortcut) -> nn.Module | None:
        if stride == 1 and inputs == outputs:
            return None
        if shortcut == "pad":
            return _PadShortcut(outputs, stride)
        return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def _join(self, x: Tensor, out: Tensor) -> Tensor:
        return self.relu(out + (x if self.downsample is None else self.downsample(x)))


class BasicBlock(_Block):
    """Two 3x3 convolutions."""

    def __init__(self, inputs: int, channels: int, stride: int, shortcut: Shortcut):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, channels, 3, stride, 1, bias=False), nn.BatchNorm2d(channels)
        self.conv2, self.bn2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False), nn.BatchNorm2d(channels)
        self.relu, self.downsample = nn.ReLU(), self._shortcut(inputs, channels, stride, shortcut)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        return self._join(x, self.bn2(self.conv2(out)))


class Bottleneck(_Block):
    """1x1, 3x3 (which has the stride), 1x1 convolutions."""

    expansion = 4

    def __init__(self, inputs: int, channels: int, stride: int, shortcut: Shortcut):
        super().__init__()
        outputs = channels * self.expansion
        self.conv1, self.bn1 = nn.Conv2d(inputs, channels, 1, bias=False), nn.BatchNorm2d(channels)
        self.conv2, self.bn2 = nn.Conv2d(channels, channels, 3, stride, 1, bias=False), nn.BatchNorm2d(channels)
        self.conv3, self.bn3 = nn.Conv2d(channels, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        self.relu, self.downsample = nn.ReLU(), self._shortcut(inputs, outputs, stride, shortcut)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        return self._join(x, self.bn3(self.conv3(out)))


class ResNet(nn.Module):
    """Images (n, 3, H, W) in [0, 1] -> logits (n, classes); what `fc` is given are the penultimate features.

    Images are standardised inside, after whatever noise was added to them: radii are then in units of the images.
    """

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        blocks: Sequence[int],
        widths: Sequence[int],
        *,
        classes: int,
        stem: Stem,
        statistics: tuple[Sequence[float], Sequence[float]],
        shortcut: Shortcut = "conv",
    ):
        super().__init__()
        if shortcut not in ("conv", "pad"):
            raise ValueError(f"shortcut must be 'conv' (convolutions) or 'pad' (zeros), not {shortcut!r}")
        self.standardise = _Standardise(*_checked(statistics))
        size = 3 if stem == "cifar" else 7
        self.conv1 = nn.Conv2d(3, widths[0], size, 1 if stem == "cifar" else 2, size // 2, bias=False)
        self.bn1, self.relu = nn.BatchNorm2d(widths[0]), nn.ReLU()
        self.maxpool = nn.Identity() if stem == "cifar" else nn.MaxPool2d(3, 2, 1)
        inputs = widths[0]
        for i, (count, width) in enumerate(zip(blocks, widths, strict=True)):
            layers: list[nn.Module] = []
            for j in range(count):
                layers.append(block(inputs, width, 2 if i and not j else 1, shortcut))
                inputs = width * block.expansion
            self.add_module(f"layer{i + 1}", nn.Sequential(*layers))
        self.stages = len(blocks)
        self.fc = nn.Linear(inputs, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(self.standardise(x)))))
        for i in range(self.stages):
            x = self.get_submodule(f"layer{i + 1}")(x)
        return self.fc(x.mean((2, 3)))


def cifar_resnet(depth: int = 110, *, classes: int = 10, shortcut: Shortcut = "conv", statistics: Any = CIFAR) -> ResNet:
    """He et al.'s ResNet for 32x32 images, depth 6n + 2: 110 is Cohen et al.'s, shortcut="pad" the public ResNet-20/32/56."""
    if depth < 8 or (depth - 2) % 6:
        raise ValueError(f"depth must be 6n + 2, such as 20, 56 or 110, not {depth}")
    blocks = [(depth - 2) // 6] * 3
    return ResNet(BasicBlock, blocks, (16, 32, 64), classes=classes, stem="cifar", statistics=statistics, shortcut=shortcut)


def resnet18(*, classes: int = 1000, stem: Stem = "imagenet") -> ResNet:
    """ResNet-18, with torchvision's names: for images of 224x224 pixels, or with stem="cifar" (see `resnet50`) of 32x32."""
    return _resnet(BasicBlock, (2, 2, 2, 2), classes, stem)


def resnet50(*, classes: int = 1000, stem: Stem = "imagenet") -> ResNet:
    """ResNet-50, with torchvision's names: for images of 224x224 pixels.

    stem="cifar" is SimCLR's variant for 32x32 pixels: a first convolution of 3x3 with stride 1, no pooling after it, CIFAR's statistics.
    """
    return _resnet(Bottleneck, (3, 4, 6, 3), classes, stem)


def _resnet(block: type[BasicBlock] | type[Bottleneck], blocks: Sequence[int], classes: int, stem: Stem) -> ResNet:
    if stem not in ("cifar", "imagenet"):
        raise ValueError(f"stem must be 'imagenet' (224x224 pixels) or 'cifar' (32x32), not {stem!r}")
    statistics = CIFAR if stem == "cifar" else IMAGENET
    return ResNet(block, blocks, (64, 128, 256, 512), classes=classes, stem=stem, statistics=statistics)


def load_weights(net: nn.Module, checkpoint: Mapping[str, Any]) -> None:
    """Load a public checkpoint: a state dict, or a dict with one at "state_dict"; wrappers' prefixes in the names are left out.

    Known layouts: torchvision's; Cohen et al.'s ("1." for a net after its normalising layer, "1.module." if data-parallel);
    akamaster's ("module.", and "linear." for "fc."); EfficientNet-Lite's ("_" before names). Every weight must find its place, and every
    place its weight.
    """
    state = checkpoint.get("state_dict", checkpoint)
    named = {_plain(name): value for name, value in state.items() if isinstance(value, Tensor)}
    wanted = net.state_dict()
    counts = {name for name in wanted if name.endswith("num_batches_tracked")}  # old checkpoints have none, and nothing depends on them
    missing, unknown = sorted(wanted.keys() - named.keys() - counts), sorted(named.keys() - wanted.keys())
    if missing or unknown:
        said = [f"it {has} {names[:5]} ({len(names)})" for has, names in (("lacks", missing), ("has", unknown)) if names]
        hint = ". Its shortcuts have no convolutions: shortcut='pad'?" if not unknown and all("downsample" in n for n in missing) else ""
        raise ValueError(f"this checkpoint is of another network: {', and '.join(said)}{hint}")
    wrong = [f"{n} {tuple(named[n].shape)} for {tuple(wanted[n].shape)}" for n in named if named[n].shape != wanted[n].shape]
    if wrong:
        raise ValueError(f"this checkpoint is of another network: {', '.join(wrong[:5])}")
    net.load_state_dict({**{name: wanted[name] for name in counts}, **named})


def _plain(name: str) -> str:
    parts = name.split(".")
    while parts and parts[0] in ("module", "1"):
        parts = parts[1:]
    return ".".join(["fc" if part == "linear" else part.lstrip("_") for part in parts])
