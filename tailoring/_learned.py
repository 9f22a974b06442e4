"""What trains in the outer loop besides the model, and the names under which all of it is saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from ._entries import as_tensor, own_shape
from ._states import State


class Learned(nn.Module):
    """The outer loop's own parameters: those of a loss that is a module, of a learned `lr`, of a learned start."""

    def __init__(self, loss: Callable[..., Tensor], lr: Any, learned_start: bool):
        super().__init__()
        self.loss = loss
        rates = dict(lr) if isinstance(lr, Mapping) else {"all": lr}
        self.lr = nn.ParameterDict({_key(name): rate for name, rate in rates.items() if isinstance(rate, nn.Parameter)})
        self.start = nn.ParameterDict()
        self.wants_start = learned_start

    def rates(self, lr: Any) -> Any:
        """The same step sizes, those that are learned as they are registered now."""
        if isinstance(lr, Mapping):
            return {name: self.lr[_key(name)] if isinstance(rate, nn.Parameter) else rate for name, rate in lr.items()}
        return self.lr["all"] if isinstance(lr, nn.Parameter) else lr

    def set_start(self, identity: State) -> None:
        """One row of the identity becomes the start that is learned."""
        for name, t in identity.items():
            self.start[_key(name)] = nn.Parameter(as_tensor(t)[0].clone())

    def start_for(self, rows: int, identity: State) -> State:
        """The start that is learned, for so many rows, in place of the identity."""
        return {name: self._start_of(name, own_shape(t)).expand(rows, *own_shape(t)) for name, t in identity.items()}

    def _start_of(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if _key(name) in self.start and self.start[_key(name)].shape == shape:
            return self.start[_key(name)]
        learned = ", ".join(f"{key.replace('/', '.')} {tuple(start.shape)}" for key, start in self.start.items())
        raise ValueError(
            f"this input needs a start for {name!r} of shape {shape}, but what is learned is {learned}: adapt modules that run equally "
            "often, and with outputs of the same shape, for all inputs, or do without learned_start"
        )


def _key(name: str) -> str:
    return name.replace(".", "/")  # parameters' names must not hold dots


class OwnNames(nn.Module):
    """A wrapper whose parameters, buffers and checkpoints have the names they have in the wrapped model."""

    def __init__(self, net: nn.Module):
        super().__init__()
        self._modules["net"] = net
        self.register_state_dict_post_hook(_drop_prefix)
        self.register_load_state_dict_pre_hook(_add_prefix)

    # Submodules, as `nn.Module.__getattr__` would find them, in a tenth of the time.

    @property
    def net(self) -> nn.Module:
        try:
            return self._modules["net"]  # type: ignore[return-value]
        except KeyError:
            raise AttributeError("net") from None

    @property
    def tailoring(self) -> Learned:
        try:
            return self._modules["tailoring"]  # type: ignore[return-value]
        except KeyError:
            raise AttributeError("tailoring") from None

    def named_parameters(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        if self.tailoring.wants_start and not self.tailoring.start:
            raise RuntimeError("the learned start has no shape yet: call model.prepare(x) with an example input first")
        yield from _own_names(super().named_parameters(prefix, recurse, remove_duplicate), prefix)

    def get_submodule(self, target: str) -> nn.Module:
        """By its name here (`net.encoder`), or the one in the wrapped model, as in the names of parameters."""
        try:
            return super().get_submodule(target)
        except AttributeError:
            return self.net.get_submodule(target)

    def get_parameter(self, target: str) -> nn.Parameter:
        return self._found(target, "get_parameter")

    def get_buffer(self, target: str) -> Tensor:
        return self._found(target, "get_buffer")

    def _found(self, target: str, how: str) -> Any:
        try:
            return getattr(self.net, how)(target)
        except AttributeError:
            return getattr(super(), how)(target)

    def named_buffers(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Iterator[tuple[str, Tensor]]:
        yield from _own_names(super().named_buffers(prefix, recurse, remove_duplicate), prefix)


def _own_names(named: Iterator[tuple[str, Any]], prefix: str) -> Iterator[tuple[str, Any]]:
    before = f"{prefix}." if prefix else ""
    for name, value in named:
        yield before + name.removeprefix(before).removeprefix("net."), value


def _lent(module: OwnNames) -> dict[str, str]:
    """What a loss holds of the model itself (a head), by its name there: the model saves it under its own."""
    names = {id(t): name for named in (module.net.named_parameters(), module.net.named_buffers()) for name, t in named}
    held = (module.tailoring.named_parameters(remove_duplicate=False), module.tailoring.named_buffers(remove_duplicate=False))
    return {f"tailoring.{name}": names[id(t)] for named in held for name, t in named if id(t) in names}


def _drop_prefix(module: OwnNames, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    for name in _lent(module):
        state_dict.pop(prefix + name, None)
    before = f"{prefix}net."  # all are taken before any is put back: the model may have a `net`, too
    taken = {key: state_dict.pop(key) for key in list(state_dict) if key.startswith(before)}
    state_dict |= {prefix + key.removeprefix(before): value for key, value in taken.items()}


def _add_prefix(module: OwnNames, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    lent = {prefix + held: prefix + name for held, name in _lent(module).items()}
    own = {"tailoring", *module._modules, *module._parameters, *module._buffers} - {"net"}  # of a subclass, too
    taken: dict[str, Any] = {held: state_dict[name] for held, name in lent.items() if name in state_dict}
    for key in [key for key in state_dict if key.startswith(prefix)]:
        name = key.removeprefix(prefix)
        if name.startswith("tailoring.start.") and module.tailoring.wants_start:  # a start that this model has not made yet
            start = name.removeprefix("tailoring.start.")
            if start not in module.tailoring.start:
                module.tailoring.start[start] = nn.Parameter(state_dict[key].clone())
        elif name.split(".")[0] not in own:
            taken[f"{prefix}net.{name}"] = state_dict.pop(key)
    state_dict |= taken
