"""The loop that looks at its numbers in the end: what it leaves behind where one of them is not finite, or a call fails."""

from __future__ import annotations

import pytest
import torch
from nets import mlp, queries
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from tailoring import CN, Tailored, Weights
from tailoring.baselines import Shared


class Watching(nn.Module):
    """Keeps a statistic of its answers, as some models do in evaluation mode, too; refuses to answer much."""

    def __init__(self, most: float = torch.inf):
        super().__init__()
        self.first, self.act, self.last, self.most = nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2), most
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        out = self.last(self.act(self.first(x)))
        if out.detach().abs().max() > self.most:
            raise ValueError("too much")
        with torch.no_grad():
            self.mean.mul_(0.9).add_(0.1 * out.mean(0))
        return out


@pytest.fixture(autouse=True)
def _seeded(seeded):
    """All networks here are drawn."""


def test_the_model_is_not_run_with_a_state_that_is_not_finite():
    def root_of_a_negative_number(model, x):
        return (model.act(model.first(x)).sum(1) - 9).sqrt()

    model = Tailored(Watching(), root_of_a_negative_number, adapt=CN("act"), steps=1, lr=0.1)
    x = torch.randn(1, 3)
    torch.testing.assert_close(model(x), model.net(x))
    assert bool(model.net.mean.isfinite().all())  # type: ignore[union-attr]


@pytest.mark.parametrize("raised_by", ["the answer", "the loss"])
def test_what_a_query_whose_loss_is_not_finite_makes_fail_costs_it_alone(raised_by):
    """Its state is finite, only too far out: an infinity that is added has no gradient."""
    steps = 1 if raised_by == "the answer" else 2

    def steep(model, x):
        squares, bad = model(x).square().sum(1), x[:, 0] > 5
        return torch.where(bad, 1e9 * squares + torch.inf, squares)

    model, x = Tailored(Watching(most=1e3), steep, adapt=CN("act"), steps=steps, lr=1e-3), torch.randn(4, 3)
    x[1, 0] = 6.0
    answers, others = model(x), [0, 2, 3]
    torch.testing.assert_close(answers[1], model.net(x)[1])
    torch.testing.assert_close(answers[others], model(x[others]))
    assert not torch.allclose(answers[others], model.net(x)[others])
    assert model.trace(x).failed.tolist() == [False, True, False, False]


def far(x: Tensor) -> Tensor:
    """One query so far out that its first step leads to infinite answers, by a state that is finite."""
    return torch.where(torch.arange(len(x))[:, None] == 1, 1e18, x)


def deep() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))


def validated(model, x):
    """As distributions do, it refuses parameters that are no numbers."""
    return -torch.distributions.Normal(model(x)[:, 0], 1.0, validate_args=True).log_prob(x[:, 0])


@pytest.mark.parametrize("backprop", ["none", "last", "all"])
@pytest.mark.parametrize("adapt", [CN(nn.ReLU), Weights(), Weights(how="vmap")], ids=repr)
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.filterwarnings("ignore:.*answered untailored")
def test_a_query_whose_step_makes_the_loss_raise_fails_alone(steps, adapt, backprop):
    net = deep()
    model, x = Tailored(net, validated, adapt=adapt, steps=steps, lr=0.1, backprop=backprop), far(torch.randn(4, 3))
    others = [0, 2, 3]
    torch.testing.assert_close(model(x)[others], model(x[others]))
    assert not torch.allclose(model(x)[others], net(x)[others])
    torch.testing.assert_close(model(x)[1], net(x)[1])
    torch.testing.assert_close(model(x[1:2]), net(x[1:2]))
    trace = model.trace(x)
    torch.testing.assert_close(trace.prediction[others], model(x[others]))
    torch.testing.assert_close(trace.losses[:, others], model.trace(x[others]).losses)
    assert trace.failed.tolist() == [False, True, False, False]
    slopes = torch.autograd.grad(model(x).clamp(-9, 9).square().sum(), list(net.parameters()))
    assert all(bool(g.isfinite().all()) for g in slopes)


def test_a_query_whose_state_makes_the_model_raise_is_answered_untailored():
    def steep(model, x):
        return model(x).square().sum(1) * torch.where(x[:, 0] > 5, 1e6, 1.0)

    model, x = Tailored(Watching(most=1e3), steep, adapt=CN("act"), steps=1, lr=1.0), torch.randn(4, 3)
    x[1, 0] = 6.0
    expected = torch.where(torch.arange(4)[:, None] == 1, model.net(x), model.replace(chunk=1)(x[[0, 0, 2, 3]]))
    for batch, answers, told in ((x, expected, "1 of 4 queries are"), (x[1:2], expected[1:2], "the whole batch is")):
        with pytest.warns(UserWarning, match=f"{told} answered untailored: .* raised ValueError: too much"):
            torch.testing.assert_close(model(batch), answers)
    with pytest.warns(UserWarning, match="answered untailored"):
        assert model.trace(x).failed.tolist() == [False, True, False, False]


def test_a_state_that_serves_several_rows_fails_with_them():
    x = torch.randn(3, 3)
    model = Tailored(Watching(most=1e3), lambda m, x: m(x).square().sum(1), adapt=CN("act"), steps=1)
    state = model.tailor(x)
    state["act.beta"] = torch.where(torch.arange(3)[:, None] == 1, 1e6, state["act.beta"])
    rows = x.repeat_interleave(2, 0)
    with pytest.warns(UserWarning, match="1 of 3 queries are answered untailored"):
        answers = model.predict(rows, state)
    torch.testing.assert_close(answers[2:4], model.net(rows[2:4]))
    others = torch.tensor([0, 2])
    expected = model.predict(x[others].repeat_interleave(2, 0), {name: entry[others] for name, entry in state.items()})
    torch.testing.assert_close(answers[[0, 1, 4, 5]], expected)


def test_a_state_that_all_share_fails_for_all():
    x = far(torch.randn(4, 3))
    net = deep()
    model = Tailored(net, validated, adapt=Shared(CN(nn.ReLU)), steps=3, lr=0.1)
    for batch in (x, x.flip(0)):
        with pytest.warns(UserWarning, match="answered untailored"):
            torch.testing.assert_close(model(batch), net(batch))


def test_many_bad_queries_among_many_good_ones_are_all_found():
    net = deep()
    model, x = Tailored(net, validated, adapt=CN(nn.ReLU), lr=0.1, steps=2), torch.randn(1024, 3)
    bad = torch.rand(1024) < 0.2
    x = torch.where(bad[:, None], 1e18, x)
    with pytest.warns(UserWarning, match=f"{int(bad.sum())} of 1024 queries are answered untailored") as told:
        answers = model(x)
    assert len(told) == 1
    torch.testing.assert_close(answers[bad], net(x)[bad])
    torch.testing.assert_close(answers[~bad], model(x[~bad]))


def test_a_loss_that_raises_for_every_query_of_a_large_batch_is_heard_at_last():
    calls = []

    def failing(model, x):
        calls.append(len(x))
        if len(calls) > 1:
            raise ValueError("a mistake of the user's")
        return model(x).square().sum(1)

    with pytest.raises(ValueError, match="a mistake") as caught:
        Tailored(mlp(), failing, adapt=CN(nn.Tanh), steps=2)(queries(5000))
    assert "every query of 512 parts" in caught.value.__notes__[0]
    assert len(calls) == 2 + 512


def test_a_loss_that_raises_for_the_batch_alone_is_heard():
    """No single query is to blame: it is a mistake of the user's, be it at a later step."""
    x = queries(4)
    before = (net := mlp())(x)

    def failing(model, x):
        answers = model(x)
        if len(x) == 4 and not torch.equal(answers, before):
            raise KeyError("a mistake of the user's")
        return answers.square().sum(1)

    with pytest.raises(KeyError, match="a mistake"):
        Tailored(net, failing, adapt=CN(nn.Tanh), steps=3)(x)


@pytest.mark.parametrize("error", [KeyError("typo"), NotImplementedError("later"), torch.OutOfMemoryError("full")], ids=repr)
def test_what_no_query_is_to_blame_for_is_heard_at_once(error):
    calls = []

    def failing(model, x):
        calls.append(len(x))
        if len(calls) > 1:
            raise error
        return model(x).square().sum(1)

    with pytest.raises(type(error)):
        Tailored(mlp(), failing, adapt=CN(nn.Tanh), steps=3)(queries(4))
    assert calls == [4, 4]


def test_a_call_that_fails_leaves_no_start_to_the_next_one():
    model, x = Tailored(mlp(), lambda m, x: m(x).square().sum(1), adapt=CN(nn.Tanh), steps=1), queries(1)
    expected = Tailored(model.net, model.loss, adapt=CN(nn.Tanh), steps=1)(x)
    model(queries(2))  # finds the places; of another number of queries
    with torch.no_grad(), pytest.raises(RuntimeError):
        torch.func.functionalize(model)(x)  # cannot be asked whether it is finite
    answer = model(x)
    assert not torch._is_functional_tensor(answer)
    torch.testing.assert_close(answer, expected)


class Ours(torch.overrides.TorchFunctionMode):
    """Hears of all that PyTorch is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[object] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.heard.append(func)
        return func(*args, **(kwargs or {}))


def test_a_mode_hears_of_the_inner_gradient():
    model, x = Tailored(mlp(), lambda m, x: m(x).square().sum(1), adapt=CN(nn.Tanh), steps=2), queries()
    expected = [model(x) for _ in range(4)][-1]  # at first it is asked whether the loss keeps the queries apart
    with Ours() as mode:
        torch.testing.assert_close(model(x), expected)
    assert mode.heard.count(torch.autograd.grad) == 2


@pytest.mark.parametrize("adapt", [Weights(), Weights(how="vmap"), CN(nn.ReLU)], ids=repr)
@pytest.mark.filterwarnings("ignore:.*answered untailored")
def test_parts_of_a_batch_may_fail_as_a_whole(adapt):
    model, x = Tailored(deep(), validated, adapt=adapt, steps=3, lr=0.1), far(torch.randn(4, 3))
    expected, cut = model.trace(x), model.replace(chunk=1)
    torch.testing.assert_close(cut(x), expected.prediction)
    torch.testing.assert_close(cut.predict(x, cut.tailor(x)), expected.prediction)
    torch.testing.assert_close(cut.trace(x).prediction, expected.prediction)
    torch.testing.assert_close(cut.trace(x).failed, expected.failed)
    for ours, theirs in zip(cut.path(x), model.path(x), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("options", [{}, {"momentum": 0.5}], ids=["hurried", "careful"])
def test_a_warm_start_that_makes_the_model_raise_is_left_for_home(options):
    x = torch.randn(4, 3)
    model = Tailored(Watching(most=1e3), lambda m, x: m(x).square().sum(1), adapt=CN("act"), steps=2, lr=0.1, **options)
    start = model.tailor(x)
    start["act.beta"] = torch.where(torch.arange(4)[:, None] == 1, 1e6, start["act.beta"])
    with pytest.warns(UserWarning, match="1 of 4 queries are answered untailored"):
        state = model.tailor(x, start=start)
    others = torch.tensor([0, 2, 3])
    expected = model.tailor(x[others], start={name: entry[others] for name, entry in start.items()})
    for name, entry in state.items():
        torch.testing.assert_close(entry[others], expected[name])
    torch.testing.assert_close(model.predict(x, state)[1:2], model.replace(steps=0)(x[1:2]))


@pytest.mark.skipif(TorchVersion(torch.__version__) < "2.13", reason="there compiled code leaves out what cholesky checks")
def test_a_query_that_makes_compiled_code_raise_fails_alone():
    def factorised(model, x):
        return torch.linalg.cholesky(torch.diag_embed(model(x) + 1.0))[:, 0, 0]

    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)), torch.randn(64, 3)
    model = Tailored(net, factorised, adapt=CN(nn.Tanh), steps=3, lr=0.8)
    with torch.no_grad(), pytest.warns(UserWarning, match="of 64 queries are answered untailored"):
        expected = model(x)
    with (
        torch.no_grad(),
        pytest.warns(UserWarning, match="of 64 queries are answered untailored"),
        pytest.warns(UserWarning, match="the compiled program raised .*: this batch is answered in eager mode"),
    ):
        torch.testing.assert_close(model.replace(compile={"backend": "aot_eager"})(x), expected)
