"""Gradients of convolutions as convolutions, where a compiled program is to search for its kernels.

The gradient in a convolution's input is a convolution of the answer's gradient with the kernel flipped. Inductor searches among kernels of
its own for convolutions, and writes what follows one into the same kernel; a gradient it leaves to the library
(by default, up to PyTorch 2.13).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

aten: Any = torch.ops.aten


def flip_gradients(graph: fx.Graph) -> None:
    """Let every gradient that a convolution with stride 1 is asked for in its input alone be a convolution."""
    for node in list(graph.nodes):
        if node.target is aten.convolution_backward.default and _is_convolution(node):
            with graph.inserting_before(node):
                made = _flipped(graph, node)
            for user in list(node.users):  # the gradients in input, weight and bias, the last two None
                user.replace_all_uses_with(made)
                graph.erase_node(user)
            graph.erase_node(node)


def _is_convolution(node: fx.Node) -> bool:
    _, _, weight, _, stride, padding, dilation, transposed, _, groups, asked = node.args
    size: Any = weight.meta["val"].shape[2:]  # type: ignore[union-attr]
    plain = not transposed and groups == 1 and len(size) == 2 and set(stride) | set(dilation) == {1}  # type: ignore[arg-type]
    inside = all(0 <= p < k for p, k in zip(padding, size, strict=True))  # type: ignore[arg-type]
    return plain and inside and list(asked) == [True, False, False]  # type: ignore[arg-type]


def _flipped(graph: fx.Graph, node: fx.Node) -> fx.Node:
    gradient, _, weight, _, stride, padding, dilation, *_ = node.args
    value: Any = weight.meta["val"]  # type: ignore[union-attr]
    layout = torch.channels_last if value.is_contiguous(memory_format=torch.channels_last) else torch.contiguous_format
    turned = _call(graph, aten.permute.default, (_call(graph, torch.ops.prims.rev.default, (weight, [2, 3])), [1, 0, 2, 3]))
    turned = _call(graph, aten.clone.default, (turned,), {"memory_format": layout})
    around = [k - 1 - p for p, k in zip(padding, value.shape[2:], strict=True)]  # type: ignore[arg-type]
    return _call(graph, aten.convolution.default, (gradient, turned, None, stride, around, dilation, False, [0, 0], 1))


def _call(graph: fx.Graph, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> fx.Node:
    made = graph.call_function(target, args, kwargs)
    made.meta["val"] = target(*(arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in args), **(kwargs or {}))
    return made
