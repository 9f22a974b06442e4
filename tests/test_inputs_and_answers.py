"""What goes into a model and comes out of it: categories, numbers, answers of other kinds, and rows that are not their query's."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from nets import Timed, float_mlp, mlp_of_8, size, to_one
from torch import nn

from tailoring import CN, Tailored, Weights, _places


def test_a_model_that_changes_its_input_in_place_is_refused():
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = float_mlp()

        def forward(self, x):
            return self.body(x.sub_(0.5))

    x = torch.rand(2, 3)
    before = x.clone()
    with pytest.raises(ValueError, match="changes its input in place"):
        Tailored(InPlace(), size)(x)
    assert torch.equal(x, before)


@pytest.mark.parametrize("queries", [3, 1])
def test_categories_stay_within_their_tables(queries):
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b, self.body = nn.Embedding(1000, 4), nn.Embedding(5, 4), mlp_of_8()

        def forward(self, x):
            return self.body(torch.cat([self.a(x[:, 0].long()), self.b(x[:, 1].long())], 1))

    rows = torch.tensor([[999, 4], [512, 0], [7, 3]])[:queries]
    for x in (rows, rows.float()):
        assert Tailored(Table(), size)(x).shape == (queries, 2)


def test_a_number_that_is_another_at_every_call():
    net, x = Timed(), torch.randn(4, 3)
    model = Tailored(net, lambda m, x, time: m(x, time).square().sum(1))
    model(x, 0.0)
    net.passes = 0
    for i in range(200):
        model(x, i / 200)
    assert net.passes <= 400 + 8 * 9  # the first few are looked at
    net.passes = 0
    for i in range(200):
        model(x, 1 + i / 200)
    assert net.passes == 400


class Forking(nn.Module):
    """What runs depends on a number that all queries share."""

    def __init__(self):
        super().__init__()
        self.first, self.act, self.second, self.more, self.last = nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)

    def forward(self, x, t):
        h = self.act(self.first(x))
        return self.last(self.more(self.second(h)) if t > 0.5 else h)


@pytest.mark.usefixtures("seeded")
@pytest.mark.parametrize(
    ("kind", "options"),
    [(float, {}), (torch.tensor, {}), (float, {"compile": {"backend": "eager"}})],
    ids=["a float", "a tensor", "compiled"],
)
def test_a_number_may_decide_what_runs(kind, options):
    net, x = Forking(), torch.randn(4, 3)

    def loss(model, x, t):
        return (model(x, t) - x).square().sum(1)

    model = Tailored(net, loss, lr=0.1, **options)
    with torch.no_grad():
        many = 4 if options else 20  # a program for each
        for t in (0.1, 0.9, 0.2, 0.3, 0.8, 0.1, *(i / many for i in range(many))):
            expected = Tailored(net, loss, lr=0.1)(x, t)
            torch.testing.assert_close(model(x, kind(t)), expected)


@pytest.mark.usefixtures("seeded")
def test_kinds_of_inputs_are_forgotten_at_last(monkeypatch):
    monkeypatch.setattr(_places, "_MOST_PLACES", 10)
    model = Tailored(nn.Linear(3, 2), lambda m, x: m(x).square().flatten(1).sum(1), adapt=CN("*"))
    timed = Tailored(Times(), lambda m, x, t: m(x, t).square().flatten(1).sum(1), adapt=CN("*"))
    for length in range(1, 30):
        model(torch.randn(2, length, 3))
        timed(torch.randn(2, length, 3), 0.5)
    assert len(model._places) <= 10
    assert max(len(timed._places), len(timed._ways)) <= 10


class Times(nn.Linear):
    def __init__(self):
        super().__init__(3, 2)

    def forward(self, x, t):
        return super().forward(x) * t


@pytest.mark.usefixtures("seeded")
def test_a_shared_number_may_have_a_gradient():
    t, x = torch.tensor(0.5, requires_grad=True), torch.randn(2, 3)
    model = Tailored(Times(), lambda m, x, t: m(x, t).square().sum(1), adapt=CN("*"))
    (slope,) = torch.autograd.grad(model(x, t).sum(), t)
    assert slope != 0


@dataclass
class Answer:
    y: torch.Tensor


def test_an_answer_that_cannot_be_looked_into_is_told():
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = float_mlp()

        def forward(self, x):
            return Answer(self.body(x))

    with pytest.warns(UserWarning, match=r"no tensor is found in the model's answer.*register_dataclass"):
        Tailored(Wrapped(), lambda m, x: m(x).y.square().sum(1))(torch.randn(4, 3))


class Forks(nn.Module):
    """Goes one way at the first time step and another at all others; with names that the library has, too."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.other = (nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)) for _ in range(2))
        self._step, self._query, self.bound = 0.25, nn.Linear(3, 3), 2.0

    def forward(self, x, t):
        return self.first(x) if t == 0 else self.other(x)


@pytest.mark.parametrize("number", [torch.tensor, float, int, lambda t: torch.tensor(bool(t)), lambda t: torch.tensor(float(t))])
def test_a_number_that_all_queries_share_may_choose_the_way(number):
    net, x = Forks(), torch.randn(4, 3)

    def model():
        return Tailored(net, lambda m, x, t: m(x, t).square().sum(1), adapt=CN(nn.Tanh), steps=2, lr=0.1)

    both = model()
    for t in (0, 1, 0):
        torch.testing.assert_close(both(x, number(t)), model()(x, number(t)))


def test_the_models_names_are_its_own():
    def loss(model, x, t):
        assert (model._step, model.bound) == (0.25, 2.0)
        return model._query(model(x, t)).square().sum(1)

    assert Tailored(Forks(), loss, adapt=CN("first.1"))(torch.randn(4, 3), 0).isfinite().all()


# Rows


class Routed(nn.Module):
    """Tokens whose first number is positive go to an expert."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.expert = nn.Sequential(nn.Linear(2, 2), nn.Tanh())

    def forward(self, x):  # (queries, tokens, 2)
        tokens = x.flatten(0, 1)
        chosen = (tokens[:, 0] > 0).nonzero().squeeze(1)
        return tokens.index_copy(0, chosen, self.expert(tokens[chosen])).view_as(x)


@pytest.mark.parametrize("adapt", [CN(nn.Tanh), Weights("expert.*")])
def test_tokens_sent_to_experts_are_no_rows_of_a_query(adapt):
    """Of these four queries 1, 2, 0 and 1 tokens are sent, which is one for each only in the mean."""
    x = torch.tensor([[[1.0, 1], [-1, 1]], [[1, 2], [2, 1]], [[-1, 0], [-2, 1]], [[-1, 3], [3, 1]]])
    with pytest.raises(ValueError, match="not equally many of each"):
        Tailored(Routed(), lambda m, x: m(x).square().flatten(1).sum(1), adapt=adapt)(x)


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
