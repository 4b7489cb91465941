"""ALFWorld's own games: a PDDL problem or a game.tw-pddl file in, a Problem out.

First comes the reading of PDDL, then that of game files: one, a folder of them, or a .jsonl.gz of many. Only
what the household game needs is read: facts at the start, the goal and the task's text. Left out: the PDDL
domain, the grammar's rules and the walkthrough.

    python -m envs.household --game game.tw-pddl          # play one
"""

import gzip
import json
import re
import zlib
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from envs import Task
from envs.alfred.problem import Goal, Problem, Receptacle, Thing, problem_of, type_of

GOALS = {
    "pick_and_place_simple":
        "(exists (?r - receptacle) (exists (?o - object) (and"
        " (inreceptacle ?o ?r) (objecttype ?o OBJECT) (receptacletype ?r RECEPTACLE))))",
    "look_at_obj_in_light":
        "(exists (?ot - object ?r - receptacle ?a - agent ?l - location) (and"
        " (objecttype ?ot TOGGLE) (toggleable ?ot) (istoggled ?ot) (receptacleatlocation ?r ?l)"
        " (atlocation ?a ?l) (inreceptacle ?ot ?r)))"
        " (exists (?o - object ?a - agent) (and (objecttype ?o OBJECT) (holds ?a ?o)))",
    "pick_clean_then_place_in_recep":
        "(exists (?r - receptacle) (exists (?o - object) (and (cleanable ?o)"
        " (objecttype ?o OBJECT) (receptacletype ?r RECEPTACLE) (isclean ?o) (inreceptacle ?o ?r))))",
    "pick_heat_then_place_in_recep":
        "(exists (?r - receptacle) (exists (?o - object) (and (heatable ?o)"
        " (objecttype ?o OBJECT) (receptacletype ?r RECEPTACLE) (ishot ?o) (inreceptacle ?o ?r))))",
    "pick_cool_then_place_in_recep":
        "(exists (?r - receptacle) (exists (?o - object) (and (coolable ?o)"
        " (objecttype ?o OBJECT) (receptacletype ?r RECEPTACLE) (iscool ?o) (inreceptacle ?o ?r))))",
    "pick_two_obj_and_place":
        "(exists (?r - receptacle) (exists (?o1 - object) (and"
        " (objecttype ?o1 OBJECT) (receptacletype ?r RECEPTACLE) (inreceptacle ?o1 ?r)"
        " (exists (?o2 - object) (and (not (= ?o1 ?o2))"
        " (objecttype ?o2 OBJECT) (receptacletype ?r RECEPTACLE) (inreceptacle ?o2 ?r))))))",
}
ARGUMENTS = {                   # of the predicates that are read; the others change nothing
    "atlocation": 2, "cancontain": 2, "inreceptacle": 2, "inreceptacleobject": 2, "objectatlocation": 2,
    "objecttype": 2, "receptacleatlocation": 2, "receptacletype": 2, "openable": 1, "opened": 1,
    "pickupable": 1, "cleanable": 1, "heatable": 1, "coolable": 1, "toggleable": 1, "sliceable": 1,
    "iscool": 1, "isreceptacleobject": 1,
}
DEEPEST = 100                   # ALFWorld's goals nest 7 deep
NOT_AT_START = ("holds", "holdsany", "isclean", "ishot", "issliced", "istoggled")   # no game starts so


@dataclass(frozen=True, slots=True)
class PddlText:
    """A game not yet parsed: thousands are loaded in seconds, each is parsed when it is played."""

    source: str                    # where it came from, for errors
    task_desc: str
    pddl: str

    @lru_cache(maxsize=4096)           # ALFWorld trains on 3,553 games: 14 ms each, and played many times
    def parse(self) -> Problem:
        """The problem of this text. Raises ValueError naming the source of broken PDDL."""
        try:
            return problem_from_pddl(self.pddl, self.task_desc)
        except ValueError as error:
            raise ValueError(f"{self.source}: {error}") from error


def problem_from_pddl(pddl_problem: str, task_desc: str) -> Problem:
    """ALFWorld's PDDL problem as a Problem. Raises ValueError for any other text and for an unknown goal."""
    sections = read_sections(pddl_problem)
    facts = read_facts(sections[":init"])
    check_ids(facts)
    names = demangled({word for found in facts.values() for arguments in found for word in arguments})
    used = {location for _, location in facts["receptacleatlocation"] + facts["objectatlocation"]}
    locations = {location: number for number, location in enumerate(sorted(used))}
    start = facts["atlocation"][0][1]
    return Problem(task_desc, read_receptacles(facts, names, locations), read_things(facts, names, locations),
                   read_goal(sections[":goal"]), locations.get(start, -1))


def read_sections(text):
    """":init" and ":goal" of a PDDL problem, as nested lists of lower-case words (PDDL knows no case)."""
    stack = [[]]
    for word in re.findall(r"[()]|[^\s()]+", re.sub(";.*", "", text.lower())):
        if word == "(":
            stack.append([])
            if len(stack) > DEEPEST:
                raise ValueError(f"bad PDDL: more than {DEEPEST} '(' in one another")
        elif word != ")":
            stack[-1].append(word)
        elif len(stack) > 1:
            done = stack.pop()
            stack[-1].append(done)
        else:
            raise ValueError("bad PDDL: a ')' too many")
    if len(stack) != 1:
        raise ValueError(f"bad PDDL: {len(stack) - 1} '(' not closed")
    define = next((form for form in stack[0] if form[:1] == ["define"]), [])
    sections = {form[0]: form[1:] for form in define if isinstance(form, list) and isinstance(form[0], str)}
    for name in (":init", ":goal"):
        if name not in sections:
            raise ValueError(f"bad PDDL: no ({name} ...) in (define ...)")
    return sections


def read_facts(init):
    """:init as predicate -> list of its arguments. Costs and distances, (= ...), are not facts."""
    facts = defaultdict(list)
    for form in init:
        if form[:1] == ["="]:
            continue
        if not form or not isinstance(form, list) or not all(isinstance(word, str) for word in form):
            raise ValueError(f"bad PDDL: {written(form)} in :init is not a fact")
        predicate, *arguments = form
        if predicate in NOT_AT_START:
            raise ValueError(f"{written(form)} at the start: no ALFWorld game starts so")
        if len(arguments) != ARGUMENTS.get(predicate, len(arguments)):
            raise ValueError(f"bad PDDL: {written(form)} needs {ARGUMENTS[predicate]} arguments")
        facts[predicate].append(tuple(arguments))
    return facts


def check_ids(facts):
    """Raise ValueError unless player and receptacles have a place, and what is put somewhere has a type."""
    placed, typed = dict(facts["receptacleatlocation"]), dict(facts["receptacletype"])
    objects = dict(facts["objecttype"])
    if len(facts["atlocation"]) != 1:
        raise ValueError(f"expected one (atLocation agent location), found {len(facts['atlocation'])}")
    for r in sorted(placed.keys() ^ typed.keys()):
        raise ValueError(f"receptacle {r} needs a receptacleType and a receptacleAtLocation")
    for o, r in facts["inreceptacle"]:
        if o not in objects or r not in placed:
            raise ValueError(f"(inReceptacle {o} {r}): expected a typed object and a placed receptacle")
    for i in sorted({*placed, *objects}):
        if "_bar_" not in i:
            raise ValueError(f"{i}: expected an id such as Cup_bar__plus_00_dot_52")


def demangled(ids):
    """PDDL id -> the name the player reads, for ids like "cup_bar__plus_00_dot_52_...": "cup 2".

    Numbers count down in the order of the ids, as alfworld's Demangler does: the last of a kind is number 1.
    """
    def kind(i):
        return i.split("_bar_", 1)[0] + ("basin" if "basin" in i else "")

    ids = sorted(i for i in ids if "_bar_" in i)
    left = Counter(map(kind, ids))
    names = {}
    for i in ids:
        names[i] = f"{kind(i)} {left[kind(i)]}"
        left[kind(i)] -= 1
    return names


def read_receptacles(facts, names, locations):
    """The receptacles in the order of their ids."""
    places, kinds = dict(facts["receptacleatlocation"]), dict(facts["receptacletype"])
    openable, opened = ({r for r, in facts[predicate]} for predicate in ("openable", "opened"))
    accepts = defaultdict(set)
    for receptacle_type, object_type in facts["cancontain"]:
        accepts[receptacle_type].add(object_type.removesuffix("type"))

    def receptacle(r):
        kind = kinds[r].removesuffix("type")
        return Receptacle(names[r], locations[places[r]], r in openable, r in opened,
                          frozenset(accepts[kinds[r]]), "" if kind == type_of(names[r]) else kind)

    return tuple(map(receptacle, sorted(places)))


def read_things(facts, names, locations):
    """The things in the order of their ids. ValueError for one that is not of the type in its name."""
    kinds, places = dict(facts["objecttype"]), dict(facts["objectatlocation"])
    able = {predicate: {o for o, in facts[predicate]} for predicate in (
        "pickupable", "cleanable", "heatable", "coolable", "toggleable", "sliceable", "iscool",
        "isreceptacleobject")}
    held_in, holding = defaultdict(list), defaultdict(list)
    for o, r in sorted(facts["inreceptacle"]):
        held_in[o].append(names[r])
    for inner, outer in sorted(facts["inreceptacleobject"]):
        holding[outer].append(names.get(inner, inner))

    def thing(o):
        if kinds[o] != type_of(names[o]) + "type":
            raise ValueError(f"object {o}: expected the objectType of its name, found {kinds[o]}")
        flags = {predicate: o in having for predicate, having in able.items()}
        cool, holds_things = flags.pop("iscool"), flags.pop("isreceptacleobject")
        first, *others = held_in[o] or [None]
        return Thing(names[o], first, locations[places[o]] if o in places else -1, **flags, cool=cool,
                     holds_things=holds_things, holding=tuple(holding[o]), also_in=tuple(others))

    return tuple(map(thing, sorted(kinds)))


def written(form):
    """A nested list of words as one line of PDDL."""
    return form if isinstance(form, str) else f"({' '.join(map(written, form))})"


def read_goal(section):
    """Which of ALFWorld's six goals this is, and of what."""
    for task_type, form in GOALS.items():
        pattern = re.escape(f"((and {form}))")
        for slot in ("object", "receptacle", "toggle"):    # the first use names the type, a second repeats it
            pattern = pattern.replace(slot.upper(), rf"(?P<{slot}>\w+)type", 1)
            pattern = pattern.replace(slot.upper(), rf"(?P={slot})type")
        if match := re.fullmatch(pattern, written(section)):
            return Goal(task_type, **match.groupdict())
    raise ValueError(f"the goal is none of ALFWorld's six: {written(section)}")


# Games from disk

def load_game(path) -> Task:
    """The game in a game.tw-pddl file, found to be sound; traj_data.json beside it, if any, has its type."""
    path = Path(path)
    data = read_json(path)
    text = PddlText(str(path), task_desc_of(data, path), entry(data, "pddl_problem", path))
    *_, split, kind, trial = ("", "", "", *path.parent.resolve().parts)
    problem = text.parse()
    beside = path.with_name("traj_data.json")
    task_type = entry(read_json(beside), "task_type", beside) if beside.exists() else problem.goal.task_type
    return Task(f"{split}/{kind}/{trial}", split, task_type, text)


def check_source(source, splits):
    """ValueError naming --games where no game can be: no such path, none in the splits' folders, no gzip.

    A quick look: nothing is parsed, so `load_games` may still find that a split has none.
    """
    path = Path(source)
    if not (path.is_dir() or path.is_file()):
        raise ValueError(f"--games={source}: no such file or folder")
    if path.is_dir():
        if not any(next((path / split).rglob("game.tw-pddl"), None) for split in splits):
            raise ValueError(f"--games={source}: no game.tw-pddl under {', '.join(splits)}; "
                             "expected a json_2.1.1 folder")
        return
    try:
        with gzip.open(path) as file:
            file.read(1)
    except (OSError, zlib.error, EOFError) as error:
        raise ValueError(f"--games={source}: expected a folder of games or a .jsonl.gz: {error}") from error


def load_games(source, split, types=None, limit=None) -> list[Task]:
    """The solvable games of a split in the order of their paths; `types` keeps task types, `limit` the first.

    source: a folder laid out as $ALFWORLD_DATA/json_2.1.1 is, <split>/<type-...>/<trial>/game.tw-pddl, or a
    .jsonl.gz file with one game a row. As the stock environment does, it passes over folders of movable
    receptacles and sliced objects, trials without traj_data.json and games that are not marked solvable.
    """
    source = Path(source)
    for task_type in types or ():
        if task_type not in GOALS:
            raise ValueError(f"task type {task_type}: expected one of {', '.join(GOALS)}")
    if not source.exists():
        raise ValueError(f"{source}: no such file or folder")
    found = games_in_folder(source, split) if source.is_dir() else games_in_rows(source, split)
    tasks = [task for task in found if types is None or task.task_type in types][:limit]
    if not tasks:
        wanted = f"split {split}" + (f" and types {', '.join(types)}" if types else "")
        raise ValueError(f"{source}: no solvable games of {wanted}")
    return tasks


def names(tasks):
    """Every numbered name, " cabinet 27", that these tasks' games have, and the numbers below it."""
    most = {}
    for task in tasks:
        problem = problem_of(task)
        for thing in (*problem.receptacles, *problem.things):
            kind, _, number = thing.name.rpartition(" ")
            most[kind] = max(int(number), most.get(kind, 0))
    return [f" {kind} {number}" for kind in sorted(most) for number in range(1, most[kind] + 1)]


def games_in_folder(folder, split):
    """The solvable games of a json_2.1.1 folder, see `load_games`."""
    tasks = []
    for path in sorted((folder / split).rglob("game.tw-pddl")):
        trial = path.parent.relative_to(folder).as_posix()
        beside = path.with_name("traj_data.json")
        if "movable" in trial or "Sliced" in trial or not beside.exists():
            continue
        data = read_json(path)
        if not data.get("solvable"):
            continue
        text = PddlText(str(path), task_desc_of(data, path), entry(data, "pddl_problem", path))
        tasks.append(Task(trial, split, entry(read_json(beside), "task_type", beside), text))
    return tasks


def games_in_rows(file, split):
    """The solvable games of a .jsonl.gz file. ValueError names the file and the line that is wrong."""
    tasks = []
    try:
        with gzip.open(file, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                where = f"{file} line {number}"
                row = parsed_object(line, where)
                if entry(row, "split", where) != split or not row.get("solvable"):
                    continue
                name, task_type, task_desc, pddl = (entry(row, key, where) for key in (
                    "rel", "task_type", "task_desc", "pddl_problem"))
                tasks.append(Task(name, split, task_type, PddlText(f"{file}: {name}", task_desc, pddl)))
    except (gzip.BadGzipFile, zlib.error, EOFError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: expected a folder of games or a .jsonl.gz file: {error}") from error
    return sorted(tasks, key=lambda task: task.id)


def task_desc_of(data, path):
    """The task's text out of the game's grammar, the same in every release: "Your task is to: <text>."."""
    grammar = entry(data, "grammar", path)
    found = re.search(r'"Your task is to: (?:[^"\\]|\\.)*"', grammar)
    if not found:
        raise ValueError(f'{path}: its grammar has no "Your task is to: ..."')
    text = parsed_object(f'{{"task": {found[0]}}}', path)["task"]
    return text.removeprefix("Your task is to: ").removesuffix(".")


def read_json(path):
    """The JSON object in a file. Raises ValueError naming the file."""
    try:
        return parsed_object(path.read_text(encoding="utf-8"), path)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot read it: {error}") from error


def parsed_object(text, where):
    """The JSON object in a text. ValueError says where it was."""
    try:
        found = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{where}: bad JSON: {error}") from error
    if type(found) is not dict:
        raise ValueError(f"{where}: expected a JSON object, found {text[:40]}")
    return found


def entry(data, key, where):
    """The text under a key of a JSON object."""
    if type(data.get(key)) is not str:
        raise ValueError(f"{where}: no text under the key {key}")
    if not data[key].isascii() and re.search("[\ud800-\udfff]", data[key]):
        raise ValueError(f"{where}: half a character in the text under the key {key}")
    return data[key]
