"""The household game as an OpenEnv environment: a server with many sessions at once, and its client.

    python -m envs.alfred.openenv --games DIR --port 8000 --sessions 64         # without --games: rooms

    from envs.alfred.openenv import Client, Command
    with Client(base_url="http://127.0.0.1:8000").sync() as client:
        result = client.reset(split="train", index=0)
        result = client.step(Command(command=result.observation.admissible[0]))

A session is a WebSocket connection and has a game of its own. Left out: OpenEnv's web page, containers, and
the listing of tasks: `reset` takes a split and an index.

    pip install openenv
"""

import argparse
import random
import sys
from uuid import uuid4

try:
    from openenv.core.client_types import StepResult
    from openenv.core.env_client import EnvClient
    from openenv.core.env_server.http_server import create_fastapi_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State
except ModuleNotFoundError as error:
    what = '"household[openenv]"' if __package__ == "household.alfred" else "openenv"
    why = f"{__package__}.openenv: {error}; pip install {what}"
    raise (SystemExit if __name__ == "__main__" else ModuleNotFoundError)(why) from None

from .game import Game
from .splits import check_positive, find_split


class Command(Action):
    """A command, "go to fridge 1"."""

    command: str


class Turn(Observation):
    """What the game answers. reward: 1 for the command that wins, else 0. done: won, or no turn is left."""

    text: str
    admissible: list[str]      # commands that are possible now, sorted
    won: bool
    task: str                  # the task's id


class Server(Environment):
    """One session's game."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, games="", types="part", max_turns=50):
        """games, types: see splits.find_split."""
        super().__init__()
        check_positive("max_turns", max_turns)
        self.games, self.types, self.max_turns = games, types, max_turns
        self.game, self.reply, self.progress = Game(), None, State()

    def reset(self, seed=None, episode_id=None, split="train", index=None):
        """Start task `index` of the split, by default one drawn by `seed`."""
        tasks = find_split(split, self.games, self.types)
        self.task = tasks[random.Random(seed).randrange(len(tasks)) if index is None else index]
        self.reply = self.game.reset(self.task)
        self.progress = State(episode_id=episode_id or str(uuid4()), step_count=0)
        return self._turn(0.0)

    def step(self, action, timeout_s=None):
        """Carry out a command. A game that is over ignores it: the same answer again, with reward 0."""
        if self.reply is None:
            raise ValueError("step: call reset first")
        if self._over():
            return self._turn(0.0)
        self.reply = self.game.step(action.command)
        self.progress.step_count += 1
        return self._turn(float(self.reply.won))

    @property
    def state(self):
        """The episode's id and the number of its turns so far."""
        return self.progress

    def _over(self):
        return self.reply.won or self.progress.step_count >= self.max_turns

    def _turn(self, reward):
        return Turn(text=self.reply.observation, admissible=self.reply.admissible, won=self.reply.won,
                    task=self.task.id, reward=reward, done=self._over())


class Client(EnvClient[Command, Turn, State]):
    """A session on a server: `reset(split=..., index=...)` and `step(Command(command=...))`."""

    def _step_payload(self, action):
        return {"command": action.command}

    def _parse_result(self, payload):
        reward, done = payload.get("reward"), payload.get("done", False)
        return StepResult(Turn(**payload["observation"], reward=reward, done=done), reward, done)

    def _parse_state(self, payload):
        return State(**payload)


def app(sessions=64, **settings):
    """The server as an ASGI application. sessions: how many there may be at once; settings: of Server.

    The training games are read here, so that no session waits for them. ValueError if there are none, or for
    wrong settings.
    """
    check_positive("sessions", sessions)
    Server(**settings)
    find_split("train", settings.get("games", ""), settings.get("types", "part"))
    return create_fastapi_app(lambda: Server(**settings), Command, Turn, max_concurrent_envs=sessions)


def main(argv=None):
    """Serve until stopped."""
    parser = argparse.ArgumentParser(f"python -m {__package__}.openenv", description=__doc__.splitlines()[0],
                                     allow_abbrev=False)
    parser.add_argument("--games", default="", help="real games: a json_2.1.1 folder or games.jsonl.gz")
    parser.add_argument("--types", default="part", help="task types of the split train: part, all")
    parser.add_argument("--max-turns", type=int, default=50, help="turns of an episode")
    parser.add_argument("--sessions", type=int, default=64, help="sessions at once")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0: all")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on")
    options = parser.parse_args(argv)
    import uvicorn  # comes with openenv
    try:
        served = app(options.sessions, games=options.games, types=options.types,
                     max_turns=options.max_turns)
    except ValueError as error:
        parser.error(str(error))
    uvicorn.run(served, host=options.host, port=options.port, log_level="warning")


if __name__ == "__main__":
    sys.exit(main())
