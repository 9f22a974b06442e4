"""The names of a tailored model lead to its parts, of a subclass, too; a learned start has its shape when it is needed."""

from __future__ import annotations

import pytest
import torch
from nets import MODES, drift, mlp, queries
from torch import nn

from tailoring import CN, Tailored


def test_the_names_of_parameters_lead_to_them():
    model = Tailored(mlp(), drift, adapt=CN(nn.Tanh, learned_start=True), lr=nn.Parameter(torch.tensor(0.1))).prepare(queries())
    for name, parameter in model.named_parameters():
        assert model.get_parameter(name) is parameter
    for path, module in model.named_modules():
        assert model.get_submodule(path) is module
    assert model.get_submodule("0") is model.net[0]  # type: ignore[index]
    alone = Tailored(nn.BatchNorm1d(4).double().eval(), drift)
    assert alone.get_parameter("weight") is alone.net.weight
    assert alone.get_buffer("running_mean") is alone.net.running_mean
    with pytest.raises(AttributeError):
        model.get_parameter("0.weights")


@pytest.mark.parametrize("backprop", MODES)
def test_a_learned_start_needs_no_preparation_to_answer(backprop):
    model = Tailored(mlp(), drift, adapt=CN(nn.Tanh, learned_start=True), backprop=backprop)
    assert model(queries()).requires_grad


def test_a_subclass_with_a_layer_of_its_own_is_saved_and_loaded():
    class More(Tailored):
        def __init__(self):
            super().__init__(mlp(), drift, adapt=CN(nn.Tanh))
            self.layer = nn.Linear(2, 3)

    one, other = More(), More()
    other.load_state_dict(one.state_dict())
    torch.testing.assert_close(other.layer.weight, one.layer.weight)
    assert {"layer.weight", "0.weight"} <= one.state_dict().keys()
