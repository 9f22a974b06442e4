"""Every tailoring loss against its formula written out by hand, and what all of them have in common."""

import copy
import math
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from by_hand import (
    CASES,
    IMAGES,
    MEASURED,
    NAN,
    PLACES,
    Reader,
    drawn,
    energy,
    filled,
    first_two,
    image_net,
    jitter,
    mean,
    measured,
    mlp,
    moments,
    statistics,
)
from nets import small
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from tailoring import CN, Inputs, Support, Tailored
from tailoring import losses as L

every_loss = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def each(x) -> list[Any]:
    count = len(pytree.tree_leaves(x)[0])
    return [pytree.tree_map(lambda t, i=i: t[i : i + 1], x) for i in range(count)]


def value(loss, net, x, adapt=None) -> torch.Tensor:
    """The loss of each query as a tailored model sees it before its first step."""
    return Tailored(net, loss, adapt=adapt or CN(nn.Tanh), steps=0).trace(x).losses[0]


@every_loss
def test_the_batched_loss_is_its_formula_query_by_query(case):
    net = case.net()
    with torch.no_grad():
        expected = [float(case.by_hand(net, q)) for q in each(case.x)]
    values = value(case.loss, net, case.x, case.adapt)
    assert values.shape == (len(expected),)
    torch.testing.assert_close(values, torch.tensor(expected, dtype=torch.float64))


@every_loss
def test_a_query_has_the_same_loss_alone_and_among_others_in_any_order(case):
    net = case.net()
    alone = torch.cat([value(case.loss, net, q, case.adapt) for q in each(case.x)])
    backwards = pytree.tree_map(lambda t: t.flip(0), case.x)
    torch.testing.assert_close(value(case.loss, net, case.x, case.adapt), alone)
    torch.testing.assert_close(value(case.loss, net, backwards, case.adapt).flip(0), alone)


@every_loss
def test_a_model_tailored_by_it_moves_and_answers_each_query_on_its_own(case):
    model = Tailored(case.net(), case.loss, adapt=case.adapt, steps=2, lr=1e-2)
    before, _, after = model.path(case.x)
    torch.testing.assert_close(after, torch.cat([model(q) for q in each(case.x)]))
    moved = (after - before).flatten(1).norm(dim=1)
    assert (moved > 1e-8).all()


# WorstCase seeks its target anew at each step: it may rise though every step is downhill.
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not isinstance(case.loss, L.WorstCase)])
def test_two_small_steps_lower_the_loss_of_every_query(name):
    case = CASES[name]
    losses = Tailored(case.net(), case.loss, adapt=case.adapt, steps=2, lr=1e-4).trace(case.x).losses
    assert (losses.diff(dim=0) < 0).all()


def test_a_query_without_any_measurement_is_answered_untailored():
    x = MEASURED | {"measured": MEASURED["measured"].clone()}
    x["measured"][1] = NAN
    net = Reader()
    model = Tailored(net, L.Misfit(first_two, measured), adapt=CN(nn.Tanh), steps=2, lr=0.1)
    trace = model.trace(x)
    assert trace.losses[:, 1].tolist() == [0, 0, 0]
    torch.testing.assert_close(trace.prediction[1], net(x)[1], rtol=0, atol=0)
    torch.testing.assert_close(trace.prediction[[0, 2, 3]], model(MEASURED)[[0, 2, 3]])


def test_a_class_that_is_ruled_out_adds_nothing_to_an_entropy():
    class Without(nn.Module):
        def __init__(self, last):
            super().__init__()
            self.net, self.last = mlp(), last

        def forward(self, x):
            return torch.cat([self.net(x)[:, :2], torch.full_like(x[:, :1], -math.inf)], 1)[:, : self.last]

    for loss in (L.Entropy(), L.MarginalEntropy(jitter), L.WorstCase(0.5, ascent=3)):
        masked, cut = (Tailored(Without(last), loss, steps=2, lr=0.1).trace(PLACES) for last in (3, 2))
        assert not masked.failed.any()
        torch.testing.assert_close(masked.losses, cut.losses)


def test_entropies_of_dense_predictions_add_up_over_the_positions():
    dense = nn.Sequential(mlp(), nn.Unflatten(1, (1, 3)))
    pair = nn.Sequential(nn.Unflatten(1, (2, 3)), mlp())
    torch.testing.assert_close(value(L.Entropy(classes=-1), dense, PLACES), value(L.Entropy(), mlp(), PLACES))
    both = torch.cat([PLACES, PLACES.flip(0)], 1)
    parts = value(L.Entropy(), mlp(), PLACES) + value(L.Entropy(), mlp(), PLACES.flip(0))
    for loss in (L.Entropy(classes=-1), L.MarginalEntropy(lambda rows, _: rows, 2, classes=-1)):
        torch.testing.assert_close(value(loss, pair, both), parts)


@pytest.mark.usefixtures("seeded")
def test_the_classes_of_an_image_are_where_they_are_said_to_be():
    net, x = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 3, padding=1)), torch.randn(2, 1, 6, 6)
    p = net(x).softmax(1)
    same = L.MarginalEntropy(lambda rows, _: rows, 2, classes=1)
    for loss in (L.Entropy(classes=1), same):
        torch.testing.assert_close(Tailored(net, loss).trace(x).losses[0], -(p * p.log()).sum((1, 2, 3)))
    with pytest.raises(ValueError, match=r"which dimension of logits of shape \(2, 3, 6, 6\) holds the classes"):
        Tailored(net, L.Entropy())(x)
    with pytest.raises(ValueError, match="holds the queries"):
        Tailored(net, L.Entropy(classes=-4))(x)


@pytest.mark.parametrize("loss", [L.Smooth, partial(L.Agree, jitter), partial(L.MarginalEntropy, jitter)])
def test_noise_is_drawn_anew_at_each_step_only_if_it_is_asked_for(loss):
    arguments = {"nu": 0.1} if loss is L.Smooth else {}
    kept, fresh = (
        Tailored(mlp(), loss(**arguments, fresh=fresh), adapt=CN(nn.Tanh), steps=2, lr=0.0).trace(PLACES).losses for fresh in (False, True)
    )
    assert (kept == kept[0]).all()
    assert all(len(set(column)) == 3 for column in fresh.mT.tolist())


def test_measured_statistics_are_means_over_all_inputs_of_all_batches():
    net = image_net()
    loss = L.Align.measured(net, [IMAGES[:2], Inputs(IMAGES[2:])], at="0")
    by_channel = list(zip(*(statistics(net, q) for q in each(IMAGES)), strict=True))
    torch.testing.assert_close(loss.mean, torch.tensor([mean([m for m, _ in c]) for c in by_channel], dtype=torch.float64))
    torch.testing.assert_close(loss.std, torch.tensor([mean([d for _, d in c]) for c in by_channel], dtype=torch.float64))
    assert not net[0]._forward_hooks
    assert "mean" not in str(Tailored(net, loss).state_dict().keys())


class Gaussians(nn.Module):
    """The classes' log-densities in the plane, as in the appendix' toy example."""

    def __init__(self, spread: float = 1.0):
        super().__init__()
        self.seen: list[torch.Tensor] = []
        self.spread, self.densities = spread, nn.Identity()

    def forward(self, x):
        self.seen.append(x.detach())
        mean, std = x.new_tensor([[-2.0, 0.0], [2.0, 0.5]]), self.spread * x.new_tensor([[1.0, 0.3], [0.5, 1.5]])
        return self.densities(-((x[:, None] - mean) / std).square().sum(-1) / 2 - std.log().sum(-1))


@pytest.mark.parametrize("eps", [0.3, 1.0, 3.0])
def test_the_worst_case_is_the_likeliest_point_of_the_ball(eps):
    net, x = Gaussians(), 1.5 * drawn(8, 2, seed=11)
    losses = value(L.WorstCase(eps, ascent=60), net, x, CN("densities"))
    found = net.seen[-3].reshape(8, 25, 2)  # the ends of all ascents, before the loss and the answer at the queries themselves
    radius, angle = torch.meshgrid(torch.linspace(0, eps, 151), torch.linspace(0, 2 * math.pi, 361), indexing="ij")
    ball = torch.stack([radius * angle.cos(), radius * angle.sin()], -1).reshape(-1, 2).double()
    assert ((found - x[:, None]).norm(dim=-1) <= eps * (1 + 1e-12)).all()
    for i in range(8):
        density = net(found[i]).logsumexp(-1)
        everywhere = net(x[i] + ball).logsumexp(-1)
        assert density.max() > everywhere.max() - 0.02
        assert (found[i][density.argmax()] - x[i] - ball[everywhere.argmax()]).norm() < 0.05 * eps
        log_p, log_q = net(x[i : i + 1])[0].log_softmax(-1), net(found[i][density.argmax()][None])[0].log_softmax(-1)
        torch.testing.assert_close(losses[i], (log_p.exp() * (log_p - log_q)).sum())


def test_a_single_start_can_miss_the_likeliest_point_that_a_grid_finds():
    net, x = Gaussians(), torch.tensor([[0.8, 0.6]], dtype=torch.float64)
    value(L.WorstCase(4.0, grid=1), net, x, CN("densities"))
    alone = net(net.seen[-3]).logsumexp(-1).max()
    value(L.WorstCase(4.0, grid=5), net, x, CN("densities"))
    assert net(net.seen[-3]).logsumexp(-1).max() > alone + 0.5


def test_the_worst_case_counts_odds_too_small_for_the_numbers_type():
    """Log-densities of -200 are no rarity: in float32 their probabilities are zero."""

    class Steep(nn.Module):
        def forward(self, x):
            return torch.stack([100 * x[:, 0], 100 - 100 * x[:, 0]], 1)

    net = nn.Sequential(Steep(), nn.Identity())
    losses = value(L.WorstCase(2.0, grid=1, ascent=1), net, torch.tensor([[0.505, 0.0]]), CN("1"))
    p = 1 / (1 + math.exp(-1))  # log-odds of 1 at 0.505, and of 401 where the ascent ends, at 2.505
    torch.testing.assert_close(losses, torch.tensor([p * math.log(p) + (1 - p) * (math.log(1 - p) + 401)]))


def mean_entropy(model, x):
    p = model(x).softmax(-1)
    return -(p * p.log()).mean(-1)


def test_losses_add_and_scale():
    net, a, b = mlp(), L.Conserve(energy), L.Entropy()
    first, second = value(a, net, PLACES), value(b, net, PLACES)
    third = value(mean_entropy, net, PLACES)
    for loss, expected in (
        (a + 2 * b, first + 2 * second),
        (b * 0.5 + a, first + second / 2),
        (torch.tensor(3.0, dtype=torch.float64) * b, 3 * second),
        (sum([a, b, b]), first + 2 * second),
        (a + mean_entropy, first + third),
        (mean_entropy + a, first + third),
        (sum([a, mean_entropy]), first + third),
        (2 * L.Loss(mean_entropy), 2 * third),
        (3 * (a + b) + a, 4 * first + 3 * second),
    ):
        torch.testing.assert_close(value(loss, net, PLACES), expected)


class Flow(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = mlp()

    def forward(self, x, dt, *, scale):
        return x + scale * dt * self.body(x)


@pytest.mark.parametrize(
    ("loss", "by_hand"),
    [
        (L.Conserve(energy), lambda y, x, dt, scale: (energy(y) - energy(x)).abs()),
        (
            L.Conserve(energy, before=lambda x, dt, scale: energy(x) + dt[:, 0]),
            lambda y, x, dt, scale: (energy(y) - energy(x) - dt[:, 0]).abs(),
        ),
        (L.Residual(lambda y, x, dt, scale: (y - x) / (scale * dt)), lambda y, x, dt, scale: ((y - x) / (scale * dt)).square().mean(1)),
        (L.Misfit(lambda y, x, dt, scale: y, lambda x, dt, scale: x + scale), lambda y, x, dt, scale: (y - x - scale).square().mean(1)),
    ],
)
def test_a_law_may_hold_for_a_model_of_several_inputs(loss, by_hand):
    torch.manual_seed(0)
    net, dt, scale = Flow().double(), torch.rand(len(PLACES), 1, dtype=torch.float64) + 0.1, torch.full((len(PLACES), 1), 0.5)
    asked = Inputs(PLACES, dt, scale=scale)
    trace = Tailored(net, loss, lr=1e-3).trace(asked)
    torch.testing.assert_close(trace.losses[0], by_hand(net(PLACES, dt, scale=scale), PLACES, dt, scale).detach())
    assert (trace.losses[1] < trace.losses[0]).all()


WRONG = {
    "a number added": (lambda: L.Entropy() + 1, TypeError, "added to a loss only, not to 1"),
    "added to a number": (lambda: 1 + L.Entropy(), TypeError, "added to a loss only"),
    "added to a tensor": (lambda: torch.zeros(2) + L.Entropy(), TypeError, "added to a loss only"),
    "nothing added": (lambda: L.Entropy() + None, TypeError, "added to a loss only, not to None"),
    "a product of losses": (lambda: L.Entropy() * L.Entropy(), TypeError, "multiplied by a number only"),
    "a word as weight": (lambda: "2" * L.Entropy(), TypeError, "multiplied by a number only, not by '2'"),
    "a weight per query": (lambda: torch.ones(3) * L.Entropy(), TypeError, "multiplied by a number only"),
    "a number as loss": (lambda: L.Loss(3), TypeError, "a tailoring loss is a function"),
    "norm": (lambda: L.Conserve(energy, norm="l3"), ValueError, "'l1' or 'l2', not 'l3'"),
    "no action": (lambda: L.Equivariant([]), ValueError, "at least one action"),
    "half an action": (lambda: L.Equivariant([torch.neg]), TypeError, "an action is a pair"),
    "sigma": (lambda: L.Misfit(first_two, measured, sigma=0.0), ValueError, "sigma must be positive, not 0.0"),
    "a sigma of each": (lambda: L.Misfit(first_two, measured, sigma=torch.ones(2)), TypeError, "sigma must be a number, not tensor"),
    "sigmas": (lambda: L.Misfit(first_two, measured, sigma=[1.0, 2.0]), TypeError, r"a number, not \[1.0, 2.0\]: where measurements have"),
    "one weight": (lambda: L.Conserve(energy, weights=3.0), TypeError, r"one for each quantity, such as \[3.0\], not a number"),
    "one view to agree": (lambda: L.Agree(jitter, 1), ValueError, "at least two views, not 1"),
    "temperature": (lambda: L.Agree(jitter, temperature=0), ValueError, "temperature must be positive, not 0"),
    "flat negatives": (lambda: L.Agree(jitter, negatives=torch.ones(3)), ValueError, r"shape \(n, d\), not \(3,\)"),
    "no noise": (lambda: L.Smooth(0.0), ValueError, "nu > 0"),
    "no noisy view": (lambda: L.Smooth(0.1, views=0), ValueError, "at least one view"),
    "no view": (lambda: L.MarginalEntropy(jitter, 0), ValueError, "at least one view, not 0"),
    "eps": (lambda: L.WorstCase(NAN), ValueError, "eps > 0"),
    "grid": (lambda: L.WorstCase(1.0, grid=0), ValueError, "grid >= 1"),
    "statistics": (lambda: L.Align(torch.zeros(2), torch.ones(3)), ValueError, r"shapes \(2,\) and \(3,\)"),
    "no deviation": (lambda: L.Align(torch.zeros(2), torch.tensor([1.0, 0.0])), ValueError, "smallest deviation 0.0"),
    "no batch": (lambda: L.Align.measured(image_net(), [], at="0"), ValueError, "no batch"),
    "a bare batch": (lambda: L.Align.measured(image_net(), IMAGES, at="0"), TypeError, r"give \[x\]"),
    "unknown module": (lambda: L.Align.measured(image_net(), [IMAGES], at="7"), ValueError, r"no module '7'; it has: 0 \(Conv2d\)"),
    "dropout": (lambda: L.Align.measured(nn.Sequential(nn.Dropout()), [IMAGES], at="0"), ValueError, "training mode"),
    "no positions": (lambda: value(L.Align(torch.zeros(3), torch.ones(3)), mlp(), PLACES), ValueError, "positions to average over"),
    "channels": (
        lambda: value(L.Align(torch.zeros(1), torch.ones(1), at="0"), image_net(), IMAGES),
        ValueError,
        "of 1 channels, .* have 2",
    ),
    "an abstract loss": (lambda: value(L.Loss(), mlp(), PLACES), NotImplementedError, "needs a function"),
    "a mean in a sum": (lambda: value(L.Entropy() + batch_mean, mlp(), PLACES), ValueError, r"shape \(4,\), but the second has shape \(\)"),
    "a mean conserved": (lambda: value(L.Conserve(torch.mean), mlp(), PLACES), ValueError, "a value for each query"),
    "other quantities": (lambda: value(L.Conserve(energy, before=moments), mlp(), PLACES), ValueError, r"\(4,\), but .* \(4, 2\)"),
    "weights": (lambda: value(L.Conserve(energy, weights=[1, 2]), mlp(), PLACES), ValueError, "2 weights for 1 quantities"),
    "a shape that would broadcast": (
        lambda: value(L.Misfit(first_two, lambda x: x["measured"][:, :1]), Reader(), MEASURED),
        ValueError,
        r"observed has shape \(4, 2\), but what was measured has shape \(4, 1\)",
    ),
    "another output": (lambda: value(L.Equivariant([(torch.neg, energy)]), mlp(), PLACES), ValueError, "image under the action"),
    "no function": (lambda: L.Conserve([energy]), TypeError, "quantity must be a function, not list"),  # type: ignore[arg-type]
    "measured numbers": (lambda: L.Misfit(energy, PLACES), TypeError, "measured must be a function, not Tensor"),  # type: ignore[arg-type]
    "two quantities": (
        lambda: value(L.Conserve(lambda x: (energy(x), energy(x))), mlp(), PLACES),
        TypeError,
        "must be a tensor, not tuple",
    ),
    "no support": (lambda: value(L.Supervised(F.mse_loss), mlp(), PLACES), TypeError, r"Support\(x, y\)"),
    "views": (lambda: value(L.Agree(lambda rows, _: rows[:4]), mlp(), PLACES), ValueError, "each of its 8 rows, not 4"),
    "oblong images": (lambda: value(L.Rotation(), nn.Tanh(), drawn(2, 1, 3, 4)), ValueError, r"square images.* not \(2, 1, 3, 4\)"),
    "three turns": (lambda: value(L.Rotation(), image_net(), IMAGES), ValueError, "four logits, not 3"),
    "a name for a head": (lambda: L.Rotation("fc"), TypeError, "told by at="),  # type: ignore[arg-type]
    "a single logit": (lambda: value(L.Entropy(), nn.Sequential(mlp(), nn.Linear(3, 1).double()), PLACES), ValueError, r"not \(4, 1\)"),
    "logits without classes": (lambda: value(L.Entropy(), nn.Sequential(mlp(), nn.Flatten(0)), PLACES), ValueError, r"classes\), not \("),
    "dense logits": (
        lambda: value(L.WorstCase(0.1, grid=1), nn.Sequential(mlp(), nn.Unflatten(1, (1, 3))), PLACES),
        ValueError,
        r"\(queries, classes\), not \(4, 1, 3\)",
    ),
}


def batch_mean(model, x):
    return model(x).mean()


@pytest.mark.parametrize(("make", "error", "words"), WRONG.values(), ids=WRONG.keys())
def test_what_makes_no_sense_is_refused_in_so_many_words(make, error, words):
    with pytest.raises(error, match=words):
        make()


@pytest.mark.usefixtures("seeded")
def test_targets_of_another_shape_do_not_mix_tasks():
    few = Tailored(small(2, 1), L.Supervised(F.mse_loss), steps=3, lr=0.1)
    x, y = torch.randn(3, 5, 2).double(), torch.randn(3, 5).double()
    with pytest.warns(UserWarning, match="target size"), pytest.raises(ValueError, match=r"shape \(15,\) has shape \(15, 15\)"):
        few.tailor(Support(x, y))
    assert few.tailor(Support(x, y[..., None])).keys() == {"1.gamma", "1.beta"}


@pytest.mark.usefixtures("seeded")
@pytest.mark.parametrize("loss", [L.Smooth, lambda _, at: L.Agree(lambda rows, _: rows, at=at)])
@pytest.mark.parametrize("length", [8, 9])
def test_features_without_the_queries_in_front_are_refused(loss, length):
    class TimeFirst(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.out = nn.GRU(3, 6), nn.Linear(6, 2)

        def forward(self, x):
            return self.out(self.encoder(x.transpose(0, 1))[0][-1])

    model = Tailored(TimeFirst(), loss(0.1, at="encoder"), adapt=CN("encoder"))
    with pytest.raises(ValueError, match=r"were read of .* rows, one for each view"):
        model(torch.randn(3, length, 3))


def composed() -> Tailored:
    contrast = L.Agree(jitter, at="1", head=filled(nn.Linear(4, 2)), negatives=drawn(5, 2))
    loss = sum([contrast, nn.Parameter(torch.tensor(0.5)) * L.Smooth(0.1), 2 * L.Conserve(energy) + mean_entropy])
    return Tailored(mlp(), loss, adapt=CN(nn.Tanh), steps=2, lr=0.1)


def test_the_parameters_of_a_loss_train_with_the_model_under_names_of_their_own():
    model = composed()
    own = {name: p for name, p in model.named_parameters() if name.startswith("tailoring.")}
    assert [name for name, _ in model.named_parameters() if name not in own] == [name for name, _ in mlp().named_parameters()]
    assert sorted(name.split(".")[-1] + str(tuple(p.shape)) for name, p in own.items()) == ["bias(2,)", "weight()", "weight(2, 4)"]
    model.replace(backprop="all")(PLACES).sum().backward()
    assert all(p.grad is not None and p.grad.norm() > 0 for p in own.values())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"])
def test_a_model_with_composed_losses_can_be_copied(copied):
    model = composed()
    expected = model(PLACES)
    other = copied(model)
    torch.testing.assert_close(other(PLACES), expected, rtol=0, atol=0)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    torch.testing.assert_close(model(PLACES), expected, rtol=0, atol=0)


def test_the_tensors_of_a_loss_move_with_the_model_and_stay_out_of_its_checkpoint():
    model = Tailored(mlp(), torch.tensor(2.0).double() * L.Agree(jitter, negatives=drawn(5, 3)), adapt=CN(nn.Tanh)).float()
    assert [b.dtype for b in model.buffers()] == [torch.float32] * 2
    assert model(PLACES.float()).dtype == torch.float32
    assert model.state_dict().keys() == mlp().state_dict().keys()
