"""The files of rows that a run writes: what they hold besides results, damage, and copies."""

from __future__ import annotations

import pytest

from tailoring.experiments import toy
from tailoring.experiments._rows import Rows, read_folder

pytestmark = pytest.mark.usefixtures("seeded")


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
