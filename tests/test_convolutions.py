"""Exact weights of convolutions: by patches, as on a GPU, and by a kernel for each query, as on a CPU where that is smaller."""

from __future__ import annotations

import copy
import time

import pytest
import torch
from nets import drift
from test_rules import EXACT, LAYERS, assert_exact, image, smooth
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tailoring import Tailored, Weights, _convolutions, _weight_sites
from tailoring._convolutions import _windows
from tailoring._entries import LowRank

CONVOLUTIONS = [name for name in LAYERS if "conv" in name]


@pytest.fixture(autouse=True)
def small_ones_too(monkeypatch):
    """Kernels of their own, however little there is to do for each."""
    monkeypatch.setattr(_convolutions, "_LEAST_WORK", 0)


@pytest.fixture
def by_patches(monkeypatch):
    """As where a convolution with a kernel for each query is not known to be the faster."""
    monkeypatch.setattr(_weight_sites, "own_kernels_pay", lambda module, positions: False)


def hows(net: nn.Module, x: torch.Tensor) -> dict[str, str]:
    return {site.key: site.how for site in Weights().sites(net, x)}


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func._schema.name)
        return func(*args, **(kwargs or {}))


def test_kernels_are_the_queries_own_where_they_are_smaller_than_one_steps_outer_products():
    found = {name: hows(*(part.double() for part in LAYERS[name]())) for name in CONVOLUTIONS}
    assert found.pop("conv, patches")["0.weight"] == "outer products"
    assert {how for sites in found.values() for how in sites.values() if how != "outer products"} == {"own kernels"}
    assert [found["conv, kernel"][f"{layer}.weight"] for layer in (0, 3)] == ["own kernels", "outer products"]
    assert found["conv, kernel"]["0.bias"] == "own kernels"
    assert set(found["conv, groups"].values()) == {"own kernels"}


@pytest.mark.parametrize("own", [True, False])
def test_they_run_without_patches(own, request):
    if not own:
        request.getfixturevalue("by_patches")
    net, x = LAYERS["conv, kernel"]()
    model = Tailored(net.double(), smooth, adapt=Weights(), steps=2, lr=0.05).prepare(x)
    with Operations() as ran:
        model(x)
    assert ("aten::im2col" in ran.names) == (not own)


@pytest.mark.parametrize("backprop", ["none", "last", "all"])
@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("own", [True, False])
def test_every_convolution_is_exact(own, name, backprop, request):
    if not own:
        request.getfixturevalue("by_patches")
    torch.manual_seed(0)
    net, x = LAYERS[name]()
    net = net.double()
    assert ("own kernels" in hows(net, x).values()) == (own and name != "conv, patches")
    assert_exact(net, x, backprop=backprop)


@pytest.mark.parametrize("groups", [1, 4, 16])
def test_where_there_is_little_to_do_for_a_group_patches_are_made(groups, monkeypatch):
    monkeypatch.undo()
    net = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1, groups=groups), nn.Tanh(), nn.Conv2d(16, 16, 3, padding=1, groups=groups))
    for size, of_one in ((32, "own kernels"), (4, "outer products")):
        expected = "outer products" if groups == 16 else of_one
        assert set(hows(net, torch.randn(2, 16, size, size)).values()) == {expected}


class Views(nn.Module):
    """Two images for every query."""

    def __init__(self):
        super().__init__()
        self.conv, self.act, self.last = nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 3, 1)

    def forward(self, x):
        both = torch.stack([x, x.flip(-1)], 1).flatten(0, 1)
        return self.last(self.act(self.conv(both))).unflatten(0, (-1, 2)).mean(1)


class Tied(nn.Module):
    """One kernel for two convolutions of the same pictures; the second has a bias of its own."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Conv2d(2, 2, 3, padding=1, bias=False), nn.Conv2d(2, 2, 3, padding=2, dilation=2)
        self.other.weight = self.one.weight

    def forward(self, x):
        return self.other(self.one(x).tanh())


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels last"])
@pytest.mark.parametrize("net", [Views, Tied])
def test_several_images_of_a_query_and_shared_kernels_are_exact(net, memory):
    torch.manual_seed(0)
    net, x = net().double().to(memory_format=memory), image(2, 6, 6).contiguous(memory_format=memory)
    assert set(hows(net, x).values()) == {"own kernels"}
    assert_exact(net, x)


def test_a_kernel_whose_bias_belongs_to_another_layer_too_keeps_its_outer_products():
    """Else that bias would be kept in two ways."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Conv2d(3, 3, 6), nn.Flatten(), nn.Linear(3, 3)).double()
    net[4].bias = net[0].bias
    x = image(2, 8, 8)
    assert set(hows(net, x).values()) == {"outer products"}
    assert_exact(net, x)


@pytest.mark.parametrize("at", ["0.weight", "0.bias"])
def test_the_kernel_or_the_bias_alone(at):
    torch.manual_seed(0)
    net, x = LAYERS["conv, kernel"]()
    assert_exact(net.double(), x, at=(at,))


def test_a_state_of_small_images_answers_large_ones():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten()).double()
    small, large = image(8, 2, 2), image(8, 16, 16)
    ours, theirs = (Tailored(net, smooth, adapt=Weights(how=how), steps=1, lr=0.5) for how in ("rules", "vmap"))
    assert [hows(net, x)["0.weight"] for x in (small, large)] == ["outer products", "own kernels"]
    for answer in (lambda model, x, state: model.predict(x, state), lambda model, x, state: model.adapted(x, state)(x)):
        for a, b in ((small, large), (large, small)):
            found, expected = (answer(model, b, model.tailor(a)) for model in (ours, theirs))
            torch.testing.assert_close(found, expected, **EXACT)
            assert (found - net(b)).abs().max() > 1e-3


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels last"])
@pytest.mark.parametrize("of", ["input", "kernel", "neither"])
@pytest.mark.parametrize("mode", ["zeros", "reflect"])
def test_answers_lie_in_memory_as_the_layers_own(mode, of, memory):
    """A model may view them so."""
    layer, x = nn.Conv2d(4, 5, 3, padding=1, padding_mode=mode).double(), image(4, 6, 6)
    layer = layer.to(memory_format=memory) if of == "kernel" else layer
    x = x.contiguous(memory_format=memory) if of == "input" else x
    seen = []
    net = nn.Sequential(layer, nn.Tanh(), nn.Flatten())
    net[1].register_forward_pre_hook(lambda module, given: seen.append(given[0].stride()))
    expected = layer(x).stride()
    model = Tailored(net, smooth, adapt=Weights(), steps=1, lr=0.1).prepare(x)
    assert hows(net, x)["0.weight"] == "own kernels"
    seen.clear()
    model(x)
    assert set(seen) == {expected}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_uses_of_a_bias_that_cancel_are_no_use_elsewhere(dtype):
    """As in losses of agreement: what is left of them is rounding."""
    for seed in range(6):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.ReLU(), nn.Conv2d(8, 3, 3, padding=1)).to(dtype)
        x = torch.randn(3, 3, 12, 12, dtype=dtype)
        ours, theirs = (
            Tailored(net, lambda m, x: (m(x) - m(x.flip(-1)).flip(-1)).flatten(1).square().mean(1), adapt=Weights(how=how), lr=1.0)(x)
            for how in ("rules", "vmap")
        )
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("options", [{}, {"backprop": "all"}, {"momentum": 0.5, "clip": 0.1, "proximal": 1.0}], ids=str)
def test_a_start_in_outer_products_is_made_a_kernel(options, rank):
    """As from a device where kernels are kept so."""
    torch.manual_seed(0)
    net, x = LAYERS["conv, kernel"]()
    model = Tailored(net.double(), smooth, adapt=Weights(), steps=2, lr=0.05, **options)
    left, right = torch.randn(3, rank, 3, dtype=torch.float64), torch.randn(3, rank, 18, dtype=torch.float64)
    start = model.tailor(x) | {"0.weight": LowRank(((-1, left, right),))}
    found, expected = (model.tailor(x, start=s)["0.weight"] for s in (start, start | {"0.weight": left.mT @ right}))
    torch.testing.assert_close(found, expected, **EXACT)
    assert (found - left.mT @ right).abs().max() > 1e-4


def test_single_precision_with_the_channels_last_is_right_too():
    """oneDNN's; PyTorch 2.13 makes wrong gradients of kernels that lie so, of a single group's say."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 1), nn.ReLU(), nn.Conv2d(16, 8, 3, stride=2)).to(
        memory_format=torch.channels_last
    )
    x = torch.randn(1, 3, 16, 16).contiguous(memory_format=torch.channels_last)
    for queries in (1, 3):
        rows = x.repeat(queries, 1, 1, 1) * torch.arange(1, queries + 1)[:, None, None, None]
        pairs = (net, rows), (copy.deepcopy(net).double(), rows.double())
        ours, exact = (Tailored(n, smooth, adapt=Weights(), steps=2, lr=0.5)(r) for n, r in pairs)
        assert (ours - net(rows)).abs().max() > 1e-2
        torch.testing.assert_close(ours, exact.float(), rtol=1e-3, atol=1e-4)


@pytest.mark.no_cover
def test_it_is_more_than_twice_as_fast_as_by_patches(monkeypatch):
    """Ratios inside one run; alone on a machine it is some seven times."""
    net = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.Tanh(), nn.Conv2d(16, 16, 3, padding=1), nn.Tanh(), nn.Conv2d(16, 16, 3))
    x, models = torch.randn(16, 3, 32, 32), {}
    for own in (True, False):
        with monkeypatch.context() as here:
            if not own:
                here.setattr(_weight_sites, "own_kernels_pay", lambda module, positions: False)
            models[own] = Tailored(net, drift, adapt=Weights(), steps=2, lr=1e-6).prepare(x)
    times = {own: [] for own in models}
    with torch.no_grad():
        for _ in range(6):
            for own, model in models.items():
                start = time.perf_counter()
                model(x)
                times[own].append(time.perf_counter() - start)
    assert min(times[False]) > 2 * min(times[True])


@pytest.mark.parametrize(("kernel", "stride"), [((3, 3), (1, 1)), ((2, 3), (2, 1)), ((1, 4), (1, 3))])
@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
def test_patches_of_a_gpu_are_those_of_a_cpu(kernel, stride, memory):
    x = torch.randn(3, 2, 6, 7, dtype=torch.float64).contiguous(memory_format=memory).requires_grad_()
    ours, theirs = _windows(x, kernel, stride).flatten(3).flatten(1, 2), F.unfold(x, kernel, stride=stride).mT
    assert torch.equal(ours, theirs)
    weights = torch.randn_like(theirs)
    for patches in (ours, theirs):
        (patches.sin() * weights).sum().backward()
    (gradient,) = torch.autograd.grad((_windows(x, kernel, stride).flatten(3).flatten(1, 2).sin() * weights).sum(), x)
    torch.testing.assert_close(x.grad, 2 * gradient)
