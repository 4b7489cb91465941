"""Data augmentation: unlimited new games from real ones, in rearranged rooms and with other games' tasks.

The 3,553 training games are played in 108 rooms. A small model that plays each ten times memorizes the rooms:
in an unseen one it goes to shelves that do not exist there (lab/results/tries_alfworld.md). Training beyond
one pass therefore uses rooms in which

    receptacles  of each type come from the room or from another one of its scene type, with their contents;
                 a random share is removed, and the rest is numbered from 1
    things       are moved to receptacles of the same type: from one drawer to another
    the task     is that of a random training game, if the room has what it needs and it is not done yet

Left out: new types of things, and things in bowls and boxes, which are not moved.
"""

import re
from collections import Counter, defaultdict
from dataclasses import replace

from .. import Task
from .problem import TREATED, problem_of, type_of

# Goals drawn per room, of all rooms' games. If none is achievable, the room keeps its receptacles and goal.
# Most draws are kitchens' goals, so this happens in a quarter to a third of the other rooms.
TRIES = 30
MAX_REMOVED = 0.3       # upper limit of the share of a room's receptacles that is removed


def rearranged(task, other, goals, rng, name):
    """A new game made from a task's room, drawn from rng.

    other: a task of the same scene type, whose receptacles are mixed in. goals: (text, Goal) pairs to draw
    from. name: appended to the task's id.
    """
    own = problem_of(task)
    problem = move_things(mix_rooms(own, problem_of(other), rng), rng)
    drawn = (rng.choice(goals) for _ in range(TRIES))
    text, goal = next((pair for pair in drawn if is_achievable(problem, pair[1])), (None, None))
    problem = replace(problem, task_desc=text, goal=goal) if goal else move_things(own, rng)
    return Task(f"{task.id}/{name}", task.split, problem.goal.task_type, problem)


def scene_type(task):
    """A real game's AI2-THOR scene type: 0 kitchen, 2 living room, 3 bedroom, 4 bathroom; 0 for other games.

    It is the hundreds digit of the scene number in the task's id.
    """
    scene = re.search(r"-(\d+)/[^/]*$", task.id)
    return int(scene[1]) // 100 if scene else 0


def mix_rooms(one, other, rng):
    """Problem `one` in a room with, of each type, either its own or the other's receptacles and contents.

    Some receptacles are removed, with their contents. Receptacles and things are renumbered and sorted into
    the order of the game's texts.
    """
    kinds = sorted({type_of(place.name) for room in (one, other) for place in room.receptacles})
    from_other = {kind for kind in kinds if rng.random() < 0.5}
    removed = rng.uniform(0, MAX_REMOVED)
    offset = 1 + max(place.location for place in one.receptacles)       # added to the other's locations
    places, things = [], []               # pairs (0 for `one` or 1 for `other`, its receptacle or thing)
    for source, room in enumerate((one, other)):
        kept = {place.name for place in room.receptacles
                if (type_of(place.name) in from_other) == source and rng.random() >= removed}
        places += [(source, place) for place in room.receptacles if place.name in kept]
        things += [(source, thing) for thing in room.things if thing.receptacle in kept]
    place_names, thing_names = renumber(places), renumber(things)

    def shifted(source, location):
        return location + offset if source and location >= 0 else location

    def renamed(names, source, old):
        return tuple(names[source, name] for name in old if (source, name) in names)

    receptacles = [replace(place, name=place_names[source, place.name],
                           location=shifted(source, place.location)) for source, place in places]
    moved = [replace(thing, name=thing_names[source, thing.name], location=shifted(source, thing.location),
                     receptacle=place_names[source, thing.receptacle],
                     also_in=renamed(place_names, source, thing.also_in),
                     holding=renamed(thing_names, source, thing.holding)) for source, thing in things]
    return replace(one, receptacles=tuple(receptacles), things=tuple(moved), start=-1)


def renumber(items):
    """Sort (source, receptacle or thing) pairs by type, in place; return {(source, name): new name}.

    The last of a type is number 1, as in real games.
    """
    items.sort(key=lambda pair: type_of(pair[1].name))
    names, count = {}, Counter()
    for source, item in reversed(items):
        kind = type_of(item.name)
        count[kind] += 1
        names[source, item.name] = f"{kind} {count[kind]}"
    return names


def move_things(problem, rng):
    """The problem with each movable thing in a random receptacle of the same type that accepts it."""
    where, same_type = {place.name: place for place in problem.receptacles}, defaultdict(list)
    for place in problem.receptacles:
        same_type[place.type, place.openable].append(place)
    contained = {name for thing in problem.things for name in thing.holding}
    things = []
    for thing in problem.things:
        fixed = not thing.pickupable or thing.also_in or thing.holding or thing.name in contained
        if not fixed and (place := where.get(thing.receptacle)):
            accepting = [new for new in same_type[place.type, place.openable] if thing.type in new.accepts]
            new = rng.choice(accepting or [place])
            thing = replace(thing, receptacle=new.name, location=new.location if thing.location >= 0 else -1)
        things.append(thing)
    return replace(problem, things=tuple(things))


def is_achievable(problem, goal):
    """Whether the room has all that a goal needs, and no object meets the goal at the start."""
    kind = {place.name: place.type for place in problem.receptacles}
    objects = [t for t in problem.things if t.type == goal.object and t.pickupable and t.receptacle]
    if len(objects) < 1 + (goal.task_type == "pick_two_obj_and_place"):
        return False
    if goal.toggle:
        return any(thing.type == goal.toggle and thing.toggleable for thing in problem.things)
    if not any(p.type == goal.receptacle and goal.object in p.accepts for p in problem.receptacles):
        return False
    placed = [thing for thing in objects
              if goal.receptacle in map(kind.get, (thing.receptacle, *thing.also_in))]
    if goal.task_type not in TREATED:
        return not placed
    verb, appliance, able = TREATED[goal.task_type]
    done = verb == "cool" and any(thing.cool for thing in placed)
    return appliance in kind.values() and all(getattr(thing, able) for thing in objects) and not done
