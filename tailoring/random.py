"""Noise that belongs to a query, not to its place in a batch.

Every draw is a hash of (the query's seed, the position of the number drawn), so a query gets the same noise alone, in any batch
and in any order, on every device, with no generator to carry about: law 1 holds for losses that draw noise. Two draws from the same seeds
are the same numbers, so each takes seeds of its own (`fold`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._trees import tensors

_GOLDEN = -7046029254386353131  # 2^64 / golden ratio, as a signed 64-bit integer
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _shift(bits: Tensor, by: int) -> Tensor:
    return (bits >> by) & ((1 << (64 - by)) - 1)  # logical, where >> on int64 is arithmetic


def _mix(bits: Tensor) -> Tensor:
    """The finaliser of splitmix64 (Steele, Lea and Flood, 2014): every input bit reaches every output bit."""
    bits = (bits ^ _shift(bits, 30)) * -4658895280553007687
    bits = (bits ^ _shift(bits, 27)) * -7723592293110705685
    return bits ^ _shift(bits, 31)


def _exact(hashed: Callable[..., Tensor], shape: Callable[..., tuple[int, ...]]) -> Callable[..., Tensor]:
    """`hashed(seeds, ...)` as it is, compiled code included, where it becomes an operator of its own.

    Inductor would take positions times a constant for an index, and C++ may do as it likes where an integer overflows.
    """
    # is_compiling(), not is_dynamo_compiling(): export traces without dynamo, too
    operator = torch.library.custom_op(f"tailoring::{hashed.__name__.strip('_')}", hashed, mutates_args=())
    operator.register_fake(lambda seeds, *rest: seeds.new_empty(shape(seeds, *rest), dtype=torch.int64))
    return lambda *args: operator(*args) if torch.compiler.is_compiling() else hashed(*args)


def _hash_rows(seeds: Tensor, words: Tensor) -> Tensor:
    place = torch.arange(words.shape[1], device=words.device)
    return _mix(seeds + _mix(words.to(torch.int64) + (place + 1) * _GOLDEN).sum(1).to(seeds.device))


def _fold(seeds: Tensor, number: int) -> Tensor:
    return _mix(seeds + (2 * number + 1) * 0x5851F42D4C957F2D % 2**62)


def _per_row(seeds: Tensor, copies: int) -> Tensor:
    place = torch.arange(1, copies + 1, device=seeds.device)
    return _mix(_mix(seeds)[:, None] ^ (place * _GOLDEN)).flatten()


def _draw(seeds: Tensor, numbers: int) -> Tensor:
    place = torch.arange(1, numbers + 1, device=seeds.device)
    return _mix(_mix(seeds)[:, None] + place * _GOLDEN)  # (queries, numbers)


_hash_rows_exact = _exact(_hash_rows, lambda seeds, words: seeds.shape)
_fold_exact = _exact(_fold, lambda seeds, number: seeds.shape)
_per_row_exact = _exact(_per_row, lambda seeds, copies: (seeds.shape[0] * copies,))
_draw_exact = _exact(_draw, lambda seeds, numbers: (seeds.shape[0], numbers))


def seeds_of(x: Any) -> Tensor:
    """One seed per query, (queries,), from the query's own numbers: queries that are equal bit for bit have equal seeds."""
    leaves = [t for t in tensors(x) if t.ndim]
    if not leaves:
        raise ValueError(f"seeds come from a tensor with one row per query, but there is none in {x!r}")
    total = torch.zeros(leaves[0].shape[0], dtype=torch.int64, device=leaves[0].device)
    for leaf in leaves:
        rows = leaf.detach()
        if rows.is_complex():
            rows = torch.view_as_real(rows.resolve_conj())
        rows = rows.reshape(leaf.shape[0], math.prod(rows.shape[1:]))  # -1 is ambiguous where there are no rows
        words = rows if rows.dtype == torch.bool else rows.contiguous().view(_WORDS[rows.element_size()])
        total = _hash_rows_exact(total, words)
    return total


def fold(seeds: Tensor, number: int) -> Tensor:
    """New seeds, independent of the old ones and of those folded with another number."""
    return _fold_exact(seeds, number)


def per_row(seeds: Tensor, copies: int) -> Tensor:
    """Seeds for `copies` rows of each query, (queries * copies,), all different."""
    return _per_row_exact(seeds, copies)


def _check(seeds: Tensor, dtype: torch.dtype) -> None:
    if seeds.dtype != torch.int64 or seeds.ndim != 1:
        raise ValueError(f"seeds must be int64 of shape (queries,), not {seeds.dtype} of shape {tuple(seeds.shape)}")
    if not dtype.is_floating_point:
        raise TypeError(f"noise has a floating-point dtype, not {dtype}")


def uniform(seeds: Tensor, shape: tuple[int, ...] = (), dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers in (0, 1), (queries, *shape). The same seeds give the same numbers, so each draw takes its own, as `fold(seeds, 1)`."""
    _check(seeds, dtype)
    bits = 52 if dtype == torch.float64 else 23
    numbers = _shift(_draw_exact(seeds, math.prod(shape)), 64 - bits).to(torch.float64 if bits == 52 else torch.float32)
    numbers = ((numbers + 0.5) * 2.0**-bits).to(dtype).clamp(max=1 - torch.finfo(dtype).eps / 2)  # bfloat16 would round up to 1
    return numbers.reshape(seeds.shape[0], *shape)


def normal(seeds: Tensor, shape: tuple[int, ...] = (), dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal numbers, (queries, *shape), by Box and Muller's transform. As with `uniform`, each draw takes seeds of its own."""
    _check(seeds, dtype)
    wide = torch.promote_types(dtype, torch.float32)
    radius, angle = uniform(seeds, (2, *shape), wide).unbind(1)
    return ((-2 * radius.log()).sqrt() * (2 * math.pi * angle).cos()).to(dtype)
