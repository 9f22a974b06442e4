"""Which modules are adapted unless told otherwise, and which dimension of an output holds its channels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ._kernels import plain_kernels
from ._sites import StandIn, intercepted
from ._trees import map_tensors, model_call, tensors
from ._untouched import untouched
from ._watch import Seen, first_and_another

_CHANNELS_SECOND = (
    nn.modules.conv._ConvNd,
    nn.modules.batchnorm._NormBase,  # BatchNorm and InstanceNorm
    nn.GroupNorm,
)
_CHANNELS_LAST = (
    nn.Linear,
    nn.LayerNorm,
    nn.RMSNorm,
    nn.Embedding,
    nn.RNNBase,
    nn.MultiheadAttention,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)
_NOT_HIDDEN = (nn.MultiheadAttention, nn.Softmax, nn.Softmin, nn.LogSoftmax, nn.Softmax2d)


def default_names(seen: list[Seen], modules: dict[str, nn.Module]) -> set[str]:
    ran = {s.name for s in seen if s.rows is not None}
    norms = {name for name in ran if _is_norm(modules[name])}
    answers = {s.name for s in seen if s.is_answer}
    return norms or {name for name in ran - answers if _is_activation(modules[name])}


def _is_norm(module: nn.Module) -> bool:
    """By its type, or, of a user's own, by its name and a parameter: what subtracts fixed means and deviations is none."""
    if isinstance(module, nn.modules.batchnorm._NormBase | nn.GroupNorm | nn.LayerNorm | nn.RMSNorm):
        return True
    named = "norm" in type(module).__name__.lower() and not isinstance(module, nn.LocalResponseNorm)
    return named and not list(module.children()) and any(True for _ in module.parameters())


def _is_activation(module: nn.Module) -> bool:
    if isinstance(module, nn.RNNBase):  # its output is a hidden activation
        return True
    return type(module).__module__.split(".")[-1].startswith("activation") and not isinstance(module, _NOT_HIDDEN)


def is_last_hidden(s: Seen, modules: dict[str, nn.Module]) -> bool:
    """The final hidden state of a recurrent layer is part of its output sequence, and adapted with it."""
    module = modules[s.name]
    return s.leaf == 1 and isinstance(module, nn.RNNBase) and not module.bidirectional and not getattr(module, "proj_size", 0)


def channel_dimension(s: Seen, seen: list[Seen], modules: dict[str, nn.Module], ask: Callable[[Seen], int | None]) -> int:
    """Told by the layer, or, of an activation, a block, a user's module, by the nearest layer before it, or around it, that tells."""
    assert s.rows is not None
    if len(s.shape) < 2:
        raise ValueError(f"the output of {s.name!r} has shape {s.shape}: no dimension for channels")
    if len(s.shape) == 2:
        return 1 - s.rows
    dim = _known_channels(s, modules[s.name])
    if dim is None and _length(modules[s.name]) is not None:
        dim = ask(s)
    if dim is None:
        earlier = seen[: seen.index(s)]
        votes = [_as_in(s, o, modules[o.name]) for o in reversed(earlier) if len(o.shape) == len(s.shape) and o.rows == s.rows]
        dim = next((vote for vote in votes if vote is not None), 1 if len(s.shape) > 3 else None)
    if dim is None:
        asked = f"which dimension of the output of {s.name!r}, shape {s.shape}, holds the channels"
        raise ValueError(f"cannot tell {asked}; say CN(..., channels=1) or channels=-1")
    return dim


def comes_second(s: Seen, seen: list[Seen], modules: dict[str, nn.Module]) -> bool:
    """Whether the channels of (queries, channels) are in the second dimension, further ones following, rather than in the last."""
    layers = [modules[o.name] for o in (s, *reversed(seen[: seen.index(s)])) if len(o.shape) == len(s.shape) == 2]
    return next((isinstance(m, _CHANNELS_SECOND) for m in layers if isinstance(m, (*_CHANNELS_SECOND, *_CHANNELS_LAST))), False)


def _known_channels(s: Seen, module: nn.Module) -> int | None:
    if isinstance(module, _CHANNELS_SECOND):
        return 1
    length = _length(module)
    if length is not None:  # it may turn its input this way and that
        found = [dim for dim in dict.fromkeys((len(s.shape) - 1, 1)) if s.shape[dim] == length]
        return found[0] if len(found) == 1 else None
    return len(s.shape) - 1 if isinstance(module, _CHANNELS_LAST) else None


def _length(module: nn.Module) -> int | None:
    """How many channels a norm layer with a forward of its own has: PyTorch's have theirs in a known place."""
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return module.normalized_shape[-1] if type(module).forward not in (nn.LayerNorm.forward, nn.RMSNorm.forward) else None
    weight = getattr(module, "weight", None)
    return len(weight) if _is_norm(module) and isinstance(weight, Tensor) and weight.ndim == 1 else None


def _as_in(s: Seen, other: Seen, module: nn.Module) -> int | None:
    """Where the channels of another layer are, unless they have been moved on the way."""
    dim = _known_channels(other, module)
    if dim is None or s.shape[dim] == other.shape[dim]:
        return dim
    turned = {1: len(s.shape) - 1, len(s.shape) - 1: 1}[dim]
    return turned if s.shape[turned] == other.shape[dim] else dim


def ask_layer(model: nn.Module, x: Any, s: Seen) -> int | None:
    """Where a norm layer has its channels, if as many numbers lie in two dimensions: its first weight moves the first channel alone."""
    module, given = model.get_submodule(s.name), []

    def note(forward: Callable[..., Any], _module: nn.Module, args: Any, kwargs: Any) -> Any:
        given.append(map_tensors(torch.clone, (args, kwargs)))
        return forward(*args, **kwargs)

    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor):
        return None
    with torch.no_grad(), untouched(model), plain_kernels(model, graph=False):
        with intercepted([StandIn(module, note)]):
            args, kwargs = model_call(first_and_another(model, x))
            model(*args, **kwargs)
        args, kwargs = given[s.call]
        other = weight.clone()
        other[0] += 1
        before, after = (tensors(functional_call(module, {"weight": w}, args, kwargs))[s.leaf] for w in (weight, other))
    moved = before != after
    found = [dim for dim in (len(s.shape) - 1, 1) if moved.any() and not moved.movedim(dim, 0)[1:].any()]
    return found[0] if len(found) == 1 else None
