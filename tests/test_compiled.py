"""`Tailored(..., compile=True)`: the same answers from programs for a few batch sizes."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from threading import Event

import pytest
import torch
from nets import Timed, drift, mlp, queries
from torch import nn

from tailoring import CN, Inputs, Tailored, Weights, _compiled, _reuse, baselines, losses

AOT = {"backend": "aot_eager"}
pytestmark = [pytest.mark.no_cover, pytest.mark.usefixtures("compiled_afresh")]  # dynamo takes longer while it is watched


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
        model.net.train(not model.net.training)  # what dynamo has to look at again
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
        number = 1.0 + m._bound.step
        if change == "in a tuple":
            net[0].pair = (number, 2.0)
        elif change == "once nothing":
            net[0].factor = number if m._bound.step else None
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


def test_a_new_shape_takes_one_program_and_leaves_the_others():
    model, made = counted()
    model = model.replace(loss=lambda m, x: m(x).square().flatten(1).sum(1))
    with torch.no_grad():
        for seen in range(1, 5):
            for length in range(seen):
                model(torch.randn(3, length + 2, 4, dtype=torch.float64))
            model.trace(torch.randn(3, 20 + seen, 4, dtype=torch.float64))
            assert len(made) == seen


def test_other_threads_tailor_while_a_program_is_built():
    """Their own models, in eager mode: whether dynamo looks is a question to each thread, not one flag."""
    model, x = Tailored(mlp(seed=1), drift, adapt=CN(nn.Tanh), steps=2, lr=1e-2), queries()
    expected, done = model(x), Event()

    def answer_on() -> int:
        answered = 0
        while not done.is_set():
            torch.testing.assert_close(model(x), expected)
            answered += 1
        return answered

    with ThreadPoolExecutor(1) as pool, torch.no_grad():
        answers = pool.submit(answer_on)
        try:
            own = Tailored(mlp(), drift, adapt=CN(nn.Tanh), steps=2, lr=1e-2).prepare(x)
            torch.compile(own, backend="aot_eager", fullgraph=True)(x)
            counted()[0](x)
        finally:
            done.set()
        assert answers.result() > 0
