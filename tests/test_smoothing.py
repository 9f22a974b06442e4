"""Randomized smoothing: bounds, radii, soundness, tables, attacks, networks."""

from __future__ import annotations

import math

import pytest
import torch
from real_data import SHARED, needs
from scipy import stats
from torch import nn

from tailoring import CN, Tailored, losses
from tailoring.baselines import Shared
from tailoring.losses import input_of
from tailoring.nn import BasicBlock, Bottleneck, cifar_resnet, load_weights, resnet50
from tailoring.smoothing import (
    ABSTAIN,
    Smoothed,
    attack,
    average_radius,
    bootstrap_difference,
    certified_accuracy,
    lower_bound,
    outer_sigma,
    read_log,
)


class HalfPlane(nn.Module):
    """Class 1 where w . x > 0: its smoothed probabilities are known, P(1) = Phi(w . x / (|w| sigma))."""

    def __init__(self, *w):
        super().__init__()
        self.register_buffer("w", torch.tensor(w))

    def forward(self, x):
        score = x.flatten(1) @ self.w
        return torch.stack([-score, score], 1)


def test_the_bound_is_clopper_and_pearsons():
    votes = torch.tensor([0, 1, 57, 99, 100])
    exact = [stats.binomtest(int(k), 100, alternative="greater").proportion_ci(0.999, "exact").low for k in votes]
    torch.testing.assert_close(lower_bound(votes, 100, 0.001), torch.tensor(exact, dtype=torch.float64))
    assert lower_bound(torch.tensor([100_000]), 100_000, 0.001).item() == pytest.approx(0.001 ** (1 / 100_000))


@pytest.mark.parametrize("margin", [0.1, 0.3, 1.0])
def test_the_confidence_holds(margin):
    """The bound lies above the true probability in at most alpha of many certifications, and not in far fewer than it may."""
    alpha, n, trials = 0.1, 200, 400
    smoothed = Smoothed(HalfPlane(3.0, 4.0).eval(), 0.5, batch=n)
    x = torch.tensor([3.0, 4.0]) / 5 * margin
    true = stats.norm.cdf(margin / 0.5)
    votes = torch.stack([smoothed.votes(x, n, seed)[1] for seed in range(trials)])
    failures = int((lower_bound(votes, n, alpha) > true).sum())
    assert stats.binomtest(failures, trials, alpha, alternative="greater").pvalue > 1e-3
    assert failures > alpha * trials / 10


def test_the_radius_is_the_distance_to_the_boundary_at_most_and_nearly():
    smoothed = Smoothed(HalfPlane(1.0, 0.0).eval(), 0.5)
    x = torch.tensor([[0.2, 3.0], [-0.4, 0.0], [0.0, 1.0]])
    found = smoothed.certify(x, n=20_000)
    assert found.label.tolist() == [1, 0, ABSTAIN]
    assert (found.radius <= x[:, 0].abs() + 1e-9).all()
    assert (found.radius[:2] > 0.8 * x[:2, 0].abs()).all()
    assert found.radius[2] == 0


def test_the_most_that_can_be_certified():
    found = Smoothed(lambda x: torch.tensor([[1.0, 0.0]]).expand(len(x), 2), 1.0, batch=10_000).certify(torch.zeros(1, 2), n=100_000)
    assert found.radius.item() == pytest.approx(3.81, abs=0.01)  # of sigma, as said of Cohen et al.'s defaults


def test_noise_inside_the_classifier_gives_no_radius():
    smoothed = Smoothed(HalfPlane(1.0, 0.0).eval(), 0.5, nu=0.3)
    found = smoothed.certify(torch.tensor([[0.3, 0.0]]), n=10_000)
    assert smoothed.outer_sigma == pytest.approx(0.4)
    assert found.radius.item() <= 0.3
    assert found.paper_radius.item() == pytest.approx(found.radius.item() * 0.5 / 0.4)
    assert found.paper_radius.item() > 0.3  # the boundary is at 0.3: the paper's convention is no certificate


def test_a_query_is_certified_alone_as_in_company():
    smoothed = Smoothed(HalfPlane(1.0, 1.0).eval(), 0.5, batch=64)
    x = torch.randn(4, 2, generator=torch.Generator().manual_seed(0))
    together = smoothed.certify(x, n=300, seeds=[7, 8, 9, 10])
    for i in range(4):
        alone = smoothed.certify(x[i : i + 1], n=300, seeds=[7 + i])
        assert (alone.label, alone.votes) == (together.label[i], together.votes[i])
    assert together.votes.tolist() != smoothed.certify(x, n=300, seeds=[1, 2, 3, 4]).votes.tolist()


def test_a_guess_may_be_given():
    asked = []

    def spy(x):
        asked.append(len(x))
        return torch.stack([x[:, 0], -x[:, 0]], 1)

    smoothed, x = Smoothed(spy, 1.0), torch.tensor([[0.5], [-0.8]])
    found = smoothed.certify(x, n=1000)
    assert asked == [100, 1000] * 2
    asked.clear()
    given = smoothed.certify(x, n=1000, guess=found.label.tolist())
    assert asked == [1000] * 2
    assert (given.votes == found.votes).all()
    assert smoothed.certify(x, n=1000, guess=[1, 0]).label.tolist() == [ABSTAIN, ABSTAIN]
    with pytest.raises(ValueError, match="there are 1 guesses for 2 queries"):
        smoothed.certify(x, guess=[1])


def test_the_samples_of_guess_estimate_and_chunks_differ():
    seen = []

    def spy(x):
        seen.append(x)
        return torch.stack([x[:, 0], -x[:, 0]], 1)

    Smoothed(spy, 1.0, batch=50).certify(torch.zeros(2, 3), n0=50, n=100, seeds=[0, 1])
    noise = torch.cat(seen)
    assert len(noise) == 2 * 150
    assert len(noise.unique(dim=0)) == len(noise)
    assert stats.kstest(noise.flatten().numpy(), "norm").pvalue > 1e-3


def test_seeds_may_be_a_tensor():
    smoothed, x = Smoothed(lambda z: torch.cat([z, -z], 1), 0.5), torch.tensor([[0.1], [0.3]])
    numbers, tensor = (smoothed.certify(x, n0=10, n=100, seeds=seeds).votes for seeds in ([5, 6], torch.tensor([5, 6])))
    assert numbers.tolist() == tensor.tolist()


def test_an_answer_that_is_no_number_has_no_vote():
    def sometimes(z):
        return torch.where(z > 0.5, torch.nan, torch.cat([z - z + 1, z - z], 1))

    smoothed, x = Smoothed(sometimes, 1.0), torch.zeros(1, 1)
    votes = smoothed.votes(x[0], 1000, 0)
    assert votes[1] == 0
    assert 600 < votes[0] < 780  # Phi(0.5) of them
    for answer in (torch.nan, torch.inf, -torch.inf):
        silent = Smoothed(lambda z, answer=answer: torch.full((len(z), 2), answer), 1.0)
        assert silent.certify(x, n0=10, n=100).label.tolist() == silent.predict(x, n=100).tolist() == [ABSTAIN]
    impossible = Smoothed(lambda z: torch.tensor([[0.0, -torch.inf]]).expand(len(z), 2), 1.0)
    assert impossible.predict(x, n=100).tolist() == [0]


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(2), nn.Dropout()])
def test_a_layer_in_training_mode_is_refused_whenever_it_is_so(layer):
    net = nn.Sequential(nn.Linear(2, 2), layer).eval()
    smoothed = Smoothed(net, 0.5)
    layer.train()
    for ask in (smoothed.predict, smoothed.certify):
        with pytest.raises(ValueError, match=rf"no radius would hold: 1 \({type(layer).__name__}\) .*in training mode"):
            ask(torch.zeros(1, 2))


@pytest.mark.parametrize(
    ("classifier", "words"),
    [
        (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, track_running_stats=False)), "keeps no running statistics"),
        (Tailored(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), losses.Entropy(), adapt=Shared(CN(nn.Tanh)), lr=1.0), "as a whole: an answer"),
        (nn.Sequential(Tailored(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), losses.Entropy(), adapt=Shared())), "as a whole: an answer"),
    ],
)
def test_a_classifier_whose_answers_depend_on_other_samples_is_refused(classifier, words):
    """Its votes agree with each other, not with those of another batch: radii came out at more than twice the distance to an error."""
    smoothed = Smoothed(classifier.eval(), 1.0)
    for ask in (smoothed.predict, smoothed.certify):
        with pytest.raises(ValueError, match=words):
            ask(torch.zeros(1, 2))


def test_noise_is_the_querys_own_unless_it_is_given():
    smoothed = Smoothed(lambda z: torch.cat([z, -z], 1), 0.5)
    x = torch.tensor([[0.1], [0.1001], [0.1]])
    together = smoothed.certify(x, n0=10, n=1000).votes.tolist()
    assert together == [smoothed.certify(row[None], n0=10, n=1000).votes.item() for row in x]
    assert together[0] == together[2] != together[1]


def test_prediction_abstains_where_the_votes_do_not_tell():
    smoothed = Smoothed(HalfPlane(1.0, 0.0).eval(), 1.0)
    assert smoothed.predict(torch.tensor([[1.0, 0.0], [0.0, 5.0], [-1.0, 0.0]])).tolist() == [1, ABSTAIN, 0]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Smoothed(HalfPlane(1.0), 0.0), "sigma must be positive"),
        (lambda: Smoothed(HalfPlane(1.0).eval(), 0.1, nu=0.2), "below sigma"),
        (lambda: Smoothed(HalfPlane(1.0), 0.5), "eval"),
        (lambda: Smoothed(HalfPlane(1.0).eval(), 0.5, batch=0), "batch"),
        (lambda: Smoothed(HalfPlane(1.0).eval(), 0.5, batch=2.5), "whole number"),
        (lambda: Smoothed(lambda x: x, 0.5).predict(torch.zeros(2, 1)), "two classes or more"),
        (lambda: average_radius(torch.zeros(3, 1), torch.zeros(3), torch.zeros(3)), "shape"),
        (lambda: certified_accuracy(torch.zeros(3), torch.zeros(3), torch.zeros(1), [0.0]), "shape"),
        (lambda: Smoothed(HalfPlane(1.0).eval(), 0.5).certify(torch.zeros(2, 1), alpha=0), "alpha"),
        (lambda: Smoothed(HalfPlane(1.0).eval(), 0.5).certify(torch.zeros(2, 1), n0=0), "at least one sample"),
        (lambda: Smoothed(HalfPlane(1.0).eval(), 0.5).certify(torch.zeros(2)), "a batch of queries"),
        (lambda: Smoothed(HalfPlane(1.0).eval(), 0.5).certify(torch.zeros(0, 1)), "no query"),
        (lambda: Smoothed(HalfPlane(1.0).eval(), 0.5).certify(torch.zeros(2, 1), seeds=[1]), "1 seeds for 2"),
        (lambda: Smoothed(HalfPlane(1.0).eval(), 0.5).certify(torch.zeros(2, 1), seeds=[0.1, 0.9]), r"whole numbers, .* not \[0.1, 0.9\]"),
        (lambda: Smoothed(lambda x: x[:, 0], 0.5).certify(torch.zeros(2, 1)), "logits"),
        (lambda: attack(Smoothed(HalfPlane(1.0).eval(), 0.5), torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64), 1.0, steps=0), "step"),
        (lambda: bootstrap_difference(torch.zeros(2), torch.zeros(3)), "two values for each query"),
    ],
)
def test_what_makes_no_sense_is_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


# Tailored classifiers


@pytest.fixture(scope="module")
def tailored():
    """A small classifier of three Gaussian blobs, tailored to be smooth."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3))
    centres = 2 * torch.eye(4)[:3]
    label = torch.arange(600) % 3
    x = centres[label] + 0.5 * torch.randn(600, 4)
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(200):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x + 0.5 * torch.randn_like(x)), label).backward()
        optimizer.step()
    model = Tailored(net.eval(), losses.Smooth(0.2, at=input_of("4")), adapt=CN(nn.Tanh), steps=1, lr=0.5, backprop="all").eval()
    return model, x[:24], label[:24]


def test_a_tailored_classifier_goes_in_as_it_is(tailored):
    model, x, label = tailored
    plain = Smoothed(model.net, 0.5).certify(x, n=500)
    with torch.no_grad():
        found = Smoothed(model, 0.5, nu=0.2).certify(x, n=500)
    assert float((found.label == label).double().mean()) > 0.8
    assert not torch.equal(found.votes, plain.votes)
    assert found.radius.max() <= math.sqrt(0.5**2 - 0.2**2) * 3.2


def test_every_sample_is_tailored_by_itself(tailored):
    """Votes do not change when samples are tailored one at a time."""
    model, x, _ = tailored
    noisy = x[0] + 0.4 * torch.randn(30, 4, generator=torch.Generator().manual_seed(3))
    alone = torch.cat([model(row[None]) for row in noisy])
    torch.testing.assert_close(model(noisy), alone)
    assert not torch.allclose(model(noisy), model.net(noisy), atol=1e-3)


def test_no_adversary_succeeds_within_a_certified_radius(tailored):
    model, x, _ = tailored
    smoothed = Smoothed(model, 0.5, nu=0.2)
    found = smoothed.certify(x, n=2000, alpha=1e-4)
    sure = found.label != ABSTAIN
    assert sure.sum() > 15
    x, label, radius = x[sure], found.label[sure], found.radius[sure].float()
    moved = attack(smoothed, x, label, radius, steps=15, samples=32)
    assert ((moved - x).norm(dim=1) <= radius * 1.001).all()
    assert ((moved - x).norm(dim=1) >= radius * 0.9).all()  # it does go to the edge
    answers = smoothed.predict(moved, n=2000, alpha=1e-4)
    assert ((answers == label) | (answers == ABSTAIN)).all()


def test_the_adversary_is_one(tailored):
    """Beyond the radius, the same attack does change answers: else the test above would show nothing."""
    model, x, _ = tailored
    smoothed = Smoothed(model, 0.5, nu=0.2)
    label = smoothed.predict(x, n=500)
    keep = label != ABSTAIN
    moved = attack(smoothed, x[keep], label[keep], 2.0, steps=15, samples=32)
    assert (smoothed.predict(moved, n=500) != label[keep]).double().mean() > 0.5


def test_the_attack_uses_the_gradient_through_tailoring(tailored):
    model, x, label = tailored
    exact = attack(Smoothed(model, 0.5, nu=0.2), x, label, 0.5, steps=1, samples=8)
    blind = attack(Smoothed(model.replace(backprop="none").eval(), 0.5, nu=0.2), x, label, 0.5, steps=1, samples=8)
    assert not torch.allclose(exact, blind, atol=1e-4)


# Tables


def test_accuracy_and_average_radius_count_right_answers_only():
    truth, label, radius = torch.tensor([0, 1, 2, 3]), torch.tensor([0, 1, 1, -1]), torch.tensor([0.5, 1.0, 2.0, 0.0])
    assert certified_accuracy(truth, label, radius, [0, 0.5, 0.6, 1.5]) == [0.5, 0.5, 0.25, 0.0]
    assert average_radius(truth, label, radius) == pytest.approx(0.375)


def test_the_bootstrap_covers():
    random = torch.Generator().manual_seed(0)
    covered = 0
    for seed in range(100):
        a, b = torch.randn(60, generator=random) + 0.3, torch.randn(60, generator=random)
        mean, low, high = bootstrap_difference(a, b, draws=500, seed=seed)
        assert low < mean < high
        covered += low < 0.3 < high
    assert 85 <= covered <= 100


@needs("smoothing-logs")
@pytest.mark.parametrize(("data", "network"), [("cifar10", "resnet110"), ("imagenet", "resnet50")])
def test_the_published_tables_are_reproduced_from_the_published_logs(data, network):
    lines = (SHARED / "smoothing-logs" / "published" / f"vary_noise_{data}").read_text().splitlines()
    radii = [float(cell.split("=")[1]) for cell in lines[0].split("|") if "=" in cell]
    compared = 0
    for line in lines[2:]:
        sigma = float(line.split("=")[1].split("<")[0])
        published = [float(cell.replace("<b>*</b>", "")) for cell in line.split("|")[1:] if cell.strip()]
        folder = SHARED / "smoothing-logs" / "certify" / data / network / f"noise_{sigma:.2f}" / "test"
        log = read_log(folder / f"sigma_{sigma:.2f}")
        ours = certified_accuracy(log["label"], log["predict"], log["radius"], radii)
        assert [f"{value:.2f}" for value in ours] == [f"{value:.2f}" for value in published]
        compared += len(published)
    assert compared >= 18


@needs("smoothing-logs")
def test_the_average_radii_of_the_logs_are_not_those_that_the_paper_compares_with():
    acr = []
    for sigma in ("0.25", "0.50", "1.00"):
        log = read_log(SHARED / "smoothing-logs" / "certify" / "cifar10" / "resnet110" / f"noise_{sigma}" / "test" / f"sigma_{sigma}")
        acr.append(average_radius(log["label"], log["predict"], log["radius"]))
    assert acr == pytest.approx([0.429, 0.538, 0.542], abs=5e-4)  # the paper's table has 0.416, 0.491, 0.458


def test_a_log_that_was_cut_off_keeps_its_whole_lines(tmp_path):
    (tmp_path / "log").write_text("idx\tlabel\tpredict\tradius\tcorrect\ttime\n0\t3\t3\t0.5\t1\t0:00:01\n20\t7\t-1\t0.0")
    log = read_log(tmp_path / "log")
    assert log["idx"].tolist() == [0]
    (tmp_path / "empty").write_text("idx\tlabel\n")
    with pytest.raises(ValueError, match="no certificates"):
        read_log(tmp_path / "empty")


# Networks


def test_cifar_networks_have_the_published_sizes():
    sizes = {depth: sum(p.numel() for p in cifar_resnet(depth, shortcut="pad").parameters()) for depth in (20, 56, 110)}
    assert sizes == {20: 269_722, 56: 853_018, 110: 1_727_962}  # He et al.: 0.27M, 0.85M, 1.7M
    assert sum(p.numel() for p in resnet50().parameters()) == 25_557_032  # torchvision's
    with pytest.raises(ValueError, match="6n"):
        cifar_resnet(21)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"shortcut": "Pad"}, r"shortcut must be 'conv' \(convolutions\) or 'pad' \(zeros\), not 'Pad'"),
        ({"statistics": "imagenet"}, r"a pair \(means, deviations\), three numbers each, .* not 'imagenet'"),
        ({"statistics": "ab"}, "a pair"),
        ({"statistics": ((0.5,), (0.2,))}, "three numbers each"),
        ({"statistics": ((0.5,) * 3, (0.0,) * 3)}, "deviations above 0"),
    ],
)
def test_a_network_of_unknown_shortcuts_or_statistics_is_refused(given, words):
    with pytest.raises(ValueError, match=words):
        cifar_resnet(8, **given)


def made_checkpoint(net, rename):
    torch.manual_seed(1)
    return {rename(name): torch.rand_like(t) if t.is_floating_point() else t for name, t in net.state_dict().items()}


@pytest.mark.parametrize(
    ("rename", "wrap"),
    [
        (lambda name: name, lambda state: state),
        (lambda name: f"1.{name}", lambda state: {"epoch": 90, "arch": "cifar_resnet110", "state_dict": state, "optimizer": {}}),
        (lambda name: f"1.module.{name}", lambda state: {"state_dict": state}),
        (lambda name: "module." + name.replace("fc.", "linear."), lambda state: {"state_dict": state, "best_prec1": 92.0}),
    ],
)
def test_checkpoints_of_every_layout_load(rename, wrap):
    net = cifar_resnet(8)
    state = made_checkpoint(net, rename)
    load_weights(net, wrap(state))
    for name, value in net.state_dict().items():
        assert torch.equal(value, state[rename(name)])


def test_a_checkpoint_without_batch_counts_loads():
    net = cifar_resnet(8)
    load_weights(net, {name: t for name, t in net.state_dict().items() if "num_batches" not in name})


def test_a_checkpoint_whose_shortcuts_are_others_says_so():
    with pytest.raises(ValueError, match=r"lacks \['layer2.0.downsample.*shortcut='pad'\?"):
        load_weights(cifar_resnet(8), cifar_resnet(8, shortcut="pad").state_dict())
    with pytest.raises(ValueError, match=r"network: it has \['layer2.0.downsample[^?]*$"):
        load_weights(cifar_resnet(8, shortcut="pad"), cifar_resnet(8).state_dict())


@pytest.mark.parametrize("other", [cifar_resnet(14), cifar_resnet(8, classes=7), cifar_resnet(8, shortcut="pad")])
def test_a_checkpoint_of_another_network_is_refused(other):
    net = cifar_resnet(8)
    before = {name: t.clone() for name, t in net.state_dict().items()}
    with pytest.raises(ValueError, match="another network"):
        load_weights(net, other.state_dict())
    assert all(torch.equal(t, before[name]) for name, t in net.state_dict().items())


def test_resnet50_has_torchvisions_names():
    names = set(resnet50().state_dict())
    expected = {
        "conv1.weight",
        "bn1.running_mean",
        "layer1.0.downsample.0.weight",
        "layer4.2.bn3.weight",
        "layer3.5.conv2.weight",
        "fc.bias",
    }
    assert expected <= names
    assert len(names) == 320
    assert resnet50(classes=5).eval()(torch.rand(1, 3, 64, 64)).shape == (1, 5)


@pytest.mark.parametrize("block", [BasicBlock, Bottleneck])
def test_cn_after_each_block_starts_at_the_identity(block):
    torch.manual_seed(0)
    net = (cifar_resnet(8) if block is BasicBlock else resnet50(classes=4)).eval()
    x = torch.rand(2, 3, 32, 32)
    model = Tailored(net, losses.Smooth(0.1, at=input_of("fc")), adapt=CN(block), steps=1, lr=0.1)
    assert len(model.adapt.sites(net, x)) == (3 if block is BasicBlock else 16)
    torch.testing.assert_close(next(iter(model.path(x))), net(x))
    assert not torch.equal(model(x), net(x))


@needs("resnet-cifar10")
def test_the_public_weights_are_what_we_load():
    from safetensors.torch import load_file

    from tailoring.nn._resnet import IMAGENET

    net = cifar_resnet(20, shortcut="pad", statistics=IMAGENET)
    load_weights(net, load_file(SHARED / "resnet-cifar10" / "resnet20.safetensors"))
    assert net.eval()(torch.rand(2, 3, 32, 32)).shape == (2, 10)


def test_a_bootstrap_of_many_images_goes_in_parts(monkeypatch):
    a, b = torch.rand(2, 50, generator=torch.Generator().manual_seed(0))
    whole = bootstrap_difference(a, b, draws=400)
    monkeypatch.setattr("tailoring.smoothing._tables._MOST_NUMBERS", 120)
    assert bootstrap_difference(a, b, draws=400) == whole


def test_a_guess_may_abstain_and_must_be_a_class():
    smoothed = Smoothed(lambda x: torch.stack([-x[:, 0], x[:, 0]], 1), 0.5, batch=64)
    x = torch.tensor([[2.0, 0.0], [2.0, 0.0]])
    found = smoothed.certify(x, n=1000, guess=[-1, 1])
    assert found.label.tolist() == [-1, 1]
    assert found.radius[0] == 0 < found.radius[1]
    for guess in ([7, 1], [0.5, 1], [-2, 1]):
        with pytest.raises(ValueError, match="guess"):
            smoothed.certify(x, n=10, guess=guess)


def test_an_attack_says_what_it_cannot_attack():
    smoothed, x = Smoothed(HalfPlane(1.0).eval(), 0.5), torch.zeros(2, 1)
    for label, radius in (([0, -1], 1.0), ([0, 1], torch.tensor([0.5, -0.5]))):
        with pytest.raises(ValueError, match="leave out queries where a certificate abstains"):
            attack(smoothed, x, torch.tensor(label), radius)
    for label in (torch.tensor([0]), torch.tensor(0), [0, 1], torch.tensor([[0], [1]])):  # of one, the second query stayed where it was
        with pytest.raises(ValueError, match="one class for each of the 2 queries, not "):
            attack(smoothed, x, label, 1.0)
    with pytest.raises(TypeError, match=r"radius must be a number, or a tensor with one for each query, not \[0.1, 0.2\]"):
        attack(smoothed, x, torch.tensor([0, 1]), [0.1, 0.2])
    with pytest.raises(ValueError, match=r"a tensor of 2 \(one for each query\), not of shape \(3,\)"):
        attack(smoothed, x, torch.tensor([0, 1]), torch.ones(3))


@pytest.mark.parametrize(
    ("answer", "kind"), [(lambda z: (z, z), "tuple"), (lambda z: {"logits": z}, "dict"), (lambda z: z.numpy(), "ndarray")]
)
def test_a_classifier_that_answers_no_tensor_is_told_what_to_do(answer, kind):
    smoothed, x = Smoothed(lambda x: answer(torch.cat([x, -x], 1).detach()), 0.5), torch.zeros(1, 1)
    for ask in (smoothed.predict, smoothed.certify, lambda x: attack(smoothed, x, torch.zeros(1, dtype=torch.int64), 1.0)):
        with pytest.raises(TypeError, match=rf"must return logits, a tensor \(n, classes\), not {kind}: wrap it"):
            ask(x)


def test_extreme_settings_give_no_infinite_radius_and_no_nonsense():
    assert lower_bound(torch.tensor([100]), 100, 1 - 1e-16).item() < 1
    for votes, alpha in ((11, 0.001), (-1, 0.001), (5, 1.5)):
        with pytest.raises(ValueError, match="a bound takes"):
            lower_bound(torch.tensor([votes]), 10, alpha)
    with pytest.raises(ValueError, match="below sigma"):
        outer_sigma(0.1, 0.5)
    right = torch.tensor([0, 0], dtype=torch.uint8), torch.tensor([1, 1], dtype=torch.uint8)
    assert bootstrap_difference(*right) == (-1.0, -1.0, -1.0)
    with pytest.raises(ValueError, match="an interval takes"):
        bootstrap_difference(torch.zeros(0), torch.zeros(0))
