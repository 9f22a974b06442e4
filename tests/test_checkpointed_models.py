"""Models that run their modules again in the backward pass (`torch.utils.checkpoint`): adapted outside of that, refused inside."""

from __future__ import annotations

import pytest
import torch
from nets import size
from torch import nn
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


def test_a_tailored_model_may_itself_be_checkpointed():
    x = torch.randn(4, 3)
    model = Tailored(Checkpointed("plain"), size, steps=2, lr=0.1, backprop="all")
    grads = [
        torch.autograd.grad(answer.square().sum(), list(model.parameters()))
        for answer in (checkpoint(model, x, use_reentrant=False), model(x))
    ]
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*grads, strict=True))
