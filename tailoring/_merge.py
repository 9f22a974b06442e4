"""Computing once what a program to be compiled computes twice: torch.compile does not look for that."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx


def merge_repeats(graph: fx.Graph) -> None:
    """Let every node be the first that does the same with the same; but two outputs stay two tensors."""
    seen: dict[tuple[Any, ...], fx.Node] = {}
    outputs = {given for node in graph.nodes if node.op == "output" for given in node.all_input_nodes}
    for node in list(graph.nodes):
        if node.op == "call_function" and node not in outputs and not node.is_impure() and _is_function(node.target):
            first = seen.setdefault((node.target, str(node.args), str(node.kwargs)), node)
            if first is not node:
                node.replace_all_uses_with(first)
                graph.erase_node(node)


def _is_function(target: Any) -> bool:
    """Whether it surely answers the same for the same. Others' operators may remember, or draw random numbers, as some of PyTorch's do."""
    known = getattr(target, "namespace", "") in ("aten", "prims", "tailoring") or target is operator.getitem
    return known and torch.Tag.nondeterministic_seeded not in getattr(target, "tags", ())
