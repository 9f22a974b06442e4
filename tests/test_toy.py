"""The toy adversarial example: its classifier, its map, and the worst attack."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributions import Normal

from tailoring.experiments import _toy_report as reports
from tailoring.experiments import toy
from tailoring.experiments._rows import read
from tailoring.experiments._toy_map import Gaussians, Window, accuracies, best_linear, linear
from tailoring.experiments.toy import Means, Separator, Setting, classifier

DATA = Gaussians()
RADII = (0.0, 0.5, 1.0, 2.0)
COARSE = Window(pixel=0.5)
CONFIG = replace(toy.quick(), window=COARSE, radii=RADII)


def logit(model):
    def z(x):
        with torch.no_grad():
            return model(x).diff(dim=1).squeeze(1)

    return z


@pytest.mark.parametrize("kind", [Separator, Means])
def test_logits_are_log_densities_but_for_a_constant(kind):
    x = 5 * torch.randn(50, 2)
    exact = [Normal(sign * torch.tensor(DATA.mean), torch.tensor(DATA.deviation)).log_prob(x).sum(1) for sign in (-1, 1)]
    difference = kind(DATA)(x) - torch.stack(exact, 1)
    torch.testing.assert_close(difference, difference[:1, :1].expand_as(difference), atol=2e-4, rtol=1e-4)


def test_one_step_of_tailoring_by_hand():
    """Brute force for the most likely point, then the gradient of KL(p || q) with respect to w and b on paper."""
    eps, lr = 2.0, 10.0
    x = torch.tensor([[1.0, -0.6], [-6.0, 1.3], [4.0, 0.2]])
    net = Separator(DATA)
    angle, radius = torch.linspace(0, 2 * torch.pi, 721), torch.linspace(0, eps, 81)
    offsets = (radius[:, None, None] * torch.stack([angle.cos(), angle.sin()], 1)).flatten(0, 1)
    expected = []
    for query in x:
        points = query + offsets
        best = points[net(points).logsumexp(1).argmax()]
        a, b = (net(point[None]).diff(dim=1).squeeze() for point in (query, best))
        p = a.sigmoid()
        slope = p * (1 - p) * (a - b)  # d KL(p(a) || q(b)) / da
        weight, bias = net.separator.weight[0] - lr * slope * query, net.separator.bias[0] - lr * slope
        expected.append(weight @ query + bias)
    found = logit(classifier(CONFIG, Setting(eps)))(x)
    torch.testing.assert_close(found, torch.stack(expected).detach(), rtol=0.02, atol=0.05)


def test_the_map_agrees_with_the_formula_for_a_line():
    window = Window(pixel=0.2)
    z = window.grid(logit(Separator(DATA)))
    assert accuracies(DATA, window, z, RADII) == pytest.approx(linear(DATA, RADII), abs=0.012)


def test_the_map_knows_where_its_pixels_are():
    window = Window((3.0, 1.0), 0.5)
    z = window.grid(lambda x: x[:, 1] - 0.25 * x[:, 0])
    assert z.shape == (5, 13)
    for x, y in window.boundary(z, every=1):
        assert y == pytest.approx(0.25 * x, abs=1e-3)


def test_the_best_line_is_the_discriminant_without_an_attack_and_better_with_one():
    plain, best = linear(DATA, RADII), best_linear(DATA, RADII)
    assert best[0] == pytest.approx(plain[0], abs=1e-3)
    assert all(b >= p - 1e-4 for b, p in zip(best, plain, strict=True))
    assert best[-1] > plain[-1] + 0.1
    assert plain == sorted(plain, reverse=True)


def test_tailoring_trades_clean_accuracy_for_robustness():
    plain = linear(DATA, RADII)
    found = accuracies(DATA, COARSE, COARSE.grid(logit(classifier(CONFIG, Setting(2.0)))), RADII)
    assert found[-1] > plain[-1] + 0.1
    assert found[0] < plain[0] - 0.02
    assert found == sorted(found, reverse=True)


def test_tailored_decisions_are_symmetric_and_not_linear():
    model = logit(classifier(CONFIG, Setting(2.0)))
    x = 4 * torch.randn(200, 2)
    torch.testing.assert_close(model(x), -model(-x), atol=1e-2, rtol=1e-2)
    found = [y for x, y in COARSE.boundary(COARSE.grid(model)) if abs(x) < 15]
    across = [x for x, _ in COARSE.boundary(COARSE.grid(model)) if abs(x) < 15]
    fit = torch.linalg.lstsq(torch.tensor(across)[:, None], torch.tensor(found)[:, None])
    assert float((torch.tensor(across)[:, None] @ fit.solution - torch.tensor(found)[:, None]).abs().max()) > 0.3


def test_a_run_goes_on_where_it_stopped_and_reports(tmp_path):
    config = replace(CONFIG, out=tmp_path, window=Window(pixel=1.0), eps=(1.0, 2.0), grids=(1, 5), lrs=(1.0, 10.0), ascent=5)
    toy.run(config)
    path = tmp_path / "rows.jsonl"
    whole = {str(r["setting"]): r["accuracy"] for r in read(path) if r["kind"] == "result"}
    assert len(whole) == len(set(toy.plan(config)))
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[: len(lines) // 2]))
    toy.run(config)
    assert {str(r["setting"]): r["accuracy"] for r in read(path) if r["kind"] == "result"} == whole
    text = toy.report(tmp_path)
    for expected in ("linear separator", "tailored, eps 2", "1 start", "energy-weighted", "tailoring the means"):
        assert expected in text
    assert {"boundaries.png", "boundaries.svg", "attack.svg", "report.html"} <= {p.name for p in tmp_path.iterdir()}


def test_the_tables_in_the_docs_are_those_of_the_committed_rows():
    folder = Path(__file__).parents[1] / "docs" / "experiments" / "toy"
    page = folder.with_suffix(".md").read_text()
    for table in reports._tables(reports.Results(list(read(folder / "rows.jsonl")))):
        lines = [line for line in table.markdown().splitlines() if line.startswith("| ")]
        assert len(lines) > 2
        assert not [line for line in lines if line not in page]
