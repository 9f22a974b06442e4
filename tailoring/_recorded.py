"""Compiled programs recorded as CUDA graphs, so that one launch starts all kernels of a tailored answer.

`torch.compile` can record, too, for programs that hand their outputs on to each other in place. Its bookkeeping takes longer on the host
than a small network's five steps take on the GPU. A tailored answer is one program, and is copied in the end: little need be kept in mind.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

Run = Callable[..., Sequence[Any]]
Record = Callable[[Callable[[], Sequence[Any]]], tuple[Callable[[], object], Sequence[Any]]]  # of a run: how to replay it, its outputs


class Recorded:
    """The program `run`, recorded at its first call, and again when a tensor that the model owns has moved.

    What the model owns is read where it lies, so weights may train in place; any other input is copied to where the recording reads it.
    The outputs are the recording's own: the next call overwrites them.
    """

    def __init__(self, run: Run, owned: Callable[[], Iterable[Tensor]], record: Record):
        self.run, self.owned, self.record = run, owned, record
        self.recording: _Recording | None = None
        self.refused = False

    def __call__(self, *args: Any) -> Sequence[Any]:
        if self.refused:
            return self.run(*args)
        if self.recording is None or not self.recording.serves(args):
            try:
                self.recording = _Recording(self.run, args, list(self.owned()), self.record)
            except Exception as error:  # from a kernel that waits for the GPU, say: it may still run
                self.refused, self.recording = True, None
                warnings.warn(f"the compiled program runs without a CUDA graph, which could not be recorded: {error}", stacklevel=2)
                return self.run(*args)
        return self.recording.replay(args)


class _Recording:
    def __init__(self, run: Run, args: Sequence[Any], owned: list[Tensor], record: Record):
        ours = {id(t) for t in owned}
        inputs = [(i, t) for i, t in enumerate(args) if isinstance(t, Tensor)]
        if len({t.device for _, t in inputs}) > 1:
            raise ValueError("its inputs are on several devices")  # a number on the CPU would be recorded as it is now
        self.places = [(i, t.data_ptr()) for i, t in inputs if id(t) in ours]
        self.slots = [
            (i, torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=t.device)) for i, t in inputs if id(t) not in ours
        ]
        self.held = given = list(args)  # the weights, too: what a graph reads must not be freed
        for i, slot in self.slots:
            given[i] = slot
        self._fill(args)
        self.again, self.outputs = record(lambda: run(*given))

    def serves(self, args: Sequence[Any]) -> bool:
        return all(args[i].data_ptr() == place for i, place in self.places)

    def replay(self, args: Sequence[Any]) -> Sequence[Any]:
        self._fill(args)
        self.again()
        return self.outputs

    def _fill(self, args: Sequence[Any]) -> None:
        for i, slot in self.slots:
            slot.copy_(args[i])


class CudaGraphs:
    """Records on one stream, into memory that all recordings share: no two replay at once, and no output is read after the next replay."""

    def __init__(self) -> None:
        self.stream, self.pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], Sequence[Any]]) -> tuple[Callable[[], object], Sequence[Any]]:
        graph = torch.cuda.CUDAGraph()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            run()  # libraries choose and load their kernels at the first run, which cannot be recorded
        torch.cuda.current_stream().wait_stream(self.stream)
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
            outputs = run()
        return graph.replay, outputs
