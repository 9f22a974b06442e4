"""The paper's statements on contrastive losses and gradients that agree, and what all of the theory's tools have in common."""

from __future__ import annotations

import pytest
import torch
from nets import mlp
from theory_cases import VIEWS, randn
from torch.nn import functional as F

from tailoring import theory


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
        with pytest.raises(ValueError, match="at least one direction, not 0"):
            theory.convexity_gap(of_head, randn(2, 3), directions=0)

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
