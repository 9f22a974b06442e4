"""Images classified by a linear layer on SimCLR's representations, tailored by the agreement of their views: Sec. 5.3, Figure 4 and TTT."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from ._checks import make_fabric
from ._contrastive_bench import Bench
from ._contrastive_data import draw, load
from ._contrastive_linear import Task
from ._contrastive_plan import Config as Config
from ._contrastive_plan import Variant
from ._contrastive_plan import quick as quick
from ._contrastive_report import report as report
from ._contrastive_results import Setting, best, best_decays, best_of_image, papers, settings
from ._rows import Rows
from ._train import Progress


def run(config: Config, progress: Progress = lambda what, done, total: None) -> Path:
    """Run what has not been run yet; the rows are in `config.out`."""
    images = load(config)
    for labels in config.labels:
        draw(images.train_labels, labels, 0)  # refuses now what could not be labelled at the end
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True  # the encoder sees few shapes, each very often
    fabric = make_fabric(config, devices=1)
    rows = Rows(config.out, "contrastive", config, str(fabric.device))
    bench = Bench(config, images, fabric, progress)
    stages: list[Callable[[Bench, Rows], None]] = [_pretrained, _choose, _linear_layers, _test_time_training, _encoder]
    for number, stage in enumerate(stages):
        progress("groups", number, len(stages))
        stage(bench, rows)
    progress("groups", len(stages), len(stages))
    return config.out


def _pretrained(bench: Bench, rows: Rows) -> None:
    if not rows.has(kind="encoder"):
        parameters = sum(p.numel() for p in bench.net.encoder.parameters())
        loss = bench.contrastive_loss(bench.net)
        rows.add(kind="encoder", parameters=parameters, width=bench.net.width, contrastive_loss=loss, curve=bench.curve)


# What the paper leaves open, and its grid, on validation data


def _choose(bench: Bench, rows: Rows) -> None:
    c = bench.config
    if not rows.has(kind="plain-choice"):
        rows.add(kind="plain-choice", accuracy=_validated(bench, bench.train.plain[None], c.grid_labels, c.grid_seeds)[0])
    for variant in c.variants:
        _try(bench, rows, variant, c.most_views)
    chosen = [best(settings(rows)), best_of_image(settings(rows))]
    for variant, views in product(dict.fromkeys(setting.variant for setting in chosen if setting), c.views):
        _try(bench, rows, variant, views)


def _try(bench: Bench, rows: Rows, variant: Variant, views: int) -> None:
    """All step sizes, after each number of steps."""
    c = bench.config
    if rows.has(kind="choice", variant=asdict(variant), views=views):
        return
    bench.progress(f"{variant.name}, {views} views", 0, 1)
    found = torch.cat([bench.tailored(Setting(variant, views, c.steps, lr), bench.train) for lr in c.lrs])  # (lrs * steps, n, d)
    accuracy = _validated(bench, found, c.grid_labels, c.grid_seeds)
    by_lr = [accuracy[i : i + c.steps] for i in range(0, len(accuracy), c.steps)]
    rows.add(kind="choice", variant=asdict(variant), views=views, lrs=c.lrs, accuracy=by_lr)


def _validated(bench: Bench, features: Tensor, labels: Sequence[int], seeds: Sequence[int]) -> list[list[list[list[float]]]]:
    """Of each set of representations, the accuracy on validation images: [set][labels][seed][decay]."""
    c = bench.config
    tasks = [Task(*key) for key in product(range(len(features)), labels, seeds, c.decays)]
    layers = bench.fit(features, tasks, c.pool, at_most=True)
    plain = features if features.ndim == 3 else bench.train.plain[None].expand(len(features), -1, -1)  # trained on views: asked of images
    found = layers.accuracy(plain[:, c.pool :], bench.labels[c.pool :])
    return torch.tensor(found, dtype=torch.float64).view(len(features), len(labels), len(seeds), len(c.decays)).tolist()


# Figure 4


def _linear_layers(bench: Bench, rows: Rows) -> None:
    """Layers trained on one kind of representation, with the weight decays that are best on validation, and asked of several kinds."""
    c = bench.config
    setting, of_image = best(settings(rows)), best_of_image(settings(rows))
    for trained, (features, asked, own) in (_kinds(bench, setting) | _kinds_of_image(bench, of_image)).items():
        if rows.has(kind="result", trained=trained):
            continue
        bench.progress(f"linear layers: {trained}", 0, 1)
        on = features()[None]
        validation = _validated(bench, on, c.labels, c.seeds)[0]
        decays = [c.decays[place] for place in best_decays(validation)[0]]
        tests = {name: make() for name, make in asked.items()}
        accuracy = dict(zip(tests, _tested(bench, on, [decays], tests.values()), strict=True))
        moved = bench.moved(own) if own and trained.startswith("meta") else None
        named = None if own is None else asdict(own)
        rows.add(kind="result", trained=trained, setting=named, decays=decays, validation=validation, moved=moved, **accuracy)


Make = Callable[[], Tensor]
Kind = tuple[Make, dict[str, Make], Setting | None]  # what layers are trained on; what they are asked of, by method; how that is tailored


def _kinds(bench: Bench, setting: Setting) -> dict[str, Kind]:
    by_paper = papers(bench.config, setting.variant)
    train, test, plain = _tailored(bench, "train"), _tailored(bench, "test"), lambda: bench.test.plain

    def mean() -> Tensor:
        return _mean(bench.test.views)

    return {
        "plain": (lambda: bench.train.plain, {"plain": plain, "tailored": test(setting)}, setting),
        "mean": (lambda: _mean(bench.train.views), {"mean": mean}, None),
        "views": (lambda: bench.train.views, {"augmented": plain, "augmented-mean": mean}, None),
        "meta": (train(setting), {"meta": test(setting), "meta-0": plain}, setting),
        "meta-paper": (train(by_paper), {"meta-paper": test(by_paper)}, by_paper),
    }


def _kinds_of_image(bench: Bench, own: Setting | None) -> dict[str, Kind]:
    """The best setting that does not average views, whose gain cannot be that of averaging; it may be the best of all."""
    if own is None:
        return {}
    by_paper = papers(bench.config, own.variant)
    train, test = _tailored(bench, "train"), _tailored(bench, "test")
    return {
        "plain-image": (lambda: bench.train.plain, {"tailored-image": test(own)}, own),
        "meta-image": (train(own), {"meta-image": test(own), "meta-image-0": lambda: bench.test.plain}, own),
        "meta-image-paper": (train(by_paper), {"meta-image-paper": test(by_paper)}, by_paper),
    }


def _tailored(bench: Bench, part: str) -> Callable[[Setting], Make]:
    return lambda of: lambda: bench.tailored(of, getattr(bench, part))[of.steps - 1]


def _mean(views: Tensor) -> Tensor:
    return views.float().mean(1).half()


def _tested(bench: Bench, on: Tensor, decays: Sequence[Sequence[float]], tests) -> Iterator[list]:
    """Layers on each set of `on`, trained with labels of all training images: test accuracy [labels][seed] for each of `tests`.

    With several sets, a test is (sets, n, d), and its accuracy [set][labels][seed].
    """
    c = bench.config
    tasks = [
        Task(of, labels, seed, decays[of][place]) for of, (place, labels), seed in product(range(len(on)), enumerate(c.labels), c.seeds)
    ]
    layers = bench.fit(on, tasks, c.train)
    for features in tests:
        found = torch.tensor(layers.accuracy(features, bench.test_labels), dtype=torch.float64).view(len(on), len(c.labels), -1)
        yield (found if features.ndim == 3 else found[0]).tolist()


# TTT


def _test_time_training(bench: Bench, rows: Rows) -> None:
    c = bench.config
    if not rows.has(kind="rotation"):
        pool, last = slice(0, c.pool), slice(c.pool, None)
        parts = {"train": bench.train[pool], "validation": bench.train[last], "test": bench.test}
        rows.add(kind="rotation", accuracy={name: bench.rotation_accuracy(part) for name, part in parts.items()})
    if not rows.has(kind="ttt"):
        decays = next(row for row in rows if row["kind"] == "result" and row["trained"] == "plain")["decays"]
        tests = [bench.turned(lr, bench.test) for lr in c.ttt_lrs]
        plain = list(_tested(bench, bench.train.plain[None], [decays], tests))
        on = torch.stack([bench.turned(lr, bench.train) for lr in c.ttt_lrs])
        (meta,) = _tested(bench, on, [decays] * len(on), [torch.stack(tests)])
        rows.add(kind="ttt", lrs=c.ttt_lrs, steps=c.steps, plain=plain, meta=meta)


# CN on the encoder


def _encoder(bench: Bench, rows: Rows) -> None:
    """CN against Shift and nothing, with labels among the first training images only: every step goes through the encoder."""
    c = bench.config
    if not c.cn_train or rows.has(kind="cn"):
        return
    least = int(torch.bincount(bench.images.train_labels[: c.cn_train], minlength=10).min())
    labels = [n for n in c.labels if n <= least]
    if not labels:
        raise ValueError(f"with {least} images of a class among the first {c.cn_train}, none of --labels can be had: set --cn-train")
    asked = slice(c.pool, c.pool + c.cn_validation)
    for lr in c.cn_lrs:
        if not rows.has(kind="cn-choice", lr=lr):
            train = bench.encoder_tailored(bench.images.train[: c.cn_train], 0, lr)
            validation = bench.encoder_tailored(bench.images.train[asked], c.pool, lr)
            found = _small(bench, train, validation, bench.labels[asked], labels, c.decays)
            rows.add(kind="cn-choice", lr=lr, labels=labels, accuracy=found)
    tried = [(r["lr"], steps, a) for r in rows if r["kind"] == "cn-choice" for steps, a in enumerate(r["accuracy"], 1)]
    lr, steps, _ = max(tried, key=lambda one: best_decays(one[2])[1])
    setting = best(settings(rows))
    first, some, asked_last = slice(0, c.cn_train), bench.train[asked], bench.test[: c.cn_test]
    sets = {
        "plain": (bench.train.plain[first], some.plain, asked_last.plain),
        "shift": tuple(bench.tailored(setting, part)[setting.steps - 1] for part in (bench.train[first], some, asked_last)),
        "cn": tuple(
            bench.encoder_tailored(images, start, lr)[steps - 1]
            for images, start in (
                (bench.images.train[first], 0),
                (bench.images.train[asked], c.pool),
                (bench.images.test[: c.cn_test], len(bench.images.train)),
            )
        ),
    }
    results = {}
    for name, (train, validation, test) in sets.items():
        places = best_decays(_small(bench, train[None], validation[None], bench.labels[asked], labels, c.decays)[0])[0]
        found = _small(bench, train[None], test[None], bench.test_labels[: c.cn_test], labels, c.decays)[0]
        results[name] = [[of[place] for of in seeds] for seeds, place in zip(found, places, strict=True)]  # [labels][seed]
    rows.add(kind="cn", labels=labels, lr=lr, steps=steps, setting=asdict(setting), **results)


def _small(bench: Bench, train: Tensor, asked: Tensor, truth: Tensor, labels: Sequence[int], decays: Sequence[float]) -> list:
    """[set][labels][seed][decay], with labels among as many of the first training images as `train` (sets, n, d) has."""
    seeds = bench.config.seeds
    tasks = [Task(*key) for key in product(range(len(train)), labels, seeds, decays)]
    found = bench.fit(train, tasks, train.shape[1]).accuracy(asked, truth)
    return torch.tensor(found, dtype=torch.float64).view(len(train), len(labels), len(seeds), len(decays)).tolist()
