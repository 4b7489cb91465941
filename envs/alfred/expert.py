"""Expert and oracle of the household game; both know only what the game's texts have revealed so far.

`Belief` is the state of knowledge after a prefix of an episode. `plan` lists the commands that the goal needs
next, given that knowledge. `SearchExpert` follows the plan; while the plan is empty, it searches where things
are usually kept in training rooms. `demonstrate` records the expert, with a few injected mistakes.
`oracle_labels` labels turns good or bad. Left out: texts other than ALFWorld's, and which things have been
sliced, since no goal depends on it. Its win rate: evaluation.py --player expert.
"""

import random
import re
from collections import Counter, defaultdict

from .. import Demonstration
from .game import Game
from .problem import NOOP_MESSAGE, OPENABLE, TREATED, UNTREATED, parse_goal, problem_of, type_of

NAME = re.compile(r"(?<![a-z])[a-z]+ \d+")      # the lookbehind avoids quadratic time on a long word
CONTENTS = re.compile(r"(?:On|In) (?:the ([a-z]+ \d+)|it), you see (.*)\.$")


# Knowledge

class Belief:
    """What is known from the texts so far. All of it is true in the game; nothing unseen is assumed.

    intro: the first observation. Three exceptions: in real rooms a pan can be on two burners at once, and
    `where` has only the last one seen; a receptacle's type is read from its name (in one room "bathtubbasin
    1" is a sink); and what a thing was like at the start is not known (no original game has a cool thing that
    must be cool, a rearranged one may).
    """

    def __init__(self, intro):
        room, _, task = intro.partition("Your task is to: ")
        self.goal = parse_goal(task.strip().removesuffix("."))
        self.receptacles = NAME.findall(room)
        self.at = None                     # the receptacle last gone to
        self.colocated = {name: {name} for name in self.receptacles}      # known to share its location
        self.opened, self.closed = set(), set()      # receptacles seen open, seen closed; others: unknown
        self.searched = set()              # receptacles whose contents have been seen
        self.visited = set()
        self.where = {}                    # {object: the receptacle where it was last seen}
        self.holding = None                # the object in the player's hand
        self.origin = None                 # the receptacle from which it was taken
        self.refused = set()               # (object type, receptacle) of refused moves, see _move_refused
        self.clean, self.hot, self.cool, self.lit = set(), set(), set(), set()
        self.treated = {"clean": self.clean, "heat": self.hot, "cool": self.cool}
        self.looked = set()                # commands that only look, since the last change of state

    def update(self, command, observation):
        """Add one turn: the command as it was sent, and the game's full answer."""
        command = command.strip()                                        # as the game does
        verb, names = command.split(" ", 1)[0], NAME.findall(command)
        if observation == NOOP_MESSAGE:
            self._refused(command, names)
            return
        if verb in ("look", "inventory", "help", "examine"):
            self.looked.add(command)
            self._looked_at(verb, names, observation)
            return
        self.looked.clear()
        if verb in self.treated:
            self._treat(verb, *names)
        else:
            getattr(self, "_" + verb)(*names)
        self._contents(names[-1], observation)

    def is_near(self, receptacle):
        """Whether the player is at this receptacle, or at one that shares its location."""
        return self.at is not None and receptacle in self.colocated[self.at]

    def _refused(self, command, names):
        if not self.at or not names or names[-1] not in self.colocated:
            return
        # "go to" is refused only for receptacles at the present location
        if command == f"go to {names[-1]}":
            self._join(names[-1])
        elif self.holding and command == f"move {self.holding} to {names[-1]}":
            self._move_refused(names[-1])

    def _move_refused(self, receptacle):
        """Remember that no receptacle of this type accepts objects of the type in hand.

        If its door may have been closed, another one of its type may accept them: remember this one only.
        """
        if not self.is_near(receptacle) or receptacle in self.closed:
            return
        is_open = receptacle in self.searched or receptacle == self.origin
        self.refused.update((type_of(self.holding), name) for name in self.receptacles
                            if name == receptacle or (is_open and type_of(name) == type_of(receptacle)))

    def _join(self, receptacle):
        if receptacle in self.colocated and self.at:
            union = self.colocated[receptacle] | self.colocated[self.at]
            for name in union:
                self.colocated[name] = union

    def _contents(self, receptacle, observation):
        """Read "The fridge 1 is closed." and "On the desk 1, you see a pen 1, and a cup 2."."""
        if f"The {receptacle} is closed." in observation:
            self.closed.add(receptacle)
            self.opened.discard(receptacle)
        if f"The {receptacle} is open." in observation:
            self.opened.add(receptacle)
            self.closed.discard(receptacle)
        found = CONTENTS.search(observation)
        if found:
            self.searched.add(receptacle)
            self.where = {name: place for name, place in self.where.items() if place != receptacle}
            self.where.update((name, receptacle) for name in NAME.findall(found.group(2)))

    def _go(self, receptacle):
        self.at = receptacle
        self.visited.add(receptacle)

    def _open(self, receptacle):
        self._join(receptacle)

    def _close(self, receptacle):
        self._join(receptacle)
        self.opened.discard(receptacle)
        self.closed.add(receptacle)

    def _take(self, name, receptacle):
        self._join(receptacle)
        self.where.pop(name, None)
        self.holding, self.origin = name, receptacle

    def _move(self, name, receptacle):
        self._join(receptacle)
        self.where[name] = receptacle
        self.holding = self.origin = None

    def _treat(self, verb, name, receptacle):
        self._join(receptacle)
        if verb != "clean":                                # hot or cool, not both
            self.hot.discard(name)
            self.cool.discard(name)
        self.treated[verb].add(name)

    def _use(self, lamp):
        self.lit.add(lamp)

    def _slice(self, name, knife):
        pass

    def _looked_at(self, verb, names, observation):
        if verb == "look" and observation.startswith("You are facing the "):
            for receptacle in NAME.findall(observation.partition(". Next to it")[0]):
                self._join(receptacle)
        if verb == "examine" and names[0] in self.colocated:
            self._join(names[0])
            self._contents(names[0], observation)
        elif verb == "examine":
            self._examined(names[0], observation)

    def _examined(self, name, observation):
        """Read "This is a hot and clean apple 1." and "This desklamp 1 is on."."""
        states = (("clean", self.clean), ("hot", self.hot), ("cold", self.cool), ("cool", self.cool))
        for word, state in states:
            if observation.startswith("This is a ") and f" {word} " in observation:
                state.add(name)
        if observation == f"This {name} is on.":
            self.lit.add(name)


# What the goal needs

def unplaced_objects(belief):
    """Seen objects of the goal's type that are not at their target yet; those within reach come first."""
    placed = {name for name, place in belief.where.items() if _is_placed(belief, name, place)}
    names = [name for name in belief.where if type_of(name) == belief.goal.object and name not in placed]
    return sorted(names, key=lambda name: (not belief.is_near(belief.where[name]),
                                           not is_treated(belief, name)))


def is_treated(belief, name):
    """Whether an object is cleaned, heated or cooled as the task asks; True if it asks for no treatment."""
    verb, _, _ = TREATED.get(belief.goal.task_type, UNTREATED)
    return verb is None or name in belief.treated[verb]


def target_receptacles(belief):
    """The goal's receptacles; if two objects are to be placed, only those that hold the most already."""
    names = [name for name in belief.receptacles if type_of(name) == belief.goal.receptacle]
    if belief.goal.task_type != "pick_two_obj_and_place":
        return names
    count = Counter(place for name, place in belief.where.items() if type_of(name) == belief.goal.object)
    most = max((count[name] for name in names), default=0)
    return [name for name in names if count[name] == most]


def _is_placed(belief, name, place):
    if type_of(name) != belief.goal.object or not belief.goal.receptacle:
        return False
    if belief.goal.task_type == "pick_two_obj_and_place":
        return place == next(iter(target_receptacles(belief)), None)
    return type_of(place) == belief.goal.receptacle and is_treated(belief, name)


def _is_tied(belief):
    """Whether two receptacles hold one object each of two to be placed: either may be moved to the other."""
    placed = [place for name, place in belief.where.items() if type_of(name) == belief.goal.object]
    return sum(place in placed for place in target_receptacles(belief)) > 1


def holds_wrong_object(belief):
    """Whether the player holds an object that is not of the goal's type."""
    return belief.holding is not None and type_of(belief.holding) != belief.goal.object


def places_to_put_down(belief):
    """Where the object in hand may be put: here, or where it was taken from.

    Once that has refused it: every receptacle that has not, those within reach first.
    """
    places = [name for name in belief.receptacles if (type_of(belief.holding), name) not in belief.refused]
    near = [name for name in places if belief.is_near(name)]
    if belief.origin in places:
        return [name for name in places
                if name == belief.origin or (name in near and name not in belief.closed)]
    return near or places


def plan(belief):
    """(receptacle, command) pairs: go to the receptacle, open it if necessary, and give the command.

    Each pair alone brings the goal nearer. Empty if something has to be found first.
    """
    goal, holding = belief.goal, belief.holding
    if holding is None:
        return [(belief.where[name], f"take {name} from {belief.where[name]}")
                for name in unplaced_objects(belief)]
    if holds_wrong_object(belief):
        places = places_to_put_down(belief) if unplaced_objects(belief) else []
        return [(place, f"move {holding} to {place}") for place in places]
    if goal.toggle:
        return [(place, f"use {lamp}") for lamp, place in belief.where.items()
                if type_of(lamp) == goal.toggle]
    if not is_treated(belief, holding):
        verb, appliance, _ = TREATED[goal.task_type]
        return [(name, f"{verb} {holding} with {name}") for name in belief.receptacles
                if type_of(name) == appliance]
    return [(name, f"move {holding} to {name}") for name in target_receptacles(belief)]


def next_steps(belief):
    """The plan's pairs within reach, or all of them if none is: leaving a usable target is no progress."""
    steps = plan(belief)
    if holds_wrong_object(belief):   # what is within reach may refuse it: to go to its origin is progress too
        return steps
    return [step for step in steps if belief.is_near(step[0])] or steps


def next_command(belief, receptacle, command):
    """The next command on the way to giving `command` at `receptacle`."""
    if not belief.is_near(receptacle):
        return f"go to {receptacle}"
    return command_here(belief, receptacle, command)


def command_here(belief, receptacle, command):
    """The next command at the receptacle: `command`, or to open it first."""
    # appliances and lamps work behind a closed door, but taking and moving need it open
    if receptacle in belief.closed and command.startswith(("take", "move")):
        return f"open {receptacle}"
    return command


def missing_type(belief):
    """The type of object to find before `plan` has a step: the goal's, or its toggle. None if it has one."""
    if plan(belief):
        return None
    return belief.goal.object if belief.holding is None or holds_wrong_object(belief) else belief.goal.toggle


# The expert

def learn_prior(tasks):
    """Where things are at the start of tasks: {object type: {receptacle type: relative frequency}}."""
    counts = defaultdict(Counter)
    for task in tasks:
        for thing in problem_of(task).things:
            if thing.receptacle:
                counts[thing.type][type_of(thing.receptacle)] += 1
    return {name: {place: n / places.total() for place, n in places.items()}
            for name, places in counts.items()}


class SearchExpert:
    """Follows the plan; while it is empty, searches where the chance of finding per turn is highest."""

    UNSEEN_CHANCE = 1e-3       # chance of a receptacle type in which the prior never saw the object type

    def __init__(self, prior, rng):
        self.prior, self.rng = prior, rng

    def act(self, belief):
        """The next command, from the belief and the prior alone."""
        steps = next_steps(belief)
        if not steps:
            return self._search(belief)
        if holds_wrong_object(belief):
            return self._put_down(belief)
        if not belief.holding:
            return next_command(belief, *steps[0])
        seen_open = belief.searched - belief.closed
        is_open = [step for step in steps if type_of(step[0]) not in OPENABLE or step[0] in seen_open]
        return next_command(belief, *(is_open or steps)[0])

    def _put_down(self, belief):
        """Put the object down: here if the prior has its type here, else where it was taken from.

        If that has refused it, where the prior has its type most often.
        """
        usual = self.prior.get(type_of(belief.holding), {})
        place, command = max(plan(belief), key=lambda step: (
            step[0] == belief.at and type_of(belief.at) in usual, step[0] == belief.origin,
            usual.get(type_of(step[0]), 0)))
        return next_command(belief, place, command)

    def _search(self, belief):
        unsearched = [name for name in belief.receptacles if name not in belief.searched]
        if not unsearched:            # the object was moved unseen: visit everything again
            far = [name for name in belief.receptacles if not belief.is_near(name)]
            return f"go to {self.rng.choice(far)}"
        counts = Counter(map(type_of, belief.receptacles))
        # ties go to the first listed, here and in `act`: a rule that a model can learn
        place = max(unsearched, key=lambda name: self._chance(belief, name, counts))
        if not belief.is_near(place):
            return f"go to {place}"
        return f"open {place}" if place in belief.closed else f"examine {place}"

    def _chance(self, belief, receptacle, counts):
        """Chance per turn of finding the missing object there. counts: the room's receptacles by type."""
        kind = type_of(receptacle)
        chance = self.prior.get(missing_type(belief), {}).get(kind, self.UNSEEN_CHANCE) / counts[kind]
        is_far = not belief.is_near(receptacle)
        has_door = type_of(receptacle) in OPENABLE and receptacle not in belief.opened
        return chance / max(1, is_far + has_door)


# Demonstrations

class OnlineExpert:
    """The expert following an episode that another player plays."""

    def __init__(self, prior, task, seed):
        self.rng = random.Random(f"{task.id}/{seed}")
        self.expert, self.belief = SearchExpert(prior, self.rng), None

    def observe(self, observation, command=None):
        """Add the first observation (no command), or a command and the observation that answered it."""
        if command is None:
            self.belief = Belief(observation)
        else:
            self.belief.update(command, observation)

    def command(self):
        """The command that the expert would give now."""
        return self.expert.act(self.belief)


def demonstrate(game, task, prior, seed, mistake_rate=0.05, max_turns=30):
    """One Demonstration by the expert. A fraction mistake_rate of its commands are replaced by mistakes."""
    expert, reply = OnlineExpert(prior, task, seed), game.reset(task, seed)
    rng = expert.rng
    expert.observe(reply.observation)
    replies, commands, mistakes = [reply], [], []
    while not reply.done and len(commands) < max_turns:
        command, erred = expert.command(), rng.random() < mistake_rate
        if erred:
            wrong = mistake(expert.belief, reply.admissible, rng)
            command, erred = wrong, wrong != command
        reply = game.step(command)
        expert.observe(reply.observation, command)
        commands.append(command)
        mistakes.append(erred)
        replies.append(reply)
    return Demonstration(replies, commands, mistakes)


def mistake(belief, admissible, rng):
    """A careless command: an admissible one, taking an absent object, or returning to a searched place."""
    absent = f"take {belief.goal.object} 1 from {belief.at or belief.receptacles[0]}"
    searched = sorted(name for name in belief.searched if not belief.is_near(name))
    choices = [rng.choice([command for command in admissible if command != "help"])]
    if belief.where.get(f"{belief.goal.object} 1") != belief.at:
        choices.append(absent)
    if searched:
        choices.append(f"go to {rng.choice(searched)}")
    return rng.choice(choices)


class Expert:
    """The search expert in the pure Python game, with a prior counted over the given tasks."""

    restarts = 0               # no engine that could die

    def __init__(self, tasks):
        self.game, self.prior = Game(), learn_prior(tasks)

    def show(self, task, seed, mistake_rate=0.05, max_turns=30):
        """Return a Demonstration, see `demonstrate`."""
        return demonstrate(self.game, task, self.prior, seed, mistake_rate, max_turns)

    def online_expert(self, task, seed):
        """The expert following another player of this task."""
        return OnlineExpert(self.prior, task, seed)


# Labels

def oracle_labels(observations, commands):
    """A label per command, "good", "bad" or None, from the texts before it and whether it was refused.

    good: a step that the goal needs given what is known, or the first visit or opening of an unsearched
    receptacle while the needed object is unseen. bad: refused, undoes progress, or reveals nothing new.
    None: the rest. Labels never depend on later turns: a search that finds nothing stays good.
    """
    belief, labels = Belief(observations[0]), []
    for command, observation in zip(commands, observations[1:], strict=True):
        labels.append(_label(belief, command, observation == NOOP_MESSAGE))
        belief.update(command, observation)
    return labels


def _label(belief, command, refused):
    if refused:
        return "bad"
    command = command.strip()
    needed = {next_command(belief, *step) for step in next_steps(belief)}
    # an accepted command was within reach, even if the location that two receptacles share is not known yet
    needed |= {command_here(belief, *step) for step in plan(belief)}
    if command in needed or _is_search(belief, command):
        return "good"
    return "bad" if _undoes(belief, command) or _brings_no_news(belief, command) else None


def _is_search(belief, command):
    """First visit or opening, or examination at the present location, while an object has to be found."""
    verb, names = command.split(" ", 1)[0], NAME.findall(command)
    if not missing_type(belief) or not names or names[0] in belief.searched:
        return False
    if names[0] not in belief.colocated:             # not a receptacle
        return False
    return (verb in ("go", "examine") and names[0] not in belief.visited | belief.closed) or verb == "open"


def _undoes(belief, command):
    """Reverts a step that the goal needs: moves or changes its object, fills the hand, or closes a door."""
    verb, names = command.split(" ", 1)[0], NAME.findall(command)
    is_goals = bool(names) and type_of(names[0]) == belief.goal.object
    if verb == "take":
        placed = is_goals and _is_placed(belief, *names) and not _is_tied(belief)
        return placed if is_goals else bool(unplaced_objects(belief))
    if verb == "move":
        return is_goals
    if verb in ("heat", "cool"):
        undone, _, _ = TREATED.get(belief.goal.task_type, UNTREATED)
        return is_goals and {verb, undone} == {"heat", "cool"} and is_treated(belief, names[0])
    return verb == "close" and any(place == names[0] and step.startswith(("take", "move"))
                                   for place, step in next_steps(belief))


def _brings_no_news(belief, command):
    """Visits, looks, opens, treats or uses again with an answer that is known already."""
    verb, names = command.split(" ", 1)[0], NAME.findall(command)
    if verb in ("go", "open"):
        return names[0] in belief.searched
    if verb == "examine" and names[0] in belief.colocated:
        return names[0] in belief.searched | belief.closed
    if verb in belief.treated:
        return names[0] in belief.treated[verb]
    return command in belief.looked or (verb == "use" and names[0] in belief.lit)
