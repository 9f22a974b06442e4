"""What tailoring costs against the plain forward pass, where CN stands after every layer and where after the last ones only.

    python benchmarks/depth.py [--device cuda --queries 16384] [--layers 16] [--steps 1 5 10]

2s + 1 forward units with CN everywhere; what lies below the first CN runs once.
"""

from __future__ import annotations

import torch
from _measure import Cases, Options, Run, bench
from _work import drift, layers, without_gradients

from tailoring import CN, Tailored


def cases(o: Options) -> Cases:
    x = torch.randn(o.queries, o.width, device=o.device)

    def plain(compile: bool = False) -> Run:
        net = layers(o.layers, o.width, o.device)
        if compile:
            net.compile(dynamic=False)
        return without_gradients(lambda: net(x))

    def tailored(last: int, compile: bool = False) -> Run:
        at = [f"{i}.1" for i in range(o.layers - last, o.layers)]
        model = Tailored(layers(o.layers, o.width, o.device), drift, adapt=CN(*at), steps=o.steps, lr=1e-4, compile=compile)
        return without_gradients(lambda: model(x))

    return {
        "plain": plain,
        "plain compiled": lambda: plain(True),
        "CN everywhere": lambda: tailored(o.layers),
        "CN everywhere compiled": lambda: tailored(o.layers, True),
        "CN last half": lambda: tailored(o.layers // 2),
        "CN last layer": lambda: tailored(1),
        "CN last layer compiled": lambda: tailored(1, True),
    }


if __name__ == "__main__":
    bench(__doc__ or "", cases, "plain", queries=[1024], steps=[5], layers=[16], width=[512])
