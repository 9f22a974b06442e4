"""Tables of the contrastive experiment: Figure 4 in numbers, its controls, what was chosen on validation, TTT, CN."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from ._contrastive_figures import pictures
from ._contrastive_plan import Variant
from ._contrastive_results import Setting, best, best_decays, best_of_image, settings
from ._report import Estimate, Table, about, write
from ._rows import Row, last_of_each, read_folder

PAPER_GAIN = (0.5, 0.8)  # points, caption of Figure 4
PAPER_ROTATION = 80.5  # % of test images, App.

METHODS = {
    "plain": "plain",
    "augmented": "trained on views, asked of the image",
    "mean": "control: mean of the views",
    "augmented-mean": "control: trained on views, mean of the views",
    "tailored": "tailored at prediction only",
    "meta-0": "meta-tailored, asked without tailoring",
    "meta": "meta-tailored",
    "meta-paper": "meta-tailored, the paper's steps and lr",
    "tailored-image": "without averaging: tailored at prediction only",
    "meta-image-0": "without averaging: meta-tailored, asked without tailoring",
    "meta-image": "without averaging: meta-tailored",
    "meta-image-paper": "without averaging: meta-tailored, the paper's steps and lr",
}


ONCE = ("encoder", "plain-choice", "rotation", "ttt", "cn")
KEYS = {"choice": ("variant", "views"), "result": ("trained",), "cn-choice": ("lr",), **dict.fromkeys(ONCE, ())}


class Results:
    def __init__(self, rows: Sequence[Row]):
        self.rows, self.config = last_of_each(rows, KEYS), rows[0]["config"]
        self.labels: list[int] = self.config["labels"]
        self.methods: dict[str, list[list[float]]] = {}  # [labels][seed]
        for row in self.of("result"):
            self.methods |= {name: row[name] for name in METHODS if name in row}

    def of(self, kind: str) -> list[Row]:
        return [row for row in self.rows if row["kind"] == kind]

    def one(self, kind: str) -> Row | None:
        return next(iter(self.of(kind)), None)

    def accuracy(self, method: str) -> list[Estimate]:
        return [Estimate(tuple(seeds)) for seeds in self.methods[method]]

    def gain(self, method: str, over: str) -> list[Estimate]:
        """Difference of accuracies, training by training: the same labelled images in the same order."""
        return differences(self.methods[method], self.methods[over])

    def worth(self, method: str) -> list[tuple[float, str]]:
        """By what factor labels would have to be added for the plain layer to be as good; "<" and ">": beyond the numbers tried."""
        plain = [e.mean for e in self.accuracy("plain")]
        return [_factor(self.labels, plain, place, e.mean) for place, e in enumerate(self.accuracy(method))]


def differences(a: Sequence[Sequence[float]], b: Sequence[Sequence[float]]) -> list[Estimate]:
    return [Estimate(tuple(x - y for x, y in zip(*pair, strict=True))) for pair in zip(a, b, strict=True)]


def _factor(labels: Sequence[int], plain: Sequence[float], place: int, reached: float) -> tuple[float, str]:
    """Where the plain curve reaches an accuracy, as a multiple of labels[place]."""
    for i in range(len(labels) - 1):
        low, high = plain[i], plain[i + 1]
        if low <= reached <= high and high > low:
            part = (reached - low) / (high - low)
            return math.exp(math.log(labels[i]) + part * math.log(labels[i + 1] / labels[i])) / labels[place], ""
    return (labels[0] / labels[place], "<") if reached < plain[0] else (labels[-1] / labels[place], ">")


def tables(results: Results) -> list[Table]:
    made = [_accuracies(results), _gains(results), _ttt(results), _ablation(results), *_grids(results), _cn(results), _facts(results)]
    return [table for table in made if table is not None]


def _columns(results: Results, first: str) -> tuple[str, ...]:
    return (first, *(str(n) for n in results.labels))


def _cells(estimates: Sequence[Estimate]) -> list[str]:
    """Accuracies in %, without a mark: that an accuracy is not 0 needs none."""
    return [e.percent().removesuffix(" ?") for e in estimates]


def _points(estimates: Sequence[Estimate]) -> list[str]:
    return [f"{100 * e.mean:+.2f}" + (f" ± {100 * e.error:.2f}{'' if e.clear else ' ?'}" if len(e.values) > 1 else "") for e in estimates]


def _accuracies(results: Results) -> Table | None:
    if not results.methods:
        return None
    c = results.config
    title = f"Figure 4: test accuracy (%) against labels per class, {c['encoder']}, {c['epochs']} epochs of SimCLR, {c['images']}"
    table = Table(title, _columns(results, "method \\ labels"), note=_note(results))
    table.rows.extend((label, *_cells(results.accuracy(name))) for name, label in METHODS.items() if name in results.methods)
    return table


def _note(results: Results) -> str:
    seeds = len(results.config["seeds"])
    names = [(label, r) for name, label in METHODS.items() for r in results.of("result") if r["trained"] == name in ("meta", "meta-image")]
    chosen = "".join(f" {label[0].upper()}{label[1:]}: {_setting(row['setting']).name}, chosen on validation." for label, row in names)
    return f"± standard error over {seeds} trainings of the linear layer, one encoder and one test set.{chosen}"


def _setting(fields: Row) -> Setting:
    return Setting(**{**fields, "variant": Variant(**fields["variant"])})


def _gains(results: Results) -> Table | None:
    if not {"plain", "meta"} <= results.methods.keys():
        return None
    table = Table(
        "Differences of test accuracy in points, training by training",
        _columns(results, "difference \\ labels"),
        note=f"?: no larger than the spread explains (95 %). The paper: {PAPER_GAIN[0]} to {PAPER_GAIN[1]} points, as much as doubling the "
        "labels. Worth: by what factor labels would have to be added for the plain layer to be as good (interpolated on a log axis).",
    )
    others = ("meta", "meta-paper", "tailored", "mean", "augmented", "augmented-mean", "meta-image", "meta-image-paper", "tailored-image")
    pairs = [(name, "plain") for name in others] + [("meta", "mean"), ("meta", "augmented"), ("meta", "augmented-mean"), ("meta", "meta-0")]
    pairs += [("meta-image", "mean"), ("meta-image", "meta-image-0")]
    for name, over in pairs:
        if over == "mean" and name == "meta":
            table.rows.append(())
        if {name, over} <= results.methods.keys():
            table.rows.append((f"{METHODS[name]} - {METHODS[over]}", *_points(results.gain(name, over))))
    table.rows.append(())
    for name in ("meta", "mean", "augmented", "meta-image"):
        if name in results.methods:
            cells = [f"{beyond} x {factor:.2f}".strip() for factor, beyond in results.worth(name)]
            table.rows.append((f"worth: {METHODS[name]}", *cells))
    return table


def _ttt(results: Results) -> Table | None:
    row = results.one("ttt")
    if row is None:
        return None
    still = row["lrs"].index(0.0)
    table = Table(
        f"TTT by rotation prediction, {row['steps']} steps: test accuracy in points relative to lr 0",
        _columns(results, "lr \\ labels"),
        note="The paper: worse with every step size, the more so the larger. ?: no larger than the spread explains (95 %).",
    )
    for how, label in (("plain", "TTT"), ("meta", "layer trained on rotation-tailored h")):
        if how == "meta":
            table.rows.append(())
        for place, lr in enumerate(row["lrs"]):
            if lr:
                table.rows.append((f"{label}, lr {lr:g}", *_points(differences(row[how][place], row[how][still]))))
    return table


def _ablation(results: Results) -> Table | None:
    plain, found = results.one("plain-choice"), settings(results.rows)
    if plain is None or not found:
        return None
    base = best_decays(plain["accuracy"])[1]
    table = Table(
        "What the paper leaves open: validation accuracy (%) of the best setting of each variant",
        ("variant", "accuracy", "- plain, points", "setting"),
        [("plain", f"{100 * base:.2f}", "", "")],
        f"Mean over {', '.join(map(str, results.config['grid_labels']))} labels per class and {len(results.config['grid_seeds'])} seeds.",
    )
    for variant in dict.fromkeys(setting.variant for setting, _ in found):
        own = [pair for pair in found if pair[0].variant == variant and pair[0].views == max(results.config["views"])]
        setting, accuracy = max(own, key=lambda pair: pair[1])
        table.rows.append(
            (variant.name, f"{100 * accuracy:.2f}", f"{100 * (accuracy - base):+.2f}", f"steps {setting.steps}, lr {setting.lr:g}")
        )
    return table


def _grids(results: Results) -> list[Table]:
    """Of the best variant, and of the best that does not average views."""
    plain, found = results.one("plain-choice"), settings(results.rows)
    if plain is None or not found:
        return []
    variants = dict.fromkeys(setting.variant for setting in (best(found), best_of_image(found)) if setting)
    return [_grid(results, variant, best_decays(plain["accuracy"])[1]) for variant in variants]


def _grid(results: Results, variant: Variant, base: float) -> Table:
    found = settings(results.rows)
    lrs = results.config["lrs"]
    table = Table(
        f"The paper's grid with {variant.name}: validation accuracy in points relative to plain",
        ("views, steps \\ lr", *(f"{lr:g}" for lr in lrs)),
        note="The paper: more views, more steps and larger step sizes gave bigger improvements.",
    )
    by = {(s.views, s.steps, s.lr): accuracy for s, accuracy in found if s.variant == variant}
    for views in results.config["views"]:
        for steps in range(1, results.config["steps"] + 1):
            if (views, steps, lrs[0]) in by:
                table.rows.append((f"{views} views, {steps}", *(f"{100 * (by[views, steps, lr] - base):+.2f}" for lr in lrs)))
    return table


def _cn(results: Results) -> Table | None:
    row = results.one("cn")
    if row is None:
        return None
    c = results.config
    table = Table(
        f"CN on the encoder or Shift on h: test accuracy (%), labels among the first {c['cn_train']} training images",
        ("method \\ labels", *(str(n) for n in row["labels"]), *(f"- plain, {n}" for n in row["labels"])),
        note=f"CN: steps {row['steps']}, lr {row['lr']:g}, chosen on {c['cn_validation']} validation images. "
        f"Shift: {_setting(row['setting']).name}.",
    )
    for name, label in (("plain", "plain"), ("shift", "Shift on h"), ("cn", "CN on the encoder")):
        gains = _points(differences(row[name], row["plain"])) if name != "plain" else [""] * len(row["labels"])
        table.rows.append((label, *_cells([Estimate(tuple(seeds)) for seeds in row[name]]), *gains))
    return table


def _facts(results: Results) -> Table | None:
    encoder, rotation = results.one("encoder"), results.one("rotation")
    if encoder is None:
        return None
    table = Table("Encoder and rotation head", ("", "ours", "paper"))
    table.rows.append(("encoder", f"{results.config['encoder']}, {encoder['parameters'] / 1e6:.2f}M weights", "ResNet-50"))
    table.rows.append(("NT-Xent on test images", f"{encoder['contrastive_loss']:.3f}", ""))
    for row in results.of("result"):
        if row["moved"]:
            name, moved = METHODS[row["trained"]], row["moved"]
            table.rows.append((f"{name}: tailoring loss by step, test", ", ".join(f"{loss:.3f}" for loss in moved["loss"]), ""))
            table.rows.append((f"{name}: mean distance that h moved, of its length", f"{moved['distance']:.2f}", ""))
            table.rows.append((f"{name}: queries given up", str(moved["failed"]), ""))
    if rotation:
        for part, accuracy in rotation["accuracy"].items():
            paper = f"{PAPER_ROTATION} %" if part == "test" else ""
            table.rows.append((f"rotation head, {part} images", f"{100 * accuracy:.1f} %", paper))
    return table


def verdict(results: Results) -> str:
    """The three questions: a gain of 0.5 to 0.8 points? Worth a doubling of the labels? Does TTT hurt?"""
    lines = []
    if {"plain", "meta"} <= results.methods.keys():
        gains = results.gain("meta", "plain")
        lines.append(f"Meta-tailoring against plain: {_range(gains)} (the paper: +{PAPER_GAIN[0]} to +{PAPER_GAIN[1]}).")
        worth = results.worth("meta")
        doubled = sum(factor >= 2 and beyond != "<" for factor, beyond in worth)
        known = sum(beyond != ">" or factor >= 2 for factor, beyond in worth)
        lines.append(f"Worth a doubling of the labels or more: at {doubled} of {known} numbers of labels where that can be told.")
    if {"mean", "meta"} <= results.methods.keys():
        lines.append(f"Meta-tailoring against the mean of the same views: {_range(results.gain('meta', 'mean'))}.")
    if {"plain", "meta-image"} <= results.methods.keys():
        lines.append(f"Without averaging views, against plain: {_range(results.gain('meta-image', 'plain'))}.")
    row = results.one("ttt")
    if row is not None:
        still, last = row["lrs"].index(0.0), row["lrs"].index(max(row["lrs"]))
        change = differences(row["plain"][last], row["plain"][still])
        lines.append(f"TTT with its largest step size: {_range(change)}.")
    return "\n".join(lines)


def _range(gains: Sequence[Estimate]) -> str:
    low, high = min(e.mean for e in gains), max(e.mean for e in gains)
    up, down = sum(e.clear and e.mean > 0 for e in gains), sum(e.clear and e.mean < 0 for e in gains)
    return (
        f"{100 * low:+.2f} to {100 * high:+.2f} points; of {len(gains)} numbers of labels clearly better at {up}, clearly worse at {down}"
    )


def report(folder: Path) -> str:
    """Write figures and the page beside the rows; the tables as text."""
    results = Results(read_folder(folder, "contrastive"))
    made = tables(results)
    write(folder, "Contrastive tailoring: Figure 4 and TTT", about(results.rows), made, lambda: pictures(results))
    said = verdict(results)
    return "\n\n".join([table.text() for table in made] + ([said] if said else []))
