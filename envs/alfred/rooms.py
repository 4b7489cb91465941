"""Generated household games: small rooms with ALFWorld's vocabulary, affordances and all six task types.

A room is a layout: how many receptacles of each type it has. Every room type has 20 training rooms and 8
other rooms. A task puts things into one of them and sets a goal. The splits follow RLVMR's: L0 = training
rooms, L1 = other rooms, L2 = other rooms and the task types that --train-types part leaves out. Things are
more likely in their usual places (USUAL_PLACES), so knowledge of training rooms makes a search faster. Left
out: knives and slicing, receptacles that share a location, and the size of real rooms (22 receptacles, 43
objects).
"""

import random
import re
import zlib
from functools import lru_cache

from .. import Task
from .problem import OPENABLE, Goal, Problem, Receptacle, Thing

TRAINED_TYPES = ("pick_and_place_simple", "look_at_obj_in_light", "pick_clean_then_place_in_recep",
                 "pick_heat_then_place_in_recep")
ALL_TYPES = TRAINED_TYPES + ("pick_cool_then_place_in_recep", "pick_two_obj_and_place")
SPLITS = ("train", "dev", "L0", "L1", "L2")
SPLIT_SIZE = 256                # tasks in every split but "train", which is endless
TRAIN_ROOMS, OTHER_ROOMS = 20, 8   # per room type
THINGS = (7, 11)                # objects in a room, fewest and most
SECOND_CHANCE = 0.2             # probability that a further object is a second one of a type

# {room type: (receptacles in every such room, {further receptacle: maximum}, (fewest, most) further ones)}
LAYOUT = {
    "kitchen": (("countertop", "fridge", "microwave", "sinkbasin"),
                {"cabinet": 3, "countertop": 1, "diningtable": 1, "drawer": 2, "garbagecan": 1, "shelf": 1},
                (3, 5)),
    "living room": (("sidetable", "sofa"),
                    {"coffeetable": 1, "desk": 1, "drawer": 3, "garbagecan": 1, "safe": 1, "shelf": 2},
                    (4, 6)),
    "bedroom": (("bed", "desk"),
                {"drawer": 3, "garbagecan": 1, "safe": 1, "shelf": 2, "sidetable": 2}, (4, 6)),
    "bathroom": (("countertop", "sinkbasin", "toilet"),
                 {"cabinet": 3, "drawer": 2, "garbagecan": 1, "shelf": 2, "sidetable": 1}, (3, 5)),
}

# {room type: {object type: {receptacle type: weight}}}; the lamp, which cannot be taken, is listed apart
USUAL_PLACES = {
    "kitchen": {
        "apple": {"fridge": 6, "diningtable": 3, "countertop": 2, "garbagecan": 1},
        "bowl": {"cabinet": 6, "shelf": 3, "countertop": 1, "diningtable": 1},
        "bread": {"countertop": 6, "fridge": 2, "diningtable": 2},
        "cup": {"cabinet": 6, "shelf": 2, "sinkbasin": 2, "countertop": 1},
        "egg": {"fridge": 8, "countertop": 1, "garbagecan": 1},
        "lettuce": {"fridge": 7, "countertop": 2, "sinkbasin": 1},
        "mug": {"cabinet": 3, "countertop": 4, "shelf": 2, "sinkbasin": 1},
        "plate": {"cabinet": 6, "diningtable": 3, "countertop": 1, "shelf": 1},
        "potato": {"sinkbasin": 4, "fridge": 3, "countertop": 2, "garbagecan": 1},
        "saltshaker": {"countertop": 4, "cabinet": 3, "drawer": 3, "shelf": 1},
        "spoon": {"drawer": 7, "sinkbasin": 2, "countertop": 1, "diningtable": 1},
        "tomato": {"countertop": 5, "fridge": 3, "sinkbasin": 1, "diningtable": 1},
    },
    "living room": {
        "book": {"coffeetable": 4, "shelf": 4, "sofa": 2, "desk": 1},
        "cellphone": {"sofa": 4, "coffeetable": 3, "drawer": 2, "sidetable": 1},
        "creditcard": {"drawer": 4, "safe": 4, "sidetable": 2, "desk": 1},
        "keychain": {"sidetable": 6, "drawer": 2, "safe": 2},
        "laptop": {"coffeetable": 4, "desk": 4, "sofa": 2},
        "pillow": {"sofa": 1},
        "remotecontrol": {"sofa": 5, "coffeetable": 4, "drawer": 2},
        "watch": {"drawer": 4, "safe": 3, "shelf": 2, "coffeetable": 1},
    },
    "bedroom": {
        "alarmclock": {"sidetable": 4, "desk": 4, "shelf": 3},
        "book": {"bed": 4, "shelf": 3, "desk": 3, "drawer": 1},
        "cd": {"desk": 3, "drawer": 4, "shelf": 2, "safe": 1, "garbagecan": 1},
        "cellphone": {"bed": 5, "desk": 3, "drawer": 2, "sidetable": 1},
        "creditcard": {"drawer": 4, "safe": 3, "desk": 2, "shelf": 1},
        "keychain": {"drawer": 3, "safe": 2, "sidetable": 4, "desk": 2},
        "laptop": {"bed": 4, "desk": 5},
        "pen": {"desk": 5, "drawer": 4, "shelf": 1, "garbagecan": 1},
        "pillow": {"bed": 1},
    },
    "bathroom": {
        "candle": {"toilet": 4, "countertop": 4, "shelf": 2, "cabinet": 1},
        "cloth": {"cabinet": 4, "drawer": 3, "countertop": 2, "shelf": 1},
        "soapbar": {"sinkbasin": 4, "toilet": 3, "countertop": 3, "garbagecan": 1},
        "spraybottle": {"cabinet": 5, "toilet": 3, "countertop": 2, "garbagecan": 1},
        "toiletpaper": {"toilet": 5, "cabinet": 4, "drawer": 2, "countertop": 1},
    },
}
LAMP = "desklamp"
LAMP_PLACES = {"desk": 3, "sidetable": 3, "shelf": 1}

# ALFWorld's affordances for the types above: what may be put where, and what may be done to it
TABLE = " ".join(kind for places in USUAL_PLACES.values() for kind in places if kind != "pillow")
ACCEPTS = {place: frozenset(names.split()) for place, names in {
    "bed": "book cellphone laptop pillow",
    "cabinet": "book bowl candle cd cloth cup mug plate saltshaker soapbar spraybottle toiletpaper",
    "coffeetable": TABLE,
    "countertop": TABLE,
    "desk": "alarmclock book bowl candle cd cellphone cloth creditcard cup keychain laptop mug pen plate "
            "remotecontrol spraybottle toiletpaper watch",
    "diningtable": TABLE,
    "drawer": "book candle cd cellphone cloth creditcard keychain pen remotecontrol saltshaker soapbar spoon "
              "spraybottle toiletpaper watch",
    "fridge": "apple bowl bread cup egg lettuce mug plate potato tomato",
    "garbagecan": "apple bread cd cloth egg lettuce pen potato soapbar spraybottle toiletpaper tomato",
    "microwave": "apple bowl bread cup egg mug plate potato tomato",
    "safe": "cd cellphone creditcard keychain watch",
    "shelf": "alarmclock book bowl candle cd cellphone cloth creditcard cup keychain mug pen plate "
             "remotecontrol saltshaker soapbar spraybottle toiletpaper watch",
    "sidetable": TABLE,
    "sinkbasin": "apple bowl cloth cup egg lettuce mug plate potato soapbar spoon tomato",
    "sofa": "book cellphone cloth creditcard keychain laptop pillow remotecontrol",
    "toilet": "candle cloth soapbar spraybottle toiletpaper",
}.items()}
CLEANABLE = frozenset(("apple", "bowl", "cloth", "cup", "egg", "lettuce", "mug", "plate", "potato", "soapbar",
                       "spoon", "tomato"))
HEATABLE = frozenset(("apple", "bread", "cup", "egg", "mug", "plate", "potato", "tomato"))
COOLABLE = HEATABLE | {"bowl", "lettuce"}
SLICEABLE = frozenset(("apple", "bread", "egg", "lettuce", "potato", "tomato"))

ROOMS_OF = {
    "pick_and_place_simple": ("kitchen", "living room", "bedroom", "bathroom"),
    "look_at_obj_in_light": ("living room", "bedroom"),
    "pick_clean_then_place_in_recep": ("kitchen", "bathroom"),
    "pick_heat_then_place_in_recep": ("kitchen",),
    "pick_cool_then_place_in_recep": ("kitchen",),
    "pick_two_obj_and_place": ("kitchen", "living room", "bedroom", "bathroom"),
}
TREATABLE = {"pick_clean_then_place_in_recep": CLEANABLE, "pick_heat_then_place_in_recep": HEATABLE,
             "pick_cool_then_place_in_recep": COOLABLE}
DESCRIPTIONS = {       # ALFWorld's two phrasings of each task type
    "pick_and_place_simple": ("put a {0} in {1}", "put some {0} on {1}"),
    "look_at_obj_in_light": ("look at {0} under the {2}", "examine the {0} with the {2}"),
    "pick_clean_then_place_in_recep": ("put a clean {0} in {1}", "clean some {0} and put it in {1}"),
    "pick_heat_then_place_in_recep": ("put a hot {0} in {1}", "heat some {0} and put it in {1}"),
    "pick_cool_then_place_in_recep": ("put a cool {0} in {1}", "cool some {0} and put it in {1}"),
    "pick_two_obj_and_place": ("put two {0} in {1}", "find two {0} and put them in {1}"),
}


# Rooms

@lru_cache
def layouts(room_type):
    """The rooms of one type, each as (receptacle type, number) pairs: training rooms first, then others."""
    rng = random.Random(f"layouts/{room_type}")
    found = []
    while len(found) < TRAIN_ROOMS + OTHER_ROOMS:
        layout = _layout(room_type, rng)
        if layout not in found:
            found.append(layout)
    return tuple(found)


def _layout(room_type, rng):
    always, further, (fewest, most) = LAYOUT[room_type]
    pool = [kind for kind, count in further.items() for _ in range(count)]
    kinds = list(always) + rng.sample(pool, rng.randint(fewest, most))
    return tuple((kind, kinds.count(kind)) for kind in sorted(set(kinds)))


def _receptacles(layout):
    """The receptacles in ALFWorld's order: types alphabetically, numbers descending."""
    names = [(kind, f"{kind} {number}") for kind, count in layout for number in range(count, 0, -1)]
    return tuple(Receptacle(name=name, location=location, openable=kind in OPENABLE, opened=False,
                            accepts=ACCEPTS[kind]) for location, (kind, name) in enumerate(names, start=1))


# Tasks

def _types_of(split):
    return {"train": ALL_TYPES, "L2": ALL_TYPES[len(TRAINED_TYPES):]}.get(split, TRAINED_TYPES)


def task(split, index, types=None):
    """Task number `index` of a split, determined by (split, index, types).

    types: the task types to alternate (default: the four that RL trains on, or L2's two).
    ValueError for an unknown split, an index outside the split, or a type that is not in the split.
    """
    if split not in SPLITS:
        raise ValueError(f"split {split!r}: expected one of {', '.join(SPLITS)}")
    if index < 0 or (split != "train" and index >= SPLIT_SIZE):
        known = "0 and up" if split == "train" else f"0 to {SPLIT_SIZE - 1}"
        raise ValueError(f"task {index} of split {split}: it has {known}")
    types = tuple(types or (TRAINED_TYPES if split == "train" else _types_of(split)))
    if not set(types) <= set(_types_of(split)):
        raise ValueError(f"types {types}: split {split} has {', '.join(_types_of(split))}")
    task_type = types[index % len(types)]
    known_room = split in ("train", "L0") or (split == "dev" and index // len(types) % 2 == 0)
    task_id = f"{split}/{index}/{task_type}" + ("" if split != "dev" else "/L0" if known_room else "/L1")
    return Task(task_id, split, task_type, _problem(split, task_type, known_room, random.Random(task_id)))


@lru_cache(8)          # a run needs the same tasks three times, and making them takes a second
def tasks(split, types=None):
    """All tasks of a fixed split, or the first SPLIT_SIZE tasks of "train", a tuple."""
    return tuple(task(split, index, types) for index in range(SPLIT_SIZE))


def _problem(split, task_type, known_room, rng):
    """Draw problems until one is achievable and belongs to the split, so that no problem is in two splits."""
    while True:
        room_type = rng.choice(ROOMS_OF[task_type])
        room = rng.randrange(TRAIN_ROOMS) if known_room else TRAIN_ROOMS + rng.randrange(OTHER_ROOMS)
        layout = layouts(room_type)[room]
        goals = _goals(task_type, room_type, layout)
        if not goals:
            continue
        problem = _furnish(room_type, layout, rng.choice(goals), rng)
        if split in _splits_of(problem):
            return problem


def _splits_of(problem):
    """The splits that may contain a problem: a checksum of its content decides."""
    text = "|".join([problem.task_desc] + [receptacle.name for receptacle in problem.receptacles]
                    + sorted(f"{thing.name} {thing.receptacle}" for thing in problem.things))
    return (("dev",), ("L0", "L1", "L2"), ("train",), ("train",))[zlib.crc32(text.encode()) % 4]


def _goals(task_type, room_type, layout):
    """All goals of this type in the room whose object has a usual place other than the target."""
    goals = []
    for kind in USUAL_PLACES[room_type]:
        places = _usual_places(room_type, layout, kind).keys()
        if kind not in TREATABLE.get(task_type, (kind,)) or not places:
            continue
        if task_type == "look_at_obj_in_light":
            goals.append(Goal(task_type, kind, toggle=LAMP))
            continue
        targets = [target for target in dict(layout) if kind in ACCEPTS[target] and places - {target}]
        goals += [Goal(task_type, kind, receptacle=target) for target in targets]
    return goals


def _furnish(room_type, layout, goal, rng):
    """A Problem with things in usual places; no object of the goal's type starts in its target."""
    receptacles = _receptacles(layout)
    number, things = {}, []
    for kind in _kinds(room_type, layout, goal, rng):
        number[kind] = number.get(kind, 0) + 1
        places = _usual_places(room_type, layout, kind)
        if kind == goal.object:
            places.pop(goal.receptacle, None)
        place = rng.choices(list(places), list(places.values()))[0]
        receptacle = rng.choice([r for r in receptacles if r.type == place])
        things.append(_thing(kind, number[kind], receptacle))
    things.sort(key=lambda thing: thing.name, reverse=True)      # ALFWorld's order: types alphabetically,
    things.sort(key=lambda thing: thing.type)                    # numbers descending
    desc = rng.choice(DESCRIPTIONS[goal.task_type]).format(goal.object, goal.receptacle, goal.toggle)
    return Problem(desc, receptacles, tuple(things), goal)


def _usual_places(room_type, layout, kind):
    """{receptacle type: weight} of an object type's usual places that exist in this room."""
    places = LAMP_PLACES if kind == LAMP else USUAL_PLACES[room_type][kind]
    return {place: weight for place, weight in places.items() if place in dict(layout)}


def _kinds(room_type, layout, goal, rng):
    """Types of the objects in the room, the goal's first; at most two of a type and one lamp."""
    kinds = [goal.object] * (2 if goal.task_type == "pick_two_obj_and_place" else 1)
    if room_type in ROOMS_OF["look_at_obj_in_light"]:
        kinds.append(LAMP)
    pool = [kind for kind in USUAL_PLACES[room_type]
            if kind not in kinds and _usual_places(room_type, layout, kind)]
    rng.shuffle(pool)
    count = rng.randint(*THINGS)
    while len(kinds) < count:
        single = [kind for kind in kinds if kinds.count(kind) == 1 and kind != LAMP]
        if not (pool or single):
            break
        second = single and (not pool or rng.random() < SECOND_CHANCE)
        kinds.append(rng.choice(single) if second else pool.pop())
    return kinds


def _thing(kind, number, receptacle):
    return Thing(name=f"{kind} {number}", receptacle=receptacle.name, location=receptacle.location,
                 pickupable=kind != LAMP, toggleable=kind == LAMP, cleanable=kind in CLEANABLE,
                 heatable=kind in HEATABLE, coolable=kind in COOLABLE, sliceable=kind in SLICEABLE)


# The vocabulary of the small model's tokenizer

NAMES = re.findall(r"\w+", """
    alarmclock apple armchair baseballbat basketball bathtub bathtubbasin bed blinds book boots bowl box
    bread butterknife cabinet candle cart cd cellphone chair cloth coffeemachine coffeetable countertop
    creditcard cup curtains desk desklamp diningtable dishsponge drawer dresser egg floorlamp footstool
    fork fridge garbagecan glassbottle handtowel handtowelholder houseplant kettle keychain knife ladle
    laptop laundryhamper laundryhamperlid lettuce lightswitch microwave mirror mug newspaper ottoman
    painting paintinghanger pan papertowel papertowelroll pen pencil peppershaker pillow plate plunger
    poster pot potato remotecontrol safe saltshaker scrubbrush shelf showerdoor showerglass sidetable sink
    sinkbasin soapbar soapbottle sofa spatula spoon spraybottle statue stoveburner stoveknob teddybear
    television tennisracket tissuebox toaster toilet toiletpaper toiletpaperhanger toiletpaperroll tomato
    towel towelholder tvstand vase watch wateringcan window winebottle
""")

WELCOME = ("-= Welcome to TextWorld, ALFRED! =-\n\n"
           "You are in the middle of a room. Looking quickly around you, you see")
TEXTS = (
    WELCOME, "You are in the middle of a room. Looking quickly around you, you see",
    "\n\nYour task is to:", "Your task is to:", " a", ", a", ", and a", ",", ".", ", and", " nothing.",
    " nothing", "Nothing happens.", "You arrive at", ". On the", "On the", ". The", "The", " is closed.",
    " is open. In it, you see", ", you see", "You open the", "You close the", "You pick up the",
    " from the", "You move the", " to the", "You clean the", "You heat the", "You cool the", " using the",
    "You turn on the", "You sliced the", " with the", "You are carrying:",
    "You are not carrying anything.", "You are facing the", ". Next to it, you see",
    "There's nothing special about", "This is a normal", ". In it, you see", "This is a clean",
    "This is a hot", "This is a cold", "This is a cool", "This is a hot and clean",
    "This is a cool and clean", "This is a sliced", " sliced", "This", " is on.", " is off.", " put a",
    " put some", " put a clean", " put a hot", " put a cool", " put two", " find two", " and put them in",
    " clean some", " heat some", " cool some", " and put it in", " look at", " under the", " examine the",
    " in", " on",
)
VERBS = ("go to", "take", "move", "open", "close", "use", "examine", "clean", "heat", "cool", "slice", "look",
         "inventory", "help")


def phrases(numbered=True):
    """Phrases of the game's texts, each one token of the small model's tokenizer; most begin with a space.

    numbered: also " drawer 2" etc., for all types and numbers in generated rooms.
    """
    verbs = [space + verb for verb in VERBS for space in ("", " ")]
    names = [" " + name for name in NAMES]
    numbers = [f" {number}" for number in range(1, 21)]
    found = [*TEXTS, *verbs, " from", " to", " with", *names, *numbers]
    return found + [f" {kind} {n}" for kind, last in sorted(_highest_numbers().items())
                    for n in range(1, last + 1) if numbered]


def _highest_numbers():
    """{type: its highest number in a generated room}"""
    highest = {kind: 1 if kind == LAMP else 2 for places in USUAL_PLACES.values() for kind in (*places, LAMP)}
    for room_type in LAYOUT:
        for layout in layouts(room_type):
            for kind, count in layout:
                highest[kind] = max(count, highest.get(kind, 0))
    return highest
