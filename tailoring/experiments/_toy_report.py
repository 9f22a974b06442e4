"""Tables and figures of the toy experiment."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ._report import Picture, Table, about, new_figure, write
from ._rows import Row, last_of_each, read_folder


class Results:
    def __init__(self, rows: list[Row]):
        self.rows = last_of_each(rows, {"result": ("setting",), "linear": (), "check": ()})
        self.config = rows[0]["config"]
        self.radii: list[float] = self.config["radii"]
        self.lines = next((r for r in self.rows if r["kind"] == "linear"), None)
        self.check = next((r for r in self.rows if r["kind"] == "check"), None)

    def found(self, **wanted: Any) -> list[Row]:
        """The results whose settings are the paper's but for these."""
        paper = {"grid": 5, "lr": 10.0, "weighted": False, "ascent": self.config["ascent"], "theta": "separator"} | wanted
        return [r for r in self.rows if r["kind"] == "result" and all(r["setting"][n] == v for n, v in paper.items())]


def _cells(values: Sequence[float]) -> list[str]:
    return [f"{100 * v:.1f}" for v in values]


def _tables(results: Results) -> list[Table]:
    radii = [f"{r:g}" for r in results.radii]
    main = Table(
        "Accuracy (%) that the worst attack within a radius leaves",
        ("classifier \\ radius", *radii),
        note="By integration over the plane: no sample, no seeds. The best line is chosen for each radius, knowing it.",
    )
    if results.lines:
        main.rows.append(("linear separator (formula)", *_cells(results.lines["plain"])))
    if results.check:
        main.rows.append(("linear separator (by the map)", *_cells(results.check["accuracy"])))
    main.rows.extend((f"tailored, eps {r['setting']['eps']:g}", *_cells(r["accuracy"])) for r in results.found())
    if results.lines:
        main.rows.append(("best line for that radius", *_cells(results.lines["best"])))

    eps = results.config["variants_eps"]
    columns = ("variant", *radii, "labels changed %", "not finite", "seconds")
    variants = Table(f"Variants at eps {eps:g}: accuracy (%) against the radius of the attack", columns)

    def add(label: str, **wanted: Any) -> None:
        for r in results.found(eps=eps, **wanted):
            last = (f"{100 * r['changed']:.1f}", str(r["not_finite"]), f"{r['seconds']:.0f}")
            variants.rows.append((label, *_cells(r["accuracy"]), *last))

    add("the paper's: 5x5 starts, step 10")
    for grid in results.config["grids"]:
        if grid != 5:
            add(f"{grid}x{grid} starts" if grid > 1 else "1 start", grid=grid)
    for lr in results.config["lrs"]:
        if lr != 10:
            add(f"step {lr:g}", lr=lr)
    add("energy-weighted, ends of the ascents", weighted=True)
    add("energy-weighted, the 5x5 points themselves", weighted=True, ascent=0)
    for lr in results.config["lrs"]:
        add(f"tailoring the means, step {lr:g}", theta="means", lr=lr)
    return [main, variants]


def _boundaries(results: Results) -> Picture:
    figure, (ax,) = new_figure(7.5, 4.2)
    data = results.config["data"]
    (mx, my), (sx, sy) = data["mean"], data["deviation"]
    from matplotlib.patches import Ellipse

    for sign, color in ((1, "tab:blue"), (-1, "tab:red")):
        for k in (1, 2):
            ax.add_patch(Ellipse((sign * mx, sign * my), 2 * k * sx, 2 * k * sy, facecolor=color, alpha=0.13, edgecolor="none"))
        ax.plot([sign * mx], [sign * my], ".", color=color)
    ax.axline((0, 0), (-my / sy**2, mx / sx**2), color="purple", linewidth=2, label="linear separator")
    for number, r in enumerate(results.found()):
        x, y = [x for x, _ in r["boundary"]], [y for _, y in r["boundary"]]  # none, if one class is answered everywhere
        ax.plot(x, y, ".", markersize=2.5, color=f"C{number + 1}", label=f"tailored, eps {r['setting']['eps']:g}")
    ax.set(xlim=(-20, 20), ylim=(-6, 6), xlabel="x1", ylabel="x2")
    ax.legend(frameon=False, fontsize=8, markerscale=4, loc="upper right")
    caption = "Decision boundaries of the separator tailored with several eps; shaded: both classes, one and two deviations."
    return Picture("boundaries", caption, figure)


def _attack(results: Results) -> Picture:
    figure, (left, right) = new_figure(11, 4, columns=2)
    tailored = results.found()
    if results.lines:
        left.plot(results.radii, results.lines["plain"], color="purple", linewidth=2, label="linear separator")
        left.plot(results.radii, results.lines["best"], "k--", linewidth=1, label="best line for each radius")
    for number, r in enumerate(tailored):
        left.plot(results.radii, r["accuracy"], color=f"C{number + 1}", label=f"tailored, eps {r['setting']['eps']:g}")
    left.set(xlabel="radius of the attack", ylabel="accuracy under the worst attack", ylim=(0, 1))
    for i, radius in enumerate(results.radii):
        if radius in (0, 0.5, 1, 1.5, 2, 3):
            plain = [(0.0, results.lines["plain"][i])] if results.lines else []
            eps, accuracy = zip(*plain, *((r["setting"]["eps"], r["accuracy"][i]) for r in tailored), strict=True)
            right.plot(eps, accuracy, ".-", label=f"attack of radius {radius:g}")
    right.set(xlabel="eps of the tailoring (0: without)", ylabel="accuracy under the worst attack", ylim=(0, 1))
    for ax in (left, right):
        ax.legend(frameon=False, fontsize=8)
    return Picture("attack", "Accuracy under the worst attack, with and without tailoring.", figure)


def report(folder: Path) -> str:
    """Write figures and the page beside the rows; the tables as text."""
    results = Results(read_folder(folder, "toy"))
    made = _tables(results)
    title = "Toy adversarial example: the appendix's figure"
    write(folder, title, about(results.rows), made, lambda: [_boundaries(results), _attack(results)])
    return "\n\n".join(table.text() for table in made)
