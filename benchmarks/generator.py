"""The five-body generator beside a plain scalar Runge-Kutta loop: time for one candidate.

python benchmarks/generator.py --threads 2
"""

from __future__ import annotations

from dataclasses import replace

import torch
from _measure import Cases, Options, Run, bench, per

from tailoring.experiments import _nbody


def cases(o: Options) -> Cases:
    system = _nbody.System()
    starts = torch.randn(o.candidates, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    starts[..., :2] *= 60.0
    starts[..., 4] = 0.2

    def batched() -> Run:
        step = _nbody.compiled_step(replace(system, slots=o.candidates))
        return per(lambda: _nbody.integrate(starts, o.steps, system, step), o.candidates)

    def scalar() -> Run:
        ours, bodies = _nbody.integrate(starts[:1], o.steps, system)[0, -1], starts[0].tolist()
        assert torch.allclose(ours, torch.tensor(simulate(bodies, o.steps, system), dtype=torch.float64))
        return lambda: simulate(bodies, o.steps, system)

    return {"scalar loop": scalar, "batched": batched}


def simulate(bodies: list[list[float]], steps: int, system: _nbody.System) -> list[list[float]]:
    """Runge and Kutta's method on numbers, one after another."""
    h = system.dt / system.substeps
    for _ in range(steps * system.substeps):
        k1 = slopes(bodies, system.gravity)
        k2 = slopes(moved(bodies, k1, h / 2), system.gravity)
        k3 = slopes(moved(bodies, k2, h / 2), system.gravity)
        k4 = slopes(moved(bodies, k3, h), system.gravity)
        mean = [[(a + 2 * b + 2 * c + d) / 6 for a, b, c, d in zip(*rows, strict=True)] for rows in zip(k1, k2, k3, k4, strict=True)]
        bodies = moved(bodies, mean, h)
    return bodies


def moved(bodies: list[list[float]], by: list[list[float]], h: float) -> list[list[float]]:
    return [[b + h * d for b, d in zip(body, slope, strict=True)] for body, slope in zip(bodies, by, strict=True)]


def slopes(bodies: list[list[float]], gravity: float) -> list[list[float]]:
    out = []
    for i, (x, y, vx, vy, _) in enumerate(bodies):
        ax = ay = 0.0
        for j, (x2, y2, _, _, mass) in enumerate(bodies):
            if i != j:
                dx, dy = x2 - x, y2 - y
                cube = (dx * dx + dy * dy) ** 1.5
                ax, ay = ax + gravity * mass * dx / cube, ay + gravity * mass * dy / cube
        out.append([vx, vy, ax, ay, 0.0])
    return out


if __name__ == "__main__":
    bench(__doc__ or "", cases, "scalar loop", candidates=[4096], steps=[20])
