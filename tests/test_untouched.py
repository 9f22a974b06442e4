"""Looking at a model leaves it as it was: buffers, random numbers, and what its user's graphs have saved."""

from __future__ import annotations

import pytest
import torch
from nets import drift, size
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from tailoring import CN, Shift, Tailored, Weights, check, theory

pytestmark = pytest.mark.usefixtures("seeded")


class Changing(nn.Module):
    """BatchNorm's statistics, spectral norm's vectors and a counter that is replaced at each pass; and dropout draws."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.act = spectral_norm(nn.Linear(4, 6)), nn.BatchNorm1d(6), nn.Tanh()
        self.drop, self.last = nn.Dropout(0.5), nn.Linear(6, 4)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x):
        self.passes = self.passes + 1
        return self.last(self.drop(self.act(self.norm(self.first(x)))))


LOOKS = {
    "CN.sites": lambda net, x: CN("act").sites(net, x),
    "Weights.sites": lambda net, x: (net.eval(), Weights("last").sites(net, x)),  # it refuses what answers otherwise each time
    "CN": lambda net, x: Tailored(net, drift, adapt=CN("act")).prepare(x),
    "Shift": lambda net, x: Tailored(net, drift, adapt=Shift("act")).prepare(x),
    "Weights": lambda net, x: (net.eval(), Tailored(net, drift, adapt=Weights("last")).prepare(x)),
    "check": lambda net, x: check(net, x),
    "last_layer": lambda net, x: theory.last_layer(net, x),
}


@pytest.mark.parametrize("look", LOOKS)
def test_a_model_that_changes_as_it_runs_is_as_it_was(look):
    net, x = Changing(), torch.randn(5, 4)
    buffers = dict(net.named_buffers())
    numbers = {name: t.clone() for name, t in buffers.items()}
    random = torch.get_rng_state()
    LOOKS[look](net, x)
    assert torch.equal(torch.get_rng_state(), random)
    for name, t in net.named_buffers():
        assert t is buffers[name]
        assert torch.equal(t, numbers[name]), name


def test_a_graph_that_has_saved_buffers_may_still_go_backward():
    net, x = Changing().eval(), torch.randn(5, 4)
    loss = net(x).square().sum()
    for look in LOOKS.values():
        look(net, x)
    loss.backward()  # which fails if one was written to


def test_the_first_prediction_is_one_pass():
    net, x = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 4)), torch.randn(5, 4)
    model = Tailored(net, size, adapt=CN(nn.Tanh))
    state = model.adapt.init(net, model.adapt.sites(net, x), 5)
    model.predict(x, state)
    assert net[1].num_batches_tracked == 1


def test_a_buffer_that_holds_no_number_is_not_written_to():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.act, self.last = nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)
            self.register_buffer("scale", torch.tensor([1.0, torch.nan]))
            self.register_buffer("table", torch.ones(3).to(torch.float8_e4m3fn))

        def forward(self, x):
            return self.last(self.act(self.first(x))) * self.scale[0]

    net, x = Scaled(), torch.randn(3, 4)
    loss = (net(x) * net.scale[0]).sum()  # its graph has saved the buffer
    Tailored(net, drift).prepare(x)
    loss.backward()
    assert net.scale._version == 0
