"""A loss calls layers with other shapes than the model does; masks and whole numbers in any order."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tailoring import CN, Inputs, Shift, Tailored, Weights


@pytest.mark.usefixtures("seeded")
@pytest.mark.parametrize("at", ["0", "1"])
@pytest.mark.parametrize("views", [3, 4])
def test_more_dimensions_come_before_the_channels(at, views):
    """Also where there are as many views as channels."""
    scales = torch.linspace(0.5, 2, views)[:, None]
    net, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(5, 3)

    def stacked(model, x):
        return model(x[:, None] * scales).square().flatten(1).mean(1)

    def flat(model, x):
        return model((x[:, None] * scales).flatten(0, 1)).unflatten(0, (len(x), -1)).square().flatten(1).mean(1)

    ours, theirs = (Tailored(net, loss, adapt=CN(at), steps=3, lr=0.3)(x) for loss in (stacked, flat))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.usefixtures("seeded")
def test_fewer_dimensions_leave_the_channels_last():
    net, x = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)), torch.randn(5, 6, 3)

    def of_the_mean(model, x):
        return model[1](model[0](x).mean(1)).square().sum(1)

    model = Tailored(net, of_the_mean, steps=2, lr=0.1)
    torch.testing.assert_close(model(x)[2:3], model(x[2:3]))


@pytest.mark.usefixtures("seeded")
def test_channels_that_come_second_stay_there():
    net, x = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).eval(), torch.randn(5, 3)

    def flat(model, x):
        return model[1](model[0](x)).square().sum(1)

    def long(model, x):
        return model[1](model[0](x)[..., None].expand(-1, -1, 4)).square().mean(2).sum(1)

    ours, theirs = (Tailored(net, loss, steps=2, lr=0.1)(x) for loss in (long, flat))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.usefixtures("seeded")
@pytest.mark.parametrize("adapt", [CN("0"), Weights()], ids=repr)
@pytest.mark.parametrize("kind", [torch.int64, torch.bool])
def test_whole_numbers_may_lie_in_any_order(adapt, kind):
    class Seen(nn.Module):
        def __init__(self):
            super().__init__()
            self.add_module("0", nn.Conv2d(2, 4, 3))

        def forward(self, x):
            return self.get_submodule("0")(x.float()).mean((2, 3))

    x = torch.randint(0, 2, (5, 6, 6, 2)).to(kind).permute(0, 3, 1, 2)
    model = Tailored(Seen(), lambda m, x: m(x).square().sum(1), adapt=adapt, steps=2, lr=0.1)
    torch.testing.assert_close(model(x), model(x.contiguous()))


@pytest.mark.usefixtures("seeded")
def test_a_mask_for_each_query_is_no_reason_for_copies():
    class Causal(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)
            self.attend = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x, mask):
            h = self.first(x)
            return self.last(self.attend(h, h, h, attn_mask=~mask.repeat_interleave(2, 0))[0]).mean(1)

    x, mask = torch.randn(6, 5, 4), torch.ones(5, 5).tril().bool().expand(6, 5, 5).contiguous()
    sites = Weights().sites(Causal(), Inputs(x, mask))  # a warning would be an error
    assert {site.how for site in sites} == {"outer products"}


@pytest.mark.usefixtures("seeded")
class Unpadded(nn.Module):
    """Tokens without those that are padding, as many as each query has."""

    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, x, mask):
        found = x.new_zeros(*x.shape[:2], 2)
        return found.masked_scatter(mask[..., None].bool(), self.mlp(x[mask.bool()]))


@pytest.mark.usefixtures("seeded")
@pytest.mark.parametrize("kind", [torch.bool, torch.int64])
@pytest.mark.parametrize("adapt", [CN("mlp.1"), Weights(), Shift("mlp.1")], ids=repr)
def test_tokens_that_are_not_equally_many_are_refused_at_the_first_batch(adapt, kind):
    def loss(model, x, mask):
        return ((model(x, mask) - 1).square() * mask[..., None]).sum((1, 2))

    mask = (torch.arange(4) < torch.tensor([3, 3])[:, None]).to(kind)
    with pytest.raises(ValueError, match="not equally many of each"):
        Tailored(Unpadded(), loss, adapt=adapt)(torch.randn(2, 4, 3), mask)
