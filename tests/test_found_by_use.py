"""What a look with fresh eyes found, by using the library as its users would."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tailoring import CN, Shift, Tailored, Weights, outer_losses


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def size(model, x):
    return model(x).square().sum(1)


class Checkpointed(nn.Module):
    """Its first layers are computed again in the backward pass, by one of the two ways of torch, or only where that saves something."""

    def __init__(self, how):
        super().__init__()
        self.first, self.act, self.last, self.how = nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2), how

    def hidden(self, x):
        return self.act(self.first(x))

    def forward(self, x):
        if self.how == "plain" or (self.how == "where it saves" and not (torch.is_grad_enabled() and self.first.weight.requires_grad)):
            return self.last(self.hidden(x))
        return self.last(checkpoint(self.hidden, x, use_reentrant=self.how == "reentrant"))


@pytest.mark.parametrize("adapt", [CN(), Shift("first"), Weights(), Weights(how="vmap"), Weights(how="loop"), Weights("first")], ids=repr)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # of torch, for the reentrant way
@pytest.mark.parametrize("how", ["not reentrant", "reentrant", "where it saves"])
def test_a_module_that_would_be_run_again_without_its_adaptation_is_refused(adapt, how):
    model = Tailored(Checkpointed(how), size, adapt=adapt, steps=2, lr=0.1)
    with torch.no_grad(), pytest.raises(ValueError, match="runs within torch"):
        model(torch.randn(4, 3))


@pytest.mark.parametrize("adapt", [CN("last"), Shift("last"), Weights("last")], ids=repr)
def test_what_lies_outside_of_a_checkpoint_is_adapted(adapt):
    x, plain = torch.randn(4, 3), Checkpointed("plain")
    expected = Tailored(plain, size, adapt=adapt, steps=2, lr=0.1)(x)
    for how in ("not reentrant", "where it saves"):
        net = Checkpointed(how)
        net.load_state_dict(plain.state_dict())
        assert torch.allclose(Tailored(net, size, adapt=adapt, steps=2, lr=0.1)(x), expected, atol=1e-6)


def test_a_tailored_model_may_itself_be_checkpointed():
    x = torch.randn(4, 3)
    model = Tailored(Checkpointed("plain"), size, steps=2, lr=0.1, backprop="all")
    grads = [
        torch.autograd.grad(answer.square().sum(), list(model.parameters()))
        for answer in (checkpoint(model, x, use_reentrant=False), model(x))
    ]
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*grads, strict=True))


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
    ids=repr,
)
def test_a_start_that_was_learned_for_other_inputs_says_so(adapt, net, words):
    model = Tailored(net(), size, adapt=adapt).prepare(torch.randn(2, 2, 3))
    if isinstance(adapt, Shift):
        model.net[2] = nn.Linear(12, 2)
    with pytest.raises(ValueError, match=words):
        model(torch.randn(2, 3, 3))


def against_a_step(model, x):
    """The answer beside the query, in the direction in which it grows: found by a derivative that is not differentiated again."""
    beside = x.clone().requires_grad_()
    (direction,) = torch.autograd.grad(size(model, beside).sum(), beside)
    return (model(x + 0.1 * direction) - model(x)).square().sum(1)


def against_itself(model, x):
    with torch.no_grad():
        target = model(-x)
    return (model(x) - target).square().sum(1)


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
