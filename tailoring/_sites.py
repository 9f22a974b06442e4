"""Finding the modules to adapt, and standing in their way for one call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from threading import get_ident
from typing import Any, Literal

from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from ._trees import first_tensor

At = str | type[nn.Module]  # a module by name, by fnmatch pattern, or by type
# around(forward, module, args, kwargs): what the module answers instead of forward(*args, **kwargs)
Around = Callable[[Callable[..., Any], nn.Module, tuple[Any, ...], dict[str, Any]], Any]


ADAPTING = threading.RLock()  # held while a model runs with anything of it replaced


@contextmanager
def alone() -> Iterator[None]:
    """One thread at a time. (Dynamo traces in one thread, and cannot trace a lock.)"""
    if is_dynamo_compiling():
        yield
    else:
        with ADAPTING:
            yield


class StandIn:
    """Answers in a module's place by `around`, which may ask the module; to be put up by `intercepted`, as often as one likes.

    It answers so to the thread that has put it up only: in any other the module is as it was. It is in no cycle, and when taken down holds
    on to nothing but the module: what `around` leads to may be as large as a batch's activations.
    """

    __slots__ = ("before", "module", "now", "shadow")

    def __init__(self, module: nn.Module, around: Around):
        self.module = module
        self.before: Any = None  # the instance's own forward, if it has one
        now: list[Any] = [None, None]  # while it is up: what the module runs otherwise, and whose it is: a thread, or (dynamo's) None

        def shadow(*args: Any, **kwargs: Any) -> Any:
            forward, owner = now
            if forward is None:  # another thread has asked before, and finds it taken down
                return module.forward(*args, **kwargs)
            return around(forward, module, args, kwargs) if owner is None or get_ident() == owner else forward(*args, **kwargs)

        shadow.stands_in = True  # type: ignore[attr-defined]  # no patch of the user's, see `is_patched`
        self.now, self.shadow = now, shadow  # a function: an object that can be called takes longer


class intercepted:  # noqa: N801 - reads as the function it is; a generator would take twice the time
    """Within the block the stand-ins answer in place of their modules.

    The instance's `forward` is shadowed, and restored in the end. Forward hooks would do the same in eager code, but dynamo cannot
    trace their registration, and registering one while another thread runs the module breaks that thread.
    """

    def __init__(self, stand_ins: Iterable[StandIn]):
        self.stand_ins = list(stand_ins)
        self.owner: int | None = None  # the thread for which they are up

    def __enter__(self) -> None:
        if not is_dynamo_compiling():
            ADAPTING.acquire()
            self.owner = get_ident()
        try:
            for stand_in in self.stand_ins:  # all of it here: functions of each would take longer
                module = stand_in.module
                own = module.__dict__
                stand_in.before = own.get("forward")
                now = stand_in.now
                now[1] = self.owner  # first: another thread that looks in between finds no forward yet
                now[0] = module.forward
                own["forward"] = stand_in.shadow
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: Any) -> None:
        for stand_in in reversed(self.stand_ins):
            if stand_in.now[0] is None:  # it was never put up
                continue
            if stand_in.before is None:
                stand_in.module.__dict__.pop("forward", None)
            else:
                stand_in.module.__dict__["forward"] = stand_in.before
            stand_in.before = stand_in.now[0] = None
        if self.owner is not None:
            self.owner = None
            ADAPTING.release()


@dataclass(frozen=True)
class Reading:
    """What is to be computed with an adapted model: the output of the submodule at `path`, or what passes through one below it."""

    path: str = ""
    below: str | None = None
    side: Literal["input", "output"] = "output"
    method: str = "__call__"  # of the submodule at `path`

    @property
    def is_part(self) -> bool:
        """Whether less than the whole model may run."""
        return self.path != "" or self.method != "__call__"

    def __call__(self, model: nn.Module, run: Callable[..., Any]) -> Any:
        """`run(what)` calls the module (or its method); this says which one, and listens while it runs."""
        base = model.get_submodule(self.path)
        if self.method != "__call__":
            return run(getattr(base, self.method))
        if self.below is None:
            return run(base)
        caught: list[Tensor] = []

        def catch(forward: Callable[..., Any], _module: nn.Module, args: Any, kwargs: Any) -> Any:
            if self.side == "input":  # cloned, since the next module may work in place
                caught.append(first_tensor((args, kwargs)).clone())
            out = forward(*args, **kwargs)
            if self.side == "output":
                caught.append(first_tensor(out).clone())
            return out

        with intercepted([StandIn(base.get_submodule(self.below), catch)]):
            run(base)
        if not caught:
            raise ValueError(f"module {self.below!r} did not run in this forward pass")
        return caught[-1]


WHOLE = Reading()  # the model's own answer


def matching(at: tuple[At, ...], names: Mapping[str, nn.Module]) -> set[str]:
    """The names of the modules that `at` chooses. Every entry must choose something."""
    chosen: set[str] = set()
    for entry in at:
        if isinstance(entry, str):
            found = {name for name in names if name == entry or fnmatchcase(name, entry)}
        else:
            found = {name for name, module in names.items() if isinstance(module, entry)}
        if not found:
            label = repr(entry) if isinstance(entry, str) else entry.__name__
            raise ValueError(f"no module matches {label}; the model has: {describe(names)}")
        chosen |= found
    return chosen


def describe(names: Mapping[str, nn.Module], most: int = 40) -> str:
    listed = [f"{name} ({type(module).__name__})" for name, module in names.items() if name]
    if not listed:
        return "no modules inside it"
    return ", ".join(listed[:most]) + (f", and {len(listed) - most} more" if len(listed) > most else "")


def check_at(at: tuple[At, ...]) -> tuple[At, ...]:
    for entry in at:
        if not isinstance(entry, str) and not (isinstance(entry, type) and issubclass(entry, nn.Module)):
            raise TypeError(f"a module is chosen by name, pattern or type, not by {entry!r}")
    return at
