"""What can be known from the text of a household game, and who plays well on that alone.

`Belief` is the state of knowledge after a prefix of an episode. `plan` says which commands the goal needs
next on facts already observed; `SearchExpert` follows it, and searches where training rooms usually keep
things when it is empty. `demonstrate` records the expert with a few injected mistakes; `oracle_labels`
calls turns good or bad from what the prefix lets one know, never from the hidden state. ALFWorld's texts
only; what has been sliced is not remembered, for no goal asks for it.

    python -m envs.alfred.expert [--games $ALFWORLD_DATA/json_2.1.1]      # its win rate on every split
"""

import argparse
import random
import re
from collections import Counter, defaultdict

from envs import Demonstration
from envs.alfred.game import Game
from envs.alfred.problem import NOTHING, TREATED, UNTREATED, parse_goal, problem_of, type_of
from envs.alfred.splits import Tasks

DOORS = frozenset(("cabinet", "drawer", "fridge", "microwave", "safe"))     # types that may be closed
NAME = re.compile(r"(?<![a-z])[a-z]+ \d+")      # begins with a word: no long one is read at each letter
CONTENTS = re.compile(r"(?:On|In) (?:the ([a-z]+ \d+)|it), you see (.*)\.$")


# Knowledge

class Belief:
    """What the texts so far say. Exact: what it holds is so in the game; it holds nothing that was not seen.

    One exception: some pans of real rooms stand on two burners at once; `where` has the one seen last.
    """

    def __init__(self, intro):
        room, _, task = intro.partition("Your task is to: ")
        self.goal = parse_goal(task.strip().removesuffix("."))
        self.receptacles = NAME.findall(room)
        self.at = None                     # the receptacle last gone to
        self.beside = {name: {name} for name in self.receptacles}      # receptacles known to share a location
        self.opened, self.closed = set(), set()      # seen open, seen closed; neither: not seen, or no door
        self.searched = set()              # receptacles whose contents have been seen
        self.visited = set()
        self.where = {}                    # object -> the receptacle it was last seen in
        self.held = None
        self.origin = None                 # where the held object was taken from
        self.clean, self.hot, self.cool, self.lit = set(), set(), set(), set()
        self.looked = set()                 # looks, examinations ... since anything last changed

    def update(self, command, observation):
        """Take in one turn. `command` is what was sent, `observation` the game's whole answer."""
        verb, names = command.split(" ", 1)[0], NAME.findall(command)
        if observation == NOTHING:
            self._refused(command, names)
            return
        if verb in ("look", "inventory", "help", "examine"):
            self.looked.add(command)
            self._looked_at(verb, names, observation)
            return
        self.looked.clear()
        getattr(self, "_" + verb)(*names)
        self._contents(names[-1], observation)

    def is_near(self, receptacle):
        """Whether one stands at a receptacle, or at another of its location."""
        return self.at is not None and receptacle in self.beside[self.at]

    def _refused(self, command, names):
        # one can go to every receptacle but those at one's own place, so this refusal is news
        if self.at and names and names[0] in self.beside and command == f"go to {names[0]}":
            self._join(names[0])

    def _join(self, receptacle):
        if receptacle in self.beside and self.at:
            together = self.beside[receptacle] | self.beside[self.at]
            for name in together:
                self.beside[name] = together

    def _contents(self, receptacle, observation):
        """Reads "The fridge 1 is closed." and "On the desk 1, you see a pen 1, and a cup 2."."""
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
        self.held, self.origin = name, receptacle

    def _move(self, name, receptacle):
        self._join(receptacle)
        self.where[name] = receptacle
        self.held = self.origin = None

    def _clean(self, name, receptacle):
        self._join(receptacle)
        self.clean.add(name)

    def _heat(self, name, receptacle):
        self._join(receptacle)
        self.hot.add(name)
        self.cool.discard(name)

    def _cool(self, name, receptacle):
        self._join(receptacle)
        self.cool.add(name)
        self.hot.discard(name)

    def _use(self, lamp):
        self.lit.add(lamp)

    def _slice(self, name, knife):
        pass

    def _looked_at(self, verb, names, observation):
        if verb == "look" and observation.startswith("You are facing the "):
            for receptacle in NAME.findall(observation.partition(". Next to it")[0]):
                self._join(receptacle)
        if verb == "examine" and names[0] in self.beside:
            self._join(names[0])
            self._contents(names[0], observation)
        elif verb == "examine":
            self._examined(names[0], observation)

    def _examined(self, name, observation):
        """Reads "This is a hot and clean apple 1." and "This desklamp 1 is on."."""
        states = (("clean", self.clean), ("hot", self.hot), ("cold", self.cool), ("cool", self.cool))
        for word, state in states:
            if observation.startswith("This is a ") and f" {word} " in observation:
                state.add(name)
        if observation == f"This {name} is on.":
            self.lit.add(name)


# What the goal needs

def wanted(belief):
    """Objects of the goal's type, seen and not yet where they have to be: the nearest first."""
    placed = {name for name, place in belief.where.items() if _is_placed(belief, name, place)}
    names = [name for name in belief.where if type_of(name) == belief.goal.object and name not in placed]
    return sorted(names, key=lambda name: (not belief.is_near(belief.where[name]),
                                           not is_treated(belief, name)))


def is_treated(belief, name):
    """Whether an object has been cleaned, heated or cooled as the task says; True where it says nothing."""
    states = {"clean": belief.clean, "heat": belief.hot, "cool": belief.cool}
    verb, _, _ = TREATED.get(belief.goal.task_type, UNTREATED)
    return verb is None or name in states[verb]


def targets(belief):
    """Receptacles that the goal's object has to go to: with two of them, where one already is."""
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
        return place == next(iter(targets(belief)), None)
    return type_of(place) == belief.goal.receptacle and is_treated(belief, name)


def holds_other(belief):
    """Whether the hand is full of something that the goal does not ask for."""
    return belief.held is not None and type_of(belief.held) != belief.goal.object


def plan(belief):
    """(receptacle, command) pairs: be there, with its door open where need be, and give the command.

    Any one of them brings the goal nearer. Empty when something has to be found first.
    """
    goal, held = belief.goal, belief.held
    if held is None:
        return [(belief.where[name], f"take {name} from {belief.where[name]}") for name in wanted(belief)]
    if holds_other(belief):
        places = {name for name in belief.beside[belief.at] if name not in belief.closed} | {belief.origin}
        return [(place, f"move {held} to {place}") for place in sorted(places)] if wanted(belief) else []
    if goal.toggle:
        return [(place, f"use {lamp}") for lamp, place in belief.where.items()
                if type_of(lamp) == goal.toggle]
    if not is_treated(belief, held):
        verb, appliance, _ = TREATED[goal.task_type]
        return [(name, f"{verb} {held} with {name}") for name in belief.receptacles
                if type_of(name) == appliance]
    return [(name, f"move {held} to {name}") for name in targets(belief)]


def steps_now(belief):
    """The plan's pairs for where one stands, else all: with one target at hand, another is no progress."""
    steps = plan(belief)
    if holds_other(belief):        # what is at hand may not take the thing; where it came from will
        return steps
    return [step for step in steps if belief.is_near(step[0])] or steps


def next_command(belief, receptacle, command):
    """The next command on the way to giving `command` at `receptacle`."""
    if not belief.is_near(receptacle):
        return f"go to {receptacle}"
    # appliances and lamps work behind a closed door; things go in and out through an open one
    if receptacle in belief.closed and command.startswith(("take", "move")):
        return f"open {receptacle}"
    return command


def missing(belief):
    """The object type to search for now, or None when the plan says what to do."""
    if plan(belief):
        return None
    return belief.goal.object if belief.held is None or holds_other(belief) else belief.goal.toggle


# The expert

def learn_prior(tasks):
    """Where rooms keep things: {object type: {receptacle type: probability}}, counted over tasks' starts."""
    counts = defaultdict(Counter)
    for task in tasks:
        for thing in problem_of(task).things:
            if thing.receptacle:
                counts[thing.type][type_of(thing.receptacle)] += 1
    return {name: {place: n / places.total() for place, n in places.items()}
            for name, places in counts.items()}


class SearchExpert:
    """Follows the plan; without one, looks first where the missing thing is likeliest per turn spent."""

    UNHEARD = 1e-3       # chance of a place where the prior has never seen the thing

    def __init__(self, prior, rng):
        self.prior, self.rng = prior, rng

    def act(self, belief):
        """The next command, from what was observed and the prior alone."""
        steps = steps_now(belief)
        if not steps:
            return self._search(belief)
        if holds_other(belief):
            return self._put_down(belief)
        if not belief.held:
            return next_command(belief, *steps[0])
        seen_open = belief.searched - belief.closed
        is_open = [step for step in steps if type_of(step[0]) not in DOORS or step[0] in seen_open]
        return next_command(belief, *(is_open or steps)[0])

    def _put_down(self, belief):
        """Frees the hand: here, if such things are kept here, or where the thing came from."""
        usual = self.prior.get(type_of(belief.held), {})
        stay = type_of(belief.at) in usual and belief.at not in belief.closed
        place = belief.at if stay else belief.origin
        return next_command(belief, place, f"move {belief.held} to {place}")

    def _search(self, belief):
        unsearched = [name for name in belief.receptacles if name not in belief.searched]
        if not unsearched:            # it has been moved out of sight: look into everything again
            far = [name for name in belief.receptacles if not belief.is_near(name)]
            return f"go to {self.rng.choice(far)}"
        counts = Counter(map(type_of, belief.receptacles))
        # of equal ones the first that was listed, here as in `act`: a player can learn which that is
        place = max(unsearched, key=lambda name: self._chance(belief, name, counts))
        if not belief.is_near(place):
            return f"go to {place}"
        return f"open {place}" if place in belief.closed else f"examine {place}"

    def _chance(self, belief, receptacle, counts):
        """Chance per turn of finding the missing thing there. counts: of the room's receptacles, by type."""
        kind = type_of(receptacle)
        chance = self.prior.get(missing(belief), {}).get(kind, self.UNHEARD) / counts[kind]
        is_far = not belief.is_near(receptacle)
        has_door = type_of(receptacle) in DOORS and receptacle not in belief.opened
        return chance / max(1, is_far + has_door)


# Demonstrations

class Coach:
    """The expert beside a player: what it would do now, whoever gave the commands so far."""

    def __init__(self, prior, task, seed):
        self.rng = random.Random(f"{task.id}/{seed}")
        self.expert, self.belief = SearchExpert(prior, self.rng), None

    def see(self, observation, command=None):
        """Take in the first observation, then each command with the answer to it."""
        if command is None:
            self.belief = Belief(observation)
        else:
            self.belief.update(command, observation)

    def advice(self):
        """The command that the expert would give."""
        return self.expert.act(self.belief)


def demonstrate(env, task, prior, seed, mistake_rate=0.05, max_turns=30):
    """One episode of the expert, who now and then errs and then goes on from what it sees."""
    coach, reply = Coach(prior, task, seed), env.reset(task, seed)
    rng = coach.rng
    coach.see(reply.observation)
    replies, commands, mistakes = [reply], [], []
    while not reply.done and len(commands) < max_turns:
        command, erred = coach.advice(), rng.random() < mistake_rate
        if erred:
            wrong = mistake(coach.belief, reply.admissible, rng)
            command, erred = wrong, wrong != command
        reply = env.step(command)
        coach.see(reply.observation, command)
        commands.append(command)
        mistakes.append(erred)
        replies.append(reply)
    return Demonstration(replies, commands, mistakes)


def mistake(belief, admissible, rng):
    """A careless command: any admissible one, taking what is not here, going back to a searched place."""
    absent = f"take {belief.goal.object} 1 from {belief.at or belief.receptacles[0]}"
    searched = sorted(name for name in belief.searched if not belief.is_near(name))
    choices = [rng.choice([command for command in admissible if command != "help"])]
    if belief.where.get(f"{belief.goal.object} 1") != belief.at:
        choices.append(absent)
    if searched:
        choices.append(f"go to {rng.choice(searched)}")
    return rng.choice(choices)


class Expert:
    """The search expert in the pure Python game: word for word the engine's, thousands of times as fast."""

    restarts = 0               # of engines: there is none

    def __init__(self, tasks):
        self.game, self.prior = Game(), learn_prior(tasks)

    def show(self, task, seed, mistake_rate=0.05, max_turns=30):
        """`demonstrate` with the prior that the expert has from its tasks."""
        return demonstrate(self.game, task, self.prior, seed, mistake_rate, max_turns)

    def coach(self, task, seed):
        """The expert beside a player of this task."""
        return Coach(self.prior, task, seed)


# Labels

def oracle_labels(observations, commands):
    """Each turn's label, "good", "bad" or None, from the prefix alone and whether the turn was refused.

    good: a step that the goal needs on facts already observed, or the first visit or opening of an unsearched
    receptacle while the needed object is unseen. bad: refused, undoes progress, or goes back without news.
    None: the rest. A search that proves vain stays good: no label changes when the future does.
    """
    belief, labels = Belief(observations[0]), []
    for command, observation in zip(commands, observations[1:], strict=True):
        labels.append(_label(belief, command, observation == NOTHING))
        belief.update(command, observation)
    return labels


def _label(belief, command, refused):
    if refused:
        return "bad"
    needed = {next_command(belief, *step) for step in steps_now(belief)}
    if command in needed or _is_search(belief, command):
        return "good"
    return "bad" if _undoes(belief, command) or _brings_no_news(belief, command) else None


def _is_search(belief, command):
    """First visit or opening (or examination, where one stands already) while something has to be found."""
    verb, names = command.split(" ", 1)[0], NAME.findall(command)
    if not missing(belief) or not names or names[0] not in belief.beside or names[0] in belief.searched:
        return False
    return (verb in ("go", "examine") and names[0] not in belief.visited | belief.closed) or verb == "open"


def _undoes(belief, command):
    """Takes back a step that the goal needed: object out of place, state lost, hand filled, door shut."""
    verb, names = command.split(" ", 1)[0], NAME.findall(command)
    is_goals = bool(names) and type_of(names[0]) == belief.goal.object
    if verb == "take":
        return _is_placed(belief, *names) if is_goals else bool(wanted(belief))
    if verb == "move":
        return is_goals
    if verb in ("heat", "cool"):
        undone, _, _ = TREATED.get(belief.goal.task_type, UNTREATED)
        return is_goals and {verb, undone} == {"heat", "cool"} and is_treated(belief, names[0])
    return verb == "close" and any(place == names[0] and step.startswith(("take", "move"))
                                   for place, step in steps_now(belief))


def _brings_no_news(belief, command):
    """Goes, looks, opens or treats again where the answer is known."""
    verb, names = command.split(" ", 1)[0], NAME.findall(command)
    if verb in ("go", "open") or (verb == "examine" and names[0] in belief.beside):
        return names[0] in belief.searched
    if verb in ("clean", "heat", "cool"):
        return names[0] in {"clean": belief.clean, "heat": belief.hot, "cool": belief.cool}[verb]
    return command in belief.looked or (verb == "use" and names[0] in belief.lit)


def main(argv=None):
    """Print the expert's win rate on every split, with a prior from 256 training tasks."""
    parser = argparse.ArgumentParser("python -m envs.alfred.expert", allow_abbrev=False,
                                     description=main.__doc__)
    parser.add_argument("--games", default="",
                        help="real ALFWorld games, folder or .jsonl.gz; empty: generated rooms")
    options = parser.parse_args(argv)
    try:
        tasks = Tasks(options.games, "all", seed=0)
        training, game, max_turns = tasks.train("all", 0, 256), Game(), 50 if options.games else 30
        prior = learn_prior(training)
        for split in ("train", "dev", "L0", "L1", "L2"):
            played = [demonstrate(game, task, prior, seed=0, mistake_rate=0.0, max_turns=max_turns)
                      for task in (training if split == "train" else tasks.split(split))]
            turns = sum(len(shown.commands) for shown in played) / len(played)
            print(f"{split}: won {sum(shown.won for shown in played)} of {len(played)}, {turns:.1f} turns")
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
