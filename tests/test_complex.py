"""Complex numbers: weights, states, losses. A complex number is two real ones, and its gradient that by its two parts."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

from tailoring import CN, LBFGS, Tailored, Weights, theory
from tailoring import _entries as entries
from tailoring import _states as states
from tailoring._entries import LowRank
from tailoring.losses import Align, Conserve, Equivariant, Misfit, Residual

EXACT = {"rtol": 1e-10, "atol": 1e-10}
pytestmark = pytest.mark.usefixtures("seeded")


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.complex128)


def size(model, z: Tensor) -> Tensor:
    """Not the same in all directions of the plane, so that a conjugate too few or too many is seen."""
    out = model(z).flatten(1)
    return (out - (1 + 2j)).abs().square().mean(1) + (out.real * out.imag).mean(1)


class Bent(nn.Module):
    """Neither analytic nor a function of the modulus."""

    def forward(self, z: Tensor) -> Tensor:
        return torch.complex(z.real.tanh(), (z.imag + z.real / 2).sin())


def net(inputs: int = 3, hidden: int = 8, outputs: int = 3) -> nn.Sequential:
    linear = [nn.Linear(a, b, dtype=torch.complex128) for a, b in ((inputs, hidden), (hidden, outputs))]
    return nn.Sequential(linear[0], Bent(), linear[1])


# Losses


LOSSES = {
    "residual": (Residual(lambda p, z: p - 1j * z), lambda p, z: (p - 1j * z).abs().square().mean(1)),
    "conserve": (
        Conserve(lambda u: u * u.roll(1, 1).conj(), norm="l2", weights=[1, 2, 3]),
        lambda p, z: ((p * p.roll(1, 1).conj() - z * z.roll(1, 1).conj()).abs().square() * torch.tensor([1, 2, 3])).sum(1),
    ),
    "misfit": (
        Misfit(lambda p, _: p[:, :2], lambda z: torch.where(z[:, :2].real > 0, z[:, :2], complex(torch.nan, 1)), sigma=0.5),
        lambda p, z: (((p - z)[:, :2].abs() / 0.5).square() * (z[:, :2].real > 0)).sum(1) / (z[:, :2].real > 0).sum(1).clamp(min=1),
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_squared_difference_of_complex_numbers_is_that_of_their_sizes(name):
    loss, by_hand = LOSSES[name]
    model, z = net(), numbers(5, 3)
    torch.testing.assert_close(loss(model, z), by_hand(model(z), z), **EXACT)
    trace = Tailored(model, loss, adapt=Weights(), steps=5, lr=1e-3).trace(z)
    assert trace.losses[-1].sum() < trace.losses[0].sum()


def test_a_complex_model_that_does_not_commute_with_a_turn():
    model, z = net(), numbers(5, 3)
    loss = Equivariant([(lambda u: 1j * u, lambda u: 1j * u)])(model, z)
    torch.testing.assert_close(loss, (model(1j * z) - 1j * model(z)).abs().square().mean(1), **EXACT)


def test_statistics_of_complex_features():
    model, batches = nn.Conv1d(2, 3, 3, dtype=torch.complex128), [numbers(4, 2, 9), numbers(3, 2, 9)]
    align = Align.measured(nn.Sequential(model), batches, at="0")
    features = model(torch.cat(batches))
    torch.testing.assert_close(align.mean, features.mean(2).mean(0), **EXACT)
    torch.testing.assert_close(
        align.std, ((features - features.mean(2, keepdim=True)).abs().square().mean(2) + 1e-12).sqrt().mean(0), **EXACT
    )
    mean, std = features.mean(2), features.var(2, unbiased=False).sqrt()
    expected = (((mean - align.mean).abs() / align.std).square() + (std / align.std - 1).square()).mean(1)
    torch.testing.assert_close(Align(align.mean, align.std)(lambda _: features, None), expected, rtol=1e-8, atol=1e-8)


def test_the_square_of_zero_has_derivatives():
    z = torch.zeros(2, dtype=torch.complex128, requires_grad=True)
    (slope,) = torch.autograd.grad(entries.squares(z).sum(), z, create_graph=True)
    (curve,) = torch.autograd.grad(slope.real.sum(), z)
    assert slope.abs().max() == 0
    torch.testing.assert_close(curve, torch.full_like(z, 2))


# Weights by rules


LAYERS = {
    "vectors": lambda: (net(), numbers(4, 3)),
    "sequences": lambda: (net(4, 20, 30), numbers(4, 3, 4)),
    "long sequences": lambda: (net(4, 5, 3), numbers(4, 9, 4)),
    "a conjugate": lambda: (nn.Sequential(net(), Conjugate(), nn.Linear(3, 2, dtype=torch.complex128)), numbers(4, 3)),
    "a real model with a complex layer": lambda: (Mixed(), torch.randn(4, 3).double()),
    "conv": lambda: (
        nn.Sequential(nn.Conv1d(4, 6, 3, dtype=torch.complex128), Bent(), nn.Conv1d(6, 2, 2, dtype=torch.complex128)),
        numbers(4, 4, 6),
    ),
    "groups": lambda: (
        nn.Sequential(nn.Conv2d(2, 4, 3, dtype=torch.complex128), Bent(), nn.Conv2d(4, 4, 2, groups=2, dtype=torch.complex128)),
        numbers(4, 2, 5, 5),
    ),
}


class Conjugate(nn.Module):
    def forward(self, z: Tensor) -> Tensor:
        return z.conj()


class Mixed(nn.Module):
    """Real layers around a complex one, as between the Fourier transforms of an operator network."""

    def __init__(self):
        super().__init__()
        self.a, self.c, self.b = nn.Linear(3, 8).double(), nn.Linear(4, 4, dtype=torch.complex128), nn.Linear(8, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.view_as_complex(self.a(x).tanh().unflatten(1, (4, 2)))
        return self.b(torch.view_as_real(self.c(h)).flatten(1))


def by_hand(model: nn.Module, z: Tensor, *, momentum: float = 0.0, clip: float = torch.inf, proximal: float = 0.0) -> Tensor:
    """Two steps of each query's own weights, by autograd alone."""
    answers = []
    shared = dict(model.named_parameters())
    for query in z.split(1):
        own, velocity = dict(shared), {name: torch.zeros_like(p) for name, p in shared.items()}
        for _ in range(2):
            loss = size(lambda q, own=own: torch.func.functional_call(model, own, (q,)), query).sum()
            grads = dict(zip(own, torch.autograd.grad(loss, list(own.values()), create_graph=True), strict=True))
            grads = {name: g + proximal * (own[name] - shared[name]) for name, g in grads.items()}
            norm = sum(g.abs().square().sum() for g in grads.values()) ** 0.5
            velocity = {name: momentum * velocity[name] + (g * clip / norm if norm > clip else g) for name, g in grads.items()}
            own = {name: p - 0.1 * velocity[name] for name, p in own.items()}
        answers.append(torch.func.functional_call(model, own, (query,)))
    return torch.cat(answers)


OPTIONS = {"plain": {}, "momentum": {"momentum": 0.5}, "clip": {"clip": 0.1}, "all": {"momentum": 0.5, "clip": 0.5, "proximal": 0.3}}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("name", LAYERS)
def test_complex_layers_are_exact_by_their_rules(name, options):
    model, z = LAYERS[name]()
    tailored = Tailored(model, size if z.is_complex() else real_size, adapt=Weights(), steps=2, lr=0.1, backprop="all", **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        answers = tailored(z)
    assert {site.how for site in tailored.adapt.sites(model, z)} == {"outer products"}
    others = [tailored.replace(adapt=Weights(how="loop"))(z)] + ([by_hand(model, z, **options)] if z.is_complex() else [])
    found = [answers, *torch.autograd.grad(answers.abs().square().sum() + answers.real.sin().sum(), list(model.parameters()))]
    for other in others:
        expected = [other, *torch.autograd.grad(other.abs().square().sum() + other.real.sin().sum(), list(model.parameters()))]
        torch.testing.assert_close(found, expected, **EXACT)
    assert (answers - model(z)).abs().max() > 1e-3


def real_size(model, x: Tensor) -> Tensor:
    return (model(x) - 1).square().sum(1)


def test_a_step_of_a_complex_layer_goes_downhill_by_what_autograd_says():
    """grad W = g h^H"""
    model, z = nn.Linear(3, 2, dtype=torch.complex128), numbers(4, 3)
    state = Tailored(model, size, adapt=Weights(), steps=1, lr=1.0).tailor(z)
    assert isinstance(state["weight"], LowRank)
    for i, query in enumerate(z.split(1)):
        (expected,) = torch.autograd.grad(size(model, query).sum(), model.weight)
        torch.testing.assert_close(state["weight"].dense()[i], -expected, **EXACT)


def test_complex_numbers_of_ordinary_precision_need_no_copies():
    linear = [nn.Linear(a, b, dtype=torch.complex64) for a, b in ((3, 8), (8, 3))]
    model, z = nn.Sequential(linear[0], Bent(), linear[1]), numbers(4, 3).to(torch.complex64)
    tailored = Tailored(model, size, adapt=Weights(), steps=3, lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        answers = tailored(z)
    torch.testing.assert_close(answers, tailored.replace(adapt=Weights(how="loop"))(z))


# States


def products(rank: int, queries: int = 3) -> LowRank:
    return LowRank(((rank, numbers(queries, rank, 4), numbers(queries, rank, 5)),))


@pytest.mark.parametrize("rank", [1, 3])
def test_the_algebra_of_complex_outer_products_is_that_of_their_matrices(rank):
    a, b = {"w": products(rank)}, {"w": products(2)}
    dense_a, dense_b = ({"w": entries.dense(entry["w"], (4, 5))} for entry in (a, b))
    for first, second in ((a, b), (a, dense_b), (dense_a, b)):
        found = states.dots(first, second)
        torch.testing.assert_close(found, (dense_a["w"].conj() * dense_b["w"]).real.sum((1, 2)), **EXACT)
        assert not found.is_complex()
    torch.testing.assert_close(states.square_norms(a), dense_a["w"].abs().square().sum((1, 2)), **EXACT)
    torch.testing.assert_close(states.square_norms(a), states.square_norms(dense_a), **EXACT)
    assert (rank * states.largest(a) >= (1 - 1e-12) * states.largest(dense_a)).all()
    torch.testing.assert_close(states.add(a, b)["w"].dense(), dense_a["w"] + dense_b["w"], **EXACT)
    torch.testing.assert_close(entries.dense(states.compact(a)["w"], (4, 5)), dense_a["w"], **EXACT)
    rows = torch.tensor([True, False, True])
    chosen = states.where(rows, a, b)["w"]
    torch.testing.assert_close(entries.dense(chosen, (4, 5)), torch.where(rows[:, None, None], dense_a["w"], dense_b["w"]), **EXACT)


def test_a_conjugate_that_is_only_noted_is_finite_or_not_as_any_number():
    t = torch.tensor([[1 + 1j], [complex(1, torch.nan)]]).conj()
    assert t.is_conj()
    assert states.finite({"w": t}).tolist() == [True, False]


# LBFGS, and theory.enough: complex weights against the same model with their two parts


class Spectral(nn.Module):
    """A convolution by its Fourier coefficients, kept as complex numbers, or as pairs of real ones."""

    def __init__(self, *, parts: bool):
        super().__init__()
        torch.manual_seed(0)
        weight = numbers(2, 2, 3) / 2
        self.weight = nn.Parameter(torch.view_as_real(weight) if parts else weight)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight if self.weight.is_complex() else torch.view_as_complex(self.weight)
        return torch.fft.irfft(torch.einsum("qim,iom->qom", torch.fft.rfft(x)[..., :3], weight), n=x.shape[-1])


def operator(*, parts: bool, layers: int = 1) -> nn.Sequential:
    torch.manual_seed(1)
    lift, lower = nn.Conv1d(1, 2, 1).double(), nn.Conv1d(2, 1, 1).double()
    return nn.Sequential(lift, *[Spectral(parts=parts) for _ in range(layers)], nn.Tanh(), lower)


def mass(model, u: Tensor) -> Tensor:
    return (model(u).square().mean((1, 2)) - u.mean((1, 2))).square()


@pytest.mark.parametrize("at", [(), ("1",), ("0", "1.weight")], ids=["all", "complex", "mixed"])
def test_lbfgs_takes_a_complex_number_for_two(at):
    u = torch.randn(3, 1, 8).double()
    ours, expected = (
        Tailored(operator(parts=parts), mass, adapt=Weights(*at, how="vmap"), optimizer=LBFGS(), steps=8).trace(u)
        for parts in (False, True)
    )
    torch.testing.assert_close(ours.losses, expected.losses, **EXACT)
    torch.testing.assert_close(ours.prediction, expected.prediction, **EXACT)
    assert ours.state["1.weight"].is_complex()
    assert (ours.losses.min(0).values < ours.losses[0]).all()


@pytest.mark.parametrize("loss", ["mass", "spectrum"])
def test_enough_counts_a_complex_number_as_two(loss):
    """As parameters, and as what the loss reads."""

    def spectrum(model, u):
        coefficients = model.output_of("2", u)
        coefficients = coefficients if coefficients.is_complex() else torch.view_as_complex(coefficients)
        return (coefficients - 1j).abs().square().sum((1, 2))

    def with_spectrum(parts):
        return nn.Sequential(*operator(parts=parts)[:2], Transform(parts=parts))

    u = torch.randn(2, 1, 8).double()
    made, what = (operator, mass) if loss == "mass" else (lambda parts: with_spectrum(parts), spectrum)
    ours, expected = (theory.enough(made(parts=parts), what, u, adapt=CN("0")) for parts in (False, True))
    for name in ("numbers", "rank", "weights_rank", "missing", "everywhere"):
        assert getattr(ours, name).tolist() == getattr(expected, name).tolist(), name
    for name in ("share", "weights_share", "condition"):
        torch.testing.assert_close(getattr(ours, name), getattr(expected, name), rtol=1e-6, atol=1e-9)
    assert ours.numbers.tolist() == [8, 8] if loss == "mass" else [20, 20]


class Transform(nn.Module):
    def __init__(self, *, parts: bool):
        super().__init__()
        self.parts = parts

    def forward(self, x: Tensor) -> Tensor:
        found = torch.fft.rfft(x)
        return torch.view_as_real(found) if self.parts else found


class Halved(nn.Module):
    """Mixed, in ordinary precision."""

    def __init__(self):
        super().__init__()
        self.a, self.c, self.b = nn.Linear(3, 8), nn.Linear(4, 4, dtype=torch.complex64), nn.Linear(8, 3)

    forward = Mixed.forward


@pytest.mark.parametrize("name", ["a real model with a complex layer", "an answer that is a conjugate"])
def test_the_trial_of_the_rules_takes_complex_numbers_of_any_precision(name):
    model, x, loss = Halved(), torch.randn(4, 3), real_size
    if name == "an answer that is a conjugate":
        model, x, loss = nn.Sequential(nn.Linear(3, 4, dtype=torch.complex64), Conjugate()), numbers(4, 3).to(torch.complex64), size
    tailored = Tailored(model, loss, adapt=Weights(), steps=3, lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        answers = tailored(x)
    torch.testing.assert_close(answers, tailored.replace(adapt=Weights(how="loop"))(x))
