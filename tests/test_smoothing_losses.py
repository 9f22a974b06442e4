"""Certified robustness, how classifiers are trained and tailored: noise, attacks, losses, settings, probes."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import pytest
import torch
from scipy import stats
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tailoring import theory
from tailoring.experiments._classifiers import Inner, blocks, build, tailored
from tailoring.experiments._images import TensorImages
from tailoring.experiments._smoothing_losses import Macer, RobustLoss, SmoothAdv, adversarial, macer_loss, shifted
from tailoring.experiments._smoothing_plan import regimes
from tailoring.experiments._smoothing_probe import probe
from tailoring.random import fold, normal, seeds_of

# The losses


def macer_by_hand(logits, y, sigma, s):
    """Zhai et al.'s Algorithm 1, image by image, in plain numbers."""
    total = 0.0
    for copies, label in zip(logits.tolist(), y.tolist(), strict=True):

        def mean(sharpness, copies=copies):
            rows = [[math.exp(sharpness * v) for v in row] for row in copies]
            return [sum(row[c] / sum(row) for row in rows) / len(rows) for c in range(len(copies[0]))]

        total -= math.log(mean(1.0)[label])
        q = mean(s.sharpness)
        other = max(p for c, p in enumerate(q) if c != label)
        if q[label] > other:
            total += s.weight * sigma / 2 * max(s.margin - (stats.norm.ppf(q[label]) - stats.norm.ppf(other)), 0)
    return total / len(y)


@pytest.mark.parametrize("spread", [0.1, 0.5, 1.5])
def test_macer_is_its_formula(spread):
    random = torch.Generator().manual_seed(0)
    logits, y = spread * torch.randn(20, 5, 4, generator=random), torch.arange(20) % 4
    settings = Macer(weight=3.0, margin=2.0, sharpness=2.0)
    assert float(macer_loss(logits, y, 0.5, settings)) == pytest.approx(macer_by_hand(logits, y, 0.5, settings), rel=1e-4)


def test_macer_asks_nothing_of_the_wrong_and_of_the_far_and_stays_finite():
    logits = torch.tensor([[[9.0, 0.0]], [[0.0, 0.3]], [[80.0, -80.0]]], requires_grad=True)  # far, wrong, far beyond float32
    y = torch.zeros(3, dtype=torch.int64)
    loss = macer_loss(logits, y, 0.5, Macer(sharpness=1.0, margin=2.0))
    torch.testing.assert_close(loss, F.cross_entropy(logits.squeeze(1), y))
    (gradient,) = torch.autograd.grad(macer_loss(logits, y, 0.5, Macer()), logits)
    assert gradient.isfinite().all()
    near = torch.tensor([[[0.5, 0.0]]], requires_grad=True)
    (gradient,) = torch.autograd.grad(macer_loss(near, y[:1], 0.5, Macer(sharpness=1.0)), near)
    assert float(gradient[0, 0, 0]) < -1  # downhill is a larger radius


def attacked_by_hand(net, x, y, noise, radius, steps):
    """Salman et al.'s attack on the smoothed classifier, image by image."""
    found = []
    for image, label, draws in zip(x, y, noise, strict=True):
        delta = torch.zeros_like(image)
        for _ in range(steps):
            delta.requires_grad_()
            p = torch.stack([net((image + delta + e)[None]).softmax(1)[0, label] for e in draws]).mean()
            (g,) = torch.autograd.grad(-p.log(), delta)
            delta = delta.detach() + 2 * radius / steps * g / g.norm()
            if delta.norm() > radius:
                delta = radius * delta / delta.norm()
            delta = (image + delta).clamp(0, 1) - image
        found.append(image + delta)
    return torch.stack(found)


def test_the_attack_is_its_algorithm():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 3)).double()
    x, y, noise = torch.rand(5, 3, 2, 2).double(), torch.arange(5) % 3, 0.3 * torch.randn(5, 4, 3, 2, 2).double()
    found = adversarial(net, x, y, noise, 0.4, 3)
    torch.testing.assert_close(found, attacked_by_hand(net, x, y, noise, 0.4, 3))
    assert (found - x).flatten(1).norm(dim=1).max() <= 0.4 + 1e-9
    assert 0 <= found.min() <= found.max() <= 1

    def risk(images):
        p = net((images[:, None] + noise).flatten(0, 1)).softmax(1).unflatten(0, (5, 4)).mean(1)
        return -p.gather(1, y[:, None]).log().squeeze(1)

    assert (risk(found) > risk(x)).all()


def images(n=6, size=16):
    return torch.randint(0, 256, (n, 3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def test_images_are_shifted_and_mirrored_by_their_own_seeds():
    x = images(40)
    moved = shifted(x, seeds_of(x))
    padded, mirrored = F.pad(x, (2, 2, 2, 2)), 0
    for image, source in zip(moved, padded, strict=True):
        ways = {
            flip
            for flip in (False, True)
            for i in range(5)
            for j in range(5)
            if torch.equal(image.flip(2) if flip else image, source[:, i : i + 16, j : j + 16])
        }
        assert len(ways) == 1
        mirrored += True in ways
    assert 8 < mirrored < 32
    assert torch.equal(shifted(x[3:4], seeds_of(x[3:4]))[0], moved[3])


class Seen(nn.Module):
    """Keeps what it is asked."""

    def forward(self, x):
        self.x = x.detach()
        return x.flatten(1)[:, :2]


def test_noise_belongs_to_image_and_epoch_and_has_its_size():
    x, y, net = images(), torch.zeros(6, dtype=torch.int64), Seen()
    loss = RobustLoss(net, "noise", 0.5, seed=3, frozen=True, augment=False)

    def asked(x, epoch):
        loss.start_epoch(epoch)
        loss(x, y[: len(x)])
        return net.x

    first = asked(x, 0)
    assert float((first - x / 255).std()) == pytest.approx(0.5, rel=0.05)
    assert torch.equal(asked(x.flip(0), 0).flip(0), first)
    assert torch.equal(asked(x[2:3], 0)[0], first[2])
    assert not torch.equal(asked(x, 1), first)
    assert torch.equal(asked(x, 0), first)


def small(inner=None, seed=0):
    torch.manual_seed(seed)
    net = build("resnet8", 4)
    for module in net.modules():  # statistics that differ from those of a batch
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
    return net.eval(), tailored(net, inner or Inner(lr=10.0)).eval()


@pytest.mark.parametrize("frozen", [True, False])
def test_meta_tailoring_is_tailoring_in_eval_mode_then_the_task_loss(frozen):
    x, y = images(), torch.arange(6) % 4
    net, model = small()
    loss = RobustLoss(model, "noise", 0.4, seed=0, frozen=frozen, augment=False)
    seen: list[torch.Tensor] = []
    hook = net.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    before = {name: t.clone() for name, t in net.state_dict().items()}
    found = loss(x, y)
    found.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())
    hook.remove()
    after = net.state_dict()
    moved = {name for name in before if "running_mean" in name and not torch.equal(before[name], after[name])}
    assert (not moved) if frozen else len(moved) == sum(isinstance(m, nn.BatchNorm2d) for m in net.modules())
    net.load_state_dict(before)
    state = model.eval().tailor(seen[-1])  # what the last pass was asked are the noisy images
    if not frozen:
        net.train()
    torch.testing.assert_close(found, F.cross_entropy(model.predict(seen[-1], state), y))


@pytest.mark.parametrize("method", ["macer", "smoothadv"])
def test_methods_see_as_many_copies_as_they_ask_for(method):
    x, y = images(), torch.zeros(6, dtype=torch.int64)
    net = Seen()
    RobustLoss(net, method, 0.5, seed=0, frozen=True, macer=Macer(copies=5), smoothadv=SmoothAdv(copies=3))(x, y)
    copies = {"macer": 5, "smoothadv": 3}[method]
    noisy = net.x.unflatten(0, (6, copies))
    assert len(net.x) == 6 * copies
    assert float((noisy - noisy.mean(1, keepdim=True)).std()) > 0.3  # of one image, with different noise


# How a classifier is tailored


def lengths_of(net, x, inner):
    """How far the step moves each query."""
    moved = tailored(net, inner).tailor(x)
    return sum(((t - float("gamma" in name)) ** 2).sum(1) for name, t in moved.items()).sqrt()


def test_the_settings_of_the_search_do_what_they_say():
    net = build("resnet20", 4).eval()
    names = blocks(net)
    assert len(names) == 9
    x = torch.rand(2, 3, 16, 16)

    def sites(**changes):
        adapt = tailored(net, replace(Inner(), **changes)).adapt
        return {site.module for site in adapt.sites(net, x)}

    assert sites() == set(names)
    assert sites(where="lower") == set(names[:5])
    assert sites(where="upper") == set(names[5:])
    assert sites(adapt="weights") == {f"{names[-1]}.{layer}" for layer in ("conv1", "bn1", "conv2", "bn2")}
    torch.testing.assert_close(lengths_of(net, x, Inner(lr=0.7, normalised=True)), torch.full((2,), 0.7), rtol=1e-3, atol=0)
    shortest = 0.5 * lengths_of(net, x, Inner(lr=1.0)).min().item()
    torch.testing.assert_close(lengths_of(net, x, Inner(lr=3.0, clip=shortest)), torch.full((2,), 3 * shortest), rtol=1e-3, atol=0)
    assert all(tailored(net, inner, backprop=inner.backprop) for inner in regimes(Inner()).values())


def test_a_probe_asks_the_same_noisy_images_with_the_step_and_without():
    torch.manual_seed(0)
    net, labels = build("resnet8", 3).eval(), torch.tensor([0, 1, 2, 0, 1, 2])
    part = TensorImages((255 * torch.rand(6, 3, 8, 8)).byte(), labels)
    ask = functools.partial(probe, part=part, sigma=0.5, copies=3, seed=1, device=torch.device("cpu"))
    model = tailored(net, Inner(lr=3.0))
    found = ask(model, batch=4)
    probabilities, votes, cosines = [], [], []
    for copy in range(3):
        x = part.images.float() / 255 + 0.5 * normal(fold(fold(torch.arange(6), 1), copy), (3, 8, 8))
        with torch.no_grad():
            answers = torch.stack([answer(x) for answer in (model, net)])
        votes.append(answers.argmax(2) == labels)
        probabilities.append(answers.softmax(2)[:, torch.arange(6), labels])
        cosines.append(theory.alignment(model, [(x, labels)], torch.nn.functional.cross_entropy).cosine)
    angles = torch.stack(cosines).mean(0)
    torch.testing.assert_close(torch.tensor(found.cosines), angles, rtol=0, atol=1e-4)
    some = next(count for count in found.right_0 if found.right_0.count(count) < 6)
    chosen = angles[torch.tensor(found.right_0) == some]
    assert [found.cosine()[0], found.cosine(some)[0]] == pytest.approx([float(angles.mean()), float(chosen.mean())], abs=1e-4)
    assert [found.right, found.right_0] == torch.stack(votes).sum(0).tolist()
    gained = torch.stack(probabilities).mean(0)
    torch.testing.assert_close(torch.tensor(found.gained), gained[0] - gained[1], rtol=0, atol=1e-5)
    assert found.probability_gain[0] == pytest.approx(float((gained[0] - gained[1]).mean()), abs=1e-5)
    assert found.accuracy_gain[0] == pytest.approx((sum(found.right) - sum(found.right_0)) / 18)
    assert any(found.gained)
    idle = ask(tailored(net, Inner(lr=0.0)), batch=6)
    assert (idle.right, idle.right_0, idle.gained) == (found.right_0, found.right_0, [0.0] * 6)


def test_an_attack_copies_no_number_to_the_device():
    """Trainings are recorded as CUDA graphs, and while one records, nothing may come from the CPU."""
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x, y, noise = torch.rand(2, 3, 4, 4), torch.tensor([0, 1]), torch.randn(2, 2, 3, 4, 4)
    with Watch():
        adversarial(lambda images: images.flatten(1)[:, :3], x, y, noise, 1.0, 2)
    assert torch.ops.aten.logsumexp.default in seen
    assert torch.ops.aten.lift_fresh.default not in seen


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_compiled_noise_is_the_same():
    seeds = torch.arange(50, device="cuda")
    for shape in ((192,), (1, 3, 8, 8)):
        expected = normal(seeds, shape).flatten(1)
        compiled = torch.compile(lambda s, shape=shape: (normal(s, shape).flatten(1), normal(s, shape).flatten(1).sum(1)), dynamic=False)
        found, total = compiled(seeds)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(total, expected.sum(1), atol=1e-3, rtol=1e-3)
