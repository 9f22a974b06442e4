"""The command `tailoring certify`: rows, resume, a real Ray cluster, real weights."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from real_data import SHARED, needs
from safetensors.torch import load_file, save_file

from tailoring import Tailored
from tailoring.__main__ import main
from tailoring.experiments import certify
from tailoring.experiments._classifiers import read_weights
from tailoring.experiments._images import MD5, ImageFolder, cifar10
from tailoring.experiments._rows import read
from tailoring.nn import cifar_resnet, load_weights
from tailoring.nn._resnet import IMAGENET
from tailoring.smoothing import Smoothed

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """An image folder of two classes and the weights of a small network."""
    folder = tmp_path_factory.mktemp("certify")
    random = np.random.default_rng(0)
    for name in ("cats", "dogs"):
        (folder / "val" / name).mkdir(parents=True)
        for i in range(5):
            Image.fromarray(random.integers(0, 255, (40, 50, 3), dtype=np.uint8)).save(folder / "val" / name / f"{i}.png")
    torch.manual_seed(0)
    save_file(cifar_resnet(20, classes=2).state_dict(), folder / "net.safetensors")
    return folder


def arguments(made, out, *more):
    flags = ["--weights", made / "net.safetensors", "--network", "resnet20", "--data", "imagenet", "--root", made / "val", "--every", "1"]
    flags += ["--n", "30", "--n0", "10", "--batch", "20", "--out", out, "--accelerator", "cpu", "--images", "6", *more]
    return [str(flag) for flag in flags]


def results(out):
    rows = [row for row in read(out / "rows.jsonl") if row["kind"] == "image"]
    return {row["index"]: {name: value for name, value in row.items() if name != "seconds"} for row in rows}, len(rows)


def test_every_image_has_a_row_and_a_second_call_adds_none(made, tmp_path, capsys):
    assert main(["certify", *arguments(made, tmp_path)]) == 0
    found, count = results(tmp_path)
    assert sorted(found) == [0, 1, 3, 5, 6, 8]  # spread over both classes
    assert [found[i]["label"] for i in sorted(found)] == [0, 0, 0, 1, 1, 1]
    assert "ACR" in capsys.readouterr().out
    assert main(["certify", *arguments(made, tmp_path)]) == 0
    assert results(tmp_path) == (found, count)


def test_a_row_is_what_smoothed_says(made, tmp_path):
    assert main(["certify", *arguments(made, tmp_path, "--no-tailor", "--seed", "3", "--images", "2")]) == 0
    net = cifar_resnet(20, classes=2, statistics=IMAGENET)
    load_weights(net, load_file(made / "net.safetensors"))
    image, label = ImageFolder.open(made / "val", 32)[5]
    with torch.no_grad():
        expected = Smoothed(net.eval(), 0.5, batch=20).certify(image[None], 10, 30, seeds=[3 + 5])
    row = results(tmp_path)[0][5]
    assert (row["label"], row["predict"], row["votes"]) == (label, int(expected.label), int(expected.votes))
    assert row["radius"] == pytest.approx(float(expected.radius))


def test_an_interrupted_run_goes_on(made, tmp_path):
    assert main(["certify", *arguments(made, tmp_path / "whole")]) == 0
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    lines = (tmp_path / "parts" / "rows.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "parts" / "rows.jsonl").write_text("".join(lines[:4]) + lines[4][:20])  # two whole images and a broken one
    assert main(["certify", *arguments(made, tmp_path / "parts")]) == 0
    assert results(tmp_path / "parts") == results(tmp_path / "whole")


def test_a_cluster_that_loses_a_worker_finds_every_image_once_and_the_same(made, tmp_path):
    args = arguments(made, tmp_path / "cluster", "--n", "60", "--images", "7")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_DISABLE_MEMORY_MONITOR": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, "-m", "tailoring", "certify", *args, "--engine", "ray", "--workers", "2"]
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        rows, killed = tmp_path / "cluster" / "rows.jsonl", None
        while process.poll() is None and killed is None:
            time.sleep(0.1)
            if rows.exists() and rows.read_text().count('"image"') >= 2:
                killed = next(iter(busy_workers()), None)
                if killed is not None:
                    os.kill(killed, signal.SIGKILL)
        output = process.stdout.read()
    assert process.returncode == 0, output
    assert killed is not None
    assert main(["certify", *arguments(made, tmp_path / "alone", "--n", "60", "--images", "7")]) == 0
    found, count = results(tmp_path / "cluster")
    assert count == len(found) == 7
    assert found == results(tmp_path / "alone")[0]


def busy_workers():
    """Ray names a worker's process after the task it works on."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "cmdline").read_bytes().startswith(b"ray::_on_worker"):
                yield int(folder.name)
        except OSError:
            pass


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--weights", "/nonexistent.safetensors"], "no weights at"),
        (["--network", "resnet56"], "another network"),
        (["--root", "/nonexistent"], "no images in"),
        (["--data", "cifar10", "--data-dir", "/nonexistent"], "kriz/cifar"),
        (["--nu", "0.6"], "below sigma"),
        (["--autotune"], "give --compile, too"),
        (["--features", "middle", "--where", "upper"], "choose --where lower or all"),
        (["--n0", "0"], "--n0 must be at least 1, not 0"),
        (["--n", "0"], "--n must be at least 1, not 0"),
        (["--batch", "0"], "--batch must be at least 1, not 0"),
        (["--engine", "ray", "--address", "127.0.0.1:1"], "no Ray cluster answers at --address 127.0.0.1:1 (["),
        (["--engine", "ray", "--address", "ray://localhost:1"], "no Ray cluster answers at --address ray://localhost:1"),
        (["--every", "0"], "--every must be at least 1, not 0"),
        (["--images", "0"], "--images must be at least 1, not 0"),
        (["--alpha", "2"], "--alpha must lie between 0 and 1, not 2"),
        (["--network", "resnet50", "--statistics", "cifar"], "resnet50 has its own"),
        (["--network", "efficientnet-lite0", "--shortcut", "pad"], "efficientnet-lite0 has its own"),
        (["--classes", "/nonexistent"], "no file or folder of class names"),
        pytest.param(
            ["--accelerator", "cuda"],
            "no CUDA device on this machine",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
    ],
)
def test_bad_input_is_told_what_to_do_and_leaves_no_folder(made, tmp_path, capsys, change, words):
    assert main(["certify", *arguments(made, tmp_path / "out", *change)]) == 1
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_images_are_spread_evenly_and_cohens_are_kept():
    assert certify.chosen(10_000, 20, 500) == list(range(0, 10_000, 20))
    assert certify.chosen(10, 3, 500) == [0, 3, 6, 9]
    assert certify.chosen(50_000, 1, 5) == [0, 10_000, 20_000, 30_000, 40_000]


def test_a_run_is_extended_and_shown_again(made, tmp_path, capsys):
    for every, images in ((5, 500), (3, 500), (1, 500), (1, 2)):
        assert main(["certify", *arguments(made, tmp_path / "parts", "--every", str(every), "--images", str(images))]) == 0
        shown = capsys.readouterr().out
    assert main(["certify", *arguments(made, tmp_path / "whole", "--images", "10")]) == 0
    found, count = results(tmp_path / "parts")
    assert count == len(found) == 10
    assert found == results(tmp_path / "whole")[0]
    capsys.readouterr()
    assert main(["report", "certify", "--out", str(tmp_path / "parts")]) == 0
    assert capsys.readouterr().out == shown
    assert main(["report", "certify", "--quick"]) == 1
    assert "no quick run" in capsys.readouterr().err


def test_changed_weights_and_images_do_not_mix_into_the_rows(made, tmp_path, capsys):
    few, here = ["--images", "1"], shutil.copytree(made, tmp_path / "made")
    assert main(["certify", *arguments(here, tmp_path / "out", *few)]) == 0
    here = here.rename(tmp_path / "moved")
    assert main(["certify", *arguments(here, tmp_path / "out", *few)]) == 0  # the same, elsewhere
    assert results(tmp_path / "out")[1] == 1
    save_file(cifar_resnet(20, classes=2).state_dict(), here / "net.safetensors")
    shutil.copy(here / "val" / "cats" / "0.png", here / "val" / "cats" / "new.png")
    capsys.readouterr()
    assert main(["certify", *arguments(here, tmp_path / "out", *few)]) == 1
    assert "weights: another content there than now; root: another content there than now" in capsys.readouterr().err


def test_a_network_of_more_classes_is_brought_to_those_of_the_folder(made, tmp_path, capsys):
    state = cifar_resnet(20, classes=3).state_dict()
    save_file(state, tmp_path / "three.safetensors")
    save_file({name: t[[2, 0]].clone() if name.startswith("fc.") else t for name, t in state.items()}, tmp_path / "two.safetensors")
    (tmp_path / "names.txt").write_text("dogs\nbirds\ncats\n")
    three = ["--images", "3", "--weights", tmp_path / "three.safetensors"]
    assert main(["certify", *arguments(made, tmp_path / "out", *three)]) == 1
    assert "knows 3 classes, the data 2: name all 3, in order, with --classes" in capsys.readouterr().err
    assert main(["certify", *arguments(made, tmp_path / "out", *three, "--classes", tmp_path / "names.txt")]) == 0
    assert main(["certify", *arguments(made, tmp_path / "by-hand", "--images", "3", "--weights", tmp_path / "two.safetensors")]) == 0
    assert results(tmp_path / "out") == results(tmp_path / "by-hand")
    (tmp_path / "names.txt").write_text("cats\nbirds\ndogs\n")
    assert main(["certify", *arguments(made, tmp_path / "out", *three, "--classes", tmp_path / "names.txt")]) == 1
    assert "classes: another content there" in capsys.readouterr().err


def test_folders_without_images_are_no_classes_and_an_image_of_the_size_stays_as_it_is(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 255, (32, 32, 3), dtype=np.uint8)
    for name in ("a", "b", ".ipynb_checkpoints"):
        (tmp_path / name).mkdir()
        Image.fromarray(pixels).save(tmp_path / name / "0.png")
    (tmp_path / "b" / "._0.png").write_bytes(b"of a Mac")
    (tmp_path / "aa").mkdir()
    found = ImageFolder.open(tmp_path, 32)
    assert (found.classes, found.labels) == (("a", "b"), (0, 1))
    assert torch.equal(found[0][0], torch.from_numpy(pixels).permute(2, 0, 1) / 255)
    assert ImageFolder.open(tmp_path, 28)[0][0].shape == (3, 28, 28)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("cut.safetensors", b"\x10\0\0\0"),
        ("cut.pt", b"PK\x03\x04"),
        ("empty.pt", b""),
        ("module.pt", torch.nn.Linear(2, 2)),
        ("list.pt", [torch.zeros(2)]),
        ("wrapped-list.pt", {"model": [torch.zeros(2)]}),
        ("body.pt", {"conv1.weight": torch.zeros(2), 3: torch.zeros(1)}),
    ],
)
def test_a_file_that_holds_no_weights_is_told_what_is_expected(made, tmp_path, capsys, name, content):
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    assert main(["certify", *arguments(made, tmp_path / "out", "--weights", path)]) == 1
    said = capsys.readouterr().err
    assert f"error: {path} " in said
    assert "weights must be plain tensors by name" in said


@pytest.mark.parametrize("wrapper", ["state_dict", "model"])
def test_weights_are_unwrapped(tmp_path, wrapper):
    state = cifar_resnet(8).state_dict()
    torch.save({wrapper: state, "epoch": 3}, tmp_path / "net.pt")
    assert read_weights(tmp_path / "net.pt").keys() == state.keys()


def test_another_setting_does_not_mix_into_the_rows(made, tmp_path, capsys):
    assert main(["certify", *arguments(made, tmp_path, "--images", "1")]) == 0
    assert main(["certify", *arguments(made, tmp_path, "--images", "1", "--sigma", "0.25")]) == 1
    assert "sigma: 0.5 there, 0.25 now" in capsys.readouterr().err


@pytest.mark.usefixtures("seeded")
def test_certificates_of_another_kind_of_device_are_not_gone_on_with(tmp_path):
    device = {"kind": "session", "device": "NVIDIA H200"}
    rows = [{"kind": "config"}, device, {"kind": "image", "index": 0}, {**device, "device": "x86_64 CPU, 1 threads"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = certify.Config(weights=tmp_path, out=tmp_path, accelerator="cpu")
    certify._refuse_other_device(config, [0])  # all is done
    certify._refuse_other_device(replace(config, engine="ray"), [0, 1])
    with pytest.raises(ValueError, match="made on cuda, whose noise is not that of cpu"):
        certify._refuse_other_device(config, [0, 1])


def test_a_damaged_cifar_file_is_refused(tmp_path):
    for name in MD5:
        (tmp_path / name).write_bytes(b"\0" * 3073)
    with pytest.raises(ValueError, match="md5 differs"):
        cifar10(tmp_path, "test")


@pytest.fixture(scope="module")
def cifar(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cifar")
    subprocess.run([sys.executable, SHARED / "cifar10" / "unpack.py", folder], check=True, capture_output=True)
    return folder


@pytest.mark.parametrize(("flags", "options"), [((), {}), (("--autotune",), {"options": certify.SEARCHED})])
def test_kernels_are_searched_for_when_asked(made, tmp_path, monkeypatch, flags, options):
    asked = []
    monkeypatch.setattr(Tailored, "forward", lambda model, x: asked.append(model.compile_options) or model.net(x))
    assert main(["certify", *arguments(made, tmp_path, "--tailor", "--compile", *flags)]) == 0
    assert asked
    assert all(option == options for option in asked)


def test_a_compiled_classifier_meets_one_size_of_batches_and_gives_the_same_votes(made, tmp_path, monkeypatch):
    sizes, forward = [], Tailored.forward
    monkeypatch.setattr(Tailored, "forward", lambda model, x: sizes.append(len(x)) or forward(model.replace(compile=False), x))
    assert main(["certify", *arguments(made, tmp_path / "eager", "--images", "2")]) == 0
    assert set(sizes) == {10, 20}
    sizes.clear()
    assert main(["certify", *arguments(made, tmp_path / "compiled", "--images", "2", "--compile")]) == 0
    assert set(sizes) == {20}
    assert results(tmp_path / "compiled") == results(tmp_path / "eager")


@needs("cifar10")
@needs("resnet-cifar10")
def test_public_weights_on_real_images(cifar, tmp_path):
    """The published error of ResNet-20, and a tailored certificate of a few images with little noise."""
    weights = SHARED / "resnet-cifar10" / "resnet20.safetensors"
    net = cifar_resnet(20, shortcut="pad", statistics=IMAGENET)
    load_weights(net, load_file(weights))
    images, labels = cifar10(cifar, "test")
    with torch.no_grad():
        right = torch.cat([net.eval()(part.float() / 255).argmax(1) for part in images[:1000].split(250)]) == labels[:1000]
    assert 0.89 < float(right.double().mean()) < 0.945  # 91.7 % on all 10,000
    config = certify.Config(
        weights=weights,
        network="resnet20",
        shortcut="pad",
        statistics="imagenet",
        out=tmp_path,
        data_dir=cifar,
        sigma=0.03,
        nu=0.01,
        n=200,
        batch=100,
        images=4,
        accelerator="cpu",
    )
    certify.run(config)
    found, _ = results(tmp_path)
    assert sum(row["predict"] == row["label"] and row["radius"] > 0 for row in found.values()) >= 2


@needs("cifar10")
def test_the_committed_network_votes_as_its_committed_certificates_say(cifar):
    """Made on a GPU in bf16 with other noise: the shares of the right class must agree as closely as so few samples can tell."""
    folder, few = ROOT / "docs" / "experiments" / "smoothing-seed1", 200
    net = cifar_resnet(110)
    load_weights(net, read_weights(folder / "weights" / "s0.5-base.safetensors"))
    smoothed = Smoothed(net.eval(), 0.5, batch=100)
    rows = [row for row in read(folder / "certified" / "s0.5-plain-n10000" / "rows.jsonl") if row.get("votes")]
    undecided = [row for row in rows if row["predict"] == row["label"] and row["votes"] < 9000][:3]
    images, labels = cifar10(cifar, "test")
    for row in undecided:
        assert int(labels[row["index"]]) == row["label"]
        share, expected = int(smoothed.votes(images[row["index"]].float() / 255, few, 0)[row["label"]]) / few, row["votes"] / 10_000
        assert abs(share - expected) < 4 * (expected * (1 - expected) / few) ** 0.5
