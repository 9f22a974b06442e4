"""Running a module with a copy of its weights for each query: what every faster way must equal."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree

from ._adapted import is_mapped
from ._kernels import may_look
from ._recurrent import in_plain_operations, unrolled_layers
from ._sites import Reading, StandIn, alone, intercepted
from ._trees import copies_per_query, row_major, tensors

_OF_ONE_QUERY = (
    "the model's answer holds a {}, in which with weights for each query is what one of them has left: do without it (use_cache=False of "
    "a transformer), or register its class with torch.utils._pytree"
)


def call_with_copies(
    model: nn.Module,
    reading: Reading,
    changes: dict[str, Tensor],
    args: Any,
    kwargs: Any,
    *,
    loop: bool = False,
    rows: Mapping[int, int | None] = MappingProxyType({}),
    forward: Callable[..., Any] | None = None,
) -> Any:
    """A reading of the model, each query's weights being the shared ones plus its `changes`, (queries, *shape), by name.

    All queries at once under `torch.func.vmap`, or one after another. `rows` tells the dimension that holds the queries where it is not the
    first: of the tensors of the input under -1, -2, ..., of those of the output under 0, 1, ...; None: all queries share the tensor. With
    `forward` that is run, in place of the module's call with its hooks.
    """
    _refuse(reading, args, kwargs)
    if not loop:
        _refuse_hooks_on_gradients(model)
    queries = next(iter(changes.values())).shape[0]
    leaves, spec = pytree.tree_flatten((args, kwargs))
    numbers = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    dims = {place: rows.get(-1 - i, 0) for i, place in enumerate(numbers) if leaves[place].ndim}
    places = [place for place, dim in dims.items() if dim is not None]
    grouped = [_by_query(leaves[place], dims[place] or 0, queries) for place in places]
    found: list[Any] = []  # the output's structure, told by the run itself: vmap hands tensors back, not trees
    shared_out = {leaf for leaf, dim in rows.items() if leaf >= 0 and dim is None}

    def one(own: dict[str, Tensor], *inputs: Tensor) -> list[Tensor]:
        filled = list(leaves)
        for place, t in zip(places, inputs, strict=True):
            filled[place] = t.movedim(0, dims[place] or 0)
        own_args, own_kwargs = pytree.tree_unflatten(filled, spec)
        out = _with_weights(model, reading, forward, {place: own[name] for place, name in slots.items()}, own_args, own_kwargs)
        flat, out_spec = pytree.tree_flatten(out)
        found.append((flat, out_spec))
        if not tensors(flat):
            raise ValueError(
                f"no tensor is found in the {type(out).__name__} that the model answers, so those of all queries cannot be put together: "
                "return tensors in tuples, lists or dicts, or register your class with torch.utils._pytree.register_dataclass"
            )
        if not loop and any(is_mapped(t) for leaf, t in enumerate(tensors(flat)) if leaf in shared_out):
            raise _not_by_row(tensors(flat), shared_out)
        return tensors(flat)

    with alone(), _as_they_were(model):  # functional_call swaps the module's weights while it runs
        shared = dict(model.named_parameters(remove_duplicate=False))
        slots = _slots(model, reading.path, changes)
        own = {name: row_major(shared[name] + change) for name, change in changes.items()}
        results = _in_turn(one, own, *grouped) if loop else _at_once(model, one, own, *grouped)
    flat, out_spec = found[-1]
    if loop and may_look() and any(bool((results[leaf] != results[leaf][:1]).any()) for leaf in shared_out if leaf < len(results)):
        raise _not_by_row(tensors(flat), shared_out)
    for name in {type(t).__name__ for t in flat if not isinstance(t, Tensor) and hasattr(t, "__dict__")}:
        warnings.warn(_OF_ONE_QUERY.format(name), stacklevel=2)
    outputs = iter(t[0] if leaf in shared_out else _back(t, rows.get(leaf) or 0) for leaf, t in enumerate(results))
    return pytree.tree_unflatten([next(outputs) if isinstance(t, Tensor) else t for t in flat], out_spec)


def _refuse(reading: Reading, args: Any, kwargs: Any) -> None:
    if reading.method != "__call__":
        raise ValueError(f"the loss calls the method {reading.method!r}, which cannot run with copies of the weights: make it a submodule")
    if parametrize._cache_enabled:
        raise ValueError("within torch.nn.utils.parametrize.cached() every query would have the weights that are cached: leave that block")
    if any(isinstance(leaf, nn.utils.rnn.PackedSequence) for leaf in (*args, *kwargs.values())):
        raise ValueError("a recurrent layer with weights for each query takes padded sequences, not packed ones")


def _refuse_hooks_on_gradients(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise ValueError(
                f"module {name or 'itself'!r} has a hook on its gradients, which torch.func.vmap leaves out: use Weights(..., how='loop'), "
                "or remove the hook while tailoring"
            )


def _with_weights(
    model: nn.Module, reading: Reading, forward: Callable[..., Any] | None, weights: dict[str, Tensor], args: Any, kwargs: Any
) -> Any:
    """The reading with these weights, by their places in the submodule that it runs; or `forward` in place of the module's call."""
    if forward is None:
        return reading(model, lambda module: functional_call(module, weights, args, kwargs, tie_weights=False))
    bare = _Bare(model, in_plain_operations(model, forward))
    return functional_call(bare, {f"model.{place}": t for place, t in weights.items()}, args, kwargs, tie_weights=False)


def _not_by_row(outputs: list[Tensor], shared: set[int]) -> ValueError:
    shapes = ", ".join(str(tuple(outputs[leaf].shape)) for leaf in sorted(shared) if leaf < len(outputs))
    return ValueError(
        f"the model answers a tensor without a row for each query, shape {shapes}, that depends on the query's own weights: adapt others, "
        "naming modules, Weights('encoder'), or let the model return it with a row for each query"
    )


@contextmanager
def _as_they_were(model: nn.Module) -> Iterator[None]:
    """Weights that hooks make from others (pruned ones, the old weight_norm) are left as they were made before."""
    hooks = [(module, hook) for module in model.modules() for hook in module._forward_pre_hooks.values()]
    names = [(module, getattr(hook, "name", getattr(hook, "_tensor_name", None))) for module, hook in hooks]
    made = [(module, name, module.__dict__[name]) for module, name in names if isinstance(name, str) and name in module.__dict__]
    try:
        yield
    finally:
        for module, name, t in made:
            module.__dict__[name] = t


class _Bare(nn.Module):
    """A module's `forward` without its hooks, which belong to the call that is under way already."""

    def __init__(self, model: nn.Module, forward: Callable[..., Any]):
        super().__init__()
        self.model, self.run = model, forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)


def _by_query(t: Tensor, dim: int, queries: int) -> Tensor:
    """(..., queries * k, ...), the queries in dimension `dim`, -> (queries, k, ...)"""
    t = t.movedim(dim, 0)
    return t.unflatten(0, (queries, copies_per_query(t.shape[0], queries, "input of the model")))


def _back(t: Tensor, dim: int) -> Tensor:
    """(queries, ..., k, ...), the rows of a query in dimension `dim` of the rest, -> (..., queries * k, ...)"""
    return t.movedim(dim + 1, 1).flatten(0, 1).movedim(0, dim) if t.ndim > 1 else t


def _at_once(model: nn.Module, one: Callable[..., list[Tensor]], state: dict[str, Tensor], *inputs: Tensor) -> list[Tensor]:
    padded = [StandIn(module, _embed) for module in model.modules() if isinstance(module, nn.Embedding) and module.padding_idx is not None]
    with unrolled_layers(model), intercepted(padded):
        try:
            return vmap(one)(state, *inputs)
        except RuntimeError as error:
            if "vmap" not in str(error) and "atching rule" not in str(error):
                raise
            raise RuntimeError(
                f"torch.func.vmap cannot run this model: {error}\nUse Weights(..., how='loop'), one query after another; or, if it writes "
                "into zeros of its own, let it make them by x.new_zeros(...), not torch.zeros(...)"
            ) from error


def _embed(_forward: Callable[..., Any], module: Any, args: Any, kwargs: Any) -> Tensor:
    """An embedding whose padding has no gradient. (Under vmap torch's own keeps that of the first query only.)"""
    (index,) = (*args, *kwargs.values())
    out = F.embedding(index, module.weight, None, module.max_norm, module.norm_type, module.scale_grad_by_freq)
    return torch.where((index == module.padding_idx)[..., None], out.detach(), out)


def _in_turn(one: Callable[..., list[Tensor]], state: dict[str, Tensor], *inputs: Tensor) -> list[Tensor]:
    queries = inputs[0].shape[0]
    outputs = [one({name: t[i] for name, t in state.items()}, *(t[i] for t in inputs)) for i in range(queries)]
    return [torch.stack(parts) for parts in zip(*outputs, strict=True)]


def _slots(model: nn.Module, path: str, chosen: Mapping[str, Any]) -> dict[str, str]:
    """Where the chosen parameters go in the submodule at `path`: {place in the submodule: name in the model}.

    A parameter that several modules share has several places; a module that stands in several places is named once, since
    functional_call, left to find ties itself, would swap it twice and so never back.
    """
    names = {id(p): name for name, p in model.named_parameters() if name in chosen}
    found: dict[str, str] = {}
    for prefix, module in model.get_submodule(path).named_modules():
        for local, p in module.named_parameters(recurse=False):
            if id(p) in names:
                found[f"{prefix}.{local}" if prefix else local] = names[id(p)]
    return found
