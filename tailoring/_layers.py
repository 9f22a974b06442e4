"""Rules: how a layer answers when every query has weights of its own, without a copy of the weights for each.

For a linear layer z = W h + b, the gradient of a query's loss with respect to W is g h^T, with g its gradient with respect to z, so

    after s steps   W_x h' + b_x = W h' + b - lr * sum_s g_s (h_s . h' + 1)

The shared product W h' is one for the whole batch, and a query owns s pairs of vectors (`LowRank`). A rule is called in place of its
layer, `rule(use, forward, module, args, kwargs)`, and returns the corrected output; on the way it lets the taps, if there are
any, note h and z, from which `Tap.factors` and `Tap.matrices` make the next ones.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn import functional as F
from torch.nn.utils.parametrize import is_parametrized

from ._entries import Entry, LowRank, as_tensor
from ._states import State
from ._taps import Tap, Taps
from ._trees import copies_per_query, has_fractions, repeat_rows


@dataclass(frozen=True)
class Use:
    """A module with adapted parameters: their names in the state, by their names in the module."""

    names: dict[str, str]
    rows: int  # the dimension of its inputs and outputs that holds the queries
    queries: int
    state: State
    tapped: frozenset[str]  # the names whose gradients come from taps
    taps: Taps | None

    def entry(self, local: str) -> Entry | None:
        return self.state[self.names[local]] if local in self.names else None

    def by_query(self, t: Tensor) -> Tensor:
        """(queries * k, ..., C), the queries in dimension `rows`, -> (queries, all other rows, C)"""
        t = t.movedim(self.rows, 0)
        copies_per_query(t.shape[0], self.queries, "input of a layer with adapted weights")
        return t.reshape(self.queries, -1, t.shape[-1])

    def back(self, t: Tensor, like: Tensor) -> Tensor:
        """The inverse of `by_query`, to the shape of `like`."""
        return _laid_out_as(like, t.reshape(like.movedim(self.rows, 0).shape).movedim(0, self.rows))

    def own(self, local: str, shared: Tensor) -> Tensor:
        """Every query's copy of a (small) parameter, (queries, *its shape)."""
        entry = self.entry(local)
        return shared.expand(self.queries, *shared.shape) if entry is None else shared + as_tensor(entry)

    def corrected(
        self, out: Tensor, given: Tensor, shape: tuple[int, ...], prefix: str = "", first: int = 0, skip: int | None = None
    ) -> Tensor:
        """The shared output, (queries, rows, out), plus what the query's own weight and bias add to it."""
        weight, bias = f"{prefix}weight", f"{prefix}bias"
        change, offset = self.entry(weight), self.entry(bias)
        if change is not None:
            out = _add_product(out, given, change, first, skip)
        if offset is not None:
            out = out + _part(as_tensor(offset), 1, first, out)[:, None].to(out.dtype)
        names = [self.names[n] if self.names.get(n) in self.tapped else None for n in (weight, bias)]
        if self.taps is not None and any(names):
            out = self.taps.listen(Tap(names[0], names[1], given, shape, first, skip), out)
        return out


How = Literal["outer products", "rows of a table", "small copies", "copies"]
TAPPED = ("outer products", "rows of a table")
Rule = Callable[[Use, Callable[..., Any], nn.Module, tuple[Any, ...], dict[str, Any]], Any]


def _add_product(out: Tensor, given: Tensor, change: Entry, first: int, skip: int | None) -> Tensor:
    """out + given @ change^T for each query, with change (out, in) given as outer products or as it is; no gradient at the index `skip`."""
    if isinstance(change, LowRank):
        if not change.rank:
            return out
        if is_dynamo_compiling() and given.is_floating_point() and given.shape[1] == 1:
            return _add_products_one_by_one(out, given, change, first)
        left, right = change.factors()  # (queries, rank, out), (queries, rank, in)
        dots = torch.bmm(given, right.mT.to(given.dtype)) if has_fractions(right) else given[:, :, None] == right[:, None, :]
        return torch.baddbmm(out, dots.to(out.dtype), _part(left, 2, first, out).to(out.dtype))  # sum_r left_r (right_r . h')
    if not has_fractions(given):  # a table that other layers share: (queries, rows of the table, out)
        picked = torch.take_along_dim(change, given[..., None], 1)
        return out + (picked if skip is None else torch.where(given[..., None] == skip, picked.detach(), picked))
    change = _part(change.flatten(2), 1, first, out).to(out.dtype)
    groups = given.shape[-1] // change.shape[-1]
    if groups == 1:
        return torch.baddbmm(out, given.to(out.dtype), change.mT)
    return out + torch.einsum("qpgi,qgoi->qpgo", given.unflatten(-1, (groups, -1)), change.unflatten(1, (groups, -1))).flatten(2)


def _part(t: Tensor, dim: int, first: int, out: Tensor) -> Tensor:
    """Of all outputs of a weight, along `dim`, those that `out` has."""
    return t if t.shape[dim] == out.shape[-1] else t.narrow(dim, first, out.shape[-1])


def _add_products_one_by_one(out: Tensor, given: Tensor, change: LowRank, first: int) -> Tensor:
    """The same for one row per query in compiled code, which fuses all of it: no factors are copied together, no tiny products made."""
    for _, left, right in change.blocks:
        if left.shape[1]:
            dots = (right.to(given.dtype) * given).sum(-1, keepdim=True)  # (queries, rank, 1)
            out = out + (dots.to(out.dtype) * _part(left, 2, first, out).to(out.dtype)).sum(1, keepdim=True)
    return out


def linear(use: Use, forward: Callable[..., Any], module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    (x,) = (*args, *kwargs.values())
    out = forward(x)
    return use.back(use.corrected(use.by_query(out), use.by_query(x), tuple(module.weight.shape)), out)


def convolution(use: Use, forward: Callable[..., Any], module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """A convolution is a linear map of patches."""
    (x,) = (*args, *kwargs.values())
    out = forward(x)
    copies = copies_per_query(x.shape[0], use.queries, "input of a convolution with adapted weights")
    by_channel = out.movedim(1, -1)  # (rows, *positions, out), as it lies in memory if the channels are last
    positions = copies * math.prod(out.shape[2:])
    patches = _patches(module, x).reshape(use.queries, positions, -1)
    flat = by_channel.reshape(use.queries, positions, -1)
    new = use.corrected(flat, patches, tuple(module.weight.shape))
    return _laid_out_as(out, new.reshape(by_channel.shape).movedim(-1, 1))


def _laid_out_as(out: Tensor, new: Tensor) -> Tensor:
    """The model may go on with `.view`, which asks for numbers in their order."""
    return new.contiguous() if out.is_contiguous() else new


def _patches(module: Any, x: Tensor) -> Tensor:
    """(rows, ..., in * kernel), a patch for each position"""
    if any(padding := _padding(module)):
        x = F.pad(x, padding, "constant" if module.padding_mode == "zeros" else module.padding_mode)
    sizes = [module.kernel_size, module.dilation, module.stride]
    if x.ndim == 3:  # a sequence is an image of height one
        x, sizes = x.unsqueeze(2), [(1, *size) for size in sizes]
    kernel, dilation, stride = sizes
    if x.is_cuda and set(dilation) == {1} and not is_dynamo_compiling():
        return _windows(x, kernel, stride)
    return F.unfold(x, kernel, dilation=dilation, stride=stride).mT


def _padding(module: Any) -> list[int]:
    """As `F.pad` takes it, and as the module does: that with zeros may have been set since it was made."""
    padding = module.padding
    if module.padding_mode != "zeros" or isinstance(padding, str):
        return module._reversed_padding_repeated_twice
    each = padding if isinstance(padding, tuple | list) else [padding] * len(module.kernel_size)
    return [p for p in reversed(each) for _ in range(2)]


def _windows(x: Tensor, kernel: tuple[int, int], stride: tuple[int, int]) -> Tensor:
    """What `F.unfold` makes, as a view to be copied: on CUDA that one starts a kernel for each row. (On a CPU it is the faster one.)"""
    views = x.unfold(2, kernel[0], stride[0]).unfold(3, kernel[1], stride[1])  # (rows, in, down, across, *kernel)
    return views.permute(0, 2, 3, 1, 4, 5)


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
