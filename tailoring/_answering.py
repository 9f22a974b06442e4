"""The answers to a batch of queries, cut in parts: each with a state that was fitted to it, and untailored where that fails."""

from __future__ import annotations

import cmath
import functools
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from ._batch import Batch, Trace
from ._fitting import Fitting
from ._inner import hurry_by_row
from ._isolate import told_apart
from ._kernels import Structure, may_look, structure_of
from ._optimisers import Descent
from ._places import Places
from ._reuse import Reuse, held_by, worth_keeping
from ._sites import WHOLE
from ._states import State, compact, device_of, rows_of, where
from ._trees import count_rows, first_tensor, has_fractions, map_tensors, model_call, repeat_rows, split_rows, tensors
from ._validate import check_seeds, check_state, refuse_mixing_modules


class Answering(Fitting):
    """The part of `Tailored` that makes batches of what is asked, and answers them."""

    _loss_structure: Structure | None

    def _batches(self, x: Any, start: State | None = None, seeds: Tensor | None = None) -> list[Batch]:
        """The queries in parts of `chunk`, checked before anything runs."""
        net, loss = self.net, self.loss
        structure = self._find_structure()
        refuse_mixing_modules(net, structure)
        if isinstance(loss, nn.Module):
            if structure is not None:
                self._loss_structure = structure_of(loss, self._loss_structure)
            refuse_mixing_modules(loss, structure and self._loss_structure)
        queries, places = count_rows(x), self._find_places(x, structure)
        if start is not None:
            check_state(start, self._identity(Batch(x, queries, places), 1), self.adapt.rows(queries))
            start = compact(start)
        if seeds is not None:
            check_seeds(seeds, queries)
        if self.chunk is None or queries <= self.chunk:
            return [Batch(x, queries, places, seeds, start, self._reuse(places, queries))]
        parts = split_rows([x, start, seeds], self.chunk)
        sizes = [count_rows(part) for part, *_ in parts]
        return [
            Batch(part, n, places, own_seeds, own, self._reuse(places, n)) for n, (part, own, own_seeds) in zip(sizes, parts, strict=True)
        ]

    def _reuse(self, places: Places, queries: int) -> Reuse | None:
        """Weights in training need the graph of every pass, and may move between two; frozen ones, or without gradients, need not."""
        prefix = places.prefix
        if not worth_keeping(places.multiplications * queries):
            return None
        if prefix and torch.is_grad_enabled():
            if is_dynamo_compiling():
                return None
            weights = {name: [t for t in held_by(self.net.get_submodule(name)) if isinstance(t, Tensor)] for name in prefix}
            prefix = {name: prefix[name] for name in prefix if not any(t.requires_grad for t in weights[name])}
            prefix = prefix if any(weights[name] for name in prefix) else {}  # else nothing but activation functions is left
        return Reuse(self.net, prefix) if prefix else None

    def _answer(self, batch: Batch, state: State) -> tuple[Any, Tensor | None]:
        """The prediction, and which rows of the state were not fit to answer with (None: no one, or that was not looked at)."""
        if not may_look():
            return self._run(batch, state), None
        raised: Tensor | None = None
        try:
            out = self._run(batch, state)
        except Exception as error:
            out, raised = self._run_without(error, batch, state)
        if answer_is_finite(out):
            return out, raised
        rows, where_rows = rows_of(state), batch.places.answer_rows
        bad = ~_finite_rows(out, rows, where_rows).to(device_of(state))
        if bad.any():  # a state may be finite and yet too far out to answer with
            identity = self._identity(batch, rows)
            with torch.no_grad():
                home = self._run(batch, identity)
                bad = bad & _finite_rows(home, rows, where_rows).to(bad.device)  # else the untailored answer is no better
            bad = bad if raised is None else bad | raised
            if bad.any():
                out = self._run(batch, where(~bad, state, identity))
        return out, bad

    def _run_without(self, error: Exception, batch: Batch, state: State) -> tuple[Any, Tensor]:
        """The answers where the model raised `error`, and which rows of the state made it do so: these answer from their start."""
        total = rows_of(state)

        def run(rows: Tensor, some: State) -> Any:
            return self._run(batch.part(rows, total), some)

        fine = told_apart(error, run, state, moved=self.steps > 0)
        raised = torch.ones(total, dtype=torch.bool, device=device_of(state)).index_fill(0, fine, False)
        return self._run(batch, where(~raised, state, self._identity(batch, total))), raised

    def _run(self, batch: Batch, state: State) -> Any:
        """The model's answers as adapted by the state."""
        args, kwargs = model_call(batch.x)
        with batch.places.kernels or self._plain_kernels():
            return self._call(batch, state, False, None, WHOLE, args, kwargs)

    def _rescued(self, batch: Batch) -> Any:
        """The answers, those of rows that failed untailored, without a look at any number: for compiled code, which need not wait then."""
        batch = batch._replace(rescued=batch.places.answers_by_row)
        start = self._identity(batch, self.adapt.rows(batch.queries))
        state, fine = hurry_by_row(functools.partial(self._gradient, batch), start, cast(Descent, self.rule).rates, self.steps)
        out = self._answer(batch, where(fine, state, start))[0]
        if not batch.places.answers_by_row:
            return out  # then what is not finite in it is looked at from outside
        home, where_rows, rows = self._answer(batch, start)[0], batch.places.answer_rows, rows_of(start)
        worse = ~_finite_rows(out, rows, where_rows) & _finite_rows(home, rows, where_rows)
        return _rows_where(~worse, out, home, where_rows)

    def _trace(self, batch: Batch) -> Trace:
        fit = self._fit(batch, record=True)
        prediction, bad = self._answer(batch, fit.state)
        failed = fit.failed if bad is None else fit.failed | bad
        per_query = [t.expand(batch.queries) for t in (torch.where(failed, 0, fit.steps), fit.stopped, failed, *fit.losses)]
        steps, stopped, failed, *losses = per_query
        once = () if batch.reuse is None else tuple(name for name in batch.reuse.names if name in batch.reuse.used)
        return Trace(prediction, torch.stack(losses), steps, stopped, failed, fit.state, batch.sites, once)


def answer_is_finite(out: Any) -> bool:
    """Surely so if it says so: a sum may overflow."""
    return all([cmath.isfinite(t.sum().item()) for t in tensors(out) if has_fractions(t)])  # noqa: C419 - a list takes less time


def _finite_rows(out: Any, rows: int, dimensions: Mapping[int, int | None]) -> Tensor:
    """(rows,): whether all numbers of the row are finite, in all tensors that have rows; `dimensions` says where."""
    found = [(t.detach(), dim) for t, dim in _with_dimensions(out, dimensions) if dim is not None and has_fractions(t)]
    checks = [t.movedim(dim, 0).reshape(rows, -1).isfinite().all(1) for t, dim in found if t.shape[dim] % rows == 0]
    return torch.stack(checks).all(0) if checks else torch.ones(rows, dtype=torch.bool, device=first_tensor(out).device)


def _rows_where(rows: Tensor, yes: Any, no: Any, dimensions: Mapping[int, int | None]) -> Any:
    """The `rows` of `yes`, and the others of `no`, in all tensors, each of which has rows, those of a query in a row."""
    pairs = iter(zip(tensors(no), _with_dimensions(yes, dimensions), strict=True))

    def choose(t: Tensor) -> Tensor:
        instead, (_, dim) = next(pairs)
        assert dim is not None
        mask = repeat_rows(rows, t.shape[dim] // len(rows)).view([-1 if d == dim else 1 for d in range(t.ndim)])
        return torch.where(mask, t, instead)

    return map_tensors(choose, yes)


def _with_dimensions(out: Any, dimensions: Mapping[int, int | None]) -> list[tuple[Tensor, int | None]]:
    return [(t, dimensions.get(place, 0) if t.ndim else None) for place, t in enumerate(tensors(out))]
