"""What is done to compiled programs: repeats merged, weights turned, products chosen, gradients as convolutions, kernels searched for."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from functorch.compile import make_boxed_func
from nets import drift, mlp, queries
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.runtime import benchmarking
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tailoring import CN, Tailored, Weights, _autotune, _compiled, _passes, _products, _weight_sites, losses
from tailoring._autotune import as_in_a_chain
from tailoring._flipped import flip_gradients
from tailoring._layouts import turn_weights
from tailoring._merge import merge_repeats
from tailoring._products import choose_products

pytestmark = [pytest.mark.no_cover, pytest.mark.usefixtures("compiled_afresh")]  # dynamo takes longer while it is watched


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

    monkeypatch.setattr(_passes, "flip_gradients", watched)
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
    monkeypatch.setattr(_passes, "flip_gradients", lambda graph: seen.append(graph))
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
    options, _, graphs = _compiled.inductor_options(torch.device(device), given)
    assert (_compiled.searches_in(options), options.get("max_autotune_conv_backends")) == searched
    assert graphs


def convolutions():
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(36, 2))


@pytest.mark.parametrize(
    ("net", "shape", "adapt", "given", "searched"),
    [
        (convolutions, (3, 5, 5), CN(nn.Tanh), {}, True),
        (convolutions, (3, 5, 5), Weights(), {}, False),
        (convolutions, (3, 5, 5), Weights(), {"options": {"max_autotune_gemm": True}}, True),  # asked for
        (lambda: mlp().float(), (4,), Weights(), {}, True),
    ],
)
def test_products_of_queries_own_matrices_are_not_searched_for(monkeypatch, net, shape, adapt, given, searched):
    """The programs are dynamo's own; in place of Inductor for CUDA, which is told what to do, they run as they are."""
    told = []
    monkeypatch.setattr(_weight_sites, "own_kernels_pay", lambda module, positions: False)  # as on a GPU
    monkeypatch.setattr(_compiled, "CudaGraphs", SimpleNamespace)
    monkeypatch.setattr(_compiled, "Recorded", lambda run, *_: SimpleNamespace(__call__=run))
    monkeypatch.setattr(_compiled, "as_in_a_chain", nullcontext)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch._inductor, "compile", lambda program, inputs, options: told.append(options) or program.forward)
    backend = _compiled._options(torch.device("cuda"), given, lambda: [])["backend"]
    model, x = Tailored(net(), drift, adapt=adapt, steps=2, lr=1e-2, compile={"backend": backend}), torch.randn(3, *shape)
    with torch.no_grad():
        torch.testing.assert_close(model(x), model.replace(compile=False)(x))
    assert list(map(_compiled.searches_in, told)) == [searched]


def test_trials_of_kernels_are_queued_and_find_the_cache_full(monkeypatch):
    made, benchmarker = [], benchmarking.InductorBenchmarker()
    before = dict(vars(benchmarker))
    monkeypatch.setattr(benchmarking, "benchmarker", benchmarker)  # without a GPU torch 2.11 has another one
    monkeypatch.setattr(benchmarking.InductorBenchmarker, "get_event_pairs", lambda self, iters, device_type=None: made.append(iters) or [])
    with as_in_a_chain(pause := made.append):
        assert benchmarker.get_event_pairs(5, device_type="cuda") == []
        assert benchmarker.L2_cache_size == _autotune._CACHE
    assert made == [5 * _autotune._AHEAD, 5]
    assert vars(benchmarker) == before
    with pytest.raises(KeyError), as_in_a_chain(pause):
        {}["an error"]
    assert vars(benchmarker) == before
    monkeypatch.delattr(benchmarking.InductorBenchmarker, "get_event_pairs")
    with as_in_a_chain(pause):  # another benchmarker is left as it is
        assert vars(benchmarker) == before


def test_random_numbers_are_drawn_anew_each_time():
    made = make_fx(lambda x: torch.rand_like(x) - torch.rand_like(x))(torch.zeros(5))
    merge_repeats(made.graph)
    made.recompile()
    assert made(torch.zeros(5)).abs().sum() > 0


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


def test_products_of_two_libraries_are_the_same():
    """Of what oneDNN may take, which is all but the small, the double, the odd, and sums that are no bias."""

    def function(x, wide, narrow, bias, offset):
        large = x @ wide, x @ wide.t(), torch.addmm(bias, x, wide), torch.addmm(bias, x, wide.t())
        others = x @ narrow, x.double() @ wide.double(), torch.addmm(offset, x, wide), torch.addmm(bias, x, wide, alpha=2), x.t() @ x
        return *large, *others

    given = torch.randn(70, 128), torch.randn(128, 128), torch.randn(128, 2), torch.randn(128), torch.randn(70, 128)
    made = make_fx(function, tracing_mode="fake")(*given)
    asked = []
    choose_products(made.graph, lambda a, b, bias: not asked.append((*b.stride(), bias is not None)))
    made.recompile()
    assert sorted(asked) == [(1, 128, False), (1, 128, True), (128, 1, False), (128, 1, True)]
    assert sum(node.target is torch.ops.tailoring.product.default for node in made.graph.nodes) == 4
    for found, expected in zip(made(*given), function(*given), strict=True):
        torch.testing.assert_close(found, expected)
        assert found.stride() == expected.stride()


def test_each_kind_of_product_is_asked_for_once_and_the_others_library_kept_if_not_slower():
    made, asked = make_fx(lambda x, w: (x @ w).sin() @ w @ w, tracing_mode="fake")(torch.randn(70, 128), torch.randn(128, 128)), []
    choose_products(made.graph, lambda *given: asked.append(given))
    assert len(asked) == 1
    assert sum(node.target is torch.ops.aten.mm.default for node in made.graph.nodes) == 3


@pytest.mark.parametrize("bias", [torch.randn(256)[::2], torch.randn(1).expand(128), torch.randn(1)], ids=["in steps", "expanded", "one"])
def test_a_bias_that_onednn_would_misread_is_left_alone(bias):
    given = torch.randn(70, 128), torch.randn(128, 128), bias
    made = make_fx(lambda x, w, b: torch.addmm(b, x, w), tracing_mode="fake")(*given)
    choose_products(made.graph, lambda *given: True)
    made.recompile()
    torch.testing.assert_close(made(*given), torch.addmm(bias, *given[:2]))


def test_the_trial_is_of_float32_whatever_is_the_default():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert _products.is_faster(*(torch.ones(128, 128, dtype=torch.float32) for _ in range(2)), None) in (True, False)
    finally:
        torch.set_default_dtype(before)


def test_a_program_in_inductors_cache_serves_those_only_whose_trials_would_be_alike():
    def uuid():
        return _passes.own_passes()["post_grad_custom_pre_pass"].uuid()

    with_onednn = uuid()
    torch.backends.mkldnn.set_flags(False)
    try:
        assert uuid() != with_onednn
    finally:
        torch.backends.mkldnn.set_flags(True)
    assert uuid() == with_onednn


def test_who_switches_onednn_off_gets_none_of_it():
    made = make_fx(lambda x, w: x @ w, tracing_mode="fake")(torch.randn(70, 128), torch.randn(128, 128))
    torch.backends.mkldnn.set_flags(False)
    try:
        choose_products(made.graph, lambda *given: True)
    finally:
        torch.backends.mkldnn.set_flags(True)
    assert any(node.target is torch.ops.aten.mm.default for node in made.graph.nodes)


@pytest.mark.parametrize("bias", [None, torch.zeros(128)])
@pytest.mark.parametrize("turned", [True, False])
def test_the_faster_library_is_found_by_a_trial_of_what_holds_no_numbers_yet(monkeypatch, bias, turned):
    tried, generator = [], torch.get_rng_state()
    monkeypatch.setattr(_products, "outruns", lambda one, other: tried.append((one(), other())) or True)
    with FakeTensorMode():
        a, b = torch.empty(5000, 128), torch.empty(128, 128)
        assert _products.is_faster(a, b.t() if turned else b, None if bias is None else torch.empty(128))
    ((one, other),) = tried
    assert one.shape == (1024, 128)
    torch.testing.assert_close(one, other)
    assert torch.equal(torch.get_rng_state(), generator)


def test_one_that_is_hardly_faster_does_not_outrun_the_other(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(_products.time, "perf_counter", lambda: clock[0])

    def lasting(seconds: float):
        return lambda: clock.__setitem__(0, clock[0] + seconds)

    assert _products.outruns(lasting(0.01), lasting(0.02))
    assert not _products.outruns(lasting(0.0195), lasting(0.02))
    assert not _products.outruns(lasting(0.02), lasting(0.01))
    assert _products.outruns(lasting(5.0), lasting(9.0))  # one turn, if that takes longer than there is time for


@pytest.mark.parametrize("adapt", [CN(), Weights()], ids=repr)
def test_compiled_answers_are_the_same_by_onednn(monkeypatch, adapt):
    used = []
    monkeypatch.setattr(_passes, "choose_products", lambda graph: choose_products(graph, lambda *given: not used.append(given)))
    net = nn.Sequential(nn.Linear(4, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 4))
    model = Tailored(net, drift, adapt=adapt, steps=2, lr=1e-2, compile={"options": {"fx_graph_cache": False}})
    x = torch.randn(70, 4)
    with torch.no_grad():
        torch.testing.assert_close(model(x), model.replace(compile=False)(x))
    assert used
