"""The first updates of a ResNet-110 that is meta-tailored from scratch, on a CPU: with steps of any length it is lost in some thirty.

    python docs/experiments/smoothing-seed1/first_updates.py ~/data > rows.jsonl

A quarter of an hour; the rows are in first-updates.jsonl.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from tailoring.experiments._classifiers import Inner, build, tailored
from tailoring.experiments._images import cifar10_splits
from tailoring.experiments._smoothing_losses import RobustLoss

UPDATES, BATCH, NOISE = 80, 64, 0.49  # the experiment's batches are of 256


def main(folder: Path) -> None:
    images = cifar10_splits(folder, 1000, 32).train
    for name, inner in {"plain": Inner(steps=0), "paper's step": Inner(), "paper's step, clip 1": Inner(clip=1.0)}.items():
        torch.manual_seed(1)
        net = build("resnet110", 10).eval().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        model = tailored(net, inner).prepare(torch.rand(2, 3, 32, 32)) if inner.steps else net
        objective = RobustLoss(model, "noise", NOISE, seed=1, frozen=False)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
        order = torch.Generator().manual_seed(0)
        for update in range(UPDATES):
            rows = torch.randint(len(images), (BATCH,), generator=order)
            with torch.autocast("cpu", torch.bfloat16):
                loss = objective(images.images[rows], images.labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(json.dumps({"name": name, "update": update, "loss": loss.item()}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
