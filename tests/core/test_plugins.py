"""Tests of plug-ins: environments and algorithms that are one file, in the tree or outside it.

    python -m pytest tests/core/test_plugins.py     # minutes: complete runs, some in a copy of the checkout

The files are those of examples, which the documentation shows as examples.
"""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from test_config import mistake
from tiny_runs import ENVIRONMENT, ROOT, copy_code, module_of, rows

import config
import gcd
import update
from infra import files
from infra.signals import Stop
from rollout import Episode, Turn

EXAMPLES = ROOT / "examples"
TINY = ("--device cpu --hidden-size 32 --layers 2 --tasks 4 --group-size 4 --iterations 2 --minibatches 2 "
        "--judge-turns 8 --judge-group-size 4 --cold-start-lr 1e-2").split()
COLD = ("--demonstrations 200 --judge-demonstrations 20 --mistake-rate 0.2").split()


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of the checkout with one more file in envs/ and one in algorithms/."""
    copy = tmp_path_factory.mktemp("copy") / "checkout"
    copy_code(copy)
    shutil.copy(EXAMPLES / "guess.py", copy / "envs")
    shutil.copy(EXAMPLES / "opo.py", copy / "algorithms")
    return copy


def run_in(folder, *flags, program="gcd.py"):
    """Run gcd.py with a folder as the working directory; returns the finished process."""
    command = [sys.executable, program, *map(str, flags)]
    return subprocess.run(command, cwd=folder, env=ENVIRONMENT | {"PYTHONPATH": ""}, timeout=300,
                          check=False, capture_output=True, text=True)


# An environment in the tree

@pytest.fixture(scope="module")
def guessed(checkout):
    """A complete run in the copy with its own environment: the finished process."""
    done = run_in(checkout, "--env", "guess", *TINY, *COLD, "--judge-labels", "oracle", "--out", "runs/guess")
    assert done.returncode == 0, done.stderr[-4000:]
    return done


@pytest.mark.slow
def test_one_file_is_an_environment(checkout, guessed):
    """Cold start, two iterations of GCD, and an evaluation of the split that the environment holds out."""
    out = checkout / "runs" / "guess"
    first, *lines = files.read_lines(out / "metrics.jsonl")[0]
    assert (first["world"], first["games"], first["config"]["max_turns"]) == ("guess", "guess", 8)
    assert first["config"]["highest"] == 20 and first["captions"]["test"].startswith("the numbers held out")
    policy, judge = (next(line for line in lines if line.get("phase") == phase)
                     for phase in ("demonstrations", "judge demonstrations"))
    assert policy["kept"] > 100 and judge["kept"] > 0
    assert [row["iteration"] for row in rows(out)] == [0, 1]
    for row in rows(out):
        assert row["rollout/episodes"] == 16 and row["judge/turns"] > 0 and row["policy/grad_norm"] > 0
        assert row["rollout/invalid_frac"] < 0.5                # the model has the environment's vocabulary
    evaluated = files.read_json(out / "evaluation.json")["splits"]
    assert {split: modes["sampled"]["n"] for split, modes in evaluated.items()} == {"test": 6}
    assert guessed.stdout.startswith("test: success ")


@pytest.mark.slow
def test_an_environment_has_its_own_flags_and_labels(checkout):
    flags = ["--env", "guess", "--highest", 9, "--judge-labels", "halves", "--train-types", "all"]
    done = run_in(checkout, *flags, *TINY, *COLD, "--iterations", 1, "--out", "runs/halves")
    assert done.returncode == 0, done.stderr[-4000:]
    first, *_ = files.read_lines(checkout / "runs" / "halves" / "metrics.jsonl")[0]
    assert first["config"]["highest"] == 9
    assert first["games_hash"].keys() == {"train"}              # no split is unseen, so none is evaluated
    (row,) = rows(checkout / "runs" / "halves")
    assert row["judge/turns"] > 0
    episodes, _ = files.read_lines(checkout / "runs" / "halves" / "episodes.jsonl")
    turns = [turn for episode in episodes for turn in episode["turns"]]
    assert {turn["label"] for turn in turns} == {"good", "bad"}             # these labels cover every turn


GUESS, OPO = ((EXAMPLES / f"{name}.py").read_text(encoding="utf-8") for name in ("guess", "opo"))


@pytest.mark.parametrize("text, reason", [
    ("import nosuchpackage\n", "ModuleNotFoundError: No module named 'nosuchpackage'"),
    ("1 / 0\n", "ZeroDivisionError: division by zero"),
    ("class Environment(:\n", "SyntaxError: invalid syntax")])
def test_an_import_error_of_an_environment_is_shown(write_environment, capsys, text, reason):
    write_environment("broken", text)
    line = mistake(capsys, "--env", "broken")
    assert line.startswith(f"--env=broken: cannot import envs/broken.py, line 1: {reason}")


def test_an_environment_needs_an_expert_and_an_oracle_only_if_they_are_used(write_environment, capsys):
    text = GUESS.replace("def expert", "def _unused").replace("def oracle", "def _unused_too")
    write_environment("bare", text)
    line = mistake(capsys, "--env", "bare")
    assert line == ("--demonstrations=3000: bare has no expert; 0 starts RL from scratch "
                    "(--demonstrations was not given)")
    line = mistake(capsys, "--env", "bare", "--demonstrations", 0, "--judge-labels", "oracle")
    assert line == "--judge-labels=oracle: bare has no oracle"
    bare = ["--env", "bare", "--demonstrations", "0"]
    assert config.parse_or_exit([*bare, "--no-gcd"]).environment.expert is None
    assert config.parse_or_exit([*bare, "--preset", "paper"]).judge_labels == "rule"


def test_flags_are_checked_against_what_the_environment_declares(write_environment, capsys):
    write_environment("guess", GUESS)
    line = mistake(capsys, "--env", "household")
    assert line == "--env=household: expected one of guess, or a file's path that ends in .py"
    assert mistake(capsys, "--env", "guess", "--highest", 2) == "--highest=2: expected 5 to 99"
    assert mistake(capsys, "--env", "guess", "--evaluate", "L0") == "--evaluate=L0: no split 'L0' (dev, test)"
    line = mistake(capsys, "--env", "guess", "--judge-labels", "thirds")
    assert line.startswith("--judge-labels=thirds: expected one of ") and line.endswith(", halves")
    settings = config.parse_or_exit(["--env", "guess"])
    assert (settings.max_turns, settings.splits) == (8, ["test"])
    assert config.parse_or_exit(["--env", "guess", "--train-types", "all"]).splits == []
    assert config.parse_or_exit(["--env", "guess", "--max-turns", "3"]).max_turns == 3
    assert config.parse_or_exit(["--env", "guess", "--judge-labels", "halves"]).judge_labels == "halves"


def test_an_environment_cannot_have_a_flag_of_the_runs_names(write_environment, capsys):
    write_environment("guess", GUESS.replace("highest", "tasks"))
    line = mistake(capsys, "--env", "guess")
    assert line == "--algo grpo --env guess: have settings of the same name: tasks"


def test_the_environment_of_the_example_is_sound(write_environment):
    """The expert wins by binary search, its mistakes are those that the oracle labels bad, and every text
    consists of the vocabulary."""
    write_environment("guess", GUESS)
    environment = config.find_environment("guess")()
    (game,), tasks = environment.make(1), environment.split_tasks("dev") + environment.split_tasks("test")
    assert sorted(task.problem for task in tasks) == list(range(1, 21))
    drawn = {task.problem for task in environment.train_tasks("part", 0, 300)}
    assert drawn == {task.problem for task in environment.split_tasks("dev")}
    texts = set()
    for task in tasks:
        demonstration = environment.expert([game]).show(task, 0, 0.0, 8)
        assert demonstration.won and len(demonstration.commands) <= 5 and not any(demonstration.mistakes)
        texts |= {*demonstration.observations, *demonstration.commands}
        clumsy = environment.expert([game]).show(task, task.problem, 0.5, 30)
        labels = environment.oracle(clumsy.observations, clumsy.commands)
        assert labels == ["bad" if mistake else "good" for mistake in clumsy.mistakes]
        episode = Episode(task, 0, turns=[
            Turn(observation, [], [], [], "", command, True, observation)
            for observation, command in zip(demonstration.observations, demonstration.commands)])
        assert environment.labels["halves"](episode) == ["good"] * len(demonstration.commands)
    observations = ["I think of a number from 1 to 20.", "It is above 7.", environment.noop_message]
    assert environment.oracle(observations, ["guess 7", "dance"]) == ["good", "bad"]
    assert remainders(texts, environment.vocabulary()) <= {"", "."}


def remainders(texts, vocabulary):
    """What remains of the texts without the phrases of the vocabulary, longest first."""
    for phrase in sorted(vocabulary, key=len, reverse=True):
        texts = {text.replace(phrase, "") for text in texts}
    return texts


@pytest.mark.slow
def test_the_shortest_environment_is_learned_without_an_expert(tmp_path):
    """README's command: from guessing among three commands to winning nearly always."""
    done = run_in(ROOT, "--env", EXAMPLES / "lamps.py", "--iterations", 10, "--evaluate", "dev",
                  "--out", tmp_path)
    assert done.returncode == 0 and done.stdout.startswith("dev: success "), done.stderr[-4000:]
    first, *_, last = [row["rollout/success"] for row in rows(tmp_path)]
    assert first < 0.6 and last > 0.8


@pytest.mark.slow
def test_a_run_that_can_learn_nothing_says_so_once(tmp_path, capsys):
    """A fresh model that may write anything never writes a command."""
    assert gcd.main(["--env", str(EXAMPLES / "lamps.py"), "--no-admissible-only", "--iterations", "2",
                     "--out", str(tmp_path)]) == 0
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "the policy learns nothing: " in line]
    assert "--admissible-only may help" in line and "--demonstrations" not in line        # it has no expert


# An algorithm in the tree

@pytest.mark.slow
def test_one_file_is_an_algorithm(checkout, guessed):
    """Complete runs with both values of its flag."""
    flags = ["--env", "guess", *TINY, "--no-gcd", "--evaluate", "none", "--algo", "opo"]
    flags += ["--model", "runs/guess/checkpoint", "--demonstrations", 0]
    for length in ("tokens", "turns"):
        done = run_in(checkout, *flags, "--length-in", length, "--out", f"runs/{length}")
        assert done.returncode == 0, done.stderr[-4000:]
    tokens, turns = (rows(checkout / "runs" / length) for length in ("tokens", "turns"))
    assert [row["iteration"] for row in tokens] == [row["iteration"] for row in turns] == [0, 1]
    assert all(row["policy/grad_norm"] > 0 for row in tokens)
    first, *_ = files.read_lines(checkout / "runs" / "turns" / "metrics.jsonl")[0]
    assert (first["config"]["algo"], first["config"]["length_in"]) == ("opo", "turns")


@pytest.mark.slow
def test_its_flag_is_in_its_help_and_with_no_other(checkout):
    done = run_in(checkout, "--help", "--algo", "opo")
    assert done.returncode == 0
    assert "--algo opo:" in done.stdout and "--length-in tokens|turns" in done.stdout
    other = run_in(checkout, "--length-in", "turns")
    assert (other.returncode, other.stdout) == (2, "")
    assert other.stderr == "gcd.py: error: --length-in: not read here, but with --algo opo; see --help\n"


def test_the_algorithm_of_the_example_by_hand():
    """Rewards 1 and 0 of lengths 3 and 1 have the baseline 3/4; equal rewards give 0 for any lengths."""
    opo = module_of("examples/opo.py")
    reward_E, group_E = torch.tensor([1.0, 0.7, 0.0, 0.7, 0.7]), torch.tensor([0, 1, 0, 1, 1])
    advantage_E = opo.length_weighted_advantage(reward_E, torch.tensor([3, 7, 1, 5, 3]), group_E)
    assert advantage_E.tolist() == [0.25, 0.0, -0.75, 0.0, 0.0]


# Plug-ins outside the tree

def test_an_algorithm_without_groups_plays_each_task_once(tmp_path):
    """By default; its own defaults come first."""
    path = tmp_path / "mine.py"
    for own, tasks in (("{}", 128), ("dict(tasks=32)", 32)):
        path.write_text("import algorithms\n\n\nclass Method(algorithms.Method):\n    groups = False\n"
                        f"    defaults = {own}\n\n    def assign(self, episodes):\n        return {{}}\n")
        found = config.parse(["--algo", str(path)])
        assert (found.tasks, found.group_size, found.dynamic_sampling) == (tasks, 1, "keep")


@pytest.fixture(scope="module")
def outside(tmp_path_factory):
    """A folder outside the checkout with all examples."""
    folder = tmp_path_factory.mktemp("outside") / "plugins"
    shutil.copytree(EXAMPLES, folder, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture(scope="module")
def plugged(outside):
    """(folder, flags) of a complete run in it with --env and --algo as paths."""
    flags = ["--env", "./guess.py", "--algo", "opo.py", "--length-in", "turns", "--highest", 9, *TINY, *COLD,
             "--judge-labels", "halves", "--out", "runs/plugged"]
    done = run_in(outside, *flags, program=ROOT / "gcd.py")
    assert done.returncode == 0, done.stderr[-4000:]
    return outside, flags


@pytest.mark.slow
def test_an_environment_and_an_algorithm_train_from_a_folder_outside_the_checkout(plugged):
    """Cold start, two iterations of GCD, evaluation. The run logs a hash of each file."""
    out = plugged[0] / "runs" / "plugged"
    first, *_ = files.read_lines(out / "metrics.jsonl")[0]
    settings = first["config"]
    assert (first["world"], first["games"]) == ("guess", "guess")
    assert (settings["env"], settings["algo"]) == ("./guess.py", "opo.py")
    assert (settings["highest"], settings["length_in"]) == (9, "turns")
    assert first["plugins"].keys() == {"algo", "env"} and len(set(first["plugins"].values())) == 2
    assert [row["iteration"] for row in rows(out)] == [0, 1]
    assert all(row["policy/grad_norm"] > 0 and row["judge/turns"] > 0 for row in rows(out))
    assert files.read_json(out / "evaluation.json")["splits"]["test"]["sampled"]["n"] == 3


@pytest.mark.slow
def test_resume_accepts_unchanged_plugins_and_refuses_changed_ones(plugged, monkeypatch, capsys):
    """Each refusal names the flag and the file. An equal file at another path is the same plug-in."""
    folder, flags = plugged
    monkeypatch.chdir(folder)
    (folder / "copy").mkdir()

    def resume(*more):
        with Stop.restored():
            status = gcd.main([str(flag) for flag in (*flags, "--resume", "--evaluate", "none", *more)])
        return status, capsys.readouterr().err.strip().splitlines()[-1:]

    assert resume()[0] == 0
    for flag, name in (("--env", "guess.py"), ("--algo", "opo.py")):
        copied = shutil.copy(folder / name, folder / "copy")
        assert resume(flag, copied)[0] == 0
        with open(copied, "a", encoding="utf-8") as file:
            file.write("# changed\n")
        status, (error,) = resume(flag, copied)
        assert status == 1
        assert error.startswith(f"gcd.py: error: --resume: {flag}={copied}: ") and "changed since" in error


@pytest.mark.parametrize("flag, text, name, base", [
    ("--env", GUESS.replace("def oracle", "def orcale"), "orcale", "envs.Environment"),
    ("--env", GUESS.replace("    labels =", "    noop_mesage ="), "noop_mesage", "envs.Environment"),
    ("--algo", OPO.replace("def assign", "def asign"), "asign", "algorithms.Method"),
    ("--algo", OPO.replace("    allows_refill = True", "    los: str"), "los", "algorithms.Method")])
def test_a_public_name_that_the_base_class_does_not_declare_is_refused(tmp_path, capsys, flag, text, name,
                                                                       base):
    """A misspelled hook would be ignored, and something else trained."""
    path = tmp_path / "misspelled.py"
    path.write_text(text)
    line = mistake(capsys, flag, path)
    kind = base.rpartition(".")[2]
    assert line.startswith(f"{flag}={path}: class {kind} defines {name}, which {base} does not declare")


# JSON actions and token advantages

@pytest.mark.slow
def test_json_actions_and_token_advantages_train_together(outside, monkeypatch):
    """Two iterations from a folder outside the checkout: the token advantages reach the update as written."""
    monkeypatch.chdir(outside)
    step, trained = update.update, []

    def record(model, optimizer, samples, *arguments, **options):
        policy = [sample for sample in samples if sample.kind == "policy"]
        trained.extend((turn, sample) for sample in policy for turn in sample.turns)
        return step(model, optimizer, samples, *arguments, **options)

    monkeypatch.setattr(update, "update", record)
    sizes = dict(device="cpu", hidden_size=32, layers=2, tasks=4, group_size=4, demonstrations=200,
                 judge_turns=8, judge_demonstrations=20, cold_start_lr=1e-2)
    agent = gcd.train(env="json_guess.py", algo="./token_weight.py", iterations=2, out="runs/json", **sizes)
    assert [row["iteration"] for row in rows(outside / "runs" / "json")] == [0, 1]
    assert all(row["policy/grad_norm"] > 0 and row["rollout/invalid_frac"] < 0.5
               for row in rows(outside / "runs" / "json"))
    weighted = [(turn, sample) for turn, sample in trained if turn.token_advantage]
    assert weighted and any(turn.advantage for turn, _ in weighted)
    for turn, sample in weighted:
        written = [a for each in sample.turns for a in each.token_advantage]
        assert [a for a, sampled in zip(sample.advantage, sample.sampled) if sampled] == written
        first, *others = turn.token_advantage
        assert others == pytest.approx([first * 0.8 ** t for t in range(1, len(others) + 1)])
        assert sum(turn.token_advantage) == pytest.approx(turn.advantage * len(turn.response_ids))
    episode = agent.play("json_guess.py", "dev/3")
    assert all(json.loads(turn.action).keys() == {"guess"} for turn in episode.turns if turn.valid)


def test_the_json_environment_accepts_any_spelling_of_an_action_and_refuses_the_rest():
    example = module_of("examples/json_guess.py")
    environment = example.Environment()
    (game,), (task, *_) = environment.make(1), environment.split_tasks("dev")
    game.reset(task)
    for command in ('{"guess": 9}', '{"guess":9}', ' {\n"guess" : 9}'):
        assert game.step(command)[:1] + game.step(command)[2:4] == ("9 is too high.", False, False)
        assert game.step(command).taken
    for command in ("guess 9", '{"guess": "9"}', '{"guess": 9.0}', '{"guess": true}', '{"guess": 16}', "[9]",
                    '{"guess": 9, "again": 1}', '{"guess": 9', "{}", "9", "null", "[" * 100_000, ""):
        reply = game.step(command)
        answer = reply.observation, reply.won, reply.taken
        assert answer == (environment.noop_message, False, False), command
    assert game.step('{"guess": 1}').won


def test_the_json_environment_brings_its_own_words():
    """For a model that writes: rules, how to answer, and a parser that reads each command back."""
    environment = module_of("examples/json_guess.py").Environment()
    assert environment.rules.startswith("You guess a number.") and environment.ask.endswith('{"guess": 8}.')
    for command in environment.make(1)[0].reset(environment.split_tasks("dev")[0]).admissible:
        assert environment.parse(f"\n{command} ") == command
    assert environment.parse("I guess 8.") is None


def test_the_json_environment_of_the_example_is_sound():
    """As `test_the_environment_of_the_example_is_sound`; all its admissible commands are accepted."""
    environment, texts = module_of("examples/json_guess.py").Environment(), set()
    (game,) = environment.make(1)
    for task in environment.split_tasks("dev"):
        demonstration = environment.expert([game]).show(task, 0, 0.0, 8)
        assert demonstration.won and len(demonstration.commands) <= 4 and not any(demonstration.mistakes)
        texts |= {*demonstration.observations, *demonstration.commands}
        clumsy = environment.expert([game]).show(task, task.problem, 0.5, 30)
        labels = environment.oracle(clumsy.observations, clumsy.commands)
        assert labels == ["bad" if mistake else "good" for mistake in clumsy.mistakes]
    assert all(game.step(command).taken for command in game.reset(task).admissible)
    assert environment.oracle([game.reset(task).observation], ["dance"]) == ["bad"]
    assert remainders(texts, environment.vocabulary()) == {""}


def test_token_weights_by_hand():
    """Powers 1, 1/2 and 1/4 of 1/2 sum to 7/4; their mean is made 1."""
    weights = module_of("examples/token_weight.py").token_weights
    assert weights(3, 0.5) == pytest.approx([12 / 7, 6 / 7, 3 / 7])
    assert weights(4, 1.0) == [1.0] * 4 and weights(0, 0.5) == []
