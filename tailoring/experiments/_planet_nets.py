"""What predicts the planets' next state, and the law that the prediction should obey. States are standardised, (queries, 25)."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ._nbody import BODIES, FIRST, SECOND


def moving(state: Tensor) -> Tensor:
    """Positions and velocities, (..., 25) -> (..., 20); masses do not change."""
    return state.unflatten(-1, (BODIES, 5))[..., :4].flatten(-2)


def layers(sizes: list[int], norm: bool = False) -> nn.Sequential:
    """Linear layers with ReLU (and BatchNorm before it) in between."""
    made: list[nn.Module] = []
    for a, b in pairwise(sizes[:-1]):
        made += [nn.Linear(a, b), nn.BatchNorm1d(b), nn.ReLU()] if norm else [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*made, nn.Linear(sizes[-2], sizes[-1]))


class PlanetMLP(nn.Module):
    """The paper's: x + f(x), three hidden layers. The masses of the answer are those of the query."""

    def __init__(self, width: int, depth: int = 3, norm: bool = False):
        super().__init__()
        self.layers = layers([5 * BODIES] + [width] * depth + [4 * BODIES], norm)

    def forward(self, x: Tensor) -> Tensor:
        change = self.layers(x).unflatten(1, (BODIES, 4))
        return x + pad(change, (0, 1)).flatten(1)  # (queries, 5 bodies, x y vx vy 0)


class PairNet(nn.Module):
    """Every body moves by what the other four do to it, summed: equivariant to permutations and translations.

    change_i = g(v_i, m_i, sum_j f(q_j - q_i, v_j - v_i, m_i, m_j, 1 / |q_j - q_i|))
    """

    mean: Tensor
    std: Tensor
    unit: Tensor
    me: Tensor
    other: Tensor

    def __init__(self, width: int, mean: Tensor, std: Tensor):
        super().__init__()
        unit = std.view(BODIES, 5).mean(0)  # one unit for all bodies, where standardising has one for each
        self.register_buffer("mean", (mean.view(BODIES, 5) / unit))
        self.register_buffer("std", (std.view(BODIES, 5) / unit))
        self.register_buffer("unit", unit)
        self.register_buffer("me", torch.cat([FIRST, SECOND]), persistent=False)  # the 20 ordered pairs
        self.register_buffer("other", torch.cat([SECOND, FIRST]), persistent=False)
        self.messages = layers([7, width, width, width])
        self.act = nn.ReLU()
        self.update = layers([width + 3, width, width, 4])

    def forward(self, x: Tensor) -> Tensor:
        bodies = x.unflatten(1, (BODIES, 5)) * self.std + self.mean  # (queries, 5, 5), in common units
        mine, others = bodies[:, self.me], bodies[:, self.other]
        away = others[..., :4] - mine[..., :4]
        distance = (away[..., :2] * self.unit[:2]).norm(dim=-1, keepdim=True)
        seen = torch.cat([away, mine[..., 4:], others[..., 4:], 30 / (distance + 1)], -1)  # (queries, 20, 7)
        messages = self.act(self.messages(seen))
        felt = messages.new_zeros(len(x), BODIES, messages.shape[-1]).index_add(1, self.me, messages)
        centred = bodies[..., 2:] - torch.stack([bodies.new_zeros(()), bodies.new_zeros(()), self.mean[:, 4].mean()])
        change = self.update(torch.cat([felt, centred], -1)) / self.std[:, :4]
        return x + pad(change, (0, 1)).flatten(1)


class Invariants:
    """Energy and momentum in physical units, where both are of the size of 1 (mean kinetic energy about 0.9, potential about -1.2).

    `compiled` has no second derivative.

    E = sum_i m_i v_i^2 / 2 - sum_{i<j} G m_i m_j / r_ij,   P = sum_i m_i v_i.    (queries, 25) -> (queries, 3): E, P_x, P_y
    """

    def __init__(self, mean: Tensor, std: Tensor, gravity: float, compiled: bool = False):
        self.mean, self.std, self.gravity = mean, std, gravity
        self._evaluate = torch.compile(self._formula, dynamic=False) if compiled else self._formula
        self._query: tuple[Tensor, Tensor] | None = None

    def __call__(self, state: Tensor) -> Tensor:
        return self._evaluate(state)

    def _formula(self, state: Tensor) -> Tensor:
        bodies = (state * self.std + self.mean).unflatten(1, (BODIES, 5))
        velocity, mass = bodies[..., 2:4], bodies[..., 4:]
        # Five bodies in a circle: every pair is one step or two apart, so two rolls meet all ten. (Indexing by pairs has a slow gradient.)
        others = torch.cat([bodies.roll(1, 1), bodies.roll(2, 1)], 1)
        mine = torch.cat([bodies, bodies], 1)  # (queries, 10, 5)
        apart = (mine - others)[..., :2].square().sum(-1)
        apart = apart.clamp(min=1)  # predicted bodies may coincide; real ones never come that near
        potential = -self.gravity * (mine[..., 4] * others[..., 4] * apart.rsqrt()).sum(1, keepdim=True)
        kinetic = (mass * velocity.square()).sum((1, 2)) / 2
        return torch.cat([kinetic[:, None] + potential, (mass * velocity).sum(1)], 1)

    def of_query(self, x: Tensor) -> Tensor:
        """The same for a query; asked again for the same tensor, as every inner step does, it remembers."""
        if self._query is None or self._query[0] is not x:
            self._query = x, self(x).detach()
        return self._query[1]


PHYSICS = (1.0, 10.0, 10.0)  # "we multiplied the momentum loss by 10 to roughly balance", App. E


def violation(law: Invariants, x: Tensor, prediction: Tensor) -> Tensor:
    """|E' - E| + 10 |P' - P|_1 for each query, (queries,): the paper's physics loss."""
    change = (law(prediction) - law.of_query(x)).abs()
    return change[:, 0] * PHYSICS[0] + change[:, 1] * PHYSICS[1] + change[:, 2] * PHYSICS[2]


def constant_velocity(x: Tensor, mean: Tensor, std: Tensor, time: float) -> Tensor:
    """Every body goes on as it was; `time` is that between two states."""
    bodies = (x * std + mean).unflatten(1, (BODIES, 5))
    moved = torch.cat([bodies[..., :2] + time * bodies[..., 2:4], bodies[..., 2:]], -1)
    return (moved.flatten(1) - mean) / std


def projected(law: Invariants, x: Tensor, prediction: Tensor, steps: int = 10) -> Tensor:
    """The prediction moved the shortest way onto the states with the query's energy and momentum, as a constraint layer does.

    Newton's steps on c(y) = 0 along the constraints' gradients, y <- y - J^T (J J^T)^-1 c.
    """
    wanted, y = law(x), prediction.detach()
    for _ in range(steps):
        with torch.enable_grad():
            leaf = y.requires_grad_()
            now = law(leaf)
            rows = [torch.autograd.grad(now[:, k].sum(), leaf, retain_graph=k < 2)[0] for k in range(3)]
        jacobian = pad(torch.stack(rows, 1).unflatten(2, (BODIES, 5))[..., :4], (0, 1)).flatten(2)  # (queries, 3, 25), masses held
        gram = jacobian @ jacobian.mT + 1e-10 * torch.eye(3, device=y.device)
        back = torch.linalg.solve(gram, (now.detach() - wanted)[..., None])
        y = y.detach() - (jacobian.mT @ back)[..., 0]
    return torch.where(y.isfinite().all(1, keepdim=True), y, prediction)


Network = Literal["mlp", "pairs"]


def build(network: Network, width: int, norm: bool, mean: Tensor, std: Tensor) -> nn.Module:
    return PlanetMLP(width, norm=norm) if network == "mlp" else PairNet(width, mean, std)
