"""What goes through the modules of a model, seen on trial inputs: where the queries are, in which order, and what runs again."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from ._kernels import plain_kernels
from ._sites import StandIn, intercepted
from ._trees import UNUSUAL, Call, map_tensors, model_call, tensors, told, versions
from ._untouched import untouched


@dataclass(frozen=True)
class Seen:
    """One tensor that went into a module or came out of it, as seen on trial inputs."""

    name: str
    call: int  # which of the module's calls in this forward pass
    leaf: int  # which tensor of its output; below 0, of its input: -1, -2, ...
    rows: int | None  # the dimension that grew with the number of queries
    shape: tuple[int, ...]  # with two queries
    floating: bool
    dtype: torch.dtype
    is_answer: bool  # the model returned this very tensor
    in_order: bool  # the rows of each query follow each other, equally many of each
    checkpointed: bool = False  # within `torch.utils.checkpoint`, which runs the module again in the backward pass


Log = list[tuple[tuple[str, int, int], Tensor, bool]]  # (module, call, leaf), what went through there, and whether it is the answer


def watch(model: nn.Module, x: Any, rerun: set[int] | None = None) -> list[Seen]:
    """Every module's inputs and outputs in the order in which the outputs arrive, from three small trial passes.

    Two copies of the first query, then three: the dimension that holds the queries is the one that grows. Then two different
    queries, in either order: the rows of each must stand where it stands, which they cannot in a module that only some queries are sent
    to. `rerun` takes the ids of the parameters that functions are given within `torch.utils.checkpoint`.
    """
    known, this = _once.seen, (id(model), id(x))
    seen, ids = (known or {}).get(this, (None, None))
    if seen is None or (rerun is not None and ids is None):  # not looked at yet, or not for what runs again
        ids = None if rerun is None else set[int]()
        seen = _look(model, x, ids)
        if known is not None:
            known[this] = seen, ids
    if rerun is not None:
        rerun |= ids or set()
    return seen


class _Once(threading.local):
    seen: dict[tuple[int, int], tuple[list[Seen], set[int] | None]] | None = None


_once = _Once()


@contextmanager
def watching_once() -> Iterator[None]:
    """Within the block the trials of a model on an input are made once, whoever asks; neither may change meanwhile."""
    before, _once.seen = _once.seen, {}
    try:
        yield
    finally:
        _once.seen = before


def _look(model: nn.Module, x: Any, rerun: set[int] | None) -> list[Seen]:
    for t in tensors(x):
        if t.is_meta:
            raise ValueError("the input is on the meta device, which holds no numbers, and tailoring needs them")
        if t.is_nested or t.layout is not torch.strided:
            raise ValueError(UNUSUAL.format("a nested tensor" if t.is_nested else f"a tensor of layout {t.layout}"))
    checkpointed: set[str] = set()
    try:
        two, three, other, swapped = _trials(model, x, rerun, checkpointed)
    except Exception as error:
        error.add_note(f"This was a first look at the model, with copies of the first query of {told(x)}{_hint(x)}")
        raise
    if [key for key, *_ in two] != [key for key, *_ in three]:
        raise ValueError(
            "the model calls its modules otherwise for three copies of a query than for two: what it does depends on how many queries "
            "there are, or on the calls before"
        )
    others, turned = ({key: t for key, t, _ in log} for log in (other, swapped))
    seen = []
    for (key, a, is_answer), (_, b, _) in zip(two, three, strict=True):
        rows = _row_dimension(a.shape, b.shape)
        in_order = rows is None or (key in others and key in turned and _in_order(a, others[key], turned[key], rows))
        seen.append(Seen(*key, rows, tuple(a.shape), a.is_floating_point(), a.dtype, is_answer, in_order, key[0] in checkpointed))
    return seen


def _trials(model: nn.Module, x: Any, rerun: set[int] | None, checkpointed: set[str]) -> list[Log]:
    with torch.no_grad(), untouched(model), plain_kernels(model, graph=False):
        pair = first_and_another(model, x)
        turned = map_tensors(lambda t: t.flip(0) if t.ndim else t, pair)
        with torch.enable_grad(), unseen_by_checkpoints(), nullcontext() if rerun is None else _Noting(rerun):  # else some models make none
            two = _watch_once(model, model_call(_first(x, 2)), checkpointed)
        return [two, *(_watch_once(model, model_call(trial)) for trial in (_first(x, 3), pair, turned))]


def _hint(x: Any) -> str:
    if isinstance(x, Tensor) and x.ndim == 1:
        return "; if that is one query, a batch of it is x[None]"
    return "; several inputs go in one by one, model(*x), or as Inputs(*x) where one is asked for" if type(x) in (tuple, list) else ""


def _in_order(same: Tensor, other: Tensor, swapped: Tensor, rows: int) -> bool:
    """Whether the rows of each query stand where it stands. `same` is of one query twice, the others of it and another in either order."""
    if any(t.ndim != same.ndim or t.shape[rows] != same.shape[rows] for t in (other, swapped)):
        return False  # tokens sent to experts, say, of which each query has as many as it happens to
    if same.shape != other.shape or same.shape != swapped.shape:
        return True
    same, other, swapped = (t.to(torch.complex128 if t.is_complex() else torch.float64).movedim(rows, 0) for t in (same, other, swapped))
    half = len(same) // 2
    if half > 1:  # with another query beside it, its own rows are as they were
        return _alike(same[:half], other[:half]) and _alike(same[half:], swapped[half:])
    if not _alike(same[0], same[1]):
        return True  # the model draws noise, so nothing can be told
    return _alike(other, swapped.flip(0))  # whatever one has to do with the other (BatchNorm in training), they change places


def _alike(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-3, atol=1e-6, equal_nan=True)


def first_and_another(model: nn.Module, x: Any) -> Any:
    """Two queries that the model can answer: the first of `x`, and the same with other numbers, or the last; or the first twice."""

    def another(t: Tensor) -> Tensor:
        first = _numbers(t[:1])
        turned = first.flip(-1) if t.ndim > 1 else None  # so that what sends it somewhere, whatever its size, may send it elsewhere
        if turned is not None and _is_mask(first):
            turned = _with_one_less(turned)
        if t.is_floating_point() or t.is_complex():
            return torch.cat([first, 1.5 * (first if turned is None else turned) + 0.1])
        return torch.cat([first, t[-1:] if turned is None else turned])

    for make in (another, lambda t: _numbers(torch.cat([t[:1], t[-1:]]))):  # a number may be that of a row in a table, which has no other
        made = map_tensors(lambda t, make=make: make(t) if t.ndim else t, x)
        args, kwargs = model_call(map_tensors(torch.clone, made))
        try:
            with torch.no_grad():
                model(*args, **kwargs)
        except Exception:
            continue
        return made
    return _first(x, 2)


def _is_mask(t: Tensor) -> bool:
    return not (t.is_floating_point() or t.is_complex()) and bool(((t == 0) | (t == 1)).all()) and int(t.sum()) > 1


def _with_one_less(mask: Tensor) -> Tensor:
    """Rows of a padded sequence, say, that another query has more of."""
    rows = mask.clone(memory_format=torch.contiguous_format).view(-1, mask.shape[-1])
    several = (rows.sum(1) > 1).nonzero()
    if len(several):  # no row is left empty: attention to nothing is no number
        row = rows[int(several[0])]
        row[int(row.to(torch.uint8).argmax())] = 0
    return rows.view(mask.shape)


def _first(x: Any, times: int) -> Any:
    return map_tensors(lambda t: _numbers(t[:1]).expand(times, *t.shape[1:]).contiguous() if t.ndim else t, x)


def _numbers(t: Tensor) -> Tensor:
    """0 in place of what is no number: a query that is broken tells nothing of the model."""
    return t.nan_to_num(0.0, 0.0, 0.0) if t.is_floating_point() or t.is_complex() else t


def _watch_once(model: nn.Module, call: Call, checkpointed: set[str] | None = None) -> Log:
    """What went through each module; `checkpointed` takes down the names of those that the model runs within a checkpoint."""
    log: list[tuple[tuple[str, int, int], Tensor]] = []
    calls: dict[str, int] = {}
    around = _checkpoints_here()  # those that the caller is within

    def note(name: str, forward: Callable[..., Any], _module: nn.Module, args: Any, kwargs: Any) -> Any:
        if checkpointed is not None and _checkpoints_here() > around:
            checkpointed.add(name)
        given = tensors((args, kwargs))
        out = forward(*args, **kwargs)
        calls[name] = calls.get(name, -1) + 1
        log.extend(((name, calls[name], -1 - leaf), t) for leaf, t in enumerate(given))
        log.extend(((name, calls[name], leaf), t) for leaf, t in enumerate(tensors(out)))
        return out

    args, kwargs = call
    before = versions(call)
    with intercepted([StandIn(module, functools.partial(note, name)) for name, module in model.named_modules()]):
        answers = {id(t) for t in tensors(model(*args, **kwargs))}
    if before != versions(call):
        raise ValueError(
            "the model changes its input in place (x.sub_(...), x += ...), so every inner step would see another query: "
            "let it make a new tensor"
        )
    return [(key, t, id(t) in answers) for key, t in log]


def _checkpoints_here() -> int:
    """How many calls of `torch.utils.checkpoint` the caller is within, told by the stack: both its kinds are there, whoever made them."""
    frame, found = sys._getframe(), 0
    while frame is not None:
        found += frame.f_globals is vars(checkpoint)
        frame = frame.f_back
    return found


def unseen_by_checkpoints() -> AbstractContextManager[Any]:
    """A checkpoint that the caller is within counts what is saved for the backward pass, where trials are not made again."""
    return saved_tensors_hooks(lambda t: t, lambda t: t) if _checkpoints_here() else nullcontext()


class _Noting(TorchFunctionMode):
    """Takes down the parameters that functions are given within a checkpoint, be it by modules or without any."""

    def __init__(self, ids: set[int]):
        super().__init__()
        self.ids, self.around = ids, _checkpoints_here()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [id(t) for t in tensors((args, kwargs or {})) if isinstance(t, nn.Parameter)]
        if given and _checkpoints_here() > self.around:
            self.ids.update(given)
        return func(*args, **(kwargs or {}))


def _row_dimension(two: torch.Size, three: torch.Size) -> int | None:
    if len(two) != len(three):
        return None
    grown = [d for d, (a, b) in enumerate(zip(two, three, strict=True)) if a != b]
    return grown[0] if len(grown) == 1 and two[grown[0]] * 3 == three[grown[0]] * 2 else None


def refuse_disorder(seen: Iterable[Seen]) -> None:
    """Raise if rows of one query do not follow each other at a place that is to be adapted."""
    for s in seen:
        if not s.in_order:
            raise ValueError(
                f"module {s.name!r} is given rows, not one query after the other in the order they came (does the model sort them, or pack "
                "sequences? a torch.cat of views, a flattened (time, queries)?), or not equally many of each (tokens sent to experts?): "
                "they cannot be told apart. Sort outside the model; pad sequences instead of packing them; stack views in dimension 1 and "
                "flatten, or call the module once for each"
            )


def refuse_checkpoints(seen: Iterable[Seen]) -> None:
    """Raise if a module that is to be adapted would be run again when it no longer is."""
    for s in seen:
        if s.checkpointed:
            raise checkpoint_error(f"module {s.name!r} runs")


def checkpoint_error(what_runs: str) -> ValueError:
    return ValueError(
        f"{what_runs} within torch.utils.checkpoint, which would compute it again in the backward pass without its "
        "adaptation: switch activation checkpointing off while tailoring (gradient_checkpointing_disable() of a transformer), or "
        "adapt what lies outside of it. To save memory, use chunk=, or recompute=True with backprop='all'"
    )
