"""Tests of the generated rooms: determinism, the contents of each split, and the tokenizer's vocabulary."""

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from envs.alfred import rooms
from envs.alfred.expert import demonstrate, learn_prior
from envs.alfred.game import Game
from envs.household import Environment

ROOT = Path(__file__).resolve().parents[2]


def layout_of(problem):
    return tuple(sorted(Counter(receptacle.type for receptacle in problem.receptacles).items()))


@pytest.fixture(scope="module")
def split_tasks():
    return {split: rooms.tasks(split) for split in rooms.SPLITS}


@pytest.mark.slow
def test_a_task_is_the_same_in_every_process():
    """String hashes are salted per process: a generator that used one would differ between ranks."""
    code = ("from envs.alfred import rooms; print([(t.id, t.problem.task_desc, [(x.name, x.receptacle) "
            "for x in t.problem.things]) for s in rooms.SPLITS for t in map(rooms.task, [s] * 8, range(8))])")
    found = {subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": salt},
                            text=True, capture_output=True, check=True).stdout for salt in ("1", "2")}
    assert len(found) == 1 and "L2/7/pick_two_obj_and_place" in found.pop()
    assert rooms.task("L1", 5) == rooms.task.__wrapped__("L1", 5)


@pytest.mark.slow
def test_equal_ids_are_equal_problems_whatever_types_are_requested():
    seen = {}
    for types in (None, rooms.ALL_TYPES, rooms.ALL_TYPES[4:]):
        for task in rooms.tasks("train", types):
            assert seen.setdefault(task.id, task.problem) == task.problem
    assert len(seen) > 2 * rooms.SPLIT_SIZE


@pytest.mark.slow
@pytest.mark.parametrize("split, types", [
    ("train", rooms.TRAINED_TYPES), ("dev", rooms.TRAINED_TYPES), ("L0", rooms.TRAINED_TYPES),
    ("L1", rooms.TRAINED_TYPES), ("L2", ("pick_cool_then_place_in_recep", "pick_two_obj_and_place"))])
def test_every_split_has_its_task_types_in_equal_parts(split_tasks, split, types):
    count = Counter(task.task_type for task in split_tasks[split])
    assert count == {task_type: 256 // len(types) for task_type in types}
    assert all(task.problem.goal.task_type == task.task_type for task in split_tasks[split])


def test_a_cold_start_may_ask_for_all_six_types():
    assert {task.task_type for task in rooms.tasks("train", rooms.ALL_TYPES)} == set(rooms.ALL_TYPES)
    assert rooms.task("train", 10**9).problem.things


@pytest.mark.slow
def test_no_problem_is_in_two_splits(split_tasks):
    problems = {split: {task.problem for task in tasks} for split, tasks in split_tasks.items()}
    problems["train"] |= {rooms.task("train", i, rooms.ALL_TYPES).problem for i in range(2000)}
    for one in rooms.SPLITS:
        assert len(problems[one]) >= 250          # nearly all of a split's problems differ
        for other in rooms.SPLITS:
            assert one == other or not problems[one] & problems[other]


@pytest.mark.slow
def test_other_rooms_are_none_of_the_training_rooms(split_tasks):
    layouts = {split: {layout_of(task.problem) for task in tasks} for split, tasks in split_tasks.items()}
    more = [rooms.task("train", i, rooms.ALL_TYPES) for i in range(2000)]
    trained = layouts["train"] | {layout_of(task.problem) for task in more}
    assert not trained & (layouts["L1"] | layouts["L2"])
    assert layouts["L0"] <= trained
    in_trained = [layout_of(task.problem) in trained for task in split_tasks["dev"]]
    assert sum(in_trained) == len(in_trained) // 2
    for task, known in zip(split_tasks["dev"], in_trained, strict=True):
        assert task.id.endswith("L0" if known else "L1")


def test_dev_is_half_like_l0_in_every_task_type(split_tasks):
    count = Counter((task.task_type, task.id[-2:]) for task in split_tasks["dev"])
    assert set(count.values()) == {32} and len(count) == 8


def test_rooms_are_small(split_tasks):
    for task in (task for tasks in split_tasks.values() for task in tasks):
        assert 6 <= len(task.problem.receptacles) <= 9, task.id
        assert 7 <= len(task.problem.things) <= 11, task.id
        names = [thing.name for thing in task.problem.things]
        assert len(set(names)) == len(names) and all(int(name.split()[1]) <= 2 for name in names), task.id


def test_things_start_where_they_may_be_and_the_goal_is_not_yet_met(split_tasks):
    for task in (task for tasks in split_tasks.values() for task in tasks):
        goal, accepts = task.problem.goal, {place.name: place.accepts for place in task.problem.receptacles}
        for thing in task.problem.things:
            assert thing.type in accepts[thing.receptacle] or thing.type == "desklamp", task.id
            assert (thing.type, thing.receptacle.split()[0]) != (goal.object, goal.receptacle), task.id
        targets = [name for name in accepts if name.split()[0] == goal.receptacle]
        assert goal.toggle or any(goal.object in accepts[name] for name in targets), task.id
        needed = 2 if task.task_type == "pick_two_obj_and_place" else 1
        assert sum(thing.type == goal.object for thing in task.problem.things) >= needed, task.id


def test_affordances_are_alfworlds():
    constants = pytest.importorskip("alfworld.gen.constants", reason="needs pip install alfworld")
    holds = {place.lower(): {name.lower() for name in names}
             for place, names in constants.VAL_RECEPTACLE_OBJECTS.items()}
    objects = {name for places in rooms.USUAL_PLACES.values() for name in places}
    for place, accepted in rooms.ACCEPTS.items():
        assert accepted == objects & holds[place], place
    for action, ours in (("Cleanable", rooms.CLEANABLE), ("Heatable", rooms.HEATABLE),
                         ("Coolable", rooms.COOLABLE), ("Sliceable", rooms.SLICEABLE)):
        assert ours == objects & {name.lower() for name in constants.VAL_ACTION_OBJECTS[action]}, action
    every = {name.lower() for name in [*constants.OBJECTS, *constants.RECEPTACLES]}
    assert every == set(rooms.NAMES)


@pytest.mark.parametrize("arguments, message", [
    (("L9", 0), "L9"), (("L0", 256), "256"), (("train", -1), "-1"),
    (("L1", 0, ("pick_two_obj_and_place",)), "pick_two")])
def test_an_invalid_split_index_or_type_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        rooms.task(*arguments)


@pytest.mark.slow
@pytest.mark.parametrize("numbered", [True, False])
def test_phrases_tokenize_full_episodes_without_remainder(numbered):
    """With longest match first, as added tokens are matched, no text needs single letters."""
    found = rooms.phrases(numbered)
    assert len(set(found)) == len(found)
    phrase = re.compile("|".join(re.escape(phrase) for phrase in sorted(found, key=len, reverse=True)))
    game, prior = Game(), learn_prior(rooms.tasks("train"))
    for task in rooms.tasks("train", rooms.ALL_TYPES)[:60]:
        episode = demonstrate(game, task, prior, seed=0)
        for text in [*episode.observations, *episode.commands]:
            assert text.startswith("Available commands") or phrase.sub("", text) == "", text


@pytest.mark.slow
def test_the_hash_of_games_is_the_same_in_every_process_and_depends_on_their_order():
    """Regression: it hashed the repr of sets, whose order differs between processes."""
    code = ("from envs.household import Environment; "
            "print(Environment().tasks_hash(Environment().split_tasks('L0')[:5]))")
    printed = {subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONHASHSEED": seed},
                              cwd=ROOT, text=True, capture_output=True, check=True).stdout.strip()
               for seed in "12"}
    tasks, hash_of = rooms.tasks("L0")[:5], Environment().tasks_hash
    assert printed == {hash_of(tasks)}
    assert hash_of(tasks[::-1]) not in printed and hash_of(tasks[:4]) not in printed
