"""The conditions of `thm:expresivity`, the weights its proof builds, and the noise of `corollary:expresivity`."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ._activations import Activation, activation_facts
from ._expressivity import ModuleCall, _calls, last_layer

_NOT_ELEMENTWISE = (nn.GLU, nn.Softmax, nn.Softmin, nn.LogSoftmax, nn.Softmax2d, nn.MultiheadAttention)


def augmentation_gap(views: Tensor) -> float:
    """The condition of `thm:expresivity` on the augmentations: it holds if this is above zero.

        min over i != j of |g_i|^2 - g_i . g_j

    views: (views, ...), each flattened. Views of equal norm satisfy it as soon as they differ. It is sufficient, not necessary: x and 2x
    violate it, and almost all weights tell them apart; what is needed is that the views differ.
    """
    if len(views) < 2:
        return float("inf")
    flat = views.flatten(1)
    dots = flat @ flat.mT
    gaps = dots.diag()[:, None] - dots
    return float(gaps[~torch.eye(len(flat), dtype=torch.bool, device=flat.device)].min())


@dataclass(frozen=True)
class Conditions:
    """What `thm:expresivity` asks of a model and of a query's views; true if all of it is given."""

    fully_connected: bool
    outputs: int
    views: int
    units: tuple[int, ...]  # of each hidden layer
    gap: float  # `augmentation_gap` of what enters the first layer
    distinct: bool  # no two views are the same
    activations: tuple[Activation, ...]

    @property
    def missing(self) -> tuple[str, ...]:
        """What the theorem asks for and does not find. It may hold all the same: look at the rank of `last_layer(model, views)`."""
        return tuple(
            text
            for wrong, text in (
                (
                    not self.fully_connected,
                    "the model is not made of linear layers, with one activation between any two, in nn.Sequential alone",
                ),
                (self.outputs != 1, f"the model has {self.outputs} outputs, not one"),
                (not self.units, "the model has no hidden layer"),
                (min(self.units, default=self.views) < self.views, f"hidden layers of {self.units} units, fewer than {self.views} views"),
                (
                    not self.gap > 0,
                    f"|g_i|^2 - g_i . g_j reaches {self.gap:.3g}, not above zero" + ("" if self.distinct else ": equal views"),
                ),
                *((not a, str(a)) for a in self.activations),
            )
            if wrong
        )

    def __bool__(self) -> bool:
        return not self.missing

    def __str__(self) -> str:
        return "\n".join(self.missing) or "the conditions of thm:expresivity hold"


@torch.no_grad()
def conditions(model: nn.Module, views: Tensor) -> Conditions:
    """Check what `thm:expresivity` asks for: a fully connected net with one output, at least as many units in each hidden layer as there
    are views, an activation that satisfies Assumption `a:activation`, and views with a positive `augmentation_gap`.

    views: (views, ...). All of this is sufficient and none of it necessary; `last_layer(model, views).reaches_all` is the fact itself.
    """
    calls = _calls(model, views)
    leaves = [call for call in calls if not any(call.module.children())]
    blocks = [call.module for call in calls if any(call.module.children())]
    linear = [call for call in leaves if isinstance(call.module, nn.Linear)]
    kinds = [kind for kind in map(_kind, leaves) if kind]
    acts = [call.module for call in leaves if _kind(call) == "activation"]
    in_turn = ["linear", "activation"] * (len(linear) - 1) + ["linear"]
    head = last_layer(model, views)
    first = linear[0].given.flatten(1)
    return Conditions(
        fully_connected=kinds == in_turn
        and all(isinstance(block, nn.Sequential) for block in blocks),  # what else a block does is not seen
        outputs=len(head.weight),
        views=len(views),
        units=tuple(call.out.shape[-1] for call in linear[:-1]),
        gap=augmentation_gap(first),
        distinct=len(torch.unique(first, dim=0)) == len(first),
        activations=tuple({type(a): activation_facts(a) for a in acts}.values()),
    )


def _kind(call: ModuleCall) -> str:
    """What a module is to the theorem; nothing at all if it changes nothing."""
    module = call.module
    if isinstance(module, nn.Linear):
        return "linear"
    if isinstance(module, nn.Flatten | nn.Identity) or (isinstance(module, nn.Dropout) and not module.training):
        return ""
    elementwise = type(module).__module__ == nn.ReLU.__module__ and not isinstance(module, _NOT_ELEMENTWISE)
    return "activation" if elementwise else "other"


def with_noise(model: nn.Module, std: float, *, seed: int = 0) -> nn.Module:
    """`corollary:expresivity`: a copy of the model with Gaussian noise on all parameters, w + delta. Almost surely M_w then has full rank.

    "Almost surely" holds for each query, not for all at once: the null set of weights depends on x. And a small `std` leaves a
    full rank that is badly conditioned, about 1 / std: look at `last_layer(...).condition`.
    """
    generator = torch.Generator().manual_seed(seed)
    noisy = copy.deepcopy(model)
    with torch.no_grad():
        for p in noisy.parameters():
            p += std * torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p)
    return noisy


def separating_network(views: Tensor, activation: nn.Module, depth: int) -> nn.Sequential:
    """The weights that the proof of `thm:expresivity` builds: in each of `depth` hidden layers the k-th unit answers to the k-th view only.

        layer 1:   alpha (g_k . h - |g_k|^2 + c / 2)          c: the views' `augmentation_gap`
        layer l:   alpha (h_k - t),   t half way between the least wanted and the largest unwanted output of layer l - 1

    views: (views, ...). The last layer is a sum. The threshold t is corrected: the paper's, sigma_+ - c' / 2, is infinite for softplus, and
    switches all units off. alpha is doubled until each layer is strictly diagonally dominant (after subtracting sigma_-). That is so in
    double precision, in which it is built; of views in another dtype or place the network comes back rounded to, and at, theirs.
    """
    gap, facts = augmentation_gap(views.detach().double()), activation_facts(activation)
    if not gap > 0:
        raise ValueError(f"the proof's construction needs |g_i|^2 - g_i . g_j > 0 for all i != j, and the least is {gap:.3g}")
    if not (facts.increasing and facts.bounded_below):
        raise ValueError(f"the proof's construction needs an increasing activation with a finite limit at minus infinity, not {facts}")
    if depth < 1 or len(views) < 2:
        raise ValueError(f"needed are at least one hidden layer and two views, not depth={depth} and {len(views)} views")
    flat = views.detach().flatten(1).double().cpu()
    lower = activation(torch.tensor(-1e4, dtype=torch.float64))
    layers: list[nn.Module] = [nn.Flatten()]
    weight, bias = flat, gap / 2 - flat.square().sum(1)
    given = flat
    for _ in range(depth):
        linear, given = _dominant(given, weight, bias, activation, lower)
        layers += [linear, activation]
        least, largest = given.diag().min(), given[~torch.eye(len(flat), dtype=torch.bool)].max()
        weight = torch.eye(len(flat), dtype=torch.float64)
        bias = -(least + largest) / 2 * torch.ones(len(flat), dtype=torch.float64)
    head = _linear(torch.ones(1, len(flat), dtype=torch.float64), torch.zeros(1, dtype=torch.float64))
    return nn.Sequential(*layers, head).to(views)


@torch.no_grad()
def _dominant(given: Tensor, weight: Tensor, bias: Tensor, activation: nn.Module, lower: Tensor) -> tuple[nn.Linear, Tensor]:
    """The layer alpha (weight h + bias) with the least power of two alpha that makes its outputs diagonally dominant."""
    for power in range(60):
        out = activation(2.0**power * (given @ weight.mT + bias))
        above = (out - lower).abs()
        if (2 * above.diag() > above.sum(1) * (1 + 1e-6)).all():
            return _linear(2.0**power * weight, 2.0**power * bias), out
    raise ValueError(f"no alpha up to 2^59 separates the views with {activation}; are two of them almost equal?")


def _linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], dtype=weight.dtype)
    layer.weight, layer.bias = nn.Parameter(weight.clone()), nn.Parameter(bias.clone())
    return layer
