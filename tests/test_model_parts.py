"""Losses that use parts of the model: the modules that they run, list or cut out belong to the query, or are refused."""

from __future__ import annotations

import pytest
import torch
from nets import Reached, float_mlp, mlp_of_8, size
from torch import nn

from tailoring import CN, Tailored, Weights, baselines

WAYS = {
    "get_submodule": lambda m, x: m.get_submodule("t")(m.a(x)),
    "named_modules": lambda m, x: dict(m.named_modules())["t"](m.a(x)),
    "modules": lambda m, x: list(m.modules())[2](m.a(x)),
    "a list": lambda m, x: m.listed[1](m.listed[0](x)),
    "a dict": lambda m, x: m.named["t"](m.named["a"](x)),
    "a method": lambda m, x: m.part("t")(m.part("a")(x)),
}


@pytest.mark.parametrize("adapt", [CN(), Weights()], ids=repr)
@pytest.mark.parametrize("way", WAYS)
def test_modules_that_a_loss_reaches_are_adapted_however_it_does(adapt, way):
    def tailored(encode):
        return Tailored(Reached(), lambda m, x: m(x).square().sum(1) + 10 * encode(m, x).square().sum(1), adapt=adapt, steps=3, lr=0.05)

    x = torch.randn(4, 3)
    torch.testing.assert_close(tailored(WAYS[way])(x), tailored(lambda m, x: m.enc(x))(x))


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self._first, self.heads = nn.Sequential(nn.Linear(3, 8), nn.Tanh()), nn.ModuleDict({"a": mlp_of_8(), "b": mlp_of_8()})

    def forward(self, x):
        h = self._first(x)
        return sum(head(h) for head in self.heads.values())


@pytest.mark.parametrize(
    "heads",
    [
        lambda m: m.heads.values(),
        lambda m: [head for _, head in m.heads.items()],
        lambda m: m.heads.children(),
        lambda m: [head for _, head in m.heads.named_children()],
        lambda m: [m.heads[name] for name in m.heads],
    ],
)
def test_modules_that_a_loss_lists_run_with_the_state(heads):
    x = torch.randn(4, 3)
    ours, expected = (
        Tailored(Heads(), loss, steps=2, lr=0.1).tailor(x)
        for loss in (lambda m, x: sum(head(m._first(x)) for head in heads(m)).square().sum(1), size)
    )
    for name, entry in expected.items():
        torch.testing.assert_close(ours[name], entry)


def test_a_loss_may_run_some_modules_of_a_sequence():
    net, x = float_mlp(), torch.randn(4, 3)
    ours, expected = (
        Tailored(net, loss, adapt=CN("1"), lr=0.1).tailor(x)
        for loss in (lambda m, x: m[:2](x).square().sum(1), lambda m, x: m.output_of("1", x).square().sum(1))
    )
    for name, entry in expected.items():
        torch.testing.assert_close(ours[name], entry)


def test_a_loss_may_count_and_cut_a_list_of_modules():
    class Listed(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList([nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)])

        def forward(self, x):
            return self.parts[2](self.parts[1](self.parts[0](x)))

    def loss(model, x):
        _, *rest = model.parts
        assert [len(model.parts[:1]), len(rest)] == [1, 2]
        return rest[1](rest[0](model.parts[:1][0](x))).square().sum(1)

    torch.manual_seed(0)
    net, x = Listed(), torch.randn(4, 3)
    torch.testing.assert_close(Tailored(net, loss, lr=0.1)(x), Tailored(net, size, lr=0.1)(x))


class Coder(nn.Module):
    """One activation for both halves."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.act = nn.Linear(3, 8), nn.Linear(8, 8), nn.Linear(8, 3), nn.Tanh()

    def encode(self, x):
        return self.act(self.a(x))

    def decode(self, z):
        return self.c(self.act(self.b(z)))

    def forward(self, x):
        return self.decode(self.encode(x))


def test_a_part_that_runs_some_calls_of_a_module_is_refused():
    x = torch.randn(4, 3)
    with pytest.raises(ValueError, match=r"module 'act' runs 1 of its 2 times.*a module of its own"):
        Tailored(Coder(), lambda m, x: (m.decode(m.encode(x)) - x).square().sum(1))(x)
    within = nn.Sequential(nn.Linear(3, 3), Coder())  # all of its calls are in the part
    ours, other = (Tailored(within, loss)(x) for loss in (size, lambda m, x: m[1](m[0](x)).square().sum(1)))
    torch.testing.assert_close(ours, other)


def test_a_generator_of_the_model_is_refused():
    with pytest.raises(ValueError, match="'generated' is a generator"):
        Tailored(Reached(), lambda m, x: next(m.generated(x)).square().sum(1))(torch.randn(4, 3))


@pytest.mark.parametrize("name", ["parameters", "named_parameters", "state_dict"])
def test_weights_that_every_query_has_its_own_of_are_not_listed(name):
    with pytest.raises(ValueError, match=rf"reads weights by {name}\(\), but every query has its own"):
        Tailored(Reached(), lambda m, x: m(x).square().sum(1) + len(list(getattr(m, name)())), adapt=Weights())(torch.randn(4, 3))


def test_a_loss_cannot_change_the_model_without_a_word():
    def change(model, x):
        model.features = True
        return size(model, x)

    for adapt in (CN(), Weights(), baselines.Output()):
        with pytest.raises(AttributeError, match="'features'"):
            Tailored(float_mlp(), change, adapt=adapt)(torch.randn(4, 3))


@pytest.mark.usefixtures("seeded")
@pytest.mark.parametrize("adapt", [CN(), Weights(), Weights(how="vmap"), Weights(how="loop"), baselines.Output()], ids=repr)
def test_forward_is_the_call(adapt):
    net, x = float_mlp(), torch.randn(4, 3)
    by_name, by_call = (Tailored(net, loss, adapt=adapt, lr=0.1)(x) for loss in (lambda m, x: size(m.forward, x), size))
    torch.testing.assert_close(by_name, by_call)
