"""The rules of convolutions: by patches, as linear maps, or by a kernel for each query."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn import functional as F

from ._entries import dense, products_pay
from ._trees import copies_per_query, row_major
from ._uses import Use, laid_out_as

_LEAST_WORK = 1 << 16  # multiplications of a group
_GIVEN = "input of a convolution with adapted weights"


def convolution(use: Use, forward: Callable[..., Any], module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """A convolution is a linear map of patches; or, with kernels of the queries' own, one of many groups."""
    (x,) = (*args, *kwargs.values())
    if "weight" in use.names and use.tapped.isdisjoint(use.names.values()):
        return _side_by_side(use, module, x)
    out = forward(x)
    copies = copies_per_query(x.shape[0], use.queries, _GIVEN)
    by_channel = out.movedim(1, -1)  # (rows, *positions, out), as it lies in memory if the channels are last
    positions = copies * math.prod(out.shape[2:])
    patches = _patches(module, x).reshape(use.queries, positions, -1)
    flat = by_channel.reshape(use.queries, positions, -1)
    new = use.corrected(flat, patches, tuple(module.weight.shape))
    return laid_out_as(out, new.reshape(by_channel.shape).movedim(-1, 1))


def _side_by_side(use: Use, module: Any, x: Tensor) -> Tensor:
    """The queries as groups of channels of one image, each with kernels of its own."""
    copies = copies_per_query(x.shape[0], use.queries, _GIVEN)
    changes = dense(use.state[use.names["weight"]], tuple(module.weight.shape))  # outer products: of another size of images
    kernels = row_major(module.weight + changes).flatten(0, 1)
    bias = None if module.bias is None else use.own("bias", module.bias).flatten()
    padding = module.padding
    if module.padding_mode != "zeros":
        x, padding = F.pad(x, _padding(module), module.padding_mode), 0
    image = x.unflatten(0, (use.queries, copies)).transpose(0, 1).flatten(1, 2)  # (copies, queries * in, ...)
    convolve = F.conv1d if x.ndim == 3 else F.conv2d
    out = convolve(image, kernels, bias, module.stride, padding, module.dilation, use.queries * module.groups)
    out = out.unflatten(1, (use.queries, -1)).transpose(0, 1).flatten(0, 1)
    return out.contiguous(memory_format=torch.channels_last) if _has_channels_last(x) or _has_channels_last(module.weight) else out


def _has_channels_last(t: Tensor) -> bool:
    """As PyTorch's convolutions ask of their input and their kernels, to answer alike."""
    return t.ndim == 4 and t.is_contiguous(memory_format=torch.channels_last) and not t.is_contiguous()


def own_kernels_pay(module: Any, positions: int) -> bool:
    """Whether a kernel for each query is smaller than a single step's outer products, and runs faster than a product with patches.

    That it does is known of CPUs only: 2 to 15 times there (16 to 128 channels, 1 to 64 queries, float32; less in float64). With little to
    do for each group (depthwise convolutions) it is slower, since PyTorch differentiates twice, and in float64 once, group by group.
    """
    weight = module.weight
    smaller = module.groups > 1 or not products_pay(positions, weight.shape[0], math.prod(weight.shape[1:]))
    work = positions * weight.numel() // module.groups
    return smaller and work >= _LEAST_WORK and weight.device.type == "cpu" and not weight.is_complex()


def _patches(module: Any, x: Tensor) -> Tensor:
    """(rows, ..., in * kernel), a patch for each position"""
    if any(padding := _padding(module)):
        x = F.pad(x, padding, "constant" if module.padding_mode == "zeros" else module.padding_mode)
    sizes = [module.kernel_size, module.dilation, module.stride]
    if x.ndim == 3:  # a sequence is an image of height one
        x, sizes = x.unsqueeze(2), [(1, *size) for size in sizes]
    kernel, dilation, stride = sizes
    if x.is_cuda and set(dilation) == {1} and not is_dynamo_compiling():
        return _windows(x, kernel, stride)
    return F.unfold(x, kernel, dilation=dilation, stride=stride).mT


def _padding(module: Any) -> list[int]:
    """As `F.pad` takes it, and as the module does: that with zeros may have been set since it was made."""
    padding = module.padding
    if module.padding_mode != "zeros" or isinstance(padding, str):
        return module._reversed_padding_repeated_twice
    each = padding if isinstance(padding, tuple | list) else [padding] * len(module.kernel_size)
    return [p for p in reversed(each) for _ in range(2)]


def _windows(x: Tensor, kernel: tuple[int, int], stride: tuple[int, int]) -> Tensor:
    """What `F.unfold` makes, as a view to be copied: on CUDA that one starts a kernel for each row. (On a CPU it is the faster one.)"""
    views = x.unfold(2, kernel[0], stride[0]).unfold(3, kernel[1], stride[1])  # (rows, in, down, across, *kernel)
    return views.permute(0, 2, 3, 1, 4, 5)
