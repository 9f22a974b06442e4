"""Models, and ways to use them, that cannot be adapted as they are: the error says why, and what to do."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from nets import size
from torch import nn

from tailoring import CN, Shift, Tailored, Weights

pytestmark = pytest.mark.usefixtures("seeded")


@pytest.mark.parametrize("layer", [nn.utils.spectral_norm(nn.Linear(4, 4)), nn.RReLU()], ids=["spectral_norm", "RReLU"])
def test_other_layers_that_answer_otherwise_at_every_call_are_refused_while_they_train(layer):
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), layer, nn.Linear(4, 2))
    x, before = torch.randn(4, 3), {name: t.clone() for name, t in net.state_dict().items()}
    with pytest.raises(ValueError, match="in training mode"):
        Tailored(net, size, adapt=CN(nn.Tanh))(x)
    assert all(torch.equal(t, before[name]) for name, t in net.state_dict().items())
    assert Tailored(net.eval(), size, adapt=CN(nn.Tanh))(x).shape == (4, 2)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("make", [torch.jit.script, lambda net: torch.jit.trace(net, torch.randn(4, 3))], ids=["script", "trace"])
def test_a_scripted_model_is_told_to_be_given_as_it_was(make):
    with pytest.raises(ValueError, match="the module that it was made from"):
        Tailored(make(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))), size)


class Unrolled(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.act, self.last = nn.Linear(7, 4), nn.Tanh(), nn.Linear(4, 2)

    def forward(self, x):
        h = x.new_zeros(len(x), 4)
        for now in x.unbind(1):
            h = self.act(self.cell(torch.cat([h, now], 1)))
        return self.last(h)


@pytest.mark.parametrize(
    ("adapt", "net", "words"),
    [
        (CN(learned_start=True), Unrolled, "needs a start for 'act:2.gamma'"),
        (Shift("0", learned_start=True), lambda: nn.Sequential(nn.Linear(3, 4), nn.Flatten(), nn.LazyLinear(2)), "is 0.shift"),
    ],
    ids=["CN", "Shift"],
)
def test_a_start_that_was_learned_for_other_inputs_says_so(adapt, net, words):
    model = Tailored(net(), size, adapt=adapt).prepare(torch.randn(2, 2, 3))
    if isinstance(adapt, Shift):
        model.net[2] = nn.Linear(12, 2)
    with pytest.raises(ValueError, match=words):
        model(torch.randn(2, 3, 3))


class Remembering(nn.Module):
    """Leaves its features behind for whoever wants to see them, beside a constant."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.unit = nn.Linear(3, 4), nn.Linear(4, 2), torch.ones(4)

    def forward(self, x):
        self.features = torch.tanh(self.first(x))
        return self.last(self.features)


def quiet(model, x):
    return size(model, x) + (model.features * model.unit).square().sum(1)


@pytest.mark.parametrize("how", ["vmap", "loop"])
def test_what_a_model_leaves_behind_is_one_querys_with_copies(how):
    x = torch.randn(4, 3)
    model = Tailored(Remembering(), quiet, adapt=Weights(), steps=2, lr=0.1)
    alone = torch.cat([model(query) for query in x.split(1)])
    assert torch.allclose(model(x), alone, atol=1e-6)
    with pytest.raises(ValueError, match="reads 'features', which the model sets while it runs"):
        model.replace(adapt=Weights(how=how))(x)


@dataclass
class Answer:
    y: torch.Tensor


class InAnObject(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))

    def forward(self, x):
        return Answer(self.body(x))


@pytest.mark.filterwarnings("ignore:no tensor is found in the model's answer")
@pytest.mark.parametrize("how", ["vmap", "loop"])
def test_copies_need_answers_that_can_be_put_together(how):
    model = Tailored(InAnObject(), lambda model, x: model(x).y.square().sum(1), adapt=Weights(how=how))
    with pytest.raises(ValueError, match="no tensor is found in the Answer"):
        model(torch.randn(4, 3))


class Packing(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.last = nn.GRU(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.last(self.layer(packed)[1][-1])


@pytest.mark.parametrize("adapt", [CN(), Weights()], ids=repr)
def test_packed_sequences_say_what_to_do(adapt):
    model = Tailored(Packing(), lambda model, *x: model(*x).square().sum(1), adapt=adapt)
    with pytest.raises(ValueError, match="pad sequences instead of packing them"):
        model(torch.randn(3, 5, 3), torch.tensor([5, 2, 3]))


def test_a_loss_with_too_many_dimensions_is_told_which_to_sum():
    net, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(4, 3)
    with pytest.raises(ValueError, match=r"but its shape is \(4, 2\); sum over all other dimensions"):
        Tailored(net, lambda model, x: model(x).square())(x)


class Routed(nn.Module):
    """Each query goes to one of three experts."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.gate = nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 3)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)) for _ in range(3))

    def forward(self, x):
        h = self.norm(self.first(x))
        weights = self.gate(h).softmax(1)
        chosen, out = weights.argmax(1), h.new_zeros(len(x), 2)
        for k, expert in enumerate(self.experts):
            rows = (chosen == k).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, weights[rows, k : k + 1] * expert(h[rows]))
        return out


@pytest.mark.parametrize(
    "adapt", [CN("norm"), CN("first"), Shift("norm"), Weights("norm"), Weights("first", "norm"), Weights(how="loop")], ids=repr
)
def test_what_all_queries_go_through_is_adapted_wherever_they_go_then(adapt):
    for seed in range(6):
        torch.manual_seed(seed)
        model, x = Tailored(Routed(), size, adapt=adapt, steps=2, lr=0.05), torch.randn(6, 3)
        torch.testing.assert_close(model(x), torch.cat([model(query[None]) for query in x]))


@pytest.mark.filterwarnings("ignore:Weights runs all of this model")
@pytest.mark.parametrize("adapt", [CN("experts.0.1"), Weights("experts.0")], ids=repr)
@pytest.mark.parametrize("seed", range(6))
def test_an_expert_is_refused(adapt, seed):
    """At the first look, or when it is given some of the rows."""
    torch.manual_seed(seed)
    model, x = Tailored(Routed(), size, adapt=adapt, lr=0.05), torch.randn(6, 3)
    with pytest.raises((ValueError, RuntimeError)):
        model(x)
