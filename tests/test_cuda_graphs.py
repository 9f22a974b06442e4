"""Recordings of compiled programs (CUDA graphs, and what stands for them on a CPU): what they read, copy and refuse."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from nets import drift, mlp, queries
from torch import nn

from tailoring import CN, Tailored, _compiled
from tailoring._cuda_graphs import Recorded

pytestmark = [pytest.mark.no_cover, pytest.mark.usefixtures("compiled_afresh")]  # dynamo takes longer while it is watched


class Repeated:
    """In place of CUDA graphs: to replay is to run once more, into the same outputs."""

    def __init__(self):
        self.recorded = 0

    def record(self, run):
        self.recorded += 1
        outputs = [t.clone() if isinstance(t, torch.Tensor) else t for t in run()]

        def again():
            for out, now in zip(outputs, run(), strict=True):
                if isinstance(out, torch.Tensor):
                    out.copy_(now)

        return again, outputs


def test_a_recording_reads_what_the_model_owns_in_place_and_copies_the_rest():
    weight, record, x = torch.ones(3), Repeated(), torch.arange(3.0)
    program = Recorded(lambda w, x: (w * x, x.sum()), lambda: [weight], record)
    assert program(weight, x)[0].tolist() == [0, 1, 2]
    assert program(weight, x + 1)[1] == 6
    weight.mul_(2)
    assert program(weight, x)[0].tolist() == [0, 2, 4]
    assert record.recorded == 1
    weight.data = torch.full((3,), 5.0)  # elsewhere now
    assert program(weight, x)[0].tolist() == [0, 5, 10]
    assert record.recorded == 2
    assert x.tolist() == [0, 1, 2]


def test_a_recording_keeps_the_layout_of_its_inputs():
    x = torch.rand(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    seen: list[tuple[int, ...]] = []
    program = Recorded(lambda x: (seen.append(x.stride()) or x * 2,), lambda: [], Repeated())
    torch.testing.assert_close(program(x)[0], x * 2)
    assert set(seen) == {x.stride()}


def test_what_cannot_be_recorded_still_runs():
    class Refusing(Repeated):
        def record(self, run):
            raise RuntimeError("operation not permitted when stream is capturing")

    program, x = Recorded(lambda x: (x + 1,), lambda: [], Refusing()), torch.zeros(2)
    with pytest.warns(UserWarning, match="without a CUDA graph: operation not permitted"):
        assert program(x)[0].tolist() == [1, 1]
    assert program(x)[0].tolist() == [1, 1]  # and says so once


@pytest.mark.parametrize("owned", [False, True])
def test_a_program_that_changes_its_inputs_changes_them_once_a_call(owned):
    count, x = torch.zeros(()), torch.ones(2)
    program = Recorded(lambda n, x: (x * n.add_(1),), lambda: [count] if owned else [], Repeated())
    with pytest.warns(UserWarning, match="it changes its inputs"):
        assert program(count, x)[0].tolist() == [1, 1]
    assert program(count, x)[0].tolist() == [2, 2]
    assert count == 2


def test_a_recording_serves_what_it_was_made_for():
    recorder = Repeated()
    program = Recorded(lambda x, k: (x * k, None), lambda: [], recorder)
    one = program(torch.ones(2), 1)[0]
    assert program(torch.ones(2), 2)[0].tolist() == [2, 2]  # another number
    assert program(torch.ones(3), 2)[0].tolist() == [2, 2, 2]  # another size
    for number in (1.0, 4.0):
        assert program(torch.full((1, 2), number).expand(3, 2), 2)[0].tolist() == 3 * [[2 * number] * 2]  # the same number in several rows
    assert one.tolist() == [1, 1]
    assert recorder.recorded == 4


def test_weights_that_go_on_moving_are_not_recorded_for_ever():
    weight, recorder = torch.ones(1), Repeated()
    program = Recorded(lambda w: (w * 2,), lambda: [weight], recorder)
    kept = [torch.full((1,), float(k)) for k in range(12)]

    def doubled(k):
        weight.data = kept[k]
        return program(weight)[0].item()

    assert [doubled(k) for k in range(8)] == [2 * k for k in range(8)]
    with pytest.warns(UserWarning, match="move elsewhere again and again"):
        assert doubled(8) == 16
    assert [doubled(k) for k in range(9, 12)] == [18, 20, 22]
    assert recorder.recorded == 8


def test_a_recorded_model_answers_as_before():
    """As on CUDA, but for the graphs."""
    model, record = Tailored(mlp(), drift, adapt=CN(nn.Tanh), steps=2, lr=1e-2), Repeated()

    def backend(program, inputs):
        return Recorded(program.forward, model._owned, record)

    recorded = model.replace(compile={"backend": backend})
    with torch.no_grad():
        for n in (6, 6, 4, 6):
            torch.testing.assert_close(recorded(queries(n)), model(queries(n)))
        assert record.recorded == 1
        model.net[0].weight.mul_(1.5)
        torch.testing.assert_close(recorded(queries(6)), model(queries(6)))
        assert record.recorded == 1
        model.net[0].weight = nn.Parameter(torch.randn_like(model.net[0].weight))
        torch.testing.assert_close(recorded(queries(6)), model(queries(6)))


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("G['__import_torch_dot_nn'].x", False),
        ("G['__import_torch'].x", False),
        ("L['self'].x", True),
        ("G['__import_torch_losses'].SCALE", True),
        ("G['__import_tailoring_demo'].loss", True),
        ("G['__import_tailoring_dot__sites'].x", False),
    ],
)
def test_only_the_libraries_themselves_are_not_looked_at(name, kept):
    assert _compiled._not_of_libraries([SimpleNamespace(name=name)]) == [kept]


@pytest.mark.parametrize(
    ("given", "recorded"),
    [
        ({}, True),
        ({"mode": "max-autotune"}, True),
        ({"options": {"triton.cudagraphs": False}}, False),
        ({"mode": "default"}, False),
        ({"mode": "default", "options": {"triton.cudagraphs": True}}, True),
    ],
)
def test_graphs_are_recorded_unless_they_are_switched_off(monkeypatch, given, recorded):
    monkeypatch.setattr(_compiled, "CudaGraphs", Repeated)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    found = _compiled._options(torch.device("cuda"), given, lambda: [])
    assert ("backend" in found) == recorded
    assert "triton.cudagraphs" not in found["options"]  # PyTorch's own
