"""What exact per-query weights cost: time and peak memory of `Weights` beside CN, the plain network, vmap and a loop.

    python benchmarks/weights.py [--device cuda] [--threads 1] [--out rows.jsonl]

The planets network (3 x 512, residual) and an energy-like loss; one JSON row per measurement, ratios at the end. Absolute times are
one machine's; the ratios are what it is for.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call

from tailoring import CN, Tailored, Weights
from tailoring.nn import ResidualMLP

ADAPTERS = {"CN": CN, "rules": Weights, "vmap": lambda: Weights(how="vmap")}
NAMES = ["plain", *ADAPTERS, "loop"]


def drift(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return (model(x).square().sum(1) - x.square().sum(1)).abs()


class Loop(nn.Module):
    """Algorithm 1 as anyone would write it: one query after another."""

    def __init__(self, net: nn.Module, steps: int, lr: float):
        super().__init__()
        self.net, self.steps, self.lr = net, steps, lr

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.answer(row) for row in x.split(1)])

    @torch.enable_grad()
    def answer(self, x: Tensor) -> Tensor:
        theta = {name: p.detach().requires_grad_() for name, p in self.net.named_parameters()}
        for _ in range(self.steps):
            loss = drift(lambda z, theta=theta: functional_call(self.net, theta, (z,)), x).sum()
            grads = torch.autograd.grad(loss, list(theta.values()))
            theta = {name: (p - self.lr * g).detach().requires_grad_() for (name, p), g in zip(theta.items(), grads, strict=True)}
        return functional_call(self.net, theta, (x,)).detach()


def measure(name: str, queries: int, steps: int, device: str, compiled: bool, seconds: float) -> dict[str, object]:
    """Median time and peak memory above the start, of one tailored prediction of the whole batch."""
    torch.manual_seed(0)
    net: nn.Module = ResidualMLP(25).to(device)
    x = torch.randn(queries, 25, device=device)
    if name in ADAPTERS:
        model: nn.Module = Tailored(net, drift, adapt=ADAPTERS[name](), steps=steps, lr=1e-4).prepare(x)
    else:
        model = net if name == "plain" else Loop(net, steps, lr=1e-4)
    run = torch.compile(model) if compiled else model
    times: list[float] = []
    with torch.no_grad():
        begin = time.perf_counter()
        run(x)
        if device == "cuda":
            run(x)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        while not times or (time.perf_counter() - begin < seconds and len(times) < 200):
            start = time.perf_counter()
            run(x)
            if device == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
    memory = torch.cuda.max_memory_allocated() - before if device == "cuda" else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    row = {"name": name, "queries": queries, "steps": steps, "device": device, "compiled": compiled, "runs": len(times)}
    row |= {"seconds": sorted(times)[len(times) // 2], "peak_bytes": memory}
    return row | {"threads": torch.get_num_threads(), "torch": torch.__version__}


def in_a_process_of_its_own(options: argparse.Namespace, name: str, queries: int, compiled: bool) -> dict[str, object]:
    """Peak memory of the CPU is that of a process, so each measurement has one."""
    command = [
        sys.executable,
        __file__,
        "--one",
        name,
        "--queries",
        str(queries),
        "--steps",
        str(options.steps),
        "--device",
        options.device,
    ]
    command += ["--threads", str(options.threads), "--seconds", str(options.seconds)] + ["--compile"] * compiled
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return {"name": name, "queries": queries, "failed": (done.stderr.strip().splitlines() or ["killed"])[-1]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--queries", type=int, nargs="+", default=[256])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--names", nargs="+", default=NAMES)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.one:
        print(json.dumps(measure(options.one, options.queries[0], options.steps, options.device, options.compile, options.seconds)))
        return
    for queries in options.queries:
        plan = [(name, False) for name in options.names]
        plan += [(name, True) for name in options.names if options.compile and name not in ("vmap", "loop")]
        reference: float | None = None
        for name, compiled in sorted(plan, key=lambda item: item != ("rules", False)):  # what the ratios refer to comes first
            row = in_a_process_of_its_own(options, name, queries, compiled)
            if options.out:
                with options.out.open("a") as file:
                    print(json.dumps(row), file=file, flush=True)
            if "failed" in row:
                print(f"{queries:>6} {name:<18} failed: {row['failed']}", flush=True)
                continue
            seconds, memory = float(str(row["seconds"])), float(str(row["peak_bytes"]))
            reference = seconds if (name, compiled) == ("rules", False) else reference
            ratio = f"{seconds / reference:9.2f} x rules" if reference else ""
            print(
                f"{queries:>6} {name + ' (compiled)' * compiled:<18} {1e3 * seconds:10.2f} ms {memory / 2**20:10.1f} MiB {ratio}",
                flush=True,
            )


if __name__ == "__main__":
    main()
