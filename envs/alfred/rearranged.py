"""Games without end from the real ones: rooms in which things have changed places, with other games' tasks.

The 3,553 training games are played in 108 rooms. A small model that sees them ten times each knows these by
heart: in another room it goes to a shelf that there is not (results/tries_alfworld.md). So whoever trains on
more gets rooms in which

    receptacles  of each kind are the room's own or another kitchen's (bedroom's ...), with what they have;
                 fewer, a share drawn for each room; and numbered anew
    things       lie in receptacles like those they lay in: another drawer for a drawer
    the task     is one of the training games', with what it needs in the room, and not done yet

Left out: new kinds of things, and things in bowls and boxes, which stay.
"""

import re
from collections import Counter, defaultdict
from dataclasses import replace

from envs import Task
from envs.alfred.problem import TREATED, problem_of, type_of

# Goals looked at, of all rooms' games; where none of them can be reached, the room keeps its receptacles and
# its own goal: most draws are kitchens' goals, so that happens to a quarter to a third of the other rooms
TRIES = 30
MOST_LEFT_OUT = 0.3     # of a room's receptacles


def rearranged(task, other, goals, rng, name):
    """Another game in a task's room, drawn from rng. other: a task in a room of the same sort, which lends
    some of its receptacles; goals: (text, Goal) of games, to choose from; name: put behind the task's id."""
    own = problem_of(task)
    problem = with_things_moved(mixed(own, problem_of(other), rng), rng)
    drawn = (rng.choice(goals) for _ in range(TRIES))
    text, goal = next((pair for pair in drawn if is_open(problem, pair[1])), (None, None))
    problem = replace(problem, task_desc=text, goal=goal) if goal else with_things_moved(own, rng)
    return Task(f"{task.id}/{name}", task.split, problem.goal.task_type, problem)


def sort_of(task):
    """A real game's sort of room, kitchen or bedroom: the hundreds of its scene's number (AI2-THOR); 0 for
    another game."""
    scene = re.search(r"-(\d+)/[^/]*$", task.id)
    return int(scene[1]) // 100 if scene else 0


def mixed(one, other, rng):
    """One problem in a room that has, of each kind, its own receptacles or the other's, fewer of them, with
    what is in them. Places and things are numbered anew, in the order in which the intro and lists have them.
    """
    kinds = sorted({type_of(place.name) for room in (one, other) for place in room.receptacles})
    lent = {kind for kind in kinds if rng.random() < 0.5}
    share = rng.uniform(0, MOST_LEFT_OUT)
    far = 1 + max(place.location for place in one.receptacles)          # where the other's locations begin
    places, things = [], []                                         # (whether it is lent, place or thing)
    for is_lent, room in enumerate((one, other)):
        kept = {place.name for place in room.receptacles
                if (type_of(place.name) in lent) == is_lent and rng.random() >= share}
        places += [(is_lent, place) for place in room.receptacles if place.name in kept]
        things += [(is_lent, thing) for thing in room.things if thing.receptacle in kept]
    place_names, thing_names = numbered(places), numbered(things)

    def there(is_lent, location):
        return location + far if is_lent and location >= 0 else location

    def named(names, is_lent, old):
        return tuple(names[is_lent, name] for name in old if (is_lent, name) in names)

    receptacles = [replace(place, name=place_names[is_lent, place.name],
                           location=there(is_lent, place.location)) for is_lent, place in places]
    moved = [replace(thing, name=thing_names[is_lent, thing.name], location=there(is_lent, thing.location),
                     receptacle=place_names[is_lent, thing.receptacle],
                     also_in=named(place_names, is_lent, thing.also_in),
                     holding=named(thing_names, is_lent, thing.holding)) for is_lent, thing in things]
    return replace(one, receptacles=tuple(receptacles), things=tuple(moved), start=-1)


def numbered(found):
    """Sort (whether it is lent, place or thing) by kind; returns {(whether, name): its name by that order}.
    The last of a kind is number 1, as where games are read."""
    found.sort(key=lambda pair: type_of(pair[1].name))
    names, count = {}, Counter()
    for is_lent, one in reversed(found):
        kind = type_of(one.name)
        count[kind] += 1
        names[is_lent, one.name] = f"{kind} {count[kind]}"
    return names


def with_things_moved(problem, rng):
    """The problem with each thing that one can take in a receptacle drawn from those alike."""
    where, alike = {place.name: place for place in problem.receptacles}, defaultdict(list)
    for place in problem.receptacles:
        alike[place.type, place.openable].append(place)
    held = {name for thing in problem.things for name in thing.holding}
    things = []
    for thing in problem.things:
        stays = not thing.pickupable or thing.also_in or thing.holding or thing.name in held
        if not stays and (place := where.get(thing.receptacle)):
            takes = [new for new in alike[place.type, place.openable] if thing.type in new.accepts]
            new = rng.choice(takes or [place])
            thing = replace(thing, receptacle=new.name, location=new.location if thing.location >= 0 else -1)
        things.append(thing)
    return replace(problem, things=tuple(things))


def is_open(problem, goal):
    """Whether the room has what a goal needs, and nothing that it asks for is done at the start."""
    kind = {place.name: place.type for place in problem.receptacles}
    wanted = [t for t in problem.things if t.type == goal.object and t.pickupable and t.receptacle]
    if len(wanted) < 1 + (goal.task_type == "pick_two_obj_and_place"):
        return False
    if goal.toggle:
        return any(thing.type == goal.toggle and thing.toggleable for thing in problem.things)
    if not any(p.type == goal.receptacle and goal.object in p.accepts for p in problem.receptacles):
        return False
    there = [thing for thing in wanted
             if goal.receptacle in map(kind.get, (thing.receptacle, *thing.also_in))]
    if goal.task_type not in TREATED:
        return not there
    verb, appliance, able = TREATED[goal.task_type]
    cool = verb == "cool" and any(thing.cool for thing in there)
    return appliance in kind.values() and all(getattr(thing, able) for thing in wanted) and not cool
