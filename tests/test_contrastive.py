"""The contrastive experiment: its views, losses, tailored representations, linear layers, files, and a whole tiny run."""

from __future__ import annotations

import contextlib
import io
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lightning_fabric import Fabric
from torch import nn
from torch.nn import functional as F

from tailoring import Shift, Tailored, losses, outer_losses
from tailoring.__main__ import main
from tailoring.experiments import _contrastive_bench as benches
from tailoring.experiments import contrastive
from tailoring.experiments._contrastive_bench import Bench
from tailoring.experiments._contrastive_data import draw, load, made
from tailoring.experiments._contrastive_linear import Task, fit
from tailoring.experiments._contrastive_nets import Pretraining, SimCLR, mlp, nt_xent
from tailoring.experiments._contrastive_plan import Config, Variant
from tailoring.experiments._contrastive_report import METHODS, Results, tables
from tailoring.experiments._contrastive_results import Setting, best, best_decays, best_of_image, settings
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
from tailoring.experiments._parts import load_parts, save_parts
from tailoring.experiments._rows import read
from tailoring.experiments._train import Learner, Schedule, train, trained
from tailoring.nn import resnet18, resnet50

ROOT = Path(__file__).parent.parent

TINY = Config(
    images="made",
    train=300,
    test=120,
    validation=100,
    encoder="resnet8",
    epochs=3,
    batch=100,
    hidden=16,
    features=8,
    views=(2, 4),
    steps=2,
    lrs=(0.1, 1.0),
    paper_lr=1.0,
    variants=(Variant("anchor"), Variant("shared"), Variant("mean"), Variant("each"), Variant("anchor", 16)),
    labels=(3, 10),
    seeds=(0, 1),
    grid_labels=(3, 40),
    grid_seeds=(0,),
    decays=(1e-3, 1e-1),
    linear_steps=40,
    linear_batch=32,
    rotation_epochs=2,
    ttt_lrs=(0.0, 1.0),
    cn_lrs=(1e-2,),
    cn_train=60,
    cn_validation=20,
    cn_test=20,
    accelerator="cpu",
    precision="32-true",
    compile=False,
    chunk=100,
    cn_chunk=30,
)


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


# Files that travel


def test_parts_are_small_and_whole(tmp_path):
    tensors = {f"t{i}": torch.randn(100, 10) for i in range(5)} | {"count": torch.tensor(7)}
    paths = save_parts(tmp_path, "w", tensors, {"epoch": "3"}, limit=9000)
    assert len(paths) > 1
    assert all(path.stat().st_size < 10000 for path in paths)
    found, about = load_parts(tmp_path, "w")
    assert about["epoch"] == "3"
    assert all(torch.equal(found[name], t) for name, t in tensors.items())
    assert load_parts(tmp_path, "other") is None
    save_parts(tmp_path, "w", {"a": torch.ones(2)}, {})
    assert len(list(tmp_path.iterdir())) == 1  # the older set is gone


def test_parts_of_different_sets_or_missing_ones_are_refused(tmp_path):
    tensors = {f"t{i}": torch.randn(100, 10) for i in range(5)}
    first = [p.read_bytes() for p in save_parts(tmp_path, "w", tensors, {}, limit=9000)]
    paths = save_parts(tmp_path, "w", {name: t + 1 for name, t in tensors.items()}, {}, limit=9000)
    paths[0].write_bytes(first[0])
    with pytest.raises(ValueError, match="not one whole set"):
        load_parts(tmp_path, "w")
    paths[0].unlink()
    with pytest.raises(ValueError, match="not one whole set"):
        load_parts(tmp_path, "w")
    paths[1].write_bytes(b"broken")
    with pytest.raises(ValueError, match="damaged"):
        load_parts(tmp_path, "w")


class Line(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x, y):
        return (self.net(x) - y).square().mean()

    def losses(self, x, y):
        yield self(x, y)


def test_a_training_goes_on_elsewhere_from_small_files(tmp_path):
    x = torch.randn(64, 6)
    y = x[:, :2].sin()

    def learn(folder, stop_at=None):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 2))
        seen = []

        def progress(what, done, total):
            seen.append(done)
            if done == stop_at:
                raise KeyboardInterrupt

        schedule = Schedule(40, 16, 1e-2, checkpoint_seconds=0, travel=True)
        train([Learner("line", net, Line(net), 0)], x, y, schedule, fabric=Fabric(accelerator="cpu"), folder=folder, progress=progress)
        return seen, Line(net)(x, y).item()

    _, straight = learn(tmp_path / "straight")
    with pytest.raises(KeyboardInterrupt):
        learn(tmp_path / "here", stop_at=25)
    (tmp_path / "there").mkdir()
    for path in (tmp_path / "here").glob("*-of-*.safetensors"):
        path.rename(tmp_path / "there" / path.name)
    seen, moved = learn(tmp_path / "there")
    assert seen[0] == 26
    assert moved == pytest.approx(straight, rel=0.3)
    assert not list((tmp_path / "there").glob("*travel*"))
    assert trained(tmp_path / "there", "line") is not None


# A whole, tiny run


def no_session(folder):
    return [row for row in read(folder / "rows.jsonl") if row["kind"] != "session"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("contrastive")


@pytest.fixture(scope="module")
def finished(folder):
    """The rows of a run, and how often representations were computed."""
    calls = []
    original = benches.represent

    def counted(*args):
        calls.append(len(args[1]))
        return original(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(benches, "represent", counted)
        contrastive.run(replace(TINY, out=folder / "out"))
    return no_session(folder / "out"), calls


def test_a_run_holds_every_method_and_control(finished):
    rows, _ = finished
    kinds = [row["kind"] for row in rows]
    assert {"encoder", "plain-choice", "choice", "result", "rotation", "ttt", "cn-choice", "cn"} <= set(kinds)
    assert {name for row in rows if row["kind"] == "result" for name in row} >= set(METHODS)
    tried = [(row["variant"]["use"], row["variant"]["negatives"], row["views"]) for row in rows if row["kind"] == "choice"]
    assert len(tried) == len(set(tried))
    chosen, of_image = best(settings(rows)).variant, best_of_image(settings(rows)).variant
    assert len(tried) == len(TINY.variants) + len({chosen, of_image})  # every variant with all views, the best ones with fewer
    assert of_image.use in ("anchor", "shared")


def test_the_best_without_averaging_is_found_where_averaging_is_better():
    averaging, own, other = (Setting(Variant(use), 4, 2, 1.0) for use in ("each", "shared", "anchor"))
    found = [(own, 0.7), (averaging, 0.9), (other, 0.6)]
    assert (best(found), best_of_image(found), best_of_image(found[1:2])) == (averaging, own, None)


def test_views_are_computed_once(finished):
    assert sorted(finished[1]) == [TINY.test, TINY.train]


def test_without_steps_ttt_is_the_plain_layer(finished):
    rows, _ = finished
    (ttt,) = [row for row in rows if row["kind"] == "ttt"]
    (plain,) = [row for row in rows if row.get("trained") == "plain"]
    assert ttt["plain"][0] == plain["plain"]
    assert ttt["meta"][0] == plain["plain"]
    assert ttt["plain"][1] != plain["plain"]


def test_the_choice_is_the_best_on_validation_alone(finished):
    rows, _ = finished
    chosen = best(settings(rows))
    by_hand = {}
    for row in rows:
        if row["kind"] == "choice":
            for lr, after in zip(row["lrs"], row["accuracy"], strict=True):
                for steps, accuracy in enumerate(after, 1):
                    values = torch.tensor(accuracy, dtype=torch.float64)  # (labels, seeds, decays)
                    by_hand[Setting(Variant(**row["variant"]), row["views"], steps, lr)] = float(values.mean(1).amax(1).mean())
    assert by_hand[chosen] == pytest.approx(max(by_hand.values()))
    (meta,) = [row for row in rows if row.get("trained") == "meta"]
    assert meta["setting"]["lr"] == chosen.lr
    assert meta["setting"]["variant"]["use"] == chosen.variant.use
    places, _ = best_decays(meta["validation"])
    assert meta["decays"] == [TINY.decays[place] for place in places]
    assert best_decays([[[0.1, 0.3], [0.3, 0.2]], [[0.5, 0.1], [0.5, 0.2]]]) == ([1, 0], pytest.approx(0.375))


def test_a_row_is_what_the_weights_say(finished, folder):
    """The plain layers, trained again one by one by hand from the saved encoder."""
    rows, _ = finished
    images = load(TINY)
    bench = Bench(replace(TINY, out=folder / "out"), images, Fabric(accelerator="cpu"), lambda *_: None)
    (plain,) = [row for row in rows if row.get("trained") == "plain"]
    h = bench.net.encoder(images.train.float() / 255).half()
    asked = bench.net.encoder(images.test.float() / 255).half()
    rows_ = draw(images.train_labels, 10, 1)
    layers = fit(h[None], images.train_labels, [rows_], [Task(0, 10, 1, plain["decays"][1])], steps=40, batch=32, lr=1e-2)
    assert layers.accuracy(asked, images.test_labels)[0] == pytest.approx(plain["plain"][1][1], abs=1.5 / TINY.test)


def test_a_finished_run_is_not_run_again(finished, folder):
    before = (folder / "out" / "rows.jsonl").read_text()
    contrastive.run(replace(TINY, out=folder / "out"))
    added = (folder / "out" / "rows.jsonl").read_text()[len(before) :]
    assert [json.loads(line)["kind"] for line in added.splitlines()] == ["session"]


def test_a_run_that_is_stopped_again_and_again_ends_the_same(finished, folder, monkeypatch):
    monkeypatch.setattr(benches, "Schedule", lambda *args, **options: Schedule(*args, **{**options, "checkpoint_seconds": 0}))
    config = replace(TINY, out=folder / "stopped")
    wanted = ["simclr", "linear layers: meta", "rotation", "CN, lr 0.01"]  # in the order in which they come
    for stop in [*wanted, None]:

        def progress(what, done, total, stop=stop):
            if what == stop and done >= min(1, total - 1):
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt) if stop else contextlib.nullcontext():
            contrastive.run(config, progress)
    assert sum(row["kind"] == "session" for row in read(folder / "stopped" / "rows.jsonl")) == 5
    ours, theirs = no_session(folder / "stopped"), finished[0]
    assert ours[1:] == theirs[1:]  # the first holds the folder


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("compile", [False, True])
def test_everything_runs_on_a_gpu_and_pre_training_learns_there(tmp_path, compile):
    config = replace(TINY, out=tmp_path, accelerator="cuda", precision="bf16-mixed", compile=compile, epochs=20)
    contrastive.run(config)
    (encoder,) = [row for row in read(tmp_path / "rows.jsonl") if row["kind"] == "encoder"]
    assert encoder["curve"][-1][1] < encoder["curve"][0][1]
    assert "meta-tailored" in contrastive.report(tmp_path)


def test_cn_on_the_encoder_in_bfloat16_is_nearly_as_in_float32(finished, folder):
    config = replace(TINY, out=folder / "out")
    found = []
    for precision in ("32-true", "bf16-mixed"):
        bench = Bench(config, load(TINY), Fabric(accelerator="cpu", precision=precision), lambda *_: None)
        found.append(bench.encoder_tailored(bench.images.train[:40], 0, 1e-2).float())
    plain = bench.net.encoder(bench.images.train[:40].float() / 255)
    moved = (found[0][-1] - plain).norm(dim=1) / plain.norm(dim=1)
    assert 1e-3 < moved.mean() < 0.5
    torch.testing.assert_close(found[1], found[0], atol=0.1 * float(plain.abs().max()), rtol=0)


def test_the_encoder_never_sees_labels(finished, folder):
    images = load(TINY)
    blind = replace(images, train_labels=torch.zeros_like(images.train_labels), test_labels=torch.zeros_like(images.test_labels))
    bench = Bench(replace(TINY, out=folder / "blind"), blind, Fabric(accelerator="cpu"), lambda *_: None)
    other, _ = load_parts(folder / "out" / "weights", "encoder")
    for name, tensor in bench.net.state_dict().items():
        torch.testing.assert_close(tensor, other[name].to(tensor.dtype), rtol=0, atol=0)


def test_the_row_of_the_encoder_is_what_its_files_say(finished, folder):
    bench = Bench(replace(TINY, out=folder / "out"), load(TINY), Fabric(accelerator="cpu"), lambda *_: None)
    (encoder,) = [row for row in finished[0] if row["kind"] == "encoder"]
    assert encoder["contrastive_loss"] == pytest.approx(bench.contrastive_loss(bench.net))
    assert encoder["curve"][-1][0] == TINY.epochs


def test_the_report_has_tables_figures_and_a_verdict(finished, folder):
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert main(["report", "contrastive", "--out", str(folder / "out")]) == 0
    text = said.getvalue()
    for words in (
        *METHODS.values(),
        "TTT, lr 1",
        "worth: ",
        "CN on the encoder",
        "rotation head, test",
        "80.5 %",
        "of 2 numbers of labels",
    ):
        assert words in text, words
    page = (folder / "out" / "report.html").read_text()
    assert page.count("<svg") == 2
    assert all((folder / "out" / name).stat().st_size > 1000 for name in ("figure4.png", "ttt.png"))


def test_a_report_of_an_unfinished_run_shows_what_is_there(finished, folder, tmp_path):
    rows = [row for row in read(folder / "out" / "rows.jsonl") if row["kind"] in ("config", "session", "encoder")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "NT-Xent on test images" in contrastive.report(tmp_path)


def test_what_a_gain_is_worth_in_labels():
    config = {"labels": [100, 200, 400], "seeds": [0, 1]}
    result = {"kind": "result", "plain": [[0.5, 0.5], [0.6, 0.6], [0.7, 0.7]], "meta": [[0.6, 0.6], [0.65, 0.65], [0.4, 0.8]]}
    results = Results([{"kind": "config", "config": config}, result])
    assert results.worth("meta") == [(pytest.approx(2.0), ""), (pytest.approx(2**0.5), ""), (pytest.approx(0.5), "")]
    gains = results.gain("meta", "plain")
    assert [e.clear for e in gains] == [True, True, False]
    better = {**result, "meta": [[0.9, 0.9], [0.1, 0.1], [0.9, 0.9]]}
    assert Results([{"kind": "config", "config": config}, better]).worth("meta") == [(4.0, ">"), (0.5, "<"), (1.0, ">")]


# What a user may get wrong


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"validation": 50000}, "validation must be"),
        ({"views": (1, 4)}, "at least two views"),
        ({"steps": 0}, "at least one inner step"),
        ({"epochs": 0}, "at least one epoch"),
        ({"ttt_lrs": (0.1,)}, "must hold 0"),
        ({"cn_train": 46000}, "at most"),
        ({"lrs": ()}, "lrs is empty"),
        ({"variants": (Variant("anchor", 60000),)}, "too few"),
    ],
)
def test_settings_that_cannot_be_run_are_refused_at_once(changes, words):
    with pytest.raises(ValueError, match=words):
        Config(**changes)


def test_errors_come_before_the_work(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TAILORING_DATA", str(tmp_path))
    assert main(["run", "contrastive", "--out", str(tmp_path / "out")]) == 1
    assert "kriz/cifar" in capsys.readouterr().err
    (tmp_path / "cifar-10-batches-bin").mkdir()
    (tmp_path / "cifar-10-batches-bin" / "test_batch.bin").write_bytes(b"not the original")
    assert main(["run", "contrastive", "--out", str(tmp_path / "out")]) == 1
    assert "md5 differs" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="a class has 30 only: set --labels"):
        contrastive.run(replace(TINY, out=tmp_path / "out", labels=(3, 1000)))


def test_results_of_another_config_are_not_mixed_in(finished, folder):
    with pytest.raises(ValueError, match=r"another config \(epochs: 3 there, 4 now\)"):
        contrastive.run(replace(TINY, out=folder / "out", epochs=4))


def test_quick_runs_without_cifar(tmp_path, monkeypatch):
    monkeypatch.setenv("TAILORING_DATA", str(tmp_path))
    assert contrastive.quick().images == "made"
    (tmp_path / "test_batch.bin").touch()
    assert contrastive.quick().images == "cifar10"


def test_run_needs_neither_tyro_nor_rich():
    code = (
        "import sys; sys.modules['tyro'] = sys.modules['rich'] = None\n"
        "from tailoring.experiments.contrastive import Config, run; print(Config().views)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "(4, 8, 16)", done.stderr


def test_the_tables_in_the_docs_are_those_of_the_committed_rows():
    folder = ROOT / "docs" / "experiments" / "contrastive"
    if not (folder / "rows.jsonl").exists():
        pytest.skip("the full run is not made yet")
    page = folder.with_suffix(".md").read_text()
    for table in tables(Results(list(read(folder / "rows.jsonl")))):
        assert table.markdown() in page, f"docs/experiments/contrastive.md does not hold the table {table.title!r} of its rows"
