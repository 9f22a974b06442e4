"""What is chosen on validation data, from rows: by the run, to go on with it, and by the report, to show it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ._contrastive_plan import Config, Variant
from ._rows import Row

Accuracies = Sequence[Sequence[Sequence[float]]]  # [labels][seed][weight decay]


@dataclass(frozen=True)
class Setting:
    """A way of tailoring by agreement."""

    variant: Variant
    views: int
    steps: int
    lr: float

    @property
    def name(self) -> str:
        return f"{self.variant.name}, {self.views} views, {self.steps} step{'s' * (self.steps != 1)}, lr {self.lr:g}"


def best_decays(accuracy: Accuracies) -> tuple[list[int], float]:
    """Of each number of labels, the weight decay (its place) with the highest mean over seeds; and the mean accuracy with these."""
    means = [[sum(of) / len(of) for of in zip(*seeds, strict=True)] for seeds in accuracy]  # [labels][decay]
    places = [of.index(max(of)) for of in means]
    return places, sum(max(of) for of in means) / len(means)


def settings(rows: Iterable[Row]) -> list[tuple[Setting, float]]:
    """Every setting that was tried, and its validation accuracy: the mean over numbers of labels and seeds, weight decay chosen."""
    found = []
    for row in rows:
        if row["kind"] == "choice":
            for lr, after in zip(row["lrs"], row["accuracy"], strict=True):
                for steps, accuracy in enumerate(after, 1):
                    found.append((Setting(Variant(**row["variant"]), row["views"], steps, lr), best_decays(accuracy)[1]))
    return found


def best(found: Iterable[tuple[Setting, float]]) -> Setting:
    """The first of the best: settings are tried in the order of the config."""
    return max(found, key=lambda pair: pair[1])[0]


def best_of_image(found: Iterable[tuple[Setting, float]]) -> Setting | None:
    """The best of those that classify the image itself, not its views; None if none was tried."""
    own = [pair for pair in found if not pair[0].variant.averages]
    return best(own) if own else None


def papers(config: Config, variant: Variant) -> Setting:
    """The setting that the paper chose, for what it leaves open."""
    return Setting(variant, config.most_views, config.steps, config.paper_lr)
