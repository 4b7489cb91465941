"""Any text environment with Gymnasium's interface: `--env gymnasium:ID`; of MODULE:ID, MODULE is imported.

    python gcd.py --env gymnasium:envs.alfred.gym:gcd/Household-v0 --demonstrations 0 --judge-labels dense

ID is what `gymnasium.make` takes. Observations and actions must be text. The seed of `reset` is the task. The
reward of an episode is the sum of the environment's own (`--success-reward 0`). It is won if `info` says so
in its last step, as "won" or "success", or else if it terminated with a positive reward;
info["admissible_commands"] is read too, if it is there. Whatever goes wrong in a call, an exception, a hang,
an observation that is no text or too long, loses the episode, and says why. A slow environment runs in
worker processes (--processes). Left out: an expert and an oracle, which Gymnasium does not have.
"""

import random
import re
from collections import Counter
from contextlib import closing, suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec

from . import Environment as Base
from . import EpisodeLost, Reply, Task
from ._checks import wrong_reply
from ._workers import worker_games

LONGEST = 100_000               # characters of an observation
SPLITS = {"dev": 64, "test": 128}
SAMPLE = 16                     # tasks whose first observations give the small model's vocabulary


class Game:
    """One environment, as a game of this process and as a worker's engine. It is made at its first reset."""

    def __init__(self, settings):
        self.settings, self.name, self.env = settings, f"--env=gymnasium:{settings.id}", None
        self.time_limit_s, self.made = settings.time_limit_s, False

    def reset(self, task, seed=0):
        """Start a task. Every reset has the task's seed: `seed` has no effect.

        ValueError if the environment cannot be made, EpisodeLost if it could be made before.
        """
        if self.env is None:
            try:
                self.env, self.made = make_env(self.settings.id), True
            except ValueError as error:
                if self.made:
                    raise EpisodeLost(str(error)) from error
                raise
        return self._reply("reset", lambda: self.env.reset(seed=task.problem))

    def step(self, command):
        """Carry out a command."""
        return self._reply("step", lambda: self.env.step(command))

    def _reply(self, method, call):
        """The Reply of a call. EpisodeLost, and a new environment at the next reset, if it goes wrong."""
        try:
            observation, *rest, info = call()
            reward, terminated, truncated = rest or (0.0, False, False)
            won = bool(info.get("won", info.get("success", terminated and reward > 0)))
            reply = Reply(observation, tuple(info.get("admissible_commands") or ()), won,
                          bool(terminated or truncated), reward=float(reward),
                          ended=next((name for name, is_so in (("won", won), ("terminated", terminated),
                                      ("truncated", truncated)) if is_so), ""))
            if wrong := wrong_reply(reply):
                raise EpisodeLost(f"{self.name}: {method}: {wrong}")
            if len(observation) > LONGEST:
                raise EpisodeLost(f"{self.name}: {method}: an observation of {len(observation)} "
                                  f"characters; expected at most {LONGEST}")
            return reply
        except KeyboardInterrupt:                            # which ends at once
            raise
        except EpisodeLost:
            self.close()
            raise
        except BaseException as error:                       # another's code may raise anything, or exit
            self.close()
            raise EpisodeLost(f"{self.name}: {method} raised {type(error).__name__}: "
                              f"{' '.join(str(error).split()):.200}") from error

    def close(self):
        """Close the environment; the next reset makes another."""
        env, self.env = self.env, None
        with suppress(Exception):                            # it may be broken
            env.close()


def make_env(name):
    """A new environment. ValueError with the reason if there is none of that ID, or it cannot be made."""
    import gymnasium
    try:
        return gymnasium.make(name, disable_env_checker=True)
    except EpisodeLost:                                      # it took too long
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ValueError(f"--env=gymnasium:{name}: {reason}") from error


def engines(settings):
    """What makes the environment of each game in a worker, see _workers.serve."""
    return lambda: Game(settings)


class Environment(Base):
    """Tasks are seeds: dev and test have their own, training an endless sequence by the run's seed."""

    @dataclass(frozen=True)
    class Settings:
        """Which environment, and where it runs."""
        id: str = field(default="", metadata={"help": "ID of gymnasium.make, or MODULE:ID"})
        processes: int = field(default=0, metadata={
            "help": "worker processes; 0: this process, where only one environment works at a time",
            "low": 0, "high": 999})
        time_limit_s: float = field(default=60.0, metadata={
            "help": "a call of the environment that takes longer loses its episode, its start included "
                    "(not while a small model's vocabulary is gathered)", "low": 0.01})

    free_settings = ("processes", "time_limit_s")
    defaults = {"slots": 16, "success_reward": 0.0, "demonstrations": 0, "judge_demonstrations": 0}
    splits = tuple(SPLITS)
    captions = {"dev": "seeds 0 to 63", "test": "seeds 64 to 191; training has others"}
    noop_message = "No action was given."

    def __init__(self, settings=None, train_types="part", seed=0):
        if settings is None or not settings.id:
            raise ValueError("--env=gymnasium: needs an ID, as in --env gymnasium:ID")
        super().__init__(settings, train_types, seed)

    def make(self, n):
        """n games, on --processes."""
        self.versions()
        if workers := min(n, self.settings.processes):
            return worker_games(n, workers, f"{__name__}:engines", self.settings.time_limit_s,
                                lambda task: task, self.settings)
        return [Game(self.settings) for _ in range(n)]

    def train_tasks(self, types, start, n):
        """Tasks with random seeds below 2^31, none of them a split's."""
        seeds = (random.Random(f"{self.seed} {i}").randrange(1000, 2**31) for i in range(start, start + n))
        return [Task(f"train/{seed}", "train", self.settings.id, seed) for seed in seeds]

    def split_tasks(self, name):
        """All tasks of a split."""
        first = {"dev": 0, "test": SPLITS["dev"]}[name]
        return [Task(f"{name}/{seed}", name, self.settings.id, seed)
                for seed in range(first, first + SPLITS[name])]

    def task_content(self, task):
        """The environment's ID: tasks of two environments have the same seeds."""
        return task.task_type

    def unseen_splits(self):
        """The test split."""
        return ["test"]

    def vocabulary(self):
        """The words of some tasks' first observations and admissible commands, most frequent first."""
        (game,), counts, lost = self.make(1), Counter(), []
        with closing(game):
            for task in self.train_tasks("all", 0, SAMPLE):
                try:
                    reply = game.reset(task)
                except EpisodeLost as error:
                    lost.append(error)
                    continue
                texts = " ".join((reply.observation, *reply.admissible))
                counts.update(re.findall(r" ?[A-Za-z]{2,}", texts))
        if len(lost) == SAMPLE:
            raise lost[0]
        return [word for word, _ in counts.most_common(1000)]

    def description(self):
        """What is played: the environment's ID."""
        return f"gymnasium {self.settings.id}"

    def versions(self):
        """Gymnasium's version. ValueError if it is missing."""
        if not find_spec("gymnasium"):
            raise ValueError("--env=gymnasium: not installed; pip install gymnasium")
        return {"gymnasium": version("gymnasium")}
