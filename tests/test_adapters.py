"""Where adapters act, and on what."""

from __future__ import annotations

import pytest
import torch
from nets import BasicBlock, Recurrent, ResNet, architecture, drift, float_mlp, mlp, queries
from torch import nn
from torch.nn import functional as F

from tailoring import CN, LBFGS, Shift, Tailored, Weights
from tailoring.baselines import Output, Shared
from tailoring.nn import ResidualMLP


def names(adapt, model, x):
    return [site.key for site in adapt.sites(model, x)]


def test_cn_adapts_norm_layers_if_there_are_any():
    net, (x,), _ = architecture("resnet")
    assert set(names(CN(), net, x)) == {n for n, m in net.named_modules() if isinstance(m, nn.BatchNorm2d)}


def test_cn_adapts_hidden_activations_otherwise_but_not_the_last():
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4), nn.Sigmoid()).double()
    assert names(CN(), net, queries()) == ["1", "3"]


def test_cn_adapts_a_recurrent_layer_without_norms_or_activations():
    net, (x,), _ = architecture("gru")
    assert set(names(CN(), net, x)) == {"rnn"}


def test_cn_finds_the_norm_layers_of_a_transformers_model_of_the_users_own_kind():
    class LlamaRMSNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(6))

        def forward(self, x):
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True)) * self.weight

    net = nn.Sequential(nn.Linear(4, 6), LlamaRMSNorm(), nn.Linear(6, 4))
    (site,) = CN().sites(net, torch.randn(2, 5, 4))
    assert (site.key, site.channels, site.shape) == ("1", 2, (6,))


@pytest.mark.parametrize(
    ("layers", "shape", "channels"),
    [
        ([nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)], (3,), 1),
        ([nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1)], (3, 5, 6), 1),
        ([nn.Conv1d(3, 4, 3), nn.ReLU(), nn.Conv1d(4, 2, 1)], (3, 7), 1),
        ([nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)], (7, 3), 2),
        ([nn.Conv3d(3, 4, 2), nn.ReLU(), nn.Conv3d(4, 2, 1)], (3, 3, 3, 3), 1),
        ([nn.Embedding(9, 4), nn.GELU(), nn.Linear(4, 2)], (5,), 2),
    ],
    ids=["B,C", "B,C,H,W", "B,C,L", "B,T,C", "B,C,D,H,W", "embedding"],
)
def test_the_channels_are_found(layers, shape, channels):
    net = nn.Sequential(*layers)
    x = torch.randint(0, 9, (2, *shape)) if isinstance(net[0], nn.Embedding) else torch.randn(2, *shape)
    (site,) = CN().sites(net, x)
    assert (site.channels, site.shape, site.rows) == (channels, (4,), 0)
    hidden = net[1](net[0](x))
    state = CN().init(net, (site,), 2)
    state = {"1.gamma": state["1.gamma"] * torch.tensor([1.0, 2.0])[:, None], "1.beta": state["1.beta"] + torch.arange(4.0)}
    shape = [1] * hidden.ndim
    shape[channels] = 4
    expected = torch.stack([h * (1.0 + i) for i, h in enumerate(hidden)]) + torch.arange(4.0).reshape(shape)
    torch.testing.assert_close(CN().edit(hidden, site, state), expected)


class LayerNorm2d(nn.LayerNorm):
    """As torchvision and timm have it, for ConvNeXt."""

    def forward(self, x):
        return F.layer_norm(x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps).permute(0, 3, 1, 2)


class ChannelsFirst(nn.Module):
    """As ConvNeXt's authors have it; a norm by its name."""

    def __init__(self, channels):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))

    def forward(self, x):
        centred = x - x.mean(1, keepdim=True)
        return self.weight[:, None, None] * centred / (centred.square().mean(1, keepdim=True) + 1e-6).sqrt() + self.bias[:, None, None]


class LayerNormOfMine(ChannelsFirst):
    def forward(self, x):
        return F.layer_norm(x, (x.shape[-1],), self.weight, self.bias)


class ChannelsFirstNorm(ChannelsFirst):
    pass


class Turned(nn.Module):
    """A block of ConvNeXt's: linear layers within, the channels first without."""

    def __init__(self, channels):
        super().__init__()
        self.norm, self.lin = nn.LayerNorm(channels), nn.Linear(channels, channels)

    def forward(self, x):
        return x + self.lin(self.norm(x.permute(0, 2, 3, 1))).permute(0, 3, 1, 2)


@pytest.mark.parametrize(
    ("layers", "at", "dimension", "told_by"),
    [
        ([LayerNorm2d(6)], (), 1, "itself"),
        ([ChannelsFirstNorm(6)], (), 1, "itself"),
        ([nn.Conv2d(6, 6, 1), ChannelsFirstNorm(6)], ("1",), 1, "itself"),
        ([nn.Conv2d(6, 6, 1), Turned(6)], (nn.LayerNorm,), 3, "itself"),
        ([Turned(6)], ("0",), 1, "those before"),
        ([Turned(6), nn.ReLU()], (nn.ReLU,), 1, "those before"),
    ],
    ids=["LayerNorm2d", "a plain module", "after a convolution", "within a block", "a block", "after a block"],
)
def test_layers_that_turn_their_input_have_the_channels_where_their_weights_are(layers, at, dimension, told_by):
    pixels = [(5, 9), (9, 5), (6, 5)] + ([(5, 6), (6, 6)] if told_by == "itself" else [])
    for shape in pixels:
        (site,) = CN(*at).sites(nn.Sequential(*layers, nn.Conv2d(6, 2, 1)), torch.randn(2, 6, *shape))
        assert (site.channels, site.shape) == (dimension, (6,)), shape


@pytest.mark.parametrize("pixels", [6, 7])
def test_a_users_layer_norm_of_the_last_dimension_is_one(pixels):
    (site,) = CN().sites(nn.Sequential(nn.Linear(4, 6), LayerNormOfMine(6), nn.Linear(6, 2)), torch.randn(3, pixels, 4))
    assert (site.channels, site.shape) == (2, (6,))


class Normalizer(nn.Module):
    def __init__(self, mean, std):
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean))
        self.register_buffer("std", torch.tensor(std))

    def forward(self, x):
        return (x - self.mean) / self.std


def test_fixed_means_and_deviations_are_no_norm_layer():
    net = nn.Sequential(Normalizer(300.0, 25.0), nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3), Normalizer(-12.0, 0.04))
    assert names(CN(), net, torch.randn(2, 3)) == ["2"]


class Headed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.act, self.rotation = nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4)

    def forward(self, x):
        return self.act(self.body(x))


@pytest.mark.parametrize("at", [("body", "rotation"), ("body", "rot*"), (nn.Tanh, "rotation")])
def test_every_module_that_is_named_must_run(at):
    with pytest.raises(ValueError, match=r"rotation of CN.* cannot be adapted: it does not run when the model answers"):
        CN(*at).sites(Headed(), torch.randn(2, 3))


def test_of_a_pattern_one_that_runs_will_do():
    assert names(CN("body", "*t*"), Headed(), torch.randn(2, 3)) == ["body", "act"]


def test_channels_can_be_told_and_must_be_where_nothing_tells():
    class Square(nn.Module):
        def forward(self, x):
            return x.square()

    net = nn.Sequential(Square(), nn.Flatten(), nn.Linear(12, 2))
    x = torch.randn(2, 3, 4)
    with pytest.raises(ValueError, match="which dimension of the output of '0'"):
        CN("0").sites(net, x)
    assert CN("0", channels=-1).sites(net, x)[0].shape == (4,)
    assert CN("0", channels=1).sites(net, x)[0].shape == (3,)
    with pytest.raises(ValueError, match="holds the queries"):
        CN("0", channels=0).sites(net, x)


def test_the_queries_are_found_in_the_second_dimension():
    net, (x,), _ = architecture("sequence-first")
    assert {site.rows for site in CN().sites(net, x)} == {1}


@pytest.mark.parametrize("use", ["sequence", "last"])
def test_the_last_hidden_state_of_a_gru_is_adapted_with_its_sequence(use):
    net = Recurrent(use).double()
    x = torch.randn(2, 5, 3, dtype=torch.float64)
    adapt = CN("rnn")
    sites = adapt.sites(net, x)
    state = adapt.init(net, sites, 2)
    assert list(state) == ["rnn.gamma", "rnn.beta"]
    state["rnn.beta"] = state["rnn.beta"] + 1
    model = Tailored(net, drift, adapt=adapt)
    torch.testing.assert_close(model.predict(x, state), net.head(net.rnn(x)[0][:, -1] + 1))


def test_a_module_that_runs_twice_has_a_pair_for_each_call():
    torch.manual_seed(0)
    net = BasicBlock(3, 3, 1).double().eval()
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    adapt = CN("relu")
    assert names(adapt, net, x) == ["relu:0", "relu:1"]
    state = adapt.init(net, adapt.sites(net, x), 2)
    state["relu:1.beta"] = state["relu:1.beta"] + 5
    torch.testing.assert_close(Tailored(net, drift, adapt=adapt).predict(x, state), net(x) + 5)


def test_a_module_that_runs_more_often_than_seen_is_refused():
    class Repeats(nn.Module):
        times = 1

        def __init__(self):
            super().__init__()
            self.act = nn.Tanh()

        def forward(self, x):
            for _ in range(self.times):
                x = self.act(x)
            return 2 * x

    net = Repeats()
    model = Tailored(net, drift, adapt=CN("act"))
    model(queries())
    net.times = 2
    with pytest.raises(RuntimeError, match="ran more often"):
        model(queries())


def test_modules_are_chosen_by_type_name_and_pattern():
    net, (x,), _ = architecture("resnet")
    assert set(names(CN("layer1.*"), net, x)) >= {"layer1.bn1", "layer1.conv1"}
    assert names(CN("layer2"), net, x) == ["layer2"]
    assert set(names(CN("bn", nn.Conv2d), net, x)) == {"bn"} | {n for n, m in net.named_modules() if isinstance(m, nn.Conv2d)}
    assert {site.key for site in Weights("layer2").sites(net, x)} == {n for n, _ in net.named_parameters() if n.startswith("layer2.")}
    assert {site.key for site in Weights(nn.Linear).sites(net, x)} == {"fc.weight", "fc.bias"}
    assert {site.key for site in Weights("*.bias").sites(net, x)} == {n for n, _ in net.named_parameters() if n.endswith(".bias")}


def test_augmented_rows_share_their_querys_state():
    net, x = mlp(), queries(3)
    model = Tailored(
        net, lambda model, x: model(x.repeat_interleave(4, 0)).unflatten(0, (3, 4)).square().mean((1, 2)), adapt=CN(nn.Tanh), lr=1e-2
    )
    one = Tailored(net, lambda model, x: model(x).square().mean(1), adapt=CN(nn.Tanh), lr=1e-2)
    torch.testing.assert_close(model(x), one(x))


@pytest.mark.parametrize("adapt", [CN(nn.Tanh), Weights(), Weights(how="loop"), Shift("0"), Output()], ids=repr)
def test_a_state_serves_several_rows_of_its_query(adapt):
    model, x = Tailored(mlp(), drift, adapt=adapt, lr=1e-2), queries(3)
    state = model.tailor(x)
    rows = model.predict(x.repeat_interleave(2, 0), state)
    torch.testing.assert_close(rows, model(x).repeat_interleave(2, 0))


class OneNumber(nn.Module):
    """An answer without dimensions of its own, and a parameter without any."""

    def __init__(self):
        super().__init__()
        self.body, self.scale = float_mlp(out=1), nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return self.scale * self.body(x).squeeze(-1)


@pytest.mark.parametrize(
    "settings",
    [
        *({"lr": 1e-2, **more} for more in ({}, {"momentum": 0.9}, {"clip": 0.1}, {"stop": 1e-9}, {"keep": "best"}, {"backprop": "all"})),
        {"optimizer": LBFGS()},
    ],
)
@pytest.mark.parametrize("adapt", [Output(), Weights(how="vmap"), Weights()], ids=repr)
def test_a_query_may_own_a_single_number(adapt, settings):
    if "optimizer" in settings and adapt.outer_products:
        pytest.skip("L-BFGS needs a state of tensors")
    x = torch.randn(4, 3)
    broken = x.clone()
    broken[2] = torch.nan
    net = OneNumber()
    adapt = Weights("scale", how=adapt.how) if isinstance(adapt, Weights) else adapt  # the rest has a test of its own, and warns
    model = Tailored(net, lambda m, x: (m(x) - x.sum(1)).square(), adapt=adapt, steps=3, **settings)
    answers, trace = model(broken), model.trace(x)
    assert (trace.losses[-1] < trace.losses[0]).all()
    torch.testing.assert_close(trace.prediction, model(x))
    torch.testing.assert_close(answers[[0, 1, 3]], model(x)[[0, 1, 3]])
    assert answers[2].isnan()


def test_the_loop_and_vmap_are_the_same():
    net, x = mlp(), queries()
    one, other = (
        Tailored(net, drift, adapt=Weights(how="loop" if loop else "vmap"), steps=3, lr=1e-2, backprop="all") for loop in (True, False)
    )
    torch.testing.assert_close(one(x), other(x), rtol=1e-12, atol=1e-13)
    grads = [torch.autograd.grad(model(x).square().sum(), list(net.parameters())) for model in (one, other)]
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
@pytest.mark.parametrize("options", [{}, {"bidirectional": True, "num_layers": 2}, {"batch_first": False, "bias": False}], ids=str)
def test_unrolled_recurrent_layers_are_pytorchs(kind, options):
    from tailoring._recurrent import unrolled_layers

    torch.manual_seed(0)
    layer = kind(3, 4, **({"batch_first": True} | options)).double()
    x = torch.randn(2, 5, 3, dtype=torch.float64)
    start = layer(x)[1]
    for hx in (None, start):
        expected = layer(x, hx)
        with unrolled_layers(layer):
            torch.testing.assert_close(layer(x, hx), expected)
    if kind is nn.LSTM:
        layer = kind(3, 4, proj_size=2, batch_first=True).double()
        with unrolled_layers(layer):
            ours = layer(x)
        torch.testing.assert_close(ours, layer(x))
    assert "forward" not in vars(layer)


def test_a_learned_start_trains_and_is_saved():
    net, x = mlp(), queries()
    model = Tailored(net, drift, adapt=CN(nn.Tanh, learned_start=True), steps=1, lr=1e-2)
    with pytest.raises(RuntimeError, match="prepare"):
        list(model.parameters())
    model.prepare(x)
    own = {name for name, _ in net.named_parameters()}
    extra = {name for name, _ in model.named_parameters()} - own
    assert extra == {f"tailoring.start.{n}/{p}" for n in (1, 3) for p in ("gamma", "beta")}
    torch.testing.assert_close(model.replace(steps=0)(x), net(x))  # it starts at the identity
    optimizer = torch.optim.SGD(model.tailoring.start.parameters(), 0.1)
    (model(x) - x).square().sum().backward()
    optimizer.step()
    assert (model.replace(steps=0)(x) - net(x)).abs().max() > 1e-3
    copy = Tailored(mlp(seed=5), drift, adapt=CN(nn.Tanh, learned_start=True), steps=1, lr=1e-2)
    copy.load_state_dict(model.state_dict())
    torch.testing.assert_close(copy(x), model(x))


def test_output_starts_from_the_prediction_and_changes_nothing_else():
    model, x = Tailored(mlp(), drift, adapt=Output(), steps=1, lr=1e-2), queries()
    y = model.net(x).detach().requires_grad_()
    gradient = torch.autograd.grad(((y.square().sum(1) - x.square().sum(1)) / 2).square().sum(), y)[0]
    torch.testing.assert_close(model(x), model.net(x) - 1e-2 * gradient)


def test_output_serves_structured_predictions():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 2)

        def forward(self, x):
            return {"a": self.a(x), "b": self.b(x)}

    model = Tailored(Two().double(), lambda model, x: model(x)["a"].square().sum(1) + model(x)["b"].square().sum(1), adapt=Output(), lr=0.5)
    assert all(t.abs().max() < 1e-12 for t in model(queries()).values())  # one Newton step on |y|^2


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (lambda model, x: model(x + 1).sum(1), "other inputs"),
        (lambda model, x: model(x.repeat_interleave(2, 0)).unflatten(0, (-1, 2)).sum((1, 2)), "other inputs"),
        (lambda model, x: model.output_of("2", x).sum(1), "output of '2'"),
        (lambda model, x: model.input_of("2", x).sum(1), "input of '2'"),
        (lambda model, x: model.body(x).sum(1), "uses 'body'"),
        (lambda model, x: model[0](x).sum(1), "uses '0'"),
    ],
)
def test_output_refuses_what_it_cannot_reach(loss, reason):
    net = mlp()
    net.body = nn.Linear(4, 4).double()
    with pytest.raises(ValueError, match=f"Output optimises the prediction itself.*{reason}"):
        Tailored(net, loss, adapt=Output())(queries())


def test_a_compiled_offset_of_the_answer_refuses_views_too():
    model = Tailored(float_mlp(), lambda m, x: (m(x) - m(x + 0.1)).square().sum(1), adapt=Output(), compile={"backend": "eager"})
    with torch.no_grad(), pytest.raises(ValueError, match="other inputs than the query"):
        model(torch.randn(4, 3))


def test_shared_fits_one_state_to_the_mean_loss_of_the_batch():
    net, x = mlp(), queries()
    model = Tailored(net, drift, adapt=Shared(CN(nn.Tanh)), steps=1, lr=1e-2)
    state = model.tailor(x)
    assert {len(t) for t in state.values()} == {1}
    per_query = Tailored(net, drift, adapt=CN(nn.Tanh), steps=1, lr=1e-2).tailor(x)
    for name, t in state.items():  # one step from a common start: the mean of the queries' own steps
        torch.testing.assert_close(t, per_query[name].mean(0, keepdim=True))


def test_losses_reach_submodules_and_features_with_the_state():
    net = ResNet().double().eval()
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    seen = {}

    def loss(model, x):
        seen["layer1"] = model.output_of("layer1", x)
        seen["fc"] = model.input_of("fc", x)
        seen["stem"] = model.stem(x)
        seen["nested"] = model.layer1.output_of("bn1", seen["stem"])
        return seen["fc"].square().sum(1)

    for adapt in (CN("layer1"), Weights("layer1")):
        model = Tailored(net, loss, adapt=adapt, steps=0)
        model.replace(steps=1)(x)
        with torch.no_grad():
            stem = net.stem(x)
            hidden = net.layer1(torch.relu(net.bn(stem)))
            torch.testing.assert_close(seen["stem"].detach(), stem)
            torch.testing.assert_close(seen["layer1"].detach(), hidden)
            torch.testing.assert_close(seen["fc"].detach(), net.layer2(hidden).mean((2, 3)))
            torch.testing.assert_close(seen["nested"].detach(), net.layer1.bn1(net.layer1.conv1(stem)))


def test_the_reference_network_adds_to_its_input():
    net = ResidualMLP(5, width=8)
    nn.init.zeros_(net.layers[-1].weight)
    nn.init.zeros_(net.layers[-1].bias)
    x = torch.randn(3, 5)
    assert torch.equal(net(x), x)
    assert names(CN(), net, x) == ["layers.1", "layers.3", "layers.5"]
