"""Whether a model's layers can be adapted one by one: tried on two queries, before any is answered so."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from . import _entries as entries
from ._adapt import Adapter
from ._casts import Site, sited
from ._inner import NoGradientError
from ._kernels import plain_kernels
from ._sites import Reading
from ._states import State
from ._taps import Taps
from ._trees import has_fractions, map_tensors, model_call, tensors
from ._untouched import untouched
from ._watch import first_and_another, unseen_by_checkpoints

Way = tuple[Adapter, tuple[Site, ...]]  # to run a model: by an adapter, at its sites
LARGEST_COPY = 1 << 28  # numbers: 2 GiB in double precision


def doubt(model: nn.Module, rules: Way, copies: Way, x: Any) -> str | None:
    """Why the model cannot run by the `rules` of its layers as it does with `copies` of its weights; None if it can.

    It is asked of a copy in double precision: rounded otherwise (as by TF32, bfloat16, or a GPU's fast convolutions), units near 0 fall
    on the other side, and gradients of a deep network differ by percents, at 110 layers by as much as they are. What is tied by a
    closure is not tied in a copy, but read from the model itself: then the copy proves nothing, and the model is asked, less exactly.
    """
    with unseen_by_checkpoints(), untouched(model):
        if sum(p.numel() for p in model.parameters()) <= LARGEST_COPY:
            try:
                doubled = copy.deepcopy(model)._apply(_double)
                _fill_zeros(doubled)
                with _Reads(model) as reads:
                    found = tried(doubled, _in_double(rules), _in_double(copies), map_tensors(_double, x), 1e-4)
                if not reads.any:
                    return found
            except Exception:  # a model that cannot be copied, or insists on its precision
                pass
        exact = all(p.dtype is torch.float64 for p in model.parameters() if has_fractions(p))
        return tried(model, rules, copies, x, 1e-4 if exact else 1e-2)


def tried(model: nn.Module, rules: Way, copies: Way, x: Any, share: float) -> str | None:
    """Why not: the answers to two queries, and the gradients of each, must be the same up to a `share` of each."""
    args, kwargs = model_call(first_and_another(model, x))

    def run(way: Way) -> tuple[Tensor, dict[str, Tensor]]:
        adapter, sites = way

        def evaluate(state: State, taps: Taps | None = None) -> Tensor:
            return _total(adapter.call(sited(model, sites), state, Reading(), args, kwargs, taps)).unsqueeze(0)

        state = adapter.init(model, sites, 2, tensors((args, kwargs))[0].device)
        values, grads = adapter.gradient(evaluate, sites, state, (0, 1), False)
        shapes = {s.key: s.shape for s in sites}
        return values.detach(), {name: entries.dense(entry, shapes[name]) for name, entry in grads.items()}

    with plain_kernels(model, graph=True), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what is no concern to who takes the rules
        try:
            expected, gradient = run(copies)
        except NoGradientError:  # so there is nothing to compare
            return None
        try:
            answer, ours = run(rules)
        except (RuntimeError, ValueError, IndexError, AssertionError) as error:
            return f"its layers cannot be adapted one by one ({error})"
    if not all(bool(t.isfinite().all()) for t in (expected, *gradient.values())):
        return "its answer to a trial input is not finite, which tells nothing of its layers"
    if not torch.allclose(answer, expected, rtol=share):
        return "a layer does not compute what its type says"
    sizes = {name: float(g.abs().max()) for name, g in gradient.items() if g.numel()}
    least = 1e-4 * max(sizes.values(), default=0.0)  # what is smaller may be rounding
    if other := [name for name in sizes if ours[name].shape != gradient[name].shape]:
        return f"the gradient of {other[0]!r} has another shape by its rule"
    wrong = [name for name, size in sizes.items() if float((ours[name] - gradient[name]).abs().max()) > 2 * share * max(size, least)]
    return f"{wrong[0]!r} is used elsewhere than in the call of its module" if wrong else None


def _fill_zeros(model: nn.Module) -> None:
    """Numbers in place of zeros: with a head, a gate or a scale that begins at zero all gradients are zero, which tells nothing."""
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            if has_fractions(p):
                drawn = torch.empty(p.shape, dtype=torch.float64).uniform_(0.05, 0.15, generator=draw).to(p)
                p.copy_(torch.where(p == 0, drawn, p))


def _total(out: Any) -> Tensor:
    """Of all answers, each of which counts the same, whatever its unit."""
    parts = [entries.in_parts(t) for t in tensors(out) if has_fractions(t)]
    parts = [t.double() / t.detach().double().abs().max().clamp(min=1e-300) for t in parts if t.numel()]
    return sum((t.sin().sum() for t in parts), torch.zeros((), dtype=torch.float64))


def _in_double(way: Way) -> Way:
    adapter, sites = way
    return adapter, tuple(replace(s, dtype=torch.promote_types(s.dtype, torch.float64)) for s in sites)


def _double(t: Tensor) -> Tensor:
    return t.to(torch.promote_types(t.dtype, torch.float64)) if has_fractions(t) else t


class _Reads(TorchDispatchMode):
    """Whether `any` operation within the block is given parameters or buffers of the model, or views of them."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.storages = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
        self.any = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.any = self.any or any(t.untyped_storage()._cdata in self.storages for t in tensors((args, kwargs)))
        return func(*args, **(kwargs or {}))
