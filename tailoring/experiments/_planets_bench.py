"""What a network of the planets experiment is trained for, and everything that is then asked of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tailoring import CN, Adapter, Tailored, Weights, baselines, losses, outer_losses

from . import _nbody
from ._planet_nets import PHYSICS, Invariants, build, constant_velocity, moving, projected, violation
from ._planets_plan import Config, Training
from ._rows import Row, Rows
from ._train import Learner


class Outer(nn.Module):
    """The outer loss: MSE of the tailored prediction plus the physics regulariser, after each inner step."""

    def __init__(self, model: Tailored, law: Invariants, weight: float, noise: bool, repeats: int = 1):
        super().__init__()
        self.model, self.law, self.weight, self.noise, self.repeats = model, law, weight, noise, repeats

    def losses(self, x: Tensor, y: Tensor) -> Iterator[Tensor]:
        made = noise_losses if self.noise else outer_losses
        for _ in range(self.repeats):
            yield from made(self.model, self._task, x, (x, y))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.stack(list(self.losses(x, y))).sum()

    def _task(self, prediction: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
        x, y = target
        error = moving(prediction - y).square().mean()
        return error + self.weight * violation(self.law, x, prediction).mean() if self.weight else error


def noise_losses(model: Tailored, task_loss: Callable[[Any, Any], Tensor], x: Tensor, y: Any) -> Iterator[Tensor]:
    """A control: as `outer_losses`, but each state is Gaussian noise of the size that tailoring's step would have had."""
    states = list(model.states(x))
    for state in states[1:]:
        noisy = {}
        for name, start in states[0].items():
            size = (state[name] - start).detach().square().mean(1, keepdim=True).sqrt()  # type: ignore[operator]
            noisy[name] = start + size * torch.randn_like(start)  # type: ignore[operator, arg-type]
        yield task_loss(model.predict(x, noisy), y)


def conserve(law: Invariants) -> losses.Conserve:
    """The tailoring loss."""
    return losses.Conserve(law, before=law.of_query, weights=PHYSICS)


class Bench:
    """The data on the device, the law, and everything that is asked of a network."""

    def __init__(self, config: Config, data: _nbody.Data, device: torch.device):
        self.config, self.device = config, device
        self.mean, self.std = data.mean.to(device), data.std.to(device)
        self.law = Invariants(self.mean, self.std, config.system.gravity)
        # Most of a small network's training step is the law's many small kernels: fused for the GPU where first order will do.
        self.fused = Invariants(self.mean, self.std, config.system.gravity, compiled=device.type == "cuda")
        self.validation, self.test = data.validation.to(device), data.test.to(device)
        self.starts = data.starts

    def error(self, prediction: Tensor, y: Tensor) -> float:
        return float(moving(prediction - y).double().square().mean())

    def tailored(self, net: nn.Module, adapt: Adapter, steps: int, lr: float, **settings: Any) -> Tailored:
        chunk = None if isinstance(adapt, baselines.Shared) else self.config.chunk
        return Tailored(net, conserve(self.law), adapt=adapt, steps=steps, lr=lr, chunk=chunk, **settings)

    def learner(self, t: Training) -> Learner:
        torch.manual_seed(t.seed)
        net = self.network(t)
        adapt = Weights() if t.adapt == "weights" else CN(nn.ReLU)
        law = self.fused if t.backprop == "none" else self.law
        model = Tailored(net, conserve(law), adapt=adapt, steps=t.steps, lr=t.lr, backprop=t.backprop, clip=t.clip)
        if t.steps:
            model.prepare(self.validation.x[:2])
        return Learner(t.name, net, Outer(model, law, t.weight, t.adapt == "noise", t.repeats), t.seed, t.outer == "each", self.validate)

    def network(self, t: Training) -> nn.Module:
        return build(t.network, t.width, t.norm, self.mean.cpu(), self.std.cpu()).to(self.device)

    def validate(self, net: nn.Module) -> float:
        x = self.validation.x.to(next(net.parameters()).dtype)
        return self.error(torch.cat([net(part) for part in x.split(self.config.chunk)]), self.validation.y)

    @torch.no_grad()
    def curve(self, model: Tailored, part: _nbody.Planets, batch: int | None = None) -> dict[str, list[float]]:
        """Task and physics loss after 0, 1, ... steps."""
        task, physics = torch.zeros(model.steps + 1).double(), torch.zeros(model.steps + 1).double()
        for x, y in zip(part.x.split(batch or self.config.chunk), part.y.split(batch or self.config.chunk), strict=True):
            for step, prediction in enumerate(model.path(x)):
                task[step] += len(x) / len(part) * self.error(prediction, y)
                physics[step] += float(violation(self.law, x, prediction).double().sum()) / len(part)
        return {"mse": task.tolist(), "physics": physics.tolist()}

    def losses_of(self, prediction: Tensor, part: _nbody.Planets) -> dict[str, list[float]]:
        return {"mse": [self.error(prediction, part.y)], "physics": [float(violation(self.law, part.x, prediction).double().mean())]}

    def adapter(self, procedure: str) -> Adapter:
        return {"tailoring": CN(nn.ReLU), "weights": Weights(), "output": baselines.Output(), "ttt": baselines.Shared(CN(nn.ReLU))}[
            procedure
        ]


# What is done with every network at prediction time, and what only with those that others are compared with.
_ALWAYS, _ALSO = ("tailoring",), ("output", "ttt", "projection", "weights")
_COMPARED = ("inductive", "pairs", "more")
_ROLLED_OUT = ("inductive", "meta", "meta-each", "pairs", "pairs-meta")


def evaluate(bench: Bench, t: Training, net: nn.Module, rows: Rows) -> None:
    """Append every result of a trained network that is not there yet, on validation and test data."""
    c = bench.config
    baseline = t.method in _COMPARED and (t.weight == c.weight or t.network != "mlp" or t.stop_early)
    grids = {"tailoring": c.lrs, "output": c.output_lrs, "ttt": c.ttt_lrs, "projection": (0.0,), "weights": c.weights_lrs}
    if t.network == "pairs":
        grids |= {"tailoring": c.pair_lrs, "ttt": c.pair_ttt_lrs, "weights": c.pair_weights_lrs}
    also = _ALSO if baseline else ("weights",) if t.adapt == "weights" else ()
    for procedure in _ALWAYS + also:
        for lr in grids[procedure]:
            for part in ("validation", "test"):
                key = {"kind": "result", "name": t.name, "procedure": procedure, "lr": lr, "part": part}
                if not rows.has(**key):
                    rows.add(**key, **_curve(bench, net, procedure, lr, getattr(bench, part)), training=t.fields)
    shown = (
        t.method in _ROLLED_OUT
        and t.seed == c.seeds[0]
        and (t.weight == c.weight or t.network != "mlp")
        and t.lr in (0, c.pair_meta_lr, max(c.meta_lrs))
    )
    if shown and c.rollout and not rows.has(kind="rollout", name=t.name):
        rows.add(kind="rollout", name=t.name, training=t.fields, **roll_outs(bench, net, best_lr(rows, t.name, c.steps)))


def _curve(bench: Bench, net: nn.Module, procedure: str, lr: float, part: _nbody.Planets) -> dict[str, list[float]]:
    c = bench.config
    if procedure == "projection":
        with torch.no_grad():
            return bench.losses_of(projected(bench.law, part.x, net(part.x)), part)
    if procedure == "ttt" and part is bench.validation:
        part = part[: c.ttt_batch]  # one batch suffices to choose a step size
    steps = c.output_steps if procedure in ("output", "ttt") else c.steps
    if procedure == "tailoring" and lr == c.path_lr:  # Figure 2 follows this one further
        steps = max(c.steps, c.output_steps)
    return bench.curve(bench.tailored(net, bench.adapter(procedure), steps, lr), part, c.ttt_batch if procedure == "ttt" else None)


def best_lr(rows: Rows, name: str, steps: int) -> float:
    """The step size of tailoring with the lowest validation error after `steps` steps."""
    tried = [r for r in rows if r["kind"] == "result" and (r["name"], r["procedure"], r["part"]) == (name, "tailoring", "validation")]
    return min(tried, key=lambda r: r["mse"][steps] if r["mse"][steps] == r["mse"][steps] else float("inf"))["lr"]


@torch.no_grad()
def roll_outs(bench: Bench, net: nn.Module, lr: float) -> Row:
    """Predictions of predictions: median error and change of energy and momentum since the start, for each way to predict."""
    c = bench.config
    starts = bench.starts[: c.rollouts]
    known = min(c.rollout, (c.system.stable - 1) // c.stride)  # later, bodies may collide, and there is no truth
    truth = _nbody.integrate(starts, known * c.stride, c.system)[:, :: c.stride].flatten(2).to(bench.device)
    truth = ((truth - bench.mean) / bench.std).float()  # (roll-outs, known steps + 1, 25)
    model = bench.tailored(net, CN(nn.ReLU), c.steps, lr)
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "plain": net,
        "tailored": model,
        "projected": lambda x: projected(bench.law, x, net(x)),
    }
    return {"lr": lr, "ways": {way: _roll_out(bench, predict, truth) for way, predict in ways.items()}}


def _roll_out(bench: Bench, predict: Callable[[Tensor], Tensor], truth: Tensor) -> dict[str, list[float]]:
    x, before = truth[:, 0], bench.law(truth[:, 0])
    out: dict[str, list[float]] = {"error": [], "energy": [], "momentum": []}
    for step in range(1, bench.config.rollout + 1):
        x = predict(x)
        change = (bench.law(x) - before).abs()
        seen = {"energy": change[:, 0], "momentum": change[:, 1:].sum(1)}
        if step < truth.shape[1]:
            seen["error"] = moving(x - truth[:, step]).square().mean(1)
        for name, values in seen.items():
            out[name].append(float(values.nan_to_num(torch.inf).median()))
    return out


@torch.no_grad()
def trivial(bench: Bench) -> Row:
    """The predictors that need no network."""
    time = bench.config.stride * bench.config.system.dt
    parts = {"validation": bench.validation, "test": bench.test}
    return {
        "identity": {name: bench.losses_of(part.x, part) for name, part in parts.items()},
        "constant velocity": {
            name: bench.losses_of(constant_velocity(part.x, bench.mean, bench.std, time), part) for name, part in parts.items()
        },
    }
