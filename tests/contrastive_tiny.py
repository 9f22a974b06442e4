"""The contrastive experiment, so small that a run of all of it is a test."""

from __future__ import annotations

from tailoring.experiments._contrastive_plan import Config, Variant

TINY = Config(
    images="made",
    train=300,
    test=120,
    validation=100,
    encoder="resnet8",
    epochs=3,
    batch=100,
    hidden=16,
    features=8,
    views=(2, 4),
    steps=2,
    lrs=(0.1, 1.0),
    paper_lr=1.0,
    variants=(Variant("anchor"), Variant("shared"), Variant("mean"), Variant("each"), Variant("anchor", 16)),
    labels=(3, 10),
    seeds=(0, 1),
    grid_labels=(3, 40),
    grid_seeds=(0,),
    decays=(1e-3, 1e-1),
    linear_steps=40,
    linear_batch=32,
    rotation_epochs=2,
    ttt_lrs=(0.0, 1.0),
    cn_lrs=(1e-2,),
    cn_train=60,
    cn_validation=20,
    cn_test=20,
    accelerator="cpu",
    precision="32-true",
    compile=False,
    chunk=100,
    cn_chunk=30,
)
