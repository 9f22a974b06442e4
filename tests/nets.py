"""Networks, losses and adapters that the tests share."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tailoring import CN, Shift, Weights
from tailoring.baselines import Output, Shared


def mlp(features: int = 4, width: int = 6, depth: int = 2, act: type[nn.Module] = nn.Tanh, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    sizes = [features] + [width] * depth
    layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), act())]
    return nn.Sequential(*layers, nn.Linear(width, features)).double()


def float_mlp(*, out: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, out))


def mlp_of_8() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def small(inputs: int = 3, outputs: int = 2) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 5), nn.Tanh(), nn.Linear(5, outputs)).double()


def data(queries: int = 4) -> tuple[Tensor, Tensor]:
    """Inputs and targets of `small`, drawn as its weights are: for tests with the fixture `seeded`."""
    return torch.randn(queries, 3).double(), torch.randn(queries, 2).double()


def queries(count: int = 5, features: int = 4, seed: int = 1) -> Tensor:
    return torch.randn(count, features, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def drift(model, x: Tensor) -> Tensor:
    """The change of the squared norm, a smooth stand-in for a conservation law."""
    return (energy(model(x)) - energy(x)).square()


def energy(x: Tensor) -> Tensor:
    return x.flatten(1).square().sum(1) / 2


def answer_size(model, *args, **kwargs) -> Tensor:
    """A smooth loss of the prediction for any network (not its norm, which a last LayerNorm fixes)."""
    out = model(*args, **kwargs)
    out = (out if isinstance(out, Tensor) else out[0]).flatten(1)
    return (out - torch.linspace(-1, 2, out.shape[1], dtype=out.dtype)).square().mean(1)


def size(model, x: Tensor) -> Tensor:
    return model(x).square().sum(1)


def to_one(model, *x: Tensor) -> Tensor:
    return (model(*x) - 1).square().flatten(1).sum(1)


def one_by_one(model, *x: Tensor) -> Tensor:
    return torch.cat([model(*(t[i : i + 1] for t in x)) for i in range(len(x[0]))])


def summed_error(prediction: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(prediction, target, reduction="sum")


PER_QUERY = {
    "CN": lambda: CN(nn.Tanh),
    "CN-learned-start": lambda: CN(nn.Tanh, learned_start=True),
    "Weights": lambda: Weights(),
    "Weights-part": lambda: Weights("2", "*.bias"),
    "Weights-vmap": lambda: Weights(how="vmap"),
    "Shift": lambda: Shift("2"),
    "Output": lambda: Output(),
}
ADAPTERS = PER_QUERY | {"Shared": lambda: Shared(CN(nn.Tanh))}
MODES = ("none", "last", "all")


class Timed(nn.Module):
    """Given a number beside its queries; counts the passes that are not compiled."""

    def __init__(self):
        super().__init__()
        self.body, self.passes = float_mlp(), 0

    def forward(self, x, time):
        if not torch.compiler.is_compiling():
            self.passes += 1
        return self.body(x) * time


class Reached(nn.Module):
    """Its parts can be reached in many ways."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.t, self.b = nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)
        self.listed, self.named = [self.a, self.t], {"a": self.a, "t": self.t}

    def enc(self, x):
        return self.t(self.a(x))

    def part(self, name):
        return getattr(self, name)

    def generated(self, x):
        yield self.enc(x)

    def forward(self, x):
        return self.b(self.enc(x))


class BasicBlock(nn.Module):
    def __init__(self, channels: int, out: int, stride: int):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)  # runs twice, as in torchvision
        self.down = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(out)) + self.down(x))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, 1, 1, bias=False)
        self.bn = nn.BatchNorm2d(4)
        self.layer1, self.layer2 = BasicBlock(4, 4, 1), BasicBlock(4, 8, 2)
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer2(self.layer1(F.relu(self.bn(self.stem(x)))))
        return self.fc(out.mean((2, 3)))


class UNet(nn.Module):
    """Two scales, a skip connection, GroupNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, 4, 3, 1, 1), nn.GroupNorm(2, 4), nn.SiLU())
        self.deep = nn.Sequential(nn.Conv2d(4, 8, 3, 2, 1), nn.GroupNorm(2, 8), nn.SiLU())
        self.up = nn.ConvTranspose2d(8, 4, 2, 2)
        self.out = nn.Conv2d(8, 1, 3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down(x)
        return self.out(torch.cat([skip, self.up(self.deep(skip))], 1))


class Recurrent(nn.Module):
    def __init__(self, use: str = "sequence", kind: type[nn.RNNBase] = nn.GRU):
        super().__init__()
        self.rnn = kind(3, 6, num_layers=2, batch_first=True)
        self.head = nn.Linear(6, 2)
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        sequence, last = self.rnn(x)
        last = last[0] if isinstance(last, tuple) else last
        return self.head(sequence[:, -1] if self.use == "sequence" else last[-1])


class SequenceFirst(nn.Module):
    """A transformer with the sequence in the first dimension inside: the queries are in the second."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=False)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x.transpose(0, 1)).mean(0))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2, enable_nested_tensor=False
        )
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).mean(1))


def conv1d() -> nn.Module:
    return nn.Sequential(nn.Conv1d(3, 5, 3, padding=1), nn.ReLU(), nn.Conv1d(5, 4, 3), nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(24, 3))


def vision_transformer() -> nn.Module:
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, image_size=8, patch_size=4)
    return ViTModel(config, add_pooling_layer=False)


def text_encoder() -> nn.Module:
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(vocab_size=11, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16))


def _image(channels: int = 3, size: int = 8) -> Tensor:
    return torch.randn(3, channels, size, size, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def _sequence(features: int, length: int = 5) -> Tensor:
    return torch.randn(3, length, features, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


ARCHITECTURES = {
    "resnet": lambda: (ResNet(), (_image(),), {}),
    "unet": lambda: (UNet(), (_image(1),), {}),
    "conv1d": lambda: (conv1d(), (_sequence(8, 3),), {}),
    "gru": lambda: (Recurrent(), (_sequence(3),), {}),
    "gru-last": lambda: (Recurrent("last"), (_sequence(3),), {}),
    "lstm": lambda: (Recurrent("last", nn.LSTM), (_sequence(3),), {}),
    "transformer": lambda: (Transformer(), (_sequence(8),), {}),
    "sequence-first": lambda: (SequenceFirst(), (_sequence(8),), {}),
    "vit": lambda: (vision_transformer(), (_image(),), {}),
    "bert": lambda: (
        text_encoder(),
        (),
        {"input_ids": torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 0]]), "attention_mask": torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 0]])},
    ),
}


def architecture(name: str):
    """A network in eval mode and float64, its positional and its keyword inputs."""
    torch.manual_seed(0)
    net, args, kwargs = ARCHITECTURES[name]()
    net = net.double().eval()
    for module in net.modules():  # BatchNorm that has seen data
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    return net, args, kwargs
