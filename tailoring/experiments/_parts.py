"""Weights in several small files, at reduced precision: what can be carried from one machine to another."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ._cache import checksum, make_folder, write_whole

LIMIT = 15 * 2**20  # bytes of a file


def halved(tensors: Mapping[str, Tensor], dtype: torch.dtype = torch.float16) -> dict[str, Tensor]:
    """Matrices and kernels at half precision; vectors (biases, statistics of BatchNorm), which take little room, as they are."""
    return {name: t.to(dtype) if t.ndim > 1 and t.is_floating_point() else t for name, t in tensors.items()}


def save_parts(folder: Path, name: str, tensors: Mapping[str, Tensor], about: Mapping[str, str], limit: int = LIMIT) -> list[Path]:
    """Write `folder/NAME-1-of-N.safetensors` and so on, no file above `limit` bytes unless a single tensor is; older sets are removed."""
    make_folder(folder)
    ready = {key: t.detach().cpu().contiguous() for key, t in tensors.items()}
    groups = list(_groups(ready, limit))
    of = {**about, "checksum": checksum(ready)}  # of all of them: parts of different sets do not go together
    paths = [folder / f"{name}-{i}-of-{len(groups)}.safetensors" for i in range(1, len(groups) + 1)]
    for path, group in zip(paths, groups, strict=True):
        write_whole(path, save(group, of))
    remove_parts(folder, name, keep=paths)
    return paths


def remove_parts(folder: Path, name: str, keep: Sequence[Path] = ()) -> None:
    for path in _found(folder, name):
        if path not in keep:
            path.unlink()


def load_parts(folder: Path, name: str) -> tuple[dict[str, Tensor], dict[str, str]] | None:
    """The tensors and what was written about them; None if there are none. Parts that are missing or of different sets are refused."""
    paths = _found(folder, name)
    if not paths:
        return None
    tensors: dict[str, Tensor] = {}
    abouts = []
    for path in paths:
        try:
            with safe_open(path, "pt") as file:
                abouts.append(file.metadata())
                tensors |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118, it is no dict
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged ({error}): bring it again, or remove {name}-*.safetensors to start anew") from None
    if any(about != abouts[0] for about in abouts) or abouts[0]["checksum"] != checksum(tensors):
        listed = ", ".join(path.name for path in paths)
        raise ValueError(f"the parts in {folder} ({listed}) are not one whole set: bring all of one set, or remove them to start anew")
    return tensors, abouts[0]


def _groups(tensors: dict[str, Tensor], limit: int) -> Iterator[dict[str, Tensor]]:
    group: dict[str, Tensor] = {}
    size = 0
    for key, tensor in tensors.items():
        if group and size + tensor.nbytes > limit:
            yield group
            group, size = {}, 0
        group[key] = tensor
        size += tensor.nbytes + len(json.dumps(key)) + 100  # the header's line
    yield group


def _found(folder: Path, name: str) -> list[Path]:
    return sorted(path for path in folder.glob(f"{name}-*-of-*.safetensors"))
