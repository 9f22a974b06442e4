"""What the functions of `tailoring.theory` see in a network and its loss, and which they refuse."""

from __future__ import annotations

import pytest
import torch
from nets import data, small, to_one
from torch import nn
from torch.func import jacrev

from tailoring import Shift, Tailored, Weights, losses, theory

pytestmark = pytest.mark.usefixtures("seeded")


@pytest.mark.parametrize("how", ["jacrev", "autograd", "jvp", "worst case"])
def test_a_loss_that_differentiates_the_model_is_not_judged(how):
    net, x = small(3, 1), data()[0]

    def by_jacrev(model, x):
        return (jacrev(lambda z: model(z).sum(0))(x)[0] - 1).square().sum(1)

    def by_jvp(model, x):
        return torch.func.jvp(model, (x,), (torch.ones_like(x),))[1].square().sum(1)

    def by_autograd(model, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            slopes = torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]
        return (slopes - 1).square().sum(1)

    loss = {"jacrev": by_jacrev, "jvp": by_jvp, "autograd": by_autograd, "worst case": losses.WorstCase(0.1)}[how]
    with pytest.raises(ValueError, match="differentiates the model"):
        theory.enough(small(3, 2) if how == "worst case" else net, loss, x)


def test_a_sum_of_losses_reads_what_one_does():
    net, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double(), torch.randn(3, 4).double()
    one = losses.Conserve(lambda s: s[:, :2].square().sum(1))
    once, twice = theory.enough(net, one, x), theory.enough(net, one + one, x)
    assert once.everywhere.all()
    assert twice.everywhere.all()
    assert torch.equal(once.numbers, twice.numbers)
    torch.testing.assert_close(once.share, twice.share)


def test_a_relu_at_the_end_is_not_affine_where_it_lets_all_pass():
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1), nn.ReLU()).double()
    nn.init.constant_(net[2].bias, 5.0)
    views = torch.randn(3, 4).double()
    with pytest.raises(ValueError, match="something follows it"):
        theory.last_layer(net, views)
    assert not theory.enough(net, lambda m, x: (m(x) + 2).square().sum(1), views).everywhere.any()
    net[3] = nn.ReLU(inplace=True)
    with pytest.raises(ValueError, match="something follows it"):
        theory.last_layer(net, views)
    net[3] = nn.Identity()
    assert theory.last_layer(net, views).site == "1"


def test_the_last_site_is_behind_an_activation_that_works_in_place():
    views, targets = torch.randn(3, 4).double(), torch.tensor([1.0, -2.0, 3.0]).double()
    first, second = nn.ReLU(inplace=True), nn.ReLU(inplace=True)
    net = nn.Sequential(nn.Linear(4, 32), first, nn.Linear(32, 32), second, nn.Linear(32, 1)).double()
    layer = theory.last_layer(net, views)
    assert layer.site == "3"
    assert layer.reaches_all
    answers = Tailored(net, to_one, adapt=layer.adapt).predict(views, layer.state(targets))
    torch.testing.assert_close(answers[:, 0], targets)


@pytest.mark.parametrize(
    "layers",
    [
        (nn.Linear(2, 8), nn.Linear(8, 1)),
        (nn.Linear(2, 8), nn.Sigmoid(), nn.Linear(8, 8), nn.Linear(8, 1)),
        (nn.Sigmoid(), nn.Linear(2, 8), nn.Linear(8, 1)),
        (nn.Linear(2, 8), nn.Sigmoid(), nn.Dropout(0.5), nn.Linear(8, 1)),
        (nn.Linear(2, 16), nn.GLU(), nn.Linear(8, 1)),
        (nn.Linear(2, 8), nn.Softmax(1), nn.Linear(8, 1)),
    ],
    ids=lambda layers: "-".join(type(layer).__name__ for layer in layers),
)
def test_the_theorem_asks_for_an_activation_between_any_two_layers(layers):
    angles = torch.linspace(0, 5, 5).double()
    views = torch.stack([angles.cos(), angles.sin()], 1)
    assert "one activation between any two" in str(theory.conditions(nn.Sequential(*layers).double(), views))
    assert theory.conditions(nn.Sequential(nn.Linear(2, 8), nn.Sigmoid(), nn.Dropout(0.5), nn.Linear(8, 1)).double().eval(), views)


@pytest.mark.parametrize("adapt", [Weights("0", how="loop"), Weights("0", "2", how="vmap"), Shift("1")], ids=repr)
def test_any_adapter_with_tensors_is_compared_with_all_weights(adapt):
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)).double(), torch.randn(2, 3).double()
    found = theory.enough(net, lambda model, x: model(x).square().sum(1), x, adapt=adapt)
    assert found
    assert found.rank.tolist() == [2, 2]
