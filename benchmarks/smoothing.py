"""What a tailored prediction costs a certification: the tailored classifier beside the plain one, per prediction.

    python benchmarks/smoothing.py --device cuda --networks resnet18 resnet110 --batch 2500 --matmul high

One step on one noisy view, as in Sec. 5.4: (1 view + 1 noisy view) forward and backward, and an answer, 5 forward units with a scale and
shift after every block; 2 + 3r where only the last blocks have one, that are the fraction r of the network's multiplications.
"""

from __future__ import annotations

import torch
from _measure import Cases, Options, Run, bench
from _work import compiled, resnet, without_gradients
from torch import nn

from tailoring import CN, Tailored
from tailoring.experiments.certify import SEARCHED
from tailoring.losses import Smooth, input_of
from tailoring.nn import BasicBlock


def cases(o: Options) -> Cases:
    x = torch.rand(o.batch, 3, 32, 32, device=o.device).contiguous(memory_format=torch.channels_last)

    def in_bf16(classifier: nn.Module) -> Run:
        def run() -> object:
            with torch.autocast(o.device, torch.bfloat16, enabled=o.device == "cuda"):
                return classifier(x)

        return without_gradients(run)

    def plain(compile: bool = True, **options: object) -> Run:
        net = resnet(o.networks, o.device)
        return in_bf16(compiled(net, o.device, **options) if compile else net)

    def tailored(last: float = 1.0, compile: bool | dict[str, object] = True) -> Run:
        net = resnet(o.networks, o.device)
        blocks = [name for name, module in net.named_modules() if isinstance(module, BasicBlock)]
        chosen = blocks[len(blocks) - max(1, round(last * len(blocks))) :]
        model = Tailored(net, Smooth(0.1, at=input_of("fc")), adapt=CN(*chosen), lr=0.1, compile=compile)
        return in_bf16(model.eval())

    autotuned: Cases = {
        "plain autotuned": lambda: plain(**SEARCHED),
        "tailored autotuned": lambda: tailored(compile={"options": SEARCHED}),
    }
    return {
        "plain compiled": plain,
        "plain": lambda: plain(False),
        "tailored": lambda: tailored(compile=False),
        "tailored compiled": tailored,
        "last half": lambda: tailored(0.5, compile=False),
        "last half compiled": lambda: tailored(0.5),
        "last quarter compiled": lambda: tailored(0.25),
        "last block compiled": lambda: tailored(0.0),
        **(autotuned if o.device == "cuda" else {}),
    }


if __name__ == "__main__":
    bench(__doc__ or "", cases, "plain compiled", networks=["resnet18"], batch=[8])
