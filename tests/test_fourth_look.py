"""What a fourth look at losses, training, theory, experiments and the command line found: what went wrong without a word, or with many."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.func import jacrev
from torch.nn.functional import mse_loss

from tailoring import CN, LBFGS, Shift, Support, Tailored, Weights, losses, outer_losses, theory, tune
from tailoring.__main__ import main
from tailoring.experiments import certify, contrastive, pendulum, planets, smoothing, toy
from tailoring.experiments._rows import Rows, read_folder

ADAPTERS = [CN(), Weights(), Weights(how="vmap"), Shift("1")]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def small(inputs: int = 3, outputs: int = 2) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 5), nn.Tanh(), nn.Linear(5, outputs)).double()


def data(queries: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(queries, 3).double(), torch.randn(queries, 2).double()


def to_one(model, x):
    return (model(x) - 1).square().sum(1)


class TestOuterGradients:
    @pytest.mark.parametrize("adapt", ADAPTERS, ids=repr)
    @pytest.mark.parametrize("backprop", ["none", "last", "all"])
    @pytest.mark.parametrize("settings", [{}, {"momentum": 0.5}, {"clip": 1.0}], ids=str)
    def test_a_query_with_an_infinite_slope_leaves_those_of_a_learned_rate_finite(self, adapt, backprop, settings):
        net, (x, y) = small(), data()
        x[2] = 0

        def steep(model, x):  # at query 2
            away = (model(x) - net(x).detach()).square().sum(1) + x.square().sum(1)
            return away.sqrt() + 0.1 * to_one(model, x)

        def gradient(x, y):
            lr = nn.Parameter(torch.tensor(0.05).double())
            model = Tailored(net, steep, adapt=adapt, steps=3, lr=lr, backprop=backprop, **settings)
            losses = [mse_loss(model(x), y, reduction="sum"), sum(outer_losses(model, lambda a, b: mse_loss(a, b, reduction="sum"), x, y))]
            return model.trace(x).failed.tolist(), [torch.autograd.grad(loss, lr)[0] for loss in losses]

        failed, found = gradient(x, y)
        assert failed == [False, False, True, False]
        fine = [0, 1, 3]
        _, without = gradient(x[fine], y[fine])
        torch.testing.assert_close(found, without)

    @pytest.mark.parametrize("adapt", ADAPTERS, ids=repr)
    @pytest.mark.parametrize("backprop", ["none", "last", "all"])
    def test_what_is_clipped_does_not_depend_on_how_large_it_was(self, adapt, backprop):
        """Also of one whose square is too large, or too small, for a number."""
        net, (x, y) = small().float(), [t.float() for t in data()]

        def gradient(scale: float, clip: float):
            weights = torch.tensor([1, scale, 1, 1])
            model = Tailored(net, lambda m, x: to_one(m, x) * weights, adapt=adapt, steps=2, lr=0.05, clip=clip, backprop=backprop)
            return torch.autograd.grad(sum(outer_losses(model, mse_loss, x, y)), list(net.parameters())), model(x)

        torch.testing.assert_close(gradient(1e22, 0.5), gradient(1e4, 0.5))
        torch.testing.assert_close(gradient(1e-30, 1e-32)[1][1], gradient(1.0, 1e-32)[1][1])

    @pytest.mark.parametrize("clip", [0.0, -1.0, math.inf, math.nan])
    def test_a_clip_that_clips_all_or_nothing_is_refused(self, clip):
        with pytest.raises(ValueError, match="clip must be positive and finite"):
            Tailored(small(), to_one, clip=clip)

    def test_a_large_clip_clips_nothing(self):
        net, (x, _) = small().float(), data()
        x = x.float()
        torch.testing.assert_close(Tailored(net, to_one, lr=0.1, steps=3, clip=1e20)(x), Tailored(net, to_one, lr=0.1, steps=3)(x))

    def test_noise_that_cannot_be_repeated_is_noticed_beside_a_large_constant(self):
        net, (x, y) = small(), data()
        model = Tailored(
            net, lambda m, x: 100 + m(x + 0.5 * torch.randn_like(x)).square().sum(1), lr=0.3, steps=2, backprop="all", recompute=True
        )
        with pytest.raises(RuntimeError, match="came out otherwise"):
            mse_loss(model(x), y).backward()

    def test_a_plain_tensor_of_rates_must_not_change_between_two_steps(self):
        net, (x, y) = small(), data()
        lr = torch.tensor(0.05).double().requires_grad_()
        steps = iter(outer_losses(Tailored(net, to_one, steps=3, lr=lr), mse_loss, x, y))
        next(steps)
        with torch.no_grad():
            lr.sub_(0.01)
        with pytest.raises(RuntimeError, match="weights changed between two inner steps"):
            next(steps)


class TestSettings:
    def test_of_patterns_the_first_counts_and_one_that_never_does_is_refused(self):
        x, _ = data()
        for lr in ({"*": 1e-3, "*.gamma": 1e-1}, {"*.gama": 0.1, "*": 1e-3}):
            with pytest.raises(ValueError, match=r"the step size of nothing .* the state has: 1.gamma, 1.beta"):
                Tailored(small(), to_one, lr=lr)(x)
        model = Tailored(small(), to_one, lr={"*.gamma": 1e-1, "*": 1e-3}).prepare(x)
        assert (model.rule.rate("1.gamma", 0), model.rule.rate("1.beta", 0)) == (1e-1, 1e-3)

    @pytest.mark.parametrize("name", ["lr", "momentum", "clip", "proximal"])
    def test_settings_of_the_descent_are_not_attributes(self, name):
        with pytest.raises(AttributeError, match=rf"model.replace\({name}=...\)"):
            setattr(Tailored(small(), to_one), name, 0.5)

    @pytest.mark.parametrize("settings", [{"momentum": 0.5}, {"clip": 1.0}, {"proximal": 0.1}], ids=str)
    def test_another_optimiser_takes_no_settings_of_the_descent(self, settings):
        with pytest.raises(ValueError, match="are gradient descent's"):
            Tailored(small(), to_one, optimizer=LBFGS(), **settings)

    def test_a_gain_is_one_for_negative_losses_too(self):
        x, y = data()
        tuned = tune(Tailored(small(), to_one), [(x, torch.ones_like(y))], lambda p, y: mse_loss(p, y) - 10, lrs=(0.05,), steps=2)
        assert tuned.task[0, 2] < tuned.task[0, 0] < 0
        assert tuned.gain == pytest.approx(float((tuned.task[0, 0] - tuned.task.min()) / -tuned.task[0, 0]))
        assert tuned.gain > 0


class TestLosses:
    def test_targets_of_another_shape_do_not_mix_tasks(self):
        few = Tailored(small(2, 1), losses.Supervised(mse_loss), steps=3, lr=0.1)
        x, y = torch.randn(3, 5, 2).double(), torch.randn(3, 5).double()
        with pytest.warns(UserWarning, match="target size"), pytest.raises(ValueError, match=r"shape \(15,\) has shape \(15, 15\)"):
            few.tailor(Support(x, y))
        assert few.tailor(Support(x, y[..., None])).keys() == {"1.gamma", "1.beta"}

    def test_the_classes_of_an_image_are_where_they_are_said_to_be(self):
        net, x = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 3, padding=1)), torch.randn(2, 1, 6, 6)
        p = net(x).softmax(1)
        same = losses.MarginalEntropy(lambda rows, _: rows, 2, classes=1)
        for loss in (losses.Entropy(classes=1), same):
            torch.testing.assert_close(Tailored(net, loss).trace(x).losses[0], -(p * p.log()).sum((1, 2, 3)))
        with pytest.raises(ValueError, match=r"which dimension of logits of shape \(2, 3, 6, 6\) holds the classes"):
            Tailored(net, losses.Entropy())(x)
        with pytest.raises(ValueError, match="holds the queries"):
            Tailored(net, losses.Entropy(classes=-4))(x)

    @pytest.mark.parametrize("loss", [losses.Smooth, lambda _, at: losses.Agree(lambda rows, _: rows, at=at)])
    @pytest.mark.parametrize("length", [8, 9])
    def test_features_without_the_queries_in_front_are_refused(self, loss, length):
        class TimeFirst(nn.Module):
            def __init__(self):
                super().__init__()
                self.encoder, self.out = nn.GRU(3, 6), nn.Linear(6, 2)

            def forward(self, x):
                return self.out(self.encoder(x.transpose(0, 1))[0][-1])

        model = Tailored(TimeFirst(), loss(0.1, at="encoder"), adapt=CN("encoder"))
        with pytest.raises(ValueError, match=r"were read of .* rows, one for each view"):
            model(torch.randn(3, length, 3))


class TestTheory:
    @pytest.mark.parametrize("how", ["jacrev", "autograd", "jvp", "worst case"])
    def test_a_loss_that_differentiates_the_model_is_not_judged(self, how):
        net, x = small(3, 1), data()[0]

        def by_jacrev(model, x):
            return (jacrev(lambda z: model(z).sum(0))(x)[0] - 1).square().sum(1)

        def by_jvp(model, x):
            return torch.func.jvp(model, (x,), (torch.ones_like(x),))[1].square().sum(1)

        def by_autograd(model, x):
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                slopes = torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]
            return (slopes - 1).square().sum(1)

        loss = {"jacrev": by_jacrev, "jvp": by_jvp, "autograd": by_autograd, "worst case": losses.WorstCase(0.1)}[how]
        with pytest.raises(ValueError, match="differentiates the model"):
            theory.enough(small(3, 2) if how == "worst case" else net, loss, x)

    def test_a_sum_of_losses_reads_what_one_does(self):
        net, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double(), torch.randn(3, 4).double()
        one = losses.Conserve(lambda s: s[:, :2].square().sum(1))
        once, twice = theory.enough(net, one, x), theory.enough(net, one + one, x)
        assert once.everywhere.all()
        assert twice.everywhere.all()
        assert torch.equal(once.numbers, twice.numbers)
        torch.testing.assert_close(once.share, twice.share)

    def test_a_relu_at_the_end_is_not_affine_where_it_lets_all_pass(self):
        net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1), nn.ReLU()).double()
        nn.init.constant_(net[2].bias, 5.0)
        views = torch.randn(3, 4).double()
        with pytest.raises(ValueError, match="something follows it"):
            theory.last_layer(net, views)
        assert not theory.enough(net, lambda m, x: (m(x) + 2).square().sum(1), views).everywhere.any()
        net[3] = nn.ReLU(inplace=True)
        with pytest.raises(ValueError, match="something follows it"):
            theory.last_layer(net, views)
        net[3] = nn.Identity()
        assert theory.last_layer(net, views).site == "1"

    def test_the_last_site_is_behind_an_activation_that_works_in_place(self):
        views, targets = torch.randn(3, 4).double(), torch.tensor([1.0, -2.0, 3.0]).double()
        first, second = nn.ReLU(inplace=True), nn.ReLU(inplace=True)
        net = nn.Sequential(nn.Linear(4, 32), first, nn.Linear(32, 32), second, nn.Linear(32, 1)).double()
        layer = theory.last_layer(net, views)
        assert layer.site == "3"
        assert layer.reaches_all
        answers = Tailored(net, to_one, adapt=layer.adapt).predict(views, layer.state(targets))
        torch.testing.assert_close(answers[:, 0], targets)

    @pytest.mark.parametrize(
        "layers",
        [
            (nn.Linear(2, 8), nn.Linear(8, 1)),
            (nn.Linear(2, 8), nn.Sigmoid(), nn.Linear(8, 8), nn.Linear(8, 1)),
            (nn.Sigmoid(), nn.Linear(2, 8), nn.Linear(8, 1)),
            (nn.Linear(2, 8), nn.Sigmoid(), nn.Dropout(0.5), nn.Linear(8, 1)),
            (nn.Linear(2, 16), nn.GLU(), nn.Linear(8, 1)),
            (nn.Linear(2, 8), nn.Softmax(1), nn.Linear(8, 1)),
        ],
        ids=lambda layers: "-".join(type(layer).__name__ for layer in layers),
    )
    def test_the_theorem_asks_for_an_activation_between_any_two_layers(self, layers):
        angles = torch.linspace(0, 5, 5).double()
        views = torch.stack([angles.cos(), angles.sin()], 1)
        assert "one activation between any two" in str(theory.conditions(nn.Sequential(*layers).double(), views))
        assert theory.conditions(nn.Sequential(nn.Linear(2, 8), nn.Sigmoid(), nn.Dropout(0.5), nn.Linear(8, 1)).double().eval(), views)

    def test_a_list_of_labels_is_a_set(self):
        features, head, others = torch.randn(4, 3), torch.randn(2, 3), torch.randn(4, 2, 3)
        with pytest.raises(ValueError, match="a tensor has one for each query"):
            theory.contrastive_tailoring_loss(
                features, head, positives=others, negatives=others, negative_labels=torch.full((4, 2), 0.5), labels=[0, 1, 1, 0]
            )

    @pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64])
    @pytest.mark.parametrize("n", [4, 20])
    def test_losses_of_zero_and_one_have_a_complexity(self, dtype, n):
        found = torch.randint(2, (3, n))
        assert theory.empirical_rademacher(found.to(dtype)) == theory.empirical_rademacher(found.float())


ROOT = Path(__file__).parent.parent


def works(process: int) -> bool:
    """Whether it is there, and not only waiting to be missed."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


class TestRows:
    def test_weights_from_before_the_first_row_are_told_of(self, tmp_path, capsys):
        (tmp_path / "weights").mkdir()
        (tmp_path / "weights" / "old.safetensors").touch()
        config = toy.quick()
        assert [row for row in Rows(tmp_path, "toy", config) if row["kind"] == "found"] == [{"kind": "found", "weights": ["old"]}]
        assert "holds old from before the first row" in capsys.readouterr().err
        Rows(tmp_path, "toy", config)  # which goes on, and is silent
        assert not capsys.readouterr().err
        assert sum(row["kind"] == "found" for row in read_folder(tmp_path)) == 1

    def test_damage_is_told_by_name(self, tmp_path):
        path = tmp_path / "rows.jsonl"
        Rows(tmp_path, "toy", toy.quick()).add(kind="result")
        whole = path.read_bytes()
        path.write_bytes(whole + b'{"a": 1}\n')
        with pytest.raises(ValueError, match=r'does not say what it is, {"a": 1}'):
            read_folder(tmp_path, "toy")
        path.write_bytes(whole + b'{"kind": "\xff"}\n{"kind": "result"}\n')
        with pytest.raises(ValueError, match=r"rows.jsonl, line 4: not a JSON row"):
            read_folder(tmp_path, "toy")

    def test_a_copy_of_the_rows_counts_once(self, tmp_path):
        rows = Rows(tmp_path, "toy", toy.quick())
        rows.add(kind="result", value=1)
        rows.add(kind="result", value=2)
        once = read_folder(tmp_path, "toy")
        (tmp_path / "rows-backup.jsonl").write_bytes(rows.path.read_bytes())
        assert read_folder(tmp_path, "toy") == once

    def test_certificates_of_another_kind_of_device_are_not_gone_on_with(self, tmp_path):
        device = {"kind": "session", "device": "NVIDIA H200"}
        rows = [{"kind": "config"}, device, {"kind": "image", "index": 0}, {**device, "device": "x86_64 CPU, 1 threads"}]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = certify.Config(weights=tmp_path, out=tmp_path, accelerator="cpu")
        certify._refuse_other_device(config, [0])  # all is done
        certify._refuse_other_device(replace(config, engine="ray"), [0, 1])
        with pytest.raises(ValueError, match="made on cuda, whose noise is not that of cpu"):
            certify._refuse_other_device(config, [0, 1])


class TestCommands:
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
    def test_numbers_that_make_no_sense_are_refused_before_anything_runs(self, experiment, changes, tmp_path):
        name = next(iter(changes)).replace("_", "-")
        with pytest.raises(ValueError, match=f"--{name} "):
            experiment.run(replace(experiment.quick(), out=tmp_path / "out", **changes))
        assert not (tmp_path / "out").exists()

    @pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
    @pytest.mark.parametrize("experiment", ["planets", "smoothing", "contrastive"])
    def test_a_device_that_is_not_there_is_told_in_a_line(self, experiment, tmp_path, capsys):
        assert main(["run", experiment, "--quick", "--accelerator", "cuda", "--out", str(tmp_path / "out")]) == 1
        assert "error: --accelerator cuda: " in capsys.readouterr().err

    def test_a_report_that_cannot_be_written_is_shown(self, tmp_path, capsys):
        assert main(["run", "toy", "--quick", "--out", str(tmp_path)]) == 0
        tables = capsys.readouterr().out
        (tmp_path / "report.html").unlink()
        (tmp_path / "report.html").mkdir()
        assert main(["report", "toy", "--out", str(tmp_path)]) == 1
        shown = capsys.readouterr()
        assert shown.out.strip() == tables.split("\n\nrows and all")[0].strip()
        assert "error: the figures and the page were not written: " in shown.err

    def test_a_reader_that_has_seen_enough_is_no_error(self):
        command = f"{sys.executable} -m tailoring --help | true; exit ${{PIPESTATUS[0]}}"
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT)
        assert (done.returncode, done.stderr) == (0, "")

    def test_another_pipe_that_breaks_is_an_error(self, monkeypatch, capsys):
        def breaks(_args):
            raise BrokenPipeError("a worker is gone")

        monkeypatch.setattr("tailoring.__main__._main", breaks)
        assert main(["run", "toy"]) == 1
        assert "error: a worker is gone" in capsys.readouterr().err

    def test_a_benchmark_refuses_what_it_does_not_know_before_it_measures(self, tmp_path, capfd):
        assert main(["bench", "architectures", "--networks", "nope"]) == 1
        assert "--networks: no 'nope'" in capfd.readouterr().err
        (tmp_path / "file").touch()
        assert main(["bench", "overhead", "--out", str(tmp_path / "file" / "rows.jsonl")]) == 1
        shown = capfd.readouterr()
        assert "error: --out: " in shown.err
        assert "ms" not in shown.out

    def test_workers_end_with_the_process_that_started_them(self, tmp_path):
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
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment) as process:
            assert process.stdout is not None
            worker = int(process.stdout.readline())
            process.send_signal(signal.SIGKILL)
            process.wait()
            until = time.monotonic() + 20
            while works(worker) and time.monotonic() < until:
                time.sleep(0.05)
            assert not works(worker)
