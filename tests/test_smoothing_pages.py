"""Certified robustness, what the pages say: the tables, certificates and weights that are committed."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from real_data import SHARED, needs
from scipy import stats

from tailoring.experiments._classifiers import build, read_weights
from tailoring.experiments._rows import read
from tailoring.experiments._smoothing_report import tables
from tailoring.experiments._smoothing_results import Results, difference
from tailoring.nn import load_weights
from tailoring.smoothing import bootstrap_difference, lower_bound, read_log

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("name", ["smoothing", "smoothing-seed1", "smoothing-why", "macer", "imagenette"])
def test_the_tables_in_the_docs_are_those_of_the_committed_rows(name):
    folder = ROOT / "docs" / "experiments" / name
    page = folder.with_suffix(".md").read_text()
    made = tables(Results(folder))
    assert len(made) >= 5
    for table in made:
        words = f"**{table.title}**\n\n{table.markdown()}\n"
        assert words in page, f"docs/experiments/{name}.md does not hold the table {table.title!r} of its rows"


def test_where_the_large_networks_steps_point_is_told_as_in_its_rows():
    folder = ROOT / "docs" / "experiments" / "smoothing-why"
    (table,) = (table for table in tables(Results(folder / "resnet110")) if table.title.startswith("Where does the step point"))
    assert len(table.rows) == 5
    assert table.markdown() in folder.with_suffix(".md").read_text()


@pytest.mark.parametrize(
    ("line", "folder", "sigma", "n"),
    [
        ("0.25, 10,000", "smoothing", 0.25, 10_000),
        ("0.5, 10,000", "smoothing", 0.5, 10_000),
        ("0.5, 10,000, [second training](smoothing-seed1.md)", "smoothing-seed1", 0.5, 10_000),
        ("0.5, 100,000, second training", "smoothing-seed1", 0.5, 100_000),
        ("1, 10,000", "smoothing", 1.0, 10_000),
    ],
)
def test_the_summary_is_that_of_the_rows(line, folder, sigma, n):
    found = Results(ROOT / "docs" / "experiments" / folder).test(sigma, n)

    def told(against):
        if against not in found:
            return "not certified"
        mean, low, high = difference(found["meta"], found[against])
        return f"{mean:+.4f} ({low:+.4f} to {high:+.4f})"

    cells = [line, *(f"{found[role].acr():.3f}" for role in ("plain", "meta")), told("control-frozen"), told("meta-0")]
    assert f"| {' | '.join(cells)} |" in (ROOT / "docs" / "experiments" / "smoothing.md").read_text()


@pytest.mark.parametrize(("name", "n", "images"), [("smoothing", 10_000, range(0, 10_000, 20)), ("imagenette", 1000, range(0, 500, 5))])
def test_the_committed_certificates_are_of_the_same_images(name, n, images):
    results = Results(ROOT / "docs" / "experiments" / name)
    assert set(results.test(0.5, n)) >= {"plain", "control", "control-frozen", "tailored", "tailored-0", "meta", "meta-0"}
    for sigma, n in results.settings():
        found = results.test(sigma, n)
        assert all(sorted(c.rows) == list(images) for c in found.values())
        assert len({tuple(c.tensors()[0].tolist()) for c in found.values()}) == 1  # labels


def test_the_weights_in_the_repository_are_those_that_were_certified():
    folder = ROOT / "docs" / "experiments" / "smoothing-seed1"
    kept = {path.stem: hashlib.sha256(path.read_bytes()).hexdigest() for path in (folder / "weights").glob("*.safetensors")}
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    for c in (row for row in rows if row["kind"] == "certification" and row["training"] in kept):
        head = next(read(folder / "certified" / c["name"] / "rows.jsonl"))
        assert head["sha256"]["weights"] == kept[c["training"]]
    net = build("resnet110", 10)
    load_weights(net, read_weights(folder / "weights" / "s0.5-meta.safetensors"))
    assert set(kept) == {"s0.5-base", "s0.5-control", "s0.5-meta", "s0.5-smoothadv-control"}


@needs("smoothing-logs")
@pytest.mark.parametrize(
    ("sigma", "of_the_logs", "thinned", "of_ours"), [(0.25, 0.429, 0.386, 0.376), (0.5, 0.538, 0.503, 0.501), (1.0, 0.542, 0.518, 0.522)]
)
def test_our_plain_network_is_about_as_good_as_that_of_the_published_logs(sigma, of_the_logs, thinned, of_ours):
    """Their 100,000 votes for an image, from its radius, thinned to our 10,000. The numbers are those of the page."""
    log = read_log(SHARED / "smoothing-logs" / "certify" / "cifar10" / "resnet110" / f"noise_{sigma:.2f}" / "test" / f"sigma_{sigma:.2f}")
    plain = Results(ROOT / "docs" / "experiments" / "smoothing").test(sigma, 10_000)["plain"]
    assert log["idx"].tolist() == sorted(plain.rows)
    assert log["label"].tolist() == plain.tensors()[0].tolist()
    votes = np.arange(50_500, 100_001)
    radii = sigma * stats.norm.ppf(lower_bound(torch.tensor(votes), 100_000, 0.001).numpy())
    right = (log["label"] == log["predict"]).numpy()
    assert (log["radius"].numpy() * right).mean() == pytest.approx(of_the_logs, abs=5e-4)
    theirs = votes[np.abs(radii[:, None] - log["radius"].numpy()[right]).argmin(0)]
    ours = np.random.default_rng(0).hypergeometric(theirs, 100_000 - theirs, 10_000)
    radius = sigma * stats.norm.ppf(lower_bound(torch.tensor(ours), 10_000, 0.001).numpy())
    assert radius.clip(0).sum() / len(right) == pytest.approx(thinned, abs=1.5e-3)
    assert plain.acr() == pytest.approx(of_ours, abs=5e-4)


def test_the_bootstrap_interval_covers():
    """Radii with many zeros, as here: 95 % intervals of the mean difference hold the true one about that often."""
    random = torch.Generator().manual_seed(0)
    hits, trials = 0, 300
    for i in range(trials):
        right = torch.rand(200, generator=random) < 0.6
        radius = torch.rand(200, generator=random)
        a = torch.where(right, radius + 0.1 + 0.2 * torch.randn(200, generator=random), 0.0)
        _, low, high = bootstrap_difference(a, torch.where(right, radius, 0.0), draws=400, seed=i)
        hits += low <= 0.06 <= high
    assert 0.90 < hits / trials < 0.985
