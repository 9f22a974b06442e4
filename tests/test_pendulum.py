"""The pendulum experiment: its data, networks, predictions, choices and workers."""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from tailoring import outer_losses
from tailoring.experiments import _compiled_step, pendulum
from tailoring.experiments import _pendulum_data as data
from tailoring.experiments import _pendulum_plan as plan
from tailoring.experiments import _pendulum_report as reports
from tailoring.experiments._pendulum_data import Law, Motion, Segment, Source, load, simulated
from tailoring.experiments._pendulum_fit import Error, OuterError, fit, mean_slope
from tailoring.experiments._pendulum_nets import HNN, MLP, Drift, Projected, Tanh, by_member, side_by_side, tailored
from tailoring.experiments._pendulum_plan import Training
from tailoring.experiments._rollout import roll_out
from tailoring.experiments._rows import read

LAW = Law("pendulum", 2.4)
FOLDER = Path(os.environ.get("TAILORING_DATA", Path(__file__).parents[2] / "shared" / "data"))


@pytest.fixture(scope="module", params=["simulated", "pendulum", "spring"])
def motion(request) -> Motion:
    if request.param != "simulated" and not (FOLDER / "pendulum" / data.SOURCES[request.param].file).exists():
        pytest.skip(f"{data.SOURCES[request.param].file} is not in {FOLDER}/pendulum: set TAILORING_DATA to test on the measured motion")
    return load(request.param, FOLDER)


def rate(motion, x, y):
    return float((motion.law.gradient(x) * y).sum(1).mean())


def test_energy_is_lost_and_forward_labels_lose_far_more(motion):
    energy = motion.law.energy(motion.states)
    true = float((energy[motion.cut - 1] - energy[0]) / (motion.time[motion.cut - 1] - motion.time[0]))
    assert true < 0
    assert rate(motion, *motion.pairs("central", "train")) == pytest.approx(true, rel=0.15)
    assert rate(motion, *motion.pairs("forward", "train")) < 10 * true


def test_no_test_state_is_seen_in_training(motion):
    changed = Motion(motion.time, torch.where(torch.arange(len(motion.time))[:, None] < motion.cut, motion.states, torch.nan), motion.law)
    for labels in ("forward", "central"):
        for a, b in zip(changed.pairs(labels, "train"), motion.pairs(labels, "train"), strict=True):
            torch.testing.assert_close(a, b)
    assert all(bool(s.states.isfinite().all()) for s in changed.train)
    assert bool(changed.test.states.isnan().all())
    assert {len(s.time) for s in [*motion.train, motion.test]} == {motion.cut // 4}


def test_labels_follow_their_formulas():
    time = torch.tensor([0.0, 1.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], dtype=torch.float64)
    states = torch.stack([time**2, 3 * time], 1)
    motion = Motion(time, states, LAW)
    x, y = motion.pairs("central", "train")
    torch.testing.assert_close(y, torch.stack([2 * x[:, 0].sqrt(), torch.full_like(x[:, 0], 3.0)], 1))  # exact for a parabola
    x, y = motion.pairs("forward", "train")
    torch.testing.assert_close(y[1], torch.tensor([4.0, 3.0], dtype=torch.float64))  # (9 - 1) / 2
    torch.testing.assert_close(motion.gaps()[:2, 0], torch.tensor([1.0, 2.0], dtype=torch.float64))


@pytest.fixture
def small_file(tmp_path):
    content = b"%o v\r\n" + b"".join(b"0 %d %d 2.5 \r\n" % (i, i) for i in range(5))
    (tmp_path / "small.txt").write_bytes(content)
    return tmp_path / "small.txt", Source("small.txt", 5, hashlib.sha256(content).hexdigest())


def test_a_file_is_read_if_rows_columns_and_checksum_are_right(small_file):
    path, source = small_file
    table = data.read(path, source)
    assert table.shape == (5, 4)
    assert table[3].tolist() == [0, 3, 3, 2.5]
    with pytest.raises(ValueError, match=r"5 rows of .4. columns; it should have 6 rows of 4"):
        data.read(path, replace(source, rows=6))
    with pytest.raises(ValueError, match="SHA-256"):
        data.read(path, replace(source, sha256="0" * 64))
    path.write_bytes(path.read_bytes().replace(b"0 1 1 2.5", b"0 1 1"))
    with pytest.raises(ValueError, match="columns"):
        data.read(path, source)


def test_a_missing_file_says_where_to_get_it(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"real_pend_h_1\.txt.*Schmidt & Lipson.*TAILORING_DATA"):
        load("pendulum", tmp_path)


@pytest.mark.parametrize("law", [LAW, Law("spring", 6.1, 0.3)])
def test_the_gradient_of_the_energy_is_its_gradient(law):
    x = torch.randn(7, 2, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(law.energy(x).sum(), x)
    torch.testing.assert_close(law.gradient(x.detach()), slope)


def test_the_spring_is_found_from_training_data():
    time = torch.linspace(0, 20, 801, dtype=torch.float64)
    q = 0.2 + torch.cos(2.5 * time)
    law = data._spring_law(Motion(time, torch.stack([q, -2.5 * torch.sin(2.5 * time)], 1), LAW))
    assert law.stiffness == pytest.approx(6.25, rel=0.01)
    assert law.rest == pytest.approx(0.2, abs=0.01)


def test_a_tanh_by_the_sigmoid_is_the_tanh():
    x = torch.linspace(-30, 30, 601, dtype=torch.float64)
    torch.testing.assert_close(Tanh()(x), x.tanh())


def test_an_hnn_follows_the_gradient_of_its_own_energy():
    torch.manual_seed(0)
    net = HNN(1, 16).double()
    x = torch.randn(9, 2, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(net.energy(x).sum(), x)
    torch.testing.assert_close(net(x), torch.stack([slope[:, 1], -slope[:, 0]], 1))


@pytest.mark.parametrize("kind", [MLP, HNN])
def test_networks_side_by_side_answer_as_each_does(kind):
    torch.manual_seed(0)
    nets = [kind(1, 8) for _ in range(3)]
    x = torch.randn(5, 3, 2, dtype=torch.float64)
    together = by_member(side_by_side(nets)(x.flatten(1)))
    for i, net in enumerate(nets):
        torch.testing.assert_close(together[:, i], net.double()(x[:, i]))
    assert not torch.allclose(together[:, 0], together[:, 1])


def test_networks_side_by_side_are_tailored_each_by_itself():
    torch.manual_seed(0)
    nets = [MLP(1, 8) for _ in range(3)]
    x = torch.randn(5, 3, 2, dtype=torch.float64)
    together = by_member(tailored(side_by_side(nets), LAW, steps=3, lr=1e-2)(x.flatten(1)))
    for i, net in enumerate(nets):
        alone = tailored(net.double(), LAW, steps=3, lr=1e-2)(x[:, i])
        torch.testing.assert_close(together[:, i], alone)
        assert not torch.allclose(alone, net(x[:, i]))


@pytest.mark.parametrize("norm", ["l1", "l2"])
def test_a_small_step_softens_the_drift_of_energy(norm):
    torch.manual_seed(0)
    net, x, loss = MLP(1, 16).double(), torch.randn(20, 2, dtype=torch.float64), Drift(LAW, norm)
    model = tailored(net, LAW, steps=1, lr=1e-4, norm=norm)
    expected = (LAW.gradient(x) * net(x)).sum(1)
    torch.testing.assert_close(loss(net, x), expected.abs() if norm == "l1" else expected**2)
    assert bool((loss(model, x) < loss(net, x)).all())


@pytest.mark.parametrize("amount", [0.0, 0.5, 1.0])
def test_projection_takes_its_share_of_the_drift(amount):
    torch.manual_seed(0)
    net, x = MLP(2, 16).double(), torch.randn(20, 4, dtype=torch.float64)
    slope, f, soft = LAW.gradient(by_member(x)), by_member(net(x)), by_member(Projected(net, LAW, amount)(x))
    torch.testing.assert_close((slope * soft).sum(-1), (1 - amount) * (slope * f).sum(-1))
    across = torch.stack([-slope[..., 1], slope[..., 0]], -1)  # what does not change the energy stays
    torch.testing.assert_close((across * soft).sum(-1), (across * f).sum(-1))
    assert Projected(net, LAW, amount)(torch.zeros(1, 4, dtype=torch.float64)).isfinite().all()


class Circle(nn.Module):
    """Each member turns at a speed of its own; one that is infinite cannot be integrated."""

    def __init__(self, *speeds: float):
        super().__init__()
        self.speeds = torch.tensor(speeds, dtype=torch.float64)

    def forward(self, x):
        q, p = by_member(x).unbind(-1)
        return torch.stack([self.speeds * p, -self.speeds * q], -1).flatten(1)


def circles():
    time = torch.linspace(0, 5, 21, dtype=torch.float64)
    shorter = Segment(time[:11], torch.tensor([[0.0, 2.0]], dtype=torch.float64).expand(11, 2))
    return [Segment(time, torch.tensor([[1.0, 0.0]], dtype=torch.float64).expand(21, 2)), shorter]


def test_predictions_follow_the_exact_solution():
    segments = circles()
    first, second = roll_out(Circle(1.0, 2.0), [], segments, members=2, rtol=1e-8, evaluations=5000)
    assert first.shape == (2, 21, 2)
    assert second.shape == (2, 11, 2)
    for member, speed in enumerate((1.0, 2.0)):
        turn = speed * segments[0].time
        torch.testing.assert_close(first[member], torch.stack([turn.cos(), -turn.sin()], 1), atol=1e-5, rtol=0)
        turn = turn[:11]
        torch.testing.assert_close(second[member], 2 * torch.stack([turn.sin(), turn.cos()], 1), atol=1e-5, rtol=0)


def test_a_member_that_cannot_be_integrated_harms_no_other():
    alone = [Circle(1.0), Circle(1e5)]
    paths = roll_out(Circle(1.0, 1e5), alone, circles(), members=2, rtol=1e-3, evaluations=500)
    turn = circles()[0].time
    torch.testing.assert_close(paths[0][0], torch.stack([turn.cos(), -turn.sin()], 1), atol=2e-2, rtol=0)
    assert bool(paths[0][1].isnan().all())
    lost = roll_out(Circle(1.0, 1e5), [], circles(), members=2, rtol=1e-3, evaluations=500)
    assert bool(lost[0].isnan().all())


def test_a_runge_kutta_step_knows_no_spurious_damping():
    x = torch.randn(6, 2, dtype=torch.float64)
    gaps = torch.full((6, 1), 1 / 6, dtype=torch.float64)
    turn = 1.5 * gaps[0, 0]
    after = torch.stack([x[:, 0] * turn.cos() + x[:, 1] * turn.sin(), x[:, 1] * turn.cos() - x[:, 0] * turn.sin()], 1)
    torch.testing.assert_close(mean_slope(Circle(1.5), x, gaps), (after - x) / gaps, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("kind", [MLP, HNN])
def test_training_is_adam_on_the_error(kind):
    torch.manual_seed(0)
    net, x, y = kind(1, 8), *torch.randn(2, 6, 2)
    twin = deepcopy(net)
    objective = Error(net)
    losses = list(fit(_compiled_step.plain_step(objective), dict(objective.named_parameters()), (x, y), 5))
    optimizer, expected = torch.optim.Adam(twin.parameters(), 1e-3, weight_decay=1e-5), []
    for _ in range(5):
        optimizer.zero_grad()
        loss = (twin(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        expected.append(float(loss.detach()))
    assert losses == pytest.approx(expected)
    for a, b in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("backprop", ["none", "all"])
def test_single_steps_in_a_row_are_the_outer_losses(backprop):
    torch.manual_seed(0)
    net, x, y = MLP(1, 8).double(), *torch.randn(2, 6, 2, dtype=torch.float64)
    model = tailored(net, LAW, steps=3, lr=0.1, backprop=backprop)
    expected = torch.stack(list(outer_losses(model, mse_loss, x, y))).sum()
    found = OuterError(model.replace(steps=1), 3)(x, y)
    torch.testing.assert_close(found, expected)
    for a, b in zip(torch.autograd.grad(found, net.parameters()), torch.autograd.grad(expected, net.parameters()), strict=True):
        torch.testing.assert_close(a, b)


def test_compiled_training_is_training(monkeypatch):
    """Also for another seed and inner step size than what was compiled; second order, whose code once crashed."""
    monkeypatch.setattr(_compiled_step, "_compile", partial(torch.compile, fullgraph=True, backend="aot_eager"))  # no C++, and much faster
    motion = simulated(rows=40)
    first = Training("simulated", "forward", "mlp", 0, steps=2, lr=0.1, backprop="all", width=4, iterations=3, marks=1)
    for t in (first, replace(first, seed=1, lr=0.3)):
        compiled, plain = (plan._train(t, motion, how) for how in (True, False))
        for name in plain.keys() - {"seconds"}:
            torch.testing.assert_close(compiled[name], plain[name])
    assert not torch.equal(plain["losses"], plan._train(first, motion, False)["losses"])


def test_one_training_of_each_shape_comes_first_then_the_longest():
    plain, meta = Training("pendulum", "forward", "mlp", 0), Training("pendulum", "forward", "mlp", 0, steps=3, lr=0.1)
    given = [plain, replace(plain, seed=1), meta, meta, replace(meta, lr=0.01)]
    assert plan.in_order(given) == [meta, plain, replace(meta, lr=0.01), replace(plain, seed=1)]


def row(train, test, at=2000, **other):
    return {"train": train, "test": test, "energy": test, "one_step": test, "rate": test, "at": at, "seeds": [0, 1], **other}


def test_choices_look_at_training_segments_only():
    rows = [row([1.0, 1.0], [0.0, 0.0]), row([0.5, 0.5], [9.0, 9.0]), row([math.inf, 0.1], [0.0, 0.0])]
    assert reports.chosen(rows) is rows[1]


def test_each_seed_stops_where_its_own_training_segments_are_predicted_best():
    rows = [row([0.1, 0.9], [1.0, 2.0], at=500), row([0.4, 0.3], [0.0, 4.0], at=1000)]
    found = reports.stopped(rows)
    assert found is not None
    assert (found["test"], found["at"]) == ([1.0, 4.0], [500, 1000])


TINY = replace(
    pendulum.quick(),
    iterations=12,
    width=4,
    marks=2,
    lrs=(1e-2,),
    steps=(1,),
    more_steps=(0, 2),
    long_steps=(2,),
    amounts=(0.0, 1.0),
    seeds=(0, 1),
)


def test_a_run_goes_on_where_it_stopped_and_reports(tmp_path):
    config = replace(TINY, out=tmp_path / "run")
    pendulum.run(config)
    whole = [r for r in read(config.out / "rows.jsonl") if r["kind"] != "session"]
    lines = (config.out / "rows.jsonl").read_text().splitlines(keepends=True)
    (config.out / "rows.jsonl").write_text("".join(lines[: len(lines) // 2]) + lines[-1][:20])  # killed in the middle of a row
    pendulum.run(config)
    again = [r for r in read(config.out / "rows.jsonl") if r["kind"] != "session"]
    assert again == whole
    text = pendulum.report(config.out)
    for expected in ("baseline MLP", "HNN", "meta-tailoring, second order", "soft projection", "Runge-Kutta"):
        assert expected in text
    assert {"figure3.png", "figure3.svg", "sweep.svg", "lengths.svg", "report.html"} <= {p.name for p in config.out.iterdir()}
    with pytest.raises(ValueError, match="another config"):
        pendulum.run(replace(config, width=5))


def test_two_workers_train_what_one_does(tmp_path):
    short = replace(TINY, meta_seeds=(), order_seeds=(), free_seeds=(), central_seeds=(), through_seeds=())
    results = []
    for workers in (1, 2):
        config = replace(short, out=tmp_path / str(workers), workers=workers)
        rows = pendulum.Rows(config.out, "pendulum", config)
        with closing(pendulum.Bench(config, pendulum.Judge(config), rows, lambda what, done, total: None)) as bench:
            (found,) = bench.measure([pendulum.Job(pendulum.others(pendulum.base(bench, "forward"), config.seeds))])
        results.append((found["train"], found["test"]))
    assert results[0] == results[1]


def works(process: int) -> bool:
    """Whether it is there, and not only waiting to be missed."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.usefixtures("seeded")
def test_workers_end_with_the_process_that_started_them(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, time\n"
        "from concurrent.futures import ProcessPoolExecutor\n"
        "from multiprocessing import get_context\n"
        "from tailoring.experiments._pendulum_bench import _begin_to_work\n"
        "if __name__ == '__main__':\n"
        "    pool = ProcessPoolExecutor(1, get_context('spawn'), _begin_to_work)\n"
        "    print(pool.submit(os.getpid).result(), flush=True)\n"
        "    time.sleep(600)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        worker = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        process.wait()
        until = time.monotonic() + 20
        while works(worker) and time.monotonic() < until:
            time.sleep(0.05)
        assert not works(worker)


def test_the_simulated_pendulum_is_much_like_the_measured_one():
    found = simulated(rows=60)
    assert found.states.shape == (60, 2)
    slope = (found.states[2:, 0] - found.states[:-2, 0]) / (found.time[2:] - found.time[:-2])
    torch.testing.assert_close(slope, found.states[1:-1, 1], atol=0.02, rtol=0)  # p is dq/dt


@pytest.mark.parametrize("run", ["", "spring"])
def test_the_tables_in_the_docs_are_those_of_the_committed_rows(run):
    folder = Path(__file__).parents[1] / "docs" / "experiments" / "pendulum"
    page = folder.with_suffix(".md").read_text()
    results = reports.Results(read(folder / run / "rows.jsonl"))
    tables = [
        *reports._labels(results),
        reports._paper(results),
        reports._grid(results),
        *(reports._soft(results, kind, "") for kind in ("forward", "central", "through")),
    ]
    assert len(tables) == 6
    for table in tables:
        rows = [line for line in table.markdown().splitlines() if line.startswith("| ")]
        assert len(rows) > 2
        assert not [line for line in rows if line not in page]


@pytest.mark.parametrize("kinds", [("curve", "result"), ("curve",)])
def test_a_report_of_what_diverged_has_its_tables(tmp_path, kinds):
    rows = list(read(Path(__file__).parents[1] / "docs" / "experiments" / "pendulum" / "rows.jsonl"))
    for found in rows:
        if found["kind"] in kinds:
            found.update({name: [math.inf] * len(found[name]) for name in ("train", "test", "energy", "error") if name in found})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(found) + "\n" for found in rows))
    assert ("10 of 10 diverged" in pendulum.report(tmp_path)) == ("result" in kinds)
    drawn = {path.stem for path in tmp_path.glob("*.svg")}
    assert drawn == (set() if "result" in kinds else {"sweep", "lengths"})


@pytest.mark.parametrize("run", ["", "spring"])
def test_the_committed_rows_have_ten_seeds_of_every_method(run):
    results = reports.Results(read(Path(__file__).parents[1] / "docs" / "experiments" / "pendulum" / run / "rows.jsonl"))
    seeds = list(range(10))
    for labels, kind in (("forward", "mlp"), ("forward", "hnn"), ("central", "mlp"), ("central", "hnn"), ("through", "mlp")):
        assert results.find(labels, kind, seeds=seeds, how="plain")
    for labels, backprop in (("forward", "none"), ("forward", "all"), ("central", "none")):
        assert reports.same_steps(results.meta(labels, seeds=seeds, backprop=backprop))
    cells = {(r["training"]["steps"], r["training"]["lr"]) for r in reports.same_steps(results.meta(seeds=[0]))}
    assert len(cells) == 12
