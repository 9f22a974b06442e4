"""Answers by compiled programs, and in eager mode where these cannot serve."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, Self

import torch
from torch import Tensor

from ._answering import Answering
from ._batch import Batch
from ._compiled import Compiled
from ._isolate import may_be_of_some
from ._kernels import allowed_by_dynamo
from ._optimisers import Descent
from ._places import kind_of
from ._recurrent import make_traceable
from ._sites import alone
from ._trees import cat_rows, count_rows

_TOO_MANY = (
    "this model asked for more programs than are kept, and answers in eager mode from now on: is it called with a number that is another "
    "at every call? Give that as a tensor, one for each query"
)
_NOT_COMPILED = (
    "tailoring: this model or its loss cannot be compiled; compile=False answers in eager mode. A loss that differentiates the model is "
    "compiled if it does so by torch.func (not torch.autograd), with CN or with Weights(how='vmap')"
)
_RAISED = "the compiled program raised {}: this batch is answered in eager mode"


class Compiling(Answering):
    """The part of `Tailored` that chooses how a batch is answered."""

    compile_options: Mapping[str, Any] | None
    _compiled: Compiled | None

    def prepare(self, x: Any) -> Self:
        """Look at an example input: find the sites (and give a learned start its shape) before compiling or training."""
        places, kind = self._find_places(x), kind_of(x)
        self._traced = (*(known for known in self._traced if known[0] != kind), (kind, places))
        start = self._identity(Batch(x, count_rows(x), places), 1)  # a learned one has its shape from now on
        if isinstance(self.rule, Descent) and self.steps:
            for name in start:
                self.rule.rate(name, 0)  # asked now, and remembered: dynamo cannot follow patterns of names
        self._try_loss(x, places)
        make_traceable(self.net)
        self._prepared = True
        return self

    def _eager_answer(self, x: Any) -> Any:
        answers = [self._answer(b, self._fitted(b))[0] for b in self._batches(x)]
        return answers[0] if len(answers) == 1 else cat_rows(answers, self._find_places(x).answer_rows)

    def _compiled_answer(self, x: Any) -> tuple[Any, bool]:
        """The answers, and whether the program has already seen to those that fail."""

        def answer(part: Any) -> Any:
            (batch,) = self._batches(part)
            if self._is_plain:
                return self._rescued(batch)
            return self._answer(batch, self._fit(batch).state)[0]

        with alone():  # neither may dynamo see what another thread has put in a module's place, nor `_places` grow while it looks
            structure = self._find_structure()
            assert structure is not None, "compiled code does not come here"
            key, known = self._key(x, structure), len(self._places)
            places = self._find_places(x, structure, key)
            if len(self._places) != known or not self._prepared:
                self._batches(x)  # what it refuses must be refused here, with its own words
            self._try_loss(x, places)
            if self._compiled is None or not self._prepared:
                self.prepare(x)
                self._compiled = Compiled(answer, self.compile_options or {}, self._owned)
            self._traced = ((kind_of(x), places),)  # alone: what else there is would be looked at, and a change of it compiled for
            try:
                with allowed_by_dynamo(self.net, structure):
                    out = self._compiled(key, x, self.chunk, places.answer_rows, fills=places.answers_by_row and not self.adapt.shared)
            except torch._dynamo.exc.FailOnRecompileLimitHit:  # pyright: ignore[reportAttributeAccessIssue]
                warnings.warn(_TOO_MANY, stacklevel=2)
                self.compile_options = None
                return self._eager_answer(x), True
            except Exception as error:
                own = torch._dynamo.exc.TorchDynamoException  # pyright: ignore[reportAttributeAccessIssue]
                if isinstance(error, own | AssertionError):  # some of torch 2.11's own errors are assertions
                    for batch in self._batches(x):
                        self._fitted(batch)  # what eager mode refuses, too, is refused with its own words
                    error.add_note(_NOT_COMPILED)
                elif may_be_of_some(error):
                    warnings.warn(_RAISED.format(f"{type(error).__name__}: {error}".splitlines()[0]), stacklevel=2)
                    return self._eager_answer(x), True  # which finds out whose it is
                raise
            return out, self._is_plain and places.answers_by_row

    def _owned(self) -> Iterator[Tensor]:
        return itertools.chain(self.parameters(), self.buffers())
