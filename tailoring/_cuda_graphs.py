"""Compiled programs recorded as CUDA graphs, so that one launch starts all kernels of a tailored answer.

`torch.compile` can record, too, for programs that hand their outputs on to each other in place. Its bookkeeping takes longer on the host
than a small network's five steps take on the GPU. A tailored answer is one program, and is copied in the end: little need be kept in mind.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

Run = Callable[..., Sequence[Any]]
_MOST = 8  # recordings of one program, before it is taken that its weights will go on moving


class Recorder(Protocol):
    def record(self, run: Callable[[], Sequence[Any]]) -> tuple[Callable[[], object], Sequence[Any]]:
        """How to replay a run, and where its outputs are then."""
        ...


class Recorded:
    """The program `run`, recorded at its first call, and again when a tensor that the model owns has moved.

    What the model owns is read where it lies, so weights may train in place; any other input is copied to where the recording reads it.
    A program that changes its inputs is run as it is.
    """

    def __init__(self, run: Run, owned: Callable[[], Iterable[Tensor]], recorder: Recorder):
        self.run, self.owned, self.recorder = run, owned, recorder
        self.recording: _Recording | None = None
        self.recordings, self.refused = 0, False

    def __call__(self, *args: Any) -> Sequence[Any]:
        if self.refused:
            return self.run(*args)
        if self.recording is not None and self.recording.serves(args):
            return self.recording.replay(args)
        before = _versions(args)
        outputs = self.run(*args)  # loads what cannot be loaded while recording
        if _versions(args) != before:
            self._refuse("it changes its inputs")
        elif self.recordings == _MOST:
            self._refuse("weights move elsewhere again and again")
        else:
            self.recordings += 1
            try:
                self.recording = _Recording(self.run, args, list(self.owned()), self.recorder)
            except Exception as error:  # from a kernel that waits for the GPU, say: it has just run without
                self._refuse(str(error))
        return outputs

    def _refuse(self, reason: str) -> None:
        self.refused, self.recording = True, None
        warnings.warn(f"the compiled program runs without a CUDA graph: {reason}", stacklevel=3)


class _Recording:
    def __init__(self, run: Run, args: Sequence[Any], owned: list[Tensor], recorder: Recorder):
        ours = {id(t) for t in owned}
        inputs = [(i, t) for i, t in enumerate(args) if isinstance(t, Tensor)]
        if len({t.device for _, t in inputs}) > 1:
            raise ValueError("its inputs are on several devices")  # a number on the CPU would be recorded as it is now
        self.numbers = [(i, value) for i, value in enumerate(args) if not isinstance(value, Tensor)]
        self.places = [(i, t.data_ptr()) for i, t in inputs if id(t) in ours]
        self.slots = [
            (i, torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=t.device)) for i, t in inputs if id(t) not in ours
        ]
        self.held = given = list(args)  # the weights, too: what a graph reads must not be freed
        for i, slot in self.slots:
            given[i] = slot
        self._fill(args)
        self.again, self.outputs = recorder.record(lambda: run(*given))

    def serves(self, args: Sequence[Any]) -> bool:
        for i, place in self.places:  # in plain loops, since this is asked before every call
            if args[i].data_ptr() != place:
                return False
        for i, slot in self.slots:
            if args[i].shape != slot.shape or args[i].stride() != slot.stride():
                return False
        return all(args[i] == value for i, value in self.numbers)

    def replay(self, args: Sequence[Any]) -> Sequence[Any]:
        self._fill(args)
        self.again()
        return [out.clone() if isinstance(out, Tensor) else out for out in self.outputs]  # the next replay overwrites them

    def _fill(self, args: Sequence[Any]) -> None:
        for i, slot in self.slots:
            _once(slot).copy_(_once(args[i]))


def _once(t: Tensor) -> Tensor:
    """Without the repeats of an expanded tensor."""
    if 0 in t.stride():
        for dim, stride in enumerate(t.stride()):
            t = t.narrow(dim, 0, min(1, t.shape[dim])) if stride == 0 else t
    return t


def _versions(args: Sequence[Any]) -> list[int]:
    return [t._version for t in args if isinstance(t, Tensor) and not t.is_inference()]


class CudaGraphs:
    """Records on one stream, into memory that all recordings share: no two replay at once, and no output is read after the next replay.

    Nothing ever runs on that stream: in a process that has used two, each kernel of a graph takes 0.3 us longer (pytorch issue 161104).
    """

    def __init__(self) -> None:
        self.stream, self.pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], Sequence[Any]]) -> tuple[Callable[[], object], Sequence[Any]]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
            outputs = run()
        return graph.replay, outputs
