"""The seven laws of the design, over every adapter and every way to backpropagate."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from nets import ADAPTERS, ARCHITECTURES, MODES, PER_QUERY, answer_size, architecture, drift, float_mlp, mlp, queries, size, summed_error
from torch import nn

from tailoring import CN, Inputs, Shift, Tailored, Weights, outer_losses
from tailoring._recurrent import NEEDS_TRACEABLE
from tailoring._trees import take_rows, tensors
from tailoring.baselines import Output

TOLERANCE = {"rtol": 1e-9, "atol": 1e-11}


def tailored(adapter: str, backprop: str = "none", steps: int = 3, lr: float = 1e-2, loss=drift, **options) -> Tailored:
    model = Tailored(mlp(), loss, adapt=ADAPTERS[adapter](), backprop=backprop, steps=steps, lr=lr, **options)
    return model.prepare(queries())


def assert_same(a, b) -> None:
    for left, right in zip(tensors(a), tensors(b), strict=True):
        torch.testing.assert_close(left, right, **TOLERANCE)


# Law 1: independence


@pytest.mark.parametrize("backprop", MODES)
@pytest.mark.parametrize("adapter", PER_QUERY)
def test_a_query_never_sees_its_neighbours(adapter, backprop):
    model, x = tailored(adapter, backprop), queries()
    alone = torch.cat([model(x[i : i + 1]) for i in range(len(x))])
    assert_same(model(x), alone)
    assert_same(model(x.flip(0)), alone.flip(0))
    assert (alone - model.net(x)).abs().max() > 1e-4  # tailoring did something


@pytest.mark.parametrize("adapter", PER_QUERY)
def test_outer_gradients_of_a_batch_are_the_sum_of_those_alone(adapter):
    model, x = tailored(adapter, "all"), queries()
    whole = torch.autograd.grad(sum(outer_losses(model, summed_error, x, x.flip(1))), list(model.parameters()))
    parts = [
        torch.autograd.grad(sum(outer_losses(model, summed_error, x[i : i + 1], x[i : i + 1].flip(1))), list(model.parameters()))
        for i in range(len(x))
    ]
    assert_same(whole, [sum(p) for p in zip(*parts, strict=True)])


# Law 2: identity start


@pytest.mark.parametrize("backprop", MODES)
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_zero_steps_are_the_model_itself_bit_for_bit(adapter, backprop):
    model, x = tailored(adapter, backprop, steps=0), queries()
    assert torch.equal(model(x), model.net(x))


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_the_identity_state_changes_nothing(adapter):
    model, x = tailored(adapter), queries()
    assert_same(next(model.path(x)), model.net(x))


@pytest.mark.parametrize("how", ["loop", "vmap"])
def test_zero_steps_are_the_model_while_another_thread_has_its_weights(how):
    net, x = float_mlp(), torch.randn(4, 3)
    expected, zero, done = net(x).detach(), Tailored(net, size, steps=0), threading.Event()
    copies = Tailored(net, size, adapt=Weights(how=how), steps=2, lr=0.1)

    def busy():
        for _ in range(10):
            copies(x)
        done.set()

    thread = threading.Thread(target=busy)
    thread.start()
    answers = []
    while not done.is_set():
        answers.append(zero(x).detach())
    thread.join()
    assert all(torch.equal(answer, expected) for answer in answers)


# Law 3: no trace


def fingerprint(model: nn.Module):
    hooks = [
        (name, list(m._forward_hooks.values()), list(m._forward_pre_hooks.values()), "forward" in vars(m))
        for name, m in model.named_modules()
    ]
    return (
        copy.deepcopy(dict(model.state_dict())),
        hooks,
        [m.training for m in model.modules()],
        [p.requires_grad for p in model.parameters()],
    )


def fails_at_step_two(error):
    calls = []

    def loss(model, x):
        calls.append(1)
        value = drift(model, x)
        if len(calls) == 2:
            raise error
        return value

    return loss


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("error", [None, RuntimeError("inside the loss"), KeyboardInterrupt()], ids=str)
def test_a_call_leaves_no_trace(adapter, error):
    model, x = tailored(adapter, "all", loss=drift if error is None else fails_at_step_two(error)), queries()
    before = fingerprint(model.net)
    kernels = torch.backends.mha.get_fastpath_enabled(), torch.backends.cuda.flash_sdp_enabled()
    if error is None:
        model(x)
    else:
        with pytest.raises(type(error)):
            model(x)
    after = fingerprint(model.net)
    assert_same(before[0], after[0])
    assert before[1:] == after[1:]
    assert kernels == (torch.backends.mha.get_fastpath_enabled(), torch.backends.cuda.flash_sdp_enabled())
    assert all(p.grad is None for p in model.net.parameters())


def test_an_error_inside_the_model_leaves_no_trace():
    class Breaks(nn.Module):
        def forward(self, x):
            if x.requires_grad:  # only below an adapted layer, so after the hooks are set
                raise RuntimeError("inside the model")
            return x

    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), Breaks(), nn.Linear(4, 4)).double()
    before = fingerprint(net)
    with pytest.raises(RuntimeError, match="inside the model"):
        Tailored(net, drift, adapt=CN(nn.Tanh))(queries())
    assert before[1:] == fingerprint(net)[1:]


# Law 5: gradients (law 4, the paper's algorithms, is tests/test_algorithms.py)


@pytest.mark.parametrize("adapter", [a for a in ADAPTERS if a != "Output"])
def test_second_order_gradients_pass_gradcheck(adapter):
    outer, x = _Outer(tailored(adapter, "all", steps=2, lr=5e-2)), queries(3)
    names, values = zip(*outer.named_parameters(), strict=True)
    values = tuple(p.detach().clone().requires_grad_() for p in values)
    assert torch.autograd.gradcheck(lambda *v: torch.func.functional_call(outer, dict(zip(names, v, strict=True)), (x,)), values)


class _Outer(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return sum(outer_losses(self.model, summed_error, x, x.flip(1)))


def test_gradients_reach_the_input_through_the_adaptation():
    model, x = tailored("CN", "all", steps=2, lr=5e-2), queries(2)
    assert torch.autograd.gradcheck(model, (x.clone().requires_grad_(),))


@pytest.mark.parametrize("adapter", [a for a in PER_QUERY if a != "CN-learned-start"])
@pytest.mark.parametrize("backprop", ["none", "last"])
def test_first_order_and_last_equal_their_definitions(adapter, backprop):
    """state_s = start - lr * (constant gradients of steps 1..s-1) - lr * g_s, with g_s constant too for "none"."""
    model, x = tailored(adapter, backprop, steps=3), queries()
    params = list(model.parameters())
    ours = [torch.autograd.grad(loss, params, retain_graph=True) for loss in outer_losses(model, summed_error, x, x.flip(1))]
    if adapter.startswith("Weights"):  # written out for states of tensors
        model = Tailored(model.net, drift, adapt=Weights(*model.adapt.at, how="vmap"))
    sites, constant, theirs = model.adapt.sites(model.net, x), None, []
    for _ in range(3):
        start = model.adapt.init(model.net, sites, len(x))
        state = {k: (v if constant is None else v - 1e-2 * constant[k]).requires_grad_() for k, v in start.items()}
        loss = model._losses(model._batches(x)[0], 0, state)
        gradient = dict(
            zip(state, torch.autograd.grad(loss.sum(), list(state.values()), create_graph=True, allow_unused=True), strict=True)
        )
        gradient = {k: torch.zeros_like(state[k]) if g is None else g for k, g in gradient.items()}
        shown = {k: state[k] - 1e-2 * (gradient[k] if backprop == "last" else gradient[k].detach()) for k in state}
        theirs.append(torch.autograd.grad(summed_error(model.predict(x, shown), x.flip(1)), params))
        constant = {k: g.detach() + (0 if constant is None else constant[k]) for k, g in gradient.items()}
    assert_same(ours, theirs)


# Law 6: descent


@pytest.mark.parametrize("backprop", MODES)
@pytest.mark.parametrize("adapter", PER_QUERY)
def test_a_small_enough_step_lowers_every_querys_loss(adapter, backprop):
    trace = tailored(adapter, backprop, steps=4, lr=1e-3).trace(queries())
    assert (trace.losses.diff(dim=0) < 0).all()


# Law 7: a bad query harms only itself


def explodes_for_large_inputs(model, x):
    return drift(model, x) * torch.where(x[:, 0] > 50, torch.inf, 1.0)


@pytest.mark.parametrize("backprop", MODES)
@pytest.mark.parametrize("adapter", PER_QUERY)
def test_a_bad_query_harms_only_itself(adapter, backprop):
    model, x = tailored(adapter, backprop, loss=explodes_for_large_inputs), queries()
    good = model(x)
    spoilt = x.clone()
    spoilt[2, 0] = 100.0
    trace = model.trace(spoilt)
    assert trace.failed.tolist() == [False, False, True, False, False]
    assert trace.steps.tolist() == [3, 3, 0, 3, 3]
    others = [0, 1, 3, 4]
    assert_same(trace.prediction[others], good[others])
    assert_same(trace.prediction[2], model.replace(steps=0)(spoilt)[2])
    total = sum(outer_losses(model, summed_error, spoilt, x))
    total.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    assert any(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())


@pytest.mark.parametrize("backprop", MODES)
def test_a_step_too_far_falls_back_to_the_untailored_answer(backprop):
    model, x = tailored("CN", backprop, loss=lambda model, x: 1e20 * drift(model, x), lr=1e300), queries()
    trace = model.trace(x)
    assert trace.failed.all()
    assert_same(trace.prediction, model.net(x))
    sum(outer_losses(model, summed_error, x, x)).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_a_finite_state_that_gives_no_finite_answer_falls_back():
    class Overflows(nn.Module):
        def forward(self, x):
            return (x.square().square().square() * 40).exp()

    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), Overflows()).float()
    model = Tailored(net, lambda model, x: -model.output_of("1", x).sum(1), adapt=CN(nn.Tanh), lr=300.0)
    x = queries().float() / 10
    trace = model.trace(x)
    assert all(t.isfinite().all() for t in trace.state.values())
    assert trace.failed.all()
    assert_same(trace.prediction, net(x))


# The same laws in compiled mode, which is without gradients: laws 1, 2, 3, 6 and 7, and the answers of eager mode

QUICK = [name for name in ADAPTERS if name not in ("Weights-part", "Weights-vmap")]  # as Weights, and as any other
COMPILED = [*((adapter, {"backend": "aot_eager"}) for adapter in QUICK), ("CN", True)]  # Inductor takes much longer


@pytest.mark.no_cover
@pytest.mark.parametrize(("adapter", "compile"), COMPILED, ids=str)
@torch.no_grad()
def test_the_laws_hold_in_compiled_mode(adapter, compile):
    torch.compiler.reset()
    model, x = tailored(adapter, steps=2, loss=explodes_for_large_inputs, compile=compile), queries()
    before, plain = fingerprint(model.net), model.net(x)
    whole = model(x)
    assert model._compiled is not None
    assert model._compiled.programs
    assert_same(whole, model.replace(compile=False)(x))
    assert (drift(lambda _: whole, x) < drift(model.net, x)).all() or adapter not in PER_QUERY
    assert torch.equal(model.replace(steps=0)(x), plain) or model.adapt.learned_start
    if adapter in PER_QUERY:
        assert_same(torch.cat([model(x[i : i + 1]) for i in range(len(x))]), whole)
        assert_same(model(x.flip(0)), whole.flip(0))
        spoilt, others = x.clone(), [0, 1, 3, 4]
        spoilt[2, 0] = 100.0
        answers = model(spoilt)
        assert_same(answers[others], whole[others])
        assert_same(answers[2], model.net(spoilt)[2])
    after = fingerprint(model.net)
    assert_same(before[0], after[0])
    assert before[1:] == after[1:]


def test_an_error_while_compiling_leaves_no_trace():
    torch.compiler.reset()
    model, x = tailored("CN", loss=fails_at_step_two(RuntimeError("inside the loss")), compile={"backend": "aot_eager"}), queries()
    before = fingerprint(model.net)
    told = (RuntimeError, torch._dynamo.exc.TorchDynamoException, *([AssertionError] if NEEDS_TRACEABLE else []))  # an older dynamo's own
    with torch.no_grad(), pytest.raises(told):
        model(x)
    assert before[1:] == fingerprint(model.net)[1:]


# Pairwise on real architectures

ADAPT_ARCHITECTURE = {"CN": CN, "Weights": Weights, "Output": Output}
SHIFT_AT = {"resnet": "layer1", "unet": "deep", "conv1d": "0", "gru": "rnn", "gru-last": "rnn", "lstm": "rnn", "transformer": "layers",
            "sequence-first": "layer", "vit": "layers.0", "bert": "encoder.layer.0"}  # fmt: skip


def shift_site(name: str, net: nn.Module) -> str:
    if name == "vit":
        return next(n for n, m in net.named_modules() if type(m).__name__ == "ViTLayer")
    return SHIFT_AT[name]


@pytest.mark.parametrize("adapter", ["CN", "Weights", "Shift", "Output"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_laws_hold_on_real_architectures(name, adapter):
    net, args, kwargs = architecture(name)
    adapt = Shift(shift_site(name, net)) if adapter == "Shift" else ADAPT_ARCHITECTURE[adapter]()
    if (name, adapter) == ("bert", "Weights"):
        adapt = Weights(how="loop")  # its attention mask is read by Python
    backprop = MODES[(list(ARCHITECTURES).index(name) + len(adapter)) % 3]
    model = Tailored(net, answer_size, adapt=adapt, steps=2, lr=1e-3, backprop=backprop)
    x = Inputs(*args, **kwargs)
    before = fingerprint(net)
    whole = model(*args, **kwargs)
    for i in range(3):
        part = take_rows(x, slice(i, i + 1))
        torch.testing.assert_close(tensors(model(*part.args, **part.kwargs))[0][0], tensors(whole)[0][i], rtol=1e-7, atol=1e-9)
    assert type(whole) is type(net(*args, **kwargs))
    trace = model.trace(x)
    assert (trace.losses.diff(dim=0) < 0).all()
    assert_same(next(model.path(x)), net(*args, **kwargs))
    loss = sum(outer_losses(model, lambda out, y: tensors(out)[0].square().sum() * y, x, 1.0))
    assert all(g is None or g.isfinite().all() for g in torch.autograd.grad(loss, list(net.parameters()), allow_unused=True))
    assert before[1:] == fingerprint(net)[1:]
