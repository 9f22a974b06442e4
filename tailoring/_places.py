"""What is known of a model for each kind of input: where it is adapted, what can run once, where its answers hold the queries."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.utils import _pytree as pytree

from ._adapt import Adapter
from ._casts import Sited, sited
from ._inner import Backprop
from ._kernels import Structure, plain_kernels, precision_of, structure_of
from ._learned import OwnNames
from ._optimisers import Descent, Rule
from ._recurrent import NEEDS_TRACEABLE
from ._reuse import Prefix, find_prefix, multiplications
from ._watch import Seen, watch, watching_once

Kind = tuple[Any, ...]
Known = TypeVar("Known")


@dataclass
class Asked:
    """What is known of the tailoring loss, once it has been asked."""

    looks: int = 0  # how many of its graphs were found to keep the queries' states apart
    sees_weights: bool = False  # it uses the adapted weights only where the adapter sees them
    enough: bool = False
    fails: bool = False  # on trial, for compiled code


class Places(NamedTuple):
    """What is known of a model for inputs of one shape."""

    sited: Sited
    prefix: Prefix  # modules that lie below the first site, and can run once for all steps
    multiplications: float  # that these make for a query
    answer_rows: dict[int, int | None]  # of each tensor of the answer, the dimension that holds the queries
    answers_by_row: bool  # every tensor of the answer has one, in which the rows of a query follow each other
    asked: Asked
    kernels: AbstractContextManager[None] | None  # plain ones, for each of the passes; None: to be asked for at each


class Ways:
    """Which ways a model has gone with numbers that all queries share, such as a time step: `if t > 0.5` may send the data elsewhere.

    A few are looked at. If they all go one way, others are taken to do so too; else each is looked at.
    """

    def __init__(self) -> None:
        self.seen: dict[tuple[float, ...], Any] = {}
        self.differ = False

    def like(self, numbers: tuple[float, ...]) -> tuple[float, ...]:
        """Numbers that go the same way, as far as is known: these, or the first that were looked at."""
        return numbers if self.differ or numbers in self.seen or len(self.seen) < _LOOKS else next(iter(self.seen))

    def note(self, numbers: tuple[float, ...], way: Any) -> None:
        self.differ = self.differ or any(way != other for other in self.seen.values())
        if len(self.seen) < _LOOKS:
            self.seen[numbers] = way


_LOOKS = 8


class Placing(OwnNames):
    """The part of `Tailored` that knows the model; the settings are told there."""

    adapt: Adapter
    rule: Rule
    backprop: Backprop

    def __init__(self, net: nn.Module):
        super().__init__(net)
        self._places: dict[Any, Places] = {}
        self._ways: dict[Any, Ways] = {}
        self._traced: tuple[tuple[Kind, Places], ...] = ()  # those that compiled code knows, by kind of input
        self._structure: Structure | None = None
        self._prepared = False

    def _find_places(self, x: Any, structure: Structure | None = None, key: Any = None) -> Places:
        structure = structure or self._find_structure()
        if structure is None:
            return self._find_traced(x)
        key = key or self._key(x, structure)
        numbers = () if isinstance(x, Tensor) else _numbers(x)
        ways = None
        if numbers and (ways := self._ways.get(key)) is None:
            ways = _put(self._ways, key, Ways())
        key = key if ways is None else (key, ways.like(numbers))
        places = self._places.get(key)
        if places is None:
            places, seen = self._look(x, structure)
            if ways is not None:
                ways.note(numbers, tuple((s.name, s.call) for s in seen))
            _put(self._places, key, places)
            self._traced = self._traced or ((kind_of(x), places),)
        return places

    def _look(self, x: Any, structure: Structure) -> tuple[Places, list[Seen]]:
        """Look at the model, by a few trial passes."""
        with watching_once():
            here, seen = sited(self.net, self.adapt.sites(self.net, x)), watch(self.net, x)
        if isinstance(self.rule, Descent) and isinstance(self.rule.lr, Mapping):
            self.rule.check_names(list(self.adapt.init(self.net, here.sites, 1)))
        prefix = find_prefix(self.adapt, here, seen, x)
        answers = [s for s in seen if s.name == "" and s.leaf >= 0]
        if not answers:
            warnings.warn(_UNSEEN, stacklevel=3)
        by_row = bool(answers) and all(s.rows is not None and s.in_order for s in answers)
        per_query = multiplications(self.net, prefix, seen) / 2
        return Places(here, prefix, per_query, {s.leaf: s.rows for s in answers}, by_row, Asked(), self._plain_kernels(structure)), seen

    def _find_traced(self, x: Any) -> Places:
        """The same in compiled code, which cannot look: of an input like one that `prepare`, or the first call, has seen."""
        if self._prepared or not NEEDS_TRACEABLE:
            here = kind_of(x)
            for kind, places in self._traced:
                if kind == here:
                    return places._replace(sited=sited(self.net, places.sited.sites), kernels=None)  # dynamo knows a module by its path
        raise RuntimeError(
            "the sites of this model are not known yet for such an input: call model.prepare(x) once, with an x of this shape and type, "
            "before compiling it"
        )

    def _forget_places(self) -> None:
        self._places.clear()
        self._ways.clear()
        self._traced = ()

    def _find_structure(self) -> Structure | None:
        """The model's modules, as they are now: None in compiled code. What was known of a model with other ones is forgotten."""
        if is_dynamo_compiling():
            return None
        if torch.compiler.is_exporting():  # asked second: to torch 2.11's dynamo this is always so
            raise RuntimeError(_NOT_EXPORTED)
        structure = structure_of(self.net, self._structure)
        if structure is not self._structure:
            self._structure = structure
            self._forget_places()
        return structure

    def _key(self, x: Any, structure: Structure) -> Any:
        """What the sites may depend on: shapes and types of a query, what else the model is called with, its precision; and the adapter."""
        net = self.net
        precision = precision_of(structure), net.training, self.backprop, self.adapt, self.adapt.depends_on(net)
        if isinstance(x, Tensor):
            return precision, x.ndim, x.shape[1:], x.dtype
        leaves, spec = pytree.tree_flatten(x)
        parts = [(leaf.ndim, leaf.shape[1:], leaf.dtype) if isinstance(leaf, Tensor) else _told(leaf) for leaf in leaves]
        return precision, tuple(parts), str(spec)

    def _plain_kernels(self, structure: Structure | None = None) -> AbstractContextManager[None]:
        return plain_kernels(self.net, graph=self.adapt.plain_kernels or self.backprop != "none", structure=structure)


def _put(known: dict[Any, Known], key: Any, one: Known) -> Known:
    """Remember it, in place of the oldest where these are too many."""
    while len(known) >= _MOST_PLACES:
        del known[next(iter(known))]
    known[key] = one
    return one


def kind_of(x: Any) -> Kind:
    """Shapes and types of a query's tensors, and what else may choose a way through the model, in a form that dynamo can compare."""
    leaves = pytree.tree_leaves(x)
    settings = (leaf for leaf in leaves if leaf is None or isinstance(leaf, bool | int | str))
    return *((t.ndim, tuple(t.shape[1:]), t.dtype) for t in leaves if isinstance(t, Tensor)), *settings


def _told(leaf: Any) -> Any:
    """Of a number that is measured rather than counted, its type alone: a time step, which may be another at every call (see `Ways`)."""
    return float if isinstance(leaf, float) else repr(leaf)


def _numbers(x: Any) -> tuple[float, ...]:
    """What is measured rather than counted, and shared by all queries. (Of a GPU's numbers it would have to be waited for.)"""
    leaves = pytree.tree_leaves(x)
    told = (float(t.detach()) if isinstance(t, Tensor) and not t.ndim and t.is_cpu and not t.is_complex() else t for t in leaves)
    return tuple(number for number in told if isinstance(number, float))


_MOST_PLACES = 1024  # kinds of inputs that are remembered; to look at one takes as long as ten answers
_NOT_EXPORTED = (
    "torch.export cannot take a model that differentiates itself to answer: export the model it wraps, model.net, or compile this one"
)
_UNSEEN = (
    "no tensor is found in the model's answer, so an answer that is not finite goes unnoticed: return tensors in tuples, lists or dicts, "
    "or register your class with torch.utils._pytree.register_dataclass or register_pytree_node"
)
