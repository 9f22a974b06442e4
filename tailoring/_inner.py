"""The inner loop: the only place where a state moves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ._rules import Rule, State

Backprop = Literal["none", "last", "all"]
Keep = Literal["last", "best"]
Objective = Callable[[State, Tensor | None, int], Tensor]  # (state, chosen rows or None for all, step) -> losses, (rows,)


@dataclass(frozen=True)
class Moment:
    """The loop between two steps. `values` are the losses that the last step saw, so those of the state before it."""

    state: State
    values: Tensor | None
    taken: Tensor  # (rows,): how many steps this row has moved
    failed: Tensor  # (rows,): not finite any more, so back at the start for good
    stopped: Tensor  # (rows,): good enough, so left where it was


def descend(
    objective: Objective,
    start: Callable[[], State],
    rule: Rule,
    *,
    steps: int,
    backprop: Backprop,
    stop: float | None,
    home: State | None = None,
) -> Iterator[Moment]:
    """Minimise the sum of all rows' losses over the state, yielding the state before the first step and after each.

        state_s = state_{s-1} - lr * d/dstate sum_i loss_i(state_{s-1})

    A row's loss depends on its own row of the state only, so one gradient serves them all. What is carried is how far each row
    has *moved*: the start is asked for afresh at every step, so it may train, or be trained, in between. `home` is where a row
    that failed goes (by default its start).

    `backprop` says which inner gradients an outer gradient sees: none of them (constants), the last one, or all. It matters only
    while the caller has gradients enabled; each step reads that afresh, and no mode leaks out to the caller at a yield.
    """
    base = start()
    moved = {name: torch.zeros_like(t) for name, t in base.items()}
    memory = rule.init(moved)
    row = next(iter(base.values()))
    taken = torch.zeros(row.shape[0], dtype=torch.int64, device=row.device)
    failed = stopped = taken > 0
    yield Moment(base, None, taken, failed, stopped)
    for step in range(steps):
        base = start()
        graph = backprop != "none" and torch.is_grad_enabled()
        values, grads = differentiate(objective, _add(base, moved), step, graph)
        fine = values.isfinite() & _finite(grads)
        if graph and not torch.compiler.is_compiling() and not bool(fine.all()):
            # 0 * inf = nan: a failed row would poison the shared weights' gradient though nothing uses it. So leave it out.
            grads = _gradients_of(fine, grads, objective, _add(base, moved), step)
        values = torch.where(fine, values.detach(), torch.inf)
        grads = _where(fine, grads, None)
        if not rule.searches or step == 0:
            failed = failed | ~fine
        if stop is not None:
            stopped = stopped | (values <= stop)
        moving = ~(failed | stopped)
        constant = {name: g.detach() for name, g in grads.items()}
        carried = (moved, memory)
        shown, memory = _advance(rule, grads if graph else constant, carried, values, moving, step)
        moved = shown
        if graph and backprop == "last":  # what is shown keeps the graph of this step, what is carried on does not
            moved, memory = _advance(rule, constant, carried, values, moving, step)
        failed = failed | ~_finite(moved)
        moved = _where(~failed, moved, None)
        taken = torch.where(failed, 0, taken + moving)
        yield Moment(_where(~failed, _add(base, shown), home or base), values, taken, failed, stopped)


def _advance(rule: Rule, grads: State, carried: tuple[State, Any], values: Tensor, moving: Tensor, step: int) -> tuple[State, Any]:
    moved, memory = carried
    move, memory = rule.update(grads, memory, moved=moved, values=values, step=step)
    return _where(moving, _add(moved, move), moved), memory


def differentiate(objective: Objective, state: State, step: int, graph: bool) -> tuple[Tensor, State]:
    """Every row's loss and its gradient with respect to that row of the state; with `graph`, both can be differentiated on."""
    with torch.enable_grad():
        if torch.compiler.is_compiling():  # dynamo traces torch.func.grad but not torch.autograd.grad

            def total(state: State) -> tuple[Tensor, Tensor]:
                values = objective(state, None, step)
                return values.sum(), values

            grads, values = torch.func.grad(total, has_aux=True)(state)
            return values, grads
        state = {name: t if graph and t.requires_grad else t.detach().requires_grad_() for name, t in state.items()}
        values = objective(state, None, step)
        if not values.requires_grad:
            raise _unused(state)
        grads = torch.autograd.grad(values.sum(), list(state.values()), create_graph=graph, allow_unused=True)
    if all(g is None for g in grads):
        raise _unused(state)
    return values, {name: torch.zeros_like(t) if g is None else g for (name, t), g in zip(state.items(), grads, strict=True)}


def _unused(state: State) -> ValueError:
    return ValueError(
        f"the tailoring loss does not depend on the state {list(state)}: call the model that the loss is given (not the original "
        "one), without detach() or no_grad(), and adapt modules that the loss can see"
    )


def _gradients_of(fine: Tensor, grads: State, objective: Objective, state: State, step: int) -> State:
    """The same gradients with those of all other rows zero, computed without ever evaluating those rows."""
    rows = fine.nonzero().squeeze(1)
    zero = {name: torch.zeros_like(g) for name, g in grads.items()}
    if len(rows) == 0:
        return zero
    _, some = differentiate(lambda s, _, step: objective(s, rows, step), {name: t[rows] for name, t in state.items()}, step, graph=True)
    return {name: z.index_copy(0, rows, some[name]) for name, z in zero.items()}


def _where(rows: Tensor, yes: State, no: State | None) -> State:
    """Rows of `yes` where `rows` holds; elsewhere those of `no`, or zero."""
    return {name: torch.where(rows.reshape(-1, *[1] * (t.ndim - 1)), t, 0.0 if no is None else no[name]) for name, t in yes.items()}


def _add(a: State, b: State) -> State:
    return {name: t + b[name] for name, t in a.items()}


def _finite(state: State) -> Tensor:
    """(rows,): whether every number of the row is finite."""
    checks = [t.detach().flatten(1).isfinite().all(1) for t in state.values()]
    return torch.stack(checks).all(0)
