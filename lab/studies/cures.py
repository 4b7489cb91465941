"""Twin states: what lets a flawed action be unlearned: a KL, untied embeddings, knowing the sign, or judging?

The environment is lab/envs/twins.py: one action is right in states P and flawed in states N, which differ in
one word; 12 of 16 tasks are P. Every cell is a run of gcd.py of 240 iterations from a cold start. Varied are
the KL (0.01 or none), the embeddings (tied or not), the questions in the cold start (none; about the sign,
about its parity, judging by coins or rightly: all in the same words, with the same two answers), the arm
(GRPO; GCD with right labels; GCD with coin tosses), and, from coins, the timing of the judge, its weight, and
what it is asked.

Measured along each run (lab/studies/twin_measures.py): the flawed action's probability q_N, the cosine of
the gradients that raise it in P and in N, the leak from the good turn to the flawed one, whether a linear
probe tells P from N where the command is chosen, and the judge's AUC in each iteration.

    python -m lab.studies.cures --seeds 3         # three seeds of every arm
    python -m lab.studies.cures --seeds 10        # ten of the arms that three do not settle, and of GCD's own
    python -m lab.studies.cures --seeds 30        # and twenty new ones, of some arms with a KL
    python -m lab.studies.cures --seeds 70        # and forty that decide whether GCD in RL beats GRPO
    python -m lab.studies.cures --jobs 0          # only the page, of the stored cells

Left out: other sizes of the flaw and other mixtures of P and N.
"""

import argparse
import itertools
import shutil
import statistics
import sys
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from unittest import mock

import torch

import gcd
import judge
from algorithms import grpo
from infra import files
from lab.bench.intervals import interval, markdown, mean_known, number, paired, sign_of, with_half
from lab.studies import common
from lab.studies.twin_measures import (
    SHARP,
    computed_sharp_wins,
    final,
    is_sharp,
    leak_of,
    linear_probe,
    probe,
    sharp_wins,
    wins,
)
from rollout import wilson

PAGE = Path(__file__).with_name("cures.page.md")
RUNS = common.ROOT / "runs" / "studies" / "cures"
ITERATIONS, POINTS = 240, 24                  # of a run; its measurements
DEMONSTRATIONS = 2000                         # of the cold start
LAST = 10                                     # iterations over which the judge's AUC is averaged
RIGHT = 0.9                                   # AUC from which a judge counts as right
START = 0.25                                  # the flaw's probability before RL, nearly
ALIVE = (10, 40, 100)                         # iterations at which runs whose flaw is alive are compared
FORETELLING = {"cosine": itemgetter("cosine"), "leak": leak_of, "q_N": itemgetter("q_N")}
DRAWS = 1000                                  # of a bootstrap over seeds
COMMON = ("--env", "lab/envs/twins.py", "--evaluate", "none", "--device", "cpu")
QUESTIONS = {"none": ("--no-gcd", "--judge-demonstrations", "0"),
             "coins": ("--judge-labels", "coins"),
             "parity": ("--judge-labels", "parity"),
             "sign": ("--judge-labels", "signs"),
             "judge": ("--judge-labels", "oracle"),
             "coins, before": ("--judge-labels", "coins"),
             "coins, flaw likely": ("--judge-labels", "coins", "--likely", "0.6")}
ARMS = {"GRPO": ("--no-gcd",),
        "+GCD": ("--judge-labels", "oracle"),
        "+GCD, coins": ("--judge-labels", "coins"),
        "GRPO, labels as reward": ("--no-gcd", "--label-reward", "1"),
        "GRPO, labels as reward, thrice the KL": ("--no-gcd", "--label-reward", "1", "--kl-coef", "0.03"),
        "GRPO, thrice the KL": ("--no-gcd", "--kl-coef", "0.03"),
        "+GCD, weight .1, thrice the KL": ("--judge-labels", "oracle", "--judge-weight", "0.1",
                                           "--kl-coef", "0.03"),
        "+GCD, coins, weight .1, thrice the KL": ("--judge-labels", "coins", "--judge-weight", "0.1",
                                                  "--kl-coef", "0.03"),
        "GRPO, ten times the KL": ("--no-gcd", "--kl-coef", "0.1"),
        "GRPO, thirty times the KL": ("--no-gcd", "--kl-coef", "0.3"),
        "GRPO, ten times the KL, then once": ("--no-gcd", "--kl-coef", "0.1"),
        "+GCD, weight .1, ten times the KL, then once": ("--judge-labels", "oracle", "--judge-weight", "0.1",
                                                         "--kl-coef", "0.1"),
        "+GCD, coins, weight .1, ten times the KL, then once": (
            "--judge-labels", "coins", "--judge-weight", "0.1", "--kl-coef", "0.1"),
        "GRPO, entropy bonus": ("--no-gcd",),
        "GRPO, half the entropy bonus": ("--no-gcd",),
        "+GCD, weight .1": ("--judge-labels", "oracle", "--judge-weight", "0.1"),
        "+GCD, coins, weight .1": ("--judge-labels", "coins", "--judge-weight", "0.1"),
        "+sign": ("--judge-labels", "signs"),
        "+sign, before": ("--judge-labels", "signs")}
FIRST = 3             # seeds of every arm; further ones of those that they do not settle, and of GCD's own
NEW = 10              # seeds from here on confirm what the first ten showed; no table has them
OWN_LUCK = 20         # seeds from here on draw outcomes and coins of their own; stored cells of earlier seeds
                      # share one set, but cells of these that are run again today do not
DECISIVE, MOST = 30, 70       # these seeds decide whether GCD in RL beats GRPO after random answers
LATEST = 50                   # seeds from here on also ask why a heavier KL unlearns the flaw
ENTROPY = 0.1                 # weight of the entropy bonus
COEFFICIENTS, EMBEDDINGS = (0.01, 0.0), ("tied", "untied")


# Cells

def settings_of(questions, arm, kl, embeddings, timing=""):
    """An arm's settings, plain values."""
    return {"questions": questions, "arm": arm, "kl": kl, "embeddings": embeddings, "timing": timing}


def arms():
    """Every arm of the study, the most important first."""
    crossed = [(kl, embeddings) for embeddings in EMBEDDINGS for kl in COEFFICIENTS]
    found = [settings_of(questions, "GRPO", *pair) for pair in crossed for questions in (
        "none", "coins", "parity", "sign", "judge")]
    found += [settings_of("coins", arm, *pair) for pair in crossed for arm in ("+GCD", "+GCD, coins")]
    found += [settings_of("judge", "+GCD", *pair) for pair in crossed]
    found += controls() + variants() + explanations()
    found += [settings_of("coins", arm, kl, "tied", timing) for kl in COEFFICIENTS
              for arm, timing in (("GRPO", "constant rate"), ("+GCD", "constant rate"), ("+GCD", "held"))]
    found += [settings_of("coins, before", arm, kl, "tied") for kl in COEFFICIENTS
              for arm in ("GRPO", "+sign, before")]
    return found


def controls():
    """Arms of the last seeds alone: coin tosses for labels after judge questions; all three arms after them
    at a constant learning rate, where fewer runs end for lack of time; coin tosses after coins at that rate.
    """
    return [settings_of("judge", arm, COEFFICIENTS[0], embeddings, timing)
            for timing, arms in (("", ["+GCD, coins"]), ("constant rate", ["GRPO", "+GCD", "+GCD, coins"]))
            for arm in arms for embeddings in EMBEDDINGS] + [
        settings_of("coins", "+GCD, coins", COEFFICIENTS[0], "tied", "constant rate")]


def variants():
    """Arms of the decisive seeds alone: GCD at its default weight, after coins and after judge questions;
    after coins, also coin tosses for labels at that weight, a judge that is asked for the sign, whatever the
    command was, and GRPO that is rewarded for what GCD's judge is taught: beside the same KL, and beside
    thrice that, since this reward makes the right command in P worth thrice as much (1.5 where it was .5);
    GRPO, and GCD at its default weight, with right labels and with coin tosses, beside thrice the KL; GRPO
    beside ten times the KL; and, after judge questions, GRPO beside thrice the KL.
    """
    return [settings_of(questions, arm, COEFFICIENTS[0], embeddings) for questions, arm in (
        ("coins", "+GCD, weight .1"), ("coins", "+sign"), ("judge", "+GCD, weight .1"),
        ("coins", "GRPO, labels as reward"), ("coins", "+GCD, coins, weight .1"),
        ("coins", "GRPO, labels as reward, thrice the KL"), ("coins", "GRPO, thrice the KL"),
        ("coins", "+GCD, weight .1, thrice the KL"), ("coins", "+GCD, coins, weight .1, thrice the KL"),
        ("judge", "GRPO, thrice the KL"), ("coins", "GRPO, ten times the KL"))
        for embeddings in EMBEDDINGS]


def explanations():
    """Arms of the latest seeds alone: GRPO beside a KL of .01 to .3 from a cold start, the KL's reference, in
    which the flaw has probability .6; from it and after coins, beside a KL of .1 for half of the run, then of
    .01; after coins, with an entropy bonus beside .01; and beside the KL that becomes lighter, GRPO after
    judge questions and, after coins, GCD at its default weight, with right labels and with coin tosses.
    """
    return [settings_of(questions, arm, COEFFICIENTS[0], embeddings) for questions, arm in (
        ("coins, flaw likely", "GRPO"), ("coins, flaw likely", "GRPO, thrice the KL"),
        ("coins, flaw likely", "GRPO, ten times the KL"), ("coins, flaw likely", "GRPO, thirty times the KL"),
        ("coins", "GRPO, entropy bonus"), ("coins", "GRPO, ten times the KL, then once"),
        ("coins", "GRPO, half the entropy bonus"),
        ("coins, flaw likely", "GRPO, ten times the KL, then once"),
        ("judge", "GRPO, ten times the KL, then once"),
        ("coins", "+GCD, weight .1, ten times the KL, then once"),
        ("coins", "+GCD, coins, weight .1, ten times the KL, then once"))
        for embeddings in EMBEDDINGS]


def name_of(arm):
    """An arm's name, without the seed."""
    kl = f"KL {arm['kl']:g}" if arm["kl"] else "no KL"
    parts = [f"{arm['arm']} after {arm['questions']}", kl, arm["embeddings"], arm["timing"]]
    return ", ".join(filter(None, parts))


# The arms with which GCD in RL is compared like for like: further seeds are run of these, too
OWN = [name_of(settings_of("coins", arm, kl, embeddings)) for arm in ("GRPO", "+GCD", "+GCD, coins")
       for kl in COEFFICIENTS for embeddings in EMBEDDINGS]
# Those of the new seeds: of each some runs remove the flaw and some keep it
CONFIRMING = [name_of(settings_of(questions, arm, COEFFICIENTS[0], embeddings)) for embeddings in EMBEDDINGS
              for questions, arm in (("none", "GRPO"), ("coins", "GRPO"), ("coins", "+GCD"))]
NEW_ARMS = CONFIRMING + [name_of(settings_of("coins", "+GCD, coins", COEFFICIENTS[0], embeddings))
                         for embeddings in EMBEDDINGS]        # and the control of GCD's labels
CONTROLS, VARIANTS, LATEST_ARMS = ([*map(name_of, group())] for group in (controls, variants, explanations))
# Those after coins of all seeds with outcomes of their own: the three, and two at a constant rate
AFTER_COINS = [name for name in NEW_ARMS if "after coins" in name] + [
    name_of(settings_of("coins", arm, COEFFICIENTS[0], "tied", "constant rate")) for arm in ("GRPO", "+GCD")]
AFTER_JUDGE = [name_of(settings_of("judge", arm, COEFFICIENTS[0], embeddings)) for embeddings in EMBEDDINGS
               for arm in ("GRPO", "+GCD")]
LAST_ARMS, DECISIVE_ARMS = AFTER_COINS + AFTER_JUDGE + CONTROLS, AFTER_COINS + AFTER_JUDGE + VARIANTS


def cells_of(seeds, iterations=ITERATIONS, names=None):
    """{name: settings} of all cells, seed by seed. names: of seeds from FIRST to NEW, only these arms (None:
    all).
    """
    def chosen(arm, seed):
        if seed >= LATEST and arm in LATEST_ARMS:
            return True
        if seed >= NEW:
            return arm in (DECISIVE_ARMS if seed >= DECISIVE else LAST_ARMS if seed >= OWN_LUCK else NEW_ARMS)
        late = arm in CONTROLS + VARIANTS + LATEST_ARMS
        return not late and (seed < FIRST or names is None or arm in names)

    return {f"{name_of(arm)}, seed {seed}": arm | {"seed": seed, "iterations": iterations}
            for seed in seeds for arm in arms() if chosen(name_of(arm), seed)}


def cold_folder(settings, runs):
    """The folder of a cell's cold start."""
    return runs / "cold" / f"{settings['questions']}, {settings['embeddings']}, seed {settings['seed']}"


def cold_start(name, settings):
    """Run the cold start of a cell in the folder `name`."""
    untied = ["--untied"] if settings["embeddings"] == "untied" else []
    with asked_before() if "before" in settings["questions"] else ExitStack():
        common.make([*COMMON, "--seed", settings["seed"], "--demonstrations", DEMONSTRATIONS, *untied,
                     *QUESTIONS[settings["questions"]], "--iterations", 0, "--overwrite"], Path(name))


def run(name, settings, runs):
    """Run a cell from its cold start, which must exist; returns what is measured during the run."""
    cold, out = cold_folder(settings, runs) / files.CHECKPOINT, runs / name
    shutil.rmtree(out, ignore_errors=True)
    own = flags_of(settings["arm"])
    coefficient = [] if "--kl-coef" in own else ["--kl-coef", settings["kl"]]
    kl = ["--kl", "loss", *coefficient] if settings["kl"] else []
    flags = [*COMMON, "--seed", settings["seed"], *kl, *own, "--model", cold,
             "--demonstrations", 0, "--iterations", settings["iterations"],
             "--keep-checkpoints", settings["iterations"] // POINTS, "--checkpoint-every", 10**6]
    with ExitStack() as changes:
        if settings["arm"] in CHANGES:
            changes.enter_context(CHANGES[settings["arm"]]())
        if settings["timing"]:
            changes.enter_context(constant_rate())
        if settings["timing"] == "held":
            changes.enter_context(policy_held())
        if "before" in settings["questions"]:
            changes.enter_context(asked_before())
        common.train(flags, out)
    result = measured(out, flags)
    shutil.rmtree(out)
    return result


def flags_of(arm):
    """The flags of an arm: the judge's weight is 1 unless the arm names another."""
    own = ARMS[arm]
    return own if {"--no-gcd", "--judge-weight"} & {*own} else ("--judge-weight", "1", *own)


# Changes of a run that no flag makes

@contextmanager
def constant_rate():
    """Within this block, the learning rate does not decay."""
    with mock.patch.object(gcd, "lr_factor", lambda config, i: 1.0):
        yield


@contextmanager
def policy_held():
    """Within this block, the policy learns only once the judge is right: an AUC above RIGHT over LAST
    iterations."""
    judge_turns, drop, aucs, right = gcd.judge_turns, gcd.drop_zero_advantage_groups, [], []

    def noted(run, i, episodes):
        *found, metrics = judge_turns(run, i, episodes)
        aucs.append(metrics.get("judge/auc_oracle", 0.5))
        if len(aucs) >= LAST and sum(aucs[-LAST:]) / LAST > RIGHT:
            right.append(len(aucs))
        return *found, metrics

    def kept(run, episodes):
        return drop(run, episodes) if right else []

    with mock.patch.multiple(gcd, judge_turns=noted, drop_zero_advantage_groups=kept):
        yield


@contextmanager
def asked_before():
    """Within this block, a question follows the observation and not the command."""
    def question_ids(chat, turn):
        return turn.prompt_ids[:-1] + judge.question_message(chat)

    with mock.patch.object(judge, "question_ids", question_ids):
        yield


@contextmanager
def entropy_bonus(weight):
    """Within this block, GRPO has an entropy bonus of this weight."""
    with mock.patch.object(grpo.Method, "defaults", {"entropy_coef": weight}):
        yield


@contextmanager
def kl_lightened():
    """Within this block, the KL weighs COEFFICIENTS[0] from half of the iterations on."""
    optimize = gcd.optimize

    def lighter(run, i, *arguments):
        if 2 * i >= run.config.iterations:
            run.objective = replace(run.objective, kl_coef=COEFFICIENTS[0])
        return optimize(run, i, *arguments)

    with mock.patch.object(gcd, "optimize", lighter):
        yield


CHANGES = {"GRPO, entropy bonus": partial(entropy_bonus, ENTROPY),
           "GRPO, half the entropy bonus": partial(entropy_bonus, ENTROPY / 2)} | {
               arm: kl_lightened for arm in ARMS if arm.endswith("ten times the KL, then once")}


# Measures

def measured(out, flags):
    """{"path": `probe` and `linear_probe` of every kept model, "auc": the judge's per iteration or []}.

    The AUC is by the oracle or, of an arm that is asked about the sign, by the sign.
    """
    actors = ((iteration, common.load_actor(folder, flags))
              for iteration, folder in common.kept_models(out).items())
    path = [{"iteration": iteration} | probe(actor) | {"probe": linear_probe(actor)}
            for iteration, actor in actors]
    lines = files.iterations_in(files.read_lines(out / files.METRICS)[0])
    aucs = [line.get("judge/auc" if "signs" in flags else "judge/auc_oracle") for line in lines]
    return {"path": path, "auc": [auc and round(auc, 3) for auc in aucs] if set(aucs) != {None} else []}


def when_right(result):
    """The iteration from which the judge's AUC, averaged over LAST, first exceeds RIGHT; None: never."""
    aucs = [0.5 if auc is None else auc for auc in result["auc"]]
    return next((k for k in range(LAST, len(aucs) + 1) if sum(aucs[k - LAST:k]) / LAST > RIGHT), None)


def when_away(result):
    """The first measured iteration at which q_N is above .9; None: never."""
    return next((point["iteration"] for point in result["path"] if point["q_N"] > 0.9), None)


# Analysis

def table_of(everything, results):
    """`common.results_by_arm` of the study's arms, without runs whose policy was held to the end."""
    trained = {name: result for name, result in results.items()
               if everything[name]["timing"] != "held" or when_right(result)}
    return common.results_by_arm(map(name_of, arms()), name_of, everything, trained)


def removed(result):
    """Whether a run ends without the flaw."""
    return final(result) < 0.5


def arm_row(results):
    """An arm's numbers: seeds that removed the flaw, final q_N and q_P, cosine, leak and probe, the judge."""
    n, gone = len(results), sum(map(removed, results.values()))
    ends, starts = ([result["path"][k] for result in results.values()] for k in (-1, 0))
    return {"removed": gone, "n": n, "removed_interval": wilson(gone, n),
            "final": interval({seed: final(result) for seed, result in results.items()}),
            **{key: mean_known([end[key] for end in ends]) for key in ("q_P", "cosine", "probe")},
            "probe_start": mean_known([start["probe"] for start in starts]),
            "leak_start": mean_known(map(leak_of, starts)), "leak": mean_known(map(leak_of, ends)),
            "auc": mean_known([mean_known(last_quarter(result["auc"])) for result in results.values()]),
            "right": [when_right(result) for result in results.values()],
            "away": [when_away(result) for result in results.values()],
            "lag": [lag(result) for result in results.values() if not removed(result) and result["auc"]]}


def last_quarter(values):
    """The last quarter of a list."""
    return values[len(values) * 3 // 4:]


def lag(result):
    """Iterations from the flaw's run-away until the judge is right; "never" counts as the run's last one."""
    last = result["path"][-1]["iteration"]
    right, away = when_right(result), when_away(result)
    return (last if right is None else right) - (last if away is None else away)


def removed_by_leak(table):
    """Of the runs whose leak ends below .5, and of all others: [those that removed the flaw, all]."""
    found = {"below": [0, 0], "above": [0, 0]}
    for result in (result for results in table.values() for result in results.values()):
        side = found["below" if leak_of(result["path"][-1]) < 0.5 else "above"]
        side[0], side[1] = side[0] + removed(result), side[1] + 1
    return found


def foretold(table):
    """What tells of a run that still has the flaw, q_N of .5 or more, that it will remove it.

    Returns {iteration of ALIVE: {"removed", "n": of these runs, measure of FORETELLING: [AUC, low, high]}}.
    The AUC: how often the measure is smaller in a run that removes the flaw later than in one of the same arm
    that keeps it, ties half; with its 95 % interval by a bootstrap over seeds. None without such a pair. At
    the end all three have fallen with the flaw, so they foretell nothing.
    """
    found = {}
    for iteration in ALIVE:
        alive = [(name, seed, removed(result), point) for name, results in table.items()
                 for seed, result in results.items() for point in result["path"]
                 if point["iteration"] == iteration and point["q_N"] >= 0.5 and point["cosine"] is not None]
        pairs = [(one, other) for one in alive for other in alive
                 if one[2] and not other[2] and one[0] == other[0]]
        found[iteration] = {"removed": sum(run[2] for run in alive), "n": len(alive), **{
            measure: auc_of([(one[1], other[1], of(one[3]) - of(other[3])) for one, other in pairs])
            for measure, of in FORETELLING.items()}}
    return found


def auc_of(pairs):
    """[share of the differences below 0, low, high] of (seed, seed, difference); None without any."""
    if not pairs:
        return None
    seeds = sorted({seed for pair in pairs for seed in pair[:2]})
    one_P, other_P = (torch.tensor([seeds.index(pair[k]) for pair in pairs]) for k in range(2))
    difference_P = torch.tensor([pair[2] for pair in pairs], dtype=torch.double)
    win_P = (difference_P < 0).double() + 0.5 * (difference_P == 0)
    drawn_DS = torch.randint(len(seeds), (DRAWS, len(seeds)), generator=torch.Generator().manual_seed(0))
    count_DS = torch.zeros(DRAWS, len(seeds), dtype=torch.double).scatter_add_(
        1, drawn_DS, torch.ones_like(drawn_DS, dtype=torch.double))
    weight_DP = count_DS[:, one_P] * count_DS[:, other_P]
    auc_D = (weight_DP @ win_P) / weight_DP.sum(1)
    low, high = auc_D[~auc_D.isnan()].quantile(torch.tensor([0.025, 0.975], dtype=torch.double)).tolist()
    return [float(win_P.mean()), low, high]


def lags(table):
    """Of GCD's runs after coins, by whether they removed the flaw: iterations from q_N > .9 to a right judge,
    of the runs that have both, and how many never had a right one.
    """
    found = {"removed": [[], 0], "kept": [[], 0]}
    for kl, embeddings in itertools.product(COEFFICIENTS, EMBEDDINGS):
        for result in table.get(name_of(settings_of("coins", "+GCD", kl, embeddings)), {}).values():
            side = found["removed" if removed(result) else "kept"]
            side[1] += when_right(result) is None
            if when_right(result) and when_away(result):
                side[0].append(lag(result))
    return found


def waiting(table, kl):
    """In how many seeds GCD removes the flaw if the policy is held until the judge is right, in how many at
    the same constant rate without, and of how many seeds: of those that have both.
    """
    sides = [table.get(name_of(settings_of("coins", "+GCD", kl, "tied", timing)), {})
             for timing in ("held", "constant rate")]
    seeds = set.intersection(*map(set, sides))
    return [*(sum(removed(results[seed]) for seed in seeds) for results in sides), len(seeds)]


def unsettled(table):
    """The arms whose first seeds do not agree on whether the flaw is removed."""
    return [name for name, results in table.items()
            if len({removed(result) for seed, result in results.items() if seed < FIRST}) > 1]


def pooled(table, arm, other, coefficients=COEFFICIENTS, questions="coins", other_questions=None,
           embeddings=EMBEDDINGS, timing=""):
    """Final q_N of an arm minus another's: a seed's mean over these KLs and embeddings, its interval over the
    seeds that have all of them; in how many runs of these seeds each removed the flaw; and the difference of
    the final chance to win ("wins").

    other_questions: the other arm's (None: the same). None below two such seeds.
    """
    found = [[table.get(name_of(settings_of(*each, kl, embedded, timing)), {})
              for kl in coefficients for embedded in embeddings]
             for each in ((questions, arm), (other_questions or questions, other))]
    seeds = sorted(set.intersection(*({*results} for side in found for results in side)))
    if len(seeds) < 2:
        return None

    def less(measure):
        return paired(*({seed: mean_known([measure(results[seed]) for results in side]) for seed in seeds}
                        for side in found))

    every = [results[seed] for side in found for results in side for seed in seeds]
    sharp = sharp_wins if all(map(is_sharp, every)) else computed_sharp_wins          # of both sides alike
    ends = [[final(results[seed]) for results in side for seed in seeds] for side in found]
    won = {name: less(measure) for name, measure in (("wins", wins), ("sharp wins", sharp))}
    return less(final) | {
        "removed": [sum(end < 0.5 for end in side) for side in ends], "n": len(ends[0]),
        **{name: {key: of[key] for key in ("mean", "half")} for name, of in won.items()}}


def merged(*tables):
    """One table of the seeds of all."""
    return {name: {seed: result for table in tables for seed, result in table.get(name, {}).items()}
            for name in dict.fromkeys(name for table in tables for name in table)}


def again(first, new, own):
    """{arm that GCD is compared with: {seeds: `pooled` with a KL}} of first seeds, of new ones, in which
    GCD's lead was first seen, and of the first with outcomes of their own.
    """
    return {other: {seeds: pooled(side, "+GCD", other, COEFFICIENTS[:1])
                    for seeds, side in {"first": first, "new": new, "own": own}.items()}
            for other in ("GRPO", "+GCD, coins")}


def elsewhere(table, own):
    """{where the first seeds showed no lead of GCD, and what coin tosses do: {seeds: `pooled` of an arm and
    GRPO, or of GCD and coin tosses, with a KL}}.
    """
    constant, after = {"timing": "constant rate"}, {"questions": "judge"}
    tied, coins = constant | {"embeddings": ("tied",)}, "+GCD, coins"
    where = {"after judge questions": ("+GCD", "GRPO", after),
             "after judge questions, coin tosses for labels": (coins, "GRPO", after),
             "after judge questions, constant rate": ("+GCD", "GRPO", after | constant),
             "after judge questions, constant rate, coin tosses for labels": (
                 coins, "GRPO", after | constant),
             "after random answers, coin tosses for labels": (coins, "GRPO", {}),
             "after random answers, constant rate, tied": ("+GCD", "GRPO", tied),
             "after random answers, constant rate, tied, coin tosses for labels": (coins, "GRPO", tied),
             "after random answers, constant rate, tied, GCD less coin tosses": ("+GCD", coins, tied)}
    return compared(where, {"first": table, "own": own, "first and own": merged(table, own)})


def compared(where, sides):
    """{name: {seeds: `pooled` with a KL}}. where: {name: (arm, reference, settings)}; sides: {seeds: table}.
    """
    return {name: {seeds: pooled(side, arm, other, COEFFICIENTS[:1], **settings)
                   for seeds, side in sides.items()} for name, (arm, other, settings) in where.items()}


def decided(own, decisive):
    """`compared` of what judging in RL does after random answers and after right ones, in the decisive seeds,
    and in all with outcomes of their own. "both halves": after right answers, less GRPO after random ones.
    """
    tied = {"timing": "constant rate", "embeddings": ("tied",)}
    where = {f"{arm} less {other}": (arm, other, {}) for arm, other in (
        ("+GCD", "GRPO"), ("+GCD", "+GCD, coins"), ("+GCD, coins", "GRPO"), ("+GCD, weight .1", "GRPO"),
        ("+sign", "GRPO"), ("+GCD", "+sign"), ("GRPO, labels as reward", "GRPO"),
        ("+GCD", "GRPO, labels as reward"), ("+GCD, weight .1", "+GCD, coins, weight .1"),
        ("+GCD, coins, weight .1", "GRPO"), ("GRPO, labels as reward, thrice the KL", "GRPO"),
        ("GRPO, labels as reward, thrice the KL", "GRPO, labels as reward"),
        ("+GCD, weight .1", "GRPO, labels as reward, thrice the KL"), ("GRPO, thrice the KL", "GRPO"),
        ("GRPO, labels as reward, thrice the KL", "GRPO, thrice the KL"),
        ("+GCD, weight .1", "GRPO, thrice the KL"),
        ("+GCD, weight .1, thrice the KL", "GRPO, thrice the KL"),
        ("+GCD, coins, weight .1, thrice the KL", "GRPO, thrice the KL"),
        ("+GCD, weight .1, thrice the KL", "+GCD, coins, weight .1, thrice the KL"),
        ("GRPO, ten times the KL", "GRPO, thrice the KL"), ("GRPO, ten times the KL", "GRPO"),
        ("+GCD, weight .1", "GRPO, ten times the KL"), ("GRPO, entropy bonus", "GRPO"),
        ("GRPO, half the entropy bonus", "GRPO"), ("GRPO, half the entropy bonus", "GRPO, thrice the KL"),
        ("GRPO, ten times the KL, then once", "GRPO, ten times the KL"),
        ("GRPO, ten times the KL, then once", "+GCD, weight .1"),
        ("+GCD, weight .1, ten times the KL, then once", "GRPO, ten times the KL, then once"),
        ("+GCD, weight .1, ten times the KL, then once",
         "+GCD, coins, weight .1, ten times the KL, then once"))}
    where["+GCD less GRPO, constant rate, tied"] = "+GCD", "GRPO", tied
    where["judge questions before RL alone, less neither"] = "GRPO", "GRPO", {
        "questions": "judge", "other_questions": "coins"}
    where["GRPO, thrice the KL less GRPO, after judge questions"] = "GRPO, thrice the KL", "GRPO", {
        "questions": "judge"}
    where["GRPO, ten times the KL, then once less judge questions before RL"] = (
        "GRPO, ten times the KL, then once", "GRPO", {"other_questions": "judge"})
    where["judge questions before RL alone, less neither, ten times the KL, then once"] = (
        "GRPO, ten times the KL, then once", "GRPO, ten times the KL, then once",
        {"questions": "judge", "other_questions": "coins"})
    for times in ("thrice the KL", "ten times the KL", "thirty times the KL",
                  "ten times the KL, then once"):
        where[f"GRPO, {times} less GRPO, flaw likely"] = f"GRPO, {times}", "GRPO", {
            "questions": "coins, flaw likely"}
    for arm in ("+GCD", "+GCD, weight .1"):
        where[f"{arm} less GRPO, after judge questions"] = arm, "GRPO", {"questions": "judge"}
        where[f"both halves, {arm}, less neither"] = arm, "GRPO", {
            "questions": "judge", "other_questions": "coins"}
    return compared(where,
                    {"decisive": decisive, "all with outcomes of their own": merged(own, decisive)})


def of_decisive(decisive):
    """{"ARM after QUESTIONS": {"removed", "n": runs, "lowered": of them, ending below START, "q_N": mean
    final, "q_P", "wins", "sharp wins": likewise}} of the decisive seeds, with a KL, at the decayed rate, over
    both kinds of embeddings.
    """
    found = {}
    for arm in arms():
        if not arm["timing"] and arm["kl"] == COEFFICIENTS[0]:
            found.setdefault(f"{arm['arm']} after {arm['questions']}", []).extend(
                decisive.get(name_of(arm), {}).values())
    return {name: {"removed": sum(map(removed, of_arm)), "n": len(of_arm),
                   "lowered": sum(final(result) < START for result in of_arm),
                   "q_N": statistics.fmean(map(final, of_arm)),
                   "q_P": statistics.fmean(result["path"][-1]["q_P"] for result in of_arm),
                   "wins": statistics.fmean(map(wins, of_arm)),
                   "sharp wins": statistics.fmean(map(sharp_wins, of_arm))}
            for name, of_arm in found.items() if of_arm}


def of_confirming(fresh):
    """The new seeds' runs that `foretold` was predicted of."""
    return {name: fresh[name] for name in CONFIRMING if name in fresh}


def start_spread(tables):
    """The largest difference of q_P or q_N at iteration 0 between arms of one cold start and seed: above 0
    where a cold start was made again later, and came out otherwise by rounding.
    """
    starts = {name_of(arm): (arm["questions"], arm["embeddings"]) for arm in arms()}
    found = {}
    for table in tables:
        for name, of_seed in table.items():
            for seed, result in of_seed.items():
                found.setdefault((starts[name], seed), []).append(result["path"][0])
    return max(max(point[q] for point in points) - min(point[q] for point in points)
               for points in found.values() for q in ("q_P", "q_N"))


def sharp_errors(table):
    """[smallest, largest] over arms without an entropy bonus: the mean chance to win at temperature SHARP as
    measured, less as computed, of the runs that have both; None without any.
    """
    known = ([sharp_wins(result) - computed_sharp_wins(result) for result in results.values()
              if is_sharp(result)] for name, results in table.items()
             if "entropy" not in name)
    found = [statistics.fmean(of_arm) for of_arm in known if of_arm]
    return [min(found), max(found)] if found else None


def in_common(table, one, other):
    """[runs in which one removes the flaw, in which the other does, all runs] of two (questions, arm), over
    the settings and seeds that both have: an arm whose first seeds agree has no more.
    """
    ends = [(final(sides[0][seed]), final(sides[1][seed]))
            for kl, embeddings in itertools.product(COEFFICIENTS, EMBEDDINGS)
            for sides in [[table.get(name_of(settings_of(questions, arm, kl, embeddings)), {})
                           for questions, arm in (one, other)]]
            for seed in sides[0] if seed in sides[1]]
    return [*(sum(end < 0.5 for end in side) for side in zip(*ends)), len(ends)] if ends else [0, 0, 0]


def findings(table, fresh, own, decisive):
    """What the runs show beyond the arms' rows: of first and new seeds, of those with outcomes of their own,
    and of the decisive ones.
    """
    judge, later = ("judge", "GRPO"), merged(own, {name: of for name, of in decisive.items()
                                                   if name not in LATEST_ARMS})
    return {"differences": {f"{one} against {other}": common.paired_arms(table, one, other, final)
                            for one, other in pairs()},
            "removed by leak": removed_by_leak(table),
            "removed by leak, later seeds": removed_by_leak(later),
            "foretold": {"first seeds": foretold(table), "new seeds": foretold(of_confirming(fresh)),
                         "later seeds": foretold(later)},
            "again": again(table, fresh, own), "elsewhere": elsewhere(table, own),
            "decided": decided(own, decisive), "decisive": of_decisive(decisive), "lags": lags(table),
            "in common": {"sign, judge": in_common(table, ("sign", "GRPO"), judge),
                          "+GCD after judge, GRPO": in_common(table, ("judge", "+GCD"), judge)},
            "held": {kl: waiting(table, kl) for kl in COEFFICIENTS},
            "start spread": start_spread((table, fresh, own, decisive)),
            "sharp error": sharp_errors(decisive),
            "pooled": {other: pooled(table, "+GCD", other) for other in ("GRPO", "+GCD, coins")}}


def pairs():
    """[(arm, reference)] of the page's comparisons, as names."""
    found = []
    for embeddings in EMBEDDINGS:
        for kl in COEFFICIENTS:
            def named(questions, arm, kl=kl, embeddings=embeddings, timing=""):
                return name_of(settings_of(questions, arm, kl, embeddings, timing))
            found += [(named("judge", "GRPO"), named("sign", "GRPO")),
                      (named("sign", "GRPO"), named("parity", "GRPO")),
                      (named("judge", "GRPO"), named("coins", "GRPO")),
                      (named("coins", "+GCD"), named("coins", "GRPO")),
                      (named("coins", "+GCD"), named("coins", "+GCD, coins")),
                      (named("judge", "+GCD"), named("judge", "GRPO"))]
            if embeddings == "tied":
                constant = {arm: named("coins", arm, timing="constant rate") for arm in ("GRPO", "+GCD")}
                found += [(constant["+GCD"], constant["GRPO"]),
                          (named("coins", "+GCD", timing="held"), constant["+GCD"]),
                          (named("coins, before", "+sign, before"), named("coins, before", "GRPO"))]
    return found


# Page and figure

def times(iterations):
    """Iterations of several seeds as text: smallest to largest, and how many seeds never get there."""
    known, never = [k for k in iterations if k is not None], iterations.count(None)
    text = f"{min(known)}–{max(known)}" if known else ""
    return ", ".join(filter(None, [text, f"never {never}" if never else ""])) or "–"


def grid(table):
    """The table of all arms."""
    head = ["arm", "flaw removed", "[95 %]", "final q_N", "q_P", "cosine", "leak, start → end",
            "probe, start → end", "judge's AUC", "judge right at", "q_N > .9 at"]
    rows, rounded = [], partial(number, form=".2f")
    for name, results in table.items():
        row = arm_row(results)
        low, high = row["removed_interval"]
        rows.append([name, f"{row['removed']} of {row['n']}", f"[{low:.0%}, {high:.0%}]",
                     with_half(row["final"]), rounded(row["q_P"]), rounded(row["cosine"]),
                     f"{rounded(row['leak_start'])} → {rounded(row['leak'])}",
                     f"{rounded(row['probe_start'])} → {rounded(row['probe'])}", rounded(row["auc"]),
                     times(row["right"]) if row["auc"] is not None else "–", times(row["away"])])
    return markdown(head, rows)


def comparisons(differences):
    """The table of differences in final q_N."""
    rows = [[*name.split(" against "), with_half(difference, "+.2f")] for name, difference in
            differences.items() if difference is not None and difference["half"] is not None]
    return markdown(["arm", "minus", "final q_N"], rows) if rows else "Not measurable."


def pooled_text(found):
    """A `pooled` difference as text."""
    if found is None:
        return "not measurable"
    one, other = found["removed"]
    won = [with_half({key: 100 * value for key, value in found[name].items()}, "+.1f")
           for name in ("wins", "sharp wins")]
    return (f"{with_half(found, '+.2f')} ({one} and {other} of {found['n']} runs removed the flaw; chance to "
            f"win {won[0]} points, at {SHARP} {won[1]})")


def removed_in(table, *settings, timing=""):
    """In how many seeds an arm removed the flaw, as text."""
    results = table.get(name_of(settings_of(*settings, timing)), {}).values()
    return f"{sum(map(removed, results))} of {len(results)}" if results else "not run"


def draw(table, path):
    """Plot q_N over training: a column for each kind of embeddings and KL, a row for what is compared."""
    pyplot = common.pyplot("cures")
    crossed = [(kl, embeddings) for embeddings in EMBEDDINGS for kl in COEFFICIENTS]
    colors = {"none": "tab:gray", "coins": "tab:brown", "parity": "tab:purple", "sign": "tab:green",
              "judge": "tab:blue", "GRPO": "tab:brown", "+GCD": "tab:blue", "+GCD, coins": "tab:orange"}
    figure, axes = pyplot.subplots(2, 4, figsize=(12, 6), sharex=True, sharey=True, layout="constrained",
                                   subplot_kw={"ylim": (0, 1.02)})
    for column, (kl, embeddings) in enumerate(crossed):
        rows = ([(q, "GRPO", q) for q in ("none", "coins", "parity", "sign", "judge")],
                [("coins", arm, arm) for arm in ("GRPO", "+GCD", "+GCD, coins")])
        for axis, (questions, arm, label) in ((axes[k][column], line) for k in (0, 1) for line in rows[k]):
            results = table.get(name_of(settings_of(questions, arm, kl, embeddings)), {}).values()
            q_N = [[point["q_N"] for point in result["path"]] for result in results]
            x = [point["iteration"] for result in results for point in result["path"]][:POINTS + 1]
            for path_of_seed in q_N:
                axis.plot(x, path_of_seed, color=colors[label], linewidth=0.4, alpha=0.4)
            if q_N:
                mean = [sum(points) / len(points) for points in zip(*q_N, strict=True)]
                axis.plot(x, mean, color=colors[label], linewidth=2, label=label)
        axes[0][column].set_title(f"{'KL .01' if kl else 'no KL'}, {embeddings} embeddings")
        axes[1][column].set_xlabel("RL iteration")
    axes[0][0].set_ylabel("GRPO, by the cold start's questions\nprobability of the flawed action")
    axes[1][0].set_ylabel("after coins, by the arm\nprobability of the flawed action")
    for row in axes:
        if row[-1].get_lines():
            row[-1].legend(fontsize=8)
    common.save(figure, path)


def foretold_text(found):
    """What `foretold` returns, as a table."""
    def text(auc):
        return "–" if auc is None else "{:.2f} [{:.2f}, {:.2f}]".format(*auc)

    return markdown(
        ["iteration", "runs with the flaw, and those of them that remove it later", *FORETELLING],
        [[str(iteration), f"{of['n']}, {of['removed']}", *(text(of[measure]) for measure in FORETELLING)]
         for iteration, of in found.items()])


def seeds_text(table):
    """Which seeds a table has."""
    seeds = sorted({seed for of_seed in table.values() for seed in of_seed})
    return f"seeds {seeds[0]} to {seeds[-1]}" if seeds else "not run"


def page(tables, found, command, seeds, iterations):
    """The page's text, from its template in this folder. tables: of `results_of`; found: of `findings`."""
    table, fresh, own, decisive = tables
    sign, added = ("{0} and {1} of {2}".format(*counts) for counts in found["in common"].values())
    early, confirmed, later = map(foretold_text, found["foretold"].values())
    return PAGE.read_text(encoding="utf-8").format(
        command=command, iterations=iterations, there=sum(map(len, table.values())),
        seeds=f"{min(seeds)} to {max(seeds)}", grid=grid(table),
        comparisons=comparisons(found["differences"]),
        unsettled="; ".join(unsettled(table)) or "none",
        less_grpo=pooled_text(found["pooled"]["GRPO"]),
        less_coins=pooled_text(found["pooled"]["+GCD, coins"]),
        sign=sign, added=added, foretold=early, confirmed=confirmed, later=later,
        again=markdown(["seeds", *(f"less that of {other}" for other in found["again"])], [
            [of_seeds, *(pooled_text(of[of_seeds]) for of in found["again"].values())]
            for of_seeds in found["again"]["GRPO"]]),
        elsewhere=markdown(["where", "first seeds", "own", "both"], [
            [where, *map(pooled_text, of.values())] for where, of in found["elsewhere"].items()]),
        decided=markdown(["final q_N of", "decisive seeds", "all with outcomes of their own"], [
            [name, *map(pooled_text, of.values())] for name, of in found["decided"].items()]),
        spread=f"{found['start spread']:.4f}", latest=LATEST, entropy=ENTROPY,
        sharp_error="{:+.1f} to {:+.1f}".format(*(100 * error for error in found["sharp error"]))
        if found["sharp error"] else "not measured",
        new_seeds=seeds_text(fresh), own_seeds=seeds_text(own), decisive_seeds=seeds_text(decisive),
        waiting=" and ".join("{0} with, {1} without, of {2}".format(*counts)
                             for counts in found["held"].values()),
        **{f"lags_{side}": lags_text(*of_side) for side, of_side in found["lags"].items()},
        **{f"{start}_{side}": f"{gone} of {n}" for start, of in (("leak", ""), ("later", ", later seeds"))
           for side, (gone, n) in found[f"removed by leak{of}"].items()})


def lags_text(values, never):
    """One side of `lags` as text."""
    known = f"median {statistics.median(values):g}, {min(values)} to {max(values)}" if values else "none"
    return f"{known} (n {len(values)}; {never} never had a right judge)"


def figures_of(table, found):
    """What was found on the paper's claim, for the gallery. found: of `findings`."""
    def both(questions, arm, embeddings="tied", timing=""):
        return " and ".join(removed_in(table, questions, arm, kl, embeddings, timing=timing)
                            for kl in COEFFICIENTS)

    below, above = found["removed by leak"].values()
    lead = {other: pooled_text(found["decided"][f"+GCD less {other}"]["decisive"])
            for other in ("GRPO", "+GCD, coins")}
    heavier, added = (pooled_text(found["decided"][name]["decisive"]) for name in (
        "GRPO, thrice the KL less GRPO", "+GCD, weight .1, thrice the KL less GRPO, thrice the KL"))
    foretelling = {name: of[ALIVE[0]] for name, of in found["foretold"].items()}

    def of_all(measure):
        return ", ".join(f"{name} " + "{:.2f} [{:.2f}, {:.2f}]".format(*of[measure])
                         for name, of in foretelling.items() if of[measure])

    return [{"paper": "Section 3.2 (similar samples)", "picture": "cures.svg",
             "claim": "Next to a right action in similar states a flawed one can run away, although its "
                      "advantage is negative.",
             "found": "GRPO from a cold start without questions, with the action right in three of four "
                      f"tasks: it removes the flaw in {both('none', 'GRPO')} seeds, with a KL of .01 and "
                      "without; untied embeddings "
                      f"{both('none', 'GRPO', 'untied')}.",
             "agrees": runs_away(table)},
            {"paper": "Section 4 (what cures, and when)", "picture": "cures.svg",
             "claim": "Judging one's own actions during RL separates similar samples, so that flawed actions "
                      "disappear.",
             "found": "Seeds that remove the flawed action, with a KL of .01 and without. GRPO by the cold "
                      f"start's questions: none {both('none', 'GRPO')}; random answers "
                      f"{both('coins', 'GRPO')}; parity {both('parity', 'GRPO')}; which sign "
                      f"{both('sign', 'GRPO')}; judging {both('judge', 'GRPO')}. From random answers, GCD "
                      f"{both('coins', '+GCD')}, with coin tosses for labels {both('coins', '+GCD, coins')}; "
                      f"untied embeddings, GCD {both('coins', '+GCD', 'untied')}, GRPO "
                      f"{both('coins', 'GRPO', 'untied')}; policy held until the judge is right "
                      f"{both('coins', '+GCD', timing='held')}, at the same constant rate without holding "
                      f"{both('coins', '+GCD', timing='constant rate')}. In {MOST - DECISIVE} "
                      "further seeds, with a KL and both kinds of embeddings, GCD's q_N less GRPO's "
                      f"{lead['GRPO']}, less that with coin tosses {lead['+GCD, coins']}. But GRPO with a KL "
                      f"of .03, without a judge, less GRPO {heavier}; GCD at .1 adds to that {added}.",
             "agrees": verdict(table, found["decided"])},
            {"paper": "Section 4 (why it works)", "picture": "cures.svg",
             "claim": "The flawed action disappears because a push on the right one no longer reaches it.",
             "found": "Of runs that end with less than half of a push on the action in P arriving in N "
                      f"{below[0]} of {below[1]} removed the flaw, of the others {above[0]} of {above[1]}; "
                      "but by then the flaw is gone as well. Of runs of one arm that still have it at "
                      f"iteration {ALIVE[0]}, a smaller cosine of the gradients in P and in N foretells that "
                      f"it will be removed with an AUC of {of_all('cosine')}; q_N does so with one of "
                      f"{of_all('q_N')}, the leak of {of_all('leak')}. An association; and it does not "
                      "take a judge: see the questions about the sign.",
             "agrees": "partly" if below[0] / max(below[1], 1) > above[0] / max(above[1], 1) else "no"}]


def runs_away(table):
    """Whether GRPO from no questions keeps the flaw: "yes" if in at least three of four runs of each KL,
    "partly" of one, "no" of none."""
    kept = []
    for kl in COEFFICIENTS:
        names = [name_of(settings_of("none", "GRPO", kl, embeddings)) for embeddings in EMBEDDINGS]
        gone = [removed(result) for name in names for result in table.get(name, {}).values()]
        if not gone:
            return "not measurable"
        kept.append(gone.count(False) >= 0.75 * len(gone))
    return "yes" if all(kept) else "partly" if any(kept) else "no"


def verdict(table, decided):
    """Whether GCD during RL, after coins, removes the flaw where GRPO does not.

    "yes" if the intervals of GCD - GRPO and of GCD - coins lie below 0 with a KL, in the decisive seeds, and
    without, in the first ones; "partly" with one of the two, "no" with none.
    """
    others = "GRPO", "+GCD, coins"
    signs = [[sign_of(decided[f"+GCD less {other}"]["decisive"]) for other in others],
             [sign_of(pooled(table, "+GCD", other, COEFFICIENTS[1:])) for other in others]]
    if None in itertools.chain(*signs):
        return "not measurable"
    below = [{*of_setting} == {-1} for of_setting in signs]
    return "yes" if all(below) else "partly" if any(below) else "no"


def results_of(options):
    """Run the missing cells, after their cold starts; with --jobs 0 none. Returns four times `table_of` all
    stored: of seeds below NEW, and then below OWN_LUCK, DECISIVE and MOST.
    """
    path = options.out / "cures.jsonl"

    def stored(seeds=range(NEW)):
        everything = cells_of(seeds, options.iterations)
        return table_of(everything, common.stored_cells(path, everything))

    steps = [*(seeds for seeds in (FIRST, NEW) if seeds < options.seeds), options.seeds]
    for seeds in steps:
        names = None if seeds <= FIRST else {*unsettled(stored()), *OWN}
        requested = cells_of(range(seeds), options.iterations, names)
        missing = common.missing_cells(path, requested, options)
        colds = {str(cold_folder(settings, options.runs)): settings for settings in missing.values()}
        common.make_runs(colds, cold_start, options.jobs, "cold starts")
        common.run_cells(path, requested, partial(run, runs=options.runs), options)
    return [stored(range(*ends)) for ends in itertools.pairwise((0, NEW, OWN_LUCK, DECISIVE, MOST))]


def main(argv=None):
    parser = argparse.ArgumentParser("python -m lab.studies.cures", description=__doc__.splitlines()[0],
                                     allow_abbrev=False)
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds, from 0")
    parser.add_argument("--iterations", type=int, default=ITERATIONS, help="RL iterations of each run")
    common.add_cells(parser, 2, RUNS)
    options = parser.parse_args(argv)
    common.check_ranges(parser, ("seeds", options.seeds, 1, MOST),
                        ("iterations", options.iterations, 1, 10**6), ("jobs", options.jobs, 0, 256))
    if options.iterations % POINTS:
        parser.error(f"--iterations={options.iterations}: expected a multiple of {POINTS}, the number of "
                     "measurements")
    try:
        table, fresh, own, decisive = tables = results_of(options)
    except ValueError as error:
        parser.error(str(error))
    if not table:
        parser.error(f"--jobs=0: {options.out / 'cures.jsonl'} has no cell")
    there = sorted({seed for part in tables for of_seed in part.values() for seed in of_seed})
    draw(table, options.out / "cures.svg")
    command = ["python", "-m", "lab.studies.cures", "--seeds", str(max(options.seeds, there[-1] + 1))]
    if options.iterations != ITERATIONS:
        command += ["--iterations", str(options.iterations)]
    found = findings(*tables)
    text = page(tables, found, " ".join(command), there, options.iterations)
    rows = [{"name": name} | arm_row(of_seed) for name, of_seed in table.items()]
    common.publish(options.out, "cures", command, there, {"rows": rows} | found,
                   figures_of(table, found), text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
