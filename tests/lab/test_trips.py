"""Proves that the way from reward to loss stays short, and that the profiler which counts it sees detours.

    python -m pytest tests/lab/test_trips.py
"""

import json
import re
import subprocess
import sys

import pytest

from lab.bench import trips


@pytest.mark.slow
def test_from_reward_to_loss_are_few_files_returns_and_frames():
    """Before the redesign of 2026-11-23 there were 10 files, 15 returns and 10 frames. In a new process, as
    the page's command counts: no module is loaded before the run."""
    done = subprocess.run([sys.executable, "-m", "lab.bench.trips"], cwd=trips.ROOT, text=True, check=True,
                          capture_output=True, timeout=500)
    printed = re.search(r"^\{$.*^\}$", done.stdout, re.M | re.S)[0]
    trip = json.loads(printed)
    assert trip["frames"][0] == "gcd.iteration" and trip["frames"][-1] == "losses.clipped_surrogate"
    assert len(trip["frames"]) == 5 and len(trip["files"]) <= 8 and trip["returns"] <= 8, trip
    text = f"{len(trip['files'])} files, with {trip['returns']} returns"
    assert text in (trips.ROOT / "docs" / "code.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_call_site_counts_once_and_an_entry_into_a_known_file_is_a_return():
    """By hand: gcd -> rewards -> (losses, twice from one line) -> rewards' second call into losses."""
    trip = trips.Trip()
    root = trips.ROOT
    source = {"losses.py": "def f(): pass", "gcd.py": "write_rewards()\n",
              "algorithms/rewards.py": "def write_rewards():\n    for _ in 'ab':\n        f()\n    f()\n"}
    scope = {}
    for file in ("losses.py", "algorithms/rewards.py"):
        exec(compile(source[file], str(root / file), "exec"), scope)
    sys.setprofile(trip)
    try:
        exec(compile(source["gcd.py"], str(root / "gcd.py"), "exec"), scope)
    finally:
        sys.setprofile(None)
    assert trip.entries == [("gcd.py", False), ("algorithms/rewards.py", False), ("losses.py", False),
                            ("losses.py", True)]
