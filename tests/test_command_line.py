"""The command `tailoring`: what it refuses, shows and returns when something is wrong."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tailoring.__main__ import main
from tailoring.experiments import contrastive, pendulum, planets, smoothing

pytestmark = pytest.mark.usefixtures("seeded")
ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("experiment", "changes"),
    [
        *((planets, {name: 0}) for name in ("batch", "width", "chunk", "ttt_batch", "epochs")),
        *((planets, {name: ()}) for name in ("lrs", "output_lrs", "ttt_lrs", "seeds")),
        *((pendulum, {name: 0}) for name in ("iterations", "width", "marks", "evaluations")),
        *((pendulum, {name: ()}) for name in ("seeds", "grid_seeds", "lrs", "amounts")),
        (contrastive, {"batch": 0}),
        (contrastive, {"labels": (0,)}),
        (smoothing, {"batch": 0}),
    ],
    ids=str,
)
def test_numbers_that_make_no_sense_are_refused_before_anything_runs(experiment, changes, tmp_path):
    name = next(iter(changes)).replace("_", "-")
    with pytest.raises(ValueError, match=f"--{name} "):
        experiment.run(replace(experiment.quick(), out=tmp_path / "out", **changes))
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("experiment", ["planets", "smoothing", "contrastive"])
def test_a_device_that_is_not_there_is_told_in_a_line(experiment, tmp_path, capsys):
    assert main(["run", experiment, "--quick", "--accelerator", "cuda", "--out", str(tmp_path / "out")]) == 1
    assert "error: --accelerator cuda: " in capsys.readouterr().err


def test_a_report_that_cannot_be_written_is_shown(tmp_path, capsys):
    assert main(["run", "toy", "--quick", "--out", str(tmp_path)]) == 0
    tables = capsys.readouterr().out
    (tmp_path / "report.html").unlink()
    (tmp_path / "report.html").mkdir()
    assert main(["report", "toy", "--out", str(tmp_path)]) == 1
    shown = capsys.readouterr()
    assert shown.out.strip() == tables.split("\n\nrows and all")[0].strip()
    assert "error: the figures and the page were not written: " in shown.err


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
