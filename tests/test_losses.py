"""Every tailoring loss against its formula written out with loops, one query at a time."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from tailoring import CN, Support, Tailored, random
from tailoring import losses as L

NAN = math.nan


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def filled(module: nn.Module, seed: int = 1) -> Any:
    for number, p in enumerate(module.double().parameters()):
        p.data = 0.7 * drawn(*p.shape, seed=100 * seed + number)
    return module


def mlp(inputs: int = 3) -> Any:
    return filled(nn.Sequential(nn.Linear(inputs, 4), nn.Tanh(), nn.Linear(4, 3)))


def image_net() -> Any:
    return filled(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)))


class Reader(nn.Module):
    """A model whose query is a place with measurements there."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, query: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.net(query["place"])


def energy(y):
    return y.square().sum(-1)


def moments(y):
    return torch.stack([y.sum(-1), y[:, 0] * y[:, 1]], -1)


def cycled(y):
    return y.roll(1, -1)


def equation(y, x):
    return y.cumsum(-1) - x


def smoothing(residual):
    return residual / torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)


def first_two(y, query):
    return y[:, :2]


def measured(query):
    return query["measured"]


def jitter(rows, seeds):
    return rows + 0.3 * random.normal(seeds, rows.shape[1:], rows.dtype)


# By hand: each takes a model and a batch of one query, and returns a number.


def answer(net, q) -> list[float]:
    return net(q)[0].flatten().tolist()


def norm(v):
    return math.sqrt(sum(a * a for a in v))


def cosine(a, b):
    return sum(p * q for p, q in zip(a, b, strict=True)) / (norm(a) * norm(b))


def softmax(v):
    return [math.exp(a) / sum(math.exp(b) for b in v) for a in v]


def entropy(p):
    return -sum(a * math.log(a) for a in p)


def mean(v):
    return sum(v) / len(v)


def hand_energy(net, q, power):
    return abs(sum(a * a for a in answer(net, q)) - sum(a * a for a in q[0].tolist())) ** power


def hand_moments(net, q):
    y, x = answer(net, q), q[0].tolist()
    return 1 * abs(sum(y) - sum(x)) + 10 * abs(y[0] * y[1] - x[0] * x[1])


def hand_equivariant(net, q):
    y = answer(net, q)
    turned = zip(answer(net, q[:, [2, 0, 1]]), [y[2], y[0], y[1]], strict=True)
    flipped = zip(answer(net, -q), y, strict=True)
    return mean([mean([(a - b) ** 2 for a, b in pairs]) for pairs in (list(turned), list(flipped))])


def hand_residual(net, q, scales):
    y, x = answer(net, q), q[0].tolist()
    return mean([((sum(y[: j + 1]) - x[j]) / scales[j]) ** 2 for j in range(3)])


def hand_misfit(net, q):
    errors = [((a - b) / 0.5) ** 2 for a, b in zip(answer(net, q)[:2], q["measured"][0].tolist(), strict=True) if b == b]
    return mean(errors) if errors else 0.0


def hand_regression(net, task):
    pairs = [(answer(net, x[None]), y.tolist()) for x, y in zip(task.x[0], task.y[0], strict=True)]
    return mean([mean([(a - b) ** 2 for a, b in zip(*pair, strict=True)]) for pair in pairs])


def hand_classification(net, task):
    return mean([-math.log(softmax(answer(net, x[None]))[y]) for x, y in zip(task.x[0], task.y[0].tolist(), strict=True)])


def view(q, copies, k):
    return jitter(q, random.per_row(random.seeds_of(q), copies)[k : k + 1])


def hand_agree(net, q):
    z = [answer(net, view(q, 3, k)) for k in range(3)]
    return mean([1 - cosine(z[a], z[b]) for a in range(3) for b in range(3) if a != b])


def hand_contrast(net, q):
    z = [answer(lambda v: HEAD(net[:2](v)), view(q, 2, k)) for k in range(2)]
    positive = math.exp(cosine(*z) / 0.2)
    others = [sum(math.exp(cosine(a, n) / 0.2) for n in NEGATIVES.tolist()) for a in z]
    return mean([-math.log(positive / (positive + other)) for other in others])


def hand_smooth(net, q):
    noise = random.normal(random.seeds_of(q), (2, 3), torch.float64)[0]
    return mean([1 - cosine(answer(net[:2], q), answer(net[:2], q + 0.1 * delta)) for delta in noise])


def hand_marginal(net, q):
    p = [softmax(answer(net, view(q, 4, k))) for k in range(4)]
    return entropy([mean(column) for column in zip(*p, strict=True)])


def hand_rotation(net, q):
    image, losses = q[0, 0].tolist(), []
    for quarters in range(4):
        logits = TURNS(net[:2](torch.tensor([[image]], dtype=torch.float64)).flatten(1))[0].tolist()
        losses.append(-math.log(softmax(logits)[quarters]))
        image = [[image[j][3 - i] for j in range(4)] for i in range(4)]
    return mean(losses)


def hand_entropy(net, q):
    return entropy(softmax(answer(net, q)))


def statistics(net, q) -> list[tuple[float, float]]:
    channels = [c.flatten().tolist() for c in net[0](q)[0]]
    return [(mean(c), math.sqrt(mean([(a - mean(c)) ** 2 for a in c]))) for c in channels]


def hand_align(net, q):
    return mean(
        [((m - mu) / s) ** 2 + ((d - s) / s) ** 2 for (m, d), mu, s in zip(statistics(net, q), [0.2, -0.1], [0.5, 1.5], strict=True)]
    )


def hand_worst_case(net, q, grid, weighted, ascent=4, eps=0.8):
    def inside(delta):
        return delta if norm(delta.tolist()) <= eps else delta * eps / norm(delta.tolist())

    size = q.shape[1]
    line = [2 * k / (grid - 1) - 1 for k in range(grid)] if grid > 1 else [0.0]
    starts = torch.tensor([[a, b] for a in line for b in line], dtype=q.dtype)
    if size > 2:
        starts = random.normal(random.seeds_of(q), (grid**2, size), q.dtype)[0] / math.sqrt(size) if grid > 1 else torch.zeros(1, size)
    ends = []
    for delta in map(inside, eps * starts):
        for step in range(ascent):
            point = (q[0] + delta).requires_grad_()
            with torch.enable_grad():
                slope = torch.autograd.grad(net(point[None]).exp().sum().log(), point)[0]
            delta = inside(delta + 2 * eps / (step + 2) * slope / norm(slope.tolist()))
        logits = answer(net, q + delta)
        ends.append((sum(math.exp(f) for f in logits), softmax(logits)))
    total = sum(density for density, _ in ends)
    target = [sum(density / total * p[j] for density, p in ends) for j in range(3)] if weighted else max(ends)[1]
    return sum(p * math.log(p / t) for p, t in zip(softmax(answer(net, q)), target, strict=True))


HEAD, TURNS = filled(nn.Linear(4, 2), 2), filled(nn.Linear(8, 4), 3)
NEGATIVES = drawn(5, 2, seed=4)
PLACES = drawn(4, 3, seed=5)
PLANE = drawn(4, 2, seed=6)
IMAGES = drawn(3, 1, 4, 4, seed=7)
MEASURED = {"place": PLACES, "measured": torch.tensor([[1.0, 2.0], [NAN, 0.5], [0.3, NAN], [-1.0, 1.0]], dtype=torch.float64)}
REGRESSION = Support(drawn(3, 2, 3, seed=8), drawn(3, 2, 3, seed=9))
CLASSES = Support(drawn(3, 2, 3, seed=8), torch.tensor([[0, 2], [1, 1], [2, 0]]))


class Case(NamedTuple):
    loss: Callable[..., Any]
    by_hand: Callable[..., float]
    x: Any = PLACES
    net: Callable[[], Any] = mlp
    adapt: CN = CN(nn.Tanh)


CASES = {
    "conserve": Case(L.Conserve(energy), partial(hand_energy, power=1)),
    "conserve l2": Case(L.Conserve(energy, norm="l2"), partial(hand_energy, power=2)),
    "conserve several": Case(L.Conserve(moments, weights=[1, 10]), hand_moments),
    "conserve before": Case(L.Conserve(torch.square, before=torch.abs, norm="l2"), lambda net, q: sum((net(q)[0] ** 2 - q[0].abs()) ** 2)),
    "equivariant": Case(L.Equivariant([(cycled, cycled), (torch.neg, None)]), hand_equivariant),
    "residual": Case(L.Residual(equation), partial(hand_residual, scales=[1, 1, 1])),
    "residual preconditioned": Case(L.Residual(equation, precondition=smoothing), partial(hand_residual, scales=[1, 2, 4])),
    "misfit": Case(L.Misfit(first_two, measured, sigma=0.5), hand_misfit, MEASURED, Reader),
    "supervised regression": Case(L.Supervised(F.mse_loss), hand_regression, REGRESSION),
    "supervised classification": Case(L.Supervised(F.cross_entropy), hand_classification, CLASSES),
    "agree": Case(L.Agree(jitter, 3), hand_agree),
    "agree against others": Case(L.Agree(jitter, at="1", head=HEAD, negatives=NEGATIVES, temperature=0.2), hand_contrast),
    "smooth": Case(L.Smooth(0.1, at=L.input_of("2"), views=2), hand_smooth),
    "marginal entropy": Case(L.MarginalEntropy(jitter, 4), hand_marginal),
    "rotation": Case(L.Rotation(TURNS, at="1"), hand_rotation, IMAGES, image_net),
    "entropy": Case(L.Entropy(), hand_entropy),
    "align": Case(
        L.Align(torch.tensor([0.2, -0.1]).double(), torch.tensor([0.5, 1.5]).double(), at="0"), hand_align, IMAGES, image_net, CN("0")
    ),
    "worst case": Case(L.WorstCase(0.8, grid=3, ascent=4), partial(hand_worst_case, grid=3, weighted=False), PLANE, partial(mlp, 2)),
    "worst case weighted": Case(
        L.WorstCase(0.8, grid=3, ascent=4, weighted=True), partial(hand_worst_case, grid=3, weighted=True), PLANE, partial(mlp, 2)
    ),
    "worst case from the query": Case(L.WorstCase(0.8, grid=1, ascent=4), partial(hand_worst_case, grid=1, weighted=False)),
    "worst case in space": Case(L.WorstCase(0.8, grid=2, ascent=4), partial(hand_worst_case, grid=2, weighted=False)),
}
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


# Where the target is sought anew at each step (WorstCase) or the loss has a kink (l1), no step size makes the fall certain.
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
    torch.testing.assert_close(value(L.Entropy(), dense, PLACES), value(L.Entropy(), mlp(), PLACES))
    both = torch.cat([PLACES, PLACES.flip(0)], 1)
    parts = value(L.Entropy(), mlp(), PLACES) + value(L.Entropy(), mlp(), PLACES.flip(0))
    for loss in (L.Entropy(), L.MarginalEntropy(lambda rows, _: rows, 2)):
        torch.testing.assert_close(value(loss, pair, both), parts)


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
    found = net.seen[-2].reshape(8, 25, 2)  # the ends of all ascents; the last call is at the queries themselves
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
    net, x = Gaussians(), torch.tensor([[-0.5, 0.9]]).double()
    for grid, density in ((1, -2.0), (5, -1.0)):
        value(L.WorstCase(3.0, grid=grid), net, x, CN("densities"))
        assert (net(net.seen[-2]).logsumexp(-1).max() > density) == (grid == 5)
