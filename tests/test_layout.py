"""Proves that imports point down, by file and by folder, and that names are the field's.

    python -m pytest tests/test_layout.py

Floors lists the root's files and folders from the bottom up; a new root file takes its place there. Whoever
adds an environment, an algorithm or a script of the laboratory changes nothing here.
"""

import ast
import functools
import gc
import graphlib
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import algorithms
import envs
from config import Config
from infra import plugins

ROOT = Path(__file__).resolve().parent.parent
# From the bottom up: each may import what stands before it, and itself
FLOORS = (("infra",), ("lm", "envs", "losses", "labels"), ("rollout", "batching"),
          ("judge", "update", "players"), ("algorithms",), ("config",), ("correction",), ("resume",),
          ("models",), ("session",), ("cold_start", "evaluation", "agent"), ("gcd",), ("report",),
          ("lab", "examples"))
USERS = ("lab", "examples")                     # these may choose an environment or an algorithm by its name
# Words of an earlier private language: no function, class, parameter, attribute or variable has such a name
FORBIDDEN = set("""
    loud beside put_away said told sayings alike whole another held asked seat seats Seat hear say
    shown Coached coach coaches accumulate backpropagate take_grads put_grads together on_main go_on
    practice world worlds World nothing words begun
""".split())
TOP, TESTS = sorted(ROOT.glob("*.py")), ROOT / "tests"
FOLDERS = sorted(folder for folder in ROOT.iterdir()
                 if folder.name.isidentifier() and any(folder.glob("*.py")))
NOTEBOOKS = [ROOT / "examples" / "tour.py"]
CODE = TOP + sorted(path for folder in FOLDERS if folder != TESTS for path in folder.rglob("*.py")
                    if path not in NOTEBOOKS)
# What a common flag offers as its value is that flag's word, whatever else has the name: --protocol rlvmr
CHOICES = {choice for setting in fields(Config) for choice in setting.metadata.get("choices") or ()}
DISTRIBUTED = re.compile(r"torch\.distributed|\bdist\.\w+|\bfsdp\b|\bDTensor\b")
DEFINITIONS = ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign


def name(path):
    return path.relative_to(ROOT).as_posix()


def folder_of(path):
    """The folder at the top that a file is in; "" for a file at the top."""
    return path.relative_to(ROOT).parts[0] if path.parent != ROOT else ""


@functools.cache
def tree(path):
    """A file's syntax tree. It took most of the time to look for garbage, of which it has none."""
    gc.disable()
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    finally:
        gc.enable()


@functools.cache
def nodes(parsed):
    """All nodes of a syntax tree."""
    return list(ast.walk(parsed))


@pytest.fixture(autouse=True, scope="module")
def forget_trees():
    """After the last test here; else every later garbage collection would go through them."""
    yield
    tree.cache_clear()
    nodes.cache_clear()


def imports(parsed):
    """Every dotted name that a file imports, anywhere in it: "config.Config", "..game.Game", "..Task"."""
    found = set()
    for node in nodes(parsed):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parent = "." * node.level + (f"{node.module}." if node.module else "")
            found |= {parent + alias.name for alias in node.names}
    return found


def absolute(dotted, package):
    """A relative name as the files of `package` mean it: "..Task" is "envs.Task" in "envs.alfred"."""
    above = len(dotted) - len(dotted.lstrip("."))
    return ".".join([*package.split(".")[:-above + 1 or None], dotted[above:]]) if above else dotted


def imported_files(parsed, package=""):
    """Which files of this project those are. package: that of the file, for relative imports."""
    found = set()
    for dotted in (absolute(used, package) for used in imports(parsed)):
        module, _, last = dotted.replace(".", "/").rpartition("/")
        places = [f"{file}{end}" for file in (f"{module}/{last}".lstrip("/"), module)
                  for end in (".py", "/__init__.py")]
        found |= {next((place for place in places if file_is_ours(place)), None)}
    return found - {None}


@functools.cache
def file_is_ours(place):
    return not place.startswith(("/", ".")) and (ROOT / place).is_file()


def circle(graph):
    """A circle of {file: the files that it imports}, [] where there is none."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def spelled(parsed, package, names):
    """Where a file reaches for a member of `package` by its name, or has one as a text: "line: what".

    A text is a string that is no docstring and no sentence: the name itself, or joined as in "envs/NAME".
    """
    documented = ast.Module, ast.ClassDef, ast.FunctionDef
    docstrings = {id(node.body[0].value) for node in nodes(parsed)
                  if isinstance(node, documented) and ast.get_docstring(node)}
    found = [dotted for dotted in imports(parsed) if {*dotted.split(".")[1:2]} & names
             and dotted.split(".")[0] == package]
    for node in nodes(parsed):
        if isinstance(node, ast.Attribute) and node.attr in names and ast.unparse(node.value) == package:
            found.append(f"{node.lineno}: {ast.unparse(node)}")
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            texts = [] if " " in node.value else re.split(r"[./=:]", node.value)
            found += [f"{node.lineno}: {node.value!r}"] if names & {*texts} else []
    return sorted(found)


# Imports

@functools.cache
def files_used_by(path):
    """The files of this project that a file imports."""
    return imported_files(tree(path), ".".join(path.relative_to(ROOT).parent.parts))


@pytest.mark.slow
def test_no_import_circle():
    assert circle({name(path): files_used_by(path) for path in CODE}) == []


def test_environments_import_environments_only_and_by_relative_names():
    """So that the folder works alone, and under another name: envs/pyproject.toml installs it as one."""
    ours = {path.stem for path in TOP} | {folder.name for folder in FOLDERS}
    found = {name(path): imports(tree(path)) for path in CODE if folder_of(path) == "envs"}
    strange = {file: {dotted for dotted in used if dotted.split(".")[0] in ours}
               for file, used in found.items()}
    assert not any(strange.values()), strange


def unit_of(place):
    """The root file's stem, or the root folder, that a project file belongs to: "gcd", "lm"."""
    return Path(place).parts[0].removesuffix(".py")


def arrows_up(graph, floors):
    """(importing file, imported file) of {file: the files that it imports} that do not point down."""
    floor = {unit: level for level, units in enumerate(floors) for unit in units}
    return [(file, used) for file, imported in graph.items() for used in imported
            if unit_of(file) != unit_of(used) and floor[unit_of(used)] >= floor[unit_of(file)]]


def test_imports_point_down():
    """Between root files and folders; within a folder there are no circles, see above."""
    units = {unit_of(name(path)) for path in CODE}
    assert units <= {unit for units in FLOORS for unit in units}, "a new root file needs a place in FLOORS"
    assert arrows_up({name(path): files_used_by(path) for path in CODE}, FLOORS) == []


def test_an_arrow_up_or_sideways_is_found():
    graph = {"a.py": {"b/c.py"}, "b/c.py": {"b/d.py"}, "b/d.py": {"e.py"}, "e.py": {"a.py"}}
    assert arrows_up(graph, (("a", "e"), ("b",))) == [("a.py", "b/c.py"), ("e.py", "a.py")]


def test_no_other_import_is_relative():
    assert [(name(path), used) for path in CODE if folder_of(path) != "envs"
            for used in imports(tree(path)) if used.startswith(".")] == []


def test_only_infra_knows_torch_distributed():
    found = {name(path) for path in CODE if DISTRIBUTED.search(path.read_text(encoding="utf-8"))}
    assert found == {"infra/job.py", "infra/parallel.py", "infra/checkpoint.py"}


# Environments and algorithms, names

@pytest.mark.parametrize("package, base, flag", [
    (envs, envs.Environment, "env"), (algorithms, algorithms.Method, "algo")])
def test_no_other_file_names_an_environment_or_an_algorithm(package, base, flag):
    """The default of the flag that chooses is there, and nothing else."""
    names = set(plugins.names(package, base)) - CHOICES
    found = {name(path): spelled(tree(path), package.__name__, names) for path in CODE
             if folder_of(path) not in (package.__name__, *USERS)}
    (default,) = found.pop("config.py")
    assert default.endswith(f": {getattr(Config, flag)!r}") and getattr(Config, flag) in names
    assert not any(found.values()), {file: wrong for file, wrong in found.items() if wrong}


def names_in(parsed):
    """Every name that a file gives to something: functions, classes, parameters, attributes, variables."""
    named = [node for node in nodes(parsed) if not isinstance(node, ast.alias)
             and isinstance(getattr(node, "ctx", ast.Store()), ast.Store)]
    return {getattr(node, field) for node in named for field in ("name", "id", "arg", "attr")
            if hasattr(node, field)}


def test_no_name_is_a_word_of_the_private_language():
    found = {name(path): names_in(tree(path)) & FORBIDDEN for path in [*CODE, *TESTS.rglob("*.py")]}
    assert {file: names for file, names in found.items() if names} == {}


# Form

def test_no_line_is_wider_than_a_window():
    found = [f"{name(path)}:{i}" for path in [*CODE, *TESTS.rglob("*.py")]
             for i, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1) if len(line) > 110]
    assert found == []


def test_no_code_runs_between_fork_and_exec():
    """Popen's preexec_fn is Python in a forked process, and crashed where the parent had threads."""
    assert [name(path) for path in CODE for node in nodes(tree(path))
            if isinstance(node, ast.keyword) and node.arg == "preexec_fn"] == []


def test_a_file_opens_with_what_it_is():
    assert [name(path) for path in [*CODE, *TESTS.rglob("*.py")] if not ast.get_docstring(tree(path))] == []


def test_a_file_does_nothing_when_imported():
    """After the docstring: imports, definitions, constants; what runs is under `if __name__ == "__main__"`.

    An import may be tried, for a kinder error, or deferred. A Gymnasium environment is registered by the file
    that has it: gymnasium.make imports it for that.
    """
    def is_quiet(node):
        if isinstance(node, ast.Try) or isinstance(node, ast.With) and "deferred(" in ast.unparse(node):
            return all(isinstance(tried, ast.Import | ast.ImportFrom) for tried in node.body)
        main = isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"
        if isinstance(node, ast.For):
            return all(map(is_quiet, node.body))
        registers = isinstance(node, ast.Expr) and ast.unparse(node).startswith("gymnasium.register(")
        return main or registers or isinstance(node, DEFINITIONS)

    assert [f"{name(path)}:{node.lineno}" for path in CODE for node in tree(path).body[1:]
            if not is_quiet(node)] == []


@pytest.mark.slow
def test_importing_gcd_prints_nothing_and_writes_nothing(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", "import gcd"], cwd=tmp_path, env=environment, text=True,
                          capture_output=True, check=False, timeout=180)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == []


# The checks themselves: what they should find

def test_a_circle_is_found_and_what_a_file_imports():
    assert circle({"a": {"b"}, "b": {"c"}, "c": set()}) == [] != circle({"a": {"b"}, "b": {"c"}, "c": {"a"}})
    source = "import json, gcd\nif gcd:\n    from envs import Task, alfred\nfrom lm.model import Model"
    used = {"gcd.py", "envs/__init__.py", "envs/alfred/__init__.py", "lm/model.py"}
    assert imported_files(ast.parse(source)) == used
    source = "from .. import Task\nfrom . import rooms\nfrom .game import Game\nfrom .._terminal import play"
    used = {"envs/__init__.py", "envs/alfred/rooms.py", "envs/alfred/game.py", "envs/_terminal.py"}
    assert imported_files(ast.parse(source), "envs.alfred") == used


@pytest.mark.parametrize("source", [
    "from envs import maze", "import envs.maze as m", "from envs.maze import Environment",
    "x = envs.maze.Environment", "if config.env == 'maze': pass", "f({'maze': 1})", "x = 'envs/maze.py'"])
def test_a_name_is_found_however_it_is_spelled(source):
    assert len(spelled(ast.parse(source), "envs", {"maze"})) == 1


@pytest.mark.parametrize("source", [
    '"""Played in a maze."""', "# maze", "help = 'a maze, or rooms'", "maze = 1", "from envs import Task",
    "def f():\n    'maze'"])
def test_what_only_reads_like_a_name_is_not_found(source):
    assert spelled(ast.parse(source), "envs", {"maze"}) == []
