"""Tests of the Gymnasium environment: registration, Gymnasium's own checks, rewards, limits and errors.

    python -m pytest tests/envs/test_gym.py
"""

import random
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from test_household import WIN, goal_of, kitchen, write_game

gymnasium = pytest.importorskip("gymnasium", reason="needs: pip install gymnasium")
from gymnasium.utils.env_checker import check_env  # noqa: E402

import envs.alfred.gym  # noqa: E402, F401

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def real(tmp_path):
    """A folder in ALFWorld's layout with one game, in valid_seen, that the commands WIN win."""
    write_game(tmp_path / "valid_seen/pick/trial", pddl_problem=kitchen(goal_of("pick_and_place_simple")))
    return str(tmp_path)


@pytest.mark.parametrize("split", ["train", "L2"])
def test_gymnasiums_own_checks_pass_without_a_warning(split):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(gymnasium.make("gcd/Household-v0", split=split).unwrapped)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "name"), [("import envs.alfred.gym", "gcd/Household-v0"),
                                              ("", "envs.alfred.gym:gcd/Household-v0")])
def test_it_is_found_by_its_name_in_a_new_process(before, name):
    script = f"import gymnasium\n{before}\nprint(gymnasium.make({name!r}).reset(seed=1)[1]['won'])"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, text=True, capture_output=True)
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_a_seed_fixes_the_tasks_and_two_seeds_differ():
    def drawn(seed):
        env = gymnasium.make("gcd/Household-v0")
        return [env.reset(seed=seed)[1]["task"], *(env.reset()[1]["task"] for _ in range(5))]

    assert drawn(0) == drawn(0) != drawn(1)
    assert len(set(drawn(0))) == 6
    assert all(task.startswith("train/") for task in drawn(0))


def test_winning_terminates_in_the_last_turn_too_and_the_limit_truncates(real):
    for limit, ended in ((5, (1.0, True, False)), (4, (0.0, False, True))):
        env = gymnasium.make("gcd/Household-v0", split="L0", games=real, max_turns=limit)
        observation, info = env.reset(seed=0)
        assert observation.endswith("\n\nYour task is to: put a hot apple in fridge.")
        assert info["task"] == "valid_seen/pick/trial" and "go to fridge 1" in info["admissible_commands"]
        steps = [env.step(command) for command in WIN[:limit]]
        assert [step[1:4] for step in steps[:-1]] == [(0.0, False, False)] * (limit - 1)
        assert steps[-1][1:4] == ended and steps[-1][4]["won"] == ended[1]


def test_only_the_command_that_wins_is_rewarded(real):
    """Also if one goes on after the win, and even if the game is won again."""
    env = gymnasium.make("gcd/Household-v0", split="L0", games=real)
    for seed in (0, 1):                                       # the second episode starts afresh
        env.reset(seed=seed)
        rewards = [env.step(command)[1] for command in
                   [*WIN, "look", "take apple 1 from fridge 1", "move apple 1 to fridge 1", "fly"]]
        assert rewards == [0.0] * 4 + [1.0] + [0.0] * 4


@pytest.mark.slow
def test_an_asynchronous_vector_gives_the_texts_of_a_synchronous_one():
    texts = []
    for mode, options in (("sync", {}), ("async", {"shared_memory": False})):
        games = gymnasium.make_vec("envs.alfred.gym:gcd/Household-v0", num_envs=2, vectorization_mode=mode,
                                   vector_kwargs=options, split="L0")
        texts.append([games.reset(seed=1)[0], games.step(["look", "inventory"])[0]])
        games.close()
    assert texts[0] == texts[1] and texts[0][0][0].startswith("-= Welcome to TextWorld, ALFRED! =-")


def test_an_invalid_command_has_no_effect():
    env = gymnasium.make("gcd/Household-v0", split="L1")
    _, info = env.reset(seed=2)
    for command in ("", "fly", env.action_space.sample()):
        observation, reward, terminated, truncated, after = env.step(command)
        assert (observation, reward, terminated, truncated) == ("Nothing happens.", 0.0, False, False)
        assert after == info


@pytest.mark.parametrize("wrong", [None, 3, ["look"], {}, np.array("look")], ids=repr)
def test_an_action_that_is_not_text_is_refused_and_changes_nothing(wrong):
    def play(disturb):
        env = gymnasium.make("gcd/Household-v0", split="L1", max_turns=3).unwrapped
        with pytest.raises(gymnasium.error.ResetNeeded):
            env.step("look")
        steps = [env.reset(seed=2)]
        while len(steps) < 4:
            if disturb:
                with pytest.raises(ValueError, match="^command .*: expected text$"):
                    env.step(wrong)
            steps.append(env.step(steps[-1][-1]["admissible_commands"][0]))
        return steps

    assert play(disturb=True) == play(disturb=False)
    assert play(disturb=True)[-1][3]


def test_random_play_stays_in_the_spaces():
    env, rng = gymnasium.make("gcd/Household-v0", max_turns=30), random.Random(0)
    for seed in range(5):
        observation, info = env.reset(seed=seed)
        over = False
        while not over:
            command = rng.choice(info["admissible_commands"])
            assert observation in env.observation_space and command in env.action_space
            observation, _, terminated, truncated, info = env.step(command)
            over = terminated or truncated


@pytest.mark.parametrize(("options", "message"), [
    ({"split": "L3"}, "split 'L3': expected one of"), ({"split": []}, r"split=\[\]: expected text"),
    ({"max_turns": 0}, "max_turns=0: expected 1 or more"), ({"max_turns": 1.5}, "max_turns=1.5: expected 1"),
    ({"games": "nothere"}, "^games=nothere: no such file or folder"),
    ({"games": 3}, "games=3: expected a path")])
def test_invalid_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        gymnasium.make("gcd/Household-v0", **options)


def test_a_split_without_games_is_refused(real):
    for split in ("train", "L1"):
        with pytest.raises(ValueError, match="no solvable games of split"):
            gymnasium.make("gcd/Household-v0", split=split, games=real)
