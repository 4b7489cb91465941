"""ALFWorld's text game in pure Python: plays a Problem with ALFWorld's exact texts and admissible commands.

Texts and commands equal those of alfworld 0.4.2 on the TextWorld engine, quirks included: "look" in the
middle of the room sees nothing, and a lamp never switches off. No planner or compiler is needed. Left out:
where problems come from (rooms.py generates them, games.py reads ALFWorld's), experts, and goals outside
ALFWorld's six types.

    python -m envs.household --split L0 --seed 3          # play it
"""

from bisect import insort
from collections import defaultdict

from .. import Reply, Task
from .problem import NOOP_MESSAGE, TREATED, UNTREATED, listing, problem_of

HELP = """Available commands:
  look:                             look around your current location
  inventory:                        check your current inventory
  go to (receptacle):               move to a receptacle
  open (receptacle):                open a receptacle
  close (receptacle):               close a receptacle
  take (object) from (receptacle):  take an object from a receptacle
  move (object) to (receptacle):  place an object in or on a receptacle
  examine (something):              examine a receptacle or an object
  use (object):                     use an object
  heat (object) with (receptacle):  heat an object using a receptacle
  clean (object) with (receptacle): clean an object using a receptacle
  cool (object) with (receptacle):  cool an object using a receptacle
  slice (object) with (object):     slice an object using a sharp object
"""
COMMANDS = str, bytes, bytearray      # types of a command; bytes change nothing, as on the stock engine


def check_commands(commands, dones):
    """ValueError unless these are commands for a batch of games, of which those that are done take any."""
    if not isinstance(commands, (list, tuple)) or len(commands) != len(dones):
        raise ValueError(f"step: expected a list of {len(dones)} commands, got {repr(commands):.60}")
    for i, (command, done) in enumerate(zip(commands, dones)):
        if not done and not isinstance(command, COMMANDS):
            raise ValueError(f"step: commands[{i}]={command!r:.60}: expected text")


class Game:
    """State and rules of one game. Things (o) and receptacles (r) are indices into the problem's tuples."""

    def reset(self, task: Task, seed: int = 0) -> Reply:
        """Start the task's game. The game is deterministic: `seed` is ignored."""
        self.problem = problem_of(task)
        self.receptacles, self.things = self.problem.receptacles, self.problem.things
        self._index_places()
        self._index_goal()
        self._place_things()
        self.here = self.problem.start
        self.holding = None
        self.opened = {r for r, place in enumerate(self.receptacles) if place.openable and place.opened}
        self.cool = {o for o, thing in enumerate(self.things) if thing.cool}
        self.clean, self.hot, self.sliced, self.toggled = set(), set(), set(), set()
        self.treated = {"clean": self.clean, "heat": self.hot, "cool": self.cool}
        around = self._look_around() if not self.reachable[self.here] else self._look()
        return self._reply(f"-= Welcome to TextWorld, ALFRED! =-\n\n{around}\n\n"
                           f"Your task is to: {self.problem.task_desc}.")

    def step(self, command: str) -> Reply:
        """Do a command; one that is not admissible changes nothing. Case matters, outer spaces do not.

        ValueError, before anything changes, for what is not one of COMMANDS.
        """
        if not isinstance(command, COMMANDS):
            raise ValueError(f"command {command!r:.60}: expected text")
        command = str.strip(command) if isinstance(command, str) else ""
        action = self.commands.get(command) or self.go_commands[self.here].get(command)
        if action is None:
            return self._reply(NOOP_MESSAGE)
        method, *arguments = action
        return self._reply(method(*arguments))

    def close(self) -> None:
        """Does nothing: the game has no resources to free."""

    # What is constant during a game

    def _index_places(self):
        """Index by location: the receptacles there, and the "go to" commands, to receptacles elsewhere."""
        self.reachable = defaultdict(list)
        for r, place in enumerate(self.receptacles):
            self.reachable[place.location].append(r)
        self.go_commands = {
            here: {f"go to {place.name}": (self._go, r) for r, place in enumerate(self.receptacles)
                   if place.location != here}
            for here in {*self.reachable, self.problem.start}}

    def _index_goal(self):
        """The receptacles and things that can win: if the goal is to clean, only cleanable things, etc."""
        goal = self.problem.goal
        self.goal_receptacles = [r for r, place in enumerate(self.receptacles)
                                 if place.type == goal.receptacle]
        _, _, needed = TREATED.get(goal.task_type, UNTREATED)
        self.goal_things = {o for o, thing in enumerate(self.things)
                            if thing.type == goal.object and (needed is None or getattr(thing, needed))}
        self.lamps = {o for o, thing in enumerate(self.things)
                      if thing.type == goal.toggle and thing.toggleable}
        self.sliceable = [o for o, thing in enumerate(self.things) if thing.sliceable]

    # What changes during a game

    def _place_things(self):
        """Put all things where they start. `at` is PDDL's objectAtLocation, which take and move change."""
        numbers = {place.name: r for r, place in enumerate(self.receptacles)}
        self.contents = [[] for _ in self.receptacles]
        for o, thing in enumerate(self.things):
            for name in filter(None, (thing.receptacle, *thing.also_in)):
                self.contents[numbers[name]].append(o)
        self.at = [{thing.location} - {-1} for thing in self.things]
        self.taken_from = [set() for _ in self.things]     # receptacles it was taken from and not put back

    def _reply(self, observation):
        """The Reply in the present state, with this observation."""
        self.commands = self._local_commands()
        won = self._won()
        return Reply(observation, sorted([*self.go_commands[self.here], *self.commands]), won, won)

    def _local_commands(self):
        """The admissible commands except "go to": {command: (method, its arguments...)}."""
        commands = {"help": (self._help,), "inventory": (self._inventory,), "look": (self._look,)}
        for r in self.reachable[self.here]:
            self._add_receptacle_commands(commands, r)
        if self.holding is not None:
            self._add_object_commands(commands)
        return commands

    def _add_receptacle_commands(self, commands, r):
        place = self.receptacles[r]
        commands[f"examine {place.name}"] = (self._examine_receptacle, r)
        if place.openable:
            verb = "close" if r in self.opened else "open"
            commands[f"{verb} {place.name}"] = (self._close if r in self.opened else self._open, r)
        open_now = not place.openable or r in self.opened
        for o in self.contents[r]:
            thing = self.things[o]
            if thing.toggleable:                           # even in a closed receptacle, as the stock engine
                commands[f"use {thing.name}"] = (self._use, o)
            if open_now and thing.pickupable and self.holding is None:
                commands[f"take {thing.name} from {place.name}"] = (self._take, o, r)
        if open_now and self.holding is not None and self.things[self.holding].type in place.accepts:
            commands[f"move {self.things[self.holding].name} to {place.name}"] = (self._put, r)

    def _add_object_commands(self, commands):
        """Add the commands that use the thing in the player's hand.

        No other thing can be examined. The PDDL domain means to allow things in sight too, but a stray comma
        there ("?l - location, ?r") names a type that has no objects.
        """
        thing = self.things[self.holding]
        commands[f"examine {thing.name}"] = (self._examine_thing, self.holding)
        for r in self.reachable[self.here]:
            place = self.receptacles[r]
            for verb, appliance, able in TREATED.values():
                if getattr(thing, able) and place.type == appliance:
                    commands[f"{verb} {thing.name} with {place.name}"] = (self._treat, verb, r)
        if thing.type in ("knife", "butterknife"):
            for o in self.sliceable:
                if self.here in self.at[o]:
                    commands[f"slice {self.things[o].name} with {thing.name}"] = (self._slice, o)

    def _won(self):
        goal = self.problem.goal
        if goal.task_type == "look_at_obj_in_light":
            lit = any(o in self.lamps and o in self.toggled
                      for r in self.reachable[self.here] for o in self.contents[r])
            return lit and self.holding in self.goal_things
        verb, _, _ = TREATED.get(goal.task_type, UNTREATED)
        treated = self.treated.get(verb, self.goal_things)
        needed = 2 if goal.task_type == "pick_two_obj_and_place" else 1
        return any(sum(o in self.goal_things and o in treated for o in self.contents[r]) >= needed
                   for r in self.goal_receptacles)

    # The commands: each changes the state and returns the observation

    def _help(self):
        return HELP

    def _inventory(self):
        if self.holding is None:
            return "You are not carrying anything."
        return f"You are carrying: {listing([self.things[self.holding].name])}."

    def _look_around(self):
        names = [place.name for place in self.receptacles]
        return f"You are in the middle of a room. Looking quickly around you, you see {listing(names)}."

    def _look(self):
        """The receptacles here, and what was taken from one of them and put into another one here."""
        reachable = self.reachable[self.here]
        if not reachable:          # the engine looks for receptacles at the player's location only
            return "You are in the middle of a room. Looking quickly around you, you see nothing."
        facing = listing([self.receptacles[r].name for r in reachable], article="")
        nearby = [thing.name for o, thing in enumerate(self.things) if self.here in self.at[o]
                  for r in reachable if r in self.taken_from[o]]
        return f"You are facing the {facing}. Next to it, you see {listing(nearby)}."

    def _go(self, r):
        self.here = self.receptacles[r].location
        return f"You arrive at {self.receptacles[r].name}. {self._examine_receptacle(r)}"

    def _open(self, r):
        self.opened.add(r)
        return f"You open the {self.receptacles[r].name}. {self._examine_receptacle(r)}"

    def _close(self, r):
        self.opened.remove(r)
        return f"You close the {self.receptacles[r].name}."

    def _take(self, o, r):
        self.contents[r].remove(o)
        self.taken_from[o].add(r)
        self.at[o].discard(self.here)
        self.holding = o
        return f"You pick up the {self.things[o].name} from the {self.receptacles[r].name}."

    def _put(self, r):
        o, self.holding = self.holding, None
        if o not in self.contents[r]:      # a thing listed in two receptacles stays in one when it is taken
            insort(self.contents[r], o)
        self.taken_from[o].discard(r)
        self.at[o].add(self.here)
        return f"You move the {self.things[o].name} to the {self.receptacles[r].name}."

    def _use(self, o):
        self.toggled.add(o)
        return f"You turn on the {self.things[o].name}."

    def _treat(self, verb, r):
        if verb != "clean":                                # hot or cool, not both
            self.hot.discard(self.holding)
            self.cool.discard(self.holding)
        self.treated[verb].add(self.holding)
        return f"You {verb} the {self.things[self.holding].name} using the {self.receptacles[r].name}."

    def _slice(self, o):
        self.sliced.add(o)
        return f"You sliced the {self.things[o].name} with the {self.things[self.holding].name}."

    def _examine_receptacle(self, r):
        place = self.receptacles[r]
        if place.openable and r not in self.opened:
            return f"The {place.name} is closed."
        seen = listing([self.things[o].name for o in self.contents[r]])
        if place.openable:
            return f"The {place.name} is open. In it, you see {seen}."
        return f"On the {place.name}, you see {seen}."

    def _examine_thing(self, o):
        thing = self.things[o]
        if thing.holds_things:
            return f"This is a normal {thing.name}. In it, you see {listing(thing.holding)}."
        warmth = "hot" if o in self.hot else "cool" if o in self.cool else ""
        state = " and ".join(filter(None, (warmth, "clean" if o in self.clean else "")))
        if state:
            sliced = " sliced" if o in self.sliced else ""
            state = "cold" if state == "cool" and not sliced else state
            return f"This is a {state}{sliced} {thing.name}."
        if o in self.toggled:
            return f"This {thing.name} is on."
        if o in self.sliced:
            return f"This is a sliced {thing.name}."
        return f"There's nothing special about {thing.name}."
