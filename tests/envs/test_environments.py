"""Tests that each environment in envs/ offers all that a run uses, is found by name, and needs only envs/.

    python -m pytest tests/envs/test_environments.py               # some seconds
"""

import json
import shutil
import subprocess
import sys
import zlib
from dataclasses import MISSING, fields
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_household import GRAMMAR, goal_of, kitchen, write_game

import envs
from config import find_environment
from envs import Demonstration, Task, alfworld, scienceworld
from envs.alfred import rooms, splits
from envs.alfred.rearranged import scene_type
from envs.alfred.splits import Tasks
from infra import plugins

ROOT = Path(__file__).resolve().parents[2]
ENVS = ROOT / "envs"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of games in alfworld-download's layout, with a kitchen in every split."""
    path, task_type = tmp_path_factory.mktemp("json_2.1.1"), "pick_two_obj_and_place"
    for split in ("train", "valid_train", "valid_seen", "valid_unseen"):
        for trial in ("a", "b"):
            game = write_game(path / split / "pick" / trial, pddl_problem=kitchen(goal_of(task_type)),
                              grammar=GRAMMAR.replace("put a hot apple", "put two apple"))
            game.with_name("traj_data.json").write_text(json.dumps({"task_type": task_type}))
    return path


@pytest.fixture(params=["household", "household with games", "alfworld", "scienceworld"])
def environment(request, folder):
    """Each environment with its settings, all task types and a seed."""
    kind = find_environment(request.param.split()[0])
    games = {"games": str(folder)} if request.param in ("household with games", "alfworld") else {}
    return kind(kind.Settings(**games), "all", 3)


# Finding environments

def test_the_environments_are_the_files_of_the_folder():
    assert {"household", "alfworld", "scienceworld"} <= set(plugins.names(envs, envs.Environment))
    for name in ("household", "alfworld", "scienceworld"):
        assert issubclass(find_environment(name), envs.Environment)


def test_a_file_is_an_environment_by_its_name(write_environment):
    methods = "    make = train_tasks = split_tasks = lambda self, *given: []\n"
    text = f"from envs import Environment as Base\n\n\nclass Environment(Base):\n{methods}"
    write_environment("guess", text)
    write_environment("_private", "1 / 0\n")
    assert plugins.names(envs, envs.Environment) == ["guess"]
    environment = find_environment("guess")()
    assert environment.description() == "guess" and environment.versions() == {}
    assert environment.unseen_splits() == ["L0", "L1", "L2"]
    for name in ("gess", "_private", "__init__", "", "../guess"):
        with pytest.raises(ValueError, match=f"^--env={name}: expected one of guess, or a file's path that "
                                             r"ends in \.py$"):
            find_environment(name)


# What each environment offers

def test_settings_are_flags(environment):
    for flag in fields(environment.Settings):
        assert flag.type in (str, int, float, bool) and flag.default is not MISSING and flag.metadata["help"]
    assert type(environment.defaults) is dict and type(environment.labels) is dict
    assert set(environment.captions) == set(environment.splits) and type(environment.noop_message) is str
    assert all(type(verb) is str for verb in environment.search_verbs) and environment.search_verbs


@pytest.mark.slow
def test_tasks_are_reproducible_and_hashed_in_order(environment):
    tasks = environment.train_tasks("all", 5, 6)
    assert tasks == environment.train_tasks("all", 0, 11)[5:] and all(type(task) is Task for task in tasks)
    assert set(environment.unseen_splits()) <= set(environment.splits)
    for split in ("dev", "L1"):
        found = environment.split_tasks(split)
        assert len({task.id for task in found}) == len(found) > 0
    assert len(environment.tasks_hash(tasks)) == 16
    assert environment.tasks_hash(tasks) != environment.tasks_hash(tasks[:5])
    with pytest.raises(ValueError, match="L9"):
        environment.split_tasks("L9")


@pytest.mark.slow
def test_generated_rooms_have_the_contents_that_stored_results_were_made_with():
    """Which `tasks_hash` does not see: their ids stay as they are."""
    contents = [(task.id, task.problem.task_desc,
                 [(place.name, place.opened) for place in task.problem.receptacles],
                 [(thing.name, thing.receptacle) for thing in task.problem.things])
                for split in rooms.SPLITS for task in (rooms.task(split, i) for i in range(32))]
    assert zlib.crc32(repr(contents).encode()) == 0xed1fa915


def test_of_real_games_two_in_three_are_rearranged_in_their_own_kind_of_room(monkeypatch):
    """With "later" after one pass over them. Each seed has its own order, and rearranges otherwise."""
    made = [SimpleNamespace(id=f"pick-{scene}/{trial}", problem=SimpleNamespace(
        task_desc="put a cup in fridge", source="")) for scene in (1, 301) for trial in range(10)]
    monkeypatch.setattr(Tasks, "real_games", lambda self, split, types: made)
    monkeypatch.setattr(Tasks, "validated", lambda self, tasks: tasks)
    monkeypatch.setattr(splits, "rearranged", lambda task, other, goals, rng, name: (task, other, name))
    drawn = {(when, seed): Tasks("a folder", "all", seed, when).train_tasks("all", 15, 90)
             for when in ("never", "later", "always") for seed in (3, 4)}
    for seed in (3, 4):
        plain, later, always = (drawn[when, seed] for when in ("never", "later", "always"))
        assert later == plain[:5] + always[5:] and plain[:20] == plain[20:40] != made
        assert [task in made for task in always] == [index % 3 == 0 for index in range(15, 105)]
        changed = [task for task in always if task not in made]
        assert all(scene_type(task) == scene_type(other) for task, other, _ in changed)
    assert drawn["never", 3] != drawn["never", 4]
    names = [{task[2] for task in drawn["always", seed] if task not in made} for seed in (3, 4)]
    assert not names[0] & names[1] and len(names[0]) == 60


def test_equal_ids_with_different_texts_have_different_hashes(folder):
    household = find_environment("household")
    (task, *_), environment = household(household.Settings(str(folder))).split_tasks("L2"), household()
    other = task.problem.__class__(task.problem.source, "put a cup in fridge", task.problem.pddl)
    changed = Task(task.id, task.split, task.task_type, other)
    assert environment.tasks_hash([task]) != environment.tasks_hash([changed])


def test_a_tasks_id_may_be_the_name_of_any_file():
    """Bytes that are no text are surrogates in it."""
    tasks = [Task(name, "L0", "", None) for name in ("a", "\udce9", "?")]
    assert len({envs.Environment().tasks_hash([task]) for task in tasks}) == 3


def test_notes_are_a_sentence_or_empty(environment):
    of_all, of_part = (environment.note({"cold_start_types": types}) for types in ("all", "part"))
    assert of_all.startswith("The cold start sees all ") and of_part.endswith(".") and of_all != of_part
    assert environment.note({"cold_start_types": "all", "train_types": "all"}) in ("", of_all)
    description = environment.description()
    assert type(environment).note({}) == "" and description and "\n" not in description


INSTALLED = {alfworld.Environment: alfworld.PACKAGES, scienceworld.Environment: scienceworld.PACKAGES}


@pytest.mark.slow
def test_games_are_made_and_closed(environment):
    if not all(map(find_spec, INSTALLED.get(type(environment), ()))):
        with pytest.raises(ValueError, match="not installed; pip install -r requirements-"):
            environment.make(2)
        return
    games = environment.make(2)
    for game in games:
        game.close()
    assert len(games) == 2 and type(environment.versions()) is dict


@pytest.mark.slow
def test_household_and_alfworld_have_a_vocabulary_an_expert_and_an_oracle(environment):
    if isinstance(environment, scienceworld.Environment):
        assert environment.oracle is None and environment.expert is not None
        assert environment.defaults == {"slots": 16, "max_turns": 30}
        return
    phrases = environment.vocabulary()
    assert len(set(phrases)) == len(phrases) > 100 and (" countertop 2" in phrases) and "go to" in phrases
    expert, (task,) = environment.expert([]), environment.train_tasks("all", 7, 1)
    played = expert.show(task, 1, mistake_rate=0.0, max_turns=50)
    assert type(played) is Demonstration and played.won and expert.restarts == 0
    assert played == expert.show(task, 1, mistake_rate=0.0, max_turns=50) != expert.show(task, 2, 0.5, 50)
    assert set(environment.oracle(played.observations, played.commands)) == {"good"}
    assert environment.oracle([played.observations[0], environment.noop_message], ["dance"]) == ["bad"]


@pytest.mark.parametrize(("name", "settings", "message"), [
    ("alfworld", {}, "--env=alfworld: needs --games, a json_2.1.1 folder or games.jsonl.gz"),
    ("alfworld", {"games": "nothere"}, "--games=nothere: no such file or folder"),
    ("household", {"games": "EMPTY"},
     "--games=EMPTY: no game.tw-pddl under train, valid_train, valid_seen, valid_uns"),
    ("household", {"games": "EMPTY/file"}, "--games=EMPTY/file: expected a folder of games or a .jsonl.gz"),
])
def test_invalid_settings_are_refused_at_once(tmp_path, monkeypatch, name, settings, message):
    monkeypatch.chdir(tmp_path)
    Path("EMPTY").mkdir()
    Path("EMPTY/file").write_text("no gzip")
    kind = find_environment(name)
    with pytest.raises(ValueError) as caught:
        kind(kind.Settings(**settings)).train_tasks("all", 0, 1)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


# Dependencies of the folder

def python(code, folder, *flags):
    flags = (*flags, "-c", code) if code else flags
    return subprocess.run([sys.executable, *flags], cwd=folder, input="", text=True, capture_output=True,
                          check=True).stdout


NEW = ("import sys; before = set(sys.modules); import {}; "
       "print(*{{name.split('.')[0] for name in {{*sys.modules}} - before}})")


@pytest.mark.slow
def test_a_copy_of_the_folder_alone_plays_under_any_name(tmp_path):
    name = "rooms"
    shutil.copytree(ENVS, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    code = (f"from {name}.household import Environment; environment = Environment(); "
            "(game,) = environment.make(1); "
            "print(game.reset(environment.split_tasks('L0')[3]).observation)")
    printed = python("", tmp_path, "-m", f"{name}.household", "--seed", "3", "--json").splitlines()[0]
    assert json.loads(printed)["observation"] + "\n" == python(code, tmp_path)


@pytest.mark.slow
def test_the_package_imports_only_itself_and_numpy():
    standard = set(sys.stdlib_module_names)
    assert set(python(NEW.format("envs"), ROOT).split()) - standard == {"envs"}
    found = set(python(NEW.format("envs.household, envs.alfworld, envs.scienceworld"), ROOT).split())
    assert found - standard - {"__mp_main__"} <= {"envs", "numpy"}         # no engine, no torch
