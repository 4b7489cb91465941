"""Every world in envs/ answers all that a run may want of it; `find` finds it; the folder needs nothing else.

    python -m pytest tests/test_worlds.py               # some seconds
"""

import ast
import json
import shutil
import subprocess
import sys
from dataclasses import MISSING, fields
from importlib.util import find_spec
from pathlib import Path

import pytest
from test_household import GRAMMAR, goal_of, kitchen, write_game

import envs
from envs import Demonstration, Task, alfworld, find, scienceworld

ROOT = Path(__file__).resolve().parent.parent
ENVS = ROOT / "envs"
pytestmark = pytest.mark.fast


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of games as alfworld-download leaves it, with a kitchen in every split."""
    found, task_type = tmp_path_factory.mktemp("json_2.1.1"), "pick_two_obj_and_place"
    for split in ("train", "valid_train", "valid_seen", "valid_unseen"):
        for trial in ("a", "b"):
            path = write_game(found / split / "pick" / trial, pddl_problem=kitchen(goal_of(task_type)),
                              grammar=GRAMMAR.replace("put a hot apple", "put two apple"))
            path.with_name("traj_data.json").write_text(json.dumps({"task_type": task_type}))
    return found


@pytest.fixture(params=["household", "household with games", "alfworld", "scienceworld"])
def world(request, folder):
    """Each world with settings that it takes, the task types of RL being all."""
    kind = find(request.param.split()[0])
    games = {"games": str(folder)} if request.param in ("household with games", "alfworld") else {}
    return kind(kind.Settings(**games), "all", 3)


# What there is

def test_the_worlds_are_the_files_of_the_folder():
    assert {"household", "alfworld", "scienceworld"} <= set(envs.names())
    for name in ("household", "alfworld", "scienceworld"):
        assert issubclass(find(name), envs.World)


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


def test_a_file_is_a_world_by_its_name(write_world):
    write_world("guess", "from envs import World as Base\n\n\nclass World(Base):\n    pass\n")
    write_world("_private", "1 / 0\n")
    assert envs.names() == ["guess"]
    world = find("guess")()
    assert (world.games(), world.unseen(), world.versions()) == ("guess", ["L0", "L1", "L2"], {})
    with pytest.raises(ValueError, match="^--env=gess: expected one of guess$"):
        find("gess")


@pytest.mark.parametrize(("text", "message"), [
    ("import nosuchpackage", "ModuleNotFoundError: No module named 'nosuchpackage'"),
    ("class World(:", "SyntaxError: "), ("raise RuntimeError('two\\nlines')", "RuntimeError: two lines"),
])
def test_a_file_that_does_not_import_shows_its_own_error_in_a_line(write_world, text, message):
    write_world("broken", text)
    with pytest.raises(ValueError) as caught:
        find("broken")
    assert str(caught.value).startswith(f"--env=broken: cannot import envs/broken.py: {message}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "World = 3", "class World:\n    pass"])
def test_a_file_without_a_world_is_refused(write_world, text):
    write_world("empty", text)
    with pytest.raises(ValueError, match=r"^--env=empty: envs/empty.py has no class World\(envs.World\)$"):
        find("empty")


# What each world answers

def test_settings_are_flags(world):
    for flag in fields(world.Settings):
        assert flag.type in (str, int, float, bool) and flag.default is not MISSING and flag.metadata["help"]
    assert type(world.defaults) is dict and type(world.labels) is dict
    assert set(world.captions) == set(world.splits) and type(world.nothing) is str
    assert all(type(verb) is str for verb in world.searches) and world.searches


def test_tasks_repeat_and_are_hashed_in_their_order(world):
    tasks = world.train("all", 5, 6)
    assert tasks == world.train("all", 0, 11)[5:] and all(type(task) is Task for task in tasks)
    assert set(world.unseen()) <= set(world.splits)
    for split in ("dev", "L1"):
        found = world.split(split)
        assert len({task.id for task in found}) == len(found) > 0
    assert len(world.tasks_hash(tasks)) == 16 and world.tasks_hash(tasks) != world.tasks_hash(tasks[:5])
    with pytest.raises(ValueError, match="L9"):
        world.split("L9")


def test_equal_ids_with_other_texts_have_another_hash(folder):
    world = find("household")
    (task, *_), world = world(world.Settings(str(folder))).split("L2"), world()
    other = task.problem.__class__(task.problem.source, "put a cup in fridge", task.problem.pddl)
    assert world.tasks_hash([task]) != world.tasks_hash([Task(task.id, task.split, task.task_type, other)])


def test_what_is_said_of_a_run_is_a_sentence_or_nothing(world):
    of_all, of_part = (world.note({"cold_start_types": types}) for types in ("all", "part"))
    assert of_all.startswith("The cold start sees all ") and of_part.endswith(".") and of_all != of_part
    assert world.note({"cold_start_types": "all", "train_types": "all"}) in ("", of_all)
    assert type(world).note({}) == "" and world.games() and "\n" not in world.games()


INSTALLED = {alfworld.World: alfworld.PACKAGES, scienceworld.World: scienceworld.PACKAGES}


def test_environments_are_made_and_closed(world):
    if not all(map(find_spec, INSTALLED.get(type(world), ()))):
        with pytest.raises(ValueError, match="not installed; pip install -r requirements-"):
            world.make(2)
        return
    made = world.make(2)
    for env in made:
        env.close()
    assert len(made) == 2 and type(world.versions()) is dict


def test_household_and_alfworld_have_words_an_expert_and_an_oracle(world):
    if isinstance(world, scienceworld.World):
        assert world.oracle is None and world.expert is not None and world.defaults == {"slots": 16}
        return
    phrases = world.words()
    assert len(set(phrases)) == len(phrases) > 100 and (" countertop 2" in phrases) and "go to" in phrases
    expert, (task,) = world.expert([]), world.train("all", 7, 1)
    shown = expert.show(task, 1, mistake_rate=0.0, max_turns=50)
    assert type(shown) is Demonstration and shown.won and expert.restarts == 0
    assert shown == expert.show(task, 1, mistake_rate=0.0, max_turns=50) != expert.show(task, 2, 0.5, 50)
    assert set(world.oracle(shown.observations, shown.commands)) == {"good"}
    assert world.oracle([shown.observations[0], world.nothing], ["dance"]) == ["bad"]


@pytest.mark.parametrize(("name", "settings", "message"), [
    ("alfworld", {}, "--env=alfworld: needs --games, a json_2.1.1 folder or games.jsonl.gz"),
    ("alfworld", {"games": "nothere"}, "--games=nothere: no such file or folder"),
    ("household", {"games": "EMPTY"},
     "--games=EMPTY: no game.tw-pddl under train, valid_train, valid_seen, valid_uns"),
    ("household", {"games": "EMPTY/file"}, "--games=EMPTY/file: expected a folder of games or a .jsonl.gz"),
    ("scienceworld", {"games": "EMPTY"},
     "--games=EMPTY: expected a folder with L0_idx.json, L1_idx.json and L2_idx"),
    ("scienceworld", {"task_ids": "5,x"}, "--task-ids=5,x: expected e.g. 5,6,7"),
    ("scienceworld", {"task_ids": "29"}, "--task-ids=29: expected ids 0 to 28"),
])
def test_settings_that_cannot_be_right_are_refused_before_any_work(tmp_path, monkeypatch, name, settings,
                                                                   message):
    monkeypatch.chdir(tmp_path)
    Path("EMPTY").mkdir()
    Path("EMPTY/file").write_text("no gzip")
    kind = find(name)
    with pytest.raises(ValueError) as caught:
        kind(kind.Settings(**settings)).train("all", 0, 1)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


# What the folder needs

def python(code, folder, *flags):
    flags = (*flags, "-c", code) if code else flags
    return subprocess.run([sys.executable, *flags], cwd=folder, input="", text=True, capture_output=True,
                          check=True).stdout


NEW = ("import sys; before = set(sys.modules); import {}; "
       "print(*{{name.split('.')[0] for name in {{*sys.modules}} - before}})")


def test_the_folder_copied_alone_plays(tmp_path):
    shutil.copytree(ENVS, tmp_path / "envs", ignore=shutil.ignore_patterns("__pycache__"))
    code = ("from envs.household import World; world = World(); (env,) = world.make(1); "
            "print(env.reset(world.split('L0')[3]).observation)")
    printed = python("", tmp_path, "-m", "envs.household", "--seed", "3", "--json").splitlines()[0]
    assert json.loads(printed)["observation"] + "\n" == python(code, tmp_path)


def test_what_the_package_and_the_worlds_import():
    standard = set(sys.stdlib_module_names)
    assert set(python(NEW.format("envs"), ROOT).split()) - standard == {"envs"}
    found = set(python(NEW.format("envs.household, envs.alfworld, envs.scienceworld"), ROOT).split())
    assert found - standard - {"__mp_main__"} <= {"envs", "numpy"}         # no engine, no torch


def imports_of(path):
    """The modules of envs that a file imports, at its top or later."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_no_file_imports_another_that_imports_it():
    names = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
             for path in ENVS.rglob("*.py")}
    graph = {name: (imports_of(path) & set(names.values())) - {"envs", "envs.alfred"}
             for path, name in names.items()}
    while ends := [name for name, needed in graph.items() if not needed & graph.keys()]:
        for name in ends:
            del graph[name]
    assert not graph, f"a circle among {sorted(graph)}"


def test_the_folder_imports_nothing_of_the_project():
    others = {path.stem for path in ROOT.iterdir() if (path.suffix == ".py" or path.is_dir())
              and path.stem != "envs"}
    for path in ENVS.rglob("*.py"):
        assert not {name.split(".")[0] for name in imports_of(path)} & others, path
