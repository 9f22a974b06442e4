"""What tailoring costs on real architectures, against the plain forward pass: CN, and exact per-query weights by our rules and by vmap.

    python benchmarks/architectures.py --device cuda --matmul high --networks resnet18 resnet110 transformer --queries 64 --steps 1 5

Residual networks on 32 x 32 images (channels last, batch normalisation in evaluation mode), a small transformer encoder on 32 tokens.
"vmap" is `Weights(how="vmap")`, the whole network under `torch.func.vmap` with a copy of all weights for each query; "vmap by hand" is as
one writes it without us.
"""

from __future__ import annotations

import torch
from _measure import Cases, Options, Run, bench
from _work import by_vmap, compiled, drift, resnet, transformer, without_gradients
from torch import Tensor, nn

from tailoring import CN, Adapter, Tailored, Weights

LR = 1e-6  # small enough for all of them: a query that leaves the finite numbers is looked at twice
TOKENS, WIDTH = 32, 128


def cases(o: Options) -> Cases:
    images = o.networks.startswith("resnet")
    if not images and o.networks != "transformer":
        raise ValueError(f"--networks: no {o.networks!r} (there is: transformer, resnet18, and resnet8, resnet20, ... resnet110)")
    x = queries(o.queries, o.device, images=images)

    def network() -> nn.Module:
        return resnet(o.networks, o.device) if images else transformer(o.device, WIDTH)

    def plain(compile: bool = False) -> Run:
        net = compiled(network(), o.device) if compile else network()
        return without_gradients(lambda: net(x))

    def tailored(adapt: Adapter, compile: bool = False) -> Run:
        model = Tailored(network(), drift, adapt=adapt, steps=o.steps, lr=LR, compile=compile)
        return without_gradients(lambda: model(x))

    return {
        "plain": plain,
        "plain compiled": lambda: plain(True),
        "CN": lambda: tailored(CN()),
        "CN compiled": lambda: tailored(CN(), True),
        "Weights": lambda: tailored(Weights()),
        "Weights compiled": lambda: tailored(Weights(), True),
        "vmap": lambda: tailored(Weights(how="vmap")),
        "vmap compiled": lambda: tailored(Weights(how="vmap"), True),
        "vmap by hand": lambda: by_vmap(network(), x, o.steps, LR),
        "vmap by hand compiled": lambda: by_vmap(network(), x, o.steps, LR, compile=True),
    }


def queries(count: int, device: str, *, images: bool) -> Tensor:
    torch.manual_seed(1)
    if images:
        return torch.rand(count, 3, 32, 32, device=device).contiguous(memory_format=torch.channels_last)
    return torch.randn(count, TOKENS, WIDTH, device=device)


if __name__ == "__main__":
    bench(__doc__ or "", cases, "plain", networks=["resnet18", "transformer"], queries=[4], steps=[1])
