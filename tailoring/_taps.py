"""Listening to the linear maps of a model: what goes in, h, and the gradient g of what comes out make that of the weight, g h^T."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor  # pyright: ignore[reportMissingImports]
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.nn import functional as F

from ._entries import LowRank, without_autocast
from ._trees import has_fractions


@dataclass(frozen=True)
class Tap:
    """One linear map of one forward pass, and what went into it: (queries, rows, in), or indices (queries, rows) into a table.

    `first` is the first of its outputs among those of the weight (attention packs three projections into one weight).
    """

    weight: str | None  # names in the state; None if not adapted
    bias: str | None
    given: Tensor
    shape: tuple[int, ...]  # the weight's own
    first: int = 0
    skip: int | None = None  # an index that has no gradient (padding)

    @property
    def is_table(self) -> bool:
        return not has_fractions(self.given)

    @property
    def outputs(self) -> int:
        return self.shape[1] if self.is_table else self.shape[0]

    @property
    def inputs(self) -> int:
        return self.shape[0] if self.is_table else math.prod(self.shape[1:])

    @property
    def groups(self) -> int:
        return 1 if self.is_table else self.given.shape[-1] // self.inputs

    def factors(self, g: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient of the weight in outer products, (left, right), given that of the outputs, (queries, rows, out)."""
        g = g if self.skip is None else g * (self.given != self.skip)[..., None]
        return self._all_outputs(g), self._conjugate

    def matrices(self, g: Tensor) -> Tensor:
        """The same as it is, (queries, out, in)."""
        if self.groups > 1:
            g, given = (t.unflatten(-1, (self.groups, -1)) for t in (g, self._conjugate.to(g.dtype)))
            with without_autocast(g):
                return torch.einsum("qpgo,qpgi->qgoi", g, given).flatten(1, 2)
        return LowRank(((0, *self.factors(g)),)).dense(self.inputs)

    def offsets(self, g: Tensor) -> Tensor:
        """The gradient of the bias, (queries, out)."""
        return self._all_outputs(g.sum(1))

    @property
    def _conjugate(self) -> Tensor:
        """Of complex numbers the gradient is g h^H; of all others, the conjugate is `given` itself."""
        return torch.conj_physical(self.given) if self.given.is_complex() else self.given

    def _all_outputs(self, g: Tensor) -> Tensor:
        missing = self.outputs - g.shape[-1]
        return F.pad(g, (self.first, missing - self.first)) if missing else g


@dataclass
class Taps:
    """What a pass through the model lets hear of its linear maps: the taps, and their outputs, (queries, rows, out) each.

    `probes` are zeros to be added to the outputs, for torch.func.grad, which differentiates by inputs only. `cloned` outputs are
    safe from modules that work in place.
    """

    graph: bool
    cloned: bool = False
    probes: list[Tensor] | None = None
    heard: list[Tap] = field(default_factory=list)
    outs: list[Tensor] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    noticed: list[bool] = field(default_factory=list)  # for each gradient that passed, whether it is to be differentiated again

    def listen(self, tap: Tap, out: Tensor) -> Tensor:
        if self.probes is not None:
            out = out + self.probes[len(self.heard)]
        elif not is_dynamo_compiling():
            if has_tangent(out) or (not out.requires_grad and transformed(out)):  # a derivative as well, taken forward or by torch.func
                self.noticed.append(True)
                return out
            out = out if out.requires_grad else out.detach().requires_grad_()
            out.register_hook(functools.partial(_notice, self.noticed))  # not `self`: a cycle would keep the graph alive
            self.versions.append(out._version)
        self.heard.append(tap if self.graph else replace(tap, given=tap.given.detach()))
        self.outs.append(out)
        return out.clone() if self.cloned or out.is_leaf else out

    @property
    def differentiated(self) -> bool:
        """Whether the model or the loss takes derivatives through a linear map, and lets them be differentiated."""
        return any(self.noticed)

    @property
    def disturbed(self) -> bool:
        """Whether a module has changed an output in place, so that its gradient is not that of the linear map."""
        return [out._version for out in self.outs] != self.versions


def transformed(t: Tensor) -> bool:
    return is_functorch_wrapped_tensor(t)


def has_tangent(t: Tensor) -> bool:
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(t).tangent is not None


def _notice(noticed: list[bool], _gradient: Tensor) -> None:
    noticed.append(torch.is_grad_enabled())
