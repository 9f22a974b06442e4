"""The rows of a planets run, by network, procedure and step size, and what is chosen among them on validation data."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ._report import Estimate
from ._rows import Row

Setting = tuple[str, float, float]  # method, weight of the physics regulariser, inner step size in training


@dataclass(frozen=True)
class Chosen:
    """A setting of training and prediction, chosen on validation data."""

    setting: Setting
    procedure: str
    lr: float
    names: tuple[str, ...]  # of the networks, one for each seed


class Results:
    """The rows of a run, by network, procedure, step size and part of the data."""

    def __init__(self, rows: Iterable[Row]):
        self.rows = list(rows)
        self.config = next(r["config"] for r in self.rows if r["kind"] == "config")
        self.trivial = next((r["trivial"] for r in self.rows if r["kind"] == "data"), None)
        self.curves = {(r["name"], r["procedure"], r["lr"], r["part"]): r for r in self.rows if r["kind"] == "result"}
        self.nets: dict[Setting, dict[int, str]] = defaultdict(dict)
        for r in self.curves.values():
            t = r["training"]
            self.nets[t["method"], t["weight"], t["lr"]][t["seed"]] = r["name"]

    def loss(self, name: str, procedure: str, lr: float, part: str, steps: int) -> float:
        value = self.curves[name, procedure, lr, part]["mse"][steps]
        return value if math.isfinite(value) else math.inf

    def choose(self, settings: Sequence[Setting], procedure: str, steps: int) -> Chosen | None:
        """The setting (and step size) with the lowest mean validation loss after `steps` steps, of those that all seeds have."""
        best: tuple[float, Chosen] | None = None
        for setting in settings:
            names = tuple(self.nets[setting][seed] for seed in sorted(self.nets[setting])) if setting in self.nets else ()
            for lr in sorted({key[2] for key in self.curves if key[0] in names and key[1] == procedure}):
                if not all((name, procedure, lr, part) in self.curves for name in names for part in ("validation", "test")):
                    continue
                loss = sum(self.loss(name, procedure, lr, "validation", steps) for name in names) / len(names)
                if best is None or loss < best[0]:
                    best = loss, Chosen(setting, procedure, lr, names)
        return best and best[1]

    def settings(self, method: str, weight: float | None = None, lr: float | None = None) -> list[Setting]:
        found = [s for s in self.nets if s[0] == method and weight in (None, s[1]) and lr in (None, s[2])]
        most = max((len(self.nets[s]) for s in found), default=0)
        return [s for s in found if len(self.nets[s]) == most]

    def test(self, chosen: Chosen, steps: int) -> Estimate:
        return Estimate(tuple(self.loss(name, chosen.procedure, chosen.lr, "test", steps) for name in chosen.names))

    def violation(self, chosen: Chosen, steps: int) -> Estimate:
        """What is left of the tailoring loss on the test data: by how much the law is violated."""
        return Estimate(tuple(self.curves[name, chosen.procedure, chosen.lr, "test"]["physics"][steps] for name in chosen.names))

    def seed_of(self, name: str) -> int:
        return next(r["training"]["seed"] for key, r in self.curves.items() if key[0] == name)

    def gain(self, chosen: Chosen, steps: int, base: Chosen) -> Estimate | None:
        """The fall of the test loss relative to `base` (plain), seed by seed: 1 - loss / loss of the base with the same seed."""
        of_seed = {self.seed_of(name): name for name in base.names}
        pairs = [(name, of_seed[self.seed_of(name)]) for name in chosen.names if self.seed_of(name) in of_seed]
        if not pairs:
            return None
        part = "test"
        return Estimate(
            tuple(
                1 - self.loss(a, chosen.procedure, chosen.lr, part, steps) / self.loss(b, base.procedure, base.lr, part, 0)
                for a, b in pairs
            )
        )
