"""Table 1 from result rows, with the paper's numbers beside ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import fill

from ._planets_figures import pictures
from ._planets_results import Chosen, Results, Setting
from ._report import Estimate, Table, about, write
from ._rows import read_folder

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
LAW = "law: by how much the answers violate it, |E' - E| + 10 |P' - P|_1."


def _columns(other: str) -> tuple[str, ...]:
    return "method", "loss", "law", "better %", other, "paper", "paper %", "setting"


def tables(results: Results) -> list[Table]:
    c = results.config
    base = results.choose(results.settings("inductive", c["weight"]), "tailoring", 0)
    if base is None:
        return []
    strongest = results.choose(_inductive(results), "tailoring", 0) or base
    line = _lines(results, base, strongest)
    rows: list[Sequence[str]] = []
    for name, label in (("identity", "predict the input"), ("constant velocity", "constant velocity")):
        if results.trivial:
            loss = results.trivial[name]["test"]["mse"][0]
            law = f"{results.trivial[name]['test']['physics'][0]:.2g}"
            rows.append((label, f"{loss:.4g}", law, _against(results, base, loss), _against(results, strongest, loss), "", "", ""))
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
        _columns("vs best %"),
        _ruled(rows),
        f"{LAW} better %: fall of the loss relative to `inductive`, seed by seed, ± standard error over the "
        f"{len(base.names)} seed(s); ?: no larger than the spread explains (95 %). vs best %: relative to the best inductive "
        f"network of all physics weights and lengths of training ({_setting(strongest, 0)}). Settings were chosen on validation data.",
    )
    more: list[Sequence[str]] = []
    after = _within({0: "", steps: ""}, steps)

    def add(label: str, settings: list[Setting], procedure: str = "tailoring", shown: dict[int, str] | None = None) -> None:
        shown = after if shown is None else shown
        more.extend(line(label, [results.choose(settings, procedure, max(shown))], shown, label + " ({})"))

    zero = c["weights"][0] if c["weights"] else None
    add("control: inductive, twice the epochs", results.settings("inductive-updates", w))
    add("control: inductive, own best weight", results.settings("inductive"))
    add("control: inductive, two updates a batch", results.settings("batches-twice"))
    add("control: BatchNorm", results.settings("batchnorm"))
    add("control: BatchNorm, two updates a batch", results.settings("batchnorm-twice"))
    add("control: best inductive of all", _inductive(results))
    add("meta-tailoring, own best weight", results.settings("meta"))
    add("same, w after each inner step", results.settings("meta-each"))
    if zero == 0:
        add("no regulariser: inductive", results.settings("inductive", zero))
        add("no regulariser: meta-tailoring", results.settings("meta", zero))
        add("no regulariser: same, w after each", results.settings("meta-each", zero))
    add("control: random CN noise", results.settings("noise"))
    add("same, w after each noise", results.settings("noise-each"))
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
        made += _other_network(results, method, title, base)
    ablations = _ablations(results)
    return made + ([ablations] if ablations else [])


def _other_network(results: Results, method: str, title: str, base: Chosen) -> list[Table]:
    """The same comparisons for a network that others are measured against by itself."""
    c, plain = results.config, results.choose(results.settings(method), "tailoring", 0)
    if plain is None or results.trivial is None:
        return []
    own = _lines(results, plain, base)
    identity = results.trivial["identity"]["test"]["mse"][0]
    gains = _against(results, plain, identity), _against(results, base, identity)
    rows: list[Sequence[str]] = [("predict the input", f"{identity:.4g}", "0", *gains, "", "", "")]
    settings, steps, output = results.settings(method), c["steps"], c["output_steps"]
    rows += own("inductive", [plain], {0: ""}, "inductive")
    rows += own("output", [results.choose(settings, "output", output)], {output: ""}, "optimise the output ({})")
    rows += own("ttt", [results.choose(settings, "ttt", output)], {output: ""}, "batch TTT ({})")
    rows += own("projection", [results.choose(settings, "projection", 0)], {0: ""}, "projection onto the law")
    shown = _within({1: "", 5: "", 10: ""}, steps)
    rows += own("tailoring", [results.choose(settings, "tailoring", steps)], shown, "tailoring ({})")
    rows += own("weights", [results.choose(settings, "weights", steps)], shown, "tailoring, all weights ({})")
    rows += own(
        "updates", [results.choose(results.settings(f"{method}-updates"), "tailoring", steps)], {0: "", steps: ""}, "twice the epochs ({})"
    )
    rows += own("meta", [results.choose(results.settings(f"{method}-meta"), "tailoring", steps)], {0: "", **shown}, "meta-tailoring ({})")
    note = f"{LAW} better %: relative to this table's inductive network."
    return [Table(f"{title} (early stopping on validation)", _columns("vs Table 1's %"), rows, note)]


def _ablations(results: Results) -> Table | None:
    """On validation, as the paper chose width and BatchNorm."""
    rows: list[Sequence[str]] = []
    base = results.choose(results.settings("inductive", results.config["weight"]), "tailoring", 0)
    for label, settings, steps in (
        ("inductive", results.settings("inductive", results.config["weight"]), 0),
        *((s[0], [s], 0) for s in sorted(results.nets) if s[0].startswith(("width-", "batchnorm"))),
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
            rows.append((label, str(Estimate(tuple(losses))), str(len(losses)), _setting(chosen, steps)))
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
                        f"{results.violation(chosen, steps).mean:.2g}",
                        *cells,
                        "" if loss is None else f"{loss:.3f}",
                        relative or "",
                        _setting(chosen, steps),
                    )
                )
        return made

    return lines


def _against(results: Results, base: Chosen, loss: float) -> str:
    return Estimate(tuple(1 - loss / results.loss(name, base.procedure, base.lr, "test", 0) for name in base.names)).percent()


def _inductive(results: Results) -> list[Setting]:
    """All ways to train without tailoring that as many seeds were given as the most."""
    methods = ("inductive", "inductive-updates", "batches-twice", "batchnorm", "batchnorm-twice")
    found = [s for method in methods for s in results.settings(method)]
    most = max((len(results.nets[s]) for s in found), default=0)
    return [s for s in found if len(results.nets[s]) == most]


def _setting(chosen: Chosen, steps: int) -> str:
    method, weight, lr = chosen.setting
    trained = f", trained with lr {lr:g}" if lr else ""
    long = {
        "inductive-updates": ", twice the epochs",
        "batches-twice": ", two updates a batch",
        "batchnorm-twice": ", two updates a batch",
    }.get(method, "")
    return f"w {weight:g}{trained}{long}" + (f"; lr {chosen.lr:g}" if chosen.lr and steps else "")


def _ruled(rows: list[Sequence[str]]) -> list[Sequence[str]]:
    """Without rules that part nothing."""
    return [row for i, row in enumerate(rows) if row or (i and rows[i - 1] and any(rows[i:]))]


def _within(shown: dict[int, str], steps: int) -> dict[int, str]:
    return {s: paper for s, paper in shown.items() if s <= steps}


def report(folder: Path) -> str:
    """Write figures and the page beside the rows; the tables as text."""
    results = Results(read_folder(folder, "planets"))
    made = tables(results)
    if not made:
        return "These rows hold no inductive network yet, so there is nothing to compare with."
    write(folder, "Planets: Table 1 and Figure 2", about(results.rows), made, lambda: pictures(results))
    return "\n\n".join([table.text() for table in made] + [verdict(made[0])])


def verdict(table: Table) -> str:
    """What of Table 1 is better or worse by more than the seeds' spread explains: than inductive learning, and than its strongest form."""
    first, best = table.columns.index("better %"), table.columns.index("vs best %")
    rows = [row for row in table.rows if row]
    if not any("±" in row[column] for row in rows for column in (first, best)):
        return "One seed: no spread to compare the differences with."
    told = [_verdict("the inductive network", [(row[0], row[first]) for row in rows])]
    strongest = next((row for row in rows if row[0] == "inductive"), None)
    if strongest and strongest[best]:  # else it is the same network
        told.append(_verdict("the strongest control, the best inductive network of all", [(row[0], row[best]) for row in rows]))
    return "\n".join(told)


def _verdict(other: str, gains: list[tuple[str, str]]) -> str:
    gains = [(name, gain) for name, gain in gains if "±" in gain]
    kinds = {
        "better": [f"{name} ({gain} %)" for name, gain in gains if "?" not in gain and not gain.startswith("-")],
        "worse": [f"{name} ({gain} %)" for name, gain in gains if "?" not in gain and gain.startswith("-")],
        "neither, by more than the seeds' spread explains": [name for name, gain in gains if "?" in gain],
    }
    lines = [f"{kind}: {'; '.join(found)}" for kind, found in kinds.items() if found]
    return "\n".join([f"Against {other}:", *(fill(line, 140, initial_indent="  ", subsequent_indent="    ") for line in lines)])
