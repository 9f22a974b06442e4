"""The inner loop: the only place where a state moves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.compiler import is_dynamo_compiling
from torch.overrides import has_torch_function_unary

from . import _entries as entries
from . import _states as states
from ._isolate import infinite_elsewhere, rows_that_run, told_apart
from ._kernels import may_look
from ._optimisers import Rule
from ._states import State

Backprop = Literal["none", "last", "all"]
Keep = Literal["last", "best"]
# (state, chosen rows or None for all, step, whether to keep the graph) -> losses (rows,), gradient
Gradient = Callable[[State, Tensor | None, int, bool], tuple[Tensor, State]]
RatesAt = Callable[[Iterable[str], int], Mapping[str, Any]]  # the step sizes of the tensors named, at one step


@dataclass(frozen=True)
class Moment:
    """The loop between two steps. `values` are the losses that the last step saw, so those of the state before it."""

    reached: State
    home: State
    values: Tensor | None
    taken: Tensor  # (rows,): how many steps this row has moved
    failed: Tensor  # (rows,): not finite any more, so back home for good
    stopped: Tensor  # (rows,): good enough, so left where it was

    @property
    def state(self) -> State:
        return self.reached if self.values is None else states.where(~self.failed, self.reached, self.home)


def descend(
    gradient: Gradient,
    start: Callable[[], State],
    rule: Rule,
    *,
    steps: int,
    backprop: Backprop,
    stop: float | None,
    home: State | None = None,
    only_last: bool = False,
) -> Iterator[Moment]:
    """Minimise the sum of all rows' losses over the state, yielding the loop before the first step and after each.

        state_s = state_{s-1} - lr * d/dstate sum_i loss_i(state_{s-1})

    A row's loss depends on its own row of the state only, so one gradient serves them all. What is carried is how far each row
    has *moved*: the start is asked for afresh at every step, so it may train, or be trained, in between. `home` is where a row
    that failed goes, of a warm start (else to its start).

    `backprop` says which inner gradients an outer gradient sees: none of them (constants), the last one, or all. It matters only
    while the caller has gradients enabled; each step reads that afresh, and no mode leaks out to the caller at a yield. If `only_last`
    of the moments is for an outer loss, the earlier ones need no graph of their own with "last".
    """
    base = reached = start()
    moved = states.zero_like(base)
    memory = rule.init(moved)
    taken = torch.zeros(states.rows_of(base), dtype=torch.int64, device=states.device_of(base))
    failed = stopped = taken > 0
    has_raised = False
    yield Moment(base, home or base, None, taken, failed, stopped)
    for step in range(steps):
        before, base = base, start()
        point = reached if backprop != "last" and base is before else states.add(base, moved)
        point = states.where(~failed, point, base) if has_raised else point  # else the same rows would raise again
        asked = backprop == "all" or (backprop == "last" and (step == steps - 1 or not only_last))
        graph = asked and torch.is_grad_enabled()
        values, grads, raised = _try_gradient(gradient, point, step, graph, moved=step > 0 or home is not None)
        has_raised = has_raised or raised
        fine = values.isfinite()
        looks = graph or not rule.moves_tell  # at the gradients
        if looks:
            fine = fine & states.finite(grads)
        if graph and may_look() and not bool(fine.all()):
            grads = _gradients_of(fine, grads, gradient, point, step)
        values = torch.where(fine, values.detach(), torch.inf)
        if looks:
            grads = states.where(fine, grads)
        if not rule.searches or step == 0:
            failed = failed | ~fine
        if stop is not None:
            stopped = stopped | (values <= stop)

        moving = ~(failed | stopped)
        carried = (moved, memory, values, moving)
        constant = states.detached(grads)
        shown, memory, sound = _advance(rule, grads if graph else constant, carried, step)
        moved = shown
        if graph and backprop == "last":  # what is shown keeps the graph of this step, what is carried on does not
            moved, memory, _ = _advance(rule, constant, carried, step)
        failed = failed | ~sound
        taken = torch.where(failed, 0, taken + moving)
        reached = states.add(base, shown)
        yield Moment(reached, home or base, values, taken, failed, stopped)


def hurry(gradient: Gradient, state: State, rates: RatesAt, steps: int, *, moved: bool = False) -> State | None:
    """What `descend` comes to by plain gradient descent, at first order, if all goes well: nothing is looked at on the way.

    None if a number was not finite somewhere, or a loss refused what a step had led to (a distribution its parameters), which is rare:
    then `descend` has to find out where. A state that is not finite once
    stays so, and a loss that is not finite stays so in the sum, hence one look in the end will do. (It cannot wait for the answer: a model
    that is run with what is not finite may keep it in a statistic, or not come to an end.)
    """
    seen: list[Tensor] = []
    try:
        for step in range(steps):
            values, state = _step_blindly(gradient, state, rates, step)
            seen.append(values)
    except Exception as error:
        if bool(states.finite(state).all()) and all(bool(values.isfinite().all()) for values in seen):
            if not seen and not moved:
                raise  # at the identity, so it is the user's
            rows_that_run(error, lambda rows, some: gradient(some, rows, len(seen), False), state)  # raises if that is all
        return None
    return state if states.all_finite([*seen, *states.numbers(state)]) else None


def hurry_by_row(gradient: Gradient, state: State, rates: RatesAt, steps: int) -> tuple[State, Tensor]:
    """The same for code that cannot look: the state, and the rows of it in which all went well, as `descend` would have found them."""
    seen: list[Tensor] = []
    for step in range(steps):
        values, state = _step_blindly(gradient, state, rates, step)
        seen.append(values)
    fine = states.finite(state)
    for values in seen:
        fine = fine & values.isfinite()
    return state, fine


def _step_blindly(gradient: Gradient, state: State, rates: RatesAt, step: int) -> tuple[Tensor, State]:
    """The losses before the step, and the state after it."""
    values, grads = gradient(state, None, step, False)
    by_name = rates(state, step)
    moved: State = {}
    for name, entry in state.items():
        grad, rate = grads[name], by_name[name]
        if isinstance(entry, Tensor) and isinstance(grad, Tensor):  # here and not in a function: small models notice
            moved[name] = torch.add(entry, grad, alpha=-rate)
        else:
            moved[name] = entries.add(entry, entries.scale(grad, -rate))
    return values.detach(), moved  # with their graph, all that the weights below the first site would need stays


def _advance(rule: Rule, grads: State, carried: tuple[State, Any, Tensor, Tensor], step: int) -> tuple[State, Any, Tensor]:
    """How far all rows have moved after this step, the rule's memory, and which rows could make it."""
    moved, memory, values, moving = carried
    move, memory = rule.update(grads, memory, moved=moved, values=values, step=step)
    sound = states.finite(move) | ~moving
    return states.add(moved, states.where(moving & sound, move)), memory, sound


def _try_gradient(gradient: Gradient, state: State, step: int, graph: bool, *, moved: bool) -> tuple[Tensor, State, bool]:
    """The losses and their gradient, and whether some rows raised: their losses are infinite."""
    try:
        return *gradient(state, None, step, graph), False
    except Exception as error:
        rows = told_apart(error, lambda rows, some: gradient(some, rows, step, False), state, moved=moved)
    total = states.rows_of(state)
    if len(rows) == 0:
        return infinite_elsewhere(None, rows, total), states.zero_like(state), True
    values, grads = gradient(states.take(state, rows), rows, step, graph)
    return infinite_elsewhere(values.detach(), rows, total), states.spread(grads, rows, total), True


def _gradients_of(fine: Tensor, grads: State, gradient: Gradient, state: State, step: int) -> State:
    """The same gradients with those of all other rows zero, computed without ever evaluating those rows.

    0 * inf = nan: in the graph, a failed row would poison the shared weights' gradient though nothing uses it.
    """
    rows = fine.nonzero().squeeze(1)
    if len(rows) == 0:
        return states.where(fine, states.detached(grads))
    _, some = gradient(states.take(state, rows), rows, step, True)
    return states.spread(some, rows, len(fine))


def differentiate(objective: Callable[[State], Tensor], state: State, graph: bool) -> tuple[Tensor, State]:
    """The losses of a state of tensors, (rows,), and the gradient of their sum; with `graph`, both can be differentiated on."""
    with torch.enable_grad():
        if is_dynamo_compiling():  # dynamo traces torch.func.grad but not torch.autograd.grad

            def total(state: State) -> tuple[Tensor, Tensor]:
                values = objective(state)
                return values.sum(), values

            grads, values = torch.func.grad(total, has_aux=True)(state)
            return values, grads
        leaves = states.leaves(state, graph)
        values = objective(dict(leaves))
        return values, gradients(values, leaves, graph)


class NoGradientError(ValueError):
    """A loss that does not depend on what is adapted."""


def found_gradients(values: Tensor, leaves: dict[str, Tensor], graph: bool) -> dict[str, Tensor]:
    """The gradient of the sum of `values`, by name, with respect to those leaves that they depend on; an error if that is none."""
    found: dict[str, Tensor] = {}
    if values.requires_grad and leaves:
        total = values if values.numel() == 1 else values.sum()  # one query's loss is the sum already: two operations less
        grads = _grad(total, tuple(leaves.values()), graph)
        found = {name: g for name, g in zip(leaves, grads, strict=True) if g is not None}
    if not found:
        raise NoGradientError(
            f"the tailoring loss does not depend on the state{f' {list(leaves)}' if leaves else ''}: call the model that the loss is given "
            "(not the original one), without detach() or no_grad(), and adapt modules that the loss can see; an autograd.grad within the "
            "loss needs create_graph=True; quantised layers have no gradient"
        )
    return found


def gradients(values: Tensor, leaves: dict[str, Tensor], graph: bool) -> dict[str, Any]:
    """The gradient of the sum of `values` with respect to each leaf; zero where there is none, but not everywhere."""
    found = found_gradients(values, leaves, graph)
    if len(found) == len(leaves):
        return found
    return {name: found[name] if name in found else torch.zeros_like(t) for name, t in leaves.items()}


def _grad(total: Tensor, inputs: tuple[Tensor, ...], graph: bool) -> tuple[Tensor | None, ...]:
    """`torch.autograd.grad(total, inputs, create_graph=graph, allow_unused=True)`, without its looks at what it is given.

    These take a twentieth of a small model's step. A kind of tensor with ways of its own, or a mode, is told by that function.
    """
    if has_torch_function_unary(total):
        return torch.autograd.grad(total, inputs, create_graph=graph, allow_unused=True)
    return _engine_run_backward((total,), (torch.ones_like(total),), graph, graph, inputs, allow_unreachable=True, accumulate_grad=False)
