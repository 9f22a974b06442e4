"""Replacing what a module computes; recurrent layers in plain operations, which vmap has rules for and dynamo traces."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.torch_version import TorchVersion

from ._sites import Around, StandIn, intercepted

NEEDS_TRACEABLE = TorchVersion(torch.__version__) < "2.13"


def make_traceable(model: nn.Module) -> None:
    """Let dynamo see a shadowed `forward`. Before 2.13 it does so only where the instance has one already, and cannot trace its removal.

    So there, and only for a model that is prepared to be compiled, every module keeps its own `forward` on the instance, which
    changes nothing that it computes.
    """
    if NEEDS_TRACEABLE:
        for module in model.modules():
            module.__dict__.setdefault("forward", functools.partial(type(module).forward, module))


def is_patched(module: nn.Module) -> bool:
    """Whether the instance has a `forward` that is neither its class's nor what stands in for it while it is adapted."""
    own = module.__dict__.get("forward")
    return own is not None and _function_of(own) is not type(module).forward and not getattr(own, "stands_in", False)


def _function_of(forward: Callable[..., Any]) -> Any:
    """The function of a class that a bound method, or what `make_traceable` leaves, is of."""
    return forward.func if isinstance(forward, functools.partial) else getattr(forward, "__func__", None)


@contextmanager
def unrolled_layers(model: nn.Module) -> Iterator[None]:
    """Within the block, the model's RNN, GRU and LSTM layers compute step by step, and its cells in plain operations."""
    plain = [(layer, _in_plain_operations(layer)) for layer in model.modules()]
    with intercepted([StandIn(layer, _instead(run)) for layer, run in plain if run is not None]):
        yield


def _instead(run: Callable[..., Any]) -> Around:
    return lambda _forward, _module, args, kwargs: run(*args, **kwargs)


def _in_plain_operations(layer: nn.Module) -> Callable[..., Any] | None:
    """Another `forward` for the layer, if it needs one and runs its own: one that the user has written or patched is left as it is."""
    return None if is_patched(layer) else _plain(layer, type(layer).forward)


def in_plain_operations(layer: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """The `forward` of a layer, or the same in plain operations if vmap cannot run it."""
    return _plain(layer, _function_of(forward)) or forward


def _plain(layer: Any, function: Any) -> Callable[..., Any] | None:
    if function in (nn.RNN.forward, nn.GRU.forward, nn.LSTM.forward):
        return Unrolled(layer)
    return functools.partial(_step, layer) if function in (nn.RNNCell.forward, nn.GRUCell.forward, nn.LSTMCell.forward) else None


def _step(layer: nn.RNNCellBase, input: Tensor, hx: Any = None) -> Any:
    """The `forward` of a recurrent cell."""
    zeros, pair = input.new_zeros(*input.shape[:-1], layer.hidden_size), isinstance(layer, nn.LSTMCell)
    state = (zeros, zeros) if hx is None else hx if pair else (hx,)
    given, recurrent = F.linear(input, layer.weight_ih, layer.bias_ih), F.linear(state[0], layer.weight_hh, layer.bias_hh)
    new = _cell(layer)(given, recurrent, state)
    return new if pair else new[0]


class Unrolled:
    """The `forward` of a recurrent layer, step by step."""

    def __init__(self, layer: nn.RNNBase):
        self.layer = layer

    def __call__(self, input: Tensor, hx: Any = None) -> tuple[Tensor, Any]:
        layer, x = self.layer, input
        if not isinstance(x, Tensor) or x.ndim != 3:
            raise ValueError(
                f"tailoring the weights of {type(layer).__name__} takes a batch of padded sequences, (queries, time, features)"
            )
        x = x.transpose(0, 1) if layer.batch_first else x  # (time, rows, features)
        starts = [None] * (layer.num_layers * self.directions) if hx is None else _starts(hx)
        ends = []
        for depth in range(layer.num_layers):
            outputs = []
            for way in range(self.directions):
                out, end = self._scan(x.flip(0) if way else x, depth, way, starts[depth * self.directions + way])
                outputs.append(out.flip(0) if way else out)
                ends.append(end)
            x = torch.cat(outputs, -1)
        out = x.transpose(0, 1) if layer.batch_first else x
        last = tuple(torch.stack(parts) for parts in zip(*ends, strict=True))
        return out, last if isinstance(layer, nn.LSTM) else last[0]

    @property
    def directions(self) -> int:
        return 2 if self.layer.bidirectional else 1

    def _scan(self, x: Tensor, depth: int, way: int, start: tuple[Tensor, ...] | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        layer, suffix = self.layer, f"_l{depth}" + ("_reverse" if way else "")
        names = ("weight_ih", "bias_ih", "weight_hh", "bias_hh", "weight_hr")
        weight_in, bias_in, weight, bias, project = (getattr(layer, name + suffix, None) for name in names)
        assert weight_in is not None
        assert weight is not None
        if start is None:
            hidden = x.new_zeros(x.shape[1], layer.proj_size or layer.hidden_size)
            start = (hidden, x.new_zeros(x.shape[1], layer.hidden_size)) if isinstance(layer, nn.LSTM) else (hidden,)
        given = F.linear(x, weight_in, bias_in)  # all time steps at once
        cell, outputs = _cell(layer), []
        for inputs in given:
            start = cell(inputs, F.linear(start[0], weight, bias), start)
            if project is not None:
                start = (F.linear(start[0], project), *start[1:])
            outputs.append(start[0])
        return torch.stack(outputs), start


def _starts(hx: Any) -> list[tuple[Tensor, ...]]:
    return list(zip(*(h.unbind(0) for h in (hx if isinstance(hx, tuple) else (hx,))), strict=True))


def _cell(layer: nn.RNNBase | nn.RNNCellBase) -> Callable[[Tensor, Tensor, tuple[Tensor, ...]], tuple[Tensor, ...]]:
    """(input part, recurrent part, state) -> state, as in the documentation of torch.nn."""
    if isinstance(layer, nn.LSTM | nn.LSTMCell):
        return _lstm
    if isinstance(layer, nn.GRU | nn.GRUCell):
        return _gru
    nonlinearity = layer.mode if isinstance(layer, nn.RNNBase) else layer.nonlinearity
    activation = torch.tanh if nonlinearity in ("RNN_TANH", "tanh") else torch.relu
    return lambda given, recurrent, state: (activation(given + recurrent),)


def _gru(given: Tensor, recurrent: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    (reset_x, update_x, new_x), (reset_h, update_h, new_h) = given.chunk(3, -1), recurrent.chunk(3, -1)
    update = torch.sigmoid(update_x + update_h)
    new = torch.tanh(new_x + torch.sigmoid(reset_x + reset_h) * new_h)
    return ((1 - update) * new + update * state[0],)


def _lstm(given: Tensor, recurrent: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    enter, forget, new, leave = (given + recurrent).chunk(4, -1)
    cell = forget.sigmoid() * state[1] + enter.sigmoid() * new.tanh()
    return (leave.sigmoid() * cell.tanh(), cell)
