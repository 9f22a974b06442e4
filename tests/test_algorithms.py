"""Law 4: the library computes the paper's algorithms (tests/reference.py)."""

from __future__ import annotations

import pytest
import reference
import torch
from nets import energy, mlp, queries, summed_error
from torch import nn
from torch.nn import functional as F

from tailoring import CN, Support, Tailored, Weights, losses, outer_losses, task_losses

TAILOR_RATE, SUP_RATE, STEPS = 5e-2, 1e-2, 3


def change_of_energy(model, x):
    return (energy(model(x)) - energy(x)).square()


def change_for_one(model, x):
    return (model(x).square().sum() / 2 - x.square().sum() / 2) ** 2


def error_for_one(prediction, target):
    return (prediction - target).square().sum()


def parameters(net: nn.Sequential):
    """The network's weights as the reference writes them: fresh copies."""
    return reference.pairs([p.detach().clone().requires_grad_() for p in net.parameters()])


def batches(count: int = 3):
    return [(queries(4, seed=10 + i), queries(4, seed=20 + i)) for i in range(count)]


def tasks(count: int = 2, shots: int = 3, asked: int = 2):
    def draw(k, seed):
        return queries(3 * k, seed=seed).unflatten(0, (3, k))

    return [(draw(shots, 30 + i), draw(shots, 40 + i), draw(asked, 50 + i), draw(asked, 60 + i)) for i in range(count)]


def train(net, losses_of_batch, each_step):
    """The outer loop: one step for the summed losses, or one for each as it arrives."""
    optimizer = torch.optim.SGD(net.parameters(), SUP_RATE)
    for outer in losses_of_batch:
        for loss in outer if each_step else [sum(outer)]:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def assert_trained_alike(net, w):
    for ours, theirs in zip(net.parameters(), reference.flat(w), strict=True):
        torch.testing.assert_close(ours.data, theirs.data, rtol=1e-9, atol=1e-11)
    start = list(mlp().parameters())
    assert any((p - q).abs().max() > 1e-4 for p, q in zip(net.parameters(), start, strict=True))


@pytest.mark.parametrize("order", ["none", "all"])
def test_mammoth_is_algorithm_1(order):
    net = mlp()
    model = Tailored(net, change_of_energy, adapt=Weights(), steps=1, lr=TAILOR_RATE, backprop=order)
    w = reference.mammoth_training(parameters(net), error_for_one, SUP_RATE, change_for_one, TAILOR_RATE, batches(), order)
    train(net, (outer_losses(model, summed_error, *batch) for batch in batches()), each_step=False)
    assert_trained_alike(net, w)


@pytest.mark.parametrize("order", ["none", "last", "all"])
def test_cngrad_is_algorithm_2(order):
    net = mlp()
    model = Tailored(net, change_of_energy, adapt=CN(nn.Tanh), steps=STEPS, lr=TAILOR_RATE, backprop=order)
    w = reference.cngrad_training(parameters(net), error_for_one, SUP_RATE, change_for_one, TAILOR_RATE, STEPS, batches(), order)
    train(net, (outer_losses(model, summed_error, *batch) for batch in batches()), each_step=False)
    assert_trained_alike(net, w)


@pytest.mark.parametrize("order", ["none", "last"])
def test_stepping_after_each_inner_step_is_algorithm_3(order):
    net = mlp()
    model = Tailored(net, change_of_energy, adapt=CN(nn.Tanh), steps=STEPS, lr=TAILOR_RATE, backprop=order)
    w = reference.cngrad_training_stepwise(parameters(net), error_for_one, SUP_RATE, change_for_one, TAILOR_RATE, STEPS, batches(), order)
    train(net, (outer_losses(model, summed_error, *batch) for batch in batches()), each_step=True)
    assert_trained_alike(net, w)


@pytest.mark.parametrize("order", ["none", "last"])
def test_few_shot_training_is_algorithm_4(order):
    net = mlp()
    model = Tailored(net, losses.Supervised(_summed_over_outputs), adapt=CN(nn.Tanh), steps=2, lr=TAILOR_RATE, backprop=order)
    w = reference.meta_training(parameters(net), error_for_one, TAILOR_RATE, SUP_RATE, 2, tasks(), order)
    train(net, (task_losses(model, summed_error, (sx, sy), (qx, qy)) for sx, sy, qx, qy in tasks()), each_step=True)
    assert_trained_alike(net, w)


def _summed_over_outputs(prediction, target, reduction):
    return F.mse_loss(prediction, target, reduction=reduction).sum(1)


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_predictions_are_the_papers(steps):
    net, x = mlp(), queries()
    model = Tailored(net, change_of_energy, adapt=CN(nn.Tanh), steps=steps, lr=TAILOR_RATE)
    expected = reference.predict(parameters(net), change_for_one, TAILOR_RATE, steps, x)
    torch.testing.assert_close(model(x).detach(), expected, rtol=1e-10, atol=1e-12)


def test_few_shot_predictions_are_the_papers():
    net = mlp()
    support_x, support_y, query_x, _ = tasks()[0]
    model = Tailored(net, losses.Supervised(_summed_over_outputs), adapt=CN(nn.Tanh), steps=4, lr=TAILOR_RATE)
    expected = reference.meta_test(parameters(net), error_for_one, TAILOR_RATE, 4, support_x, support_y, query_x)
    state = model.tailor(Support(support_x, support_y))
    ours = model.predict(query_x.flatten(0, 1), state).unflatten(0, query_x.shape[:2])
    torch.testing.assert_close(ours.detach(), expected, rtol=1e-10, atol=1e-12)
