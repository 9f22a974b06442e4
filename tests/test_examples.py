"""The examples show what they say they show."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.functional import mse_loss

from tailoring import Tailored, Weights, losses, task_losses

pytestmark = pytest.mark.no_cover  # they train for long, with code that other tests cover
EXAMPLES = Path(__file__).parent.parent / "examples"


def load(name):
    """examples/ is no package, so a module of it is loaded by its path."""
    spec = importlib.util.spec_from_file_location(f"examples_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def one_thread():
    """Small matrices are slowed down by sharing them between cores, the more so beside other tests."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_importing_an_example_does_nothing(path, capfd):
    before = torch.get_rng_state()
    load(path.stem)
    assert capfd.readouterr() == ("", "")
    assert torch.equal(before, torch.get_rng_state())


@pytest.fixture(scope="module")
def sine():
    return load("sine")


def test_sine_learns_to_adapt(sine):
    rows = sine.run(sine.QUICK)
    cn, untrained = rows["CN"], rows["CN, untrained"]
    assert cn.after.mean() <= cn.before.mean() / 2
    assert cn.after.mean() < untrained.after.mean()
    assert cn.after.mean() < rows["CN, 0 steps"].after.mean()  # it is the training through the adaptation that does it
    torch.testing.assert_close(rows["Weights"].after.mean(), rows["MAML by hand"].after.mean(), rtol=0.02, atol=0)
    assert len(sine.table(rows).splitlines()) == 1 + len(rows)


@pytest.mark.parametrize("steps", [1, 3])
def test_weights_are_maml(sine, steps):
    config = sine.Config(tasks=4, width=16)
    net = sine.network(config, torch.nn.Tanh).double()
    support, query = (tuple(t.double() for t in points) for points in sine.draw(config, config.tasks, torch.Generator().manual_seed(0)))
    by_hand = sine.maml_errors(net, support, query, steps=steps, lr=0.02).mean()
    model = Tailored(net, losses.Supervised(mse_loss), adapt=Weights(), steps=steps, lr=0.02, backprop="all")
    *_, ours = task_losses(model, mse_loss, support, query)
    torch.testing.assert_close(ours, by_hand, rtol=1e-12, atol=0)
    parameters = list(net.parameters())
    for a, b in zip(torch.autograd.grad(ours, parameters), torch.autograd.grad(by_hand, parameters), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_the_pendulum_conserves_energy():
    conservation = load("conservation")
    rows = conservation.run(conservation.QUICK)
    assert all(values.isfinite().all() for values in rows.values())
    plain = rows["plain"][:, 1]
    for name, values in rows.items():  # for every seed
        if name.startswith(("tailored", "output")) or name == "meta-tailored, steps=5":
            assert (values[:, 1] < plain).all(), name
    assert (rows["tailored, as tuned"][:, 0] < rows["plain"][:, 0]).all()
    assert (rows["no change"][:, 0] > 100 * rows["plain"][:, 0]).all()  # energy alone would not make a good answer
    assert len(conservation.table(rows).splitlines()) == 1 + len(rows)


@pytest.mark.parametrize("name", ["sine", "conservation"])
def test_the_command_prints_its_table(name, monkeypatch, capsys):
    module = load(name)
    tiny = {"outer_steps": 2, "held_out": 5} if name == "sine" else {"epochs": 1, "meta_epochs": 1, "test": 20, "transitions": 32}
    monkeypatch.setattr(module, "QUICK", module.replace(module.QUICK, **tiny))
    monkeypatch.setattr(sys, "argv", [name, "--quick", "--seed", "3"])
    module.main()
    assert "plain" in (text := capsys.readouterr().out) or "MAML by hand" in text


def test_the_simulation_is_exact():
    conservation = load("conservation")
    state = torch.tensor([[2.5, 1.5], [0.1, 0.0], [-1.0, 0.7]], dtype=torch.float64)
    later = conservation.one_unit_later(state)
    torch.testing.assert_close(later, conservation.one_unit_later(state, substeps=500), rtol=0, atol=1e-8)
    torch.testing.assert_close(conservation.energy(later), conservation.energy(state), rtol=0, atol=1e-8)
    swing = later[1, 0] / state[1, 0]  # a small swing is nearly harmonic
    assert abs(swing - torch.cos(torch.tensor(1.0))) < 1e-3


def test_mammoth_training_makes_the_step_work():
    mammoth = load("mammoth")
    config = mammoth.Config()
    training, test = mammoth.springs(2000, config, 0), mammoth.springs(300, config, 1)
    for order in ("none", "all"):
        model = mammoth.make(config, 0, Weights(), steps=config.steps, lr=0.1, backprop=order)
        mammoth.train(model, training, epochs=8, seed=0)
        assert mammoth.error(model, test) < 0.6 * mammoth.error(model.replace(steps=0), test)
    rows = mammoth.run(mammoth.Config(train=100, test=50, width=8, epochs=6, steps=1, rates=(0.1, 0.1, 0.1), seeds=(0, 1)))
    assert all(len(values) == 2 for values in rows.values())
    assert len(rows) == 17
