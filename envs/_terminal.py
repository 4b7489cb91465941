"""A game on the terminal: what the players of all environments share, and what makes text safe to print.

Commands are read from stdin, one a line, typed or piped. The game's text is printed or, with --json, one
Reply a line.

    python -m envs.household --split L0 --seed 3
"""

import json
import os
import sys
from contextlib import closing, contextmanager, redirect_stderr, redirect_stdout, suppress

from . import EpisodeLost

# What a terminal would obey: C0 and C1 controls, with ESC; what reverses text: bidi embeddings and isolates
OBEYED = {*range(0x20), *range(0x7f, 0xa0), *range(0x202a, 0x202f), *range(0x2066, 0x206a)}
ESCAPES = {code: f"\\u{code:04x}" for code in OBEYED - {ord("\n"), ord("\t")}}      # so that JSON stays JSON


def printable(text):
    """The text with what a terminal would obey instead of showing it as JSON's escapes: ESC is \\u001b.

    Line ends and tabs stay, and so does all other text.
    """
    return text.translate(ESCAPES)


class StdoutError(Exception):
    """What is printed cannot be written, to a full disk for instance."""


class Printed:
    """A wrapper of an output stream (None: there is none) that writes text as `printable`, line by line.

    What the stream cannot encode is escaped as well. What cannot be written, as the stream is closed, or its
    terminal, its pipe or the room on its disk is gone, is dropped. fail: then called with the OSError, and
    all that follows is dropped, too; None: later text is tried again, as a disk may have room again.
    """

    def __init__(self, stream, fail=None):
        self.stream, self.fail = stream, fail

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text):
        """Write the text."""
        encoding = getattr(self.stream, "encoding", None) or "utf-8"
        self.attempt("write", printable(text).encode(encoding, "backslashreplace").decode(encoding))
        if "\n" in text:
            self.flush()
        return len(text)

    def flush(self):
        """Flush the stream."""
        self.attempt("flush")

    def attempt(self, method, *arguments):
        """Call this method of the stream."""
        with suppress(ValueError, AttributeError):                  # it is closed; there is none
            try:
                getattr(self.stream, method)(*arguments)
            except OSError as error:
                self.drop()
                if self.fail:
                    self.fail(error)

    def drop(self):
        """Write what is buffered to the null device: Python would report it when it exits."""
        with suppress(OSError):
            own, null = self.stream.fileno(), os.open(os.devnull, os.O_WRONLY)
            kept = os.dup(own)
            os.dup2(null, own)
            try:
                self.stream.flush()
            finally:
                if self.fail is None:                               # else it goes there from now on
                    os.dup2(kept, own)
                os.close(kept)
                os.close(null)


def stop_printing(error):
    """End the program if the reader of stdout is gone; StdoutError for any other error."""
    if isinstance(error, BrokenPipeError):
        sys.exit(0)
    raise StdoutError(f"standard output: {error.strerror}")


@contextmanager
def printed(program):
    """Context in which all that is printed is `printable`, on a terminal or not: a log is read on one later.

    A reader of stdout that closes it, as `head` does, ends the program quietly with status 0. Any other error
    of stdout, such as a full disk, ends it with one line and status 2.
    """
    with (redirect_stdout(Printed(sys.stdout, stop_printing)) as stdout,
          redirect_stderr(Printed(sys.stderr))):
        try:
            try:
                yield
            finally:
                stdout.flush()
        except StdoutError as error:
            print(f"{program}: error: {error}", file=sys.stderr)
            sys.exit(2)


def play_in_terminal(parser, argv, task_of, make, hint=""):
    """Parse `argv` and play the task task_of(options) in a game of make(1), see `terminal_session`.

    hint: printed first if a person types.
    """
    parser.add_argument("--json", action="store_true", help="answer with one JSON object a line")
    with terminal_session(parser):
        options = parser.parse_args(argv)
        task = task_of(options)
        (game,) = make(1)
        with closing(game):
            play(game, task, sys.stdin, options.json, hint)


@contextmanager
def terminal_session(parser, undecodable="surrogateescape"):
    """Context, see `printed`, in which commands are read from stdin. undecodable: as `errors` of `open`.

    A ValueError, OSError or EpisodeLost ends the program with the parser's error. Ctrl-C ends the session.
    """
    with printed(parser.prog):
        if sys.stdin is None:
            parser.error("stdin is closed: commands are read from it")
        sys.stdin.reconfigure(errors=undecodable)          # invalid bytes: a refused command, no exception
        try:
            yield
        except KeyboardInterrupt:
            print()
        except (ValueError, OSError, EpisodeLost) as error:
            parser.error(str(error))


def play(game, task, commands, as_json, hint=""):
    """Play the task with these commands, one a line, until they end; if a person types them, the game's end
    ends them. A program's are all answered.
    """
    typed = commands.isatty() and not as_json
    if typed and hint:
        print(hint)
    show(game.reset(task), as_json)
    for command in commands:
        reply = game.step(command.rstrip("\n"))
        over = typed and reply.done
        show(reply, as_json, "\n" if over else "\n> ")
        if over:
            return
    if not as_json:
        print()


def show(reply, as_json, end="\n> "):
    """Print a reply: as JSON, or the observation and `end`, a prompt."""
    if as_json:
        print(json.dumps(reply._asdict()), flush=True)
    else:
        print(reply.observation + ("\nYou have won." if reply.won else ""), end=end, flush=True)
