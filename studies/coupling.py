"""Which turns of the agent share gradients, and whether judging itself parts the good from the bad.

arXiv:2509.23870 sections 3.2 and 4 on models kept along runs of gcd.py (studies/runs.py), by the measures of
studies/influence.py: how alike turns are in worlds of different repetitiveness (Figure 3a); what a gradient
step on one turn does to others (3b); influence within a class of turns less that across, over training (8);
which tokens carry it (9); the policy's gradient beside the judge's and the value head's (10b). The paper
compares ALFWorld with GSM8K, which is no world here: twin states, household and real games stand in its
place. Left out: what becomes of flawed actions (studies/flaws.py), and Figure 10a, which could not be read.

    python -m studies.coupling            # one seed; 15 minutes on two cores
    python -m studies.coupling --seeds 0,1,2 --iterations 80 --turns 128
    python -m studies.coupling --games $ALFWORLD_DATA/json_2.1.1
"""

import argparse
import re
import shlex
import statistics
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import torch

from bench import jobs
from bench.intervals import markdown, mean_known, number, paired, with_half
from studies import common, influence, runs

PAGE = Path(__file__).with_name("coupling.page.md")
GAMES = "../shared/data/alfworld/games.jsonl.gz"
RL = ("grpo", "gigpo", "grpo+gcd", "grpo+shuffled", "grpo+value")
# What is looked at as a whole, {name: (world, arm)}: its last model
LOOKED_AT = {"twin states": ("twins", runs.COLD), "household": ("household", runs.COLD),
             "household after GRPO": ("household", "grpo"), "ALFWorld": ("alfworld", runs.COLD)}
JUDGES = {"generative judge": "grpo+gcd", "value head": "grpo+value"}
GAPS = ("gap", "gap of cosines")


# Cells

def looked_at(run, settings):
    """What Figures 3a, 3b and 9 show of a run's last model, on turns that it plays itself."""
    actor, seed = run.actor(max(run.models)), settings["seed"]
    shown = influence.shown_by(actor, seed)
    return {"similarity": influence.similarity(actor.model, shown, seed),
            "heat": influence.heat(actor.model, shown, seed),
            "tokens": influence.carriers(actor.model, shown, 2 * settings["turns"], seed)}


def along(run, settings):
    """What Figures 8 and 10b show of a run. "fixed": on turns that its start plays, which are the same for
    all arms and all through the run, so that only the model changes; "refused": good ones of them and refused
    ones; "own": on turns that each kept model plays itself."""
    seed, n, path = settings["seed"], settings["turns"], []
    fixed = influence.classes_of(influence.shown_by(run.start.actor(0), seed), n, seed)
    for iteration in run.models:
        actor = run.actor(iteration)
        own = influence.classes_of(influence.shown_by(actor, seed), n, seed)
        path.append({"iteration": iteration, "fixed": influence.gap(actor.model, fixed),
                     "refused": influence.gap(actor.model, fixed, ("good", "refused")),
                     "own": influence.gap(actor.model, own)})
    lines = [line for line in run.metrics if line.get("judge/grad_cosine") is not None]
    return {"path": path, "judge": [{"iteration": line["iteration"], "cosine": line["judge/grad_cosine"],
                                     "ratio": line["judge/grad_ratio"]} for line in lines]}


def wanted(options, worlds):
    """{cell: settings} of the study: what is looked at in each world, and the arms of household."""
    shared, found = {"turns": options.turns, "iterations": options.iterations, "flags": options.flags}, {}
    for seed in options.seeds:
        for name, (world, arm) in LOOKED_AT.items():
            if world in worlds and arm in (*options.arms, runs.COLD):
                found[f"{name}, seed {seed}"] = {"world": world, "arm": arm, "seed": seed} | shared
        for arm in options.arms if "household" in worlds else ():
            found[f"{arm}, seed {seed}"] = {"world": "household", "arm": arm, "along": True,
                                            "seed": seed} | shared
    return found


def runs_for(settings, games, root):
    """The runs of a cell: {(arm, seed): Run}, its own and the cold start."""
    flags = ["--games", games] if settings["world"] == "alfworld" else []
    return runs.runs_of(settings["world"], [settings["arm"]], [settings["seed"]],
                        [*flags, *shlex.split(settings["flags"])], settings["iterations"], root)


def work(games, root, name, settings):
    """One cell."""
    torch.set_num_threads(1)
    run = runs_for(settings, games, root)[settings["arm"], settings["seed"]]
    return (along if settings.get("along") else looked_at)(run, settings)


def measured(options, worlds):
    """The result of every cell; the runs of those that lack are made first."""
    path, root, needed = Path(options.out) / "coupling.jsonl", Path(options.runs).resolve(), {}
    cells = wanted(options, worlds)
    for settings in common.missing(path, cells).values():
        for key, run in runs_for(settings, options.games, root).items():
            needed[settings["world"], *key] = run
    runs.make(dict(sorted(needed.items(), key=lambda item: not item[1].cold)), options.jobs)
    return common.cells(path, cells, partial(work, options.games, root), options.jobs)


# What follows

class Results:
    """The results of the cells, as the page, the pictures and the verdicts read them."""

    def __init__(self, cells, seeds):
        self.cells, self.seeds = cells, seeds
        self.names = [name for name in LOOKED_AT if f"{name}, seed {seeds[0]}" in cells]
        self.arms = [arm for arm in RL if f"{arm}, seed {seeds[0]}" in cells]

    def of(self, name, seed=None):
        """A cell; of the first seed, where none is named."""
        return self.cells[f"{name}, seed {self.seeds[0] if seed is None else seed}"]

    def mean(self, name, part, key):
        """The mean over seeds of a number of what is looked at; None where no seed has it."""
        parts = [self.of(name, seed)[part] for seed in self.seeds]
        return mean_known(found and found[key] for found in parts)

    def gap(self, arm, seed, key="gap", turns="fixed", late=True):
        """An arm's gap: its mean over the last third of the kept models, or the first; None where none."""
        path = self.of(arm, seed)["path"]
        part = path[-max(1, len(path) // 3):] if late else path[:1]
        return mean_known(point[turns] and point[turns][key] for point in part)

    def differences(self, key):
        """{arm: the late gap of +GCD less that arm's, an interval over seeds}; the value head's is apart."""
        def known(arm):
            found = {seed: self.gap(arm, seed, key) for seed in self.seeds}
            return {seed: value for seed, value in found.items() if value is not None}

        others = [arm for arm in self.arms if arm not in JUDGES.values()] if "grpo+gcd" in self.arms else []
        found = {arm: paired(known("grpo+gcd"), known(arm)) for arm in others}
        return {arm: difference for arm, difference in found.items() if difference["mean"] is not None}

    def judges(self):
        """{kind: the lines of Figure 10b, of all seeds} of those that were run."""
        found = {kind: [line for seed in self.seeds for line in self.of(arm, seed)["judge"]]
                 for kind, arm in JUDGES.items() if arm in self.arms}
        return {kind: lines for kind, lines in found.items() if lines}

    def shares(self, name):
        """{kind of token: its shares of the influence and of the tokens}, means over seeds; {} of none."""
        found = [shares for seed in self.seeds if (shares := self.of(name, seed)["tokens"])]
        kinds = dict.fromkeys(kind for shares in found for kind in shares)
        return {kind: {key: sum(shares[kind][key] for shares in found if kind in shares) / len(found)
                       for key in ("influence", "tokens")} for kind in kinds}


def verdict(tests):
    """yes where all tests hold, no where none does, partly between; not measurable where there is none."""
    return "not measurable" if not tests else "yes" if all(tests) else "partly" if any(tests) else "no"


def above_zero(difference):
    """Whether an interval over seeds lies above 0; with one seed there is none: no."""
    return difference["half"] is not None and difference["mean"] > difference["half"]


def spread(values):
    """Mean and standard error of the values; the error of a single one is infinite."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("inf")
    return statistics.fmean(values), error


def figure_3a(results):
    """Not measurable: it would take a set of mathematics. Worlds of different repetitiveness are told."""
    def told(key):
        return "; ".join(f"{name} {number(results.mean(name, 'similarity', key), '.2f')}"
                         for name in results.names)

    return {"paper": "Figure 3a", "picture": "coupling.similarity.svg",
            "claim": "Samples of a repetitive agent's world are far more alike than those of a mathematics "
            "set.",
            "found": f"Root mean square cosine of gradients between tasks: {told('rms')}. Pairs with one "
            f"action: {told('same action')}. Mean cosine of hidden states: {told('hidden')}. There is no "
            "mathematics here: worlds of different repetitiveness are compared.",
            "agrees": "not measurable"}


def figure_3b(results):
    """Agrees where same-action pairs are above different-action ones in 4 of 5 comparisons, and twice as high
    in the mean."""
    maps = {name: [results.mean(name, "heat", key) for key in ("same", "different", "above")]
            for name in results.names if results.mean(name, "heat", "same") is not None}
    told = "; ".join(f"{name} {same:.2f} against {different:.2f}, above it in {above:.0%} of comparisons"
                     for name, (same, different, above) in maps.items())
    return {"paper": "Figure 3b", "picture": "coupling.heat.svg",
            "claim": "A gradient step on a sample lifts most those with the same action on another input.",
            "found": "Change over the geometric mean of both own changes, same-action turns of other tasks "
            f"against different-action ones: {told or 'no command was given twice'}.",
            "agrees": verdict([above >= 0.8 and same > 2 * abs(different)
                               for same, different, above in maps.values()])}


def figure_8(results):
    """Agrees where +GCD is above every other arm, as far as seeds tell, in the gap and in that of cosines."""
    tests, told = [], []
    for key in GAPS:
        for arm, difference in results.differences(key).items():
            tests.append(above_zero(difference))
            told.append(f"{key}, +GCD less {arm}: {with_half(difference, '+.2g')}")
    few = " One seed has no interval, so it can show no difference." if len(results.seeds) < 2 else ""
    return {"paper": "Figure 8", "picture": "coupling.gap.svg",
            "claim": "GCD widens the gap between same-class and cross-class influence, beyond GRPO and "
            "GiGPO.",
            "found": f"Last third of training: {'; '.join(told) or 'nothing to compare'}.{few}",
            "agrees": "not measurable" if few else verdict(tests)}


def figure_9(results):
    """Agrees where verbs and names have more of the influence than of the tokens."""
    content = {name: [sum(share[key] for kind, share in shares.items() if kind not in influence.FORM)
                      for key in ("influence", "tokens")]
               for name in results.names if (shares := results.shares(name))}
    told = "; ".join(f"{name} {of_influence:.1%} of the influence, {of_tokens:.1%} of the tokens"
                     for name, (of_influence, of_tokens) in content.items())
    return {"paper": "Figure 9", "picture": "coupling.tokens.svg",
            "claim": "Tokens of reasoning and action carry the similarity, not those of the format.",
            "found": f"Verbs and names: {told or 'no two turns'}. A small model's responses "
            "have no reasoning.", "agrees": verdict([a > b for a, b in content.values()])}


def figure_10b(results):
    """Agrees where the value head's cosine with the policy is below 0 and below the judge's, by more than two
    standard errors over iterations (taken as independent). Norms are told, and decide nothing."""
    of = {kind: [spread([line[key] for line in lines]) for key in ("cosine", "ratio")]
          for kind, lines in results.judges().items()}
    tests = []
    if len(of) == len(JUDGES):
        (judge, _), (value, _) = (of[kind] for kind in JUDGES)
        tests = [value[0] + 2 * value[1] < min(0.0, judge[0] - 2 * judge[1])]
    told = "; ".join(f"{kind}: cosine {mean:+.3f} (standard error {error:.3f}), norm {ratio:.1f} times the "
                     "policy's" for kind, ((mean, error), (ratio, _)) in of.items())
    return {"paper": "Figure 10b", "picture": "coupling.conflict.svg",
            "claim": "The value head's gradient is in conflict with the policy's, the generative judge's is "
            "not.", "found": f"Means over training: {told or 'neither was run'}.", "agrees": verdict(tests)}


# Pictures

def draw(results, out):
    """A picture for each figure of the paper; what was not measurable is said in it."""
    plotted = common.pyplot("coupling")
    draw_similarity(plotted, results, out / "coupling.similarity.svg")
    draw_heat(plotted, results, out / "coupling.heat.svg")
    draw_gap(plotted, results, out / "coupling.gap.svg")
    draw_tokens(plotted, results, out / "coupling.tokens.svg")
    draw_conflict(plotted, results, out / "coupling.conflict.svg")


def explain(axes, **legend):
    """A legend, or where nothing is drawn that there was nothing to measure."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, **legend)
    else:
        axes.set_axis_off()
        axes.text(0.5, 0.5, "not measurable", ha="center", va="center", transform=axes.transAxes)


def draw_similarity(plotted, results, path):
    """How the cosines of gradients are spread, and what they come to beside hidden states and actions."""
    figure, (spread, bars) = plotted.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    known = {name: found for name in results.names if (found := results.of(name)["similarity"])}
    edges = [-1 + 2 * i / influence.BINS for i in range(influence.BINS + 1)]
    for name, found in known.items():
        spread.stairs(found["histogram"], edges, label=name, linewidth=1.3)
    spread.set(title="two turns of different tasks", xlabel="cosine of gradients (output layer)",
               ylabel="share of pairs", yscale="log")
    for i, (key, label) in enumerate((("rms", "cosine of gradients, root mean square"),
                                      ("hidden", "cosine of hidden states, mean"),
                                      ("same action", "share of pairs with one action"))):
        bars.bar([k + 0.27 * (i - 1) for k in range(len(known))], [found[key] for found in known.values()],
                 0.25, label=label if known else None)
    bars.set_xticks(range(len(known)), [name.replace(" after ", "\nafter ") for name in known])
    bars.set(ylim=(0, 1.45))
    explain(spread, loc="upper left")
    explain(bars, loc="upper left")
    common.save(figure, path)


def draw_heat(plotted, results, path):
    """A map for each world, turns sorted by action, their blocks framed."""
    n, image = max(1, len(results.names)), None
    figure, places = plotted.subplots(1, n, figsize=(4.7 * n, 3.9), layout="constrained", squeeze=False)
    for axes, name in zip(places[0], results.names):
        axes.set_title(name)
        if (found := results.of(name)["heat"]) is None:
            explain(axes)
            continue
        image, start, middles = axes.imshow(found["matrix"], cmap="RdBu_r", vmin=-1, vmax=1), 0, {}
        for action, count in Counter(found["actions"]).items():
            axes.add_patch(plotted.Rectangle((start - 0.5, start - 0.5), count, count, fill=False))
            middles[action], start = start + (count - 1) / 2, start + count
        axes.set_yticks([*middles.values()], [*middles], fontsize=8)
        axes.set_xticks([])
        axes.set_xlabel("turn that changes")
    places[0][0].set_ylabel("turn of the gradient step")
    if image:
        figure.colorbar(image, ax=places[0], shrink=0.8, label="change / mean of own changes")
    common.save(figure, path)


def draw_gap(plotted, results, path):
    """The gap over training, an arm a line, the mean over seeds."""
    kinds = (("fixed", "gap", "influence a token pair"), ("fixed", "gap of cosines", "cosines"),
             ("refused", "gap of cosines", "cosines, good and refused"),
             ("own", "gap of cosines", "cosines, each model's own turns"))
    figure, places = plotted.subplots(1, len(kinds), figsize=(15, 3.6), layout="constrained")
    for axes, (turns, key, title) in zip(places, kinds):
        for arm in results.arms:
            of = {}
            for point in (point for seed in results.seeds for point in results.of(arm, seed)["path"]):
                if point[turns]:
                    of.setdefault(point["iteration"], []).append(point[turns][key])
            if of:
                axes.plot([*of], [*map(statistics.fmean, of.values())], "o-", markersize=3, label=arm)
        axes.axhline(0, color="grey", linewidth=0.6)
        axes.set(title=title, xlabel="iteration")
        if not axes.get_legend_handles_labels()[0]:
            explain(axes)
    lines = {label: line for axes in places for line, label in zip(*axes.get_legend_handles_labels())}
    if lines:
        figure.legend(lines.values(), lines, loc="outside right center")
    places[0].set_ylabel("same class minus cross class")
    common.save(figure, path)


def draw_tokens(plotted, results, path):
    """Influence by kind of token, beside how many tokens are of it."""
    n = max(1, len(results.names))
    figure, places = plotted.subplots(1, n, figsize=(3.7 * n, 3), layout="constrained", sharex=True,
                                      squeeze=False)
    for axes, name in zip(places[0], results.names):
        shares = results.shares(name)
        kinds = [*shares][::-1]
        for i, key in enumerate(("tokens", "influence")):
            axes.barh([k + 0.38 * (i - 0.5) for k in range(len(kinds))],
                      [shares[kind][key] for kind in kinds], 0.36, label=f"of the {key}" if kinds else None)
        axes.set_yticks(range(len(kinds)), kinds)
        axes.set(title=name, xlabel="share")
        explain(axes)
    common.save(figure, path)


def draw_conflict(plotted, results, path):
    """Cosine and norm ratio of the judge's gradient with the policy's, an iteration a point, all seeds."""
    figure, places = plotted.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for axes, key, title in zip(places, ("cosine", "ratio"), ("cosine with the policy's gradient",
                                                              "norm over that of the policy's")):
        for kind, lines in results.judges().items():
            axes.plot([line["iteration"] for line in lines], [line[key] for line in lines], ".", label=kind)
        axes.set(title=title, xlabel="iteration")
        explain(axes)
    places[0].axhline(0, color="grey", linewidth=0.6)
    places[1].set_ylim(bottom=0)
    common.save(figure, path)


# The study

def page(results, figures, command, without):
    """The page's text, from its template beside this file."""
    def table(part, columns):
        rows = [[name, *(number(results.mean(name, part, key), form) for _, key, form in columns)]
                for name in results.names]
        return "\n".join(markdown(["", *(title for title, _, _ in columns)], rows))

    similar = table("similarity", (
        ("pairs with one action", "same action", ".2f"), ("cosine of gradients, mean", "mean", ".3f"),
        ("root mean square", "rms", ".2f"), ("one action", "mean of same action", ".2f"),
        ("different actions", "mean of different", ".3f"), ("hidden states", "hidden", ".2f")))
    heats = table("heat", (
        ("one action", "same", ".2f"), ("different actions", "different", ".3f"),
        ("one above different", "above", ".0%"), ("change, one action", "change same", ".1%"),
        ("different actions", "change different", ".1%"), ("off linear", "nonlinear", ".1%")))
    columns = (("fixed", "gap", False), ("fixed", "gap", True), ("fixed", "gap of cosines", False),
               ("fixed", "gap of cosines", True), ("refused", "gap of cosines", True),
               ("own", "gap of cosines", True))
    rows = [[arm, *(number(mean_known(results.gap(arm, seed, key, turns, late) for seed in results.seeds),
                           ".3f") for turns, key, late in columns)] for arm in results.arms]
    gaps = markdown(["", "gap, start", "late", "of cosines, start", "late", "good and refused, late",
                     "own turns, late"], rows)
    shares = {name: results.shares(name) for name in results.names}
    kinds = dict.fromkeys(kind for of_name in shares.values() for kind in of_name)
    tokens = markdown(["", *kinds], [[name, *(
        "{influence:.1%} of {tokens:.1%}".format(**of_name[kind]) if kind in of_name else "–"
        for kind in kinds)] for name, of_name in shares.items()])
    said = [f"**{figure['paper']}.** The paper: {figure['claim']} Here: {figure['found']} "
            f"Agrees: {figure['agrees']}.\n" for figure in figures]
    return PAGE.read_text(encoding="utf-8").format(
        command=command, seeds=", ".join(map(str, results.seeds)), without=without, said="\n".join(said),
        tasks=influence.TASKS, own=influence.OWN, similar=similar, heats=heats, gaps="\n".join(gaps),
        tokens="\n".join(tokens), counts=counts(results))


def counts(results):
    """How many turns each class of Figure 8 has, seed by seed."""
    told = []
    for seed in results.seeds if results.arms else ():
        point = results.of(results.arms[0], seed)["path"][0]
        found = (point["fixed"] or {}) | (point["refused"] or {})
        numbers = [f"{found[label]} {label}" for label in influence.CLASSES if label in found]
        told.append(f"seed {seed}: {', '.join(numbers) or 'not measurable'}")
    return "; ".join(told)


def options_of(argv):
    """The command line, checked: one line says what is wrong."""
    parser = argparse.ArgumentParser("python -m studies.coupling", description=__doc__.splitlines()[0],
                                     allow_abbrev=False)
    parser.add_argument("--seeds", default="0", help="of the runs, separated by commas")
    parser.add_argument("--iterations", type=int, default=runs.ITERATIONS, help="of RL in each run")
    parser.add_argument("--turns", type=int, default=64, help="of each class that are measured, at most")
    parser.add_argument("--worlds", default=",".join(runs.WORLDS), help="that are looked at")
    parser.add_argument("--arms", default=",".join(RL), help="of household, for Figures 8 and 10b")
    parser.add_argument("--games", default=GAMES, help="real ALFWorld games, as gcd.py's flag")
    parser.add_argument("--flags", default="", help="of gcd.py for all runs, after all others")
    parser.add_argument("--jobs", type=int, default=2, help="runs, and then cells, at once")
    parser.add_argument("--runs", default=str(runs.RUNS), help="folder of the runs")
    parser.add_argument("--out", default=str(common.OUT), help="folder of coupling.json, .svg and .md")
    options = parser.parse_args(argv)
    for name, known in (("worlds", runs.WORLDS), ("arms", RL)):
        given = getattr(options, name).split(",")
        if wrong := [word for word in given if word not in known]:
            parser.error(f"--{name}={wrong[0]}: expected some of {','.join(known)}")
        setattr(options, name, [word for word in known if word in given])
    if not re.fullmatch(r"\d{1,2}(,\d{1,2})*", options.seeds):
        parser.error(f"--seeds={options.seeds}: expected numbers from 0 to 99, separated by commas")
    options.seeds = [*dict.fromkeys(map(int, options.seeds.split(",")))]
    for name, low in (("iterations", runs.EVERY), ("turns", 2), ("jobs", 1)):
        if getattr(options, name) < low:
            parser.error(f"--{name}={getattr(options, name)}: expected at least {low}")
    return options


def main(argv=None):
    options = options_of(argv)
    out, worlds, without = Path(options.out), options.worlds, ""
    if "alfworld" in worlds and not (common.ROOT / options.games).exists():
        worlds = [world for world in worlds if world != "alfworld"]
        without = f"Real ALFWorld was not measured: {options.games} is not there (`--games`)."
        print(without, file=sys.stderr)
    try:
        results = Results(measured(options, worlds), options.seeds)
    except (ValueError, jobs.Failed) as error:
        print(f"studies.coupling: error: {error}", file=sys.stderr)
        return 1
    command = ["python", "-m", "studies.coupling", *(sys.argv[1:] if argv is None else argv)]
    figures = [figure(results) for figure in (figure_3a, figure_3b, figure_8, figure_9, figure_10b)]
    draw(results, out)
    text = page(results, figures, shlex.join(command), without)
    common.publish(out, "coupling", command, options.seeds, {"without": without, "cells": results.cells},
                   figures, text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
