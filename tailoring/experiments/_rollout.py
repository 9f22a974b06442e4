"""Long predictions: learned derivatives, integrated by scipy from a segment's first state."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from scipy.integrate import solve_ivp
from torch import Tensor, nn

from ._pendulum_data import Segment


class _TooManyError(Exception):
    """The integrator asks for more evaluations than it may: the field is too rough, or has diverged."""


def roll_out(
    joined: nn.Module, alone: Sequence[nn.Module], segments: Sequence[Segment], *, members: int, rtol: float, evaluations: int
) -> list[Tensor]:
    """The trajectories that the members of a network predict, for each segment (members, time, 2); nan for what cannot be integrated.

    All members are integrated as one system; if that takes too many evaluations for the roughness of some, each by itself, if `alone`
    holds them.
    """
    found = _solve(joined, segments, members, rtol, evaluations)
    if found is not None:
        return found
    each = [_solve(net, segments, 1, rtol, evaluations) for net in alone]
    lost = [torch.full((1, len(s.time), 2), torch.nan, dtype=torch.float64) for s in segments]
    return [torch.cat(parts) for parts in zip(*(one or lost for one in each or [None] * members), strict=True)]


def _solve(net: nn.Module, segments: Sequence[Segment], members: int, rtol: float, evaluations: int) -> list[Tensor] | None:
    count = 0

    @torch.no_grad()
    def slope(_: float, y: np.ndarray) -> np.ndarray:
        nonlocal count
        count += 1
        if count > evaluations or not np.isfinite(y).all():
            raise _TooManyError
        return net(torch.from_numpy(y).view(len(segments), -1)).flatten().numpy()

    start = torch.stack([s.states[0].repeat(members) for s in segments])  # (segments, members * 2)
    end = max(float(s.time[-1]) for s in segments)
    try:
        solution = solve_ivp(slope, (0.0, end), start.flatten().numpy(), rtol=rtol, atol=rtol * 1e-3, dense_output=True)
    except _TooManyError:
        return None
    if not solution.success:
        return None
    paths = []
    for i, segment in enumerate(segments):
        path = torch.from_numpy(solution.sol(segment.time.numpy())).T.unflatten(1, (len(segments), members, 2))[:, i]
        paths.append(path.transpose(0, 1).contiguous())  # (members, time, 2)
    return paths
