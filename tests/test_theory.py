"""The paper's statements on cases whose answer is known."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from nets import architecture, mlp
from torch import Tensor, nn
from torch.nn import functional as F

from tailoring import CN, LBFGS, Tailored, Weights, theory

ACTIVATIONS = [nn.Sigmoid, nn.Tanh, nn.Softplus]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def network(units: tuple[int, ...] = (6, 6), outputs: int = 1, act: type[nn.Module] = nn.Tanh, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    sizes = [4, *units]
    hidden = [layer for a, b in itertools.pairwise(sizes) for layer in (nn.Linear(a, b), act())]
    return nn.Sequential(*hidden, nn.Linear(sizes[-1], outputs)).double()


def views_of(x: Tensor) -> Tensor:
    """(queries, 4) -> (queries, 3, 4), views of equal norm"""
    return torch.stack([x, -x, x.flip(1)], 1)


VIEWS = views_of(randn(1, 4, seed=1))[0]


class TestLastLayer:
    def test_the_matrix_is_the_derivative_of_the_answers(self):
        layer = theory.last_layer(network(outputs=2), VIEWS)
        ones, zeros = torch.ones(6, dtype=torch.float64), torch.zeros(6, dtype=torch.float64)
        by_gamma, by_beta = torch.autograd.functional.jacobian(layer.answers, (ones, zeros))
        torch.testing.assert_close(layer.matrix, torch.cat([by_gamma, by_beta], 2).flatten(0, 1))

    def test_answers_at_the_start_are_the_models(self):
        net = network(outputs=2)
        layer = theory.last_layer(net, VIEWS)
        torch.testing.assert_close(layer.answers(torch.ones(6), torch.zeros(6)), net(VIEWS).detach())

    @pytest.mark.parametrize("act", ACTIVATIONS)
    def test_any_targets_are_reached_through_the_library(self, act):
        net, targets = network(act=act), 10 * randn(3, seed=5)
        layer = theory.last_layer(net, VIEWS)
        assert layer.reaches_all
        model = Tailored(net, lambda model, x: model(x).square().sum(1), adapt=layer.adapt)
        torch.testing.assert_close(model.predict(VIEWS, layer.state(targets)).detach()[:, 0], targets)

    def test_models_of_low_precision_are_served(self):
        layer = theory.last_layer(network().bfloat16(), VIEWS.bfloat16())
        assert layer.reaches_all
        torch.testing.assert_close(layer.answers(*layer.solve(torch.ones(3)))[:, 0], torch.ones(3), rtol=1e-3, atol=1e-3)

    def test_the_solution_is_the_one_nearest_to_the_start(self):
        layer = theory.last_layer(network(), VIEWS)
        gamma, beta = layer.solve(randn(3))
        change = torch.cat([gamma - 1, beta])
        null = torch.linalg.svd(layer.matrix).Vh[layer.rank :]  # what changes no answer
        assert len(null) == 9
        torch.testing.assert_close(null @ change, torch.zeros(9, dtype=torch.float64))

    @pytest.mark.parametrize(("units", "outputs", "views"), [(1, 1, 2), (1, 1, 3), (2, 1, 3), (4, 2, 3), (3, 2, 3), (3, 3, 2), (6, 2, 4)])
    def test_the_rank_is_what_units_outputs_and_views_allow(self, units, outputs, views):
        layer = theory.last_layer(network((6, units), outputs), randn(views, 4))
        assert layer.rank == min(views * outputs, units + outputs)
        assert layer.reaches_all == (units >= outputs * (views - 1))

    def test_a_rank_that_is_missing_is_refused_with_the_remedy(self):
        layer = theory.last_layer(network((6, 1)), VIEWS)
        with pytest.raises(ValueError, match=r"rank 2, and any answers need rank 3 = 3 views \* 1 outputs.*Weights"):
            layer.solve(torch.zeros(3))
        assert layer.condition == math.inf

    def test_the_model_must_end_in_a_linear_layer(self):
        with pytest.raises(ValueError, match="something follows it"):
            theory.last_layer(nn.Sequential(*network(), nn.Sigmoid()), VIEWS)
        with pytest.raises(ValueError, match="has none that runs"):
            theory.last_layer(nn.Sequential(nn.Tanh()), VIEWS)
        with pytest.raises(ValueError, match=r"\(3, 1\) \(views, outputs\), not \(2, 1\)"):
            theory.last_layer(network(), VIEWS).solve(torch.zeros(2))

    def test_a_functional_activation_leaves_cn_no_place(self):
        class Functional(nn.Module):
            def __init__(self):
                super().__init__()
                self.hidden, self.out = nn.Linear(4, 6), nn.Linear(6, 1)

            def forward(self, x):
                return self.out(torch.tanh(self.hidden(x)))

        layer = theory.last_layer(Functional().double(), VIEWS)
        gamma, beta = layer.solve(torch.ones(3))
        torch.testing.assert_close(layer.answers(gamma, beta)[:, 0], torch.ones(3, dtype=torch.float64))
        with pytest.raises(ValueError, match="make it a module"):
            _ = layer.adapt

    def test_an_activation_that_runs_several_times_is_adapted_at_its_last_call(self):
        act = nn.Tanh()
        net = nn.Sequential(nn.Linear(4, 6), act, nn.Linear(6, 6), act, nn.Linear(6, 1)).double()
        layer, targets = theory.last_layer(net, VIEWS), randn(3)
        model = Tailored(net, lambda model, x: model(x).square().sum(1), adapt=layer.adapt)
        torch.testing.assert_close(model.predict(VIEWS, layer.state(targets)).detach()[:, 0], targets)


class TestExpressivityTheorem:
    """`thm:expresivity` and `corollary:expresivity`"""

    floor = 0.7  # the least value of the joint loss below, over all answers

    def joint(self, model, x):
        """A loss of the answers to all views at once; its infimum over answers is `floor`."""
        answers = model(views_of(x).flatten(0, 1)).reshape(len(x), 3)
        wanted = torch.tensor([1.0, -2.0, 0.5], dtype=answers.dtype)
        return (answers - wanted).square().sum(1) + self.floor

    def lowest(self, net, adapt) -> Tensor:
        return Tailored(net, self.joint, adapt=adapt, optimizer=LBFGS(), steps=150).trace(randn(2, 4, seed=1)).losses.min(0).values

    def test_the_infimum_over_cn_is_that_over_all_parameters(self):
        net = network()
        assert theory.conditions(net, VIEWS)
        over_cn, over_all = self.lowest(net, CN(nn.Tanh)), self.lowest(net, Weights(how="vmap"))
        torch.testing.assert_close(over_cn, torch.full_like(over_cn, self.floor))
        torch.testing.assert_close(over_all, over_cn)

    def degenerate(self) -> nn.Sequential:
        net = network()
        with torch.no_grad():
            net[0].weight.zero_()  # all views look the same: no scale or shift of any layer can tell them apart
        return net

    def test_it_fails_for_degenerate_weights(self):
        net = self.degenerate()
        assert theory.last_layer(net, VIEWS).rank == 1
        over_cn, over_all = self.lowest(net, CN(nn.Tanh)), self.lowest(net, Weights(how="vmap"))
        wanted = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
        equal_answers = self.floor + (wanted - wanted.mean()).square().sum()  # what is best if all views must have one answer
        torch.testing.assert_close(over_cn, equal_answers.expand(2))
        torch.testing.assert_close(over_all, torch.full_like(over_all, self.floor))

    def test_noise_mends_them_and_less_noise_leaves_worse_conditions(self):
        layers = [theory.last_layer(theory.with_noise(self.degenerate(), std), VIEWS) for std in (1e-1, 1e-3)]
        assert all(layer.reaches_all for layer in layers)
        assert 10 * layers[0].condition < layers[1].condition

    def test_noise_leaves_the_model_itself_alone(self):
        net = network()
        before = net(VIEWS)
        assert not torch.equal(theory.with_noise(net, 0.1)(VIEWS), before)
        assert torch.equal(net(VIEWS), before)

    def test_as_printed_the_loss_needs_no_condition_but_a_last_layer_that_is_not_zero(self):
        """A sum over views of one function of (answer, x) is least where all answers are equal, which beta alone can make them."""
        net = self.degenerate()

        def printed(model, x):
            answers = model(views_of(x).flatten(0, 1)).reshape(len(x), 3)
            return (answers - x.sum(1, keepdim=True)).square().sum(1) + self.floor

        for adapt in (CN(nn.Tanh), Weights(how="vmap")):
            losses = Tailored(net, printed, adapt=adapt, optimizer=LBFGS(), steps=150).trace(randn(2, 4)).losses.min(0).values
            torch.testing.assert_close(losses, torch.full_like(losses, self.floor))

    @pytest.mark.parametrize("seed", range(5))
    def test_no_weights_serve_all_queries_at_once(self, seed):
        """The views x and -x of a query in the kernel of the first layer: the conditions hold, and the rank is missing."""
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1)).double()
        kernel = torch.linalg.svd(net[0].weight.detach()).Vh[2]
        unlucky, lucky = torch.stack([kernel, -kernel]), torch.stack([randn(3), -randn(3)])
        assert theory.conditions(net, unlucky)
        assert theory.last_layer(net, unlucky).rank == 1
        assert theory.last_layer(net, lucky).reaches_all

    def test_the_conditions_are_not_necessary(self):
        """x and 2x violate the one on the views, three units that on the width, GELU that on the activation."""
        x = randn(4)
        views = torch.stack([x, 2 * x, -x, 3 * x])
        net = network((3, 3), act=nn.GELU)
        found = theory.conditions(net, views)
        assert not found
        assert found.gap < 0
        assert found.distinct
        assert len(found.missing) == 3
        assert theory.last_layer(net, views).reaches_all

    def test_relu_fails_on_a_set_of_positive_measure(self):
        """Around weights whose units are all dead at every view, all weights have rank one."""
        net = network(act=nn.ReLU)
        with torch.no_grad():
            net[0].bias.fill_(-20)
            net[2].bias.fill_(-20)
        for seed in range(5):
            assert theory.last_layer(theory.with_noise(net, 0.5, seed=seed), VIEWS).rank == 1


class TestConditions:
    def test_of_views_of_equal_norm_the_gap_is_half_the_squared_distance(self):
        views = F.normalize(randn(5, 7), dim=1)
        distances = [(a - b).square().sum() / 2 for a, b in itertools.combinations(views, 2)]
        assert theory.augmentation_gap(views) == pytest.approx(float(min(distances)))
        assert theory.augmentation_gap(views[:1]) == math.inf

    def test_orthogonal_views_need_no_equal_norm(self):
        assert theory.augmentation_gap(torch.diag(torch.tensor([1.0, 3.0, 2.0]))) == 1

    def test_equal_views_are_named(self):
        found = theory.conditions(network(), VIEWS[[0, 1, 1]])
        assert not found.distinct
        assert "equal views" in str(found)

    def test_blocks_of_blocks_are_seen_through_and_others_are_not(self):
        class Skip(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(4, 4)

            def forward(self, x):
                return x + self.layer(x)

        nested = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 1)).double()
        assert theory.conditions(nested, VIEWS).fully_connected
        assert theory.last_layer(nested, VIEWS).site == "0.1"  # the innermost
        assert not theory.conditions(nn.Sequential(Skip(), nn.Tanh(), nn.Linear(4, 1)).double(), VIEWS).fully_connected

    def test_what_is_missing_is_named(self):
        found = theory.conditions(nn.Sequential(*network((2, 5), 2, nn.ReLU)[:-1], nn.LayerNorm(5), nn.Linear(5, 2)).double(), VIEWS)
        text = str(found)
        for part in ("not made of linear layers", "2 outputs", "(2, 5) units, fewer than 3 views", "ReLU: not analytic"):
            assert part in text
        assert "no hidden layer" in str(theory.conditions(nn.Linear(4, 1).double(), VIEWS))

    @pytest.mark.parametrize(
        ("act", "analytic", "increasing", "bounded"),
        [
            *((kind(), True, True, True) for kind in ACTIVATIONS),
            (nn.Softplus(beta=3), True, True, True),
            (nn.ReLU(), False, True, True),
            (nn.LeakyReLU(), False, True, False),
            (nn.PReLU(), False, True, False),
            (nn.GELU(), True, False, True),
            (nn.SiLU(), True, False, True),
            (nn.LogSigmoid(), True, True, False),
            (torch.atan, None, True, True),
            (torch.neg, None, False, False),
        ],
    )
    def test_activations(self, act, analytic, increasing, bounded):
        facts = theory.activation_facts(act)
        assert (facts.analytic, facts.increasing, facts.bounded_below) == (analytic, increasing, bounded)
        assert bool(facts) == (analytic is True and increasing and bounded)


class TestSeparatingNetwork:
    """The construction in the proof of `thm:expresivity`."""

    @pytest.mark.parametrize("depth", [1, 2, 4])
    @pytest.mark.parametrize("act", ACTIVATIONS)
    def test_corrected_it_has_full_rank_at_any_depth(self, act, depth):
        net = theory.separating_network(VIEWS, act(), depth)
        layer = theory.last_layer(net, VIEWS)
        assert theory.conditions(net, VIEWS)
        above = layer.features - act()(torch.tensor(-1e4, dtype=torch.float64))
        assert (2 * above.diag() > above.sum(1)).all()  # strictly diagonally dominant, as the proof wants it
        own = torch.eye(3, dtype=torch.bool)
        zero = act()(torch.tensor(0.0, dtype=torch.float64))
        assert (layer.features[own] > zero).all()  # a unit is on for its own view, and off for the others
        assert (layer.features[~own] < zero).all()
        assert layer.reaches_all

    @pytest.mark.parametrize(("act", "top", "works"), [(torch.sigmoid, 1.0, True), (torch.tanh, 1.0, True), (F.softplus, math.inf, False)])
    def test_as_printed_it_fails_for_softplus_from_two_hidden_layers_on(self, act, top, works):
        """b^(l) = alpha (c' / 2 - sigma_+), with c' below sigma_+ - sigma_-"""
        gap, alpha, spread = theory.augmentation_gap(VIEWS), 50.0, 0.9
        dots = VIEWS @ VIEWS.mT
        first = act(alpha * (dots - dots.diag() + gap / 2))
        second = act(alpha * first + alpha * (spread / 2 - top))
        ones = torch.ones(3, 1, dtype=torch.float64)
        assert torch.linalg.matrix_rank(torch.cat([first, ones], 1)) == 3
        assert (torch.linalg.matrix_rank(torch.cat([second, ones], 1)) == 3) == works

    def test_what_it_cannot_do_is_refused(self):
        with pytest.raises(ValueError, match="for all i != j"):
            theory.separating_network(torch.stack([VIEWS[0], 2 * VIEWS[0]]), nn.Tanh(), 1)
        with pytest.raises(ValueError, match="GELU: analytic, not increasing"):
            theory.separating_network(VIEWS, nn.GELU(), 1)
        with pytest.raises(ValueError, match="depth=0"):
            theory.separating_network(VIEWS, nn.Tanh(), 0)


class TestEnough:
    @staticmethod
    def spread(model, x):
        """Distinct targets for the three views: a loss that needs to tell them apart."""
        answers = model(views_of(x).flatten(0, 1)).unflatten(0, (len(x), 3))
        return (answers - torch.arange(3.0, dtype=answers.dtype)[:, None]).square().sum((1, 2))

    def test_a_wide_network_is_free_everywhere(self):
        found = theory.enough(network(outputs=2), self.spread, randn(3, 4))
        assert found
        assert found.everywhere.all()
        assert found.numbers.tolist() == [6, 6, 6] == found.rank.tolist()
        torch.testing.assert_close(found.share, torch.ones(3))
        assert "is enough (" in str(found)

    def test_a_narrow_one_is_not(self):
        net, x = network((6, 2), outputs=2), randn(3, 4)
        last = theory.enough(net, self.spread, x, adapt=CN("3"))
        assert not last
        assert last.rank.tolist() == [4, 4, 4]  # units + outputs
        assert last.weights_rank.tolist() == [6, 6, 6]
        assert last.missing.tolist() == [2, 2, 2]
        assert (last.share < 0.999).all()
        torch.testing.assert_close(last.weights_share, torch.ones(3))
        assert "cannot do all that Weights() can" in str(last)

    def test_its_numbers_are_those_of_the_last_layer(self):
        net, x = network((6, 2), outputs=2), randn(1, 4, seed=1)
        layer = theory.last_layer(net, VIEWS)
        found = theory.enough(net, self.spread, x, adapt=layer.adapt)
        assert found.rank.item() == layer.rank
        gradient = 2 * (net(VIEWS) - torch.arange(3.0)[:, None]).detach().flatten()
        inside = layer.matrix @ torch.linalg.pinv(layer.matrix) @ gradient
        assert found.share.item() == pytest.approx(float(inside.square().sum() / gradient.square().sum()))

    def test_of_a_blind_network_the_share_is_that_of_the_mean(self):
        """All views have one answer, so of a gradient g only its mean can be followed."""
        net = network()
        with torch.no_grad():
            net[0].weight.zero_()
        found = theory.enough(net, self.spread, randn(1, 4, seed=1), weights=Weights("0.weight", how="loop"))
        gradient = 2 * (net(VIEWS) - torch.arange(3.0)[:, None]).detach()
        assert (found.rank.item(), found.numbers.item()) == (1, 3)
        assert found.share.item() == pytest.approx(float(gradient.mean().square() / gradient.square().mean()))

    def test_earlier_layers_may_mend_it_but_to_first_order_only(self):
        found = theory.enough(network((8, 2), outputs=2), self.spread, randn(2, 4))
        assert found
        assert not found.everywhere.any()
        assert "to first order" in str(found)

    def test_one_answer_per_query_needs_no_more_units_than_outputs(self):
        for units, free in ((3, True), (2, False)):
            found = theory.enough(network((5, units), outputs=3), lambda model, x: model(x).square().sum(1), randn(2, 4), adapt=CN("3"))
            assert found.everywhere.all().item() == free

    def test_directions_are_compared_not_only_counted(self):
        """CN on one branch and Weights on the other have the same rank and reach different answers."""

        class Branches(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b = (nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)) for _ in range(2))

            def forward(self, x):
                return torch.cat([self.a(x), self.b(x)], 1)

        torch.manual_seed(0)
        found = theory.enough(
            Branches().double(), lambda m, x: m(x).square().sum(1), randn(1, 4), adapt=CN("a.1"), weights=Weights("b.*", how="loop")
        )
        assert found.rank.item() == found.weights_rank.item() == found.missing.item() == 1
        assert not found

    def test_features_count_as_what_is_read(self):
        found = theory.enough(network((6, 5)), lambda model, x: model.output_of("1", x).square().sum(1), randn(1, 4))
        assert found.numbers.item() == 6

    def test_two_numbers_per_channel_do_not_move_a_field_freely(self):
        net, args, _ = architecture("unet")  # GroupNorm layers of 4 and 8 channels, an answer of 8 x 8
        found = theory.enough(net, lambda model, x: model(x).square().sum((1, 2, 3)), args[0][:1])
        assert (found.numbers.item(), found.rank.item(), found.weights_rank.item()) == (64, 2 * (4 + 8), 64)
        assert found.missing.item() == 64 - 24

    def test_it_may_be_asked_in_inference_mode(self):
        net, x = network((6, 2), outputs=2), randn(2, 4)
        with torch.inference_mode():
            inside = theory.enough(net, self.spread, x.clone(), adapt=CN("3"))
        outside = theory.enough(net, self.spread, x, adapt=CN("3"))
        assert torch.equal(inside.share, outside.share)

    def test_on_a_resnet(self):
        net, args, _ = architecture("resnet")
        found = theory.enough(net, lambda model, x: model(x).square().sum(1), args[0][:2])
        assert found
        assert not found.everywhere.any()  # a ReLU follows the last BatchNorm layer

    def test_what_it_cannot_do_is_refused(self):
        net, x = network(), randn(2, 4)
        with pytest.raises(ValueError, match="reads nothing from the model"):
            theory.enough(net, lambda model, x: x.sum(1), x)
        with pytest.raises(ValueError, match="keeps outer products"):
            theory.enough(net, lambda model, x: model(x).sum(1), x, weights=Weights())
        with pytest.raises(ValueError, match="no query"):
            theory.enough(net, lambda model, x: model(x).sum(1), x[:0])
        with pytest.raises(ValueError, match="5000 numbers of a query"):
            theory.enough(network(outputs=5000), lambda model, x: model(x).sum(1), x)


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

    def test_a_model_that_ignores_its_data_is_perfectly_stable(self):
        found = self.measure(train=lambda x, y: torch.zeros(1, dtype=y.dtype))
        assert found.zeta == found.zeta_theta == found.lipschitz == 0

    def test_what_does_not_fit_is_refused(self):
        with pytest.raises(ValueError, match="'vmap' or 'loop', not 'pool'"):
            self.measure(how="pool")
        with pytest.raises(ValueError, match="as many x as y"):
            theory.measure_stability(mean_model, squared_error, (randn(3), randn(2)), replacements=self.replacements, probes=self.probes)


class TestCosineCondition:
    def test_of_a_quadratic_loss_the_ratio_is_one_over_the_rate(self):
        def pull(theta, x):
            return (theta - x).square().sum() / 2

        for rate, closer in ((0.5, True), (1.9, True), (2.1, False)):
            found = theory.pulls_closer(pull, randn(3), randn(3, seed=1), randn(4, 3, seed=2), lr=rate)
            torch.testing.assert_close(found.ratio, torch.full((4,), 1 / rate, dtype=torch.float64))
            torch.testing.assert_close(found.after, abs(1 - rate) * found.before.expand(4))
            assert (found.closer == closer).all()

    def test_it_is_exact_both_ways(self):
        def wavy(theta, x):
            return (3 * theta["w"] * x).sin().sum() + theta["b"].cos().sum()

        for seed in range(20):
            theta, other = ({"w": randn(3, seed=seed + s), "b": randn(2, seed=seed + s)} for s in (100, 200))
            found = theory.pulls_closer(wavy, theta, other, randn(10, 3, seed=seed), lr=0.5)
            assert torch.equal(found.closer, found.after < found.before)

    def test_a_loss_that_moves_nothing_pulls_nothing(self):
        found = theory.pulls_closer(lambda theta, x: theta.sum(), randn(3), randn(3, seed=1), randn(2, 3), lr=0.1)
        assert not found.closer.any()
        assert not found.ratio.any()
        torch.testing.assert_close(found.after, found.before.expand(2))


LOSSES = [theory.hinge, theory.logistic]


class TestContrastive:
    """`lemma:contrastive` and `thm:cont_3`; everything about the data is known."""

    def problem(self, seed: int = 0, queries: int = 6, units: int = 3):
        rho = torch.rand(queries, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        return {
            "features": randn(queries, units, seed=seed),
            "positives": randn(queries, 4, units, seed=seed + 1000),
            "negatives": randn(queries, 5, units, seed=seed + 2000),
            "negative_labels": torch.stack([rho, 1 - rho], 1),
        }

    @pytest.mark.parametrize("loss", LOSSES)
    def test_it_is_the_definition_written_with_loops(self, loss):
        given, head = self.problem(), randn(2, 3, seed=9)
        found = theory.contrastive_tailoring_loss(head=head, loss=loss, **given)
        for q in range(6):
            h, rho = given["features"][q], given["negative_labels"][q]
            pairs = [loss(h @ (p - n)) for p in given["positives"][q] for n in given["negatives"][q]]
            examples = torch.stack(pairs).mean()
            by_label = [sum(rho[other] * loss((head[y] - head[other]) @ h) for other in (0, 1)) for y in (0, 1)]
            labels = max(by_label) - loss((given["positives"][q].mean(0) - given["negatives"][q].mean(0)) @ h)
            value = (examples + labels - rho.min()) / (1 - rho.max())
            for ours, theirs in ((found.examples, examples), (found.labels, labels), (found.value, value)):
                torch.testing.assert_close(ours[q], theirs)

    @pytest.mark.parametrize("loss", LOSSES)
    @pytest.mark.parametrize("scale", [0.1, 1.0, 10.0])
    def test_the_lemma_holds_at_every_query(self, loss, scale):
        for seed in range(50):
            given, head = self.problem(seed), scale * randn(2, 3, seed=seed + 3000)
            p = torch.rand(6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            value = theory.contrastive_tailoring_loss(head=head, loss=loss, **given).value
            task = theory.expected_task_loss(given["features"], head, torch.stack([p, 1 - p], 1), loss)
            assert (task <= value + 1e-12).all()

    @pytest.mark.parametrize("loss", LOSSES)
    def test_with_known_labels_it_holds_too_and_is_tighter(self, loss):
        for seed in range(50):
            given, head = self.problem(seed), randn(2, 3, seed=seed + 3000)
            y = torch.randint(2, (6,), generator=torch.Generator().manual_seed(seed))
            known = theory.contrastive_tailoring_loss(head=head, loss=loss, labels=y, **given)
            task = theory.expected_task_loss(given["features"], head, F.one_hot(y, 2), loss)
            assert (task <= known.value + 1e-12).all()
            assert (known.value <= theory.contrastive_tailoring_loss(head=head, loss=loss, **given).value + 1e-12).all()

    @pytest.mark.parametrize("loss", LOSSES)
    def test_with_both_labels_it_is_never_below_one(self, loss):
        """So the lemma promises no less than a model that always answers 0 has."""
        for seed in range(200):
            given, head = self.problem(seed), 3 * randn(6, 2, 3, seed=seed + 3000)
            found = theory.contrastive_tailoring_loss(head=head, loss=loss, **given)
            assert (found.value >= (1 - found.rho_low) / (1 - found.rho_high) - 1e-12).all()
        known = theory.contrastive_tailoring_loss(  # the label known, a head that is right: below one
            torch.ones(1, 1), torch.tensor([[2.0], [0.0]]), positives=torch.full((1, 1, 1), 2.0), negatives=torch.zeros(1, 1, 1),
            negative_labels=torch.tensor([[0.0, 1.0]]), loss=loss, labels=(0,),
        )  # fmt: skip
        assert known.value < 1

    @pytest.mark.parametrize("loss", LOSSES)
    def test_it_is_convex_in_the_last_layer(self, loss):
        given = self.problem()

        def of_head(head):
            return theory.contrastive_tailoring_loss(head=head, loss=loss, **given).value.sum()

        assert theory.convexity_gap(of_head, randn(2, 3), scale=3.0) <= 1e-9
        assert theory.convexity_gap(lambda head: -of_head(head), randn(2, 3), scale=3.0) > 1e-3

    @pytest.mark.parametrize("labels", [(0, 1), (0,), (1,)])
    def test_the_infimum_over_heads_is_reached_and_never_passed(self, labels):
        given = self.problem(queries=3)
        h = given["features"]

        def total(head):
            found = theory.contrastive_tailoring_loss(head=head, loss=theory.logistic, labels=labels, **given)
            return found.examples + found.labels, found.infimum

        # a head acts through its margin m alone: [m h / |h|^2, 0] is one head for each margin
        unit = torch.stack([h / h.square().sum(1, keepdim=True), torch.zeros_like(h)], 1)
        values = torch.stack([total(m * unit)[0] for m in torch.linspace(-40, 40, 401, dtype=torch.float64)])
        infimum = total(unit)[1]
        torch.testing.assert_close(values.min(0).values, infimum)
        for seed in range(20):
            assert (total(3 * randn(3, 2, 3, seed=seed))[0] >= infimum - 1e-12).all()

    def test_the_inequality_of_the_theorem_depends_on_the_examples(self):
        """Positives like the query, negatives unlike it: with both labels allowed no head gets below `examples`."""
        h = torch.ones(1, 2, dtype=torch.float64)
        positives, negatives = h[:, None].expand(1, 3, 2), -h[:, None].expand(1, 3, 2)
        even = torch.full((1, 2), 0.5)
        given = {"negative_labels": even, "loss": theory.logistic}
        apart = theory.contrastive_tailoring_loss(h, torch.zeros(2, 2), positives=positives, negatives=negatives, **given)
        assert not apart.holds
        same = theory.contrastive_tailoring_loss(h, torch.zeros(2, 2), positives=negatives, negatives=negatives, **given)
        assert same.holds
        torch.testing.assert_close(same.infimum, same.examples)

    def test_the_proofs_head_works_where_the_label_is_known_and_never_among_the_negatives(self):
        """theta^(H+1) = U = (u+, u-) makes the second part zero."""
        given = self.problem() | {"negative_labels": torch.tensor([[0.0, 1.0]]).expand(6, 2)}
        means = torch.stack([given["positives"].mean(1), given["negatives"].mean(1)], 1)
        found = theory.contrastive_tailoring_loss(head=means, loss=theory.logistic, labels=(0,), **given)
        torch.testing.assert_close(found.labels, torch.zeros(6, dtype=torch.float64))
        assert found.holds.all()

    def test_the_printed_logistic_loss_rewards_wrong_answers(self):
        def printed(margin):
            return torch.log2(1 + margin.exp())

        right, wrong = torch.tensor(2.0), torch.tensor(-2.0)
        assert printed(right) > printed(wrong)
        for loss in LOSSES:
            assert loss(right) < loss(wrong)
            assert loss(torch.tensor(0.0)) == printed(torch.tensor(0.0)) == 1
            assert theory.convexity_gap(lambda z, loss=loss: loss(z).sum(), torch.zeros(5, dtype=torch.float64)) <= 1e-12

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"positives": torch.zeros(6, 4, 2)}, r"positives must have shape \(6, examples, 3\), not \(6, 4, 2\)"),
            ({"negative_labels": torch.ones(6, 2)}, "probabilities"),
            ({"negative_labels": torch.tensor([[0.0, 1.0]]).expand(6, 2)}, "rho_high must be below 1"),
            ({"labels": (0, 2)}, "chosen from 0 and 1"),
            ({"labels": torch.zeros(3)}, "one for each of the 6 queries"),
            ({"loss": lambda z: F.softplus(-z)}, "must be 1 at margin 0.*not 0.6931"),
        ],
    )
    def test_what_does_not_fit_is_refused(self, change, message):
        with pytest.raises(ValueError, match=message):
            theory.contrastive_tailoring_loss(head=randn(2, 3), **(self.problem() | change))

    @pytest.mark.usefixtures("seeded")
    def test_a_list_of_labels_is_a_set(self):
        features, head, others = torch.randn(4, 3), torch.randn(2, 3), torch.randn(4, 2, 3)
        with pytest.raises(ValueError, match="a tensor has one for each query"):
            theory.contrastive_tailoring_loss(
                features, head, positives=others, negatives=others, negative_labels=torch.full((4, 2), 0.5), labels=[0, 1, 1, 0]
            )


def test_every_public_name_says_what_it_is():
    names = [name for name in vars(theory) if not name.startswith("_")]
    assert names
    assert all((getattr(theory, name).__doc__ or "").strip() for name in names)


def test_every_statement_of_the_paper_is_named_in_a_docstring():
    text = " ".join(getattr(theory, name).__doc__ for name in vars(theory) if not name.startswith("_"))
    for label in ("thm:expresivity", "corollary:expresivity", "a:activation", "thm:cont_1", "thm:cont_2", "thm:cont_3", "coro:gen_1"):
        assert label in text
    for label in ("def:stability", "lemma:contrastive", "lemma:gen_1", "lemma:gen_2"):
        assert label in text


def test_it_leaves_the_model_as_it_was():
    net = mlp()
    before = {name: set(vars(module)) for name, module in net.named_modules()}
    theory.last_layer(net, VIEWS)
    theory.enough(net, lambda model, x: model(x).square().sum(1), VIEWS)
    assert before == {name: set(vars(module)) for name, module in net.named_modules()}
    assert all(p.grad is None for p in net.parameters())


def test_a_complexity_is_never_below_zero():
    """The mean over draws of one model's sums is about zero, on either side of it."""
    found = [theory.empirical_rademacher(torch.rand(1, 100, generator=torch.Generator().manual_seed(i)), seed=i) for i in range(8)]
    assert min(found) == 0.0 < max(found) < 0.01
    assert theory.rademacher_bound(0.1, complexity=min(found), c=1.0, n=100, delta=0.1).supervised > 0.1


@pytest.mark.parametrize("empirical", [-0.1, 1.5, float("nan")])
def test_a_mean_loss_that_cannot_be_is_refused(empirical):
    with pytest.raises(ValueError, match="lie in \\[0, c\\]"):
        theory.stability_bound(empirical, zeta=1.0, c=1.0, n=10, delta=0.1)
