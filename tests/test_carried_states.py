"""Roll-outs: the state that one query was answered with is where the next one's tailoring starts, and made that query."""

from __future__ import annotations

import pytest
import torch
from nets import drift, queries
from torch import nn

from tailoring import CN, Shift, Tailored, Weights

pytestmark = pytest.mark.usefixtures("seeded")
ADAPTERS = [CN(nn.Tanh), Shift("1"), Weights(), Weights("0"), Weights(how="vmap"), Weights(how="loop")]


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 4)).double()


def rolled(model: Tailored, x: torch.Tensor) -> torch.Tensor:
    state = None
    for _ in range(3):
        state = model.tailor(x, start=state)
        x = model.predict(x, state)
    return x


@pytest.mark.parametrize("adapt", ADAPTERS, ids=repr)
@pytest.mark.parametrize("options", [{"backprop": b} for b in ("none", "last", "all")] + [{"backprop": "all", "recompute": True}], ids=str)
def test_the_answers_do_not_depend_on_what_the_outer_gradient_sees(adapt, options):
    net, x = network(), queries()
    with torch.no_grad():
        expected = rolled(Tailored(net, drift, adapt=adapt, steps=2, lr=0.02), x)
    torch.testing.assert_close(rolled(Tailored(net, drift, adapt=adapt, steps=2, lr=0.02, **options), x), expected)


@pytest.mark.parametrize("adapt", ADAPTERS, ids=repr)
def test_the_whole_gradient_is_that_of_the_whole_roll_out(adapt):
    net, x = network(), queries()
    model = Tailored(net, drift, adapt=adapt, steps=2, lr=0.02, backprop="all")
    weights, direction = list(net.parameters()), [torch.randn_like(p) for p in net.parameters()]
    found = torch.autograd.grad(rolled(model, x).square().sum(), weights)
    slope = sum(float((g * d).sum()) for g, d in zip(found, direction, strict=True))

    def moved(by: float) -> float:
        with torch.no_grad():
            for p, d in zip(weights, direction, strict=True):
                p.add_(by * d)
            return float(rolled(model, x).square().sum())

    ahead, behind = moved(1e-6), moved(-2e-6)
    assert slope == pytest.approx((ahead - behind) / 2e-6, rel=1e-5)
