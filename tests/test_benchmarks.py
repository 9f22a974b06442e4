"""The programs in benchmarks/ run, and write rows that say what was measured beside what."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tailoring.__main__ import main

ROOT = Path(__file__).parent.parent
SMALL = {
    "overhead": ["--width", "8"],
    "depth": ["--queries", "4", "--layers", "0", "2", "--width", "8", "--steps", "1", "--only", "CN last layer"],
    "architectures": ["--networks", "resnet8", "transformer", "--queries", "2", "--steps", "1", "--only", "CN", "Weights"],
    "weights": ["--queries", "2", "--steps", "1", "--only", "loop by hand"],
    "meta": ["--queries", "4", "--steps", "1", "--only", "all, one loss, recomputed"],
    "generator": ["--candidates", "4", "--steps", "1"],
    "peers": ["--queries", "2", "--steps", "1", "--only", "torch.func.vmap", "torchopt"],
    "smoothing": ["--networks", "resnet20", "--batch", "1", "--only", "plain", "last half"],
}


def run(name: str, out: Path) -> list[dict]:
    command = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), *SMALL[name], "--seconds", "0.01", "--out", str(out)]
    subprocess.run(command, check=True, capture_output=True, cwd=out.parent, env={**os.environ, "PYTHONPATH": str(ROOT)})
    return [json.loads(line) for line in out.read_text().splitlines()]


def measured(name: str, rows: list[dict]) -> bool:
    return len(rows) >= 2 and all(row["seconds"] > 0 and row["peak_bytes"] > 0 and row["program"] == name for row in rows)


@pytest.mark.parametrize("name", ["meta", "generator", "peers", "weights"])  # others are below; smoothing compiles a ResNet
def test_every_program_measures_its_cases(name, tmp_path):
    rows = run(name, tmp_path / "rows.jsonl")
    assert not [row for row in rows if "failed" in row]
    assert measured(name, rows)


def test_every_program_is_tried_here():
    assert {path.stem for path in (ROOT / "benchmarks").glob("[!_]*.py")} == set(SMALL)


@pytest.fixture(scope="module")
def depths(tmp_path_factory):
    """Several depths, measured once: every case is a process, which takes seconds to start."""
    return run("depth", tmp_path_factory.mktemp("depth") / "rows.jsonl")


def test_every_combination_has_its_rows(depths):
    assert [(row["name"], row["layers"]) for row in depths] == [(name, n) for n in (0, 2) for name in ("plain", "CN last layer")]


def test_a_case_that_fails_does_not_cost_the_others(depths):
    failed = [row["layers"] for row in depths if "failed" in row]
    assert failed
    assert set(failed) == {0}
    whole = [row for row in depths if row["layers"] == 2]
    assert [row["name"] for row in whole] == ["plain", "CN last layer"]
    assert measured("depth", whole)


@pytest.mark.parametrize("steps", [1, 3])
def test_training_steps_multiply_as_often_as_counted(steps, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    meta, work = importlib.import_module("meta"), importlib.import_module("_work")

    def multiplications(run) -> int:
        with FlopCounterMode(display=False) as counter:
            run()
        return counter.get_total_flops()

    unit = multiplications(lambda: work.planets("cpu")(torch.zeros(4, 25)))
    known = meta.cases(argparse.Namespace(queries=4, steps=steps, device="cpu"))
    assert known.keys() == meta.COUNTS.keys()
    for name, build in known.items():
        run = build()
        for _ in range(9):  # the first finds the places, and in eight passes the loss is looked at
            run()
        assert multiplications(run) / unit == pytest.approx(meta.COUNTS[name](steps), rel=0.02)  # the first layer's input needs none


def test_growth_is_drawn_for_each_device(depths, tmp_path):
    rows = [row for row in depths if row["layers"] > 0]
    rows += [row | {"device": "NVIDIA H200"} for row in rows] + [rows[0] | {"layers": 4, "failed": "no memory"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, str(ROOT / "benchmarks" / "_plots.py"), str(tmp_path / "rows.jsonl"), "--out", str(tmp_path / "plots")]
    subprocess.run(command, check=True, capture_output=True)
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {"cpu.png", "nvidia-h200.png"}


def test_runs_are_also_waited_for_one_by_one(monkeypatch, capsys):
    """As on CUDA, where a run returns before it is done."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    measure, done = importlib.import_module("_measure"), []
    times = measure._waited(lambda: done.append("run"), lambda: done.append("wait"), 0.01)
    assert done == ["run", "wait"] * len(times)
    assert 1 <= len(times) <= 1000
    row = {"name": "a case", "seconds": 1e-3, "waited": 2e-3, "peak_bytes": None}
    measure._tell(row, {}, "another", 4e-3)
    assert "1 ms (2 waited for)" in capsys.readouterr().out


def test_rounds_measure_the_cases_in_turns_and_tell_the_medians(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    measure, done = importlib.import_module("_measure"), []

    def found(options, setting, name):
        done.append(name)
        return {"failed": "ValueError: no such thing"} if name == "c" else {"seconds": [3.0, 1.0, 2.0][(len(done) - 1) // 3], "runs": 5}

    monkeypatch.setattr(measure, "_in_a_process_of_its_own", found)
    rounds = dict(measure._in_rounds(["a", "b", "c"], {}, argparse.Namespace(rounds=3)))
    assert done == ["a", "b", "c"] * 3
    assert rounds["a"] == rounds["b"] == {"seconds": 2, "runs": 5, "rounds": {"seconds": [3, 1, 2]}}
    assert rounds["c"] == {"failed": "ValueError: no such thing"}


def test_a_case_that_cannot_be_built_is_told_as_failed(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    measure = importlib.import_module("_measure")

    def fails():
        raise ValueError("no such thing")

    options = argparse.Namespace(device="cpu", seconds=0.01)
    assert measure._measure({"c": fails}, "c", options) == {"failed": "ValueError: no such thing"}
    assert measure._measure({"a": lambda: lambda: None}, "a", options)["seconds"] > 0


ON_THE_H200 = [  # the lines of the table in docs/performance.md: program, setting, case, against
    *(("smoothing", "resnet18", "high", case, "plain compiled") for case in ("tailored compiled", "tailored")),
    *(("smoothing", "resnet18", "high", f"last {part} compiled", "plain compiled") for part in ("half", "quarter", "block")),
    ("smoothing", "resnet110", "high", "tailored compiled", "plain compiled"),
    *(("smoothing", "resnet110", "high", f"last {part} compiled", "plain compiled") for part in ("half", "quarter", "block")),
    *(("depth", 16384, "highest", f"CN {where} compiled", "plain") for where in ("everywhere", "last layer")),
    *(("depth", 16384, "high", f"CN {where} compiled", "plain") for where in ("everywhere", "last layer")),
    *(("peers", 1024, "high", case, "JAX CN") for case in ("CN compiled", "CN, nothing tuned") for _ in ("in a row", "waited for")),
    ("peers", 1024, "highest", "CN compiled", "JAX CN"),
    ("peers", 16384, "high", "CN compiled", "JAX CN"),
    ("peers", 16384, "highest", "CN compiled", "JAX CN"),
    ("peers", 1024, "high", "Weights compiled", "JAX weights"),
    *(("peers", n, matmul, "Weights compiled", "CN compiled") for n in (1024, 16384) for matmul in ("high", "highest")),
    ("peers", 1024, "high", "Weights", "torch.func.vmap"),
    *(("architectures", "resnet18", "high", "Weights compiled", against) for against in ("vmap compiled", "vmap", "vmap by hand")),
    *(("architectures", "resnet18", "high", "Weights", against) for against in ("vmap", "vmap by hand")),
    ("architectures", 256, "high", "Weights", "vmap"),
    ("architectures", "transformer", "high", "Weights compiled", "vmap"),
    ("architectures", "transformer", "high", "CN compiled", "plain"),
]


ON_THE_CPU = [
    ("depth", 512, "highest", "CN everywhere", "plain"),
    ("depth", 512, "highest", "CN everywhere compiled", "plain compiled"),
    *(("depth", 512, "highest", case, "plain") for case in ("CN last half", "CN last layer")),
    *(
        ("depth", width, "highest", f"CN {where}", f"plain{' compiled' if 'compiled' in where else ''}")
        for width in (1024, 2048)
        for where in ("everywhere", "everywhere compiled", "last layer")
    ),
    ("overhead", 1, "highest", "tailored", "by hand"),
    ("generator", None, "highest", "batched", "scalar loop"),
    *(("peers", 256, "highest", case, "Weights") for case in ("Weights compiled", "JAX weights", "higher", "torchopt", "torch-ttt")),
    *(
        ("peers", 256, "highest", case, "Weights")
        for case in ("torch.func.vmap", "torch.func.vmap compiled", "CN", "CN compiled", "JAX CN")
    ),
    *(
        ("architectures", network, "highest", f"Weights{mode}", f"{vmap}{mode}")
        for network, vmaps in (("resnet18", ("vmap", "vmap by hand")), ("resnet20", ("vmap by hand",)))
        for vmap in vmaps
        for mode in ("", " compiled")
    ),
    ("architectures", "transformer", "highest", "Weights", "vmap by hand"),
    ("architectures", "transformer", "highest", "Weights compiled", "Weights"),
]


@pytest.mark.parametrize(
    ("section", "file", "lines"),
    [("## Measured\n", "cpu", ON_THE_CPU), ("## Measured on the H200", "h200", ON_THE_H200)],
    ids=["cpu", "h200"],
)
def test_the_tables_are_those_of_their_rows(section, file, lines):
    """The last row of each case, beside the row of the other that is nearest to it in the file: of the same process, or at least run."""
    rows = [json.loads(line) for line in (ROOT / "benchmarks" / "rows" / f"{file}.jsonl").read_text().splitlines()]
    page = (ROOT / "docs" / "performance.md").read_text().split(section)[1].split("|--:|--:|\n")[1].split("\n\n")[0]
    for line, of_a_row in zip(page.splitlines(), lines, strict=True):
        program, setting, matmul, case, against = of_a_row
        measured = "peak_bytes" if "MiB" in line else "waited" if "waited for" in line else "seconds"
        of = {
            name: [
                i
                for i, row in enumerate(rows)
                if (row["program"], row["matmul"], row["name"]) == (program, matmul, name)
                and setting in ([row.get("width")] if (file, program) == ("cpu", "depth") else [row.get("networks"), row.get("queries")])
                and measured in row
            ]
            for name in (case, against)
        }
        place = of[case][-1]
        other = min(of[against], key=lambda i: abs(i - place))
        said = line.split("|")[4].split()[0]
        digits = len(said.partition(".")[2])
        assert f"{rows[place][measured] / rows[other][measured]:.{digits}f}" == said, line


def test_what_is_said_in_short_is_said_at_length():
    page = (ROOT / "docs" / "performance.md").read_text()
    short, measured = page.split("## In short")[1].split("## Run it")[0], page.split("## Measured\n")[1]
    told = [number for line in short.splitlines() if line.startswith("| ") for number in re.findall(r"\d[\d./]*", line.split("|")[2])]
    assert len(told) >= 12
    assert [number for number in told if not re.search(rf"(?<![\d.]){re.escape(number)}(?![\d.])", measured)] == []


def test_the_command_runs_a_program_with_its_flags(tmp_path, capfd):
    out = tmp_path / "rows.jsonl"
    assert main(["bench", "overhead", *SMALL["overhead"], "--seconds", "0.01", "--out", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["name"] for row in rows] == ["by hand", "tailored", "plain"]
    assert {row["width"] for row in rows} == {8}
    assert measured("overhead", rows)
    title, *lines = capfd.readouterr().out.splitlines()
    assert title.startswith("overhead: ")
    for row, line in zip(rows, lines, strict=True):  # each with its ratio to the first
        assert row["name"] in line
        assert float(line.split()[-4]) == pytest.approx(row["seconds"] / rows[0]["seconds"], abs=6e-4)


def test_the_command_says_which_programs_there_are(capsys):
    assert main(["bench", "dept"]) == 1
    assert "did you mean depth?" in capsys.readouterr().err
    assert main(["bench", "--steps", "1"]) == 1
    assert f"(there is: {', '.join(sorted(SMALL))})" in capsys.readouterr().err
    assert main(["bench", "--help"]) == 0
    told = capsys.readouterr().out
    assert all(f"\n  {name} " in told for name in SMALL)


def test_no_round_is_refused(capfd):
    assert main(["bench", "overhead", "--rounds", "0"]) == 1
    assert "--rounds must be at least 1, not 0" in capfd.readouterr().err


def test_a_case_that_there_is_not_is_named(capfd):
    assert main(["bench", "overhead", "--only", "by foot"]) == 1
    assert "no case 'by foot' (there is: by hand, tailored, plain)" in capfd.readouterr().err


@pytest.mark.usefixtures("seeded")
def test_a_benchmark_refuses_what_it_does_not_know_before_it_measures(tmp_path, capfd):
    assert main(["bench", "architectures", "--networks", "nope"]) == 1
    assert "--networks: no 'nope'" in capfd.readouterr().err
    (tmp_path / "file").touch()
    assert main(["bench", "overhead", "--out", str(tmp_path / "file" / "rows.jsonl")]) == 1
    shown = capfd.readouterr()
    assert "error: --out: " in shown.err
    assert "ms" not in shown.out
