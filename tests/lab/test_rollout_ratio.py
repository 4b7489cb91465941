"""Tests that lab.bench.rollout gives both sides the same work.

    python -m pytest tests/lab/test_rollout_ratio.py
"""

import pytest

import rollout as played
from lab.bench import rollout

TURNS, EPISODES = 4, 3


@pytest.mark.slow
def test_both_sides_see_the_recorded_observations_and_prompts_of_about_equal_lengths(monkeypatch):
    """Ours had "Nothing happens." in place of most observations until 2026-11-27: a cut response was none."""
    kept, play = [], played.play
    monkeypatch.setattr(played, "play", lambda *given, **more: kept.extend(play(*given, **more)) or kept)
    model, peer, chat = rollout.both_models(16)
    tasks, seen = rollout.recorded(EPISODES)
    slots = rollout.new_slots(model, chat, EPISODES)
    _, new, _, ours = rollout.ours(model, chat, tasks, seen, TURNS, slots)
    _, theirs_new, _, theirs = rollout.theirs(peer, chat, seen, TURNS)
    for episode, observations in zip(kept, seen, strict=True):
        wanted = [observations[t % len(observations)] for t in range(TURNS)]
        assert [turn.observation for turn in episode.turns] == wanted
    closed = EPISODES * (TURNS - 1)                  # a cut response is closed in our prompts
    assert 0 <= ours - theirs + (theirs_new - new) <= closed + 2 * abs(theirs_new - new)
