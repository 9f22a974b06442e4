"""What the programs in this folder share: time and peak memory of each case, a JSON row for each, and ratios to one of them.

Times of different machines cannot be compared, so none is shown without its ratio to a case that ran beside it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch

from tailoring.experiments._rows import environment

_WARM = 8  # runs before those that are timed: in the first eight passes for a kind of input Tailored looks at the loss's graph
PEERS = ("jax", "higher", "torchopt", "torch_ttt")
Run = Callable[[], object]
Cases = Mapping[str, Callable[[], Run]]  # by name: builds what is to be timed
Options = argparse.Namespace
Count = Callable[[str, Options], float]


def per(run: Run, units: int) -> Run:
    """The same, timed by unit: a run makes so many of them."""

    def made() -> object:
        return run()

    made.units = units  # type: ignore[attr-defined]
    return made


def of_another_library(run: Run, *, wait: Callable[[], object], peak: Callable[[], int | None]) -> Run:
    """The same for a run that returns before it is done, and whose memory on CUDA PyTorch knows nothing of."""

    def made() -> object:
        return run()

    made.wait, made.peak = wait, peak  # type: ignore[attr-defined]
    return made


def bench(doc: str, cases: Callable[[Options], Cases], against: str, count: Count | None = None, **grid: Sequence[Any]) -> None:
    """The command line of a program: measures all cases for every combination of the `grid`, each flag of which takes several values.

    `cases(options)` has one value of each; so has `count(case, options)`, the forward units that a run should take. Every measurement has
    a process of its own: peak memory is a process's, and on CUDA the streams of one library slow the graphs of another.
    """
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    for name, values in grid.items():
        told = f"one or more; by default {' '.join(map(str, values))}"
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(values[0]), nargs="+", default=list(values), help=told)
    parser.add_argument("--only", nargs="+", help=f"measure these cases only, and {against!r}; a name that there is not lists all")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=1, help="PyTorch's, on a CPU; 1 by default")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each measurement")
    parser.add_argument("--rounds", type=int, default=1, help="measure all cases in turns, so many times, and tell the medians")
    parser.add_argument("--matmul", default="highest", choices=["highest", "high"], help="high: TF32 on CUDA")
    parser.add_argument("--out", type=Path, help="append the rows to this file")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1, not {options.rounds}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch finds no GPU here")
    if options.out:
        try:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.open("a").close()
        except OSError as error:
            parser.error(f"--out: {error}")
    torch.set_num_threads(options.threads)
    torch.set_float32_matmul_precision(options.matmul)
    if options.one:
        found = _measure(cases(_single(options, next(_settings(options, grid)))), options.one, options)
        print(json.dumps(found | _machine(options)))  # told here: a parent that asked would stand on the GPU beside those that follow
        return
    for setting in _settings(options, grid):
        try:
            known = cases(_single(options, setting))
        except ValueError as error:
            parser.error(str(error))
        if unknown := [name for name in options.only or () if name not in known]:
            parser.error(f"--only: no case {unknown[0]!r} (there is: {', '.join(known)})")
        names = [name for name in known if not options.only or name in (*options.only, against)]
        names.sort(key=lambda name: name != against)  # what the ratios refer to comes first
        reference: float | None = None
        for name, found in _in_rounds(names, setting, options):
            row = {"program": Path(sys.argv[0]).stem, "name": name, **setting, **found}
            if count is not None:
                row["units"], row["units_against"] = (count(case, _single(options, setting)) for case in (name, against))
            reference = found.get("seconds") if name == against else reference
            _tell(row, setting, against, reference)
            if options.out:
                with options.out.open("a") as file:
                    print(json.dumps(row), file=file, flush=True)


def _settings(options: Options, grid: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for values in itertools.product(*(getattr(options, name) for name in grid)):
        yield dict(zip(grid, values, strict=True))


def _single(options: Options, setting: Mapping[str, Any]) -> Options:
    return argparse.Namespace(**{**vars(options), **setting})


def _in_rounds(names: Sequence[str], setting: Mapping[str, Any], options: Options) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each case and what was found, as soon as its last round is done. Of several rounds, the medians, and what each of them found."""
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for number in range(options.rounds):
        for name in names:
            rounds[name].append(_in_a_process_of_its_own(options, setting, name))
            if number + 1 == options.rounds:
                yield name, _joined(rounds[name])


def _joined(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    failed = next((found for found in rounds if "failed" in found), None)
    if failed or len(rounds) == 1:
        return failed or rounds[0]
    timed = {key: [found[key] for found in rounds] for key in ("seconds", "waited") if key in rounds[0]}
    return {**rounds[0], **{key: median(each) for key, each in timed.items()}, "rounds": timed}


def _measure(cases: Cases, name: str, options: Options) -> dict[str, Any]:
    """Median time of a run, and peak memory: on CUDA above what was held before, on a CPU of the whole process.

    Short runs are started one after another and waited for in the end, whichever library makes them: what a run adds to many. On CUDA
    `waited` is the time of one that is waited for by itself, as a user does who needs the answer. A replayed CUDA graph allocates
    nothing: what it holds on to is in `held_bytes`, all that the case took of the device.
    """
    cuda = options.device == "cuda"
    wait = torch.cuda.synchronize if cuda else lambda: None
    held = torch.cuda.memory_reserved() if cuda else 0  # 0 as long as PyTorch has not been on it
    try:
        run = cases[name]()
        wait = getattr(run, "wait", wait)
        begin = time.perf_counter()
        first_ones = 3 if cuda else 1
        for _ in range(first_ones):
            run()
        wait()
        first = time.perf_counter() - begin
        for _ in range(first_ones, _WARM):
            if time.perf_counter() - begin > 10 * options.seconds + first:  # a loop over single queries, say
                break
            run()
        wait()
        ours = cuda and not hasattr(run, "peak")  # else nothing of PyTorch's is to run there
        before = torch.cuda.memory_allocated() if ours else 0
        if ours:
            torch.cuda.reset_peak_memory_stats()
        times, repeats = [], 1
        begin = time.perf_counter()
        while not times or (time.perf_counter() - begin < options.seconds and len(times) < 200):
            start = time.perf_counter()
            for _ in range(repeats):
                run()
            wait()
            took = time.perf_counter() - start
            times.append(took / repeats)
            if took < 5e-3:  # too short to be timed by itself
                times.clear()
                repeats *= 2
        alone = _waited(run, wait, options.seconds / 3) if cuda else []
    except Exception as error:  # one case that fails, say for want of memory, must not cost the others
        return {"failed": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
    units = getattr(run, "units", 1)
    timed = {"seconds": median(times) / units, "runs": len(times) * repeats, "first_runs": first}
    if not cuda:
        return timed | {"peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    timed["waited"] = median(alone) / units
    if hasattr(run, "peak"):
        return timed | {"peak_bytes": run.peak()}
    return timed | {"peak_bytes": torch.cuda.max_memory_allocated() - before, "held_bytes": torch.cuda.max_memory_reserved() - held}


def _waited(run: Run, wait: Callable[[], object], seconds: float) -> list[float]:
    times: list[float] = []
    end = time.perf_counter() + seconds
    while not times or (time.perf_counter() < end and len(times) < 1000):
        start = time.perf_counter()
        run()
        wait()
        times.append(time.perf_counter() - start)
    return times


def _in_a_process_of_its_own(options: Options, setting: Mapping[str, Any], name: str) -> dict[str, Any]:
    command = [sys.executable, sys.argv[0], "--one", name]
    for flag, value in {**setting, **{k: getattr(options, k) for k in ("device", "threads", "seconds", "matmul")}}.items():
        command += [f"--{flag.replace('_', '-')}", str(value)]
    done = subprocess.run(command, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {"failed": (done.stderr.splitlines() or ["killed"])[-1]}


def _machine(options: Options) -> dict[str, Any]:
    """What it was measured on, and with: to be asked after the measurement, when the libraries are there."""
    device = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    peers = {name: version(name.replace("_", "-")) for name in PEERS if name in sys.modules}
    told = {"device": device, "threads": options.threads, "matmul": options.matmul, "torch": torch.__version__}
    return told | {"cpu": _cpu(), "commit": environment(options.device)["commit"]} | ({"peers": peers} if peers else {})


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.+)", info.read_text()) if info.exists() else []
    return names[0] if names else platform.processor()


def _tell(row: Mapping[str, Any], setting: Mapping[str, Any], against: str, reference: float | None) -> None:
    what = " ".join(f"{name}={value}" for name, value in setting.items())
    if "failed" in row:
        print(f"{what}  {row['name']:<28} failed: {row['failed']}", flush=True)
        return
    waited = f" ({1e3 * row['waited']:.4g} waited for)" if "waited" in row else ""
    memory = "?" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**20:.1f}"
    ratio = f"{row['seconds'] / reference:9.3f} x {against}" if reference else ""
    ratio += f", counted {row['units'] / row['units_against']:.3f}" if "units" in row else ""
    print(f"{what}  {row['name']:<28} {1e3 * row['seconds']:10.4g} ms{waited} {memory:>9} MiB {ratio}", flush=True)
