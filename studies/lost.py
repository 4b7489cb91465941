"""Where a household agent loses: what was refused and why, and how the episodes ended that it did not win.

Each model plays every game of a split once; beside it goes the expert's `Belief`, which knows what the texts
have said. A refusal is put down to the first thing that is wrong with the command:

    python -m studies.lost --models small=runs/a/checkpoint,large=runs/b/checkpoint --split dev \
        --games ../shared/data/alfworld/games.jsonl.gz --max-turns 30 --out results/lost_alfworld.md

Other flags are gcd.py's, those that the models were made with. Left out: other worlds.
"""

import argparse
import math
import shlex
import sys
from collections import Counter
from pathlib import Path

from bench.intervals import markdown
from envs.alfred.expert import NAME, Belief
from envs.alfred.problem import type_of
from rollout import Seat
from run import files
from run.parallel import stream
from studies.common import actor

# Why a command is refused, in the order in which it is looked at, and how an episode is lost
REFUSED = ("no command of the game", "names what is not in the room", "goes where it is",
           "goes where nothing new can be reached", "is not at the place", "the place is closed",
           "holds something already", "does not hold the thing", "the thing lies elsewhere",
           "another of its kind lies here", "the thing is not here", "for another reason")
LOST = ("never saw the thing", "saw it and never took it", "took it and did not finish")


def reason(belief, command):
    """Why the game refuses a command, one of REFUSED, as far as the texts before let one know."""
    verb, names = command.split(" ", 1)[0], NAME.findall(command)
    thing, place = (names[0], names[-1]) if len(names) == 2 else (None, *names[:1], None)[:2]
    if verb not in ("go", "take", "move", "open", "close", "clean", "heat", "cool", "use", "examine"):
        return REFUSED[0]
    if place is None or verb in ("take", "move", "clean", "heat", "cool") and thing is None:
        return REFUSED[0]
    if place not in belief.beside:
        return REFUSED[1] if place not in belief.where and place != belief.held else REFUSED[4]
    if verb == "go":
        return REFUSED[2] if place == belief.at else REFUSED[3]
    if not belief.is_near(place):
        return REFUSED[4]
    if place in belief.closed and verb in ("take", "move"):
        return REFUSED[5]
    if verb == "take":
        return why_not_taken(belief, thing, place)
    if verb in ("move", "clean", "heat", "cool") and belief.held != thing:
        return REFUSED[7]
    return REFUSED[-1]


def why_not_taken(belief, thing, place):
    """The same of a thing that cannot be taken from where one stands."""
    if belief.held:
        return REFUSED[6]
    if belief.where.get(thing, place) != place:
        return REFUSED[8]
    kinds = [type_of(name) for name, where in belief.where.items() if where == place]
    return REFUSED[9] if type_of(thing) in kinds else REFUSED[10]


def looked_through(episode):
    """Of an episode: {what: count} of "turns", "refused", "again" (the same command was refused before), the
    reason of the first refusal, and how it was lost."""
    turns = episode.turns
    belief, found, refused, taken = Belief(turns[0].observation), Counter(), set(), False
    answers = [turn.observation for turn in turns[1:]] + [episode.final_observation]
    for turn, answer in zip(turns, answers, strict=True):
        command = turn.action or ""
        found["turns"] += 1
        if turn.valid:
            belief.update(command, answer)
            taken = taken or type_of(belief.held or "") == belief.goal.object
            continue
        found["refused"] += 1
        found["again"] += command in refused
        if not refused:
            found[reason(belief, command)] += 1
        refused.add(command)
    if not episode.won:
        seen = taken or any(type_of(name) == belief.goal.object for name in belief.where)
        found[LOST[seen + taken]] += 1
    return found


def column(player, tasks, temperature):
    """A model's numbers, in the order of `ROWS`, as text."""
    seats = [Seat(task, i, stream(0, i), i) for i, task in enumerate(tasks)]
    episodes = player.play(seats, temperature)
    found = sum(map(looked_through, episodes), Counter())

    def share(part, whole):
        return f"{100 * part / whole:.1f}" if whole else "–"

    n = len(episodes)
    return [share(sum(e.won for e in episodes), n), share(found["refused"], found["turns"]),
            share(found["again"], found["refused"]), *(share(found[why], n) for why in (*REFUSED, *LOST))]


ROWS = ("won, % of episodes", "refused, % of turns", "of these, a command refused before in the episode, %",
        *(f"first refused, % of episodes: {why}" for why in REFUSED),
        *(f"lost, % of episodes: {how}" for how in LOST))


def main(argv=None):
    """Play, print the table, and write it where that is asked for."""
    parser = argparse.ArgumentParser("python -m studies.lost", allow_abbrev=False,
                                     description="Where a household agent loses; other flags are gcd.py's.")
    parser.add_argument("--models", required=True, help="NAME=FOLDER,NAME=FOLDER")
    parser.add_argument("--split", default="dev", help="whose games are played")
    parser.add_argument("--temperature", type=float, default=0.4, help="of sampling")
    parser.add_argument("--out", default="", help="a Markdown file to write")
    options, flags = parser.parse_known_args(argv)
    columns, names = [], []
    if not 0 <= options.temperature < math.inf:
        parser.error(f"--temperature={options.temperature:g}: expected 0 (greedy) or more")
    try:
        for pair in options.models.split(","):
            name, _, folder = pair.partition("=")
            if not folder:
                raise ValueError(f"--models={options.models}: expected NAME=FOLDER,NAME=FOLDER")
            player = actor(folder, flags)
            columns.append(column(player, player.config.world.split(options.split), options.temperature))
            names.append(name)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    command = shlex.join(["python", "-m", "studies.lost", *(sys.argv[1:] if argv is None else argv)])
    rows = [[row, *cells] for row, cells in zip(ROWS, zip(*columns), strict=True)]
    lines = [f"`{command}`, commit {files.commit()}", "",
             *markdown([f"{options.split}, temperature {options.temperature:g}", *names], rows)]
    text = "\n".join(lines)
    if options.out:
        files.write_text(Path(options.out), text)
    print(text)


if __name__ == "__main__":
    main()
