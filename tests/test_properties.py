"""Laws 1, 2 and 4 on networks, losses and batches that nobody chose."""

from __future__ import annotations

import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tailoring import CN, Shift, Tailored, Weights
from tailoring.baselines import Output

ACTIVATIONS = {nn.Tanh: torch.tanh, nn.SiLU: nn.functional.silu, nn.Softplus: nn.functional.softplus, nn.Sigmoid: torch.sigmoid}

LOSSES = {  # for one query, given its answer y and itself
    "energy": lambda y, x: (y.square().sum() - x.square().sum()) ** 2 / 10,
    "mean": lambda y, x: (y.mean() - x.mean()).abs(),
    "entropy": lambda y, x: -(y.softmax(0) * y.log_softmax(0)).sum(),
    "wave": lambda y, x: (y.sin() * x.sum()).sum(),
}


@st.composite
def cases(draw):
    features, width, depth = draw(st.integers(1, 5)), draw(st.integers(1, 7)), draw(st.integers(1, 3))
    activation = draw(st.sampled_from(list(ACTIVATIONS)))
    torch.manual_seed(draw(st.integers(0, 10_000)))
    sizes = [features] + [width] * depth
    layers = [layer for i in range(depth) for layer in (nn.Linear(sizes[i], sizes[i + 1]), activation())]
    net = nn.Sequential(*layers, nn.Linear(width, features)).double()
    x = torch.randn(draw(st.integers(1, 6)), features, dtype=torch.float64)
    return net, x, activation, draw(st.sampled_from(list(LOSSES))), draw(st.integers(1, 4)), draw(st.sampled_from([1e-3, 1e-2, 1e-1]))


def batched(name):
    return lambda model, x: torch.stack([LOSSES[name](y, row) for y, row in zip(model(x), x, strict=True)])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(cases(), st.sampled_from(["CN", "Weights", "Shift", "Output"]), st.sampled_from(["none", "last", "all"]), st.randoms())
def test_independence_and_identity(case, adapter, backprop, random):
    net, x, activation, name, steps, lr = case
    adapt = {"CN": CN(activation), "Weights": Weights(), "Shift": Shift("0"), "Output": Output()}[adapter]
    model = Tailored(net, batched(name), adapt=adapt, steps=steps, lr=lr, backprop=backprop)
    order = random.sample(range(len(x)), len(x))
    answers = model(x)
    torch.testing.assert_close(model(x[order]), answers[order], rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(model(x[-1:]), answers[-1:], rtol=1e-8, atol=1e-10)
    assert torch.equal(model.replace(steps=0)(x), net(x))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(cases())
def test_predictions_are_the_papers(case):
    net, x, activation, name, steps, lr = case
    w = reference.pairs([p.detach() for p in net.parameters()])
    loss = LOSSES[name]
    act = ACTIVATIONS[activation]
    answers = []
    for row in x:
        cn = reference.identity(w)
        for _ in range(steps):
            cn = reference.pairs([t.detach().requires_grad_() for t in reference.flat(cn)])
            value = loss(reference.f(w, cn, row, act), row)
            cn = reference.step(cn, torch.autograd.grad(value, reference.flat(cn)), lr)
        answers.append(reference.f(w, cn, row, act).detach())
    model = Tailored(net, batched(name), adapt=CN(activation), steps=steps, lr=lr)
    torch.testing.assert_close(model(x).detach(), torch.stack(answers), rtol=1e-8, atol=1e-10)
