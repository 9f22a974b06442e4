"""Training on Lightning Fabric: several networks side by side, checkpoints, and going on after a kill as if nothing had happened."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from lightning_fabric import Fabric
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn

from ._cache import make_folder, write_whole
from ._parts import halved, load_parts, remove_parts, save_parts

Progress = Callable[[str, int, int], None]  # what, done, of how many


class Objective(Protocol):
    """What is minimised: `forward(x, y)` is the loss of a batch, `losses(x, y)` the terms that it sums."""

    def __call__(self, x: Any, y: Any) -> Tensor: ...
    def losses(self, x: Any, y: Any) -> Iterator[Tensor]: ...
    def parameters(self) -> Iterator[nn.Parameter]: ...


@dataclass(frozen=True)
class Learner:
    """One network in training. Batches come in an order that depends on `seed` and epoch alone."""

    name: str  # of its files
    net: nn.Module
    objective: nn.Module  # an Objective around the net
    seed: int
    each: bool = False  # step after each of the objective's losses (the appendix's outer loop) instead of after their sum
    validate: Callable[[nn.Module], float] | None = None
    on_device: Callable[[], object] | None = None  # called when the objective has come to where it will stay
    on_epoch: Callable[[int], None] | None = None  # told before each epoch: what is drawn in it may depend on the epoch, not on a past


@dataclass(frozen=True)
class Schedule:
    epochs: int
    batch: int
    lr: float
    validations: int = 20  # how often the networks are validated, evenly over the epochs
    checkpoint_seconds: float = 30.0
    travel: bool = False  # checkpoints also in small files, to go on with on another machine: nearly, not exactly, where it stopped
    optimizer: Literal["adam", "sgd"] = "adam"  # sgd: with momentum 0.9
    weight_decay: float = 0.0
    decay: Literal["cosine", "thirds"] = "cosine"  # to 0; or by 10 after each third of the epochs

    def rate(self, done: float) -> float:
        """The step size after this part of the training, 0 to 1."""
        return self.lr * ((1 + math.cos(math.pi * done)) / 2 if self.decay == "cosine" else 0.1 ** int(3 * done))


@dataclass
class _Run:
    """A learner as Fabric runs it."""

    learner: Learner
    module: Any
    optimizer: Any
    kind: str  # of the optimizer
    best: dict[str, Tensor] = field(default_factory=dict)
    curve: list[tuple[int, float]] = field(default_factory=list)

    def step(self, fabric: Fabric, x: Tensor, y: Tensor) -> None:
        losses = self.learner.objective.losses(x, y) if self.learner.each else iter([self.module(x, y)])  # type: ignore[operator]
        for loss in losses:
            self.optimizer.zero_grad()
            fabric.backward(loss)
            self.optimizer.step()

    def tensors(self) -> dict[str, Tensor]:
        """Everything that the next step depends on, by name; the tensors themselves."""
        found = {f"net.{name}": t for name, t in self.learner.net.state_dict().items()}
        for i, p in enumerate(self.learner.net.parameters()):
            found |= {f"{self.kind}.{i}.{name}": t for name, t in self.optimizer.optimizer.state[p].items()}
        return found | {f"best.{name}": t for name, t in self.best.items()}


def train(learners: list[Learner], x: Tensor, y: Tensor, schedule: Schedule, *, fabric: Fabric, folder: Path, progress: Progress) -> None:
    """Train the learners in lockstep on (x, y) and leave `folder/NAME.safetensors` (final) and `NAME.best.safetensors` (if validated).

    On CUDA one graph holds a step of all of them, each in a stream of its own: small networks leave most of a card idle. Data that lies
    elsewhere (a file of images too large for the card) is brought batch by batch, without a graph. Killed at any moment, the next call
    goes on from the last checkpoint, to the same result.
    """
    if any(learner.each for learner in learners) and fabric.world_size > 1:
        raise ValueError(
            "the appendix's outer loop (a step after each inner step) trains on one device only: use --devices 1, or outer='sum'"
        )
    if len(x) < schedule.batch:
        raise ValueError(f"a batch of {schedule.batch} is larger than the training set of {len(x)} pairs: set --batch")
    make_folder(folder)
    rate = torch.tensor(schedule.lr, device=fabric.device)
    runs = [_set_up(fabric, learner, rate, schedule) for learner in learners]
    precision = next(learners[0].net.parameters()).dtype  # --precision 64-true
    x, y = (t.to(precision) if t.is_floating_point() else t for t in (x, y))
    checkpoint = _Checkpoint(folder, runs, schedule)
    start = checkpoint.load()
    step, index = _stepper(fabric, runs, x, y, schedule.batch // fabric.world_size)
    every = max(1, schedule.epochs // schedule.validations)
    steps = len(x) // schedule.batch
    for epoch in range(start, schedule.epochs):
        orders = _orders(runs, len(x), epoch, schedule.batch, fabric).to(index.device)  # (steps, runs, batch)
        for learner in learners:
            if learner.on_epoch is not None:
                learner.on_epoch(epoch)
        for i in range(steps):
            rate.fill_(schedule.rate((epoch + i / steps) / schedule.epochs))
            index.copy_(orders[i])
            step()
        if (epoch + 1) % every == 0 or epoch + 1 == schedule.epochs:
            for run in runs:
                _validate(run, epoch + 1)
        if fabric.is_global_zero:
            checkpoint.save(epoch + 1)
        progress(_title(learners), epoch + 1, schedule.epochs)
    if fabric.is_global_zero:
        for run in runs:
            _leave_weights(folder, run)
        checkpoint.remove()
    fabric.barrier()


def trained(folder: Path, name: str, *, best: bool = False) -> tuple[dict[str, Tensor], list[tuple[int, float]]] | None:
    """The weights that `train` left, and the validation losses (epoch, loss) on the way; None if it has not."""
    path = folder / f"{name}{'.best' if best else ''}.safetensors"
    if not path.exists():
        return None
    with safe_open(path, "pt") as file:
        about = file.metadata()
        return {key: file.get_tensor(key) for key in file.keys()}, json.loads(about["curve"])  # noqa: SIM118, it is no dict


def _set_up(fabric: Fabric, learner: Learner, rate: Tensor, schedule: Schedule) -> _Run:
    learner.objective.to(fabric.device)
    parameters, options = list(learner.net.parameters()), {"lr": rate, "weight_decay": schedule.weight_decay, "fused": True}
    if schedule.optimizer == "adam":
        optimizer: Any = torch.optim.Adam(parameters, **options, capturable=fabric.device.type == "cuda")
    else:
        optimizer = torch.optim.SGD(parameters, **options, momentum=0.9)
    module, wrapped = fabric.setup(learner.objective, optimizer)
    if learner.on_device is not None:
        learner.on_device()
    for p in parameters:  # as the first step would make it: a graph must find these where they will stay
        if schedule.optimizer == "adam":
            step = torch.zeros((), device=p.device)
            optimizer.state[p] = {"step": step, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        else:
            optimizer.state[p] = {"momentum_buffer": torch.zeros_like(p)}
    return _Run(learner, module, wrapped, schedule.optimizer)


def _stepper(fabric: Fabric, runs: list[_Run], x: Tensor, y: Tensor, batch: int) -> tuple[Callable[[], None], Tensor]:
    """A function that makes one step of every run, on the rows that `index` (runs, batch) holds."""
    index = torch.zeros(len(runs), batch, dtype=torch.int64, device=x.device)

    def one(run: _Run, rows: Tensor) -> None:
        with fabric.autocast():
            run.step(fabric, x[rows].to(fabric.device), y[rows].to(fabric.device))

    if x.device.type != "cuda":

        def in_turn() -> None:
            for run, rows in zip(runs, index, strict=True):
                one(run, rows)

        return in_turn, index
    before = [{name: t.clone() for name, t in run.tensors().items()} for run in runs]
    streams = [torch.cuda.Stream() for _ in runs]

    def all_at_once() -> None:
        main = torch.cuda.current_stream()
        for run, rows, stream in zip(runs, index, streams, strict=True):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                one(run, rows)
        for stream in streams:
            main.wait_stream(stream)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # libraries choose and load their kernels, which cannot be captured
        for _ in range(3):
            all_at_once()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    for run in runs:
        run.optimizer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        all_at_once()
    with torch.no_grad():
        for run, kept in zip(runs, before, strict=True):
            for name, t in run.tensors().items():
                t.copy_(kept[name])
    return graph.replay, index


def _orders(runs: list[_Run], rows: int, epoch: int, batch: int, fabric: Fabric) -> Tensor:
    """(steps, runs, batch / processes): this process's share of every batch of the epoch; the same for runs of one seed."""
    steps, made = rows // batch, {}
    for seed in {run.learner.seed for run in runs}:
        random = torch.Generator().manual_seed(1_000_003 * seed + epoch)
        made[seed] = torch.randperm(rows, generator=random)[: steps * batch].view(steps, batch)
    mine = slice(fabric.global_rank, batch - batch % fabric.world_size, fabric.world_size)
    return torch.stack([made[run.learner.seed][:, mine] for run in runs], 1)


def _validate(run: _Run, epoch: int) -> None:
    if run.learner.validate is None:
        return
    run.learner.net.eval()
    with torch.no_grad():
        loss = run.learner.validate(run.learner.net)
    run.learner.net.train()
    if not run.curve or loss < min(seen for _, seen in run.curve):
        run.best = {name: t.clone() for name, t in run.learner.net.state_dict().items()}
    run.curve.append((epoch, loss))


class _Checkpoint:
    """All runs of a group in one file, so that a kill cannot leave them at different epochs."""

    def __init__(self, folder: Path, runs: list[_Run], schedule: Schedule):
        self.path, self.runs, self.schedule = folder / f"{_title([r.learner for r in runs])}.checkpoint", runs, schedule
        self.saved = time.monotonic()

    def save(self, epoch: int) -> None:
        if time.monotonic() - self.saved < self.schedule.checkpoint_seconds or epoch == self.schedule.epochs:
            return
        tensors = {f"{i}.{name}": t.detach().cpu().contiguous() for i, run in enumerate(self.runs) for name, t in run.tensors().items()}
        about = {"epoch": str(epoch), "curves": json.dumps([run.curve for run in self.runs]), "of": self._of()}
        write_whole(self.path, save(tensors, about))
        if self.schedule.travel:
            save_parts(self.path.parent, self._travel, _travelling(tensors), about)
        self.saved = time.monotonic()

    def load(self) -> int:
        """Put the runs where they were; the epoch to go on with."""
        found = self._read()
        if found is None:
            return 0
        tensors, about = found
        if about["of"] != self._of():
            raise ValueError(f"{self.path} belongs to a training with other settings: choose another --out, or move it away")
        with torch.no_grad():
            for i, (run, curve) in enumerate(zip(self.runs, json.loads(about["curves"]), strict=True)):
                run.curve = [(epoch, loss) for epoch, loss in curve]
                names = [key.split(".", 1)[1] for key in tensors if key.startswith(f"{i}.")]
                own = run.learner.net.state_dict()
                run.best = {n[5:]: torch.empty_like(own[n[5:]]) for n in names if n.startswith("best.")}
                for name, tensor in run.tensors().items():
                    if f"{i}.{name}" in tensors:  # a travelling checkpoint has no first moments: they start from 0
                        tensor.copy_(tensors[f"{i}.{name}"])
        return int(about["epoch"])

    def _read(self) -> tuple[dict[str, Tensor], dict[str, str]] | None:
        """The exact checkpoint of this machine; else what travelled here from another."""
        if not self.path.exists():
            return load_parts(self.path.parent, self._travel) if self.schedule.travel else None
        with safe_open(self.path, "pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}, file.metadata()  # noqa: SIM118, it is no dict

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
        remove_parts(self.path.parent, self._travel)

    @property
    def _travel(self) -> str:
        return f"{self.path.stem}.travel"

    def _of(self) -> str:
        s = self.schedule
        more = [] if s.optimizer == "adam" else [s.optimizer, s.weight_decay, s.decay]  # Adam's checkpoints keep their mark
        return json.dumps([s.epochs, s.batch, s.lr, [run.learner.name for run in self.runs], *more])


def _travelling(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A third of a checkpoint: weights and Adam's second moments at half precision; first moments are new again after ten steps."""
    kept = {key: t for key, t in tensors.items() if not key.endswith(".exp_avg") and ".best." not in key}
    moments = {key: t for key, t in kept.items() if key.endswith(".exp_avg_sq")}  # tiny numbers, which float16 would lose
    return halved({key: t for key, t in kept.items() if key not in moments}) | halved(moments, torch.bfloat16)


def _leave_weights(folder: Path, run: _Run) -> None:
    about = {"curve": json.dumps(run.curve)}
    final = {name: t.detach().cpu().contiguous() for name, t in run.learner.net.state_dict().items()}
    if run.best:
        best = {name: t.cpu().contiguous() for name, t in run.best.items()}
        write_whole(folder / f"{run.learner.name}.best.safetensors", save(best, about))
    write_whole(folder / f"{run.learner.name}.safetensors", save(final, about))  # last: this one says that it is done


def _title(learners: list[Learner]) -> str:
    return learners[0].name + (f" and {len(learners) - 1} more" if len(learners) > 1 else "")
