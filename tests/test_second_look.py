"""What fresh eyes found: each once gave a wrong answer without a word, or died of a plausible input."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tailoring import CN, LBFGS, Inputs, Tailored, Weights, baselines, check, outer_losses


def size(model, x):
    return model(x).square().sum(1)


def mlp(*, out=2):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, out))


class Padded(nn.Module):
    def __init__(self, *, token: bool):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.out = nn.Embedding(7, 4, padding_idx=0), nn.Linear(4, 2)
        self.token = nn.Parameter(torch.randn(4)) if token else 0

    def forward(self, index):
        return self.out((self.table(index) + self.token).tanh().mean(1))


class Tied(nn.Module):
    def __init__(self, *, bias: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.mid, self.head = nn.Embedding(7, 4, padding_idx=0), nn.Linear(4, 4), nn.Linear(4, 7, bias=bias)
        self.head.weight = self.table.weight

    def forward(self, index):
        return self.head(torch.tanh(self.mid(self.table(index))))


def indecision(model, index):
    logits = model(index)
    return -(logits.softmax(-1) * logits.log_softmax(-1)).sum((1, 2))


INDICES = torch.tensor([[1, 2, 3, 4], [5, 6, 0, 0], [1, 0, 2, 0]])


@pytest.mark.parametrize("how", ["rules", "vmap"])
@pytest.mark.parametrize(("net", "loss"), [(Padded(token=False), size), (Tied(), indecision)], ids=["plain", "tied"])
def test_padding_has_no_gradient_whichever_way_every_query_has_its_weights(how, net, loss):
    ours, expected = (Tailored(net, loss, adapt=Weights(how=way), steps=3, lr=0.1)(INDICES) for way in (how, "loop"))
    torch.testing.assert_close(ours, expected)


def test_padding_has_no_gradient_in_a_model_that_runs_with_copies():
    model = Tailored(Padded(token=True), size, adapt=Weights(), steps=2, lr=0.1)
    with pytest.warns(UserWarning, match="token belong to the model itself"):
        torch.testing.assert_close(model(INDICES)[2:], model(INDICES[2:]))


class Field(nn.Module):
    """Of a place x in a medium."""

    def __init__(self, **table):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.body = nn.Embedding(5, 4, **table), nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x, medium):
        return self.body(torch.cat([x, self.table(medium)], 1))


def equation(model, x, medium):
    x = x.detach().requires_grad_()
    u = model(x, medium)
    (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    return (slope.sum(1) - u[:, 0]).square()


def test_a_loss_that_differentiates_a_model_with_a_table():
    """Its gradient is the table itself, not outer products."""
    x = Inputs(torch.randn(4, 2), torch.tensor([0, 1, 4, 0]))
    padded = Field(padding_idx=0)
    ours, expected = (Tailored(padded, equation, adapt=Weights(how=how), steps=2, lr=0.1).tailor(x) for how in ("rules", "loop"))
    torch.testing.assert_close(ours["table.weight"], expected["table.weight"])
    model = Tailored(Field(), equation, adapt=Weights(), steps=2)
    torch.testing.assert_close(model.predict(x, model.tailor(x)), model(*x.args))
    assert all(loss.isfinite() for loss in outer_losses(model, F.mse_loss, x, torch.randn(4, 1)))
    with pytest.raises(ValueError, match="has shape"):
        model.predict(x, model.tailor(x) | {"table.weight": torch.zeros(4, 5, 3)})


def test_a_table_of_ordinary_size_is_looked_at_without_its_indices():
    net = nn.Sequential(nn.Embedding(50, 64), nn.Flatten(), nn.Linear(512, 64), nn.Tanh(), nn.Linear(64, 4))
    many = torch.randint(0, 50, (200, 8))
    model = Tailored(net, size, adapt=Weights(), steps=2)
    torch.testing.assert_close(model(many)[:3], model(many[:3]), rtol=1e-3, atol=1e-5)


class OneNumber(nn.Module):
    """An answer without dimensions of its own, and a parameter without any."""

    def __init__(self):
        super().__init__()
        self.body, self.scale = mlp(out=1), nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return self.scale * self.body(x).squeeze(-1)


@pytest.mark.parametrize(
    "settings", [{}, {"momentum": 0.9}, {"clip": 0.1}, {"stop": 1e-9}, {"keep": "best"}, {"backprop": "all"}, {"optimizer": LBFGS()}]
)
@pytest.mark.parametrize("adapt", [baselines.Output(), Weights(how="vmap"), Weights()], ids=repr)
def test_a_query_may_own_a_single_number(adapt, settings):
    if "optimizer" in settings and adapt.outer_products:
        pytest.skip("L-BFGS needs a state of tensors")
    x = torch.randn(4, 3)
    broken = x.clone()
    broken[2] = torch.nan
    net = OneNumber()
    adapt = Weights("scale", how=adapt.how) if isinstance(adapt, Weights) else adapt  # the rest has a test of its own, and warns
    model = Tailored(net, lambda m, x: (m(x) - x.sum(1)).square(), adapt=adapt, steps=3, lr=1e-2, **settings)
    answers, trace = model(broken), model.trace(x)
    assert (trace.losses[-1] < trace.losses[0]).all()
    torch.testing.assert_close(trace.prediction, model(x))
    torch.testing.assert_close(answers[[0, 1, 3]], model(x)[[0, 1, 3]])
    assert answers[2].isnan()


def test_a_tied_weight_is_chosen_under_any_of_its_names():
    ids = INDICES
    assert {site.key for site in Weights("head").sites(Tied(bias=True), ids)} == {"table.weight", "head.bias"}
    assert {site.key for site in Weights("head.*").sites(Tied(), ids)} == {"table.weight"}


def test_a_shared_state_sees_that_weights_were_tied():
    torch.manual_seed(0)
    first, last, x = nn.Linear(4, 4), nn.Linear(4, 4), torch.randn(3, 4)
    net = nn.Sequential(first, nn.Tanh(), last)
    before = Tailored(net, size, adapt=baselines.Shared(Weights()), steps=2, lr=0.1)
    before(x)
    last.weight = first.weight
    torch.testing.assert_close(before(x), Tailored(net, size, adapt=baselines.Shared(Weights()), steps=2, lr=0.1)(x))


# Losses that look into the model


class Coder(nn.Module):
    """One activation for both halves."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.act = nn.Linear(3, 8), nn.Linear(8, 8), nn.Linear(8, 3), nn.Tanh()

    def encode(self, x):
        return self.act(self.a(x))

    def decode(self, z):
        return self.c(self.act(self.b(z)))

    def forward(self, x):
        return self.decode(self.encode(x))


def test_a_part_that_runs_some_calls_of_a_module_is_refused():
    x = torch.randn(4, 3)
    with pytest.raises(ValueError, match=r"module 'act' runs 1 of its 2 times.*a module of its own"):
        Tailored(Coder(), lambda m, x: (m.decode(m.encode(x)) - x).square().sum(1))(x)
    within = nn.Sequential(nn.Linear(3, 3), Coder())  # all of its calls are in the part
    ours, other = (Tailored(within, loss)(x) for loss in (size, lambda m, x: m[1](m[0](x)).square().sum(1)))
    torch.testing.assert_close(ours, other)


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self._first, self.heads = nn.Sequential(nn.Linear(3, 8), nn.Tanh()), nn.ModuleDict({"a": mlp_of_8(), "b": mlp_of_8()})

    def forward(self, x):
        h = self._first(x)
        return sum(head(h) for head in self.heads.values())


def mlp_of_8():
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


@pytest.mark.parametrize(
    "heads",
    [
        lambda m: m.heads.values(),
        lambda m: [head for _, head in m.heads.items()],
        lambda m: m.heads.children(),
        lambda m: [head for _, head in m.heads.named_children()],
        lambda m: [m.heads[name] for name in m.heads],
    ],
)
def test_modules_that_a_loss_lists_run_with_the_state(heads):
    x = torch.randn(4, 3)
    ours, expected = (
        Tailored(Heads(), loss, steps=2, lr=0.1).tailor(x)
        for loss in (lambda m, x: sum(head(m._first(x)) for head in heads(m)).square().sum(1), size)
    )
    for name, entry in expected.items():
        torch.testing.assert_close(ours[name], entry)


def test_a_loss_may_run_some_modules_of_a_sequence():
    net, x = mlp(), torch.randn(4, 3)
    ours, expected = (
        Tailored(net, loss, adapt=CN("1"), lr=0.1).tailor(x)
        for loss in (lambda m, x: m[:2](x).square().sum(1), lambda m, x: m.output_of("1", x).square().sum(1))
    )
    for name, entry in expected.items():
        torch.testing.assert_close(ours[name], entry)


def test_a_loss_may_count_and_cut_a_list_of_modules():
    class Listed(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList([nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)])

        def forward(self, x):
            return self.parts[2](self.parts[1](self.parts[0](x)))

    def loss(model, x):
        _, *rest = model.parts
        assert [len(model.parts[:1]), len(rest)] == [1, 2]
        return rest[1](rest[0](model.parts[:1][0](x))).square().sum(1)

    torch.manual_seed(0)
    net, x = Listed(), torch.randn(4, 3)
    torch.testing.assert_close(Tailored(net, loss, lr=0.1)(x), Tailored(net, size, lr=0.1)(x))


def test_a_loss_cannot_change_the_model_without_a_word():
    def change(model, x):
        model.features = True
        return size(model, x)

    for adapt in (CN(), Weights(), baselines.Output()):
        with pytest.raises(AttributeError, match="'features'"):
            Tailored(mlp(), change, adapt=adapt)(torch.randn(4, 3))


# Inputs and answers


def test_a_model_that_changes_its_input_in_place_is_refused():
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = mlp()

        def forward(self, x):
            return self.body(x.sub_(0.5))

    x = torch.rand(2, 3)
    before = x.clone()
    with pytest.raises(ValueError, match="changes its input in place"):
        Tailored(InPlace(), size)(x)
    assert torch.equal(x, before)


@dataclass
class Answer:
    y: torch.Tensor


def test_an_answer_that_cannot_be_looked_into_is_told():
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = mlp()

        def forward(self, x):
            return Answer(self.body(x))

    with pytest.warns(UserWarning, match=r"no tensor is found in the model's answer.*register_dataclass"):
        Tailored(Wrapped(), lambda m, x: m(x).y.square().sum(1))(torch.randn(4, 3))


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


class Timed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.passes = mlp(), 0

    def forward(self, x, time):
        if not torch.compiler.is_compiling():
            self.passes += 1
        return self.body(x) * time


def test_a_number_that_is_another_at_every_call():
    net, x = Timed(), torch.randn(4, 3)
    model = Tailored(net, lambda m, x, time: m(x, time).square().sum(1))
    model(x, 0.0)
    net.passes = 0
    for i in range(200):
        model(x, i / 200)
    assert net.passes == 400
    for i in range(200):
        model(x, i)
    assert len(model._places) < 100


@pytest.mark.no_cover
@pytest.mark.filterwarnings("ignore:Dynamo detected a call")
def test_more_programs_than_are_kept_are_answered_in_eager_mode(monkeypatch):
    monkeypatch.setattr("tailoring._compiled._PROGRAMS", 3)
    net, x = Timed(), torch.randn(4, 3)
    loss = lambda m, x, time: m(x, time).square().sum(1)  # noqa: E731
    model, eager = Tailored(net, loss, compile={"backend": "eager"}), Tailored(net, loss)
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=2), pytest.warns(UserWarning, match="Give that as a tensor"):
        answers = [model(x, 1 + i / 100) for i in range(5)]
    torch.testing.assert_close(answers, [eager(x, 1 + i / 100) for i in range(5)])


@pytest.mark.parametrize("how", ["loop", "vmap"])
def test_zero_steps_are_the_model_while_another_thread_has_its_weights(how):
    net, x = mlp(), torch.randn(4, 3)
    expected, zero, done = net(x).detach(), Tailored(net, size, steps=0), threading.Event()
    copies = Tailored(net, size, adapt=Weights(how=how), steps=2, lr=0.1)

    def busy():
        for _ in range(10):
            copies(x)
        done.set()

    thread = threading.Thread(target=busy)
    thread.start()
    answers = []
    while not done.is_set():
        answers.append(zero(x).detach())
    thread.join()
    assert all(torch.equal(answer, expected) for answer in answers)


def test_a_compiled_offset_of_the_answer_refuses_views_too():
    model = Tailored(mlp(), lambda m, x: (m(x) - m(x + 0.1)).square().sum(1), adapt=baselines.Output(), compile={"backend": "eager"})
    with torch.no_grad(), pytest.raises(ValueError, match="other inputs than the query"):
        model(torch.randn(4, 3))


def test_a_model_with_the_queries_in_the_second_dimension_mixes_nothing():
    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = mlp()

        def forward(self, x):
            return self.body(x).T

    assert not check(Tailored(Turned(), lambda m, x: m(x).square().sum(0)), torch.randn(5, 3)).problems


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
