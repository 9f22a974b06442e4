"""What lies below the first adapted module runs once, and no answer changes by it."""

from __future__ import annotations

import gc
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from tailoring import CN, Shift, Tailored, Weights, _reuse, baselines, losses, outer_losses
from tailoring.nn import cifar_resnet

H = 5  # layers


@pytest.fixture(autouse=True)
def _however_small(monkeypatch):
    monkeypatch.setattr(_reuse, "WORTH_KEEPING", 0)


ROWS: Counter[nn.Module] = Counter()  # not in the layer: one that changes its own attributes is never reused


class Counted(nn.Linear):
    """A layer that counts the rows that go through it."""

    def forward(self, input: Tensor) -> Tensor:
        ROWS[self] += len(input)
        return super().forward(input)


def mlp(activation=nn.Tanh, layer=Counted) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(layer(8, 8), activation()) for _ in range(H)), nn.Linear(8, 4))


def drift(model, x):
    return (model(x)[:, :2] - x[:, :2]).square().sum(1)


X = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
LAST = f"{H - 1}.1"  # the last activation
ADAPTERS = [CN(LAST), Weights(f"{H - 1}.*"), Shift("2"), baselines.Shared(CN(LAST)), CN("2.1", LAST), Weights(str(H), how="vmap")]


def rows_through(net: nn.Sequential) -> list[int]:
    counted = [m for m in net.modules() if isinstance(m, Counted)]
    found = [ROWS[m] for m in counted]
    ROWS.clear()
    return found


def without_reuse(monkeypatch, model: Tailored, x) -> Tensor:
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(_reuse, "WORTH_IT", 2.0)
        return model.replace()(x)


@pytest.mark.parametrize("adapt", ADAPTERS, ids=repr)
@pytest.mark.parametrize("activation", [nn.Tanh, lambda: nn.ReLU(inplace=True)], ids=["tanh", "in place"])
@pytest.mark.parametrize("loss", [drift, losses.Smooth(2.0, views=2), losses.Smooth(2.0, fresh=True)], ids=["drift", "smooth", "fresh"])
def test_answers_are_those_of_full_passes(monkeypatch, adapt, activation, loss):
    model = Tailored(mlp(activation), loss, adapt=adapt, steps=3, lr=0.3)
    with torch.no_grad():
        answer = model(X)
    assert torch.allclose(answer, without_reuse(monkeypatch, model, X), atol=1e-6)
    assert not torch.allclose(answer, model.net(X), rtol=0, atol=1e-5)


@pytest.mark.parametrize("adapt", [CN(LAST), Weights(f"{H - 1}.*"), Shift("2")], ids=repr)
@pytest.mark.parametrize(
    "loss", [drift, lambda model, x: model.output_of("1", x).square().sum(1) + drift(model, x)], ids=["answer", "inside"]
)
@pytest.mark.parametrize("no_gradients", [True, False])
def test_nothing_of_a_batch_outlives_its_answer(adapt, loss, no_gradients):
    """Not for the garbage collector either, which the memory that tensors take does not call."""
    model = Tailored(mlp(layer=nn.Linear).requires_grad_(False), loss, adapt=adapt, steps=2)
    model(X)
    gc.collect()
    gc.disable()
    try:
        with torch.set_grad_enabled(not no_gradients):
            before = _live_tensors()
            x = X.clone()
            model(x)
            del x
            assert _live_tensors() == before
    finally:
        gc.enable()


def _live_tensors() -> int:
    return sum(isinstance(found, Tensor) for found in gc.get_objects())


def test_a_small_prefix_is_left_alone_until_the_batch_is_large(monkeypatch):
    monkeypatch.setattr(_reuse, "WORTH_KEEPING", 64 * H * 10)  # the multiplications of ten queries
    model = Tailored(mlp(), drift, adapt=CN(LAST), lr=0.1)
    with torch.no_grad():
        assert [len(model.trace(X.repeat(2, 1)[:n]).ran_once) > 0 for n in (9, 10)] == [False, True]


def test_output_optimisation_runs_the_model_once():
    net = mlp()
    model = Tailored(net, drift, adapt=baselines.Output(), steps=4, lr=0.1)
    with torch.no_grad():
        model(X)
        rows_through(net)
        model(X)
    assert rows_through(net) == [6] * H
    assert model.trace(X[:2]).ran_once == ()  # gradients are enabled here, and the weights need them
    with torch.no_grad():
        assert model.trace(X[:2]).ran_once == ("",)


@pytest.mark.parametrize(
    ("loss", "below"),
    [(drift, 6), (losses.Smooth(0.1), 12), (losses.Smooth(0.1, views=3), 24), (losses.Smooth(0.1, fresh=True), 6 + 3 * 6)],
    ids=["drift", "smooth", "three views", "fresh noise at each of three steps"],
)
def test_each_input_goes_through_the_prefix_once(loss, below):
    net = mlp()
    model = Tailored(net, loss, adapt=CN(LAST), steps=3, lr=0.1)
    with torch.no_grad():
        model(X)
        rows_through(net)
        model(X)
    assert rows_through(net) == [below] * H


def test_an_adapted_layer_and_what_follows_run_at_each_step():
    net = mlp()
    model = Tailored(net, drift, adapt=CN("1.1"), steps=3, lr=0.1)
    with torch.no_grad():
        model(X)
        rows_through(net)
        model(X)
    assert rows_through(net) == [6, 6, *[4 * 6] * (H - 2)]
    with torch.no_grad():
        trace = model.trace(X)
    assert trace.ran_once == ("0", "1.0", "1.1")
    assert "run once for all steps: 0, 1.0, 1.1" in str(trace)


def test_a_view_of_the_input_is_the_same_at_every_step():
    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def forward(self, x):
            return self.net(x.flatten(1))

    net = Flat()
    model = Tailored(net, lambda m, x: m(x).square().sum(1), adapt=CN(f"net.{LAST}"), steps=3, lr=0.1)
    with torch.no_grad():
        model(X.view(6, 2, 4))
        rows_through(net.net)
        model(X.view(6, 2, 4))
    assert rows_through(net.net) == [6] * H


class Functional(nn.Module):
    """Submodules with a plain function in between."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (Counted(8, 8) for _ in range(3))
        self.act = nn.Tanh()

    def forward(self, x):
        return self.act(self.third(torch.tanh(self.second(torch.tanh(self.first(x))))))


def test_a_function_between_modules_ends_the_prefix_and_the_trace_says_so(monkeypatch):
    net = Functional()
    model = Tailored(net, drift, adapt=CN("act"), steps=2, lr=0.1)
    with torch.no_grad():
        trace = model.trace(X)
        assert trace.ran_once == ("first",)
        rows_through(net)
        assert torch.allclose(model(X), without_reuse(monkeypatch, model, X))


class Noisy(nn.Module):
    def forward(self, x):
        return x + 0.1 * torch.randn_like(x)


class Overwrites(nn.Module):
    def forward(self, x):
        return x.mul_(0.5)


@pytest.mark.parametrize("odd", [Noisy, Overwrites])
def test_random_and_overwriting_modules_are_never_reused(odd):
    net = nn.Sequential(nn.Linear(8, 8), odd(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    x = X.clone()
    with torch.no_grad():
        once = Tailored(net, drift, adapt=CN("3"), steps=2).trace(x).ran_once
    assert "1" not in once
    assert odd is Noisy or not once  # the layer below has its answer overwritten


def test_outer_gradients_see_every_pass_of_weights_that_train():
    net = mlp(layer=nn.Linear)
    model = Tailored(net, drift, adapt=CN(LAST), steps=2, lr=0.1)
    sum(outer_losses(model, nn.functional.mse_loss, X, torch.zeros(6, 4))).backward()  # type: ignore[union-attr]
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in net.parameters())


def test_a_frozen_prefix_is_reused_in_training():
    net = mlp()
    frozen = net[: H - 1]
    for p in frozen.parameters():
        p.requires_grad_(False)
    model = Tailored(net, drift, adapt=CN(LAST), steps=3, lr=0.1)
    list(outer_losses(model, nn.functional.mse_loss, X, torch.zeros(6, 4)))
    rows_through(net)
    y = model(X)
    assert rows_through(net) == [6] * (H - 1) + [6 * 4]  # the last layer trains, so it runs with the answers' graph
    y.sum().backward()
    assert all((p.grad is None) == (not p.requires_grad) for p in net.parameters())


def test_weights_that_change_between_two_steps_are_noticed():
    net = mlp()
    model = Tailored(net, drift, adapt=CN(LAST), steps=2, lr=0.5)
    with torch.no_grad():
        for change in (False, True):
            states = model.states(X)
            next(states)
            next(states)
            if change:
                net[0][0].weight.mul_(2.0)  # type: ignore[union-attr]
            rows_through(net)
            next(states)
            assert rows_through(net)[0] == (6 if change else 0)


def test_resnet_with_a_tailored_last_block(monkeypatch):
    torch.manual_seed(0)
    net = cifar_resnet(20).eval()
    x = torch.randn(4, 3, 16, 16)
    model = Tailored(net, losses.Smooth(0.1, at=losses.input_of("fc")), adapt=CN("layer3.2.*"), steps=2, lr=0.5)
    with torch.no_grad():
        trace = model.trace(x)
        assert {"layer1", "layer2"} <= set(trace.ran_once)
        assert torch.allclose(model(x), without_reuse(monkeypatch, model, x), atol=1e-5)


@pytest.mark.no_cover
@pytest.mark.parametrize(
    ("adapt", "loss", "below"),
    [
        (CN(LAST), drift, 1),
        (CN(LAST), losses.Smooth(0.1), 2),
        (CN(LAST), losses.Smooth(0.1, fresh=True), 3),
        (Weights(f"{H - 1}.*", str(H)), drift, 1),
    ],
    ids=["drift", "smooth", "fresh", "weights"],
)
def test_a_compiled_model_runs_the_prefix_once_too(adapt, loss, below):
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table

    products: list[int] = []

    def count(graph: torch.fx.GraphModule, _):
        products.append(sum("addmm" in str(node.target) for node in graph.graph.nodes))
        return graph.forward

    net = mlp(layer=nn.Linear)
    model = Tailored(net, loss, adapt=adapt, steps=2, lr=0.3).prepare(X)
    with torch.no_grad():
        compiled = torch.compile(model, backend=aot_autograd(fw_compiler=count, decompositions=select_decomp_table()), fullgraph=True)
        assert torch.allclose(compiled(X), model(X), atol=1e-5)
    above = 2 if isinstance(adapt, Weights) else 1  # layers that run at every step
    views = 2 if isinstance(loss, losses.Smooth) else 1
    assert products == [(H + 1 - above) * below + above * (2 * views + 1)]


class Remembers(nn.Linear):
    last: Tensor

    def forward(self, input: Tensor) -> Tensor:
        self.last = super().forward(input)
        return self.last


class Conditioned(nn.Linear):
    by: object = 0.0

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * (1 + self.by)  # type: ignore[operator]


class Odd(nn.Module):
    """A first part that is more than a function of its tensors."""

    def __init__(self, how: str):
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.remembers, self.conditioned, self.appends, self.wraps = Remembers(8, 8), Conditioned(8, 8), Appends(8, 8), Wraps(8, 8)
        self.act, self.out = nn.Tanh(), nn.Linear(8, 8)
        self.head = nn.Sequential(nn.Linear(8, 8), self.act)

    def forward(self, x: Tensor, by: float = 0.0) -> Tensor:
        skips: list[Tensor] = []
        if self.how == "a hidden tensor":
            return self.out(self.act(self.remembers(x))) + self.remembers.last
        if self.how == "a condition":
            self.conditioned.by = by
            return self.out(self.act(self.conditioned(x)))
        if self.how == "a condition with gradients":
            self.conditioned.by = self.act(self.out(x))
            return self.conditioned(x)
        if self.how == "a list to append to":
            return self.out(self.act(self.appends(x, skips))) + skips.pop()
        if self.how == "an object":
            box = self.wraps(x, np.ones(8))
            box.h = self.act(box.h)
            return self.out(box.h)
        return self.out(self.act(self.remembers(x))) + self.head(x)  # "an adapted module in two places"


class Appends(nn.Linear):
    def forward(self, input: Tensor, skips: list[Tensor]) -> Tensor:  # type: ignore[override]
        skips.append(super().forward(input))
        return skips[-1].tanh()


class Wraps(nn.Linear):
    def forward(self, input: Tensor, _array: np.ndarray) -> SimpleNamespace:  # type: ignore[override]
        return SimpleNamespace(h=super().forward(input))


ODD = [
    "a hidden tensor",
    "a condition",
    "a condition with gradients",
    "a list to append to",
    "an object",
    "an adapted module in two places",
]


@pytest.mark.parametrize("how", ODD)
def test_modules_that_are_more_than_functions_of_their_tensors(monkeypatch, how):
    def loss(model, x):
        other = model(x, by=2.0) if how == "a condition" else model(1.3 * x)
        return (model(x) - other).square().sum(1) + (model(x) - x).square().sum(1)

    model = Tailored(Odd(how), loss, adapt=CN("act"), steps=3, lr=0.1)
    with torch.no_grad():
        expected = without_reuse(monkeypatch, model, X)
        for _ in range(2):
            assert torch.allclose(model(X), expected, atol=1e-5)


def slope(model, x):
    x = x.detach().requires_grad_()
    return torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]


def tangent(model, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


def in_another_thread(model, x):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(torch.enable_grad()(model), 1.1 * x).result(10)


def with_other_weights(model, x):
    net = model._bound.module
    return torch.func.functional_call(net, {name: 1.5 * p.detach() for name, p in net.named_parameters()}, (x,)).detach() + model(x)


def in_full_precision(model, x):
    with torch.autocast("cpu", enabled=False):
        return model(x)


LOOKS = [slope, tangent, in_another_thread, with_other_weights, in_full_precision, lambda m, x: m.output_of("0.0", x)]


@pytest.mark.parametrize("look", LOOKS)
def test_losses_that_look_at_the_model_in_their_own_way(monkeypatch, look):
    def loss(model, x):
        return look(model, x).square().sum(1) + (0 if look is in_full_precision else model(x).square().sum(1))

    model = Tailored(mlp(layer=nn.Linear), loss, adapt=CN(LAST), steps=3, lr=0.1)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=look is in_full_precision):
        assert torch.equal(model(X), without_reuse(monkeypatch, model, X))


def test_a_hook_inside_the_prefix_hears_every_pass():
    net = mlp()
    heard: list[Tensor] = []
    net[0][0].register_forward_hook(lambda *_: heard.append(_[-1]))  # type: ignore[index]
    model = Tailored(net, drift, adapt=CN(LAST), steps=2, lr=0.1)
    with torch.no_grad():
        model(X)
        heard.clear()
        model(X)
    assert len(heard) == 3


def test_inference_tensors_outside_their_mode():
    with torch.inference_mode():
        x = X * 1
    with torch.no_grad():
        assert torch.equal(Tailored(mlp().requires_grad_(False), drift, adapt=CN(LAST))(x), Tailored(mlp(), drift, adapt=CN(LAST))(X))


def test_a_tensor_that_trains_and_is_no_parameter():
    class Scaled(nn.Linear):
        own: Tensor

        def forward(self, input):
            return super().forward(input) * self.own

    layer = Scaled(8, 8).requires_grad_(False)
    layer.own = torch.ones(8, requires_grad=True)
    Tailored(nn.Sequential(layer, nn.Tanh(), nn.Linear(8, 4)), drift, adapt=CN("1"))(X).sum().backward()
    assert layer.own.grad is not None


def test_fresh_noise_is_not_kept_for_ever(monkeypatch):
    made: list[_reuse.Reuse] = []
    monkeypatch.setattr("tailoring._answering.Reuse", lambda *args: made.append(_reuse.Reuse(*args)) or made[-1])
    with torch.no_grad():
        Tailored(mlp(), losses.Smooth(0.1, fresh=True), adapt=CN(LAST), steps=20)(X)
    assert max(len(kept) for kept in made[-1]._kept.values()) <= 4


def test_other_modules_are_looked_at_anew():
    net = mlp()
    model = Tailored(net, drift, adapt=CN(LAST), steps=2)
    with torch.no_grad():
        assert "0" in model.trace(X).ran_once
        net[0] = nn.Sequential(nn.Linear(8, 8), Noisy())
        assert "0" not in model.trace(X).ran_once
        net[0].append(nn.Dropout())  # type: ignore[operator]
        with pytest.raises(ValueError, match="drops units"):
            model(X)
