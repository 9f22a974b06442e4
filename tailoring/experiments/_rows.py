"""Result rows: one JSON object a line, appended as they come, the config first."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, fields, is_dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from ._cache import make_folder, telling, write_whole
from ._lock import lock_folder

Row = dict[str, Any]
# Fields that say how to compute, not what, of configs from before these said so themselves
HOW_BEFORE = {"out", "data", "only", "at_once", "chunk", "cn_chunk", "accelerator", "devices", "strategy", "compile"}


class _Found(dict):
    """A row of a file, or a part of one, that says where it lies when it is asked for a field that it lacks."""

    def __init__(self, where: str, fields: Row):
        super().__init__(fields)
        self.where = where

    def __missing__(self, name: str) -> Any:
        raise ValueError(f"{self.where}: the row lacks the field {name!r}; mend it or take it out (nothing was changed)")

    def __reduce__(self) -> Any:
        return _Found, (self.where, dict(self))


class Rows:
    """The file `rows.jsonl` of a run. Opening it again goes on where the run stopped, if the config is the same.

    The first row holds the experiment's name and config; every session of the run adds one with its commit, versions and device. A config
    names in `HOW` those of its fields that say how to compute and not what. `sha256` tells the content of what some of its paths lead to:
    where it is known, it is compared in place of the path. A file without results, beside no trainings, is written anew. As long as the
    object lives no other process can open the folder to write.
    """

    def __init__(self, folder: Path, experiment: str, config: Any, device: str = "cpu", *, sha256: dict[str, str] | None = None):
        make_folder(folder)
        self._lock = lock_folder(folder)  # before the rows are read, which another process may be about to write
        self.path = folder / "rows.jsonl"
        head = {"kind": "config", "experiment": experiment, "config": _plain(asdict(config)), "how": sorted(config.HOW)}
        if sha256:
            head["sha256"] = sha256
        self._rows = list(read(self.path)) if self.path.exists() else []
        found = [] if self._rows else sorted(path.stem for path in (folder / "weights").glob("*.safetensors"))
        if has_results(self._rows) or (self._rows and (folder / "weights").exists()):  # trainings leave theirs before the first result
            _refuse_another(self.path, self._rows[0], head, _defaults(config))
            _mend_end(self.path)
        else:
            write_whole(self.path, (json.dumps(head) + "\n").encode())
            self._rows = [head]
        self.add(kind="session", **environment(device))
        if found:  # brought here, or left behind without the rows that told how they were trained
            print(f"{folder / 'weights'} holds {', '.join(found)} from before the first row: taken as they are", file=sys.stderr)
            self.add(kind="found", weights=found)

    def add(self, **row: Any) -> None:
        """Append a row; it is on the disk when this returns."""
        with telling(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._rows.append(row)

    def has(self, **fields: Any) -> bool:
        """Whether a row with these fields was written, in this session or before."""
        wanted = json.loads(json.dumps(fields))
        return any(all(row.get(name) == value for name, value in wanted.items()) for row in self._rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)


def read(path: Path) -> Iterator[Row]:
    """The whole rows of a file; a last line that was cut off in the middle is left out."""
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        raise FileNotFoundError(f"no result rows at {path}: run the experiment first, or give its folder with --out") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                row = json.loads(line, object_hook=partial(_Found, f"{path}, line {number}"))
            except ValueError:  # no JSON, or no text
                if number == len(lines):  # only a line that was not finished may be broken
                    return
                row = None
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number}: not a JSON row; mend or move the file (nothing was changed)")
            yield row


def read_folder(folder: Path, experiment: str | None = None) -> list[Row]:
    """The rows of a run: `rows.jsonl`, and `rows-*.jsonl` of other machines that ran parts of it with the same config (`--only`).

    If an experiment is named, they must be its rows, with results among them.
    """
    if folder.is_file():
        raise ValueError(f"{folder} is a file, not the folder of a run")
    rows: list[Row] = []
    for path in sorted(folder.glob("rows*.jsonl")) or [folder / "rows.jsonl"]:
        part = list(read(path))
        if rows and part:
            common = {name: value for name, value in rows[0]["config"].items() if name in part[0]["config"]}
            older = {**part[0], "config": {name: value for name, value in part[0]["config"].items() if name in common}}
            _refuse_another(path, older, {**rows[0], "config": common}, {})  # a setting that one of them did not know yet is no difference
        rows += part
    rows = list({json.dumps(row, sort_keys=True): row for row in rows}.values())  # once each, also if a copy of the file lies beside it
    if experiment is not None:
        found = rows[0].get("experiment") if rows else experiment
        if found != experiment:
            known = f"results of {found}" if found else "no results of this library"
            raise ValueError(f"{folder} holds {known}, not of {experiment}: give the folder of a run of {experiment} with --out")
        if foreign := [row for row in rows if "kind" not in row]:
            raise ValueError(f"{folder} holds a row that does not say what it is, {json.dumps(foreign[0])[:80]}: remove it")
        if not has_results(rows):
            raise ValueError(f"{folder} holds no results of {experiment} yet: run it first, or give the folder of a run with --out")
    return rows


def last_of_each(rows: Iterable[Row], names: Mapping[str, Sequence[str]]) -> list[Row]:
    """The rows, but of those of a kind that agree in the fields `names` only the last, in the first one's place: a result counts once."""
    found: dict[str, Row] = {}
    for row in rows:
        wanted = names.get(row["kind"])
        found[json.dumps(row if wanted is None else [row["kind"], *map(row.get, wanted)], sort_keys=True)] = row
    return list(found.values())


def has_results(rows: Iterable[Row]) -> bool:
    return any(row.get("kind") not in ("config", "session", "data", "found") for row in rows)


def _mend_end(path: Path) -> None:
    """End a last line that lacks only its end; drop one that was cut off in the middle."""
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    try:
        json.loads(content[whole:] or b"{}")
    except ValueError:
        os.truncate(path, whole)
    else:
        if content[whole:]:
            with path.open("ab") as file:
                file.write(b"\n")


def _plain(value: Any) -> Any:
    """As JSON holds it."""
    return json.loads(json.dumps(value, default=lambda o: asdict(o) if is_dataclass(o) and not isinstance(o, type) else str(o)))


def _defaults(config: Any) -> Row:
    """What a file that does not know a setting was made with: there was no other choice then."""
    known = {f.name: f.default_factory() if callable(f.default_factory) else f.default for f in fields(config)}
    return {name: _plain(value) for name, value in known.items() if value is not MISSING}


def _refuse_another(path: Path, found: Row, head: Row, defaults: Row) -> None:
    if found.get("kind") != "config" or found.get("experiment") != head["experiment"]:
        raise ValueError(f"{path} is not a result file of {head['experiment']}: choose another folder with --out (nothing was changed)")
    was, now, contents = defaults | found["config"], head["config"], head.get("sha256", {})
    known = found.get("sha256", {})
    how = {*head.get("how", HOW_BEFORE), *(name for name in contents if name in known or _moved_along(was, now, name))}
    differences = [f"{name}: {a!r} there, {b!r} now" for name, a, b in _different(was, now, how)]
    differences += [f"{name}: another content there than now" for name in contents if known.get(name, contents[name]) != contents[name]]
    if differences:
        raise ValueError(
            f"{path} holds results of another config ({'; '.join(differences)}): choose another folder with --out, "
            "or the same settings to go on (nothing was changed)"
        )


def _moved_along(was: Row, now: Row, name: str) -> bool:
    """Whether a path leads to the same place as seen from the run's folder, which may have been moved with what lies around it."""
    seen = [os.path.relpath(config[name], config["out"]) for config in (was, now) if config.get(name) and config.get("out")]
    return len(seen) == 2 and seen[0] == seen[1]


def _different(was: Row, now: Row, how: set[str], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    for name in sorted((was.keys() | now.keys()) - (set() if prefix else how)):
        a, b = was.get(name), now.get(name)
        if isinstance(a, dict) and isinstance(b, dict):
            yield from _different(a, b, how, f"{prefix}{name}.")
        elif a != b:
            yield prefix + name, a, b


def environment(device: str) -> Row:
    """Where a result came from."""
    cuda = torch.device(device).type == "cuda"
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    return {
        "commit": _commit(),
        "versions": versions | {name: _version(name) for name in ("tailoring", "lightning-fabric")},
        "device": torch.cuda.get_device_name() if cuda else f"{platform.machine()} CPU, {torch.get_num_threads()} threads",
        "command": " ".join(["tailoring", *sys.argv[1:]]),
    }


def _commit() -> str:
    """The commit of this source tree, with a + if files differ from it; TAILORING_COMMIT says it where there is no git."""
    if "TAILORING_COMMIT" in os.environ:
        return os.environ["TAILORING_COMMIT"]

    def git(*args: str) -> str:
        return subprocess.run(["git", "-C", str(Path(__file__).parent), *args], capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
