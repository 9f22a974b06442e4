"""The answers to one batch of queries: with a state that was fitted to it, and untailored where that fails."""

from __future__ import annotations

import functools
from typing import Any, cast

import torch
from torch import Tensor

from ._batch import Batch, Trace, all_finite, finite_rows, rows_where
from ._fitting import Fitting
from ._inner import hurry_by_row
from ._isolate import run_apart
from ._kernels import may_look
from ._optimisers import Descent
from ._sites import WHOLE
from ._states import State, device_of, rows_of, where
from ._trees import model_call


class Answering(Fitting):
    """The part of `Tailored` that answers a `Batch`."""

    def _answer(self, batch: Batch, state: State) -> tuple[Any, Tensor | None]:
        """The prediction, and which rows of the state were not fit to answer with (None: no one, or that was not looked at)."""
        if not may_look():
            return self._run(batch, state), None
        out, raised = self._run_where_it_can(batch, state)
        if all_finite(out):
            return out, raised
        rows, where_rows = rows_of(state), batch.places.answer_rows
        bad = ~finite_rows(out, rows, where_rows).to(device_of(state))
        if bad.any():  # a state may be finite and yet too far out to answer with
            identity = self._identity(batch, rows)
            with torch.no_grad():
                home = self._run(batch, identity)
                bad = bad & finite_rows(home, rows, where_rows).to(bad.device)  # else the untailored answer is no better
            bad = bad if raised is None else bad | raised
            if bad.any():
                out = self._run(batch, where(~bad, state, identity))
        return out, bad

    def _run_where_it_can(self, batch: Batch, state: State) -> tuple[Any, Tensor | None]:
        """The answers, and which rows of the state made the model raise (None: no one): these answer from their start."""

        total = rows_of(state)

        def run(rows: Tensor | None, state: State) -> Any:
            return self._run(batch if rows is None else batch.part(rows, total), state)

        out, fine = run_apart(run, state, moved=self.steps > 0)
        if fine is None:
            return out, None
        raised = torch.ones(total, dtype=torch.bool, device=device_of(state)).index_fill(0, fine, False)
        return self._run(batch, where(~raised, state, self._identity(batch, total))), raised

    def _run(self, batch: Batch, state: State) -> Any:
        """The model's answers as adapted by the state."""
        args, kwargs = model_call(batch.x)
        with batch.places.kernels or self._plain_kernels():
            return self._call(batch, state, batch.reuse, False, None, WHOLE, args, kwargs)

    def _rescued(self, batch: Batch) -> Any:
        """The answers, those of rows that failed untailored, without a look at any number: for compiled code, which need not wait then."""
        batch = batch._replace(rescued=batch.places.answers_by_row)
        start = self._identity(batch, self.adapt.rows(batch.queries))
        state, fine = hurry_by_row(functools.partial(self._gradient, batch), start, cast(Descent, self.rule).rates, self.steps)
        out = self._answer(batch, where(fine, state, start))[0]
        if not batch.places.answers_by_row:
            return out  # then what is not finite in it is looked at from outside
        home, where_rows, rows = self._answer(batch, start)[0], batch.places.answer_rows, rows_of(start)
        worse = ~finite_rows(out, rows, where_rows) & finite_rows(home, rows, where_rows)
        return rows_where(~worse, out, home, where_rows)

    def _trace(self, batch: Batch) -> Trace:
        fit = self._fit(batch, record=True)
        prediction, bad = self._answer(batch, fit.state)
        failed = fit.failed if bad is None else fit.failed | bad
        per_query = [t.expand(batch.queries) for t in (torch.where(failed, 0, fit.steps), fit.stopped, failed, *fit.losses)]
        steps, stopped, failed, *losses = per_query
        once = () if batch.reuse is None else tuple(name for name in batch.reuse.names if name in batch.reuse.used)
        return Trace(prediction, torch.stack(losses), steps, stopped, failed, fit.state, batch.sites, once)
