"""What a model run with copies of its weights answers, and what it leaves behind."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from tailoring import CN, Tailored, Weights

COPIES = [Weights(how="vmap"), Weights(how="loop")]


class Scaled(nn.Module):
    """Features and a temperature that all queries share, as open_clip's models answer."""

    def __init__(self):
        super().__init__()
        self.vision, self.act, self.last = nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)
        self.logit_scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        return self.last(self.act(self.vision(x))), self.logit_scale.exp()


def surprise(model, x):
    features, scale = model(x)
    p = (scale * features).log_softmax(1)
    return -(p.exp() * p).sum(1)


@pytest.mark.usefixtures("seeded")
@pytest.mark.parametrize("queries", [3, 5])  # with as many queries as classes, shapes that are wrong would pass
@pytest.mark.parametrize("adapt", [CN(), Weights("vision"), Weights("vision", how="vmap"), Weights("vision", how="loop")], ids=repr)
@pytest.mark.parametrize("chunk", [None, 2])
def test_what_all_queries_share_is_answered_once(adapt, queries, chunk, recwarn):
    model, x = Tailored(Scaled(), surprise, adapt=adapt, steps=3, lr=0.5, chunk=chunk), torch.randn(queries, 4)
    features, scale = model(x)
    assert scale.shape == ()
    torch.testing.assert_close(features, torch.cat([model(query[None])[0] for query in x]))
    assert not [w for w in recwarn if "slowly" in str(w.message)]


@pytest.mark.usefixtures("seeded")
@pytest.mark.filterwarnings("ignore:Weights runs all of this model")
@pytest.mark.parametrize("adapt", [Weights(), *COPIES], ids=repr)
def test_what_would_be_another_for_each_query_must_have_a_row_for_each(adapt):
    told = r"without a row for each query, shape \(\), that depends on the query's own weights"
    if adapt.how == "loop":  # at the start all queries' are the same, but the loss of one depends on another's
        told = "depend on another query's state"
    with pytest.raises(ValueError, match=told):
        Tailored(Scaled(), surprise, adapt=adapt, lr=0.5)(torch.randn(3, 4))


class Remembering(nn.Module):
    class Cache:
        def __init__(self, keys):
            self.keys = keys

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 3)

    def forward(self, x):
        return self.net(x), self.Cache(x)


@pytest.mark.usefixtures("seeded")
@pytest.mark.parametrize("adapt", COPIES, ids=repr)
def test_an_object_of_one_query_is_told(adapt):
    with pytest.warns(UserWarning, match="the model's answer holds a Cache, in which .* what one of them has left"):
        Tailored(Remembering(), lambda model, x: model(x)[0].square().sum(1), adapt=adapt)(torch.randn(3, 4))


@pytest.mark.usefixtures("seeded")
def test_it_is_no_concern_of_rules(recwarn):
    Tailored(Remembering(), lambda model, x: model(x)[0].square().sum(1), adapt=Weights())(torch.randn(3, 4))
    assert not recwarn.list


def pruned(layer):
    prune.l1_unstructured(layer, "weight", 0.5)


@pytest.mark.usefixtures("seeded")
@pytest.mark.filterwarnings("ignore:.*weight_norm", "ignore:Weights runs all of this model")
@pytest.mark.parametrize("adapt", [Weights(), *COPIES], ids=repr)
@pytest.mark.parametrize("wrap", [nn.utils.weight_norm, pruned, nn.utils.spectral_norm])
def test_weights_that_hooks_make_are_left_as_they_were(wrap, adapt):
    net, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), torch.randn(5, 4)
    wrap(net[0])
    net.eval()
    with torch.no_grad():
        net(x)
        before = net[0].weight.clone()
        Tailored(net, lambda model, x: model(x).square().sum(1), adapt=adapt, lr=0.1)(x)
    assert torch.equal(net[0].weight, before)
    copy.deepcopy(net)


@pytest.mark.usefixtures("seeded")
@pytest.mark.filterwarnings("ignore:.*weight_norm")
@pytest.mark.parametrize("adapt", [Weights(), *COPIES], ids=repr)
def test_cached_parametrisations_are_refused(adapt):
    net, x = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 8)), nn.Tanh(), nn.Linear(8, 3)), torch.randn(5, 4)
    model = Tailored(net, lambda model, x: model(x).square().sum(1), adapt=adapt, lr=0.1)
    with parametrize.cached(), pytest.raises(ValueError, match="leave that block"):
        model(x)
    assert model(x).shape == (5, 3)


@pytest.mark.usefixtures("seeded")
def test_hooks_on_gradients_are_not_left_out():
    net, x = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)), torch.randn(4, 3)
    net[2].register_full_backward_hook(lambda _module, given, _out: tuple(g if g is None else g / 2 for g in given))
    with pytest.raises(ValueError, match="'2' has a hook on its gradients"):
        Tailored(net, lambda m, x: m(x).square().sum(1), adapt=Weights(how="vmap"))(x)
    Tailored(net, lambda m, x: m(x).square().sum(1), adapt=Weights(how="loop"))(x)
