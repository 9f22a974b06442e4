"""What exact per-query weights cost: `Weights` beside CN, the plain network, vmap and a loop over the queries.

    python benchmarks/weights.py [--device cuda --matmul high] [--queries 256 1024]

The planets network (3 x 512, residual) and an energy-like loss.
"""

from __future__ import annotations

import torch
from _measure import Cases, Options, Run, bench
from _work import drift, planets, without_gradients
from torch import Tensor, nn
from torch.func import functional_call

from tailoring import CN, Adapter, Tailored, Weights

LR = 1e-4


def cases(o: Options) -> Cases:
    x = torch.randn(o.queries, 25, device=o.device)

    def tailored(adapt: Adapter, compile: bool = False) -> Run:
        model = Tailored(planets(o.device), drift, adapt=adapt, steps=o.steps, lr=LR, compile=compile)
        return without_gradients(lambda: model(x))

    def plain() -> Run:
        net = planets(o.device)
        return without_gradients(lambda: net(x))

    def loop() -> Run:
        net = planets(o.device)
        return lambda: torch.cat([by_hand(net, row, o.steps) for row in x.split(1)])

    return {
        "plain": plain,
        "CN": lambda: tailored(CN()),
        "CN compiled": lambda: tailored(CN(), True),
        "Weights": lambda: tailored(Weights()),
        "Weights compiled": lambda: tailored(Weights(), True),
        "vmap": lambda: tailored(Weights(how="vmap")),
        "vmap compiled": lambda: tailored(Weights(how="vmap"), True),
        "loop by hand": loop,
    }


def by_hand(net: nn.Module, x: Tensor, steps: int) -> Tensor:
    """Algorithm 1 as anyone would write it, for one query."""
    theta = {name: p.detach().requires_grad_() for name, p in net.named_parameters()}
    for _ in range(steps):
        loss = drift(lambda z, theta=theta: functional_call(net, theta, (z,)), x).sum()
        grads = torch.autograd.grad(loss, list(theta.values()))
        theta = {name: (p - LR * g).detach().requires_grad_() for (name, p), g in zip(theta.items(), grads, strict=True)}
    return functional_call(net, theta, (x,)).detach()


if __name__ == "__main__":
    bench(__doc__ or "", cases, "Weights", queries=[256], steps=[5])
