"""The paper's four algorithms as plain loops: one query (or task) at a time, nothing batched, nothing of ours imported.

The model is a feed-forward network with parameters w = [(W, b), ...] and a conditional normalisation after each hidden layer:

    h_l = gamma_l * act(W_l h_{l-1} + b_l) + beta_l,   f(x) = W_L h_{L-1} + b_L

Slips of the pseudo-code that are corrected here:
- Algorithms 3 and 4 take samples ib to i(b+1) with i up to and including n/b; meant are ib to (i+1)b, i below n/b.
- Algorithms 2 and 3 detach gamma and beta *before* the outer loss, "only in first order"; the experiments' second order "with the
  detachment of WarpGrad" must detach *after* it, as Algorithm 4 does. The three readings are `order` below: "none" detaches before the
  outer loss, "last" after it, "all" never.
- Detaching theta_x itself would leave Algorithm 1 without any outer gradient; first order means that the inner *gradient* is constant.
- Algorithm 4 appends the support and the query set to the same lists X and Y, and repeats gamma and beta along axis 1 (the units);
  meant are X_train, Y_train and X_test, Y_test, and axis 0 (the tasks).
- Algorithm 4's "first order" is not offered in the paper; `order="none"` is the obvious one.
"""

from __future__ import annotations

from functools import partial

import torch


def f(w, cn, x, act=torch.tanh):
    """One input, (features,)."""
    h = x
    for (weight, bias), (gamma, beta) in zip(w[:-1], cn, strict=True):
        h = gamma * act(weight @ h + bias) + beta
    weight, bias = w[-1]
    return weight @ h + bias


def identity(w):
    return [(torch.ones_like(bias), torch.zeros_like(bias)) for _, bias in w[:-1]]


def flat(pairs):
    return [t for pair in pairs for t in pair]


def pairs(tensors):
    return list(zip(tensors[::2], tensors[1::2], strict=True))


def step(params, gradient, rate):
    return pairs([p - rate * g for p, g in zip(flat(params), gradient, strict=True)])


def sgd(w, gradient, rate):
    with torch.no_grad():
        return pairs([(p - rate * g).requires_grad_() for p, g in zip(flat(w), gradient, strict=True)])


def inner_step(tailor_loss, w, cn, x, rate, order):
    """gamma_s, beta_s = gamma_{s-1} - rate * d tailor_loss, for one query."""
    cn = pairs([t if t.requires_grad else t.requires_grad_() for t in flat(cn)])
    gradient = torch.autograd.grad(tailor_loss(partial(f, w, cn), x), flat(cn), create_graph=order != "none")
    if order == "none":
        gradient = [g.detach() for g in gradient]
    return step(cn, gradient, rate)


def detached(cn):
    return pairs([t.detach() for t in flat(cn)])


def predict(w, tailor_loss, rate, steps, queries):
    """Prediction of Algorithms 2 and 3."""
    answers = []
    for x in queries:
        cn = identity(w)
        for _ in range(steps):
            cn = detached(inner_step(tailor_loss, w, cn, x, rate, "none"))
        answers.append(f(w, cn, x).detach())
    return torch.stack(answers)


def mammoth_training(w, sup_loss, sup_rate, tailor_loss, tailor_rate, batches, order):
    """Algorithm 1: theta_x = theta - rate * d tailor_loss(theta, x), then theta moves by the supervised losses of all theta_x."""
    no_cn = identity(w)
    for batch in batches:
        total = 0.0
        for x, y in zip(*batch, strict=True):
            gradient = torch.autograd.grad(tailor_loss(partial(f, w, no_cn), x), flat(w), create_graph=order != "none")
            if order == "none":
                gradient = [g.detach() for g in gradient]
            theta_x = step(w, gradient, tailor_rate)
            total = total + sup_loss(f(theta_x, no_cn, x), y)
        w = sgd(w, torch.autograd.grad(total, flat(w)), sup_rate)
    return w


def cngrad_training(w, sup_loss, sup_rate, tailor_loss, tailor_rate, steps, batches, order):
    """Algorithm 2 (main text): one step of w after all inner steps, with the sum of the outer gradients after each of them."""
    for batch in batches:
        total = 0.0
        for x, y in zip(*batch, strict=True):
            cn = identity(w)
            for _ in range(steps):
                cn = inner_step(tailor_loss, w, cn, x, tailor_rate, order)
                total = total + sup_loss(f(w, cn, x), y)
                if order != "all":
                    cn = detached(cn)
        w = sgd(w, torch.autograd.grad(total, flat(w)), sup_rate)
    return w


def cngrad_training_stepwise(w, sup_loss, sup_rate, tailor_loss, tailor_rate, steps, batches, order):
    """Algorithm 3 (appendix): a step of w after each inner step. ("all" has no meaning: w has moved under the earlier steps.)"""
    for xs, ys in batches:
        cns = [identity(w) for _ in xs]
        for _ in range(steps):
            total = 0.0
            for i, (x, y) in enumerate(zip(xs, ys, strict=True)):
                cns[i] = inner_step(tailor_loss, w, cns[i], x, tailor_rate, order)
                total = total + sup_loss(f(w, cns[i], x), y)
                cns[i] = detached(cns[i])
            # The gradient is of the losses as computed, before w moves.
            w = sgd(w, torch.autograd.grad(total, flat(w)), sup_rate)
    return w


def meta_training(w, sup_loss, inner_rate, outer_rate, steps, batches, order):
    """Algorithm 4: a task's support set inside (a mean over its k examples), its query set outside, a step of w after each."""
    for support_x, support_y, query_x, query_y in batches:
        cns = [identity(w) for _ in support_x]
        for _ in range(steps):
            total = 0.0
            for j in range(len(support_x)):
                cns[j] = inner_step(support_loss(sup_loss, support_y[j]), w, cns[j], support_x[j], inner_rate, order)
                total = total + sum(sup_loss(f(w, cns[j], x), y) for x, y in zip(query_x[j], query_y[j], strict=True))
                cns[j] = detached(cns[j])
            w = sgd(w, torch.autograd.grad(total, flat(w)), outer_rate)
    return w


def meta_test(w, sup_loss, inner_rate, steps, support_x, support_y, query_x):
    """Algorithm 4's meta-test, for several tasks."""
    answers = []
    for xs, ys, queries in zip(support_x, support_y, query_x, strict=True):
        cn = identity(w)
        for _ in range(steps):
            cn = detached(inner_step(support_loss(sup_loss, ys), w, cn, xs, inner_rate, "none"))
        answers.append(torch.stack([f(w, cn, x) for x in queries]).detach())
    return torch.stack(answers)


def support_loss(sup_loss, ys):
    return lambda model, xs: sum(sup_loss(model(x), y) for x, y in zip(xs, ys, strict=True)) / len(xs)
