"""`theory.alignment`: how the tailoring loss's gradient lies to the task's, against both written by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from tailoring import CN, Inputs, Shift, Tailored, Weights, baselines, theory

ADAPTERS = [CN(), CN(learned_start=True), Weights(), Weights(how="vmap"), Shift("2"), baselines.Output()]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def drift(model, x):
    return (model(x).norm(dim=1) - x[:, :2].norm(dim=1)).square()


def queries(count: int = 20) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    return tuple(torch.randn(count, size, generator=random, dtype=torch.float64) for size in (3, 2))


@pytest.mark.parametrize("adapt", [Weights(), Weights(how="vmap")], ids=repr)
def test_the_angle_is_that_between_the_gradients_of_each_querys_weights(adapt):
    net, (x, y) = network(), queries()
    found = theory.alignment(Tailored(net, drift, adapt=adapt), [(x[:12], y[:12]), (x[12:], y[12:])], F.mse_loss)
    weights = {name: p.detach().requires_grad_() for name, p in net.named_parameters()}
    for i in range(len(x)):
        own, target = x[i : i + 1], y[i : i + 1]
        model = lambda z: functional_call(net, weights, (z,))  # noqa: E731
        losses = drift(model, own).sum(), F.mse_loss(model(own), target)
        a, b = (torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(weights.values()))]) for loss in losses)
        torch.testing.assert_close(found.fall[i], a @ b)
        torch.testing.assert_close(found.cosine[i], F.cosine_similarity(a, b, dim=0))


@pytest.mark.parametrize("adapt", ADAPTERS, ids=repr)
def test_a_small_step_lowers_the_task_loss_by_as_much(adapt):
    net, (x, y) = network(), queries()
    model = Tailored(net, drift, adapt=adapt, steps=3, lr=0.1, momentum=0.5, chunk=7, backprop="last")  # of which nothing matters here
    found = theory.alignment(model, [(x, y)], F.mse_loss)
    assert not found.fall.requires_grad

    def task(prediction):
        return (prediction - y).square().mean(1)

    with torch.no_grad():
        step = Tailored(net, drift, adapt=adapt, steps=1, lr=1e-7)(x)
        torch.testing.assert_close(found.fall, (task(net(x)) - task(step)) / 1e-7, rtol=1e-3, atol=1e-5)


def test_it_says_whether_small_steps_help():
    net, (x, y) = network(), queries()
    task = lambda prediction, target: (prediction - target).square().mean(1)  # noqa: E731
    oracle = theory.alignment(Tailored(net, lambda model, x: task(model(x), y)), [(x, y)], task)
    torch.testing.assert_close(oracle.cosine, torch.ones(20, dtype=torch.float64))
    assert oracle.agreeing == 1
    assert "small steps help: a step changes the task loss by -" in str(oracle)
    fool = theory.alignment(Tailored(net, lambda model, x: -task(model(x), y)), [(x, y)], F.mse_loss)
    torch.testing.assert_close(fool.fall, -oracle.fall)
    assert "small steps harm: a step changes the task loss by +" in str(fool)
    few = theory.alignment(Tailored(net, drift), [(x[:1], y[:1])], F.mse_loss)
    assert "neither help nor harm clearly" in str(few)


def test_a_gradient_of_zero_points_nowhere_and_a_tiny_one_somewhere():
    net, (x, y) = network(), queries()
    scale = torch.tensor([0.0, 1e-200] * 10, dtype=torch.float64)
    found = theory.alignment(Tailored(net, lambda model, x: scale * drift(model, x)), [(x, y)], F.mse_loss)
    whole = theory.alignment(Tailored(net, drift), [(x, y)], F.mse_loss)
    torch.testing.assert_close(found.cosine, torch.where(scale > 0, whole.cosine, 0.0))


def test_models_of_several_inputs_and_queries_that_are_not_finite():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = network()

        def forward(self, x, by):
            return by * self.net(x)

    (x, y), by = queries(), torch.full((20, 1), 2.0, dtype=torch.float64)
    model = Tailored(Scaled(), lambda model, x, by: model(x, by).square().sum(1), adapt=CN(nn.Tanh))
    x[3] = torch.inf
    found = theory.alignment(model, [(Inputs(x, by), y)], F.mse_loss)
    assert found.fall.isfinite().sum() == 19
    mean, low, high = found.mean_fall
    assert low < mean < high


def test_what_is_wrong_is_told():
    model, (x, y) = Tailored(network(), drift), queries()
    with pytest.raises(ValueError, match="no batch was given"):
        theory.alignment(model, [], F.mse_loss)
    with pytest.raises(TypeError, match=r"a single one is \[\(x, y\)\]"):
        theory.alignment(model, (x, y), F.mse_loss)
    with pytest.raises(ValueError, match=r"must be a mean over the batch, or \(20,\), not of shape \(20, 2\)"):
        theory.alignment(model, [(x, y)], lambda a, b: a - b)
