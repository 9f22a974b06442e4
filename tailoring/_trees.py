"""Inputs and outputs as trees of tensors that share their first dimension: one row per query."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from operator import mul
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Call = tuple[tuple[Any, ...], dict[str, Any]]  # what a function is called with: (args, kwargs)


class Inputs:
    """Several arguments as one batch of queries: `Inputs(ids, mask=mask)` stands where a single `x` would.

    Only functions that take the input as one value need it (`predict`, `trace`, `outer_losses`, ...): a `Tailored` itself is
    called like the model it wraps, `model(ids, mask=mask)`.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        self.args, self.kwargs = args, dict(sorted(kwargs.items()))  # a query's seed must not depend on their order

    def __repr__(self) -> str:
        return f"Inputs{shapes(self)}"


class Support(NamedTuple):
    """Few-shot learning (Alg. 4): the query is a task, given by k examples. `x` and `y` are (tasks, k, ...)."""

    x: Any
    y: Any


def _rebuild(parts: Iterable[Any], _: Any) -> Inputs:
    args, kwargs = parts
    return Inputs(*args, **kwargs)


pytree.register_pytree_node(Inputs, lambda x: ([x.args, x.kwargs], None), _rebuild, serialized_type_name="tailoring.Inputs")


def as_call(x: Any) -> Call:
    """The arguments behind one input: those of an `Inputs`, else the value itself."""
    return (x.args, x.kwargs) if isinstance(x, Inputs) else ((x,), {})


def model_call(x: Any) -> Call:
    """What the model is called with when it answers `x`: of a support set, its examples as rows."""
    return as_call(flat_rows(x.x) if isinstance(x, Support) else x)


def flat_rows(tree: Any) -> Any:
    """(tasks, k, ...) -> (tasks * k, ...)"""
    return map_tensors(lambda t: t.flatten(0, 1), tree)


def tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):  # as nearly always, and a tree takes its time
        return [tree]
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def versions(tree: Any) -> list[int]:
    """They count up when a tensor is changed in place; those of inference mode do not count."""
    if isinstance(tree, Tensor):  # as nearly always
        return [0 if tree.is_inference() else tree._version]
    return [0 if t.is_inference() else t._version for t in tensors(tree)]


def first_tensor(tree: Any) -> Tensor:
    if isinstance(tree, Tensor):
        return tree
    found = tensors(tree)
    if not found:
        raise ValueError(f"expected a tensor, or a structure with one in it, not {type(tree).__name__}")
    return found[0]


UNUSUAL = "the input holds {}, whose rows cannot be told apart: give a dense one (pad sequences of different lengths, with a mask)"


def told(x: Any) -> str:
    """What an input is, for a message."""
    if isinstance(x, Tensor):
        return f"a tensor of shape {tuple(x.shape)}"
    kind = type(x).__name__
    return f"{kind} with tensors of shapes {shapes(x)}" if tensors(x) else kind


def shapes(tree: Any) -> list[tuple[int, ...]]:
    return [tuple(t.shape) for t in tensors(tree)]


def map_tensors(f: Callable[[Tensor], Tensor], tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return f(tree)
    return pytree.tree_map(lambda leaf: f(leaf) if isinstance(leaf, Tensor) else leaf, tree)


def count_rows(tree: Any) -> int:
    """The rows of a tree: the common first dimension of its tensors (numbers and 0-d tensors are shared by all rows)."""
    if isinstance(tree, Tensor) and tree.ndim:
        try:
            return tree.shape[0]
        except RuntimeError:
            raise ValueError(UNUSUAL.format("a nested tensor")) from None
    rowed = [t for t in tensors(tree) if t.ndim]
    if not rowed:
        hint = "; torch.from_numpy makes one of an array" if type(tree).__module__ == "numpy" else ""
        raise ValueError(f"the input ({told(tree)}) holds no tensor with a row per query{hint}; constants belong into the model")
    if any(t.shape[0] != rowed[0].shape[0] for t in rowed):
        raise ValueError(
            f"every input tensor needs one row per query, but the shapes are {shapes(tree)}; "
            "what all queries share (grids, graphs) belongs into the model, as a buffer; what has the queries elsewhere (a recurrent "
            "layer's start) is given with them first, and turned by a module around the model"
        )
    return rowed[0].shape[0]


def take_rows(tree: Any, index: Any) -> Any:
    """The rows that `index` (a slice or a tensor of indices) names."""
    return map_tensors(lambda t: t[index] if t.ndim else t, tree)


def first_other(tree: Any) -> int | None:
    """The first row that is not the same as row 0; None if all are alike."""
    rowed = [t for t in tensors(tree) if t.ndim]
    alike = [torch.isclose(t, t[:1], rtol=0.0, atol=0.0, equal_nan=True) for t in rowed]  # a nan, a missing measurement, is like another
    differs = [~(same.flatten(1).all(1) if same.ndim > 1 else same) for same in alike]
    found = [int(rows.to(torch.uint8).argmax()) for rows in differs]  # 0 if there is none
    return min((row for row in found if row), default=None)


def split_rows(tree: Any, size: int) -> list[Any]:
    return [take_rows(tree, slice(i, i + size)) for i in range(0, count_rows(tree), size)]


def cat_rows(trees: Sequence[Any], dims: Mapping[int, int | None] = MappingProxyType({})) -> Any:
    """Trees of equal structure, one below the other. `dims` tells the dimension that holds the rows, for the i-th tensor; 0 if not said."""
    if len(trees) == 1:
        return trees[0]
    flat = [pytree.tree_leaves(tree) for tree in trees]
    joined: list[Any] = []
    count = 0
    for leaves in zip(*flat, strict=True):
        if isinstance(leaves[0], Tensor):
            dim = dims.get(count, 0)
            joined.append(leaves[0] if dim is None or not leaves[0].ndim else torch.cat(leaves, dim))
            count += 1
        elif isinstance(leaves[0], bool | int | float | str | None):
            joined.append(leaves[0])
        else:
            raise TypeError(
                f"cannot join the parts of a {type(leaves[0]).__name__}: answer with tensors, in tuples or dicts (use_cache=False of a "
                "transformer), or do without chunk="
            )
    return pytree.tree_unflatten(joined, pytree.tree_structure(trees[0]))


def repeat_rows(t: Tensor, copies: int) -> Tensor:
    """`t.repeat_interleave(copies, 0)`: (queries, ...) -> (queries * copies, ...), row i of t at rows i * copies and on."""
    if copies == 1:
        return t
    return t.unsqueeze(1).expand(t.shape[0], copies, *t.shape[1:]).flatten(0, 1)


def copies_per_query(rows: int, queries: int, where: str) -> int:
    """How many rows belong to each query, or a ValueError that says where the numbers do not fit."""
    if queries == 0 or rows % queries:
        raise ValueError(
            f"{where}: {rows} rows are not a multiple of {queries} queries; "
            "several rows per query must follow each other (repeat_interleave), all queries having equally many"
        )
    return rows // queries


def has_fractions(t: Tensor) -> bool:
    return t.is_floating_point() or t.is_complex()


def row_major(t: Tensor) -> Tensor:
    """The same numbers in the order of the dimensions, which `contiguous` takes kernels of one pixel to be in in any case.

    With the channels last PyTorch 2.13 makes wrong gradients of kernels on a CPU, under vmap and of single rows.
    """
    strides = tuple(accumulate(reversed(t.shape[1:]), mul, initial=1))[::-1]
    return t if t.stride() == strides else t.clone(memory_format=torch.contiguous_format)
