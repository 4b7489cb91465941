"""Proves that a rearranged game is another one of the same room, can be won, and comes after the real ones.

    python -m pytest tests/test_rearranged.py
"""

import random
from collections import Counter
from dataclasses import replace

import pytest
from test_household import GAMES, needs_games

from envs import household
from envs.alfred import rooms
from envs.alfred.expert import Expert
from envs.alfred.game import Game
from envs.alfred.problem import Thing, type_of
from envs.alfred.rearranged import is_open, rearranged, with_fewer_places, with_things_moved
from envs.alfred.splits import HELD_OUT, TYPES, Tasks

pytestmark = pytest.mark.fast


@pytest.fixture(scope="module")
def tasks():
    return [rooms.task("train", i, rooms.ALL_TYPES) for i in range(120)]


@pytest.fixture(scope="module")
def others(tasks):
    goals = [(task.problem.task_desc, task.problem.goal) for task in tasks]
    return [rearranged(task, goals, random.Random(i), f"again/{i}") for i, task in enumerate(tasks)]


def test_things_move_to_places_alike(tasks):
    moved = 0
    for i, task in enumerate(tasks):
        other = with_things_moved(task.problem, random.Random(i))
        assert replace(other, things=()) == replace(task.problem, things=())
        where = {place.name: place for place in other.receptacles}
        for was, now in zip(task.problem.things, other.things, strict=True):
            old, new = where[was.receptacle], where[now.receptacle]
            assert now == replace(was, receptacle=new.name, location=new.location)
            assert (new.type, new.openable) == (old.type, old.openable)
            assert was.type in new.accepts or now == was
            moved += now != was
    assert moved > 100


def test_places_are_left_out_with_what_lies_there_and_the_others_are_numbered_anew(tasks):
    shares = []
    for i, task in enumerate(tasks):
        problem = task.problem
        other = with_fewer_places(problem, random.Random(i))
        shares.append(1 - len(other.receptacles) / len(problem.receptacles))
        before = {place.location: place for place in problem.receptacles}
        assert len(before) == len(problem.receptacles)
        same = {before[place.location].name: place.name for place in other.receptacles}
        assert [replace(place, name=same[place.name]) for place in problem.receptacles
                if place.name in same] == [*other.receptacles]
        kinds = Counter(map(type_of, same))
        assert {*same.values()} == {f"{kind} {n + 1}" for kind in kinds for n in range(kinds[kind])}
        assert all(type_of(was) == type_of(now) for was, now in same.items())
        assert [replace(thing, receptacle=same[thing.receptacle]) for thing in problem.things
                if thing.receptacle in same] == [*other.things]
    assert min(shares) < 0.1 and max(shares) > 0.4 and 0.2 < sum(shares) / len(shares) < 0.4


def test_nothing_is_held_or_lies_where_it_is_no_more(tasks):
    """A bowl in two places of which one goes, and what it holds, which is elsewhere and goes."""
    problem, first = tasks[0].problem, tasks[0].problem.receptacles[0]
    places = tuple(replace(first, name=f"shelf {n}", kind="") for n in (3, 2, 1))
    things = (Thing("bowl 1", "shelf 1", 0, holding=("cup 1", "pen 1"), also_in=("shelf 2",)),
              Thing("cup 1", "shelf 2", 0), Thing("pen 1", "shelf 1", 0), Thing("key 1", None, 0))
    seen = set()
    for i in range(60):
        other = with_fewer_places(replace(problem, receptacles=places, things=things), random.Random(i))
        named = {place.name for place in other.receptacles}
        seen.add(len(named))
        there = {thing.name: thing for thing in other.things}
        assert "key 1" in there
        for thing in other.things:
            assert {thing.receptacle, *thing.also_in} <= named | {None} and {*thing.holding} <= {*there}
    assert seen == {0, 1, 2, 3} or seen == {1, 2, 3}


def test_the_expert_wins_them_and_none_is_won_at_the_start(tasks, others):
    expert = Expert(tasks)
    shown = [expert.show(task, 0, 0.0, 50) for task in others]
    assert sum(one.won for one in shown) >= 0.97 * len(shown)
    assert min(len(one.commands) for one in shown) >= 3


def test_tasks_are_other_games_and_are_named_by_what_they_ask(tasks, others):
    changed = sum(task.problem.task_desc != other.problem.task_desc for task, other in zip(tasks, others))
    assert changed > len(tasks) / 3 and len({other.task_type for other in others}) == 6
    for task, other in zip(tasks, others, strict=True):
        assert other.task_type == other.problem.goal.task_type and other.split == task.split
        assert other.id.startswith(f"{task.id}/again/")


def test_what_lies_in_a_bowl_or_in_two_places_or_cannot_be_taken_stays(tasks):
    task = tasks[0]
    places = [place for place in task.problem.receptacles if place.type == task.problem.receptacles[0].type]
    place, accepted = places[0], frozenset(("cup", "bowl", "pen"))
    alike = [replace(place, name=f"shelf {n}", kind="", accepts=accepted) for n in range(1, 9)]
    things = (Thing("cup 1", "shelf 1", 0), Thing("bowl 1", "shelf 1", 0, holding=("pen 1",)),
              Thing("pen 1", "shelf 1", 0), Thing("cup 2", "shelf 1", 0, also_in=("shelf 2",)),
              Thing("cup 3", "shelf 1", 0, pickupable=False), Thing("cup 4", None, 0))
    problem = replace(task.problem, receptacles=tuple(alike), things=things)
    found = [with_things_moved(problem, random.Random(i)).things for i in range(40)]
    assert {then[1:] for then in found} == {things[1:]}
    assert {then[0].receptacle for then in found} == {f"shelf {n}" for n in range(1, 9)}


@pytest.mark.parametrize("change, fine", [
    ("", True), ("no such thing", False), ("one of two", False), ("no such place", False),
    ("no fridge", False), ("cool and there", False), ("there", True), ("cannot be cooled", False)])
def test_a_goal_needs_what_it_asks_for_and_is_not_met(tasks, change, fine):
    """A cool apple in the fridge is what "put a cool apple in fridge" asks for; a warm one is not."""
    task_type = "pick_two_obj_and_place" if change == "one of two" else "pick_cool_then_place_in_recep"
    task = next(task for task in tasks if task.task_type == "pick_cool_then_place_in_recep")
    goal, problem = replace(task.problem.goal, task_type=task_type), task.problem
    (target, *_) = (p.name for p in problem.receptacles if p.type == goal.receptacle)
    mine = [thing for thing in problem.things if thing.type == goal.object][:1]
    rest = [thing for thing in problem.things if thing.type != goal.object]
    if change in ("there", "cool and there"):
        mine = [replace(mine[0], receptacle=target, cool=change != "there")]
    if change == "cannot be cooled":
        mine = [replace(mine[0], coolable=False)]
    left_out = {"no such place": goal.receptacle, "no fridge": "fridge"}.get(change)
    problem = replace(problem, things=tuple(rest + (mine if change != "no such thing" else [])),
                      receptacles=tuple(p for p in problem.receptacles if p.type != left_out))
    assert is_open(problem, goal) is fine


@needs_games
def test_real_games_come_first_and_then_others_without_end():
    plain, endless = Tasks(GAMES, "part", 3), Tasks(GAMES, "part", 3, endless=True)
    n = len(plain.real("train", TYPES["part"]))
    assert endless.train("part", 0, 5) == plain.train("part", 0, 5)
    assert plain.train("part", n, 5) == plain.train("part", 0, 5)
    first, again = endless.train("part", n - 2, 6), endless.train("part", n - 1, 6)
    assert first[1:] == again[:5] and first[:2] == plain.train("part", n - 2, 2)
    later = endless.train("part", 100 * n, 200)
    assert not {task.task_type for task in later} & set(HELD_OUT) and len({task.id for task in later}) == 200
    assert later != Tasks(GAMES, "part", 4, endless=True).train("part", 100 * n, 200)
    expert = Expert(plain.train("all", 0, 200))
    played = Counter(expert.show(task, 0, 0.0, 50).won for task in later)
    assert played[True] >= 195
    assert household.World(household.World.Settings(GAMES)).tasks.endless


def test_a_rearranged_game_is_played_as_any_other(others):
    game = Game()
    for task in others[:10]:
        reply = game.reset(task)
        assert reply.observation.endswith(f"Your task is to: {task.problem.task_desc}.") and not reply.won
