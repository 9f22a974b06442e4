"""What tailoring costs against the plain forward pass, where CN stands after every layer and where after the last ones only.

    python benchmarks/depth.py [--device cuda --queries 16384] [--layers 16] [--steps 1 5 10]

2s + 1 forward units with CN everywhere; what lies below the first CN runs once. "Weights" moves all weights. With several values of one
flag this is the growth of the cost with it, which `_plots.py` draws (in bash):

    for axis in "queries 1 16 256 4096 65536" "steps 1 5 10" "layers 2 4 8 16" "width 64 256 1024"; do
        python benchmarks/depth.py --layers 3 --queries 1024 --$axis --out rows.jsonl    # the later value of a flag counts
    done
    python benchmarks/_plots.py rows.jsonl
"""

from __future__ import annotations

import torch
from _measure import Cases, Options, Run, bench
from _work import compiled, drift, layers, without_gradients
from torch import nn

from tailoring import CN, Adapter, Tailored, Weights


def cases(o: Options) -> Cases:
    x = torch.randn(o.queries, o.width, device=o.device)

    def plain(compile: bool = False) -> Run:
        net: nn.Module = layers(o.layers, o.width, o.device)
        net = compiled(net, o.device) if compile else net
        return without_gradients(lambda: net(x))

    def tailored(adapt: Adapter, compile: bool = False) -> Run:
        model = Tailored(layers(o.layers, o.width, o.device), drift, adapt=adapt, steps=o.steps, lr=1e-4, compile=compile)
        return without_gradients(lambda: model(x))

    def after(last: int) -> CN:
        return CN(*(f"{i}.1" for i in range(o.layers - last, o.layers)))

    return {
        "plain": plain,
        "plain compiled": lambda: plain(True),
        "CN everywhere": lambda: tailored(after(o.layers)),
        "CN everywhere compiled": lambda: tailored(after(o.layers), True),
        "CN last half": lambda: tailored(after(o.layers // 2)),
        "CN last layer": lambda: tailored(after(1)),
        "CN last layer compiled": lambda: tailored(after(1), True),
        "Weights": lambda: tailored(Weights()),
        "Weights compiled": lambda: tailored(Weights(), True),
    }


if __name__ == "__main__":
    bench(__doc__ or "", cases, "plain", queries=[1024], steps=[5], layers=[16], width=[512])
