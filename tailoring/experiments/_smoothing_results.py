"""What a run of the certified-robustness experiment found: its certificates, probes and trainings, from the rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tailoring.smoothing import average_radius, bootstrap_difference

from ._rows import Row, read_folder

LABELS = {
    "plain": "plain",
    "control": "control: the same extra training, no tailoring",
    "control-frozen": "control at sigma': meta-tailoring's training, 0 steps",
    "tailored": "tailored only",
    "tailored-0": "tailored only, 0 steps",
    "meta": "meta-tailored",
    "meta-0": "meta-tailored, 0 steps",
    "scratch": "meta-tailored from scratch",
    "scratch-0": "meta-tailored from scratch, 0 steps",
    "scratch-control": "control from scratch, at sigma', 0 steps",
    "macer": "MACER",
    "macer-control": "MACER at sigma', 0 steps",
    "macer-meta": "MACER, meta-tailored",
    "macer-meta-0": "MACER, meta-tailored, 0 steps",
    "smoothadv": "SmoothAdv",
    "smoothadv-control": "SmoothAdv at sigma', 0 steps",
    "smoothadv-meta": "SmoothAdv, meta-tailored",
    "smoothadv-meta-0": "SmoothAdv, meta-tailored, 0 steps",
}


@dataclass(frozen=True)
class Certified:
    """The images of one certification, by index."""

    about: Row
    rows: dict[int, Row]
    finished: bool

    @property
    def tailored(self) -> bool:
        return self.about["inner"]["nu"] > 0

    def tensors(self, convention: str = "sound") -> tuple[Tensor, Tensor, Tensor]:
        """Truth, answer and radius of each image."""
        key = "radius" if convention == "sound" else "paper_radius"
        rows = [self.rows[index] for index in sorted(self.rows)]
        truth, label = (torch.tensor([row[name] for row in rows]) for name in ("label", "predict"))
        return truth, label, torch.tensor([row[key] for row in rows], dtype=torch.float64)

    def acr(self, convention: str = "sound") -> float:
        return average_radius(*self.tensors(convention))

    def counted(self, indices: Sequence[int], convention: str = "sound") -> Tensor:
        """What each of these images adds to the sum of radii."""
        key = "radius" if convention == "sound" else "paper_radius"
        rows = [self.rows[index] for index in indices]
        return torch.tensor([row[key] if row["label"] == row["predict"] else 0.0 for row in rows], dtype=torch.float64)


class Results:
    def __init__(self, folder: Path):
        self.rows = read_folder(folder, "smoothing")
        self.config = self.rows[0]["config"]
        self.classes: int = next((row["classes"] for row in self.rows if row["kind"] == "data"), 0)
        self.trainings = {row["name"]: row for row in self.rows if row["kind"] == "trained"}
        self.probes = {row["role"]: row for row in self.rows if row["kind"] == "probed"}
        self.found: dict[str, Certified] = {}
        finished = {row["name"] for row in self.rows if row["kind"] == "certified"}
        for row in self.rows:
            if row["kind"] == "certification" and (images := _images(folder / "certified" / row["name"])):
                self.found[row["name"]] = Certified(row, images, row["name"] in finished)

    def test(self, sigma: float, n: int, *, begun: bool = False) -> dict[str, Certified]:
        """By role: the finished certifications, or also those that are `begun`. Half of the images may be easier than the other half."""
        asked = [c for c in self._part("test") if (c.about["sigma"], c.about["n"]) == (sigma, n)]
        return {c.about["role"]: c for c in asked if c.finished or begun}

    def validation(self) -> dict[str, Certified]:
        return {c.about["role"]: c for c in self._part("validation") if c.finished}

    def settings(self, *, begun: bool = False) -> list[tuple[float, int]]:
        """(sigma, N) of the certifications on test images, in the order in which they were made."""
        return list(dict.fromkeys((c.about["sigma"], c.about["n"]) for c in self._part("test") if c.finished or begun))

    def _part(self, part: str) -> list[Certified]:
        return [c for c in self.found.values() if c.about["part"] == part]


def _images(folder: Path) -> dict[int, Row]:
    if not folder.is_dir():
        return {}
    return {row["index"]: row for row in read_folder(folder) if row["kind"] == "image"}


def difference(a: Certified, b: Certified, convention: str = "sound") -> tuple[float, float, float]:
    """ACR of a minus that of b, over the images that both have, and the ends of its 95 % bootstrap interval."""
    both = sorted(a.rows.keys() & b.rows.keys())
    return bootstrap_difference(a.counted(both, convention), b.counted(both))


def interval(found: tuple[float, float, float]) -> tuple[str, str, str]:
    mean, low, high = found
    return f"{mean:+.4f}", f"{low:+.4f} to {high:+.4f}", "" if low <= 0 <= high else "yes"
