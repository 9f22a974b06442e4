"""Where a state acts on a model, and the stand-ins for the modules there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from ._sites import Around, StandIn, intercepted
from ._states import State


@dataclass(frozen=True)
class Site:
    """One place where a state acts: a tensor of a module's output, or (for `Weights`) a parameter."""

    key: str  # the prefix of its names in the state
    module: str
    call: int  # which of the module's calls in one forward pass
    leaf: int  # which tensor of the module's output
    rows: int | None  # the dimension of that tensor that holds the queries; None of a layer that all queries share the input of
    channels: int  # the dimension that holds the channels
    shape: tuple[int, ...]  # what one query owns
    dtype: torch.dtype
    how: str = ""  # of a parameter: the rule by which every query has its own
    local: str = ""  # of a parameter: its name in the module
    all_rows: tuple[tuple[int, int | None], ...] = ()  # of a parameter: `rows` of all the module's inputs (-1, -2, ...) and outputs
    parts: tuple[tuple[str, tuple[tuple[int, int | None], ...]], ...] = ()  # of a whole model with copies: `all_rows` of its modules
    calls: int = 1  # how often the module runs in one forward pass
    copied: bool = False  # of a parameter: the module has no rule, and runs with a copy of its weights for each query
    dims: int = 0  # of that tensor, when it was first seen
    channels_last: bool = False  # whatever other dimensions it has
    names: tuple[str, ...] = ()  # in the state, of what an adapter keeps here: to put them together at every call takes its time


Modules = list[tuple[nn.Module, list[Site]]]  # the adapted ones, each with its own sites


class Pass:
    """What the stand-ins of a pass go by. They know this, and not each other: nothing of a pass, or of a model, is in a cycle."""

    __slots__ = ("given", "queries", "ran", "state", "taps")

    def __init__(self) -> None:
        self.rest()

    def rest(self) -> None:
        """Hold on to nothing."""
        self.state: State = {}
        self.ran: dict[str, int] = {}  # how often each module did
        self.given: Any = None  # the model's input
        self.queries: int = 0
        self.taps: Any = None


class Cast(NamedTuple):
    """Stand-ins for a model's adapted modules, made once; they work for one pass at a time."""

    now: Pass
    at_work: intercepted  # within it they answer


StandInFor = Callable[[nn.Module, list[Site], Pass], Around]


class Spare(list[Cast]):
    """Those that are not at work: a pass takes one from here, or makes one, which takes its time. A copy of a model makes its own."""

    def __reduce__(self) -> Any:
        return Spare, ()


class Sited(NamedTuple):
    """A model with its sites, kept while it has the same modules: to look these up at every pass takes its time."""

    model: nn.Module
    sites: tuple[Site, ...]
    modules: Modules
    spare: Spare | None  # casts that wait for another pass; dynamo makes a new one for each

    def cast(self, stand_in_for: StandInFor, state: State) -> Cast:
        """A cast at work by this state, to be given to `dismiss` after the pass."""
        try:
            cast = self.spare.pop() if self.spare else None
        except IndexError:  # another thread was faster
            cast = None
        if cast is None:
            now = Pass()
            cast = Cast(now, intercepted([StandIn(module, stand_in_for(module, own, now)) for module, own in self.modules]))
        cast.now.state = state
        return cast

    def dismiss(self, cast: Cast) -> None:
        """Not after a pass that failed: what it has left there goes with it."""
        if self.spare is not None:
            cast.now.rest()
            self.spare.append(cast)


def sited(model: nn.Module, sites: tuple[Site, ...]) -> Sited:
    spare = None if is_dynamo_compiling() else Spare()
    groups: dict[str, list[Site]] = {}
    for site in sites:
        groups.setdefault(site.module, []).append(site)
    return Sited(model, sites, [(model.get_submodule(name), own) for name, own in groups.items()], spare)
