"""Reader of ALFWorld's own games: parses a PDDL problem or a game.tw-pddl file into a Problem.

The first part parses PDDL, the second reads game files: one, a folder of them, or a .jsonl.gz of many. Only
what the household game needs is read: the initial facts, the goal and the task's text. Left out: the PDDL
domain, the grammar's rules and the walkthrough.

    python -m envs.household --game game.tw-pddl          # play one
"""

import gzip
import json
import os
import re
import zlib
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from .. import Task
from .problem import Goal, Problem, Receptacle, Thing, problem_of, type_of

ROOT = __package__.rpartition(".")[0]                # "envs"; of the installed package "household"
PROGRAM = "household" if ROOT == "household" else f"python -m {ROOT}.household"
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
ARGUMENTS = {                   # {predicate: number of arguments}; other predicates are not used
    "atlocation": 2, "cancontain": 2, "inreceptacle": 2, "inreceptacleobject": 2, "objectatlocation": 2,
    "objecttype": 2, "receptacleatlocation": 2, "receptacletype": 2, "openable": 1, "opened": 1,
    "pickupable": 1, "cleanable": 1, "heatable": 1, "coolable": 1, "toggleable": 1, "sliceable": 1,
    "iscool": 1, "isreceptacleobject": 1,
}
MAX_DEPTH = 100                 # of nested lists; ALFWorld's goals have 7
NOT_AT_START = ("holds", "holdsany", "isclean", "ishot", "issliced", "istoggled")   # in no ALFWorld game


@dataclass(frozen=True, slots=True)
class PddlText:
    """An unparsed game: thousands are loaded in seconds, and each is parsed when it is first played."""

    source: str                    # its file, for error messages
    task_desc: str
    pddl: str

    @lru_cache(maxsize=4096)           # room for ALFWorld's 3,553 training games; each takes 14 ms to parse
    def parse(self) -> Problem:
        """The parsed Problem. ValueError, with the source, for invalid PDDL."""
        try:
            return problem_from_pddl(self.pddl, self.task_desc)
        except ValueError as error:
            raise ValueError(f"{self.source}: {error}") from error


def problem_from_pddl(pddl_problem: str, task_desc: str) -> Problem:
    """Parse ALFWorld's PDDL into a Problem. ValueError for any other text and for an unknown goal."""
    sections = read_sections(pddl_problem)
    facts = read_facts(sections[":init"])
    check_ids(facts)
    names = demangled({token for found in facts.values() for arguments in found for token in arguments})
    used = {location for _, location in facts["receptacleatlocation"] + facts["objectatlocation"]}
    locations = {location: number for number, location in enumerate(sorted(used))}
    start = facts["atlocation"][0][1]
    return Problem(task_desc, read_receptacles(facts, names, locations), read_things(facts, names, locations),
                   read_goal(sections[":goal"]), locations.get(start, -1))


def read_sections(text):
    """Sections ":init" and ":goal" of a PDDL problem as nested lists of tokens, in lower case."""
    stack = [[]]
    for token in re.findall(r"[()]|[^\s()]+", re.sub(";.*", "", text.lower())):
        if token == "(":
            stack.append([])
            if len(stack) > MAX_DEPTH:
                raise ValueError(f"bad PDDL: nested more than {MAX_DEPTH} deep")
        elif token != ")":
            stack[-1].append(token)
        elif len(stack) > 1:
            done = stack.pop()
            stack[-1].append(done)
        else:
            raise ValueError("bad PDDL: ')' without '('")
    if len(stack) != 1:
        raise ValueError(f"bad PDDL: {len(stack) - 1} '(' not closed")
    define = next((form for form in stack[0] if form[:1] == ["define"]), [])
    sections = {form[0]: form[1:] for form in define if isinstance(form, list) and isinstance(form[0], str)}
    for name in (":init", ":goal"):
        if name not in sections:
            raise ValueError(f"bad PDDL: no ({name} ...) in (define ...)")
    return sections


def read_facts(init):
    """The facts of :init: {predicate: list of argument tuples}, without costs and distances, (= ...)."""
    facts = defaultdict(list)
    for form in init:
        if form[:1] == ["="]:
            continue
        if not form or not isinstance(form, list) or not all(isinstance(token, str) for token in form):
            raise ValueError(f"bad PDDL: {as_pddl(form)} in :init is not a fact")
        predicate, *arguments = form
        if predicate in NOT_AT_START:
            raise ValueError(f"{as_pddl(form)} at the start: no ALFWorld game has this initial fact")
        if len(arguments) != ARGUMENTS.get(predicate, len(arguments)):
            raise ValueError(f"bad PDDL: {as_pddl(form)} needs {ARGUMENTS[predicate]} arguments")
        facts[predicate].append(tuple(arguments))
    return facts


def check_ids(facts):
    """Raise ValueError for a player or receptacle without location, a thing without type, a malformed id."""
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
    """{PDDL id: name in the game's texts}, e.g. "cup 2" for "cup_bar__plus_00_dot_52_...".

    Numbers count down in the order of the ids, as in alfworld's Demangler: the last of a type is number 1.
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
    """All receptacles, in the order of their ids."""
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
    """All things, in the order of their ids. ValueError if a thing's type and name disagree."""
    kinds, places = dict(facts["objecttype"]), dict(facts["objectatlocation"])
    able = {predicate: {o for o, in facts[predicate]} for predicate in (
        "pickupable", "cleanable", "heatable", "coolable", "toggleable", "sliceable", "iscool",
        "isreceptacleobject")}
    receptacles, holding = defaultdict(list), defaultdict(list)
    for o, r in sorted(facts["inreceptacle"]):
        receptacles[o].append(names[r])
    for inner, outer in sorted(facts["inreceptacleobject"]):
        holding[outer].append(names.get(inner, inner))

    def thing(o):
        if kinds[o] != type_of(names[o]) + "type":
            raise ValueError(f"object {o}: expected the objectType of its name, found {kinds[o]}")
        flags = {predicate: o in ids for predicate, ids in able.items()}
        cool, holds_things = flags.pop("iscool"), flags.pop("isreceptacleobject")
        first, *others = receptacles[o] or [None]
        return Thing(names[o], first, locations[places[o]] if o in places else -1, **flags, cool=cool,
                     holds_things=holds_things, holding=tuple(holding[o]), also_in=tuple(others))

    return tuple(map(thing, sorted(kinds)))


def as_pddl(form):
    """A nested list of tokens as one line of PDDL."""
    return form if isinstance(form, str) else f"({' '.join(map(as_pddl, form))})"


def read_goal(section):
    """The Goal of a ":goal" section. ValueError if it is none of ALFWorld's six forms."""
    for task_type, form in GOALS.items():
        pattern = re.escape(f"((and {form}))")
        for slot in ("object", "receptacle", "toggle"):    # the first use names a group, others refer to it
            pattern = pattern.replace(slot.upper(), rf"(?P<{slot}>\w+)type", 1)
            pattern = pattern.replace(slot.upper(), rf"(?P={slot})type")
        if match := re.fullmatch(pattern, as_pddl(section)):
            return Goal(task_type, **match.groupdict())
    raise ValueError(f"the goal is none of ALFWorld's six: {as_pddl(section)}")


# Games from disk

def expand_variables(path):
    """A path with its environment variables and "~" expanded; $ALFWORLD_DATA has alfworld's default."""
    if "ALFWORLD_DATA" not in os.environ:
        default = os.path.expanduser("~/.cache/alfworld")
        path = path.replace("$ALFWORLD_DATA", default).replace("${ALFWORLD_DATA}", default)
    return os.path.expanduser(os.path.expandvars(path))


def load_game(path) -> Task:
    """The game in a game.tw-pddl file, parsed once to check it.

    Its task type is that of traj_data.json in the same folder, if any, else that of its goal.
    """
    path = Path(path)
    data = read_json(path)
    text = PddlText(str(path), task_desc_of(data, path), entry(data, "pddl_problem", path))
    *_, split, kind, trial = ("", "", "", *path.parent.resolve().parts)
    problem = text.parse()
    labels = path.with_name("traj_data.json")
    task_type = entry(read_json(labels), "task_type", labels) if labels.exists() else problem.goal.task_type
    return Task(f"{split}/{kind}/{trial}", split, task_type, text)


def check_source(source, splits):
    """Raise ValueError, naming --games, if a source is no path, has no game in any split, or is no gzip.

    A quick check that parses nothing: `load_games` may still fail.
    """
    path = Path(source)
    if not (path.is_dir() or path.is_file()):
        raise ValueError(f"--games={source}: no such file or folder (python -m envs.household download gets "
                         "ALFWorld's games)")
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


def load_games(source, split, types=None) -> list[Task]:
    """The solvable games of a split, in the order of their paths; ValueError if there are none.

    source: a folder laid out like $ALFWORLD_DATA/json_2.1.1, <split>/<type-...>/<trial>/game.tw-pddl, or a
    .jsonl.gz file with one game a row. types: the task types to keep (default: all). As in ALFWorld,
    folders of movable receptacles and sliced objects, trials without traj_data.json and games that are not
    marked solvable are skipped.
    """
    source = Path(source)
    for task_type in types or ():
        if task_type not in GOALS:
            raise ValueError(f"task type {task_type}: expected one of {', '.join(GOALS)}")
    if not source.exists():
        raise ValueError(f"{source}: no such file or folder")
    found = games_in_folder(source, split) if source.is_dir() else games_in_rows(source, split)
    tasks = [task for task in found if types is None or task.task_type in types]
    if not tasks:
        selection = f"split {split}" + (f" and types {', '.join(types)}" if types else "")
        raise ValueError(f"{source}: no solvable games of {selection}")
    return tasks


def numbered_names(tasks):
    """All names with numbers, " cabinet 27": of each type from 1 to the highest number in these games."""
    highest = {}
    for task in tasks:
        problem = problem_of(task)
        for thing in (*problem.receptacles, *problem.things):
            kind, _, number = thing.name.rpartition(" ")
            highest[kind] = max(int(number), highest.get(kind, 0))
    return [f" {kind} {number}" for kind in sorted(highest) for number in range(1, highest[kind] + 1)]


def games_in_folder(folder, split):
    """The solvable games of a json_2.1.1 folder, see `load_games`."""
    tasks = []
    for path in sorted((folder / split).rglob("game.tw-pddl")):
        trial = path.parent.relative_to(folder).as_posix()
        labels = path.with_name("traj_data.json")
        if "movable" in trial or "Sliced" in trial or not labels.exists():
            continue
        data = read_json(path)
        if not data.get("solvable"):
            continue
        text = PddlText(str(path), task_desc_of(data, path), entry(data, "pddl_problem", path))
        tasks.append(Task(trial, split, entry(read_json(labels), "task_type", labels), text))
    return tasks


def games_in_rows(file, split):
    """The solvable games of a .jsonl.gz file. ValueError, with file and line, for an invalid row."""
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
    """The task's text, from "Your task is to: <text>." in the game's grammar, as in every release."""
    grammar = entry(data, "grammar", path)
    found = re.search(r'"Your task is to: (?:[^"\\]|\\.)*"', grammar)
    if not found:
        raise ValueError(f'{path}: its grammar has no "Your task is to: ..."')
    text = parsed_object(f'{{"task": {found[0]}}}', path)["task"]
    return text.removeprefix("Your task is to: ").removesuffix(".")


def read_json(path):
    """The JSON object in a file. ValueError, with the path, for anything else."""
    try:
        return parsed_object(path.read_text(encoding="utf-8"), path)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot read it: {error}") from error


def parsed_object(text, where):
    """The JSON object in a text. ValueError, with `where`, for anything else."""
    try:
        found = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{where}: bad JSON: {error}") from error
    if type(found) is not dict:
        raise ValueError(f"{where}: expected a JSON object, found {text[:40]}")
    return found


def entry(data, key, where):
    """The text under a key of a JSON object. ValueError, with `where`, for anything else."""
    if type(data.get(key)) is not str:
        raise ValueError(f"{where}: no text under the key {key}")
    if not data[key].isascii() and re.search("[\ud800-\udfff]", data[key]):
        raise ValueError(f"{where}: a lone surrogate in the text under the key {key}")
    return data[key]
