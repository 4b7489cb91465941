"""Tests of rearranged games: rooms of the same scene type, new tasks that can be won, used after one pass.

    python -m pytest tests/envs/test_rearranged.py
"""

import functools
import itertools
import random
from collections import Counter, defaultdict
from dataclasses import replace
from types import SimpleNamespace

import pytest
from test_household import GAMES, needs_games

from envs import Task, household
from envs.alfred import games, rooms
from envs.alfred.expert import Expert
from envs.alfred.game import Game
from envs.alfred.problem import Thing, type_of
from envs.alfred.rearranged import is_achievable, mix_rooms, move_things, rearranged, scene_type
from envs.alfred.splits import HELD_OUT, TYPES, Tasks


@pytest.fixture(scope="module")
def tasks():
    return [rooms.task("train", i, rooms.ALL_TYPES) for i in range(120)]


@pytest.fixture(scope="module")
def others(tasks):
    goals = [(task.problem.task_desc, task.problem.goal) for task in tasks]
    return [rearranged(task, tasks[i - 1], goals, random.Random(i), f"again/{i}")
            for i, task in enumerate(tasks)]


def test_things_move_to_receptacles_of_the_same_type(tasks):
    moved = 0
    for i, task in enumerate(tasks):
        other = move_things(task.problem, random.Random(i))
        assert replace(other, things=()) == replace(task.problem, things=())
        where = {place.name: place for place in other.receptacles}
        for was, now in zip(task.problem.things, other.things, strict=True):
            old, new = where[was.receptacle], where[now.receptacle]
            assert now == replace(was, receptacle=new.name, location=new.location)
            assert (new.type, new.openable) == (old.type, old.openable)
            assert was.type in new.accepts or now == was
            moved += now != was
    assert moved > 100


def test_a_mixed_room_has_one_rooms_receptacles_and_contents_per_type(tasks):
    shares, from_other = [], 0
    for i, (task, other) in enumerate(itertools.pairwise(tasks)):
        one, two = without_names(task.problem, 0), without_names(other.problem, 1)
        both, kinds = Counter(one) + Counter(two), defaultdict(set)
        room = mix_rooms(marked(task.problem, 0), marked(other.problem, 1), random.Random(i))
        present = Counter(without_names(room))
        assert present <= both
        for kind, source in ((place[1], place[0]) for place in present):
            kinds[kind].add(source)
        assert all(len(sources) == 1 for sources in kinds.values())
        unreduced = [place for place in both.elements() if place[0] in kinds.get(place[1], ())]
        shares.append(1 - present.total() / len(unreduced))
        from_other += sum(sources == {True} for sources in kinds.values()) / len(kinds) / len(tasks)
        for names in ([place.name for place in room.receptacles], [thing.name for thing in room.things]):
            counts = Counter(map(type_of, names))
            assert names == [f"{kind} {n}" for kind in sorted(counts) for n in range(counts[kind], 0, -1)]
        assert len({place.location for place in room.receptacles}) == len(room.receptacles)
    # a type of which all receptacles are removed is not counted: these rooms have one of most types
    assert min(shares) == 0 and max(shares) > 0.2 and 0.02 < sum(shares) / len(shares) < 0.15
    assert 0.4 < from_other < 0.6


def marked(problem, source):
    """The problem with "room {source}" among the types that each receptacle accepts, to identify its room."""
    return replace(problem, receptacles=tuple(
        replace(place, accepts=place.accepts | {f"room {source}"}) for place in problem.receptacles))


def without_names(problem, source=None):
    """(source, type, accepted types, contents) of each receptacle, without numbers."""
    inside = defaultdict(list)
    for thing in problem.things:
        inside[thing.receptacle].append(replace(thing, name=thing.type + " 0", receptacle=None, location=0))
    return [("room 1" in place.accepts if source is None else bool(source), place.type,
             place.accepts - {"room 0", "room 1"}, tuple(sorted(inside[place.name], key=str)))
            for place in problem.receptacles]


def test_removed_receptacles_and_things_are_referenced_nowhere(tasks):
    """A bowl in two receptacles, its contents, and a thing in none; receptacles are removed at random."""
    problem, first = tasks[0].problem, tasks[0].problem.receptacles[0]
    places = tuple(replace(first, name=f"shelf {n}", kind="", location=n) for n in (3, 2, 1))
    things = (Thing("bowl 1", "shelf 1", 1, holding=("cup 1", "pen 1"), also_in=("shelf 2",)),
              Thing("cup 1", "shelf 2", 2), Thing("pen 1", "shelf 1", 1), Thing("key 1", None, -1))
    room, seen = replace(problem, receptacles=places, things=things), set()
    for i in range(200):
        other = mix_rooms(room, room, random.Random(i))
        named, there = {place.name for place in other.receptacles}, {thing.name for thing in other.things}
        for thing in other.things:
            assert thing.receptacle in named and {*thing.also_in} <= named and {*thing.holding} <= there
            seen.add((thing.type, len(thing.also_in), len(thing.holding)))
    assert seen == {("cup", 0, 0), ("pen", 0, 0), ("bowl", 0, 1), ("bowl", 1, 2)}


def test_the_scene_type_is_read_from_the_task_id():
    name = "train/pick_heat_then_place_in_recep-Egg-None-DiningTable-{}/trial_T20190908_051346_079516"
    assert [scene_type(Task(name.format(scene), "train", "", None)) for scene in (1, 30, 201, 318, 430)] == [
        0, 0, 2, 3, 4]
    assert scene_type(Task("L0/318", "L0", "", None)) == 0
    assert scene_type(Task("train/a-318/b/c", "", "", None)) == 0


def test_the_expert_wins_them_and_none_is_won_at_the_start(tasks, others):
    expert = Expert(tasks)
    played = [expert.show(task, 0, 0.0, 50) for task in others]
    assert sum(one.won for one in played) >= 0.97 * len(played)
    assert min(len(one.commands) for one in played) >= 3


def test_tasks_are_other_games_tasks_and_set_the_task_type(tasks, others):
    changed = sum(task.problem.task_desc != other.problem.task_desc for task, other in zip(tasks, others))
    assert changed > len(tasks) / 3 and len({other.task_type for other in others}) == 6
    for task, other in zip(tasks, others, strict=True):
        assert other.task_type == other.problem.goal.task_type and other.split == task.split
        assert other.id.startswith(f"{task.id}/again/")


def test_things_in_bowls_in_two_receptacles_or_fixed_are_not_moved(tasks):
    task = tasks[0]
    places = [place for place in task.problem.receptacles if place.type == task.problem.receptacles[0].type]
    place, accepted = places[0], frozenset(("cup", "bowl", "pen"))
    shelves = [replace(place, name=f"shelf {n}", kind="", accepts=accepted) for n in range(1, 9)]
    things = (Thing("cup 1", "shelf 1", 0), Thing("bowl 1", "shelf 1", 0, holding=("pen 1",)),
              Thing("pen 1", "shelf 1", 0), Thing("cup 2", "shelf 1", 0, also_in=("shelf 2",)),
              Thing("cup 3", "shelf 1", 0, pickupable=False), Thing("cup 4", None, 0))
    problem = replace(task.problem, receptacles=tuple(shelves), things=things)
    found = [move_things(problem, random.Random(i)).things for i in range(40)]
    assert {then[1:] for then in found} == {things[1:]}
    assert {then[0].receptacle for then in found} == {f"shelf {n}" for n in range(1, 9)}


def test_a_thing_without_a_location_gets_none_and_closed_places_differ_from_open_ones(tasks):
    """Of things that lie in others, the location is unknown: -1. A drawer may be a shelf's neighbour."""
    problem, first = tasks[0].problem, tasks[0].problem.receptacles[0]
    places = tuple(replace(first, name=f"shelf {n}", kind="", location=n, openable=n < 4,
                           accepts=frozenset(("bowl", "cup"))) for n in range(6))
    room = replace(problem, receptacles=places,
                   things=(Thing("bowl 1", "shelf 1", -1), Thing("cup 1", "shelf 5", 5)))
    moved = [move_things(room, random.Random(i)).things for i in range(40)]
    assert {one.location for one, _ in moved} == {-1}
    assert {one.receptacle for one, _ in moved} == {f"shelf {n}" for n in range(4)}
    assert {other.receptacle for _, other in moved} == {"shelf 4", "shelf 5"}
    mixed = [thing for i in range(40) for thing in mix_rooms(room, room, random.Random(i)).things]
    assert {(thing.type, thing.location) for thing in mixed} == {("bowl", -1), ("cup", 5), ("cup", 5 + 6)}


@pytest.mark.parametrize("change, fine", [
    ("", True), ("no such thing", False), ("one of two", False), ("no such place", False),
    ("no fridge", False), ("cool and there", False), ("cool and also there", False), ("there", True),
    ("cannot be cooled", False), ("one of them cannot be cooled", False)])
def test_a_goal_is_achievable_if_all_is_there_and_it_is_not_reached(tasks, change, fine):
    """A cool apple in the fridge reaches "put a cool apple in fridge" already; a warm one does not."""
    task_type = "pick_two_obj_and_place" if change == "one of two" else "pick_cool_then_place_in_recep"
    task = next(task for task in tasks if task.task_type == "pick_cool_then_place_in_recep")
    goal, problem = replace(task.problem.goal, task_type=task_type), task.problem
    (target, *_) = (p.name for p in problem.receptacles if p.type == goal.receptacle)
    mine = [thing for thing in problem.things if thing.type == goal.object][:1]
    rest = [thing for thing in problem.things if thing.type != goal.object]
    if change in ("there", "cool and there"):
        mine = [replace(mine[0], receptacle=target, cool=change != "there")]
    if change == "cool and also there":
        mine = [replace(mine[0], cool=True, also_in=(target,))]
    if change.endswith("cannot be cooled"):
        mine = mine * ("one of" in change) + [replace(mine[0], coolable=False)]
    left_out = {"no such place": goal.receptacle, "no fridge": "fridge"}.get(change)
    problem = replace(problem, things=tuple(rest + (mine if change != "no such thing" else [])),
                      receptacles=tuple(p for p in problem.receptacles if p.type != left_out))
    assert is_achievable(problem, goal) is fine


@pytest.mark.slow
@needs_games
def test_real_games_come_first_and_then_endless_rearranged_ones(monkeypatch):
    monkeypatch.setattr(games, "load_games", functools.cache(games.load_games))
    plain, endless = Tasks(GAMES, "part", 3), Tasks(GAMES, "part", 3, "later")
    n = len(plain.real_games("train", TYPES["part"]))
    assert endless.train_tasks("part", 0, 5) == plain.train_tasks("part", 0, 5)
    assert plain.train_tasks("part", n, 5) == plain.train_tasks("part", 0, 5)
    first, again = endless.train_tasks("part", n - 2, 6), endless.train_tasks("part", n - 1, 6)
    assert first[1:] == again[:5] and first[:2] == plain.train_tasks("part", n - 2, 2)
    later = endless.train_tasks("part", 100 * n, 300)
    assert not {task.task_type for task in later} & set(HELD_OUT) and len({task.id for task in later}) == 300
    known = {task.id for task in plain.real_games("train", TYPES["part"])}
    assert sum(task.id in known for task in later) == 100
    assert {task.id.split("/rearranged/")[0] for task in later} <= known
    assert later != Tasks(GAMES, "part", 4, "later").train_tasks("part", 100 * n, 300)
    expert = Expert(plain.train_tasks("all", 0, 200))
    played = Counter(expert.show(task, 0, 0.0, 50).won for task in later)
    assert played[True] >= 292
    always = Tasks(GAMES, "part", 3, "always")
    assert always.train_tasks("part", 100 * n, 300) == later
    assert sum(task.id in known for task in always.train_tasks("part", 0, 30)) == 10
    environment, other = (household.Environment(household.Environment.Settings(GAMES, flag))
                          for flag in (False, True))
    assert (environment._tasks.rearrange, other._tasks.rearrange) == ("later", "always")
    assert environment.vocabulary() == other.vocabulary()


def test_the_hash_depends_on_where_things_are(tasks, others):
    environment, one, other = household.Environment(household.Environment.Settings("games")), *others[:2]
    renamed = Task(one.id, one.split, one.task_type, other.problem)
    moved = Task(one.id, one.split, one.task_type, move_things(one.problem, random.Random(5)))
    assert len({environment.tasks_hash([task]) for task in (one, renamed, moved)}) == 3
    assert household.Environment().task_content(tasks[0]) == ""


def test_a_game_with_an_unknown_task_text_is_named_when_rooms_are_mixed(monkeypatch):
    """Goals are drawn from all games, so a bad text is an error for every room."""
    tasks = Tasks("somewhere", "all", 0, "always")
    good, bad = (SimpleNamespace(id=f"{name}-301/trial", split="train", problem=SimpleNamespace(
        task_desc=text, source=name)) for name, text in (("a", "put a cup in fridge"), ("b", "dance")))
    monkeypatch.setattr(tasks, "real_games", lambda *_: [good, bad])
    monkeypatch.setattr(tasks, "validated", lambda tasks: tasks)
    with pytest.raises(ValueError, match="b.*dance"):
        tasks.train_tasks("all", 1, 1)


def test_a_rearranged_game_can_be_played(others):
    game = Game()
    for task in others[:10]:
        reply = game.reset(task)
        assert reply.observation.endswith(f"Your task is to: {task.problem.task_desc}.") and not reply.won
