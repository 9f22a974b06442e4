"""Training through the adaptation, choosing its settings, and checking a model for leaks."""

from __future__ import annotations

import pytest
import torch
from nets import ADAPTERS, MODES, SequenceFirst, data, drift, energy, float_mlp, mlp, queries, small, summed_error, to_one
from torch import nn
from torch.nn import functional as F

from tailoring import CN, LBFGS, OuterLoss, Shift, Support, Tailored, Weights, check, losses, outer_losses, task_losses, tune
from tailoring.baselines import Output, Shared


def tailored(**options) -> Tailored:
    rate = {} if "optimizer" in options else {"lr": 1e-2}
    return Tailored(mlp(), drift, **({"adapt": CN(nn.Tanh), "steps": 2} | rate | options))


def test_one_loss_for_each_inner_step_and_the_plain_one_without_steps():
    x = queries()
    assert len(list(outer_losses(tailored(steps=3), summed_error, x, x))) == 3
    (plain,) = outer_losses(tailored(steps=0), summed_error, x, x)
    torch.testing.assert_close(plain, summed_error(mlp()(x), x))


@pytest.mark.parametrize("backprop", MODES)
@pytest.mark.parametrize("adapter", ["CN", "Weights", "Shift"])
def test_meta_tailoring_lowers_the_task_loss_of_the_tailored_prediction(adapter, backprop):
    x = queries(32)
    y = F.normalize(x.roll(1, 1), dim=1) * x.norm(dim=1, keepdim=True)  # keeps the energy, as the tailoring loss wants
    model = tailored(adapt=ADAPTERS[adapter](), backprop=backprop)
    before = summed_error(model(x), y).item()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(30):
        optimizer.zero_grad()
        sum(outer_losses(model, F.mse_loss, x, y)).backward()
        optimizer.step()
    assert summed_error(model(x), y).item() < 0.6 * before


NEEDING_EARLIER_STEPS = pytest.mark.parametrize(
    "options",
    [
        lambda: {"backprop": "all"},
        lambda: {"backprop": "all", "recompute": True},
        lambda: {"lr": nn.Parameter(torch.tensor(1e-2, dtype=torch.float64))},
    ],
    ids=["all", "recomputed", "learned lr"],
)


@NEEDING_EARLIER_STEPS
def test_stepping_between_inner_steps_is_refused_where_the_graph_is_still_needed(options):
    model, x = tailored(**options()), queries()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    arriving = outer_losses(model, summed_error, x, x)
    next(arriving).backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="weights changed between two inner steps"):
        next(arriving)


@NEEDING_EARLIER_STEPS
@pytest.mark.parametrize("adapter", ["CN", "CN-learned-start", "Weights", "Shift"])
def test_so_is_freeing_the_graph(options, adapter):
    model, x = tailored(adapt=ADAPTERS[adapter](), **options()).prepare(queries()), queries()
    arriving = outer_losses(model, summed_error, x, x)
    next(arriving).backward()
    with pytest.raises(RuntimeError, match=r"backward\(\) freed the graph between two inner steps"):
        next(arriving)
    for loss in outer_losses(model, summed_error, x, x):
        loss.backward(retain_graph=True)


@NEEDING_EARLIER_STEPS
def test_after_the_last_step_nothing_is_needed(options):
    model, x = tailored(steps=1, **options()), queries()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for loss in outer_losses(model, summed_error, x, x):
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize("adapter", ["CN", "CN-learned-start", "Weights", "Shift"])
@pytest.mark.parametrize("backprop", ["none", "last"])
def test_stepping_between_inner_steps_works_at_first_order_and_last(adapter, backprop):
    model, x = tailored(adapt=ADAPTERS[adapter](), backprop=backprop, steps=3).prepare(queries()), queries()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    values = []
    for _ in range(15):
        for loss in outer_losses(model, summed_error, x, x.flip(1)):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        values.append(loss.item())
    assert values[-1] < values[0]


@pytest.mark.usefixtures("seeded")
def test_a_plain_tensor_of_rates_must_not_change_between_two_steps():
    net, (x, y) = small(), data()
    lr = torch.tensor(0.05).double().requires_grad_()
    steps = iter(outer_losses(Tailored(net, to_one, steps=3, lr=lr), F.mse_loss, x, y))
    next(steps)
    with torch.no_grad():
        lr.sub_(0.01)
    with pytest.raises(RuntimeError, match="weights changed between two inner steps"):
        next(steps)


@pytest.mark.parametrize("backprop", ["none", "last"])
def test_only_the_last_steps_graph_is_kept(backprop):
    """With "none" and "last" the memory does not grow with the steps: an earlier step's tensors are gone once its loss is."""
    import gc
    import weakref

    alive = []

    class Mark(torch.autograd.Function):  # lives as long as the graph that it is part of
        @staticmethod
        def forward(ctx, value):
            ctx.marker = torch.zeros(1)
            alive.append(weakref.ref(ctx.marker))
            return value.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad

    def watched(model, x):
        return Mark.apply(drift(model, x))

    model, x = Tailored(mlp(), watched, adapt=CN(nn.Tanh), steps=4, lr=1e-2, backprop=backprop), queries()
    counts = []
    for loss in outer_losses(model, summed_error, x, x):
        gc.collect()
        counts.append(sum(ref() is not None for ref in alive))
        del loss
    assert max(counts) <= (0 if backprop == "none" else 1)


def test_the_outer_loss_as_a_module_is_the_sum():
    model, x = tailored(), queries()
    torch.testing.assert_close(OuterLoss(model, summed_error)(x, x), sum(outer_losses(model, summed_error, x, x)))
    few = Tailored(mlp(), losses.Supervised(F.mse_loss), adapt=CN(nn.Tanh), steps=2, lr=1e-2)
    pair = (queries(6).unflatten(0, (3, 2)), queries(6, seed=3).unflatten(0, (3, 2)))
    torch.testing.assert_close(OuterLoss(few, summed_error)(Support(*pair), pair), sum(task_losses(few, summed_error, pair, pair)))


@pytest.mark.parametrize("adapter", ["CN", "Weights"])
def test_tasks_are_adapted_separately(adapter):
    model = Tailored(mlp(), losses.Supervised(F.mse_loss), adapt=ADAPTERS[adapter](), steps=2, lr=5e-2)
    x, y = queries(12).unflatten(0, (4, 3)), queries(12, seed=2).unflatten(0, (4, 3))
    state = model.tailor(Support(x, y))
    for task in range(4):
        own = model.tailor(Support(x[task : task + 1], y[task : task + 1]))
        for name, t in own.items():
            torch.testing.assert_close(state[name][task : task + 1], t, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(model.replace(steps=0)(Support(x, y)), model.net(x.flatten(0, 1)))
    (plain,) = task_losses(model.replace(steps=0), summed_error, (x, y), (x, y))
    torch.testing.assert_close(plain, summed_error(model.net(x.flatten(0, 1)), y.flatten(0, 1)))


def test_tune_finds_the_best_setting_and_never_a_worse_one_than_none():
    x = queries(40)
    y = F.normalize(mlp()(x).detach(), dim=1) * x.norm(dim=1, keepdim=True)  # what tailoring should make of the prediction
    data = [(x[:30], y[:30]), (x[30:], y[30:])]
    tuned = tune(tailored(), data, F.mse_loss, lrs=(1e-3, 1e-2, 1e3), steps=4)
    assert tuned.task.shape == tuned.tailoring.shape == (3, 5)
    assert tuned.steps > 0
    assert tuned.gain > 0.05
    assert (tuned.model.steps, tuned.model.rule.lr) == (tuned.steps, tuned.lr)
    assert "best: lr=" in str(tuned)
    for lr, row in zip(tuned.lrs, tuned.task, strict=True):
        for steps, value in enumerate(row.tolist()):
            expected = F.mse_loss(tailored(lr=lr, steps=steps)(x), y)
            if expected.isfinite():
                torch.testing.assert_close(value, expected.item(), rtol=1e-6, atol=1e-9)
    per_query = tune(tailored(), data, lambda p, y: (p - y).square().mean(1), lrs=tuned.lrs, steps=4)
    torch.testing.assert_close(per_query.task, tuned.task, rtol=1e-6, atol=1e-9)
    useless = tune(tailored(), [(x, mlp()(x).detach())], F.mse_loss, lrs=(1e-2,), steps=2)
    assert useless.steps == 0
    assert "does not help" in str(useless)
    torch.testing.assert_close(useless.model(x), mlp()(x))


@pytest.mark.usefixtures("seeded")
def test_a_gain_is_one_for_negative_losses_too():
    x, y = data()
    tuned = tune(Tailored(small(), to_one), [(x, torch.ones_like(y))], lambda p, y: F.mse_loss(p, y) - 10, lrs=(0.05,), steps=2)
    assert tuned.task[0, 2] < tuned.task[0, 0] < 0
    assert tuned.gain == pytest.approx(float((tuned.task[0, 0] - tuned.task.min()) / -tuned.task[0, 0]))
    assert tuned.gain > 0


def test_tune_leaves_other_optimisers_their_steps():
    x = queries(20)
    y = F.normalize(mlp()(x).detach(), dim=1) * x.norm(dim=1, keepdim=True)
    model = tailored(adapt=Output(), optimizer=LBFGS())
    tuned = tune(model, [(x, y)], F.mse_loss, steps=6)
    assert isinstance(tuned.model.rule, LBFGS)
    assert tuned.lr is None
    assert tuned.task.shape == (1, 7)
    torch.testing.assert_close(tuned.task.min().item(), F.mse_loss(tuned.model(x), y).item(), rtol=1e-6, atol=1e-9)
    assert "best: steps=" in str(tuned)


def test_tune_says_what_it_needs():
    with pytest.raises(ValueError, match="no batch was given"):
        tune(tailored(), [], F.mse_loss)
    with pytest.raises(ValueError, match="at least one step"):
        tune(tailored(), [(queries(), queries())], F.mse_loss, steps=0)


class Centres(nn.Module):
    def forward(self, x):
        return x - x.mean(0)


class Chained(nn.Module):
    """A leak in a block's own code, between two innocent layers."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.second(self.first(x) * self.first(x).norm())


@pytest.mark.parametrize(
    ("layer", "where", "remedy"),
    [
        (nn.BatchNorm1d(4), r"module 1 \(BatchNorm1d\): mixes", "eval mode"),
        (Centres(), r"module 1 \(Centres\): mixes", "within a query only"),
        (Chained(), r"module 1 \(Chained\): mixes", "within a query only"),
        (nn.Dropout(0.5), r"module 1 \(Dropout\): answers the same input differently", "eval mode"),
        (nn.MultiheadAttention(4, 1), "MultiheadAttention", "batch_first=True"),
    ],
    ids=["batchnorm", "centres", "functional", "dropout", "attention"],
)
def test_check_names_the_module_that_leaks(layer, where, remedy):
    import re

    class Wrapped(nn.Sequential):
        def forward(self, x):
            x = self[0](x)
            x = self[1](x[:, None], x[:, None], x[:, None])[0][:, 0] if isinstance(self[1], nn.MultiheadAttention) else self[1](x)
            return self[2](x)

    report = check(Wrapped(nn.Linear(4, 4), layer, nn.Linear(4, 4)).double(), queries())
    assert not report
    assert re.search(where, str(report))
    assert remedy in str(report)


def test_check_is_content_with_a_good_model():
    assert check(tailored(), queries())
    assert str(check(mlp(), queries())) == "every query is answered on its own"
    assert check(Tailored(SequenceFirst().double(), lambda model, x: energy(model(x)), adapt=CN()), torch.randn(3, 5, 8).double())
    assert check(
        Tailored(nn.Embedding(9, 4), lambda model, x: energy(model(x)), adapt=Weights(how="loop")), torch.tensor([[1, 2], [3, 4], [5, 6]])
    )


def test_a_model_with_the_queries_in_the_second_dimension_mixes_nothing():
    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = float_mlp()

        def forward(self, x):
            return self.body(x).T

    assert not check(Tailored(Turned(), lambda m, x: m(x).square().sum(0)), torch.randn(5, 3)).problems


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"loss": lambda model, x: drift(model, x) - drift(model, x).mean()}, "tailoring loss <lambda>: mixes"),
        ({"loss": lambda model, x: drift(model, x + torch.randn_like(x))}, "another value each time"),
        ({"adapt": Shared(CN(nn.Tanh))}, r"adaptation with Shared\(CN\(Tanh\)\)"),
        ({"optimizer": "global"}, "adaptation with CN.*Functional"),
        (
            {"loss": lambda model, x: energy(model(torch.cat([x, -x]))).view(2, -1).sum(0)},
            r"mixes.*x.repeat_interleave\(k, 0\)",
        ),
    ],
    ids=["loss", "noise", "shared", "optimizer", "views"],
)
def test_check_finds_leaks_in_the_tailoring(options, what):
    import re

    import torchopt

    if options.get("optimizer") == "global":
        options = {"optimizer": torchopt.chain(torchopt.clip.clip_grad_norm(1e-3), torchopt.sgd(1.0))}
    loss = options.pop("loss", drift)
    report = check(
        Tailored(mlp(), loss, **({"adapt": CN(nn.Tanh)} | ({} if "optimizer" in options else {"lr": 1e-1}) | options)), queries()
    )
    assert not report
    assert re.search(what, str(report)), str(report)


def test_check_needs_neighbours():
    with pytest.raises(ValueError, match="at least two"):
        check(mlp(), queries(1))


def test_only_the_step_that_an_outer_loss_sees_keeps_its_graph():
    kept = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx, h):
            return h.clone()

        @staticmethod
        def backward(ctx, g):
            kept.append(torch.is_grad_enabled())  # so it is while a gradient is made that can itself be differentiated
            return g

    def loss(model, x):
        return drift(lambda z: Watched.apply(model(z)), x)

    for backprop, answered, each in (
        ("none", [False] * 3, [False] * 3),
        ("last", [False, False, True], [True] * 3),
        ("all", [True] * 3, [True] * 3),
    ):
        model = Tailored(mlp(), loss, adapt=CN(nn.Tanh), steps=3, lr=0.01, backprop=backprop)
        for _ in range(3):  # at first it is asked whether the loss keeps the queries apart
            model(queries())
        for run, expected in ((model, answered), (lambda x, model=model: list(model.states(x)), each)):
            kept.clear()
            run(queries())
            assert kept == expected


@pytest.mark.usefixtures("seeded")
@pytest.mark.parametrize("adapt", [CN(), Weights(), Weights(how="vmap"), Shift("1")], ids=repr)
@pytest.mark.parametrize("backprop", ["none", "last", "all"])
@pytest.mark.parametrize("settings", [{}, {"momentum": 0.5}, {"clip": 1.0}], ids=str)
def test_a_query_with_an_infinite_slope_leaves_those_of_a_learned_rate_finite(adapt, backprop, settings):
    net, (x, y) = small(), data()
    x[2] = 0

    def steep(model, x):  # at query 2
        away = (model(x) - net(x).detach()).square().sum(1) + x.square().sum(1)
        return away.sqrt() + 0.1 * to_one(model, x)

    def gradient(x, y):
        lr = nn.Parameter(torch.tensor(0.05).double())
        model = Tailored(net, steep, adapt=adapt, steps=3, lr=lr, backprop=backprop, **settings)
        losses = [F.mse_loss(model(x), y, reduction="sum"), sum(outer_losses(model, lambda a, b: F.mse_loss(a, b, reduction="sum"), x, y))]
        return model.trace(x).failed.tolist(), [torch.autograd.grad(loss, lr)[0] for loss in losses]

    failed, found = gradient(x, y)
    assert failed == [False, False, True, False]
    fine = [0, 1, 3]
    _, without = gradient(x[fine], y[fine])
    torch.testing.assert_close(found, without)


@pytest.mark.parametrize("length", [4, 5, 8])
def test_check_finds_the_queries_in_whichever_dimension_they_are(length):
    """Sequences come first inside, and their length may be a multiple of the batch's size."""
    net = SequenceFirst().eval()
    assert check(net, torch.randn(4, length, 8))
    assert not check(nn.Sequential(net, Mixing()), torch.randn(4, length, 8))


class Mixing(nn.Module):
    def forward(self, x):
        return x - x.mean(0)


@pytest.mark.parametrize(
    ("support", "query", "words"),
    [
        (((4, 5, 4), (4, 5, 2)), ((8, 6, 4), (8, 6, 2)), r"as many tasks .* not \[4, 4, 8, 8\]"),
        (((4, 5, 4), (4, 5, 2)), ((4, 6, 4), (6, 4, 2)), r"as many tasks .* not \[4, 4, 4, 6\]"),
        (((4, 3, 4), (4, 2, 2)), ((4, 6, 4), (4, 6, 2)), "support x and y .* the same k"),
        (((4, 3, 4), (4, 3, 2)), ((4, 6, 4), (4,)), "query x and y .* the same k"),
    ],
)
def test_tasks_that_do_not_go_together_are_refused(support, query, words):
    model = Tailored(mlp(), losses.Supervised(F.mse_loss), adapt=CN(nn.Tanh), steps=1)
    with pytest.raises(ValueError, match=words):
        list(task_losses(model, F.mse_loss, *(tuple(map(torch.randn, part)) for part in (support, query))))
