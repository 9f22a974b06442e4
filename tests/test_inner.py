"""How a state moves: step sizes, clipping, momentum, other optimisers, guards."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torchopt
from nets import Reached, answer_size, drift, energy, mlp, queries, summed_error, to_one
from torch import nn

from tailoring import CN, LBFGS, Descent, Shift, Tailored, Weights, outer_losses
from tailoring import _entries as entries
from tailoring import _states as states
from tailoring._inner import hurry
from tailoring.baselines import Output, Shared


def model(**options) -> Tailored:
    rate = {} if "optimizer" in options else {"lr": 1e-2}
    return Tailored(mlp(), options.pop("loss", drift), **({"adapt": CN(nn.Tanh), "steps": 3} | rate | options))


def by_hand(x, lr=lambda step, name: 1e-2, momentum=0.0, clip=None, proximal=0.0, steps=3):
    """The same loop for one query, written out."""
    tailored = model(steps=1)
    sites = tailored.adapt.sites(tailored.net, x)
    start = tailored.adapt.init(tailored.net, sites, 1)
    state, velocity = start, {k: torch.zeros_like(v) for k, v in start.items()}
    for step in range(steps):
        state = {k: v.detach().requires_grad_() for k, v in state.items()}
        grads = torch.autograd.grad(drift(lambda z, s=state: tailored.predict(z, s), x).sum(), list(state.values()))
        grads = {k: g + proximal * (state[k] - start[k]) for (k, _), g in zip(state.items(), grads, strict=True)}
        norm = torch.cat([g.flatten() for g in grads.values()]).norm()
        if clip is not None and norm > clip:
            grads = {k: g * clip / norm for k, g in grads.items()}
        velocity = {k: momentum * velocity[k] + g for k, g in grads.items()}
        state = {k: v - lr(step, k) * velocity[k] for k, v in state.items()}
    return {k: v.detach() for k, v in state.items()}


PER_STEP = [1e-2, 3e-2, 0.0]
SETTINGS = {
    "float": ({"lr": 1e-2}, {}),
    "sequence": ({"lr": PER_STEP}, {"lr": lambda step, name: PER_STEP[step]}),
    "tensor": ({"lr": torch.tensor(0.02)}, {"lr": lambda step, name: 0.02}),
    "tensor per step": ({"lr": torch.tensor(PER_STEP)}, {"lr": lambda step, name: PER_STEP[step]}),
    "by name": (
        {"lr": {"*.gamma": 0.05, "*.beta": 0.0, "3.beta": PER_STEP}},
        {"lr": lambda step, name: 0.05 if "gamma" in name else PER_STEP[step] if name == "3.beta" else 0.0},
    ),
    "momentum": ({"momentum": 0.9}, {"momentum": 0.9}),
    "clip": ({"clip": 0.1, "lr": 0.1}, {"clip": 0.1, "lr": lambda step, name: 0.1}),
    "proximal": ({"proximal": 5.0}, {"proximal": 5.0}),
    "all": ({"momentum": 0.5, "clip": 0.3, "proximal": 1.0}, {"momentum": 0.5, "clip": 0.3, "proximal": 1.0}),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_descent_is_what_it_says(name):
    ours, theirs = SETTINGS[name]
    x = queries()
    state = model(**ours).tailor(x)
    for i in range(len(x)):
        for key, value in by_hand(x[i : i + 1], **theirs).items():
            torch.testing.assert_close(state[key][i : i + 1].detach(), value, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("backprop", ["none", "last", "all"])
@pytest.mark.parametrize("rates", ["one", "per step", "by name"])
def test_a_learned_step_size_trains_in_the_outer_loop(rates, backprop):
    value = torch.full((3,) if rates == "per step" else (), 1e-2, dtype=torch.float64)
    lr = nn.Parameter(value)
    tailored = model(lr={"*.gamma": lr, "*.beta": 1e-2} if rates == "by name" else lr, backprop=backprop)
    assert any(p is lr for p in tailored.parameters())
    assert any(key.startswith("tailoring.lr.") for key in tailored.state_dict())
    x = queries()

    def loss():
        return summed_error(tailored(x), x.flip(1))

    loss().backward()
    if backprop != "all":  # constant gradients: the derivative is partial, so compare with "all" where the two agree, at the last step
        assert lr.grad.isfinite().all()
        assert (lr.grad != 0).all()
        return
    analytic, eps = lr.grad.clone().flatten(), 1e-6
    for i in range(lr.numel()):
        with torch.no_grad():
            lr.view(-1)[i] += eps
            up = loss()
            lr.view(-1)[i] -= 2 * eps
            down = loss()
            lr.view(-1)[i] += eps
        torch.testing.assert_close(analytic[i], (up - down) / (2 * eps), rtol=1e-4, atol=1e-7)


def test_a_loss_with_parameters_trains_in_the_outer_loop():
    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.log_weight = nn.Parameter(torch.zeros((), dtype=torch.float64))

        def forward(self, model, x):
            return self.log_weight.exp() * drift(model, x)

    tailored, x = model(loss=Weighted(), backprop="last"), queries()
    assert "tailoring.loss.log_weight" in dict(tailored.named_parameters())
    sum(outer_losses(tailored, summed_error, x, x.flip(1))).backward()
    assert tailored.loss.log_weight.grad.abs() > 1e-6


def test_momentum_passes_gradcheck_at_second_order():
    tailored, x = model(momentum=0.9, clip=0.2, proximal=0.5, backprop="all"), queries(2)
    assert torch.autograd.gradcheck(tailored, (x.clone().requires_grad_(),))


@pytest.mark.parametrize(
    "make", [lambda: torchopt.sgd(1e-2), lambda: torchopt.adam(1e-2), lambda: torchopt.rmsprop(1e-2)], ids=["sgd", "adam", "rmsprop"]
)
@pytest.mark.parametrize("adapt", [CN(nn.Tanh), Shift("2")], ids=repr)
def test_torchopts_optimisers_plug_in(adapt, make):
    tailored, x = model(adapt=adapt, optimizer=make(), steps=4), queries()
    alone = torch.cat([tailored(x[i : i + 1]) for i in range(len(x))])
    torch.testing.assert_close(tailored(x), alone, rtol=1e-9, atol=1e-11)
    losses = tailored.trace(x).losses
    assert (losses[-1] < losses[0]).all()


def test_torchopts_sgd_is_plain_descent_and_differentiable():
    x = queries()
    ours, theirs = model(backprop="all"), model(optimizer=torchopt.sgd(1e-2), backprop="all")
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-12, atol=1e-13)
    grads = [torch.autograd.grad(summed_error(m(x), x), list(m.net.parameters())) for m in (ours, theirs)]
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-12)


def rosenbrock(model, x):
    """The answer must be at the bottom of a curved valley, at (a, a^2, a, a^2) with a from the query."""
    y, a = model(x), x[:, :1]
    return ((a - y[:, ::2]).square() + 20 * (y[:, 1::2] - y[:, ::2].square()).square()).sum(1)


def test_lbfgs_finds_each_querys_minimum():
    x = queries(6)
    trace = model(loss=rosenbrock, adapt=Output(), optimizer=LBFGS(), steps=120).trace(x)
    bottom = torch.stack([x[:, 0], x[:, 0] ** 2, x[:, 0], x[:, 0] ** 2], 1)
    torch.testing.assert_close(trace.prediction.detach(), bottom, rtol=1e-4, atol=1e-4)
    plain = model(loss=rosenbrock, adapt=Output(), lr=1e-3, steps=120).trace(x)
    assert (trace.losses.min(0).values < plain.losses.min(0).values).all()


@pytest.mark.parametrize("adapt", [Output(), Shift("2"), CN(nn.Tanh)], ids=repr)
def test_lbfgs_keeps_the_best_and_treats_queries_separately(adapt):
    tailored, x = model(adapt=adapt, optimizer=LBFGS(), steps=15), queries()
    trace = tailored.trace(x)
    torch.testing.assert_close(trace.losses.gather(0, trace.steps[None])[0], trace.losses.min(0).values)
    plain = model(adapt=adapt, lr=1e-2, steps=60).trace(x)
    assert (trace.losses.min(0).values <= plain.losses.min(0).values + 1e-9).all()
    alone = torch.cat([tailored(x[i : i + 1]) for i in range(len(x))])
    torch.testing.assert_close(trace.prediction, alone, rtol=1e-6, atol=1e-8)


def test_lbfgs_takes_back_a_step_that_leaves_the_domain():
    def barrier(model, x):
        y = model(x).sum(1)
        return torch.where(y > 0, (y - 3.0).square() - y.abs().log(), torch.inf)

    net = nn.Linear(4, 1).double()
    nn.init.zeros_(net.weight)
    nn.init.constant_(net.bias, 20.0)
    trace = Tailored(net, barrier, adapt=Output(), optimizer=LBFGS(first_step=50.0), steps=60).trace(queries())
    assert trace.losses.isinf().any()  # it did leave
    assert not trace.failed.any()
    root = (3 + (9 + 2) ** 0.5) / 2  # 2 (y - 3) = 1 / y
    torch.testing.assert_close(trace.prediction.detach(), torch.full_like(trace.prediction, root), rtol=1e-4, atol=1e-4)


def test_lbfgs_is_for_prediction():
    with pytest.raises(ValueError, match="cannot be differentiated"):
        model(optimizer=LBFGS(), backprop="last")


def test_the_best_state_is_kept_for_each_query():
    x = queries()
    last, best = (model(lr=0.6, steps=8, keep=keep).trace(x) for keep in ("last", "best"))
    assert (last.losses.diff(dim=0) > 0).any()  # the steps are too long for some
    torch.testing.assert_close(last.losses, best.losses)
    torch.testing.assert_close(best.steps, best.losses.argmin(0))
    tailored = model(lr=0.6)
    for i, steps in enumerate(best.steps.tolist()):
        torch.testing.assert_close(best.prediction[i], tailored.replace(steps=steps)(x)[i])


def test_a_query_that_is_good_enough_stops():
    x = queries()
    full = model(steps=10, lr=3e-2).trace(x)
    stop = float(full.losses[3:5].mean())
    trace = model(steps=10, lr=3e-2, stop=stop).trace(x)
    assert trace.stopped.any()
    for i in range(len(x)):
        below = (full.losses[:-1, i] <= stop).nonzero().flatten()  # a stop is noticed when the next step looks
        steps = int(below[0]) if len(below) else 10
        assert int(trace.steps[i]) == steps
        torch.testing.assert_close(trace.prediction[i], model(steps=steps, lr=3e-2)(x)[i])


def test_when_all_have_stopped_the_loop_ends():
    calls = []

    def counted(model, x):
        calls.append(1)
        return drift(model, x)

    model(loss=counted, steps=50, stop=1e9)(queries())
    assert len(calls) == 1


def test_a_trace_reads_well():
    trace = model().trace(queries())
    assert trace.losses.shape == (4, 5)
    text = str(trace)
    assert "5 queries" in text
    assert "adapted: 1, 3" in text


def test_large_batches_are_cut():
    x = queries(7)
    sizes = []

    def watched(model, x):
        sizes.append(len(x))
        return drift(model, x)

    whole, cut = model(steps=2), model(steps=2, chunk=3, loss=watched)
    torch.testing.assert_close(cut(x), whole(x))
    assert sizes == [3, 3, 3, 3, 1, 1]
    torch.testing.assert_close(cut.tailor(x), whole.tailor(x))
    torch.testing.assert_close(cut.trace(x).losses, whole.trace(x).losses)
    torch.testing.assert_close(list(cut.path(x)), list(whole.path(x)))
    sum(outer_losses(cut, summed_error, x, x)).backward()


def test_a_state_can_be_the_start_of_the_next():
    tailored, x = model(steps=2), queries()
    state = tailored.tailor(x, start=tailored.tailor(x))
    torch.testing.assert_close(tailored.predict(x, state), tailored.replace(steps=4)(x))


def test_what_fails_from_a_warm_start_goes_back_to_the_untailored_answer():
    tailored, x = model(steps=2), queries()
    start = {k: v.clone() for k, v in tailored.tailor(x).items()}
    start["1.gamma"][1] = torch.inf
    trace = tailored.trace(x, start=start)
    assert trace.failed.tolist() == [False, True, False, False, False]
    torch.testing.assert_close(trace.prediction[1], tailored.net(x)[1])


def test_the_path_is_made_of_the_predictions_after_each_step():
    tailored, x = model(steps=3), queries()
    for steps, prediction in enumerate(tailored.path(x)):
        torch.testing.assert_close(prediction, tailored.replace(steps=steps)(x))
    assert steps == 3


def test_noise_belongs_to_the_query_and_seeds_replace_it():
    from tailoring import random

    def noisy(model, x):
        return energy(model(x + random.normal(model.seeds, x.shape[1:], x.dtype)))

    tailored, x = model(loss=noisy), queries()
    alone = torch.cat([tailored(x[i : i + 1]) for i in range(len(x))])
    torch.testing.assert_close(tailored(x), alone)
    seeds = torch.arange(5)
    seeded = tailored.tailor(x, seeds=seeds)
    torch.testing.assert_close(tailored.tailor(x.clone(), seeds=seeds), seeded)
    assert (seeded["1.gamma"] - tailored.tailor(x)["1.gamma"]).abs().max() > 1e-6
    part = tailored.tailor(x[2:4], seeds=seeds[2:4])
    torch.testing.assert_close(part["1.gamma"], seeded["1.gamma"][2:4])


def test_fresh_seeds_differ_at_every_step():
    seen = []

    def noisy(model, x):
        seen.append((model.seeds.clone(), model.fresh_seeds.clone()))
        return drift(model, x)

    model(loss=noisy, steps=3)(queries())
    assert all(torch.equal(seen[0][0], s) for s, _ in seen)
    assert len({tuple(fresh.tolist()) for _, fresh in seen}) == 3


def test_settings_can_be_replaced():
    tailored = model(momentum=0.5, keep="best")
    other = tailored.replace(steps=7, lr=1e-1)
    assert (other.steps, other.rule.lr, other.rule.momentum, other.keep) == (7, 1e-1, 0.5, "best")
    assert other.net is tailored.net
    assert (tailored.training, tailored.eval().replace(steps=7).training, model().training) == (True, False, True)
    assert not Tailored(tailored.net, tailored.loss).training  # as the model is
    assert isinstance(tailored.replace(optimizer=LBFGS()).replace(steps=2).rule, LBFGS)
    with pytest.raises(ValueError, match="lr belongs to gradient descent"):
        tailored.replace(optimizer=LBFGS()).replace(lr=0.1)
    assert isinstance(tailored.replace(optimizer=LBFGS()).replace(optimizer=Descent(0.1)).rule, Descent)


def test_the_loss_can_be_replaced_and_a_search_leaves_no_setting_behind():
    net, x = Reached(), torch.randn(4, 3)
    model = Tailored(net, to_one, steps=np.int64(2), lr=0.1)
    other = model.replace(loss=lambda m, x: m(x).square().sum(1))
    assert other.net is net
    torch.testing.assert_close(other(x), Tailored(net, lambda m, x: m(x).square().sum(1), steps=2, lr=0.1)(x))
    searching = model.replace(optimizer=LBFGS())
    assert searching.keep == "best"
    assert searching.replace(optimizer=None, lr=0.1).keep == "last"


def test_weights_of_a_part_leave_the_rest_alone():
    tailored, x = model(adapt=Weights("2"), loss=answer_size), queries()
    assert list(tailored.tailor(x)) == ["2.weight", "2.bias"]


@pytest.mark.parametrize("steps", [1, 3])
def test_the_hurried_loop_comes_to_what_the_careful_one_does(steps):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    x = torch.randn(5, 4).double()
    model = Tailored(net, lambda m, x: (m(x) - x).square().sum(1), steps=steps, lr={"*gamma": 0.1, "*beta": 0.2})
    batch = model._batches(x)[0]
    careful, hurried = model._fit(batch).state, model._fitted(batch)
    assert model._is_plain
    assert all(torch.allclose(careful[name], hurried[name], rtol=1e-12) for name in careful)  # type: ignore[arg-type]
    assert not any(torch.equal(careful[name], start) for name, start in model.adapt.init(net, batch.sites, 5).items())  # type: ignore[arg-type]


def test_the_hurried_loop_gives_up_where_a_number_is_not_finite():
    def gradient(state, rows, step, graph):
        return torch.tensor([1.0, torch.inf if step == 0 else 1.0]), {"a": torch.ones(2, 1)}

    assert hurry(gradient, {"a": torch.zeros(2, 1)}, Descent(0.1).rates, 2) is None
    assert (
        hurry(lambda *a: (torch.ones(2), {"a": torch.tensor([[1.0], [torch.nan]])}), {"a": torch.zeros(2, 1)}, Descent(0.1).rates, 1)
        is None
    )


@pytest.mark.parametrize("width", [8, 64], ids=["matrices", "outer products"])
@pytest.mark.parametrize("bad", [1.0, 1e200], ids=["all well", "one fails"])
def test_exact_weights_hurry_too(monkeypatch, width, bad):
    net, x = mlp(width=width), queries(4)
    x[1] *= bad
    tailored = Tailored(net, drift, adapt=Weights(), steps=2, lr=1e-3)
    careful, careful_loops = tailored.trace(x), []
    fit = Tailored._fit
    monkeypatch.setattr(Tailored, "_fit", lambda self, batch: careful_loops.append(batch) or fit(self, batch))
    hurried = tailored.tailor(x)
    assert len(careful_loops) == (bad > 1)
    for name, entry in careful.state.items():
        shape = dict(net.named_parameters())[name].shape
        torch.testing.assert_close(entries.dense(hurried[name], shape), entries.dense(entry, shape), rtol=1e-12, atol=1e-15)
    assert {type(entry) for entry in hurried.values()} == {type(entry) for entry in careful.state.values()}
    torch.testing.assert_close(tailored(x), careful.prediction)


def test_a_shared_state_of_outer_products():
    from tailoring import Tailored, Weights, baselines

    net = torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.Tanh(), torch.nn.Linear(64, 2))
    x = torch.randn(3, 2)
    model = Tailored(net, lambda m, x: m(x).square().sum(1), adapt=baselines.Shared(Weights()), steps=2, lr=0.1)
    assert torch.allclose(model(x), model.trace(x).prediction, atol=1e-6)


@pytest.mark.parametrize("count", [2, 3])
def test_a_query_that_cannot_be_answered_is_found_in_whatever_dimension_it_stands(count):
    class Steps(nn.Module):
        """Answers (time, queries, 1); a state may be finite, and the answer not."""

        def __init__(self):
            super().__init__()
            self.act = nn.Tanh()

        def forward(self, x):
            return (self.act(x) * 50).exp().exp().expand(4, *x.shape)

    model = Tailored(Steps().double(), lambda m, x: -m(x)[0].log().log().sum(1), steps=1, lr=1e-3)
    x = torch.full((count, 1), 0.01).double()
    x[1] = 0.12
    answers, untailored = model(x), model.net(x)
    assert answers.isfinite().all()
    assert torch.equal(answers[:, 1], untailored[:, 1])
    assert not torch.allclose(answers[:, 0], untailored[:, 0])
    assert model.trace(x).failed.tolist() == [row == 1 for row in range(count)]


def test_a_loss_that_refuses_numbers_which_are_not_finite_costs_its_query_alone():
    def likelihood(model, x):
        out = model(x)
        return -torch.distributions.Normal(out[:, 0], 1.0).log_prob(0.0 * x[:, 0]) * torch.where(
            x[:, 0] > 50, torch.tensor(1e200).double(), 1.0
        )

    model, x = Tailored(mlp(act=nn.ReLU), likelihood, adapt=CN(nn.ReLU), steps=4, lr=1e-2), queries()
    x[2, 0] = 100.0
    answers = model(x)
    torch.testing.assert_close(answers[2], model.net(x)[2])
    others = [0, 1, 3, 4]
    torch.testing.assert_close(answers[others], model(x[others]))
    assert not torch.allclose(answers[others], model.net(x)[others])


def test_an_error_of_the_loss_is_raised():
    calls = []

    def fails_later(model, x):
        calls.append(len(calls))
        if len(calls) == 2:
            raise ValueError("my own mistake")
        return drift(model, x)

    model, x = Tailored(mlp(), fails_later, adapt=CN(nn.Tanh), steps=3, lr=1e-2), queries()
    with pytest.raises(ValueError, match="my own mistake"):
        model(x)


@pytest.mark.parametrize("grads", [False, True])
@pytest.mark.parametrize("adapt", [CN(nn.Tanh), Shift("2"), Weights(how="vmap"), Shared(CN(nn.Tanh))])
def test_what_a_call_starts_from_is_kept_for_the_next_one_and_comes_to_the_same(adapt, grads):
    kept, x = model(adapt=adapt), queries()
    with torch.set_grad_enabled(grads):
        for batch in (x, 2 * x, x[:2], x[:1], x):
            for _ in range(2):
                fresh, found = model(adapt=adapt).tailor(batch), kept.tailor(batch)
                assert all(torch.equal(found[name], entry) and not found[name].requires_grad for name, entry in fresh.items())
                for entry in found.values():
                    entry.fill_(torch.nan)  # it is the caller's now


def test_a_start_that_is_handed_on_or_learned_is_nobody_elses():
    x = queries()
    untailored, learned = model(steps=0), model(adapt=CN(nn.Tanh, learned_start=True)).prepare(x)
    for _ in range(2):
        for state in (untailored.tailor(x), next(iter(model().states(x)))):
            assert all(bool((entry == ("gamma" in name)).all()) for name, entry in state.items())
            for entry in state.values():
                entry.fill_(torch.nan)
    with torch.no_grad():
        before = learned(x)
        for start in learned.tailoring.start.values():
            start.add_(0.1)
        assert not torch.allclose(learned(x), before)


class FromWeights(CN):
    """Starts at the mean of a weight, so that what was kept from a call would be wrong after a training step."""

    def init(self, model, sites, queries, device=None):
        return {name: start + model[0].weight.mean() for name, start in super().init(model, sites, queries, device).items()}


def test_a_start_that_depends_on_the_weights_is_not_kept():
    tailored, x = model(adapt=FromWeights(nn.Tanh)), queries()
    with torch.no_grad():
        tailored(x)
        tailored.net[0].weight.add_(0.1)
        torch.testing.assert_close(tailored(x), Tailored(tailored.net, drift, adapt=FromWeights(nn.Tanh), steps=3, lr=1e-2)(x))


def test_a_loss_may_remember_what_it_saw_at_the_call_before():
    remembered = []

    def steady(model, x):
        out = model(x)
        remembered.append(out)  # with its graph
        return (out - remembered[-2 if len(remembered) > 1 else -1].detach()).square().sum(1) + drift(model, x)

    def steady_with_graph(model, x):
        out = model(x)
        remembered.append(out)
        return (out - remembered[-2 if len(remembered) > 1 else -1]).square().sum(1) + drift(model, x)

    answers = []
    for loss in (steady, steady_with_graph):
        remembered.clear()
        tailored = model(loss=loss, steps=1)
        with torch.no_grad():
            answers.append([tailored(scale * queries()) for scale in (1.0, 1.1, 1.2)])
    for ours, theirs in zip(*answers, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_without_gradients_a_scale_and_shift_come_to_the_same():
    x = queries()
    tailored = model()
    state = tailored.tailor(x)
    with_gradients = tailored.predict(x, state)
    with torch.no_grad():
        torch.testing.assert_close(tailored.predict(x, state), with_gradients.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("count", [10, 100_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
def test_one_look_tells_whether_all_numbers_are_finite(count, dtype):
    numbers = [torch.ones(3), torch.ones(2, count, dtype=dtype)]
    assert states.all_finite(numbers)
    for bad in (torch.nan, torch.inf, -torch.inf):
        numbers[1][1, -1] = bad
        assert not states.all_finite(numbers)
    numbers[1][1, -2:] = torch.tensor([torch.inf, -torch.inf])
    assert not states.all_finite(numbers)


def test_a_learned_step_size_may_go_below_zero():
    rate = nn.Parameter(torch.tensor(0.1, dtype=torch.float64))
    model, x = Tailored(mlp(), drift, adapt=CN(nn.Tanh), lr=rate, steps=2), queries()
    with torch.no_grad():
        rate.fill_(-0.1)
    torch.testing.assert_close(model.replace(chunk=1)(x), model(x))
