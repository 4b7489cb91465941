"""Compares two evaluations game by game: which is better, which games flipped, and both transcripts of those.

An evaluation is an evaluation.json of a run or of the referee (evaluation.py), with each game's outcomes;
the transcripts are those in episodes.jsonl beside it. Games are the units: with one play a game, the exact
test of McNemar; with several, an interval over the games' shares. Left out: more than two evaluations, and a
correction for many comparisons.

    python -m report compare A.json B.json
    python -m report compare A.json B.json --common        # only the splits, modes and games that both have
    python -m report compare A.json B.json --html compare.html
"""

import argparse
import math
import shutil
import statistics
import textwrap
from dataclasses import dataclass, replace
from itertools import islice, zip_longest
from pathlib import Path

from envs._terminal import printable
from infra import files
from report import page, read

SAME = ("world", "protocol", "max_turns")                # of two evaluations that are compared as they are
# Differences that are printed only; of the last ones, if both files have them, as older ones do not
NAMED = ("games", "seed", "temperature", "instruction", "commit")
CONDITIONS = ("admissible_only", "history", "context", "max_response_tokens", "on_truncation", "dtype",
              "settings", "plugins")
OF_MODELS = ("admissible_only", "context", "dtype", "on_truncation")     # not read by scripts and servers
COLUMN = 48                                              # characters, at least, of a transcript
Z = statistics.NormalDist().inv_cdf(0.975)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A stored evaluation. shares: {split: {mode: {game: (won plays, plays)}}}."""

    path: Path
    name: str
    facts: dict
    shares: dict
    episodes: list


@dataclass(frozen=True, slots=True)
class Difference:
    """B minus A in one split and mode, paired by game."""

    split: str
    mode: str
    games: int
    plays: tuple          # of A, of B
    success: tuple        # mean over games of A's share, and of B's
    mean: float
    half: float | None    # half the 95 % interval of the mean; None below two games, or if all differ alike
    only: tuple | None    # with one play a game: games that only A won, games that only B won
    p: float | None       # McNemar's, then
    flipped: list         # (game, A's (won, plays), B's), largest difference first
    scores: tuple | None = None      # mean of the games' own score of A, and of B, if both played these alone


# Statistics

def mcnemar(b, c):
    """Two-sided p of McNemar's exact test: of b + c games that flipped, b did so in one direction.

        p = min(1, 2 sum_{k <= min(b, c)} C(b + c, k) / 2^(b + c))          1 if none flipped
    """
    n = b + c
    return min(1.0, 2 * sum(math.comb(n, k) for k in range(min(b, c) + 1)) / 2 ** n)


def t_quantile(degrees):
    """The 97.5 % quantile of Student's t, to 0.1 % from 4 degrees of freedom on.

    Cornish and Fisher's expansion (Abramowitz and Stegun 26.7.5); exact for 1, 2 and 3 degrees.
    """
    if degrees < 4:
        return (12.706205, 4.302653, 3.182446)[degrees - 1]
    terms = ((Z**3 + Z) / 4, (5 * Z**5 + 16 * Z**3 + 3 * Z) / 96,
             (3 * Z**7 + 19 * Z**5 + 17 * Z**3 - 15 * Z) / 384,
             (79 * Z**9 + 776 * Z**7 + 1482 * Z**5 - 1920 * Z**3 - 945 * Z) / 92160)
    return Z + sum(term / degrees**power for power, term in enumerate(terms, 1))


def paired(a, b):
    """(mean, half its 95 % t interval) of b - a over games; a, b: shares of the same games in order.

    None for the half below two games, and if all differ alike: no interval comes of no variance.
    """
    d = [y - x for x, y in zip(a, b, strict=True)]
    spread = statistics.stdev(d) if len(d) > 1 else 0.0
    return statistics.fmean(d), t_quantile(len(d) - 1) * spread / math.sqrt(len(d)) if spread else None


# Reading

def load(path):
    """Read an evaluation: a file, or the folder that it is in. ValueError if it keeps no game's outcome."""
    path = path / files.EVALUATION if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    facts = read.checked(files.read_json(path), read.check_evaluation, path)
    if not facts.get("outcomes"):
        raise ValueError(f"{path}: keeps no outcomes of games (an older evaluation, or one that has not "
                         "ended); evaluate again")
    shares = {split: {} for split in facts["outcomes"]}
    for split, entries in facts["outcomes"].items():
        for entry in entries:
            for mode, digits in entry.items():
                if mode not in ("game", "type"):
                    won = shares[split].setdefault(mode, {})
                    won[entry["game"]] = digits.count("1"), len(digits)
    player = facts.get("player") or {}
    name = player.get("name") or (path.resolve().parent.name if path.name == files.EVALUATION else path.stem)
    episodes = files.EPISODES if path.name == files.EVALUATION else f"{path.stem}.{files.EPISODES}"
    stored, _ = read.checked_lines(path.with_name(episodes), read.check_episode)
    return Evaluation(path, str(name), facts, shares, [e for e in stored if e.get("phase") == "evaluation"])


def differences_of(a, b):
    """What makes two evaluations differ in games or protocol, as a list of clauses."""
    found = [f"{key}: {a.facts.get(key)} and {b.facts.get(key)}" for key in SAME
             if a.facts.get(key) != b.facts.get(key)]
    if a.shares.keys() != b.shares.keys():
        found.append(f"splits: {', '.join(sorted(a.shares))} and {', '.join(sorted(b.shares))}")
    hashes = [one.facts.get("games_hash") or {} for one in (a, b)]
    for split in sorted(a.shares.keys() & b.shares.keys()):
        if hashes[0].get(split) != hashes[1].get(split):
            found.append(f"games of {split}: {hashes[0].get(split)} and {hashes[1].get(split)}")
        modes = [sorted(one.shares[split]) for one in (a, b)]
        if modes[0] != modes[1]:
            found.append(f"modes of {split}: {', '.join(modes[0])} and {', '.join(modes[1])}")
        for mode in sorted(a.shares[split].keys() & b.shares[split].keys()):
            games = [one.shares[split][mode] for one in (a, b)]
            if games[0].keys() != games[1].keys():
                found.append(f"games played in {split} {mode}: {len(games[0])} and {len(games[1])}, "
                             f"{len(games[0].keys() & games[1].keys())} of them in both")
    return found


def compare(a, b):
    """A Difference for each split and mode that both have, over the games that both have."""
    found = []
    for split in sorted(a.shares.keys() & b.shares.keys()):
        for mode in (mode for mode in a.shares[split] if mode in b.shares[split]):
            ours, theirs = a.shares[split][mode], b.shares[split][mode]
            games = [game for game in ours if game in theirs]
            if games:
                change = difference(split, mode, [(game, ours[game], theirs[game]) for game in games])
                same = len(ours) == len(theirs) == len(games)
                found.append(replace(change, scores=own_scores(a, b, split, mode) if same else None))
    if not found:
        raise ValueError(f"{a.path} and {b.path}: have no game in common")
    return found


def own_scores(a, b, split, mode):
    """The mean of the games' own score in A and in B; None if one has none."""
    stored = [one.facts.get("splits", {}).get(split, {}).get(mode, {}).get("score_100") for one in (a, b)]
    return tuple(stored) if all(map(files.is_number, stored)) else None


def difference(split, mode, games):
    """The Difference over games, a list of (game, A's (won, plays), B's)."""
    shares = [[won / plays for won, plays in column] for column in list(zip(*games))[1:]]
    mean, half = paired(*shares)
    plays = tuple(sum(n for _, n in column) for column in list(zip(*games))[1:])
    flipped = [(game, one, two) for game, one, two in games if one[0] * two[1] != two[0] * one[1]]
    flipped.sort(key=lambda entry: -abs(entry[1][0] / entry[1][1] - entry[2][0] / entry[2][1]))
    only = p = None
    if plays == (len(games), len(games)):
        only = tuple(sum(entry[1 + i][0] > entry[2 - i][0] for entry in flipped) for i in (0, 1))
        p = mcnemar(*only)
    return Difference(split, mode, len(games), plays, tuple(map(statistics.fmean, shares)), mean, half, only,
                      p, flipped)


# Transcripts

def episode_of(evaluation, change, game, won):
    """A stored episode of a game in the split and mode of a Difference, if possible one that was won (or
    not); None if none is stored.
    """
    found = [episode for episode in evaluation.episodes
             if (episode.get("split"), episode.get("mode", "sampled")) == (change.split, change.mode)
             and episode.get("task_id") == game]
    return next((episode for episode in found if bool(episode.get("won")) == won), next(iter(found), None))


def transcripts(a, b, change, game, one, two):
    """Both transcripts of a flipped game, as lists of texts; [] where none is stored."""
    better = one[0] * two[1] > two[0] * one[1]
    return [transcript(episode_of(evaluation, change, game, won))
            for evaluation, won in ((a, better), (b, not better))]


def transcript(episode):
    """An episode's observations and commands as texts."""
    if episode is None:
        return []
    texts = []
    for number, turn in enumerate(episode.get("turns", []), start=1):
        command = turn.get("action")
        given = f"(no command) {turn.get('response')}" if command is None else command
        texts += [str(turn.get("observation")),
                  f"[{number}] > {given}" + ("" if turn.get("valid") else "   (refused)")]
    return [*texts, str(episode.get("final_observation") or ""), "won" if episode.get("won") else "not won"]


def side_by_side(left, right, width):
    """Two transcripts as lines of two columns, `width` characters each."""
    def lines(texts):
        return [line for text in texts or ["(no transcript is stored)"]
                for part in printable(text).split("\n")
                for line in textwrap.wrap(part, width, drop_whitespace=False) or [""]]

    return "\n".join(f"{one:<{width}} | {two}".rstrip() for one, two
                     in zip_longest(lines(left), lines(right), fillvalue=""))


# As text and as a page

def points(value, sign=""):
    """A share in percentage points."""
    return f"{100 * value:{sign}.1f}"


def sentence(change):
    """A Difference in words: the two numbers, the difference, its interval and the test."""
    text = (f"{change.split} {change.mode}: {points(change.success[0])} and {points(change.success[1])} %, "
            f"difference {points(change.mean, '+')}")
    if change.half is not None:
        text += f" ± {points(change.half)}"
    text += f" points over {change.games} games"
    if change.scores:
        text += f", scores {change.scores[0]:.1f} and {change.scores[1]:.1f}"
    if change.only:
        return text + (f"; only A won {change.only[0]}, only B {change.only[1]}: p = {change.p:.2g} "
                       "(McNemar, exact)")
    return text + f" ({change.plays[0]} and {change.plays[1]} plays; each game counts as one)"


def share(entry):
    """(3, 8) as "3 of 8"; of one play, "won" or "not won"."""
    won, plays = entry
    return ("won" if won else "not won") if plays == 1 else f"{won} of {plays}"


def named_differences(a, b):
    """Differences that do not forbid a comparison, as clauses: who plays, with which prompt and seed."""
    found = [f"A: {a.name} ({a.path})", f"B: {b.name} ({b.path})"]
    read_by_all = {(one.facts.get("player") or {}).get("kind", "model") for one in (a, b)} == {"model"}
    both = [key for key in CONDITIONS if key in a.facts and key in b.facts
            and (read_by_all or key not in OF_MODELS)]
    facts = [(key, a.facts.get(key), b.facts.get(key)) for key in (*NAMED, *both)]
    ours, theirs = (one.facts.get("prompt") or {} for one in (a, b))
    facts += [(f"prompt {key}", ours.get(key), theirs.get(key)) for key in ("style", "admissible")]
    facts.append(("--endpoint-extra", *((one.facts.get("player") or {}).get("extra") for one in (a, b))))
    return found + [f"{key}: {one} and {two}" for key, one, two in facts if one != two]


def text_of(a, b, changes, limit):
    """The comparison as lines. limit: number of flipped games whose transcripts follow."""
    lines, width = named_differences(a, b), max(COLUMN, (shutil.get_terminal_size().columns - 3) // 2)
    for change in changes:
        lines += ["", sentence(change)]
        lines += [f"    {game}: {share(one)} -> {share(two)}" for game, one, two in change.flipped]
    if not any(change.flipped for change in changes):
        return [*lines, "", "nothing differs: each game has the same outcomes"]
    stored = ((change, entry[0], both) for change in changes for entry in change.flipped
              if any(both := transcripts(a, b, change, *entry)))
    for change, game, both in islice(stored, limit):
        lines += ["", f"{change.split} {change.mode}, {game}: A on the left, B on the right", "",
                  side_by_side(*both, width)]
    return lines


def page_of(a, b, changes, notes):
    """The comparison as an HTML page, with as many transcripts as fit."""
    budget, games = page.EPISODE_BYTES, []
    for change in changes:
        for entry in change.flipped:
            both = transcripts(a, b, change, *entry)
            size = sum(len(text) for texts in both for text in texts)
            fits = size <= budget
            budget -= size * fits
            missing = "(no transcript is stored)" if fits else "(left out: the page is full)"
            games.append((change, entry[0], share(entry[1]), share(entry[2]), both if fits else [[], []],
                          missing))
    return page.templates().get_template("compare.html").render(
        notes=notes, facts=named_differences(a, b), sentences=[sentence(change) for change in changes],
        games=games)


def main(argv):
    """The command. Returns its lines. ValueError for files that cannot be compared."""
    parser = argparse.ArgumentParser(prog="python -m report compare", allow_abbrev=False,
                                     description="Compare two evaluations game by game.")
    parser.add_argument("a", type=Path, help="evaluation.json, or the folder that it is in")
    parser.add_argument("b", type=Path, help="the other one")
    parser.add_argument("--common", action="store_true",
                        help="compare the splits, modes and games that both have, if not all are the same")
    parser.add_argument("--transcripts", type=int, default=1,
                        help="flipped games whose transcripts are printed side by side")
    parser.add_argument("--html", type=Path,
                        help="write the comparison, with as many transcripts as fit, to this file")
    options = parser.parse_args(argv)
    a, b = load(options.a), load(options.b)
    notes = differences_of(a, b)
    if notes and not options.common:
        raise ValueError(f"{a.path} and {b.path}: other games or another protocol: {'; '.join(notes)} "
                         "(--common compares what both have)")
    notes = [f"compared although they differ in: {note}" for note in notes]
    notes += [f"{one.path}: some games are missing" for one in (a, b) if one.facts.get("complete") is False]
    changes = compare(a, b)
    lines = [*notes, *text_of(a, b, changes, max(0, options.transcripts))]
    if options.html:
        files.write_text(options.html, page_of(a, b, changes, notes))
        lines.append(f"wrote {options.html}")
    return lines
