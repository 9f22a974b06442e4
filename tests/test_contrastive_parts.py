"""The contrastive experiment's parts: networks, the loss of the pre-training, views, tailored representations, linear layers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from contrastive_tiny import TINY
from torch import nn
from torch.nn import functional as F

from tailoring import Shift, Tailored, losses, outer_losses
from tailoring.experiments._contrastive_data import draw, made
from tailoring.experiments._contrastive_linear import Task, fit
from tailoring.experiments._contrastive_nets import Pretraining, SimCLR, mlp, nt_xent
from tailoring.experiments._contrastive_plan import Variant
from tailoring.experiments._contrastive_tailor import (
    Classifier,
    Encoder,
    StoredAgreement,
    StoredRotation,
    after_each_step,
    agreement_model,
    encoder_model,
    image_seeds,
    represent,
)
from tailoring.experiments._contrastive_views import Augment, make_views, view_seeds
from tailoring.nn import resnet18, resnet50

# Networks


def count(net):
    return sum(p.numel() for p in net.parameters())


def test_resnets_have_the_published_sizes():
    assert count(resnet18()) == 11_689_512  # torchvision's
    assert count(resnet18(classes=10, stem="cifar")) == 11_173_962
    assert count(resnet50(classes=10, stem="cifar")) == 23_520_842
    with pytest.raises(ValueError, match="stem"):
        resnet18(stem="mnist")


def test_the_cifar_stem_keeps_the_pixels():
    for net, pixels in ((resnet18(stem="cifar"), 32), (resnet18(), 8)):
        seen = []
        net.layer1.register_forward_hook(lambda *args, seen=seen: seen.append(args[-1].shape[-1]))
        net.eval()(torch.rand(1, 3, 32, 32))
        assert seen == [pixels]


# Loss of the pre-training


def test_nt_xent_is_its_definition():
    torch.manual_seed(0)
    z, t = torch.randn(8, 5, dtype=torch.float64).float(), 0.5
    total = 0.0
    for i in range(8):
        j = i + 1 if i % 2 == 0 else i - 1
        similarity = [math.exp(float(F.cosine_similarity(z[i], z[k], dim=0)) / t) for k in range(8)]
        total -= math.log(similarity[j] / sum(s for k, s in enumerate(similarity) if k != i))
    assert float(nt_xent(z, t)) == pytest.approx(total / 8, rel=1e-5)


def test_pre_training_lowers_its_loss_with_new_views_each_time():
    torch.manual_seed(0)
    objective = Pretraining(SimCLR(TINY), Augment(), TINY)
    x, y = made("train", 32)[0].float(), torch.arange(32).float()
    rule = torch.optim.Adam(objective.parameters(), lr=3e-3)
    values = []
    for _ in range(40):
        loss = objective(x, y)
        rule.zero_grad()
        loss.backward()
        rule.step()
        values.append(loss.item())
    assert sum(values[-5:]) < sum(values[:5]) - 2.5
    assert int(objective.net.clock) == 40
    with torch.no_grad():
        assert objective(x, y).item() != objective(x, y).item()  # other views


# Views


def some_images(n=6):
    return made("train", n)[0].float() / 255


def seeds(n=6):
    return view_seeds(torch.arange(n), 3)


def test_a_view_belongs_to_its_image_and_seed():
    images, augment = some_images(), Augment()
    whole = augment(images, seeds())
    torch.testing.assert_close(whole[4:5], augment(images[4:5], seeds()[4:5]))
    assert not torch.equal(whole, augment(images, view_seeds(torch.arange(6), 4)))
    assert whole.shape == images.shape
    assert 0 <= whole.min() < whole.max() <= 1
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(whole, augment(images, seeds()))


def test_the_first_views_are_the_same_however_many_are_made():
    images, ids = some_images(), torch.arange(6)
    four, two = (make_views(Augment(), images, ids, n, 0).unflatten(0, (6, n)) for n in (4, 2))
    torch.testing.assert_close(four[:, :2], two)
    assert len({round(float(v), 5) for v in four.mean((2, 3, 4)).flatten()}) == 24


NOTHING = Augment(area=(1.0, 1.0), ratio=(1.0, 1.0), jitter=(0.0, 0.0, 0.0, 0.0), jitter_probability=0.0, grey_probability=0.0)


def test_without_augmentation_an_image_stays_or_is_mirrored():
    images = some_images(40)
    views = NOTHING(images, seeds(40))
    same = [torch.allclose(v, i, atol=1e-5) for v, i in zip(views, images, strict=True)]
    mirrored = [torch.allclose(v, i.flip(2), atol=1e-5) for v, i in zip(views, images, strict=True)]
    assert all(a != b for a, b in zip(same, mirrored, strict=True))
    assert 8 < sum(same) < 32


def test_a_crop_is_a_box_of_the_image_brought_to_full_size():
    """On a ramp the values are places: the box has the wanted area and shape, and lies in the image."""
    ramp = (torch.arange(32) + 0.5) / 32
    image = torch.stack([ramp.expand(32, 32), ramp[:, None].expand(32, 32), torch.zeros(32, 32)])
    crop = replace(NOTHING, area=(0.25, 0.5), ratio=(0.5, 2.0))
    views = crop(image.expand(200, 3, 32, 32), seeds(200))[:, :, 4:28, 4:28]  # away from the reflected edges
    across, down = (views[:, 0, 0, -1] - views[:, 0, 0, 0]).abs() * 32 / 23, (views[:, 1, -1, 0] - views[:, 1, 0, 0]).abs() * 32 / 23
    area, shape = across * down, across / down
    assert 0.24 < area.min() < 0.3
    assert 0.42 < area.max() < 0.51
    assert 0.5 < shape.min() < 0.7
    assert 1.5 < shape.max() < 2.01
    inner = views[:, 1].mean((1, 2))
    assert inner.min() < 0.4
    assert inner.max() > 0.6


def test_colours_follow_their_formulas():
    images = some_images(50)
    bright = replace(NOTHING, jitter=(0.4, 0.0, 0.0, 0.0), jitter_probability=1.0)(0.5 * images, seeds(50))
    still = NOTHING(0.5 * images, seeds(50))
    factor = (bright.sum((1, 2, 3)) / still.sum((1, 2, 3))).view(-1, 1, 1, 1)
    torch.testing.assert_close(bright, still * factor, atol=1e-4, rtol=1e-3)
    assert 0.6 <= factor.min() < 0.75
    assert 1.25 < factor.max() <= 1.4
    grey = replace(NOTHING, grey_probability=0.2)(images, seeds(50))
    without_colour = (grey - grey.mean(1, keepdim=True)).abs().amax((1, 2, 3)) < 1e-5
    assert 3 <= int(without_colour.sum()) <= 20
    hue = replace(NOTHING, jitter=(0.0, 0.0, 0.0, 0.1), jitter_probability=1.0)(images, seeds(50))
    torch.testing.assert_close(hue.amax(1), NOTHING(images, seeds(50)).amax(1), atol=1e-3, rtol=0)  # the value of HSV


@pytest.mark.parametrize("images", [torch.zeros(2, 3, 8, 8, dtype=torch.uint8), torch.zeros(2, 1, 8, 8), torch.zeros(3, 8, 8)])
def test_augment_refuses_what_is_no_batch_of_images(images):
    with pytest.raises(ValueError, match="images are"):
        Augment()(images, seeds(2))


# Tailoring representations


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    net = SimCLR(TINY)
    with torch.no_grad():
        net.train()(some_images(60))  # statistics for BatchNorm
    return net.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def stored(net):
    images = made("train", 8)[0]
    return images, represent(net.encoder, images, torch.arange(8), TINY, lambda *_: None)


def test_representations_are_those_of_the_image_its_views_and_its_turns(net, stored):
    images, found = stored
    image = images[5:6].float() / 255
    torch.testing.assert_close(found.plain[5:6].float(), net.encoder(image), atol=2e-3, rtol=2e-3)
    views = make_views(TINY.augment, image, torch.tensor([5]), 4, -1)
    torch.testing.assert_close(found.views[5].float(), net.encoder(views), atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(found.turned[5, 1:2].float(), net.encoder(image.rot90(2, (2, 3))), atol=2e-3, rtol=2e-3)


def test_stored_views_give_what_the_library_gives_on_images(net, stored):
    """`Shift` on h with the stored views is `losses.Agree` on the images with the same views; likewise for rotation."""
    images, found = stored
    x = images.float() / 255
    variant = Variant("shared")
    ours = agreement_model(net.head, variant, None, TINY).replace(lr=5.0)(found.beside_views(4))
    seeds = image_seeds(torch.arange(8), TINY)
    model = encoder_model(net, TINY, adapt="shift").replace(lr=5.0)
    theirs = list(model.path(x, seeds=seeds))
    torch.testing.assert_close(ours, theirs[-1], atol=5e-3, rtol=5e-3)
    assert (theirs[-1] - theirs[0]).abs().max() > 0.05

    head = mlp(net.width, 16, 4).eval().requires_grad_(False)
    ours = Tailored(Classifier("anchor"), StoredRotation(head), adapt=Shift("h"), steps=2, lr=5.0)(found.beside_turned())
    theirs = Tailored(Encoder(net), losses.Rotation(head, at="encoder"), adapt=Shift("encoder"), steps=2, lr=5.0)(x)
    torch.testing.assert_close(ours, theirs, atol=5e-3, rtol=5e-3)


def by_hand(head, variant, negatives, h, views, lr, steps):
    """One query, written out. h: (d,), views: (v, d)."""
    offset = torch.zeros_like(views if variant.use == "each" else h)
    for _ in range(steps):
        offset.requires_grad_(True)
        if variant.use == "anchor":
            pairs = [(h + offset, v) for v in views]
        else:
            moved = views + offset
            pairs = [(moved[a], moved[b]) for a in range(len(views)) for b in range(len(views)) if a != b]
        total = 0.0
        for a, b in pairs:
            za, zb = (F.normalize(head(r[None])[0], dim=0) for r in (a, b))
            if variant.negatives:
                others = sum(torch.exp(za @ F.normalize(n, dim=0) / 0.5) for n in negatives)
                total = total - torch.log(torch.exp(za @ zb / 0.5) / (torch.exp(za @ zb / 0.5) + others))
            else:
                total = total + 1 - za @ zb
        (gradient,) = torch.autograd.grad(total / len(pairs), offset)
        offset = (offset - lr * gradient).detach()
    base = views.mean(0) if variant.use == "mean" else h
    return (views + offset).mean(0) if variant.use == "each" else base + offset


@pytest.mark.parametrize("variant", [Variant(use, n) for use in ("anchor", "shared", "mean", "each") for n in (0, 3)], ids=lambda v: v.name)
def test_tailored_representations_are_hand_written_gradient_steps(net, variant):
    torch.manual_seed(1)
    x, negatives = torch.rand(3, 5, net.width), torch.randn(3, TINY.features)
    model = agreement_model(net.head, variant, negatives, TINY).replace(lr=3.0)
    found = after_each_step(model, lambda rows: x[rows], 3, 2)
    assert found.shape == (2, 3, net.width)
    for steps in (1, 2):
        expected = torch.stack([by_hand(net.head, variant, negatives, one[0], one[1:], 3.0, steps) for one in x])
        torch.testing.assert_close(found[steps - 1].float(), expected, atol=2e-3, rtol=2e-3)
    assert (found[1] - found[0]).abs().max() > 1e-3


def test_the_head_must_be_in_eval_mode(net):
    """BatchNorm in training mode would mix queries, and views: the library refuses it."""
    head = mlp(net.width, 16, 8).train()
    with pytest.raises(ValueError, match=r"eval\(\)"):
        agreement_model(head, Variant(), None, TINY)(torch.rand(3, 5, net.width))


@pytest.mark.parametrize("backprop", ["none", "all"])
def test_meta_tailoring_the_linear_layer_is_training_on_tailored_representations(net, backprop):
    """The tailoring loss does not see the layer: the outer gradient is the same at every order, so tailored h are computed once."""
    torch.manual_seed(2)
    x, y, fc = torch.rand(6, 5, net.width), torch.arange(6), nn.Linear(net.width, 10)
    model = agreement_model(net.head, Variant("shared"), None, TINY, fc).replace(lr=3.0, backprop=backprop)
    *_, outer = outer_losses(model, F.cross_entropy, x, y)
    through = torch.autograd.grad(outer, list(fc.parameters()))
    with torch.no_grad():
        h = agreement_model(net.head, Variant("shared"), None, TINY).replace(lr=3.0)(x)
    direct = torch.autograd.grad(F.cross_entropy(fc(h), y), list(fc.parameters()))
    for a, b in zip(through, direct, strict=True):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(model(x), fc(h))  # and at prediction


def test_the_agreement_falls_and_views_agree_more(net):
    x = torch.rand(4, 5, net.width)
    for variant in TINY.variants[:4]:
        trace = agreement_model(net.head, variant, None, TINY).replace(lr=0.1).trace(x)
        assert (trace.losses[-1] < trace.losses[0]).all(), variant


def test_negatives_are_normalised_once():
    loss = StoredAgreement(nn.Identity(), "anchor", torch.tensor([[3.0, 4.0]]))
    torch.testing.assert_close(loss.negatives, torch.tensor([[0.6, 0.8]]))


# Linear layers


def problem(n=200, d=5):
    torch.manual_seed(3)
    x = torch.randn(n, d) @ torch.randn(d, d) + 2
    return x, (x @ torch.randn(d, 10)).argmax(1)


def test_a_layer_is_softmax_regression_with_decay():
    x, y = problem()
    task = Task(0, 20, 0, 1e-2)
    layers = fit(x[None], y, [torch.arange(200)], [task], steps=2000, batch=1000, lr=5e-2)
    h = (x - x.mean(0)) / x.std(0)
    w, b = torch.zeros(5, 10, requires_grad=True), torch.zeros(10, requires_grad=True)

    def objective(w, b):
        return F.cross_entropy(h @ w + b, y) + 1e-2 * w.square().sum() / 2

    rule = torch.optim.LBFGS([w, b], max_iter=500, line_search_fn="strong_wolfe")

    def closure():
        rule.zero_grad()
        loss = objective(w, b)
        loss.backward()
        return loss

    rule.step(closure)
    ours = objective(layers.weight[0], layers.bias[0]).item()
    assert ours == pytest.approx(objective(w, b).item(), abs=2e-3)
    assert ours < math.log(10) / 2
    expected = ((h @ layers.weight[0] + layers.bias[0]).argmax(1) == y).double().mean()
    assert layers.accuracy(x, y) == [pytest.approx(float(expected))]


def test_layers_do_not_see_each_other_and_draw_alike():
    x, y = problem()
    subsets = [torch.arange(200), torch.arange(50), torch.arange(50)]
    tasks = [Task(0, 20, 0, 1e-2), Task(1, 5, 1, 1e-2), Task(0, 5, 1, 1e-1)]
    sets = torch.stack([x, x + 1])
    options = {"steps": 30, "batch": 16, "lr": 1e-2}
    together = fit(sets, y, subsets, tasks, **options)
    for i, task in enumerate(tasks):
        alone = fit(sets, y, [subsets[i]], [task], **options)
        torch.testing.assert_close(alone.weight[0], together.weight[i])
    shifted = fit(sets, y, [subsets[1]], [Task(0, 5, 1, 1e-2)], **options)
    torch.testing.assert_close(shifted.weight[0], together.weight[1], atol=1e-4, rtol=1e-3)  # the same images, the same batches
    per_set = together.accuracy(sets, y)
    assert per_set[1] == together.accuracy(x + 1, y)[1]


def test_views_are_drawn_at_random_for_training():
    x, y = problem()
    views = torch.stack([x - 1, x + 1], 1)[None]  # (1, n, 2, d)
    layers = fit(views, y, [torch.arange(200)], [Task(0, 20, 0, 1e-2)], steps=20, batch=32, lr=1e-2)
    torch.testing.assert_close(layers.mean[0], x.mean(0))
    one = fit(views[:, :, :1], y, [torch.arange(200)], [Task(0, 20, 0, 1e-2)], steps=20, batch=32, lr=1e-2)
    assert (layers.weight - one.weight).abs().max() > 1e-3


def test_labelled_images_are_balanced_and_nested():
    labels = torch.randint(0, 10, (1000,), generator=torch.Generator().manual_seed(0))
    few, many = draw(labels, 5, 1), draw(labels, 50, 1)
    assert torch.bincount(labels[few]).tolist() == [5] * 10
    assert set(few.tolist()) < set(many.tolist())
    assert not torch.equal(few, draw(labels, 5, 2))
    least = int(torch.bincount(labels).min())
    assert len(draw(labels, 500, 1, at_most=True)) == 10 * least
    with pytest.raises(ValueError, match=f"a class has {least} only"):
        draw(labels, 500, 1)
