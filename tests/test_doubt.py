"""Exact weights are not used where they would not be exact: what the trial before the first answer finds."""

from __future__ import annotations

import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from nets import drift, mlp, queries, to_one
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from tailoring import CN, Tailored, Weights, _doubt
from tailoring._doubt import tried
from tailoring.nn import cifar_resnet, resnet18


class Imprecise(TorchDispatchMode):
    """Products of single precision are off by a percent, each time otherwise: gradients of a deep network then have little in common."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        aten = torch.ops.aten
        products = {aten.convolution, aten.convolution_backward, aten.mm, aten.addmm, aten.bmm}
        single = func.overloadpacket in products and args[0].dtype is torch.float32
        return tree_map(lambda t: t * (1 + 1e-2 * torch.randn_like(t)) if isinstance(t, torch.Tensor) else t, out) if single else out


def test_rounding_does_not_pass_for_a_weight_used_elsewhere():
    """As TF32 and a GPU's fast convolutions round, and more so."""
    torch.manual_seed(0)
    net, x = cifar_resnet(20).eval(), torch.rand(2, 3, 32, 32)
    before = [(t.dtype, t.data_ptr()) for t in (*net.parameters(), *net.buffers())]
    with Imprecise():
        sites = Weights().sites(net, x)  # a warning would be an error
        assert tried(net, (Weights(), sites), (Weights(how="loop"), Weights(how="loop").sites(net, x)), x, 1e-2) is not None
    assert [(t.dtype, t.data_ptr()) for t in (*net.parameters(), *net.buffers())] == before
    assert {site.how for site in sites} != {"copies"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tf32_does_not_pass_for_a_weight_used_elsewhere():
    torch.manual_seed(0)
    net = resnet18(classes=10, stem="cifar").eval().cuda().to(memory_format=torch.channels_last)
    try:
        torch.set_float32_matmul_precision("high")
        Weights().sites(net, torch.rand(4, 3, 32, 32, device="cuda"))  # a warning would be an error
    finally:
        torch.set_float32_matmul_precision("highest")


class ByClosure(nn.Module):
    """A weight that a copy of the model would have twice."""

    def __init__(self):
        super().__init__()
        self.lin, self.act = nn.Linear(4, 4), nn.Tanh()
        self.again = lambda x: nn.functional.linear(x, self.lin.weight)

    def forward(self, x):
        return self.again(self.act(self.lin(x)))


class OfAnyPrecision(ByClosure):
    """The same, which nothing stops from running in another precision."""

    def __init__(self):
        super().__init__()
        self.again = lambda x: x * self.lin.weight.detach().sum(0) + x * self.lin.weight.sum(0)


class OfOnePrecision(ByClosure):
    def forward(self, x):
        if x.dtype is not torch.float32:
            raise ValueError("give float32")
        return nn.functional.linear(self.act(self.lin(x)), self.lin.weight)


@pytest.mark.parametrize("copied", [True, False])
@pytest.mark.parametrize("kind", [ByClosure, OfAnyPrecision, OfOnePrecision])
def test_a_weight_that_is_used_elsewhere_is_found(kind, copied, monkeypatch):
    """Also where no copy can tell, or the model is too large for one."""
    monkeypatch.setattr(_doubt, "LARGEST_COPY", _doubt.LARGEST_COPY if copied else 0)
    torch.manual_seed(0)
    model = Tailored(kind(), lambda m, x: m(x).square().sum(1), adapt=Weights(), steps=2, lr=0.1)
    with pytest.warns(UserWarning, match="'lin.weight' is used elsewhere"):
        found = model(queries().float())
    torch.testing.assert_close(found, model.replace(adapt=Weights(how="loop"))(queries().float()))


class Tied(nn.Module):
    """A weight that is used again, in an answer of small numbers, beside one of large ones."""

    def __init__(self, unit=1.0):
        super().__init__()
        self.enc, self.dec, self.unit = nn.Linear(4, 3), nn.Linear(3, 4), unit

    def forward(self, x):
        h = torch.tanh(self.enc(x))
        return self.unit * nn.functional.linear(h, self.enc.weight.t()), 10 * self.dec(h)


@pytest.mark.parametrize(("unit", "spoiled"), [(1.0, torch.nan), (1.0, torch.inf), (1e-4, 1.0), (1e-9, 1.0)])
def test_no_trial_is_passed_without_proof(unit, spoiled):
    torch.manual_seed(0)
    net, x = Tied(unit).double(), queries()
    x[0, 0] = spoiled

    def error(model, x):
        return (model(x)[0] / unit - x).square().sum(1)

    model = Tailored(net, error, adapt=Weights(), steps=2, lr=0.1)
    with pytest.warns(UserWarning, match="'enc.weight' is used elsewhere"):
        found = model(x)[0][1:]
    torch.testing.assert_close(found, model.replace(adapt=Weights(how="loop"))(x[1:])[0])


def test_rows_are_told_apart_though_the_first_query_is_broken():
    class Mixing(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.act = nn.Linear(4, 4), nn.Tanh()

        def forward(self, x):
            return self.act(self.lin(torch.cat([x, -x]))).unflatten(0, (2, -1)).sum(0)

    x = queries()
    x[0, 0] = torch.nan
    with pytest.raises(ValueError, match="not one query after the other"):
        Tailored(Mixing().double(), drift, adapt=CN("act"))(x)


def test_a_weight_that_is_tied_later_is_noticed():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    model = Tailored(net, drift, adapt=Weights(), steps=2, lr=0.1)
    model(queries())
    net[2].weight = net[0].weight
    torch.testing.assert_close(model(queries()), Tailored(net, drift, adapt=Weights(how="loop"), steps=2, lr=0.1)(queries()))


def test_threads_do_not_look_like_patches():
    """A layer has a stand-in while another thread adapts it."""
    model = Tailored(mlp(), lambda m, x: (time.sleep(0.002), drift(m, x))[1], adapt=Weights(), steps=2, lr=0.1)
    expected = model(queries())
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: model(queries()), range(12)):
            torch.testing.assert_close(found, expected)
    assert len(model._places) == 1


def test_a_patched_layer_is_noticed():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    model = Tailored(net, drift, adapt=Weights(), steps=2, lr=0.1)
    model(queries())
    net[2].forward = lambda h: nn.functional.linear(h, net[2].weight).sin()
    torch.testing.assert_close(model(queries()), Tailored(net, drift, adapt=Weights(how="loop"), steps=2, lr=0.1)(queries()))


def test_a_large_model_is_tried_as_it_is(monkeypatch):
    monkeypatch.setattr(_doubt, "LARGEST_COPY", 0)
    net, x = mlp().float(), queries().float()
    sites = Weights().sites(net, x)  # a warning would be an error
    assert {site.how for site in sites} != {"copies"}


class TiedBelow(nn.Module):
    """A weight that is used again, below what begins at zero."""

    def __init__(self, last: nn.Module):
        super().__init__()
        self.enc, self.last = nn.Linear(3, 5), last

    def forward(self, x):
        return self.last(nn.functional.linear(self.enc(x).tanh(), self.enc.weight.T))


@pytest.mark.usefixtures("seeded")
@pytest.mark.parametrize("last", [lambda: nn.Linear(3, 3), lambda: nn.LayerNorm(3)], ids=["head", "norm"])
def test_what_begins_at_zero_hides_no_weight_used_elsewhere(last):
    net, x = TiedBelow(last()).double(), torch.randn(5, 3).double()
    nn.init.zeros_(net.last.weight)
    with pytest.warns(UserWarning, match="'enc.weight' is used elsewhere"):
        model = Tailored(net, to_one, adapt=Weights(), steps=3, lr=0.1).prepare(x)
    torch.testing.assert_close(model(x), model.replace(adapt=Weights(how="loop"))(x))


@pytest.mark.usefixtures("seeded")
def test_double_precision_is_tried_exactly_also_where_it_cannot_be_copied():
    class Locked(nn.Module):
        def __init__(self):
            super().__init__()
            self.lock, self.first, self.last = threading.Lock(), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.last(self.first(x).tanh()) + 0.001 * self.first.weight.square().sum()

    with pytest.warns(UserWarning, match="'first.weight' is used elsewhere"):
        Weights().sites(Locked().double(), queries())


class Autoencoder(nn.Module):
    """A decoder that borrows the encoder's weight, which the model's own answer does not."""

    class Decoder(nn.Module):
        def __init__(self, enc: nn.Linear):
            super().__init__()
            self.lent = [enc]

        def forward(self, h):
            return nn.functional.linear(h, self.lent[0].weight.T)

    def __init__(self):
        super().__init__()
        self.enc, self.head = nn.Linear(3, 5), nn.Linear(5, 2)
        self.dec = self.Decoder(self.enc)

    def encode(self, x):
        return self.enc(x).tanh()

    def forward(self, x, tied=False):
        return self.reconstruct(x) if tied else self.head(self.encode(x))

    def reconstruct(self, x):
        return nn.functional.linear(self.encode(x), self.enc.weight.T)


TIED = {
    "by a method": lambda m, x: (m.reconstruct(x) - x).square().sum(1),
    "by a part": lambda m, x: (m.dec(m.encode(x)) - x).square().sum(1),
    "by a flag": lambda m, x: (m(x, tied=True) - x).square().sum(1),
}


@pytest.mark.usefixtures("seeded")
@pytest.mark.parametrize("loss", TIED.values(), ids=TIED)
@pytest.mark.parametrize("count", [1, 5])
def test_a_loss_that_uses_a_weight_elsewhere_is_refused(loss, count):
    x = torch.randn(count, 3)
    with pytest.raises(ValueError, match=r"uses the weight 'enc.weight' otherwise than by a call of its module"):
        Tailored(Autoencoder(), loss, adapt=Weights(), steps=2, lr=0.1)(x)
    Tailored(Autoencoder(), lambda m, x: m.encode(x).square().sum(1), adapt=Weights("enc"), steps=2, lr=0.1)(x)


@pytest.mark.usefixtures("seeded")
def test_so_is_one_beside_gradients_that_are_ten_thousand_times_as_large():
    def loss(m, x):
        return 1e4 * m.head(m.encode(x).detach()).square().sum(1) + TIED["by a method"](m, x)

    with pytest.raises(ValueError, match=r"uses the weight 'enc.weight' otherwise than by a call of its module"):
        Tailored(Autoencoder(), loss, adapt=Weights(), steps=2, lr=0.1)(torch.randn(5, 3))


@pytest.mark.usefixtures("seeded")
def test_an_anchor_is_no_use_elsewhere():
    net, x = mlp(), queries()

    def near(model, x):
        return drift(model, x) + (model(x) - net(x)).square().sum(1)

    model = Tailored(net, near, adapt=Weights(), steps=3, lr=0.01)
    torch.testing.assert_close(model(x), model.replace(adapt=Weights(how="loop"))(x))


@pytest.mark.usefixtures("seeded")
def test_what_a_loss_may_use_elsewhere_runs_with_copies():
    net, x = Autoencoder().double(), torch.randn(4, 3).double()
    copies, loop = (Tailored(net, TIED["by a flag"], adapt=Weights(how=how), steps=2, lr=0.1)(x) for how in ("vmap", "loop"))
    torch.testing.assert_close(copies, loop)


@pytest.mark.usefixtures("seeded")
@pytest.mark.parametrize("backprop", ["none", "last", "all"])
def test_a_query_or_start_may_come_from_the_same_weights(backprop):
    net, x = mlp(), queries()
    model = Tailored(net, to_one, adapt=Weights(), steps=2, lr=0.05, backprop=backprop)
    loop = model.replace(adapt=Weights(how="loop"))
    torch.testing.assert_close(model(net(x)), loop(net(x)))
    torch.testing.assert_close(model(model(x)), loop(loop(x)))
    start = model.tailor(x)
    torch.testing.assert_close(model.predict(x, model.replace(steps=1).tailor(x, start=start)), model.replace(steps=3)(x))
    spent = net(x)
    spent.sum().backward()
    torch.testing.assert_close(model(spent.detach()), loop(spent.detach()))


@pytest.mark.usefixtures("seeded")
def test_sums_in_half_precision_are_no_use_elsewhere():
    net = nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 8)).bfloat16()
    Tailored(net, lambda m, x: m(x).flatten(1).square().mean(1), adapt=Weights())(torch.randint(0, 5, (300, 5)))


@pytest.mark.usefixtures("seeded")
def test_a_parameter_that_two_modules_hold_is_tried():
    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.decoder, self.bias = nn.Linear(8, 4), nn.Parameter(torch.zeros(4))
            self.decoder.bias = self.bias

        def forward(self, h):
            return self.decoder(h)

    net, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), Head()).double(), queries()
    model = Tailored(net, to_one, adapt=Weights(), steps=2, lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it may take the slow way
        torch.testing.assert_close(model(x), model.replace(adapt=Weights(how="loop"))(x))
