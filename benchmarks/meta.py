"""A training step of meta-tailoring, by which inner gradients the outer one differentiates: time and memory against plain training.

python benchmarks/meta.py [--device cuda --queries 16384] [--steps 1 2 5 10]
"""

from __future__ import annotations

import torch
from _measure import Cases, Options, Run, bench
from _work import drift, planets
from torch.nn.functional import mse_loss

from tailoring import CN, Tailored, outer_losses


def cases(o: Options) -> Cases:
    x = torch.randn(o.queries, 25, device=o.device)

    def training(steps: int, backprop: str = "none", each: bool = False) -> Run:
        net = planets(o.device)
        model = Tailored(net, drift, adapt=CN(), steps=steps, lr=1e-4, backprop=backprop)  # type: ignore[arg-type]

        def step() -> None:
            if each:
                for loss in outer_losses(model, mse_loss, x, x):
                    loss.backward()
            else:
                sum(outer_losses(model, mse_loss, x, x)).backward()  # type: ignore[union-attr]
            for p in net.parameters():
                p.grad = None

        return step

    def last_only(backprop: str) -> Run:
        net = planets(o.device)
        model = Tailored(net, drift, adapt=CN(), steps=o.steps, lr=1e-4, backprop=backprop)  # type: ignore[arg-type]

        def step() -> None:
            mse_loss(model(x), x).backward()
            for p in net.parameters():
                p.grad = None

        return step

    return {
        "plain": lambda: training(0),
        "none, one loss": lambda: last_only("none"),
        "last, one loss": lambda: last_only("last"),
        "all, one loss": lambda: last_only("all"),
        "none, summed losses": lambda: training(o.steps),
        "none, loss by loss": lambda: training(o.steps, each=True),
        "last, loss by loss": lambda: training(o.steps, "last", each=True),
        "all, summed losses": lambda: training(o.steps, "all"),
    }


if __name__ == "__main__":
    bench(__doc__ or "", cases, "plain", queries=[2048], steps=[2, 5])
