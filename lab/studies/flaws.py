"""Do flawed actions survive training? Figures 1, 2, 5 and 11 of arXiv:2509.23870 on models kept during runs.

The measures are in lab/studies/flaw_measures.py; this file has the runs, means over seeds, and the comparison
with the paper. Figure 1 is measured on the repeats of each model's own episodes, as in the paper, and as a
control on repeats that are the same for all models. Every model plays the first tasks of `dev`, which no
table reports. Left out: what the gradients of two samples have in common (lab/studies/coupling.py).

    python -m lab.studies.flaws               # lab/results/studies/flaws.json, .md and a picture per figure
    python -m lab.studies.flaws --seeds 0,1,2,3,4            # about a quarter of a core-hour each
"""

import argparse
import statistics
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from lab.bench import jobs
from lab.bench.intervals import interval, markdown, mean_known, paired
from lab.studies import common, runs
from lab.studies.flaw_measures import (
    CLASSES,
    CONSISTENT,
    KINDS,
    MEMBERS,
    MOVED,
    TEMPERATURES,
    TRIALS,
    measured,
)

PAGE = Path(__file__).with_name("flaws.page.md")
CONVERGED = 200                          # iterations after which the paper's runs gain no more (Figure 11)
ENVIRONMENT, SPLIT, ARMS = "household", "dev", ("grpo", "grpo+gcd")
# Numbers of a final model at temperature 1 in which the arms are compared
COMPARED = {"probability to repeat": ("repeats", "confidence"), "success": ("own", "success"),
            "probability of flawed actions": ("confidence", "flawed", "mean"),
            "flawed share of turns": ("own", "shares", "flawed")}


# The runs, and one cell: all models of a run

def requested_runs(arms, twice, seeds, iterations, root):
    """{(arm, iterations, seed): Run} of the arms, of the longer runs, and of each seed's cold start.

    The arms in `twice` are trained twice as long, too, below root/twice. A cold start has 0 iterations.
    """
    found = {}
    for names, length, folder in ((arms, iterations, root), (twice, 2 * iterations, root / "twice")):
        made = runs.runs_of(ENVIRONMENT, names, seeds, iterations=length, root=folder)
        for (arm, seed), run in made.items():
            if run.start:                           # cold starts come first: use the shared one
                run = replace(run, start=found[run.start.row, 0, seed])
            found.setdefault((arm, run.iterations, seed), run)
    return found


def cell(made, name, settings):
    """Measure one run. made: {cell's name: Run}."""
    tasks = made[name].actor(0).config.environment.split_tasks(SPLIT)[:settings["tasks"]]
    actors = ((done, made[name].actor(done)) for done in settings["models"])
    return measured(actors, tasks, settings["places"], settings["seed"])


# Over seeds

def over_seeds(parts):
    """Average the results of several seeds, number by number, without None; None if none is known.

    Values with an interval over tasks: their mean, with half the t interval over seeds; of one seed its own.
    Wins are left out.
    """
    parts = [part for part in parts if part is not None]
    if not parts or not isinstance(parts[0], (dict, list)):
        return mean_known(parts)
    if isinstance(parts[0], list):
        return [over_seeds(column) for column in zip(*parts, strict=True)]
    if parts[0].keys() == {"value", "half"}:
        return parts[0] if len(parts) == 1 else value_and_half([part["value"] for part in parts])
    return {key: over_seeds([part[key] for part in parts]) for key in parts[0] if key != "wins"}


def value_and_half(values):
    """Mean of the seeds' values, and half its 95 % t interval over seeds, None of one."""
    found = interval(dict(enumerate(values)))
    return {"value": found["mean"], "half": found["half"]}


def pooled_ways(results):
    """`flaw_measures.rise_and_fall` of the turns of all seeds together, and "n": their number, that of risen
    ones, and of those that have fallen.

    No mean of the seeds' shares: where one turn rises, its fall would count as much as those of ten. Cells
    store shares, and from them the numbers are computed.
    """
    def pooled(temperature, kind):
        n = [0, 0, 0]
        for result in results:
            way = result["ways"][temperature][kind]
            turns = result["models"][0][temperature]["confidence"][kind]["turns"]
            risen = round(turns * (way["risen"] or 0))
            n = [a + b for a, b in zip(n, (turns, risen, round(risen * (way["fallen"] or 0))))]
        return {"n": n, "risen": n[1] / n[0] if n[0] else None, "fallen": n[2] / n[1] if n[1] else None}

    return {temperature: {kind: pooled(temperature, kind) for kind in ways}
            for temperature, ways in results[0]["ways"].items()}


def known_in(results, *path):
    """" (k/n)" if a number is known in k of n seeds' results only; "" if in all, or in none."""
    k = sum(read(result, *path) is not None for result in results)
    return "" if k in (0, len(results)) else f" ({k}/{len(results)})"


def more(short, long, temperature):
    """Final success of the runs twice as long minus that of the others, paired by seed.

    Returns `value_and_half` and the gain of each seed. short, long: lists of cells' results in the order of
    seeds.
    """
    before, after = ([result["models"][-1][temperature]["own"]["wins"] for result in results]
                     for results in (short, long))
    gains = [statistics.fmean((b - a) / MEMBERS for a, b in zip(*of_seed, strict=True))
             for of_seed in zip(before, after, strict=True)]
    return value_and_half(gains) | {"seeds": gains}


def less_first(results, seeds):
    """{arm: {text of COMPARED: the arm's number minus the first arm's, `paired` over seeds}}.

    results: {arm: cells' results in the order of seeds}.
    """
    def known(of_seeds, path):
        numbers = {seed: read(result, "models", -1, "1.0", *path) for seed, result in zip(seeds, of_seeds)}
        return {seed: number for seed, number in numbers.items() if number is not None}

    (_, first), *others = results.items()
    return {arm: {text: paired(known(ours, path), known(first, path)) for text, path in COMPARED.items()}
            for arm, ours in others}


def read(model, *path):
    """The number at a path of keys and indices of a result; None if it or a parent is None."""
    for key in path:
        model = None if model is None else model[key]
    return model


# Comparison with the paper

def as_text(value, form=".1%"):
    """A number as text."""
    return "not measurable" if value is None else f"{value:{form}}"


def with_half(part, form="+.3f"):
    """A value with half its interval as text."""
    half = "" if part is None or part["half"] is None else f" ± {part['half']:{form.strip('+')}}"
    return "not measurable" if part is None else f"{part['value']:{form}}{half}"


def way_text(way, what):
    """The share "risen" or "fallen" of `pooled_ways`, with its numbers."""
    total, part = way["n"][:2] if what == "risen" else way["n"][1:]
    return as_text(way[what]) + f" ({part}/{total})" * (way[what] is not None)


def repeats_survive(result):
    """Figure 1, of the repeats that each model chose itself, at temperature 1: "yes" if nine tenths or more
    of the initial confidence and of the initial share of consistent repeats are left at the end, "partly" if
    half or more of both are."""
    first, last = (result["models"][i]["1.0"]["chosen"]["own"] for i in (0, -1))
    if not (first["confidence"] and first["alike"]):
        return "not measurable"
    left = min((last[name] or 0.0) / first[name] for name in ("confidence", "alike"))
    return "yes" if left >= 0.9 else "partly" if left >= 0.5 else "no"


def flaws_lose(result):
    """Figure 2: "yes" if at the end, at temperature 1, all three kinds are more frequent in lost episodes
    than in won ones, and if an early flaw goes with losing the same task, all beyond their intervals;
    "partly" if some of this holds. A lost episode has more other turns anyway."""
    found = result["models"][-1]["1.0"]["own"]["won or lost"]
    parts = [*(found[kind]["difference"] for kind in KINDS), result["models"][0]["1.0"]["own"]["raised"]]
    known = [part for part in parts if part and part["half"] is not None]
    clear = sum(part["value"] > part["half"] for part in known)
    return "not measurable" if not known else "yes" if clear == len(parts) else "partly" if clear else "no"


def some_rise(result):
    """Figure 5: "yes" if good actions end with a higher probability, a tenth or more of the flawed ones rise
    during training (temperature 1), and half or more of these have fallen again at the end; "partly" if all
    but the last holds."""
    first, last = (result["models"][i]["1.0"]["confidence"]["good"]["mean"] for i in (0, -1))
    way = result["ways"]["1.0"]["flawed"]
    if first is None or way["risen"] is None:
        return "not measurable"
    if last <= first or way["risen"] < 0.1:
        return "no"
    return "yes" if way["fallen"] >= 0.5 else "partly"


def no_gain(gain, iterations):
    """Figure 11, that 200 iterations have converged: "not measurable" by runs shorter than that.

    Else "no" if success rises with twice the iterations, beyond its interval, "yes" if it does not and the
    interval excludes more than 5 points, else "partly".
    """
    if gain is None or gain["half"] is None or iterations < CONVERGED:
        return "not measurable"
    low, high = gain["value"] - gain["half"], gain["value"] + gain["half"]
    return "no" if low > 0 else "yes" if high <= 0.05 else "partly"


def entries(found, results, gains, iterations):
    """The study's results on the paper's four figures, for `common.publish`.

    found: {(arm, whether twice as long): its result over seeds}; results: those of its cells. iterations: of
    a usual run.
    """
    short = {arm: result for (arm, twice), result in found.items() if not twice}
    first, of_first = (of[next(iter(found))] for of in (found, results))

    def ends(*path):
        """A number at the start and the end of training, for each arm."""
        texts = [(arm, [as_text(read(result, "models", i, *path), ".2f")
                        + known_in(results[arm, False], "models", i, *path) for i in (0, -1)])
                for arm, result in short.items()]
        return ", ".join(f"{before} to {after} ({title(arm)})" for arm, (before, after) in texts)

    def of_seeds(*path):
        """A number of the first arm with its interval."""
        return with_half(read(first, *path)) + known_in(of_first, *path)

    own, fixed, way = ("chosen", "own"), ("chosen", "initial"), first["ways"]["1.0"]["flawed"]
    raised = of_seeds("models", 0, "1.0", "own", "raised")
    lost = ", ".join(f"{kind} " + of_seeds("models", -1, "1.0", "own", "won or lost", kind, "difference")
                     for kind in KINDS)
    gained = "; ".join(f"{title(arm)} {with_half(of_arm['1.0'])}, at temperature 0.4 "
                       f"{with_half(of_arm['0.4'])}" for arm, of_arm in gains.items())
    figures = [
        ("1", "Repeats survive training: confidence in them stays or grows, and so does the share of states "
         "in which five or more of ten trials repeat the same command.",
         "Turns of a model's own episodes that repeat a command in the same state, as in the paper: "
         f"probability of the command: {ends('1.0', *own, 'confidence')}; at temperature 0.4: "
         f"{ends('0.4', *own, 'confidence')}. Those with {CONSISTENT} or more of {TRIALS} new responses "
         f"equal to it: {ends('1.0', *own, 'alike')}; at 0.4: {ends('0.4', *own, 'alike')}. Repeats among "
         f"all turns: {ends('1.0', 'own', 'shares', 'repeated')}; at 0.4: "
         f"{ends('0.4', 'own', 'shares', 'repeated')}. Such turns are chosen by what the model did, so "
         "likely commands are over-represented. The same measures on the start model's repeats, which do "
         f"not change: {ends('1.0', *fixed, 'confidence')}; {ends('1.0', *fixed, 'alike')}. Probability to "
         "repeat any command where one could, in states of the start model's episodes: "
         f"{ends('1.0', 'repeats', 'confidence')}; at 0.4: {ends('0.4', 'repeats', 'confidence')}.",
         repeats_survive(first)),
        ("2", "Some flawed actions are more frequent in failed episodes than in successful ones, so that "
         "their expected advantage is negative.",
         f"Shares of turns in lost episodes minus those in won ones, {title(next(iter(short)))} at its "
         f"end: {lost}. Within a task, an early flaw of the initial model goes with a probability to lose "
         f"that is higher by r = {raised}.", flaws_lose(first)),
        ("5", "Good actions become consistent; some flawed ones rise with them, and fall only once the "
         "probability of the good ones is high.",
         f"Probability of good actions: {ends('1.0', 'confidence', 'good', 'mean')}; of flawed ones: "
         f"{ends('1.0', 'confidence', 'flawed', 'mean')}; of refused ones: "
         f"{ends('1.0', 'confidence', 'refused', 'mean')}. Of the flawed turns of all seeds "
         f"{way_text(way, 'risen')} rise by {MOVED} or more during training, and of these "
         f"{way_text(way, 'fallen')} have fallen again.",
         some_rise(first)),
        ("11", "200 iterations have converged: training on does not improve the model.",
         (f"The claim was not tested: the runs here have {iterations} iterations. "
          if iterations < CONVERGED else "")
         + "Runs twice as long are other runs, whose learning rate is decayed over their own length, not the "
         f"same ones trained on. Their success minus that of the shorter: {gained or 'not measurable'}.",
         no_gain(next(iter(gains.values()))["1.0"] if gains else None, iterations))]
    return [{"paper": f"Figure {number}", "claim": claim, "found": text, "agrees": agrees,
             "picture": f"flaws.figure{number}.svg"} for number, claim, text, agrees in figures]


def title(arm):
    """An arm's name as in the paper."""
    return arm.replace("grpo", "GRPO").replace("gigpo", "GiGPO").replace("+gcd", "+GCD")


# Figures

COLORS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple")      # of the arms, in order
DASHES = {"1.0": "-", "0.4": "--"}


def line(axes, result, path, **style):
    """Plot a number over a run's models, without those for which it is not measurable."""
    points = [(model["done"], read(model, *path)) for model in result["models"]]
    known = [point for point in points if point[1] is not None]
    axes.plot([done for done, _ in known], [value for _, value in known], marker="o", markersize=3, **style)


def finish(figure, panels, path):
    """Finish the panels, {axes: (title, y label)}, and save the figure."""
    for axes, (text, label) in panels.items():
        axes.set_title(text, fontsize=10)
        axes.set(xlabel="RL iterations", ylabel=label)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7, handlelength=3)
    common.save(figure, path)


def draw(found, out):
    """Draw the four figures, OUT/flaws.figureN.svg. found: {(arm, whether twice as long): result}."""
    plotted = common.pyplot("flaws")
    short = {arm: result for (arm, twice), result in found.items() if not twice}
    colors = dict(zip(short, COLORS))

    def panels(rows, columns, **more):
        return plotted.subplots(rows, columns, figsize=(3.8 * columns, 3.5 * rows), layout="constrained",
                                squeeze=False, **more)

    (figure, axes_RC), texts = panels(3, 3), {}
    numbers = {"confidence": "probability to repeat, exact", "trials": "share of trials that repeat",
               "alike": f"states with {CONSISTENT} or more of {TRIALS} equal"}
    for row, (path, states) in zip(axes_RC, (
            (("chosen", "own"), "each model's own repeats (the paper's)"),
            (("chosen", "initial"), "the start model's own repeats"),
            (("repeats",), "all states in which it could repeat"))):
        for axes, (name, text) in zip(row, numbers.items()):
            for arm, result in short.items():
                for temperature, dash in DASHES.items():
                    line(axes, result, (temperature, *path, name), color=colors[arm], linestyle=dash,
                         label=f"{title(arm)}, temperature {temperature}")
            texts[axes] = text, states if name == "confidence" else ""
    finish(figure, texts, out / "flaws.figure1.svg")

    figure, ((*axes_3,),) = panels(1, 3)
    for axes, kind in zip(axes_3, KINDS):
        for arm, result in short.items():
            for which, dash in (("lost", "-"), ("won", "--")):
                line(axes, result, ("1.0", "own", "won or lost", kind, which), color=colors[arm],
                     linestyle=dash, label=f"{title(arm)}, {which} episodes")
    finish(figure, {axes: (f"{kind} turns", "mean share of an episode's turns")
                    for axes, kind in zip(axes_3, KINDS)}, out / "flaws.figure2.svg")

    (figure, axes_RC), texts = panels(2, len(short), sharey=True), {}
    for row, temperature in zip(axes_RC, DASHES):
        for axes, (arm, result) in zip(row, short.items()):
            for name, color in zip(CLASSES, ("tab:green", "tab:red", "tab:gray")):
                turns = result["models"][0][temperature]["confidence"][name]["turns"]
                line(axes, result, (temperature, "confidence", name, "mean"), color=color,
                     linestyle=DASHES[temperature], label=f"{name} ({turns:.0f} turns a seed)")
            texts[axes] = f"{title(arm)}, temperature {temperature}", "probability of the command"
    finish(figure, texts, out / "flaws.figure5.svg")

    figure, ((*axes_2,),) = panels(1, 2, sharey=True)
    for axes, temperature in zip(axes_2, DASHES):
        for (arm, twice), result in found.items():
            line(axes, result, (temperature, "own", "success"), color=colors[arm],
                 linestyle="--" if twice else "-", label=length_of(arm, twice))
    finish(figure, {axes: (f"temperature {temperature}", f"success on {SPLIT}")
                    for axes, temperature in zip(axes_2, DASHES)}, out / "flaws.figure11.svg")


def length_of(arm, twice):
    """A run's name."""
    return title(arm) + (", twice as long" if twice else "")


# The page

def tables(found, results):
    """{placeholder of the page: table}: numbers at start and end of every run, at both temperatures.

    found, results: as of `entries`.
    """
    def table(columns):
        """columns: {head: (path, function that formats the number)}."""
        rows = []
        for (arm, twice), result in found.items():
            for i in (0, -1):
                rows += [[length_of(arm, twice), f"{result['models'][i]['done']:g}", temperature,
                          *(form(read(result, "models", i, temperature, *path))
                            + known_in(results[arm, twice], "models", i, temperature, *path)
                            for path, form in columns.values())] for temperature in DASHES]
        return markdown(["arm", "iterations", "temperature", *columns], rows)

    def three(value):
        return as_text(value, ".3f")

    def as_count(value):
        return as_text(value, ".0f")

    def share_of(kind, which):
        return "own", "won or lost", kind, which

    ways = [[length_of(*name), temperature, *(way_text(result["ways"][temperature][kind], what)
                                              for kind in CLASSES for what in ("risen", "fallen"))]
            for name, result in found.items() for temperature in DASHES]

    def of_repeats(*path):
        return table({head: ((*path, name), three) for head, name in (
            ("probability to repeat", "confidence"), ("an accepted command", "accepted"),
            ("a refused one", "refused"), ("trials that repeat", "trials"),
            (f"{CONSISTENT} or more equal", "alike"))} | {"states a seed": ((*path, "places"), as_count)})

    return {
        "chosen": of_repeats("chosen", "own"), "same": of_repeats("chosen", "initial"),
        "repeats": of_repeats("repeats"),
        "frequency": table({f"{kind}, {which}": (share_of(kind, which), three)
                            for kind in KINDS for which in ("won", "lost")}),
        "differences": table({kind: (share_of(kind, "difference"), with_half) for kind in KINDS}
                             | {"r": (("own", "raised"), with_half)}),
        "confidence": table({name: (("confidence", name, "mean"), three) for name in CLASSES}),
        "ways": markdown(["arm", "temperature", *(f"{kind}: {what}" for kind in CLASSES
                                                  for what in ("risen", "fallen again"))], ways),
        "success": table({"success": (("own", "success"), three)}
                         | {kind: (("own", "shares", kind), three) for kind in KINDS})}


def by_seed(differences, base):
    """What `less_first` returns, less the first arm `base`, as lines of text."""
    return "\n".join(
        f"* {title(arm)} minus {title(base)}, {text}: "
        + ("not measurable" if of["mean"] is None else
           f"{with_half({'value': of['mean'], 'half': of['half']})}; by seed "
           + ", ".join(f"{value:+.3f}" for value in of["seeds"].values()))
        for arm, of_arm in differences.items() for text, of in of_arm.items()
    ) or "One arm: nothing to compare."


# The study

def study(options, command):
    """Make missing runs, measure missing cells, and write the files; returns the page."""
    arms, twice, seeds, out = options.arms, options.twice, options.seeds, options.out
    kept = requested_runs(arms, twice, seeds, options.iterations, options.runs)
    made = {f"{arm} {length} seed{seed}": run for (arm, length, seed), run in kept.items() if length}
    requested = {name: {"arm": run.row, "iterations": run.iterations, "seed": run.seed,
                        "tasks": options.tasks, "places": options.places,
                        "chosen": True,                      # absent in cells without this measure
                        "models": measured_models(run.iterations, options)}
                 for name, run in made.items()}
    missing = common.missing_cells(out / "flaws.jsonl", requested, options)
    needed = {run for name in missing for run in (made[name], made[name].start)}
    runs.make({key: run for key, run in kept.items() if run in needed}, options.jobs)
    done = common.all_cells(out / "flaws.jsonl", requested, partial(cell, made), options)
    results = {}
    for name, run in made.items():
        results.setdefault((run.row, run.iterations > options.iterations), []).append(done[name])
    found = {name: over_seeds(of_seeds) | {"ways": pooled_ways(of_seeds)}
             for name, of_seeds in results.items()}
    gains = {arm: {str(t): more(results[arm, False], results[arm, True], str(t)) for t in TEMPERATURES}
             for arm in twice}
    draw(found, out)
    against = less_first({arm: of_arm for (arm, longer), of_arm in results.items() if not longer}, seeds)
    figures = entries(found, results, gains, options.iterations)
    texts = {figure["picture"].split(".")[1]: f"{figure['found']} Agrees with the paper: {figure['agrees']}."
            for figure in figures}
    page = PAGE.read_text(encoding="utf-8").format(
        command=" ".join(command), seeds=",".join(map(str, seeds)), tasks=options.tasks, members=MEMBERS,
        arms=" and ".join(map(title, arms)), against=by_seed(against, arms[0]), **texts,
        **tables(found, results))
    common.publish(out, "flaws", command, seeds, {
        "arms": [{"arm": arm, "twice": longer} | found[arm, longer] for arm, longer in found],
        "twice less once": gains, "less the first arm": against}, figures, page)
    return page


def measured_models(length, options):
    """Iterations whose models are measured: the same number of models for any length of run."""
    return list(range(0, length + 1, options.every * length // options.iterations))


def check(parser, options):
    """Check the options before anything runs; an error is one line."""
    trained = [arm for arm, (start, _) in runs.ARMS.items() if start]
    common.split_lists(parser, options, arms=trained, twice=options.arms.split(","))
    if not options.arms:
        parser.error(f"--arms=: expected some of {','.join(trained)}")
    common.check_ranges(
        parser, ("iterations", options.iterations, 1, 10**4), ("every", options.every, 1, options.iterations),
        ("tasks", options.tasks, 2, 256), ("places", options.places, 1, 10**6),
        ("jobs", options.jobs, 0, 256))
    if options.iterations % options.every or options.every % runs.EVERY:
        parser.error(f"--every={options.every}: expected a multiple of {runs.EVERY} that divides "
                     f"--iterations={options.iterations}")


def main(argv=None):
    parser = argparse.ArgumentParser("python -m lab.studies.flaws", description=__doc__.splitlines()[0],
                                     allow_abbrev=False)
    for flag, default, text in (
            ("seeds", "0,1", "seeds of the runs"),
            ("arms", ",".join(ARMS), "arms of lab/studies/runs.py; the first in its order is the reference"),
            ("twice", "grpo", "arms that are trained twice as long, too; empty: none"),
            ("iterations", runs.ITERATIONS, "RL iterations"),
            ("every", 10, "iterations between measured models; doubled in a run twice as long"),
            ("tasks", 32, f"tasks of {SPLIT} that each model plays, {MEMBERS} episodes each"),
            ("places", 100, "states of each kind in which repeats are measured")):
        parser.add_argument(f"--{flag}", type=type(default), default=default, help=text)
    common.add_cells(parser, 2, runs.RUNS)
    options = parser.parse_args(argv)
    command = common.command_of(parser, options)
    check(parser, options)
    try:
        print(study(options, command))
    except (ValueError, jobs.Failed) as error:
        parser.exit(1, f"{parser.prog}: error: {error}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
