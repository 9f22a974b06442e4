"""Few-shot sine regression: CN in the inner loop (Alg. 4) beside MAML, by hand and as `Weights`.

A task is a sine of its own amplitude and phase, known by k points (the support set) and scored on others (the query set). Every method
adapts to the support set by a few gradient steps and is trained through them:

    CN               scale and shift of every hidden unit, one pair per task; all tasks in parallel
    Weights          all weights, one copy per task: MAML, in parallel
    MAML by hand     the same algorithm as a loop over tasks, from the same weights on the same tasks, with nothing of this library in it
    CN, 0 steps      the control: the network of CN, trained on the same tasks without adaptation, and adapted only afterwards
    CN, untrained    CN before its training
"""

import argparse
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import mse_loss

from tailoring import CN, Support, Tailored, Weights, losses, task_losses

Points = tuple[Tensor, Tensor]  # x and y, (tasks, k, 1) each


@dataclass(frozen=True)
class Config:
    seed: int = 0
    shots: int = 10  # support points per task, and as many query points: MAML's sine task with k = k' = 10
    tasks: int = 25  # per outer step, as in MAML
    outer_steps: int = 600  # all methods together then take 40 s on one core, most of it the loop by hand; more still helps
    held_out: int = 500  # a standard error of a few per cent
    width: int = 80  # 40, MAML's, gives CN (two numbers per unit) half the freedom: with 80 its error halves
    steps: int = 2  # one step leaves CN twice the error; five halve it once more, at 2.5 times the cost
    outer_lr: float = 1e-2  # with a cosine decay; 3e-3 is stable too but has not learned as much by the end
    cn_activation: type[nn.Module] = nn.ReLU  # each method has its own best of ReLU, SiLU and Tanh ...
    maml_activation: type[nn.Module] = nn.Tanh
    cn_lr: float = 0.05  # ... and of the step sizes 0.01 to 0.3, tried on other tasks than the held-out ones
    maml_lr: float = 0.02  # of 0.01 to 0.05


QUICK = Config(tasks=15, outer_steps=200, held_out=200, outer_lr=2e-2, cn_lr=0.1)  # fewer outer steps, so longer ones


@dataclass(frozen=True)
class Row:
    before: Tensor  # (held-out tasks,): the query error of each before adaptation
    after: Tensor
    seconds: float  # per outer step


def draw(config: Config, tasks: int, generator: torch.Generator) -> tuple[Points, Points]:
    """The support and the query set of so many new tasks: y = a sin(x - phi)."""
    amplitude = 0.1 + 4.9 * torch.rand(tasks, 1, 1, generator=generator)
    phase = math.pi * torch.rand(tasks, 1, 1, generator=generator)
    x = 10 * torch.rand(tasks, 2 * config.shots, 1, generator=generator) - 5
    y = amplitude * torch.sin(x - phase)  # (tasks, k + k', 1)
    k = config.shots
    return (x[:, :k], y[:, :k]), (x[:, k:], y[:, k:])


def network(config: Config, activation: type[nn.Module]) -> nn.Module:
    torch.manual_seed(config.seed)  # the same weights for all that use the same activation
    return nn.Sequential(
        nn.Linear(1, config.width), activation(), nn.Linear(config.width, config.width), activation(), nn.Linear(config.width, 1)
    )


def maml_adapt(net: nn.Module, x: Tensor, y: Tensor, *, steps: int, lr: float) -> dict[str, Tensor]:
    """The weights fitted to one task, (k, 1) points, as a differentiable function of the net's own."""
    weights: dict[str, Tensor] = dict(net.named_parameters())
    for _ in range(steps):
        loss = mse_loss(functional_call(net, weights, (x,)), y)
        grads = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        weights = {name: w - lr * g for (name, w), g in zip(weights.items(), grads, strict=True)}
    return weights


def maml_errors(net: nn.Module, support: Points, query: Points, *, steps: int, lr: float) -> Tensor:
    """The query error of every task after adaptation, (tasks,): MAML as a loop over tasks."""
    errors = []
    for x, y, query_x, query_y in zip(*support, *query, strict=True):
        weights = maml_adapt(net, x, y, steps=steps, lr=lr)
        errors.append(mse_loss(functional_call(net, weights, (query_x,)), query_y))
    return torch.stack(errors)


def tailored_errors(model: Tailored, support: Points, query: Points) -> Tensor:
    """The query error of every task after adaptation, (tasks,): all tasks at once."""
    x, y = query
    with torch.no_grad():
        answers = model.predict(x.flatten(0, 1), model.tailor(Support(*support)))  # (tasks * k', 1)
    return mse_loss(answers.view_as(y), y, reduction="none").mean((1, 2))


def train(config: Config, parameters: Iterable[nn.Parameter], outer_loss: Callable[[Points, Points], Tensor]) -> float:
    """Minimise the outer loss on a stream of new tasks, the same for every method; seconds per outer step."""
    generator = torch.Generator().manual_seed(config.seed)
    optimizer = torch.optim.Adam(parameters, lr=config.outer_lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, config.outer_steps)
    start = time.perf_counter()
    for _ in range(config.outer_steps):
        loss = outer_loss(*draw(config, config.tasks, generator))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return (time.perf_counter() - start) / config.outer_steps


def run(config: Config) -> dict[str, Row]:
    held_out = draw(config, config.held_out, torch.Generator().manual_seed(config.seed + 1_000_000))
    rows: dict[str, Row] = {}

    def tailored(adapt: CN | Weights, activation: type[nn.Module], lr: float) -> Tailored:
        loss = losses.Supervised(mse_loss)
        return Tailored(network(config, activation), loss, adapt=adapt, steps=config.steps, lr=lr, backprop="all")

    def score(name: str, model: Tailored, seconds: float) -> None:
        before, after = (tailored_errors(model.replace(steps=steps), *held_out) for steps in (0, config.steps))
        rows[name] = Row(before, after, seconds)

    model = tailored(CN(), config.cn_activation, config.cn_lr)
    score("CN, untrained", model, math.nan)
    # the query loss after every inner step counts: Alg. 4, with one outer step for their sum
    seconds = train(config, model.parameters(), lambda s, q: sum(task_losses(model, mse_loss, s, q), start=torch.zeros(())))
    score("CN", model, seconds)

    control = tailored(CN(), config.cn_activation, config.cn_lr)
    plain = control.replace(steps=0)
    seconds = train(config, plain.parameters(), lambda s, q: next(task_losses(plain, mse_loss, s, q)))
    score("CN, 0 steps", control, seconds)

    maml = tailored(Weights(), config.maml_activation, config.maml_lr)
    seconds = train(config, maml.parameters(), lambda s, q: list(task_losses(maml, mse_loss, s, q))[-1])  # MAML scores the last step only
    score("Weights", maml, seconds)

    net, inner = network(config, config.maml_activation), {"steps": config.steps, "lr": config.maml_lr}
    seconds = train(config, net.parameters(), lambda s, q: maml_errors(net, s, q, **inner).mean())
    before, after = (maml_errors(net, *held_out, steps=steps, lr=config.maml_lr).detach() for steps in (0, config.steps))
    rows["MAML by hand"] = Row(before, after, seconds)
    return rows


def table(rows: dict[str, Row]) -> str:
    def cell(errors: Tensor) -> str:
        return f"{errors.mean():.3f} +- {errors.std() / len(errors) ** 0.5:.3f}"

    lines = [f"{'method':<15}{'before':>17}{'after':>17}{'s per outer step':>19}"]
    for name, row in rows.items():
        seconds = "-" if math.isnan(row.seconds) else f"{row.seconds:.4f}"
        lines.append(f"{name:<15}{cell(row.before):>17}{cell(row.after):>17}{seconds:>19}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="ten seconds instead of forty, and less learned")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)  # such small matrices lose more by being shared between cores than they gain
    config = replace(QUICK if args.quick else Config(), seed=args.seed)
    print(f"query MSE on {config.held_out} held-out tasks (mean +- standard error), {config.steps} inner steps")
    print(table(run(config)))


if __name__ == "__main__":
    main()
