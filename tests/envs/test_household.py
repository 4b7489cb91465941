"""Tests that the household game equals the stock ALFWorld engine: its transcripts, and the engine itself.

    python -m pytest tests/envs/test_household.py      # 2 minutes with alfworld installed, else 10 seconds
"""

import gzip
import json
import os
import pty
import random
import re
import subprocess
import sys
from dataclasses import replace
from functools import cache, lru_cache, partial
from pathlib import Path

import pytest

from envs import Reply, Task
from envs.alfred.game import Game
from envs.alfred.games import GOALS, PddlText, check_source, load_game, load_games, problem_from_pddl
from envs.alfred.problem import Goal, Problem, Receptacle, Thing, listing, problem_of
from envs.household import Environment

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT.parent / "shared/data/alfworld"
DOWNLOADED = Path(os.environ.get("ALFWORLD_DATA") or "~/.cache/alfworld").expanduser() / "json_2.1.1"
GAMES = DATA / "games.jsonl.gz" if (DATA / "games.jsonl.gz").exists() else DOWNLOADED
TRANSCRIPTS = DATA / "transcripts.jsonl.gz"
needs_games = pytest.mark.skipif(
    not GAMES.exists(), reason="needs ALFWorld's games (python -m envs.household download) in $ALFWORLD_DATA "
                               "(or ../shared/data/alfworld/games.jsonl.gz)")
needs_transcripts = pytest.mark.skipif(
    not TRANSCRIPTS.exists(), reason="needs transcripts, ../shared/data/alfworld/transcripts.jsonl.gz; other "
                                     "tests compare with the engine itself, given alfworld and "
                                     "alfworld-download's games in $ALFWORLD_DATA")
real_games = cache(partial(load_games, GAMES))           # of a split: the file is large
GRAMMAR = 'grammar :: """{"task": [{"rhs": "Your task is to: put a hot apple in fridge."}]}""";\n' \
          'action PutObject { template :: "VERB {o} WORD {r}"; }'

# A kitchen with rare features of real games: a thing in two receptacles, receptacles that share a location, a
# bathtub basin of type sink, an egg that is cold at the start and has no type, a bowl that contains things,
# two knives; and a tour that uses every command
IDS = {"fridge": "Fridge_bar_1", "micro": "Microwave_bar_1", "sink": "Sink_bar_1_bar_SinkBasin",
       "tub": "Bathtub_bar_bathtubbasin",
       "top1": "CounterTop_bar_1", "top2": "CounterTop_bar_2", "desk": "Desk_bar_1", "apple1": "Apple_bar_1",
       "apple2": "Apple_bar_2", "egg": "Egg_bar_1", "knife": "Knife_bar_1", "butter": "ButterKnife_bar_1",
       "lamp": "DeskLamp_bar_1", "bowl": "Bowl_bar_1", "stove": "StoveKnob_bar_1"}
PLACES = {"fridge": ("l1", "Fridge"), "micro": ("l2", "Microwave"), "top2": ("l2", "CounterTop"),
          "sink": ("l3", "SinkBasin"),
          "tub": ("l3", "SinkBasin"), "top1": ("l4", "CounterTop"), "desk": ("l5", "Desk")}
OBJECTS = {"apple1": "Apple", "apple2": "Apple", "knife": "Knife", "butter": "ButterKnife",
           "lamp": "DeskLamp", "bowl": "Bowl", "stove": "StoveKnob"}
INSIDE = [("apple1", "micro"), ("apple1", "top2"), ("apple2", "top1"), ("knife", "top1"), ("butter", "desk"),
          ("lamp", "desk"), ("bowl", "fridge"), ("stove", "micro")]
TOUR = """go to countertop 2; take knife 1 from countertop 2; slice apple 1 with knife 1;
slice apple 2 with knife 1; move knife 1 to countertop 2; take apple 1 from countertop 2; examine apple 1;
go to sinkbasin 1; look; clean apple 1 with bathtubbasin 1; examine apple 1; go to microwave 1;
heat apple 1 with microwave 1; examine apple 1; move apple 1 to countertop 1;
take apple 1 from countertop 1; open microwave 1; move apple 1 to microwave 1; look; use stoveknob 1;
examine stoveknob 1; take apple 2 from countertop 1; examine apple 2; heat apple 2 with microwave 1;
examine apple 2; take apple 2 from microwave 1; close microwave 1; go to desk 1; use desklamp 1;
use desklamp 1; look; inventory; go to microwave 1; move apple 2 to countertop 1; open microwave 1;
take apple 2 from microwave 1; look; move apple 2 to microwave 1; go to fridge 1; open fridge 1;
take bowl 1 from fridge 1; cool bowl 1 with fridge 1; examine bowl 1; clean bowl 1 with fridge 1;
help""".replace("\n", " ").split("; ")
AT = {"apple1": "l4", "apple2": "l4", "knife": "l4", "butter": "l5", "lamp": "l5", "bowl": "l1",
      "stove": "l2"}


# The commands that win a kitchen's pick_and_place_simple
WIN = ["go to countertop 2", "take apple 1 from countertop 2", "go to fridge 1", "open fridge 1",
       "move apple 1 to fridge 1"]


def kitchen(goal, start="l0"):
    """The PDDL problem of that kitchen. Knives fit everywhere, other things everywhere but on the desk."""
    types = {"SinkBasinType", "MicrowaveType", "FridgeType"} | {kind + "Type" for _, kind in PLACES.values()}
    object_types = {"KnifeType", "ButterKnifeType", "MugType"} | {kind + "Type" for kind in OBJECTS.values()}
    facts = [f"atLocation agent1 {start}", *(f"cleanable {IDS[o]}" for o in OBJECTS if o != "lamp"),
             *(f"heatable {IDS[o]}" for o in ("apple1", "apple2")),
             *(f"coolable {IDS[o]}" for o in ("apple1", "apple2", "bowl")),
             *(f"sliceable {IDS[o]}" for o in ("apple1", "apple2")), f"isCool {IDS['egg']}",
             f"isCool {IDS['apple2']}",
             f"toggleable {IDS['lamp']}", f"toggleable {IDS['stove']}", f"isReceptacleObject {IDS['bowl']}",
             f"inReceptacleObject {IDS['apple1']} {IDS['bowl']}",
             f"inReceptacleObject {IDS['knife']} {IDS['bowl']}",
             *(f"pickupable {IDS[o]}" for o in OBJECTS if o not in ("lamp", "stove")),
             *(f"openable {IDS[r]}" for r in ("fridge", "micro"))]
    for r, (location, kind) in PLACES.items():
        facts += [f"receptacleType {IDS[r]} {kind}Type", f"receptacleAtLocation {IDS[r]} {location}"]
    facts += [f"canContain {r} {o}" for r in sorted(types) for o in sorted(object_types)
              if r != "DeskType" or "Knife" in o]
    facts += [f"objectType {IDS[o]} {kind}Type" for o, kind in OBJECTS.items()]
    facts += [f"inReceptacle {IDS[o]} {IDS[r]}" for o, r in INSIDE]
    facts += [f"objectAtLocation {IDS[o]} {at}" for o, at in AT.items()]
    declared = ["agent1 - agent", *(f"l{i} - location" for i in range(6)),
                *(f"{t} - rtype" for t in sorted(types)),
                *(f"{t} - otype" for t in sorted(object_types)), *(f"{IDS[r]} - receptacle" for r in PLACES),
                *(f"{IDS[o]} - object" for o in (*OBJECTS, "egg"))]
    lines = "\n".join(f"({fact})" for fact in facts)
    return (f"(define (problem kitchen) (:domain alfred) (:objects {' '.join(declared)})\n"
            f"(:init\n{lines}\n(= (total-cost) 0)) (:goal (and {goal})))")


def goal_of(task_type, object="Apple", receptacle="Fridge", toggle="DeskLamp"):
    return (GOALS[task_type].replace("OBJECT", object + "Type").replace("RECEPTACLE", receptacle + "Type")
            .replace("TOGGLE", toggle + "Type"))


def task_of(pddl, task_desc="put a hot apple in fridge"):
    return Task("kitchen", "train", "", PddlText("kitchen.pddl", task_desc, pddl))


def recorded():
    """The recorded transcripts of the stock engine."""
    with gzip.open(TRANSCRIPTS, "rt", encoding="utf-8") as lines:
        return list(map(json.loads, lines))


# Against the recorded engine

@pytest.mark.slow
@needs_games
@needs_transcripts
def test_every_recorded_transcript_is_reproduced_exactly():
    transcripts = recorded()
    tasks = {task.id: task for split in {t["split"] for t in transcripts}
             for task in real_games(split)}
    game = Game()
    for transcript in transcripts:
        task = tasks[transcript["rel"]]
        reply = game.reset(task)
        assert reply.observation == transcript["intro"]
        assert game.problem.goal.task_type == task.task_type == transcript["task_type"]
        for k, turn in enumerate(transcript["turns"]):
            assert reply.admissible == turn["admissible_before"], (task.id, k)
            reply = game.step(turn["command"])
            assert reply.observation == turn["observation"], (task.id, k, turn["command"])
            assert reply.won == reply.done == turn["won"], (task.id, k, turn["command"])
        assert reply.admissible == transcript["admissible_after"], task.id
    assert len(transcripts) == 216


# Against the engine itself

@cache
def translator():
    """The engine's translation of a game to its planner's format, each game translated once.

    The engine does it twice when it loads a game and twice when it starts it, in more than half of its time,
    and only reads what it gets.
    """
    import fast_downward
    return lru_cache(maxsize=64)(fast_downward.pddl2sas)


@pytest.fixture
def engine(monkeypatch):
    """The stock engine: engine(pddl, task_desc) starts a game, engine.step(command) plays a turn."""
    pytest.importorskip("alfworld", reason="needs the stock engine: pip install alfworld")
    monkeypatch.setattr(sys, "argv", list(sys.argv))          # the engine's translator overwrites it
    monkeypatch.setattr("fast_downward.pddl2sas", translator())
    import textworld
    from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
    from alfworld.info import ALFRED_PDDL_PATH, ALFRED_TWL2_PATH
    from textworld.envs.pddl import PddlEnv
    domain, grammar = (Path(path).read_text(encoding="utf-8")
                       for path in (ALFRED_PDDL_PATH, ALFRED_TWL2_PATH))
    game = AlfredDemangler(PddlEnv(textworld.EnvInfos(won=True, admissible_commands=True)))

    def start(pddl, task_desc):
        game.load({"pddl_domain": domain, "pddl_problem": pddl, "solvable": True, "walkthrough": None,
                  "grammar": grammar.replace("UNKNOWN GOAL", task_desc)})
        return game.reset()

    start.step = lambda command: game.step(command)[0]
    return start


def next_command(admissible, seen, rng):
    """A random command: mostly not "go to", sometimes one seen earlier or a malformed one."""
    draw = rng.random()
    if draw < 0.12:
        return rng.choice(sorted(seen))
    if draw < 0.2:
        command = rng.choice(sorted(seen))
        return rng.choice([command.upper(), f"  {command} ", command + ".", command[:-1], "", "fly",
                           "examine", "\tlook"])
    doing = [c for c in admissible if not c.startswith(("go to", "help", "inventory", "look"))]
    if doing and draw < 0.75:
        strong = [c for c in doing if not c.startswith(("examine", "close"))]
        return rng.choice(strong if strong and draw < 0.6 else doing)
    return rng.choice([c for c in admissible if c not in ("help", "inventory") or draw > 0.97])


def play_both(engine, pddl, task_desc, turns, rng, tour=()):
    """Play the tour and then random commands on both, and compare. Return the observations, and any win."""
    game = Game()
    theirs, ours = engine(pddl, task_desc), game.reset(task_of(pddl, task_desc))
    seen, texts, won, command = {"look"}, set(), False, None
    for turn in range(len(tour) + turns):
        assert ours.observation == theirs.feedback, command
        assert ours.admissible == theirs["admissible_commands"], command
        assert ours.won == theirs["won"], command
        seen.update(ours.admissible)
        texts.add(ours.observation)
        won |= ours.won
        command = tour[turn] if turn < len(tour) else next_command(ours.admissible, seen, rng)
        theirs, ours = engine.step(command), game.step(command)
    return texts, won


@pytest.mark.slow
@needs_games
def test_real_games_equal_the_live_engine_under_random_commands(engine):
    rng, solvable = random.Random(20), real_games("train")
    for rare in (r"\(isCool", r"\(receptacleType Bathtub\w+ SinkBasinType"):
        problem = next(task.problem for task in solvable if re.search(rare, task.problem.pddl))
        play_both(engine, problem.pddl, problem.task_desc, 10, rng)


# test_alfworld plays the other types' kitchens, with the same commands on textworld's own state and grammar
@pytest.mark.slow
@pytest.mark.parametrize(("task_type", "start"), [("pick_and_place_simple", "l2"),
                                                  ("look_at_obj_in_light", "l5")])
def test_a_kitchen_of_corner_cases_equals_the_live_engine(engine, task_type, start):
    rng = random.Random(task_type)
    pddl = kitchen(goal_of(task_type, receptacle="CounterTop"), start)
    texts, won = play_both(engine, pddl, "tidy up", 60, rng, TOUR)
    assert won
    for text in ("a cool sliced apple 1", "a cool and clean sliced apple 1", "a hot and clean sliced apple 1",
                 "a sliced apple 2", "a hot sliced apple 2", "Next to it, you see a apple",
                 "turn on the desklamp 1",
                 "In it, you see a apple 2, and a knife 1", "Available commands"):
        assert any(text in observation for observation in texts), text


# By hand

def test_the_texts_of_a_short_game():
    game = Game()
    reply = game.reset(task_of(kitchen(goal_of("pick_heat_then_place_in_recep"))))
    assert reply.observation.endswith(
        "you see a bathtubbasin 1, a countertop 2, a countertop 1, a desk 1, a fridge 1, a microwave 1, "
        "and a sinkbasin 1."
        "\n\nYour task is to: put a hot apple in fridge.")
    dialogue = [
        ("look", "You are in the middle of a room. Looking quickly around you, you see nothing."),
        ("take apple 1 from countertop 2", "Nothing happens."),
        ("go to countertop 2",
         "You arrive at countertop 2. On the countertop 2, you see a apple 1, and a knife 1."),
        ("Take apple 1 from countertop 2", "Nothing happens."),
        (" take apple 1 from countertop 2 ", "You pick up the apple 1 from the countertop 2."),
        ("inventory", "You are carrying: a apple 1."),
        ("examine apple 1", "This is a cold apple 1."),
        ("go to microwave 1", "You arrive at microwave 1. The microwave 1 is closed."),
        ("heat apple 1 with microwave 1", "You heat the apple 1 using the microwave 1."),
        ("examine apple 1", "This is a hot apple 1."),
        ("look", "You are facing the countertop 1, and microwave 1. Next to it, you see nothing."),
        ("go to fridge 1", "You arrive at fridge 1. The fridge 1 is closed."),
        ("move apple 1 to fridge 1", "Nothing happens."),
        ("open fridge 1", "You open the fridge 1. The fridge 1 is open. In it, you see a bowl 1."),
    ]
    for command, observation in dialogue:
        reply = game.step(command)
        assert (reply.observation, reply.won) == (observation, False)
    reply = game.step("move apple 1 to fridge 1")
    assert reply == Reply("You move the apple 1 to the fridge 1.", reply.admissible, True, True)


def test_a_problem_made_of_records_plays_without_pddl():
    shelf = Receptacle("shelf 1", 0, openable=False, opened=False, accepts=frozenset({"mug"}))
    safe = Receptacle("safe 1", 1, openable=True, opened=False, accepts=frozenset({"mug"}))
    problem = Problem("put a mug in safe", (shelf, safe),
                      (Thing("mug 1", "shelf 1", 0), Thing("pen 1", "safe 1", 1)),
                      Goal("pick_and_place_simple", "mug", "safe"))
    game = Game()
    assert game.reset(Task("x", "train", "", problem)).admissible == [
        "go to safe 1", "go to shelf 1", "help", "inventory", "look"]
    replies = [game.step(c) for c in ("go to shelf 1", "take mug 1 from shelf 1", "go to safe 1",
                                     "open safe 1",
                                     "move mug 1 to safe 1")]
    assert [reply.won for reply in replies] == [False] * 4 + [True]
    seen = game.step("examine safe 1").observation
    assert seen == "The safe 1 is open. In it, you see a mug 1, and a pen 1."
    assert not game.reset(Task("x", "train", "", problem)).won          # the last game's state is gone
    ajar = replace(problem, receptacles=(shelf, replace(safe, opened=True)))
    game.reset(Task("x", "train", "", ajar))
    reply = game.step("go to safe 1")
    assert "The safe 1 is open. In it, you see a pen 1." in reply.observation
    assert "close safe 1" in reply.admissible


def test_lists_are_punctuated_as_in_the_game():
    assert [listing(["cup 1", "pan 1", "egg 1"][:n]) for n in range(4)] == [
        "nothing", "a cup 1", "a cup 1, and a pan 1", "a cup 1, a pan 1, and a egg 1"]


# Game files

def write_game(folder, verb="move", word="to", **changes):
    folder.mkdir(parents=True)
    game = {"pddl_domain": "", "grammar": GRAMMAR.replace("VERB", verb).replace("WORD", word),
            "solvable": True,
            "pddl_problem": kitchen(goal_of("pick_heat_then_place_in_recep"))} | changes
    (folder / "game.tw-pddl").write_text(json.dumps({k: v for k, v in game.items() if v is not None}),
                                         encoding="utf-8")
    (folder / "traj_data.json").write_text('{"task_type": "pick_heat_then_place_in_recep"}', encoding="utf-8")
    return folder / "game.tw-pddl"


@pytest.mark.parametrize(("verb", "word"), [("move", "to"), ("put", "in/on")])
def test_games_of_old_and_new_releases_are_played_with_the_new_commands(tmp_path, verb, word):
    path = write_game(tmp_path / "train/pick_heat_then_place_in_recep-Apple-None-Fridge-1/trial_1", verb,
                      word)
    task = load_game(path)
    assert (task.id, task.split, task.task_type) == (
        "train/pick_heat_then_place_in_recep-Apple-None-Fridge-1/trial_1", "train",
        "pick_heat_then_place_in_recep")
    game = Game()
    assert game.reset(task).observation.endswith("Your task is to: put a hot apple in fridge.")
    game.step("go to countertop 2")
    assert "move knife 1 to countertop 2" in game.step("take knife 1 from countertop 2").admissible


def test_a_folder_gives_its_solvable_games_in_order(tmp_path):
    for trial, changes in (("b", {}), ("a", {}), ("unsolvable", {"solvable": False}),
                           ("unknown", {"solvable": None})):
        write_game(tmp_path / "valid_seen" / "pick" / trial, **changes)
    write_game(tmp_path / "valid_seen" / "pick-Sliced" / "c")
    assert [task.id for task in load_games(tmp_path, "valid_seen")] == [
        "valid_seen/pick/a", "valid_seen/pick/b"]
    assert len(load_games(tmp_path, "valid_seen", types=["pick_heat_then_place_in_recep"])) == 2
    with pytest.raises(ValueError,
                       match="no solvable games of split valid_seen and types pick_two_obj_and_place"):
        load_games(tmp_path, "valid_seen", types=["pick_two_obj_and_place"])
    with pytest.raises(ValueError, match="no solvable games of split train"):
        load_games(tmp_path, "train")


@pytest.mark.slow
@needs_games
def test_the_released_games_have_the_official_counts():
    counts = {split: len(real_games(split)) for split in ("train", "valid_seen", "valid_unseen")}
    assert counts == {"train": 3553, "valid_seen": 140, "valid_unseen": 134}
    environment = Environment(Environment.Settings(str(GAMES)))
    assert [len(environment.split_tasks(name)) for name in ("dev", "L0", "L1", "L2")] == [199, 140, 134, 38]
    assert environment.unseen_splits() == ["L2"]
    assert environment.description() == "real ALFWorld games, household engine"


@pytest.mark.slow
@needs_games
def test_the_pages_counts_of_games_that_are_close_to_training():
    """Of valid_seen: those whose folder, which names type, objects and room, has a training game."""
    goal_and_room = {split: [task.id.split("/")[1] for task in real_games(split)]
                     for split in ("train", "valid_seen", "valid_unseen")}
    rooms = {split: [name.rpartition("-")[2] for name in names] for split, names in goal_and_room.items()}
    known = sum(name in set(goal_and_room["train"]) for name in goal_and_room["valid_seen"])
    assert set(rooms["valid_seen"]) <= set(rooms["train"])
    assert not set(rooms["valid_unseen"]) & set(rooms["train"])
    pages = {"results": f"{known} of its 140 games have both", "guide": f"{known} of the 140 have the room"}
    for page, text in pages.items():
        assert text in (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")


BROKEN = {
    "bad JSON": "{",
    "expected a JSON object": "[1]",
    "no text under the key pddl_problem": {"pddl_problem": None},
    "no text under the key grammar": {"grammar": None},
    "its grammar has no": {"grammar": "grammar"},
    r"1 '\(' not closed": {"pddl_problem": "(define (:init)"},
    r"'\)' without '\('": {"pddl_problem": "())"},
    r"no \(:goal": {"pddl_problem": "(define (:init))"},
    "none of ALFWorld's six": {"pddl_problem": kitchen("(exists (?o - object) (and (isSliced ?o)))")},
    "needs 2 arguments": {"pddl_problem": kitchen("x").replace("(objectType Apple_bar_1 ", "(objectType ")},
    r"one \(atLocation": {"pddl_problem": kitchen("x").replace("(atLocation agent1 l0)", "")},
    "needs a receptacleType": {
        "pddl_problem": kitchen("x").replace("(receptacleAtLocation Desk_bar_1 l5)", "")},
    "at the start": {"pddl_problem": kitchen("x").replace("(isCool Egg_bar_1)", "(isHot Egg_bar_1)")},
    "placed receptacle": {
        "pddl_problem": kitchen("x").replace("Apple_bar_1 Microwave_bar_1", "Apple_bar_1 Nowhere_bar_1")},
    "objectType of its name": {
        "pddl_problem": kitchen("x").replace("Bowl_bar_1 BowlType", "Bowl_bar_1 MugType")},
    "expected an id": {"pddl_problem": kitchen("x").replace("Bowl_bar_1", "Bowl")},
    "is not a fact": {"pddl_problem": kitchen("x").replace("(isCool Egg_bar_1)", "cold")},
}


@pytest.mark.parametrize("message", BROKEN)
def test_a_broken_game_file_is_refused_with_its_path(tmp_path, message):
    change = BROKEN[message]
    path = write_game(tmp_path / "train/x/y", **(change if isinstance(change, dict) else {}))
    if isinstance(change, str):
        path.write_text(change, encoding="utf-8")
    with pytest.raises(ValueError, match=message) as caught:
        load_game(path)
    assert str(path) in str(caught.value)


def test_a_broken_game_among_many_is_refused_when_it_is_played(tmp_path):
    path = write_game(tmp_path / "train/x/y", pddl_problem="(define")
    (task,) = load_games(tmp_path, "train")
    with pytest.raises(ValueError, match="not closed") as caught:
        Game().reset(task)
    assert str(path) in str(caught.value)


def test_invalid_sources_are_refused(tmp_path):
    with pytest.raises(ValueError, match="nothere: no such file or folder"):
        load_games(tmp_path / "nothere", "train")
    with pytest.raises(ValueError, match="nothere.tw-pddl: cannot read it"):
        load_game(tmp_path / "nothere.tw-pddl")
    (tmp_path / "plain.jsonl.gz").write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match="expected a folder of games or a .jsonl.gz file"):
        load_games(tmp_path / "plain.jsonl.gz", "train")
    with gzip.open(tmp_path / "rows.jsonl.gz", "wt") as rows_file:
        rows_file.write('{"split": "train", "solvable": true, "rel": "a"}\n')
    with pytest.raises(ValueError, match="line 1: no text under the key task_type"):
        load_games(tmp_path / "rows.jsonl.gz", "train")
    with pytest.raises(ValueError, match="task type pick_three"):
        load_games(tmp_path, "train", types=["pick_three"])


def test_pddl_may_have_any_case_and_spacing_and_comments():
    text = kitchen(goal_of("pick_two_obj_and_place"))
    shaped = text.upper().replace("(", "\n ( ").replace("(:INIT", "; a comment (\n(:INIT", 1)
    assert problem_from_pddl(shaped, "x") == problem_from_pddl(text, "x")


def test_two_different_types_do_not_make_a_pick_two_goal():
    goal = goal_of("pick_two_obj_and_place").replace("AppleType", "BowlType", 1)
    with pytest.raises(ValueError, match="none of ALFWorld's six"):
        problem_from_pddl(kitchen(goal), "x")


def test_problem_of_returns_a_parsed_problem_unchanged():
    task = task_of(kitchen(goal_of("pick_heat_then_place_in_recep")))
    problem = problem_of(task)
    assert problem_of(Task("x", "train", "", problem)) is problem


# Checks of --games that parse no game

def test_a_source_without_games_is_refused_at_once_and_one_with_a_game_is_not(tmp_path):
    (tmp_path / "train/x/y").mkdir(parents=True)
    with pytest.raises(ValueError,
                       match="no game.tw-pddl under train, valid_seen; expected a json_2.1.1 folder"):
        check_source(tmp_path, ("train", "valid_seen"))
    (tmp_path / "train/x/y/game.tw-pddl").write_text("not parsed")
    check_source(tmp_path, ("train", "valid_seen"))
    (tmp_path / "games.jsonl").write_text("{}")
    with pytest.raises(ValueError, match="--games=.*games.jsonl: expected a folder of games or a .jsonl.gz"):
        check_source(tmp_path / "games.jsonl", ())
    with pytest.raises(ValueError, match="--games=nothere: no such file or folder"):
        check_source("nothere", ())


# The command line

def run(*flags, commands=""):
    return subprocess.run([sys.executable, "-m", "envs.household", *flags], input=commands, cwd=ROOT,
                          text=True, capture_output=True, check=False, errors="surrogateescape")


@pytest.mark.slow
def test_json_gives_one_line_before_the_first_command_and_one_after_each(tmp_path):
    path = write_game(tmp_path / "train/x/y")
    commands = ["go to countertop 2", "take apple 1 from countertop 2", "fly", "\udcff", "inventory"]
    # without a newline after the last command
    done = run("--game", str(path), "--json", commands="\n".join(commands))
    game = Game()
    expected = [game.reset(load_game(path)), *map(game.step, commands)]
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        json.loads(json.dumps(reply._asdict())) for reply in expected]
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_without_json_the_text_and_a_prompt_are_printed(tmp_path):
    path = write_game(tmp_path / "train/x/y", pddl_problem=kitchen(goal_of("pick_and_place_simple")))
    done = run("--game", str(path),
               commands="go to countertop 2\ntake apple 1 from countertop 2\ngo to fridge 1\n"
                                             "open fridge 1\nmove apple 1 to fridge 1\n")
    assert done.stdout.startswith("-= Welcome to TextWorld, ALFRED! =-")
    assert done.stdout.endswith("\n> You move the apple 1 to the fridge 1.\nYou have won.\n> \n")
    assert done.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("as_json", [False, True])
def test_who_types_learns_of_help_and_a_game_that_is_won_ends(tmp_path, as_json):
    """Piped commands get neither, see above, and --json answers as ever."""
    path = write_game(tmp_path / "train/x/y", pddl_problem=kitchen(goal_of("pick_and_place_simple")))
    keyboard, terminal = pty.openpty()
    os.write(keyboard, b"go to countertop 2\ntake apple 1 from countertop 2\ngo to fridge 1\nopen fridge 1\n"
                       b"move apple 1 to fridge 1\nlook\n\x04")
    flags = ["--game", str(path), *(["--json"] if as_json else [])]
    done = subprocess.run([sys.executable, "-m", "envs.household", *flags], cwd=ROOT, stdin=terminal,
                          text=True, capture_output=True, timeout=60)
    os.close(keyboard)
    os.close(terminal)
    assert (done.returncode, done.stderr) == (0, "")
    if as_json:
        assert [json.loads(line)["won"] for line in done.stdout.splitlines()] == [False] * 5 + [True] * 2
    else:
        assert done.stdout.startswith("(help: the commands; Ctrl-D: end)\n-= Welcome to TextWorld, ALFRED!")
        assert done.stdout.endswith("\n> You move the apple 1 to the fridge 1.\nYou have won.\n")


@pytest.mark.slow
def test_a_generated_room_is_played_by_number():
    first, again, other = (run("--seed", seed, "--split", "L1", "--json").stdout for seed in "334")
    assert first == again != other


@pytest.mark.slow
def test_a_closed_stdout_ends_the_game_without_a_traceback():
    player = subprocess.Popen([sys.executable, "-m", "envs.household"], cwd=ROOT, stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    player.stdout.readline()
    player.stdout.close()
    player.stdout = None                                       # communicate would read it
    assert player.communicate("look\n" * 3)[1] == "" and player.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize(("flags", "message"), [
    (("--colour",), "unrecognized arguments"), (("--se", "3"), "unrecognized arguments"),
    (("--game", "nothere"), "nothere: cannot read it"),
    (("--split", "L9"), "--split=L9 --seed=0: split 'L9'"),
    (("--seed", "300"), "--split=L0 --seed=300: task 300 of split L0: it has 0 to 255"),
    (("--seed", "x"), "invalid int"),
])
def test_invalid_flags_fail(flags, message):
    done = run(*flags)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
