"""The smoothed classifier, what it predicts, and within which radius that is certain."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from scipy import stats
from torch import Tensor, nn

from .. import random
from .._tailored import Tailored
from .._validate import refuse_mixing_modules

ABSTAIN = -1


@dataclass(frozen=True)
class Certificates:
    """With probability 1 - alpha each, no change of the query smaller than `radius` (in L2) changes the smoothed `label`."""

    label: Tensor  # (queries,): the class, or -1 to abstain
    radius: Tensor  # (queries,), float64: sigma' Phi^-1(p), sound; 0 where it abstains
    paper_radius: Tensor  # (queries,), float64: sigma Phi^-1(p), the tailoring paper's convention; no certificate if nu > 0
    votes: Tensor  # (queries,): how many of the `samples` chose the label that was to be certified
    samples: int


class Smoothed:
    """g(x) = the class that `classifier` most often gives to x + noise, noise ~ N(0, sigma'^2).

    `nu` is the noise that a tailored classifier's own loss adds to its input (`losses.Smooth(nu)`), so that what the network sees has the
    noise sigma it was trained with: sigma'^2 = sigma^2 - nu^2. Randomness inside the classifier gives no further radius, so the certified
    one is sigma' Phi^-1(p). Every noisy sample is tailored by itself, with noise of its own, so the votes are independent.

    The classifier maps (n, ...) to (n, classes), each row by itself: where rows see each other, votes are not independent and radii not
    true (modules known to do so are refused; a function must see to it). `batch` samples run at once. Noise depends on the query's seed (by
    default a hash of the query), `batch`, the number of samples and the kind of device, and on nothing else. Neither device nor grad mode
    nor train/eval mode is decided here.
    """

    def __init__(self, classifier: Callable[[Tensor], Tensor], sigma: float, *, nu: float = 0.0, batch: int = 1000):
        if not 0 < sigma < math.inf:
            raise ValueError(f"sigma must be positive and finite, not {sigma}")
        if not 0 <= nu < sigma:
            raise ValueError(f"nu, the noise inside the classifier, must be at least 0 and below sigma = {sigma}, not {nu}")
        if not isinstance(batch, int) or batch < 1:
            raise ValueError(f"batch must be a whole number, at least 1, not {batch}")
        if not callable(classifier):
            raise TypeError(f"the classifier must be a function from (n, ...) to logits (n, classes), not {classifier!r}")
        if getattr(classifier, "training", False):
            raise ValueError("the classifier is in training mode, where BatchNorm mixes the samples: call eval() first")
        self.classifier, self.sigma, self.nu, self.batch = classifier, sigma, nu, batch

    @property
    def outer_sigma(self) -> float:
        """sigma': the standard deviation of the noise added to a query here."""
        return outer_sigma(self.sigma, self.nu)

    def predict(self, x: Tensor, n: int = 1000, alpha: float = 0.001, *, seeds: Sequence[int] | None = None) -> Tensor:
        """The smoothed class of each query, (queries,), wrong with probability alpha at most; -1 where the votes do not tell."""
        _check(x, alpha, seeds, n)
        _refuse_mixing(self.classifier)
        labels = []
        for query, seed in zip(x, _seeds(x, seeds), strict=True):
            (first, second), (label, _) = (part.tolist() for part in self.votes(query, n, seed, phase=2).topk(2))
            clear = first > 0 and stats.binomtest(first, first + second, 0.5).pvalue <= alpha
            labels.append(label if clear else ABSTAIN)
        return torch.tensor(labels, device=x.device)

    def certify(
        self,
        x: Tensor,
        n0: int = 100,
        n: int = 100_000,
        alpha: float = 0.001,
        *,
        seeds: Sequence[int] | None = None,
        guess: Sequence[int] | None = None,
    ) -> Certificates:
        """Guess each query's class from n0 samples, bound its probability from n others, abstain below one half.

        A `guess` for each query may be given instead, wherever it comes from but the n samples (those of `votes` with phase=1).
        """
        _check(x, alpha, seeds, n0, n)
        _refuse_mixing(self.classifier)
        labels, votes = [], []
        if guess is not None and len(guess) != len(x):
            raise ValueError(f"there are {len(guess)} guesses for {len(x)} queries")
        if guess is not None and not all(int(g) == g and g >= ABSTAIN for g in guess):
            raise ValueError(f"a guess is the number of a class, or {ABSTAIN} to abstain, not {list(guess)}")
        for i, (query, seed) in enumerate(zip(x, _seeds(x, seeds), strict=True)):
            guessed = self.votes(query, n0, seed, phase=0).argmax() if guess is None else torch.as_tensor(guess[i], device=x.device)
            counts = self.votes(query, n, seed, phase=1)
            if guess is not None and guessed >= len(counts):
                raise ValueError(f"query {i} is guessed to be of class {int(guessed)}, of {len(counts)}")
            labels.append(guessed.long())
            votes.append(counts[guessed.long()] if guess is None or guessed >= 0 else torch.zeros_like(counts[0]))
        label, vote = torch.stack(labels), torch.stack(votes)  # the only place where the host waits for the device
        p = lower_bound(vote, n, alpha)
        quantile = torch.tensor(stats.norm.ppf(p.cpu().numpy()), dtype=torch.float64, device=x.device)
        sure = p > 0.5
        label, quantile = torch.where(sure, label, ABSTAIN), torch.where(sure, quantile, 0.0)
        return Certificates(label, self.outer_sigma * quantile, self.sigma * quantile, vote, n)

    def votes(self, query: Tensor, n: int, seed: int, *, phase: int = 1) -> Tensor:
        """How many of n noisy copies of one query the classifier gives to each class, (classes,). Stays on the device.

        An answer that is not a number, or has no largest one, is given to no class, which can only make a certificate smaller.
        """
        counts: Tensor | None = None
        for chunk, start in enumerate(range(0, n, self.batch)):
            random = torch.Generator(query.device).manual_seed(_mixed(seed, phase, chunk))
            size = (min(self.batch, n - start), *query.shape)
            noise = torch.randn(size, generator=random, dtype=query.dtype, device=query.device)
            logits = logits_of(self.classifier, query + self.outer_sigma * noise).detach()
            counts = logits.new_zeros(logits.shape[1], dtype=torch.int64) if counts is None else counts
            counts = counts.scatter_add(0, logits.argmax(1), logits.amax(1).isfinite().long())  # of nan, the maximum is nan
        assert counts is not None
        return counts


def logits_of(classifier: Callable[[Tensor], Tensor], samples: Tensor) -> Tensor:
    """What it answers to samples (n, ...), (n, classes), or why that is no answer."""
    logits = classifier(samples)
    if not isinstance(logits, Tensor):
        raise TypeError(f"the classifier must return logits, a tensor (n, classes), not {type(logits).__name__}: wrap it")
    if logits.ndim != 2 or len(logits) != len(samples) or logits.shape[1] < 2:
        raise ValueError(f"the classifier must return logits ({len(samples)}, classes) of two classes or more, not {tuple(logits.shape)}")
    return logits


def outer_sigma(sigma: float, nu: float) -> float:
    """What is left of the noise `sigma` for the query if the classifier's own loss adds `nu`."""
    if not 0 <= nu < sigma:
        raise ValueError(f"nu must be at least 0 and below sigma, not {nu} and {sigma}")
    return math.sqrt(sigma**2 - nu**2)


def lower_bound(votes: Tensor, n: int, alpha: float) -> Tensor:
    """Clopper and Pearson's one-sided bound: the smallest p that gives so many of n votes, or more, with probability alpha. float64."""
    if not 0 < alpha < 1 or bool(((votes < 0) | (votes > n)).any()):
        raise ValueError(f"a bound takes alpha between 0 and 1 and 0 to {n} votes, not alpha = {alpha} and votes {votes.tolist()}")
    k = votes.cpu().numpy()
    bound = torch.tensor(stats.beta.ppf(alpha, k, n - k + 1), dtype=torch.float64)
    most = math.nextafter(1.0, 0.0)  # of 1, which is no bound but rounding, the radius would be infinite
    return torch.where(votes.cpu() > 0, bound.clamp(max=most), 0.0).to(votes.device)


def _mixed(seed: int, phase: int, chunk: int) -> int:
    """A seed for a generator: different for every query, phase and chunk, but for chance (a CPU's generator uses 32 of its bits)."""
    value = (int(seed) * 0x9E3779B97F4A7C15 + phase * 0xBF58476D1CE4E5B9 + chunk * 0x94D049BB133111EB) % 2**64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    return (value ^ (value >> 27)) >> 1


def _seeds(x: Tensor, seeds: Sequence[int] | None) -> Sequence[int]:
    return random.seeds_of(x).tolist() if seeds is None else seeds


def _check(x: Tensor, alpha: float, seeds: Sequence[int] | None, *samples: int) -> None:
    if not 0 < alpha < 1:
        raise ValueError(f"alpha must lie between 0 and 1, not {alpha}")
    if min(samples) < 1:
        raise ValueError(f"at least one sample is needed, not {min(samples)}")
    if x.ndim < 2 or not x.is_floating_point():
        raise ValueError(f"x must be a batch of queries (queries, ...) of floating-point numbers, not {x.dtype} of shape {tuple(x.shape)}")
    if not len(x):
        raise ValueError("there is no query to answer")
    if seeds is not None and len(seeds) != len(x):
        raise ValueError(f"there are {len(seeds)} seeds for {len(x)} queries")
    if seeds is not None and not all(int(seed) == seed for seed in seeds):
        raise ValueError(f"seeds are whole numbers, one for each query, not {list(seeds)}")


def _refuse_mixing(classifier: Callable[[Tensor], Tensor]) -> None:
    if not isinstance(classifier, nn.Module):
        return
    try:
        refuse_mixing_modules(classifier)
    except ValueError as error:
        raise ValueError(f"an answer would depend on other samples or on chance, and no radius would hold: {error}") from None
    for module in classifier.modules():
        if isinstance(module, Tailored) and module.adapt.shared:
            raise ValueError(
                f"{module.adapt!r} adapts to a batch as a whole: an answer would depend on other samples, and no radius would hold"
            )
