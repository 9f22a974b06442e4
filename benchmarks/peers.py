"""Per-query adaptation with the libraries there are: a loop with higher, torchopt and torch-ttt, torch.func.vmap, JAX's jit(vmap(grad)).

    pip install higher torchopt torch-ttt jax      # those that are missing are reported as failed
    python benchmarks/peers.py [--device cuda --matmul high] [--queries 256 1024]

The planets network and an energy-like loss. Peers run as their own documentation tells users to. higher, torchopt and
torch-ttt move all weights, one query after another (torch-ttt by its only optimiser, Adam); so do vmap and "JAX weights" for all queries at
once. "JAX CN" moves the scales and shifts that CN does. JAX multiplies at the precision of --matmul, too.
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable
from typing import Any

import torch
from _measure import Cases, Options, Run, bench, of_another_library
from _work import by_vmap, drift, planets, without_gradients
from torch import Tensor, nn

from tailoring import CN, Adapter, Tailored, Weights
from tailoring.nn import ResidualMLP

LR = 1e-4


def cases(o: Options) -> Cases:
    torch.manual_seed(1)
    x = torch.randn(o.queries, 25)  # on the CPU: in JAX's process nothing of PyTorch's is to run on a GPU

    def tailored(adapt: Adapter, compile: bool | dict[str, Any]) -> Run:
        model, queries = Tailored(planets(o.device), drift, adapt=adapt, steps=o.steps, lr=LR, compile=compile), x.to(o.device)
        return without_gradients(lambda: model(queries))

    def peer(made: Callable[[nn.Module, Tensor, int], Run]) -> Run:
        return made(planets(o.device), x.to(o.device), o.steps)

    autotuned: Cases = {
        "CN autotuned": lambda: tailored(CN(), {"mode": "max-autotune"}),
        "CN, nothing tuned": lambda: tailored(CN(), {"options": {"max_autotune_gemm": False}}),
    }
    return {
        "CN": lambda: tailored(CN(), False),
        "CN compiled": lambda: tailored(CN(), True),
        **(autotuned if o.device == "cuda" else {}),
        "JAX CN": lambda: with_jax(x, o, weights=False),
        "Weights": lambda: tailored(Weights(), False),
        "Weights compiled": lambda: tailored(Weights(), True),
        "JAX weights": lambda: with_jax(x, o, weights=True),
        "torch.func.vmap": lambda: peer(with_vmap),
        "torch.func.vmap compiled": lambda: peer(functools.partial(with_vmap, compile=True)),
        "higher": lambda: peer(with_higher),
        "torchopt": lambda: peer(with_torchopt),
        "torch-ttt": lambda: peer(with_torch_ttt),
    }


def checked(run: Run, expected: Tensor, x: Tensor, steps: int) -> Run:
    """Peers that take the same steps must come to the same answers."""
    ours = Tailored(planets(str(x.device)), drift, adapt=Weights(), steps=steps, lr=LR)(x)
    assert torch.allclose(expected, ours, rtol=1e-2, atol=1e-3), "the peer computes something else"
    return run


def with_vmap(net: nn.Module, x: Tensor, steps: int, *, compile: bool = False) -> Run:
    run = by_vmap(net, x, steps, LR, compile=compile)
    return checked(run, run(), x, steps)


def with_higher(net: nn.Module, x: Tensor, steps: int) -> Run:
    import higher

    optimizer = torch.optim.SGD(net.parameters(), lr=LR)

    def run() -> Tensor:
        answers = []
        for row in x.split(1):
            with higher.innerloop_ctx(net, optimizer, copy_initial_weights=False, track_higher_grads=False) as (own, inner):
                for _ in range(steps):
                    inner.step(drift(own, row).sum())
                answers.append(own(row).detach())
        return torch.cat(answers)

    return checked(run, run(), x, steps)


def with_torchopt(net: nn.Module, x: Tensor, steps: int) -> Run:
    import torchopt

    optimizer = torchopt.SGD(net.parameters(), lr=LR)  # MetaSGD keeps the graph of every step, which nobody asks for here
    start = copy.deepcopy(net.state_dict())  # without momentum the optimiser has nothing to be put back

    @torch.enable_grad()
    def run() -> Tensor:
        answers = []
        for row in x.split(1):
            for _ in range(steps):
                optimizer.zero_grad()
                drift(net, row).sum().backward()
                optimizer.step()
            answers.append(net(row).detach())
            net.load_state_dict(start)
        return torch.cat(answers)

    return checked(run, run(), x, steps)


def with_torch_ttt(net: nn.Module, x: Tensor, steps: int) -> Run:
    from torch_ttt.engine.base_engine import BaseEngine

    class Engine(BaseEngine):
        def __init__(self) -> None:
            super().__init__()
            self.model = net
            self.optimization_parameters = {"num_steps": steps, "lr": LR}

        def ttt_forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
            return self.model(inputs), drift(self.model, inputs).sum()

    engine = Engine().eval()
    return lambda: torch.cat([engine(row)[0] for row in x.split(1)])


def with_jax(x: Tensor, o: Options, *, weights: bool) -> Run:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if o.device == "cpu":
        os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    import jax.numpy as jnp

    jax.config.update("jax_default_matmul_precision", "float32" if o.matmul == "highest" else "tensorfloat32")
    net = planets("cpu")
    assert isinstance(net, ResidualMLP)
    linears = [
        (jnp.array(m.weight.detach().numpy().T), jnp.array(m.bias.detach().numpy())) for m in net.modules() if isinstance(m, nn.Linear)
    ]
    queries = jnp.array(x.numpy())
    hidden = len(linears) - 1
    start = linears if weights else [(jnp.ones(w.shape[1]), jnp.zeros(w.shape[1])) for w, _ in linears[:-1]]

    def network(state, x):  # as ResidualMLP, with the state's weights, or its scales and shifts
        h = x
        for i in range(hidden):
            w, b = state[i] if weights else linears[i]
            h = jax.nn.relu(h @ w + b)
            h = h if weights else state[i][0] * h + state[i][1]
        w, b = state[-1] if weights else linears[-1]
        return x + h @ w + b

    def loss(state, x):
        return jnp.abs(jnp.sum(network(state, x) ** 2) - jnp.sum(x**2))

    def answer(x):
        state = start
        for _ in range(o.steps):
            slopes = jax.grad(loss)(state, x)
            state = jax.tree.map(lambda p, g: p - LR * g, state, slopes)
        return network(state, x)

    run = jax.jit(jax.vmap(answer))
    found = torch.tensor(run(queries).tolist())
    ours = Tailored(net, drift, adapt=Weights() if weights else CN(), steps=o.steps, lr=LR)(x)
    assert torch.allclose(found, ours, rtol=1e-2, atol=1e-3), "JAX computes something else"
    last = [run(queries)]

    def begin() -> None:
        last[0] = run(queries)

    def peak() -> int | None:
        return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")

    return of_another_library(begin, wait=lambda: last[0].block_until_ready(), peak=peak)


if __name__ == "__main__":
    bench(__doc__ or "", cases, "Weights", queries=[256], steps=[5])
