"""Recurrent cells, one step at a time: every query has its own weights in them too."""

from __future__ import annotations

import functools

import pytest
import torch
from nets import one_by_one, size
from torch import Tensor, nn

from tailoring import CN, Tailored, Weights, outer_losses

EXACT = {"rtol": 1e-10, "atol": 1e-10}


class Loop(nn.Module):
    """A loop over time that the model writes itself; its first state is left to the cell, or given."""

    def __init__(self, cell: nn.Module, *, started: bool = False):
        super().__init__()
        self.cell, self.head, self.started = cell, nn.Linear(6, 2), started

    def forward(self, x: Tensor) -> Tensor:
        state = (x.new_ones(len(x), 6), x.new_zeros(len(x), 6)) if self.started else None
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
        return self.head(state[0] if isinstance(state, tuple) else state)


class Peephole(nn.LSTMCell):
    def forward(self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        hidden, cell = (input.new_zeros(len(input), 6),) * 2 if hx is None else hx
        gates = nn.functional.linear(input, self.weight_ih) + nn.functional.linear(hidden, self.weight_hh)
        enter, forget, new, _ = gates.chunk(4, 1)
        cell = forget.sigmoid() * cell + enter.sigmoid() * new
        return cell.tanh(), cell


def patched() -> nn.LSTMCell:
    cell = nn.LSTMCell(3, 6)
    cell.forward = functools.partial(Peephole.forward, cell)
    return cell


CELLS = {
    "lstm": lambda: Loop(nn.LSTMCell(3, 6)),
    "lstm, no bias": lambda: Loop(nn.LSTMCell(3, 6, bias=False)),
    "lstm, started": lambda: Loop(nn.LSTMCell(3, 6), started=True),
    "lstm, normed": lambda: Loop(nn.utils.parametrizations.weight_norm(nn.LSTMCell(3, 6), "weight_hh")),
    "of a subclass": lambda: Loop(Peephole(3, 6, bias=False)),
    "patched": lambda: Loop(patched()),
    "gru": lambda: Loop(nn.GRUCell(3, 6)),
    "rnn": lambda: Loop(nn.RNNCell(3, 6)),
    "rnn, relu, no bias": lambda: Loop(nn.RNNCell(3, 6, bias=False, nonlinearity="relu")),
}


@pytest.mark.usefixtures("seeded")
@pytest.mark.filterwarnings("ignore:Weights runs all of this model", "ignore:There is a performance drop.*_weight_norm")
@pytest.mark.parametrize("how", ["rules", "vmap"])
@pytest.mark.parametrize("name", CELLS)
def test_a_cell_in_a_loop_over_time_is_exact(name, how):
    """Its answers, and their derivative through all steps."""
    net, x, y = CELLS[name]().double(), torch.randn(3, 4, 3).double(), torch.randn(3, 2).double()
    before = net(x)
    model = Tailored(net, size, adapt=Weights(how=how), steps=2, lr=0.1, backprop="all", momentum=0.5)
    expected = model.replace(adapt=Weights(how="loop"))
    torch.testing.assert_close(model(x), expected(x), **EXACT)
    torch.testing.assert_close(model(x), one_by_one(model, x), **EXACT)
    assert (model(x) - before).abs().max() > 1e-3
    grads = [
        torch.autograd.grad(
            sum(outer_losses(m, nn.functional.mse_loss, x, y)), list(net.parameters()), allow_unused=True, materialize_grads=True
        )
        for m in (model, expected)
    ]
    torch.testing.assert_close(*grads, **EXACT)
    torch.testing.assert_close(net(x), before, rtol=0, atol=0)


@pytest.mark.usefixtures("seeded")
@pytest.mark.parametrize("how", ["rules", "vmap"])
def test_a_cell_by_itself(how):
    def loss(model, x):
        hidden, cell = model(x)
        return hidden.square().sum(1) + cell.sum(1)

    net, x = nn.LSTMCell(3, 6).double(), torch.randn(4, 3).double()
    model = Tailored(net, loss, adapt=Weights(how=how), steps=2, lr=0.1)
    torch.testing.assert_close(model(x), model.replace(adapt=Weights(how="loop"))(x), **EXACT)
    assert "forward" not in net.__dict__


@pytest.mark.usefixtures("seeded")
@pytest.mark.parametrize("how", ["rules", "vmap"])
def test_a_cell_in_compiled_code(how):
    net, x = Loop(nn.LSTMCell(3, 6)), torch.randn(3, 2, 3)
    model = Tailored(net, size, adapt=Weights(how=how), steps=1, lr=0.1)
    torch.testing.assert_close(model.replace(compile={"backend": "eager"})(x), model(x))


class Residual(nn.GRU):
    def forward(self, input: Tensor, hx: Tensor | None = None) -> tuple[Tensor, Tensor]:
        out, last = super().forward(input, hx)
        return out + input, last


def with_a_residual() -> nn.GRU:
    layer = nn.GRU(3, 3, batch_first=True)
    own = layer.forward
    layer.forward = lambda x: (own(x)[0] + x, None)
    return layer


class Last(nn.Module):
    def __init__(self, layer: nn.GRU):
        super().__init__()
        self.layer, self.head = layer, nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0][:, -1])


@pytest.mark.usefixtures("seeded")
@pytest.mark.filterwarnings("ignore:Weights runs all of this model")
@pytest.mark.parametrize("how", ["rules", "vmap"])
@pytest.mark.parametrize("layer", [lambda: Residual(3, 3, batch_first=True), with_a_residual], ids=["class", "patch"])
def test_a_layer_that_is_no_longer_torchs_is_not_taken_for_it(layer, how):
    net, x = Last(layer()), torch.randn(4, 5, 3)
    model = Tailored(net, size, adapt=Weights(how=how), lr=0.1)
    with pytest.raises(RuntimeError, match="how='loop'"):
        model(x)
    torch.testing.assert_close(model.replace(adapt=Weights("head"), steps=0)(x), net(x))
    assert (model.replace(adapt=Weights(how="loop"))(x) - net(x)).abs().max() < 1


@pytest.mark.usefixtures("seeded")
@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
@pytest.mark.parametrize("adapt", [CN(), Weights()], ids=repr)
def test_models_with_recurrent_layers_are_compiled_without_further_ado(kind, adapt):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.norm, self.head = kind(3, 6, batch_first=True), nn.LayerNorm(6), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.norm(self.layer(x)[0][:, -1]))

    net, x = Net(), torch.randn(4, 5, 3)
    eager = Tailored(net, size, adapt=adapt, steps=2, lr=0.1)
    with torch.no_grad():
        torch.testing.assert_close(eager.replace(compile={"backend": "eager"})(x), eager(x))
    assert not torch._dynamo.config.allow_rnn
