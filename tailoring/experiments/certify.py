"""Certify a classifier, plain or tailored, image by image: on this machine, or over a Ray cluster."""

from __future__ import annotations

import hashlib
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from tailoring.nn import load_weights
from tailoring.smoothing import Smoothed, average_radius, certified_accuracy

from ._classifiers import LARGE, Network, Tailoring, build, check_tailoring, class_names, count_classes, for_classes, read_weights, tailored
from ._images import CIFAR10, ImageFolder, Images, TensorImages, cifar10, data_folder, image_folder
from ._report import Table
from ._rows import Row, Rows, read, read_folder

Progress = Callable[[str, int, int], None]
# The fastest convolutions, each by itself: with what follows put into its kernel, which is then read number by number, one took 0.61 ms in
# place of 0.11 on an H200, and to test which do better with it takes long.
SEARCHED = {"max_autotune_gemm": True, "benchmark_epilogue_fusion": False, "epilogue_fusion": False, "prologue_fusion": False}


@dataclass(frozen=True, kw_only=True)
class Config(Tailoring):
    """What is certified, and how. The defaults are Cohen et al.'s and the tailoring paper's."""

    HOW: ClassVar = frozenset({"out", "data_dir", "every", "images", "accelerator", "compile", "autotune", "engine", "address", "workers"})

    weights: Path
    """checkpoint of the network, .safetensors or a PyTorch file of plain tensors; Cohen's, torchvision's and akamaster's names are known"""
    network: Network = "resnet110"
    """of the CIFAR networks, or one for ImageNet"""
    shortcut: Literal["conv", "pad"] = "conv"
    """Cohen's CIFAR networks have convolutions in their shortcuts, the public ResNet-20/56 zero padding"""
    statistics: Literal["cifar", "imagenet"] | None = None
    """with which the CIFAR networks standardise images; by default those of the data set"""
    out: Path = Path("runs/certify")
    """folder of the rows"""
    data: Literal["cifar10", "imagenet", "given"] = "cifar10"
    """given: images that a program hands to `run`"""
    data_dir: Path | None = None
    """folder of cifar-10-batches-bin; TAILORING_DATA by default"""
    root: Path | None = None
    """of the data set imagenet: a folder with one folder of images per class"""
    classes: Path | None = None
    """where the network knows other classes than the data: a file or folder that names all of the network's, as ImageNet's val/ does"""
    size: int | None = None
    """pixels of an image's side; by default 32 for the CIFAR networks, 224 for the others"""
    sigma: float = 0.5
    """noise that the network was trained with"""
    tailor: bool = True
    """tailor every noisy sample; --no-tailor certifies the network as it is"""
    n0: int = 100
    """samples for the guess"""
    n: int = 100_000
    """samples for the bound"""
    alpha: float = 0.001
    """probability that a certificate is wrong"""
    every: int = 20
    """certify one image in so many, as Cohen et al. do on CIFAR-10"""
    images: int = 500
    """how many at most, spread over all of them; more of either adds to a run"""
    skip_wrong: bool = False
    """spend no samples on an image whose guess is wrong: it counts 0 in every table, whatever they would say"""
    seed: int = 0
    """of the noise; an image's own seed is this and its index, so results do not depend on who computed them"""
    batch: int = 1000
    """samples at once"""
    accelerator: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU if there is one"""
    bf16: bool = False
    """autocast to bfloat16"""
    compile: bool = False
    """torch.compile the classifier, CUDA graphs included"""
    autotune: bool = False
    """with --compile, search for the fastest kernels of convolutions and products, which takes longer"""
    engine: Literal["local", "ray"] = "local"
    """ray: spread the images over a cluster, each on whichever worker is free, again if its worker dies"""
    address: str | None = None
    """of a running Ray cluster; without it one is started on this machine"""
    workers: int | None = None
    """how many images at once on the cluster; by default one per GPU, or per CPU core where there are none"""

    @property
    def pixels(self) -> int:
        return self.size or (224 if self.network in LARGE else 32)


def run(config: Config, progress: Progress = lambda what, done, total: None, images: Images | None = None) -> Path:
    """Append a row for every image that has none yet; `images` in place of the config's."""
    _check(config)
    if config.engine == "ray":
        refuse_nowhere(config.address)
    data = _images(config) if images is None else images
    state = read_weights(config.weights)
    if images is None:
        classes = data.classes if isinstance(data, ImageFolder) else CIFAR10
        state = for_classes(state, config.weights, classes, config.classes)
    _smoothed(config, _classifier(config, state))  # fails here, not on a worker, if the weights do not fit
    todo = chosen(len(data), config.every, config.images)
    _refuse_other_device(config, todo)
    rows = Rows(config.out, "certify", config, str(_device(config)), sha256=_contents(config, data))
    done = {row["index"] for row in rows if row["kind"] == "image"}
    left = [index for index in todo if index not in done]
    engine = _over_ray if config.engine == "ray" else _here
    for row in engine(config, state, data, left):
        rows.add(kind="image", **row)
        done.add(row["index"])
        progress("images", len(done & set(todo)), len(todo))
    return config.out


def _refuse_other_device(config: Config, todo: list[int]) -> None:
    """An image's noise is another on a CPU than on a GPU, and tables compare certificates with the same."""
    path, now = config.out / "rows.jsonl", _device(config).type
    if config.engine != "local" or not path.exists():  # of a cluster it is not known here which devices it has
        return
    kinds, done, session = set[str](), set[int](), ""
    for row in read(path):
        if row.get("kind") == "session":
            session = "cpu" if "CPU" in row["device"] else "cuda"
        elif row.get("kind") == "image":
            kinds.add(session)
            done.add(row["index"])
    if kinds - {now} and not done >= set(todo):
        there = " and ".join(sorted(kinds))
        raise ValueError(f"{path} holds certificates made on {there}, whose noise is not that of {now}: choose another folder with --out")


def chosen(count: int, every: int, most: int) -> list[int]:
    """Every so many of `count` images; if these are more than `most`, that many, spread over them: a folder's are sorted by class."""
    found = range(0, count, every)
    return [found[i * len(found) // most] for i in range(most)] if len(found) > most else list(found)


def _check(config: Config) -> None:
    for name in ("n0", "n", "batch", "every", "images", "size", "workers"):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name} must be at least 1, not {value}")
    if not 0 < config.alpha < 1:
        raise ValueError(f"--alpha must lie between 0 and 1, not {config.alpha}")
    if config.autotune and not config.compile:
        raise ValueError("--autotune searches for the kernels of a compiled classifier: give --compile, too")
    check_tailoring(config)
    if config.network in LARGE and config.data != "given" and (config.statistics or config.shortcut != "conv"):
        raise ValueError(f"--statistics and --shortcut are of the CIFAR networks, {config.network} has its own: leave them out")
    if config.accelerator == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "there is no CUDA device on this machine: use --accelerator cpu, or auto, with which a cluster's workers use theirs"
        )


def _contents(config: Config, images: Images) -> dict[str, str]:
    """Of what the config's paths lead to: what has changed since must not be mixed with older rows."""
    found = {"weights": hashlib.sha256(config.weights.read_bytes()).hexdigest()}
    if isinstance(images, ImageFolder):
        found["root"] = _digest(f"{file.parent.name}/{file.name}" for file in images.files)
    if config.classes:
        found["classes"] = _digest(class_names(config.classes))
    return found


def _digest(names: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(names).encode()).hexdigest()


def certify_image(config: Config, classifier: nn.Module, image: Tensor, label: int, index: int) -> Row:
    """One image (3, H, W) on the classifier's device."""
    device = next(classifier.parameters()).device
    start = time.monotonic()
    smoothed = _smoothed(config, classifier)
    with torch.no_grad():
        query, seed = image.to(device), config.seed + index
        guess = int(smoothed.votes(query, config.n0, seed, phase=0).argmax())
        if guess != label and config.skip_wrong:
            zero = {"radius": 0.0, "paper_radius": 0.0, "votes": None}
            return {"index": index, "label": label, "predict": guess, **zero, "seconds": time.monotonic() - start}
        found = smoothed.certify(query[None], n=config.n, alpha=config.alpha, seeds=[seed], guess=[guess])
    numbers = {name: getattr(found, name).item() for name in ("radius", "paper_radius", "votes")}
    return {"index": index, "label": label, "predict": int(found.label), **numbers, "seconds": time.monotonic() - start}


def _smoothed(config: Config, classifier: nn.Module) -> Smoothed:
    return Smoothed(_run_as(config, classifier), config.sigma, nu=config.nu if config.tailor else 0.0, batch=config.batch)


def _run_as(config: Config, classifier: nn.Module) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        samples, left = len(x), config.batch - len(x) if config.compile else 0
        x = torch.cat([x, x[:1].expand(left, -1, -1, -1)]) if left else x  # to compile one more program takes longer than to fill up
        x = x.contiguous(memory_format=torch.channels_last)
        with torch.autocast(x.device.type, torch.bfloat16, enabled=config.bf16):
            return classifier(x)[:samples].float()

    return forward


def _classifier(config: Config, state: dict[str, Any]) -> nn.Module:
    statistics = "cifar" if (config.statistics or config.data).startswith("cifar") else "imagenet"
    net = build(config.network, count_classes(state), statistics=statistics, shortcut=config.shortcut)
    load_weights(net, state)
    device = _device(config)
    net = net.eval().to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    options = SEARCHED if config.autotune else {}
    if config.tailor:
        return tailored(net, config, compile={"options": options} if config.compile and options else config.compile).eval()
    if config.compile:
        net.compile(dynamic=False, options=options | {"triton.cudagraphs": device.type == "cuda"})
    return net


def _device(config: Config) -> torch.device:
    cuda = config.accelerator == "cuda" or (config.accelerator == "auto" and torch.cuda.is_available())
    return torch.device("cuda" if cuda else "cpu")


def _images(config: Config) -> Images:
    if config.data == "cifar10":
        return TensorImages(*cifar10(data_folder(config.data_dir), "test"))
    if config.data == "given":
        raise ValueError("--data given is for programs that hand their images to run(): choose cifar10 or imagenet")
    return image_folder(config.root, config.pixels)


def _here(config: Config, state: dict[str, Any], images: Images, indices: list[int]) -> Iterator[Row]:
    classifier = _classifier(config, state) if indices else None
    for index in indices:
        assert classifier is not None
        image, label = images[index]
        yield certify_image(config, classifier, image, label, index)


def _over_ray(config: Config, state: dict[str, Any], images: Images, indices: list[int]) -> Iterator[Row]:
    """Images go to whichever worker is free; one whose worker dies goes to another. Rows come as they are done."""
    try:
        import ray as installed
    except ModuleNotFoundError:
        raise OSError("--engine ray needs Ray: pip install 'tailoring[cluster]' (in a checkout '.[cluster]')") from None
    ray: Any = installed  # its types know no options of other versions
    mine = not ray.is_initialized()
    if mine:
        ray.init(address=config.address, log_to_driver=False, include_dashboard=False if config.address is None else None)
    try:
        resources = ray.cluster_resources()
        gpus = int(resources.get("GPU", 0))
        workers = config.workers or gpus or int(resources["CPU"])
        options = {"num_gpus": min(1.0, gpus / workers)} if gpus else {"num_cpus": max(1, int(resources["CPU"]) // workers)}
        task = ray.remote(**options, max_retries=5)(_on_worker)
        shared = ray.put((config, state))  # once per machine, not once per image
        waiting, running = list(reversed(indices)), []
        while waiting or running:
            while waiting and len(running) < 2 * workers:  # a little ahead, so that no worker waits for this loop
                index = waiting.pop()
                running.append(task.remote(shared, *images[index], index))
            finished, running = ray.wait(running)
            yield from ray.get(finished)
    finally:
        if mine:
            ray.shutdown()


def refuse_nowhere(address: str | None) -> None:
    """Ray itself would look for more than a minute for a cluster that is not there."""
    host, _, port = (address or "").rpartition("://")[2].rpartition(":")
    if host and port.isdigit():
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
        except OSError as error:
            raise OSError(f"no Ray cluster answers at --address {address} ({error}); `ray start --head` starts one") from error


_built: dict[str, nn.Module] = {}  # of a worker process: the classifier is built once, not for every image


def _on_worker(shared: tuple[Config, dict[str, Any]], image: Tensor, label: int, index: int) -> Row:
    config, state = shared
    if str(config) not in _built:
        torch.set_num_threads(1 if _device(config).type == "cpu" else torch.get_num_threads())
        _built.clear()
        _built[str(config)] = _classifier(config, state)
    return certify_image(config, _built[str(config)], image, label, index)


def report(folder: Path) -> str:
    """Certified accuracy at radii and ACR, by the sound radius and by the paper's convention."""
    rows = read_folder(folder, "certify")
    images = list({row["index"]: row for row in rows if row["kind"] == "image"}.values())
    config = rows[0]["config"]
    truth, label = (torch.tensor([row[name] for row in images]) for name in ("label", "predict"))
    radii = [0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.25]
    table = Table(
        f"{len(images)} images of {config['data']}, sigma {config['sigma']:g}, N = {config['n']}",
        ("radius", *(f"{r:g}" for r in radii), "ACR"),
        note="sound: sigma' Phi^-1(p), sigma' being the noise added to the query; paper: sigma Phi^-1(p), no certificate if tailored.",
    )
    for name, key in (("sound", "radius"), ("paper", "paper_radius")):
        radius = torch.tensor([row[key] for row in images], dtype=torch.float64)
        accuracy = certified_accuracy(truth, label, radius, radii)
        table.rows.append((name, *(f"{100 * a:.1f}" for a in accuracy), f"{average_radius(truth, label, radius):.4f}"))
    return table.text() + f"\nabstained: {int((label == -1).sum())}; {sum(row['seconds'] for row in images):.0f} s of computing"
