"""Fills the tables of docs/alfworld.md: rows of the referee, and published numbers.

A row is an evaluation.json of the referee (evaluation.py), copied to lab/results/referee/NAME.json; a mode of
decoding has a row of its own. Published numbers and what is unknown of them are in
lab/results/published_alfworld.json, those of arXiv:2509.23870 in lab/results/paper.json. Left out: the page's
text, which is written in the page.

    python -m lab.bench.leaderboard    # rewrite the page; tests/lab/test_leaderboard.py fails if it is old
"""

import argparse
import math
import re
import shlex
import sys

from config import PROTOCOLS
from infra import files
from lab.bench.intervals import markdown
from lab.bench.study import PAPER, ROOT
from report import read

REFEREE = ROOT / "lab" / "results" / "referee"
PUBLISHED = ROOT / "lab" / "results" / "published_alfworld.json"
PAGE = ROOT / "docs" / "alfworld.md"
SPLITS = ("L0", "L1", "L2")
BLOCK = re.compile(r"(<!-- begin (\w+) -->\n).*?(<!-- end \2 -->)", re.DOTALL)
GAMES = "$ALFWORLD_DATA/json_2.1.1"           # in commands, in place of the folder that the games were in
DRAWS = 128
FIELDS = {"commit": str, "games_hash": dict, "protocol": str, "splits": dict, "outcomes": dict,
          "prompt": dict, "temperatures": dict, "command": str}           # that a row needs, with their types


def evaluations(folder=REFEREE):
    """{name: evaluation} of a folder. ValueError for one that is not complete, or of other games."""
    found, hashes = {path.stem: files.read_json(path) for path in sorted(folder.glob("*.json"))}, {}
    for name, result in found.items():
        read.check_evaluation(result, f"{name}.json")
        if not result.get("complete") or not result.get("player"):
            raise ValueError(f"{name}.json: not a complete evaluation by the referee")
        if missing := [key for key, kind in FIELDS.items() if not isinstance(result.get(key), kind)]:
            raise ValueError(f"{name}.json: {missing[0]} is {result.get(missing[0])!r:.60}")
        if result["protocol"] not in PROTOCOLS:
            raise ValueError(f"{name}.json: protocol {result['protocol']!r:.60}: expected one of "
                             f"{', '.join(PROTOCOLS)}")
        if not re.fullmatch(r"\w*", style := str(result["prompt"].get("style", ""))):
            raise ValueError(f"{name}.json: prompt's style {style!r:.60}: expected a word")
        if result["commit"].endswith("+"):
            raise ValueError(f"{name}.json: its commit {result['commit']} had local changes")
        if result.get("evaluate_tasks"):
            raise ValueError(f"{name}.json: --evaluate-tasks={result['evaluate_tasks']} left games out")
        for split, value in result["games_hash"].items():
            known = hashes.setdefault(split, value)
            if known != value:
                raise ValueError(f"{name}.json: its games of {split} ({value}) are not those of the other "
                                 f"rows ({known})")
    numbers = numbers_of_games(found)
    for name, result in found.items():
        for split, games in result["outcomes"].items():
            if plays_all_games(result) and len(games) < numbers[split]:
                raise ValueError(f"{name}.json: {len(games)} games of {split}, another row has "
                                 f"{numbers[split]}")
    return found


def plays_all_games(result):
    """Whether a row's protocol plays every game of a split, rather than some that it draws."""
    return not PROTOCOLS[result["protocol"]].draws


def numbers_of_games(found):
    """{split: how many games it has}, of those that a row plays all of."""
    numbers = {}
    for result in filter(plays_all_games, found.values()):
        for split, games in result["outcomes"].items():
            numbers[split] = max(len(games), numbers.get(split, 0))
    return numbers


def success(rate):
    """"98.8 [95.4, 99.7]" of a split's scores, in per cent; a dash if it was not played."""
    if not rate:
        return "–"
    return "{:.1f} [{:.1f}, {:.1f}]".format(*(100 * rate[key] for key in ("success", "low", "high")))


def parameters(result):
    """The number of a model's parameters; of a script none, of a server's model unknown."""
    n, kind = result["player"].get("parameters"), result["player"]["kind"]
    return f"{n:,}" if n else "none" if kind == "script" else "unknown"


def protocol(result, mode):
    """How a row was played: protocol, temperature, turns, and the prompt's style."""
    temperature, style = result["temperatures"][mode], result["prompt"].get("style")
    listed = " with the admissible commands" if result["prompt"].get("admissible") else ""
    parts = [f"`{result['protocol']}`", "" if temperature is None else f"at {temperature:g}",
             f"{result['max_turns']} turns", f"prompt `{style}`{listed}" if style else ""]
    return ", ".join(filter(None, parts))


def percent_of(result, mode, key):
    """A share of all commands, in per cent by split."""
    shares = [result["splits"].get(split, {}).get(mode, {}).get(key) for split in SPLITS]
    return "/".join("–" if value is None else f"{100 * value:.0f}" for value in shares)


def text(value):
    """A text as the cell of a table: no text of a file becomes markup or another cell."""
    escaped = re.sub(r"[&<>]", lambda found: f"&#{ord(found[0])};", " ".join(str(value).split()))
    return re.sub(r"([\\`*_\[\]|])", r"\\\1", escaped)


def rows(found):
    """The table of the referee's rows: a row for each evaluation and mode."""
    head = ["who", "parameters", "what it had seen", "played", *SPLITS, "invalid", "flawed"]
    lines = [[text(result["player"]["name"]), parameters(result), text(result["seen"] or "–"),
              protocol(result, mode), *(success(result["splits"].get(s, {}).get(mode)) for s in SPLITS),
              percent_of(result, mode, "invalid_frac"), percent_of(result, mode, "flawed_frac")]
             for result in found.values() for mode in result["temperatures"]]
    return markdown(head, lines)


def commands(found):
    """The command that repeats each row, with the games where ALFWorld's own script puts them."""
    lines = ["```bash"]
    for result in found.values():
        parts = [f"--games={GAMES}" if word.startswith("--games=") else shlex.quote(word)
                 for word in shlex.split(result["command"]) if not word.startswith(("--seen=", "--name="))]
        lines.append(f"{' '.join(parts)} --out=runs/{shlex.quote(result['player']['name'])}")
    return "\n".join([*lines, "```", ""])


def hashes(found):
    """The games of all rows: their hash and, if a row plays all of them, how many."""
    values = {split: value for result in found.values() for split, value in result["games_hash"].items()}
    numbers = {split: f" ({n} games)" for split, n in numbers_of_games(found).items()}
    return ", ".join(f"{split} `{values[split]}`{numbers.get(split, '')}" for split in sorted(values)) + ".\n"


def published(stored, paper):
    """The table of published numbers. Each is followed by half of what 128 draws alone leave open."""
    entries = list(stored["rows"])
    for name, source in stored["sources"].items():
        for model, methods in paper["table1"].items() if source.get("table1") else ():
            if isinstance(methods, dict):
                columns = dict(enumerate(paper["table1"]["columns"]))
                entries += [{"who": who, "source": name, "model": model} | {
                    split: values[i] for split in SPLITS for i, column in columns.items()
                    if column == f"{source['table1']} {split}"} for who, values in methods.items()]
    lines = [[entry["who"], entry["model"], stored["sources"][entry["source"]]["source"],
              *(number(entry, split) for split in SPLITS)] for entry in entries]
    return markdown(["who", "model", "source", *(f"{split} (± of {DRAWS} draws)" for split in SPLITS)], lines)


def number(entry, split):
    """A published number as printed, and half the 95 % interval of one evaluation of 128 draws."""
    if split not in entry:
        return "–"
    printed = f" ± {entry['half'][split]:g}" if split in entry.get("half", {}) else ""
    p = entry[split] / 100
    return f"{entry[split]:.1f}{printed} ({196 * math.sqrt(p * (1 - p) / DRAWS):.1f})"


def sources(stored):
    """What is known, and not known, of each source."""
    return "".join(f"- {entry['source']}. Protocol: {entry['protocol']}. Seen: {entry['seen']}. Unknown: "
                   f"{entry['unknown']}.\n" for entry in stored["sources"].values())


def filled(page, found, stored, paper):
    """The page's text with current tables."""
    blocks = {"rows": rows(found), "commands": commands(found), "games": hashes(found),
              "published": published(stored, paper), "sources": sources(stored)}
    return BLOCK.sub(lambda match: match[1] + blocks[match[2]] + match[3], page)


def current(page):
    """The page's text, filled from the committed files."""
    return filled(page, evaluations(), files.read_json(PUBLISHED), files.read_json(PAPER))


def main(argv=None):
    """Rewrite the page."""
    argparse.ArgumentParser(prog="python -m lab.bench.leaderboard", description=__doc__,
                            formatter_class=argparse.RawDescriptionHelpFormatter).parse_args(argv)
    try:
        files.write_text(PAGE, current(PAGE.read_text(encoding="utf-8")))
    except (ValueError, OSError) as error:
        print(f"lab.bench.leaderboard: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
