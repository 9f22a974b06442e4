"""The contrastive experiment, whole and tiny: files that travel, every method and control, reports, bad input."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from contrastive_tiny import TINY
from lightning_fabric import Fabric
from torch import nn

from tailoring.__main__ import main
from tailoring.experiments import _contrastive_bench as benches
from tailoring.experiments import contrastive
from tailoring.experiments._contrastive_bench import Bench
from tailoring.experiments._contrastive_data import draw, load
from tailoring.experiments._contrastive_linear import Task, fit
from tailoring.experiments._contrastive_plan import Config, Variant
from tailoring.experiments._contrastive_report import METHODS, Results, tables
from tailoring.experiments._contrastive_results import Setting, best, best_decays, best_of_image, settings
from tailoring.experiments._parts import load_parts, save_parts
from tailoring.experiments._rows import read
from tailoring.experiments._train import Learner, Schedule, train, trained

ROOT = Path(__file__).parent.parent


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
