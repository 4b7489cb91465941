"""ALFWorld's text game in pure Python, on generated rooms or ALFWorld's own games: a world without an engine.

The game is alfred/game.py, its rooms alfred/rooms.py, the reader of real games alfred/games.py, expert and
oracle alfred/expert.py: what this world and the real engine's (alfworld.py) share. For whoever trains with
other stacks, the game also stands behind ALFWorld's interface: `from envs.household import AlfredTWEnv`
(alfred/tw_env.py).

    python -m envs.household --split L0 --seed 3          # play a generated room, one command a line
    python -m envs.household --game game.tw-pddl --json   # play an ALFWorld game, one JSON reply a line
"""

import argparse
from dataclasses import dataclass, field
from functools import cached_property

import envs
from envs._terminal import play_in_terminal
from envs.alfred import expert, games, rooms, splits
from envs.alfred.game import Game
from envs.alfred.problem import NOTHING
from envs.alfred.tw_env import AlfredTWEnv

__all__ = ["AlfredTWEnv", "World"]

PRIOR = 5_000_000, 400     # training tasks that the expert's prior is counted over: the first, how many


class World(envs.World):
    """Household tasks in pure Python: no engine, and a core plays tens of thousands of turns a second."""

    @dataclass(frozen=True)
    class Settings:
        """Where the games come from."""
        games: str = field(default="", metadata={
            "help": "real ALFWorld games: a json_2.1.1 folder or games.jsonl.gz; empty: generated rooms"})
        rearranged: bool = field(default=False, metadata={
            "help": "RL plays two in three of them rearranged from the start, not only after one pass, as "
                    "all demonstrations and practice are",
            "needs": (lambda values: bool(values["games"]), "only with --games")})

    captions = splits.CAPTIONS
    nothing = NOTHING
    searches = ("go", "open", "examine", "look")
    rearranges = True          # plays what is made of real games, too

    def __init__(self, settings=None, train_types="part", seed=0):
        super().__init__(settings, train_types, seed)
        when = "never" if not self.rearranges else "always" if self.settings.rearranged else "later"
        self.tasks = splits.Tasks(self.settings.games, train_types, seed, when)

    def make(self, n):
        """n games that can be played at once."""
        return [Game() for _ in range(n)]

    def train(self, types, start, n):
        """n training tasks, see splits.Tasks."""
        return self.tasks.train(types, start, n)

    def split(self, name):
        """Every task of a split, see splits.Tasks."""
        return self.tasks.split(name)

    def unseen(self):
        """The splits that this training leaves unseen, see splits.Tasks."""
        return self.tasks.unseen()

    def words(self):
        """The texts' phrases and the names of things: in 400 real games, or in generated rooms."""
        if self.settings.games:
            return rooms.phrases(numbered=False) + games.names(self.tasks.whole("all", 0, 400))
        return rooms.phrases()

    def games(self):
        """What is played: numbers on generated rooms are not ALFWorld scores."""
        return "real ALFWorld games, household engine" if self.settings.games else "generated rooms"

    def warning(self):
        """Generated rooms are smaller than ALFWorld's."""
        return "" if self.settings.games else "Numbers on generated rooms are not ALFWorld scores."

    def text_of(self, task):
        """The text of a real game; of one rearranged what lies where; a generated room is all in its id."""
        if hasattr(task.problem, "pddl"):
            return f"{task.problem.task_desc}\n{task.problem.pddl}"
        things = (f"{thing.name} in {thing.receptacle}" for thing in task.problem.things)
        places = (place.name for place in task.problem.receptacles)
        return "\n".join([task.problem.task_desc, *places, *things]) if self.settings.games else ""

    @cached_property
    def searcher(self):
        """The search expert; its prior is counted once."""
        return expert.Expert(self.train("all", *PRIOR))

    def expert(self, envs):
        """The search expert; it plays in the pure Python game whatever the engine, so not in `envs`."""
        return self.searcher

    def coach(self, task, seed):
        """The search expert beside a player: it reads what is observed, so any engine will do."""
        return self.searcher.coach(task, seed)

    def oracle(self, observations, commands):
        """What the prefix lets one know of each turn, see expert.oracle_labels."""
        return expert.oracle_labels(observations, commands)

    @staticmethod
    def note(settings):
        """Which task types the cold start saw: it decides what "never trained on" means."""
        if settings.get("train_types") == "all":
            return ""                                              # nothing is called unseen then
        return {"all": "The cold start sees all six task types, the two of L2 that RL never trains on "
                       "included.",
                "part": "The cold start sees the four task types that RL trains on, none of L2's two.",
                }.get(settings.get("cold_start_types"), "")


# The player on the command line

def main(argv=None):
    """Play one task on the terminal."""
    parser = argparse.ArgumentParser("python -m envs.household", description="Play the household text game.",
                                     allow_abbrev=False)
    parser.add_argument("--split", default="L0", help="split of the generated room")
    parser.add_argument("--seed", type=int, default=0, help="number of the generated room in its split")
    parser.add_argument("--game", help="play this game.tw-pddl file instead of a generated room")
    play_in_terminal(parser, argv, chosen_task, lambda n: [Game() for _ in range(n)])


def chosen_task(options):
    """The task that the command line names."""
    if options.game is not None:
        return games.load_game(options.game)
    return rooms.task(options.split, options.seed)


if __name__ == "__main__":
    main()
