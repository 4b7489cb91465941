"""Natural twins: situations in English; a detail of the text decides whether the same command is right.

One turn. "The potato is cold. You can heat the potato or serve the potato." (kind P) and "The potato is hot.
You can ..." (kind N) offer the same two commands. The first of a template's is right in P (it wins with
probability .9, the other with .4) and flawed in N (it wins with .5 - r, the other with .5), as in
lab/envs/twins.py; of each 16 training tasks --p-tasks are P. Each template has four nouns.

The templates have three parts. RL plays TRAINED (task types "part"). OTHER (types "all") are for a cold start
whose questions are not about what RL plays. Of UNTRAINED nothing is ever shown: split "untrained" tells what
carries over. Made for lab/studies/natural_twins.py (arXiv:2509.23870, sections 3.2 to 4). Left out: more than
one turn or two commands.

    python gcd.py --env lab/envs/natural_twins.py --model smollm2 --preset small --prompt plain \
        --judge-labels oracle
"""

import random
from dataclasses import dataclass

from envs import Task
from lab.envs import twins

# (state with [detail of P|detail of N], the command that is right in P, the one that is right in N, nouns)
OTHER = (
    ("The {} is [messy|tidy].", "clean up the {}", "leave the {}", "room garage attic kitchen"),
    ("The {} is [hard|soft].", "warm the {}", "spread the {}", "butter dough honey fudge"),
    ("The {} is [unpeeled|peeled].", "peel the {}", "eat the {}", "orange banana carrot kiwi"),
    ("The {} is [missing|here].", "find the {}", "use the {}", "key map wallet ticket"),
    ("The {} is [rusty|shiny].", "polish the {}", "show the {}", "sword medal coin trophy"),
    ("The {} is [sick|healthy].", "treat the {}", "release the {}", "horse bird sheep fox"),
    ("The {} is [lowered|raised].", "raise the {}", "secure the {}", "flag sail mast anchor"),
    ("The {} is [open|shut].", "shut the {}", "lock the {}", "window hatch cabinet lid"),
    ("The {} is [wrinkled|ironed].", "iron the {}", "wear the {}", "shirt skirt tie blouse"),
    ("The {} is [dim|bright].", "brighten the {}", "watch the {}", "screen stage slide lamp"),
    ("The {} is [overloaded|light].", "lighten the {}", "lift the {}", "backpack basket parcel sack"),
    ("The {} is [uncooked|boiled].", "boil the {}", "drain the {}", "pasta corn cabbage spinach"))
TRAINED = (
    ("The {} is [still cold|already hot].", "heat the {}", "serve the {}", "potato soup egg rice"),
    ("You [need|already hold] a {}.", "take the {}", "use the {}", "cup fork spoon plate"),
    ("The {} is [locked|unlocked].", "unlock the {}", "open the {}", "door chest safe gate"),
    ("The {} is [empty|full].", "fill the {}", "carry the {}", "bucket kettle jug bottle"),
    ("The {} is [dirty|clean].", "wash the {}", "store the {}", "pan bowl pot glass"),
    ("The {} is [off|on].", "start the {}", "watch the {}", "printer oven engine fan"),
    ("The {} is [wet|dry].", "dry the {}", "fold the {}", "towel sheet cloth napkin"),
    ("The {} is [closed|open].", "open the {}", "search the {}", "drawer fridge box closet"),
    ("The {} is [whole|sliced].", "slice the {}", "eat the {}", "bread apple cake melon"),
    ("The {} is [broken|repaired].", "repair the {}", "ride the {}", "bicycle cart scooter sled"),
    ("The {} is [hungry|asleep].", "feed the {}", "leave the {}", "baby dog cat pony"),
    ("The {} is [raw|burnt].", "cook the {}", "discard the {}", "fish steak bacon onion"),
    ("The {} is [unlit|burning].", "light the {}", "guard the {}", "candle fire torch lantern"),
    ("The {} is [thirsty|soaked].", "water the {}", "move the {}", "fern rose cactus tulip"),
    ("The {} is [dull|sharp].", "sharpen the {}", "pack the {}", "knife axe blade saw"),
    ("The {} is [unsigned|signed].", "sign the {}", "mail the {}", "letter form contract check"),
    ("The {} is [unread|read].", "read the {}", "return the {}", "book report novel magazine"),
    ("The {} is [flat|firm].", "inflate the {}", "throw the {}", "tire ball balloon raft"),
    ("The {} is [unpaid|paid].", "pay the {}", "file the {}", "bill invoice fine fee"),
    ("The {} is [loose|tight].", "tighten the {}", "test the {}", "screw bolt knot belt"))
UNTRAINED = (
    ("The {} is [frozen|thawed].", "thaw the {}", "fry the {}", "shrimp chicken beef turkey"),
    ("The {} is [warm|chilled].", "chill the {}", "pour the {}", "juice wine milk cider"),
    ("The {} is [dusty|spotless].", "dust the {}", "ignore the {}", "shelf piano desk mirror"),
    ("The {} is [crooked|straight].", "straighten the {}", "admire the {}", "picture sign painting poster"),
    ("The {} is [packed|unpacked].", "unpack the {}", "stow the {}", "suitcase crate bag trunk"),
    ("The {} is [torn|mended].", "mend the {}", "wear the {}", "coat sock glove scarf"),
    ("The {} is [ripe|green].", "pick the {}", "spare the {}", "plum peach tomato pear"),
    ("The {} is [asleep|awake].", "wake the {}", "greet the {}", "guard guest driver child"),
    ("The {} is [sour|sweet].", "sweeten the {}", "drink the {}", "tea lemonade coffee cocoa"),
    ("The {} is [unplugged|plugged in].", "plug in the {}", "run the {}", "toaster heater mixer vacuum"),
    ("The {} is [blank|painted].", "paint the {}", "hang the {}", "canvas panel board frame"),
    ("The {} is [tangled|smooth].", "untangle the {}", "wind the {}", "rope yarn cable hose"),
    ("The {} is [loaded|unloaded].", "unload the {}", "park the {}", "truck van trailer wagon"),
    ("The {} is [bare|covered].", "cover the {}", "inspect the {}", "sofa grill pool boat"),
    ("The {} is [leaking|sealed].", "seal the {}", "lift the {}", "pipe barrel tank tub"),
    ("The {} is [unwrapped|wrapped].", "wrap the {}", "send the {}", "gift vase toy watch"),
    ("The {} is [ringing|silent].", "answer the {}", "keep the {}", "phone intercom pager radio"),
    ("The {} is [overgrown|trimmed].", "trim the {}", "enjoy the {}", "hedge garden bush vine"),
    ("The {} is [unfinished|finished].", "finish the {}", "post the {}", "card note poem essay"),
    ("The {} is [stale|fresh].", "replace the {}", "taste the {}", "bun cheese salad pie"))
PARTS = {"other": OTHER, "trained": TRAINED, "untrained": UNTRAINED}
NOUNS = 4                              # of a template


@dataclass(frozen=True, slots=True)
class State:
    """A situation: what is seen, and the two commands."""

    kind: str          # "P" or "N"
    detail: str        # the sentence in which the two kinds differ
    flawed: str        # the command that is right in P and flawed in N
    other: str
    swapped: bool      # whether the other command is offered first

    @property
    def commands(self):
        """Both commands, in the order in which they are offered."""
        return [self.other, self.flawed] if self.swapped else [self.flawed, self.other]

    @property
    def observation(self):
        """What is seen."""
        return f"{self.detail} You can {' or '.join(self.commands)}."

    def label(self, command):
        """"good" if the command is one of the two and the other does not win more often, else "bad"."""
        return "good" if command == (self.flawed if self.kind == "P" else self.other) else "bad"


def state(template, noun, kind, swapped=False):
    """The State of a template, a noun's number and a kind."""
    text, flawed, other, nouns = template
    noun = nouns.split()[noun]
    before, details, after = text.replace("[", "]").split("]")
    detail = before + details.split("|")["PN".index(kind)] + after
    return State(kind, *(part.format(noun) for part in (detail, flawed, other)), swapped)


def states_of(part):
    """All states of a part, template by template and noun by noun: P, N, and both with the order swapped."""
    return [state(template, noun, kind, swapped) for template in PARTS[part] for noun in range(NOUNS)
            for swapped in (False, True) for kind in "PN"]


STATES = {one.observation: one for part in PARTS for one in states_of(part)}


class Game(twins.Game):
    """A game of one of two commands, see twins.Game."""

    answers = ("It does not help.", "It helps.")

    def observe(self, problem):
        """Set up a task's state. Returns its observation."""
        self.kind, self.commands = problem.kind, sorted(problem.commands)
        self.flawed, self.others = problem.flawed, [problem.other]
        return problem.observation


def details(episode):
    """The detail alone, for --judge-labels details: "good" in P, "bad" in N, whatever the command."""
    return ["good" if STATES[turn.observation].kind == "P" else "bad" for turn in episode.turns]


class Environment(twins.Environment):
    """Natural twins. Types "part" are TRAINED, of 16 tasks --p-tasks in P; types "all" are OTHER, half P."""

    _game = Game
    defaults = {"max_turns": 1, "context": 256, "hidden_size": 64, "layers": 2}
    splits = ("trained", "untrained")
    captions = {"trained": "situations of the templates that RL trains on",
                "untrained": "situations of templates that nothing was trained on"}
    rules = "You get one command."
    ask = "Answer with it alone."
    labels = {"coins": twins.coins, "details": details}

    def train_tasks(self, types, start, n):
        """n training tasks: a random template, noun and order each; of 16 in a row --p-tasks are P, or 8 for
        types "all", spread evenly.
        """
        part, p_tasks = ("trained", self.settings.p_tasks) if types == "part" else ("other", twins.BATCH // 2)
        return [self._train_task(part, i, "P" if i * p_tasks % twins.BATCH < p_tasks else "N")
                for i in range(start, start + n)]

    def _train_task(self, part, i, kind):
        """Training task i: drawn with the run's seed, the part and i as the seed."""
        rng = random.Random(f"{self.seed} {part} {i}")
        return Task(f"{part}/{i}", "train", kind,
                    state(rng.choice(PARTS[part]), rng.randrange(NOUNS), kind, rng.random() < 0.5))

    def split_tasks(self, name):
        """All situations of a part, half of them P."""
        return [Task(f"{name}/{i}", name, one.kind, one) for i, one in enumerate(states_of(name))]

    def unseen_splits(self):
        """Both: of the first part RL draws at random, of the second nothing is shown."""
        return [*self.splits]

    def vocabulary(self):
        """Every word, with the space before it and, if a sentence or a command begins with it, without."""
        texts = [text for one in STATES.values() for text in (one.observation, *one.commands)]
        texts += [*Game.answers, self.noop_message]
        lines = [text.replace(".", "").split() for text in texts]
        return sorted({token for line in lines for token in (line[0], *(f" {word}" for word in line))})

    def oracle(self, observations, commands):
        """State.label of each command: "bad", too, for one that is not offered."""
        return [STATES[observation].label(command) for observation, command in zip(observations, commands)]
