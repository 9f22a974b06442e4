"""How the networks of the pendulum experiment are trained: what is minimised, and the loop."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from tailoring import Tailored

from ._compiled_step import Parameters, Step


class Error(nn.Module):
    """The squared error of a network's derivatives; with `gaps` (rows, 1), of its mean derivatives over Runge-Kutta steps that long."""

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, y: Tensor, gaps: Tensor | None = None) -> Tensor:
        return mse_loss(self.net(x) if gaps is None else mean_slope(self.net, x, gaps), y)


def mean_slope(model: nn.Module, x: Tensor, gaps: Tensor) -> Tensor:
    """(x(t + gap) - x(t)) / gap by one step of the classical Runge-Kutta method."""
    a = model(x)
    b = model(x + gaps / 2 * a)
    c = model(x + gaps / 2 * b)
    return (a + 2 * b + 2 * c + model(x + gaps * c)) / 6


class OuterError(nn.Module):
    """The squared errors after each inner step, summed (Alg. 2): `sum(outer_losses(model, mse_loss, x, y))`, in a form that compiles.

    `one_step` is the tailored network with a single inner step, which is taken `steps` times, each from where the last one ended.
    """

    def __init__(self, one_step: Tailored, steps: int):
        super().__init__()
        self.one_step, self.steps = one_step, steps

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        state, errors = None, []
        for _ in range(self.steps):
            state = self.one_step.tailor(x, start=state)
            errors.append(mse_loss(self.one_step.predict(x, state), y))
        return torch.stack(errors).sum()


def fit(step: Step, parameters: Parameters, data: tuple[Tensor, ...], iterations: int) -> Iterator[float]:
    """Minimise as the code of Hamiltonian Neural Networks does: Adam, 1e-3, weight decay 1e-5, all pairs at once. Yields the losses."""
    optimizer = torch.optim.Adam(parameters.values(), 1e-3, weight_decay=1e-5, fused=True)
    for _ in range(iterations):
        gradients, loss = step(parameters, data)
        for name, parameter in parameters.items():
            parameter.grad = gradients[name].contiguous()  # fused Adam does not look at strides
        optimizer.step()
        yield float(loss)
