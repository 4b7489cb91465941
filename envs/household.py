"""ALFWorld's text game in pure Python, on generated rooms or on ALFWorld's own games.

The rules are in alfred/game.py, the generated rooms in alfred/rooms.py, the reader of real games in
alfred/games.py, expert and oracle in alfred/expert.py. alfworld.py plays the same tasks on the original
engine. Other training stacks use the game through alfred/tw_env.py, ALFWorld's own interface, alfred/gym.py,
alfred/trl.py, alfred/openenv.py or alfred/vector.py: docs/household.md.

    python -m envs.household --split L0 --seed 3          # play a generated room, one command a line
    python -m envs.household --game game.tw-pddl --json   # play an ALFWorld game, one JSON reply a line
    python -m envs.household download                     # get ALFWorld's games, see alfred/download.py
"""

import argparse
import sys
from dataclasses import dataclass, field
from functools import cached_property

from . import Environment as Base
from . import MessageLengths
from ._terminal import play_in_terminal
from .alfred import expert, games, rooms, splits
from .alfred.game import Game
from .alfred.games import PROGRAM
from .alfred.problem import NOOP_MESSAGE
from .alfred.tw_env import AlfredTWEnv

__all__ = ["AlfredTWEnv", "Environment"]

PRIOR = 5_000_000, 400     # training tasks that the expert's prior is counted over: first index, number


class Environment(Base):
    """Household tasks in pure Python, tens of thousands of turns a second on one core."""

    @dataclass(frozen=True)
    class Settings:
        """Where the games come from."""
        games: str = field(default="", metadata={
            "help": "real ALFWorld games: a json_2.1.1 folder or games.jsonl.gz; empty: generated rooms"})
        rearranged: bool = field(default=False, metadata={
            "help": "RL plays two in three games rearranged from the start, as demonstrations and DAgger "
                    "always do, not only after its first pass over the games",
            "needs": (lambda values: bool(values["games"]), "only with --games")})

    captions = splits.CAPTIONS
    sources = ("games",)
    noop_message = NOOP_MESSAGE
    search_verbs = ("go", "open", "examine", "look")
    _rearranges = True         # can play real games rearranged

    def __init__(self, settings=None, train_types="part", seed=0):
        super().__init__(settings, train_types, seed)
        when = "never" if not self._rearranges else "always" if self.settings.rearranged else "later"
        self._tasks = splits.Tasks(self.settings.games, train_types, seed, when)
        if self.settings.games:
            self.captions = self.captions | splits.OF_REAL_GAMES

    def make(self, n):
        """n games that can be played at the same time."""
        return [Game() for _ in range(n)]

    def train_tasks(self, types, start, n):
        """n training tasks, from index `start`; see splits.Tasks."""
        return self._tasks.train_tasks(types, start, n)

    def split_tasks(self, name):
        """All tasks of a split, see splits.Tasks."""
        return self._tasks.split_tasks(name)

    def unseen_splits(self):
        """The splits that fit this training, see splits.Tasks."""
        return self._tasks.unseen_splits()

    def vocabulary(self):
        """The phrases of the game's texts, and the names in 400 real games or in generated rooms."""
        if self.settings.games:
            sample = self._tasks.original_tasks("all", 0, 400)
            return rooms.phrases(numbered=False) + games.numbered_names(sample)
        return rooms.phrases()

    def message_lengths(self):
        """Those of real games; generated rooms are smaller."""
        return MessageLengths("alfworld") if self.settings.games else None

    def description(self):
        """What is played: generated rooms or real games."""
        return "real ALFWorld games, household engine" if self.settings.games else "generated rooms"

    def warning(self):
        """That results on generated rooms, which are smaller than ALFWorld's, are not ALFWorld scores."""
        return "" if self.settings.games else "Numbers on generated rooms are not ALFWorld scores."

    def task_content(self, task):
        """A real game's text; a rearranged game's task, receptacles and things; "" for a generated room."""
        if hasattr(task.problem, "pddl"):
            return f"{task.problem.task_desc}\n{task.problem.pddl}"
        things = (f"{thing.name} in {thing.receptacle}" for thing in task.problem.things)
        places = (place.name for place in task.problem.receptacles)
        return "\n".join([task.problem.task_desc, *places, *things]) if self.settings.games else ""

    @cached_property
    def _searcher(self):
        """The search expert; its prior is counted once, at the first use."""
        try:
            tasks = self.train_tasks("all", *PRIOR)
        except ValueError as error:
            raise ValueError(f"{error}; the expert's counts of where things are need it") from None
        return expert.Expert(tasks)

    def expert(self, games):
        """The search expert. It always plays its own pure Python game, so `games` are not used."""
        return self._searcher

    def online_expert(self, task, seed):
        """The search expert following another player of this task: it needs only the observations."""
        return self._searcher.online_expert(task, seed)

    def oracle(self, observations, commands):
        """Label each command by what was known when it was given, see expert.oracle_labels."""
        return expert.oracle_labels(observations, commands)

    @staticmethod
    def note(settings):
        """Which task types the cold start saw, since L2's are only unseen if it left them out."""
        if settings.get("train_types") == "all":
            return ""                                              # no task type is called unseen then
        return {"all": "The cold start sees all six task types, the two of L2 that RL never trains on "
                       "included.",
                "part": "The cold start sees the four task types that RL trains on, none of L2's two.",
                }.get(settings.get("cold_start_types"), "")


# Command line

def main(argv=None):
    """Play one task on the terminal, or download ALFWorld's games."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["download"]:
        from .alfred import download
        return download.main(argv[1:], f"{PROGRAM} download")
    parser = argparse.ArgumentParser(PROGRAM, description="Play the household text game.", allow_abbrev=False,
                                     epilog=f"{PROGRAM} download --help: get ALFWorld's games")
    parser.add_argument("--split", default="L0", help="split of the generated room")
    parser.add_argument("--seed", type=int, default=0, help="number of the generated room in its split")
    parser.add_argument("--game", help="play this game.tw-pddl file instead of a generated room")
    play_in_terminal(parser, argv, chosen_task, Environment().make, hint="(help: the commands; Ctrl-D: end)")


def chosen_task(options):
    """The task that the command line names."""
    if options.game is not None:
        return games.load_game(options.game)
    try:
        return rooms.task(options.split, options.seed)
    except ValueError as error:
        raise ValueError(f"--split={options.split} --seed={options.seed}: {error}") from None


if __name__ == "__main__":
    main()
