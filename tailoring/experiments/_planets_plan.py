"""The settings of the planets experiment, and which networks a run trains."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from tailoring._inner import Backprop

from . import _nbody
from ._planet_nets import Network


@dataclass(frozen=True)
class Config:
    """Settings of the planets experiment; beside each, where it comes from."""

    HOW: ClassVar = frozenset({"out", "data", "only", "accelerator", "devices", "strategy", "at_once", "chunk"})

    out: Path = Path("runs/planets")
    """folder of the rows, weights and figures"""
    data: Path = Path("runs/data")
    """folder of the generated trajectories, shared by runs"""
    system: _nbody.System = field(default_factory=_nbody.System)
    """the generator's settings"""
    split: _nbody.Split = "trajectory"
    """what the appendix says; family and pair are easier"""
    split_seed: int = 0
    """which trajectories go where"""
    stride: int = 5
    """integration steps between a state and its target: with 5 to 10 the loss is of the paper's size (.041); with 1, a thirtieth"""
    parts: tuple[int, int, int] = (500, 200, 400)
    """trajectories to train, validate and test on (not given in the paper): 50,000 training pairs"""
    seeds: tuple[int, ...] = (0, 1, 2)
    """of initial weights and batches; the paper ran 2"""
    width: int = 512
    """App. E: the best of 128, 256, 512"""
    epochs: int = 1000
    """App. E"""
    batch: int = 2048
    """not given"""
    lr: float = 1e-3
    """Adam with a cosine decay to 0; not given"""
    weight: float = 2e-3
    """of the physics regulariser, App. E"""
    weights: tuple[float, ...] = (0.0, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
    """others to choose from on validation: none, which meta-training is tried with too, and the paper's"""
    meta_lrs: tuple[float, ...] = (1e-3, 1e-2)
    """inner step sizes while meta-training: the paper's, and the best of a sketch"""
    meta_steps: int = 2
    """App. E"""
    lrs: tuple[float, ...] = (1e-4, 1e-3, 3e-3, 1e-2, 3e-2)
    """step sizes of tailoring to choose from on validation: the paper's and larger ones"""
    ttt_lrs: tuple[float, ...] = (1e-3, 1e-2, 3e-2, 1e-1)
    """of batch TTT"""
    output_lrs: tuple[float, ...] = (1e-4, 3e-4, 1e-3, 1e-2, 3e-2)
    """of output optimisation: the paper's, but for 1e-1, which it found too large"""
    weights_lrs: tuple[float, ...] = (1e-5, 1e-4, 3e-4, 1e-3, 3e-3)
    """of tailoring all weights, whose gradients are larger"""
    pair_lrs: tuple[float, ...] = (1e-6, 3e-6, 1e-5, 3e-5)
    """of tailoring the pairwise network, whose scales and shifts act on all twenty pairs at once (1e-4 was too large on validation data)"""
    pair_ttt_lrs: tuple[float, ...] = (1e-6, 1e-5, 3e-5, 1e-4, 3e-4)
    """of batch TTT with it (1e-3 and more were far too large)"""
    pair_weights_lrs: tuple[float, ...] = (1e-6, 3e-6, 1e-5, 3e-5)
    """of tailoring all its weights (1e-4 was too large)"""
    pair_meta_lr: float = 1e-5
    """of meta-training it: the best for tailoring the inductive one, on validation data"""
    path_lr: float = 1e-3
    """of `lrs`, the small one with which Figure 2 follows the path for `output_steps`"""
    steps: int = 10
    """tailoring steps at test time, at most"""
    output_steps: int = 50
    """of output optimisation and of batch TTT, Table 1"""
    ttt_batch: int = 6400
    """Table 1"""
    rollout: int = 100
    """steps of the roll-outs"""
    rollouts: int = 200
    """how many test trajectories are rolled out"""
    extras: tuple[Literal["second-order", "order", "controls", "ablations", "weights", "pairs", "more"], ...] = (
        "controls",
        "order",
        "weights",
        "pairs",
        "more",
        "ablations",
    )
    """what to train besides Table 1's first-order networks; "second-order" is the paper's alone, "order" all of that kind"""
    more: int = 5000
    """training trajectories of "more", early stopping included"""
    only: tuple[str, ...] = ("*",)
    """train and evaluate only what matches these patterns, e.g. 'inductive*'; the rest can follow in another call"""
    accelerator: str = "auto"
    devices: int = 1
    strategy: str = "auto"
    precision: Literal["32-true", "bf16-mixed", "64-true"] = "32-true"
    matmul: Literal["highest", "high"] = "high"
    """"high" allows TF32 on CUDA"""
    at_once: int = 12
    """networks trained side by side on a GPU"""
    chunk: int = 50000
    """queries tailored at once"""


def quick() -> Config:
    """Table 1 and its controls in small: the same code in under two minutes on two cores.

    A demonstration, not evidence: its split is the easy one, and the networks beyond Table 1 (`extras`) are left out.
    """
    return Config(
        out=Path("runs/planets-quick"),
        system=_nbody.System(trajectories=120, slots=1024),
        split="pair",
        parts=(80, 10, 20),
        seeds=(0, 1),  # as many as the paper's
        width=128,
        epochs=15,
        batch=512,
        weights=(),
        meta_lrs=(1e-2,),
        lrs=(1e-3, 1e-2),
        ttt_lrs=(1e-3, 1e-2),
        output_lrs=(1e-3,),
        weights_lrs=(1e-4, 1e-3),
        ttt_batch=2000,
        chunk=10000,
        rollout=20,
        rollouts=20,
        extras=("second-order", "controls"),
    )


@dataclass(frozen=True)
class Training:
    """One network to train. `steps` = 0 is inductive training."""

    method: str
    seed: int
    weight: float
    epochs: int
    steps: int = 0
    lr: float = 0.0
    backprop: Backprop = "none"
    outer: Literal["sum", "each"] = "sum"
    adapt: Literal["cn", "weights", "noise"] = "cn"
    network: Network = "mlp"
    width: int = 512
    norm: bool = False
    clip: float | None = None
    trajectories: int = 500
    stop_early: bool = False
    repeats: int = 1  # updates on each batch, without inner steps

    @property
    def fields(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def name(self) -> str:
        parts = [self.method, f"w{self.weight:g}", f"lr{self.lr:g}" if self.steps else "", f"seed{self.seed}"]
        return "-".join(part for part in parts if part).replace(" ", "_")


def plan(config: Config) -> Iterator[Training]:
    """Every training of a run, the most important first."""
    c = config
    for seed in c.seeds:
        base = Training("inductive", seed, c.weight, c.epochs, width=c.width, trajectories=c.parts[0])
        meta = replace(base, method="meta", steps=c.meta_steps)
        yield base
        yield from (replace(meta, lr=lr) for lr in c.meta_lrs)
        yield from (replace(meta, method="meta-each", lr=lr, outer="each") for lr in c.meta_lrs)
        if "controls" in c.extras:
            yield from (replace(base, weight=w) for w in c.weights)
            for w in (c.weight, *c.weights[:1]):
                yield replace(base, method="inductive-updates", weight=w, epochs=c.meta_steps * c.epochs)
            for w in c.weights[:1]:  # with the larger step size only: one setting is searched at a time
                yield replace(meta, lr=max(c.meta_lrs), weight=w)
                yield replace(meta, method="meta-each", outer="each", lr=max(c.meta_lrs), weight=w)
            yield replace(meta, method="noise", adapt="noise", lr=max(c.meta_lrs))
            yield replace(meta, method="noise-each", adapt="noise", lr=max(c.meta_lrs), outer="each")
            yield replace(meta, method="batches-twice", outer="each", lr=0.0)  # as meta-each, but tailoring does not move
        if "second-order" in c.extras and "order" not in c.extras:
            yield replace(meta, method="second-order", backprop="last", lr=1e-4)
        if "order" in c.extras:
            for lr in (1e-4, 1e-3)[: 2 if seed == c.seeds[0] else 1]:  # the paper's, where 1e-3 diverged; and that one, once
                yield replace(meta, method="second-order", backprop="last", lr=lr)
                yield replace(meta, method="full-second-order", backprop="all", lr=lr)
            yield replace(meta, method="meta-5-steps", steps=5, lr=max(c.meta_lrs))
        if "weights" in c.extras:
            yield replace(meta, method="mammoth", adapt="weights", lr=1e-4)  # falls as fast as with CN and 1e-3
        if "pairs" in c.extras:
            pairs = replace(
                base, method="pairs", network="pairs", width=c.width // 4, weight=0.0, stop_early=True, epochs=max(1, c.epochs // 10)
            )
            yield pairs
            yield replace(pairs, method="pairs-meta", steps=c.meta_steps, lr=c.pair_meta_lr)
            yield replace(pairs, method="pairs-updates", epochs=c.meta_steps * pairs.epochs)
        if "more" in c.extras:
            more = replace(
                base, method="more", trajectories=c.more, epochs=max(1, c.epochs * c.parts[0] // c.more), stop_early=True, weight=0.0
            )
            yield more
            yield replace(more, method="more-meta", steps=c.meta_steps, lr=max(c.meta_lrs))
        if "ablations" in c.extras:  # BatchNorm, which the paper dropped, is a control, too
            yield replace(base, method="batchnorm", norm=True)
            yield replace(base, method="batchnorm-twice", norm=True, outer="each", repeats=c.meta_steps)
        if "ablations" in c.extras and seed == c.seeds[0]:
            yield from (replace(base, method=f"width-{width}", width=width) for width in (c.width // 4, c.width // 2))
            yield replace(meta, method="second-order-clipped", backprop="last", lr=1e-3, clip=1.0)
