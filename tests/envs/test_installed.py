"""Tests of the package of envs/pyproject.toml: what it holds, and its ways in from an empty environment.

    python -m pytest tests/envs/test_installed.py -rs     # a minute; needs a package registry

The ways in are the examples of docs/household.md, as they stand there; TRL's is run by test_trl_class.py.
"""

import json
import os
import re
import subprocess
import sys
import tarfile
import urllib.request
import zipfile
from contextlib import suppress
from pathlib import Path

import pytest
from test_household import goal_of, kitchen
from test_tw_env import write_game
from waiting import free_port, wait_for

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "household.md"
LEFT_OUT = {"alfworld.py", "scienceworld.py"}
EXAMPLES = {"tw_env": ("## In place of", r"\d of 8 won\n"), "gym": ("## As a Gymnasium", "(True|False)\n"),
            "openenv": ("## As an OpenEnv", r"(True|False) [01]\.0\n"),
            "vector": ("## In a loop", r"\d+ of 64 won: train/0/\S+ \.\.\.\n"),
            "plain": ("## As plain Python", r"\d+ of 256 won\n")}
# What TRL does with its class, without TRL
AS_TRL_DOES = """
import inspect
from household.alfred.trl import Household, rows
row, env = rows(1)[0], Household()
tools = [name for name, _ in inspect.getmembers(Household, inspect.isfunction) if name[0] != "_"]
print(tools, "Your task is to" in env.reset(**row), env.act("fly").splitlines()[0], env.get_reward())
"""


def example(name):
    """A face's example on the page."""
    part = PAGE.read_text(encoding="utf-8").partition(EXAMPLES[name][0])[2]
    return re.search(r"^```python\n(.*?)^```$", part, re.M | re.S)[1]


def run(command, **options):
    """The command's output. AssertionError, with what it printed, if it fails."""
    done = subprocess.run([str(part) for part in command], text=True, capture_output=True, timeout=500,
                          **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder for $ALFWORLD_DATA with a game in valid_unseen."""
    folder = tmp_path_factory.mktemp("data")
    write_game(folder / "json_2.1.1/valid_unseen/pick/trial", pddl=kitchen(goal_of("pick_and_place_simple")))
    return folder


def test_an_example_is_about_ten_lines():
    assert all(len(example(name).splitlines()) <= 12 for name in EXAMPLES)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tw_env", "gym", "vector", "plain"])
def test_the_pages_examples_run_in_the_project(name, data, tmp_path):
    if name == "gym":
        pytest.importorskip("gymnasium", reason="needs: pip install gymnasium")
    text = example(name).replace("household.alfred", "envs.alfred")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "ALFWORLD_DATA": str(data)}
    assert re.fullmatch(EXAMPLES[name][1], run([sys.executable, "-c", text], cwd=tmp_path, env=environment))


def test_the_licence_is_the_projects():
    assert (ROOT / "envs" / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


# Under its installed name: the folder itself

@pytest.fixture
def installed(tmp_path):
    """The variables of an environment that finds the folder as the package household."""
    (tmp_path / "household").symlink_to(ROOT / "envs")
    return clean(PYTHONPATH=str(tmp_path), PYTHONDONTWRITEBYTECODE="1")


@pytest.mark.slow
@pytest.mark.parametrize("module", ["household", "household.household"])
def test_the_installed_command_has_its_name(installed, tmp_path, module):
    text = run([sys.executable, "-m", module, "--help"], cwd=tmp_path, env=installed)
    assert text.startswith("usage: household [") and "\nhousehold download --help: " in text
    assert "python -m" not in text
    code = "from household.alfred.tw_env import PROGRAM; print(PROGRAM)"
    assert run([sys.executable, "-c", code], cwd=tmp_path, env=installed) == "household\n"


@pytest.mark.slow
@pytest.mark.parametrize("package, extra", [("household", '"household[openenv]"'), ("envs", "openenv")])
def test_without_openenv_its_face_says_how_to_get_it(installed, tmp_path, package, extra):
    """And an import raises what a caller may catch."""
    (tmp_path / "openenv.py").write_text("raise ModuleNotFoundError(\"No module named 'openenv'\")")
    (tmp_path / "envs").symlink_to(ROOT / "envs")
    module = f"{package}.alfred.openenv"
    line = f"{module}: No module named 'openenv'; pip install {extra}\n"
    done = subprocess.run([sys.executable, "-m", module], cwd=tmp_path, env=installed, text=True,
                          capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", line)
    code = f"try: import {module}\nexcept ImportError as error: print(error)"
    assert run([sys.executable, "-c", code], cwd=tmp_path, env=installed) == line


# From an empty environment

@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder of wheel and sdist. The wheel is built from the sdist, which is therefore whole."""
    pytest.importorskip("build", reason="needs: pip install build")
    folder = tmp_path_factory.mktemp("dist")
    done = subprocess.run([sys.executable, "-m", "build", "--outdir", folder, ROOT / "envs"], text=True,
                          capture_output=True, timeout=500)
    if done.returncode and re.search("No matching distribution|ConnectionError|NewConnectionError|Network is "
                                     "unreachable|Max retries", done.stdout + done.stderr):
        pytest.skip("no package registry can be reached, which has the build tool hatchling")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def python(built, tmp_path_factory):
    """The Python of an empty environment into which one line installed the wheel with its extra [gym]."""
    folder = tmp_path_factory.mktemp("empty")
    run([sys.executable, "-m", "venv", folder])
    (wheel,) = built.glob("*.whl")
    run([folder / "bin" / "pip", "install", "-q", "--no-compile",
         f"household[gym] @ {wheel.as_uri()}"], cwd=folder)
    return folder / "bin" / "python"


def clean(**more):
    """The environment's variables without those that would let it find this project."""
    return {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | more


@pytest.mark.slow
def test_wheel_and_sdist_hold_the_game_and_nothing_else(built):
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    files = {path.relative_to(ROOT / "envs").as_posix() for path in (ROOT / "envs" / "alfred").glob("*.py")}
    files |= {"__init__.py", "__main__.py", "_terminal.py", "household.py", "lengths.json"}
    with zipfile.ZipFile(wheel) as archive:
        assert {name for name in archive.namelist() if ".dist-info/" not in name} == {
            f"household/{file}" for file in files}
        metadata = archive.read(next(n for n in archive.namelist() if n.endswith("METADATA"))).decode()
    assert re.findall("^Requires-Dist: (.*)$", metadata, re.M)[0] == "numpy>=1.26"
    assert all("extra ==" in line for line in re.findall("^Requires-Dist: (.*)$", metadata, re.M)[1:])
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert files | {"pyproject.toml", "LICENSE", "PKG-INFO"} <= names and not LEFT_OUT & names


@pytest.mark.slow
def test_the_ways_in_work_from_an_empty_environment(python, data, tmp_path):
    for name in ("tw_env", "gym", "vector", "plain"):
        printed = run([python, "-c", example(name)], cwd=tmp_path, env=clean(ALFWORLD_DATA=str(data)))
        assert re.fullmatch(EXAMPLES[name][1], printed), name
    assert run([python, "-c", AS_TRL_DOES], cwd=tmp_path, env=clean()) == (
        "['act', 'get_reward', 'reset'] True Nothing happens. 0.0\n")
    assert run([python, "-c", "from household import MessageLengths; "
                "print(len(MessageLengths('alfworld').episodes))"], cwd=tmp_path, env=clean()) == "200\n"
    listed = run([python, "-m", "pip", "list", "--format=json"])
    packages = {package["name"] for package in json.loads(listed)}
    assert not packages & {"alfworld", "textworld", "torch", "trl", "tqdm"}


@pytest.mark.slow
def test_the_installed_command_plays_and_downloads(python, tmp_path):
    for command in ([python.with_name("household")], [python, "-m", "household"],
                    [python, "-m", "household.household"]):
        reply = json.loads(run([*command, "--seed", "3", "--json"], cwd=tmp_path, input="", env=clean()))
        assert reply["observation"].startswith("-= Welcome to TextWorld, ALFRED! =-")
        done = subprocess.run([*command, "download", "--to", tmp_path, "--mirror", "x"], text=True,
                              capture_output=True, env=clean())
        assert done.returncode == 2 and "--mirror=x: expected an address" in done.stderr


@pytest.mark.slow
def test_the_openenv_face_serves_from_the_same_environment(python, data, tmp_path):
    """The page's client, and two sessions at once; the extra's hundred packages take a minute."""
    done = subprocess.run([python, "-m", "pip", "install", "-q", "--no-compile", "openenv>=0.10"], text=True,
                          capture_output=True, timeout=500)
    if done.returncode:
        pytest.skip(f"openenv cannot be installed: {done.stderr.strip().splitlines()[-1]}")
    port = free_port()
    server = subprocess.Popen([python, "-m", "household.alfred.openenv", "--port", str(port),
                               "--sessions", "2"], cwd=tmp_path, env=clean())
    try:
        wait_for(lambda: answers(f"http://127.0.0.1:{port}/health"), server)
        for text, expected in ((example("openenv"), EXAMPLES["openenv"][1]),
                               (SESSIONS, "same\n.*CAPACITY.*\n")):
            printed = run([python, "-c", text.replace("8000", str(port))], cwd=tmp_path, env=clean())
            assert re.fullmatch(expected, printed)
    finally:
        server.terminate()
        server.wait(30)


def answers(url):
    """Whether a server does."""
    with suppress(OSError), urllib.request.urlopen(url, timeout=5):
        return True


SESSIONS = """
from household.alfred.game import Game
from household.alfred.openenv import Client, Command
from household.alfred.splits import find_split
def client():
    return Client(base_url="http://127.0.0.1:8000").sync()
with client() as one, client() as two:
    alone, results = [Game(), Game()], [c.reset(split="L1", index=i) for i, c in enumerate((one, two))]
    replies = [game.reset(find_split("L1")[i]) for i, game in enumerate(alone)]
    for turn in range(20):
        for i, session in enumerate((one, two)):
            command = replies[i].admissible[turn % len(replies[i].admissible)]
            results[i], replies[i] = session.step(Command(command=command)), alone[i].step(command)
            seen = results[i].observation
            assert (seen.text, seen.admissible, seen.won) == replies[i][:3]
    assert one.state().step_count == 20
    print("same")
    try:
        client().reset()
    except Exception as error:
        print(" ".join(str(error).split()))
"""
