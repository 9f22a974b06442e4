"""A training step of meta-tailoring, by which inner gradients the outer one differentiates: time and memory against plain training.

python benchmarks/meta.py [--device cuda --queries 16384] [--steps 1 2 5 10]
Counted in forward units: 1 for a pass forward, 1 for the gradient by what is inside the network, 1 for that by its weights. So plain
training takes 3, an inner step 2, and to differentiate through an inner step takes 4: its backward pass has as many products as its
forward pass.
"""

from __future__ import annotations

import torch
from _measure import Cases, Options, Run, bench
from _work import drift, planets
from torch.nn.functional import mse_loss

from tailoring import CN, Tailored, outer_losses

COUNTS = {  # by the number of steps
    "plain": lambda s: 3,
    "none, one loss": lambda s: 2 * s + 3,
    "last, one loss": lambda s: 2 * s + 4 + 3,
    "all, one loss": lambda s: (2 + 4) * s + 3,
    "all, one loss, recomputed": lambda s: (2 + 2 + 4) * s + 3,
    "none, summed losses": lambda s: (2 + 3) * s,
    "none, loss by loss": lambda s: (2 + 3) * s,
    "last, summed losses": lambda s: (2 + 4 + 3) * s,
    "last, loss by loss": lambda s: (2 + 4 + 3) * s,
    "all, summed losses": lambda s: (2 + 4 + 3) * s,
    "all, summed losses, recomputed": lambda s: (2 + 2 + 4 + 3 + 1) * s,
}


def cases(o: Options) -> Cases:
    x = torch.randn(o.queries, 25, device=o.device)

    def training(steps: int, backprop: str = "none", *, losses: str = "summed", recompute: bool = False) -> Run:
        net = planets(o.device)
        model = Tailored(net, drift, adapt=CN(), steps=steps, lr=1e-4, backprop=backprop, recompute=recompute)  # type: ignore[arg-type]

        def step() -> None:
            if losses == "one":
                mse_loss(model(x), x).backward()
            elif losses == "each":
                for loss in outer_losses(model, mse_loss, x, x):
                    loss.backward()
            else:
                sum(outer_losses(model, mse_loss, x, x)).backward()  # type: ignore[union-attr]
            for p in net.parameters():
                p.grad = None

        return step

    return {
        "plain": lambda: training(0),
        "none, one loss": lambda: training(o.steps, losses="one"),
        "last, one loss": lambda: training(o.steps, "last", losses="one"),
        "all, one loss": lambda: training(o.steps, "all", losses="one"),
        "all, one loss, recomputed": lambda: training(o.steps, "all", losses="one", recompute=True),
        "none, summed losses": lambda: training(o.steps),
        "none, loss by loss": lambda: training(o.steps, losses="each"),
        "last, summed losses": lambda: training(o.steps, "last"),
        "last, loss by loss": lambda: training(o.steps, "last", losses="each"),
        "all, summed losses": lambda: training(o.steps, "all"),
        "all, summed losses, recomputed": lambda: training(o.steps, "all", recompute=True),
    }


if __name__ == "__main__":
    bench(__doc__ or "", cases, "plain", count=lambda name, o: COUNTS[name](o.steps), queries=[2048], steps=[2, 5])
