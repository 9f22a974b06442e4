"""The networks and losses that are timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from tailoring._compiled import inductor_options
from tailoring.nn import ResidualMLP, ResNet, cifar_resnet, resnet18


def planets(device: str) -> nn.Module:
    """The network of the planets experiment: 25 numbers, 3 x 512, residual."""
    torch.manual_seed(0)
    return ResidualMLP(25).to(device).eval()


def layers(count: int, width: int, device: str) -> nn.Sequential:
    """Equal layers, each a linear map and an activation."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(count))).to(device).eval()


def transformer(device: str, width: int = 128, depth: int = 2) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, batch_first=True)
    return nn.TransformerEncoder(layer, depth, enable_nested_tensor=False).to(device).eval()


def resnet(name: str, device: str) -> ResNet:
    torch.manual_seed(0)
    net = resnet18(classes=10, stem="cifar") if name == "resnet18" else cifar_resnet(int(name[6:]))
    net = net.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None  # statistics of all that was seen
    with torch.no_grad():
        net(torch.rand(16, 3, 32, 32, device=device))  # with none, 110 layers answer 1e8 and every step overflows
    return net.eval()


def drift(model: Callable[[Any], Tensor], x: Tensor) -> Tensor:
    """An energy that should not change."""
    return (model(x).flatten(1).square().sum(1) - x.flatten(1).square().sum(1)).abs()


Compilable = TypeVar("Compilable", bound=Callable[..., Any])


def compiled(what: Compilable, device: str, **options: object) -> Compilable:
    """A network or function compiled as `Tailored` compiles: its passes, its search for kernels (or other options), on CUDA graphs."""
    as_ours, *_ = inductor_options(torch.device(device), {"options": options} if options else {})
    # not Module.compile, which leaves modules of PyTorch's own classes (Sequential) as they are
    return cast(Compilable, torch.compile(what, dynamic=False, options=as_ours | {"triton.cudagraphs": device == "cuda"}))


def by_vmap(net: nn.Module, x: Tensor, steps: int, lr: float, *, compile: bool = False) -> Callable[[], Tensor]:
    """Gradient descent of all weights for every query as one writes it with torch.func: vmap over what answers one."""
    theta = {name: p.detach() for name, p in net.named_parameters()}

    def loss(theta: dict[str, Tensor], row: Tensor) -> Tensor:
        return drift(lambda z: functional_call(net, theta, (z,)), row[None]).sum()

    def answer(row: Tensor) -> Tensor:
        own = theta
        for _ in range(steps):
            slopes = grad(loss)(own, row)
            own = {name: p - lr * slopes[name] for name, p in own.items()}
        return functional_call(net, own, (row[None],))[0]

    answers = compiled(vmap(answer), x.device.type) if compile else vmap(answer)
    return without_gradients(lambda: answers(x))


def without_gradients(run: Callable[[], Any]) -> Callable[[], Any]:
    return torch.no_grad()(run)
