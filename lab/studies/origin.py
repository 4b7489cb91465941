"""What GRPO can add to its base model: the claims of arXiv:2510.15990, tested including pretraining.

A small model is pretrained on strings (lab/envs/strings.py) with a share rho of problems outside the main
distribution on each of four axes: more operations, longer strings, other letters, unseen pairs of
operations. GRPO then trains on one axis. Measured before and after: pass@1 to pass@256 on 64 new problems,
and with it the base's probability Q of a correct response; the same from checkpoints of pretraining;
alternatives to GRPO; and other methods of RL beside the base sampled at lower temperatures. On a toy whose
responses can be enumerated, the end points of GRPO with each kind of KL are compared with closed forms
(lab/studies/tilting.py). Left out: text games, except for one comparison.

    python -m lab.studies.origin              # one seed, rho .01: ten minutes on two cores
    python -m lab.studies.origin --all        # five seeds of everything; about four core-hours
    python -m lab.studies.origin --jobs 0     # only the page, which always covers all stored cells
"""

import argparse
import itertools
import math
import statistics
import sys
from functools import partial
from pathlib import Path

from lab.bench.intervals import interval, markdown, mean_known, paired, percent, sign_of, with_half
from lab.envs import strings
from lab.envs.strings import AXES, HELD_OUT
from lab.studies import common, origin_cells, tilting
from lab.studies.origin_cells import (
    AGENT,
    BETA,
    EACH,
    INSTEAD,
    K1,
    K1_PAIRS,
    K3,
    KINDS,
    KS,
    LONGER,
    METHODS,
    METHODS_AT,
    MIDDLE,
    OMITTING,
    RHOS,
    STEPS,
    TEMPERATURES,
    TOY_GROUP,
    base_at,
    omitted_pair,
)

PAGE = Path(__file__).with_name("origin.page.md")


# Running

def results_of(everything, requested, options):
    """Run the requested cells that are missing, seed by seed (--jobs 0: none).

    First the bases, then GRPO, then the alternatives, which get as many tokens as GRPO sampled. Returns
    {name: result} of every stored cell.
    """
    path = options.out / "origin.jsonl"
    work = partial(origin_cells.run, runs=options.runs, results=path)
    missing = common.missing_cells(path, requested, options)
    for _, cells in itertools.groupby(missing.items(), lambda cell: cell[1]["seed"]):
        cells = dict(cells)
        bases = {str(origin_cells.base_of(settings, options.runs)): settings
                 for settings in cells.values() if settings["what"] != "agent"}
        common.make_runs(bases, origin_cells.pretrain, options.jobs, "pretraining")
        for instead in (False, True):
            common.run_cells(path, {name: settings for name, settings in cells.items()
                                if (settings["what"] in INSTEAD) == instead}, work, options)
    return common.stored_cells(path, everything)


def main(argv=None):
    parser = argparse.ArgumentParser("python -m lab.studies.origin", description=__doc__.splitlines()[0],
                                     allow_abbrev=False)
    parser.add_argument("--all", action="store_true",
                        help="run every rho, no positions, alternatives, and methods of RL")
    parser.add_argument("--seeds", type=int, help="number of seeds, from 0 (default 1; with --all 5)")
    common.add_cells(parser, 2, origin_cells.RUNS, "runs")
    options = parser.parse_args(argv)
    seeds = options.seeds if options.seeds is not None else len(origin_cells.SEEDS) if options.all else 1
    common.check_ranges(parser, ("seeds", seeds, 1, 90), ("jobs", options.jobs, 0, 256))
    everything = origin_cells.cells_of(True, range(max(seeds, len(origin_cells.SEEDS))))
    try:
        results = results_of(everything, origin_cells.cells_of(options.all, range(seeds)), options)
    except ValueError as error:
        parser.error(str(error))
    if not any(everything[name]["what"] == "GRPO" for name in results):
        parser.error(f"--jobs=0: {options.out / 'origin.jsonl'} has no run of GRPO")
    there = sorted({everything[name]["seed"] for name in results})
    found = findings(everything, results)
    draw_axes(found["axes"], options.out / "origin.svg")
    draw_saturation(found["saturation"], options.out / "origin.saturation.svg")
    draw_masses(found, options.out / "origin.toy.svg")
    draw_methods(found["methods"], options.out / "origin.methods.svg")
    seeds = max(seeds, there[-1] + 1)                  # the stored cells may be of a larger study
    more = options.all or not {*results} <= {*origin_cells.cells_of(False, range(seeds))}
    command = ["python", "-m", "lab.studies.origin", *(["--all"] if more else []), "--seeds", str(seeds)]
    text = page(found, " ".join(command), there, len(results), len(everything))
    common.publish(options.out, "origin", command, there, found, figures_of(found), text)
    print(text)
    return 0


# Analysis

def passes(right, k, each=None):
    """Mean pass@k over problems. right: number of correct responses of `each` (None: EACH) per problem."""
    return statistics.fmean(tilting.pass_at(k, each or EACH, c) for c in right)


def compared(before, after):
    """Intervals of the base, of GRPO and of the gain. before, after: {seed: value}."""
    return {"base": interval(before), "GRPO": interval(after), "gain": paired(after, before)}


def findings(everything, results):
    """All numbers of the page, from the stored cells."""
    cells = [(settings, results[name]) for name, settings in everything.items() if name in results]
    bases = {(s["rho"], s["positions"], s["seed"]): result for s, result in cells if s["what"] == "base"}
    trained, instead, omitting = {}, {}, {}
    for settings, result in cells:
        key = settings.get("rho"), settings.get("positions"), settings["seed"]
        if settings["what"] == "GRPO" and key in bases:
            trained.setdefault((settings["axis"], *key[:2]), {})[key[2]] = bases[key], result
        if settings["what"] in INSTEAD:
            instead.setdefault((settings["axis"], settings["what"]), {})[key[2]] = bases[key], result
        if settings["what"] == OMITTING:
            omitting.setdefault(settings["rho"], {})[key[2]] = result
    axes = [axis_row(*key, of_seed) for key, of_seed in trained.items()]
    return {"axes": axes, "gain": gains(trained),
            "saturation": saturation(cells),
            "instead": [instead_row(axis, how, of_seed, trained) for (axis, how), of_seed in instead.items()],
            "omitted": [row for rho, of_seed in omitting.items() for row in omitted_rows(
                rho, of_seed, trained.get(("composition", rho, "rotary"), {}))],
            "composing": composing_rows(trained, omitting),
            "methods": [row for axis, rho in METHODS_AT
                        for row in method_rows(axis, rho, {s["seed"]: result for s, result in cells if (
                            s["what"], s.get("axis"), s.get("rho")) == ("methods", axis, rho)})],
            "agent": agent_rows({s["seed"]: result for s, result in cells if s["what"] == "agent"}),
            "toy": {kind: toy_row(kind, results) for kind in KINDS
                    if (results := [result for s, result in cells if s.get("kind") == kind])},
            "groups": group_rows()}


def axis_row(axis, rho, positions, of_seed):
    """An axis at one rho: pass@k before and after, and new solutions. of_seed: {seed: (base, result)}."""
    def both(split, k):
        each = EACH if split == axis else EACH // 16
        return compared({seed: passes(base["right"][split], k) for seed, (base, _) in of_seed.items()},
                        {seed: passes(result["right"][split], k, each)
                         for seed, (_, result) in of_seed.items()})

    curve = {k: both(axis, k) for k in KS}
    pairs = [pair for base, result in of_seed.values()
             for pair in zip(base["right"][axis], result["right"][axis])]
    crossing = next((k for k in KS if curve[k]["gain"]["mean"] <= 0 < curve[k]["base"]["mean"]), None)
    passed = next((k for k in KS if sign_of(curve[k]["gain"]) == -1), None)          # beyond the interval
    return {"axis": axis, "rho": rho, "positions": positions, "curve": curve, "id": both("id", 1),
            "unsolved": sum(not b for b, _ in pairs), "newly_solved": sum(not b and a > 0 for b, a in pairs),
            "lost": sum(b > 0 and not a for b, a in pairs),
            "by_second_half": by_second_half(b for b, _ in pairs),
            "problems": len(pairs), "crossing": crossing, "passed": passed,
            "rare": share([result["rare"] for _, result in of_seed.values()]),
            "rare_before": share([base["rare"][axis] for base, _ in of_seed.values()])}


def share(rare):
    """The share of correct responses that are rare, over seeds; None without correct responses."""
    n = sum(one["right"] for one in rare)
    return sum(one["below"] for one in rare) / n if n else None


BINS = (0, 1e-9, 0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0000001)


def gains(trained):
    """Gain by the base's Q over all problems of the runs, and the shift of log-odds that fits it best.

    trained: {(axis, rho, positions): {seed: (base, result)}}. gain: all problems have the same weight. half:
    of the interval over the seeds' means, None for one seed, because the problems of a seed share a base.
    "fitted": the problems that have a shift, those with 0 < Q < 1. "unsolved": of problems with a Q of 0 the
    number and the gain on each axis at each rho, of which the first bin is a mixture.
    """
    tried, unsolved = [], []
    for (axis, rho, positions), of_seed in trained.items():
        of_axis = [(seed, b / EACH, a / EACH) for seed, (base, result) in of_seed.items()
                   for b, a in zip(base["right"][axis], result["right"][axis])]
        gain = [p for _, q, p in of_axis if not q]
        unsolved.append({"axis": axis, "rho": rho, "positions": positions, "n": len(gain),
                         "gain": mean_known(gain)})
        tried += of_axis
    bins = []
    for low, high in itertools.pairwise(BINS):
        inside = [(seed, q, p) for seed, q, p in tried if low <= q < high]
        if len(inside) > 1:
            gain = {seed: statistics.fmean(p - q for one, q, p in inside if one == seed)
                    for seed in sorted({seed for seed, _, _ in inside})}
            bins.append({"low": low, "high": min(high, 1), "n": len(inside), "half": interval(gain)["half"],
                         "gain": statistics.fmean(p - q for _, q, p in inside),
                         "q": statistics.fmean(q for _, q, _ in inside),
                         "shift": tilting.shift_of([(q, p) for _, q, p in inside])})
    return {"bins": bins, "shift": tilting.shift_of([(q, p) for _, q, p in tried]), "problems": len(tried),
            "fitted": sum(0 < q < 1 for _, q, _ in tried), "unsolved": unsolved}


def by_second_half(right):
    """How many problems have their first right response in the second half of EACH tries, in expectation over
    the order of the tries. right: of each problem the number of its right responses.
    """
    return sum(math.comb(EACH - n, EACH // 2) for n in right if n) / math.comb(EACH, EACH // 2)


def saturation(cells):
    """By steps of pretraining (None: all): pass@1 on "id" before GRPO on "id", and its gain."""
    found = {}
    for settings, result in cells:
        if settings["what"] == "saturation":
            found.setdefault(settings["steps"], {})[settings["seed"]] = result
    return [{"steps": steps or None} | {
        "base": interval({seed: passes(result["before"], 1) for seed, result in of_seed.items()}),
        "gain": interval({seed: passes(result["after"], 1) - passes(result["before"], 1)
                          for seed, result in of_seed.items()})}
        for steps, of_seed in sorted(found.items(), key=lambda item: item[0] or math.inf)]


def instead_row(axis, how, of_seed, trained):
    """An alternative to GRPO: its gain at pass@1 and at pass@256, and its gain minus GRPO's."""
    gain = {k: {seed: passes(result["right"][axis], k) - passes(base["right"][axis], k)
                for seed, (base, result) in of_seed.items()} for k in (1, EACH)}
    grpo_gain = {seed: passes(result["right"][axis], 1) - passes(base["right"][axis], 1)
              for seed, (base, result) in trained[axis, MIDDLE, "rotary"].items()}
    return {"axis": axis, "how": how, "gain": interval(gain[1]), "gain_256": interval(gain[EACH]),
            "less_GRPO": paired(gain[1], grpo_gain)}


def composing():
    """The places in the composition split of the problems that compose something: the last operation of the
    others changes nothing, as `reverse` does after `mirror`, whose result is a palindrome.
    """
    problems = [task.problem for task in strings.Environment().split_tasks("composition")]
    return [i for i, problem in enumerate(problems)
            if len({*strings.solution(problem.text, problem.operations, problem.letters)[-2:]}) == 2]


def composing_rows(trained, omitting):
    """What composition shows on all of its problems and on those alone that compose something: the gain, new
    solutions by pair of operations, and `omitted_rows`, by rho of the omitted pairs' runs. {} without these.
    """
    if not omitting:
        return {}
    n = min(len(result["right"]["composition"]) for of_seed in omitting.values()
            for result in of_seed.values())                                    # a small study has fewer
    kept = [i for i in composing() if i < n]
    found = {"idle": n - len(kept), "problems": n}
    for name, places in {"all": range(n), "composing": kept}.items():
        of_rho = {rho: trained.get(("composition", rho, "rotary"), {}) for rho in omitting}
        found[name] = {
            "gain": {rho: compared(*({seed: passes([pair[k]["right"]["composition"][i] for i in places], 1)
                                      for seed, pair in of_seed.items()} for k in (0, 1)))
                     for rho, of_seed in of_rho.items()},
            "new": new_by_pair([pair for of_seed in of_rho.values() for pair in of_seed.values()], places),
            "omitted": [row for rho, of_seed in omitting.items()
                        for row in omitted_rows(rho, of_seed, of_rho[rho], places)]}
    return found


def new_by_pair(runs, places):
    """{"base solves others of the pair" or "base solves none of it": [new solutions, problems that the base
    does not solve]} of (base, result), among these places of the split.
    """
    found = {"base solves others of the pair": [0, 0], "base solves none of it": [0, 0]}
    for base, result in runs:
        before, after = base["right"]["composition"], result["right"]["composition"]
        for pair in range(len(HELD_OUT)):
            here = [i for i in places if i % len(HELD_OUT) == pair]
            unsolved = [i for i in here if not before[i]]
            side = [*found][len(unsolved) == len(here)]
            found[side][0] += sum(after[i] > 0 for i in unsolved)
            found[side][1] += len(unsolved)
    return found


def omitted_rows(rho, of_seed, trained, places=None):
    """The gains on composition, on the problems of the pair that RL omits and on those of the other five, of
    RL without that pair and with all six, from the same base, and their difference, at k = 1 and 256.

    of_seed: {seed: result} without the pair; trained: {seed: (base, result)} with all. places: the problems
    of the split that count (None: all); a seed whose pair has none of them is left out. Problem i of the
    split has pair i, modulo their number.
    """
    seeds = [seed for seed in of_seed if seed in trained and (
        places is None or any(i % len(HELD_OUT) == omitted_pair(seed) for i in places))]
    results = {"base": {seed: trained[seed][0] for seed in seeds}, "five": of_seed,
               "six": {seed: trained[seed][1] for seed in seeds}}

    def row(omitted):
        curve = {}
        for k in (1, EACH):
            base, five, six = ({seed: passes(
                [n for i, n in enumerate(of[seed]["right"]["composition"])
                 if (i % len(HELD_OUT) == omitted_pair(seed)) == omitted
                 and (places is None or i in places)], k) for seed in seeds}
                for of in results.values())
            curve[k] = {"base": interval(base), "five": paired(five, base), "six": paired(six, base),
                        "five_less_six": paired(five, six)}
        return {"rho": rho, "problems": "the omitted pair" if omitted else "the other five", "curve": curve}

    return [row(True), row(False)]


def method_rows(axis, rho, of_seed):
    """The base at each temperature and each method of RL on an axis: pass@k, its gain on the base at
    temperature 1, and its difference to GRPO, at k = 1 and at the largest k. of_seed: {seed: result}."""
    names = [*map(base_at, TEMPERATURES), *METHODS] if of_seed else []
    known = {how: {k: {seed: passes(result["right"][how], k) for seed, result in of_seed.items()} for k in KS}
             for how in names}
    return [{"axis": axis, "rho": rho, "how": how, "curve": {k: interval(known[how][k]) for k in KS},
             "gain": {k: paired(known[how][k], known[base_at(1)][k]) for k in (1, KS[-1])},
             "less_GRPO": {k: paired(known[how][k], known["GRPO"][k]) for k in (1, KS[-1])}}
            for how in names]


def agent_rows(of_seed):
    """The agent's pass@k on task types without RL training, {k: base, GRPO, gain}; None: not run."""
    if not of_seed:
        return None
    trials = AGENT[-1]
    return {k: compared(*({seed: passes(result[name], k, trials) for seed, result in of_seed.items()}
                          for name in ("base", "GRPO")))
            for k in (2**i for i in range(trials.bit_length()))}


# Closed forms of p that need nothing but Q; k3's needs the base's probability of each token
FORMS = {K1: tilting.tilted, K1_PAIRS: tilting.tilted, "k1, reward over its std": tilting.std_mass}


def toy_row(kind, results):
    """One kind of KL on the toy: (Q, p) of every problem, the shift, and the distance to its closed form.

    "forms": the closed form of every problem, None without one. "grown_most_nats": the largest rise of any
    response's log-probability. Distances are per run, not of means over seeds. For k3 there are also the
    distance from the form of whole responses and, where Q is below a tenth, the mean of p minus that form.
    """
    runs = [[(math.exp(problem["before"][problem["right"]]), math.exp(problem["after"][problem["right"]]))
             for problem in result["problems"]] for result in results]
    grown = [after - before for result in results for problem in result["problems"]
             for before, after in zip(problem["before"], problem["after"])]
    points, forms, more = [point for run in runs for point in run], None, {}
    if (kind := kind.removesuffix(LONGER)) in FORMS:
        forms = [FORMS[kind](q, BETA) for q, _ in points]
    elif kind == K3:
        forms = [tilting.k3_tokens(token_probabilities(problem["before"], problem["right"]), BETA, TOY_GROUP)
                 for result in results for problem in result["problems"]]
        less = [(q, p - tilting.k3_mass(q, BETA)) for q, p in points]
        more = {"distance_of_whole_responses": statistics.fmean(abs(gap) for _, gap in less),
                "rare_less_form": mean_known(gap if q < 0.1 else None for q, gap in less)}
    return {"points": points, "forms": forms,
            "shift": interval({i: tilting.shift_of(run) for i, run in enumerate(runs)}),
            "grown_most_nats": max(grown),
            "distance": statistics.fmean(abs(form - p) for form, (_, p) in zip(forms, points)) if forms
            else None,
            "at_an_end": statistics.fmean(min(p, 1 - p) < 0.02 for _, p in points),
            "at_one": statistics.fmean(p > 0.98 for _, p in points)} | more


def longest(toy):
    """{kind: row} of the toy's longest runs of each kind. toy: {kind: row} of all runs."""
    return {kind: toy.get(kind + LONGER, row) for kind, row in toy.items() if not kind.endswith(LONGER)}


def token_probabilities(logprob_Y, right):
    """Probability of each token of response `right`, given those before it.

    logprob_Y: of all responses of two letters, sorted, so the first token halves the list, and so on.
    """
    probability_Y, found, start, size = [math.exp(logprob) for logprob in logprob_Y], [], 0, len(logprob_Y)
    while size > 1:
        total, size = sum(probability_Y[start:start + size]), size // 2
        start += size * (right >= start + size)
        found.append(sum(probability_Y[start:start + size]) / total)
    return found


def group_rows():
    """The shift of log-odds at the optimum with k1 in the reward, by groups of G, by enumeration.

    "joint": reward and penalty are centered by the group's mean, as --kl reward does; "outside": only the
    reward is.
    """
    q = 0.3                                                  # any Q gives the same shift
    return [{"group": group} | {name: tilting.logit(tilting.group_mass(q, BETA, group, name == "outside"))
                                - tilting.logit(q) for name in ("joint", "outside")}
            for group in (2, TOY_GROUP)]


# Figures and page

COLORS = dict(zip(RHOS, ("tab:gray", "tab:blue", "tab:orange", "tab:red")))


def draw_axes(rows, path):
    """Plot pass@k before (dashed) and after GRPO, a panel per axis, a color per rho."""
    pyplot = common.pyplot("origin")
    figure, panels = pyplot.subplots(1, len(AXES), figsize=(13, 3.6), layout="constrained", sharey=True)
    for panel, axis in zip(panels, AXES):
        for row in rows:
            if (row["axis"], row["positions"]) == (axis, "rotary"):
                for which, line in (("base", "--"), ("GRPO", "-")):
                    panel.plot(KS, [row["curve"][k][which]["mean"] for k in KS], line, linewidth=1.6,
                               color=COLORS[row["rho"]])
        panel.set_xscale("log", base=2)
        panel.set_xticks(KS[::2], map(str, KS[::2]))
        panel.set(title=axis, xlabel="k", ylim=(-0.02, 1.02))
    panels[0].set_ylabel("pass@k")
    for rho in sorted({row["rho"] for row in rows}):
        panels[0].plot([], [], color=COLORS[rho], label=f"rho {rho:g}")
    panels[0].plot([], [], "--", color="black", label="base")
    panels[0].plot([], [], "-", color="black", label="after GRPO")
    figure.legend(fontsize=8, loc="outside lower center", ncols=6)
    common.save(figure, path)


def draw_saturation(rows, path):
    """Plot GRPO's gain on "id" against the base's accuracy there, a point per run."""
    pyplot = common.pyplot("origin")
    figure, panel = pyplot.subplots(figsize=(5, 3.6), layout="constrained")
    for row in rows:
        seeds = row["base"]["seeds"]
        panel.scatter(list(seeds.values()), [row["gain"]["seeds"][seed] for seed in seeds], s=24,
                      label=f"{row['steps'] or 'all'} steps")
    panel.axhline(0, color="black", linewidth=0.6)
    panel.plot([0, 1], [1, 0], ":", color="black", linewidth=0.8, label="largest possible gain")
    panel.set(xlabel="base: pass@1 on id", ylabel="gain by GRPO", xlim=(0, 1))
    panel.legend(fontsize=7, title="of pretraining", title_fontsize=7)
    common.save(figure, path)


def draw_masses(found, path):
    """Plot, left, p against Q on the toy with closed forms; right, the gain by Q in the study's runs."""
    pyplot = common.pyplot("origin")
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10.5, 4.2), layout="constrained")
    colors = dict(zip(KINDS, ("tab:blue", "tab:orange", "tab:green", "tab:gray", "tab:purple")))
    grid = [i / 400 for i in range(1, 400)]
    for kind, row in longest(found["toy"]).items():
        left.scatter(*zip(*row["points"]), s=9, color=colors[kind], alpha=0.6, linewidths=0, label=kind)
        if kind in FORMS:
            left.plot(grid, [FORMS[kind](q, BETA) for q in grid], color=colors[kind], linewidth=1)
        elif row["forms"]:                                   # no function of Q: a mark for every problem
            left.scatter([q for q, _ in row["points"]], row["forms"], s=14, color=colors[kind], marker="+",
                         linewidths=0.7, label=f"{kind}: fixed points, per token")
    left.plot(grid, grid, ":", color="black", linewidth=0.8)
    left.set(xlabel="Q: the base's probability of the correct response", ylabel="after GRPO",
             title=f"toy, beta {BETA:g}: runs and closed forms")
    left.legend(*left.get_legend_handles_labels(), fontsize=7)
    bins, shift = found["gain"]["bins"], found["gain"]["shift"]
    right.errorbar([one["q"] for one in bins], [one["gain"] for one in bins],
                   [one["half"] or 0 for one in bins], fmt="o", color="black", markersize=4)
    if shift is not None:
        right.plot(grid, [tilting.sigmoid(tilting.logit(q) + shift) - q for q in grid], color="tab:blue",
                   linewidth=1, label=f"log-odds + {shift:.2f}")
        right.legend(fontsize=7)
    right.axhline(0, color="black", linewidth=0.6)
    right.set(xlabel="Q of a problem", ylabel="gain", title="all axes, no KL: gain by Q")
    common.save(figure, path)


def draw_methods(rows, path):
    """Plot pass@k of the base at each temperature (dashed) and of each method, a panel per axis."""
    pyplot = common.pyplot("origin")
    figure, panels = pyplot.subplots(1, len(METHODS_AT), figsize=(5 * len(METHODS_AT), 3.8),
                                     layout="constrained", squeeze=False)
    for panel, (axis, rho) in zip(panels[0], METHODS_AT):
        for row in rows:
            if (row["axis"], row["rho"]) == (axis, rho):
                panel.plot(KS, [row["curve"][k]["mean"] for k in KS], "-" if row["how"] in METHODS else "--",
                           linewidth=1.4, label=row["how"])
        panel.set_xscale("log", base=2)
        panel.set_xticks(KS[::2], map(str, KS[::2]))
        panel.set(title=f"{axis}, rho {rho:g}" + ("" if rows else ": not run"), xlabel="k", ylabel="pass@k")
    if rows:
        panels[0][0].legend(fontsize=7)
    common.save(figure, path)


def points_of(value):
    """A share with half its interval, in points."""
    return percent(value, len(value["seeds"]))


def axes_table(rows):
    """The table of axes and rhos."""
    head = ["axis", "rho", "positions", "pass@1 base", "GRPO", "gain", "pass@256 base", "GRPO",
            "base reaches GRPO at k", "passes it at k", "newly solved", "rare", "id, gain"]
    return markdown(head, [[
        row["axis"], f"{row['rho']:g}", row["positions"],
        *(points_of(row["curve"][1][which]) for which in ("base", "GRPO", "gain")),
        *(points_of(row["curve"][EACH][which]) for which in ("base", "GRPO")),
        *(str(row[which] or "never") for which in ("crossing", "passed")),
        f"{row['newly_solved']} of {row['unsolved']} ({row['by_second_half']:.0f}, −{row['lost']})",
        " → ".join("–" if value is None else f"{value:.1%}" for value in (row["rare_before"], row["rare"])),
        points_of(row["id"]["gain"])] for row in rows])


def unsolved_table(rows):
    """The table of `gains`' "unsolved": an axis a row, a rho a column."""
    cells, rhos = {}, sorted({row["rho"] for row in rows})
    for row in rows:
        name = row["axis"] + (", no positions" if row["positions"] == "none" else "")
        cells[name, row["rho"]] = f"{100 * row['gain']:+.1f} ({row['n']})" if row["n"] else "– (0)"
    return markdown(["gain, points (problems)", *(f"rho {rho:g}" for rho in rhos)],
                    [[name, *(cells.get((name, rho), "–") for rho in rhos)]
                     for name in dict.fromkeys(name for name, _ in cells)])


def toy_table(toy):
    """The table of the toy."""
    rows = []
    for kind, row in toy.items():
        rows.append([kind, with_half(row["shift"]),
                     "–" if row["distance"] is None else f"{100 * row['distance']:.1f}",
                     f"{row['grown_most_nats']:.2f}", f"{row['at_an_end']:.0%}"])
    return markdown(["kind", "shift of log-odds", "points from its closed form",
                     "largest growth of a response, nats", "problems at 0 or 1"], rows)


def group_text(found):
    """How far the shifts of the toy's longest runs are from the two values, in groups of either size."""
    toy = longest(found["toy"])
    return " ".join(sizes_text(row, toy.get(kind)) for kind, row in zip((K1_PAIRS, K1), found["groups"]))


def sizes_text(group, toy):
    """A sentence on groups of one size. group: a row of `group_rows`; toy: the toy's row, None if not run."""
    size = group["group"]
    if toy is None or toy["shift"]["half"] is None:
        return f"In groups of {size} the toy was not run with two seeds or more."
    shift = toy["shift"]
    joint, outside = (abs(group[name] - shift["mean"]) for name in ("joint", "outside"))
    return (f"The runs, which center jointly, shift by {with_half(shift, '.3f')} in groups of {size}: "
            f"{joint:.3f} from the first and {outside:.3f} from the second.")


def response_text(toy):
    """How far k3's runs are from the form of whole responses, in points."""
    return f"{100 * longest(toy)[K3]['distance_of_whole_responses']:.1f}" if K3 in toy else "not measured"


def agent_text(rows):
    """The agent's first and last pass@k as a sentence; "" if it was not run."""
    if not rows:
        return ""
    texts = [f"pass@{k}: {100 * row['base']['mean']:.0f} % by the cold start, "
             f"{100 * row['GRPO']['mean']:.0f} % by GRPO, gain "
             f"{percent(row['gain'], len(row['gain']['seeds']), '+')} points"
             for k, row in rows.items() if k in (min(rows), max(rows))]
    decided = any(sign_of(row["gain"]) for row in rows.values())
    return "; ".join(texts) + (". " if decided else ". No gain is distinguishable from 0. ") + (
        f"Seeds: {len(rows[1]['gain']['seeds'])}.")


def page(found, command, seeds, there, requested):
    """The page's text, from its template in this folder."""
    bins = [["0 of 256" if one["high"] < 1e-6 else f"{round(one['low'], 3):g} to {one['high']:g}",
             str(one["n"]), percent({"mean": one["gain"], "half": one["half"], "seeds": {}}, 0, "+"),
             "–" if one["shift"] is None else f"{one['shift']:+.2f}"] for one in found["gain"]["bins"]]
    saturated = [[str(row["steps"] or "all"), points_of(row["base"]), points_of(row["gain"])]
                 for row in found["saturation"]]
    instead = [[row["axis"], row["how"], points_of(row["gain"]), points_of(row["less_GRPO"]),
                points_of(row["gain_256"])] for row in found["instead"]]
    omitted = [[f"{row['rho']:g}", row["problems"],
                *(points_of(value) for of_k in row["curve"].values() for value in of_k.values())]
               for row in found["omitted"]]
    composed = [[name, *map(points_of, (of["gain"][rho]["base"], of["gain"][rho]["gain"])),
                 *(" of ".join(map(str, counts)) for counts in of["new"].values()),
                 *(points_of(row["curve"][1][how]) for row in of["omitted"]
                   if (row["rho"], row["problems"]) == (rho, "the omitted pair") for how in ("five", "six"))]
                for name in ("all", "composing") if found["composing"]
                for of in [found["composing"][name]] for rho in of["gain"]]
    columns = 1, KS[len(KS) // 2], KS[-1]
    methods = [[f"{row['axis']}, rho {row['rho']:g}", row["how"],
                *(points_of(row["curve"][k]) for k in columns),
                *(points_of(row["less_GRPO"][k]) for k in (1, KS[-1]))] for row in found["methods"]]
    agent = [[str(k), *map(points_of, row.values())] for k, row in (found["agent"] or {}).items()]
    shift = found["gain"]["shift"]
    return PAGE.read_text(encoding="utf-8").format(
        command=command, seeds=", ".join(map(str, seeds)), there=there, requested=requested,
        axes=axes_table(found["axes"]), toy=toy_table(found["toy"]),
        groups=markdown(["groups of", "centered jointly", "penalty outside", "between them"], [
            [str(row["group"]), *(f"{value:+.3f}" for value in (row["joint"], row["outside"],
                                                               row["joint"] - row["outside"]))]
            for row in found["groups"]]), decided=group_text(found), responses=response_text(found["toy"]),
        steps=STEPS,
        shift="none" if shift is None else f"{shift:+.2f}", problems=found["gain"]["problems"],
        fitted=found["gain"]["fitted"], unsolved=unsolved_table(found["gain"]["unsolved"]),
        bins=markdown(["Q", "problems", "gain, points", "shift of log-odds"], bins),
        saturation=markdown(["steps of pretraining", "base, pass@1 on id", "gain"], saturated),
        instead=markdown(["axis", "alternative", "gain at pass@1", "minus GRPO's",
                          "gain at pass@256"], instead) if instead else "Not run.\n",
        omitted=markdown(["rho", "problems of", *(
            head for k in (1, EACH) for head in (f"pass@{k} base", "GRPO on five", "on all six",
                                                 "five minus six"))], omitted) if omitted else "Not run.\n",
        idle="{idle} of its {problems}".format(**found["composing"]) if found["composing"] else "none",
        composing=markdown(["problems", "base, pass@1", "gain", "new, of pairs that the base solves in part",
                            "of pairs that it does not solve", "omitted pair, trained on five", "on all six"],
                           composed) if composed else "Not run.\n",
        methods=markdown(["axis", "from one base", *(f"pass@{k}" for k in columns),
                          "pass@1 minus GRPO's", f"pass@{KS[-1]} minus GRPO's"], methods)
        if methods else "Not run yet.\n",
        agent=markdown(["k", "cold start", "GRPO", "gain"], agent) if agent else "Not run.\n",
        agent_text=agent_text(found["agent"]),
        agrees=markdown(["claim", "agrees", "found"], [
            [figure["claim"], figure["agrees"], figure["found"]] for figure in figures_of(found)]))


def figures_of(found):
    """What was found on each claim of the paper's abstract and, of the tilt, its public reviews: dicts of
    claim, finding and verdict.

    Each verdict's rule was fixed before the runs, but that of sharpening was changed after them.
    """
    claims = (("GRPO's origin: theorem", "origin.toy.svg", "GRPO reweights its base: the optimum is the "
             "base's distribution, tilted by the reward; the gain is a function of the base's probability Q.",
             tilt_verdict(found["toy"])),
            ("GRPO's origin: no novel solutions", "origin.svg",
             "It cannot discover completely novel solutions.", discovery_verdict(found["axes"])),
            ("GRPO's origin: out of distribution", "origin.svg", "It improves out of distribution only where "
             "the task agrees with the base's biases.", alignment_verdict(found["axes"])),
            ("GRPO's origin: saturation", "origin.saturation.svg",
             "Its gains in distribution vanish as the base saturates.",
             saturation_verdict(found["saturation"])))
    if found["methods"]:
        claims += (("GRPO's origin: sharpening", "origin.methods.svg", "It is a tool that sharpens what "
                    "pretraining prefers.", sharpening_verdict(found["methods"])),)
    return [{"paper": paper, "picture": picture, "claim": claim, "agrees": agrees, "found": text}
            for paper, picture, claim, (agrees, text) in claims]


def tilt_verdict(toy):
    """Yes if k1 in the reward ends within 3 points of the tilted optimum, with a shift within .1 of it.

    That was to be so after 300 iterations, and was with an older model's bases; with today's these are too
    few for rare responses, so the longer runs decide.
    """
    rows, early = longest(toy), toy.get(K1)
    if early is None or early["shift"]["mean"] is None:
        return "not measurable", "The toy was not run."
    row = rows[K1]
    fits = row["distance"] < 0.03 and abs(row["shift"]["mean"] - 1 / BETA) <= 0.1
    when = "" if row is early else (
        f" after 1,200 iterations (after 300 {100 * early['distance']:.1f} points and "
        f"{with_half(early['shift'])}: rare responses arrive late)")
    return ("yes" if fits else "no",
            f"On a toy with k1 in the reward, beta {BETA:g}, runs end {100 * row['distance']:.1f} points "
            f"from the optimum; log-odds shift by {with_half(row['shift'])} (1 / beta = {1 / BETA:g}){when}. "
            "Rewards over their std and runs without KL go to 0 or 1 (the runs on strings are without KL). "
            "k3 in the loss ends elsewhere"
            + (f", {100 * rows[K3]['distance']:.1f} points from its own fixed point." if K3 in rows else "."))


def discovery_verdict(rows):
    """Yes if fewer than a tenth of the correct responses are rare in the base, on each axis and rho whose
    base solves more than a tenth of the problems in 256 responses; partly if on most."""
    rows = [row for row in rows if row["positions"] == "rotary"]
    measurable = [row for row in rows if row["rare"] is not None and row["curve"][EACH]["base"]["mean"] > 0.1]
    if not measurable:
        return "not measurable", "No base solves a tenth of an axis' problems in 256 responses."
    few, most = sum(row["rare"] < 0.1 for row in measurable), max(measurable, key=lambda row: row["rare"])
    solved, unsolved, lost, late = (sum(row[key] for row in rows)
                                    for key in ("newly_solved", "unsolved", "lost", "by_second_half"))
    return ("yes" if few == len(measurable) else "partly" if 2 * few > len(measurable) else "no",
            "Correct responses that the base gives less than once in as many as RL sampled: at most "
            f"{most['rare']:.1%} ({most['axis']}, rho {most['rho']:g}). Of {unsolved} problems that the base "
            f"does not solve in 256 responses, GRPO solves {solved} at least once in 256 (the base's second "
            f"128 solve {late:.0f} that its first do not); it loses {lost} of those that the base solves.")


def alignment_verdict(rows):
    """Yes if no axis with a base below 2 % at pass@256 gains 5 points, and one with a base of 10 to 90 % at
    pass@1 gains more than half its interval (one seed: 5 points); partly if one of the two holds."""
    rows = [row["curve"] | row for row in rows if row["positions"] == "rotary"]
    blind = [row for row in rows if row[EACH]["base"]["mean"] < 0.02]
    open_ = [row for row in rows if 0.1 <= row[1]["base"]["mean"] <= 0.9]
    if not blind or not open_:
        return "not measurable", "This needs axes on which the base fails and others that it solves in part."
    none = all(row[1]["gain"]["mean"] < 0.05 for row in blind)
    some = any(row[1]["gain"]["mean"] > (row[1]["gain"]["half"] or 0.05) for row in open_)
    largest = [max(of, key=lambda row: row[1]["gain"]["mean"]) for of in (blind, open_)]
    one, other = (f"{points_of(row[1]['gain'])} points ({row['axis']}, rho {row['rho']:g})"
                  for row in largest)
    return (("no", "partly", "yes")[none + some],
            f"Largest gain where the base is below 2 % at pass@256: {one}; where it is at 10 to 90 % at "
            f"pass@1: {other}.")


def saturation_verdict(rows):
    """Yes if the finished base gains 2 points or less, and a base of 20 to 70 % gains 10 or more."""
    early = [row for row in rows if 0.2 <= row["base"]["mean"] <= 0.7]
    if not early or rows[-1]["steps"] is not None:
        return "not measurable", "This needs a base between 20 and 70 % and the finished one."
    best = max(early, key=lambda row: row["gain"]["mean"])
    late = rows[-1]["gain"]["mean"] <= 0.02
    return (("no", "partly", "yes")[late + (best["gain"]["mean"] >= 0.1)],
            f"From {points_of(best['base'])} % GRPO gains {points_of(best['gain'])} points, from "
            f"{points_of(rows[-1]['base'])} % {points_of(rows[-1]['gain'])}.")


def sharpening_verdict(rows):
    """Yes if on each axis on which GRPO gains, beyond the interval, a lower temperature brings the base to
    its pass@1: if GRPO is not above the best of them, beyond the interval; no if on none; partly if on some.
    An axis on which half the interval of this difference exceeds half of GRPO's gain cannot tell, unless
    GRPO is above, and does not count. (Until 2026-11-27 it did, so that a wide interval was a yes.)
    Not measurable with one seed, if GRPO gains nowhere, or if no axis can tell.

    The best temperature is chosen on the problems that are reported, in favor of sharpening.
    """
    reached, text = [], []
    for axis, rho in METHODS_AT:
        of = {row["how"]: row for row in rows if (row["axis"], row["rho"]) == (axis, rho)}
        if not of or of["GRPO"]["gain"][1]["half"] is None:
            return "not measurable", "This needs every axis, and two seeds or more."
        if of["GRPO"]["gain"][1]["mean"] <= of["GRPO"]["gain"][1]["half"]:
            text.append(f"{axis}, rho {rho:g}: GRPO gains {points_of(of['GRPO']['gain'][1])} points only")
            continue
        best = max((of[base_at(t)] for t in TEMPERATURES if t < 1), key=lambda row: row["curve"][1]["mean"])
        less = best["less_GRPO"]
        above, wide = sign_of(less[1]) == -1, less[1]["half"] > of["GRPO"]["gain"][1]["mean"] / 2
        reached += [not above] if above or not wide else []
        text.append(f"{axis}, rho {rho:g}: {best['how']} has {points_of(best['curve'][1])} % at pass@1; "
                    f"minus GRPO's, which gains {points_of(of['GRPO']['gain'][1])}, {points_of(less[1])} "
                    "points" + ("" if above or not wide else ", which is too wide to tell")
                    + f", and {points_of(less[KS[-1]])} at pass@{KS[-1]}")
    return ("not measurable" if not reached else
            "yes" if all(reached) else "partly" if any(reached) else "no",
            "The base at its best temperature: " + "; ".join(text) + ".")


if __name__ == "__main__":
    sys.exit(main())
