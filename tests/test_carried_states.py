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


@pytest.mark.parametrize("adapt", ADAPTERS, ids=repr)
def test_the_adapted_model_is_there_for_more_than_its_answer(adapt):
    net, x = network(), queries()
    model = Tailored(net, drift, adapt=adapt, steps=2, lr=0.1)
    state = model.tailor(x)
    own = model.adapted(x, state)
    torch.testing.assert_close(own(x), model(x))
    features = own.output_of("2", x)
    assert (features - net[:3](x)).abs().max() > 1e-3
    if not isinstance(adapt, Weights):
        torch.testing.assert_close(net[3](features), model(x))
    views = torch.stack([x, -x], 1).flatten(0, 1)
    torch.testing.assert_close(own(views), model.predict(views, state))
    with pytest.raises(ValueError, match="a state of this model has the names"):
        model.adapted(x, {"other": torch.ones(5, 1)})


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.lin, self.act, self.last = nn.Embedding(7, 6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)

    def forward(self, x):
        return self.last(self.act(self.lin(self.table(x))).mean(1))


@pytest.mark.parametrize("adapt", [CN(), Weights(), Weights(how="vmap")], ids=repr)
def test_states_are_cut_moved_and_held_fast_entry_by_entry(adapt):
    model = Tailored(Words(), lambda m, x: m(x).square().sum(1), adapt=adapt, steps=2, lr=0.1, backprop="all")
    x = torch.randint(7, (5, 4), generator=torch.Generator().manual_seed(0))
    state = model.tailor(x)
    fixed = {name: entry.detach() for name, entry in state.items()}
    assert model.predict(x, state).requires_grad
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    assert not model.predict(x, fixed).requires_grad
    for rows in (slice(1, 4), torch.tensor([4, 0]), torch.arange(5) > 2):
        torch.testing.assert_close(
            model.predict(x[rows], {name: entry[rows] for name, entry in fixed.items()}), model.predict(x, fixed)[rows]
        )
    model.double()
    moved = {name: entry.to(torch.float64) for name, entry in fixed.items()}
    torch.testing.assert_close(model.predict(x, moved), model.predict(x, {name: entry.to("cpu") for name, entry in moved.items()}))


def test_a_single_row_is_a_slice():
    model = Tailored(network(), drift, adapt=Weights())
    with pytest.raises(TypeError, match=r"a row is chosen as \[2:3\]"):
        model.tailor(queries())["0.weight"][2]
