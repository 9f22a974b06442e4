"""A tailoring loss in which one query's value depends on another's state is refused, at the first batch that has two."""

from __future__ import annotations

import copy

import pytest
import torch
from nets import drift, float_mlp, size
from torch import nn
from torch.nn import functional as F

from tailoring import CN, Shift, Tailored, Weights, check, outer_losses
from tailoring.baselines import Output, Shared

pytestmark = pytest.mark.usefixtures("seeded")
ADAPTERS = [CN(), Shift("1"), Weights(), Weights("2"), Weights(how="vmap"), Weights(how="loop")]


def one_view_after_the_other(model, x):
    return model(torch.cat([x, -x])).view(2, len(x), -1).var(0).sum(1)


def negatives_of_the_batch(model, x):
    first, second = F.normalize(model(x)), F.normalize(model(x + 0.1))
    return F.cross_entropy(first @ second.T / 0.1, torch.arange(len(x)), reduction="none")


def centred(model, x):
    y = model(x)
    return (y - y.mean(0)).square().sum(1)


def turned(model, x):
    return model(x).flip(0).square().sum(1)


def moved_on(model, x):
    return model(x).roll(1, 0).square().sum(1)


MIXING = [one_view_after_the_other, negatives_of_the_batch, centred, turned, moved_on]


def of_the_one_before(model, x):
    y = model(x)
    return F.pad((y[1:] - y[:-1]).square().sum(1), (1, 0))


def of_the_one_after(model, x):
    y = model(x)
    return F.pad((y[1:] - y[:-1]).square().sum(1), (0, 1))


@pytest.mark.parametrize("adapt", ADAPTERS, ids=repr)
@pytest.mark.parametrize("loss", MIXING)
def test_it_is_refused_each_time(loss, adapt):
    model, x = Tailored(float_mlp(), loss, adapt=adapt, lr=0.1), torch.randn(5, 3)
    for run in (model, model, model.trace, model.replace(steps=3, lr=0.1, backprop="all"), model.replace(keep="best")):
        with pytest.raises(ValueError, match=f"the tailoring loss {loss.__name__} makes one query's value depend on another query's state"):
            run(x)
    assert "tailoring loss" in str(check(model, x))
    assert torch.isfinite(model(x[:1])).all()  # of one query there is nothing to mix


@pytest.mark.parametrize("loss", [centred, turned, moved_on])
def test_so_it_is_where_the_answer_itself_moves(loss):
    with pytest.raises(ValueError, match="depend on another query's state"):
        Tailored(float_mlp(), loss, adapt=Output())(torch.randn(5, 3))


@pytest.mark.parametrize("loss", MIXING)
def test_compiled_code_never_sees_it(loss):
    model = Tailored(float_mlp(), loss, compile={"backend": "eager"})
    for queries in (2, 1, 5):
        if queries > 1:
            with torch.no_grad(), pytest.raises(ValueError, match="depend on another query's state"):
                model(torch.randn(queries, 3))
        else:
            with torch.no_grad():
                assert model(torch.randn(queries, 3)).shape == (1, 2)


def one_view_beside_the_other(model, x):
    return model(torch.stack([x, -x], 1).flatten(0, 1)).unflatten(0, (len(x), 2)).var(1).sum(1)


def a_view_at_a_time(model, x):
    return (model(x) - model(-x)).square().sum(1)


def views_as_inputs_of_one(model, x):
    return model(torch.stack([x, -x], 1)).var(1).sum(1)


@pytest.mark.parametrize("adapt", ADAPTERS, ids=repr)
@pytest.mark.parametrize("loss", [one_view_beside_the_other, a_view_at_a_time, views_as_inputs_of_one, drift])
def test_what_keeps_them_apart_is_not(loss, adapt):
    net, x = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3)), torch.randn(5, 3)
    if loss is views_as_inputs_of_one and not isinstance(adapt, Weights):
        loss = a_view_at_a_time  # CN's scales are made for the shape of a query
    model = Tailored(net, loss, adapt=adapt, lr=0.1, steps=2)
    torch.testing.assert_close(model(x), torch.cat([model(query[None]) for query in x]))
    sum(outer_losses(model, F.mse_loss, x, x)).backward()


def mixed_early(model, x):
    hidden = model.output_of("1", x)
    return model(x).square().sum(1) + (hidden - hidden.mean(0)).square().sum(1)


@pytest.mark.parametrize("adapt", [CN("*"), Weights(), Weights(how="vmap")], ids=repr)
@pytest.mark.parametrize("loss", [of_the_one_before, of_the_one_after, mixed_early])
def test_it_is_asked_both_ways_and_of_all_that_is_adapted(loss, adapt):
    with pytest.raises(ValueError, match="depend on another query's state"):
        Tailored(float_mlp(), loss, adapt=adapt)(torch.randn(5, 3))


def test_a_batch_that_is_not_finite_answers_for_no_other():
    model, x = Tailored(float_mlp(), turned), torch.randn(5, 3)
    broken = torch.where(torch.arange(5)[:, None] == 1, torch.nan, x)
    model(broken)
    with pytest.raises(ValueError, match="depend on another query's state"):
        model(x)


def test_compiled_code_never_sees_it_with_a_learned_start_either():
    model = Tailored(float_mlp(), turned, adapt=CN(learned_start=True), compile={"backend": "eager"})
    with torch.no_grad(), pytest.raises(ValueError, match="depend on another query's state"):
        model(torch.randn(5, 3))


def test_a_batch_that_is_adapted_as_a_whole_may_be_mixed():
    model = Tailored(float_mlp(), centred, adapt=Shared(CN()))
    assert model(torch.randn(5, 3)).shape == (5, 2)


def pairs(model, x):
    y = model(x)
    return (y[0::2] - y[1::2]).square().sum(1).repeat_interleave(2)


def halves(model, x):
    own = model(x).unflatten(0, (2, -1))
    return (own - own.mean(1, keepdim=True)).square().sum(2).flatten()


@pytest.mark.parametrize("adapt", [CN(), Weights()], ids=repr)
@pytest.mark.parametrize("loss", [pairs, halves, of_the_one_before])
def test_no_two_queries_are_left_unasked(loss, adapt):
    with pytest.raises(ValueError, match="depend on another query's state"):
        Tailored(float_mlp(), loss, adapt=adapt)(torch.randn(6, 3))


@pytest.mark.parametrize("compile", [False, {"backend": "eager"}], ids=["eager", "compiled"])
@pytest.mark.parametrize("first", [torch.zeros(4, 3), torch.ones(1, 3).expand(4, 3)], ids=["zeros", "copies"])
def test_queries_that_are_alike_answer_for_no_other(first, compile):
    """What a mean takes of the others cancels out where all are the same."""
    model = Tailored(float_mlp(), centred, compile=compile)
    with torch.no_grad():
        model(first)
        with pytest.raises(ValueError, match="depend on another query's state"):
            model(torch.randn(4, 3))


@pytest.mark.parametrize("compile", [False, {"backend": "eager"}], ids=["eager", "compiled"])
def test_a_missing_measurement_hides_nothing(compile):
    def centred_where_known(model, x):
        y = model(x.nan_to_num())
        return (y - y.mean(0)).square().sum(1)

    x = torch.randn(4, 3)
    x[0, 1] = torch.nan
    with torch.no_grad(), pytest.raises(ValueError, match="depend on another query's state"):
        Tailored(float_mlp(), centred_where_known, compile=compile)(x)


def test_a_loss_that_cannot_be_tried_on_two_queries_is_asked_when_it_is_called():
    def of_fours(model, x):
        own = model(x).view(4, -1, 2)
        return (own - own.mean(1, keepdim=True)).square().sum(2).flatten()

    x = torch.randn(8, 3)
    with pytest.raises(ValueError, match="depend on another query's state"):
        Tailored(float_mlp(), of_fours).prepare(x)(x)


def test_compiled_code_asks_two_queries_that_differ():
    model, x = Tailored(float_mlp(), centred, compile={"backend": "eager"}), torch.randn(6, 3)
    with torch.no_grad(), pytest.raises(ValueError, match="depend on another query's state"):
        model(torch.cat([x[:1], x[:1], x[1:]]))


def test_who_compiles_it_himself_is_told_when_it_is_prepared():
    x = torch.randn(5, 3)
    with pytest.raises(ValueError, match="depend on another query's state"):
        Tailored(float_mlp(), centred).prepare(x)
    batchnorm = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))  # in training mode: refused when it is called
    assert Tailored(batchnorm, size).prepare(x).training


def test_compiled_code_asks_once_where_the_batch_is_adapted_as_a_whole():
    calls = []

    def noted(model, x):
        if not torch.compiler.is_compiling():
            calls.append(len(x))
        return size(model, x)

    model, x = Tailored(float_mlp(), noted, adapt=Shared(CN()), compile={"backend": "eager"}), torch.randn(5, 3)
    with torch.no_grad():
        for _ in range(3):
            model(x)
    assert calls == []


def test_to_ask_calls_no_loss_and_draws_nothing():
    calls = []

    def noted(model, x):
        calls.append(len(x))
        return size(model, x + 0.1 * torch.randn_like(x))

    model, x = Tailored(float_mlp(), noted, lr=0.1, steps=2), torch.randn(5, 3)
    first, second = (model(x) for _ in range(2) if torch.manual_seed(1))
    assert calls == [5, 5, 5, 5]
    assert torch.equal(first, second)


def test_a_slope_that_is_no_number_tells_nothing():
    """The square root of 0 has none, in all rows: an answer, untailored, is better than an error."""
    model, x = Tailored(float_mlp(), lambda model, x: (model(x) - model(x).detach()).square().sum(1).sqrt()), torch.randn(5, 3)
    torch.testing.assert_close(model(x), model.net(x))


@pytest.mark.parametrize("adapt", ADAPTERS, ids=repr)
@pytest.mark.parametrize("queries", [1, 5])
def test_a_loss_must_leave_the_query_as_it_is(adapt, queries):
    def masked(model, x):
        x[:, ::2] = 0
        return model(x).square().sum(1)

    with pytest.raises(ValueError, match="the tailoring loss masked changes the query in place"):
        Tailored(float_mlp(), masked, adapt=adapt)(torch.randn(queries, 3))


class Imaginary(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 4)

    def forward(self, x):
        h = self.lin(x)
        return torch.complex(h, h - h.mean(0))


class ToTheNext(nn.Module):
    """Rows know of later ones only."""

    def forward(self, x):
        return x + torch.cat([x[1:], x[:1] * 0])


@pytest.mark.parametrize("net", [Imaginary(), nn.Sequential(nn.Linear(3, 3), ToTheNext())], ids=["imaginary", "backwards"])
def test_check_looks_at_all_parts_and_both_ways(net):
    assert "mixes the queries" in str(check(net, torch.randn(4, 3)))


def test_check_finds_a_loss_that_knows_later_queries():
    def later(model, x):
        return (model(x) - torch.cat([x[1:], x[-1:]])).square().sum(1)

    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))
    assert "tailoring loss later: mixes the queries" in str(check(Tailored(net, later), torch.randn(4, 3)))


def trusting(plain):
    """Its terms of the whole batch are zero, with their gradients, until the first step."""

    def loss(model, x):
        with torch.no_grad():
            before = plain(x)
        y = model(x)
        return (y.square().sum(1) - 1).square() + 10 * (y - before).mean(0).square().sum()

    return loss


def hinge(model, x):
    y = model(x)
    far = (y - y.mean(0)).square().sum(1) - 1.0
    return y.square().sum(1) + torch.where(x.abs().sum(1) > 3, far.clamp(min=0), 0.0) * 10


@pytest.mark.parametrize("adapt", [CN(), Weights()], ids=repr)
def test_what_a_later_pass_mixes_is_refused_then(adapt):
    net, x = float_mlp(), torch.randn(6, 3)
    with pytest.raises(ValueError, match="depend on another query's state"):
        Tailored(net, trusting(copy.deepcopy(net)), adapt=adapt, steps=2, lr=0.1)(x)
    model = Tailored(net, hinge, adapt=adapt, steps=1, lr=0.1)
    model(0.1 * x)
    with pytest.raises(ValueError, match="depend on another query's state"):
        model(10 * x)


def test_a_head_that_begins_at_zero_hides_nothing():
    net, x = float_mlp(), torch.randn(4, 3)
    nn.init.zeros_(net[2].weight)
    model = Tailored(net, centred)
    model(x)
    nn.init.normal_(net[2].weight)
    with pytest.raises(ValueError, match="depend on another query's state"):
        model(x)


@pytest.mark.parametrize("adapt", ADAPTERS, ids=repr)
def test_what_the_batch_lends_and_takes_back_is_no_mixing(adapt):
    def stabilised(model, x):
        y = model(x)
        most = y.max()
        return (y - most).exp().sum(1).log() + most

    for count in (5, 1024):
        model, x = Tailored(float_mlp(), stabilised, adapt=adapt, steps=2, lr=0.1), torch.randn(count, 3)
        torch.testing.assert_close(model(x)[2:3], model(x[2:3]))


def test_compiled_code_asks_all_queries_where_two_are_too_few():
    def neighbours(model, x):
        y = model(x)
        return torch.cdist(y, y).topk(4, 1, largest=False).values[:, 1:].square().sum(1)

    with torch.no_grad(), pytest.raises(ValueError, match="depend on another query's state"):
        Tailored(float_mlp(), neighbours, compile={"backend": "eager"})(torch.randn(8, 3))


def test_a_query_that_is_changed_in_place_later_is_noticed_then():
    def sometimes(model, x):
        if (x > 2).any():
            x.clamp_(max=2.0)
        return model(x).square().sum(1)

    model = Tailored(float_mlp(), sometimes)
    model(torch.zeros(4, 3))
    with pytest.raises(ValueError, match="changes the query in place"):
        model(torch.full((4, 3), 3.0))


@pytest.mark.parametrize("count", [1024, 16384])
@pytest.mark.parametrize("adapt", [CN(), Weights()], ids=repr)
def test_a_mean_over_a_large_batch_is_mixing(adapt, count):
    with pytest.raises(ValueError, match="depend on another query's state"):
        Tailored(float_mlp(), centred, adapt=adapt)(torch.randn(count, 3))
