"""Reference networks."""

from ._efficientnet import EfficientNetLite0 as EfficientNetLite0
from ._efficientnet import InvertedResidual as InvertedResidual
from ._mlp import ResidualMLP as ResidualMLP
from ._resnet import BasicBlock as BasicBlock
from ._resnet import Bottleneck as Bottleneck
from ._resnet import ResNet as ResNet
from ._resnet import cifar_resnet as cifar_resnet
from ._resnet import load_weights as load_weights
from ._resnet import resnet18 as resnet18
from ._resnet import resnet50 as resnet50

__all__ = [
    "BasicBlock",
    "Bottleneck",
    "EfficientNetLite0",
    "InvertedResidual",
    "ResNet",
    "ResidualMLP",
    "cifar_resnet",
    "load_weights",
    "resnet18",
    "resnet50",
]
