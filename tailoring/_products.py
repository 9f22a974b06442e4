"""Products of matrices by oneDNN in programs compiled for a CPU, where it is the faster.

PyTorch multiplies float32 matrices by the BLAS that it was built with, on x86 by MKL, which leaves half the width of the vector units of
AMD's processors unused. oneDNN, which PyTorch has for convolutions, uses all of it. Which one is faster is seen by a trial.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

aten: Any = torch.ops.aten
_LARGE = 1 << 20  # multiplications: fewer take no longer than the call
_ROWS = 1024  # of a product that is tried: more take longer, and do not change what is faster
_SECONDS = 0.03  # for the trial of one kind of product
_FASTER = 0.9  # times the other's time, or it may be chance


@torch.library.custom_op("tailoring::product", mutates_args=())
def product(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """a @ b + bias by oneDNN. (Inductor takes PyTorch's own operator for it only if the weights are constants.)"""
    return torch.ops.mkldnn._linear_pointwise(a, b.t(), bias, "none", [], "")


@product.register_fake
def _(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


def is_faster(a: Tensor, b: Tensor, bias: Tensor | None) -> bool:
    """Whether oneDNN multiplies matrices like these, which hold no numbers yet, faster than PyTorch does by itself."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily  # not public, so only where it is needed

    with unset_fake_temporarily(), torch.no_grad():
        ones = functools.partial(torch.ones, dtype=torch.float32, device="cpu")  # drawn ones would move the generator
        left, right = ones(min(len(a), _ROWS), a.shape[1]), ones(b.shape)
        right = right if b.is_contiguous() else right.t().contiguous().t()
        offset = None if bias is None else ones(bias.shape)
        usual = (lambda: left @ right) if offset is None else lambda: torch.addmm(offset, left, right)
        return outruns(lambda: product(left, right, offset), usual)


def outruns(one: Callable[[], object], other: Callable[[], object]) -> bool:
    """Whether the first is surely the faster of the two, run in turns."""
    best = [float("inf")] * 2
    for run in (one, other):  # what is done at first only, is done
        run()
    end = time.perf_counter() + _SECONDS
    while best[1] == float("inf") or time.perf_counter() < end:
        for i, run in enumerate((one, other)):
            start = time.perf_counter()
            run()
            best[i] = min(best[i], time.perf_counter() - start)
    return best[0] < _FASTER * best[1]


def choose_products(graph: fx.Graph, wanted: Callable[[Tensor, Tensor, Tensor | None], bool] = is_faster) -> None:
    """Let large products of float32 matrices on a CPU be oneDNN's where that is `wanted`, which is asked once for each kind."""
    asked: dict[Any, bool] = {}
    if not (torch.backends.mkldnn.enabled and hasattr(torch.ops.mkldnn, "_linear_pointwise")):  # switched off, or not built in
        return
    for node in list(graph.nodes):
        given = _factors(node)
        if given is None:
            continue
        values: list[Any] = [None if one is None else one.meta["val"] for one in given]
        kind = str([None if value is None else (value.shape, value.stride()) for value in values])
        if kind not in asked:
            asked[kind] = wanted(*values)
        if asked[kind]:
            with graph.inserting_before(node):
                made = graph.call_function(torch.ops.tailoring.product.default, given)
            made.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(made)
            graph.erase_node(node)


def _factors(node: fx.Node) -> tuple[Any, Any, Any] | None:
    """(a, b, bias or None) if the node is such a product."""
    given: Any = node.args
    if node.kwargs:
        return None
    if node.target is aten.mm.default:
        (a, b), bias = given, None
    elif node.target is aten.addmm.default:
        bias, a, b = given
    else:
        return None
    left, right, offset = a.meta["val"], b.meta["val"], None if bias is None else bias.meta["val"]
    fits = offset is None or (offset.shape == right.shape[1:] and offset.is_contiguous())  # oneDNN reads it as if it did
    plain = left.is_contiguous() and (right.is_contiguous() or right.t().is_contiguous())
    large = left.shape[0] * right.numel() >= _LARGE
    return (a, b, bias) if fits and plain and large and left.dtype is torch.float32 and left.is_cpu else None
