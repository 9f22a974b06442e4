"""The image classifiers that are certified: networks by name, and how each is tailored."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tailoring import CN, Tailored, Weights, losses
from tailoring._inner import Backprop
from tailoring.losses import input_of
from tailoring.nn import BasicBlock, Bottleneck, EfficientNetLite0, InvertedResidual, cifar_resnet, resnet50
from tailoring.nn._resnet import CIFAR, IMAGENET

from ._images import class_folders

Network = Literal["resnet8", "resnet20", "resnet32", "resnet44", "resnet56", "resnet110", "resnet50", "efficientnet-lite0"]
LARGE = ("resnet50", "efficientnet-lite0")  # networks for images of 224 pixels
SHORTEST = 1e-6  # a gradient below this length is not made longer
_EXPECTED = "weights must be plain tensors by name, bare or under 'state_dict' or 'model', as safetensors or torch.save writes them"


@dataclass(frozen=True, kw_only=True)
class Tailoring:
    """How a classifier tailors itself to a noisy image: the paper's choice, and the others that are searched."""

    nu: float = 0.1
    """noise of the tailoring loss, Sec. 5.4"""
    lr: float = 0.1
    """step size; the paper's appendix chooses among 1e-3 to 1"""
    steps: int = 1
    """gradient steps on each noisy sample; the paper's appendix has 1"""
    views: int = 1
    """noisy views in the loss"""
    features: Literal["penultimate", "middle", "logits"] = "penultimate"
    """that must not change under noise; Sec. 5.4"""
    where: Literal["all", "lower", "upper"] = "all"
    """which blocks' outputs are scaled and shifted: all, the first half, or the last half"""
    adapt: Literal["cn", "weights"] = "cn"
    """weights: tailor the weights of one block, the last of those chosen by --where, in place of scales and shifts"""
    normalised: bool = False
    """step by `lr` along each query's gradient, however short that is"""
    clip: float | None = None
    """longest gradient that a query steps along; the paper names none, and trained networks' are shorter than 0.4"""


@dataclass(frozen=True, kw_only=True)
class Inner(Tailoring):
    """The same, in training."""

    backprop: Backprop = "none"
    """order of meta-tailoring; the paper's is first order"""


def check_tailoring(inner: Tailoring) -> None:
    """Raise if settings contradict each other, or the loss cannot see what would be tailored."""
    if not 0 < inner.lr < math.inf:
        raise ValueError(f"--lr must be above 0, not {inner.lr}")
    if inner.views < 1:
        raise ValueError(f"--views must be at least 1, not {inner.views}")
    if inner.clip is not None and not inner.clip > 0:
        raise ValueError(f"--clip must be above 0, not {inner.clip}")
    if inner.clip is not None and inner.normalised:
        raise ValueError("--clip bounds gradients, and --normalised steps have a length of their own, --lr: choose one of the two")
    if inner.features == "middle" and inner.where == "upper":
        raise ValueError("--features middle lie below the blocks of --where upper, so nothing would move: choose --where lower or all")


def build(network: Network, classes: int, *, statistics: Literal["cifar", "imagenet"] = "cifar", shortcut: Any = "conv") -> nn.Module:
    if network == "resnet50":
        return resnet50(classes=classes)
    if network == "efficientnet-lite0":
        return EfficientNetLite0(classes)
    chosen = CIFAR if statistics == "cifar" else IMAGENET
    return cifar_resnet(int(network[6:]), classes=classes, shortcut=shortcut, statistics=chosen)


def blocks(net: nn.Module) -> list[str]:
    """Names of a network's residual blocks, from input to output."""
    return [name for name, module in net.named_modules() if isinstance(module, BasicBlock | Bottleneck | InvertedResidual)]


def tailored(net: nn.Module, inner: Tailoring, *, backprop: Backprop = "none", compile: bool | dict[str, Any] = False) -> Tailored:
    """The classifier that makes its features smooth around each image before it answers."""
    names = blocks(net)
    half = (len(names) + 1) // 2
    at = {"penultimate": input_of("fc"), "middle": names[half - 1], "logits": None}[inner.features]
    chosen = {"all": names, "lower": names[:half], "upper": names[half:]}[inner.where]
    return Tailored(
        net,
        losses.Smooth(inner.nu, at=at, views=inner.views),
        adapt=CN(*chosen) if inner.adapt == "cn" else Weights(chosen[-1]),
        steps=inner.steps,
        lr=inner.lr / SHORTEST if inner.normalised else inner.lr,
        clip=SHORTEST if inner.normalised else inner.clip,
        backprop=backprop,
        compile=compile,
    )


def read_weights(path: Path) -> dict[str, Tensor]:
    if not path.exists():
        raise FileNotFoundError(f"no weights at {path}")
    try:
        found = load_file(path) if path.suffix == ".safetensors" else torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # each format has errors of its own
        raise ValueError(f"{path} cannot be read ({type(error).__name__}): {_EXPECTED}") from None
    for wrapper in ("state_dict", "model"):
        found = found.get(wrapper, found) if isinstance(found, dict) else found
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a {type(found).__name__}: {_EXPECTED}")
    state = {str(name): value for name, value in found.items() if isinstance(value, Tensor)}
    if not any(map(head, state)):
        own = "a network of your own is certified from Python, see docs/smoothing.md"
        raise ValueError(f"{path} holds no last layer, fc or linear, among its {len(state)} tensors: {_EXPECTED}; {own}")
    return state


def head(name: str) -> bool:
    """Whether this is the name of a tensor of the last layer, in any of the public layouts."""
    return re.search(r"(^|\.)_?(fc|linear)\.(weight|bias)$", name) is not None


def count_classes(state: dict[str, Any]) -> int:
    return next(len(value) for name, value in state.items() if head(name))


def for_classes(state: dict[str, Tensor], path: Path, classes: Sequence[str], named: Path | None) -> dict[str, Tensor]:
    """The checkpoint of `path`, its last layer brought to the data's classes; `named`, a file or folder, names all of its own."""
    known = count_classes(state)
    if named is None:
        if known == len(classes):
            return state
        raise ValueError(
            f"{path} knows {known} classes, the data {len(classes)}: name all {known}, in order, with --classes FILE or FOLDER"
        )
    names = class_names(named)
    missing = [name for name in classes if name not in names]
    if missing or len(names) != known:
        raise ValueError(f"{named} names {len(names)} classes ({known} are needed) and lacks {missing[:5]} of the data's")
    return restricted(state, [names.index(name) for name in classes])


def class_names(path: Path) -> list[str]:
    if not path.exists():
        raise FileNotFoundError(f"no file or folder of class names at {path}")
    return [f.name for f in class_folders(path)] if path.is_dir() else path.read_text().split()


def restricted(state: dict[str, Any], rows: list[int]) -> dict[str, Tensor]:
    """A checkpoint whose last layer knows only some of its classes, in this order."""
    return {name: value[rows] if head(name) else value for name, value in state.items()}
