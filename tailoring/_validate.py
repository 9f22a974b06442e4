"""What is refused, with what was given and what to do, before anything is touched."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from ._adapt import Adapter
from ._entries import LowRank, own_shape
from ._inner import Backprop, Keep
from ._kernels import Structure, found_once
from ._optimisers import Descent, Rule
from ._states import State, rows_of


def check_settings(
    net: Any, loss: Any, *, adapt: Any, steps: Any, backprop: Any, keep: Any, stop: Any, chunk: Any, compile: Any = False
) -> None:
    if not isinstance(net, nn.Module):
        raise TypeError(f"the model must be a torch.nn.Module, not {type(net).__name__}")
    if hasattr(net, "_orig_mod"):
        raise ValueError("nothing inside a compiled model can be adapted: compile the tailored one, torch.compile(Tailored(net, ...))")
    if isinstance(net, torch.jit.ScriptModule):
        raise ValueError("nothing inside a scripted or traced model can be adapted: give the module that it was made from")
    own = net._modules.get("tailoring")
    if own is not None and (own.state_dict() or getattr(own, "wants_start", False)):
        raise ValueError(
            "the model saves something under the name 'tailoring' (is it a Tailored that learns its start or its lr?), and so would this "
            "one: give it another name"
        )
    if not callable(loss):
        raise TypeError(f"the tailoring loss must be a function loss(model, x) -> (queries,), not {type(loss).__name__}")
    if isinstance(loss, type):
        raise TypeError(f"the tailoring loss is an object, {loss.__name__}(...), not the class")
    if not isinstance(adapt, Adapter):
        raise TypeError(f"adapt must be an adapter such as CN(), not {adapt!r}")
    if not isinstance(steps, Integral) or isinstance(steps, bool) or steps < 0:
        raise ValueError(f"steps must be a whole number, 0 or more, not {steps!r}")
    if backprop not in get_args(Backprop):
        raise ValueError(f"backprop must be one of {get_args(Backprop)}, not {backprop!r}")
    if keep not in get_args(Keep):
        raise ValueError(f"keep must be one of {get_args(Keep)}, not {keep!r}")
    if stop is not None and (not isinstance(stop, Real) or isinstance(stop, bool) or math.isnan(stop)):
        raise ValueError(f"stop must be a value of the tailoring loss, a number, not {stop!r}")
    if chunk is not None and (not isinstance(chunk, Integral) or isinstance(chunk, bool) or chunk < 1):
        raise ValueError(f"chunk must be a positive whole number, not {chunk!r}")
    if chunk is not None and adapt.shared:
        raise ValueError(f"{adapt!r} adapts to the batch as a whole, so the batch cannot be cut by chunk={chunk}")
    if not isinstance(compile, bool | Mapping):
        raise TypeError(f"compile must be True, False or a dict of options of torch.compile such as {{'mode': ...}}, not {compile!r}")
    if not isinstance(compile, bool) and (taken := {"fullgraph", "dynamic"} & compile.keys()):
        raise ValueError(f"compile sets {min(taken)!r} itself: whole graphs of fixed sizes; give other options of torch.compile")


def check_rule(rule: Rule, *, adapt: Adapter, steps: int, backprop: str, keep: str, recompute: bool, **_: Any) -> None:
    """What an optimiser asks of the other settings."""
    if isinstance(rule, Descent):
        rule.check_steps(steps)
    if not rule.general and adapt.outer_products:
        raise ValueError(
            f"{rule!r} needs a state of tensors, and {adapt!r} keeps outer products: use lr=, or Weights with how='vmap' or how='loop'"
        )
    if not rule.differentiable and backprop != "none":
        raise ValueError(f"{rule!r} cannot be differentiated; use it with backprop='none'")
    if recompute and backprop != "all":
        raise ValueError(
            f"recompute=True saves the activations that backprop='all' keeps; backprop={backprop!r} keeps those of one step only"
        )


def check_losses(losses: Any, queries: int) -> None:
    if not isinstance(losses, Tensor):
        raise TypeError(f"the tailoring loss must return a tensor of shape ({queries},), not {type(losses).__name__}")
    if losses.shape != (queries,):
        hint = "; keep one value per query instead of their mean or sum" if losses.ndim == 0 else ""
        hint = "; sum over all other dimensions, losses.flatten(1).sum(1)" if losses.ndim > 1 and len(losses) == queries else hint
        raise ValueError(
            f"the tailoring loss must return one value per query, shape ({queries},), but its shape is {tuple(losses.shape)}{hint}"
        )
    if not losses.is_floating_point():
        raise TypeError(f"the tailoring loss must return floating-point numbers, not {losses.dtype}")


def check_state(state: Any, identity: State, rows: int | None = None, *, serves: int | None = None) -> None:
    """Of so many `rows`, or such that equally many of the rows it `serves` belong to each."""
    if not isinstance(state, dict) or state.keys() != identity.keys():
        raise ValueError(
            f"a state of this model has the names {list(identity)}, not {list(state) if isinstance(state, dict) else type(state).__name__}"
        )
    for name, entry in state.items():
        count, shape, expected = rows_of({name: entry}), own_shape(entry), own_shape(identity[name])
        if isinstance(entry, Tensor) and len(shape) == 2 and isinstance(identity[name], LowRank) and len(expected) == 1:
            shape = shape[1:]  # a table as it is; outer products do not tell how many rows it has
        if shape != expected or (rows is not None and count != rows):
            told = f"{'rows' if rows is None else f'{rows} row(s)'} of shape {expected}"
            raise ValueError(f"the state's {name!r} has shape {(count, *own_shape(entry))}; expected {told}")
    if serves is not None and (own := rows_of(state)) and serves % own:
        raise ValueError(f"the state has {own} rows, and {serves} rows to answer are not a multiple of that: each serves equally many")


def check_seeds(seeds: Any, queries: int) -> None:
    if not isinstance(seeds, Tensor) or seeds.shape != (queries,) or seeds.dtype != torch.int64:
        told = f"{seeds.dtype} of shape {tuple(seeds.shape)}" if isinstance(seeds, Tensor) else f"a {type(seeds).__name__}"
        raise ValueError(f"seeds must be a tensor of int64, of shape ({queries},), not {told}")


def refuse_mixing_modules(model: nn.Module, structure: Structure | None = None) -> None:
    """Raise if a module would mix the queries of a batch or draw other masks at each inner step."""
    for name, module in _suspects(model, structure):
        here = f"{name or 'the model'} ({type(module).__name__})"
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            if module.training:
                raise ValueError(
                    f"{here} is in training mode: it would mix the queries of the batch and change its statistics at every inner step. "
                    "Call model.eval(), or put the BatchNorm layers alone in eval mode while the rest trains"
                )
            if module.running_mean is None:
                raise ValueError(
                    f"{here} keeps no running statistics, so it mixes the queries of the batch; use track_running_stats=True or GroupNorm"
                )
        elif module.training and _keeps_statistics(module):
            raise ValueError(
                f"{here} is in training mode: it would change its statistics at every inner step. Call model.eval(), or put these layers "
                "alone in eval mode while the rest trains"
            )
        elif module.training and _drops(module):
            draws = "draws other slopes" if isinstance(module, nn.RReLU) else "drops units"
            raise ValueError(
                f"{here} {draws} in training mode: every inner step and the answer would see another mask. "
                "Call model.eval(), or put these layers alone in eval mode while the rest trains"
            )


@found_once
def _suspects(model: nn.Module) -> list[tuple[str, nn.Module]]:
    kinds = nn.modules.batchnorm._NormBase | nn.modules.dropout._DropoutNd | nn.RReLU | nn.RNNBase | nn.MultiheadAttention
    return [(name, module) for name, module in model.named_modules() if isinstance(module, kinds) or _is_spectral(module)]


def _is_spectral(module: nn.Module) -> bool:
    """Whether it iterates for the largest singular value of a weight, by either way of torch.nn.utils."""
    return isinstance(module, _SpectralNorm) or any(isinstance(hook, SpectralNorm) for hook in module._forward_pre_hooks.values())


def _keeps_statistics(module: nn.Module) -> bool:
    return _is_spectral(module) or (isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.track_running_stats)


def _drops(module: nn.Module) -> bool:
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    if isinstance(module, nn.RReLU):
        return module.lower < module.upper
    if isinstance(module, nn.RNNBase):
        return module.dropout > 0 and module.num_layers > 1
    return isinstance(module, nn.MultiheadAttention) and module.dropout > 0
