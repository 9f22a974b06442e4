"""The planets experiment, whole and tiny: every method, kills, several processes, commands, the page."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tailoring.__main__ import main
from tailoring.experiments import planets
from tailoring.experiments._planets_bench import Bench, noise_losses
from tailoring.experiments._planets_plan import Training, plan
from tailoring.experiments._planets_report import PAPER, tables, verdict
from tailoring.experiments._planets_results import Results
from tailoring.experiments._rows import read, read_folder
from tailoring.experiments._train import Learner, Schedule, train, trained

ROOT = Path(__file__).parent.parent


# fmt: off
TINY = [
    "--system.trajectories", "30", "--system.slots", "64", "--system.stable", "30", "--system.kept", "20", "--system.ahead", "5",
    "--parts", "14", "4", "6", "--more", "20", "--width", "8", "--seeds", "0", "1", "--epochs", "4", "--batch", "64", "--rollout", "3",
    "--rollouts", "4", "--ttt-batch", "60", "--lrs", "1e-3", "1e-2", "--ttt-lrs", "1e-3", "--output-lrs", "1e-3", "--weights-lrs", "1e-4",
    "--output-steps", "12", "--weights", "0", "1e-2", "--pair-lrs", "1e-6", "--pair-ttt-lrs", "1e-5", "--pair-weights-lrs", "1e-6",
    "--accelerator", "cpu",
]
# fmt: on


def command(*args, **changes):
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "tailoring", *map(str, args)], cwd=ROOT, env=env, capture_output=True, text=True, **changes
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("planets")


@pytest.fixture(scope="module")
def finished(folder):
    return run_here("run", "planets", "--out", folder / "out", "--data", folder / "data", *TINY)


def run_here(*args):
    """As `command`, without a process of its own: what the command printed."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert main([str(arg) for arg in args]) == 0
    return said.getvalue()


def results(folder):
    return [row for row in read(folder / "out" / "rows.jsonl") if row["kind"] == "result"]


def test_a_run_holds_every_method_and_control(finished, folder):
    methods = {row["training"]["method"] for row in results(folder)}
    assert methods >= {"inductive", "inductive-updates", "meta", "meta-each", "noise", "second-order", "full-second-order", "meta-5-steps"}
    assert methods >= {
        "mammoth",
        "pairs",
        "pairs-meta",
        "more",
        "more-meta",
        "batchnorm",
        "batchnorm-twice",
        "width-2",
        "width-4",
        "second-order-clipped",
    }
    procedures = {row["procedure"] for row in results(folder) if row["name"] == "inductive-w0.002-seed0"}
    assert procedures == {"tailoring", "output", "ttt", "projection", "weights"}
    for words in (
        "predict the input",
        "constant velocity",
        "optimise the output",
        "batch TTT",
        "tailoring (1 step)",
        "w after each inner step",
    ):
        assert words in finished


def test_the_rows_are_what_the_weights_say(finished, folder):
    """A row of the file, computed again from the saved network, with loops and by hand."""
    config = tiny_config(folder)
    data = planets._nbody.load(config.data, config.system, stride=5, split="trajectory", parts=config.parts, seed=0, more=config.more)
    net = planets.build_network(Bench(config, data, torch.device("cpu")), next(plan(config)))
    (row,) = [r for r in results(folder) if r["name"] == "inductive-w0.002-seed0" and r["procedure"] == "output" and r["part"] == "test"]
    with torch.no_grad():
        error = (net(data.test.x) - data.test.y).view(-1, 5, 5)[..., :4]
    assert row["mse"][0] == pytest.approx(float(error.square().mean()), rel=1e-4)
    assert len(row["mse"]) == config.output_steps + 1
    assert row["physics"][-1] < row["physics"][0]


def tiny_config(folder):
    import tyro

    return tyro.cli(planets.Config, args=["--out", str(folder / "out"), "--data", str(folder / "data"), *TINY])


def test_a_finished_run_is_not_run_again(finished, folder):
    before = (folder / "out" / "rows.jsonl").read_text()
    planets.run(replace(tiny_config(folder), data=folder / "nowhere"))  # asked from another directory, say
    added = (folder / "out" / "rows.jsonl").read_text()[len(before) :]
    assert [json.loads(line)["kind"] for line in added.splitlines()] == ["session"]
    assert not (folder / "nowhere").exists()  # no trajectories are made again for nothing


def test_the_report_has_our_numbers_beside_the_papers(finished, folder, capsys):
    assert main(["report", "planets", "--out", str(folder / "out")]) == 0
    assert "Against the inductive network:" in capsys.readouterr().out
    page = (folder / "out" / "report.html").read_text()
    for _, relative in PAPER.values():
        assert relative is None or relative in page
    assert page.count("<svg") == 2
    for name in ("paths", "rollouts"):
        assert (folder / "out" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (folder / "out" / f"{name}.svg").read_text()


def test_gains_are_relative_to_the_same_seed_and_chosen_on_validation(finished, folder):
    found = Results(read(folder / "out" / "rows.jsonl"))
    chosen = found.choose(found.settings("inductive", 2e-3), "tailoring", 5)
    base = found.choose(found.settings("inductive", 2e-3), "tailoring", 0)
    loss = {(r["name"], r["lr"], r["part"]): r["mse"] for r in results(folder) if r["procedure"] == "tailoring"}
    names = [f"inductive-w0.002-seed{seed}" for seed in (0, 1)]
    mean = {lr: sum(loss[name, lr, "validation"][5] for name in names) for lr in (1e-3, 1e-2)}
    assert chosen.lr == min(mean, key=mean.__getitem__)
    gain = found.gain(chosen, 5, base)
    assert gain.values == pytest.approx([1 - loss[n, chosen.lr, "test"][5] / loss[n, chosen.lr, "test"][0] for n in names])
    main = tables(found)[0]
    assert any("meta-tailoring" in row[0] for row in main.rows if row)
    law = next(row[main.columns.index("law")] for row in main.rows if row and row[0].startswith("tailoring (5"))
    left = [
        r["physics"][5]
        for r in results(folder)
        if (r["procedure"], r["part"], r["lr"]) == ("tailoring", "test", chosen.lr) and r["name"] in names
    ]
    assert float(law) == pytest.approx(sum(left) / len(left), rel=0.06)


def test_killed_in_the_middle_it_goes_on_to_the_same_rows(folder):
    """kill -9 in training, then the same command: the same results as never stopped."""
    args = ["--data", folder / "data", *TINY, "--only", "meta-each-w0.002-lr0.01-seed0", "--epochs", "60"]
    whole = run_here("run", "planets", "--out", folder / "whole", *args)
    assert "no inductive network" in whole  # so no table yet
    killed = [sys.executable, "-c", KILLED, "run", "planets", "--out", str(folder / "killed"), *map(str, args)]
    with subprocess.Popen(killed, cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == b"checkpoint"
        process.send_signal(signal.SIGKILL)
    assert list((folder / "killed" / "weights").glob("*.checkpoint"))
    run_here("run", "planets", "--out", folder / "killed", *args)
    lines = [[row for row in read(folder / name / "rows.jsonl") if row["kind"] == "result"] for name in ("whole", "killed")]
    assert len(lines[0]) == 4
    assert lines[0] == lines[1]


# As the command, but it checkpoints after every epoch, says so once, and then waits to be killed in the next epoch.
KILLED = """
import sys, time
from tailoring.experiments import _train
save = _train._Checkpoint.save
def slow(self, epoch):
    self.saved = 0
    save(self, epoch)
    if epoch == 30:
        print("checkpoint", flush=True)
    if epoch >= 31:
        time.sleep(60)
_train._Checkpoint.save = slow
from tailoring.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def test_two_processes_train_as_one(finished, folder):
    args = ["--data", folder / "data", *TINY, "--only", "meta-w0.002-lr0.01-seed0"]
    done = command("run", "planets", "--out", folder / "two", *args, "--devices", "2", "--strategy", "ddp", timeout=240)
    assert done.returncode == 0, done.stderr
    one, two = (trained(folder / name / "weights", "meta-w0.002-lr0.01-seed0") for name in ("out", "two"))
    for name, value in one[0].items():
        torch.testing.assert_close(two[0][name], value, atol=1e-4, rtol=1e-3)
    rows = [row["kind"] for row in read(folder / "two" / "rows.jsonl")]
    assert rows.count("config") == 1


def test_the_appendix_outer_loop_refuses_several_processes_before_anything_runs(tmp_path):
    config = replace(tiny_config(tmp_path), devices=2, strategy="ddp")
    with pytest.raises(ValueError, match=r"meta-each-w0.002-lr0.001-seed0, a step after each inner step .* one device only"):
        planets.run(config)
    with pytest.raises(ValueError, match=r"nothing matches --only meta-eech\*; a run trains: inductive-"):
        planets.run(replace(config, only=("meta-eech*",)))
    assert not list(tmp_path.iterdir())


def test_training_refuses_a_step_after_each_loss_in_several_processes(tmp_path):
    learner, several = Learner("each", nn.Linear(2, 2), nn.Identity(), 0, each=True), SimpleNamespace(world_size=2)
    x, y, schedule = torch.zeros(8, 2), torch.zeros(8), Schedule(1, 4, 0.1)
    with pytest.raises(ValueError, match="trains on one device only"):
        train([learner], x, y, schedule, fabric=several, folder=tmp_path, progress=None)


@pytest.mark.parametrize("precision", ["64-true", "bf16-mixed"])
def test_other_precisions_train_and_report(folder, precision):
    only = ["inductive-w0.002-seed0", "meta-w0.002-lr0.01-seed0", "meta-each-w0.002-lr0.01-seed0"]
    flags = [*TINY, "--only", *only, "--precision", precision, "--output-steps", "4"]
    assert "tailoring (10 steps)" in run_here("run", "planets", "--out", folder / precision, "--data", folder / "data", *flags)
    weights = trained(folder / precision / "weights", only[1])[0]
    assert weights["layers.0.weight"].dtype == (torch.float64 if precision == "64-true" else torch.float32)


def tiny_bench(folder):
    config = tiny_config(folder)
    data = planets._nbody.load(config.data, config.system, stride=5, split="trajectory", parts=config.parts, seed=0, more=config.more)
    return Bench(config, data, torch.device("cpu")), data


def test_noise_has_the_size_of_the_step_it_replaces(folder, finished):
    bench, data = tiny_bench(folder)
    t = replace(next(plan(bench.config)), steps=2, lr=1e-2, adapt="noise", width=64)
    model = bench.learner(t).objective.model
    x, y = data.test.x, data.test.y

    def mse(a, b):
        return (a - b).square().mean().detach()

    plain = float(mse(model.net(x), y))
    noisy = [float(loss) for loss in noise_losses(model, mse, x, y)]
    assert len(noisy) == 2
    assert all(abs(loss - plain) / plain > 1e-7 for loss in noisy)
    used, predict = [], model.predict
    model.predict = lambda x, state: (used.append(state), predict(x, state))[1]
    list(noise_losses(model, mse, x, y))
    for start, step, noise in zip([next(iter(model.states(x)))] * 2, list(model.states(x))[1:], used, strict=True):
        for name in start:
            sizes = [(state[name] - start[name]).square().mean().sqrt() for state in (noise, step)]
            torch.testing.assert_close(*sizes, rtol=0.1, atol=1e-9)
            assert not torch.allclose(noise[name] - start[name], step[name] - start[name], atol=float(sizes[0]) / 10)
    still = bench.learner(replace(t, lr=0.0)).objective.model
    assert [float(loss) for loss in noise_losses(still, mse, x, y)] == pytest.approx([plain, plain])


def test_a_batch_is_taken_twice_with_batchnorm_too(folder, finished):
    bench, _ = tiny_bench(folder)
    learner = bench.learner(Training("batchnorm-twice", 0, 0.0, 1, width=8, norm=True, outer="each", repeats=2))
    x, y = bench.validation.x, bench.validation.y
    seen = [loss.detach() for loss in learner.objective.losses(x, y)]
    assert len(seen) == 2
    assert learner.each
    assert next(m for m in learner.net.modules() if isinstance(m, nn.BatchNorm1d)).num_batches_tracked == 2


def test_every_training_has_a_name_of_its_own():
    for config in (planets.Config(), planets.quick()):
        trainings = list(dict.fromkeys(plan(config)))
        assert len({t.name for t in trainings}) == len(trainings)
    assert next(plan(planets.Config())) == Training("inductive", 0, 2e-3, 1000)


def test_the_quick_run_trains_all_of_table_1_as_the_full_run_does():
    quick, full = ({t.method: t for t in plan(config) if t.seed == 0} for config in (planets.quick(), planets.Config()))
    assert quick.keys() >= {"inductive", "meta", "meta-each", "second-order"}
    second = next(t for t in plan(planets.Config()) if t.method == "second-order")
    assert (quick["second-order"].backprop, quick["second-order"].lr) == (second.backprop, second.lr) == ("last", 1e-4)
    assert quick.keys() < full.keys()
    named = [t.name for t in plan(replace(planets.Config(), extras=("second-order", "order")))]
    assert len(named) == len(set(named))


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["run", "planet"], "did you mean planets?"),
        (["rum", "planets"], "did you mean run?"),
        (["run", "zzz"], "there is: "),
        (["report", "planets", "--out", "/nonexistent/folder"], "no result rows"),
        (["report", "toy", "--out", "FILE"], "is a file, not the folder of a run"),
        (["run", "pendulum", "--out", "OUT", "--data", "/nonexistent/folder"], "/nonexistent/folder"),
        (["run", "planets", "--only", "nothing*", "--out", "OUT", "--data", "DATA", *TINY], "nothing matches"),
        (["run", "planets", "--out", "FILE/x", "--data", "DATA", *TINY], "cannot write to"),
        (["run", "planets", "--out", "OUT", "--data", "FILE/x", *TINY, "--system.seed", "9"], "cannot write to"),
    ],
)
def test_bad_commands_are_told_what_to_do(args, words, tmp_path, capsys):
    (tmp_path / "file").touch()
    places = {"OUT": "out", "DATA": "data", "FILE/x": "file/x", "FILE": "file"}
    places = {name: str(tmp_path / place) for name, place in places.items()}
    assert main([places.get(arg, arg) for arg in args]) != 0
    assert words in capsys.readouterr().err
    assert args[1] != "pendulum" or not (tmp_path / "out").exists()


def test_run_needs_neither_tyro_nor_rich():
    code = "import sys; sys.modules['tyro'] = sys.modules['rich'] = None\nfrom tailoring.experiments.planets import *; print(quick().split)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "pair", done.stderr


def test_the_tables_in_the_docs_are_those_of_the_committed_rows():
    folder = ROOT / "docs" / "experiments" / "planets"
    page = folder.with_suffix(".md").read_text()
    for table in tables(Results(read_folder(folder))):
        assert table.markdown() in page, f"docs/experiments/planets.md does not hold the table {table.title!r} of its rows"


def test_the_verdict_knows_the_strongest_control():
    main = tables(Results(read_folder(ROOT / "docs" / "experiments" / "planets")))[0]
    said = verdict(main).replace("\n    ", " ")  # long lines are folded
    against_first, against_best = said.split("Against the strongest control, the best inductive network of all:")
    once, each = "meta-tailoring, w once a batch (0 steps)", "meta-tailoring, w after each inner step (0 steps)"
    better, worse = (next(line for line in against_best.splitlines() if line.startswith(f"  {kind}: ")) for kind in ("better", "worse"))
    assert once in against_first
    assert "worse" not in against_first
    assert once in worse
    assert each in better
    assert verdict(replace(main, rows=[(*row[:3], "", "", *row[5:]) for row in main.rows if row])).startswith("One seed")
