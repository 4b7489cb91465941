"""Twin states: why a flawed action survives next to a right one, and whether self-judging removes it.

Runs of gcd.py in lab/envs/twins.py, where one action, R, is right in states P and flawed in states N
(arXiv:2509.23870, sections 3.3 and 4). Measured during each run: q(R), the probability of that action, in P
and in N; the cosine of the two gradients that raise it in P and in N; the judge's AUC. The arms are GRPO,
GCD, GCD with random labels ("coins"), and a judge with its own trunk, which cannot change the policy. Each
starts from cold starts without judge questions, with correctly answered ones, and with randomly answered
ones. Left out: other environments (lab/studies/coupling.py).

    python -m lab.studies.twins               # five seeds of FIRST; ten minutes on two cores
    python -m lab.studies.twins --all         # 20 seeds of everything; three core-hours
    python -m lab.studies.twins --jobs 0      # only the page, which always covers all stored cells
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

import batching
import gcd
import update
from infra import files
from lab.bench.intervals import interval, markdown, mean_known, paired, with_half
from lab.envs import twins
from lab.studies import common
from lm.optim import adamw
from rollout import wilson

PAGE = Path(__file__).with_name("twins.page.md")
RUNS = common.ROOT / "runs" / "studies" / "twins"
SEEDS, FEW = range(20), range(5)
POINTS, PROBES = 12, 64                  # measurements of a run, and states per measurement
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
# What was tuned on which seeds, and why the main grid has this learning rate: lab/predictions.md
COMMON = {"p_tasks": 12, "flaw": 0.3, "likely": 0.25, "judge_weight": 1.0, "lr": 6e-4, "iterations": 240}
COLD_START = ("--demonstrations", "2000")
RL = ("--kl", "loss", "--kl-coef", "0.01")
FAST = {"lr": 3e-3}                      # a separate grid, from the cold start "coins"
# Changed one at a time, with five seeds
OTHERS = ({"p_tasks": 4}, {"p_tasks": 8}, {"judge_weight": 0.1}, {"flaw": 0.1}, {"likely": 0.05},
          {"likely": 0.6})


# Cells

def settings_of(cold, arm, seed, **changes):
    """A cell's settings, plain values."""
    return {"cold": cold, "arm": arm, "seed": seed} | COMMON | changes


def name_of(settings):
    """A cell's name: arm, cold start, settings that differ from COMMON, and seed."""
    changed = [f"{key} {settings[key]:g}" for key in COMMON if settings[key] != COMMON[key]
               and key != "iterations"]
    return ", ".join([settings["arm"], f"from {settings['cold']}", *changed, f"seed {settings['seed']}"])


def cells_of(full, seeds, iterations):
    """{name: settings} of the cells to run, the most important first. full: as with --all."""
    few = [seed for seed in seeds if seed in FEW]
    requested = [settings_of(*pair, seed) for seed in seeds for pair in FIRST]
    if full:
        rest = sorted([pair for pair in MAIN if pair not in FIRST])          # "plain" last: GCD equals GRPO
        requested += [settings_of(*pair, seed) for pair in rest[:2] for seed in seeds]
        requested += [settings_of("coins", arm, seed, **FAST) for seed in seeds for arm in ARMS]
        requested += [settings_of(cold, arm, seed, **change) for change in OTHERS for seed in few
                   for cold in ("judge", "coins") for arm in ("GRPO", "+GCD")
                   if arm != "GRPO" or "judge_weight" not in change]
        requested += [settings_of(*pair, seed) for pair in rest[2:] for seed in seeds]
    requested = [settings | {"iterations": iterations} for settings in requested]
    return {name_of(settings): settings for settings in requested}


def run(name, settings, runs):
    """Run a cell from its cold start, which must exist; returns what is measured during the run."""
    cold, out = cold_folder(settings, runs) / files.CHECKPOINT, runs / name
    shutil.rmtree(out, ignore_errors=True)
    flags = [*environment(settings), *RL, *ARMS[settings["arm"]], "--model", cold, "--demonstrations", 0,
             "--lr", settings["lr"], "--iterations", settings["iterations"],
             "--keep-checkpoints", settings["iterations"] // POINTS, "--checkpoint-every", 10**6]
    if settings["arm"] != "GRPO":
        flags += ["--judge-weight", settings["judge_weight"]]
    with own_trunk() if settings["arm"] == OWN_TRUNK else nullcontext():
        common.train(flags, out)
    result = measured(out, flags)
    shutil.rmtree(out)
    return result


def environment(settings):
    """The flags that a cell shares with its cold start."""
    return ["--env", "lab/envs/twins.py", "--evaluate", "none", "--device", "cpu", "--seed", settings["seed"],
            "--p-tasks", settings["p_tasks"], "--flaw", settings["flaw"], "--likely", settings["likely"]]


def cold_folder(settings, runs):
    """The folder of a cell's cold start."""
    return runs / "cold" / f"{settings['cold']}, likely {settings['likely']:g}, seed {settings['seed']}"


def cold_start(name, settings):
    """Run the cold start of a cell in the folder `name`."""
    flags = [*environment(settings), *COLD_START, *COLD[settings["cold"]], "--iterations", 0]
    common.train([*flags, "--overwrite"], Path(name))


@contextmanager
def own_trunk():
    """Within this block, the judge has its own model and optimizer, and the actor learns from no question.

    The judge starts as a copy of the actor, answers the actor's questions and is trained on them as the actor
    would be.
    """
    judge_turns, copies = gcd.judge_turns, []

    def judge_with_copy(run, i, episodes):
        if not copies:
            model = copy.deepcopy(run.model)
            copies.append(replace(run, model=model, optimizer=adamw(model)))
        judged, questions = judge_turns(copies[0], i, episodes)
        rate = run.config.lr * gcd.lr_factor(run.config, i)
        for part in batching.minibatches(questions, run.config.minibatches):
            if part:
                update.update(copies[0].model, copies[0].optimizer, part, run.objective, rate)
        return judged, []

    with mock.patch.object(gcd, "judge_turns", judge_with_copy):
        yield


# Measures of a run

def measured(out, flags):
    """q(R) in P and N and the cosine for every kept model, and the judge's mean AUC over the last quarter."""
    path = [{"iteration": iteration} | probe(common.load_actor(folder, flags))
            for iteration, folder in common.kept_models(out).items()]
    lines = files.iterations_in(files.read_lines(out / files.METRICS)[0])
    aucs = [line.get("judge/auc_oracle") for line in lines[-(len(lines) // 4 or 1):]]
    return {"path": path, "auc": mean_known(aucs)}


def probe(actor):
    """q_P and q_N, the mean probability of R over PROBES states of each kind; cosine and leak from P to N.

        cosine = <g_P, g_N> / (|g_P| |g_N|),   leak = <g_P, g_N> / <g_P, g_P>

    g_K: the gradient, over all parameters, of R's mean log-probability in kind K. The leak is the theory's c:
    a step that raises it in P by d raises it in N by c d, to first order. None if a gradient is zero.
    """
    R, game, found, grads = actor.chat.encode(twins.PULL)[0], twins.Game(0.0, Counter()), {}, []
    for kind in "PN":
        tasks = [twins.task(f"probe/{i}", "probe", kind) for i in range(PROBES)]
        ids_BT = torch.tensor([actor.chat.observe(game.reset(task), True) for task in tasks])
        last = (list(range(PROBES)), [ids_BT.shape[1] - 1] * PROBES)
        logprob_B = actor.model(ids_BT, select=last).float().log_softmax(-1)[:, R]
        found[f"q_{kind}"] = float(logprob_B.detach().exp().mean())
        logprob_B.mean().backward()
        pushed = [parameter.grad for parameter in actor.model.parameters() if parameter.grad is not None]
        grads.append(torch.cat([grad.flatten().double() for grad in pushed]))
        actor.model.zero_grad(set_to_none=True)
    inner, size_P, size_N = float(grads[0] @ grads[1]), float(grads[0].norm()), float(grads[1].norm())
    return found | {"cosine": inner / (size_P * size_N) if size_P and size_N else None,
                    "leak": inner / size_P**2 if size_P else None}


def final(result):
    """The flawed action's final probability."""
    return result["path"][-1]["q_N"]


def area(result):
    """The mean of the flawed action's probability over the run, by the trapezoid rule."""
    points = [(point["iteration"], point["q_N"]) for point in result["path"]]
    total = sum((b - a) * (p + q) / 2 for (a, p), (b, q) in zip(points, points[1:]))
    return total / (points[-1][0] - points[0][0])


def cosine_drop(result):
    """The fall of the cosine from the cold start to the end; None if it could not be measured."""
    first, last = result["path"][0]["cosine"], result["path"][-1]["cosine"]
    return None if first is None or last is None else first - last


# Analysis

def table_of(requested, results):
    """{(cold, arm, changes): {seed: result}} of the stored results: the main grid, then changed settings."""
    found = {(cold, arm, ()): {} for cold, arm in MAIN}
    for name, settings in requested.items():
        if name not in results:
            continue
        changes = tuple((key, settings[key]) for key in COMMON
                        if settings[key] != COMMON[key] and key != "iterations")
        found.setdefault((settings["cold"], settings["arm"], changes), {})[settings["seed"]] = results[name]
    return {key: of_seed for key, of_seed in found.items() if of_seed}


def arm_row(results):
    """An arm's numbers: final q_N and area with intervals, seeds that removed the flaw, means of the rest."""
    n, removed = len(results), sum(final(result) < 0.5 for result in results.values())
    ends = [result["path"][-1] for result in results.values()]
    return {"final": interval({seed: final(result) for seed, result in results.items()}),
            "area": interval({seed: area(result) for seed, result in results.items()}),
            "removed": removed, "n": n, "removed_interval": wilson(removed, n),
            "q_P": mean_known([end["q_P"] for end in ends]),
            "cosine": mean_known([end["cosine"] for end in ends]),
            "auc": mean_known([result["auc"] for result in results.values()])}


def against(results, reference, number=final):
    """An arm's number minus the reference arm's, paired by seed, with its 95 % t interval and a verdict."""
    difference = paired({seed: number(result) for seed, result in results.items()},
                        {seed: number(result) for seed, result in reference.items()})
    if difference["half"] is None:
        return difference | {"verdict": "not measurable"}
    low, high = difference["mean"] - difference["half"], difference["mean"] + difference["half"]
    return difference | {"verdict": "less" if high < 0 else "more" if low > 0 else "no difference shown"}


def mediation(table):
    """The association between the fall of the cosine and the fall of q_N from its peak.

    One point per run of the main and the fast grid in which both are known; the rank correlation over all
    points and within each arm of a cold start. Runs with a judge on its own trunk are left out, since their
    policies are GRPO's and would count twice. It is no causal effect: arms share seeds and cold starts.
    """
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
    """The rank correlation of the two falls; None with fewer than three points or if one is constant."""
    from scipy import stats
    columns = [[point[key] for point in points] for key in ("cosine_drop", "removed")]
    varied = len(points) > 2 and all(len(set(column)) > 1 for column in columns)
    return float(stats.spearmanr(*columns).statistic) if varied else None


def findings(table):
    """{name: `against`} of every comparison of the page whose arms have results."""
    requested = {}
    for changes in ((), *(tuple(change.items()) for change in (FAST, *OTHERS))):
        reference = () if "judge_weight" in dict(changes) else changes
        setting = "".join(f", {key} {value:g}" for key, value in changes)
        for cold in COLD:
            for arm in ARMS:
                requested[f"{arm} against GRPO, from {cold}{setting}"] = (
                    (cold, arm, changes), (cold, "GRPO", reference))
            requested[f"+GCD against coins for labels, from {cold}{setting}"] = (
                (cold, "+GCD", changes), (cold, "+GCD, coins for labels", changes))
    for cold in ("plain", "coins"):
        requested[f"GRPO from judge against GRPO from {cold}"] = ("judge", "GRPO", ()), (cold, "GRPO", ())
    requested["GRPO from judge against +GCD from coins"] = ("judge", "GRPO", ()), ("coins", "+GCD", ())
    return {name: against(table[one], table[other]) | {"area": against(table[one], table[other], area)}
            for name, (one, other) in requested.items() if one in table and other in table and one != other}


def verdict(found, name):
    """The verdict of a comparison, "not measurable" if it has no result."""
    return found.get(name, {}).get("verdict", "not measurable")


def agreement(found):
    """Whether the results agree with the paper's mechanism, {claim: agrees}.

    "controls" is "yes" if the interval of the better cure lies below that of each control.
    """
    in_rl = verdict(found, "+GCD against GRPO, from coins")
    at_first = verdict(found, "GRPO from judge against GRPO from coins")
    controls = [found.get(f"{arm} against GRPO, from coins") for arm in ("+GCD, coins for labels", OWN_TRUNK)]
    helps, known = [in_rl, at_first].count("less"), "not measurable" not in (in_rl, at_first)
    if not known or any(control is None or control["half"] is None for control in controls):
        return {"cure": ("no", "partly", "yes")[helps] if known else "not measurable",
                "controls": "not measurable"}
    cures = [found["GRPO from judge against GRPO from coins"], found["+GCD against GRPO, from coins"]]
    best = min(cures, key=lambda cure: cure["mean"])
    separated = all(best["mean"] + best["half"] < control["mean"] - control["half"]
                    for control in controls)
    return {"cure": ("no", "partly", "yes")[helps], "controls": "yes" if helps and separated else "no"}


def signed(difference):
    """A difference as text."""
    if difference is None or difference.get("half") is None:
        return "not measurable"
    return f"{with_half(difference, '+.2f')} ({difference['verdict']})"


# Figures and page

COLORS = dict(zip(ARMS, ("tab:gray", "tab:blue", "tab:orange", "tab:green")))
TITLES = {"plain": "cold start without judge questions", "coins": "questions with random answers",
          "judge": "questions with correct answers"}


def draw_paths(table, path, changes=()):
    """Plot q_N over training, a panel per cold start: runs thin, an arm's mean thick; q_P of GRPO dotted."""
    pyplot = common.pyplot("twins")
    colds = [cold for cold in TITLES if (cold, "GRPO", changes) in table]
    if not colds:
        return
    figure, axes = pyplot.subplots(1, len(colds), figsize=(2.5 + 3 * len(colds), 3.8), layout="constrained",
                                   sharey=True, squeeze=False)
    for axis, cold in zip(axes[0], colds):
        for arm, color in COLORS.items():
            runs = [result["path"] for result in table.get((cold, arm, changes), {}).values()]
            if not runs:
                continue
            x = [point["iteration"] for point in runs[0]]
            for run in runs:
                axis.plot(x, [point["q_N"] for point in run], color=color, linewidth=0.4, alpha=0.35)
            mean = [sum(run[k]["q_N"] for run in runs) / len(runs) for k in range(len(x))]
            axis.plot(x, mean, color=color, linewidth=2.2, label=arm)
            if arm == "GRPO":
                right = [sum(run[k]["q_P"] for run in runs) / len(runs) for k in range(len(x))]
                axis.plot(x, right, color="black", linewidth=1, linestyle=":", label="GRPO, in P (right)")
        axis.set(title=TITLES[cold], xlabel="RL iteration", ylim=(0, 1.02))
    axes[0][0].set_ylabel("probability of the flawed action")
    lines = {line.get_label(): line for axis in axes[0] for line in axis.get_lines()
             if not line.get_label().startswith("_")}
    figure.legend(lines.values(), lines, fontsize=8, loc="outside lower center", ncols=2 * len(colds))
    common.save(figure, path)


def draw_mediation(found, path):
    """Plot the fall of the cosine against the fall of the flawed action from its peak, a point per run."""
    pyplot = common.pyplot("twins")
    figure, axis = pyplot.subplots(figsize=(5.2, 4), layout="constrained")
    markers = {"plain": "s", "coins": "o", "judge": "^"}
    for (cold, marker), (arm, color) in ((c, a) for c in markers.items() for a in COLORS.items()):
        points = [point for point in found["points"] if (point["cold"], point["arm"]) == (cold, arm)]
        axis.scatter([point["cosine_drop"] for point in points], [point["removed"] for point in points],
                     color=color, marker=marker, s=22, alpha=0.7, linewidths=0)
    for arm, color in COLORS.items():
        axis.scatter([], [], color=color, label=arm)
    for cold, marker in markers.items():
        axis.scatter([], [], color="black", marker=marker, label=TITLES[cold])
    axis.set(xlabel="fall of the cosine between P and N", ylabel="fall of the flawed action from its peak")
    axis.legend(fontsize=7)
    common.save(figure, path)


def grid(table, settings):
    """The table of the arms whose changes of settings are in `settings`."""
    head = ["cold start", "arm", "setting", "final q_N(R)", "flaw removed", "area", "q_P(R)", "cosine",
            "judge's AUC"]
    rows = []
    for (cold, arm, changes), results in table.items():
        if changes not in settings:
            continue
        row = arm_row(results)
        low, high = row["removed_interval"]
        setting = ", ".join(f"{key} {value:g}" for key, value in changes)
        rows.append([cold, arm, setting, with_half(row["final"]),
                     f"{row['removed']}/{row['n']} [{low:.0%}, {high:.0%}]", with_half(row["area"]),
                     *("–" if row[key] is None else f"{row[key]:.2f}" for key in ("q_P", "cosine", "auc"))])
    return "\n".join(markdown(head, rows)) if rows else "not run"


def rho_text(rho):
    """A rank correlation as text."""
    return "not measurable" if rho is None else f"{rho:.2f}"


def removed_in(table, cold, arm, changes=()):
    """In how many seeds an arm removed the flaw, as text."""
    row = arm_row(table[cold, arm, changes]) if (cold, arm, changes) in table else None
    return f"{row['removed']} of {row['n']}" if row else "not run"


def runaway_in(table, cold, arm):
    """In how many seeds of an arm the first model measured during RL has q_N(R) > .9, as text."""
    first = [result["path"][1] for result in table.get((cold, arm, ()), {}).values()]
    if not first:
        return "not run"
    above = sum(point["q_N"] > 0.9 for point in first)
    return f"{above} of {len(first)} runs at iteration {first[0]['iteration']}"


def outcomes(table):
    """(prediction of the main grid, result) of lab/predictions.md, in its order."""
    def count(*arm):
        return removed_in(table, *arm)

    grpo, gcd, slow = ("GRPO", ()), ("+GCD", ()), ("+GCD", (("judge_weight", 0.1),))
    rows = [
        ("GRPO from plain removes it in at most 5 of 20", count("plain", *grpo)),
        ("GRPO from coins in at most 5 of 20", count("coins", *grpo)),
        ("GCD from coins in at most 4 of 20", count("coins", *gcd)),
        ("GRPO from judge in at least 15 of 20", count("judge", *grpo)),
        ("GCD from judge, lambda 1, in fewer", count("judge", *gcd)),
        ("GCD from judge, lambda .1, as without", count("judge", *slow))]
    for change, claim in (({"p_tasks": 4}, "4:12: removed"), ({"p_tasks": 8}, "8:8: in at least 3 of 5"),
                          ({"flaw": 0.1}, "r = .1: in fewer"), ({"likely": 0.6}, "q0 = .6: in fewer"),
                          ({"likely": 0.05}, "q0 = .05: as with .25")):
        rows += [(f"GRPO from {cold}, {claim}", count(cold, "GRPO", tuple(change.items())))
                    for cold in ("coins", "judge")]
    return rows


def fast_of(table):
    """The fast grid: its picture and its table."""
    rows = grid(table, [tuple(FAST.items())])
    return rows if rows == "not run" else f"![q_N(R), fast](twins-fast.svg)\n\n{rows}"


def page(table, found, mediated, command, seeds):
    """The page's text, from its template in this folder."""
    return PAGE.read_text(encoding="utf-8").format(
        command=command, seeds=f"{min(seeds)} to {max(seeds)}", main=grid(table, [()]),
        fast=fast_of(table), coins_grpo=removed_in(table, "coins", "GRPO"),
        judge_grpo=removed_in(table, "judge", "GRPO"), plain_grpo=removed_in(table, "plain", "GRPO"),
        package=removed_in(table, "judge", "+GCD"), runaway=runaway_in(table, "coins", "+GCD"),
        delay=signed(found.get("+GCD against GRPO, from judge")),
        coins_delay=signed(found.get("+GCD, coins for labels against GRPO, from judge")),
        delay_less_coins=signed(found.get("+GCD against coins for labels, from judge")),
        mediation=rho_text(mediated["spearman"]),
        within="; ".join(f"{arm} {rho_text(rho)}" for arm, rho in mediated["within"].items()),
        outcomes="\n".join(markdown(["predicted", "came out"], outcomes(table))),
        comparisons="\n".join(markdown(["difference", "in final q_N(R)", "in area"], [
            [name, signed(difference), signed(difference["area"])] for name, difference in found.items()])),
        runs=len(mediated["points"]), there=sum(map(len, table.values())),
        others=grid(table, [tuple(change.items()) for change in OTHERS]))


def figures_of(table, found, mediated):
    """What was found on each of the paper's claims: dicts of claim, finding and verdict, for the gallery."""
    agrees, rho, row = agreement(found), rho_text(mediated["spearman"]), arm_row(table[("plain", "GRPO", ())])
    at_first, in_rl, coins, own = (signed(found.get(name)) for name in (
        "GRPO from judge against GRPO from coins", "+GCD against GRPO, from coins",
        "+GCD, coins for labels against GRPO, from coins", f"{OWN_TRUNK} against GRPO, from coins"))
    return [
        {"paper": "Section 3.3 (danger zone)", "picture": "twins.svg",
         "claim": "Next to a right action in similar states a flawed one can run away, although its "
                  "advantage is negative.",
         "found": f"GRPO from a cold start without judge questions ends with q_N(R) = "
                  f"{with_half(row['final'])}, with the action right in three of four tasks; the flaw was "
                  f"removed in {row['removed']} of {row['n']} seeds.",
         "agrees": ("yes" if row["removed"] <= row["n"] / 4
                    else "partly" if row["removed"] < row["n"] else "no")},
        {"paper": "Figure 6 and section 4 (the cure)", "picture": "twins.svg",
         "claim": "Judging one's own actions separates similar samples, and the flawed action disappears.",
         "found": f"Difference of the final q_N(R). GRPO from a cold start with correct answers minus from "
                  f"one with random answers: {at_first}; it removes the flaw in "
                  f"{removed_in(table, 'judge', 'GRPO')} against {removed_in(table, 'coins', 'GRPO')} seeds. "
                  f"GCD in RL minus GRPO, both from random answers: {in_rl}. The full method, correct "
                  f"answers and GCD, removes it in {removed_in(table, 'judge', '+GCD')} seeds, GRPO without "
                  f"judge questions in {removed_in(table, 'plain', 'GRPO')}.",
         "agrees": agrees["cure"]},
        {"paper": "Section 4 (why it works)", "picture": "twins-mediation.svg",
         "claim": "It works through shared features, not by the additional loss or a judge without them.",
         "found": f"Minus GRPO, all from random answers: GCD with random labels {coins}; a judge with its "
                  f"own trunk {own}. Rank correlation of the cosine's fall with the flaw's: {rho}.",
         "agrees": agrees["controls"]}]


def results_of(everything, requested, options):
    """Run the requested cells that are missing, after their cold starts; with --jobs 0 nothing is run.

    Returns {name: result} of every stored cell.
    """
    path = options.out / "twins.jsonl"
    missing = common.missing_cells(path, requested) if options.jobs else {}
    common.check_tree(missing, options.dirty)
    colds = {str(cold_folder(settings, options.runs)): settings for settings in missing.values()}
    common.make_runs(colds, cold_start, options.jobs or 1, "cold starts")
    common.run_cells(path, missing, partial(run, runs=options.runs), options.jobs or 1, options.dirty)
    return {name: record["result"] for name, record in common.finished_cells(path, everything).items()}


def main(argv=None):
    parser = argparse.ArgumentParser("python -m lab.studies.twins", description=__doc__.splitlines()[0],
                                     allow_abbrev=False)
    parser.add_argument("--all", action="store_true", help="run all cold starts and settings")
    parser.add_argument("--seeds", type=int, help="number of seeds, from 0 (default 5; with --all 20)")
    parser.add_argument("--iterations", type=int, default=COMMON["iterations"],
                        help="RL iterations of each run")
    parser.add_argument("--jobs", type=int, default=2, help="runs in parallel; 0: use stored cells only")
    parser.add_argument("--out", type=Path, default=common.OUT, help="output folder")
    parser.add_argument("--runs", type=Path, default=RUNS, help="folder of the runs and their cold starts")
    common.add_dirty(parser)
    options = parser.parse_args(argv)
    seeds = options.seeds if options.seeds is not None else len(SEEDS) if options.all else len(FEW)
    common.check_ranges(parser, ("seeds", seeds, 1, 90), ("iterations", options.iterations, 1, 10**6),
                        ("jobs", options.jobs, 0, 256))
    if options.iterations % POINTS:
        parser.error(f"--iterations={options.iterations}: expected a multiple of {POINTS}, the number of "
                     "measurements")
    everything = cells_of(True, range(max(seeds, len(SEEDS))), options.iterations)
    requested = cells_of(options.all, range(seeds), options.iterations)
    table = table_of(everything, results_of(everything, requested, options))
    if ("plain", "GRPO", ()) not in table:
        parser.error(f"--jobs=0: {options.out / 'twins.jsonl'} has no cell of GRPO from a plain cold start")
    found, mediated = findings(table), mediation(table)
    there = sorted({seed for of_seed in table.values() for seed in of_seed})
    draw_paths(table, options.out / "twins.svg")
    draw_paths(table, options.out / "twins-fast.svg", tuple(FAST.items()))
    draw_mediation(mediated, options.out / "twins-mediation.svg")
    command = ["python", "-m", "lab.studies.twins", *(["--all"] if options.all else []),
               "--seeds", str(seeds), "--iterations", str(options.iterations)]
    text = page(table, found, mediated, " ".join(command), there)
    rows = [{"cold": cold, "arm": arm, "changes": dict(changes)} | arm_row(of_seed)
            for (cold, arm, changes), of_seed in table.items()]
    common.publish(options.out, "twins", command, there,
                   {"rows": rows, "differences": found, "mediation": mediated},
                   figures_of(table, found, mediated), text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
