"""It works where users call it."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from nets import ADAPTERS, MODES, PER_QUERY, architecture, drift, mlp, queries, summed_error, to_one
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tailoring import CN, Inputs, OuterLoss, Shift, Support, Tailored, Weights, losses, outer_losses
from tailoring._trees import tensors


def tailored(adapter: str = "CN", **options) -> Tailored:
    return Tailored(mlp(), drift, adapt=ADAPTERS[adapter](), **({"steps": 2, "lr": 1e-2} | options)).prepare(queries())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_it_works_where_gradients_are_off(adapter, mode):
    model, x = tailored(adapter), queries()
    expected, path, state = model(x), list(model.path(x)), tensors(model.tailor(x))
    with mode():
        inside = queries()  # an inference tensor in inference mode
        y = model(inside)
        assert not y.requires_grad
        assert not torch.is_grad_enabled()
        torch.testing.assert_close(y, expected)
        torch.testing.assert_close(list(model.path(inside)), path)
        torch.testing.assert_close(model.predict(inside, model.tailor(inside)), expected)
        torch.testing.assert_close(tensors(model.trace(inside).state), state)
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("backprop", MODES)
def test_no_mode_leaks_out_of_a_generator(backprop):
    model, x = tailored(backprop=backprop), queries()
    for mode in (torch.no_grad, torch.enable_grad):
        with mode():
            before = torch.is_grad_enabled()
            for _ in model.path(x):
                assert torch.is_grad_enabled() == before


@pytest.mark.parametrize("adapter", PER_QUERY)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_prediction_has_the_models_dtype(adapter, dtype):
    model, x = tailored(adapter, lr=0.1), queries().to(dtype)
    model = model.to(dtype)
    y = model(x)
    assert y.dtype == dtype
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.3}[dtype]
    torch.testing.assert_close(y.double(), tailored(adapter, lr=0.1)(queries()), rtol=tolerance, atol=tolerance)


def test_small_steps_are_not_lost_in_bfloat16():
    state = tailored(lr=1e-3).to(torch.bfloat16).tailor(queries().bfloat16())
    assert state["1.gamma"].dtype == torch.float32
    assert (state["1.gamma"] != 1).any()


@pytest.mark.parametrize("adapter", ["CN", "Weights", "Shift"])
@pytest.mark.parametrize("backprop", MODES)
def test_it_works_under_autocast(adapter, backprop):
    model, x = tailored(adapter, backprop=backprop).float(), queries().float()
    expected = model(x)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
        loss = sum(outer_losses(model, summed_error, x, x))
    if adapter != "Weights":  # vmap casts nothing
        assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), expected, rtol=0.1, atol=0.1)
    loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


COMPILED = [
    ("CN", "none", True, "aot_eager"),
    ("CN", "all", False, "aot_eager"),
    ("CN-learned-start", "last", True, "eager"),
    ("Weights", "none", True, "eager"),
    ("Weights-part", "all", False, "eager"),
    ("Shift", "none", False, "eager"),
    ("Output", "none", False, "eager"),
    ("Shared", "none", True, "eager"),
]


@pytest.mark.no_cover
@pytest.mark.parametrize(("adapter", "backprop", "dynamic", "backend"), COMPILED)
def test_it_compiles_as_one_graph(adapter, backprop, dynamic, backend):
    """These backends trace all that inductor would and run it with PyTorch's own kernels: quick, and exact."""
    torch.compiler.reset()
    model, x = tailored(adapter, backprop=backprop), queries()
    before = [dict(vars(module)) for module in model.net.modules()]
    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic, backend=backend)
    torch.testing.assert_close(compiled(x), model(x))
    # Without gradients it is another graph; of the adapters that are left out here, tests/test_compiled.py compiles it.
    with torch.set_grad_enabled(adapter in ("Weights", "Shared")):
        torch.testing.assert_close(compiled(x[:3]), model(x[:3]))
    parameters = list(model.parameters())
    grads = [torch.autograd.grad(summed_error(m(x), x), parameters) for m in (compiled, model)]
    torch.testing.assert_close(*grads)
    assert [vars(module).keys() for module in model.net.modules()] == [old.keys() for old in before]


@pytest.mark.no_cover
@pytest.mark.parametrize("method", ["states", "path", "tailor", "trace"])
def test_every_way_in_compiles_as_one_graph(method):
    """As parts of a training objective, which is compiled as a whole."""
    torch.compiler.reset()
    x = queries()
    model = tailored("CN", backprop="all").prepare(x)

    def found():
        out = getattr(model, method)(x)
        return out.prediction if method == "trace" else out if method == "tailor" else list(out)

    torch.testing.assert_close(torch.compile(found, fullgraph=True, backend="eager")(), found())


class Branching(nn.Module):
    """With a context, or the other way round, it runs other modules."""

    def __init__(self):
        super().__init__()
        self.first, self.act, self.context, self.other, self.last = nn.Linear(4, 8), nn.Tanh(), nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)

    def forward(self, x, context=None, left=True):
        h = self.act(self.first(x)) if left else self.other(self.first(x))
        return self.last(h if context is None else h + self.other(self.context(context)))


@pytest.mark.no_cover
def test_compiled_code_knows_each_kind_of_input_or_says_so():
    """What eager calls see in between changes nothing."""
    torch.compiler.reset()
    torch.manual_seed(0)
    x, context = torch.randn(6, 4), torch.randn(6, 3)
    model = Tailored(Branching(), lambda m, *args: (m(*args) - 1).square().sum(1), adapt=CN(nn.Tanh), steps=3, lr=0.3)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    kinds = [(x, context), (x,), (x, None, False)]
    with torch.no_grad():
        model.prepare(Inputs(x, context))
        torch.testing.assert_close(compiled(x, context), model(x, context))
        for others in kinds[1:]:
            model(*others)
            torch.testing.assert_close(compiled(x, context), model(x, context))
            with pytest.raises(Exception, match="not known yet for such an input"):
                compiled(*others)
        for others in kinds[1:]:
            model.prepare(Inputs(*others))
        for args in (*kinds, *kinds):
            torch.testing.assert_close(compiled(*args), model(*args))


@pytest.mark.no_cover
def test_guards_work_in_compiled_code():
    torch.compiler.reset()

    def explodes(model, x):
        return drift(model, x) * torch.where(x[:, 0] > 50, torch.inf, 1.0)

    x = queries()
    x[2, 0] = 100.0
    for options in ({"keep": "best", "stop": 1.0}, {"momentum": 0.5, "clip": 0.1}):
        model = Tailored(mlp(), explodes, adapt=CN(nn.Tanh), steps=2, lr=1e-2, **options).prepare(x)
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.no_cover
def test_inductor_agrees():
    torch.compiler.reset()
    model, x = tailored().float(), queries().float()
    model.prepare(x)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, fullgraph=True)(x), model(x))


def test_compiling_a_model_not_yet_prepared_says_what_to_do():
    torch.compiler.reset()
    model = Tailored(mlp(), drift, adapt=CN(nn.Tanh))
    with pytest.raises(Exception, match=r"call model\.prepare"):
        torch.compile(model, fullgraph=True, backend="aot_eager")(queries())


@pytest.mark.no_cover
@pytest.mark.parametrize("name", ["transformer", "gru", "resnet", "vit"])
def test_real_architectures_compile(name):
    torch.compiler.reset()
    net, args, _ = architecture(name)
    model = Tailored(net, lambda model, x: _first(model(x)).flatten(1).sin().mean(1), adapt=CN(), steps=1, lr=1e-2).prepare(*args)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad(), torch._dynamo.config.patch(allow_rnn=True):  # else dynamo refuses any model with a recurrent layer
        torch.testing.assert_close(_first(compiled(*args)), _first(model(*args)))


def _first(out):
    return out if isinstance(out, torch.Tensor) else out[0]


def test_frozen_transformers_are_adapted_too():
    """With no weight that needs gradients PyTorch would take a fast path that skips the layers inside."""
    net, (x,), _ = architecture("transformer")
    expected = Tailored(net, lambda model, x: model(x).sin().sum(1), adapt=CN(), lr=1e-2)(x)
    net.requires_grad_(False)
    torch.testing.assert_close(Tailored(net, lambda model, x: model(x).sin().sum(1), adapt=CN(), lr=1e-2)(x), expected)
    assert (expected - net(x)).abs().max() > 1e-6


def test_several_inputs_go_through_as_they_came():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = mlp()

        def forward(self, a, parts, *, scale, flag=True):
            return {"out": self.body(a + parts["b"][0]) * scale, "flag": flag}

    def loss(model, a, parts, *, scale, flag):
        return model(a, parts, scale=scale, flag=flag)["out"].square().sum(1)

    a, parts, scale = queries(), {"b": (queries(seed=4),)}, torch.tensor(2.0, dtype=torch.float64)
    model = Tailored(Sum(), loss, adapt=CN(nn.Tanh), lr=1e-2, chunk=2)
    out = model(a, parts, scale=scale, flag=False)
    assert out["flag"] is False
    flat = Tailored(model.net.body, lambda model, x: 4 * model(x).square().sum(1), adapt=CN(nn.Tanh), lr=1e-2)
    torch.testing.assert_close(out["out"], 2 * flat(a + parts["b"][0]))
    x = Inputs(a, parts, scale=scale, flag=False)
    torch.testing.assert_close(model.predict(x, model.tailor(x))["out"], out["out"])
    torch.testing.assert_close(list(model.path(x))[-1]["out"], out["out"])


def test_checkpoints_load_both_ways():
    net, x = mlp(), queries()
    model = Tailored(net, drift, adapt=CN(nn.Tanh))
    assert list(model.state_dict()) == list(net.state_dict())
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in net.named_parameters()]
    other = Tailored(mlp(seed=7), drift, adapt=CN(nn.Tanh))
    other.load_state_dict(net.state_dict())
    torch.testing.assert_close(other(x), model(x))
    plain = mlp(seed=8)
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(plain(x), net(x))
    holder = nn.ModuleDict({"model": model})  # inside another module, as in a training framework
    assert list(holder.state_dict()) == [f"model.{key}" for key in net.state_dict()]
    into = nn.ModuleDict({"model": Tailored(mlp(seed=9), drift, adapt=CN(nn.Tanh))})
    into.load_state_dict(holder.state_dict())
    torch.testing.assert_close(into["model"](x), model(x))
    with pytest.raises(RuntimeError, match="Unexpected key"):
        other.load_state_dict({**net.state_dict(), "more": x})


class WithNet(nn.Module):
    def __init__(self, *, first: bool):
        super().__init__()
        torch.manual_seed(0)
        if first:
            self.fc = nn.Linear(2, 2)
        self.net = nn.Sequential()
        self.net.fc = nn.Linear(2, 2)
        self.fc = nn.Linear(2, 2)


@pytest.mark.parametrize("first", [True, False])
def test_a_model_that_has_a_net_itself_is_saved_and_loaded_whole(first):
    net = WithNet(first=first)
    saved = Tailored(net, to_one).state_dict()
    assert {name: t.tolist() for name, t in saved.items()} == {name: t.tolist() for name, t in net.state_dict().items()}
    other = WithNet(first=first).requires_grad_(False)
    for p in other.parameters():
        p.zero_()
    Tailored(other, to_one).load_state_dict(net.state_dict())
    for name, t in net.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], t)


def test_buffers_keep_their_names():
    net, _, _ = architecture("resnet")
    model = Tailored(net, drift)
    assert [n for n, _ in model.named_buffers()] == [n for n, _ in net.named_buffers()]
    assert list(model.state_dict()) == list(net.state_dict())


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_copies_and_pickles_are_independent_and_equal(adapter):
    model, x = tailored(adapter), queries()
    expected = model(x)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)):
        torch.testing.assert_close(other(x), expected)
        with torch.no_grad():
            for p in other.parameters():
                p.zero_()
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize("adapter", PER_QUERY)
def test_two_threads_may_share_a_model(adapter):
    model = tailored(adapter)
    inputs = [queries(8, seed=i) for i in range(12)]
    expected = [model(x) for x in inputs]
    plain = [model.net(x) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        tailored_answers = pool.map(model, inputs * 3)
        for got, wanted in zip(tailored_answers, expected * 3, strict=True):
            torch.testing.assert_close(got, wanted)
        if not adapter.startswith("Weights"):  # functional_call swaps the weights under everyone's feet
            mixed = [pool.submit(model if i % 2 else model.net, x) for i, x in enumerate(inputs * 3)]
            for i, (job, one, other) in enumerate(zip(mixed, expected * 3, plain * 3, strict=True)):
                torch.testing.assert_close(job.result(), one if i % 2 else other)
    assert not any(m._forward_hooks for m in model.net.modules())


@pytest.mark.parametrize("adapter", ["CN", "Shift", "Weights"])
def test_a_pass_that_fails_leaves_nothing_behind(adapter):
    model, x = tailored(adapter), queries()
    expected, plain = model(x), model.net(x)

    def refuse(*_: object) -> None:
        raise KeyboardInterrupt

    handle = model.net[1].register_forward_hook(refuse)
    with pytest.raises(KeyboardInterrupt):
        model(x)
    handle.remove()
    torch.testing.assert_close(model.net(x), plain)
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize("adapter", PER_QUERY)
def test_a_model_holds_on_to_no_state_and_no_query(adapter):
    model, x = tailored(adapter, backprop="all"), queries()
    held = [weakref.ref(t) for t in tensors(model.tailor(x))]
    model.predict(x, state := model.tailor(x)).sum().backward()
    held += [weakref.ref(t) for t in (*tensors(state), x)]
    del state, x
    gc.collect()
    assert not any(ref() is not None for ref in held)


def _train_in_processes(rank: int, world: int, port: int, results) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    out = {}
    for backprop in MODES:
        model = tailored("CN-learned-start", backprop=backprop)
        ddp = DistributedDataParallel(OuterLoss(model, summed_error))
        x, y = queries(6), queries(6, seed=2)
        ddp(x[rank::world], y[rank::world]).backward()
        out[backprop] = [p.grad.tolist() for p in model.parameters()]
    tasks = Tailored(mlp(), losses.Supervised(nn.functional.mse_loss), adapt=CN(nn.Tanh), lr=1e-2)
    ddp = DistributedDataParallel(OuterLoss(tasks, summed_error))
    x, y = queries(12).unflatten(0, (4, 3)), queries(12, seed=2).unflatten(0, (4, 3))
    ddp(Support(x[rank::world], y[rank::world]), (x[rank::world], y[rank::world])).backward()
    out["tasks"] = [p.grad.tolist() for p in tasks.parameters()]
    results[rank] = out
    dist.destroy_process_group()


def test_two_processes_give_the_gradients_of_one():
    with mp.Manager() as manager:
        results = manager.dict()
        mp.spawn(_train_in_processes, (2, _free_port(), results), nprocs=2)
        ranks = dict(results)
    for backprop in MODES:
        model = tailored("CN-learned-start", backprop=backprop)
        OuterLoss(model, summed_error)(queries(6), queries(6, seed=2)).backward()
        expected = [p.grad / 2 for p in model.parameters()]  # DDP averages over the processes
        for rank in (0, 1):
            torch.testing.assert_close([torch.tensor(g, dtype=torch.float64) for g in ranks[rank][backprop]], expected)
    assert ranks[0]["tasks"] == ranks[1]["tasks"]


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["resnet", "gru", "transformer"])
@pytest.mark.parametrize("adapt", [CN(), Weights()], ids=repr)
def test_a_gpu_gives_the_same_answers(name, adapt):
    net, args, _ = architecture(name)
    for backprop in MODES:
        model = Tailored(net, lambda model, x: model(x).sin().flatten(1).sum(1), adapt=adapt, steps=2, lr=1e-2, backprop=backprop)
        expected = model.cpu()(*args)
        torch.testing.assert_close(model.cuda()(*(a.cuda() for a in args)).cpu(), expected, rtol=1e-6, atol=1e-8)


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.act = nn.Linear(4, 4), nn.Tanh()

    def forward(self, x):
        h = self.act(self.lin(x))
        return torch.complex(h, h.exp())


def test_complex_answers_are_looked_at_too():
    torch.manual_seed(0)
    net, x = Complex().double(), queries()
    for adapt in (CN("act"), Weights()):
        model = Tailored(net, lambda m, x: m(x).real.square().sum(1), adapt=adapt, steps=1, lr=1e3)  # e^1000 is infinite
        found = model(x)
        assert found.isfinite().all()
        torch.testing.assert_close(model.trace(x).prediction, found)
        model = Tailored(net, lambda m, x: m(x).abs().sum(1), adapt=adapt, steps=2, lr=0.01)
        torch.testing.assert_close(model(x), torch.cat([model(query[None]) for query in x]))


@pytest.mark.parametrize("change", [{"stop": 1e9}, {"keep": "best"}])
def test_settings_may_change_later(change):
    model, x = Tailored(mlp(), drift, adapt=CN(nn.Tanh), steps=3, lr=[0.05, 0.05, 30.0]), queries()
    before = model(x)
    for name, value in change.items():
        setattr(model, name, value)
    expected = model.replace(**change)(x)
    torch.testing.assert_close(model(x), expected)
    torch.testing.assert_close(model.trace(x).prediction, expected)
    assert (before - expected).abs().max() > 1e-6
    with pytest.raises(ValueError, match="lr has 3 step sizes"):
        model.steps = 4


@pytest.mark.parametrize("named", [False, True])
def test_a_learned_step_size_that_is_loaded_is_used(named):
    def rate(value):
        return nn.Parameter(torch.tensor(value, dtype=torch.float64))

    model, other = (
        Tailored(mlp(), drift, adapt=CN(nn.Tanh), steps=2, lr={"*gamma": rate(v), "*beta": 0.01} if named else rate(v)) for v in (0.01, 0.3)
    )
    model.load_state_dict(other.state_dict(), assign=True)
    torch.testing.assert_close(model(queries()), other(queries()))
    assert any(p is (model.rule.lr["*gamma"] if named else model.rule.lr) for p in model.parameters())


def test_another_adapter_has_its_own_sites():
    model = Tailored(mlp(), drift, adapt=CN("1"), steps=2, lr=0.1)
    model(queries())
    model.adapt = CN("3")
    torch.testing.assert_close(model(queries()), Tailored(mlp(), drift, adapt=CN("3"), steps=2, lr=0.1)(queries()))


def test_a_renamed_module_is_noticed():
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double()
    model = Tailored(net, drift, adapt=CN(nn.Tanh), steps=1, lr=0.1)
    expected = model(queries())
    net._modules["act"] = net._modules.pop("1")
    torch.testing.assert_close(model(queries()), expected)


def test_a_replaced_module_is_noticed_though_it_says_it_is_equal():
    class Equal(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.lin = nn.Linear(4, width)
            self.out = nn.Linear(width, 4)

        def __eq__(self, other):
            return isinstance(other, Equal)

        def __hash__(self):
            return 1

        def forward(self, x):
            return self.out(self.lin(x))

    net = nn.Sequential(Equal(3), nn.Tanh()).double()
    model = Tailored(net, drift, adapt=CN("0.lin"), steps=1, lr=0.1)
    model(queries())
    net[0] = Equal(5).double()
    torch.testing.assert_close(model(queries()), Tailored(net, drift, adapt=CN("0.lin"), steps=1, lr=0.1)(queries()))


def test_moving_the_model_moves_what_is_learned():
    model = tailored("CN-learned-start", lr=nn.Parameter(torch.tensor(1e-2, dtype=torch.float64))).float()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model(queries().float()).dtype == torch.float32
    assert Tailored(mlp(), drift, adapt=Shift("2"))(queries()).dtype == torch.float64


def test_a_model_whose_layer_is_replaced_or_renamed_is_looked_at_again():
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    model, x = Tailored(net, lambda model, x: model(x).square().sum(1), adapt=CN(nn.Tanh), steps=1, lr=0.1), torch.randn(4, 3)
    model(x)
    net[1] = nn.Sequential(nn.Tanh())  # at another place
    assert list(model.tailor(x)) == ["1.0.gamma", "1.0.beta"]
    net[1] = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5))  # of another size
    assert model.tailor(x)["1.1.gamma"].shape == (4, 7)
    model.net = nn.Sequential(nn.Linear(3, 6), nn.Tanh())
    assert model.net is not net
    assert model.tailor(x)["1.gamma"].shape == (4, 6)


def test_a_model_that_is_not_used_any_more_is_not_kept():
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    net[1].__dict__["whole"] = net  # a module that knows the one it is in
    model = Tailored(net, lambda model, x: model(x).square().sum(1), adapt=CN(nn.Tanh), steps=1, lr=0.1)
    model(torch.randn(4, 3))
    gone = weakref.ref(net)
    del net, model
    gc.collect()
    assert gone() is None
