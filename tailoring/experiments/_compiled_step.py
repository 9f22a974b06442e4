"""One step of training, compiled as one function: parameters and data in, gradients and loss out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tailoring._passes import own_passes

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
    """An outer loss and the next inner step begin with the same forward pass, so repeats are merged."""
    return torch.compile(function, fullgraph=True, dynamic=False, options=own_passes())
