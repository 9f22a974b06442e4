"""What the last scale and shift of CN can reach: the matrix of `thm:expresivity`, on a user's own model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._adapt import CN
from .._sites import StandIn, intercepted
from .._states import State
from .._untouched import untouched


@dataclass(frozen=True)
class LastLayer:
    """The answers to a query's views as a function of the last layer's gamma and beta; made by `last_layer`.

        answers = M_w (gamma, beta) + b

    For `views` views, `outputs` outputs and `units` units before the last layer, M_w is (views * outputs, 2 * units), with views
    slowest. CN can give the views *any* answers if and only if its rank is views * outputs.
    """

    model: nn.Module
    views: Tensor  # (views, ...)
    head: str  # the name of the last layer
    site: str | None  # the module whose output enters it; None where no module's does
    features: Tensor  # (views, units): z^(H), what gamma and beta act on
    weight: Tensor  # (outputs, units): W^(H+1)
    bias: Tensor  # (outputs,): b^(H+1)

    @property
    def matrix(self) -> Tensor:
        """M_w, (views * outputs, 2 * units): a row is [W_j * z(view_i), W_j]."""
        scaled = self.weight * self.features[:, None]  # (views, outputs, units)
        return torch.cat([scaled, self.weight.expand_as(scaled)], -1).flatten(0, 1)

    @property
    def needed(self) -> int:
        """The rank at which any answers can be reached: views * outputs."""
        return len(self.features) * len(self.weight)

    @property
    def rank(self) -> int:
        """The rank of M_w, to the precision of its numbers; never above units + min(units, outputs), since all views share beta."""
        return int(torch.linalg.matrix_rank(self.matrix))

    @property
    def condition(self) -> float:
        """Largest over smallest singular value: how far gamma and beta may have to move for a small change of the answers."""
        values = torch.linalg.svdvals(self.matrix)
        enough = len(values) == self.needed and values[-1] > 0
        return float(values[0] / values[-1]) if enough else float("inf")

    @property
    def reaches_all(self) -> bool:
        """Can gamma and beta give the views any answers whatever?"""
        return self.rank == self.needed

    @property
    def adapt(self) -> CN:
        """The adapter that moves this gamma and beta, for `Tailored(..., adapt=...)`."""
        if self.site is None:
            raise ValueError(
                f"what enters {self.head!r} is no module's output (a functional activation?), so CN has no place there; make it a module"
            )
        return CN(self.site)

    def answers(self, gamma: Tensor, beta: Tensor) -> Tensor:
        """gamma, beta: (units,) -> (views, outputs)."""
        return (gamma * self.features + beta) @ self.weight.mT + self.bias

    def solve(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """gamma and beta, (units,) each, that give the views the answers `targets`, (views, outputs) or (views,) for one output.

        Of all solutions this is the one nearest to the start, gamma = 1 and beta = 0. Refused where M_w lacks the rank.
        """
        targets = targets.reshape(len(targets), -1).to(self.features)
        shape = (len(self.features), len(self.weight))
        if tuple(targets.shape) != shape:
            raise ValueError(f"targets must have shape {shape} (views, outputs), not {tuple(targets.shape)}")
        if not self.reaches_all:
            raise ValueError(
                f"M_w has rank {self.rank}, and any answers need rank {self.needed} = {shape[0]} views * {shape[1]} outputs; use distinct "
                "views, at least as many units before the last layer as outputs and as outputs * (views - 1), other weights "
                "(theory.with_noise), or Weights"
            )
        ones, zeros = torch.ones_like(self.features[0]), torch.zeros_like(self.features[0])
        change = torch.linalg.pinv(self.matrix) @ (targets - self.answers(ones, zeros)).flatten()
        gamma, beta = change.split(len(ones))
        return ones + gamma, zeros + beta

    def state(self, targets: Tensor) -> State:
        """`solve` as a state of one row: `Tailored(net, loss, adapt=layer.adapt).predict(views, state)` gives the targets."""
        gamma, beta = self.solve(targets)
        sites = self.adapt.sites(self.model, self.views)
        state = self.adapt.init(self.model, sites, 1, self.views.device)
        last = sites[-1]  # of a module that runs several times, the call before the last layer
        return state | {f"{last.key}.gamma": gamma[None].to(last.dtype), f"{last.key}.beta": beta[None].to(last.dtype)}


@torch.no_grad()
def last_layer(model: nn.Module, views: Tensor) -> LastLayer:
    """The matrix M_w of `thm:expresivity` for a model that ends in a linear layer, and all that follows from it.

        f(view) = W (gamma * z(view) + beta) + b,      M_w = [W * z(view_i), W] for each view i

    views: (views, ...) are the n_g augmentations g^(i)(x) of one query, as the model takes them. What surprises: scales and shifts
    of earlier layers are left at 1 and 0 (as in the proof), so a missing rank here may still be mended by them; and all views share
    beta, so with m = min(units, outputs) the rank is at most min(views * m, units + m), which asks for units >= outputs and for
    units >= outputs * (views - 1): with one output, one unit less than the theorem's n_g.
    """
    calls = _calls(model, views)
    heads = [call for call in calls if isinstance(call.module, nn.Linear)]
    if not heads:
        raise ValueError("the theorem is about a model that ends in nn.Linear, and this one has none that runs; use theory.enough")
    head = heads[-1]
    if not calls[-1].puts_out(head.out, head.version):
        raise ValueError(
            f"the model's answer is not what its last linear layer {head.name!r} puts out (something follows it), so it is not affine "
            "in gamma and beta; ask theory.enough instead, which needs no such form"
        )
    features, layer = head.given, head.module
    assert isinstance(layer, nn.Linear)
    if features.ndim != 2 or len(features) != len(views):
        raise ValueError(f"{head.name!r} is given {tuple(features.shape)}, and one row for each of the {len(views)} views is needed")
    # a block whose last module made this tensor puts it out too; the innermost module finishes first
    makers = [call.name for call in calls if call.puts_out(features, head.given_version) and call.name]
    bias = torch.zeros_like(layer.weight[:, 0]) if layer.bias is None else layer.bias
    precise = torch.promote_types(features.dtype, torch.float32)  # bfloat16 has no ranks
    numbers = (t.detach().to(precise) for t in (features, layer.weight, bias))
    return LastLayer(model, views, head.name, makers[0] if makers else None, *numbers)


@dataclass(frozen=True)
class ModuleCall:
    """One module's call in a forward pass."""

    name: str
    module: nn.Module
    given: Any
    given_version: int
    out: Any
    version: int

    def puts_out(self, t: Any, version: int) -> bool:
        """Whether its output is these very numbers: the same memory, not changed in place in between."""
        if not isinstance(t, Tensor) or not isinstance(self.out, Tensor):
            return False
        same = self.out.data_ptr() == t.data_ptr() and self.out.shape == t.shape and self.out.stride() == t.stride()
        return same and self.version == version


def _calls(model: nn.Module, x: Any) -> list[ModuleCall]:
    """All calls of modules in one forward pass, in the order in which they end; the last is the model's own."""
    calls: list[ModuleCall] = []

    def note(name: str) -> Callable[..., Any]:
        def around(forward: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
            given = next(iter(args), None)
            before = _version(given)
            out = forward(*args, **kwargs)
            calls.append(ModuleCall(name, module, given, before, out, _version(out)))
            return out

        return around

    with untouched(model), intercepted([StandIn(module, note(name)) for name, module in model.named_modules()]):
        model(x)
    return calls


def _version(t: Any) -> int:
    return t._version if isinstance(t, Tensor) else 0


def equal(a: Any, b: Any) -> bool:
    return isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape and torch.equal(a, b)
