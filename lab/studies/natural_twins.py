"""Natural twins: does a flawed command run away in a pretrained language model, and what takes it back?

The environment is lab/envs/natural_twins.py: situations in English in which one command is right (P) or
flawed (N) by a detail of the text; twelve of sixteen tasks are P. Every cell is a run of gcd.py on
SmolLM2-135M, bare commands, from a cold start. Varied are the cold start's questions, which are on templates
that RL never shows (none; judging; on the detail alone, in a prompt that names no command), the arm (GRPO;
GCD with right labels; GCD with shuffled ones) and the KL (0.01 or none). The positive control, "taught", was
taught before all that to judge RL's own templates; the later cold start may take some of it back.

Measured along each run, on the templates of RL and on as many that nothing was trained on: the probability
of the flawed command in N, the cosine of the hidden states of P and N where the command is chosen, and the
judge's AUC: so when the judge became right, and when the flaw ran away.

    python -m lab.studies.natural_twins --jobs 2            # 75 cells, some 8 core-hours
    python -m lab.studies.natural_twins --small --seeds 3   # the small model from scratch: minutes
    python -m lab.studies.natural_twins --jobs 0            # only the page, of the stored cells

Left out: whole-model gradients (lab/studies/cures.py), other sizes of the flaw and mixtures of P and N.
"""

import argparse
import math
import random
import shutil
import sys
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F

import batching
import gcd
import judge
import update
from envs import Reply
from infra import files
from infra.progress import progress
from lab.bench.intervals import interval, markdown, mean_known, number, with_half
from lab.envs import natural_twins as twins
from lab.studies import common
from lab.studies.cures import times

PAGE = Path(__file__).with_name("natural_twins.page.md")
RUNS = common.ROOT / "runs" / "studies" / "natural_twins"
ITERATIONS, POINTS = 60, 12           # of a run; its measurements after the first
PAIRS = 4                             # pairs of states in a forward pass of a measurement
LAST = 10                             # iterations over which success is averaged
RIGHT, AWAY = 0.9, 0.5                # above these a judge is right (AUC), and a flaw ran away (q_N)
MEASURED = ("trained", "untrained")   # parts of the environment's templates
COMMON = ("--env", "lab/envs/natural_twins.py", "--evaluate", "none", "--device", "cpu", "--preset", "small",
          "--tasks", 8, "--group-size", 4, "--minibatches", 2, "--max-response-tokens", 8,
          "--judge-turns", 16)
# Parts of a cold start: commands on the templates of RL, then commands and questions on other templates
FIRST = ("--cold-start-types", "part", "--p-tasks", 8, "--judge-epochs", 0, "--no-gcd",
         "--judge-demonstrations", 0)
SECOND = ("--cold-start-epochs", 0)
# Before both for "taught": steps of lessons, which have LESSON pairs of states each, and their learning rate
LESSONS, LESSON = {"smollm2": (160, 3e-4), "small": (400, 1e-3)}, 8
# The last layers, not adapters, and bf16: each trains about twice as many tokens a CPU second, and the cells
# are many. Only the two commands: where all texts may be sampled, 60 iterations teach little but the form
# (pilots of GRPO, seed 99: the two have .46 of the probability at the start)
MODELS = {"smollm2": {"all": ("--prompt", "plain", "--admissible-only", "--train-layers", 4, "--lr", 1e-4,
                              "--dtype", "bfloat16"),
                      "cold": ("--cold-start-lr", 3e-4), "start": ("--model", "smollm2")},
          "small": {"all": ("--admissible-only",), "cold": (), "start": ()}}
QUESTIONS = {"none": ("--no-gcd", "--judge-demonstrations", 0),
             "judge": ("--judge-labels", "oracle"),
             "detail": ("--judge-labels", "details"),
             "taught": ("--judge-labels", "oracle")}
# {part of a cold start: the part before it}; the last four are the starts
FROM = {"lessons": None, "first": None, "first after lessons": "lessons",
        "none": "first", "judge": "first", "detail": "first", "taught": "first after lessons"}
SHOWN = {"smollm2": 192, "small": 2000}           # demonstrations, and questions, of a part of the cold start
# Shuffled labels are the environment's: gcd.py shuffles dense ones, which call no single turn bad
ARMS = {"GRPO": ("--no-gcd",),
        "+GCD": ("--judge-labels", "oracle", "--judge-weight", 1),
        "+shuffled": ("--judge-labels", "coins", "--judge-weight", 1)}
COEFFICIENTS = (0.01, 0.0)


# Cells

def settings_of(start, arm, kl):
    """An arm's settings, plain values."""
    return {"start": start, "arm": arm, "kl": kl}


def all_arms():
    """Every arm of the study: three after no questions and after judging, GRPO after questions on the detail,
    and with a KL the three after having been taught.
    """
    found = [settings_of(start, arm, kl) for start in ("none", "judge") for arm in ARMS for kl in COEFFICIENTS
             if kl or arm != "+shuffled"]
    return (found + [settings_of("detail", "GRPO", kl) for kl in COEFFICIENTS]
            + [settings_of("taught", arm, COEFFICIENTS[0]) for arm in ARMS])


def name_of(arm):
    """An arm's name, without the seed."""
    return f"{arm['arm']} after {arm['start']}, {'KL %g' % arm['kl'] if arm['kl'] else 'no KL'}"


def cells_of(seeds, iterations, model):
    """{name: settings} of the cells of these seeds, seed by seed."""
    return {f"{name_of(arm)}, seed {seed}": arm | {"seed": seed, "iterations": iterations, "model": model}
            for seed in seeds for arm in all_arms()}


def cold_folder(settings, runs):
    """The folder of a cell's cold start, or of a part of one, as settings["start"]."""
    return runs / "cold" / f"{settings['model']}, {settings['start']}, seed {settings['seed']}"


def parts_of(start):
    """The parts of a start, in their order."""
    return [*(parts_of(before) if (before := FROM[start]) else ()), start]


def cold_start(name, settings):
    """Run a part of a cold start, settings["start"], in the folder `name`, from the part before beside it."""
    part, chosen, count = settings["start"], MODELS[settings["model"]], SHOWN[settings["model"]]
    start, flags, changed = chosen["start"], FIRST, ExitStack()
    if FROM[part]:
        before = cold_folder(settings | {"start": FROM[part]}, Path(name).parents[1])
        start = ("--model", before / files.CHECKPOINT)
    if part == "lessons":
        changed = mock.patch.object(gcd, "cold_start", partial(teach, *LESSONS[settings["model"]]))
    elif part in QUESTIONS:
        flags = [*SECOND, "--judge-demonstrations", count, *QUESTIONS[part]]
        changed = asked_on_detail() if part == "detail" else changed
    with changed:
        common.make([*COMMON, *chosen["all"], *chosen["cold"], "--demonstrations", count, *start, *flags,
                     "--seed", settings["seed"], "--iterations", 0, "--overwrite"], Path(name))


def run(name, settings, runs):
    """Run a cell from its cold start, which must exist; returns what is measured during the run."""
    out, path = runs / name, []
    shutil.rmtree(out, ignore_errors=True)
    kl = ["--kl", "loss", "--kl-coef", settings["kl"]] if settings["kl"] else []
    with measuring(settings["iterations"] // POINTS, path):
        common.train([*COMMON, *MODELS[settings["model"]]["all"], *ARMS[settings["arm"]], *kl,
                      "--seed", settings["seed"], "--model", cold_folder(settings, runs) / files.CHECKPOINT,
                      "--demonstrations", 0, "--iterations", settings["iterations"],
                      "--checkpoint-every", 10**6], out)
    lines = files.iterations_in(files.read_lines(out / files.METRICS)[0])
    shutil.rmtree(out)

    def along(key):
        return [None if (value := line.get(key)) is None else round(value, 3) for line in lines]

    return {"path": path, "success": along("rollout/success"),
            "unreadable": along("judge/unreadable_frac") if settings["arm"] != "GRPO" else []}


# Changes of a run that no flag makes

@contextmanager
def asked_on_detail():
    """Within this block, a question follows the detail's sentence alone: no command is in it."""
    def question_ids(chat, turn):
        return chat.message(twins.STATES[turn.observation].detail, first=True) + judge.question_message(chat)

    with mock.patch.object(judge, "question_ids", question_ids):
        yield


def teach(steps, rate, run):
    """Lessons, in place of a run's cold start: cross-entropy of the right verdicts on the templates of RL.

    Each step asks about both commands in both kinds of some situations, so that neither the command nor the
    detail alone tells the answer.
    """
    states, rng = twins.states_of("trained"), random.Random(run.config.seed)
    pairs = [*zip(states[::2], states[1::2], strict=True)]
    objective = update.Objective(judge_weight=1.0, microbatch_tokens=run.config.microbatch_tokens)
    for _ in progress(range(steps), desc="lessons", unit="step"):
        samples = lesson(run.chat, rng.sample(pairs, LESSON))
        update.update(run.model, run.optimizer, samples, objective, rate)


def lesson(chat, pairs):
    """Judge samples that imitate the right verdict on each command of these pairs of states."""
    found = []
    for one, command in with_commands(pairs):
        ids, answer = sum(question_on(chat, one, command), []), judge.verdict_ids(chat, one.label(command))
        found.append(batching.sample_of(ids, answer, 1.0, len(found), kind="judge"))
    return found


@contextmanager
def measuring(every, path):
    """Within this block, runs append {"iteration": i} | probe to `path` every so many iterations and at the
    end.

    Kept checkpoints would take half a gigabyte each.
    """
    iteration = gcd.iteration

    def measure(run, i):
        run.update_sampler()               # after a forward of the sharded model itself weights stay gathered
        path.append({"iteration": i} | probe(run.sampler, run.chat))

    def measured(run, i, reference):
        if i % every == 0:
            measure(run, i)
        metrics = iteration(run, i, reference)
        if i + 1 == run.config.iterations:
            measure(run, i + 1)
        return metrics

    with mock.patch.object(gcd, "iteration", measured):
        yield


# Measures

def pairs_of(part):
    """A pair of states (P, N) for each template of a part: all nouns and both orders occur."""
    return [tuple(twins.state(template, k % twins.NOUNS, kind, k // twins.NOUNS % 2 == 1) for kind in "PN")
            for k, template in enumerate(twins.PARTS[part])]


def probe(model, chat):
    """{part: `measures`} of a model on both parts."""
    return {part: measures(*read(model, chat, pairs_of(part))) for part in MEASURED}


def with_commands(pairs):
    """(state, command) for both commands of each state of these pairs."""
    return [(one, command) for pair in pairs for one in pair for command in (one.flawed, one.other)]


def question_on(chat, one, command):
    """Token ids of a state's prompt, of a command as the response, and of the judge's question on it."""
    prompt = chat.observe(Reply(one.observation, sorted(one.commands)), first=True)
    return prompt, chat.respond(command), judge.question_message(chat)


@torch.no_grad()
def read(model, chat, pairs):
    """What a model thinks of n pairs of states, P and N, and in each of its flawed and its other command.

    Returns hidden_nsC, the hidden states from which a command's first token is predicted; first_nsc, that
    token's logprob; whole_nsc, the whole response's; good_nsc, the log-odds of "good" against "bad" as the
    answer to the judge's question.
    """
    good, bad = (judge.verdict_ids(chat, label)[0] for label in judge.ANSWERS)
    found = []
    for i in range(0, len(pairs), PAIRS):
        samples, at = [], []
        for one, command in with_commands(pairs[i:i + PAIRS]):
            prompt, response, question = question_on(chat, one, command)
            ids = prompt + response + question
            samples.append(batching.Sample(ids, [], [], None, 0))
            at.append([*range(len(prompt) - 1, len(prompt) + len(response) - 1), len(ids) - 1])
        ids_1M, layout, columns_of = batching.layout(samples, model)
        column_N = torch.tensor([columns_of[s][t] for s, tokens in enumerate(at) for t in tokens])
        x_NC, logprob_NV = model(ids_1M, layout, column_N, lambda x, lm_head: (
            x.float(), lm_head(x).float().log_softmax(-1)))
        start = 0
        for sample, tokens in zip(samples, at):
            here, n = logprob_NV[start:start + len(tokens)], len(tokens) - 1
            response = sample.ids[tokens[0] + 1:tokens[0] + 1 + n]
            token_n = here[range(n), response]
            found.append((x_NC[start], token_n[0], token_n.sum(), here[-1, good] - here[-1, bad]))
            start += len(tokens)
    hidden, first, response, verdict = (torch.stack(column) for column in zip(*found))
    hidden_nsC = hidden.view(len(pairs), 2, 2, -1)[:, :, 0]              # the same before either command
    return hidden_nsC, *(column.view(len(pairs), 2, 2).double() for column in (first, response, verdict))


def measures(hidden_nsC, first_nsc, whole_nsc, good_nsc):
    """The numbers of a part, from what `read` returns.

        q_P, q_N     probability of the flawed command's first token against the other's: the policy with
                     --admissible-only
        offered      probability of the two whole commands together
        cosine       of the hidden states of a pair
        apart        of those of two templates, both in P: what any two situations have in common
        auc          probability that the judge's log-odds of "good" are higher for a good command than for a
                     bad one, ties half
    """
    q_P, q_N = first_nsc.softmax(-1)[:, :, 0].mean(0).tolist()
    P, N = hidden_nsC.double().unbind(1)
    good = torch.cat([good_nsc[:, 0, 0], good_nsc[:, 1, 1]])
    bad = torch.cat([good_nsc[:, 0, 1], good_nsc[:, 1, 0]])
    difference = good[:, None] - bad
    return {"q_P": q_P, "q_N": q_N, "offered": float(whole_nsc.exp().sum(-1).mean()),
            "cosine": float(F.cosine_similarity(P, N).mean()),
            "apart": float(F.cosine_similarity(P, P.roll(1, 0)).mean()),
            "auc": float(((difference > 0).double() + 0.5 * (difference == 0)).mean())}


# Analysis

def final(result, part="trained"):
    """The flawed command's final probability in N."""
    return result["path"][-1][part]["q_N"]


def when(result, key, limit):
    """The first measured iteration at which a number on the templates of RL is above a limit; None: never."""
    return next((point["iteration"] for point in result["path"] if point["trained"][key] > limit), None)


def lag(result):
    """Iterations from the flaw's run-away until the judge is right; "never" counts as the run's last one.

    None if neither ever was.
    """
    right, away = when(result, "auc", RIGHT), when(result, "q_N", AWAY)
    last = result["path"][-1]["iteration"]
    if right is None and away is None:
        return None
    return (last if right is None else right) - (last if away is None else away)


def table_of(everything, results):
    """`common.results_by_arm` of the study's arms."""
    return common.results_by_arm(map(name_of, all_arms()), name_of, everything, results)


def arm_row(results):
    """An arm's numbers.

    Of each part: seeds whose final q_N is below one half, and the measures at start and end; of the run:
    success over the last iterations; by seed when the judge was right, when the flaw ran away, and the lag.
    """
    parts = {}
    for part in MEASURED:
        starts, ends = ([result["path"][k][part] for result in results.values()] for k in (0, -1))
        removed = sum(final(result, part) < AWAY for result in results.values())
        parts[part] = {
            "removed": removed,
            "final": interval({seed: final(result, part) for seed, result in results.items()}),
            **{f"{key}{suffix}": mean_known([point[key] for point in points]) for key in starts[0]
               for suffix, points in (("_start", starts), ("", ends))}}
    right = [when(result, "auc", RIGHT) for result in results.values()]
    lags = [known for result in results.values() if (known := lag(result)) is not None]
    return {"n": len(results), **parts,
            "success": interval({seed: mean_known(result["success"][-LAST:])
                                 for seed, result in results.items()}),
            "unreadable": mean_known([mean_known(result["unreadable"][-LAST:])
                                      for result in results.values()]),
            "away": [when(result, "q_N", AWAY) for result in results.values()],
            "right": right, "seeds_right": len(right) - right.count(None),
            "lag": lags}


def pairs():
    """[(arm, reference)] of the page's comparisons, as names."""
    found = []
    for kl in COEFFICIENTS:
        def named(start, arm, kl=kl):
            return name_of(settings_of(start, arm, kl))
        for start in ("none", "judge", *(("taught",) if kl else ())):
            found.append((named(start, "+GCD"), named(start, "GRPO")))
            found += [(named(start, "+GCD"), named(start, "+shuffled")),
                      (named(start, "+shuffled"), named(start, "GRPO"))] if kl else []
        found += [(named("judge", "GRPO"), named("none", "GRPO")),
                  (named("detail", "GRPO"), named("none", "GRPO")),
                  (named("judge", "GRPO"), named("detail", "GRPO"))]
        found += [(named("taught", "GRPO"), named("judge", "GRPO"))] if kl else []
    return found


def against(table, one, other, part):
    """Final q_N of an arm minus another's: `common.paired_arms`."""
    return common.paired_arms(table, one, other, partial(final, part=part))


def start_of(name):
    """The start in an arm's name."""
    return name.split(" after ")[1].split(",")[0]


def unlike(table):
    """{(start, seed): groups of arms} of the seeds in which the arms of a start did not begin with the same
    model, by their measures at iteration 0: a cold start that was made again came out otherwise.
    """
    found = {}
    for name, results in table.items():
        for seed, result in results.items():
            groups = found.setdefault((start_of(name), seed), {})
            groups.setdefault(str(result["path"][0]), []).append(name)
    return {key: [*groups.values()] for key, groups in found.items() if len(groups) > 1}


def same_start(table, one, other):
    """`against` on the templates of RL, of the seeds in which both arms began with the same model; None for
    arms of two starts.
    """
    if start_of(one) != start_of(other) or one not in table or other not in table:
        return None
    seeds = [seed for seed, result in table[one].items() if seed in table[other]
             and result["path"][0] == table[other][seed]["path"][0]]
    return against({name: {seed: table[name][seed] for seed in seeds} for name in (one, other)}, one, other,
                   "trained")


def verdict(table):
    """Whether GCD removes what GRPO keeps, by final q_N on the templates of RL with the KL.

    Over the three starts from which it runs: "yes" if the intervals of GCD - GRPO and GCD - shuffled lie
    below 0 in all, "partly" in some, "no" in none.
    """
    below = []
    for start in ("none", "judge", "taught"):
        one, *others = (name_of(settings_of(start, arm, COEFFICIENTS[0]))
                        for arm in ("+GCD", "GRPO", "+shuffled"))
        differences = [against(table, one, other, "trained") for other in others]
        if any(d is None or d["half"] is None for d in differences):
            return "not measurable"
        below.append(all(d["mean"] + d["half"] < 0 for d in differences))
    return "yes" if all(below) else "partly" if any(below) else "no"


# Page and figure

def grids(table):
    """The tables of all arms: probabilities, then representation and judge."""
    policy = [["arm", "seeds below .5: trained", "untrained", "final q_N: trained", "untrained",
               "q_P: trained", "untrained", "offered, start → end: trained", "untrained", "success"], []]
    shared = [["arm", "cosine P–N, start → end: trained", "untrained", "two templates",
               "judge's AUC, start → end: trained", "untrained", "unreadable", "judge right at",
               "q_N > .5 at", "lag"], []]
    rounded = partial(number, form=".2f")
    for name, results in table.items():
        row = arm_row(results)
        of = [row[part] for part in MEASURED]

        def change(key, part):
            return f"{rounded(part[f'{key}_start'])} → {rounded(part[key])}"
        policy[1].append([name, *(f"{part['removed']} of {row['n']}" for part in of),
                          *(with_half(part["final"]) for part in of), *(rounded(part["q_P"]) for part in of),
                          *(change("offered", part) for part in of), with_half(row["success"])])
        shared[1].append([name, *(change("cosine", part) for part in of), change("apart", of[0]),
                          *(change("auc", part) for part in of), rounded(row["unreadable"]),
                          times(row["right"]), times(row["away"]), times(row["lag"])])
    return [markdown(head, rows) for head, rows in (policy, shared)]


def comparisons(table):
    """The table of differences in final q_N."""
    rows = []
    for one, other in pairs():
        differences = [against(table, one, other, part) for part in MEASURED]
        if all(d is not None and d["half"] is not None for d in differences):
            same = same_start(table, one, other)
            rows.append([one, other, *(with_half(d, "+.2f") for d in differences),
                         with_half(same, "+.2f")])
    head = ["arm", "minus", *MEASURED, "trained, same cold start"]
    return markdown(head, rows) if rows else "Not measurable."


def unlike_text(table):
    """Where the arms of a start did not begin with the same model, as sentences; "" if nowhere."""
    def group(names):
        return ", ".join(name.replace(f" after {start_of(name)},", "") for name in names)

    text = "; ".join(f"after {start}, seed {seed}: {' / '.join(map(group, groups))}"
                     for (start, seed), groups in unlike(table).items())
    return text and ("In some seeds a cold start was made again later, and came out otherwise, so "
                     "the arms before the slash began with one model and those behind it with another: "
                     f"{text}. The last column is of the seeds in which both arms began with one model.\n\n")


def draw(table, path, name):
    """Plot q_N on both parts and the judge's AUC over training: a column for each start; dashed: no KL."""
    pyplot = common.pyplot(name)
    colors = {"GRPO": "tab:brown", "+GCD": "tab:blue", "+shuffled": "tab:orange"}
    rows = (("trained", "q_N", "q_N, templates of RL"), ("untrained", "q_N", "q_N, untrained templates"),
            ("trained", "auc", "judge's AUC, templates of RL"))
    starts = [start for start in QUESTIONS if any(f" after {start}," in name for name in table)]
    figure, axes = pyplot.subplots(3, len(starts), figsize=(3.25 * len(starts) + 1, 8), sharex=True,
                                   sharey=True, layout="constrained", squeeze=False,
                                   subplot_kw={"ylim": (0, 1.02)})
    for column, start in enumerate(starts):
        for (arm, color), kl in ((one, kl) for one in colors.items() for kl in COEFFICIENTS):
            results = table.get(name_of(settings_of(start, arm, kl)), {}).values()
            style = {"color": color, "linestyle": "-" if kl else "--"}
            for axis, (part, key, _) in zip(axes[:, column], rows) if results else ():
                lines = [[point[part][key] for point in result["path"]] for result in results]
                x = [point["iteration"] for point in next(iter(results))["path"]]
                seeds = [y for line in lines for y in (*line, math.nan)]         # one path: a smaller file
                axis.plot([*x, math.nan] * len(lines), seeds, linewidth=0.4, alpha=0.4, **style)
                axis.plot(x, [sum(points) / len(points) for points in zip(*lines, strict=True)], linewidth=2,
                          label=arm if kl else f"{arm}, no KL", **style)
        axes[0][column].set_title({"none": "no questions", "judge": "judging, other templates",
                                   "detail": "the detail, no command",
                                   "taught": "taught to judge these, then judging"}[start], fontsize=9)
        axes[-1][column].set_xlabel("RL iteration")
        if axes[0][column].get_lines():
            axes[0][column].legend(fontsize=7)
    for axis, (*_, label) in zip(axes[:, 0], rows):
        axis.set_ylabel(label)
    common.save(figure, path)


def page(table, command, seeds, model, name):
    """The page's text, from its template in this folder."""
    policy, shared = grids(table)
    return PAGE.read_text(encoding="utf-8").format(
        command=command, there=sum(map(len, table.values())), seeds=f"{min(seeds)} to {max(seeds)}",
        model={"smollm2": "SmolLM2-135M-Instruct, of which the last four layers are trained",
               "small": "The small model from scratch"}[model],
        lessons=LESSONS[model][0] * LESSON, figure=f"{name}.svg", policy=policy, shared=shared,
        unlike=unlike_text(table), comparisons=comparisons(table))


def figures_of(table, model, name):
    """What was found on the paper's claim, for the gallery."""
    def ends(start, arm, kl=COEFFICIENTS[0], part="trained"):
        of_seed = table.get(name_of(settings_of(start, arm, kl)))
        return with_half(arm_row(of_seed)[part]["final"]) if of_seed else "not run"

    named = {"smollm2": "SmolLM2-135M", "small": "The small model"}[model]
    found = "; ".join(
        f"after {start}: " + ", ".join(f"{arm} {ends(start, arm)} ({ends(start, arm, part='untrained')})"
                                       for arm in (ARMS if start != "detail" else ("GRPO",)))
        for start in QUESTIONS)
    return [{"paper": "Section 4 (in a language model)", "picture": f"{name}.svg",
             "claim": "A flawed action next to a right one in similar states can run away under GRPO; "
                      "training to judge one's own actions weakens the coupling (asked here: of situations "
                      "in English, and of a pretrained model?).",
             "found": f"{named}, situations in English. Final probability of the flawed command with a KL of "
                      f".01, by the cold start's questions, in parentheses on untrained templates: {found}.",
             "agrees": verdict(table)}]


# The command

def results_of(options, name):
    """Run the missing cells seed by seed; with --jobs 0 none. Returns `table_of` all that are stored.

    A seed's cold starts are made first, and removed when its cells are done.
    """
    path, model = options.out / f"{name}.jsonl", "small" if options.small else "smollm2"
    for seed in range(options.seeds):
        requested = cells_of([seed], options.iterations, model)
        missing = common.missing_cells(path, requested, options)
        needed = {part for settings in missing.values() for part in parts_of(settings["start"])}
        folders = {str(cold_folder(settings, options.runs)): settings for part in needed
                   for settings in [{"model": model, "start": part, "seed": seed}]}
        for k in range(1, 4):
            common.make_runs({folder: settings for folder, settings in folders.items()
                              if len(parts_of(settings["start"])) == k}, cold_start, options.jobs,
                             f"seed {seed}: cold starts, part {k}")
        common.run_cells(path, requested, partial(run, runs=options.runs), options)
        for folder in folders:
            shutil.rmtree(folder)
    everything = cells_of(range(90), options.iterations, model)
    return table_of(everything, common.stored_cells(path, everything))


def main(argv=None):
    parser = argparse.ArgumentParser("python -m lab.studies.natural_twins",
                                     description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds, from 0")
    parser.add_argument("--small", action="store_true", help="the small model from scratch, not SmolLM2")
    parser.add_argument("--iterations", type=int, default=ITERATIONS, help="RL iterations of each run")
    common.add_cells(parser, 1, RUNS)
    options = parser.parse_args(argv)
    common.check_ranges(parser, ("seeds", options.seeds, 1, 90), ("iterations", options.iterations, 1, 10**6),
                        ("jobs", options.jobs, 0, 256))
    if options.iterations % POINTS:
        parser.error(f"--iterations={options.iterations}: expected a multiple of {POINTS}, the number of "
                     "measurements")
    model = "small" if options.small else "smollm2"
    name = "natural_twins_small" if options.small else "natural_twins"
    try:
        table = results_of(options, name)
    except ValueError as error:
        parser.error(str(error))
    if not table:
        parser.error(f"--jobs=0: {options.out / f'{name}.jsonl'} has no cell")
    there = sorted({seed for of_seed in table.values() for seed in of_seed})
    draw(table, options.out / f"{name}.svg", name)
    command = ["python", "-m", "lab.studies.natural_twins", *(["--small"] if options.small else []),
               "--seeds", str(options.seeds)]
    if options.iterations != ITERATIONS:
        command += ["--iterations", str(options.iterations)]
    text = page(table, " ".join(command), there, model, name)
    compared = {f"{one} against {other}": {part: against(table, one, other, part) for part in MEASURED}
                | {"same cold start": same_start(table, one, other)}
                for one, other in pairs() if one in table and other in table}
    unlike_starts = [{"start": start, "seed": seed, "arms": groups}
                     for (start, seed), groups in unlike(table).items()]
    common.publish(options.out, name, command, there,
                   {"rows": [{"name": arm} | arm_row(of_seed) for arm, of_seed in table.items()],
                    "differences": compared, "unlike cold starts": unlike_starts},
                   figures_of(table, model, name), text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
