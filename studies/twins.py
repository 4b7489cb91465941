"""Twin states: why a flawed action lives on beside a right one, and whether judging oneself removes it.

Runs of gcd.py in envs/twins.py, where one action is right in P and flawed in N (arXiv:2509.23870 sections 3.3
and 4). Measured along each run: q(R), the probability of that action, in P and in N; the cosine of the two
gradients that raise it there; the judge's AUC. The arms are GRPO, GCD, GCD with labels by coins, and a judge
whose trunk is its own, so that it can teach the policy nothing; each from cold starts without questions to
the judge, with right answers to them, and with answers by coins. Left out: other worlds, which
studies/coupling.py looks at.

    python -m studies.twins               # five seeds of FIRST; ten minutes on two cores
    python -m studies.twins --all         # 20 seeds of everything; three core-hours
    python -m studies.twins --jobs 0      # only the page; it is always of all cells that there are
"""

import argparse
import copy
import shutil
import sys
from collections import Counter
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import torch

import gcd
import update
from bench.intervals import interval, markdown, mean_known, paired, with_half
from envs import twins
from rollout import wilson
from run import files
from studies import common

PAGE = Path(__file__).with_name("twins.page.md")
RUNS = common.ROOT / "runs" / "studies" / "twins"
SEEDS, FEW = range(20), range(5)
POINTS, PROBES = 12, 64                  # how often a run is measured, and in how many situations
COLD = {"plain": ("--no-gcd", "--judge-demonstrations", "0"),
        "judge": ("--judge-labels", "oracle"),
        "coins": ("--judge-labels", "coins")}
ARMS = {"GRPO": ("--no-gcd",),
        "+GCD": ("--judge-labels", "oracle"),
        "+GCD, coins for labels": ("--judge-labels", "coins"),
        "+judge on its own trunk": ("--judge-labels", "oracle")}
OWN_TRUNK = "+judge on its own trunk"
MAIN = [(cold, arm) for cold in COLD for arm in ARMS]
FIRST = [("plain", "GRPO"), ("coins", "GRPO"), ("coins", "+GCD"), ("judge", "GRPO"), ("judge", "+GCD")]
# What was tuned, on which seeds, and why the main grid is at this learning rate: studies/predictions.md
COMMON = {"p_tasks": 12, "flaw": 0.3, "likely": 0.25, "judge_weight": 1.0, "lr": 6e-4, "iterations": 240}
COLD_START = ("--demonstrations", "2000")
RL = ("--kl", "loss", "--kl-coef", "0.01")
FAST = {"lr": 3e-3}                      # a grid of its own, from the coins' cold start
# One at a time, five seeds: what else is said of GRPO and GCD
OTHERS = ({"p_tasks": 4}, {"p_tasks": 8}, {"judge_weight": 0.1}, {"flaw": 0.1}, {"likely": 0.05},
          {"likely": 0.6})


# Cells

def settings_of(cold, arm, seed, **changes):
    """A cell's settings, plain values."""
    return {"cold": cold, "arm": arm, "seed": seed} | COMMON | changes


def name_of(settings):
    """A cell's name: what it is, and where it differs from the others."""
    changed = [f"{key} {settings[key]:g}" for key in COMMON if settings[key] != COMMON[key]
               and key != "iterations"]
    return ", ".join([settings["arm"], f"from {settings['cold']}", *changed, f"seed {settings['seed']}"])


def cells_of(whole, seeds, iterations):
    """{name: settings} of the cells to be run, what matters most first."""
    few = [seed for seed in seeds if seed in FEW]
    wanted = [settings_of(*pair, seed) for seed in seeds for pair in FIRST]
    if whole:
        rest = sorted([pair for pair in MAIN if pair not in FIRST])          # "plain", which is GRPO's, last
        wanted += [settings_of(*pair, seed) for pair in rest[:2] for seed in seeds]
        wanted += [settings_of("coins", arm, seed, **FAST) for seed in seeds for arm in ARMS]
        wanted += [settings_of(cold, arm, seed, **change) for change in OTHERS for seed in few
                   for cold in ("judge", "coins") for arm in ("GRPO", "+GCD")
                   if arm != "GRPO" or "judge_weight" not in change]
        wanted += [settings_of(*pair, seed) for pair in rest[2:] for seed in seeds]
    wanted = [settings | {"iterations": iterations} for settings in wanted]
    return {name_of(settings): settings for settings in wanted}


def run(name, settings, runs):
    """A cell: its run from a cold start that is there, and what is measured along it."""
    cold, out = cold_folder(settings, runs) / files.CHECKPOINT, runs / name
    shutil.rmtree(out, ignore_errors=True)
    flags = [*world(settings), *RL, *ARMS[settings["arm"]], "--model", cold, "--demonstrations", 0,
             "--lr", settings["lr"], "--iterations", settings["iterations"],
             "--keep-checkpoints", settings["iterations"] // POINTS, "--checkpoint-every", 10**6]
    if settings["arm"] != "GRPO":
        flags += ["--judge-weight", settings["judge_weight"]]
    with own_trunk() if settings["arm"] == OWN_TRUNK else nullcontext():
        common.train(flags, out)
    result = measured(out, flags)
    shutil.rmtree(out)
    return result


def world(settings):
    """The flags that a cell shares with its cold start."""
    return ["--env", "twins", "--evaluate", "none", "--device", "cpu", "--seed", settings["seed"],
            "--p-tasks", settings["p_tasks"], "--flaw", settings["flaw"], "--likely", settings["likely"]]


def cold_folder(settings, runs):
    """The run of the cold start that a cell begins from."""
    return runs / "cold" / f"{settings['cold']}, likely {settings['likely']:g}, seed {settings['seed']}"


def cold_start(name, settings):
    """Make the cold start of a cell, in the folder of that name."""
    flags = [*world(settings), *COLD_START, *COLD[settings["cold"]], "--iterations", 0]
    common.train([*flags, "--overwrite"], Path(name))


@contextmanager
def own_trunk():
    """The judge on a model of its own, which begins as a copy of the actor, answers the actor's questions and
    learns from them as the actor would, with an optimizer of its own: the actor learns from none."""
    judge_turns, others = gcd.judge_turns, []

    def apart(run, i, episodes):
        if not others:
            model = copy.deepcopy(run.model)
            others.append(replace(run, model=model, optimizer=update.adam(model)))
        judged, questions = judge_turns(others[0], i, episodes)
        for part in update.minibatches(questions, run.config.minibatches):
            if part:
                others[0].step(part, run.objective(), run.config.lr * gcd.decay(run.config, i))
        return judged, []

    with mock.patch.object(gcd, "judge_turns", apart):
        yield


# What is measured along a run

def measured(out, flags):
    """q(R) in P and N and the cosine at every kept model, and the judge's AUC over the last quarter."""
    path = [{"iteration": iteration} | probe(common.actor(folder, flags))
            for iteration, folder in common.kept(out).items()]
    lines = files.iterations_in(files.read_lines(out / files.METRICS)[0])
    aucs = [line.get("judge/auc_oracle") for line in lines[-(len(lines) // 4 or 1):]]
    return {"path": path, "auc": mean_known(aucs)}


def probe(actor):
    """q_P and q_N, the mean probability of R over PROBES situations of each kind, and the cosine of the
    gradients of its mean log probability there, over all parameters: how much a push in P pushes in N.
    None where a gradient is zero."""
    R, game, found, grads = actor.chat.encode(twins.R)[0], twins.Game(0.0, Counter()), {}, []
    for kind in "PN":
        tasks = [actor.config.world.task(f"probe/{i}", "probe", kind) for i in range(PROBES)]
        ids_BT = torch.tensor([actor.chat.observe(game.reset(task), True) for task in tasks])
        last = (list(range(PROBES)), [ids_BT.shape[1] - 1] * PROBES)
        logprob_B = actor.model(ids_BT, select=last).float().log_softmax(-1)[:, R]
        found[f"q_{kind}"] = float(logprob_B.detach().exp().mean())
        logprob_B.mean().backward()
        pushed = [parameter.grad for parameter in actor.model.parameters() if parameter.grad is not None]
        grads.append(torch.cat([grad.flatten().double() for grad in pushed]))
        actor.model.zero_grad(set_to_none=True)
    size = float(grads[0].norm() * grads[1].norm())
    return found | {"cosine": float(grads[0] @ grads[1]) / size if size else None}


def final(result):
    """The flawed action's probability at the end."""
    return result["path"][-1]["q_N"]


def area(result):
    """The mean of the flawed action's probability over the run: the area under its curve (trapezoids)."""
    points = [(point["iteration"], point["q_N"]) for point in result["path"]]
    total = sum((b - a) * (p + q) / 2 for (a, p), (b, q) in zip(points, points[1:]))
    return total / (points[-1][0] - points[0][0])


def cosine_drop(result):
    """By how much the cosine fell from the cold start to the end; None where it could not be measured."""
    first, last = result["path"][0]["cosine"], result["path"][-1]["cosine"]
    return None if first is None or last is None else first - last


# What follows

def table_of(wanted, results):
    """{(cold, arm, changes): {seed: result}} of the results that there are: cold starts and arms in their
    order, then what changes a setting."""
    found = {(cold, arm, ()): {} for cold, arm in MAIN}
    for name, settings in wanted.items():
        if name not in results:
            continue
        changes = tuple((key, settings[key]) for key in COMMON
                        if settings[key] != COMMON[key] and key != "iterations")
        found.setdefault((settings["cold"], settings["arm"], changes), {})[settings["seed"]] = results[name]
    return {key: of_seed for key, of_seed in found.items() if of_seed}


def row_of(results):
    """An arm's numbers: final q_N with its interval, how many seeds removed the flaw, the rest as means."""
    n, removed = len(results), sum(final(result) < 0.5 for result in results.values())
    ends = [result["path"][-1] for result in results.values()]
    return {"final": interval({seed: final(result) for seed, result in results.items()}),
            "area": interval({seed: area(result) for seed, result in results.items()}),
            "removed": removed, "n": n, "removed_interval": wilson(removed, n),
            "q_P": mean_known([end["q_P"] for end in ends]),
            "cosine": mean_known([end["cosine"] for end in ends]),
            "auc": mean_known([result["auc"] for result in results.values()])}


def against(results, reference, number=final):
    """A number of an arm minus the reference arm's, seed by seed, with its 95 % t interval, and what it
    says."""
    difference = paired({seed: number(result) for seed, result in results.items()},
                        {seed: number(result) for seed, result in reference.items()})
    if difference["half"] is None:
        return difference | {"verdict": "not measurable"}
    low, high = difference["mean"] - difference["half"], difference["mean"] + difference["half"]
    return difference | {"verdict": "less" if high < 0 else "more" if low > 0 else "no difference shown"}


def mediation(table):
    """A point a run at 12:4, slow and fast: how far the cosine fell and how far q_N fell from its peak; their
    rank correlation over all runs in which both are known, and within each arm of a cold start. Runs with a
    trunk of their own are left out: their policies are GRPO's, and would count twice. It is an association:
    arms share seeds and cold starts. None below three runs, or where one never varies."""
    points = [{"cold": cold, "arm": arm, "seed": seed, "cosine_drop": cosine_drop(result),
               "removed": max(point["q_N"] for point in result["path"]) - final(result), "auc": result["auc"]}
              for (cold, arm, changes), of_seed in table.items()
              if changes in ((), tuple(FAST.items())) and arm != OWN_TRUNK
              for seed, result in of_seed.items() if cosine_drop(result) is not None]
    arms = dict.fromkeys((point["cold"], point["arm"]) for point in points)
    within = {": ".join(pair): spearman([p for p in points if (p["cold"], p["arm"]) == pair])
              for pair in arms}
    return {"points": points, "spearman": spearman(points), "within": within}


def spearman(points):
    """The rank correlation of the two falls; None below three points, or where one never varies."""
    from scipy import stats
    columns = [[point[key] for point in points] for key in ("cosine_drop", "removed")]
    varied = len(points) > 2 and all(len(set(column)) > 1 for column in columns)
    return float(stats.spearmanr(*columns).statistic) if varied else None


def findings(table):
    """Every comparison that the page speaks of, as `against` gives it; those whose arms are there."""
    wanted = {}
    for changes in ((), *(tuple(change.items()) for change in (FAST, *OTHERS))):
        reference = () if "judge_weight" in dict(changes) else changes
        setting = "".join(f", {key} {value:g}" for key, value in changes)
        for cold in COLD:
            for arm in ARMS:
                wanted[f"{arm} against GRPO, from {cold}{setting}"] = (
                    (cold, arm, changes), (cold, "GRPO", reference))
            wanted[f"+GCD against coins for labels, from {cold}{setting}"] = (
                (cold, "+GCD", changes), (cold, "+GCD, coins for labels", changes))
    for cold in ("plain", "coins"):
        wanted[f"GRPO from judge against GRPO from {cold}"] = ("judge", "GRPO", ()), (cold, "GRPO", ())
    wanted["GRPO from judge against +GCD from coins"] = ("judge", "GRPO", ()), ("coins", "+GCD", ())
    return {name: against(table[one], table[other]) | {"area": against(table[one], table[other], area)}
            for name, (one, other) in wanted.items() if one in table and other in table and one != other}


def verdict(found, name):
    """What a comparison says, "not measurable" where its arms did not run."""
    return found.get(name, {}).get("verdict", "not measurable")


def agreement(found):
    """Whether the paper's mechanism is seen, {claim: agrees}. Controls say "yes" where the cure's interval is
    below each of theirs: they do clearly less than it does."""
    in_rl = verdict(found, "+GCD against GRPO, from coins")
    at_first = verdict(found, "GRPO from judge against GRPO from coins")
    controls = [found.get(f"{arm} against GRPO, from coins") for arm in ("+GCD, coins for labels", OWN_TRUNK)]
    helps, known = [in_rl, at_first].count("less"), "not measurable" not in (in_rl, at_first)
    if not known or any(control is None or control["half"] is None for control in controls):
        return {"cure": ("no", "partly", "yes")[helps] if known else "not measurable",
                "controls": "not measurable"}
    cures = [found["GRPO from judge against GRPO from coins"], found["+GCD against GRPO, from coins"]]
    best = min(cures, key=lambda cure: cure["mean"])
    apart = all(best["mean"] + best["half"] < control["mean"] - control["half"] for control in controls)
    return {"cure": ("no", "partly", "yes")[helps], "controls": "yes" if helps and apart else "no"}


def signed(difference):
    """A difference as text."""
    if difference is None or difference.get("half") is None:
        return "not measurable"
    return f"{with_half(difference, '+.2f')} ({difference['verdict']})"


# Figures and page

COLOURS = dict(zip(ARMS, ("tab:gray", "tab:blue", "tab:orange", "tab:green")))
TITLES = {"plain": "no questions in the cold start", "coins": "questions, answered by coins",
          "judge": "questions, answered rightly"}


def draw_paths(table, path, changes=()):
    """q_N along training, a panel a cold start: each run thin, an arm's mean thick; q_P of GRPO dotted."""
    pyplot = common.pyplot("twins")
    colds = [cold for cold in TITLES if (cold, "GRPO", changes) in table]
    if not colds:
        return
    figure, axes = pyplot.subplots(1, len(colds), figsize=(2.5 + 3 * len(colds), 3.8), layout="constrained",
                                   sharey=True, squeeze=False)
    for axis, cold in zip(axes[0], colds):
        for arm, colour in COLOURS.items():
            runs = [result["path"] for result in table.get((cold, arm, changes), {}).values()]
            if not runs:
                continue
            x = [point["iteration"] for point in runs[0]]
            for run in runs:
                axis.plot(x, [point["q_N"] for point in run], color=colour, linewidth=0.4, alpha=0.35)
            mean = [sum(run[k]["q_N"] for run in runs) / len(runs) for k in range(len(x))]
            axis.plot(x, mean, color=colour, linewidth=2.2, label=arm)
            if arm == "GRPO":
                right = [sum(run[k]["q_P"] for run in runs) / len(runs) for k in range(len(x))]
                axis.plot(x, right, color="black", linewidth=1, linestyle=":", label="GRPO, where right")
        axis.set(title=TITLES[cold], xlabel="RL iteration", ylim=(0, 1.02))
    axes[0][0].set_ylabel("probability of the flawed action")
    lines = {line.get_label(): line for axis in axes[0] for line in axis.get_lines()
             if not line.get_label().startswith("_")}
    figure.legend(lines.values(), lines, fontsize=8, loc="outside lower center", ncols=2 * len(colds))
    common.save(figure, path)


def draw_mediation(found, path):
    """How far the cosine fell against how much of the flaw was removed, a point a run."""
    pyplot = common.pyplot("twins")
    figure, axis = pyplot.subplots(figsize=(5.2, 4), layout="constrained")
    markers = {"plain": "s", "coins": "o", "judge": "^"}
    for (cold, marker), (arm, colour) in ((c, a) for c in markers.items() for a in COLOURS.items()):
        points = [point for point in found["points"] if (point["cold"], point["arm"]) == (cold, arm)]
        axis.scatter([point["cosine_drop"] for point in points], [point["removed"] for point in points],
                     color=colour, marker=marker, s=22, alpha=0.7, linewidths=0)
    for arm, colour in COLOURS.items():
        axis.scatter([], [], color=colour, label=arm)
    for cold, marker in markers.items():
        axis.scatter([], [], color="black", marker=marker, label=TITLES[cold])
    axis.set(xlabel="fall of the cosine between P and N", ylabel="fall of the flawed action from its peak")
    axis.legend(fontsize=7)
    common.save(figure, path)


def grid(table, settings):
    """The table of the arms with these changes of settings."""
    head = ["cold start", "arm", "setting", "final q_N(R)", "flaw removed", "area", "q_P(R)", "cosine",
            "judge's AUC"]
    rows = []
    for (cold, arm, changes), results in table.items():
        if changes not in settings:
            continue
        row = row_of(results)
        low, high = row["removed_interval"]
        setting = ", ".join(f"{key} {value:g}" for key, value in changes)
        rows.append([cold, arm, setting, with_half(row["final"]),
                     f"{row['removed']}/{row['n']} [{low:.0%}, {high:.0%}]", with_half(row["area"]),
                     *("–" if row[key] is None else f"{row[key]:.2f}" for key in ("q_P", "cosine", "auc"))])
    return "\n".join(markdown(head, rows)) if rows else "not run"


def told(rho):
    """A rank correlation as text."""
    return "not measurable" if rho is None else f"{rho:.2f}"


def outcomes(table):
    """(what was predicted of the main grid, what came out) of studies/predictions.md, in its order."""
    def count(*arm):
        row = row_of(table[arm]) if arm in table else None
        return f"{row['removed']} of {row['n']}" if row else "not run"

    grpo, gcd, slow = ("GRPO", ()), ("+GCD", ()), ("+GCD", (("judge_weight", 0.1),))
    removed = [
        ("GRPO from plain removes it in at most 5 of 20", count("plain", *grpo)),
        ("GRPO from coins in at most 5 of 20", count("coins", *grpo)),
        ("GCD from coins in at most 4 of 20", count("coins", *gcd)),
        ("GRPO from judge in at least 15 of 20", count("judge", *grpo)),
        ("GCD from judge, lambda 1, in fewer", count("judge", *gcd)),
        ("GCD from judge, lambda .1, as without", count("judge", *slow))]
    for change, claim in (({"p_tasks": 4}, "4:12: removed"), ({"p_tasks": 8}, "8:8: in at least 3 of 5"),
                          ({"flaw": 0.1}, "r = .1: in fewer"), ({"likely": 0.6}, "q0 = .6: in fewer"),
                          ({"likely": 0.05}, "q0 = .05: as with .25")):
        removed += [(f"GRPO from {cold}, {claim}", count(cold, "GRPO", tuple(change.items())))
                    for cold in ("coins", "judge")]
    return removed


def fast_of(table):
    """The fast grid: its picture and its table."""
    rows = grid(table, [tuple(FAST.items())])
    return rows if rows == "not run" else f"![q_N(R), fast](twins-fast.svg)\n\n{rows}"


def page(table, found, mediated, command, seeds):
    """The page's text, from its template beside this file."""
    return PAGE.read_text(encoding="utf-8").format(
        command=command, seeds=f"{min(seeds)} to {max(seeds)}", main=grid(table, [()]),
        fast=fast_of(table),
        mediation=told(mediated["spearman"]),
        within="; ".join(f"{arm} {told(rho)}" for arm, rho in mediated["within"].items()),
        outcomes="\n".join(markdown(["predicted", "came out"], outcomes(table))),
        comparisons="\n".join(markdown(["difference", "in final q_N(R)", "in area"], [
            [name, signed(difference), signed(difference["area"])] for name, difference in found.items()])),
        runs=len(mediated["points"]), there=sum(map(len, table.values())),
        others=grid(table, [tuple(change.items()) for change in OTHERS]))


def figures_of(table, found, mediated):
    """The gallery's entries."""
    agrees, rho, row = agreement(found), told(mediated["spearman"]), row_of(table[("plain", "GRPO", ())])
    at_first, in_rl, coins, own = (signed(found.get(name)) for name in (
        "GRPO from judge against GRPO from coins", "+GCD against GRPO, from coins",
        "+GCD, coins for labels against GRPO, from coins", f"{OWN_TRUNK} against GRPO, from coins"))
    return [
        {"paper": "Section 3.3 (danger zone)", "picture": "twins.svg",
         "claim": "Beside a right action in similar states a flawed one can run away, though its advantage "
                  "is negative.",
         "found": f"GRPO alone ends with q_N(R) = {with_half(row['final'])} where three of four tasks push "
                  f"the action; the flaw was removed in {row['removed']} of {row['n']} seeds.",
         "agrees": ("yes" if row["removed"] <= row["n"] / 4
                    else "partly" if row["removed"] < row["n"] else "no")},
        {"paper": "Figure 6 and section 4 (the cure)", "picture": "twins.svg",
         "claim": "Judging one's own actions pulls similar samples apart, and the flawed action goes.",
         "found": f"Final q_N(R), difference. GRPO from a cold start that judges rightly, minus from one by "
                  f"coins: {at_first}. GCD in RL minus GRPO, both from coins: {in_rl}.",
         "agrees": agrees["cure"]},
        {"paper": "Section 4 (why it works)", "picture": "twins-mediation.svg",
         "claim": "It works through shared features: not by the extra loss, nor by a judge that shares none.",
         "found": f"Minus GRPO: coins for labels {coins}; a trunk of its own {own}. Rank correlation of the "
                  f"cosine's fall with the flaw's: {rho}.",
         "agrees": agrees["controls"]}]


def results_of(everything, wanted, options):
    """{name: result} of every cell that there is, after those wanted that lack are run, and before them their
    cold starts (--jobs 0: none is run)."""
    path = options.out / "twins.jsonl"
    missing = common.missing(path, wanted) if options.jobs else {}
    colds = {str(cold_folder(settings, options.runs)): settings for settings in missing.values()}
    common.make(colds, cold_start, options.jobs or 1, "cold starts")
    common.cells(path, missing, partial(run, runs=options.runs), options.jobs or 1)
    return {name: record["result"] for name, record in common.finished(path, everything).items()}


def main(argv=None):
    parser = argparse.ArgumentParser("python -m studies.twins", description=__doc__.splitlines()[0],
                                     allow_abbrev=False)
    parser.add_argument("--all", action="store_true", help="all cold starts and settings")
    parser.add_argument("--seeds", type=int, help="how many, from 0 on (default 5; with --all 20)")
    parser.add_argument("--iterations", type=int, default=COMMON["iterations"], help="of RL, in each run")
    parser.add_argument("--jobs", type=int, default=2, help="runs at once; 0: only what there is")
    parser.add_argument("--out", type=Path, default=common.OUT, help="folder of what comes out")
    parser.add_argument("--runs", type=Path, default=RUNS, help="folder of the runs and their cold starts")
    options = parser.parse_args(argv)
    seeds = options.seeds if options.seeds is not None else len(SEEDS) if options.all else len(FEW)
    for name, value, low, high in (("seeds", seeds, 1, 90), ("iterations", options.iterations, 1, 10**6),
                                   ("jobs", options.jobs, 0, 256)):
        if not low <= value <= high:
            parser.error(f"--{name}={value}: expected {low} to {high}")
    if options.iterations % POINTS:
        parser.error(f"--iterations={options.iterations}: expected a multiple of {POINTS}, its points of "
                     "measurement")
    everything = cells_of(True, range(max(seeds, len(SEEDS))), options.iterations)
    wanted = cells_of(options.all, range(seeds), options.iterations)
    table = table_of(everything, results_of(everything, wanted, options))
    if ("plain", "GRPO", ()) not in table:
        parser.error(f"--jobs=0: {options.out / 'twins.jsonl'} holds no cell of GRPO from a plain cold start")
    found, mediated = findings(table), mediation(table)
    there = sorted({seed for of_seed in table.values() for seed in of_seed})
    draw_paths(table, options.out / "twins.svg")
    draw_paths(table, options.out / "twins-fast.svg", tuple(FAST.items()))
    draw_mediation(mediated, options.out / "twins-mediation.svg")
    command = ["python", "-m", "studies.twins", *(["--all"] if options.all else []), "--seeds", str(seeds),
               "--iterations", str(options.iterations)]
    text = page(table, found, mediated, " ".join(command), there)
    rows = [{"cold": cold, "arm": arm, "changes": dict(changes)} | row_of(of_seed)
            for (cold, arm, changes), of_seed in table.items()]
    common.publish(options.out, "twins", command, there,
                   {"rows": rows, "differences": found, "mediation": mediated},
                   figures_of(table, found, mediated), text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
