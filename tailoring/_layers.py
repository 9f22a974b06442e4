"""Rules: how a layer answers when every query has weights of its own, without a copy of the weights for each.

A rule is called in place of its layer, `rule(use, forward, module, args, kwargs)`, and returns the corrected output; on the way it lets the
taps, if there are any, note what goes in and comes out, from which `Tap.factors` and `Tap.matrices` make the next factors (`_uses.py`).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrize import is_parametrized

from ._convolutions import convolution
from ._trees import copies_per_query, repeat_rows
from ._uses import Use

How = Literal["outer products", "own kernels", "rows of a table", "small copies", "copies"]
TAPPED = ("outer products", "rows of a table")
Rule = Callable[[Use, Callable[..., Any], nn.Module, tuple[Any, ...], dict[str, Any]], Any]


def linear(use: Use, forward: Callable[..., Any], module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    (x,) = (*args, *kwargs.values())
    out = forward(x)
    return use.back(use.corrected(use.by_query(out), use.by_query(x), tuple(module.weight.shape)), out)


def embedding(use: Use, forward: Callable[..., Any], module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """A table is a linear map of one-hot vectors: its factors keep indices."""
    (x,) = (*args, *kwargs.values())
    out = forward(x)
    index = use.by_query(x.unsqueeze(-1)).squeeze(-1)
    new = use.corrected(use.by_query(out), index, tuple(module.weight.shape), skip=module.padding_idx)
    return use.back(new, out)


def normalisation(use: Use, forward: Callable[..., Any], module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """An affine map per channel is small: every query has its own copy."""
    (x,) = (*args, *kwargs.values())
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        if isinstance(module, nn.LayerNorm):
            out = F.layer_norm(x, module.normalized_shape, None, None, module.eps)
        else:
            out = F.rms_norm(x, module.normalized_shape, None, module.eps)
        trailing = len(module.normalized_shape)
    else:
        if isinstance(module, nn.GroupNorm):
            out = F.group_norm(x, module.num_groups, None, None, module.eps)
        else:
            out = F.batch_norm(x, module.running_mean, module.running_var, None, None, False, 0.0, module.eps)
        trailing = 0
    kind = out.dtype  # under autocast another one than that of x
    copies = copies_per_query(x.shape[use.rows], use.queries, "input of a normalisation layer with adapted weights")

    def own(local: str, shared: Tensor) -> Tensor:
        """(queries, *channels) -> a shape that fits the output"""
        t = repeat_rows(use.own(local, shared), copies)
        if not trailing:
            return t.reshape(*t.shape, *[1] * (x.ndim - 2))
        return t.reshape([t.shape[0] if d == use.rows else 1 for d in range(x.ndim - trailing)] + list(t.shape[1:]))

    out = out * own("weight", module.weight)
    bias = getattr(module, "bias", None)
    return (out if bias is None else out + own("bias", bias)).to(kind)


def attention(
    use: Use, forward: Callable[..., Any], module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """Multi-head attention in plain operations: its four projections are linear maps."""
    given = inspect.signature(nn.MultiheadAttention.forward).bind(module, *args, **kwargs)
    given.apply_defaults()
    a = given.arguments
    inputs = [a[name] if module.batch_first else a[name].transpose(0, 1) for name in ("query", "key", "value")]  # (rows, time, E)
    size, heads = module.embed_dim, module.num_heads
    use = replace(use, rows=0)

    def project(x: Tensor, first: int, last: int) -> Tensor:
        bias = None if module.in_proj_bias is None else module.in_proj_bias[first:last]
        out = F.linear(x, module.in_proj_weight[first:last], bias)
        shape = tuple(module.in_proj_weight.shape)
        new = use.corrected(use.by_query(out), use.by_query(x), shape, prefix="in_proj_", first=first)
        return use.back(new, out)

    if a["query"] is a["key"] and a["key"] is a["value"]:
        parts = project(inputs[0], 0, 3 * size).chunk(3, -1)
    else:
        parts = [project(x, i * size, (i + 1) * size) for i, x in enumerate(inputs)]
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in parts)  # (rows, heads, time, E / heads)
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    for mask in _masks(a["attn_mask"], a["key_padding_mask"], heads):
        scores = scores.masked_fill(mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if not a["need_weights"]:  # then a place that may look nowhere (padding, all of it) is answered 0; else not a number, as torch does
        nowhere = scores.isneginf().all(-1, keepdim=True)
        weights = scores.masked_fill(nowhere, 0.0).softmax(-1).masked_fill(nowhere, 0.0)
    else:
        weights = scores.softmax(-1)
    mixed = (weights @ v).transpose(1, 2).flatten(2)
    out = F.linear(mixed, module.out_proj.weight, module.out_proj.bias)
    shape = tuple(module.out_proj.weight.shape)
    out = use.back(use.corrected(use.by_query(out), use.by_query(mixed), shape, prefix="out_proj."), out)
    out = out if module.batch_first else out.transpose(0, 1)
    if not a["need_weights"]:
        return out, None
    return out, weights.mean(1) if a["average_attn_weights"] else weights


def _masks(attention: Tensor | None, padding: Tensor | None, heads: int) -> list[Tensor]:
    """Masks that fit (rows, heads, time, time); true or -inf keeps a place from being looked at."""
    masks = []
    if attention is not None:
        masks.append(attention.unflatten(0, (-1, heads)) if attention.ndim == 3 else attention)
    if padding is not None:
        masks.append(padding[:, None, None, :])
    return masks


KNOWN = {"weight", "bias", "in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"}  # what the rules know of


def rule_for(module: nn.Module) -> tuple[How, Rule] | None:
    """The rule of a layer, by what it really runs, and how it keeps the weights; None if it has none."""
    kind = type(module)

    def runs(*layers: type[nn.Module]) -> bool:
        return any(isinstance(module, layer) and kind.forward is layer.forward for layer in layers)

    own = module.named_parameters() if module._modules else module._parameters.items()  # the latter in a tenth of the time, at every call
    if is_parametrized(module) or not {name for name, p in own if p is not None} <= KNOWN:
        return None
    if runs(nn.Linear):
        return "outer products", linear
    if runs(nn.Conv1d, nn.Conv2d) and getattr(kind, "_conv_forward", None) in (nn.Conv1d._conv_forward, nn.Conv2d._conv_forward):
        return "outer products", convolution
    if isinstance(module, nn.Embedding) and runs(nn.Embedding) and not (module.max_norm or module.scale_grad_by_freq or module.sparse):
        return "rows of a table", embedding
    if runs(nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
        return "small copies", normalisation
    if isinstance(module, nn.MultiheadAttention) and runs(nn.MultiheadAttention) and _plain_attention(module):
        return "outer products", attention
    return None


def _plain_attention(module: nn.MultiheadAttention) -> bool:
    return module._qkv_same_embed_dim and module.bias_k is None and not module.add_zero_attn
