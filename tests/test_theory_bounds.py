"""The paper's bounds on cases whose answer is known: Rademacher complexities, unlabelled losses, stability."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from theory_cases import randn
from torch import Tensor

from tailoring import theory


class TestBounds:
    def test_stability_bound_at_a_confidence_that_makes_the_root_one(self):
        n, zeta, c = 7, 0.3, 2.0
        bound = theory.stability_bound(0.1, zeta=zeta, c=c, n=n, delta=math.exp(-2 * n))
        assert float(bound) == pytest.approx(0.1 + zeta / n + 2 * zeta + c)

    def test_rademacher_bound_at_such_a_confidence(self):
        n, c = 7, 2.0
        delta = math.exp(-2 * n)
        assert float(theory.rademacher_bound(0.1, complexity=0.2, c=c, n=n, delta=delta)) == pytest.approx(0.1 + 0.4 + c)
        measured = theory.rademacher_bound(0.1, complexity=0.2, c=c, n=n, delta=2 * delta, measured=True)
        assert float(measured) == pytest.approx(0.1 + 0.4 + 3 * c)

    def test_kappa_mixes_and_the_best_is_at_an_end(self):
        settings = {"zeta": 0.3, "c": 1.0, "n": 50, "delta": 0.1}
        for unlabelled in (0.05, 5.0):
            bounds = [theory.stability_bound(0.1, **settings, unlabelled=unlabelled, kappa=k / 10) for k in range(11)]
            assert float(bounds[0]) == bounds[0].supervised == float(theory.stability_bound(0.1, **settings))
            assert float(bounds[-1]) == unlabelled
            assert float(bounds[3]) == pytest.approx(0.3 * unlabelled + 0.7 * bounds[0].supervised)
            assert bounds[3].best == min(map(float, bounds))
        assert theory.stability_bound(0.1, **settings).best == float(bounds[0])

    def test_tensors_of_one_number_are_as_good(self):
        settings = {"c": 1.0, "n": 50, "delta": 0.1, "unlabelled": 2.0, "kappa": 0.3}
        for bound, size in ((theory.stability_bound, {"zeta": 0.3}), (theory.rademacher_bound, {"complexity": 0.3})):
            expected = bound(0.25, **settings, **size)
            found = bound(
                torch.tensor(0.25), **{name: torch.tensor(value, dtype=torch.float64) for name, value in (settings | size).items()}
            )
            assert float(found) == pytest.approx(float(expected))
            assert all(type(value) is float for value in (found.best, found.complexity, found.deviation, found.unlabelled, found.kappa))

    def test_it_holds_as_often_as_it_says(self):
        """theta = mean of y in [0, 1], loss (theta - y)^2: a point moves theta by 1/n at most, and the loss by 2/n."""
        n, delta, rounds = 20, 0.5, 2000
        y = torch.rand(rounds, n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        theta = y.mean(1)
        expected, seen = 1 / 12 + (theta - 0.5).square(), (theta[:, None] - y).square().mean(1)
        bound = theory.stability_bound(0.0, zeta=2.0, c=1.0, n=n, delta=delta)
        assert (expected > seen + float(bound)).double().mean() <= delta
        assert (expected > seen).double().mean() > delta  # the empirical loss alone is no such bound

    def test_losses_below_zero_break_the_printed_condition(self):
        """Losses -1 or 0 are at most c = 0, and a fixed model has zeta = 0: the bound would be the empirical loss itself."""
        losses = -torch.randint(2, (4000, 11), generator=torch.Generator().manual_seed(0)).double()
        delta = 0.1
        as_printed = float(theory.stability_bound(0.0, zeta=0.0, c=0.0, n=11, delta=delta))
        by_range = float(theory.stability_bound(0.0, zeta=0.0, c=1.0, n=11, delta=delta))  # c = 1, the losses' range
        failures = [(losses.mean(1) + extra < -0.5).double().mean() for extra in (as_printed, by_range)]
        assert failures[0] > delta > failures[1]

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"n": 0}, "at least 1, not 0"),
            ({"delta": 0.0}, "between 0 and 1, not 0.0"),
            ({"kappa": 1.5, "unlabelled": 1.0}, r"\[0, 1\], not 1.5"),
            ({"kappa": 0.5}, "give it as unlabelled="),
            ({"zeta": -1.0}, "zeta must be at least 0"),
            ({"c": math.nan}, "c must be at least 0"),
        ],
    )
    def test_settings_without_meaning_are_refused(self, change, message):
        with pytest.raises(ValueError, match=message):
            theory.stability_bound(0.1, **({"zeta": 1.0, "c": 1.0, "n": 10, "delta": 0.1} | change))


class TestRademacher:
    def test_one_model_has_none(self):
        assert theory.empirical_rademacher(torch.rand(1, 8, dtype=torch.float64)) == pytest.approx(0, abs=1e-12)

    def test_models_with_all_patterns_of_zero_and_one_have_one_half(self):
        losses = torch.tensor(list(itertools.product((0.0, 1.0), repeat=6)), dtype=torch.float64)
        assert theory.empirical_rademacher(losses) == pytest.approx(0.5)

    def test_of_a_model_and_its_opposite_it_is_the_mean_distance_of_a_walk(self):
        n = 6
        exact = sum(math.comb(n, k) * abs(n - 2 * k) for k in range(n + 1)) / 2**n / n
        losses = torch.stack([torch.ones(n), -torch.ones(n)]).double()
        assert theory.empirical_rademacher(losses) == pytest.approx(exact)
        drawn = [theory.empirical_rademacher(losses, draws=2**n - 1, seed=seed) for seed in (0, 1)]  # too few for all signs
        assert drawn == pytest.approx([exact, exact], abs=0.15)
        assert drawn[0] != drawn[1]

    def test_draws_agree_with_all_signs(self):
        losses = torch.rand(5, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        assert theory.empirical_rademacher(losses, draws=4000) == pytest.approx(theory.empirical_rademacher(losses), rel=0.05)

    def test_losses_need_two_dimensions(self):
        with pytest.raises(ValueError, match=r"\(models, n\), not \(3,\)"):
            theory.empirical_rademacher(torch.ones(3))

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_a_model_that_diverged_is_refused(self, bad):
        with pytest.raises(ValueError, match="losses must be finite"):
            theory.empirical_rademacher(torch.tensor([[0.1, 0.2], [bad, 0.3]]))

    @pytest.mark.usefixtures("seeded")
    @pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64])
    @pytest.mark.parametrize("n", [4, 20])
    def test_losses_of_zero_and_one_have_a_complexity(self, dtype, n):
        found = torch.randint(2, (3, n))
        assert theory.empirical_rademacher(found.to(dtype)) == theory.empirical_rademacher(found.float())


class TestUnlabelledLoss:
    """`coro:gen_1`"""

    def test_the_envelope_is_the_least_increasing_function_above(self):
        tailoring, task = torch.tensor([3.0, 1.0, 2.0]), torch.tensor([4.0, 2.0, 1.0])
        phi = theory.monotone_envelope(tailoring, task)
        assert phi(torch.tensor([0.0, 1.0, 1.5, 2.0, 3.0, 9.0])).tolist() == [2, 2, 2, 2, 4, 4]

    def test_it_bounds_every_example_whatever_parameters_it_had(self):
        tailoring, task = randn(50).abs(), randn(50, seed=1).abs()
        phi = theory.monotone_envelope(tailoring, task)
        assert (phi(tailoring) >= task).all()
        with pytest.raises(ValueError, match="one tailoring and one task loss per example"):
            theory.monotone_envelope(tailoring, task[:3])

    def test_on_average_is_not_enough_where_each_query_has_its_own_parameters(self):
        """Rows are two parameters, columns two queries: for either parameter the means agree, and phi may be the identity."""
        task, tailoring = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[0.0, 1.0], [1.0, 0.0]])
        assert (task.mean(1) <= tailoring.mean(1)).all()
        chosen = tailoring.argmin(0)  # tailoring: each query takes the parameter that its own loss prefers
        tailored = [t.gather(0, chosen[None]).mean() for t in (task, tailoring)]
        assert tailored[0] > tailored[1]
        phi = theory.monotone_envelope(tailoring.flatten(), task.flatten())  # at every query: the bound holds again
        assert phi(tailoring.gather(0, chosen[None])).mean() >= tailored[0]


def mean_model(x: Tensor, y: Tensor) -> Tensor:
    return y.mean(0, keepdim=True)


def squared_error(theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return (theta - y).square().sum()


def linear_model(x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Ten steps of gradient descent on a linear model."""
    theta = {"w": torch.zeros_like(x[0]), "b": torch.zeros_like(y[0])}

    def loss(theta: dict[str, Tensor]) -> Tensor:
        return (x @ theta["w"] + theta["b"] - y).square().mean()

    for _ in range(10):
        grads = torch.func.grad(loss)(theta)
        theta = {name: theta[name] - 0.1 * grads[name] for name in theta}
    return theta


class TestStability:
    data = randn(6, 2), randn(6, seed=1)
    replacements = randn(3, 2, seed=2), randn(3, seed=3)
    probes = randn(4, 2, seed=4), randn(4, seed=5)

    def measure(self, train=mean_model, loss=squared_error, **settings):
        return theory.measure_stability(train, loss, self.data, replacements=self.replacements, probes=self.probes, **settings)

    def test_of_a_mean_everything_is_known(self):
        found = self.measure()
        y, new, probes = self.data[1], self.replacements[1], self.probes[1]
        assert found.parameter_changes.shape == (6, 3, 4)
        assert found.zeta_theta == pytest.approx(float((new[None] - y[:, None]).abs().max()))
        before, after = y.mean(), y.mean() + (new[None] - y[:, None]) / 6
        losses = ((after[..., None] - probes).square() - (before - probes).square()).abs()
        torch.testing.assert_close(found.loss_changes, losses)
        assert found.zeta == pytest.approx(6 * float(losses.max()))

    @pytest.mark.parametrize("rate", [0.5, 1.5, 2.5])
    def test_a_step_towards_the_query_scales_parameter_stability(self, rate):
        """L_tailor = |theta - x_1|^2 / 2 pulls theta_S and theta_S' together by 1 - rate."""
        plain, tailored = self.measure(), self.measure(tailor=lambda theta, x: theta - rate * (theta - x[:1]))
        assert tailored.zeta_theta == pytest.approx(abs(1 - rate) * plain.zeta_theta)

    def test_vmap_and_loop_agree(self):
        def loss(theta, x, y):
            return (x @ theta["w"] + theta["b"] - y).square()

        fast, slow = self.measure(linear_model, loss, chunk=4), self.measure(linear_model, loss, how="loop")
        torch.testing.assert_close(fast.loss_changes, slow.loss_changes)
        torch.testing.assert_close(fast.parameter_changes, slow.parameter_changes)
        assert fast.zeta <= fast.lipschitz * fast.zeta_theta

    def test_the_lipschitz_constant_is_found(self):
        found = self.measure(loss=lambda theta, x, y: 3 * theta.sum())
        assert found.lipschitz == pytest.approx(3)
        assert found.zeta == pytest.approx(3 * found.zeta_theta)

    def test_a_training_that_diverged_has_no_constant(self):
        found = self.measure(train=lambda x, y: y.mean(0, keepdim=True) * math.inf)
        assert math.isnan(found.zeta_theta)
        assert math.isnan(found.lipschitz)

    def test_a_model_that_ignores_its_data_is_perfectly_stable(self):
        found = self.measure(train=lambda x, y: torch.zeros(1, dtype=y.dtype))
        assert found.zeta == found.zeta_theta == found.lipschitz == 0

    def test_what_does_not_fit_is_refused(self):
        with pytest.raises(ValueError, match="'vmap' or 'loop', not 'pool'"):
            self.measure(how="pool")
        with pytest.raises(ValueError, match="as many x as y"):
            theory.measure_stability(mean_model, squared_error, (randn(3), randn(2)), replacements=self.replacements, probes=self.probes)
