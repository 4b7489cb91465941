"""Games without end from the real ones: rooms in which things have changed places, with other games' tasks.

The 3,553 training games are played in 108 rooms. A small model that sees them ten times each knows these by
heart: in another room it goes to a shelf that there is not (results/tries_alfworld.md). So whoever trains on
more gets rooms in which

    receptacles  are fewer, a share drawn for each room, and numbered anew
    things       lie in receptacles like those they lay in: another drawer for a drawer
    the task     is one of the training games', with what it needs in the room, and not done yet

Left out: new kinds of things, more receptacles than there were, and things in bowls and boxes, which stay.
"""

from collections import Counter, defaultdict
from dataclasses import replace

from envs import Task
from envs.alfred.problem import problem_of, type_of

# What treats a thing, and which things it can treat
TREATED = {"pick_clean_then_place_in_recep": ("sinkbasin", "cleanable"),
           "pick_heat_then_place_in_recep": ("microwave", "heatable"),
           "pick_cool_then_place_in_recep": ("fridge", "coolable")}
TRIES = 30              # goals looked at; where none can be reached, the room stays whole, with its own
MOST_LEFT_OUT = 0.6     # of a room's receptacles


def rearranged(task, goals, rng, name):
    """Another game in a task's room, drawn from rng. goals: (text, Goal) of games, to choose from; name: put
    behind the task's id."""
    whole = with_things_moved(problem_of(task), rng)
    problem = with_fewer_places(whole, rng)
    drawn = (rng.choice(goals) for _ in range(TRIES))
    text, goal = next((pair for pair in drawn if is_open(problem, pair[1])), (None, None))
    problem = replace(problem, task_desc=text, goal=goal) if goal else whole
    return Task(f"{task.id}/{name}", task.split, problem.goal.task_type, problem)


def with_fewer_places(problem, rng):
    """The problem without some of its receptacles and what lies in them; the others numbered from 1 again."""
    share = rng.uniform(0, MOST_LEFT_OUT)
    kept = [place for place in problem.receptacles if rng.random() >= share]
    names, count = {}, Counter()
    for place in reversed(kept):                              # the intro names the last number first
        kind = type_of(place.name)
        count[kind] += 1
        names[place.name] = f"{kind} {count[kind]}"
    there = {thing.name for thing in problem.things if thing.receptacle is None or thing.receptacle in names}
    things = [replace(thing, receptacle=names.get(thing.receptacle),
                      also_in=tuple(names[place] for place in thing.also_in if place in names),
                      holding=tuple(held for held in thing.holding if held in there))
              for thing in problem.things if thing.name in there]
    places = [replace(place, name=names[place.name]) for place in kept]
    return replace(problem, receptacles=tuple(places), things=tuple(things))


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
    appliance, able = TREATED[goal.task_type]
    cool = goal.task_type == "pick_cool_then_place_in_recep" and any(thing.cool for thing in there)
    return appliance in kind.values() and all(getattr(thing, able) for thing in wanted) and not cool
