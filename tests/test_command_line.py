"""The command `tailoring`: what it refuses, shows and returns when something is wrong."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tailoring.__main__ import main
from tailoring.experiments import contrastive, pendulum, planets, smoothing, toy
from tailoring.experiments._toy_map import Gaussians, Window

pytestmark = pytest.mark.usefixtures("seeded")
ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("experiment", "changes"),
    [
        *((planets, {name: 0}) for name in ("batch", "width", "chunk", "ttt_batch", "epochs")),
        *((planets, {name: ()}) for name in ("lrs", "output_lrs", "ttt_lrs", "seeds")),
        *((pendulum, {name: 0}) for name in ("iterations", "width", "marks", "evaluations")),
        *((pendulum, {name: ()}) for name in ("seeds", "grid_seeds", "lrs", "amounts")),
        *((toy, {name: ()}) for name in ("eps", "radii")),
        *((toy, {name: (-1.0,)}) for name in ("eps", "radii", "lrs")),
        *((toy, {"window": Window(pixel=pixel)}) for pixel in (0.0, 100.0)),
        *((toy, {"data": Gaussians(**given)}) for given in ({"deviation": (0.0, 1.0)}, {"mean": (0.0, 0.0)})),
        (contrastive, {"batch": 0}),
        (contrastive, {"data": Path("nowhere"), "images": "made"}),
        (smoothing, {"data_dir": Path("nowhere"), "data": "made"}),
        (smoothing, {"root": Path("nowhere"), "data": "made"}),
        (pendulum, {"data": Path("nowhere")}),
        (contrastive, {"labels": (0,)}),
        (smoothing, {"batch": 0}),
    ],
    ids=str,
)
def test_numbers_that_make_no_sense_are_refused_before_anything_runs(experiment, changes, tmp_path):
    name = next(iter(changes)).replace("_", "-")
    with pytest.raises(ValueError, match=rf"--{name}(\.\w+)? "):
        experiment.run(replace(experiment.quick(), out=tmp_path / "out", **changes))
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("experiment", ["planets", "smoothing", "contrastive"])
def test_a_device_that_is_not_there_is_told_in_a_line(experiment, tmp_path, capsys):
    assert main(["run", experiment, "--quick", "--accelerator", "cuda", "--out", str(tmp_path / "out")]) == 1
    assert "error: --accelerator cuda: " in capsys.readouterr().err


def test_a_device_that_needs_another_package_is_told_in_a_line(tmp_path, capsys):
    assert main(["run", "planets", "--quick", "--accelerator", "tpu", "--out", str(tmp_path / "out")]) == 1
    assert "error: --accelerator tpu: Requirement 'torch_xla" in capsys.readouterr().err


def test_a_report_that_cannot_be_written_is_shown(tmp_path, capsys):
    assert main(["run", "toy", "--quick", "--out", str(tmp_path)]) == 0
    tables = capsys.readouterr().out
    (tmp_path / "report.html").unlink()
    (tmp_path / "report.html").mkdir()
    assert main(["report", "toy", "--out", str(tmp_path)]) == 1
    shown = capsys.readouterr()
    assert shown.out.strip() == tables.split("\n\nrows and all")[0].strip()
    assert "error: the figures and the page were not written: " in shown.err


def test_a_figure_that_cannot_be_drawn_costs_no_table(tmp_path, capsys, monkeypatch):
    (tmp_path / "rows.jsonl").write_bytes((ROOT / "docs" / "experiments" / "toy" / "rows.jsonl").read_bytes())

    def fails(_results):
        raise ValueError("Data cannot be log-scaled.")

    monkeypatch.setattr("tailoring.experiments._toy_report._attack", fails)
    assert main(["report", "toy", "--out", str(tmp_path)]) == 1
    shown = capsys.readouterr()
    assert "best line for that radius" in shown.out
    assert "error: the figures and the page were not written: ValueError: Data cannot be log-scaled." in shown.err


def test_a_reader_that_has_seen_enough_is_no_error():
    command = f"{sys.executable} -m tailoring --help | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")


def test_another_pipe_that_breaks_is_an_error(monkeypatch, capsys):
    def breaks(_args):
        raise BrokenPipeError("a worker is gone")

    monkeypatch.setattr("tailoring.__main__._main", breaks)
    assert main(["run", "toy"]) == 1
    assert "error: a worker is gone" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["planets", "pendulum", "contrastive", "toy", "smoothing"])
def test_the_help_of_a_run_tells_of_quick(name, capsys):
    for flags, words in (([], "--quick: other defaults"), (["--quick"], "The defaults are those of --quick")):
        with pytest.raises(SystemExit) as stop:
            main(["run", name, *flags, "--help"])
        assert stop.value.code == 0
        assert words in capsys.readouterr().out


def test_a_mistyped_flag_is_corrected(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["run", "planets", "--epoch", "3"])
    assert stop.value.code != 0
    assert "--epochs" in capsys.readouterr().err


@pytest.mark.parametrize("args", [["--help"], ["run", "--help"], ["run"]])
def test_help_lists_the_experiments(args, capsys):
    assert main(args) == 0
    assert "planets" in capsys.readouterr().out


def test_help_of_an_experiment_gives_reasons(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["run", "planets", "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert "--stride" in text
    assert "the paper" in text.lower()
