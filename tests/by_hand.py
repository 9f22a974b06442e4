"""The formula of every tailoring loss written out with loops, for one query at a time, and small models to try them on."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from tailoring import CN, Support, random
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
