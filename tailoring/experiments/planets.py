"""Five planets that should conserve energy and momentum: Sec. 5.1, Table 1 and Figure 2, with their controls and beyond."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from itertools import groupby
from pathlib import Path

import torch
from lightning_fabric import Fabric

from . import _nbody
from ._cache import checksum
from ._checks import at_least_one, make_fabric, not_empty
from ._planets_bench import Bench, evaluate, trivial
from ._planets_plan import Config as Config
from ._planets_plan import Training, plan
from ._planets_plan import quick as quick
from ._planets_report import report as report
from ._rows import Rows, read
from ._train import Progress, Schedule, train, trained


def run(config: Config, progress: Progress = lambda what, done, total: None) -> Path:
    """Run what has not been run yet; the rows are in `config.out`."""
    at_least_one(config, "stride", "width", "epochs", "batch", "ttt_batch", "rollout", "rollouts", "at_once", "chunk")
    not_empty(config, "seeds", "lrs", "ttt_lrs", "output_lrs")
    torch.set_float32_matmul_precision(config.matmul)
    fabric = make_fabric(config, devices=config.devices, strategy=config.strategy)
    chosen = _chosen(config, fabric.world_size)
    fabric.launch()
    rows = Rows(config.out, "planets", config, str(fabric.device)) if fabric.is_global_zero else None
    fabric.barrier()
    before = list(read(config.out / "rows.jsonl"))
    finished = {row["name"] for row in before if row["kind"] == "done"}
    if finished >= {t.name for t in chosen} and any(row["kind"] == "data" for row in before):
        return config.out  # where the trajectories are not at hand, to make them again takes long
    with fabric.rank_zero_first():
        data = _nbody.load(
            config.data,
            config.system,
            stride=config.stride,
            split=config.split,
            parts=config.parts,
            seed=config.split_seed,
            more=config.more if "more" in config.extras else 0,
            progress=progress,
        )
    bench = Bench(config, data, fabric.device)
    if rows is not None and not rows.has(kind="data"):
        rows.add(kind="data", checksum=checksum({"x": data.test.x, "y": data.test.y}), trivial=trivial(bench))
    fabric.barrier()
    groups = list(_groups(config, [t for t in chosen if t.name not in finished], fabric))
    for number, group in enumerate(groups):
        progress("groups", number, len(groups))
        _train(group, bench, data, fabric, progress)
        if rows is not None:
            for done, t in enumerate(group):
                progress(f"evaluation of {t.name}", done, len(group))
                evaluate(bench, t, build_network(bench, t), rows)
                rows.add(kind="done", name=t.name, training=t.fields, validation=_trained(bench, t)[1])
        fabric.barrier()
    return config.out


def _chosen(config: Config, processes: int) -> list[Training]:
    """What `--only` leaves of the plan; what cannot be trained is refused before anything runs."""
    chosen = [t for t in dict.fromkeys(plan(config)) if any(fnmatchcase(t.name, pattern) for pattern in config.only)]
    if not chosen:
        raise ValueError(f"nothing matches --only {' '.join(config.only)}; a run trains: {', '.join(t.name for t in plan(config))}")
    if processes > 1 and (alone := [t.name for t in chosen if t.outer == "each"]):
        raise ValueError(
            f"{alone[0]}, a step after each inner step (the appendix's outer loop), trains on one device only: use --devices 1, or --only"
        )
    return chosen


def _groups(config: Config, chosen: list[Training], fabric: Fabric) -> Iterator[list[Training]]:
    """Trainings that run side by side: of equal length, as many as the device may hold."""
    size = config.at_once if fabric.device.type == "cuda" else 1
    alike = sorted(chosen, key=lambda t: (t.network, t.adapt, t.trajectories, t.epochs, t.stop_early))
    if size == 1:
        yield from ([t] for t in chosen)
        return
    for _, group in groupby(alike, key=lambda t: (t.network, t.adapt, t.trajectories, t.epochs, t.stop_early)):
        members = list(group)
        yield from (members[i : i + size] for i in range(0, len(members), size))


def _train(group: list[Training], bench: Bench, data: _nbody.Data, fabric: Fabric, progress: Progress) -> None:
    folder = bench.config.out / "weights"
    todo = [t for t in group if trained(folder, t.name) is None]
    if not todo:
        return
    part = data.train[: todo[0].trajectories * bench.config.system.kept].to(fabric.device)
    schedule = Schedule(todo[0].epochs, bench.config.batch, bench.config.lr)
    train([bench.learner(t) for t in todo], part.x, part.y, schedule, fabric=fabric, folder=folder, progress=progress)


def build_network(bench: Bench, t: Training) -> torch.nn.Module:
    """The network that a training left, ready to predict."""
    net = bench.network(t)
    net.load_state_dict(_trained(bench, t)[0])
    return net.eval()


def _trained(bench: Bench, t: Training) -> tuple[dict[str, torch.Tensor], list[tuple[int, float]]]:
    found = trained(bench.config.out / "weights", t.name, best=t.stop_early)
    assert found is not None, "evaluation comes after training"
    return found
