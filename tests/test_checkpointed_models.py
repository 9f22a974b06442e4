"""Models that run their modules again in the backward pass (`torch.utils.checkpoint`): adapted outside of that, refused inside."""

from __future__ import annotations

import pytest
import torch
from nets import size
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tailoring import CN, Shift, Tailored, Weights

pytestmark = pytest.mark.usefixtures("seeded")


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


@pytest.mark.parametrize("adapt", [CN(), Shift("first"), Weights(), Weights("first"), Weights(how="vmap"), Weights(how="loop")], ids=repr)
@pytest.mark.parametrize("backprop", ["none", "all"])
def test_a_tailored_model_may_itself_be_checkpointed(adapt, backprop):
    """By its first call too, whose trials are not made again in the backward pass."""
    x = torch.randn(4, 3)
    model = Tailored(Checkpointed("plain"), size, adapt=adapt, steps=2, lr=0.1, backprop=backprop)
    grads = [
        torch.autograd.grad(answer.square().sum(), list(model.parameters()))
        for answer in (checkpoint(model, x, use_reentrant=False), model(x))
    ]
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*grads, strict=True))


class Bare(nn.Module):
    """A parameter that is no module's to run, used within a checkpoint."""

    def __init__(self, how):
        super().__init__()
        self.first, self.last, self.how = nn.Parameter(torch.randn(4, 3)), nn.Linear(4, 2), how

    def hidden(self, x):
        return torch.tanh(F.linear(x, self.first))

    def forward(self, x):
        return self.last(self.hidden(x) if self.how == "plain" else checkpoint(self.hidden, x, use_reentrant=self.how == "reentrant"))


@pytest.mark.parametrize("adapt", [Weights(), Weights(how="vmap"), Weights(how="loop"), Weights("first")], ids=repr)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # of torch, for the reentrant way
@pytest.mark.parametrize("how", ["not reentrant", "reentrant"])
def test_a_bare_parameter_that_would_be_used_again_without_its_adaptation_is_refused(adapt, how):
    with pytest.raises(ValueError, match="parameter 'first' is used within torch"):
        Tailored(Bare(how), size, adapt=adapt, steps=2, lr=0.1)(torch.randn(4, 3))


def test_other_weights_than_a_checkpoints_are_adapted():
    x, plain, net = torch.randn(4, 3), Bare("plain"), Bare("not reentrant")
    net.load_state_dict(plain.state_dict())
    ours, expected = (Tailored(model, size, adapt=Weights("last"), steps=2, lr=0.1)(x) for model in (net, plain))
    assert torch.allclose(ours, expected, atol=1e-6)


@pytest.mark.parametrize("adapt", [CN(), Shift("first"), Weights(), Weights("first"), Weights(how="vmap"), Weights(how="loop")], ids=repr)
@pytest.mark.parametrize("backprop", ["none", "last", "all"])
def test_a_loss_may_checkpoint_the_model_it_is_given(adapt, backprop):
    x, net = torch.randn(4, 3), Checkpointed("plain")

    def checkpointed(model, x):
        return checkpoint(model, x, use_reentrant=False).square().sum(1)

    found = []
    for loss in (checkpointed, lambda model, x: model(x).square().sum(1)):
        answer = Tailored(net, loss, adapt=adapt, steps=2, lr=0.1, backprop=backprop)(x)
        found.append([answer, *torch.autograd.grad(answer.square().sum(), list(net.parameters()))])
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected)
