"""`check`: does each query of a batch get its own answer, whatever its neighbours are?"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from ._apart import MixingError
from ._entries import in_parts
from ._sites import StandIn, intercepted
from ._tailored import Tailored
from ._trees import cat_rows, count_rows, map_tensors, model_call, take_rows, tensors
from ._untouched import untouched
from ._watch import watch

_REMEDIES = (
    (nn.modules.batchnorm._BatchNorm, "put it in eval mode with running statistics, or use GroupNorm or LayerNorm"),
    (nn.modules.dropout._DropoutNd, "put it in eval mode"),
    ((nn.RNNBase, nn.MultiheadAttention), "give it batch_first=True, or inputs with the sequence first, so that its rows are the queries"),
)
_GENERAL = "normalise, attend and average within a query only, never over the first dimension"
_APART = "let every query's value depend on its own rows only"
_VIEWS = "let several rows of a query follow each other in what the loss gives the model, x.repeat_interleave(k, 0), not torch.cat([x, x])"
_SEEDED = "put dropout in eval mode and draw noise with tailoring.random from model.seeds"


@dataclass(frozen=True)
class Problem:
    where: str
    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}. Remedy: {self.remedy}"


@dataclass(frozen=True)
class Report:
    """What `check` found; true if all is well."""

    problems: tuple[Problem, ...]

    def __bool__(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        return "\n".join(map(str, self.problems)) or "every query is answered on its own"


@dataclass(frozen=True)
class _Record:
    """One module's call: what went in and what came out."""

    name: str
    module: nn.Module
    given: list[Tensor]
    out: list[Tensor]
    along: tuple[list[int | None], list[int | None]]  # of each of these, the dimension that holds the queries, if it was found


def check(model: nn.Module, x: Any, *, rtol: float = 1e-3, atol: float = 1e-5) -> Report:
    """Look for leakage between the queries of a model, and of its tailoring loss and adaptation if it is a `Tailored`.

    One query of `x` is changed, the first and then the last, and the answers to all others are watched, module by module: the module named
    is the innermost one whose inputs stayed the same for them while its output did not. The same is done for nothing changed at all
    (randomness).
    """
    queries = count_rows(x)
    if queries < 2:
        raise ValueError(f"leakage between queries shows in a batch of at least two, not {queries}")
    compare = functools.partial(_same_rows, queries=queries, rtol=rtol, atol=atol)
    everyone = functools.partial(compare, rows=torch.arange(queries))
    changes = [  # the queries with one changed, and how the others are compared
        (_change_one(x, 0, by=1), functools.partial(compare, rows=torch.arange(1, queries))),
        (_change_one(x, -1, by=0), functools.partial(compare, rows=torch.arange(queries - 1))),
    ]
    net = model.net if isinstance(model, Tailored) else model
    try:
        rows = {(s.name, s.call, s.leaf): s.rows for s in watch(net, x)}
    except ValueError:  # a model that mixes queries so that nothing can be told
        rows = {}
    with torch.no_grad(), untouched(net):
        before, again = (_record(net, x, rows) for _ in range(2))
        problems = [_find(before, again, everyone, "answers the same input differently each time", _SEEDED)]
        for changed, same in changes:
            if not any(problems):  # else the answers to all others change by themselves
                problems.append(_find(before, _record(net, changed, rows), same, "mixes the queries of a batch", _GENERAL))
    if isinstance(model, Tailored) and not any(problems):
        problems += _check_tailoring(model, x, changes, everyone)
    return Report(tuple(p for p in problems if p is not None))


def _check_tailoring(
    model: Tailored, x: Any, changes: list[tuple[Any, Callable[..., bool]]], everyone: Callable[..., bool]
) -> list[Problem]:
    if model.adapt.shared:
        return [
            Problem(f"adaptation with {model.adapt!r}", "mixes the queries of a batch, by design", "use an adapter that serves each query")
        ]
    loss = f"tailoring loss {getattr(model.loss, '__name__', type(model.loss).__name__)}"
    try:
        start, again, *others = ([model.trace(value).losses[:1].mT] for value in (x, x, *(changed for changed, _ in changes)))
    except MixingError:
        return [Problem(loss, "mixes the queries of a batch", f"{_APART}; {_VIEWS}")]
    if not everyone(start, again):
        return [Problem(loss, "gives the same query another value each time", _SEEDED)]
    if not all(same(start, other) for (_, same), other in zip(changes, others, strict=True)):
        return [Problem(loss, "mixes the queries of a batch", _APART)]
    what = f"adaptation with {model.adapt!r} and {model.rule!r}"
    remedy = "let an optimiser treat rows separately (no norm over the whole batch)"
    answer = tensors(model(x))
    if not all(same(answer, tensors(model(changed))) for changed, same in changes):
        return [Problem(what, "mixes the queries of a batch", remedy)]
    alone = [model(take_rows(x, slice(i, i + 1))) for i in range(count_rows(x))]
    if not everyone(answer, tensors(cat_rows(alone, model._find_places(x).answer_rows))):
        return [Problem(what, "answers a query in a batch otherwise than alone", remedy)]
    return []


def _change_one(x: Any, index: int, by: int) -> Any:
    """The same queries but for one, whose numbers are others; whole ones those of the query `by`."""

    def change(t: Tensor) -> Tensor:
        if not t.ndim:
            return t
        t = t.clone()
        if t.is_floating_point():
            noise = torch.randn(t[index].shape, generator=torch.Generator().manual_seed(0)).to(t)
            t[index] += noise * t.float().std().nan_to_num(1.0).clamp(min=1e-3).to(t.dtype)
        else:
            t[index] = t[by]  # whole (and complex) numbers keep to values that are known to be valid
        return t

    return map_tensors(change, x)


def _record(net: nn.Module, x: Any, rows: dict[tuple[str, int, int], int | None]) -> list[_Record]:
    records: list[_Record] = []
    calls: Counter[str] = Counter()

    def note(name: str, forward: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        given = [t.clone() for t in tensors((args, kwargs))]
        out = forward(*args, **kwargs)
        came, call = [t.clone() for t in tensors(out)], calls[name]
        calls[name] += 1
        along = [rows.get((name, call, -1 - i)) for i in range(len(given))], [rows.get((name, call, i)) for i in range(len(came))]
        records.append(_Record(name, module, given, came, along))
        return out

    with intercepted([StandIn(module, functools.partial(note, name)) for name, module in net.named_modules()]):
        args, kwargs = model_call(x)
        net(*args, **kwargs)
    return records


def _find(before: list[_Record], after: list[_Record], same: Callable[..., bool], what: str, remedy: str) -> Problem | None:
    for a, b in zip(before, after, strict=False):
        if same(a.given, b.given, a.along[0]) and not same(a.out, b.out, a.along[1]):
            remedy = next((text for kind, text in _REMEDIES if isinstance(a.module, kind)), remedy)
            return Problem(f"module {a.name or '(the model itself)'} ({type(a.module).__name__})", what, remedy)
    return None


def _same_rows(
    a: list[Tensor], b: list[Tensor], along: Sequence[int | None] = (), *, rows: Tensor, queries: int, rtol: float, atol: float
) -> bool:
    pairs = zip_longest(a, b, along)
    return len(a) == len(b) and all(_same_tensor(p, q, d, rows, queries, rtol, atol) for p, q, d in pairs)


def _same_tensor(a: Tensor, b: Tensor, along: int | None, rows: Tensor, queries: int, rtol: float, atol: float) -> bool:
    if a.shape != b.shape:
        return False
    if along is None or a.shape[along] % queries:  # it was not found: one of the first two, if it fits
        along = next((d for d in range(min(a.ndim, 2)) if a.shape[d] and a.shape[d] % queries == 0), None)
    if along is None:  # nothing here belongs to a single query
        return True
    a, b = (in_parts(t) for t in (a, b))
    a, b = (t.movedim(along, 0).reshape(queries, -1)[rows.to(t.device)].detach().double() for t in (a, b))
    return torch.allclose(a, b, rtol=rtol, atol=atol * max(1.0, float(a.abs().max()) if a.numel() else 1.0), equal_nan=True)
