"""Which mode a call comes in, and what that asks for."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from ._trees import map_tensors


def in_inference_mode() -> bool:
    """Never while dynamo looks, which leaves its graph at the question."""
    return not is_dynamo_compiling() and torch.is_inference_mode_enabled()


def leaves_inference_mode(method: Callable[..., Any]) -> Callable[..., Any]:
    """Inference tensors cannot take part in the inner gradients, so leave that mode and clone them."""
    kinds = [p.kind for p in inspect.signature(method).parameters.values()]
    most = math.inf if inspect.Parameter.VAR_POSITIONAL in kinds else kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD) - 1

    @functools.wraps(method)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) > most:
            raise TypeError(f"{method.__name__} takes all inputs of the model as one, Inputs(ids, mask=mask), not one by one")
        if not in_inference_mode():
            return method(self, *args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            args, kwargs = map_tensors(lambda t: t.clone() if t.is_inference() else t, (args, kwargs))
            return method(self, *args, **kwargs)

    return wrapped
