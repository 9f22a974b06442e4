"""`Tailored(..., backprop="all", recompute=True)`: the same outer gradients without the activations; and what each mode keeps."""

from __future__ import annotations

import pytest
import torch
from nets import ADAPTERS, data, drift, mlp, queries, small, summed_error
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tailoring import CN, Tailored, Weights, losses, outer_losses
from tailoring.nn import ResidualMLP


class LearnedLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 0.5, 2.0, 1.5], dtype=torch.float64))

    def forward(self, model, x):
        return ((model(x) - x).square() * self.weight).sum(1)


def learned_rate():
    return nn.Parameter(torch.tensor([1e-2, 2e-2, 3e-2], dtype=torch.float64))


SETTINGS = {
    "plain": dict,
    "momentum and clip": lambda: {"momentum": 0.5, "clip": 1.0, "proximal": 0.1},
    "learned lr": lambda: {"lr": learned_rate()},
    "learned loss": lambda: {"loss": LearnedLoss()},
    "noise": lambda: {"loss": losses.Smooth(0.1)},
    "fresh noise": lambda: {"loss": losses.Smooth(0.1, fresh=True)},
    "chunks": lambda: {"chunk": 2},
    "best": lambda: {"keep": "best"},
}


def tailored(net: nn.Module | None = None, **options) -> Tailored:
    options = {"loss": drift, "adapt": CN(nn.Tanh), "steps": 3, "lr": 1e-2, "backprop": "all", "recompute": True} | options
    return Tailored(mlp() if net is None else net, options.pop("loss"), **options).prepare(queries())


def gradients(model: Tailored, x: torch.Tensor, *, summed: bool = True) -> list[torch.Tensor | None]:
    loss = sum(outer_losses(model, summed_error, x, x.flip(1))) if summed else summed_error(model(x), x.flip(1))
    assert isinstance(loss, torch.Tensor)
    return [None if g is None else g.clone() for g in torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)]


@pytest.mark.parametrize("summed", [True, False], ids=["summed losses", "one loss"])
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("adapter", [a for a in ADAPTERS if a != "Output"])
def test_outer_gradients_are_exactly_the_same(adapter, settings, summed):
    if settings == "chunks" and adapter == "Shared":
        pytest.skip("refused: the batch is adapted as a whole")
    model, x = tailored(adapt=ADAPTERS[adapter](), **SETTINGS[settings]()), queries()
    ours, expected = gradients(model, x, summed=summed), gradients(model.replace(recompute=False), x, summed=summed)
    assert any(g is not None and g.abs().max() > 0 for g in ours)
    for a, b in zip(ours, expected, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


class Field(nn.Module):
    """Differentiates inside its forward pass, as Hamiltonian networks do; and works in place."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 1)).double()

    def forward(self, x):
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            return torch.autograd.grad(self.inner(x).square().sum(), x, create_graph=True)[0]


@pytest.mark.parametrize("adapt", [CN("inner.1"), Weights()], ids=repr)
def test_models_that_take_derivatives_themselves(adapt):
    torch.manual_seed(0)
    model, x = tailored(Field(), adapt=adapt), queries()
    for a, b in zip(gradients(model, x), gradients(model.replace(recompute=False), x), strict=True):
        torch.testing.assert_close(a, b)


def test_a_frozen_first_part_and_gradients_by_the_query():
    model = tailored(mlp(depth=3), adapt=CN("5"))
    for layer in list(model.net)[:4]:  # type: ignore[call-overload]
        layer.requires_grad_(False)
    x = queries()
    for given in (x, x.clone().requires_grad_()):
        ours, expected = (
            torch.autograd.grad(m(given).square().sum(), [p for p in (*m.net.parameters(), given) if p.requires_grad])
            for m in (model, model.replace(recompute=False))
        )
        assert all(map(torch.equal, ours, expected))


def test_the_backward_pass_has_the_precision_of_the_forward_pass():
    model, x = tailored().float(), queries().float()
    found = []
    for m in (model, model.replace(recompute=False)):
        with torch.autocast("cpu", torch.bfloat16):
            loss = summed_error(m(x).float(), x.flip(1))
        found.append(torch.autograd.grad(loss, list(m.parameters())))  # outside, as torch advises
    assert all(map(torch.equal, *found))


def test_two_backward_passes_and_a_third_derivative():
    model, x = tailored(steps=2), queries()
    found = []
    for m in (model, model.replace(recompute=False)):
        weights = list(m.parameters())
        grads = torch.autograd.grad(summed_error(m(x), x.flip(1)), weights, create_graph=True)
        again = torch.autograd.grad(sum(g.square().sum() for g in grads), weights, allow_unused=True)
        found.append([*grads, *(g for g in again if g is not None)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_a_bad_query_harms_only_itself():
    model = tailored(loss=lambda model, x: drift(model, x) * torch.where(x[:, 0] > 50, torch.inf, 1.0))
    x = queries()
    x[2, 0] = 100.0
    for a, b in zip(gradients(model, x), gradients(model.replace(recompute=False), x), strict=True):
        assert a.isfinite().all()
        assert torch.equal(a, b)


@pytest.mark.parametrize("backprop", ["none", "last"])
def test_it_is_refused_where_there_is_nothing_to_save(backprop):
    with pytest.raises(ValueError, match=f"backprop='{backprop}' keeps those of one step only"):
        tailored(backprop=backprop)


def test_weights_must_not_change_before_backward():
    model, x = tailored(), queries()
    loss = summed_error(model(x), x)
    with torch.no_grad():
        next(model.parameters()).mul_(2.0)
    with pytest.raises(RuntimeError, match="weights changed before backward"):
        loss.backward()


def test_weights_that_were_lent_must_still_be_there():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = tailored()

        def forward(self, x):
            return self.model(x).sum()

    outer = Outer()
    lent = {name: p.detach().clone().requires_grad_() for name, p in outer.named_parameters()}
    loss = torch.func.functional_call(outer, lent, (queries(),))
    with pytest.raises(RuntimeError, match="weights changed before backward"):
        loss.backward()


class Twice(nn.Module):
    """Answers with two tensors, and looks at a buffer."""

    def __init__(self):
        super().__init__()
        self.net = mlp()
        self.register_buffer("scale", torch.ones(4, dtype=torch.float64))

    def forward(self, x):
        y = self.net(x) * self.scale
        return y, 2 * y


@pytest.mark.parametrize("changed", ["queries", "buffer"])
def test_nothing_else_that_the_steps_depend_on_may_change_either(changed):
    net, x = Twice(), queries()
    model = tailored(net, loss=lambda m, x: drift(lambda z: m(z)[0], x))
    *_, state = model.states(x)
    outer = model.predict(x, state)[0].square().sum()
    (x if changed == "queries" else net.scale).mul_(2.0)
    with pytest.raises(RuntimeError, match="weights changed before backward"):
        outer.backward()


def test_a_large_loss_of_one_query_hides_no_other():
    def noisy(model, x):
        return (model(x + 0.1 * torch.randn_like(x)) - model(x)).square().sum(1) + 1e6 * (x[:, 0] == x[0, 0])

    with pytest.raises(RuntimeError, match="came out otherwise"):
        gradients(tailored(loss=noisy), queries())


def test_noise_that_cannot_be_drawn_again_is_refused():
    def noisy(model, x):
        return (model(x + 0.1 * torch.randn_like(x)) - model(x)).square().sum(1)

    with pytest.raises(RuntimeError, match=r"came out otherwise.*model\.seeds"):
        gradients(tailored(loss=noisy), queries())


@pytest.mark.usefixtures("seeded")
def test_noise_that_cannot_be_repeated_is_noticed_beside_a_large_constant():
    net, (x, y) = small(), data()
    model = Tailored(
        net, lambda m, x: 100 + m(x + 0.5 * torch.randn_like(x)).square().sum(1), lr=0.3, steps=2, backprop="all", recompute=True
    )
    with pytest.raises(RuntimeError, match="came out otherwise"):
        nn.functional.mse_loss(model(x), y).backward()


class Living(TorchDispatchMode):
    """The bytes of all storages made inside the block that are still alive, and the most that ever were."""

    def __init__(self):
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most, self.where = 0, ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else [out]:
            if isinstance(t, torch.Tensor):
                storage = StorageWeakRef(t.untyped_storage())
                self.made[storage.cdata] = storage, t.untyped_storage().nbytes()
        self.made = {key: pair for key, pair in self.made.items() if not pair[0].expired()}
        now = sum(size for _, size in self.made.values())
        if now > self.most:
            self.most, self.where = now, func.__name__
        return out


STATE = 2 * 16 * 64 * 8  # bytes of gamma and beta below


def peak(steps: int, losses: str, **options) -> int:
    """The most memory of a training step, in a network with a small state and large activations."""
    model, x = tailored(mlp(width=64, depth=6), adapt=CN("1"), steps=steps, **options), queries(16)
    with Living() as living:
        if losses == "one":
            summed_error(model(x), x).backward()
        elif losses == "summed":
            sum(outer_losses(model, summed_error, x, x)).backward()  # type: ignore[union-attr]
        else:
            for loss in outer_losses(model, summed_error, x, x):
                loss.backward()
    return living.most


def growth(losses: str, **options) -> float:
    """With each step, in states."""
    return (peak(12, losses, **options) - peak(4, losses, **options)) / 8 / STATE


@pytest.mark.parametrize("losses", ["one", "each"])
@pytest.mark.parametrize("backprop", ["none", "last"])
def test_memory_does_not_grow_with_the_steps_with_none_and_last(backprop, losses):
    assert growth(losses, backprop=backprop, recompute=False) < 0.05  # the values of the tailoring loss


@pytest.mark.parametrize("losses", ["one", "summed"])
def test_with_all_it_grows_by_a_steps_activations_and_recomputed_by_the_state(losses):
    assert growth(losses, recompute=False) > 8
    assert 1 <= growth(losses) < 1.2


def test_exact_weights_take_the_most_memory_in_a_pass_not_when_their_factors_are_put_together():
    x = torch.randn(256, 8)
    model = Tailored(ResidualMLP(8, width=64), drift, adapt=Weights(), steps=5, lr=1e-3)
    with torch.no_grad():
        model(x)  # the first call looks at the loss
    with torch.no_grad(), Living() as living:
        model(x)
    assert living.where != "cat.default"  # which puts them together: all would be there twice


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("net", [mlp, Field])
def test_on_cuda_where_autograd_computes_again_in_a_thread_of_its_own(net):
    model, x = Tailored(net().cuda(), drift, adapt=Weights(), steps=3, lr=1e-2, backprop="all", recompute=True), queries().cuda()
    for a, b in zip(gradients(model, x), gradients(model.replace(recompute=False), x), strict=True):
        torch.testing.assert_close(a, b)
