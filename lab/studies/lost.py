"""Failure analysis of a household agent: which commands are refused and why, and how episodes are lost.

Each model plays every game of a split once. The expert's `Belief` follows each episode: it contains what the
observations have revealed. A refusal is counted by the first thing that is wrong with the command:

    python -m lab.studies.lost --models committed=lab/results/alfworld_model --split dev \
        --games ../shared/data/alfworld/games.jsonl.gz --max-turns 30 --out lab/results/lost_alfworld.md

All other flags are gcd.py's, those the models were trained with. Left out: other environments.
"""

import argparse
import shlex
import sys
from collections import Counter
from pathlib import Path

from envs.alfred.expert import NAME, Belief
from envs.alfred.problem import type_of
from infra import files
from infra.streams import stream
from lab.bench.intervals import markdown
from lab.bench.study import add_dirty
from lab.studies.common import load_actor
from rollout import EpisodeSpec

TEMPERATURE = 0.4
# Why a command is refused, in the order of testing, and how an episode is lost
REASONS = ("not a command of the game", "names something that is not in the room",
           "goes to where it already is", "goes to a receptacle that is already within reach",
           "is not at the receptacle", "the receptacle is closed", "already holds an object",
           "does not hold the object", "the object is elsewhere", "another object of this type is here",
           "the object is not here", "another reason")
LOSSES = ("never saw the object", "saw it and never took it", "took it and did not finish")


def reason(belief, command):
    """Why the game refuses a command, one of REASONS, as far as the observations so far determine it."""
    verb, names = command.split(" ", 1)[0], NAME.findall(command)
    item, receptacle = (names[0], names[-1]) if len(names) == 2 else (None, *names[:1], None)[:2]
    if verb not in ("go", "take", "move", "open", "close", "clean", "heat", "cool", "use", "examine"):
        return REASONS[0]
    if receptacle is None or verb in ("take", "move", "clean", "heat", "cool") and item is None:
        return REASONS[0]
    if receptacle not in belief.colocated:
        return REASONS[1] if receptacle not in belief.where and receptacle != belief.holding else REASONS[4]
    if verb == "go":
        return REASONS[2] if receptacle == belief.at else REASONS[3]
    if not belief.is_near(receptacle):
        return REASONS[4]
    if receptacle in belief.closed and verb in ("take", "move"):
        return REASONS[5]
    if verb == "take":
        return reason_of_take(belief, item, receptacle)
    if verb in ("move", "clean", "heat", "cool") and belief.holding != item:
        return REASONS[7]
    return REASONS[-1]


def reason_of_take(belief, item, receptacle):
    """Why the game refuses to take an object from the receptacle at hand, one of REASONS."""
    if belief.holding:
        return REASONS[6]
    if belief.where.get(item, receptacle) != receptacle:
        return REASONS[8]
    kinds = [type_of(name) for name, where in belief.where.items() if where == receptacle]
    return REASONS[9] if type_of(item) in kinds else REASONS[10]


def failures_of(episode):
    """Counts of an episode, {name: count}.

    The names: "turns"; "refused"; "repeated", refusals of a command that was refused before in the episode;
    the reason of the first refusal; and, of a lost episode, one of LOSSES.
    """
    turns = episode.turns
    belief, found, refused, taken = Belief(turns[0].observation), Counter(), set(), False
    answers = [turn.observation for turn in turns[1:]] + [episode.final_observation]
    for turn, answer in zip(turns, answers, strict=True):
        command = turn.action or ""
        found["turns"] += 1
        if turn.valid:
            belief.update(command, answer)
            taken = taken or type_of(belief.holding or "") == belief.goal.object
            continue
        found["refused"] += 1
        found["repeated"] += command in refused
        if not refused:
            found[reason(belief, command)] += 1
        refused.add(command)
    if not episode.won:
        seen = taken or any(type_of(name) == belief.goal.object for name in belief.where)
        found[LOSSES[seen + taken]] += 1
    return found


def column(player, tasks, temperature):
    """A model's column of the table, in the order of `ROWS`, as texts."""
    specs = [EpisodeSpec(task, i, stream(0, i), i) for i, task in enumerate(tasks)]
    episodes = player.play(specs, temperature)
    found = sum(map(failures_of, episodes), Counter())

    def share(part, total):
        return f"{100 * part / total:.1f}" if total else "–"

    n = len(episodes)
    return [str(n), share(sum(e.won for e in episodes), n), share(found["refused"], found["turns"]),
            share(found["repeated"], found["refused"]),
            *(share(found[name], n) for name in (*REASONS, *LOSSES))]


ROWS = ("games, each played once", "won, % of episodes", "refused, % of turns",
        "of these, a command refused before in the episode, %",
        *(f"first refused, % of episodes: {reason}" for reason in REASONS),
        *(f"lost, % of episodes: {loss}" for loss in LOSSES))


def main(argv=None):
    """Play, print the table, and write it to --out, if given."""
    parser = argparse.ArgumentParser("python -m lab.studies.lost", allow_abbrev=False,
                                     description="How a household agent fails; all other flags are gcd.py's.")
    parser.add_argument("--models", required=True, help="NAME=FOLDER,NAME=FOLDER")
    parser.add_argument("--split", default="dev", help="split whose games are played")
    parser.add_argument("--out", default="", help="Markdown file to write")
    add_dirty(parser)
    options, flags = parser.parse_known_args(argv)
    if any(flag.partition("=")[0] == "--temperature" for flag in flags):
        parser.error(f"--temperature: games are played at {TEMPERATURE:g}")
    columns, names = [], []
    try:
        commit = files.clean_commit(options.dirty or not options.out)
        for pair in options.models.split(","):
            name, _, folder = pair.partition("=")
            if not folder:
                raise ValueError(f"--models={options.models}: expected NAME=FOLDER,NAME=FOLDER")
            player = load_actor(folder, flags)
            tasks = player.config.environment.split_tasks(options.split)
            columns.append(column(player, tasks, TEMPERATURE))
            names.append(name)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    command = shlex.join(["python", "-m", "lab.studies.lost", *(sys.argv[1:] if argv is None else argv)])
    rows = [[row, *cells] for row, cells in zip(ROWS, zip(*columns), strict=True)]
    lines = [f"`{command}`, commit {commit}", "",
             markdown([f"{options.split}, temperature {TEMPERATURE:g}", *names], rows)]
    text = "\n".join(lines)
    if options.out:
        files.write_text(Path(options.out), text)
    print(text)


if __name__ == "__main__":
    main()
