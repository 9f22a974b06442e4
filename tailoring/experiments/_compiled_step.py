"""One step of training, compiled as one function: parameters and data in, gradients and loss out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

Parameters = dict[str, Tensor]
Step = Callable[[Parameters, tuple[Tensor, ...]], tuple[Parameters, Tensor]]


def plain_step(objective: nn.Module) -> Step:
    """(parameters, data) -> gradients, loss of `objective(*data)`, which holds these parameters."""

    def step(parameters: Parameters, data: tuple[Tensor, ...]) -> tuple[Parameters, Tensor]:
        loss = objective(*data)
        return dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True)), loss.detach()

    return step


def compiled_step(objective: nn.Module) -> Step:
    """The same, compiled for these shapes.

    Forward and backward pass as one graph: compiled apart, as `objective.compile()` does, the backward pass computes much of the forward
    pass again to save memory, which a small network does not need to save, and takes an eighth longer.
    """

    def step(parameters: Parameters, data: tuple[Tensor, ...]) -> tuple[Parameters, Tensor]:
        return torch.func.grad_and_value(lambda p: torch.func.functional_call(objective, p, data))(parameters)

    return torch.no_grad()(_compile(step))


def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    from torch._inductor.custom_graph_pass import CustomGraphPass  # not public, so only where it is needed

    class Once(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            merge_repeats(graph)

        def uuid(self) -> str:
            return "tailoring merge_repeats 1"

    return torch.compile(function, fullgraph=True, dynamic=False, options={"post_grad_custom_pre_pass": Once()})


def merge_repeats(graph: fx.Graph) -> None:
    """Compute once what is computed twice: an outer loss and the next inner step begin with the same forward pass."""
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
