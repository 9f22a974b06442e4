"""Weights by columns, where a compiled program multiplies by them again and again.

Hopper's tensor cores read float32 (as TF32) along the dimension that is summed over, and no other way. A layer's weight lies so for its
forward pass; for the backward pass, g W, it must be turned, which the kernels do at every step: slower by a third, as seen on an H200.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

aten: Any = torch.ops.aten
_OFTEN = 3  # to turn a weight takes about as long as to multiply by it
_ALIGNED = 4  # numbers in 16 bytes, which is what the kernels read at once


def turned_by_tf32(weight: Tensor) -> bool:
    cuda: Any = torch.backends.cuda.matmul
    return weight.device.type == "cuda" and weight.dtype is torch.float32 and cuda.fp32_precision == "tf32"


def turn_weights(graph: fx.Graph, wanted: Callable[[Tensor], bool] = turned_by_tf32) -> None:
    """Turn once, at the program's beginning, every weight that several products would turn."""
    products: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.target is aten.mm.default and (weight := _read_by_rows(node.args[1])) is not None:
            products.setdefault(weight, []).append(node)
    for weight, uses in products.items():
        value = weight.meta["val"]
        if len(uses) < _OFTEN or not value.is_contiguous() or any(n % _ALIGNED for n in value.shape) or not wanted(value):
            continue
        with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
            turned = _permuted(graph, weight)
            copied = graph.call_function(aten.clone.default, (turned,), {"memory_format": torch.contiguous_format})
            copied.meta["val"] = turned.meta["val"].contiguous()
            back = _permuted(graph, copied)
        for node in uses:
            node.args = (node.args[0], back)


def _read_by_rows(node: fx.Node) -> fx.Node | None:
    """The input of the program that this is, if it is one, turned twice or not at all."""
    turns = 0
    while node.target is aten.permute.default and list(node.args[1]) == [1, 0]:  # type: ignore[arg-type]
        node, turns = node.args[0], turns + 1  # type: ignore[assignment]
    return node if node.op == "placeholder" and turns % 2 == 0 else None


def _permuted(graph: fx.Graph, node: fx.Node) -> fx.Node:
    made = graph.call_function(aten.permute.default, (node, [1, 0]))
    made.meta["val"] = node.meta["val"].permute(1, 0)
    return made
