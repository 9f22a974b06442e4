"""A user's first try: one step of eager tailoring of one query, beside the same step written by hand with autograd.

python benchmarks/overhead.py
"""

from __future__ import annotations

import torch
from _measure import Cases, Options, Run, bench
from _work import drift, layers, without_gradients
from torch import Tensor, nn

from tailoring import CN, Tailored

LR = 1e-4


def cases(o: Options) -> Cases:
    net, x = layers(o.layers, o.width, o.device), torch.randn(o.queries, o.width, device=o.device)
    model = Tailored(net, drift, adapt=CN(nn.ReLU), steps=o.steps, lr=LR)

    def scaled(state: list[tuple[Tensor, Tensor]], h: Tensor) -> Tensor:
        for (gamma, beta), layer in zip(state, net, strict=True):
            h = gamma * layer(h) + beta
        return h

    def by_hand() -> object:
        size = (o.queries, o.width)
        state = [(torch.ones(size, requires_grad=True), torch.zeros(size, requires_grad=True)) for _ in net]
        for _ in range(o.steps):
            with torch.enable_grad():
                loss = drift(lambda z, state=state: scaled(state, z), x).sum()
                grads = iter(torch.autograd.grad(loss, [t for pair in state for t in pair]))
            state = [tuple((t - LR * next(grads)).requires_grad_() for t in pair) for pair in state]
        return scaled(state, x)

    def checked() -> Run:
        with torch.no_grad():
            assert torch.allclose(model(x), by_hand(), rtol=1e-4, atol=1e-5)  # type: ignore[arg-type]
        return without_gradients(lambda: model(x))

    return {
        "by hand": lambda: without_gradients(by_hand),
        "tailored": checked,
        "plain": lambda: without_gradients(lambda: net(x)),
    }


if __name__ == "__main__":
    bench(__doc__ or "", cases, "by hand", queries=[1], steps=[1], layers=[3], width=[512])
