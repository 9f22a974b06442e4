"""A module of the model's that only the loss runs (a head for an auxiliary task): adapted with it, and saved once."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from tailoring import CN, Shift, Tailored, Weights
from tailoring.losses import Agree, Rotation

pytestmark = pytest.mark.usefixtures("seeded")


class WithHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.act, self.flat = nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten()
        self.last, self.turn = nn.Linear(64, 3), nn.Linear(64, 4)

    def features(self, x):
        return self.flat(self.act(self.norm(self.conv(x))))

    def forward(self, x):
        return self.last(self.features(x))


def turned(net: WithHead, x: torch.Tensor) -> torch.Tensor:
    """The loss of a single image."""
    views = torch.cat([x.rot90(k, (-2, -1)) for k in range(4)])
    return F.cross_entropy(net.turn(net.features(views)), torch.arange(4))


@pytest.mark.parametrize("adapt", [Weights(), Weights("turn"), Weights("conv", "turn"), Weights(how="vmap"), Weights(how="loop")], ids=repr)
def test_the_head_is_the_querys_own(adapt):
    net, x = WithHead().double(), torch.randn(3, 2, 4, 4).double()
    model = Tailored(net, Rotation(net.turn, at="flat"), adapt=adapt, steps=2, lr=0.1)
    state = model.tailor(x)
    for i, image in enumerate(x):
        weights = {name: p.detach().clone() for name, p in net.named_parameters()}
        for _ in range(2):
            own = {name: w.requires_grad_() for name, w in weights.items() if name in state}
            loss = functional_call(_Run(net), {f"net.{name}": w for name, w in weights.items()}, (image[None],))
            grads = torch.autograd.grad(loss, list(own.values()), allow_unused=True)
            steps = {name: w - 0.1 * g for (name, w), g in zip(own.items(), grads, strict=True) if g is not None}
            weights |= {name: w.detach() for name, w in steps.items()}
        torch.testing.assert_close(model(x)[i], functional_call(net, weights, (image[None],))[0])
    moved = state["turn.weight"]
    assert float((moved if isinstance(moved, torch.Tensor) else moved.dense()).abs().max()) > 1e-3


class _Run(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return turned(self.net, x)


@pytest.mark.parametrize("adapt", [CN(), Weights(), Shift("norm")], ids=repr)
def test_it_is_saved_under_the_models_name_only(adapt):
    net = WithHead()
    model = Tailored(net, Rotation(net.turn, at="flat"), adapt=adapt)
    saved = model.state_dict()
    assert saved.keys() == net.state_dict().keys()
    assert len(list(model.parameters())) == len(list(net.parameters()))
    net.load_state_dict(saved)
    other = WithHead()
    same = Tailored(other, Rotation(other.turn, at="flat"), adapt=adapt)
    same.load_state_dict(saved)
    assert torch.equal(other.turn.weight, net.turn.weight)
    same.load_state_dict(
        saved | {"tailoring.loss.head.weight": net.turn.weight, "tailoring.loss.head.bias": net.turn.bias}
    )  # an older file


def test_a_head_of_its_own_is_the_losss():
    net, head = WithHead(), nn.Linear(64, 4)
    model = Tailored(net, Rotation(head, at="flat"), adapt=Weights())
    assert "tailoring.loss.head.weight" in model.state_dict()
    assert model(torch.randn(3, 2, 4, 4)).shape == (3, 3)


@pytest.mark.parametrize("adapt", [Weights(), Weights("turn")], ids=repr)
def test_so_is_the_head_in_which_views_agree(adapt):
    def views(rows, seeds):
        return rows + seeds[:, None, None, None] % 7 / 70

    net, x = WithHead().double(), torch.randn(3, 2, 4, 4).double()
    by_name = Tailored(net, Agree(views, at=lambda model, x: model.turn(model.features(x))), adapt=adapt, steps=2, lr=0.1)
    state = by_name.replace(loss=Agree(views, at="flat", head=net.turn)).tailor(x)
    for name, entry in by_name.tailor(x).items():
        if name.startswith("turn."):
            entry, own = (e if isinstance(e, torch.Tensor) else e.dense() for e in (entry, state[name]))
            assert own.abs().max() > 0
            torch.testing.assert_close(own, entry)
