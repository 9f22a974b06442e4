"""The files of rows that a run writes, what they refuse and mend, and the tables that are made of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from tailoring.__main__ import main
from tailoring.experiments import _contrastive_report as contrastive_report
from tailoring.experiments import _pendulum_report as pendulum_report
from tailoring.experiments import _toy_report as toy_report
from tailoring.experiments import contrastive, pendulum, planets, smoothing, toy
from tailoring.experiments._cache import write_whole
from tailoring.experiments._nbody import System
from tailoring.experiments._report import Estimate, Table
from tailoring.experiments._rows import Rows, read, read_folder

pytestmark = pytest.mark.usefixtures("seeded")
COMMITTED = Path(__file__).parents[1] / "docs" / "experiments"


def test_weights_from_before_the_first_row_are_told_of(tmp_path, capsys):
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "old.safetensors").touch()
    config = toy.quick()
    assert [row for row in Rows(tmp_path, "toy", config) if row["kind"] == "found"] == [{"kind": "found", "weights": ["old"]}]
    assert "holds old from before the first row" in capsys.readouterr().err
    Rows(tmp_path, "toy", config)  # which goes on, and is silent
    assert not capsys.readouterr().err
    assert sum(row["kind"] == "found" for row in read_folder(tmp_path)) == 1


def test_damage_is_told_by_name(tmp_path):
    path = tmp_path / "rows.jsonl"
    Rows(tmp_path, "toy", toy.quick()).add(kind="result")
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"a": 1}\n')
    with pytest.raises(ValueError, match=r'does not say what it is, {"a": 1}'):
        read_folder(tmp_path, "toy")
    path.write_bytes(whole + b'{"kind": "\xff"}\n{"kind": "result"}\n')
    with pytest.raises(ValueError, match=r"rows.jsonl, line 4: not a JSON row"):
        read_folder(tmp_path, "toy")


def test_a_copy_of_the_rows_counts_once(tmp_path):
    rows = Rows(tmp_path, "toy", toy.quick())
    rows.add(kind="result", value=1)
    rows.add(kind="result", value=2)
    once = read_folder(tmp_path, "toy")
    (tmp_path / "rows-backup.jsonl").write_bytes(rows.path.read_bytes())
    assert read_folder(tmp_path, "toy") == once


@dataclass(frozen=True)
class Settings:
    HOW: ClassVar = frozenset({"out"})

    out: Path = Path()
    lr: float = 0.1
    inner: System = field(default_factory=System)


def test_rows_are_appended_and_found_again(tmp_path):
    rows = Rows(tmp_path, "x", Settings())
    rows.add(kind="result", name="a", lr=0.1, mse=[1.0])
    again = Rows(tmp_path, "x", Settings(out=Path("elsewhere")))  # where it lies is no setting
    assert again.has(name="a", lr=0.1)
    assert not again.has(name="a", lr=0.2)
    kinds = [row["kind"] for row in read(again.path)]
    assert kinds == ["config", "session", "result", "session"]
    session = list(again)[1]
    assert session["versions"]["torch"] == torch.__version__
    assert session["commit"]


def test_a_row_that_was_cut_off_is_dropped_and_the_rest_kept(tmp_path):
    rows = Rows(tmp_path, "x", Settings())
    rows.add(name="a")
    with rows.path.open("a") as file:
        file.write('{"name": "b", "ms')  # killed here
    again = Rows(tmp_path, "x", Settings())
    again.add(name="c")
    assert [row.get("name") for row in read(rows.path) if "name" in row] == ["a", "c"]


def test_a_broken_line_in_the_middle_is_refused(tmp_path):
    rows = Rows(tmp_path, "x", Settings())
    rows.path.write_text("{broken\n" + rows.path.read_text())
    before = rows.path.read_text()
    with pytest.raises(ValueError, match="line 1"):
        Rows(tmp_path, "x", Settings())
    assert rows.path.read_text() == before


def test_results_of_another_config_are_refused_and_kept(tmp_path):
    rows = Rows(tmp_path, "x", Settings())
    rows.add(kind="result")
    path = rows.path
    with path.open("a") as file:
        file.write('{"kind": "res')  # not even a broken end is touched
    before = path.read_text()
    with pytest.raises(ValueError, match=r"lr: 0\.1 there, 0\.2 now"):
        Rows(tmp_path, "x", Settings(lr=0.2))
    with pytest.raises(ValueError, match=r"inner\.gravity: 300\.0 there, 2\.0 now"):
        Rows(tmp_path, "x", Settings(inner=System(gravity=2.0)))
    with pytest.raises(ValueError, match="not a result file of y"):
        Rows(tmp_path, "y", Settings())
    assert path.read_text() == before


@pytest.mark.parametrize("kept", [b'{"kind": "conf', b"", b'{"kind": "config", "experiment": "y", "config": {"lr": 0.2}}'])
def test_a_file_without_results_is_written_anew(tmp_path, kept):
    (tmp_path / "rows.jsonl").write_bytes(kept)
    Rows(tmp_path, "x", Settings(lr=0.2)).add(kind="data", classes=2)
    Rows(tmp_path, "x", Settings()).add(kind="result")
    rows = list(read(tmp_path / "rows.jsonl"))
    assert [row["kind"] for row in rows] == ["config", "session", "result"]
    assert rows[0]["config"]["lr"] == 0.1


def test_a_file_without_results_but_with_trainings_is_kept(tmp_path):
    Rows(tmp_path, "x", Settings())
    (tmp_path / "weights").mkdir()
    with pytest.raises(ValueError, match="lr: "):
        Rows(tmp_path, "x", Settings(lr=0.2))


def test_a_last_row_that_lacks_only_its_end_is_kept(tmp_path):
    path = Rows(tmp_path, "x", Settings()).path
    path.write_bytes(path.read_bytes() + b'{"kind": "result", "name": "a"}')
    assert Rows(tmp_path, "x", Settings()).has(name="a")
    assert [row.get("name") for row in read(path)] == [None, None, "a", None]


@dataclass(frozen=True)
class Net:
    HOW: ClassVar = frozenset({"out"})

    weights: Path
    out: Path


def test_a_file_is_known_by_its_content_and_in_old_rows_by_its_place(tmp_path):
    def rows(path, out="run", **sha256):
        return Rows(tmp_path, "x", Net(Path(path), Path(out)), sha256=sha256)

    rows("run/net.pt").add(kind="result")  # from before contents were kept
    rows("moved/net.pt", "moved", weights="a")
    with pytest.raises(ValueError, match=r"weights: 'run/net.pt' there, 'run/other.pt' now"):
        rows("run/other.pt", weights="a")
    (tmp_path / "rows.jsonl").unlink()
    rows("run/net.pt", weights="a").add(kind="result")
    rows("run/other.pt", weights="a")
    with pytest.raises(ValueError, match="weights: another content there than now"):
        rows("run/net.pt", weights="b")


@pytest.mark.parametrize("experiment", ["planets", "pendulum", "smoothing", "toy", "contrastive", "certify"])
@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "no results of {} yet"),
        ('{"kind": "config", "experiment": "EXPERIMENT", "config": {}}\n', "no results of {} yet"),
        ('{"kind": "config", "experiment": "another", "config": {}}\n{"kind": "result"}\n', "results of another, not of {}"),
        ('{"name": "a"}\n', "not of {}"),
        ("[1]\n", "line 1: not a JSON row"),
        (None, "no result rows at"),
    ],
)
def test_a_report_on_rows_of_something_else_says_so(tmp_path, capsys, experiment, content, words):
    if content is not None:
        (tmp_path / "rows.jsonl").write_text(content.replace("EXPERIMENT", experiment))
    assert main(["report", experiment, "--out", str(tmp_path)]) == 1
    assert words.format(experiment) in capsys.readouterr().err


def test_parts_of_one_run_are_read_together(tmp_path):
    Rows(tmp_path, "x", Settings()).add(name="a")
    (tmp_path / "rows.jsonl").rename(tmp_path / "rows-a.jsonl")
    Rows(tmp_path, "x", Settings(out=Path("there"))).add(name="b")
    assert {row.get("name") for row in read_folder(tmp_path)} >= {"a", "b"}
    (tmp_path / "rows.jsonl").rename(tmp_path / "rows-b.jsonl")
    old = (tmp_path / "rows-b.jsonl").read_text().replace('"lr": 0.1, ', "")  # from before there was such a setting
    (tmp_path / "rows-b.jsonl").write_text(old)
    assert len(read_folder(tmp_path)) == 5  # two configs, two names, and one session that both tell of
    Rows(tmp_path, "x", Settings(lr=0.3)).add(name="c")
    with pytest.raises(ValueError, match="another config"):
        read_folder(tmp_path)
    (tmp_path / "rows.jsonl").write_text("")
    assert len(read_folder(tmp_path)) == 5


def test_an_estimate_tells_its_spread():
    clear, unclear = Estimate((0.10, 0.11, 0.12)), Estimate((0.1, -0.1, 0.02))
    assert clear.mean == pytest.approx(0.11)
    assert clear.error == pytest.approx(0.01 / 3**0.5)
    assert clear.percent() == "11.0 ± 0.6"
    assert unclear.percent().endswith("?")
    assert Estimate((0.1,)).percent() == "10.0"
    assert Estimate((float("inf"),)).percent() == "diverged"


def test_a_table_prints_in_three_ways():
    table = Table("T", ("a", "b"), [("x", "1"), (), ("<y>", "22")], "note")
    assert table.text().splitlines()[4] == "x     1"
    assert table.markdown().splitlines()[1] == "|---|--:|"
    assert "&lt;y&gt;" in table.html()


@pytest.mark.parametrize("experiment", [planets, pendulum, contrastive, toy, smoothing], ids=lambda module: module.__name__)
def test_rows_of_other_settings_are_refused_whichever_it_is_that_differs(experiment, tmp_path):
    """All but those that say how to compute, and not what."""
    names = {f.name for f in fields(experiment.Config)}
    assert names > experiment.Config.HOW
    config = experiment.quick()
    Rows(tmp_path, "it", config).add(kind="result")
    head = json.loads((tmp_path / "rows.jsonl").read_text().splitlines()[0])
    for name in sorted(names):
        changed = json.dumps({**head, "config": {**head["config"], name: "another"}})
        (tmp_path / "rows.jsonl").write_text(changed + '\n{"kind": "result"}\n')
        with nullcontext() if name in experiment.Config.HOW else pytest.raises(ValueError, match=f"results of another config .{name}"):
            Rows(tmp_path, "it", config)


HOLDER = """
import sys, time
from pathlib import Path
from tailoring.experiments import toy
from tailoring.experiments._rows import Rows
rows = Rows(Path(sys.argv[1]), "toy", toy.quick())
print("holds", flush=True)
time.sleep(600)
"""


def test_a_second_process_cannot_write_into_a_folder(tmp_path, capfd):
    """Until the first ends, however it ends; a process that was forked by it does not hold the folder in its place."""
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "holds\n"
            before = (tmp_path / "rows.jsonl").read_bytes()
            assert main(["run", "toy", "--quick", "--out", str(tmp_path)]) == 1
            said = capfd.readouterr().err
            assert f"error: another process (pid {process.pid} on " in said
            assert f"is writing into {tmp_path}: " in said
            assert (tmp_path / "rows.jsonl").read_bytes() == before
            assert len(list(read(tmp_path / "rows.jsonl"))) == 2  # reading is free
        finally:
            process.send_signal(signal.SIGKILL)
    Rows(tmp_path, "toy", toy.quick())


def test_a_process_may_open_its_rows_again_and_leaves_the_folder_free(tmp_path):
    first, second = Rows(tmp_path, "x", Settings()), Rows(tmp_path, "x", Settings())
    first.add(kind="result")
    descriptor = first._lock.file.fileno()
    assert not os.get_inheritable(descriptor)  # what it starts does not keep the folder
    other = [sys.executable, "-c", HOLDER.replace("time.sleep(600)", ""), str(tmp_path)]
    del first
    refused = subprocess.run(other, capture_output=True, text=True)  # the second still holds it
    assert f"another process (pid {os.getpid()} on " in refused.stderr
    child = os.fork()
    if not child:  # holds nothing; would it still, the parent's end would not free the folder
        try:
            os.fstat(descriptor)
            os._exit(1)
        except OSError:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    del second
    (tmp_path / "rows.jsonl").unlink()
    assert subprocess.run(other, capture_output=True, text=True).stdout == "holds\n"


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    rows = Rows(tmp_path, "x", Settings())
    rows.path = Path("/dev/full")
    with pytest.raises(OSError, match=r"cannot write /dev/full \(No space left"):
        rows.add(kind="result")
    (tmp_path / "report.html").mkdir()
    with pytest.raises(OSError, match=r"cannot write .*report\.html \(Is a directory"):
        write_whole(tmp_path / "report.html", b"")


def test_a_field_that_a_row_lacks_is_told_with_its_place(tmp_path, capsys):
    lines = (COMMITTED / "toy" / "rows.jsonl").read_text().splitlines()
    place = next(i for i, line in enumerate(lines) if json.loads(line)["kind"] == "result")
    lines[place] = json.dumps({**json.loads(lines[place]), "setting": {"eps": 1.0}})
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n")
    assert main(["report", "toy", "--out", str(tmp_path)]) == 1
    assert f"error: {tmp_path / 'rows.jsonl'}, line {place + 1}: the row lacks the field 'grid'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("experiment", "made"),
    [
        (toy, lambda rows: toy_report._tables(toy_report.Results(rows))),
        (pendulum, lambda rows: pendulum_report.tables(pendulum_report.Results(rows))),
        (contrastive, lambda rows: contrastive_report.tables(contrastive_report.Results(rows))),
    ],
)
def test_a_result_that_stands_twice_counts_once(experiment, made, tmp_path):
    """As two processes that wrote at once, before a folder was locked, have left them: the last one counts."""
    name = experiment.__name__.rpartition(".")[2]
    rows = read_folder(COMMITTED / name, name)
    new = [row for row in rows if row["kind"] not in ("config", "session")]
    same = ("setting", "training", "seeds", "way", "at", "label", "name", "variant", "views", "trained", "lr", "lrs")
    old = [json.loads(json.dumps(row).replace("0.", "0.0")) | {name: row[name] for name in same if name in row} for row in new]
    assert old != new
    assert made([rows[0], *old, *new]) == made(rows)
