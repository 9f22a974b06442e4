"""The networks of the pendulum experiment, how they are trained, and what softens or hardens their conservation of energy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tailoring import CN, Tailored, losses

from ._pendulum_data import Law

Norm = Literal["l1", "l2"]


class Blocks(nn.Module):
    """A linear layer of several networks side by side: (rows, members * inputs) -> (rows, members * outputs), one block for each.

    A row is one query for every member, and no member sees another's: all seeds of a method are integrated at once.
    """

    def __init__(self, members: int, inputs: int, outputs: int, bias: bool = True):
        super().__init__()
        start = torch.empty(outputs, inputs)
        self.weight = nn.Parameter(torch.stack([nn.init.orthogonal_(start).T.clone() for _ in range(members)]))  # (members, in, out)
        bound = inputs**-0.5  # nn.Linear's own
        self.bias = nn.Parameter(torch.empty(members, 1, outputs).uniform_(-bound, bound)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return _blocks(x, self.weight, self.bias)


def _blocks(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    x = x.unflatten(1, (weight.shape[0], -1)).transpose(0, 1)  # (members, rows, in)
    y = torch.bmm(x, weight) if bias is None else torch.baddbmm(bias, x, weight)
    return y.transpose(0, 1).flatten(1)


class Tanh(nn.Tanh):
    """tanh x = 2 sigmoid(2x) - 1. On a CPU torch's own tanh takes six times as long as its sigmoid, half as long as the matrix product."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * torch.sigmoid(2 * input) - 1


class MLP(nn.Sequential):
    """dx/dt = f(x), 2-200-200-2 with tanh, started as in the code of Hamiltonian Neural Networks (orthogonal, no bias at the end)."""

    def __init__(self, members: int = 1, width: int = 200, outputs: int = 2):
        last = Blocks(members, width, outputs, bias=False)
        super().__init__(Blocks(members, 2, width), Tanh(), Blocks(members, width, width), Tanh(), last)


class HNN(nn.Module):
    """A Hamiltonian network: dq/dt = dH/dp, dp/dt = -dH/dq, with H the output of a 2-200-200-1 network (Greydanus et al. 2019).

    The gradient of H is written out, so that training is ordinary backpropagation.
    """

    def __init__(self, members: int = 1, width: int = 200):
        super().__init__()
        self.energy = MLP(members, width, outputs=1)

    def forward(self, x: Tensor) -> Tensor:
        first, second, last = (layer for layer in self.energy if isinstance(layer, Blocks))
        tanh = Tanh()
        h1 = tanh(first(x))
        h2 = tanh(second(h1))
        g2 = (1 - h2.square()) * last.weight.flatten()  # dH/d(second layer), (rows, members * width)
        g1 = (1 - h1.square()) * _blocks(g2, second.weight.mT)
        dq, dp = _blocks(g1, first.weight.mT).unflatten(1, (-1, 2)).unbind(-1)
        return torch.stack([dp, -dq], -1).flatten(1)


class Projected(nn.Module):
    """The closed form of soft conservation: `amount` of the part of f that changes the energy is taken away (0 none, 1 all).

    f - amount (grad H . f) grad H / |grad H|^2
    """

    def __init__(self, net: nn.Module, law: Law, amount: float):
        super().__init__()
        self.net, self.law, self.amount = net, law, amount

    def forward(self, x: Tensor) -> Tensor:
        x, f = by_member(x), by_member(self.net(x))
        slope = self.law.gradient(x)
        size = slope.square().sum(-1, keepdim=True).clamp(min=1e-12)  # at rest nothing changes the energy
        return (f - self.amount * (slope * f).sum(-1, keepdim=True) * slope / size).flatten(1)


def by_member(x: Tensor) -> Tensor:
    """(rows, members * 2) -> (rows, members, 2)"""
    return x.unflatten(1, (-1, 2))


def side_by_side(nets: Sequence[nn.Module]) -> nn.Module:
    """Networks of one member each as one network with as many members, in float64 for the integrator."""
    width = next(iter(nets[0].parameters())).shape[-1]
    joined = type(nets[0])(len(nets), width)
    states = [net.state_dict() for net in nets]
    joined.load_state_dict({name: torch.cat([state[name] for state in states]) for name in states[0]})
    return joined.double().requires_grad_(False)


class Drift(losses.Loss):
    """How fast the energy of the query would change: |grad H(x) . f(x)|, or its square, summed over the members."""

    def __init__(self, law: Law, norm: Norm = "l1"):
        super().__init__()
        self.law, self.norm = law, norm

    def forward(self, model: Any, x: Tensor) -> Tensor:
        rate = (self.law.gradient(by_member(x)) * by_member(model(x))).sum(-1)  # dH/dt, (rows, members)
        if self.norm == "l2":
            return rate.square().sum(1)
        return (rate * rate.detach().sign()).sum(1)  # |rate|; compiled for a CPU by torch 2.13, the second derivative of abs() crashes


def tailored(
    net: nn.Module, law: Law, *, steps: int, lr: float | Tensor, norm: Norm = "l1", backprop: Literal["none", "all"] = "none"
) -> Tailored:
    return Tailored(net, Drift(law, norm), adapt=CN(nn.Tanh), steps=steps, lr=lr, backprop=backprop)
