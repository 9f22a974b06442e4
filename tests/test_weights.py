"""Every query's own weights, whichever way they come about: tables and padding, tied weights, layers that run in several ways."""

from __future__ import annotations

import pytest
import torch
from nets import one_by_one, size, to_one
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune

from tailoring import CN, Inputs, Shift, Tailored, Weights, baselines, outer_losses
from tailoring import _entries as entries

# Tables and ties


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


# How layers and models are called


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


# The state


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


# Passes of a loss


def against_a_step(model, x):
    """The answer beside the query, in the direction in which it grows: found by a derivative that is not differentiated again."""
    beside = x.clone().requires_grad_()
    (direction,) = torch.autograd.grad(size(model, beside).sum(), beside)
    return (model(x + 0.1 * direction) - model(x)).square().sum(1)


def against_itself(model, x):
    with torch.no_grad():
        target = model(-x)
    return (model(x) - target).square().sum(1)


@pytest.mark.usefixtures("seeded")
@pytest.mark.parametrize("loss", [against_a_step, against_itself])
@pytest.mark.parametrize("backprop", ["none", "last", "all"])
def test_passes_that_a_loss_takes_no_gradient_of_do_not_count(loss, backprop):
    x, y = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    model = Tailored(net, loss, adapt=Weights(), steps=2, lr=0.1, backprop=backprop)
    assert next(iter(model.replace(steps=1).tailor(x).values())).rank == (2 if loss is against_a_step else 1)
    grads = [
        torch.autograd.grad(sum(outer_losses(way, nn.functional.mse_loss, x, y)), list(net.parameters()))
        for way in (model, model.replace(adapt=Weights(how="loop")))
    ]
    assert all(torch.allclose(a, b, atol=1e-10) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("chunk", [None, 3])
def test_a_roll_out_with_a_broken_query_keeps_its_ranks(chunk):
    """Each call starts from the last one's state, and one query is no number from the second on: the others go on as if it were well."""
    net, x = nn.Sequential(nn.Linear(200, 300), nn.Tanh(), nn.Linear(300, 200)), torch.randn(6, 200)
    model = Tailored(net, size, adapt=Weights(), steps=4, lr=1e-4, keep="best", chunk=chunk)
    broken = x.clone()
    broken[5] = torch.nan
    well = ill = model.tailor(x)
    for calls in range(2, 5):
        well, ill = model.tailor(x, start=well), model.tailor(broken, start=ill)
        assert well["0.weight"].rank == ill["0.weight"].rank == 4 * calls
    torch.testing.assert_close(model.predict(x, ill)[:5], model.predict(x, well)[:5])
    assert model.trace(broken, start=ill).failed.tolist() == [False] * 5 + [True]


# Layers that change, layouts, digits


def spread(model, x):
    return (model(x).flatten(1) - 0.3).square().mean(1)


def pruned(net):
    for name in ("weight", "bias"):
        prune.l1_unstructured(net[1], name, 0.5)


class Doubled(nn.Linear):
    def forward(self, input):
        return 2 * super().forward(input)


def of_another_class(net):
    net[1].__class__ = Doubled


def renormed(net):
    net[0].max_norm = 0.5


@pytest.mark.filterwarnings("ignore:There is a performance drop", "ignore:Weights runs all of this model")
@pytest.mark.parametrize("change", [pruned, of_another_class, renormed])
def test_a_layer_that_changes_after_its_first_call_is_looked_at_again(change):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    settings = {"steps": 3, "lr": 0.3}
    model = Tailored(net, spread, adapt=Weights(), **settings)
    model(INDICES)
    change(net)
    torch.testing.assert_close(model(INDICES), Tailored(net, spread, adapt=Weights(how="loop"), **settings)(INDICES))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("how", ["rules", "vmap", "loop"])
def test_how_numbers_lie_in_memory_changes_no_answer(how, groups, dtype):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(4, 4, 3, groups=groups), nn.Tanh(), nn.Conv2d(4, 2, 1)).to(dtype)
    x = torch.randn(3, 4, 7, 7, dtype=dtype)
    model = Tailored(net, spread, adapt=Weights(how=how), steps=3, lr=0.3)
    expected = model(x)
    net.to(memory_format=torch.channels_last)
    torch.testing.assert_close(model(x.contiguous(memory_format=torch.channels_last)), expected, rtol=1e-4, atol=1e-5)


def test_a_padding_that_was_set_later_is_that_of_the_layer():
    net = nn.Sequential(nn.Conv1d(2, 3, 3, padding=1), nn.Tanh(), nn.AdaptiveAvgPool1d(2), nn.Flatten(), nn.Linear(6, 3)).double()
    x = torch.randn(4, 2, 6).double()
    for padding in ((0,), 2, (1,)):
        net[0].padding = padding
        ours, expected = (Tailored(net, size, adapt=Weights(how=how), steps=2, lr=0.1)(x) for how in ("rules", "loop"))
        torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("layer", [nn.Linear(6, 6), nn.Sequential(nn.Unflatten(1, (6, 1)), nn.Conv1d(6, 6, 1, groups=2), nn.Flatten())])
def test_many_small_steps_add_up_under_autocast(layer):
    """Their sum has more digits than each of them, which is rounded to bfloat16."""
    torch.manual_seed(0)
    net, x = nn.Sequential(layer, nn.Tanh(), nn.Linear(6, 4)), torch.randn(3, 6)
    model = Tailored(net, lambda m, x: (m(x) - 1).square().mean(1), adapt=Weights(), steps=300, lr=1e-3)
    expected = model.tailor(x)
    with torch.autocast("cpu", torch.bfloat16):
        state = model.tailor(x)
    for name, entry in state.items():
        shape = tuple(net.get_parameter(name).shape)
        found, right = (entries.dense(e, shape) for e in (entry, expected[name]))
        assert found.dtype == torch.float32
        assert (found - right).norm() < 0.03 * right.norm()


@pytest.mark.parametrize("adapt", [CN("1"), Shift("1")], ids=repr)
def test_a_layer_that_has_grown_is_not_taken_for_what_it_was(adapt):
    net = nn.Sequential(nn.Linear(3, 1), nn.Tanh())
    model = Tailored(net, size, adapt=adapt)
    model(torch.randn(5, 3))
    net[0].weight, net[0].bias = nn.Parameter(torch.randn(9, 3)), nn.Parameter(torch.randn(9))
    with pytest.raises(ValueError, match=r"the output of '1' .* when the model was first seen"):
        model(torch.randn(5, 3))


@pytest.mark.usefixtures("seeded")
def test_a_table_as_it_is_may_be_the_start():
    net, x = nn.Sequential(nn.Embedding(7, 5), nn.Flatten(), nn.Linear(10, 2)).double(), torch.randint(7, (4, 2))
    ruled, dense = (Tailored(net, size, adapt=Weights(how=how), steps=2, lr=0.1) for how in ("rules", "vmap"))
    start = dense.tailor(x)
    torch.testing.assert_close(ruled.predict(x, ruled.tailor(x, start=start)), dense.predict(x, dense.tailor(x, start=start)))


def test_states_are_joined_whatever_their_rank_and_form():
    def products(rows, rank):
        return entries.LowRank(((entries.START, torch.randn(rows, rank, 3), torch.randn(rows, rank, 5)),))

    none, two, dense = products(1, 0), products(2, 2), torch.randn(1, 3, 5)
    joined = entries.cat([none, two])
    assert isinstance(joined, entries.LowRank)
    torch.testing.assert_close(joined.dense(), torch.cat([none.dense(), two.dense()]))
    torch.testing.assert_close(entries.cat([none, dense, two]), torch.cat([none.dense(), dense, two.dense()]))


def test_a_norm_layer_answers_as_precisely_as_it_does(monkeypatch):
    """On CUDA autocast lets norm layers answer in float32."""
    own = F.layer_norm
    monkeypatch.setattr(F, "layer_norm", lambda x, *args, **kwargs: own(x.float(), *args, **kwargs))
    net, x = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), torch.randn(4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        plain = net(x)
        answers = Tailored(net, lambda m, x: m(x).square().sum(1), adapt=Weights("1"), lr=0.0)(x)
    assert plain.dtype == torch.float32
    torch.testing.assert_close(answers, plain)


@pytest.mark.usefixtures("seeded")
def test_what_the_model_gives_for_all_queries_a_loss_may_give_for_each():
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.pos, self.last = nn.Linear(3, 4), nn.Linear(7, 2)
            self.register_buffer("grid", torch.randn(1, 3))

        def forward(self, x):
            return self.last(torch.cat([x, self.pos(self.grid).expand(len(x), -1)], 1))

    def loss(model, x):
        return model(x).square().sum(1) + (model.pos(x) - 1).square().sum(1)

    net, x = Positions().double(), torch.randn(5, 3).double()
    ruled, copies, loop = (Tailored(net, loss, adapt=Weights(how=how), steps=3, lr=0.1) for how in ("rules", "vmap", "loop"))
    torch.testing.assert_close(ruled(x), loop(x))
    torch.testing.assert_close(copies(x), loop(x))
    torch.testing.assert_close(ruled(x), one_by_one(ruled, x))
    shared = ruled.replace(loss=lambda m, x: (m(x) + m.pos(m.grid).sum(1, keepdim=True)).square().sum(1))
    torch.testing.assert_close(shared(x), one_by_one(shared, x))
