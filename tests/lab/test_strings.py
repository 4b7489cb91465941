"""Proves lab/envs/strings.py: correct responses by brute force, the axes, and that splits are not trained on.

    python -m pytest tests/lab/test_strings.py           # about ten seconds
"""

import itertools
import json
import random
from collections import Counter

import pytest
import torch
from tiny_runs import assert_one_error, rows, train

import config
import models
from envs import Reply, Task
from lab.envs import strings
from lm import model as decoder
from lm.small import save_small_model

SPLITS = ("dev", "id", *strings.AXES)
HELD_OUT = {("rotate", "swap"), ("reverse", "shift"), ("swap", "double"), ("shift", "mirror"),
            ("double", "rotate"), ("mirror", "reverse")}
# The index in the old string, of length n, of the new letter i
FROM = {"rotate": lambda i, n: (i + 1) % n, "reverse": lambda i, n: n - 1 - i, "double": lambda i, n: i // 2,
        "swap": lambda i, n: {0: n - 1, n - 1: 0}.get(i, i), "mirror": lambda i, n: min(i, n - 1 - i),
        "shift": lambda i, n: i, "copy": lambda i, n: i}


def environment(seed=0, **settings):
    return strings.Environment(strings.Environment.Settings(**settings), seed=seed)


def steps(problem):
    """The solution, computed letter by letter."""
    text, found = problem.text, []
    for name in problem.operations:
        text = [text[FROM[name](i, len(text))] for i in range(len(text))]
        if name == "shift":
            text = [problem.letters[0] if x == problem.letters[-1] else chr(ord(x) + 1) for x in text]
        found.append("".join(text))
    return found


def wins(problem, response):
    game = strings.Game()
    game.reset(Task("", "", "", problem))
    reply = game.step(response)
    assert reply.done and reply.taken and reply.observation == ("Right." if reply.won else "Wrong.")
    return reply.won


def contents(tasks):
    return {(task.problem.text, task.problem.operations) for task in tasks}


def axes(problem):
    """The axes on which a problem is outside of pretraining, by its text and operations."""
    found = {"depth": len(problem.operations) > 2, "length": len(problem.text) > 6,
             "representation": problem.text.isupper() and problem.operations != ("copy",),
             "composition": any(pair in HELD_OUT for pair in zip(problem.operations, problem.operations[1:]))}
    return [axis for axis, beyond in found.items() if beyond]


def assert_share(count, n, share):
    """Assert that count / n is within five binomial standard deviations of `share`."""
    assert abs(count - n * share) <= 5 * (n * share * (1 - share)) ** 0.5, (count, n, share)


# Operations

@pytest.mark.parametrize("name, even, odd", [
    ("rotate", "bcfa", "bcdfa"), ("reverse", "fcba", "fdcba"), ("swap", "fbca", "fbcda"),
    ("shift", "bcda", "bcdea"), ("double", "aabb", "aabbc"), ("mirror", "abba", "abcba")])
def test_operations_by_hand(name, even, odd):
    """The strings are abcf and abcdf, in an alphabet that ends with f."""
    operation = strings.OPERATIONS[name]
    assert (operation("abcf", "abcdef"), operation("abcdf", "abcdef")) == (even, odd)


def test_operations_equal_brute_force_on_random_strings():
    assert FROM.keys() == {*strings.NAMES, "copy"}
    rng = random.Random(0)
    for name, length, _ in itertools.product(FROM, range(2, 13), range(20)):
        letters = strings.LETTERS[:rng.randint(2, 26)]
        letters = rng.choice((letters, letters.upper()))
        problem = strings.Problem("id", "".join(rng.choices(letters, k=length)), (name,), letters)
        assert strings.solution(problem.text, (name,), letters) == steps(problem)


def test_a_solution_has_every_intermediate_string():
    problem = strings.Problem("depth", "abcd", ("rotate", "double", "reverse"), "abcd")
    assert strings.solution("abcd", ("rotate", "double", "copy"), "abcd") == ["bcda", "bbcc", "bbcc"]
    assert (str(problem), problem.response) == ("abcd rotate double reverse", "bcda bbcc ccbb")
    for task in environment(rho=0.2).train_tasks("all", 0, 300):
        assert task.problem.response == " ".join(steps(task.problem))


# The verifier

@pytest.mark.parametrize("split, k", [("id", 1), ("id", 2), ("composition", 2), ("representation", 2),
                                      ("depth", 3), ("depth", 4)])
def test_exactly_the_responses_with_the_correct_last_string_win(split, k):
    """Two letters, strings of three: 8^k possible responses."""
    small = environment(letters=2, length=3, split=split, k=k)
    for task in small.train_tasks("part", 0, {3: 4, 4: 1}.get(k, 30)):
        problem = task.problem
        every = ["".join(letters) for letters in itertools.product(problem.letters, repeat=3)]
        listed = problem.responses()
        assert listed == sorted(map(" ".join, itertools.product(every, repeat=k)))
        assert strings.Game().reset(task) == Reply(str(problem), listed, False, False)
        right = {" ".join([*before, steps(problem)[-1]]) for before in itertools.product(every, repeat=k - 1)}
        assert {response for response in listed if problem.is_solved_by(response)} == right
        assert problem.response in right and len(right) == 8 ** (k - 1)


def test_too_many_possible_responses_are_not_listed():
    assert environment(letters=2, length=3, split="depth", k=6)._rl_task("t").problem.responses() == []
    assert environment()._rl_task("t").problem.responses() == []


@pytest.mark.parametrize("split", ["id", *strings.AXES])
def test_the_last_string_alone_counts_and_each_of_its_letters(split):
    for task in environment(split=split).train_tasks("part", 0, 40):
        problem, (*before, last) = task.problem, steps(task.problem)
        assert wins(problem, " ".join([*before, last])) and wins(problem, last)
        assert wins(problem, " ".join([problem.text[::-1]] * len(before) + [last]))
        for i, letter in itertools.product(range(len(last)), problem.letters):
            changed = last[:i] + letter + last[i + 1:]
            assert wins(problem, " ".join([*before, changed])) == (letter == last[i])
        for wrong in (last[:-1], last + last[-1], last.swapcase(), last + " ", last + ".", "", "nonsense"):
            assert not wins(problem, " ".join([*before, wrong])), wrong
        assert not wins(problem, f"{last} {problem.letters[0]}")


def test_an_omitted_pair_is_not_trained_on():
    def pairs(omitted):
        tasks = environment(split="composition", omit_pair=omitted).train_tasks("part", 0, 200)
        return {task.problem.operations for task in tasks}

    assert pairs(-1) == HELD_OUT
    for i, pair in enumerate(strings.HELD_OUT):
        assert pairs(i) == HELD_OUT - {pair}
    with pytest.raises(ValueError, match="--omit-pair=2: --split depth has no held-out pair"):
        environment(split="depth", omit_pair=2)


def test_the_expert_wins_with_one_response():
    expert = environment().expert([])
    for i, task in enumerate(environment(rho=0.2).train_tasks("all", 0, 100)):
        demonstration = expert.show(task, i, 0.5, 1)
        assert demonstration.won and demonstration.mistakes == [False]
        assert demonstration.commands == [" ".join(steps(task.problem))]


# Training tasks and splits

@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"letters": 3, "length": 5, "problems": 48}], ids=str)
def test_no_problem_is_in_two_splits_or_trained_on(settings):
    """The second settings have few problems (8,748 in pretraining), so that draws repeat often."""
    seed = 1
    evaluated = {name: environment(seed, **settings).split_tasks(name) for name in SPLITS}
    n = settings.get("problems", 64)
    assert all(len(contents(tasks)) == len(tasks) == n for tasks in evaluated.values())
    for one, other in itertools.combinations(SPLITS, 2):
        assert not contents(evaluated[one]) & contents(evaluated[other]), (one, other)
    trained = [environment(seed, rho=rho, **settings).train_tasks("all", 0, 3000) for rho in (0.0, 0.2)]
    trained += [environment(seed, split=split, **settings).train_tasks("part", 0, 1000)
                for split in SPLITS[1:]]
    for tasks, (name, split) in itertools.product(trained, evaluated.items()):
        assert not contents(tasks) & contents(split), (tasks[0], name)


@pytest.mark.slow
def test_splits_are_the_same_for_every_seed_and_training_is_not():
    one, other = environment(0, rho=0.1), environment(1, rho=0.1)
    assert all(one.split_tasks(name) == other.split_tasks(name) for name in SPLITS)
    for types in ("all", "part"):
        tasks = one.train_tasks(types, 0, 50)
        assert tasks[20:] == one.train_tasks(types, 20, 30) and len({task.id for task in tasks}) == 50
        assert len(contents(tasks) & contents(other.train_tasks(types, 0, 50))) < 5


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_pretraining_at_rho_0_has_no_problem_of_an_axis(seed):
    tasks = environment(seed).train_tasks("all", 0, 3000)
    copied = [task.problem for task in tasks if task.problem.operations == ("copy",)]
    others = [task.problem for task in tasks if "copy" not in task.problem.operations]
    assert len(copied) + len(others) == 3000 and not any(axes(task.problem) for task in tasks)
    assert_share(len(copied), 3000, 1 / 8)
    assert {len(problem.text) for problem in copied + others} == {6}
    assert {letter for problem in copied for letter in problem.text} == {*"ABCDEFGHIJKL"}
    assert {letter for problem in others for letter in problem.text} == {*"abcdefghijkl"}
    sequences = {problem.operations for problem in others}
    pairs = {*itertools.product(strings.NAMES, repeat=2)} - HELD_OUT
    assert sequences == pairs | {(name,) for name in strings.NAMES}
    assert {one for one, _ in pairs} == {other for _, other in pairs} == {*strings.NAMES}
    assert_share(sum(len(problem.operations) == 2 for problem in others), len(others), 1 / 2)


@pytest.mark.slow
@pytest.mark.parametrize("rho", [0.01, 0.1, 0.2])
def test_rho_is_the_share_of_each_axis_in_pretraining(rho):
    tasks = environment(3, rho=rho).train_tasks("all", 0, 3000)
    assert all(len(axes(task.problem)) <= 1 for task in tasks)
    counts = Counter(axis for task in tasks for axis in axes(task.problem))
    for axis in strings.AXES:
        assert_share(counts[axis], 3000, rho)
    assert_share(sum(task.problem.operations == ("copy",) for task in tasks), 3000, 1 / 8)
    assert all(task.task_type == (*axes(task.problem), task.task_type)[0] for task in tasks)


@pytest.mark.slow
def test_a_split_leaves_pretraining_on_its_axis_alone_and_has_equal_shares():
    problems = {name: [task.problem for task in environment(problems=60).split_tasks(name)]
                for name in SPLITS}
    for name in SPLITS[1:]:
        assert all(axes(problem) == [name] * (name != "id") for problem in problems[name])
        assert {problem.text.isupper() for problem in problems[name]} == {name == "representation"}
        lengths = Counter(len(problem.text) for problem in problems[name])
        assert lengths == ({8: 20, 10: 20, 12: 20} if name == "length" else {6: 60})
        depths = Counter(len(problem.operations) for problem in problems[name])
        assert depths == {"depth": {3: 20, 4: 20, 6: 20}, "composition": {2: 60}}.get(name, {1: 30, 2: 30})
    assert Counter(problem.operations for problem in problems["composition"]) == dict.fromkeys(HELD_OUT, 10)
    assert Counter((*axes(problem), "id")[0] for problem in problems["dev"]) == dict.fromkeys(SPLITS[1:], 12)
    assert {problem.operations for problem in problems["dev"] if axes(problem) == ["composition"]} == HELD_OUT


@pytest.mark.parametrize("split", ["id", *strings.AXES])
def test_rl_trains_on_its_split(split):
    tasks = environment(split=split, rho=0.1).train_tasks("part", 0, 600)
    assert all(axes(task.problem) == [split] * (split != "id") and task.task_type == split for task in tasks)
    depths = Counter(len(task.problem.operations) for task in tasks)
    assert depths.keys() == {*({"depth": (3, 4, 6), "composition": (2,)}.get(split, (1, 2)))}
    for count in depths.values():
        assert_share(count, 600, 1 / len(depths))
    for k in depths:
        chosen = environment(split=split, k=k).train_tasks("part", 0, 20)
        assert {len(task.problem.operations) for task in chosen} == {k}


# Mistakes

@pytest.mark.parametrize("flags, message", [
    ("--rho 0.5", "--rho=0.5: expected 0 to 0.2"),
    ("--problems 3", "--problems=3: fewer than the 6 held-out pairs of operations"),
    ("--k 4 --split id",
     "--k=4: --split id has 1 or 2; pretraining has at most 2, --split depth has 3, 4, 6;"),
    ("--k 1 --split composition", "--k=1: --split composition has 2;"),
    ("--k 5 --split depth", "--k=5: --split depth has 3 or 4 or 6;"),
    ("--split width", "--split=width: expected one of id, depth, length, representation, composition"),
    ("--letters 27", "--letters=27: expected 2 to 26"), ("--length 7", "--length=7: expected 2 to 6"),
    ("--evaluate L0", "--evaluate=L0: no split 'L0' (dev, id, depth, length, representation, composition)")])
def test_a_user_error_is_one_line_that_names_the_flag(capsys, flags, message):
    with pytest.raises(SystemExit) as stopped:
        config.parse_or_exit(["--env", "lab/envs/strings.py", *flags.split()])
    printed, error = capsys.readouterr()
    assert (stopped.value.code, printed, error.count("\n")) == (2, "", 1)
    assert error.startswith(f"gcd.py: error: {message}"), error


def test_too_few_problems_for_the_splits_fail_before_any_work(tmp_path, capsys):
    message = "--letters=2 --length=2: too few problems of id for --problems=64"
    with pytest.raises(ValueError, match=message):
        environment(letters=2, length=2).split_tasks("id")
    small = ["--env", "lab/envs/strings.py", "--letters", 2, "--length", 2, "--evaluate", "id"]
    assert train(tmp_path, *small) == 1
    assert_one_error(capsys, message)
    assert not (tmp_path / "metrics.jsonl").exists()


# Trained

@pytest.mark.slow
@pytest.mark.parametrize("flags", ["--admissible-only", "--max-response-tokens 4"])
def test_it_is_trained_by_gcd_for_a_reward_of_0_or_1(tmp_path, flags):
    """With --admissible-only some episodes win; truncated responses are invalid, at no cost in reward."""
    small = ["--env", "lab/envs/strings.py", "--letters", 2, "--length", 4, "--k", 1, "--problems", 6,
             "--evaluate", "id,representation"]
    cold = ["--demonstrations", 100, "--cold-start-lr", 1e-2, "--positions", "none", "--tasks", 16]
    assert train(tmp_path, "--max-turns", 1, *small, *cold, *flags.split()) == 0
    lines = rows(tmp_path)
    assert len(lines) == 2
    assert all(line["rollout/reward"] == line["rollout/success"] for line in lines)
    if flags == "--admissible-only":
        assert any(0 < line["rollout/reward"] < 1 for line in lines)
    else:
        assert all(line["rollout/invalid_frac"] > 0 for line in lines)
    found = json.loads((tmp_path / "evaluation.json").read_text())["splits"]
    assert {name: split["sampled"]["n"] for name, split in found.items()} == {"id": 6, "representation": 6}
    shape = json.loads((tmp_path / "checkpoint" / "config.json").read_text())
    assert shape["rope_parameters"]["rope_type"] == "none"


def test_a_base_model_with_a_foreign_vocabulary_is_refused(tmp_path):
    """By its tokens, unless the state of the run that trained it names the same environment."""
    ours, theirs = (config.parse(["--env", f"lab/envs/{name}.py", "--hidden-size", "16"])
                    for name in ("strings", "twins"))
    for name, settings in (("ours", ours), ("theirs", theirs)):
        save_small_model(tmp_path / name, models.vocabulary_of(settings), settings.hidden_size,
                         settings.layers, settings.context, settings.positions == "rotary",
                         not settings.untied, settings.seed)
    weights = decoder.load_pretrained(tmp_path / "ours").model.layers[0].self_attn
    assert torch.equal(weights.o_proj.weight, weights.v_proj.weight.T)       # initialized to copy
    own, other = (decoder.load_tokenizer(tmp_path / name) for name in ("ours", "theirs"))
    models.check_vocabulary(ours, tmp_path / "ours", {}, own)
    with pytest.raises(ValueError, match="theirs: has the vocabulary of another environment: ' rotate'"):
        models.check_vocabulary(ours, tmp_path / "theirs", {}, other)
    of_strings = {"settings": {"env": "strings"}}
    models.check_vocabulary(ours, tmp_path / "theirs", of_strings, other)
