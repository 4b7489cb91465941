"""Runs -> summary.json, the table in the terminal, and the page's tables as rows of words. Reads nothing."""

import shlex

from config import flags_of
from report.read import is_number
from run.files import finite


def percent(value):
    """A share -> its percentage in words; a dash where nothing was measured."""
    return f"{100 * value:.1f}" if is_number(value) else "–"


def interval(score):
    """{"success": .43, "low": .37, "high": .49} -> "43.0 [37.0, 49.0]"; a dash where nothing was measured."""
    if not score:
        return "–"
    return f"{percent(score['success'])} [{percent(score['low'])}, {percent(score['high'])}]"


def summarize(runs):
    """Runs -> summary.json: the headline success (sampled at temperature 1), seconds by stage, versions."""
    methods, seconds, versions = {}, {}, {}
    for run in runs:
        splits = run.evaluation.get("splits", {})
        sampled = {split: scores["sampled"] for split, scores in splits.items() if "sampled" in scores}
        methods[run.name] = {split: {key: score.get(key) for key in ("success", "n", "low", "high")} |
                                    {"plays": score.get("plays") or 1} for split, score in sampled.items()}
        if run.stages:
            seconds[run.name] = sum(value for value in run.stages.values() if is_number(value))
        seconds |= {f"{run.name}/{stage}": value for stage, value in run.stages.items()}
        versions = versions or run.header.get("versions", {})
    return finite({"methods": methods, "seconds": seconds, "versions": versions})


def split_names(summary):
    """The splits that any method was evaluated on."""
    return sorted({split for splits in summary["methods"].values() for split in splits})


def split_heads(summary):
    """{split: "L0 (n=256)"}, or "L0 (n=140 × 8)" where each game was played eight times; n of several sizes
    are all named."""
    heads = {}
    for split in split_names(summary):
        sizes = {games_and_plays(scores[split]) for scores in summary["methods"].values() if split in scores}
        heads[split] = f"{split} (n={'/'.join(sorted(sizes))})"
    return heads


def games_and_plays(score):
    """"256", or "140 × 8": the interval's games, and how often each was played."""
    n, plays = score["n"], score["plays"]
    return f"{n // plays} × {plays}" if n and plays > 1 else str(n or "–")


def aligned(rows):
    """Rows of words -> lines of columns padded to equal width."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    padded = [[word.ljust(width) for word, width in zip(row, widths)] for row in rows]
    return "\n".join("  ".join(row).rstrip() for row in padded)


def table(summary):
    """The headline as plain text: one row per method, one column per split."""
    heads = split_heads(summary)
    rows = [["success %", *heads.values(), "seconds"]]
    for name, scores in summary["methods"].items():
        spent = summary["seconds"].get(name)
        seconds = f"{spent:.0f}" if is_number(spent) else "–"
        rows.append([name, *(interval(scores.get(split)) for split in heads), seconds])
    return aligned(rows)


# What belongs beside the numbers

def distinct(runs, key):
    """What the runs say of themselves under a key, each sentence once."""
    return list(dict.fromkeys(words for run in runs if (words := run.fact(key))))


def captions(runs, summary):
    """{split: what its tasks are} of the evaluated splits, in the words of the runs' world; may lack some."""
    worded = {}
    for run in runs:
        worded |= run.fact("captions") or {}
    return {split: worded[split] for split in split_names(summary) if worded.get(split)}


def seeds_caption(seeds, summary):
    """What several seeds gave beside this one, as a sentence. Empty where that is not known."""
    if seeds is None:
        return ""
    splits = [s for s in split_names(summary) if any(s in scores for scores in seeds.scores.values())]
    gave = [f"{name} " + " / ".join(seed_words(seeds.scores[name].get(split)) for split in splits)
            for name in summary["methods"] if name in seeds.scores]
    return (f"One seed. {seeds.count} seeds gave on {' / '.join(splits)} (mean ± half the 95 % interval, "
            f"{seeds.file}): {', '.join(gave)}.")


def seed_words(score):
    """{"mean": .593, "half": .058} -> "59.3 ± 5.8"; a dash where there is none."""
    return f"{percent(score['mean'])} ± {percent(score['half'])}" if score else "–"


def caption(runs, summary, seeds):
    """The lines under the table in the terminal."""
    clauses = [f"{split}: {words}" for split, words in captions(runs, summary).items()]
    lines = [". ".join(clauses) + "." if clauses else "", *distinct(runs, "note"),
             seeds_caption(seeds, summary), *distinct(runs, "warning")]
    return [line for line in lines if line]


# The page's tables

def headline_rows(summary, seeds):
    """The head, and per method its cells: (success with interval, the same over several seeds or "")."""
    heads = split_heads(summary)
    rows = []
    for name, scores in summary["methods"].items():
        several = seeds.scores.get(name, {}) if seeds else {}
        cells = [(interval(scores.get(split)), seed_words(several[split]) if split in several else "")
                 for split in heads]
        rows.append((name, cells))
    return list(heads.values()), rows


def detail_rows(runs):
    """Per method and split: success under each way of decoding, and how the sampled episodes behaved."""
    found = [(run, split, scores) for run in runs
             for split, scores in sorted(run.evaluation.get("splits", {}).items())]
    ways = list(dict.fromkeys(way for _, _, scores in found for way in ("sampled", *scores)))
    rows = [["method", "split", *(f"{way} %" for way in ways), "invalid %", "repeated %", "turns"]]
    for run, split, scores in found:
        sampled = scores.get("sampled", {})
        turns = f"{sampled['turns']:.1f}" if is_number(sampled.get("turns")) else "–"
        rows.append([run.name, split, *(percent(scores.get(way, {}).get("success")) for way in ways),
                     percent(sampled.get("invalid_frac")), percent(sampled.get("repeated_frac")), turns])
    return rows


def difference_rows(runs):
    """The flags whose values differ between the methods."""
    configs = [run.header.get("config", {}) for run in runs]
    flags = dict.fromkeys(flag for config in configs for flag in config)
    rows = [["flag", *(run.name for run in runs)]]
    for flag in flags:
        values = [str(config.get(flag, "–")) for config in configs]
        if len(set(values)) > 1:
            rows.append(["--" + flag.replace("_", "-"), *values])
    return rows


def command(run):
    """The command line that repeats this run: every flag that it read, with its value."""
    words = ["python", "gcd.py"]
    for name, value in flags_of(run.header.get("config", {})).items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            words.append(f"--{flag}={shlex.quote(str(value))}")
    return " ".join(words)
