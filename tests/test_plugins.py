"""Proves that one file makes a world or an algorithm, and that what is wrong with one is said in a line.

    python -m pytest tests/test_plugins.py          # about a minute: whole runs in a copy of the checkout

The files are tests/recipes/guess.py and tests/recipes/opo.py; README shows them as the way to add others.
"""

import importlib.util
import shutil
import subprocess
import sys

import pytest
import torch
from tiny_runs import ENVIRONMENT, ROOT, rows

import config
import envs
from rollout import Episode, Turn
from run import files

RECIPES = ROOT / "tests" / "recipes"
NOT_CODE = (".git", ".venv", "runs", "results", "tests", "__pycache__", ".pytest_cache", ".ruff_cache")
TINY = ("--device cpu --hidden-size 32 --layers 2 --tasks 4 --group-size 4 --iterations 2 --minibatches 2 "
        "--judge-turns 8 --judge-group-size 4 --cold-start-lr 1e-2").split()
COLD = ("--demonstrations 200 --judge-demonstrations 20 --mistake-rate 0.2").split()


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of the checkout with a file more in envs/ and one in algorithms/."""
    copy = tmp_path_factory.mktemp("copy") / "checkout"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*NOT_CODE))
    shutil.copy(RECIPES / "guess.py", copy / "envs")
    shutil.copy(RECIPES / "opo.py", copy / "algorithms")
    return copy


def run_in(checkout, *flags):
    """A finished gcd.py of the copy."""
    command = [sys.executable, "gcd.py", *map(str, flags)]
    return subprocess.run(command, cwd=checkout, env=ENVIRONMENT | {"PYTHONPATH": ""}, timeout=300,
                          check=False, capture_output=True, text=True)


# A world

def test_one_file_is_a_world(checkout):
    """Cold start, two iterations of GCD, and an evaluation of what the world says is unseen."""
    done = run_in(checkout, "--env", "guess", *TINY, *COLD, "--judge-labels", "oracle", "--out", "runs/guess")
    assert done.returncode == 0, done.stderr[-4000:]
    out = checkout / "runs" / "guess"
    first, *lines = files.read_lines(out / "metrics.jsonl")[0]
    assert (first["world"], first["games"], first["config"]["max_turns"]) == ("guess", "guess", 8)
    assert first["config"]["highest"] == 20 and first["captions"]["test"].startswith("the numbers held out")
    asked, judged = (next(line for line in lines if line.get("phase") == phase)
                     for phase in ("demonstrations", "judge demonstrations"))
    assert asked["kept"] > 100 and judged["kept"] > 0
    assert [row["iteration"] for row in rows(out)] == [0, 1]
    for row in rows(out):
        assert row["rollout/episodes"] == 16 and row["judge/turns"] > 0 and row["policy/grad_norm"] > 0
        assert row["rollout/invalid_frac"] < 0.5                # its words are those of the model
    evaluated = files.read_json(out / "evaluation.json")["splits"]
    assert {split: modes["sampled"]["n"] for split, modes in evaluated.items()} == {"test": 6}
    assert done.stdout.startswith("test: success ")


def test_a_world_brings_flags_and_labels_of_its_own(checkout):
    flags = ["--env", "guess", "--highest", 9, "--judge-labels", "halves", "--train-types", "all"]
    done = run_in(checkout, *flags, *TINY, *COLD, "--iterations", 1, "--out", "runs/halves")
    assert done.returncode == 0, done.stderr[-4000:]
    first, *_ = files.read_lines(checkout / "runs" / "halves" / "metrics.jsonl")[0]
    assert first["config"]["highest"] == 9
    assert first["games_hash"].keys() == {"train"}              # nothing is unseen, so nothing evaluated
    (row,) = rows(checkout / "runs" / "halves")
    assert row["judge/turns"] > 0
    episodes, _ = files.read_lines(checkout / "runs" / "halves" / "episodes.jsonl")
    turns = [turn for episode in episodes for turn in episode["turns"]]
    assert {turn["label"] for turn in turns} == {"good", "bad"}             # this kind leaves no turn without


@pytest.fixture
def write_world(tmp_path, monkeypatch):
    """write_world(name, text): a file in a folder that is looked through in place of envs/."""
    monkeypatch.setattr(envs, "__file__", str(tmp_path / "__init__.py"))
    monkeypatch.setattr(envs, "__path__", [str(tmp_path)])
    written = []

    def write(name, text):
        written.append(name)
        (tmp_path / f"{name}.py").write_text(text)

    yield write
    for name in written:
        sys.modules.pop(f"envs.{name}", None)
        vars(envs).pop(name, None)


def refused(capsys, *flags):
    """The one line that these flags come to."""
    with pytest.raises(SystemExit) as stopped:
        config.parse([str(flag) for flag in flags])
    said, error = capsys.readouterr()
    assert stopped.value.code == 2 and said == "" and error.count("\n") == 1
    assert error.startswith("gcd.py: error: ") and error.endswith("; see --help\n")
    return error.removeprefix("gcd.py: error: ").removesuffix("; see --help\n")


GUESS = (RECIPES / "guess.py").read_text(encoding="utf-8")


@pytest.mark.fast
@pytest.mark.parametrize("text, reason", [
    ("import nosuchpackage\n", "ModuleNotFoundError: No module named 'nosuchpackage'"),
    ("1 / 0\n", "ZeroDivisionError: division by zero"), ("class World(:\n", "SyntaxError: invalid syntax")])
def test_a_world_that_does_not_import_shows_its_error(write_world, capsys, text, reason):
    write_world("broken", text)
    line = refused(capsys, "--env", "broken")
    assert line.startswith(f"--env=broken: cannot import envs/broken.py: {reason}")


@pytest.mark.fast
def test_a_world_is_asked_only_for_what_it_has(write_world, capsys):
    write_world("bare", GUESS.replace("def expert", "def unused").replace("def oracle", "def unused_too"))
    line = refused(capsys, "--env", "bare")
    assert line == "--demonstrations=3000: bare has no expert; 0 starts RL from nothing"
    line = refused(capsys, "--env", "bare", "--demonstrations", 0, "--judge-labels", "oracle")
    assert line == "--judge-labels=oracle: bare has no oracle"
    bare = ["--env", "bare", "--demonstrations", "0"]
    assert config.parse([*bare, "--no-gcd"]).world.expert is None
    assert config.parse([*bare, "--preset", "paper"]).judge_labels == "rule"


@pytest.mark.fast
def test_what_a_world_says_of_itself_is_checked(write_world, capsys):
    write_world("guess", GUESS)
    assert refused(capsys, "--env", "household") == "--env=household: expected one of guess"
    assert refused(capsys, "--env", "guess", "--highest", 2) == "--highest=2: expected 5 to 99"
    assert refused(capsys, "--env", "guess", "--evaluate", "L0") == "--evaluate=L0: no split 'L0' (dev, test)"
    line = refused(capsys, "--env", "guess", "--judge-labels", "thirds")
    assert line.startswith("--judge-labels=thirds: expected one of ") and line.endswith(", halves")
    settings = config.parse(["--env", "guess"])
    assert (settings.max_turns, settings.splits) == (8, ["test"])
    assert config.parse(["--env", "guess", "--train-types", "all"]).splits == []
    assert config.parse(["--env", "guess", "--max-turns", "3"]).max_turns == 3
    assert config.parse(["--env", "guess", "--judge-labels", "halves"]).judge_labels == "halves"


@pytest.mark.fast
def test_a_world_has_no_flag_of_the_runs_names(write_world, capsys):
    write_world("guess", GUESS.replace("highest", "tasks"))
    line = refused(capsys, "--env", "guess")
    assert line == "--algo grpo --env guess: names two settings alike: tasks"


@pytest.mark.fast
def test_the_world_of_the_recipe_is_a_sound_one(write_world):
    """Its expert wins by halving, its mistakes are what the oracle calls bad, and its words suffice."""
    write_world("guess", GUESS)
    world = envs.find("guess")()
    (game,), tasks = world.make(1), world.split("dev") + world.split("test")
    assert sorted(task.problem for task in tasks) == list(range(1, 21))
    drawn = {task.problem for task in world.train("part", 0, 300)}
    assert drawn == {task.problem for task in world.split("dev")}
    texts = set()
    for task in tasks:
        shown = world.expert([game]).show(task, 0, 0.0, 8)
        assert shown.won and len(shown.commands) <= 5 and not any(shown.mistakes)
        texts |= {*shown.observations, *shown.commands}
        clumsy = world.expert([game]).show(task, task.problem, 0.5, 30)
        labels = world.oracle(clumsy.observations, clumsy.commands)
        assert labels == ["bad" if mistake else "good" for mistake in clumsy.mistakes]
        episode = Episode(task, 0, turns=[Turn(seen, [], [], [], "", command, True, seen)
                                          for seen, command in zip(shown.observations, shown.commands)])
        assert world.labels["halves"](episode) == ["good"] * len(shown.commands)
    seen = ["I think of a number from 1 to 20.", "It is above 7.", world.nothing]
    assert world.oracle(seen, ["guess 7", "dance"]) == ["good", "bad"]
    rest = texts
    for word in sorted(world.words(), key=len, reverse=True):
        rest = {text.replace(word, "") for text in rest}
    assert rest <= {"", "."}


# An algorithm

def test_one_file_is_an_algorithm(checkout):
    """Its flag changes what is learnt; whoever has not chosen it is told whose flag it is."""
    flags = ["--env", "guess", *TINY, *COLD, "--no-gcd", "--evaluate", "none"]
    assert run_in(checkout, *flags, "--iterations", 0, "--out", "runs/cold").returncode == 0
    flags += ["--model", "runs/cold/checkpoint", "--demonstrations", 0, "--algo", "opo"]
    for length in ("tokens", "turns"):
        done = run_in(checkout, *flags, "--length-in", length, "--out", f"runs/{length}")
        assert done.returncode == 0, done.stderr[-4000:]
    tokens, turns = (rows(checkout / "runs" / length) for length in ("tokens", "turns"))
    assert [row["iteration"] for row in tokens] == [row["iteration"] for row in turns] == [0, 1]
    assert all(row["policy/grad_norm"] > 0 for row in tokens)
    first, *_ = files.read_lines(checkout / "runs" / "turns" / "metrics.jsonl")[0]
    assert (first["config"]["algo"], first["config"]["length_in"]) == ("opo", "turns")


def test_its_flag_is_in_its_help_and_with_no_other(checkout):
    shown = run_in(checkout, "--help", "--algo", "opo")
    assert shown.returncode == 0
    assert "--algo opo:" in shown.stdout and "--length-in tokens|turns" in shown.stdout
    other = run_in(checkout, "--length-in", "turns")
    assert (other.returncode, other.stdout) == (2, "")
    assert other.stderr == "gcd.py: error: --length-in: not read here, but with --algo opo; see --help\n"


@pytest.mark.fast
def test_the_algorithm_of_the_recipe_by_hand():
    """Rewards 1 and 0 of lengths 3 and 1 have the baseline 3/4; equal ones give 0, whatever the lengths."""
    specification = importlib.util.spec_from_file_location("opo", RECIPES / "opo.py")
    opo = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(opo)
    reward_E, group_E = torch.tensor([1.0, 0.7, 0.0, 0.7, 0.7]), torch.tensor([0, 1, 0, 1, 1])
    advantage_E = opo.length_weighted_advantage(reward_E, torch.tensor([3, 7, 1, 5, 3]), group_E)
    assert advantage_E.tolist() == [0.25, 0.0, -0.75, 0.0, 0.0]
