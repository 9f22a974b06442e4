"""Bad input gets a clear error before anything is touched."""

from __future__ import annotations

import math
import re

import pytest
import torch
from nets import data, drift, energy, mlp, queries, small, to_one
from torch import nn
from torch.func import jacrev, jvp, vmap
from torch.nn.utils.parametrizations import spectral_norm

from tailoring import CN, LBFGS, Descent, Inputs, Shift, Tailored, Weights, outer_losses, tune
from tailoring.baselines import Shared
from tailoring.losses import Entropy


def tailored(loss=drift, net=None, **options) -> Tailored:
    return Tailored(mlp() if net is None else net, loss, **({"adapt": CN(nn.Tanh)} | options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": -1}, "steps must be a whole number"),
        ({"steps": 1.5}, "steps must be a whole number"),
        ({"lr": -1e-3}, "lr must not be negative"),
        ({"lr": float("nan")}, "lr must not be negative"),
        ({"lr": [1e-3, -1.0], "steps": 2}, "lr must not be negative"),
        ({"lr": [1e-3], "steps": 2}, "lr has 1 step sizes for 2 steps"),
        ({"lr": torch.ones(3), "steps": 4}, "lr has 3 step sizes for 4 steps"),
        ({"lr": torch.ones(2, 2)}, "a tensor lr has no dimension"),
        ({"momentum": 1.0}, "momentum must lie"),
        ({"clip": 0.0}, "clip must be positive"),
        ({"proximal": -1.0}, "proximal must not be negative"),
        ({"backprop": "first"}, "backprop must be one of"),
        ({"keep": "first"}, "keep must be one of"),
        ({"chunk": 0}, "chunk must be a positive"),
        ({"chunk": True}, "chunk must be a positive"),
        ({"chunk": 2, "adapt": Shared()}, "adapts to the batch as a whole"),
    ],
)
def test_settings_are_checked_at_once(options, message):
    with pytest.raises(ValueError, match=message):
        tailored(**options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Tailored(lambda x: x, drift), "must be a torch.nn.Module"),
        (lambda: Tailored(mlp(), "drift"), "must be a function"),
        (lambda: tailored(adapt=CN), "adapt must be an adapter"),
        (lambda: tailored(adapt="CN"), "adapt must be an adapter"),
        (lambda: tailored(optimizer=object()), "needs init"),
        (lambda: tailored(optimizer=LBFGS), r"an object, LBFGS\(...\), not the class"),
        (lambda: tailored(Entropy), r"an object, Entropy\(...\), not the class"),
        (lambda: tailored(optimizer=torch.optim.SGD([torch.zeros(1)], 0.1)), "needs init"),
        (lambda: CN(3), "chosen by name, pattern or type"),
        (lambda: Weights(nn.Linear(1, 1)), "chosen by name, pattern or type"),
    ],
)
def test_wrong_kinds_are_told(make, message):
    with pytest.raises(TypeError, match=message):
        make()


def test_lbfgs_checks_its_settings():
    with pytest.raises(ValueError, match="first_step > 0"):
        LBFGS(first_step=0.0)


@pytest.mark.usefixtures("seeded")
@pytest.mark.parametrize("settings", [{"momentum": 0.5}, {"clip": 1.0}, {"proximal": 0.1}], ids=str)
def test_another_optimiser_takes_no_settings_of_the_descent(settings):
    with pytest.raises(ValueError, match="are gradient descent's"):
        Tailored(small(), to_one, optimizer=LBFGS(), **settings)


@pytest.mark.usefixtures("seeded")
@pytest.mark.parametrize("name", ["lr", "momentum", "clip", "proximal"])
def test_settings_of_the_descent_are_not_attributes(name):
    with pytest.raises(AttributeError, match=rf"model.replace\({name}=...\)"):
        setattr(Tailored(small(), to_one), name, 0.5)


@pytest.mark.parametrize(
    ("adapt", "message"),
    [
        (CN("layer9"), "no module matches 'layer9'; the model has: 0 \\(Linear\\)"),
        (CN(nn.Conv2d), "no module matches Conv2d; the model has"),
        (CN(nn.Tanh, "nothing.*"), "no module matches 'nothing.\\*'"),
        (Weights("layer9"), "no module or parameter matches 'layer9'"),
        (Weights("1"), "chooses no parameters"),
        (Shift("layer9"), "no module matches 'layer9'"),
        (Shift(nn.Tanh), "Shift moves the output of one module"),
    ],
    ids=repr,
)
def test_a_site_that_does_not_exist_is_told_with_those_that_do(adapt, message):
    with pytest.raises(ValueError, match=message):
        tailored(adapt=adapt)(queries())


def test_a_model_without_norms_or_activations_asks_for_names():
    with pytest.raises(ValueError, match="name the modules to adapt"):
        tailored(net=nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double(), adapt=CN())(queries())


def test_a_module_that_never_runs_is_told():
    net = mlp()
    net.idle = nn.ReLU()
    net.forward = lambda x: net[2](net[1](net[0](x)))
    with pytest.raises(ValueError, match="in this forward pass"):
        tailored(net=net, adapt=CN("idle"))(queries())


@pytest.mark.parametrize(
    ("loss", "kind", "message"),
    [
        (lambda model, x: drift(model, x).mean(), ValueError, "keep one value per query instead of their mean"),
        (lambda model, x: drift(model, x)[:-1], ValueError, r"shape \(5,\), but its shape is \(4,\)"),
        (lambda model, x: model(x), ValueError, r"but its shape is \(5, 4\)"),
        (lambda model, x: 1.0, TypeError, "must return a tensor"),
        (lambda model, x: (model(x) > 0).sum(1), TypeError, "floating-point"),
        (lambda model, x: x.square().sum(1), ValueError, "does not depend on the state"),
        (lambda model, x: model(x).detach().sum(1), ValueError, "does not depend on the state"),
        (lambda model, x: x.requires_grad_().sum(1), ValueError, "does not depend on the state"),
        (lambda model, x: model.output_of("nowhere", x).sum(1), ValueError, "the model has no module 'nowhere'; it has: 0, 1"),
        (lambda model, x: model(torch.cat([x, x[:1]])).sum(1)[:5], ValueError, "6 rows are not a multiple of 5 queries"),
    ],
)
@pytest.mark.parametrize("adapt", [CN(nn.Tanh), Weights()], ids=repr)
def test_a_wrong_loss_is_told(loss, kind, message, adapt):
    net = mlp()
    before = {k: v.clone() for k, v in net.state_dict().items()}
    with pytest.raises(kind, match=message):
        tailored(loss, net, adapt=adapt)(queries())
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    assert not any(m._forward_hooks for m in net.modules())


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.BatchNorm1d(4), "in training mode.*BatchNorm layers alone in eval mode"),
        (nn.BatchNorm1d(4, track_running_stats=False).eval(), "keeps no running statistics"),
        (nn.Dropout(0.5), "drops units in training mode"),
        (spectral_norm(nn.Linear(4, 4)), "_SpectralNorm.* in training mode: it would change its statistics"),
        (
            nn.Sequential(nn.Unflatten(1, (2, 2)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten()),
            "InstanceNorm1d.* its statistics",
        ),
    ],
    ids=["batchnorm", "no statistics", "dropout", "spectral norm", "instance norm"],
)
def test_layers_that_mix_queries_or_draw_masks_are_refused(layer, message):
    net = nn.Sequential(nn.Linear(4, 4), layer, nn.Tanh(), nn.Linear(4, 4)).double()
    before = {k: v.clone() for k, v in net.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        tailored(net=net)(queries())
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())  # no statistics were touched
    tailored(net=net, steps=0)(queries())  # the plain model may train as it likes
    if layer.training:
        tailored(net=net.eval())(queries())


def test_the_modules_of_a_loss_must_not_mix_queries_either():
    class Headed(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.BatchNorm1d(4).double()

        def forward(self, model, x):
            return self.head(model(x)).square().sum(1)

    with pytest.raises(ValueError, match=r"head \(BatchNorm1d\) is in training mode"):
        tailored(Headed())(queries())


def test_recurrent_dropout_is_refused():
    with pytest.raises(ValueError, match="drops units"):
        tailored(net=nn.LSTM(4, 4, num_layers=2, dropout=0.5, batch_first=True), adapt=CN())(torch.randn(2, 3, 4))
    with pytest.raises(ValueError, match="drops units"):
        tailored(net=nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True), adapt=CN())(torch.randn(2, 3, 4))


@pytest.mark.parametrize("adapt", [CN(nn.Tanh), Weights(), Shift("2")], ids=repr)
def test_an_empty_batch_gets_an_empty_prediction(adapt):
    model, x = tailored(adapt=adapt), queries()[:0]
    assert model(x).shape == (0, 4)
    assert model.predict(x, model.tailor(x)).shape == (0, 4)
    assert [y.shape for y in model.path(x)] == [(0, 4)] * 2
    with pytest.raises(ValueError, match="empty batch"):
        model.trace(x)


def test_inputs_must_share_their_rows():
    with pytest.raises(ValueError, match=r"one row per query, but the shapes are \[\(5, 4\), \(3, 4\)\]"):
        tailored()(queries(5), queries(3))
    with pytest.raises(ValueError, match="holds no tensor"):
        tailored()(3.0)
    assert "(5, 4)" in repr(Inputs(queries()))


def test_a_state_of_another_model_or_batch_is_refused():
    model, x = tailored(), queries()
    state = model.tailor(x)
    with pytest.raises(ValueError, match="a state of this model has the names"):
        model.predict(x, {"0.gamma": state["1.gamma"]})
    with pytest.raises(ValueError, match="a state of this model has the names"):
        model.predict(x, [1])
    with pytest.raises(ValueError, match=r"has shape \(5, 2\)"):
        model.predict(x, {name: t[:, :2] for name, t in state.items()})
    with pytest.raises(ValueError, match=r"expected 5 row\(s\)"):
        model.tailor(x, start={name: t[:2] for name, t in state.items()})
    with pytest.raises(ValueError, match="not a multiple of"):
        model.predict(x, {name: t[:2] for name, t in state.items()})


def test_a_rate_for_every_name_is_needed():
    with pytest.raises(ValueError, match=r"lr names no step size for '1\.beta'"):
        tailored(lr={"*.gamma": 0.1})(queries())


@pytest.mark.usefixtures("seeded")
def test_of_patterns_the_first_counts_and_one_that_never_does_is_refused():
    x, _ = data()
    for lr in ({"*": 1e-3, "*.gamma": 1e-1}, {"*.gama": 0.1, "*": 1e-3}):
        with pytest.raises(ValueError, match=r"the step size of nothing .* the state has: 1.gamma, 1.beta"):
            Tailored(small(), to_one, lr=lr)(x)
    model = Tailored(small(), to_one, lr={"*.gamma": 1e-1, "*": 1e-3}).prepare(x)
    assert (model.rule.rate("1.gamma", 0), model.rule.rate("1.beta", 0)) == (1e-1, 1e-3)


def test_vmap_failures_tell_of_the_loop():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            y = self.layer(x)
            return y if y.sum() > 0 else 2 * y

    net = Branches().double()
    with pytest.raises(RuntimeError, match=r"Weights\(..., how='loop'\)"):
        tailored(net=net, adapt=Weights(how="vmap"))(queries())
    assert tailored(net=net, adapt=Weights(how="loop"))(queries()).isfinite().all()


def test_an_error_of_the_models_own_is_not_disguised():
    class Breaks(nn.Linear):
        def forward(self, x):
            raise RuntimeError("my own")

    with pytest.raises(RuntimeError) as raised:
        tailored(net=Breaks(4, 4), adapt=Weights())(queries())
    assert str(raised.value) == "my own"


def of_a_pair(net, x, dt):
    return net(x * dt).sum(1)


@pytest.mark.parametrize(
    ("run", "kind", "words"),
    [
        (lambda: tailored()(queries(3, 5)), RuntimeError, r"a first look at the model, .* a tensor of shape \(3, 5\)"),
        (lambda: tailored()(queries()[0]), RuntimeError, r"shape \(4,\); if that is one query, a batch of it is x\[None\]"),
        (lambda: tailored()((queries(), queries())), TypeError, r"several inputs go in one by one, model\(\*x\)"),
        (lambda: tailored().trace(queries(), queries()), TypeError, r"trace takes all inputs of the model as one, Inputs\("),
        (lambda: tailored()(queries().numpy()), ValueError, r"the input \(ndarray\) holds no tensor .* torch.from_numpy"),
        (lambda: tailored(nn.functional.mse_loss)(queries()), AttributeError, r"'mse_loss' was called as loss\(model, x\)"),
        (lambda: tailored(lambda out, x: (out - x).sum(1))(queries()), TypeError, "it gets no labels and no prediction"),
        (lambda: tailored(of_a_pair)(queries()), TypeError, r"'of_a_pair' was called as loss\(model, x\), .* shape \(5, 4\)"),
        (lambda: tailored(lambda m, x: setattr(m, "note", 1))(queries()), AttributeError, "sets no attribute of the model"),
        (lambda: tailored(lr={"gamma": 0.1})(queries()), ValueError, r"patterns such as '\*\.gamma'"),
        (lambda: next(outer_losses(mlp(), nn.functional.mse_loss, queries(), queries())), TypeError, "a model that tailors"),
        (lambda: tune(tailored(), (queries(), queries()), nn.functional.mse_loss), TypeError, r"a single one is \[\(x, y\)\]"),
        (lambda: tune(tailored(), [], nn.functional.mse_loss, lrs=0.1), TypeError, r"such as \[0.1\]"),  # type: ignore[arg-type]
    ],
)
def test_a_first_mistake_is_told_with_what_was_given(run, kind, words):
    with pytest.raises(kind) as raised:
        run()
    assert re.search(words, "\n".join([str(raised.value), *getattr(raised.value, "__notes__", [])]))


@pytest.mark.parametrize("adapt", [CN(nn.Tanh), Weights(), Shift("1")], ids=repr)
@pytest.mark.parametrize("one", [lambda m: m, lambda m: lambda z: m(z[None])[0], jacrev], ids=["as it is", "as a batch", "its derivative"])
def test_a_loss_that_maps_the_model_over_queries_is_refused(adapt, one):
    """Whose state a row takes would not be known, or taken for that of its channels."""
    with pytest.raises(ValueError, match="maps the model over single queries"):
        tailored(lambda model, x: vmap(one(model))(x).flatten(1).square().sum(1), adapt=adapt, steps=1)(queries())


def test_a_loss_may_map_the_model_over_something_else():
    noise, x = queries(3 * 5).view(3, 5, 4), queries()
    mapped = tailored(lambda model, x: vmap(lambda e: energy(model(x + e)))(noise).sum(0), steps=2, lr=1e-2)
    in_turn = tailored(lambda model, x: sum(energy(model(x + e)) for e in noise), steps=2, lr=1e-2)
    torch.testing.assert_close(mapped(x), in_turn(x))
    pushed = tailored(lambda model, x: vmap(lambda v: energy(jvp(model, (x,), (v,))[1]))(noise).sum(0), steps=2, lr=1e-2)
    in_turn = tailored(lambda model, x: sum(energy(jvp(model, (x,), (v,))[1]) for v in noise), steps=2, lr=1e-2)
    torch.testing.assert_close(pushed(x), in_turn(x))


def test_recurrent_weights_want_padded_batches():
    packed = nn.utils.rnn.pack_sequence([torch.randn(3, 4)])

    class Packs(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.GRU(4, 4, batch_first=True)

        def forward(self, x):
            return self.rnn(packed)[0].data[:1] + x

    with pytest.raises(ValueError, match="padded sequences"):
        tailored(lambda model, x: model(x).sum(1), Packs(), adapt=Weights(how="vmap"))(torch.randn(2, 4))


def test_small_mistakes_are_named():
    x = queries()
    with pytest.raises(ValueError, match="does not depend on the state: call the model that the loss is given"):
        Tailored(mlp(), lambda model, x: x.square().sum(1), adapt=Weights())(x)
    with pytest.raises(ValueError, match="the model has: no modules inside it"):
        Tailored(nn.Linear(4, 4).double(), drift, adapt=CN("layer"))(x)
    with pytest.raises(TypeError, match="lr must be a number, or one for each step, not 'a'"):
        Tailored(mlp(), drift, lr="a")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"optimizer": LBFGS(), "lr": 0.5}, "lr, momentum, clip and proximal are gradient descent's"),
        ({"optimizer": Descent(0.1), "lr": torch.ones(2)}, "lr, momentum, clip and proximal are gradient descent's"),
        ({"stop": "soon"}, "stop must be a value of the tailoring loss, a number, not 'soon'"),
        ({"stop": math.nan}, "stop must be a value of the tailoring loss, a number, not nan"),
        ({"compile": "max-autotune"}, "compile must be True, False or a dict of options"),
        ({"compile": {"fullgraph": True}}, "compile sets 'fullgraph' itself"),
    ],
    ids=str,
)
def test_settings_that_make_no_sense_are_told_at_once(settings, words):
    with pytest.raises((TypeError, ValueError), match=words):
        Tailored(mlp(), drift, **settings)


def test_a_model_that_saves_something_as_tailoring_is_refused():
    """Its checkpoint could not be told from ours."""
    net = mlp()
    net.add_module("tailoring", nn.Linear(1, 1))
    learned = Tailored(mlp(), drift, adapt=CN(nn.Tanh, learned_start=True))
    for model in (net, learned):
        with pytest.raises(ValueError, match="saves something under the name 'tailoring'"):
            Tailored(model, drift)
    within = Tailored(Tailored(mlp(), drift, adapt=CN(nn.Tanh)), drift, adapt=CN("1"))
    within.load_state_dict(within.state_dict())


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (lambda: torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)], layout=torch.jagged), "a nested tensor, whose rows"),
        (lambda: torch.eye(4).double().to_sparse(), "layout torch.sparse_coo"),
        (lambda: torch.empty(3, 4, device="meta", dtype=torch.float64), "on the meta device"),
    ],
    ids=["nested", "sparse", "meta"],
)
def test_inputs_that_are_no_dense_numbers_are_told(x, words):
    with pytest.raises(ValueError, match=words):
        tailored()(x())


@pytest.mark.parametrize("transform", [lambda m: torch.func.grad(lambda x: m(x).sum()), jacrev, vmap], ids=["grad", "jacrev", "vmap"])
@pytest.mark.parametrize("adapt", [CN(nn.Tanh), Weights(how="vmap"), Shift("1")], ids=repr)
def test_transforms_of_a_tailored_model_are_told(transform, adapt):
    model, x = tailored(adapt=adapt), queries()
    model(x)
    with pytest.raises(RuntimeError) as caught:
        transform(model)(x[None] if transform is vmap else x)
    assert any("torch.func cannot transform a Tailored" in note for note in caught.value.__notes__)


def test_to_export_it_is_refused():
    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = tailored()

        def forward(self, x):
            return self.model(x)

    with pytest.raises(RuntimeError, match=r"torch\.export cannot take"):
        torch.export.export(Around(), (queries(),), strict=False)


@pytest.mark.parametrize(
    ("name", "value"), [("keep", "bset"), ("backprop", 1), ("steps", -1), ("chunk", 0), ("stop", "never"), ("adapt", CN)]
)
def test_settings_are_checked_when_they_change_later(name, value):
    model = tailored()
    before = getattr(model, name)
    with pytest.raises((ValueError, TypeError), match=name):
        setattr(model, name, value)
    assert getattr(model, name) is before


@pytest.mark.parametrize("loss", [drift, Entropy()], ids=["function", "module"])
def test_another_loss_makes_another_model(loss):
    model = tailored()
    with pytest.raises(AttributeError, match=r"model.replace\(loss=...\)"):
        model.loss = loss
    assert model.state_dict().keys() == model.net.state_dict().keys()


@pytest.mark.parametrize("seeds", [[1, 2, 3, 4, 5], torch.ones(5), torch.ones(4, dtype=torch.int64)], ids=["list", "floats", "too few"])
def test_seeds_are_checked(seeds):
    with pytest.raises(ValueError, match=r"seeds must be a tensor of int64, of shape \(5,\), not"):
        tailored().tailor(queries(), seeds=seeds)


@pytest.mark.parametrize("rows", [1, 3, 7])
def test_rows_that_a_state_cannot_serve_are_refused_at_once(rows):
    model = tailored()
    state = model.tailor(queries())
    with pytest.raises(
        ValueError, match=f"the state has 5 rows, and {rows} rows to answer are not a multiple"
    ):  # a warning would be an error
        model.predict(queries(rows), state)


def test_a_state_of_another_shape_is_refused_with_what_was_expected():
    model, x = tailored(), queries()
    state = {name: entry[:, :1] for name, entry in model.tailor(x).items()}
    with pytest.raises(ValueError, match=r"expected rows of shape \(6,\)"):
        model.predict(x, state)


@pytest.mark.parametrize(
    ("options", "name", "value", "message"),
    [
        ({"optimizer": LBFGS()}, "adapt", Weights(), "needs a state of tensors"),
        ({"optimizer": LBFGS()}, "backprop", "all", "cannot be differentiated"),
        ({"backprop": "all", "recompute": True}, "backprop", "none", "recompute=True saves"),
        ({}, "recompute", True, "recompute=True saves"),
        ({"lr": [0.1, 0.1], "steps": 2}, "steps", 3, "lr has 2 step sizes"),
    ],
)
def test_settings_that_do_not_go_together_are_refused_later_too(options, name, value, message):
    model = tailored(**options)
    with pytest.raises(ValueError, match=message):
        setattr(model, name, value)
