"""How networks are trained: side by side, in recorded graphs, stopped and gone on with."""

from __future__ import annotations

import pytest
import torch
from lightning_fabric import Fabric
from torch import nn

from tailoring.experiments._train import Learner, Schedule, train, trained


class Squares(nn.Module):
    """Two terms, so that summing them and stepping on each can be told apart."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def losses(self, x, y):
        yield (self.net(x) - y).square().mean()
        yield (self.net(x) - y).abs().mean()

    def forward(self, x, y):
        return sum(self.losses(x, y), start=x.new_zeros(()))


def learner(name, seed=0, **changes):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    return Learner(name, net, Squares(net), seed, **changes)


def problem():
    torch.manual_seed(5)
    x = torch.randn(64, 3)
    return x, x.sum(1, keepdim=True)


def fit(folder, learners, epochs=6, **changes):
    x, y = problem()
    schedule = Schedule(epochs, 16, 1e-2, **changes)
    train(learners, x, y, schedule, fabric=Fabric(accelerator="cpu"), folder=folder, progress=lambda *_: None)
    return [trained(folder, item.name) for item in learners]


def same(a, b):
    return all(torch.equal(a[0][name], b[0][name]) for name in a[0])


def test_side_by_side_is_as_alone(tmp_path):
    together = fit(tmp_path / "two", [learner("a"), learner("b", 1)])
    alone = [fit(tmp_path / "one", [learner("a")])[0], fit(tmp_path / "one", [learner("b", 1)])[0]]
    assert same(together[0], alone[0])
    assert same(together[1], alone[1])
    assert not same(together[0], together[1])


def test_training_is_adam_on_shuffled_batches_with_a_cosine(tmp_path):
    (found,) = fit(tmp_path, [learner("a")], epochs=3)
    x, y = problem()
    net = learner("a").net
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for epoch in range(3):
        order = torch.randperm(64, generator=torch.Generator().manual_seed(epoch)).view(4, 16)
        for i, rows in enumerate(order):
            optimizer.param_groups[0]["lr"] = 1e-2 * (1 + torch.cos(torch.tensor((epoch + i / 4) / 3 * torch.pi)).item()) / 2
            optimizer.zero_grad()
            Squares(net)(x[rows], y[rows]).backward()
            optimizer.step()
    for name, value in net.state_dict().items():
        torch.testing.assert_close(found[0][name], value, atol=1e-5, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_recorded_graph_trains_as_the_cpu_does(tmp_path):
    x, y = (t.cuda() for t in problem())
    learners = [learner("a"), learner("b", 1, each=True)]
    train(learners, x, y, Schedule(6, 16, 1e-2), fabric=Fabric(accelerator="cuda"), folder=tmp_path, progress=lambda *_: None)
    expected = fit(tmp_path / "cpu", [learner("a"), learner("b", 1, each=True)])
    for item, weights in zip(learners, expected, strict=True):
        for name, value in trained(tmp_path, item.name)[0].items():
            torch.testing.assert_close(value, weights[0][name], atol=1e-4, rtol=1e-3)


def test_each_steps_after_every_loss(tmp_path):
    summed, each = fit(tmp_path, [learner("sum"), learner("each", each=True)])
    assert not same(summed, each)


def test_the_best_on_validation_is_kept(tmp_path):
    seen = []

    def validate(net):
        seen.append(float(next(net.parameters()).detach().sum()))
        return abs(len(seen) - 2.0)  # the second is the best

    fit(tmp_path, [learner("a", validate=validate)], epochs=4, validations=4)
    best, curve = trained(tmp_path, "a", best=True)
    assert [loss for _, loss in curve] == [1.0, 0.0, 1.0, 2.0]
    assert float(best["0.weight"].sum()) == seen[1]


def test_a_stopped_training_goes_on_to_the_same_result(tmp_path):
    class StopError(Exception):
        pass

    def stop(what, done, total):
        if done == 4:
            raise StopError

    whole = fit(tmp_path / "whole", [learner("a"), learner("b", 1, each=True)])
    x, y = problem()
    schedule = Schedule(6, 16, 1e-2, checkpoint_seconds=0)
    with pytest.raises(StopError):
        train([learner("a"), learner("b", 1, each=True)], x, y, schedule, fabric=Fabric(accelerator="cpu"), folder=tmp_path, progress=stop)
    assert trained(tmp_path, "a") is None
    epochs = []
    again = [learner("a"), learner("b", 1, each=True)]
    progress = lambda what, done, total: epochs.append(done)  # noqa: E731
    train(again, x, y, schedule, fabric=Fabric(accelerator="cpu"), folder=tmp_path, progress=progress)
    assert epochs == [5, 6]  # from the checkpoint, not from the start
    assert same(whole[0], trained(tmp_path, "a"))
    assert same(whole[1], trained(tmp_path, "b"))
    assert not list(tmp_path.glob("*.checkpoint"))


def test_a_checkpoint_of_another_training_is_refused(tmp_path):
    x, y = problem()

    def stop(what, done, total):
        if done == 2:
            raise KeyboardInterrupt

    schedule = Schedule(6, 16, 1e-2, checkpoint_seconds=0)
    with pytest.raises(KeyboardInterrupt):
        train([learner("a")], x, y, schedule, fabric=Fabric(accelerator="cpu"), folder=tmp_path, progress=stop)
    with pytest.raises(ValueError, match="other settings"):
        fit(tmp_path, [learner("a")], epochs=7)


def test_impossible_trainings_are_refused(tmp_path):
    with pytest.raises(ValueError, match="larger than the training set"):
        train(
            [learner("a")],
            torch.zeros(3, 3),
            torch.zeros(3, 1),
            Schedule(1, 16, 0.1),
            fabric=Fabric(accelerator="cpu"),
            folder=tmp_path,
            progress=print,
        )
