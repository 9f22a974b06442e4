"""`Tailored(..., compile=True)`: one compiled program for each of a few batch sizes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor, fx

from ._autotune import as_in_a_chain
from ._cuda_graphs import CudaGraphs, Recorded
from ._passes import own_passes
from ._trees import cat_rows, count_rows, map_tensors, split_rows, tensors

Program = Callable[[Any], Any]
_MOST_PADDING = 4  # a batch may be filled up to so many times its size, before a new size is compiled
_PROGRAMS = 64  # of one model; dynamo's own limit is 8
_REALIZED = {"realize_reads_threshold": 3}  # what several read is written down sooner: states reread what made them at every step
_LIBRARIES = re.compile(r"G\['__import_(torch|tailoring)(_dot_|'\])|G\['__builtins_|__import__\('torch'\)")
_SEARCHES = ("max_autotune", "max_autotune_gemm")  # the options with which Inductor looks for the fastest kernels
_SEARCH_GEMMS = {  # on CUDA: search for the kernels of matrix products, not of convolutions, which takes minutes; print no tables of it
    "max_autotune_gemm": True,
    "max_autotune_conv_backends": "ATEN",
    "autotune_num_choices_displayed": 0,
}
_BATCHED, _PLAIN = ("bmm", "baddbmm"), ("linear", "mm", "addmm")
_RECORDED = {None, "reduce-overhead", "max-autotune"}  # the modes of torch.compile with CUDA graphs


class Compiled:
    """Answers batches of any size with programs for a few sizes: a batch is filled up with copies of its first query.

    The first size, and one at least twice as large as all before, is compiled as it is, any other that no program serves as the next
    power of two. On CUDA the programs are recorded as CUDA graphs. Where queries see each other (`fills=False`) a batch stays as it is.
    """

    def __init__(self, answer: Program, options: Mapping[str, Any], owned: Callable[[], Iterable[Tensor]]):
        code = cast(FunctionType, answer).__code__.replace()  # dynamo counts programs by code, and all models have this one
        self.answer = FunctionType(code, answer.__globals__, code.co_name, None, answer.__closure__)  # type: ignore[attr-defined]
        self.options, self.owned = options, owned
        self.programs: dict[torch.device, Program] = {}
        self.stream: torch.cuda.Stream | None = None
        self.sizes: dict[Any, list[int]] = {}

    def __call__(self, key: Any, x: Any, chunk: int | None, rows: Mapping[int, int | None], *, fills: bool) -> Any:
        """The answers to `x`. `key` is what a program depends on besides the size, `rows` the answers' dimensions of the queries.

        Without `fills` the batch stays as it is: its answers hold what cannot be cut off by rows.
        """
        parts = split_rows(x, chunk) if chunk is not None and count_rows(x) > chunk else [x]
        answers = [self._part(key, part, chunk, rows, fills) for part in parts]
        return answers[0] if len(answers) == 1 else cat_rows(answers, rows)

    def _part(self, key: Any, x: Any, chunk: int | None, rows: Mapping[int, int | None], fills: bool) -> Any:
        queries, device = count_rows(x), tensors(x)[0].device
        size = self._size((key, device), queries, chunk) if fills else queries
        if device not in self.programs:
            self.programs[device] = torch.compile(self.answer, fullgraph=True, dynamic=False, **_options(device, self.options, self.owned))
        if size > queries:
            x = map_tensors(lambda t: torch.cat([t, t[:1].expand(size - queries, *t.shape[1:])]) if t.ndim else t, x)
        with self._in_turn(device):
            try:
                out = self.programs[device](x)
            except torch._dynamo.exc.FailOnRecompileLimitHit:  # pyright: ignore[reportAttributeAccessIssue]
                with torch._dynamo.config.patch(recompile_limit=_PROGRAMS):  # pyright: ignore[reportAttributeAccessIssue]
                    out = self.programs[device](x)
            return _first_rows(out, queries, size, rows, owned=device.type != "cuda" or "backend" not in self.options)

    def _in_turn(self, device: torch.device) -> AbstractContextManager[Any]:
        """On CUDA, after what another stream has begun: a recording's memory serves one call at a time."""
        if device.type != "cuda":
            return nullcontext()
        torch.compiler.cudagraph_mark_step_begin()  # for the graphs of a backend that was given
        stream = torch.cuda.current_stream(device)
        if self.stream is not None and self.stream != stream:
            stream.wait_stream(self.stream)
        self.stream = stream
        return torch.cuda.device(device)

    def _size(self, key: Any, queries: int, chunk: int | None) -> int:
        """The size of the program that answers so many queries."""
        sizes = self.sizes.setdefault(key, [])
        fitting = [size for size in sizes if queries <= size <= _MOST_PADDING * queries]
        if fitting:
            return min(fitting)
        power = 1 << (queries - 1).bit_length()
        exact = queries >= 2 * max(sizes, default=0)
        sizes.append(queries if exact else power if chunk is None else min(power, chunk))
        return sizes[-1]


def _options(device: torch.device, given: Mapping[str, Any], owned: Callable[[], Iterable[Tensor]]) -> dict[str, Any]:
    """A backend as given; else Inductor, with CUDA graphs of our own, and without the repeats that the passes of one batch have."""
    if "backend" in given:
        return dict(given)
    options, for_dynamo, graphs = inductor_options(device, given)
    by_default = options.items() >= _SEARCH_GEMMS.items()
    rest = {name: value for name, value in given.items() if name not in ("mode", "options")}
    if device.type != "cuda" or not graphs:
        return {**rest, "options": options | for_dynamo}
    with torch.cuda.device(device):
        recorder = CudaGraphs()

    def recorded(program: fx.GraphModule, inputs: list[Any]) -> Program:
        fitting = {**options, "max_autotune_gemm": False} if by_default and mostly_batched(program) else options
        with as_in_a_chain() if searches_in(fitting) else nullcontext():
            compiled = torch._inductor.compile(program, inputs, options=fitting)
        return Recorded(cast(Callable[..., Any], compiled), owned, recorder).__call__

    return {**rest, "backend": recorded, "options": for_dynamo}


def inductor_options(device: torch.device, given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], bool]:
    """Inductor's options, dynamo's, and whether CUDA graphs are wanted."""
    mode = given.get("mode")
    asked = {**_of_mode(mode), **given.get("options", {})}
    if device.type == "cuda" and mode is None and not asked.keys() & set(_SEARCHES):
        options = {**_REALIZED, **own_passes(), **_SEARCH_GEMMS, **asked}
    else:
        options = {**_REALIZED, **own_passes(searches=searches_in(asked)), **asked}
    for_dynamo = {"guard_filter_fn": options.pop("guard_filter_fn", _not_of_libraries)}
    graphs = options.pop("triton.cudagraphs", mode in _RECORDED)
    return options, for_dynamo, graphs


def searches_in(options: Mapping[str, Any]) -> bool:
    """Whether Inductor looks for the fastest kernels with these options."""
    return any(map(options.get, _SEARCHES))


def mostly_batched(program: fx.GraphModule) -> bool:
    """Whether most of its products are of matrices that each query has of its own, as in convolutions with exact weights.

    They have many shapes, so a search through their kernels takes minutes, and they read more than they multiply: on an H200 the search
    of ResNet-18's took six of nine minutes and found nothing faster.
    """
    names = [getattr(node.target, "__name__", node.target) for node in program.graph.nodes if node.op in ("call_function", "call_method")]
    return sum(map(names.count, _BATCHED)) > sum(map(names.count, _PLAIN))


def _not_of_libraries(guards: Sequence[Any]) -> list[bool]:
    """Which of its assumptions dynamo is to look at before every call: not at functions and constants of PyTorch, of Python, or of ours."""
    return [_LIBRARIES.match(guard.name) is None for guard in guards]


def _of_mode(mode: str | None) -> dict[str, Any]:
    from torch._inductor import list_mode_options  # takes a second, so only where it is needed

    known = list_mode_options()
    if mode is not None and mode not in known:
        raise ValueError(f"compile knows the modes {', '.join(known)}, not {mode!r}")
    return {} if mode is None else {name: value for name, value in known[mode].items() if name != "triton.cudagraphs"}


def _first_rows(out: Any, queries: int, size: int, rows: Mapping[int, int | None], *, owned: bool) -> Any:
    """The answers without those to the filling; copied, unless `owned`: a backend that was given may overwrite its outputs later."""
    count = [-1]

    def cut(t: Tensor) -> Tensor:
        count[0] += 1
        dim = rows.get(count[0], 0) if t.ndim else None
        part = t if dim is None or queries == size else t.narrow(dim, 0, queries * (t.shape[dim] // size))
        return part if owned else part.clone()

    return map_tensors(cut, out)
