"""Tests the formulas of lab/studies/theory.py against hand-worked cases and second methods.

    python -m pytest tests/lab/test_theory.py
"""

import itertools
import json
import math

import numpy as np
import pytest

from lab.studies import theory


@pytest.mark.parametrize("q, r, p", [(0.25, 0.2, 0.3), (0.7, 0.4, 0.0), (0.5, -0.1, 0.2)])
def test_the_lemma_with_a_groups_own_mean_is_exact(q, r, p):
    """Against the sum over every outcome of a group of two, weighted by its probability."""
    total = 0.0
    for episodes in itertools.product(itertools.product((0, 1), (0, 1)), repeat=2):      # (taken, won) twice
        chance = math.prod((q if taken else 1 - q) * (1 - (p + r * taken) if won else p + r * taken)
                           for taken, won in episodes)
        mean = sum(won for _, won in episodes) / 2
        total += chance * sum((won - mean) * taken for taken, won in episodes) / 2
    assert total == pytest.approx(theory.flawed_advantage(q, r, 2), abs=1e-12)
    assert theory.flawed_advantage(q, r, 2) == theory.flawed_advantage(q, r) / 2
    assert theory.flawed_advantage(0.5, 0.2) == pytest.approx(-0.05)          # r / 4, the largest


def test_sampled_advantages_agree_with_the_formula():
    mean, error = theory.sampled_advantage(0.5, 0.2, 0.3, 8, 20_000, np.random.default_rng(0))
    assert abs(mean - theory.flawed_advantage(0.5, 0.2, 8)) < 5 * error < 0.01


def test_three_actions_by_hand():
    q_3, r1, r2 = np.array([0.4, 0.55, 0.05]), 0.02, 0.4
    advantage_3 = theory.advantages_of_three(q_3, r1, r2)
    assert advantage_3 == pytest.approx([-0.0048, -0.2156, 0.2204]) and advantage_3.sum() == pytest.approx(0)
    change_3, log_odds = theory.step_of_three(q_3, r1, r2)
    exact_3 = q_3 * (advantage_3 - q_3 @ advantage_3)
    assert change_3 == pytest.approx(exact_3, abs=1e-4) and log_odds == pytest.approx(-0.0048 - 0.2204)
    assert theory.flawed_rises(q_3, r1, r2) and change_3[0] - change_3[2] > 0 > log_odds
    assert not theory.flawed_rises(np.array([0.4, 0.05, 0.55]), r1, r2)       # 2 is less likely than 3


@pytest.mark.slow
def test_the_log_odds_rise_in_no_random_case(monkeypatch):
    """And each case can occur: no failure is less likely than never or likelier than always."""
    step, spans = theory.step_of_three, []

    def noted(q_3, r1, r2):
        changes = r1, r2, -q_3[1] * r2 / q_3[2]
        spans.append(max(changes) - min(changes))
        return step(q_3, r1, r2)

    monkeypatch.setattr(theory, "step_of_three", noted)
    found = theory.random_cases(3000, np.random.default_rng(1))
    assert found["log-odds rise"] == found["formula wrong"] == 0
    assert len(spans) == 3000 and max(spans) <= 1
    assert 0.05 < found["flawed rises"] < 0.09 and found["gap rises"] < 0.006


def test_fixed_points_and_the_limits_on_either_side():
    assert theory.fixed_points(0.02, 0.2) == pytest.approx((0.1127, 0.8873), abs=1e-4)
    assert theory.fixed_points(0.04, 0.2) == pytest.approx((0.2764, 0.7236), abs=1e-4)
    assert theory.fixed_points(0.05, 0.2) == pytest.approx((0.5, 0.5))
    assert theory.fixed_points(0.06, 0.2) is None
    for start, end in ((0.05, 0.1127), (0.88, 0.1127), (0.89, 1.0)):
        assert theory.pushed(start, 0.02, 0.2)[-1] == pytest.approx(end, abs=2e-3)
    assert theory.pushed(0.05, 0.06, 0.2)[-1] > 0.99


@pytest.mark.parametrize("coupling, flawed, good", [(0.3, 0.26, 0.85), (0.5, 0.38, 0.89), (0.7, 0.57, 0.92),
                                                    (0.9, 0.90, 0.98)])
def test_the_peaks_of_a_coupled_flaw(coupling, flawed, good):
    paths = theory.coupled_paths(coupling)
    assert theory.peak(paths) == pytest.approx((flawed, good), abs=0.01)
    odds = [[math.log(q / (1 - q)) for q in path] for path in paths]
    gaps = [g - b for g, b in zip(*odds)]
    assert all(later > earlier for earlier, later in zip(gaps, gaps[1:]))    # the log-odds gap only grows
    assert theory.narrowest(paths) == pytest.approx(0.077 if coupling == 0.9 else 0.1, abs=1e-3)


def test_a_weakly_coupled_flaw_only_falls():
    assert theory.peak(theory.coupled_paths(0.1)) is None


def test_the_turning_point():
    """In the limit z1 - z2 = ln(.5 * .5 / .1) = .916; exactly where the two slopes are equal."""
    assert theory.large_turning_point(8.0, 0.5, 0.5, 0.1) == pytest.approx(8.9163, abs=1e-4)
    for z2 in (0.5, 2.0, 8.0):
        z1 = theory.turning_point(z2, 0.5, 0.5, 0.1)
        slope = [math.exp(z) / (1 + math.exp(z)) ** 2 for z in (z1, z2)]
        assert 0.5 * 0.5 * slope[0] == pytest.approx(0.1 * slope[1])
    assert theory.turning_point(8.0, 0.5, 0.5, 0.1) == pytest.approx(8.9167, abs=1e-3)
    assert theory.turning_point(0.5, 0.1, 0.1, 0.5) is None                   # it falls from the start


@pytest.mark.slow
def test_the_study_writes_numbers_figures_and_page_and_is_reproducible(tmp_path, capsys):
    for name in ("one", "two"):
        assert theory.main(["--n", "200", "--out", str(tmp_path / name)]) == 0
    one, two = (json.loads((tmp_path / name / "theory.json").read_text()) for name in ("one", "two"))
    assert one == two and one["three"]["cases"] == 200
    assert one["command"] == "python -m lab.studies.theory --n 200 --seed 0"
    pictures = [(tmp_path / name / "theory.svg").read_text() for name in ("one", "two")]
    assert pictures[0] == pictures[1] and "tipping point" in (tmp_path / "one" / "theory.md").read_text()
    with pytest.raises(SystemExit):
        theory.main(["--n", "3", "--out", str(tmp_path)])
    assert "--n=3: expected 100" in capsys.readouterr().err
