"""Computing once what a program to be compiled computes twice: torch.compile does not look for that."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx


def merging() -> dict[str, Any]:
    """Options of torch.compile (Inductor) with which repeats are merged."""
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files  # not public, so only where it is needed

    class Once(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            merge_repeats(graph)

        def uuid(self) -> Any:
            return get_hash_for_files((__file__,))

    return {"post_grad_custom_pre_pass": Once()}


def merge_repeats(graph: fx.Graph) -> None:
    """Let every node be the first that does the same with the same."""
    seen: dict[tuple[Any, ...], fx.Node] = {}
    for node in list(graph.nodes):
        if node.op == "call_function" and not node.is_impure() and not _draws(node.target):
            first = seen.setdefault((node.target, str(node.args), str(node.kwargs)), node)
            if first is not node:
                node.replace_all_uses_with(first)
                graph.erase_node(node)


def _draws(operator: Any) -> bool:
    """Whether it draws random numbers, others at each call."""
    return torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ())
