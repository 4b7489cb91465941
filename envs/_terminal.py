"""A game on the terminal: what the players of all environments share.

Commands are read from stdin, one a line, typed or piped. The game's text is printed or, with --json, one
Reply a line.

    python -m envs.household --split L0 --seed 3
"""

import json
import os
import sys
from contextlib import closing, contextmanager

from envs import EpisodeLost


def play_in_terminal(parser, argv, task_of, make):
    """Parse `argv` and play the task task_of(options) in a game of make(1), see `terminal_session`."""
    parser.add_argument("--json", action="store_true", help="answer with one JSON object a line")
    options = parser.parse_args(argv)
    with terminal_session(parser):
        task = task_of(options)
        (game,) = make(1)
        with closing(game):
            play(game, task, sys.stdin, as_json=options.json)


@contextmanager
def terminal_session(parser, undecodable="surrogateescape"):
    """Context in which commands are read from stdin. undecodable: its error handler, as `errors` of `open`.

    A ValueError, OSError or EpisodeLost ends the program with the parser's error. Ctrl-C ends the session,
    and so does a reader of stdout that closes it, as `head` does.
    """
    if sys.stdin is None:
        parser.error("stdin is closed: commands are read from it")
    sys.stdin.reconfigure(errors=undecodable)          # invalid bytes: a refused command, no exception
    try:
        yield
    except KeyboardInterrupt:
        print()
    except (ValueError, OSError, EpisodeLost) as error:
        if isinstance(error, OSError):       # stdout's: Python would report it again when it exits
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            parser.error(str(error))


def play(game, task, commands, as_json):
    """Play the task with these commands, one a line, until they end."""
    show(game.reset(task), as_json)
    for command in commands:
        show(game.step(command.rstrip("\n")), as_json)
    if not as_json:
        print()


def show(reply, as_json):
    """Print a reply: as JSON, or the observation and a prompt."""
    if as_json:
        print(json.dumps(reply._asdict()), flush=True)
    else:
        print(reply.observation + ("\nYou have won." if reply.won else ""), end="\n> ", flush=True)
