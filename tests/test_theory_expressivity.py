"""The expressivity theorem on networks whose answer is known: last layers, conditions, enough units."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from nets import architecture
from theory_cases import ACTIVATIONS, VIEWS, network, randn, views_of
from torch import Tensor, nn
from torch.nn import functional as F

from tailoring import CN, LBFGS, Tailored, Weights, theory


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

    @pytest.mark.parametrize(
        ("units", "outputs", "views"),
        [(1, 1, 2), (1, 1, 3), (2, 1, 3), (4, 2, 3), (3, 2, 3), (3, 3, 2), (6, 2, 4), (2, 3, 1), (3, 3, 1), (2, 3, 2), (2, 4, 3)],
    )
    def test_the_rank_is_what_units_outputs_and_views_allow(self, units, outputs, views):
        layer = theory.last_layer(network((6, units), outputs), randn(views, 4))
        least = min(units, outputs)
        assert layer.rank == min(views * least, units + least)
        assert layer.reaches_all == (units >= outputs * (views - 1) and units >= outputs)

    def test_a_rank_that_is_missing_is_refused_with_the_remedy(self):
        layer = theory.last_layer(network((6, 1)), VIEWS)
        with pytest.raises(ValueError, match=r"rank 2, and any answers need rank 3 = 3 views \* 1 outputs.*Weights"):
            layer.solve(torch.zeros(3))
        with pytest.raises(ValueError, match=r"at least as many units before the last layer as outputs and as outputs \* \(views - 1\)"):
            theory.last_layer(network((6, 2), 3), VIEWS[:1]).solve(torch.zeros(1, 3))
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

    @pytest.mark.parametrize("act", ACTIVATIONS)
    def test_it_runs_on_views_of_less_precision(self, act):
        views = VIEWS.float()
        layer = theory.last_layer(theory.separating_network(views, act(), 3), views)
        assert layer.features.dtype == torch.float32
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
        with pytest.raises(ValueError, match="nan or infinite for a query"):
            theory.enough(net, lambda model, x: model(x).sum(1), torch.where(torch.arange(2)[:, None] == 1, torch.nan, x))
        mixing = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).double()
        with pytest.raises(ValueError, match=r"is in training mode: .* Call model.eval\(\)"):
            theory.enough(mixing, lambda model, x: model(x).sum(1), x)
        with pytest.raises(ValueError, match="no query"):
            theory.enough(net, lambda model, x: model(x).sum(1), x[:0])
        with pytest.raises(ValueError, match="5000 numbers of a query"):
            theory.enough(network(outputs=5000), lambda model, x: model(x).sum(1), x)
