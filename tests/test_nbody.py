"""The five-body simulator, its data set, and the cache."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import pytest
import torch
from torch.torch_version import TorchVersion

from tailoring.experiments import _nbody
from tailoring.experiments._cache import cached
from tailoring.experiments._nbody import Climb, System, acceleration, compiled_step, integrate, load, runge_kutta, stable_systems
from tailoring.experiments._planet_nets import Invariants, PairNet, constant_velocity, moving, projected, violation

SMALL = System(trajectories=24, slots=96, stable=40, kept=12, ahead=6)


def energy(states, gravity):
    """By the formula, pair by pair, in float64."""
    states = states.double()
    kinetic = (states[..., 4] * states[..., 2:4].square().sum(-1)).sum(-1) / 2
    pairs = [(i, j) for i in range(5) for j in range(i)]
    potential = sum(states[..., i, 4] * states[..., j, 4] / (states[..., i, :2] - states[..., j, :2]).norm(dim=-1) for i, j in pairs)
    return kinetic - gravity * potential


def momentum(states):
    return (states[..., 4:] * states[..., 2:4]).double().sum(-2)


@pytest.fixture(scope="module")
def systems():
    return stable_systems(SMALL)


@pytest.fixture(scope="module")
def starts(systems):
    return torch.cat([systems["motion"][:, 0], systems["mass"][..., None]], 2)


def two_bodies(distance=60.0):
    """A pair on a circle around its centre of mass, and three bodies without mass."""
    states = torch.zeros(1, 5, 5, dtype=torch.float64)
    m1, m2 = 0.25, 0.15
    omega = (System.gravity * (m1 + m2) / distance**3) ** 0.5
    states[0, 0] = torch.tensor([300 + distance * m2 / (m1 + m2), 150, 0, omega * distance * m2 / (m1 + m2), m1])
    states[0, 1] = torch.tensor([300 - distance * m1 / (m1 + m2), 150, 0, -omega * distance * m1 / (m1 + m2), m2])
    states[0, 2:, 0] = torch.tensor([10.0, 20.0, 590.0])
    return states, omega, distance


def test_two_bodies_follow_their_circle():
    states, omega, distance = two_bodies()
    path = integrate(states, 200, System())
    time = torch.arange(201, dtype=torch.float64)
    between = path[0, :, 0, :2] - path[0, :, 1, :2]
    exact = distance * torch.stack([torch.cos(omega * time), torch.sin(omega * time)], 1)
    assert omega * 200 > 3.14  # more than half a turn
    torch.testing.assert_close(between, exact, atol=1e-3, rtol=0)  # of 60


def test_acceleration_is_newtons():
    torch.manual_seed(0)
    position, mass = 300 * torch.rand(2, 5, 7, dtype=torch.float64), 0.1 + torch.rand(5, 7, dtype=torch.float64)
    expected = torch.zeros_like(position)
    for i in range(5):
        for j in range(5):
            if i != j:
                away = position[:, j] - position[:, i]
                expected[:, i] += 300 * mass[j] * away / away.norm(dim=0) ** 3
    torch.testing.assert_close(acceleration(position, mass, 300.0), expected)


def test_energy_and_momentum_hardly_drift(starts):
    path = integrate(starts, SMALL.stable - 1, SMALL)
    assert (energy(path, 300) - energy(path[:, :1], 300)).abs().max() < 1e-4
    assert (momentum(path) - momentum(path[:, :1])).abs().max() < 1e-12


def test_time_runs_backwards(starts):
    there = integrate(starts, 30, SMALL)[:, -1]
    back = there.clone()
    back[..., 2:4] *= -1
    again = integrate(back, 30, SMALL)[:, -1]
    torch.testing.assert_close(again[..., :2], starts[..., :2].double(), atol=1e-3, rtol=0)
    torch.testing.assert_close(-again[..., 2:4], starts[..., 2:4].double(), atol=1e-4, rtol=0)


def test_found_systems_are_stable_and_as_the_appendix_says(systems, starts):
    assert systems["motion"].shape == (24, 18, 5, 4)
    assert ((systems["mass"] >= 0.15) & (systems["mass"] <= 0.25)).all()
    assert (systems["mass"].mean(1) < 0.2).all()
    size = torch.tensor([600.0, 300.0])
    first = starts[..., :2]
    assert ((first >= size / 4) & (first <= 3 * size / 4)).all()
    path = integrate(starts, SMALL.stable - 1, SMALL)
    assert ((path[..., :2] >= 0) & (path[..., :2] <= size)).all()
    apart = (path[:, :, :, None, :2] - path[:, :, None, :, :2]).norm(dim=-1) + 1e6 * torch.eye(5)
    assert apart.min() > SMALL.critical - 0.1
    torch.testing.assert_close(systems["motion"].double(), path[:, :18, :, :4], atol=2e-3, rtol=0)  # from float32 starts


def test_most_random_starts_are_not_stable():
    """Else hill climbing would be for nothing, and the test above empty."""
    climb = _nbody.Climb(replace(SMALL, slots=200, stable=200))
    path = integrate(torch.cat([climb.start_q, climb.start_v, climb.mass[None]]).permute(2, 1, 0), 199, SMALL)
    inside = ((path[..., :2] >= 0) & (path[..., :2] <= torch.tensor([600.0, 300.0]))).all((1, 2, 3))
    assert inside.double().mean() < 0.5


def test_siblings_share_a_family():
    made = stable_systems(replace(SMALL, siblings=5, slots=16))
    assert len(made["family"].unique()) < 24
    assert len(stable_systems(SMALL)["family"].unique()) == 24


def test_the_same_seed_makes_the_same_systems(systems):
    assert torch.equal(stable_systems(SMALL)["motion"], systems["motion"])
    assert not torch.equal(stable_systems(replace(SMALL, seed=1))["motion"], systems["motion"])


def data(folder, split="trajectory", system=SMALL, **changes):
    return load(folder, system, **{"stride": 5, "split": split, "parts": (10, 4, 6), "seed": 0, **changes})


def test_no_trajectory_is_in_two_parts(tmp_path):
    d = data(tmp_path)
    masses = [{tuple(row) for row in part.x[:, 4::5].tolist()} for part in (d.train, d.validation, d.test)]
    assert [len(m) for m in masses] == [10, 4, 6]
    assert not masses[0] & masses[1]
    assert not masses[0] & masses[2]
    assert not masses[1] & masses[2]
    assert len(d.train) == 10 * SMALL.kept


def test_pairs_of_one_trajectory_are_split_on_request(tmp_path):
    d = data(tmp_path, "pair")
    train, test = ({tuple(row) for row in part.x[:, 4::5].tolist()} for part in (d.train, d.test))
    assert len(train & test) > 10
    assert len(d.test) == 6 * SMALL.kept


def test_families_are_split_on_request_only(tmp_path):
    with pytest.raises(ValueError, match="siblings"):
        data(tmp_path, "family")
    system = replace(SMALL, siblings=8, slots=12)
    d = data(tmp_path, "family", system)
    assert {tuple(row) for row in d.train.x[:, 4::5].tolist()} & {tuple(row) for row in d.test.x[:, 4::5].tolist()}
    with pytest.raises(ValueError, match="siblings"):
        data(tmp_path, "trajectory", system)


def test_inputs_are_standardised_and_targets_lie_ahead(tmp_path, systems):
    d = data(tmp_path)
    torch.testing.assert_close(d.train.x.mean(0), torch.zeros(25), atol=1e-4, rtol=0)
    torch.testing.assert_close(d.train.x.std(0), torch.ones(25), atol=1e-3, rtol=0)
    state, later = d.test.x[:1] * d.std + d.mean, d.test.y[:1] * d.std + d.mean
    moved = integrate(state.view(1, 5, 5), 5, SMALL)[:, -1]
    torch.testing.assert_close(later.view(1, 5, 5).double(), moved, atol=1e-2, rtol=0)
    assert torch.equal(d.train.x[:, 4::5], d.train.y[:, 4::5])


def test_more_training_data_leave_the_rest_as_it_was(tmp_path):
    small, large = data(tmp_path), data(tmp_path, more=14)
    assert len(large.train) == 14 * SMALL.kept
    assert torch.equal(large.train.x[: len(small.train)], small.train.x)
    assert torch.equal(large.test.y, small.test.y)


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"stride": 7}, "ahead"), ({"stride": 0}, "stride"), ({"parts": (20, 4, 6)}, "30 trajectories"), ({"parts": (5, 0, 5)}, "every part")],
)
def test_impossible_data_are_refused(tmp_path, changes, words):
    with pytest.raises(ValueError, match=words):
        data(tmp_path, **changes)


# The law


def test_true_transitions_obey_the_law(tmp_path):
    d = data(tmp_path)
    law = Invariants(d.mean, d.std, SMALL.gravity)
    assert violation(law, d.test.x, d.test.y).max() < 1e-3
    assert violation(law, d.test.x, d.test.x).max() == 0
    assert violation(law, d.test.x, constant_velocity(d.test.x, d.mean, d.std, 5.0)).mean() > 1e-2  # energy is not conserved


def test_the_law_is_energy_and_momentum_in_physical_units(tmp_path):
    d = data(tmp_path)
    states = (d.test.x * d.std + d.mean).view(-1, 5, 5)
    values = Invariants(d.mean, d.std, SMALL.gravity)(d.test.x)
    torch.testing.assert_close(values[:, 0].double(), energy(states, 300), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(values[:, 1:].double(), momentum(states), atol=1e-5, rtol=1e-4)
    by_hand = (values - values.roll(1, 0)).abs() @ torch.tensor([1.0, 10.0, 10.0])
    torch.testing.assert_close(violation(Invariants(d.mean, d.std, 300.0), d.test.x.roll(1, 0), d.test.x), by_hand)


def test_a_prediction_with_bodies_in_one_place_has_a_finite_law():
    law = Invariants(torch.zeros(25), torch.ones(25), 300.0)
    x = torch.ones(1, 25, requires_grad=True)
    law(x).sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_the_projection_reaches_the_law_by_a_short_way(tmp_path):
    d = data(tmp_path)
    law = Invariants(d.mean, d.std, SMALL.gravity)
    torch.manual_seed(0)
    noisy = d.test.y + 0.05 * torch.nn.functional.pad(torch.randn(len(d.test), 5, 4), (0, 1)).flatten(1)
    found = projected(law, d.test.x, noisy)
    assert violation(law, d.test.x, found).max() < 1e-3 < violation(law, d.test.x, noisy).min()
    assert torch.equal(found[:, 4::5], noisy[:, 4::5])
    # y is on the set too, so the nearest point is no farther than y
    assert (moving(found - noisy).norm(dim=1) <= moving(d.test.y - noisy).norm(dim=1) + 1e-4).all()


def test_the_pairwise_network_is_equivariant():
    torch.manual_seed(0)
    net, x = PairNet(16, torch.zeros(25), torch.ones(25)), torch.randn(3, 25)
    order = torch.tensor([3, 0, 4, 1, 2])
    bodies = x.view(3, 5, 5)
    torch.testing.assert_close(net(bodies[:, order].flatten(1)).view(3, 5, 5), net(x).view(3, 5, 5)[:, order])
    aside = torch.tensor([0.7, -0.3, 0, 0, 0]).repeat(5)
    torch.testing.assert_close(net(x + aside), net(x) + aside)


# The cache


@dataclass(frozen=True)
class Settings:
    n: int = 3


def test_what_was_made_is_found_again(tmp_path):
    calls = []

    def make():
        calls.append(1)
        return {"a": torch.arange(3)}

    for _ in range(2):
        assert torch.equal(cached(tmp_path / "new", "x", Settings(), make)["a"], torch.arange(3))
    assert len(calls) == 1
    cached(tmp_path / "new", "x", Settings(4), make)
    assert len(calls) == 2
    assert len(list((tmp_path / "new").iterdir())) == 2  # and no temporary files


@pytest.mark.parametrize("damage", ["truncated", "changed", "empty"])
def test_a_damaged_cache_is_made_again(tmp_path, damage):
    def make():
        return {"a": torch.arange(1000)}

    cached(tmp_path, "x", Settings(), make)
    (path,) = tmp_path.iterdir()
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes({"truncated": content[:-100], "changed": content, "empty": b""}[damage])
    with pytest.warns(UserWarning, match="damaged"):
        assert torch.equal(cached(tmp_path, "x", Settings(), make)["a"], torch.arange(1000))
    assert torch.equal(cached(tmp_path, "x", Settings(), lambda: pytest.fail("made twice"))["a"], torch.arange(1000))


def test_a_folder_that_cannot_be_written_is_told_before_the_work(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="cannot write to"):
        cached(tmp_path / "file" / "folder", "x", Settings(), lambda: pytest.fail("worked first"))


def test_nothing_is_left_of_a_write_that_failed(tmp_path, monkeypatch):
    def fail(_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        cached(tmp_path, "x", Settings(), lambda: {"a": torch.arange(3)})
    assert not list(tmp_path.iterdir())


def test_the_compiled_step_has_the_same_bits():
    system = replace(SMALL, slots=64)
    step, climb = compiled_step(system), Climb(system)
    assert step is not runge_kutta
    given = climb.position, climb.velocity, climb.mass, system.gravity, system.dt / system.substeps
    exact = {"rtol": 0, "atol": 0} if TorchVersion(torch.__version__) >= "2.13" else {"rtol": 1e-12, "atol": 1e-14}
    for ours, expected in zip(step(*given), runge_kutta(*given), strict=True):
        torch.testing.assert_close(ours, expected, **exact)


def test_without_a_compiler_the_generator_runs_as_it_is(monkeypatch):
    def no_compiler(*_):
        raise torch._dynamo.exc.TorchDynamoException("no C++ compiler")

    monkeypatch.setattr(torch, "compile", lambda *_, **__: no_compiler)
    with pytest.warns(UserWarning, match=r"runs uncompiled, .*: no C\+\+ compiler"):
        assert compiled_step(SMALL) is runge_kutta
