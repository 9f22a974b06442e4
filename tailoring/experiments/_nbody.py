"""Five bodies in the plane: their motion, stable systems found by hill climbing, and the data set of the planets experiment (App. E)."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from ._cache import cached

BODIES = 5
WORTH_COMPILING = 100  # trajectories: a few seconds for the compiler
FIRST, SECOND = (torch.tensor(side) for side in zip(*combinations(range(BODIES), 2), strict=True))  # the 10 pairs


@dataclass(frozen=True)
class System:
    """What the appendix says of the systems, and what it leaves open. Units: pixels, steps, and masses as in the appendix."""

    trajectories: int = 6000  # "counts" are not given; shared by the small training sets (500) and the large ones (5,000)
    width: float = 600.0  # the grid, App. E; starts are uniform in its central half
    height: float = 300.0
    mass: tuple[float, float] = (0.15, 0.25)  # App. E
    mean_mass: float = 0.2  # "below a threshold mean mass": the middle of that range; applied when masses are drawn, as they never change
    gravity: float = 300.0  # not given: bodies a grid apart then fall together in about 50 steps, so 200 steps are a few falls
    speed: float = 1.0  # not given: kinetic and potential energy are then alike (about 0.9 and -1.2)
    critical: float = 10.0  # not given: nearer than this is a collision; at 3 a few tight binaries make most of the error
    dt: float = 1.0  # not given; sets the unit of time
    substeps: int = 3  # Runge-Kutta steps per step: energy then drifts by 1e-5 at most
    stable: int = 200  # App. E: steps without a collision or an escape,
    kept: int = 100  # of which the first 100 give the inputs,
    ahead: int = 10  # and this many more are kept as targets: the largest stride
    move: float = 10.0  # not given: the "small random perturbation" of positions,
    push: float = 0.3  # and of velocities, times 10^U(-1.5, 0.3): small ones refine, large ones escape
    tries: int = 200  # not in the paper: then a start that will not become stable is given up
    siblings: int = 0  # not in the paper: keep perturbing a success, for a split by family
    slots: int = 4096  # candidates that are tried at once; a matter of speed, but also of which systems are found
    seed: int = 0


def acceleration(position: Tensor, mass: Tensor, gravity: float) -> Tensor:
    """Newton's: a_i = G sum_j m_j (q_j - q_i) / r_ij^3. position (2, bodies, n), mass (bodies, n) -> (2, bodies, n)."""
    away = position[:, FIRST] - position[:, SECOND]  # (2, pairs, n)
    nearness = away.square().sum(0).rsqrt()  # 1 / r; the third power of this is three times faster than .pow(-1.5)
    pull = away * (gravity * nearness * nearness * nearness)
    towards = torch.zeros_like(position)
    towards.index_add_(1, FIRST, pull * mass[SECOND], alpha=-1)
    return towards.index_add_(1, SECOND, pull * mass[FIRST])


def runge_kutta(position: Tensor, velocity: Tensor, mass: Tensor, gravity: float, h: float) -> tuple[Tensor, Tensor]:
    """One classical fourth-order step of length h, written for q'' = a(q)."""
    drift = position + h * velocity
    k1 = acceleration(position, mass, gravity)
    k2 = acceleration(position + (h / 2) * velocity, mass, gravity)
    k3 = acceleration(position + (h / 2) * velocity + (h * h / 4) * k1, mass, gravity)
    k4 = acceleration(drift + (h * h / 2) * k2, mass, gravity)
    return drift + (h * h / 6) * (k1 + k2 + k3), velocity + (h / 6) * (k1 + 2 * (k2 + k3) + k4)


Step = Callable[[Tensor, Tensor, Tensor, float, float], tuple[Tensor, Tensor]]


def compiled_step(system: System) -> Step:
    """`runge_kutta` for all slots in half the time, with the same bits (torch 2.11: nearly all); as it is where nothing can be compiled."""
    step = torch.compile(runge_kutta, dynamic=False, options={"cpp.threads": 1})  # its kernels are too short to be shared
    trial = torch.arange(2.0 * BODIES * system.slots, dtype=torch.float64).view(2, BODIES, system.slots)
    try:
        step(trial, trial, trial[0], system.gravity, system.dt / system.substeps)
    except (torch._dynamo.exc.TorchDynamoException, RuntimeError) as error:  # pyright: ignore[reportAttributeAccessIssue]
        warnings.warn(f"the generator runs uncompiled, and takes twice as long: {str(error).splitlines()[0]}", stacklevel=2)
        return runge_kutta
    return step


def integrate(states: Tensor, steps: int, system: System, step: Step = runge_kutta) -> Tensor:
    """States (n, 5, 5), rows x, y, vx, vy, m of each body, -> (n, steps + 1, 5, 5), collisions and escapes ignored."""
    columns = states.double().permute(2, 1, 0)  # (x y vx vy m, bodies, n)
    position, velocity, mass = columns[:2], columns[2:4], columns[4]
    seen = [states.double()]
    for _ in range(steps):
        for _ in range(system.substeps):
            position, velocity = step(position, velocity, mass, system.gravity, system.dt / system.substeps)
        seen.append(torch.cat([position, velocity, mass[None]]).permute(2, 1, 0))
    return torch.stack(seen, 1)


class Climb:
    """Hill climbing for stable systems in `slots` places at once. A place whose candidate dies starts its next one at once."""

    def __init__(self, system: System):
        self.step = compiled_step(system) if system.trajectories >= WORTH_COMPILING else runge_kutta
        self.system, self.random = system, torch.Generator().manual_seed(system.seed)
        n, self.age, self.family = system.slots, torch.zeros(system.slots, dtype=torch.int64), torch.arange(system.slots)
        self.families = n
        self.mass = self._masses(n)
        self.start_q, self.start_v = self._fresh(n)  # the best start of each place so far
        self.lifetime, self.tried = torch.zeros(n, dtype=torch.int64), torch.zeros(n, dtype=torch.int64)
        self.tried_q, self.tried_v = self.start_q.clone(), self.start_v.clone()  # the start on trial
        self.position, self.velocity = self.start_q.clone(), self.start_v.clone()
        self.history = torch.zeros(system.kept + system.ahead + 1, 4, BODIES, n)  # the last one is overwritten by all later steps
        self.successes = torch.zeros(n, dtype=torch.int64)

    def advance(self) -> tuple[Tensor, Tensor, Tensor]:
        """One integration step everywhere. -> new trajectories (found, steps, 5, 4), their masses (found, 5), families (found,)."""
        system = self.system
        self._record()
        alive = torch.ones(system.slots, dtype=torch.bool)
        substeps = torch.zeros(system.slots, dtype=torch.int64)
        for _ in range(system.substeps):
            self.position, self.velocity = self.step(self.position, self.velocity, self.mass, system.gravity, system.dt / system.substeps)
            alive &= self._sound()
            substeps += alive
        self.age += substeps
        done = self.age >= system.stable * system.substeps
        found = done.nonzero()[:, 0]
        motion = self.history[:-1, ..., found].permute(3, 0, 2, 1)  # (found, steps, bodies, x y vx vy)
        new = motion, self.mass[:, found].T.float(), self.family[found]
        self._replace(((~alive) | done).nonzero()[:, 0], done)
        return new

    def _record(self) -> None:
        step = (self.age // self.system.substeps).clamp(max=len(self.history) - 1).expand(1, 4, BODIES, -1)
        self.history.scatter_(0, step, torch.cat([self.position, self.velocity])[None].float())

    def _sound(self) -> Tensor:
        x, y = self.position
        inside = ((x >= 0) & (x <= self.system.width) & (y >= 0) & (y <= self.system.height)).all(0)
        apart = (self.position[:, FIRST] - self.position[:, SECOND]).square().sum(0).amin(0) >= self.system.critical**2
        return inside & apart  # false for what is not finite, too

    def _replace(self, at: Tensor, done: Tensor) -> None:
        """Start the next candidate in the places `at`: near the longest-lived start there, or anew."""
        if not len(at):
            return
        system, won = self.system, done[at]
        longer = (self.age[at] > self.lifetime[at]) | won
        up = at[longer]
        self.start_q[..., up], self.start_v[..., up] = self.tried_q[..., up], self.tried_v[..., up]
        self.lifetime[up] = self.age[up]
        self.tried[at] += 1
        self.successes[at] += won
        over = at[(won & (self.successes[at] > system.siblings)) | (self.tried[at] >= system.tries)]
        self.start_q[..., over], self.start_v[..., over] = self._fresh(len(over))
        self.mass[:, over] = self._masses(len(over))
        for count in (self.lifetime, self.tried, self.successes):
            count[over] = 0
        self.family[over] = self.families + torch.arange(len(over))
        self.families += len(over)
        scale = 10 ** (1.8 * self._uniform(len(at)) - 1.5)
        scale[torch.isin(at, over)] = 0  # a fresh start is tried as it is
        self.tried_q[..., at] = self._inside(self.start_q[..., at] + system.move * scale * self._normal(2, BODIES, len(at)))
        self.tried_v[..., at] = self.start_v[..., at] + system.push * scale * self._normal(2, BODIES, len(at))
        self.position[..., at], self.velocity[..., at] = self.tried_q[..., at], self.tried_v[..., at]
        self.age[at] = 0

    def _fresh(self, n: int) -> tuple[Tensor, Tensor]:
        size = torch.tensor([self.system.width, self.system.height], dtype=torch.float64)[:, None, None]
        return size / 4 + size / 2 * self._uniform(2, BODIES, n), self.system.speed * self._normal(2, BODIES, n)

    def _inside(self, position: Tensor) -> Tensor:
        size = torch.tensor([self.system.width, self.system.height], dtype=torch.float64)[:, None, None]
        return position.maximum(size / 4).minimum(3 * size / 4)

    def _masses(self, n: int) -> Tensor:
        low, high = self.system.mass
        mass = low + (high - low) * self._uniform(BODIES, 4 * n + 64)  # half of them are light enough
        return mass[:, mass.mean(0) < self.system.mean_mass][:, :n]

    def _uniform(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.random, dtype=torch.float64)

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.random, dtype=torch.float64)


Progress = Callable[[str, int, int], None]  # what, done, of how many


def stable_systems(system: System, progress: Progress | None = None) -> dict[str, Tensor]:
    """`motion` (trajectories, steps, 5, 4), `mass` (trajectories, 5), `family`, in random order, as easy systems are found first."""
    if not 0 < system.kept + system.ahead <= system.stable:
        raise ValueError(f"kept + ahead ({system.kept} + {system.ahead}) must not exceed the {system.stable} stable steps")
    climb, parts, found = Climb(system), [], 0
    while found < system.trajectories:
        new = climb.advance()
        if len(new[0]):
            parts.append(new)
            found += len(new[0])
            if progress is not None:
                progress("stable systems", min(found, system.trajectories), system.trajectories)
    order = torch.randperm(found, generator=climb.random)[: system.trajectories]
    return {name: torch.cat(part)[order] for name, part in zip(("motion", "mass", "family"), zip(*parts, strict=True), strict=True)}


Split = Literal["trajectory", "family", "pair"]


@dataclass(frozen=True)
class Planets:
    """Pairs (state, state `stride` steps later) of one part of the data, standardised: x and y are (pairs, 25)."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, rows: slice) -> Planets:
        return Planets(self.x[rows], self.y[rows])

    def to(self, device: torch.device | str) -> Planets:
        return Planets(self.x.to(device), self.y.to(device))


@dataclass(frozen=True)
class Data:
    train: Planets  # in an order of which any beginning is a fair, smaller training set
    validation: Planets
    test: Planets
    mean: Tensor  # (25,): of the inputs of the first `parts[0]` training trajectories
    std: Tensor
    starts: Tensor  # (test trajectories, 5, 5): first states in physical units, for roll-outs


def load(
    folder: Path,
    system: System,
    *,
    stride: int,
    split: Split,
    parts: tuple[int, int, int],
    seed: int,
    more: int = 0,
    progress: Progress | None = None,
) -> Data:
    """The data set, from the cache or made now; `parts` trajectories to train, validate and test on, `more` to train on at most.

    split="trajectory" is what the appendix says. "family" lets perturbed siblings of a trajectory stand in several parts, "pair" puts pairs
    of one trajectory in several parts: both are easier than the paper's task, and said to be.
    """
    sizes = (parts[2], parts[1], max(parts[0], more))  # test data first: they stay the same whatever there is to train on
    if min(parts) < 1:
        raise ValueError(f"every part needs a trajectory, but parts is {parts}")
    if sum(sizes) > system.trajectories:
        raise ValueError(f"{sum(sizes)} trajectories are asked for and the set has {system.trajectories}: raise --system.trajectories")
    if not 0 < stride <= system.ahead:
        raise ValueError(f"stride must be 1 to {system.ahead} (--system.ahead), not {stride}")
    if (split == "family") != (system.siblings > 0):
        raise ValueError("split 'family' needs --system.siblings of 1 or more, other splits 0: siblings are near copies of each other")
    made, kept = cached(folder, "planets", system, lambda: stable_systems(system, progress)), system.kept
    mass = made["mass"][:, None, :, None].expand(-1, kept + system.ahead, -1, 1)
    states = torch.cat([made["motion"], mass], 3)  # (trajectories, steps, 5 bodies, x y vx vy m)
    test, validation, train = _choose(len(states), split, sizes, kept, seed)
    now, later = states[:, :kept].flatten(2), states[:, stride : stride + kept].flatten(2)  # (trajectories, kept, 25)
    inputs = now[train[0][: parts[0] * kept], train[1][: parts[0] * kept]].double()
    mean, std = inputs.mean(0), inputs.std(0)

    def part(chosen: tuple[Tensor, Tensor]) -> Planets:
        return Planets(*(((t[chosen].double() - mean) / std).float() for t in (now, later)))

    return Data(part(train), part(validation), part(test), mean.float(), std.float(), states[test[0].unique(), 0])


def _choose(trajectories: int, split: Split, sizes: tuple[int, int, int], kept: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """For each part, the (trajectory, time) of its pairs."""
    random = torch.Generator().manual_seed(seed)
    if split == "pair":
        order = torch.randperm(sum(sizes) * kept, generator=random)
        return [(piece // kept, piece % kept) for piece in order.split([size * kept for size in sizes])]
    order = torch.randperm(trajectories, generator=random)[: sum(sizes)]
    return [(piece.repeat_interleave(kept), torch.arange(kept).repeat(len(piece))) for piece in order.split(list(sizes))]
