"""Which turns of the agent share gradients, and whether self-judging separates good turns from bad ones.

arXiv:2509.23870, sections 3.2 and 4, on models kept during runs of gcd.py (lab/studies/runs.py), by the
measures of lab/studies/influence.py: the similarity of turns in environments of different repetitiveness
(Figure 3a); the effect of a gradient step on one turn on others (3b); influence within a class of turns minus
influence across classes, over training (8); the tokens that carry it (9); the gradients of the judge and of
the value head against the policy's, with and without their noise (10b). The paper compares
ALFWorld with GSM8K, which is not an environment here: twin states, household and real games are compared with
problems on strings, which have one turn and hardly an answer twice. Left out: the fate of flawed actions
(lab/studies/flaws.py), and Figure 10a, which was not readable.

    python -m lab.studies.coupling            # one seed; 20 minutes on two cores
    python -m lab.studies.coupling --seeds 0,1,2,3,4
    python -m lab.studies.coupling --games $ALFWORLD_DATA/json_2.1.1
"""

import argparse
import math
import shlex
import statistics
import sys
from collections import Counter
from functools import partial
from pathlib import Path

from lab.bench import jobs
from lab.bench.intervals import interval, markdown, mean_known, number, paired, sign_of, with_half
from lab.studies import common, conflict, influence, runs

PAGE = Path(__file__).with_name("coupling.page.md")
GAMES = "../shared/data/alfworld/games.jsonl.gz"
RL = ("grpo", "gigpo", "grpo+gcd", "grpo+shuffled", "grpo+value")
# Final models that are measured, {name: (environment, arm)}
SNAPSHOTS = {"twin states": ("twins", runs.COLD), "household": ("household", runs.COLD),
             "household after GRPO": ("household", "grpo"), "ALFWorld": ("alfworld", runs.COLD),
             "strings": ("strings", runs.COLD)}
STAND_IN, STAND_IN_SPLIT = "strings", "id"         # for mathematics in Figure 3a; not an agent
JUDGES = {"generative judge": "grpo+gcd", "value head": "grpo+value"}
GAPS = ("gap", "gap of cosines")
SMALL = 0.33                                       # a cosine that is no conflict, either way
STAND_IN_TEXT = (", and strings are not GSM8K: they are problems of one turn, answered with letters by a "
                 "model of their own, and stand for a task without repetition. So the claim can be met in "
                 "part at most.")


# Cells

def snapshot(run, settings):
    """The numbers of Figures 3a, 3b and 9 for a run's last model, on turns that it plays itself.

    Of the stand-in for mathematics only 3a's: its responses are no commands.
    """
    actor, seed = run.actor(max(run.models)), settings["seed"]
    if settings["world"] == STAND_IN:
        turns = influence.measured_turns(actor, seed, STAND_IN_SPLIT)
        return {"similarity": influence.similarity(actor.model, turns, seed), "heat": None, "tokens": None}
    turns = influence.measured_turns(actor, seed)
    return {"similarity": influence.similarity(actor.model, turns, seed),
            "heat": influence.heat(actor.model, turns, seed),
            "tokens": influence.influence_by_kind(actor.model, turns, 2 * settings["turns"], seed)}


def trajectory(run, settings):
    """The numbers of Figure 8 for a run, and "judge", what it measured in its own steps.

    "fixed": on turns played by the cold start, the same for all arms and kept models, so only the model
    changes; "refused": on the good and the refused ones of these turns; "own": on turns that each kept model
    plays itself.
    """
    seed, n, path = settings["seed"], settings["turns"], []
    fixed = influence.by_class(influence.measured_turns(run.start.actor(0), seed), n, seed)
    for iteration in run.models:
        actor = run.actor(iteration)
        own = influence.by_class(influence.measured_turns(actor, seed), n, seed)
        path.append({"iteration": iteration, "fixed": influence.influence_gaps(actor.model, fixed),
                     "refused": influence.influence_gaps(actor.model, fixed, ("good", "refused")),
                     "own": influence.influence_gaps(actor.model, own)})
    lines = [line for line in run.metrics if line.get("judge/grad_cosine") is not None]
    return {"path": path, "judge": [{"iteration": line["iteration"], "cosine": line["judge/grad_cosine"],
                                     "ratio": line["judge/grad_ratio"]} for line in lines]}


def gradients(run, settings):
    """The numbers of Figure 10b, conflict.products of a run's first, middle and last kept model."""
    kept, found = [*run.models], []
    for iteration in dict.fromkeys((kept[0], kept[len(kept) // 2], kept[-1])):
        batches = conflict.batch_gradients(run, iteration, settings["batches"])
        found.append({"iteration": iteration} | conflict.products(*batches.values()))
    return found


def requested_cells(options, environments):
    """{cell: settings} of the study: the final models of each environment, and the arms of household."""
    shared, found = {"turns": options.turns, "iterations": options.iterations, "flags": options.flags}, {}
    for seed in options.seeds:
        for name, (environment, arm) in SNAPSHOTS.items():
            if environment in environments and arm in (*options.arms, runs.COLD):
                found[f"{name}, seed {seed}"] = {"world": environment, "arm": arm, "seed": seed} | shared
        for arm in options.arms if "household" in environments else ():
            found[f"{arm}, seed {seed}"] = {"world": "household", "arm": arm, "along": True,
                                            "seed": seed} | shared
            if arm in JUDGES.values():
                found[f"gradients, {arm}, seed {seed}"] = {
                    "world": "household", "arm": arm, "batches": conflict.BATCHES, "seed": seed} | shared
    return found


def runs_for(settings, games, root):
    """The runs of a cell, {(arm, seed): Run}: its own and the cold start."""
    flags = ["--games", games] if settings["world"] == "alfworld" else []
    return runs.runs_of(settings["world"], [settings["arm"]], [settings["seed"]],
                        [*flags, *shlex.split(settings["flags"])], settings["iterations"], root)


def work(games, root, name, settings):
    """Measure one cell."""
    run = runs_for(settings, games, root)[settings["arm"], settings["seed"]]
    measure = gradients if "batches" in settings else trajectory if settings.get("along") else snapshot
    return measure(run, settings)


def measured(options, environments):
    """The result of every cell; the runs of missing cells are made first."""
    path, root, needed = options.out / "coupling.jsonl", options.runs.resolve(), {}
    cells = requested_cells(options, environments)
    missing = common.missing_cells(path, cells, options)
    for settings in missing.values():
        for key, run in runs_for(settings, options.games, root).items():
            needed[settings["world"], *key] = run
    runs.make(dict(sorted(needed.items(), key=lambda item: not item[1].cold)), options.jobs)
    return common.all_cells(path, cells, partial(work, options.games, root), options)


# Analysis

class Results:
    """The results of the cells, with the means and differences that page, figures and verdicts use."""

    def __init__(self, cells, seeds):
        self.cells, self.seeds = cells, seeds
        self.names = [name for name in SNAPSHOTS if f"{name}, seed {seeds[0]}" in cells]
        self.agents = [name for name in self.names if name != STAND_IN]
        self.arms = [arm for arm in RL if f"{arm}, seed {seeds[0]}" in cells]

    def of(self, name, seed=None):
        """The result of a cell; seed: default the first."""
        return self.cells[f"{name}, seed {self.seeds[0] if seed is None else seed}"]

    def mean(self, name, part, key):
        """The mean over seeds of a number of a final model; None if no seed has it."""
        parts = [self.of(name, seed)[part] for seed in self.seeds]
        return mean_known(found and found[key] for found in parts)

    def less_repetitive(self, key):
        """{final model: a number of its similarity minus that of STAND_IN, an interval over seeds}, of the
        cold starts in text games; {} without either."""
        names = [name for name in ("household", "ALFWorld") if {name, STAND_IN} <= {*self.names}]
        known = {name: {seed: found[key] for seed in self.seeds
                        if (found := self.of(name, seed)["similarity"])}
                 for name in (*names, *([STAND_IN] if names else []))}
        return {name: paired(known[name], known[STAND_IN]) for name in names}

    def gap(self, arm, seed, key="gap", turns="fixed", late=True):
        """An arm's mean gap over the last third of the kept models, or its first gap; None if unknown."""
        path = self.of(arm, seed)["path"]
        part = path[-max(1, len(path) // 3):] if late else path[:1]
        return mean_known(point[turns] and point[turns][key] for point in part)

    def late_gaps(self, arm, key):
        """An arm's late gap by seed, {seed: value}, where it is known."""
        found = {seed: self.gap(arm, seed, key) for seed in self.seeds}
        return {seed: value for seed, value in found.items() if value is not None}

    def differences(self, key):
        """{arm: late gap of +GCD minus that arm's, an interval over seeds}, without the value head."""
        others = [arm for arm in self.arms if arm not in JUDGES.values()] if "grpo+gcd" in self.arms else []
        found = {arm: paired(self.late_gaps("grpo+gcd", key), self.late_gaps(arm, key)) for arm in others}
        return {arm: difference for arm, difference in found.items() if difference["mean"] is not None}

    def less_grpo(self, key):
        """{arm: its late gap minus GRPO's, an interval over seeds}."""
        others = [arm for arm in self.arms if arm != "grpo"] if "grpo" in self.arms else []
        found = {arm: paired(self.late_gaps(arm, key), self.late_gaps("grpo", key)) for arm in others}
        return {arm: difference for arm, difference in found.items() if difference["mean"] is not None}

    def judges(self):
        """{kind of judge: the points of Figure 10b, of all seeds}, for the kinds that were run."""
        found = {kind: [line for seed in self.seeds for line in self.of(arm, seed)["judge"]]
                 for kind, arm in JUDGES.items() if arm in self.arms}
        return {kind: lines for kind, lines in found.items() if lines}

    def gradients(self):
        """{kind of judge: {number of conflict.products: its `estimate`, "cosine": conflict.cosine over the
        models, "stages": {iteration: that of one}}} of the kinds run."""
        found = {}
        for kind, arm in JUDGES.items():
            points = {seed: self.of(f"gradients, {arm}", seed) for seed in self.seeds
                      } if arm in self.arms else {}
            known = {key: estimate({seed: [point[key] for point in of_seed]
                                    for seed, of_seed in points.items()}) for key in conflict.NUMBERS}
            if all(known.values()):
                stages = [point["iteration"] for point in points[self.seeds[0]]]
                found[kind] = known | {"cosine": conflict.cosine(points), "stages": {
                    iteration: conflict.cosine({seed: [of_seed[i]] for seed, of_seed in points.items()})
                    for i, iteration in enumerate(stages)}}
        return found

    def shares(self, name):
        """{kind of token: its shares of the influence and of the tokens}, means over seeds; {} if unknown."""
        found = [shares for seed in self.seeds if (shares := self.of(name, seed)["tokens"])]
        kinds = dict.fromkeys(kind for shares in found for kind in shares)
        return {kind: {key: sum(shares[kind][key] for shares in found if kind in shares) / len(found)
                       for key in ("influence", "tokens")} for kind in kinds}


def verdict(tests):
    """yes if all tests hold, no if none does, else partly; not measurable without tests."""
    return "not measurable" if not tests else "yes" if all(tests) else "partly" if any(tests) else "no"


def spread(values):
    """Mean and standard error of the values; the error of a single value is infinite."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("inf")
    return statistics.fmean(values), error


def estimate(of_seed):
    """Mean with half its 95 % interval: over seeds or, of one seed, two standard errors over its values.

    of_seed: {seed: values, of which some may be None}; one seed's are taken as independent. None if no value
    is known.
    """
    known = {seed: found for seed, values in of_seed.items()
             if (found := [value for value in values if value is not None])}
    means = {seed: statistics.fmean(values) for seed, values in known.items()}
    if len(known) == 1:
        (values,) = known.values()
        return {"mean": statistics.fmean(values), "half": 2 * spread(values)[1], "seeds": means}
    return interval(means) if known else None


def figure_3a(results):
    """At most "partly", since strings stand in for a mathematics data set: if in household or ALFWorld the
    root mean square of the gradients' cosines or the cosine of hidden states is above that of strings, beyond
    the interval over seeds; else "no". "Not measurable" without strings or with one seed."""
    stand_in = STAND_IN_TEXT if STAND_IN in results.names else (": environments of different repetitiveness "
                                                               "are compared.")
    known = [difference for key in ("rms", "hidden") for difference in results.less_repetitive(key).values()
             if difference["half"] is not None]

    def text(key):
        return "; ".join(f"{name} {number(results.mean(name, 'similarity', key), '.2f')}"
                         for name in results.names)

    return {"paper": "Figure 3a", "picture": "coupling.similarity.svg",
            "claim": "Samples of a repetitive agent environment are far more similar than those of a "
            "mathematics data set.",
            "found": f"Root mean square cosine of gradients between tasks: {text('rms')}. Pairs with one "
            f"action: {text('same action')}. Mean cosine of hidden states: {text('hidden')}. There is no "
            f"mathematics here{stand_in}",
            "agrees": ("not measurable" if not known else
                       "partly" if any(sign_of(one) == 1 for one in known) else "no")}


def figure_3b(results):
    """Agrees if same-action pairs exceed different-action ones in 4 of 5 comparisons, and their mean is twice
    as high."""
    maps = {name: [results.mean(name, "heat", key) for key in ("same", "different", "above")]
            for name in results.agents if results.mean(name, "heat", "same") is not None}
    text = "; ".join(f"{name} {same:.2f} against {different:.2f}, above it in {above:.0%} of comparisons"
                     for name, (same, different, above) in maps.items())
    return {"paper": "Figure 3b", "picture": "coupling.heat.svg",
            "claim": "A gradient step on a sample raises those with the same action on other inputs most.",
            "found": "Change divided by the geometric mean of both turns' own changes, same-action turns of "
            f"other tasks against different-action ones: {text or 'no command was given twice'}.",
            "agrees": verdict([above >= 0.8 and same > 2 * abs(different)
                               for same, different, above in maps.values()])}


def figure_8(results):
    """Agrees if +GCD is above every other arm in both kinds of gap: see `common.agreement`."""
    signs, text = [], []
    for key in GAPS:
        for arm, difference in results.differences(key).items():
            signs.append((sign_of(difference), 1))
            text.append(f"{key}, +GCD minus {arm}: {with_half(difference, '+.2g')}")
    few = " One seed has no interval, so it cannot show a difference." if len(results.seeds) < 2 else ""
    return {"paper": "Figure 8", "picture": "coupling.gap.svg",
            "claim": "GCD widens the gap between same-class and cross-class influence, beyond GRPO and "
            "GiGPO.",
            "found": f"Last third of training: {'; '.join(text) or 'nothing to compare'}.{few}",
            "agrees": common.agreement(signs)}


def figure_9(results):
    """"Not measurable": a response has no reasoning, and nearly nothing but verbs and names to choose."""
    content = {name: [sum(share[key] for kind, share in shares.items() if kind not in influence.FORM)
                      for key in ("influence", "tokens")]
               for name in results.agents if (shares := results.shares(name))}
    text = "; ".join(f"{name} {of_influence:.1%} of the influence, {of_tokens:.1%} of the tokens"
                     for name, (of_influence, of_tokens) in content.items())
    return {"paper": "Figure 9", "picture": "coupling.tokens.svg",
            "claim": "The tokens that cause the similarity of an agent's samples are those of its actions "
            "and of its reasoning.",
            "found": "A small model's responses have no reasoning: verbs, names, words between them, and the "
            "stop token, whose choice is certain and so has no gradient. That verbs and names carry the "
            f"influence could not come out otherwise: {text or 'no two turns'}.", "agrees": "not measurable"}


def figure_10b(results):
    """Agrees if the cosine of the value head's expected gradient with the policy's is below 0 beyond its
    interval over seeds, and below the judge's beyond that of the difference; in part without the latter. "No"
    if it is not below 0 and its interval is above -SMALL; else "not measurable". Norms decide nothing."""
    known, text = results.gradients(), []
    for kind, found in known.items():
        cosine, *stages = ("unknown" if of is None else with_half(of, "+.2f")
                           for of in (found["cosine"], *found["stages"].values()))
        along = ", ".join(f"{one} at iteration {k}" for k, one in zip(found["stages"], stages))
        text.append(f"{kind}: cosine {cosine} ({along}); between two batches "
                    f"{with_half(found['between'], '+.4f')}, the policy's own "
                    f"{with_half(found['policy'], '+.3f')}, the judge's {with_half(found['judge'], '+.3f')}; "
                    f"norm, noise included, {found['ratio']['mean']:.1f} times the policy's")
    for kind, lines in results.judges().items():
        mean, error = spread([line["cosine"] for line in lines])
        text.append(f"{kind} in the runs' own steps: cosine {mean:+.3f} (standard error over iterations "
                    f"{error:.3f}), norm {statistics.fmean(line['ratio'] for line in lines):.1f} times the "
                    "policy's")
    agrees = "not measurable"
    judge, value = (known[kind]["cosine"] if kind in known else None for kind in JUDGES)
    if judge and value and len(results.seeds) > 1:
        if sign_of(value) == -1:
            agrees = "yes" if sign_of(paired(judge["seeds"], value["seeds"])) == 1 else "partly"
        elif value["mean"] - value["half"] > -SMALL:
            agrees = "no"
    return {"paper": "Figure 10b", "picture": "coupling.conflict.svg",
            "claim": "The value head's gradient conflicts with the policy's, the generative judge's does so "
            "less.", "found": ("Of the expected gradients, means over three models of a run: " if known
                              else "What noise leaves of a cosine was not measured: ")
            + f"{'; '.join(text) or 'neither was run'}.", "agrees": agrees}


# Figures

def draw(results, out):
    """Draw each figure of the paper; a panel without data says "not measurable"."""
    plotted = common.pyplot("coupling")
    draw_similarity(plotted, results, out / "coupling.similarity.svg")
    draw_heat(plotted, results, out / "coupling.heat.svg")
    draw_gap(plotted, results, out / "coupling.gap.svg")
    draw_tokens(plotted, results, out / "coupling.tokens.svg")
    draw_conflict(plotted, results, out / "coupling.conflict.svg")


def add_legend(axes, **legend):
    """Add a legend or, to axes without data, the text "not measurable"."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, **legend)
    else:
        axes.set_axis_off()
        axes.text(0.5, 0.5, "not measurable", ha="center", va="center", transform=axes.transAxes)


def draw_similarity(plotted, results, path):
    """Plot the distribution of the cosines of gradients, and means of gradients, hidden states, actions."""
    figure, (spread, bars) = plotted.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    known = {name: found for name in results.names if (found := results.of(name)["similarity"])}
    edges = [-1 + 2 * i / influence.BINS for i in range(influence.BINS + 1)]
    for name, found in known.items():
        spread.stairs(found["histogram"], edges, label=name, linewidth=1.3)
    spread.set(title="two turns of different tasks", xlabel="cosine of gradients (output layer)",
               ylabel="share of pairs", yscale="log")
    for i, (key, label) in enumerate((("rms", "cosine of gradients, root mean square"),
                                      ("hidden", "cosine of hidden states, mean"),
                                      ("same action", "share of pairs with the same action"))):
        bars.bar([k + 0.27 * (i - 1) for k in range(len(known))], [found[key] for found in known.values()],
                 0.25, label=label if known else None)
    bars.set_xticks(range(len(known)), [name.replace(" after ", "\nafter ") for name in known])
    bars.set(ylim=(0, 1.45))
    add_legend(spread, loc="upper left")
    add_legend(bars, loc="upper left")
    common.save(figure, path)


def draw_heat(plotted, results, path):
    """Draw a map per environment, turns sorted by action, the blocks of each action framed."""
    n, image = max(1, len(results.agents)), None
    figure, panels = plotted.subplots(1, n, figsize=(4.7 * n, 3.9), layout="constrained", squeeze=False)
    for axes, name in zip(panels[0], results.agents):
        axes.set_title(name)
        if (found := results.of(name)["heat"]) is None:
            add_legend(axes)
            continue
        image, start, middles = axes.imshow(found["matrix"], cmap="RdBu_r", vmin=-1, vmax=1), 0, {}
        for action, count in Counter(found["actions"]).items():
            axes.add_patch(plotted.Rectangle((start - 0.5, start - 0.5), count, count, fill=False))
            middles[action], start = start + (count - 1) / 2, start + count
        axes.set_yticks([*middles.values()], [*middles], fontsize=8)
        axes.set_xticks([])
        axes.set_xlabel("turn that changes")
    panels[0][0].set_ylabel("turn of the gradient step")
    if image:
        figure.colorbar(image, ax=panels[0], shrink=0.8, label="change / mean of own changes")
    common.save(figure, path)


def draw_gap(plotted, results, path):
    """Plot the gap over training, a line per arm, means over seeds with their 95 % intervals."""
    kinds = (("fixed", "gap", "influence per token pair"), ("fixed", "gap of cosines", "cosines"),
             ("refused", "gap of cosines", "cosines, good and refused"),
             ("own", "gap of cosines", "cosines, each model's own turns"))
    figure, panels = plotted.subplots(1, len(kinds), figsize=(15, 3.6), layout="constrained")
    for axes, (turns, key, title) in zip(panels, kinds):
        for arm in results.arms:
            of = {}
            for point in (point for seed in results.seeds for point in results.of(arm, seed)["path"]):
                if point[turns]:
                    of.setdefault(point["iteration"], []).append(point[turns][key])
            if of:
                (drawn,) = axes.plot([*of], [*map(statistics.fmean, of.values())], "o-", markersize=3,
                                     label=arm)
                bands = [interval(dict(enumerate(values))) for values in of.values()]
                if all(band["half"] is not None for band in bands):
                    axes.fill_between([*of], [band["mean"] - band["half"] for band in bands],
                                      [band["mean"] + band["half"] for band in bands],
                                      color=drawn.get_color(), alpha=0.12, linewidth=0)
        axes.axhline(0, color="grey", linewidth=0.6)
        axes.set(title=title, xlabel="iteration")
        if not axes.get_legend_handles_labels()[0]:
            add_legend(axes)
    lines = {label: line for axes in panels for line, label in zip(*axes.get_legend_handles_labels())}
    if lines:
        figure.legend(lines.values(), lines, loc="outside right center")
    panels[0].set_ylabel("same class minus cross class")
    common.save(figure, path)


def draw_tokens(plotted, results, path):
    """Plot the share of each kind of token in the influence and in the tokens."""
    n = max(1, len(results.agents))
    figure, panels = plotted.subplots(1, n, figsize=(3.7 * n, 3), layout="constrained", sharex=True,
                                      squeeze=False)
    for axes, name in zip(panels[0], results.agents):
        shares = results.shares(name)
        kinds = [*shares][::-1]
        for i, key in enumerate(("tokens", "influence")):
            axes.barh([k + 0.38 * (i - 0.5) for k in range(len(kinds))],
                      [shares[kind][key] for kind in kinds], 0.36, label=f"of the {key}" if kinds else None)
        axes.set_yticks(range(len(kinds)), kinds)
        axes.set(title=name, xlabel="share")
        add_legend(axes)
    common.save(figure, path)


def draw_conflict(plotted, results, path):
    """Plot cosine and norm ratio of the judge's gradient and the policy's, a point per iteration and seed,
    and the cosine between different batches, means over seeds, with its ceilings dashed."""
    figure, panels = plotted.subplots(1, 3, figsize=(13, 3.4), layout="constrained")
    for axes, key, title in zip(panels, ("cosine", "ratio"), ("cosine with the policy's gradient",
                                                              "norm over that of the policy's")):
        for kind, lines in results.judges().items():
            axes.plot([line["iteration"] for line in lines], [line[key] for line in lines], ".", label=kind)
        axes.set(title=title, xlabel="iteration")
    for kind, color in zip(results.gradients(), ("tab:blue", "tab:orange")):
        points = {}
        for point in (point for seed in results.seeds
                      for point in results.of(f"gradients, {JUDGES[kind]}", seed)):
            points.setdefault(point["iteration"], []).append(point)
        means = {key: [mean_known(point[key] for point in at) for at in points.values()]
                 for key in conflict.NUMBERS}
        means = {key: [math.nan if value is None else value for value in values]
                 for key, values in means.items()}
        most = [*map(conflict.ceiling, means["policy"], means["judge"])]
        for values, line, text in ((means["between"], "o-", kind), (most, "--", f"{kind}: ceiling")):
            panels[2].plot([*points], values, line, color=color, markersize=3, label=text)
    panels[2].set(title="between different batches", xlabel="iteration")
    for axes in panels:
        add_legend(axes)
    for axes in (panels[0], panels[2]):
        axes.axhline(0, color="grey", linewidth=0.6)
    panels[1].set_ylim(bottom=0)
    common.save(figure, path)


# The study

text_of = partial(with_half, form=".3f")


def page(results, figures, command, without):
    """The page's text, from its template in this folder."""
    def table(names, part, columns):
        rows = [[name, *(number(results.mean(name, part, key), form) for _, key, form in columns)]
                for name in names]
        return markdown(["", *(title for title, _, _ in columns)], rows)

    similar = table(results.names, "similarity", (
        ("pairs with the same action", "same action", ".2f"), ("cosine of gradients, mean", "mean", ".3f"),
        ("root mean square", "rms", ".2f"), ("same action", "mean of same action", ".2f"),
        ("different actions", "mean of different", ".3f"), ("hidden states", "hidden", ".2f")))
    heats = table(results.agents, "heat", (
        ("same action", "same", ".2f"), ("different actions", "different", ".3f"),
        ("same above different", "above", ".0%"), ("change, same action", "change same", ".1%"),
        ("different actions", "change different", ".1%"), ("nonlinearity", "nonlinear", ".1%")))
    columns = (("fixed", "gap", False), ("fixed", "gap", True), ("fixed", "gap of cosines", False),
               ("fixed", "gap of cosines", True), ("refused", "gap of cosines", True),
               ("own", "gap of cosines", True))
    rows = [[arm, *(text_of(interval({seed: gap for seed in results.seeds if (
        gap := results.gap(arm, seed, key, turns, late)) is not None})) for turns, key, late in columns)]
        for arm in results.arms]
    gaps = markdown(["", "gap, start", "late", "of cosines, start", "late", "good and refused, late",
                     "own turns, late"], rows)
    shares = {name: results.shares(name) for name in results.agents}
    kinds = dict.fromkeys(kind for of_name in shares.values() for kind in of_name)
    tokens = markdown(["", *kinds], [[name, *(
        "{influence:.1%} of {tokens:.1%}".format(**of_name[kind]) if kind in of_name else "–"
        for kind in kinds)] for name, of_name in shares.items()])
    return PAGE.read_text(encoding="utf-8").format(
        command=command, seeds=", ".join(map(str, results.seeds)), without=without,
        claims=common.claims_text(figures), tasks=influence.TASKS, batches=conflict.BATCHES,
        own=influence.STEP_NATS, similar=similar, heats=heats, gaps=gaps, gradients=gradients_table(results),
        tokens=tokens, counts=counts(results))


def gradients_table(results):
    """The table of Figure 10b's cosines."""
    columns = "between", "policy", "judge", "same", "ratio"
    rows = [[kind, text_of(found["cosine"]),
             "; ".join(f"{iteration}: {text_of(of)}" for iteration, of in found["stages"].items()),
             *(text_of(found[key]) for key in columns)] for kind, found in results.gradients().items()]
    return markdown(["", "cosine of the expected gradients", "by iteration", "between two batches",
                     "of two of the policy's", "of two of the judge's", "in one batch",
                     "norm, times the policy's"], rows) if rows else "Not measured.\n"


def counts(results):
    """The number of turns of each class of Figure 8, by seed."""
    text = []
    for seed in results.seeds if results.arms else ():
        point = results.of(results.arms[0], seed)["path"][0]
        found = (point["fixed"] or {}) | (point["refused"] or {})
        numbers = [f"{found[label]} {label}" for label in influence.CLASSES if label in found]
        text.append(f"seed {seed}: {', '.join(numbers) or 'not measurable'}")
    return "; ".join(text)


def options_of(argv):
    """Parse and check the command line."""
    parser = argparse.ArgumentParser("python -m lab.studies.coupling", description=__doc__.splitlines()[0],
                                     allow_abbrev=False)
    parser.add_argument("--seeds", default="0", help="seeds, separated by commas")
    parser.add_argument("--iterations", type=int, default=runs.ITERATIONS, help="RL iterations of each run")
    parser.add_argument("--turns", type=int, default=64, help="turns measured of each class, at most")
    parser.add_argument("--environments", default=",".join(runs.ENVIRONMENTS),
                        help="environments to measure")
    parser.add_argument("--arms", default=",".join(RL), help="arms of household, for Figures 8 and 10b")
    parser.add_argument("--games", default=GAMES, help="real ALFWorld games, as gcd.py's flag")
    parser.add_argument("--flags", default="", help="further flags of gcd.py for all runs")
    common.add_cells(parser, 2, runs.RUNS)
    options = parser.parse_args(argv)
    command = common.command_of(parser, options)
    common.split_lists(parser, options, environments=runs.ENVIRONMENTS, arms=RL)
    for name in ("environments", "arms"):
        if not getattr(options, name):
            parser.error(f"--{name}: expected one or more")
    common.check_ranges(parser, ("iterations", options.iterations, runs.EVERY, 10**4),
                        ("turns", options.turns, 2, 10**4), ("jobs", options.jobs, 0, 256))
    options.command = command
    return options


def main(argv=None):
    options = options_of(argv)
    out, environments, without = options.out, options.environments, ""
    if "alfworld" in environments and not (common.ROOT / options.games).exists():
        environments = [environment for environment in environments if environment != "alfworld"]
        without = f"Real ALFWorld was not measured: {options.games} does not exist (`--games`)."
        print(without, file=sys.stderr)
    try:
        results = Results(measured(options, environments), options.seeds)
    except (ValueError, jobs.Failed) as error:
        print(f"studies.coupling: error: {error}", file=sys.stderr)
        return 1
    figures = [figure(results) for figure in (figure_3a, figure_3b, figure_8, figure_9, figure_10b)]
    draw(results, out)
    text = page(results, figures, shlex.join(options.command), without)
    common.publish(out, "coupling", options.command, options.seeds, {
        "without": without, "gradients": results.gradients(),
        "late gap, +GCD minus": {key: results.differences(key) for key in GAPS},
        "late gap minus GRPO's": {key: results.less_grpo(key) for key in GAPS},
        "similarity minus that of strings": {key: results.less_repetitive(key) for key in ("rms", "hidden")},
    }, figures, text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
