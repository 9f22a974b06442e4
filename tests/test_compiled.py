"""`Tailored(..., compile=True)`: the same answers from programs for a few batch sizes."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from functorch.compile import make_boxed_func
from nets import Timed, drift, mlp, queries
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.runtime.benchmarking import InductorBenchmarker, benchmarker
from torch.fx.experimental.proxy_tensor import make_fx

from tailoring import CN, Inputs, Tailored, Weights, _compiled, _merge, _reuse, _trials, baselines, losses
from tailoring._flipped import flip_gradients
from tailoring._layouts import turn_weights
from tailoring._merge import merge_repeats
from tailoring._recorded import Recorded
from tailoring._trials import as_in_a_chain

AOT = {"backend": "aot_eager"}
pytestmark = pytest.mark.no_cover  # dynamo takes longer while it is watched


@pytest.fixture(autouse=True)
def _afresh():
    torch.compiler.reset()


def counted(**options):
    """A model and the sizes of the batches that a program was made for."""
    made: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs):
        made.append(max(t.shape[0] for t in inputs if isinstance(t, torch.Tensor) and not isinstance(t, nn.Parameter)))
        return graph.forward

    return Tailored(mlp(), drift, compile={"backend": backend}, **({"adapt": CN(nn.Tanh), "steps": 2, "lr": 1e-2} | options)), made


@pytest.mark.parametrize("adapt", [CN(nn.Tanh), Weights()], ids=repr)
def test_answers_are_those_of_eager_mode(adapt):
    model = Tailored(mlp(), drift, adapt=adapt, steps=2, lr=1e-2, compile=AOT)
    with torch.no_grad():
        for n in (6, 4):
            torch.testing.assert_close(model(queries(n)), model.replace(compile=False)(queries(n)))


def test_a_few_programs_serve_all_batch_sizes():
    model, made = counted(steps=1)
    with torch.no_grad():
        for n in (12, 5, 3, 12, 2, 1, 13, 20, 30, 200):
            torch.testing.assert_close(model(queries(n)), model.replace(compile=False)(queries(n)))
    assert model._compiled is not None
    assert list(model._compiled.sizes.values()) == [[12, 2, 16, 32, 200]]
    assert len(made) == 5


def test_a_batch_whose_queries_see_each_other_is_not_filled_up():
    model = Tailored(mlp(), drift, adapt=baselines.Shared(CN(nn.Tanh)), steps=1, lr=1e-1, compile=AOT)
    with torch.no_grad():
        for n in (6, 5):
            torch.testing.assert_close(model(queries(n)), model.replace(compile=False)(queries(n)))


def test_old_sizes_may_be_compiled_anew_and_other_models_do_not_count(monkeypatch):
    monkeypatch.setattr(_compiled, "_PROGRAMS", 4)  # both limits are low here: to reach the real ones takes a minute
    model, made = counted(steps=1)
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=2):
        for n in (1, 2, 4):
            torch.testing.assert_close(model(queries(n)), model.replace(compile=False)(queries(n)))
        model.net.requires_grad_(False)  # what dynamo has to look at again
        model(queries(4))
        other, made_for_other = counted(steps=1)
        other(queries(4))
    assert len(made) == 4
    assert len(made_for_other) == 1


@pytest.mark.filterwarnings("ignore:Dynamo detected a call")
def test_more_programs_than_are_kept_are_answered_in_eager_mode(monkeypatch):
    monkeypatch.setattr("tailoring._compiled._PROGRAMS", 3)
    net, x = Timed(), torch.randn(4, 3)
    loss = lambda m, x, time: m(x, time).square().sum(1)  # noqa: E731
    model, eager = Tailored(net, loss, compile={"backend": "eager"}), Tailored(net, loss)
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=2), pytest.warns(UserWarning, match="Give that as a tensor"):
        answers = [model(x, 1 + i / 100) for i in range(5)]
    torch.testing.assert_close(answers, [eager(x, 1 + i / 100) for i in range(5)])


def test_chunks_share_one_program():
    model, made = counted(chunk=8)
    with torch.no_grad():
        torch.testing.assert_close(model(queries(21)), model.replace(compile=False)(queries(21)))
    assert len(made) == 1


def test_with_gradients_it_answers_in_eager_mode():
    model, made = counted()
    model(queries(4)).sum().backward()
    assert not made
    assert all(p.grad is not None for p in model.parameters())


def test_weights_may_train_between_two_calls():
    model, made = counted()
    x = queries(4)
    with torch.no_grad():
        before = model(x)
        next(model.net.parameters()).mul_(2.0)
        torch.testing.assert_close(model(x), model.replace(compile=False)(x))
        assert not torch.allclose(model(x), before)
    assert len(made) == 1


class Odd(nn.Module):
    """Answers with the queries in the second dimension, several rows for each, and numbers that no query owns."""

    def __init__(self):
        super().__init__()
        self.act = nn.Tanh()

    def forward(self, x, slope):
        h = self.act(x)
        return {"across": h.T, "rows": h.repeat_interleave(3, 0), "scale": torch.tensor(2.0), "sign": h > 0, "own": h}


@pytest.mark.parametrize(("steps", "slope"), [(1, torch.nan), (3, 1e160), (1, 1.7e308)], ids=["at once", "on the way", "in the answer"])
def test_a_query_that_fails_is_answered_untailored_without_a_second_look(monkeypatch, steps, slope):
    x, bad = queries(5), 2
    slopes = torch.where(torch.arange(5) == bad, torch.tensor(slope).double(), 1.0)

    def loss(m, x, slope):
        return m(x, slope)["own"].sum(1) * slope

    model = Tailored(Odd().double(), loss, adapt=CN("act"), steps=steps, lr=1.0, compile=AOT)
    x = Inputs(x, slopes)
    expected = model.replace(compile=False).trace(x)
    assert expected.failed.tolist() == [row == bad for row in range(5)]
    with torch.no_grad():
        model(*x.args)
        monkeypatch.setattr(Tailored, "_fit", None)  # eager mode would need it
        found, untailored = model(*x.args), model.net(*x.args)
        torch.testing.assert_close(found, expected.prediction)
        torch.testing.assert_close(found["own"][bad], untailored["own"][bad])
        assert not torch.allclose(found["own"], untailored["own"])


def test_a_query_that_cannot_be_answered_is_answered_untailored():
    class Far(nn.Module):
        def __init__(self):
            super().__init__()
            self.act = nn.Tanh()

        def forward(self, x):
            return (self.act(x) * 50).exp().exp()  # a state may be finite, and the answer not

    model = Tailored(Far().double(), lambda m, x: -m(x).log().log().sum(1), steps=1, lr=1.0, compile=AOT)
    x = torch.tensor([[0.01], [0.12]]).double()
    with torch.no_grad():
        torch.testing.assert_close(model(x), model.replace(compile=False)(x))
        assert model(x).isfinite().all()


def test_input_trees_and_other_shapes_have_their_own_programs():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.act = nn.Tanh()

        def forward(self, a, *, b):
            return {"sum": self.act(a) + b, "rows": [b * 2]}

    model = Tailored(Two(), lambda m, a, b: m(a, b=b)["sum"].square().sum(1), adapt=CN("act"), lr=0.1, compile=AOT)
    eager = model.replace(compile=False)
    with torch.no_grad():
        for n, width in ((4, 3), (3, 3), (3, 5)):
            a, b = torch.randn(n, width), torch.randn(n, width)
            torch.testing.assert_close(model(a, b=b), eager(a, b=b))
            assert model(a, b=b)["rows"][0].shape == (n, width)
    assert torch.equal(model.predict(Inputs(a, b=b), eager.tailor(Inputs(a, b=b)))["sum"], eager(a, b=b)["sum"])


def test_a_compiled_model_can_be_copied_and_saved():
    model, _ = counted()
    with torch.no_grad():
        model(queries(3))
    model.compile_options = AOT
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(Tailored(mlp(), drift, compile=True)))):
        assert other._compiled is None


def test_bad_input_is_refused_as_in_eager_mode():
    model, made = counted()
    model.net.append(nn.Dropout())  # type: ignore[operator]
    model.net.train()
    with torch.no_grad(), pytest.raises(ValueError, match="drops units in training mode"):
        model(queries(3))
    assert not made
    model.net.eval()
    with torch.no_grad():
        model(queries(3))
        model.net.train()
        with pytest.raises(ValueError, match="drops units in training mode"):  # of the batches after the first, too
            model(queries(3))
    assert len(made) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_graphs_do_not_overwrite_earlier_answers():
    model = Tailored(mlp().cuda(), drift, steps=2, lr=1e-2, compile=True)
    with torch.no_grad():
        answers = [model(queries(n).cuda()) for n in (8, 8, 5)]
        for n, answer in zip((8, 8, 5), answers, strict=True):
            torch.testing.assert_close(answer, model.replace(compile=False)(queries(n).cuda()))


@pytest.mark.parametrize("fresh", [False, True])
def test_a_loss_that_draws_noise_compiles(fresh):
    model = Tailored(mlp(), losses.Smooth(0.5, fresh=fresh), steps=2, lr=1.0, compile=True)
    with torch.no_grad():
        torch.testing.assert_close(model(queries(3)), model.replace(compile=False)(queries(3)))
        assert not torch.allclose(model(queries(3)), model.net(queries(3)), atol=1e-4)


def test_the_untailored_answers_cost_nothing_where_the_loss_asks_for_them():
    """Two steps on three layers and two answers: four passes, of which two are the same; the first layer runs once in any case."""
    seen: list[int] = []

    def products(graph: fx.Graph) -> int:
        return sum(node.target is torch.ops.aten.addmm.default for node in graph.nodes)

    def merged(program: fx.GraphModule, _):
        seen.append(products(program.graph))
        merge_repeats(program.graph)
        seen.append(products(program.graph))
        program.recompile()
        return make_boxed_func(program.forward)

    model = Tailored(mlp(), drift, adapt=CN(nn.Tanh), steps=2, lr=1e-2, compile={"backend": aot_autograd(fw_compiler=merged)})
    with torch.no_grad():
        torch.testing.assert_close(model(queries(3)), model.replace(compile=False)(queries(3)))
    assert seen == [1 + 4 * 2, 1 + 3 * 2]


def test_a_query_goes_in_by_itself_where_that_pass_is_the_untailored_answer():
    """Else, next to its noisy view, it would be answered untailored in a pass of its own: four queries' worth in place of three."""
    rows: list[int] = []

    def watched(program: fx.GraphModule, _):
        merge_repeats(program.graph)
        program.recompile()
        rows.extend(node.meta["val"].shape[0] for node in program.graph.nodes if node.target is torch.ops.aten.addmm.default)
        return make_boxed_func(program.forward)

    net, loss = mlp(), losses.Smooth(0.1)
    model = Tailored(net, loss, adapt=CN("0"), steps=1, lr=1e-2, compile={"backend": aot_autograd(fw_compiler=watched)})
    with torch.no_grad():
        torch.testing.assert_close(model(queries(5)), model.replace(compile=False)(queries(5)))
    layers = sum(isinstance(module, nn.Linear) for module in net.modules())
    assert sum(rows) == 5 * (3 * layers - 1)  # below its first scale, the tailored answer is as the untailored one


def test_repeats_are_merged_and_nothing_else():
    def function(x, y):
        return x.sin() * x.sin() + x.cos() * y.sin() + torch.ops.aten.add(x.sin(), y)

    x, y = torch.randn(2, 5)
    made = make_fx(function)(x, y)
    merge_repeats(made.graph)
    made.recompile()
    assert sum(node.target is torch.ops.aten.sin.default for node in made.graph.nodes) == 2
    torch.testing.assert_close(made(x, y), function(x, y))


@pytest.mark.parametrize(("steps", "width", "turned"), [(4, 8, 1), (2, 8, 0), (4, 6, 0)])
def test_weights_that_are_multiplied_by_often_are_turned_once(steps, width, turned):
    def function(x, w):
        for _ in range(steps):
            x = x @ w.T.T
        return x @ w.T

    x, w = torch.randn(5, width).double(), torch.randn(width, width).double()  # in float32 a draw may cancel, and rounding be seen
    made = make_fx(function)(x, w)
    turn_weights(made.graph, wanted=lambda weight: weight.shape == w.shape)
    made.recompile()
    seconds = [node.args[1] for node in made.graph.nodes if node.target is torch.ops.aten.mm.default]
    assert len({node for node in seconds if node.args[0].target is torch.ops.aten.clone.default}) == turned
    torch.testing.assert_close(made(x, w), function(x, w))
    layouts = [node.meta["val"].stride() for node in seconds[:-1]]
    assert set(layouts) == {(1, width) if turned else (width, 1)}


@pytest.mark.parametrize(
    ("kernel", "settings", "flipped"),
    [
        ((5, 4, 3, 3), {"padding": 1}, True),
        ((5, 4, 3, 1), {}, True),
        ((5, 4, 4, 3), {"padding": (0, 2)}, True),
        ((5, 4, 3, 3), {"padding": 1, "stride": 2}, False),
        ((5, 4, 3, 3), {"padding": 1, "dilation": 2}, False),
        ((4, 2, 3, 3), {"padding": 1, "groups": 2}, False),
        ((5, 4, 1, 1), {"padding": 1}, False),
    ],
)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_gradients_in_inputs_are_convolutions_where_kernels_are_searched_for(kernel, settings, flipped, layout):
    def function(x, w):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(nn.functional.conv2d(x, w, **settings).sin().sum(), x)[0]

    x, w = torch.randn(2, 4, 7, 6).contiguous(memory_format=layout), torch.randn(kernel).contiguous(memory_format=layout)
    made = make_fx(function, tracing_mode="fake")(x, w)
    flip_gradients(made.graph)
    made.recompile()
    left = [node for node in made.graph.nodes if node.target is torch.ops.aten.convolution_backward.default]
    assert len(left) == (not flipped)
    torch.testing.assert_close(made(x, w), function(x, w))


def test_a_convolution_that_is_asked_for_its_weights_gradient_too_is_left_alone():
    def function(x, w):
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        return torch.autograd.grad(nn.functional.conv2d(x, w, padding=1).sin().sum(), (x, w))

    x, w = torch.randn(2, 4, 7, 6), torch.randn(5, 4, 3, 3)
    made = make_fx(function, tracing_mode="fake")(x, w)
    flip_gradients(made.graph)
    made.recompile()
    torch.testing.assert_close(made(x, w), function(x, w))


def test_a_tailored_network_whose_kernels_are_searched_for(monkeypatch):
    left = []

    def gradients(graph: fx.Graph) -> int:
        return sum(node.target is torch.ops.aten.convolution_backward.default for node in graph.nodes)

    def watched(graph: fx.Graph) -> None:
        left.append(gradients(graph))
        flip_gradients(graph)
        left.append(gradients(graph))

    monkeypatch.setattr(_merge, "flip_gradients", watched)
    options = {"max_autotune_gemm": True, "fx_graph_cache": False}  # a program from the cache would skip the passes
    net = nn.Sequential(*(nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.Tanh()) for _ in range(3)), nn.Flatten())
    model = Tailored(net, drift, adapt=CN("0", "1"), steps=2, lr=1e-2, compile={"options": options})
    x = torch.randn(4, 3, 5, 5)
    with torch.no_grad():
        torch.testing.assert_close(model(x), model.replace(compile=False)(x))
    assert left == [4, 0]


@pytest.mark.parametrize(("given", "searches"), [({}, 0), ({"mode": "max-autotune"}, 1), ({"options": {"max_autotune_gemm": True}}, 1)])
def test_only_a_search_for_kernels_flips_gradients(monkeypatch, given, searches):
    seen = []
    monkeypatch.setattr(_merge, "flip_gradients", lambda graph: seen.append(graph))
    _compiled._options(torch.device("cpu"), given, lambda: [])["options"]["post_grad_custom_pre_pass"](fx.Graph())
    assert len(seen) == searches


@pytest.mark.parametrize(
    ("device", "given", "searched"),
    [
        ("cuda", {}, (True, "ATEN")),  # the default: products, not convolutions
        ("cuda", {"options": {"max_autotune_gemm": True}}, (True, None)),
        ("cuda", {"options": {"max_autotune_gemm": False}}, (False, None)),
        ("cuda", {"mode": "reduce-overhead"}, (False, None)),
        ("cpu", {}, (False, None)),
    ],
)
def test_what_is_searched_for(device, given, searched):
    options, _, searches, graphs = _compiled._for_inductor(torch.device(device), given)
    assert (searches, options.get("max_autotune_conv_backends")) == searched
    assert graphs


def test_trials_of_kernels_are_queued_and_find_the_cache_full(monkeypatch):
    made, before = [], dict(vars(benchmarker))
    monkeypatch.setattr(InductorBenchmarker, "get_event_pairs", lambda self, iters, device_type=None: made.append(iters) or [])
    with as_in_a_chain(pause := made.append):
        assert benchmarker.get_event_pairs(5, device_type="cuda") == []
        assert benchmarker.get_device_cache_size("cuda") == _trials._CACHE
    assert made == [5 * _trials._AHEAD, 5]
    assert vars(benchmarker) == before
    with pytest.raises(KeyError), as_in_a_chain(pause):
        {}["an error"]
    assert vars(benchmarker) == before
    monkeypatch.delattr(InductorBenchmarker, "get_event_pairs")
    with as_in_a_chain(pause):  # another benchmarker is left as it is
        assert vars(benchmarker) == before


def test_random_numbers_are_drawn_anew_each_time():
    made = make_fx(lambda x: torch.rand_like(x) - torch.rand_like(x))(torch.zeros(5))
    merge_repeats(made.graph)
    made.recompile()
    assert made(torch.zeros(5)).abs().sum() > 0


@pytest.mark.parametrize("bad", [1e200, 1e-3], ids=["fails", "goes well"])
def test_exact_weights_are_not_looked_at_either(monkeypatch, bad):
    x = queries(4)
    x[1] *= bad
    model = Tailored(mlp(act=nn.ReLU), drift, adapt=Weights(), steps=2, lr=1e-3, compile=AOT)
    expected = model.replace(compile=False).trace(x)
    assert expected.failed.tolist() == [False, bad > 1, False, False]
    with torch.no_grad():
        model(x)
        monkeypatch.setattr(Tailored, "_fit", None)
        torch.testing.assert_close(model(x), expected.prediction)


class Answering(nn.Module):
    """One layer whose outputs are made an answer by `make(h)`."""

    def __init__(self, make):
        super().__init__()
        torch.manual_seed(0)
        self.lin, self.act, self.make = nn.Linear(4, 2), nn.Tanh(), make

    def forward(self, x):
        return self.make(self.act(self.lin(x)))


@dataclass
class Own:
    own: torch.Tensor


ANSWERS = {
    "not finite by intention": lambda h: torch.cat([h, torch.full_like(h[:, :1], -torch.inf)], 1),
    "of no query too": lambda h: (h, h.square().mean()),
    "of all queries with all": lambda h: (h, h @ h.T),
    "several, not in order": lambda h: torch.cat([h, 2 * h]),
    "that cannot be looked into": Own,
}


@pytest.mark.filterwarnings("ignore:no tensor is found in the model's answer")
@pytest.mark.parametrize("answers", ANSWERS)
def test_answers_of_all_kinds_are_those_of_eager_mode(answers):
    """Also in batches of another size, which are filled up only where that can be undone, and in which one query fails."""

    def loss(m, x):
        return (m.output_of("act", x) - 0.5).square().sum(1) / (x[:, 0] < 50)

    model = Tailored(Answering(ANSWERS[answers]).double(), loss, adapt=CN("act"), steps=2, lr=0.1, compile=AOT)
    for n, fails in product((5, 3), (True, False)):  # one model: to compile it is what takes time
        x = queries(n)
        x[0, 0] = 100.0 if fails else 1.0
        with torch.no_grad():
            found, expected, plain = (_own(net(x)) for net in (model, model.replace(compile=False), model.net))
        torch.testing.assert_close(found, expected)
        assert not torch.allclose(found[0][1], plain[0][1])
        assert torch.allclose(found[0][0], plain[0][0]) == fails


def _own(answer) -> tuple[torch.Tensor, ...]:
    return (answer.own,) if isinstance(answer, Own) else answer if isinstance(answer, tuple) else (answer,)


def test_an_answer_that_depends_on_the_mode_is_looked_at_in_each():
    class Moody(nn.Module):
        def __init__(self):
            super().__init__()
            self.act = nn.Tanh()

        def forward(self, x):
            h = self.act(x)
            return (h.T, h) if self.training else h

    model = Tailored(Moody(), lambda m, x: m.act(x).square().sum(1), adapt=CN("act"), lr=0.1, compile=AOT)
    x = queries(4)
    with torch.no_grad():
        for mode in (True, False, True):
            model.net.train(mode)
            torch.testing.assert_close(model(x), model.replace(compile=False)(x))


@pytest.mark.parametrize("change", ["of PyTorch's layer", "once nothing", "in a tuple"])
def test_numbers_that_a_loss_changes_between_steps_are_seen(change, monkeypatch):
    monkeypatch.setattr(_reuse, "WORTH_KEEPING", 0)

    class Below(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.leaky, self.factor, self.pair = nn.Linear(4, 4), nn.LeakyReLU(0.1), None, (1.0, 2.0)

        def forward(self, x):
            return self.leaky(self.lin(x)) * (self.factor or 1.0) * self.pair[0]

    torch.manual_seed(0)
    net = nn.Sequential(Below(), nn.Linear(4, 4), nn.Tanh())

    def loss(m, x):
        number = 1.0 + m._step
        if change == "in a tuple":
            net[0].pair = (number, 2.0)
        elif change == "once nothing":
            net[0].factor = number if m._step else None
        else:
            net[0].leaky.negative_slope = number
        return (m(x) - 0.5).square().sum(1)

    model, x = Tailored(net, loss, adapt=CN("2"), steps=3, lr=0.5, compile=AOT), queries(3).float()
    with torch.no_grad():
        found = model(x)
        monkeypatch.setattr(_reuse, "WORTH_IT", 2.0)
        torch.testing.assert_close(found, model.replace(compile=False)(x))


def test_step_sizes_by_name_compile():
    for lr in ({"*": 0.1}, {"1*": 0.2, "*": 0.1}, {"1.gamma": 0.3, "*": 0.1}):
        model = Tailored(mlp(), drift, adapt=CN(nn.Tanh), steps=2, lr=lr, compile=AOT)
        with torch.no_grad():
            torch.testing.assert_close(model(queries(3)), model.replace(compile=False)(queries(3)))


def test_options_that_compile_sets_itself_are_refused():
    for others in ({}, AOT):
        with torch.no_grad(), pytest.raises(ValueError, match="compile sets 'dynamic' itself"):
            Tailored(mlp(), drift, compile={"dynamic": True, **others})(queries(3))


def test_equal_outputs_stay_two_tensors_and_foreign_operators_are_left_alone():
    def function(x):
        return x.sin(), x.sin(), torch.ops.tailoring_test.draw(x) - torch.ops.tailoring_test.draw(x)

    with torch.library._scoped_library("tailoring_test", "DEF") as library:
        library.define("draw(Tensor x) -> Tensor")
        library.impl("draw", torch.rand_like, "CompositeExplicitAutograd")
        made = make_fx(function)(torch.zeros(3))
        merge_repeats(made.graph)
        made.recompile()
        one, other, drawn = made(torch.zeros(3))
    assert one.data_ptr() != other.data_ptr()
    assert drawn.abs().sum() > 0


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


SCALE = 1.0


def test_what_the_user_changes_is_seen_whatever_else_is_not_looked_at():
    def loss(m, x):
        return SCALE * (m(x) - target[0]).square().sum(1)

    def agrees():
        return torch.testing.assert_close(model(x), model.replace(compile=False)(x))

    global SCALE
    target, x = [0.5], queries(3)
    model = Tailored(mlp(), loss, adapt=CN(nn.Tanh), steps=1, lr=1e-2, compile=True)
    with torch.no_grad():
        agrees()
        for change in (
            lambda: target.__setitem__(0, 2.0),
            lambda: model.net[0].weight.mul_(2),
            lambda: setattr(model.net, "2", nn.Identity()),
        ):
            change()
            agrees()
        SCALE = 3.0
        agrees()
    SCALE = 1.0


def test_modes_of_torch_compile_go_with_our_options():
    cpu = torch.device("cpu")
    found = _compiled._options(cpu, {"mode": "max-autotune", "options": {"max_autotune": False}}, lambda: [])
    assert found["options"].keys() >= {"coordinate_descent_tuning", "post_grad_custom_pre_pass"}
    assert found["options"]["max_autotune"] is False
    assert "triton.cudagraphs" not in found["options"]
    with pytest.raises(ValueError, match=r"knows the modes default, .*, not 'fast'"):
        _compiled._options(cpu, {"mode": "fast"}, lambda: [])


def test_what_cannot_be_compiled_says_what_can():
    def residual(model, x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(model(x).sum(), x, create_graph=True)[0].sum(1).square()

    def by_func(model, x):
        return torch.func.grad(lambda z: model(z).sum())(x).sum(1).square()

    eager = Tailored(mlp(), residual, adapt=CN(nn.Tanh), lr=0.1)
    with torch.no_grad(), pytest.raises(torch._dynamo.exc.TorchDynamoException) as caught:
        eager.replace(compile={"backend": "eager"})(queries())
    assert "torch.func" in caught.value.__notes__[0]
    with torch.no_grad():
        compiled = Tailored(eager.net, by_func, adapt=CN(nn.Tanh), lr=0.1, compile={"backend": "eager"})
        torch.testing.assert_close(compiled(queries()), eager(queries()))
