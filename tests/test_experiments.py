"""The harness that experiments share: rows, training, reports, the command."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning_fabric import Fabric
from torch import nn

from tailoring.__main__ import main
from tailoring.experiments import planets
from tailoring.experiments._nbody import System
from tailoring.experiments._planets_bench import Bench, noise_losses
from tailoring.experiments._planets_plan import Training, plan
from tailoring.experiments._planets_report import PAPER, tables
from tailoring.experiments._planets_results import Results
from tailoring.experiments._report import Estimate, Table
from tailoring.experiments._rows import Rows, read, read_folder
from tailoring.experiments._train import Learner, Schedule, train, trained

ROOT = Path(__file__).parent.parent

# Rows


@dataclass(frozen=True)
class Settings:
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


# Training


class Squares(nn.Module):
    """Two terms, so that summing them and stepping on each can be told apart."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def losses(self, x, y):
        yield (self.net(x) - y).square().mean()
        yield (self.net(x) - y).abs().mean()

    def forward(self, x, y):
        return sum(self.losses(x, y), start=x.new_zeros(()))


def learner(name, seed=0, **changes):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    return Learner(name, net, Squares(net), seed, **changes)


def problem():
    torch.manual_seed(5)
    x = torch.randn(64, 3)
    return x, x.sum(1, keepdim=True)


def fit(folder, learners, epochs=6, **changes):
    x, y = problem()
    schedule = Schedule(epochs, 16, 1e-2, **changes)
    train(learners, x, y, schedule, fabric=Fabric(accelerator="cpu"), folder=folder, progress=lambda *_: None)
    return [trained(folder, item.name) for item in learners]


def same(a, b):
    return all(torch.equal(a[0][name], b[0][name]) for name in a[0])


def test_side_by_side_is_as_alone(tmp_path):
    together = fit(tmp_path / "two", [learner("a"), learner("b", 1)])
    alone = [fit(tmp_path / "one", [learner("a")])[0], fit(tmp_path / "one", [learner("b", 1)])[0]]
    assert same(together[0], alone[0])
    assert same(together[1], alone[1])
    assert not same(together[0], together[1])


def test_training_is_adam_on_shuffled_batches_with_a_cosine(tmp_path):
    (found,) = fit(tmp_path, [learner("a")], epochs=3)
    x, y = problem()
    net = learner("a").net
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for epoch in range(3):
        order = torch.randperm(64, generator=torch.Generator().manual_seed(epoch)).view(4, 16)
        for i, rows in enumerate(order):
            optimizer.param_groups[0]["lr"] = 1e-2 * (1 + torch.cos(torch.tensor((epoch + i / 4) / 3 * torch.pi)).item()) / 2
            optimizer.zero_grad()
            Squares(net)(x[rows], y[rows]).backward()
            optimizer.step()
    for name, value in net.state_dict().items():
        torch.testing.assert_close(found[0][name], value, atol=1e-5, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_recorded_graph_trains_as_the_cpu_does(tmp_path):
    x, y = (t.cuda() for t in problem())
    learners = [learner("a"), learner("b", 1, each=True)]
    train(learners, x, y, Schedule(6, 16, 1e-2), fabric=Fabric(accelerator="cuda"), folder=tmp_path, progress=lambda *_: None)
    expected = fit(tmp_path / "cpu", [learner("a"), learner("b", 1, each=True)])
    for item, weights in zip(learners, expected, strict=True):
        for name, value in trained(tmp_path, item.name)[0].items():
            torch.testing.assert_close(value, weights[0][name], atol=1e-4, rtol=1e-3)


def test_each_steps_after_every_loss(tmp_path):
    summed, each = fit(tmp_path, [learner("sum"), learner("each", each=True)])
    assert not same(summed, each)


def test_the_best_on_validation_is_kept(tmp_path):
    seen = []

    def validate(net):
        seen.append(float(next(net.parameters()).detach().sum()))
        return abs(len(seen) - 2.0)  # the second is the best

    fit(tmp_path, [learner("a", validate=validate)], epochs=4, validations=4)
    best, curve = trained(tmp_path, "a", best=True)
    assert [loss for _, loss in curve] == [1.0, 0.0, 1.0, 2.0]
    assert float(best["0.weight"].sum()) == seen[1]


def test_a_stopped_training_goes_on_to_the_same_result(tmp_path):
    class StopError(Exception):
        pass

    def stop(what, done, total):
        if done == 4:
            raise StopError

    whole = fit(tmp_path / "whole", [learner("a"), learner("b", 1, each=True)])
    x, y = problem()
    schedule = Schedule(6, 16, 1e-2, checkpoint_seconds=0)
    with pytest.raises(StopError):
        train([learner("a"), learner("b", 1, each=True)], x, y, schedule, fabric=Fabric(accelerator="cpu"), folder=tmp_path, progress=stop)
    assert trained(tmp_path, "a") is None
    epochs = []
    again = [learner("a"), learner("b", 1, each=True)]
    progress = lambda what, done, total: epochs.append(done)  # noqa: E731
    train(again, x, y, schedule, fabric=Fabric(accelerator="cpu"), folder=tmp_path, progress=progress)
    assert epochs == [5, 6]  # from the checkpoint, not from the start
    assert same(whole[0], trained(tmp_path, "a"))
    assert same(whole[1], trained(tmp_path, "b"))
    assert not list(tmp_path.glob("*.checkpoint"))


def test_a_checkpoint_of_another_training_is_refused(tmp_path):
    x, y = problem()

    def stop(what, done, total):
        if done == 2:
            raise KeyboardInterrupt

    schedule = Schedule(6, 16, 1e-2, checkpoint_seconds=0)
    with pytest.raises(KeyboardInterrupt):
        train([learner("a")], x, y, schedule, fabric=Fabric(accelerator="cpu"), folder=tmp_path, progress=stop)
    with pytest.raises(ValueError, match="other settings"):
        fit(tmp_path, [learner("a")], epochs=7)


def test_impossible_trainings_are_refused(tmp_path):
    with pytest.raises(ValueError, match="larger than the training set"):
        train(
            [learner("a")],
            torch.zeros(3, 3),
            torch.zeros(3, 1),
            Schedule(1, 16, 0.1),
            fabric=Fabric(accelerator="cpu"),
            folder=tmp_path,
            progress=print,
        )


# A whole, tiny run of planets

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
    assert methods >= {"mammoth", "pairs", "pairs-meta", "more", "more-meta", "batchnorm", "width-2", "width-4", "second-order-clipped"}
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
    planets.run(tiny_config(folder))
    added = (folder / "out" / "rows.jsonl").read_text()[len(before) :]
    assert [json.loads(line)["kind"] for line in added.splitlines()] == ["session"]


def test_the_report_has_our_numbers_beside_the_papers(finished, folder, capsys):
    assert main(["report", "planets", "--out", str(folder / "out")]) == 0
    assert "Larger than the seeds' spread" in capsys.readouterr().out
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
    assert any("meta-tailoring" in row[0] for row in tables(found)[0].rows if row)


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


def test_noise_has_the_size_of_the_step_it_replaces(folder, finished):
    config = tiny_config(folder)
    data = planets._nbody.load(config.data, config.system, stride=5, split="trajectory", parts=config.parts, seed=0, more=config.more)
    bench = Bench(config, data, torch.device("cpu"))
    t = replace(next(plan(config)), steps=2, lr=1e-2, adapt="noise", width=64)
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


# The command


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


def test_run_needs_neither_tyro_nor_rich():
    code = "import sys; sys.modules['tyro'] = sys.modules['rich'] = None\nfrom tailoring.experiments.planets import *; print(quick().split)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "pair", done.stderr


# Tables


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


def test_the_tables_in_the_docs_are_those_of_the_committed_rows():
    folder = ROOT / "docs" / "experiments" / "planets"
    page = folder.with_suffix(".md").read_text()
    for table in tables(Results(read_folder(folder))):
        assert table.markdown() in page, f"docs/experiments/planets.md does not hold the table {table.title!r} of its rows"
