"""Kernels that tailoring can differentiate.

PyTorch's fast paths skip submodules (so adapters never see them) or lack the derivative that tailoring needs: fused attention
has no second derivative, cuDNN's recurrent kernels have no backward pass in eval mode. Their switches are global to the process,
so they are counted: the first call that needs them off turns them off, the last one that ends restores them.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from ._recurrent import unrolled_layers


class _Switch:
    def __init__(self, name: str, read: Callable[[], bool], write: Callable[[bool], None]):
        self.name, self.read, self.write = name, read, write
        self.lock, self.users, self.before = threading.Lock(), 0, True

    def __reduce__(self) -> str:
        return self.name  # a copy, of a model say, has the switch itself: a process has one of each

    def off(self) -> None:
        with self.lock:
            if self.users == 0:
                self.before = self.read()
                self.write(False)
            self.users += 1

    def restore(self) -> None:
        with self.lock:
            self.users -= 1
            if self.users == 0:
                self.write(self.before)


def _set_cudnn(enabled: bool) -> None:
    torch.backends.cudnn.enabled = enabled


def _set_mkldnn(enabled: bool) -> None:
    torch.backends.mkldnn.set_flags(enabled)


_cuda = torch.backends.cuda
_FAST_MODULES = _Switch("_FAST_MODULES", torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled)
_FLASH = _Switch("_FLASH", _cuda.flash_sdp_enabled, _cuda.enable_flash_sdp)
_MEMORY_EFFICIENT = _Switch("_MEMORY_EFFICIENT", _cuda.mem_efficient_sdp_enabled, _cuda.enable_mem_efficient_sdp)
_CUDNN_ATTENTION = _Switch("_CUDNN_ATTENTION", _cuda.cudnn_sdp_enabled, _cuda.enable_cudnn_sdp)
_FUSED_ATTENTION = (_FLASH, _MEMORY_EFFICIENT, _CUDNN_ATTENTION)
_CUDNN = _Switch("_CUDNN", lambda: bool(torch.backends.cudnn.enabled), _set_cudnn)
_MKLDNN = _Switch("_MKLDNN", lambda: bool(torch.backends.mkldnn.enabled), _set_mkldnn)
_RECURRENT = (_CUDNN, _MKLDNN)


Found = TypeVar("Found")
_UNCHANGED: AbstractContextManager[None] = nullcontext()  # one serves all


def all_modules(model: nn.Module) -> list[nn.Module]:
    """`list(model.modules())`, the nearest first, in a tenth of the time."""
    found, known = [model], {model}
    for module in found:
        for child in module._modules.values():
            if child is not None and child not in known:
                found.append(child)
                known.add(child)
    return found


class Structure:
    """Which modules a model has, and what `found_once` functions found of them. It holds while they are the same ones."""

    def __init__(self, model: nn.Module):
        self.modules = all_modules(model)
        self._children = [(list(module._modules), list(module._modules.values())) for module in self.modules]
        self.found: dict[Callable[[nn.Module], Any], Any] = {}

    def holds(self, model: nn.Module) -> bool:
        if model is not self.modules[0]:
            return False
        for module, (names, children) in zip(self.modules, self._children, strict=True):
            now = module._modules
            if not now and not names:  # as most of them
                continue
            if list(now) != names or not all(map(operator.is_, now.values(), children)):  # `==` may be the modules' own
                return False
        return True


def structure_of(model: nn.Module, known: Structure | None) -> Structure:
    return known if known is not None and known.holds(model) else Structure(model)


def found_once(find: Callable[[nn.Module], Found]) -> Callable[[nn.Module, Structure | None], Found]:
    """What `find(model)` says of a model's modules, remembered with its structure if that is given: to look at each takes its time."""

    @wraps(find)
    def ask(model: nn.Module, structure: Structure | None = None) -> Found:
        if structure is None:
            return find(model)
        if find not in structure.found:
            structure.found[find] = find(model)
        return structure.found[find]

    return ask


def precision_of(structure: Structure) -> torch.dtype | None:
    """The dtype of the model's first parameter."""
    for module in structure.modules:
        for p in module._parameters.values():
            if p is not None:
                return p.dtype
    return None


@found_once
def _needed_switches(model: nn.Module) -> tuple[_Switch, ...]:
    kinds = list(model.modules())
    attends = any(isinstance(m, nn.MultiheadAttention | nn.TransformerEncoder | nn.TransformerEncoderLayer) for m in kinds)
    return (_FAST_MODULES,) * attends + _RECURRENT * any(isinstance(m, nn.RNNBase) for m in kinds)


@found_once
def _has_recurrent_layers(model: nn.Module) -> bool:
    return any(isinstance(m, nn.RNNBase) for m in model.modules())


def allowed_by_dynamo(model: nn.Module, structure: Structure) -> AbstractContextManager[Any]:
    """Dynamo refuses any model with a recurrent layer, though it is unrolled while dynamo looks."""
    if not _has_recurrent_layers(model, structure):
        return _UNCHANGED
    return torch._dynamo.config.patch(allow_rnn=True)  # pyright: ignore[reportAttributeAccessIssue]


def plain_kernels(model: nn.Module, *, graph: bool, structure: Structure | None = None) -> AbstractContextManager[None]:
    """Within the block, modules call their submodules and, with `graph`, every kernel can be differentiated twice.

    One such context serves many blocks, but in compiled code.
    """
    if structure is None and is_dynamo_compiling():  # the switches are not for dynamo to set; it takes fused attention apart itself
        return _traceable(model)
    switches = _needed_switches(model, structure) + _FUSED_ATTENTION * graph
    return _Without(switches) if switches else _UNCHANGED


@contextmanager
def _traceable(model: nn.Module) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(unrolled_layers(model))
        for module in model.modules():
            if isinstance(module, nn.TransformerEncoderLayer):
                stack.callback(setattr, module, "activation_relu_or_gelu", module.activation_relu_or_gelu)
                module.activation_relu_or_gelu = 0  # what its fast path asks for
        yield


class _Without:
    """Within the block the switches are off. One serves many blocks, one after another or one within another."""

    def __init__(self, switches: tuple[_Switch, ...]):
        self.switches = switches

    def __enter__(self) -> None:
        with ExitStack() as undo:
            for switch in self.switches:
                switch.off()
                undo.callback(switch.restore)
            undo.pop_all()

    def __exit__(self, *_: Any) -> None:
        for switch in reversed(self.switches):
            switch.restore()


def may_look() -> bool:
    """Whether values may be read by Python now: not while dynamo traces the code, nor while a CUDA graph records it."""
    return not is_dynamo_compiling() and not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())
