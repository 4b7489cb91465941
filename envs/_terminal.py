"""A game on the terminal, for whoever types or a program that pipes: what all players share.

One command a line in, the game's text out, or with --json one Reply a line.

    python -m envs.household --split L0 --seed 3
"""

import json
import os
import sys
from contextlib import closing, contextmanager

from envs import EpisodeLost


def play_in_terminal(parser, argv, task_of, make):
    """Play the task of the parsed options in one environment of make(1), see `at_terminal`."""
    parser.add_argument("--json", action="store_true", help="answer with one JSON object a line")
    options = parser.parse_args(argv)
    with at_terminal(parser):
        task = task_of(options)
        (env,) = make(1)
        with closing(env):
            play(env, task, sys.stdin, as_json=options.json)


@contextmanager
def at_terminal(parser, undecodable="surrogateescape"):
    """Meanwhile commands are read from stdin; undecodable: what becomes of bytes in it that are no text.

    Mistakes end with the parser's error; Ctrl-C, or a reader who goes away, as `head` does, ends the game.
    """
    if sys.stdin is None:
        parser.error("stdin is closed: commands are read from it")
    sys.stdin.reconfigure(errors=undecodable)          # what is no text is no command, either
    try:
        yield
    except KeyboardInterrupt:
        print()
    except (ValueError, OSError, EpisodeLost) as error:
        if isinstance(error, OSError):       # stdout's; Python would complain at its exit too
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            parser.error(str(error))


def play(env, task, commands, as_json):
    """Play the task with one command a line, until there are no more."""
    show(env.reset(task), as_json)
    for command in commands:
        show(env.step(command.rstrip("\n")), as_json)
    if not as_json:
        print()


def show(reply, as_json):
    """Print a reply: as JSON, or the observation and a prompt."""
    if as_json:
        print(json.dumps(reply._asdict()), flush=True)
    else:
        print(reply.observation + ("\nYou have won." if reply.won else ""), end="\n> ", flush=True)
