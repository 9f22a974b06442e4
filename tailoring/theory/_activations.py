"""What `thm:expresivity` asks of an activation (Assumption `a:activation`)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

# Whether a function is analytic cannot be seen from its values, so it is told here.
_ANALYTIC = (nn.Sigmoid, nn.Tanh, nn.Softplus, nn.GELU, nn.SiLU, nn.Mish, nn.LogSigmoid, nn.Tanhshrink)
_KINKED = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.RReLU, nn.ELU, nn.SELU, nn.CELU, nn.Threshold, nn.Softsign),
    *(nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Hardshrink, nn.Softshrink),
)


@dataclass(frozen=True)
class Activation:
    """What is known of an activation; true if it satisfies Assumption `a:activation`."""

    name: str
    analytic: bool | None  # None: not known
    increasing: bool
    bounded_below: bool  # has a finite limit at minus infinity

    def __bool__(self) -> bool:
        return self.analytic is True and self.increasing and self.bounded_below

    def __str__(self) -> str:
        known = {True: "analytic", False: "not analytic", None: "not known to be analytic"}[self.analytic]
        return (
            f"{self.name}: {known}, {'increasing' if self.increasing else 'not increasing'}, "
            f"{'with a' if self.bounded_below else 'without a'} finite limit at minus infinity"
        )


def activation_facts(activation: Callable[[Tensor], Tensor]) -> Activation:
    """Assumption `a:activation`: analytic, increasing, with a finite limit at minus infinity (the limit at plus infinity may be infinite).

    The last two are looked at on a grid; the first is known for torch's own modules. Sigmoid, tanh and softplus satisfy all three.
    GELU, SiLU and Mish are not increasing, LogSigmoid has no lower limit, and ReLU is not analytic: it is excluded with reason,
    since units that are dead at every view (a set of weights of positive measure, not zero) leave M_w of rank one.
    """
    analytic = True if isinstance(activation, _ANALYTIC) else False if isinstance(activation, _KINKED) else None
    grid = torch.linspace(-30, 30, 6001, dtype=torch.float64)
    far = torch.tensor([-1e4, -1e8], dtype=torch.float64)
    if isinstance(activation, nn.Module):  # one with parameters may be elsewhere, or in float32
        activation = copy.deepcopy(activation).cpu().double()
    with torch.no_grad():
        values, limit = activation(grid), activation(far)
    # where the function is flat to rounding (a saturated sigmoid) differences may be zero, or of the size of the rounding
    rounding = 8 * torch.finfo(values.dtype).eps * float(values.abs().max())
    increasing = bool((values.diff() >= -rounding).all() and values[-1] > values[0])
    bounded = bool(limit.isfinite().all() and (limit[0] - limit[1]).abs() < 1e-3)
    return Activation(getattr(activation, "__name__", type(activation).__name__), analytic, increasing, bounded)
