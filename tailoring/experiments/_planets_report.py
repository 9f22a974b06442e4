"""Table 1 and Figure 2 from result rows, with the paper's numbers beside ours."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ._report import Estimate, Picture, Table, about, new_figure, write
from ._rows import Row, read_folder

# Table 1 of the paper: loss, relative improvement in %
PAPER = {
    "inductive": (0.041, None),
    "output": (0.041, "0.7 ± 0.1"),
    "ttt": (0.040, "3.6 ± 0.2"),
    "tailoring 1": (0.040, "1.9 ± 0.2"),
    "tailoring 5": (0.039, "6.3 ± 0.3"),
    "tailoring 10": (0.038, "7.5 ± 0.1"),
    "meta 0": (0.030, "26.3 ± 3.3"),
    "meta 1": (0.029, "29.9 ± 3.0"),
    "meta 5": (0.027, "35.3 ± 2.6"),
    "meta 10": (0.026, "36.0 ± 2.6"),
    "second-order": (None, "about 20"),
}

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


def tables(results: Results) -> list[Table]:
    c = results.config
    base = results.choose(results.settings("inductive", c["weight"]), "tailoring", 0)
    if base is None:
        return []
    strongest = results.choose(results.settings("inductive") + results.settings("inductive-updates"), "tailoring", 0) or base
    line = _lines(results, base, strongest)
    rows: list[Sequence[str]] = []
    for name, label in (("identity", "predict the input"), ("constant velocity", "constant velocity")):
        if results.trivial:
            loss = results.trivial[name]["test"]["mse"][0]
            rows.append((label, f"{loss:.4g}", _against(results, base, loss), _against(results, strongest, loss), "", "", ""))
    rows += [(), *line("inductive", [base], {0: "inductive"}, "inductive")]
    w, steps = c["weight"], c["steps"]
    output = c["output_steps"]
    plain = results.settings("inductive", w)
    rows += line(f"optimise the output ({output} steps)", [results.choose(plain, "output", output)], {output: "output"}, None)
    rows += line(f"batch TTT ({c['ttt_batch']}, {output} steps)", [results.choose(plain, "ttt", output)], {output: "ttt"}, None)
    rows.append(())
    at = {1: "tailoring 1", 5: "tailoring 5", 10: "tailoring 10"}
    rows += line("tailoring", [results.choose(plain, "tailoring", steps)], _within(at, steps), "tailoring ({})")
    meta = {0: "meta 0", 1: "meta 1", 5: "meta 5", 10: "meta 10"}
    for method, label in (("meta", "meta-tailoring, w once a batch"), ("meta-each", "meta-tailoring, w after each inner step")):
        rows.append(())
        rows += line(label, [results.choose(results.settings(method, w), "tailoring", steps)], _within(meta, steps), label + " ({})")
    main = Table(
        f"Table 1: test loss, split by {c['split']}, {c['stride']} integration steps ahead, width {c['width']}, {c['epochs']} epochs",
        ("method", "loss", "better %", "vs best %", "paper", "paper %", "setting"),
        _ruled(rows),
        "better %: fall of the loss relative to `inductive`, seed by seed, ± standard error over the "
        f"{len(base.names)} seed(s); ?: no larger than the spread explains (95 %). vs best %: relative to the best inductive "
        f"network of all physics weights and lengths of training ({_setting(strongest)}). Settings were chosen on validation data.",
    )
    more: list[Sequence[str]] = []
    after = _within({0: "", steps: ""}, steps)

    def add(label: str, settings: list[Setting], procedure: str = "tailoring", shown: dict[int, str] | None = None) -> None:
        shown = after if shown is None else shown
        more.extend(line(label, [results.choose(settings, procedure, max(shown))], shown, label + " ({})"))

    zero = c["weights"][0] if c["weights"] else None
    add("control: inductive, as many updates", results.settings("inductive-updates", w))
    add("control: inductive, own best weight", results.settings("inductive"))
    add("control: both", results.settings("inductive") + results.settings("inductive-updates"))
    add("meta-tailoring, own best weight", results.settings("meta"))
    add("same, w after each inner step", results.settings("meta-each"))
    if zero == 0:
        add("no regulariser: inductive", results.settings("inductive", zero))
        add("no regulariser: meta-tailoring", results.settings("meta", zero))
        add("no regulariser: same, w after each", results.settings("meta-each", zero))
    add("control: random CN noise", results.settings("noise"))
    add("paper's lr 1e-3: meta-tailoring", results.settings("meta", w, 1e-3))
    add("paper's lr 1e-3: same, w after each", results.settings("meta-each", w, 1e-3))
    more.append(())
    add("5 inner steps in training", results.settings("meta-5-steps"))
    add(
        'second order ("last"), lr 1e-4', results.settings("second-order", None, 1e-4), shown=_within({0: "", steps: "second-order"}, steps)
    )
    add('second order ("last"), lr 1e-3', results.settings("second-order", None, 1e-3))
    add('full second order ("all"), lr 1e-4', results.settings("full-second-order", None, 1e-4))
    add('full second order ("all"), lr 1e-3', results.settings("full-second-order", None, 1e-3))
    more.append(())
    add("projection onto the law", plain, "projection", {0: ""})
    add("all weights (MAMmoTh)", plain, "weights", _within({1: "", 5: "", steps: ""}, steps))
    add("meta-trained, all weights", results.settings("mammoth"), "weights", _within({0: "", 1: "", 5: "", steps: ""}, steps))
    extra = Table("Controls, orders, and beyond the paper", main.columns, _ruled(more))
    made = [main, extra] if any(more) else [main]
    for method, title in (("pairs", "A pairwise, permutation-equivariant network"), ("more", f"{c['more']} training trajectories")):
        made += _other_network(results, method, title, base, strongest)
    ablations = _ablations(results)
    return made + ([ablations] if ablations else [])


def _other_network(results: Results, method: str, title: str, base: Chosen, strongest: Chosen) -> list[Table]:
    """The same comparisons for a network that others are measured against by itself."""
    c, plain = results.config, results.choose(results.settings(method), "tailoring", 0)
    if plain is None or results.trivial is None:
        return []
    own = _lines(results, plain, base)
    identity = results.trivial["identity"]["test"]["mse"][0]
    rows = [("predict the input", f"{identity:.4g}", _against(results, plain, identity), _against(results, base, identity), "", "", "")]
    settings, steps, output = results.settings(method), c["steps"], c["output_steps"]
    rows += own("inductive", [plain], {0: ""}, "inductive")
    rows += own("output", [results.choose(settings, "output", output)], {output: ""}, "optimise the output ({})")
    rows += own("ttt", [results.choose(settings, "ttt", output)], {output: ""}, "batch TTT ({})")
    rows += own("projection", [results.choose(settings, "projection", 0)], {0: ""}, "projection onto the law")
    shown = _within({1: "", 5: "", 10: ""}, steps)
    rows += own("tailoring", [results.choose(settings, "tailoring", steps)], shown, "tailoring ({})")
    rows += own("weights", [results.choose(settings, "weights", steps)], shown, "tailoring, all weights ({})")
    rows += own("meta", [results.choose(results.settings(f"{method}-meta"), "tailoring", steps)], {0: "", **shown}, "meta-tailoring ({})")
    columns = ("method", "loss", "better %", "vs Table 1's %", "paper", "paper %", "setting")
    return [Table(f"{title} (early stopping on validation)", columns, rows, "better %: relative to this table's inductive network.")]


def _ablations(results: Results) -> Table | None:
    """On validation, as the paper chose width and BatchNorm."""
    rows: list[Sequence[str]] = []
    base = results.choose(results.settings("inductive", results.config["weight"]), "tailoring", 0)
    for label, settings, steps in (
        ("inductive", results.settings("inductive", results.config["weight"]), 0),
        *((s[0], [s], 0) for s in sorted(results.nets) if s[0].startswith("width-") or s[0] == "batchnorm"),
        *((f"physics weight {s[1]:g}", [s], 0) for s in sorted(results.nets) if s[0] == "inductive"),
        *(
            (f"{s[0]}, {results.config['steps']} steps", [s], results.config["steps"])
            for s in sorted(results.nets)
            if "second-order" in s[0]
        ),
    ):
        chosen = results.choose(settings, "tailoring", steps)
        if chosen and base:
            losses = [results.loss(name, "tailoring", chosen.lr, "validation", steps) for name in chosen.names]
            rows.append((label, str(Estimate(tuple(losses))), str(len(losses)), _setting(chosen)))
    if not any(row[0].startswith(("width", "batch")) for row in rows):
        return None
    return Table("Ablations, on validation data", ("network", "validation loss", "seeds", "setting"), rows)


def _lines(results: Results, base: Chosen, other: Chosen) -> Callable[..., list[Sequence[str]]]:
    def lines(label: str, found: list[Chosen | None], shown: dict[int, str], pattern: str | None) -> list[Sequence[str]]:
        made: list[Sequence[str]] = []
        for chosen in found:
            for steps, paper in shown.items() if chosen else ():
                assert chosen is not None
                loss, relative = PAPER.get(paper, (None, None))
                name = label if pattern is None else pattern.format(f"{steps} step{'s' * (steps != 1)}")
                gains = [results.gain(chosen, steps, b) for b in (base, other)]
                cells = [
                    "" if g is None or (chosen.names == b.names and not steps and chosen.procedure == "tailoring") else g.percent()
                    for g, b in zip(gains, (base, other), strict=True)
                ]
                made.append(
                    (
                        name,
                        str(results.test(chosen, steps)),
                        *cells,
                        "" if loss is None else f"{loss:.3f}",
                        relative or "",
                        _setting(chosen),
                    )
                )
        return made

    return lines


def _against(results: Results, base: Chosen, loss: float) -> str:
    return Estimate(tuple(1 - loss / results.loss(name, base.procedure, base.lr, "test", 0) for name in base.names)).percent()


def _setting(chosen: Chosen) -> str:
    method, weight, lr = chosen.setting
    trained = f", trained with lr {lr:g}" if lr else ""
    long = ", twice the updates" if method == "inductive-updates" else ""
    return f"w {weight:g}{trained}{long}; lr {chosen.lr:g}" if chosen.lr else f"w {weight:g}{trained}{long}"


def _ruled(rows: list[Sequence[str]]) -> list[Sequence[str]]:
    """Without rules that part nothing."""
    return [row for i, row in enumerate(rows) if row or (i and rows[i - 1] and any(rows[i:]))]


def _within(shown: dict[int, str], steps: int) -> dict[int, str]:
    return {s: paper for s, paper in shown.items() if s <= steps}


def pictures(results: Results) -> list[Picture]:
    return [p for p in (_paths(results), _roll_outs(results)) if p is not None]


def _paths(results: Results) -> Picture | None:
    """Figure 2: from right to left, the physics loss falls; does the task loss?"""
    c = results.config
    wanted = [
        ("tailoring", "inductive", "tailoring", c["path_lr"]),
        ("batch TTT", "inductive", "ttt", c["path_lr"]),
        ("output", "inductive", "output", max([lr for lr in c["output_lrs"] if lr <= 3e-4] or c["output_lrs"][:1])),
        ("meta-tailoring", "meta", "tailoring", c["path_lr"]),
        ("meta-tailoring, w after each step", "meta-each", "tailoring", c["path_lr"]),
    ]
    figure, (ax,) = new_figure(6.5, 4.2)
    drawn = 0
    for label, method, procedure, lr in wanted:
        chosen = results.choose(results.settings(method, c["weight"]), procedure, c["steps"])
        curve = chosen and results.curves.get((chosen.names[0], procedure, lr, "test"))
        if curve:
            ax.plot(curve["physics"], curve["mse"], ".-", markersize=3, linewidth=1, label=f"{label} (lr {lr:g})")
            ax.plot(curve["physics"][0], curve["mse"][0], "ko", markersize=4)
            drawn += 1
    ax.set(xlabel="physics loss", ylabel="task loss (MSE)")
    ax.legend(frameon=False, fontsize=8)
    caption = f"Figure 2: paths of optimisation at prediction time, {c['output_steps']} small steps from the dots, first seed, test data."
    return Picture("paths", caption, figure) if drawn else None


def _roll_outs(results: Results) -> Picture | None:
    rows = [r for r in results.rows if r["kind"] == "rollout" and r["training"]["seed"] == results.config["seeds"][0]]
    shown = [
        ("inductive", "plain"),
        ("inductive", "tailored"),
        ("inductive", "projected"),
        ("meta", "tailored"),
        ("pairs", "plain"),
        ("pairs", "tailored"),
    ]
    figure, axes = new_figure(10, 4, columns=2)
    drawn = 0
    for method, way in shown:
        of = [r for r in rows if r["training"]["method"] == method]
        if of:
            for ax, what in zip(axes, ("energy", "error"), strict=True):
                ax.semilogy(range(1, 1 + len(of[0]["ways"][way][what])), of[0]["ways"][way][what], label=f"{method}, {way}")
            drawn += 1
    axes[0].set(xlabel="steps", ylabel="median change of energy since the start")
    axes[1].set(xlabel="steps", ylabel="median squared error")
    axes[0].legend(frameon=False, fontsize=8)
    return (
        Picture("rollouts", "Roll-outs: predictions of predictions, first seed, medians over test trajectories.", figure) if drawn else None
    )


def report(folder: Path) -> str:
    """Write figures and the page beside the rows; the tables as text."""
    results = Results(read_folder(folder))
    made, drawn = tables(results), pictures(results)
    if not made:
        return "These rows hold no inductive network yet, so there is nothing to compare with."
    write(folder, "Planets: Table 1 and Figure 2", about(results.rows), made, drawn)
    return "\n\n".join([table.text() for table in made] + [verdict(made[0])])


def verdict(table: Table) -> str:
    """Which methods of Table 1 differ from inductive learning by more than the seeds' spread explains."""
    gains = [(row[0], row[2]) for row in table.rows if row and "±" in row[2]]
    if not gains:
        return "One seed: no spread to compare the differences with."
    clear = [f"{name} ({gain} %)" for name, gain in gains if "?" not in gain]
    unclear = [name for name, gain in gains if "?" in gain]
    lines = ["Larger than the seeds' spread: " + ("; ".join(clear) or "none") + "."]
    return "\n".join(lines + (["Not larger: " + "; ".join(unclear) + "."] if unclear else []))
