"""Many household games side by side, for a training loop of your own: one command for each, in one call.

    from envs.alfred.vector import Games
    games = Games(64, split="train", group_size=8)       # games=DIR for the real ones
    observations = games.reset()
    observations, rewards, dones = games.step([commands[0] for commands in games.admissible])

All games live in this process: they need no workers. Left out: a model, prompts, and starting a new game in
the place of one that is over before the others are.
"""

from .game import Game, check_commands
from .splits import check_positive, find_split


class Games:
    """n games, played in step.

    tasks, admissible, won, dones: of each game its Task, its admissible commands now, whether it is won, and
    whether it is over, which means won or at the turn limit. split: its tasks; len(split) is their number.
    """

    def __init__(self, n, split="train", games="", types="part", max_turns=50, group_size=1):
        """split, games, types: see splits.find_split. group_size: neighbours that play the same task; it
        divides n.

        ValueError for a split without games and for a number that cannot be right.
        """
        for name, value in (("n", n), ("max_turns", max_turns), ("group_size", group_size)):
            check_positive(name, value)
        if n % group_size:
            raise ValueError(f"group_size={group_size}: expected a divisor of n={n}")
        self.split, self.max_turns, self.group_size = find_split(split, games, types), max_turns, group_size
        self.games, self.next, self.tasks = [Game() for _ in range(n)], 0, None

    def reset(self, tasks=None):
        """Start the next tasks of the split, or these, one for each group: the observations.

        After the last task of the split comes the first one again. ValueError, and no game changes, for
        another number of tasks, and for one that cannot be played.
        """
        groups = len(self.games) // self.group_size
        if tasks is None:
            tasks = [self.split[self.next + i] for i in range(groups)]
            self.next += groups
        elif not isinstance(tasks, (list, tuple)) or len(tasks) != groups:
            raise ValueError(f"reset: expected a list of {groups} tasks, got {repr(tasks):.60}")
        games = [Game() for _ in self.games]                  # a task that cannot be played changes nothing
        replies = [game.reset(tasks[i // self.group_size]) for i, game in enumerate(games)]
        self.games = games
        self.tasks, self.turns = [tasks[i // self.group_size] for i in range(len(replies))], 0
        self.observations = [reply.observation for reply in replies]
        self.admissible = [reply.admissible for reply in replies]
        self.won, self.dones = ([False] * len(replies) for _ in range(2))
        return list(self.observations)

    def step(self, commands):
        """Carry out one command for each game: (observations, rewards, dones), a list of each.

        The reward is 1 for the command that wins and 0 for any other. A game that is over ignores its
        command, which may be None, and repeats its observation. ValueError, before any game moves, for
        another number of commands and for what is not text.
        """
        if self.tasks is None:
            raise ValueError("step: call reset first")
        check_commands(commands, self.dones)
        self.turns += 1
        rewards = [0.0] * len(commands)
        for i, command in enumerate(commands):
            if not self.dones[i]:
                reply = self.games[i].step(command)
                self.observations[i], self.admissible[i] = reply.observation, reply.admissible
                self.won[i], rewards[i] = reply.won, float(reply.won)
                self.dones[i] = reply.won or self.turns >= self.max_turns
        return list(self.observations), rewards, list(self.dones)
