"""The pre-trained encoder, the representations it gives, and the linear layers on them: each made when it is first needed, once."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from tailoring import Tailored

from ._contrastive_data import Images, draw
from ._contrastive_linear import Layers, Task, fit
from ._contrastive_nets import Pretraining, SimCLR, Turned, channels_last, mlp, nt_xent
from ._contrastive_plan import Config
from ._contrastive_results import Setting
from ._contrastive_tailor import Representations, after_each_step, agreement_model, encoder_model, image_seeds, represent, rotation_model
from ._contrastive_views import make_views
from ._parts import halved, load_parts, save_parts
from ._rows import Row
from ._train import Learner, Progress, Schedule, train, trained


class Bench:
    def __init__(self, config: Config, images: Images, fabric: Fabric, progress: Progress):
        self.config, self.images, self.fabric, self.progress = config, images, fabric, progress
        self.device = fabric.device
        self.labels, self.test_labels = images.train_labels.to(self.device), images.test_labels.to(self.device)
        self.weights = config.out / "weights"

    # The encoder

    @cached_property
    def net(self) -> SimCLR:
        """Read from its files even right after the training: what is reported does not depend on where a run was interrupted."""
        found = load_parts(self.weights, "encoder")
        if found is None:
            self._pretrain()
            found = load_parts(self.weights, "encoder")
        assert found is not None
        net = SimCLR(self.config)
        net.load_state_dict(found[0])
        net = net.eval().requires_grad_(False).to(self.device)
        return net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    @torch.enable_grad()  # whoever asks for the encoder first
    def _pretrain(self) -> None:
        c = self.config
        torch.manual_seed(c.seed)
        net = SimCLR(c).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        learner = Learner("simclr", net, Pretraining(net, c.augment, c), c.seed, validate=self.contrastive_loss)
        x = self.images.train.to(self.device)
        numbers = torch.arange(len(x), device=self.device)
        schedule = Schedule(c.epochs, c.batch, c.lr, validations=10, checkpoint_seconds=60.0, travel=True)
        if trained(self.weights, "simclr") is None:
            train([learner], x, numbers, schedule, fabric=self.fabric, folder=self.weights, progress=self.progress)
        found = trained(self.weights, "simclr")
        assert found is not None
        save_parts(self.weights, "encoder", halved(found[0]), {"curve": json.dumps(found[1])})

    @property
    def curve(self) -> list[tuple[int, float]]:
        """The contrastive loss on test images during the pre-training."""
        found = load_parts(self.weights, "encoder")
        assert found is not None, "the encoder comes first"
        return json.loads(found[1]["curve"])

    @torch.no_grad()
    def contrastive_loss(self, net: nn.Module, images: int = 1024) -> float:
        """NT-Xent of a batch of test images, always the same views; no labels, and nothing is chosen by it."""
        x = self.images.test[:images].to(self.device).float() / 255
        views = make_views(self.config.augment, x, torch.arange(len(x), device=self.device), 2, 0)
        with self.fabric.autocast():
            z = net(channels_last(views))
        return float(nt_xent(z, self.config.temperature))

    def _encode(self, images: Tensor) -> Tensor:
        with self.fabric.autocast():
            return self.net.encoder(images)

    # Representations

    @cached_property
    def train(self) -> Representations:
        return self._represent(self.images.train, 0, "training images")

    @cached_property
    def test(self) -> Representations:
        return self._represent(self.images.test, len(self.images.train), "test images")

    def _represent(self, images: Tensor, first: int, what: str) -> Representations:
        ids = torch.arange(first, first + len(images), device=self.device)
        return represent(
            self._encode, images.to(self.device), ids, self.config, lambda done, total: self.progress(f"views of {what}", done, total)
        )

    @cached_property
    def negatives(self) -> Tensor | None:
        """Projections of a view of the first training images; for these few it is their own, one of a thousand terms."""
        count = max(v.negatives for v in self.config.variants)
        return self.net.head(self.train.views[:count, 0].float()) if count else None

    # Tailored representations

    def tailored(self, setting: Setting, part: Representations) -> Tensor:
        """(steps, n, d), float16, after 1 to `config.steps` steps."""
        model = agreement_model(self.net.head, setting.variant, self.negatives, self.config).replace(lr=setting.lr)
        return self._after(model, lambda rows: part[rows].beside_views(setting.views), len(part.plain))

    def moved(self, setting: Setting) -> Row:
        """What happens to test images on the way: their mean loss before and after each step; how many were given up; how far h went."""
        part = self.test[: self.config.chunk]
        model = agreement_model(self.net.head, setting.variant, self.negatives, self.config)
        trace = model.replace(lr=setting.lr, steps=setting.steps).trace(part.beside_views(setting.views))
        before = model.net(part.beside_views(setting.views))
        distance = (trace.prediction - before).norm(dim=1) / before.norm(dim=1)
        return {"loss": trace.losses.mean(1).tolist(), "failed": int(trace.failed.sum()), "distance": float(distance.mean())}

    def turned(self, lr: float, part: Representations) -> Tensor:
        """(n, d): after TTT's steps; with a step size of 0, as they are."""
        model = rotation_model(self.rotation_head, self.config).replace(lr=lr)
        return self._after(model, lambda rows: part[rows].beside_turned(), len(part.plain))[-1]

    def encoder_tailored(self, images: Tensor, first: int, lr: float) -> Tensor:
        """(steps, n, d): CN on the encoder, by the agreement of the very views that are stored for these images."""
        ids = torch.arange(first, first + len(images), device=self.device)
        model = encoder_model(self.net, self.config).replace(lr=lr)

        def inputs(rows: slice) -> Tensor:
            self.progress(f"CN, lr {lr:g}", rows.start, len(images))
            return channels_last(images[rows].to(self.device).float() / 255)

        seeds = image_seeds(ids, self.config)
        return after_each_step(model, inputs, len(images), self.config.cn_chunk, seeds=seeds, autocast=self.fabric.autocast)

    def _after(self, model: Tailored, inputs: Callable[[slice], Tensor], count: int) -> Tensor:
        return after_each_step(model, inputs, count, self.config.chunk)

    @cached_property
    def rotation_head(self) -> nn.Module:
        """Trained on representations of the frozen encoder, all training images turned by 0 to 3 right angles."""
        torch.manual_seed(self.config.seed)
        head = mlp(self.net.width, self.config.hidden, 4)
        learner = Learner("rotation", head, Turned(head), self.config.seed)
        if trained(self.weights, "rotation") is None:
            schedule = Schedule(self.config.rotation_epochs, min(self.config.batch, len(self.labels)), self.config.lr)
            x = self.train.beside_turned()
            train([learner], x, self.labels, schedule, fabric=self.fabric, folder=self.weights, progress=self.progress)
        found = trained(self.weights, "rotation")
        assert found is not None
        head.load_state_dict(found[0])
        return head.eval().requires_grad_(False).to(self.device)

    def rotation_accuracy(self, part: Representations) -> float:
        answers = self.rotation_head(part.beside_turned().flatten(0, 1)).argmax(1)
        return float((answers == torch.arange(4, device=self.device).repeat(len(part.plain))).double().mean())

    # Linear layers

    def fit(self, features: Tensor, tasks: Sequence[Task], pool: int, *, at_most: bool = False) -> Layers:
        """Layers on (sets, n, d) or (sets, n, views, d), with labels of the first `pool` images."""
        c = self.config
        known = self.images.train_labels[:pool]
        subsets = {(t.labels, t.seed): draw(known, t.labels, t.seed, at_most=at_most) for t in tasks}
        chosen = [subsets[t.labels, t.seed] for t in tasks]
        return fit(features, self.labels, chosen, tasks, steps=c.linear_steps, batch=c.linear_batch, lr=c.linear_lr)
