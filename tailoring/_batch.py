"""A batch of queries before, and what is told of it after its tailoring."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._casts import Site
from ._places import Asked, Places
from ._reuse import Reuse
from ._states import State
from ._trees import take_rows


@dataclass(frozen=True)
class Trace:
    """What happened to each query of a batch."""

    prediction: Any
    losses: Tensor  # (steps + 1, queries): the tailoring loss before the first step and after each
    steps: Tensor  # (queries,): the steps taken by the state that answered
    stopped: Tensor  # (queries,): its loss came down to `stop`
    failed: Tensor  # (queries,): not finite on the way, so answered untailored
    state: State
    sites: tuple[Site, ...]
    ran_once: tuple[str, ...] = ()  # modules below the first adapted one that were not run again at each step

    def __str__(self) -> str:
        curve = " ".join(f"{value:.4g}" for value in self.losses.double().mean(1).tolist())
        places = ", ".join(dict.fromkeys(site.key or "the output" for site in self.sites))
        once = ", ".join(name or "all of it" for name in self.ran_once) or "nothing"
        return (
            f"{self.losses.shape[1]} queries, mean tailoring loss by step: {curve}\n"
            f"mean steps of the answer {self.steps.double().mean():.2f}, stopped early {int(self.stopped.sum())}, "
            f"fell back {int(self.failed.sum())}\nadapted: {places}\nof the model, run once for all steps: {once}"
        )


class Batch(NamedTuple):
    """A batch of queries on its way through the inner loop."""

    x: Any
    queries: int
    places: Places
    seeds: Tensor | None = None
    start: State | None = None  # a warm start
    reuse: Reuse | None = None
    rescued: bool = False  # answered untailored, too, in case the tailored answer fails

    @property
    def sites(self) -> tuple[Site, ...]:
        return self.places.sited.sites

    def part(self, rows: Tensor, total: int) -> Batch:
        """The queries that these rows of a state serve, of `total` rows that serve equally many each; nothing is asked or kept of it."""
        each = self.queries // total
        own = rows if each == 1 else (rows[:, None] * each + torch.arange(each, device=rows.device)).flatten()
        x, seeds = take_rows((self.x, self.seeds), own)
        places = self.places._replace(asked=Asked(enough=True))
        return Batch(x, len(own), places, seeds)
