"""Which modules are adapted unless told otherwise, and which dimension of an output holds its channels."""

from __future__ import annotations

from torch import Tensor, nn

from ._watch import Seen

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
    known = isinstance(module, nn.modules.batchnorm._NormBase | nn.GroupNorm | nn.LayerNorm | nn.RMSNorm)
    return known or (
        "norm" in type(module).__name__.lower() and not list(module.children()) and not isinstance(module, nn.LocalResponseNorm)
    )


def _is_activation(module: nn.Module) -> bool:
    if isinstance(module, nn.RNNBase):  # its output is a hidden activation
        return True
    return type(module).__module__.split(".")[-1].startswith("activation") and not isinstance(module, _NOT_HIDDEN)


def is_last_hidden(s: Seen, modules: dict[str, nn.Module]) -> bool:
    """The final hidden state of a recurrent layer is part of its output sequence, and adapted with it."""
    module = modules[s.name]
    return s.leaf == 1 and isinstance(module, nn.RNNBase) and not module.bidirectional and not getattr(module, "proj_size", 0)


def channel_dimension(s: Seen, seen: list[Seen], modules: dict[str, nn.Module]) -> int:
    assert s.rows is not None
    if len(s.shape) < 2:
        raise ValueError(f"the output of {s.name!r} has shape {s.shape}: no dimension for channels")
    if len(s.shape) == 2:
        return 1 - s.rows
    dim = _known_channels(s, modules[s.name])
    if dim is None:  # an activation, a block, a user's module: as in the nearest layer before it, or around it, that tells
        earlier = seen[: seen.index(s)]
        votes = [_known_channels(o, modules[o.name]) for o in reversed(earlier) if len(o.shape) == len(s.shape) and o.rows == s.rows]
        dim = next((vote for vote in votes if vote is not None), 1 if len(s.shape) > 3 else None)
    if dim is None:
        asked = f"which dimension of the output of {s.name!r}, shape {s.shape}, holds the channels"
        raise ValueError(f"cannot tell {asked}; say CN(..., channels=1) or channels=-1")
    return dim


def _known_channels(s: Seen, module: nn.Module) -> int | None:
    if isinstance(module, _CHANNELS_SECOND):
        return 1
    if isinstance(module, _CHANNELS_LAST):
        return len(s.shape) - 1
    weight = getattr(module, "weight", None)
    if _is_norm(module) and isinstance(weight, Tensor) and weight.ndim == 1:  # a norm layer of the user's
        for dim in (len(s.shape) - 1, 1):
            if s.shape[dim] == len(weight):
                return dim
    return None
