"""MAMmoTh (Algorithm 1): meta-tailoring in which every query has all the weights of the network for itself.

A spring is released from a known state, with a stiffness and a friction that nobody tells; the network predicts where it will be. With each
query come a few noisy sensor readings of its own motion, and the tailoring loss is their misfit. It prints the test error of the network
trained plainly, tailored only, and meta-tailored first and second order, with CN and with all weights, beside the controls: the same
model with 0 steps, plain training for more epochs, and a network that simply takes the readings as inputs.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from tailoring import CN, Adapter, Tailored, Weights, outer_losses
from tailoring.losses import Misfit

Query = dict[str, Tensor]


@dataclass(frozen=True)
class Config:
    points: int = 40  # predicted positions, over one to two periods
    sensors: int = 5  # readings per query: more than the two unknowns, far fewer than the points
    noise: float = 0.05  # of a reading, against positions of size 1
    train: int = 2000
    test: int = 2000
    width: int = 64
    epochs: int = 60
    steps: int = 5  # inner steps, in training and prediction
    rates: tuple[float, ...] = (0.01, 0.03, 0.1, 0.3)  # inner step sizes tried on validation data
    seeds: tuple[int, ...] = (0, 1, 2)


class Spring(nn.Module):
    """Positions, (queries, points), from the start and, if `amortised`, from the readings too."""

    def __init__(self, config: Config, amortised: bool):
        super().__init__()
        self.amortised, self.points = amortised, config.points
        inputs, width = 2 + 2 * config.points * amortised, config.width
        self.layers = nn.Sequential(
            nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, config.points)
        )

    def forward(self, x: Query) -> Tensor:
        parts = [x["start"]]
        if self.amortised:  # on the grid of points, with a mark: from raw (time, value) pairs it learns far less
            blank = torch.zeros(len(x["start"]), self.points)
            parts += [blank.scatter(1, x["when"], x["reading"]), blank.scatter(1, x["when"], 1.0)]
        return self.layers(torch.cat(parts, 1))


def springs(count: int, config: Config, seed: int) -> tuple[Query, Tensor]:
    """Queries and the true positions: q'' = -k q - c q' from (q, v), in closed form."""
    draw = torch.Generator().manual_seed(seed)
    start = torch.randn(count, 2, generator=draw)
    friction = 0.3 * torch.rand(count, 1, generator=draw)
    frequency = 0.5 + torch.rand(count, 1, generator=draw)  # of the damped motion
    t = torch.linspace(0, 10, config.points)
    q, v = start[:, :1], start[:, 1:]
    y = torch.exp(-friction * t) * (q * torch.cos(frequency * t) + (v + friction * q) / frequency * torch.sin(frequency * t))
    when = torch.rand(count, config.points, generator=draw).argsort(1)[:, : config.sensors]
    reading = y.gather(1, when) + config.noise * torch.randn(count, config.sensors, generator=draw)
    return {"start": start, "when": when, "reading": reading}, y


def at_sensors(prediction: Tensor, x: Query) -> Tensor:
    return prediction.gather(1, x["when"])


def readings(x: Query) -> Tensor:
    return x["reading"]


def make(config: Config, seed: int, adapt: Adapter, amortised: bool = False, **options: object) -> Tailored:
    torch.manual_seed(seed)
    return Tailored(Spring(config, amortised), Misfit(at_sensors, readings), adapt=adapt, **options)  # type: ignore[arg-type]


def train(model: Tailored, data: tuple[Query, Tensor], epochs: int, seed: int) -> Tailored:
    """By the outer losses; with no steps, plainly."""
    (x, y), draw = data, torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for _ in range(epochs):
        for part in torch.randperm(len(y), generator=draw).split(100):
            optimizer.zero_grad()
            batch = {name: t[part] for name, t in x.items()}
            sum(outer_losses(model, mse_loss, batch, y[part]), start=torch.zeros(())).backward()
            optimizer.step()
        schedule.step()
    return model


@torch.no_grad()
def error(model: Tailored, data: tuple[Query, Tensor]) -> float:
    return mse_loss(model(data[0]), data[1]).item()


def run(config: Config) -> dict[str, list[float]]:
    """The test error of every method, for each seed."""
    rows: dict[str, list[float]] = {}
    adapters: dict[str, Adapter] = {"CN": CN(nn.Tanh), "Weights": Weights()}
    for seed in config.seeds:
        training, validation, test = (springs(count, config, 10 * seed + i) for i, count in enumerate((config.train, 500, config.test)))

        def best(models: list[Tailored], validation: tuple[Query, Tensor] = validation) -> Tailored:
            return min(models, key=lambda model: error(model, validation))

        def note(name: str, model: Tailored, test: tuple[Query, Tensor] = test) -> None:
            rows.setdefault(name, []).append(error(model, test))

        plain = train(make(config, seed, CN(nn.Tanh), steps=0), training, config.epochs, seed)
        note("plain", plain)
        note(
            f"plain, {config.steps} times the epochs",
            train(make(config, seed, CN(nn.Tanh), steps=0), training, config.steps * config.epochs, seed),
        )
        lengths = [config.epochs // 6, config.epochs // 3, config.epochs]  # it overfits, so validation chooses when to stop
        note("readings as inputs", best([train(make(config, seed, CN(nn.Tanh), True, steps=0), training, n, seed) for n in lengths]))
        for name, adapt in adapters.items():
            tailored = best([plain.replace(adapt=adapt, steps=config.steps, lr=rate) for rate in config.rates])
            note(f"tailored, {name}", tailored)
            for order in ("none", "last", "all"):
                options = {"adapt": adapt, "steps": config.steps, "backprop": order}
                meta = best([train(make(config, seed, **options, lr=rate), training, config.epochs, seed) for rate in config.rates[2:]])
                note(f"meta-tailored, {name}, {order}", meta)
                note(f"  with 0 steps ({name}, {order})", meta.replace(steps=0))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one seed and fewer epochs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = replace(Config(), epochs=8, seeds=(0,)) if options.quick else Config()
    begin = time.perf_counter()
    print(f"mean squared error of all positions, mean +- deviation over seeds {config.seeds}, {config.steps} inner steps")
    for name, values in run(config).items():
        spread = torch.tensor(values)
        print(f"{name:<36} {spread.mean():.4f} +- {spread.std(correction=0):.4f}")
    print(f"{time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
