"""Measured oscillators that lose a little energy: the files, their checks, labels, laws; and a simulated one for tests."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

Labels = Literal["forward", "central", "through"]
Name = Literal["pendulum", "spring", "simulated"]


@dataclass(frozen=True)
class Source:
    """A file of Schmidt & Lipson (Science 2009): trial, time, angle or position, its velocity."""

    file: str
    rows: int
    sha256: str
    scale: float = 1.0  # both coordinates are divided by this
    stride: int = 1  # take every second row, and the set is about as large as the pendulum's


SOURCES = {
    "pendulum": Source("real_pend_h_1.txt", 556, "45d92988198b89a5933f5a53e67aa819d06937516f71a462ac09e1307d8b3411"),
    "spring": Source("real_linear_h_1.txt", 870, "bf11e50703376b82566b635771de23845a2546e4b733beb49588c7af4eec26cc", 100.0, 2),
}
WHERE = (
    "It is part of invar_datasets.zip, in the supporting material of Schmidt & Lipson, 'Distilling Free-Form Natural Laws from "
    "Experimental Data' (Science 2009); experiment-real/ of github.com/greydanus/hamiltonian-nn downloads that archive. Put the file into "
    "a folder named pendulum, and give the folder above it with --data or the variable TAILORING_DATA"
)


@dataclass(frozen=True)
class Law:
    """The energy that should be conserved, of states (..., 2) = (q, p), with p = dq/dt.

    pendulum  H = stiffness (1 - cos q) + p^2
    spring    H = stiffness (q - rest)^2 / 2 + p^2 / 2
    """

    kind: Literal["pendulum", "spring"]
    stiffness: float
    rest: float = 0.0

    def energy(self, x: Tensor) -> Tensor:
        q, p = x.unbind(-1)
        if self.kind == "pendulum":
            return self.stiffness * (1 - q.cos()) + p.square()
        return (self.stiffness * (q - self.rest).square() + p.square()) / 2

    def gradient(self, x: Tensor) -> Tensor:
        q, p = x.unbind(-1)
        if self.kind == "pendulum":
            return torch.stack([self.stiffness * q.sin(), 2 * p], -1)
        return torch.stack([self.stiffness * (q - self.rest), p], -1)


@dataclass(frozen=True)
class Segment:
    """A stretch of the measured trajectory, to be predicted from its first state. time (n,), states (n, 2)"""

    time: Tensor
    states: Tensor


@dataclass(frozen=True)
class Motion:
    """A measured trajectory, divided as the code of Hamiltonian Neural Networks does: the first four fifths train, the rest tests."""

    time: Tensor  # (n,)
    states: Tensor  # (n, 2), float64
    law: Law

    @property
    def cut(self) -> int:
        """The first test row."""
        return int(len(self.time) * 0.8)

    @property
    def train(self) -> list[Segment]:
        """Four equal trajectories, each as long as the test's."""
        return [self._segment(i * self.cut // 4) for i in range(4)]

    @property
    def test(self) -> Segment:
        return self._segment(self.cut)

    def _segment(self, first: int) -> Segment:
        end = first + self.cut // 4
        return Segment(self.time[first:end] - self.time[first], self.states[first:end])

    def pairs(self, labels: Labels, part: Literal["train", "test"]) -> tuple[Tensor, Tensor]:
        """States (n, 2) and the time derivatives that a network learns.

        forward   (x(t + h) - x(t)) / h, as the paper's source does; its error h x''/2 is a damping that the pendulum does not have
        central   the second-order difference over both neighbours, unequal gaps allowed
        through   as forward, for networks that are trained through an integrator's step over the gap (see `gaps`)
        """
        first, end = (0, self.cut) if part == "train" else (self.cut, len(self.time))
        t, x = self.time[first:end], self.states[first:end]
        if labels != "central":
            gap = (t[1:] - t[:-1])[:, None]
            return x[:-1], (x[1:] - x[:-1]) / gap
        before, after = (t[1:-1] - t[:-2])[:, None], (t[2:] - t[1:-1])[:, None]
        slopes = (x[1:-1] - x[:-2]) / before, (x[2:] - x[1:-1]) / after
        return x[1:-1], (after * slopes[0] + before * slopes[1]) / (before + after)

    def gaps(self) -> Tensor:
        """The time from each training state to the next, (n, 1), in the order of `pairs`."""
        return (self.time[1 : self.cut] - self.time[: self.cut - 1])[:, None]


def load(name: Name, folder: Path | None) -> Motion:
    """A data set by name; `folder` (else TAILORING_DATA) holds `pendulum/FILE`."""
    if name == "simulated":
        return simulated()
    source = SOURCES[name]
    table = read(_path(source, folder), source)[:: source.stride]
    time, states = table[:, 1], table[:, 2:] / source.scale
    motion = Motion(time, states, Law("pendulum", 2.4))  # the constant of hamiltonian-nn's code
    return motion if name == "pendulum" else Motion(time, states, _spring_law(motion))


def _path(source: Source, folder: Path | None) -> Path:
    given = folder if folder is not None else Path(os.environ.get("TAILORING_DATA", "../shared/data"))
    for path in (given / "pendulum" / source.file, given / source.file):
        if path.exists():
            return path
    raise FileNotFoundError(f"{source.file} is neither in {given / 'pendulum'} nor in {given}. {WHERE}")


def read(path: Path, source: Source) -> Tensor:
    """The table of a file, (rows, 4) in float64, once its size and its checksum are found right."""
    content = path.read_bytes()
    lines = [line.split() for line in content.decode("ascii", errors="replace").splitlines() if line.strip() and not line.startswith("%")]
    widths = sorted({len(line) for line in lines})
    if len(lines) != source.rows or widths != [4]:
        raise ValueError(f"{path} has {len(lines)} rows of {widths} columns; it should have {source.rows} rows of 4. {WHERE}")
    found = hashlib.sha256(content).hexdigest()
    if found != source.sha256:
        raise ValueError(f"{path} has the SHA-256 sum {found}; it should be {source.sha256}. {WHERE}")
    return torch.from_numpy(np.array(lines, dtype=np.float64))


def _spring_law(motion: Motion) -> Law:
    """Stiffness and rest position by least squares on the training labels: dp/dt = -stiffness (q - rest) - friction p."""
    x, y = motion.pairs("central", "train")
    columns = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)
    slope, _, offset = torch.linalg.lstsq(columns, y[:, 1:]).solution.squeeze(1).tolist()
    return Law("spring", -slope, offset / -slope)


def simulated(rows: int = 556, step: float = 1 / 6, friction: float = 0.0048) -> Motion:
    """A damped pendulum much like the measured one, without noise: q'' = -1.2 sin q - 2 friction q'. For tests and where no file is.

    Its energy 2.4 (1 - cos q) + p^2 falls at the measured rate.
    """
    inner = 20
    h = step / inner

    def slope(x: np.ndarray) -> np.ndarray:
        return np.array([x[1], -1.2 * np.sin(x[0]) - 2 * friction * x[1]])

    x = np.array([1.14, 0.92])
    states = [x]
    for _ in range(rows - 1):
        for _ in range(inner):  # classical Runge-Kutta
            a = slope(x)
            b = slope(x + h / 2 * a)
            c = slope(x + h / 2 * b)
            x = x + h / 6 * (a + 2 * b + 2 * c + slope(x + h * c))
        states.append(x)
    time = step * np.arange(rows)
    return Motion(torch.from_numpy(time), torch.from_numpy(np.array(states)), Law("pendulum", 2.4))
