"""What real models and losses do that a first test does not think of."""

from __future__ import annotations

import io

import pytest
import torch
from nets import drift, mlp, queries, summed_error, text_encoder
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from tailoring import CN, LBFGS, Tailored, Weights, outer_losses
from tailoring._entries import LowRank
from tailoring._trees import tensors

EXACT = {"rtol": 1e-9, "atol": 1e-10}


def size(model, x) -> Tensor:
    out = model(x)
    return (out if isinstance(out, Tensor) else out[0]).flatten(1).square().mean(1)


def assert_exact(net: nn.Module, x: Tensor, loss=size, at: tuple = (), steps: int = 2, lr: float = 0.05) -> None:
    """As the loop over queries, in all modes, in the answer and in the outer gradients."""
    for backprop in ("none", "all"):
        ours, theirs = (
            Tailored(net, loss, adapt=Weights(*at, how=how), steps=steps, lr=lr, backprop=backprop) for how in ("rules", "loop")
        )
        answers = [tensors(m(x))[0] for m in (ours, theirs)]
        torch.testing.assert_close(*answers, **EXACT)
        assert (answers[0] - tensors(net(x))[0]).abs().max() > 1e-6
        params = [p for p in net.parameters() if p.requires_grad]
        grads = [torch.autograd.grad(a.sin().sum(), params, allow_unused=True) if params else () for a in answers]
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(torch.zeros(()) if a is None else a, torch.zeros(()) if b is None else b, **EXACT)


# Derivatives of the model inside the loss or the model


def pinn(model, x):
    x = x.detach().requires_grad_()
    u = model(x).sum(1)
    return (torch.autograd.grad(u.sum(), x, create_graph=True)[0].sum(1) - u).square()


class Hamiltonian(nn.Module):
    def __init__(self):
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x):
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            return torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0].roll(2, 1)


def test_a_loss_may_differentiate_the_model():
    assert_exact(mlp(), queries(), pinn, lr=0.02)


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("adapt", [CN(nn.Tanh), Weights()], ids=repr)
def test_a_loss_that_differentiates_the_model_is_traced_and_compared(adapt, gradients):
    net, x = mlp(), queries()
    model = Tailored(net, pinn, adapt=adapt, steps=3, lr=[0.02, 0.02, 3.0])
    with torch.set_grad_enabled(gradients):
        trace, best = model.trace(x), model.replace(keep="best").trace(x)
    torch.testing.assert_close(trace.losses[0], pinn(net, x).detach())
    torch.testing.assert_close(best.losses, trace.losses)
    assert (best.steps == trace.losses.argmin(0)).all()
    assert (best.steps == 2).any()  # a later step was worse


@pytest.mark.parametrize("frozen", [False, True])
def test_a_loss_may_differentiate_forwards(frozen):
    def slope(model, x):
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x)))).tangent.square().sum(1)

    assert_exact(mlp().requires_grad_(not frozen), queries(), slope, lr=0.02)


class ViewedImage(nn.Module):
    """What comes after a layer relies on how its numbers lie in memory."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(1, 2, 3), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x.unflatten(1, (1, 4, 4)))).view(len(x), -1))


class ViewedSequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(2, 2), nn.Linear(16, 3)

    def forward(self, x):
        steps = self.first(x.unflatten(1, (8, 2)).transpose(0, 1).contiguous())  # (time, queries, 2)
        return self.last(torch.tanh(steps.view(-1, 2)).view(8, -1, 2).transpose(0, 1).flatten(1))


@pytest.mark.parametrize("kind", [ViewedImage, ViewedSequence])
def test_layers_answer_in_the_layout_that_they_have_by_themselves(kind):
    torch.manual_seed(0)
    assert_exact(kind().double(), torch.randn(5, 16).double())


def test_a_loss_may_use_the_transforms_of_torch_func():
    def by_grad(model, x):
        return (torch.func.grad(lambda z: model(z).sum())(x).sum(1) - model(x).sum(1)).square()

    def by_jvp(model, x):
        value, slope = torch.func.jvp(model, (x,), (torch.ones_like(x),))
        return (slope.sum(1) - value.sum(1)).square()

    for loss in (by_grad, by_jvp):
        assert_exact(mlp(), queries(), loss, lr=0.02)


def test_a_model_may_differentiate_itself():
    torch.manual_seed(0)
    assert_exact(Hamiltonian().double(), queries())


# States that are chosen, warm, or gone wrong


def test_the_best_state_is_really_the_one_that_answers():
    net, x = mlp(), queries()
    for how in ("rules", "vmap"):
        model = Tailored(net, drift, adapt=Weights(how=how), steps=4, lr=[0.05, 0.05, 3.0, 0.05], keep="best")
        trace = model.trace(x)
        assert (trace.losses.argmin(0) < 3).any()  # a later step was worse
        torch.testing.assert_close(drift(lambda _, p=trace.prediction: p, x), trace.losses.min(0).values)


def explodes(model, x):
    return drift(model, x) * torch.where(x[:, 0] > 50, torch.inf, 1.0)


@pytest.mark.parametrize("steps", [1, 3])
def test_a_query_that_fails_after_a_warm_start_harms_only_itself(steps):
    model, x = Tailored(mlp(), explodes, adapt=Weights(), steps=2, lr=0.02), queries()
    start = model.replace(steps=steps).tailor(x)
    good = model.predict(x, model.tailor(x, start=start))
    x[1, 0] = 100.0
    trace = model.trace(x, start=start)
    assert trace.failed.tolist() == [False, True, False, False, False]
    keep = [0, 2, 3, 4]
    torch.testing.assert_close(trace.prediction[keep], good[keep], **EXACT)
    torch.testing.assert_close(trace.prediction[1], model.net(x)[1], **EXACT)


@pytest.mark.parametrize("adapt", [CN(nn.Tanh), Weights()], ids=repr)
def test_every_state_on_the_way_can_be_a_start(adapt):
    model, x = Tailored(mlp(), drift, adapt=adapt, steps=2, lr=0.02), queries()
    for steps, state in enumerate(model.states(x)):
        longer = model.predict(x, model.tailor(x, start=state))
        torch.testing.assert_close(longer, model.replace(steps=steps + 2)(x), **EXACT)


def test_a_long_roll_out_does_not_grow_its_state():
    model, x = Tailored(mlp(), drift, adapt=Weights(), steps=3, lr=1e-3), queries()
    state = None
    for _ in range(6):
        state = model.tailor(x, start=state)
    assert isinstance(state["2.weight"], Tensor)  # the matrix itself is smaller by now
    torch.testing.assert_close(model.predict(x, state), model.replace(steps=18)(x), **EXACT)


def test_a_state_can_be_saved_without_pickle():
    model, x = Tailored(mlp(), drift, adapt=Weights(), steps=1, lr=0.02), queries()
    buffer = io.BytesIO()
    with torch.no_grad():
        torch.save(model.tailor(x), buffer)
        buffer.seek(0)
        torch.testing.assert_close(model.predict(x, torch.load(buffer)), model(x), **EXACT)


def test_chunks_that_stop_at_different_steps_fit_together():
    x = queries(6)
    whole, cut = (Tailored(mlp(), drift, adapt=Weights(), steps=5, lr=0.03, stop=0.5, chunk=chunk).trace(x) for chunk in (None, 2))
    torch.testing.assert_close(cut.prediction, whole.prediction, **EXACT)


@pytest.mark.parametrize("adapt", [CN(nn.GRU), Weights()], ids=repr)
def test_chunks_are_joined_where_the_queries_are(adapt):
    torch.manual_seed(0)
    net, x = nn.GRU(3, 4, 2, batch_first=True).double(), torch.randn(5, 6, 3, dtype=torch.float64)
    whole, cut = (Tailored(net, size, adapt=adapt, lr=0.1, chunk=chunk)(x) for chunk in (None, 2))
    torch.testing.assert_close(cut, whole, **EXACT)


def test_answers_that_cannot_be_joined_are_told():
    class Odd(nn.Linear):
        def forward(self, x):
            return {"y": super().forward(x), "of": object()}

    with pytest.raises(TypeError, match="cannot join the parts of a object"):
        Tailored(Odd(4, 4).double(), lambda m, x: m(x)["y"].square().sum(1), adapt=Weights(how="loop"), chunk=2)(queries())


# Weights that are used otherwise than by the call of their layer


class TiedByHand(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mid = nn.Embedding(7, 5), nn.Linear(5, 5)

    def forward(self, x):
        return F.linear(torch.tanh(self.mid(self.embed(x).mean(1))), self.embed.weight)


class Listed(nn.Module):
    def __init__(self):
        super().__init__()
        self.scales, self.layer = nn.ParameterList([torch.randn(4), torch.randn(4)]), nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x * self.scales[0]) * self.scales[1]


class Sharing(nn.Module):
    """A layer below a module that has no rule, and used outside of it too."""

    def __init__(self, first: bool):
        super().__init__()
        inner = nn.Linear(4, 4)
        if first:
            self.lin = inner
        self.part = nn.Module()
        self.part.scale, self.part.lin = nn.Parameter(torch.randn(4)), inner
        self.part.forward = lambda x: self.part.lin(x * self.part.scale)
        if not first:
            self.lin = inner

    def forward(self, x):
        return self.lin(torch.tanh(self.part(x)))


def test_weights_tied_by_a_functional_call_are_right():
    torch.manual_seed(0)
    net, x = TiedByHand().double(), torch.tensor([[1, 2], [3, 3], [6, 0]])
    with pytest.warns(UserWarning, match=r"'embed\.weight' is used elsewhere"):
        assert_exact(net, x)


def test_parameter_lists_belong_to_their_parent():
    torch.manual_seed(0)
    assert_exact(Listed().double(), queries())


@pytest.mark.filterwarnings("ignore:Weights runs all of this model")
@pytest.mark.filterwarnings("ignore:.*weight_norm")
@pytest.mark.parametrize(
    "wrap", [parametrizations.weight_norm, parametrizations.orthogonal, nn.utils.weight_norm], ids=["parametrized", "orthogonal", "legacy"]
)
def test_reparametrised_layers_are_right(wrap):
    torch.manual_seed(0)
    assert_exact(nn.Sequential(wrap(nn.Linear(4, 4).double()), nn.Tanh(), nn.Linear(4, 3).double()), queries())


@pytest.mark.filterwarnings("ignore:Weights runs all of this model")
@pytest.mark.parametrize("first", [True, False])
def test_a_layer_shared_with_a_module_that_has_no_rule_is_right(first):
    torch.manual_seed(0)
    assert_exact(Sharing(first).double(), queries())


def test_a_patched_forward_is_seen():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 4)).double()
    plain = net[1].forward
    net[1].forward = lambda x: 3 * plain(x)
    assert_exact(net, queries(), lr=0.01)
    assert net[1].forward(torch.zeros(1, 6).double()) is not None  # it is still the patched one
    assert "forward" in vars(net[1])


def test_hooks_of_a_module_without_a_rule_run_once():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.PReLU(), nn.Linear(6, 4)).double()
    net[1].register_forward_hook(lambda m, args, out: 2 * out + 1)
    net[0].register_forward_pre_hook(lambda m, args: (args[0] * 2,))
    assert_exact(net, queries(), lr=0.01)


def test_spectral_weights_of_complex_numbers_are_adapted():
    class Spectral(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.out = nn.Parameter(torch.randn(3, dtype=torch.complex128)), nn.Linear(4, 4)

        def forward(self, x):
            return self.out(torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=4))

    torch.manual_seed(0)
    net, x = Spectral().double(), queries()
    with pytest.warns(UserWarning, match="weight belong to the model itself"):
        answers = [Tailored(net, size, adapt=Weights(how=how), steps=2, lr=0.05)(x) for how in ("rules", "loop")]
    torch.testing.assert_close(*answers, **EXACT)
    assert "weight" in Tailored(net, size, adapt=Weights(how="vmap")).tailor(x)


# Inputs and rows


class Positions(nn.Module):
    def __init__(self, lead: bool):
        super().__init__()
        self.tokens, self.places, self.norm, self.out, self.lead = (
            nn.Embedding(7, 6),
            nn.Embedding(4, 6),
            nn.LayerNorm(6),
            nn.Linear(6, 3),
            lead,
        )

    def forward(self, x):
        at = torch.arange(x.shape[1])
        return self.out(self.norm(self.tokens(x) + self.places(at[None] if self.lead else at)))


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
@pytest.mark.parametrize("lead", [True, False])
def test_positions_that_all_queries_share(rows, lead):
    torch.manual_seed(0)
    net, x = Positions(lead).double(), torch.arange(4 * rows).reshape(rows, 4) % 7
    assert_exact(net, x)
    assert_exact(
        net, x, lambda model, x: model(torch.stack([x, x.flip(1)], 1).flatten(0, 1)).unflatten(0, (-1, 2)).square().mean((1, 2, 3))
    )


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_language_models_are_tailored_in_all_their_weights(kind):
    torch.manual_seed(0)
    if kind == "bert":
        net = text_encoder().double().eval()
    else:
        from transformers import GPT2Config, GPT2Model

        net = GPT2Model(GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=2, n_head=2, use_cache=False)).double().eval()
    x = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 0]])
    target = torch.linspace(-1, 1, 24, dtype=torch.float64)
    models = [
        Tailored(net, lambda m, ids: (m(ids)[0].flatten(1) - target).square().mean(1), adapt=Weights(how=how), steps=2, lr=0.05)
        for how in ("rules", "loop")
    ]
    torch.testing.assert_close(models[0](x)[0], models[1](x)[0], **EXACT)


@pytest.mark.parametrize("adapt", [CN(nn.Tanh), Weights()], ids=repr)
@pytest.mark.parametrize("order", ["cat", "time first"])
def test_rows_that_do_not_follow_their_query_are_refused(adapt, order):
    class Disordered(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = mlp()

        def forward(self, x):
            if order == "cat":
                a, b = self.body(torch.cat([x, -x])).chunk(2)
                return a + b
            return self.body(x.transpose(0, 1).reshape(-1, 4)).reshape(3, -1, 4).sum(0)

    x = queries() if order == "cat" else queries(15).reshape(5, 3, 4)
    with pytest.raises(ValueError, match="not one query after the other"):
        Tailored(Disordered(), size, adapt=adapt)(x)


def test_a_norm_that_also_runs_without_queries():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.places, self.out = nn.LayerNorm(4), nn.Parameter(torch.randn(3, 4)), nn.Linear(4, 2)

        def forward(self, x):
            return self.out(self.norm(x) + self.norm(self.places))

    net, x = Both().double(), torch.randn(2, 3, 4, dtype=torch.float64)
    model = Tailored(net, size, adapt=CN(), lr=0.1)
    alone = torch.cat([model(x[i : i + 1]) for i in range(2)])
    torch.testing.assert_close(model(x), alone, **EXACT)


def test_other_arguments_and_other_precision_are_looked_at_again():
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.act = nn.Linear(4, 4), nn.Tanh()

        def forward(self, x, depth=2):
            for _ in range(depth):
                x = self.act(self.layer(x))
            return 2 * x

    model = Tailored(Deep(), lambda m, x, depth=2: m(x, depth=depth).square().sum(1), adapt=CN("act"), lr=0.1)
    x = torch.randn(3, 4)
    assert model(x, depth=2).shape == model(x, depth=3).shape
    model.net.double()  # the user's own module, behind our back
    assert model.tailor(x.double())["act:0.gamma"].dtype == torch.float64


def test_keyword_inputs_of_a_layer():
    class ByName(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.rnn = nn.Linear(3, 3), nn.GRU(3, 4, batch_first=True)

        def forward(self, x):
            return self.rnn(input=self.lin(input=x))[0]

    torch.manual_seed(0)
    assert_exact(ByName().double(), torch.randn(3, 4, 3, dtype=torch.float64))


def test_frozen_weights_and_modules_that_work_in_place():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 4)).double().requires_grad_(False)
    assert_exact(net, queries())


# Losses that use more than the call of the model


class Encodes(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList([nn.Linear(4, 6), nn.Linear(6, 6)]), nn.Linear(6, 3)

    def encode(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x

    def forward(self, x):
        return self.head(self.encode(x))


@pytest.mark.parametrize("adapt", [CN("blocks.0"), Weights()], ids=repr)
def test_methods_and_entries_run_with_the_state(adapt):
    torch.manual_seed(0)
    net, x = Encodes().double(), queries()

    def by_method(model, x):
        assert len(model.blocks) == 2
        return size(model, x) + model.encode(x).square().mean(1)

    def by_entries(model, x):
        hidden = torch.tanh(model.blocks[1](torch.tanh(model.blocks[0](x))))
        return size(model, x) + hidden.square().mean(1)

    answers = [Tailored(net, loss, adapt=adapt, steps=2, lr=0.1)(x) for loss in (by_method, by_entries)]
    torch.testing.assert_close(*answers, **EXACT)
    assert (answers[0] - Tailored(net, size, adapt=adapt, steps=2, lr=0.1)(x)).abs().max() > 1e-5


def test_a_loss_cannot_mistake_shared_weights_for_the_querys_own():
    with pytest.raises(ValueError, match="reads the weight 'weight' itself"):
        Tailored(mlp(), lambda m, x: size(m, x) + m[0].weight.square().sum(), adapt=Weights())(queries())
    Tailored(mlp(), lambda m, x: size(m, x) + m[0].weight.square().sum(), adapt=CN(nn.Tanh))(queries())


class WithToken(nn.Module):
    """Parameters of the model's own, as most vision transformers have."""

    def __init__(self):
        super().__init__()
        self.token, self.body, self.head = nn.Parameter(torch.randn(4)), nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x + self.token)))


def test_a_chosen_part_has_its_rules_whatever_else_the_model_holds():
    torch.manual_seed(0)
    net, x = WithToken().double(), queries()
    assert_exact(net, x, at=("head",))
    assert isinstance(Tailored(net, size, adapt=Weights("head"), lr=0.1).tailor(x)["head.weight"], LowRank)
    assert (
        repr(Tailored(net, size, adapt=Weights("head"), steps=2).tailor(x)["head.weight"])
        == f"LowRank(rows={len(x)}, shape=(3, 6), rank=2)"
    )
    with pytest.warns(UserWarning, match=r"token belong to the model itself.*Weights\('body', 'head'\) adapts all others by their rules"):
        assert_exact(net, x)  # all of it: copies
    with pytest.warns(UserWarning, match="under torch.func.vmap"):
        assert_exact(net, x, lambda m, x: size(m, x) + m.body(x).square().mean(1) + m.output_of("body", x).mean(1))


def test_optimisers_that_need_tensors_say_so():
    with pytest.raises(ValueError, match="needs a state of tensors"):
        Tailored(mlp(), drift, adapt=Weights(), optimizer=LBFGS())
    losses = Tailored(mlp(), drift, adapt=Weights(how="vmap"), optimizer=LBFGS(), steps=8).trace(queries()).losses
    assert (losses.min(0).values < 0.5 * losses[0]).all()


def test_a_compiled_model_cannot_be_looked_into():
    with pytest.raises(ValueError, match="compile the tailored one"):
        Tailored(torch.compile(mlp()), drift)


def test_outer_gradients_stay_finite_when_a_rule_meets_a_bad_query():
    net, x = nn.Sequential(nn.Linear(4, 6), nn.PReLU(), nn.LayerNorm(6), nn.Linear(6, 4)).double(), queries()
    x[3, 0] = 100.0
    for backprop in ("none", "last", "all"):
        model = Tailored(net, explodes, adapt=Weights(), steps=2, lr=0.01, backprop=backprop)
        grads = torch.autograd.grad(sum(outer_losses(model, summed_error, x, x)), list(net.parameters()))
        assert all(g.isfinite().all() for g in grads)
