"""The tables of runs: summary.json, the table on the terminal, and the page's tables as rows of text."""

import shlex

from config import PROTOCOLS, arguments, flags_of
from envs._terminal import printable
from infra.files import is_number, nan_to_null
from infra.flags import flag_of


def percent(value):
    """A share as a percentage; a dash if it is no number."""
    return f"{100 * value:.1f}" if is_number(value) else "–"


def decimal(value):
    """A number with one decimal; a dash if it is no number."""
    return f"{value:.1f}" if is_number(value) else "–"


def interval(score):
    """{"success": .43, "low": .37, "high": .49} -> "43.0 [37.0, 49.0]"; a dash if there is no score."""
    if not score:
        return "–"
    return f"{percent(score['success'])} [{percent(score['low'])}, {percent(score['high'])}]"


def summarize(runs):
    """The content of summary.json: success when sampling (the mode "sampled"), seconds by stage, versions."""
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
    return nan_to_null({"methods": methods, "seconds": seconds, "versions": versions})


def split_names(summary):
    """The splits that any method was evaluated on."""
    return sorted({split for splits in summary["methods"].values() for split in splits})


def split_heads(summary):
    """{split: "L0 (n=256)"}, or "L0 (n=140 × 8)" if each game was played eight times.

    If n differs between the methods, all its values are listed.
    """
    heads = {}
    for split in split_names(summary):
        sizes = {games_and_plays(scores[split]) for scores in summary["methods"].values() if split in scores}
        heads[split] = f"{split} (n={'/'.join(sorted(sizes))})"
    return heads


def games_and_plays(score):
    """"256", or "140 × 8": the number of games, and how often each was played."""
    n, plays = score["n"], score["plays"]
    return f"{n // plays} × {plays}" if n and plays > 1 else str(n or "–")


def aligned(rows):
    """Rows of text as lines, with columns padded to equal width."""
    rows = [[printable(cell).replace("\n", "\\n") for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows)]
    padded = [[cell.ljust(width) for cell, width in zip(row, widths)] for row in rows]
    return "\n".join("  ".join(row).rstrip() for row in padded)


def table(summary):
    """The main results as plain text: a row per method, a column per split."""
    heads = split_heads(summary)
    rows = [["success %", *heads.values(), "seconds"]]
    for name, scores in summary["methods"].items():
        spent = summary["seconds"].get(name)
        seconds = f"{spent:.0f}" if is_number(spent) else "–"
        rows.append([name, *(interval(scores.get(split)) for split in heads), seconds])
    return aligned(rows)


# Captions and notes

def distinct(runs, key):
    """The runs' distinct texts under a key, such as "note" or "warning"."""
    return list(dict.fromkeys(text for run in runs if (text := run.fact(key))))


def captions(runs, summary):
    """{evaluated split: what its tasks are}, as the runs' environments describe them; with the runs' names
    where they differ.
    """
    names = {split: {} for split in split_names(summary)}
    for run in runs:
        for split, text in (run.fact("captions") or {}).items():
            if text and split in names:
                names[split].setdefault(text, []).append(run.name)
    return {split: "; ".join(text if len(found) == 1 else f"{text} ({', '.join(of_runs)})"
                             for text, of_runs in found.items()) for split, found in names.items() if found}


def protocol_caption(runs):
    """How each run was evaluated, in a sentence, if they differ in it; else ""."""
    found = {run.name: (run.evaluation.get("protocol"), run.evaluation.get("max_turns")) for run in runs
             if run.evaluation.get("splits")}
    if len({*found.values()}) < 2:
        return ""
    of_runs = [f"{name} by {protocol or 'an unknown protocol'}" + (
        f" at temperature {PROTOCOLS[protocol].temperatures['sampled']}" if protocol in PROTOCOLS else "")
        + f" in {turns or 'unknown'} turns" for name, (protocol, turns) in found.items()]
    return f"Evaluation differs: {', '.join(of_runs)}."


def seeds_caption(seeds, summary):
    """The results over several seeds, as a sentence; "" if unknown."""
    if seeds is None:
        return ""
    splits = [s for s in split_names(summary) if any(s in scores for scores in seeds.scores.values())]
    scores = [f"{name} " + " / ".join(mean_and_half(seeds.scores[name].get(split)) for split in splits)
              for name in summary["methods"] if name in seeds.scores]
    return (f"One seed, in which the order of the methods means little. Mean of {seeds.count} seeds at the "
            f"settings of {seeds.file} on {' / '.join(splits)} (± half the 95 % CI): {', '.join(scores)}.")


def mean_and_half(score):
    """{"mean": .593, "half": .058} -> "59.3 ± 5.8"; a dash if there is no score."""
    return f"{percent(score['mean'])} ± {percent(score['half'])}" if score else "–"


def caption(runs, summary, seeds):
    """The lines below the table on the terminal."""
    clauses = [f"{split}: {text}" for split, text in captions(runs, summary).items()]
    lines = [". ".join(clauses) + "." if clauses else "", protocol_caption(runs), *distinct(runs, "note"),
             seeds_caption(seeds, summary), *distinct(runs, "warning")]
    return [line for line in lines if line]


# The page's tables

def headline_rows(summary, seeds):
    """The head, and each method's cells: (success with interval, that over several seeds or "")."""
    heads = split_heads(summary)
    rows = []
    for name, scores in summary["methods"].items():
        by_split = seeds.scores.get(name, {}) if seeds else {}
        cells = [(interval(scores.get(split)), f"{over['seeds']} seeds: {mean_and_half(over)}"
                  if (over := by_split.get(split)) else "") for split in heads]
        rows.append((name, cells))
    return list(heads.values()), rows


def detail_rows(runs):
    """Per method and split: success in each decoding mode, and statistics of the sampled episodes; with the
    games' own score where any is known.
    """
    found = [(run, split, scores) for run in runs
             for split, scores in sorted(run.evaluation.get("splits", {}).items())]
    modes = list(dict.fromkeys(mode for _, _, scores in found for mode in ("sampled", *scores)))
    means = {"turns": "turns"}
    if any(is_number(scores.get("sampled", {}).get("score_100")) for _, _, scores in found):
        means["score_100"] = "score"
    rows = [["method", "split", *(f"{mode} %" for mode in modes), "invalid %", "repeated %", *means.values()]]
    for run, split, scores in found:
        sampled = scores.get("sampled", {})
        rows.append([run.name, split, *(percent(scores.get(mode, {}).get("success")) for mode in modes),
                     percent(sampled.get("invalid_frac")), percent(sampled.get("repeated_frac")),
                     *(decimal(sampled.get(key)) for key in means)])
    return rows


def difference_rows(runs):
    """The flags whose values differ between the methods."""
    configs = [run.header.get("config", {}) for run in runs]
    flags = dict.fromkeys(flag for config in configs for flag in config)
    rows = [["flag", *(run.name for run in runs)]]
    for flag in flags:
        values = [str(config.get(flag, "–")) for config in configs]
        if len(set(values)) > 1:
            rows.append([flag_of(flag), *values])
    return rows


def command(run):
    """The command line that repeats this run: every flag that it read, with its value."""
    read = {name: value for name, value in flags_of(run.header.get("config", {})).items()
            if value is not None and name not in ("resume", "overwrite")}     # these go on with a run
    return shlex.join(["python", "gcd.py", *arguments(read)])
