"""Settings that would fail only after hours of training are refused before."""

from __future__ import annotations

from typing import Any

from lightning_fabric import Fabric


def at_least_one(config: Any, *names: str) -> None:
    """Refuse counts below one, also among several."""
    for name in names:
        value = getattr(config, name)
        for number in value if isinstance(value, tuple) else [value]:
            if number < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, not {number}")


def not_empty(config: Any, *names: str) -> None:
    for name in names:
        if not getattr(config, name):
            raise ValueError(f"--{name.replace('_', '-')} is empty: give at least one value")


def not_used(config: Any, name: str, why: str) -> None:
    """Refuse what would have no effect."""
    if getattr(config, name) is not None:
        raise ValueError(f"--{name.replace('_', '-')} {getattr(config, name)} would not be used, {why}, or leave it out")


def make_fabric(config: Any, **options: Any) -> Fabric:
    try:
        return Fabric(accelerator=config.accelerator, precision=config.precision, **options)
    except (RuntimeError, ModuleNotFoundError) as error:  # a device that this machine does not have, or cannot drive
        raise ValueError(f"--accelerator {config.accelerator}: {str(error).splitlines()[0]}") from None
