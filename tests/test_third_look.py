"""What fresh eyes found later: each once gave a wrong answer without a word, or died of a plausible input."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from tailoring import CN, LBFGS, Tailored, Weights


def to_one(model, *x):
    return (model(*x) - 1).square().flatten(1).sum(1)


def one_by_one(model, *x):
    return torch.cat([model(*(t[i : i + 1] for t in x)) for i in range(len(x[0]))])


class WithNet(nn.Module):
    def __init__(self, *, first: bool):
        super().__init__()
        torch.manual_seed(0)
        if first:
            self.fc = nn.Linear(2, 2)
        self.net = nn.Sequential()
        self.net.fc = nn.Linear(2, 2)
        self.fc = nn.Linear(2, 2)


@pytest.mark.parametrize("first", [True, False])
def test_a_model_that_has_a_net_itself_is_saved_and_loaded_whole(first):
    net = WithNet(first=first)
    saved = Tailored(net, to_one).state_dict()
    assert {name: t.tolist() for name, t in saved.items()} == {name: t.tolist() for name, t in net.state_dict().items()}
    other = WithNet(first=first).requires_grad_(False)
    for p in other.parameters():
        p.zero_()
    Tailored(other, to_one).load_state_dict(net.state_dict())
    for name, t in net.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], t)


class Positions(nn.Module):
    """One layer for what every query brings, and for what all of them share."""

    def __init__(self, layer: nn.Module, shared: torch.Tensor):
        super().__init__()
        self.layer = layer
        self.register_buffer("shared", shared)

    def forward(self, x):
        return torch.tanh(self.layer(x) + self.layer(self.shared)).sum(1)


class Turned(nn.Module):
    """One layer, first with the queries in front, then with the time."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        return self.layer(torch.tanh(self.layer(x)).transpose(0, 1)).transpose(0, 1).sum(1)


@pytest.mark.parametrize("name", ["linear", "embedding", "norm", "turned"])
def test_a_layer_that_is_called_in_several_ways_runs_with_copies(name):
    torch.manual_seed(0)
    x = torch.randn(4, 4, 3)
    make = {
        "linear": lambda: Positions(nn.Linear(3, 3), torch.randn(4, 3)),
        "embedding": lambda: Positions(nn.Embedding(5, 3), torch.arange(4)),
        "norm": lambda: Positions(nn.LayerNorm(3), torch.randn(4, 3)),
        "turned": Turned,
    }
    x = torch.randint(5, (4, 4)) if name == "embedding" else x
    model = Tailored(make[name](), to_one, adapt=Weights(), steps=2, lr=0.01)
    with pytest.warns(UserWarning, match="'layer' is called with the queries in different dimensions, or also with what all"):
        answers = model(x)
    torch.testing.assert_close(answers, model.replace(adapt=Weights(how="loop"))(x))
    torch.testing.assert_close(answers, one_by_one(model, x))


class Sorted(nn.Module):
    """Answers in their order, but works on the queries in another."""

    def __init__(self, *, noise: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.act, self.b, self.noise = nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2), noise

    def forward(self, x):
        order = torch.arange(len(x)) if self.noise else x[:, 0].argsort()
        h = self.a(x[order])
        h = h + torch.randn_like(h) if self.noise else h
        return self.b(self.act(h)[order.argsort()])


@pytest.mark.parametrize("adapt", [CN(), CN("act"), Weights()], ids=repr)
@pytest.mark.parametrize("first", [-2.0, 2.0])
def test_a_model_that_sorts_its_queries_is_refused(adapt, first):
    x = torch.tensor([[first, 0, 0], [1, 1, 0], [0, 0, 1]])
    with pytest.raises(ValueError, match="does the model sort them"):
        Tailored(Sorted(), to_one, adapt=adapt, steps=2, lr=0.1)(x)


def test_a_model_that_draws_noise_is_not_taken_for_one_that_sorts():
    answers = Tailored(Sorted(noise=True), to_one, adapt=CN("act"), steps=2, lr=0.1)(torch.randn(4, 3))
    assert answers.isfinite().all()


class TimeFirst(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.enc, self.out = nn.GRU(3, 3), nn.Linear(3, 2)

    def forward(self, x):
        return self.out(self.enc(x.transpose(0, 1))[0]).mean(0)


READINGS = {
    "output_of": lambda m, x: m.output_of("enc", x).square().sum((0, 2)),
    "input_of": lambda m, x: m.input_of("out", x).square().sum((0, 2)),
    "submodule": lambda m, x: m.enc(x.transpose(0, 1))[0].square().sum((0, 2)),
}


@pytest.mark.parametrize("how", ["rules", "vmap", "loop"])
@pytest.mark.parametrize("reading", READINGS)
def test_what_is_read_inside_a_model_keeps_its_layout_with_copies(how, reading):
    torch.manual_seed(0)
    x = torch.randn(4, 5, 3)

    def loss(model, x):
        return READINGS[reading](model, x) + model(x).square().sum(1)

    model = Tailored(TimeFirst(), loss, adapt=Weights(how=how), steps=3, lr=0.1)
    torch.testing.assert_close(model(x), one_by_one(model, x))
    torch.testing.assert_close(model(x), model.replace(adapt=Weights())(x))


class Reached(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.t, self.b = nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)
        self.listed, self.named = [self.a, self.t], {"a": self.a, "t": self.t}

    def enc(self, x):
        return self.t(self.a(x))

    def part(self, name):
        return getattr(self, name)

    def generated(self, x):
        yield self.enc(x)

    def forward(self, x):
        return self.b(self.enc(x))


WAYS = {
    "get_submodule": lambda m, x: m.get_submodule("t")(m.a(x)),
    "named_modules": lambda m, x: dict(m.named_modules())["t"](m.a(x)),
    "modules": lambda m, x: list(m.modules())[2](m.a(x)),
    "a list": lambda m, x: m.listed[1](m.listed[0](x)),
    "a dict": lambda m, x: m.named["t"](m.named["a"](x)),
    "a method": lambda m, x: m.part("t")(m.part("a")(x)),
}


@pytest.mark.parametrize("adapt", [CN(), Weights()], ids=repr)
@pytest.mark.parametrize("way", WAYS)
def test_modules_that_a_loss_reaches_are_adapted_however_it_does(adapt, way):
    def tailored(encode):
        return Tailored(Reached(), lambda m, x: m(x).square().sum(1) + 10 * encode(m, x).square().sum(1), adapt=adapt, steps=3, lr=0.05)

    x = torch.randn(4, 3)
    torch.testing.assert_close(tailored(WAYS[way])(x), tailored(lambda m, x: m.enc(x))(x))


def test_a_generator_of_the_model_is_refused():
    with pytest.raises(ValueError, match="'generated' is a generator"):
        Tailored(Reached(), lambda m, x: next(m.generated(x)).square().sum(1))(torch.randn(4, 3))


@pytest.mark.parametrize("name", ["parameters", "named_parameters", "state_dict"])
def test_weights_that_every_query_has_its_own_of_are_not_listed(name):
    with pytest.raises(ValueError, match=rf"reads weights by {name}\(\), but every query has its own"):
        Tailored(Reached(), lambda m, x: m(x).square().sum(1) + len(list(getattr(m, name)())), adapt=Weights())(torch.randn(4, 3))


def test_an_argument_without_a_row_per_query_is_no_concern_of_weights():
    class Started(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.enc, self.out = nn.Linear(3, 3), nn.Linear(3, 2)

        def step(self, x, start):
            return self.enc(x) + start

        def forward(self, x):
            return self.out(self.step(x, torch.zeros(1, 1, 3)).tanh().mean(1))

    def loss(model, x):
        return model.step(x, torch.ones(1, 1, 3)).square().flatten(1).sum(1)

    x = torch.randn(4, 5, 3)
    model = Tailored(Started(), loss, adapt=Weights(), steps=2, lr=0.1)
    torch.testing.assert_close(model(x), one_by_one(model, x))


@pytest.mark.parametrize("need_weights", [False, True])
def test_a_query_that_is_all_padding_is_answered_as_the_model_does(need_weights):
    class Attended(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.m = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x, pad):
            return self.m(x, x, x, key_padding_mask=pad, need_weights=need_weights)[0]

    x, pad = torch.randn(3, 5, 4), torch.zeros(3, 5, dtype=torch.bool)
    pad[1] = True
    net = Attended().eval()
    model = Tailored(net, to_one, adapt=Weights(), steps=2, lr=0.1)
    answers = model(x, pad)
    assert answers.isfinite().flatten(1).all(1).tolist() == [True, not need_weights, True]
    torch.testing.assert_close(answers, model.replace(adapt=Weights(how="loop"))(x, pad), equal_nan=True)
    assert (answers - net(x, pad))[0].abs().max() > 1e-3


@pytest.mark.parametrize("lr", [0.02, 0.03, 0.04])
def test_the_best_of_exact_weights_has_a_pair_for_each_step(lr):
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 20)), torch.randn(8, 30)

    def loss(model, x):
        return (model(x).square().sum(1) - x.square().sum(1) / 30).square()

    model = Tailored(net, loss, adapt=Weights(), steps=4, lr=lr, keep="best")
    trace, chunked = model.trace(x), model.replace(chunk=2).trace(x)
    assert trace.state["0.weight"].rank == 4
    assert len(set(trace.steps.tolist())) > 1  # so rows are chosen from several states
    expected = model.replace(adapt=Weights(how="loop")).trace(x)
    for found in (trace, chunked):
        torch.testing.assert_close(found.prediction, expected.prediction)
        assert found.steps.tolist() == expected.steps.tolist()
    torch.testing.assert_close(model.predict(x, trace.state), expected.prediction)


@pytest.mark.parametrize("how", ["rules", "vmap", "loop"])
def test_a_number_for_all_and_one_for_each_are_told_apart(how):
    class Timed(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(3, 3)

        def forward(self, x, t):
            return self.layer(x) * t.reshape(-1, 1)

    model, x, times = Tailored(Timed(), to_one, adapt=Weights(how=how), steps=2, lr=0.1), torch.randn(3, 3), torch.rand(3)
    for_all = model(x, torch.tensor(0.5))
    torch.testing.assert_close(model(x, times), one_by_one(model, x, times))
    torch.testing.assert_close(model(x, torch.tensor(0.5)), for_all)


def test_the_loss_can_be_replaced_and_a_search_leaves_no_setting_behind():
    net, x = Reached(), torch.randn(4, 3)
    model = Tailored(net, to_one, steps=np.int64(2), lr=0.1)
    other = model.replace(loss=lambda m, x: m(x).square().sum(1))
    assert other.net is net
    torch.testing.assert_close(other(x), Tailored(net, lambda m, x: m(x).square().sum(1), steps=2, lr=0.1)(x))
    searching = model.replace(optimizer=LBFGS())
    assert searching.keep == "best"
    assert searching.replace(optimizer=None, lr=0.1).keep == "last"


@pytest.mark.parametrize("adapt", [CN(), Weights()], ids=repr)
def test_a_gradient_too_large_to_be_squared_is_clipped(adapt):
    x = torch.randn(3, 3)
    model = Tailored(Reached(), lambda m, x: to_one(m, x) * torch.tensor([1.0, 1e22, 1.0])[: len(x)], adapt=adapt, clip=0.5, lr=0.1)
    trace = model.trace(x)
    assert not trace.failed.any()
    assert (trace.prediction - model.net(x)).abs().sum(1).min() > 1e-4
