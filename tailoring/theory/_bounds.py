"""The generalisation bounds `thm:cont_2`, `thm:cont_1` and `coro:gen_1`, and the quantities they need."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Bound:
    """An upper bound on the expected task loss of a tailored model, in its parts.

    value = kappa * unlabelled + (1 - kappa) * (empirical + complexity + deviation)
    """

    empirical: float  # mean task loss of the tailored model on the n training points
    complexity: float  # zeta / n, or twice the Rademacher complexity
    deviation: float  # the price of the confidence 1 - delta
    unlabelled: float | None = None  # E_x[L_cont], or E_x[phi(L_tailor)] (coro:gen_1)
    kappa: float = 0.0

    @property
    def supervised(self) -> float:
        """The paper's J: the bound at kappa = 0 (`lemma:gen_2`, `lemma:gen_1`)."""
        return self.empirical + self.complexity + self.deviation

    @property
    def value(self) -> float:
        """The bound at the kappa that was given."""
        return self.supervised if self.unlabelled is None else self.kappa * self.unlabelled + (1 - self.kappa) * self.supervised

    @property
    def best(self) -> float:
        """The least of the bounds over kappa: the bound is linear in kappa, so that is the smaller of its two ends."""
        return self.supervised if self.unlabelled is None else min(self.unlabelled, self.supervised)

    def __float__(self) -> float:
        return self.value


def stability_bound(
    empirical: float, *, zeta: float, c: float, n: int, delta: float, unlabelled: float | None = None, kappa: float = 0.0
) -> Bound:
    """`thm:cont_2` (at kappa = 0, `lemma:gen_2`): a bound on the expected task loss from uniform stability, with probability 1 - delta.

        kappa E_x[L_cont] + (1 - kappa) (empirical + zeta / n + (2 zeta + c) sqrt(ln(1 / delta) / (2 n)))

    `c`: task losses lie in [0, c] (the paper says at most c; its proof needs the lower end, too). `unlabelled`: the expectation
    E_x[L_cont(x, theta_x)], or by `coro:gen_1` E_x[phi(L_tailor(x, theta_x))]. `zeta` is a supremum over all data sets: an estimate
    of it (`measure_stability`) is from below, and the bound is then an indication, no guarantee.
    """
    _check(empirical, c=c, n=n, delta=delta, kappa=kappa, unlabelled=unlabelled, zeta=zeta)
    deviation = (2 * zeta + c) * math.sqrt(math.log(1 / delta) / (2 * n))
    return _bound(empirical, zeta / n, deviation, unlabelled, kappa)


def rademacher_bound(
    empirical: float,
    *,
    complexity: float,
    c: float,
    n: int,
    delta: float,
    unlabelled: float | None = None,
    kappa: float = 0.0,
    measured: bool = False,
) -> Bound:
    """`thm:cont_1` (at kappa = 0, `lemma:gen_1`): the same from a Rademacher complexity R_n, for all models of a set.

        kappa E_x[L_cont] + (1 - kappa) (empirical + 2 R_n + c sqrt(ln(1 / delta) / (2 n)))

    R_n is an expectation over data sets. If `complexity` is `empirical_rademacher` of the one you have, say `measured=True`: the last
    term becomes 3 c sqrt(ln(2 / delta) / (2 n)), which pays for that (McDiarmid's inequality once more).
    """
    _check(empirical, c=c, n=n, delta=delta, kappa=kappa, unlabelled=unlabelled, complexity=complexity)
    times, share = (3, delta / 2) if measured else (1, delta)
    return _bound(empirical, 2 * complexity, times * c * math.sqrt(math.log(1 / share) / (2 * n)), unlabelled, kappa)


def _bound(empirical: float, complexity: float, deviation: float, unlabelled: float | None, kappa: float) -> Bound:
    """Of plain numbers, where tensors of one number were given."""
    return Bound(float(empirical), float(complexity), float(deviation), None if unlabelled is None else float(unlabelled), float(kappa))


def empirical_rademacher(losses: Tensor, *, draws: int = 10_000, seed: int = 0) -> float:
    """The empirical Rademacher complexity of a finite set of models, from their losses on the n training points.

        R = E_xi max over models f of 1/n sum_i xi_i L(f, i),      xi_i = -1 or 1

    losses: (models, n). Exact (all 2^n signs) where 2^n is at most `draws`, else a mean over so many draws. The weights that one searches
    are no finite set: models sampled from it give a value from below.
    """
    if losses.ndim != 2:
        raise ValueError(f"losses must have shape (models, n), not {tuple(losses.shape)}")
    if not losses.isfinite().all():
        raise ValueError("the losses must be finite, and some are nan or infinite: leave out the models that diverged")
    losses = losses if losses.is_floating_point() else losses.to(torch.float32)  # 0 and 1, say
    n = losses.shape[1]
    if 2**n <= draws:
        signs = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=n)), dtype=losses.dtype)
    else:
        signs = 2.0 * torch.randint(2, (draws, n), generator=torch.Generator().manual_seed(seed)).to(losses.dtype) - 1
    mean = (signs.to(losses.device) @ losses.mT / n).max(1).values.mean()
    return max(0.0, float(mean))  # which it never is below; a mean over draws can be


def monotone_envelope(tailoring: Tensor, task: Tensor) -> Callable[[Tensor], Tensor]:
    """`coro:gen_1`: the least increasing phi with task loss <= phi(tailoring loss) at every example given.

        phi(t) = max of the task losses of all examples whose tailoring loss is at most t   (of the first example, below all)

    tailoring, task: (examples,). The paper asks for E[L_sup] <= E[phi(L_tailor)] at each theta; but tailoring picks another theta for each
    x, so the inequality must hold at (almost) every x, as it does here, not on average. Fitted to labelled data, phi is an estimate
    from below.
    """
    if tailoring.shape != task.shape or tailoring.ndim != 1 or not len(task):
        raise ValueError(f"one tailoring and one task loss per example are needed, not {tuple(tailoring.shape)} and {tuple(task.shape)}")
    order = tailoring.argsort()
    known, highest = tailoring[order].contiguous(), task[order].cummax(0).values

    def phi(values: Tensor) -> Tensor:
        at = torch.searchsorted(known, values.contiguous(), right=True) - 1
        return highest[at.clamp(min=0)]

    return phi


def _check(empirical: float, *, c: float, n: int, delta: float, kappa: float, unlabelled: float | None, **sizes: float) -> None:
    if n < 1:
        raise ValueError(f"n is the number of training points, at least 1, not {n}")
    if not 0 < delta < 1:
        raise ValueError(f"delta is a probability between 0 and 1, not {delta}")
    if not 0 <= kappa <= 1:
        raise ValueError(f"kappa lies in [0, 1], not {kappa}")
    if kappa and unlabelled is None:
        raise ValueError(f"kappa={kappa} weighs the expected unlabelled loss: give it as unlabelled=, or take kappa=0")
    for name, size in {"c": c, **sizes}.items():
        if not size >= 0:
            raise ValueError(f"{name} must be at least 0, not {size}")
    if not 0 <= empirical <= c:
        raise ValueError(f"the task losses lie in [0, c], so their mean cannot be {empirical} where c is {c}")
