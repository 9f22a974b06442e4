"""The command `tailoring`: run the experiments and report on them."""

from __future__ import annotations

import difflib
import importlib
import inspect
import io
import os
import select
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

EXPERIMENTS = {
    "planets": "five planets that conserve energy and momentum (Table 1, Figure 2)",
    "pendulum": "a real pendulum that nearly conserves its energy (Figure 3)",
    "smoothing": "image classifiers that are certified against attacks (Tables 2 to 5)",
    "toy": "two Gaussians, a linear separator and its adversary (the toy example of the appendix)",
    "contrastive": "CIFAR-10 by a linear layer on SimCLR representations, tailored by the agreement of views (Figure 4, TTT)",
}

COMMANDS = ("run", "report", "certify", "bench")

USAGE = """usage: tailoring COMMAND EXPERIMENT [flags]

  tailoring run EXPERIMENT            full settings (a GPU helps); stopped at any moment, the same command goes on
  tailoring run EXPERIMENT --quick    the same in small, minutes on two cores
  tailoring run EXPERIMENT --help     all settings
  tailoring report EXPERIMENT         tables on the screen, figures and an HTML page beside the rows [--out DIR | --quick]
  tailoring certify --weights FILE    certify a classifier by randomized smoothing, here or over a Ray cluster [--help]
  tailoring report certify            its table again [--out DIR]
  tailoring bench [PROGRAM] [flags]   time the programs in benchmarks/ (all of them, or one), in ratios [PROGRAM --help]

experiments:
"""


def main(args: list[str] | None = None) -> int:
    args = sys.argv[1:] if args is None else args
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that does not know a sign
    try:
        found = _main(args)
        sys.stdout.flush()
        return found
    except BrokenPipeError as error:
        if not _stdout_is_closed():
            print(f"error: {error}", file=sys.stderr)
            return 1
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # `| head` has seen enough; nothing is to fail at the end, either
        return 0
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on from here", file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _stdout_is_closed() -> bool:
    """Whether nobody reads it any more; another pipe that breaks is an error."""
    poll = select.poll()
    poll.register(1, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _main(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help") or (args[0] not in ("certify", "bench") and args[1:] in ([], ["-h"], ["--help"])):
        if args and args[0] not in ("-h", "--help"):
            _choose(args[0], COMMANDS, "command")
        print(USAGE + "".join(f"  {name:<12}{what}\n" for name, what in EXPERIMENTS.items()), end="")
        return 0 if args else 2
    command = _choose(args[0], COMMANDS, "command")
    if command == "certify":
        return _certify(args[1:])
    if command == "bench":
        return _bench(args[1:])
    known = [*EXPERIMENTS, "certify"] if command == "report" else [*EXPERIMENTS]
    experiment = _load(_choose(args[1], known, "experiment"))
    return (_run if command == "run" else _report)(experiment, args[1], args[2:])


def _choose(given: str, known: Collection[str], what: str) -> str:
    if given in known:
        return given
    near = difflib.get_close_matches(given, known, 1, 0.5)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ValueError(f"unknown {what} {given!r}{hint} (there is: {', '.join(known)})")


def _load(name: str) -> Any:
    try:
        for needed in ("tyro", "rich"):
            importlib.import_module(needed)
        return importlib.import_module(f"tailoring.experiments.{name}")
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("tailoring"):
            raise
        raise OSError(f"the experiments need {error.name}: pip install 'tailoring[experiments]' (in a checkout '.[experiments]')") from None


def _run(experiment: Any, name: str, args: list[str]) -> int:
    import tyro

    quick = "--quick" in args
    default = experiment.quick() if quick else experiment.Config()
    flags = [arg for arg in args if arg != "--quick"]
    about = inspect.cleandoc(experiment.Config.__doc__ or "")
    about += "\n\nThe defaults are those of --quick." if quick else "\n\n--quick: other defaults, with which all of it runs in small."
    prog = f"tailoring run {name}{' --quick' if quick else ''}"
    config = tyro.cli(experiment.Config, default=default, args=flags, prog=prog, description=about)
    with _progress() as progress:
        out = experiment.run(config, progress)
    shown = _show(experiment, out)
    if quick:
        print(f"A demonstration, not evidence: smaller, and often easier, than what docs/experiments/{name}.md reports.")
    return shown


def _certify(args: list[str]) -> int:
    experiment = _load("certify")
    import tyro

    config = tyro.cli(experiment.Config, args=args, prog="tailoring certify")
    with _progress() as progress:
        out = experiment.run(config, progress)
    return _show(experiment, out)


def _bench(args: list[str]) -> int:
    """The programs are not part of the package: they lie beside it in the repository."""
    folder = Path(__file__).parent.parent / "benchmarks"
    programs = {path.stem: path for path in sorted(folder.glob("[!_]*.py"))}
    if not programs:
        raise ValueError(f"no benchmarks in {folder}: `tailoring bench` works in a checkout of the repository")
    given = args[:1] if args and not args[0].startswith("-") else []
    if args in (["-h"], ["--help"]):
        print("tailoring bench [PROGRAM] [flags], where PROGRAM is one of (each has --help):")
        print("\n".join(f"  {name:<14} {_first_line(path)}" for name, path in programs.items()))
        return 0
    if not given and args:
        raise ValueError(
            f"which program do these flags belong to? tailoring bench PROGRAM {' '.join(args)} (there is: {', '.join(programs)})"
        )
    failed = 0
    for name in [_choose(given[0], programs, "program")] if given else programs:
        print(f"{name}: {_first_line(programs[name])}", flush=True)
        failed += subprocess.run([sys.executable, str(programs[name]), *args[1:]]).returncode != 0
    return 1 if failed else 0


def _first_line(path: Path) -> str:
    return path.read_text().splitlines()[0].strip('"')


def _report(experiment: Any, name: str, args: list[str]) -> int:
    import tyro

    def where(quick: bool = False, out: Path | None = None) -> Path:
        """Tables on the screen, figures (PNG, SVG) and one HTML page beside the rows.

        Args:
            quick: report on the quick run.
            out: folder of the run.
        """
        if quick and name == "certify":
            raise ValueError("certify has no quick run: give the folder of its rows with --out")
        return out or (experiment.quick() if quick else experiment.Config).out

    return _show(experiment, tyro.cli(where, args=args, prog=f"tailoring report {name}"))


def _show(experiment: Any, out: Path) -> int:
    try:
        print(experiment.report(out))
    except OSError as error:
        print(getattr(error, "tables", ""))  # of a folder that cannot be written to
        raise
    print(f"\nrows and all that is made of them: {out}")
    return 0


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar for the whole and one for what is being done, with the time left of each."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description:<44.44}"), BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        tasks: dict[str, Any] = {}
        shown = [""]

        def progress(what: str, done: int, total: int) -> None:
            kind = "whole" if what == "groups" else "part"
            if kind not in tasks or (kind == "part" and shown[0] != what):
                if kind in tasks:
                    bars.remove_task(tasks.pop(kind))
                tasks[kind] = bars.add_task("all of it" if kind == "whole" else what, total=total)
                shown[0] = what if kind == "part" else shown[0]
            bars.update(tasks[kind], completed=done, total=total)

        yield progress


if __name__ == "__main__":
    sys.exit(main())
