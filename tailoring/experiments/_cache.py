"""Made data on disk: kept with the settings that made it and a checksum, never half-written."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor


def cached(folder: Path, name: str, settings: Any, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """What `make()` returned for these settings (a dataclass): from `folder` if it is there and whole, else made and put there."""
    wanted = json.dumps(asdict(settings), sort_keys=True)
    path = folder / f"{name}-{hashlib.sha256(wanted.encode()).hexdigest()[:12]}.safetensors"
    found = _read(path, wanted)
    if found is not None:
        return found
    make_folder(folder)
    made = make()
    write_whole(path, _seal({key: value.contiguous() for key, value in made.items()}, wanted))
    return made


def checksum(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}".encode())
        digest.update(tensors[name].reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def make_folder(folder: Path) -> None:
    """Raise before the work, not after it, if nothing could be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".writable-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise OSError(f"cannot write to {folder} ({error.strerror or error}): choose another folder") from error


def write_whole(path: Path, content: bytes) -> None:
    """Write under another name, then rename: whoever reads `path` finds all of it or the version before."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    with telling(path):
        try:
            with part.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)


@contextmanager
def telling(path: Path) -> Iterator[None]:
    """An error of the system says which file it was: that of a full disk does not."""
    try:
        yield
    except OSError as error:
        raise OSError(f"cannot write {path} ({error.strerror or error})") from error


def _seal(tensors: dict[str, Tensor], settings: str) -> bytes:
    return save(tensors, {"settings": settings, "checksum": checksum(tensors)})


def _read(path: Path, wanted: str) -> dict[str, Tensor] | None:
    """The tensors, or None where there are none, or not whole, or made with other settings."""
    try:
        content = path.read_bytes()
        length = int.from_bytes(content[:8], "little")
        about = json.loads(content[8 : 8 + length])["__metadata__"]
        tensors = load(content)
        if about["settings"] != wanted or about["checksum"] != checksum(tensors):
            raise ValueError("its settings or its checksum differ")
        return tensors
    except (FileNotFoundError, NotADirectoryError):
        return None
    except Exception as error:  # whatever is wrong with a cache, making it again is right
        warnings.warn(f"{path} is damaged ({error}) and is made again", stacklevel=3)
        return None
