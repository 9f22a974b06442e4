"""Figure 2, and the roll-outs."""

from __future__ import annotations

from ._planets_results import Results
from ._report import Picture, new_figure


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
        chosen = results.choose(
            results.settings(method, c["weight"]), procedure, c["output_steps" if procedure in ("output", "ttt") else "steps"]
        )
        curve = chosen and results.curves.get((chosen.names[0], procedure, lr, "test"))
        if curve:
            ax.plot(curve["physics"], curve["mse"], ".-", markersize=3, linewidth=1, label=f"{label} (lr {lr:g})")
            ax.plot(curve["physics"][0], curve["mse"][0], "ko", markersize=4)
            drawn += 1
    if not drawn:
        return None
    ax.set(xlabel="physics loss", ylabel="task loss (MSE)")
    ax.legend(frameon=False, fontsize=8)
    caption = f"Figure 2: paths of optimisation at prediction time, {c['output_steps']} small steps from the dots, first seed, test data."
    return Picture("paths", caption, figure)


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
    if not drawn:
        return None
    axes[0].set(xlabel="steps", ylabel="median change of energy since the start")
    axes[1].set(xlabel="steps", ylabel="median squared error")
    axes[0].legend(frameon=False, fontsize=8)
    return Picture("rollouts", "Roll-outs: predictions of predictions, first seed, medians over test trajectories.", figure)
