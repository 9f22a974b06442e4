"""Inductor's search for the fastest kernels, timed as they will run: one after another in a CUDA graph, on what was just written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_CACHE = 1 << 16  # bytes that are overwritten before each trial, to empty a cache: all of the GPU's, if Inductor is asked
_AHEAD = 80_000  # cycles, 40 us: longer than the host takes to start a trial


@contextmanager
def as_in_a_chain(pause: Callable[[int], object] | None = None) -> Iterator[None]:
    """While the block runs, trials find what they read in the cache, and the host is ahead of the GPU.

    Inductor empties the cache before each trial, and starts trials from Python. If that takes longer than a kernel of some microseconds
    does, the host's hesitation is timed instead, and the kernel chosen by chance. Here the GPU pauses (`pause(cycles)`) until all trials of
    a kernel are in its queue.
    """
    from torch._inductor.runtime.benchmarking import benchmarker  # takes a second to import, so only where it is needed

    pause = pause or torch.cuda._sleep
    own, make = vars(benchmarker), getattr(benchmarker, "get_event_pairs", None)
    before = dict(own)

    def ahead(trials: int, *args: Any, **kwargs: Any) -> Any:
        pause(trials * _AHEAD)
        return make(trials, *args, **kwargs)  # type: ignore[misc]

    if make is not None:  # else another benchmarker was asked for in Inductor's configuration: it stays as it is
        own.update(L2_cache_size=_CACHE, get_event_pairs=ahead)
    try:
        yield
    finally:
        own.clear()
        own.update(before)
