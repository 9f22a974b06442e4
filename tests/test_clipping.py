"""Clipping: of gradients of any size, and by settings of any size."""

from __future__ import annotations

import math

import pytest
import torch
from nets import Reached, data, small, to_one
from torch.nn.functional import mse_loss

from tailoring import CN, Shift, Tailored, Weights, outer_losses


@pytest.mark.parametrize("adapt", [CN(), Weights()], ids=repr)
def test_a_gradient_too_large_to_be_squared_is_clipped(adapt):
    x = torch.randn(3, 3)
    model = Tailored(Reached(), lambda m, x: to_one(m, x) * torch.tensor([1.0, 1e22, 1.0])[: len(x)], adapt=adapt, clip=0.5, lr=0.1)
    trace = model.trace(x)
    assert not trace.failed.any()
    assert (trace.prediction - model.net(x)).abs().sum(1).min() > 1e-4


@pytest.mark.usefixtures("seeded")
@pytest.mark.parametrize("adapt", [CN(), Weights(), Weights(how="vmap"), Shift("1")], ids=repr)
@pytest.mark.parametrize("backprop", ["none", "last", "all"])
def test_what_is_clipped_does_not_depend_on_how_large_it_was(adapt, backprop):
    """Also of one whose square is too large, or too small, for a number."""
    net, (x, y) = small().float(), [t.float() for t in data()]

    def gradient(scale: float, clip: float):
        weights = torch.tensor([1, scale, 1, 1])
        model = Tailored(net, lambda m, x: to_one(m, x) * weights, adapt=adapt, steps=2, lr=0.05, clip=clip, backprop=backprop)
        return torch.autograd.grad(sum(outer_losses(model, mse_loss, x, y)), list(net.parameters())), model(x)

    torch.testing.assert_close(gradient(1e22, 0.5), gradient(1e4, 0.5))
    torch.testing.assert_close(gradient(1e-30, 1e-32)[1][1], gradient(1.0, 1e-32)[1][1])


@pytest.mark.usefixtures("seeded")
@pytest.mark.parametrize("clip", [0.0, -1.0, math.inf, math.nan])
def test_a_clip_that_clips_all_or_nothing_is_refused(clip):
    with pytest.raises(ValueError, match="clip must be positive and finite"):
        Tailored(small(), to_one, clip=clip)


@pytest.mark.usefixtures("seeded")
def test_a_large_clip_clips_nothing():
    net, (x, _) = small().float(), data()
    x = x.float()
    torch.testing.assert_close(Tailored(net, to_one, lr=0.1, steps=3, clip=1e20)(x), Tailored(net, to_one, lr=0.1, steps=3)(x))
