"""Noise that belongs to a query: its distribution, and what it depends on."""

import itertools
import math

import pytest
import torch

from tailoring import Inputs, Support, random

SEEDS = torch.arange(1000)  # neighbouring seeds, where a weak hash would show itself
FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
BOUND = 4.0  # standard errors: one in 16,000 by chance, and the draws are always the same


def largest_gap(draws: torch.Tensor, distribution) -> float:
    """Kolmogorov's distance between the draws and their distribution function, times sqrt(n)."""
    expected = distribution(draws.flatten().double().sort().values)
    rank = torch.arange(len(expected) + 1, dtype=torch.float64) / len(expected)
    return max((rank[1:] - expected).max(), (expected - rank[:-1]).max()).item() * math.sqrt(len(expected))


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    """In standard errors of independent numbers."""
    a, b = (t.flatten().double() for t in (a, b))
    return abs(torch.corrcoef(torch.stack([a, b]))[0, 1].item()) * math.sqrt(len(a))


def normal_distribution(z):
    return (1 + torch.erf(z / math.sqrt(2))) / 2


@pytest.mark.parametrize("dtype", FLOATS[:2])
@pytest.mark.parametrize(("draw", "distribution"), [(random.uniform, lambda u: u), (random.normal, normal_distribution)])
def test_the_draws_follow_their_distribution(draw, distribution, dtype):
    draws = draw(SEEDS, (100,), dtype)
    assert largest_gap(draws, distribution) < 1.95  # exceeded by one sample in a thousand
    for row in draws[:20]:
        assert largest_gap(row, distribution) < 2.2
    for column in draws.T[:20]:
        assert largest_gap(column, distribution) < 2.2


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("draw", "powers"),
    [(random.uniform, {1: 1 / 2, 2: 1 / 3, 3: 1 / 4, 4: 1 / 5}), (random.normal, {1: 0.0, 2: 1.0, 3: 0.0, 4: 3.0, 6: 15.0})],
)
def test_the_moments_are_right(draw, powers, dtype):
    draws = draw(SEEDS, (200,), dtype).double()
    for power, expected in powers.items():
        sample = draws**power
        rounding = torch.finfo(dtype).eps / 8 if dtype != torch.float64 else 0.0  # rounding to even leaves far less bias than eps
        assert abs(sample.mean() - expected) < BOUND * sample.std() / math.sqrt(sample.numel()) + rounding


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_uniform_number_is_never_zero_or_one(dtype):
    draws = random.uniform(SEEDS, (2000,), dtype)
    assert draws.dtype == dtype
    assert 0 < draws.min() < 1e-4
    assert 1 - 2 * torch.finfo(dtype).eps - 1e-4 < draws.max() < 1
    assert random.normal(SEEDS, (2000,), dtype).isfinite().all()


def test_double_precision_uses_all_its_digits():
    draws = random.uniform(SEEDS, (100,), torch.float64).flatten()
    assert len(draws.unique()) == len(draws)
    assert (draws != draws.float().double()).all()


@pytest.mark.parametrize("draw", [random.uniform, random.normal])
@pytest.mark.parametrize("shape", [(), (5,), (2, 3)])
def test_a_seed_draws_the_same_numbers_alone_and_among_others_in_any_order(draw, shape):
    seeds = random.seeds_of(torch.arange(6.0)[:, None])
    together = draw(seeds, shape)
    assert together.shape == (6, *shape)
    order = torch.tensor([3, 0, 5, 1])
    assert torch.equal(draw(seeds[order], shape), together[order])
    assert torch.equal(torch.cat([draw(seeds[i : i + 1], shape) for i in range(6)]), together)


def test_drawing_leaves_torchs_own_generator_alone():
    before = torch.get_rng_state()
    random.normal(random.per_row(random.seeds_of(torch.ones(3, 2)), 2), (4,))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("draw", [random.uniform, random.normal])
def test_different_seeds_and_different_places_are_uncorrelated(draw):
    draws = draw(SEEDS, (200,), torch.float64)
    assert len(draws.unique()) == draws.numel()
    assert correlation(draws[1:], draws[:-1]) < BOUND
    assert correlation(draws[:, 1:], draws[:, :-1]) < BOUND
    assert correlation(draws[:, 100:], draws[:, :100]) < BOUND
    for seeds in ((SEEDS + 1) * 2**40, SEEDS + 2**62, -SEEDS - 1):  # other high bits, few or no other low ones
        assert correlation(draw(seeds, (200,), torch.float64), draws) < BOUND
    step = random._GOLDEN  # what the hash adds from place to place: a seed that far on must not begin the same stream a place later
    assert correlation(draw(SEEDS + step, (200,), torch.float64)[:, :-1], draws[:, 1:]) < BOUND


def streams() -> dict[str, torch.Tensor]:
    """Seeds that come from the same ones, all of them (1000,)."""
    rows = random.per_row(SEEDS, 3).reshape(1000, 3)
    return {
        "own": SEEDS,
        "fold 0": random.fold(SEEDS, 0),
        "fold 1": random.fold(SEEDS, 1),
        "fold 2": random.fold(SEEDS, 2),
        "fold twice": random.fold(random.fold(SEEDS, 1), 1),
        "row 0": rows[:, 0],
        "row 1": rows[:, 1],
        "row 2": rows[:, 2],
        "row of fold": random.per_row(random.fold(SEEDS, 0), 2).reshape(1000, 2)[:, 0],
        "fold of row": random.fold(rows[:, 0], 0),
    }


def test_derived_seeds_give_streams_without_correlation():
    seeds = streams()
    assert len(torch.cat(list(seeds.values())).unique()) == 1000 * len(seeds)
    draws = {name: random.normal(s, (100,), torch.float64) for name, s in seeds.items()}
    for first, second in itertools.permutations(draws, 2):
        a, b = draws[first], draws[second]
        for far, numbers in {"there": (a, b), "in size": (a.abs(), b.abs()), "a place on": (a[:, 1:], b[:, :-1])}.items():
            assert correlation(*numbers) < BOUND, (first, second, far)


def test_the_rows_of_a_query_follow_each_other_and_do_not_depend_on_its_neighbours():
    rows = random.per_row(SEEDS, 3)
    assert rows.shape == (3000,)
    assert len(rows.unique()) == 3000
    assert torch.equal(rows[3:6], random.per_row(SEEDS[1:2], 3))
    assert torch.equal(rows.reshape(-1, 3)[:, :2], random.per_row(SEEDS, 2).reshape(-1, 2))


def test_folding_with_any_number_gives_other_seeds():
    numbers = [0, 1, 2, 3, 10**6, 2**31, 2**40, -1, -2]
    folded = torch.cat([random.fold(SEEDS, n) for n in numbers] + [SEEDS])
    assert len(folded.unique()) == len(folded)


NUMBERS = torch.tensor([[0, 1, 2], [1, 0, 2], [2, 1, 0], [0, 1, 3], [0, 0, 3], [3, 0, 0], [0, 0, 0], [1, 1, 1], [-1, 1, 2]])
KINDS = [torch.int64, torch.int32, torch.int16, torch.int8, *FLOATS, torch.complex64, torch.complex128]


@pytest.mark.parametrize("dtype", KINDS)
def test_queries_have_different_seeds_if_their_numbers_or_the_places_of_these_differ(dtype):
    x = NUMBERS.to(dtype)
    seeds = random.seeds_of(x)
    assert seeds.dtype == torch.int64
    assert len(seeds.unique()) == len(x)
    assert torch.equal(torch.cat([random.seeds_of(row[None]) for row in x]), seeds)
    assert torch.equal(random.seeds_of(x.flip(0)), seeds.flip(0))
    assert torch.equal(random.seeds_of(x.clone().T.contiguous().T), seeds)  # the numbers count, not how they lie in memory


def test_all_truth_tables_have_seeds_of_their_own():
    x = torch.cartesian_prod(*[torch.tensor([False, True])] * 12)
    assert len(random.seeds_of(x).unique()) == 2**12


def test_the_smallest_change_of_one_number_gives_an_unrelated_seed():
    x = torch.ones(500, 20, dtype=torch.float64)
    for i in range(500):
        x[i, i % 20] += (i // 20 + 1) * torch.finfo(x.dtype).eps
    seeds = random.seeds_of(x)
    assert len(seeds.unique()) == 500
    bits = (seeds[:, None] >> torch.arange(64)) & 1
    assert (bits.double().mean(0) - 0.5).abs().max() < BOUND * 0.5 / math.sqrt(500)
    flips = (bits[1:] != bits[:-1]).double().mean()
    assert abs(flips - 0.5) < BOUND * 0.5 / math.sqrt(499 * 64)


def test_imaginary_parts_and_conjugates_count():
    z = torch.tensor([[1 + 2j], [1 - 2j], [2 + 1j], [1 + 0j]])
    seeds = random.seeds_of(z)
    assert len(seeds.unique()) == 4
    assert torch.equal(random.seeds_of(z[:1].conj()), seeds[1:2])


def test_every_tensor_of_a_tree_counts_in_its_place():
    a, b = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0))
    pairs = [(a, b), (b, a), (a, a), (a, torch.cat([b, a], 1)), {"a": a, "b": b[:, :2]}, (a, b > 0)]
    trees = [*pairs, (a,), (b,), (a, b, a), (a, b[:, :0], b, b)]
    seeds = torch.stack([random.seeds_of(tree) for tree in trees])
    assert seeds.shape == (len(trees), 4)
    assert len(seeds.unique()) == seeds.numel()
    same = [random.seeds_of(tree) for tree in ([a, b], Inputs(a, b), Inputs(a, extra=b), Support(a, b), (a, torch.tensor(2.0), b, "name"))]
    assert all(torch.equal(s, seeds[0]) for s in same)


def test_queries_may_be_single_numbers_or_have_many_dimensions_or_be_none_at_all():
    assert len(random.seeds_of(torch.arange(5)).unique()) == 5
    assert torch.equal(random.seeds_of(torch.arange(24.0).reshape(2, 3, 4)), random.seeds_of(torch.arange(24.0).reshape(2, 12)))
    assert random.seeds_of(torch.zeros(0, 3)).shape == (0,)
    assert random.normal(random.seeds_of(torch.zeros(0, 3)), (2,)).shape == (0, 2)
    assert random.normal(SEEDS, (0,)).shape == (1000, 0)


def test_seeds_carry_no_gradient():
    assert not random.seeds_of(torch.ones(2, 3, requires_grad=True)).requires_grad


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(ValueError, match="one row per query, but there is none"):
        random.seeds_of({"grid": torch.tensor(1.0)})
    for draw in (random.uniform, random.normal):
        with pytest.raises(TypeError, match=r"floating-point dtype, not torch\.int64"):
            draw(SEEDS, (2,), torch.int64)
        with pytest.raises(ValueError, match=r"int64 of shape \(queries,\), not torch\.int32"):
            draw(SEEDS.int())
        with pytest.raises(ValueError, match=r"of shape \(1000, 1\)"):
            draw(SEEDS[:, None])


def test_compiled_noise_is_the_same():
    torch.compiler.reset()

    def noise(x):
        seeds = random.seeds_of(x)
        return random.normal(random.fold(random.per_row(seeds, 3), 2), (2, 5)), random.uniform(seeds, (7,)).sum(1), seeds

    x = torch.randn(4, 8)
    for ours, compiled in zip(noise(x), torch.compile(noise, fullgraph=True)(x), strict=True):
        torch.testing.assert_close(compiled, ours)


class Noisy(torch.nn.Module):
    def forward(self, x):
        return x + random.normal(random.seeds_of(x), (7,)).sum(1)[:, None].to(x.dtype)


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_model_draws_by_operators_of_our_own(strict):
    """What compiles it later would multiply the hashes' numbers otherwise, or not at all."""
    x = torch.randn(3, 3)
    exported = torch.export.export(Noisy(), (x,), strict=strict)
    assert {str(node.target).split(".")[0] for node in exported.graph.nodes if "tailoring" in str(node.target)} == {"tailoring"}
    torch.testing.assert_close(exported.module()(x), Noisy()(x))
