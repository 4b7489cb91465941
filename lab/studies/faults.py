"""Faults in training curves: runs with one fault each, injected by a patched function, and a healthy run.

All runs start from one short cold start and have one seed; gcd.py has no flag for any of these faults. Each
fault has a rule, in code, that detects it from the curves of its run and of the healthy one. Each rule is
applied to all runs, which shows a rule that always fires. Two faults are stopped by gcd.py itself: their runs
have its check disabled, and its error message is reported. Left out: faults of an engine or an environment.

    python -m lab.studies.faults --jobs 2   # lab/results/studies/faults.json, .svg, .md; 15 min on two cores
"""

import argparse
import contextlib
import functools
import io
import math
import shlex
import sys
from dataclasses import dataclass
from unittest import mock

import torch

import batching
import config
import gcd
import judge
import update
from algorithms import rewards
from infra import files
from lab.bench.intervals import markdown, mean_known
from lab.studies import common
from lm import engine

PAGE = common.ROOT / "lab" / "studies" / "faults.page.md"
RUNS = common.ROOT / "runs" / "faults"
HEALTHY, CHECKED = "healthy", ", checked"
# Rewards are 0 or 1, so that all of a group can be equal, and are divided by the group's std, so that noise
# can be amplified. Groups without a gradient stay in the update, so that its tokens can be counted
COLD = "--demonstrations 3000 --judge-demonstrations 800"
FLAGS = ("--tasks 8 --group-size 8 --normalize-std --invalid-penalty 0 --dynamic-sampling keep "
         "--judge-turns 48 --judge-weight 0.3")
REPORTED_AT = 1.5             # factor on the temperature of the reported logprobs
NOISE = 1e-4                  # of a reward; 1/10,000 of the reward of a won episode
TOO_FAST = 10                 # factor on the learning rate
LATE = 5                      # number of first and last iterations that `early` and `late` average
CURVES = {                    # plotted: {metric: title}
    "rollout/success": "success", "rollout/turns": "turns", "rollout/invalid_frac": "invalid turns",
    "rollout/truncated_frac": "cut responses", "rollout/zero_variance_frac": "equal groups",
    "trained_share": "trained / sampled tokens", "policy/entropy_nats": "entropy, nats",
    "policy/logprob_gap_max_nats": "largest logprob gap, nats", "policy/clip_frac": "clipped tokens",
    "policy/grad_norm": "gradient norm", "judge/auc": "judge AUC, labels",
    "judge/auc_oracle": "judge AUC, oracle"}


# The faults: context managers that patch one function

@contextlib.contextmanager
def patch_samples_of(function):
    """Replace batching.samples_of, also where update imports it."""
    with (mock.patch.object(batching, "samples_of", function),
          mock.patch.object(update, "samples_of", function)):
        yield


def stop_untrained():
    """A response's stop token has no loss, as if padding were masked by the stop token's id."""
    samples_of = batching.samples_of

    def without_stops(episode, make=batching.Sample):
        samples = samples_of(episode, make)
        for sample in samples:
            ends = [t for t, (now, after) in enumerate(zip(sample.sampled, [*sample.sampled[1:], False]))
                    if now and not after]
            for t, turn in zip(ends, sample.turns, strict=True):
                if not turn.truncated:                       # a cut response has no stop token
                    sample.sampled[t], sample.advantage[t], sample.logprob_old[t] = False, 0.0, 0.0
        return samples

    return patch_samples_of(without_stops)


def logprobs_at_wrong_temperature():
    """The sampler draws at one temperature and reports logprobs at another one."""
    sample_tokens = engine.sample_tokens

    def misreported(logits_BV, uniform_B, temperature=1.0):
        token_B, _ = sample_tokens(logits_BV, uniform_B, temperature)
        logprob_BV = (logits_BV.float() / ((temperature or 1.0) * REPORTED_AT)).log_softmax(-1)
        return token_B, logprob_BV.gather(1, token_B[:, None])[:, 0]

    return mock.patch.object(engine, "sample_tokens", misreported)


def environment_trained():
    """The mask of sampled tokens includes the environment's answers, with the advantage of the preceding
    response; these tokens have no sampler logprobs."""
    samples_of = batching.samples_of

    def all_sampled(episode, make=batching.Sample):
        samples = samples_of(episode, make)
        for sample in samples:
            for t in range(sample.sampled.index(True), len(sample.ids)):
                if not sample.sampled[t]:
                    sample.sampled[t], sample.advantage[t] = True, sample.advantage[t - 1]
        return samples

    return patch_samples_of(all_sampled)


def equal_groups_amplified():
    """Rewards have a little noise (as from a term that is never exactly equal), so no group has equal
    rewards, and the division by the group's std turns noise into advantages as large as those of winning."""
    write_rewards, rng = rewards.write_rewards, torch.Generator().manual_seed(0)

    def with_noise(episodes, settings):
        write_rewards(episodes, settings)
        for episode, noise in zip(episodes, torch.rand(len(episodes), generator=rng).tolist()):
            episode.reward += NOISE * noise

    return mock.patch.object(rewards, "write_rewards", with_noise)


def too_fast():
    """The learning rate is ten times the tuned one."""
    factor = gcd.lr_factor
    return mock.patch.object(gcd, "lr_factor", lambda config, i: TOO_FAST * factor(config, i))


def judge_knows_the_outcome():
    """The judge's question comes after the full episode and its label is the outcome, neither of which is
    known at the turn in question."""
    questions = judge.questions

    def after_the_end(chat, episodes, chosen, environment, first=0):
        judged = questions(chat, episodes, chosen, environment, first)
        for question in judged:
            question.prompt_ids = judge.question_ids(chat, question.episode.turns[-1])
            question.label = "good" if question.episode.won else "bad"
        return judged

    return mock.patch.object(judge, "questions", after_the_end)


# Disabled checks, where gcd.py itself would stop the run

def unchecked():
    """No difference between sampler and trainer is too large."""
    return mock.patch.object(gcd, "LOGPROB_GAP_LIMIT", math.inf)


def rescored():
    """Old logprobs are computed by the trainer, as in bfloat16, and not compared with the sampler's."""
    optimize = gcd.optimize

    def with_trainer_logprobs(run, i, samples, reference):
        update.rescore(run.model, samples, run.objective)
        for sample in samples:
            sample.logprob_sampler = None
        return optimize(run, i, samples, reference)

    return mock.patch.object(gcd, "optimize", with_trainer_logprobs)


# Detection: a rule on the curves of a run and of the healthy run

def early(curves, name):
    """A metric's mean over the first LATE iterations; nan if none of them has it."""
    return mean_or_nan(curves[name][:LATE])


def late(curves, name):
    """A metric's mean over the last LATE iterations; nan if none of them has it."""
    return mean_or_nan(curves[name][-LATE:])


def mean_or_nan(values):
    """The mean of the measured values; nan, which fires no rule, if there are none."""
    mean = mean_known(values)
    return math.nan if mean is None else mean


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault and the rule that detects it."""

    broken: str               # the fault in words
    patch: object             # () -> a context manager that injects the fault
    disabled_check: object    # the same for the check of gcd.py that stops such a run; None: no check does
    rule: object              # (curves, healthy run's curves) -> True if it detects the fault
    rule_text: str            # the rule in words
    signs: tuple              # the curves that show it
    note: str = ""            # a caveat about the rule


FAULTS = {
    "stop": Fault(
        "stop token untrained", stop_untrained, None,
        lambda curves, healthy: early(curves, "trained_share") < 0.99,
        "fewer tokens are trained than sampled, from the first iteration on",
        ("trained_share", "policy/entropy_nats", "policy/grad_norm")),
    "temperature": Fault(
        "logprobs of another temperature", logprobs_at_wrong_temperature, unchecked,
        lambda curves, healthy: early(curves, "policy/logprob_gap_max_nats") > gcd.LOGPROB_GAP_LIMIT,
        "sampler and trainer differ by more than rounding on equal weights",
        ("policy/logprob_gap_max_nats", "policy/clip_frac", "policy/entropy_nats")),
    "environment": Fault(
        "environment tokens trained", environment_trained, rescored,
        lambda curves, healthy: early(curves, "trained_share") > 1.01,
        "more tokens are trained than sampled, from the first iteration on",
        ("trained_share", "policy/clip_frac", "policy/grad_norm")),
    "noise": Fault(
        "noise of equal groups amplified", equal_groups_amplified, None,
        lambda curves, healthy: max(curves["rollout/zero_variance_frac"]) == 0.0
        < mean_or_nan(healthy["rollout/zero_variance_frac"]),
        "no group ever has equal rewards, although an episode is either won or lost",
        ("rollout/zero_variance_frac", "policy/grad_norm", "rollout/success")),
    "rate": Fault(
        "learning rate too high", too_fast, None,
        lambda curves, healthy: early(curves, "policy/clip_frac") > 3 * early(healthy, "policy/clip_frac")
        and late(curves, "rollout/success") < late(healthy, "rollout/success") / 2
        and early(curves, "policy/logprob_gap_max_nats") < gcd.LOGPROB_GAP_LIMIT,
        "three times as many tokens are clipped and success falls below half, while logprobs are correct",
        ("policy/clip_frac", "policy/entropy_nats", "rollout/success")),
    "leak": Fault(
        "judge knows the outcome", judge_knows_the_outcome, None,
        lambda curves, healthy: late(curves, "judge/auc") > late(healthy, "judge/auc") + 0.1
        and late(curves, "rollout/success") > late(healthy, "rollout/success") / 2,
        "the judge soon predicts its labels almost without errors, while success is as in the healthy run",
        ("judge/auc", "judge/auc_oracle", "rollout/success"),
        "This rule was made after the run of seed 0: the predicted rule, on the AUC by labels minus that by "
        "the oracle, did not fire.")}


# Cells

def cells_of(options):
    """{name: settings} of the runs: the healthy one, the faulty ones, and those that gcd.py's check stops."""
    common_to_all = {"seed": options.seed, "cold": options.cold.split(), "flags": options.flags.split()}
    names = [(HEALTHY, False), *((name, False) for name in FAULTS),
             *((name, True) for name, fault in FAULTS.items() if fault.disabled_check)]
    return {name + CHECKED * checked: {
        "fault": name, "checked": checked, "iterations": 1 if checked else options.iterations} | common_to_all
        for name, checked in names}


def run(runs, name, settings):
    """Run a cell from the cold start in `runs`; returns its curves and gcd.py's error, if any.

    ValueError if the run failed but should not have, or the reverse.
    """
    fault = FAULTS.get(settings["fault"])
    with contextlib.ExitStack() as broken:
        for patch in (fault.patch, not settings["checked"] and fault.disabled_check) if fault else ():
            if patch:
                broken.enter_context(patch())
        flags = ["--model", cold_folder(runs, settings) / files.CHECKPOINT, "--demonstrations", 0]
        flags += [*settings["flags"], "--iterations", settings["iterations"]]
        error = train(runs / name, flags, settings["seed"])
    if bool(error) != settings["checked"]:
        raise ValueError(f"{name}: {error or 'gcd.py detected no error'}")
    lines = files.iterations_in(files.read_lines(runs / name / files.METRICS)[0])
    return {"error": error, "curves": {metric: [value_of(line, metric) for line in lines]
                                       for metric in CURVES}}


def value_of(line, metric):
    """A metric from an iteration's record; None if it was not measured."""
    if metric != "trained_share":
        return line.get(metric)
    return (line["policy/tokens"] * line["policy/steps"] / line["rollout/response_tokens"]
            if line.get("policy/tokens") else None)


def cold_folder(runs, settings):
    """The folder of the cold start of all runs with these settings."""
    return runs / shlex.join(["cold", str(settings["seed"]), *settings["cold"]]).replace(" ", "_")


def train(out, flags, seed):
    """Run gcd.py without output; returns its error message, "" if it succeeded."""
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr), contextlib.redirect_stdout(io.StringIO()):
        status = gcd.main([*map(str, flags), "--seed", str(seed), "--out", str(out), "--overwrite",
                           "--evaluate", "none", "--device", "cpu"])
    if status == 130:
        raise KeyboardInterrupt
    return stderr.getvalue().strip().splitlines()[-1].removeprefix("gcd.py: error: ") if status else ""


# Results

def fired(results):
    """{run: the faults whose rule fires on it}, of all runs that gcd.py did not stop."""
    runs = {name: result["curves"] for name, result in results.items() if not result["error"]}
    return {name: [key for key, fault in FAULTS.items() if fault.rule(curves, runs[HEALTHY])]
            for name, curves in runs.items()}


def lessons(results, pictures):
    """The gallery's record of each fault (report/gallery.py)."""
    rules_fired, healthy = fired(results), results[HEALTHY]["curves"]
    found = []
    for name, fault in FAULTS.items():
        curves = results[name]["curves"]
        others = [FAULTS[key].broken for key in rules_fired[name] if key != name]
        wrong = [run for run in rules_fired if name in rules_fired[run] and run != name]
        paths = [f"{CURVES[sign]} {path_of(curves, sign)} (healthy {path_of(healthy, sign)})"
                 for sign in fault.signs]
        doubts = [f"The rule of \"{other}\" fires on this run too." for other in others]
        doubts += [f"Its rule also fires on: {', '.join(wrong)}."] if wrong else []
        doubts += [fault.note] if fault.note else []
        what = " ".join(fault.patch.__doc__.split())
        found.append({"title": fault.broken, "what": what, "tell": fault.rule_text,
                      "told": name in rules_fired[name],
                      "found": " ".join([f"Means of the first and the last {LATE} iterations: "
                                         f"{'; '.join(paths)}.", *doubts]),
                      "error": results.get(name + CHECKED, {}).get("error", ""), "picture": pictures[name]})
    return found


def path_of(curves, metric):
    """A curve as text: the means of its first and last iterations."""
    return " to ".join("not measured" if math.isnan(value) else f"{value:.3g}"
                       for value in (early(curves, metric), late(curves, metric)))


def draw(results, out):
    """Draw faults.svg, the signs of each fault, and all curves of each fault; returns {name: file name}."""
    plotted, healthy = common.pyplot("faults"), results[HEALTHY]["curves"]
    columns = max(len(fault.signs) for fault in FAULTS.values())
    figure, axes = plotted.subplots(len(FAULTS), columns, squeeze=False, layout="constrained",
                                    figsize=(3.2 * columns, 1.75 * len(FAULTS)))
    for row, (name, fault) in zip(axes, FAULTS.items()):
        row[0].set_ylabel(fault.broken.replace(" of ", "\nof ").replace(" token", "\ntoken"), fontsize=8)
        for axis, metric in zip(row, fault.signs):
            panel(axis, metric, results[name]["curves"], healthy)
    axes[0, 0].legend(fontsize=7)
    common.save(figure, out / "faults.svg")
    for name, fault in FAULTS.items():
        figure, axes = plotted.subplots(3, 4, layout="constrained", figsize=(10.5, 5.4))
        for axis, metric in zip(axes.flat, CURVES):
            panel(axis, metric, results[name]["curves"], healthy, metric in fault.signs)
        axes[0, 0].legend(fontsize=7)
        common.save(figure, out / f"faults.{name}.svg")
    return {name: f"faults.{name}.svg" for name in FAULTS}


def panel(axis, metric, curves, healthy, sign=False):
    """Plot one curve of the faulty and the healthy run, framed if it is a sign of the fault."""
    lowest = 1e-7 if "gap" in metric else -math.inf                   # on a logarithmic axis
    for label, of_run, color in (("healthy", healthy, "tab:gray"), ("faulty", curves, "tab:red")):
        values = [math.nan if value is None else max(value, lowest) for value in of_run[metric]]
        dots = "." if None in of_run[metric] else ""                  # a single value is no line
        axis.plot(values, f"{dots}-", color=color, linewidth=1.3, markersize=3, label=label)
    axis.locator_params(nbins=4)
    axis.locator_params("x", integer=True)
    if math.isfinite(lowest):
        axis.set(yscale="log", ylim=(lowest / 3, 30), yticks=(1e-6, 1e-4, 1e-2, 1))
    axis.set_title(CURVES[metric], fontsize=8.5, fontweight="bold" if sign else "normal")
    axis.tick_params(labelsize=7)
    for spine in axis.spines.values():
        spine.set(linewidth=2 if sign else 0.8, color="tab:red" if sign else "black")


def page(results, taught, command):
    """The page's text, from its template in this folder."""
    rules_fired = fired(results)
    lessons_text = "\n".join(f"**{row['title'].capitalize()}.** {row['what']} Rule: {row['tell']}. "
                     f"{'It fires' if row['told'] else 'It does NOT fire'}. {row['found']}"
                     + (f" gcd.py itself stopped this run: `{row['error']}`." if row["error"] else "")
                     + f"\n\n![{row['title']}]({row['picture']})\n" for row in taught)
    rules = markdown(["run", *(f"rule of {name}" for name in FAULTS)], [
        [name, *("yes" if key in rules_fired[name] else "" for key in FAULTS)] for name in rules_fired])
    ends = markdown(["last iterations", *rules_fired], [
        [title, *(number(late(results[name]["curves"], metric)) for name in rules_fired)]
        for metric, title in CURVES.items()])
    return PAGE.read_text(encoding="utf-8").format(
        command=command, lessons=lessons_text, rules=rules, ends=ends,
        gap=number(ahead(results["leak"]) - ahead(results[HEALTHY])),
        right=sum(row["told"] for row in taught), of=len(taught),
        alone=sum(rules_fired[name] == [name] for name in FAULTS),
        healthy=(f"the rules of {', '.join(rules_fired[HEALTHY])} fire" if rules_fired[HEALTHY]
                 else "no rule fires"))


def ahead(result):
    """The judge's final AUC by its labels minus that by the oracle."""
    return late(result["curves"], "judge/auc") - late(result["curves"], "judge/auc_oracle")


def number(value):
    """Format a mean for a table; nan is a dash."""
    return "–" if math.isnan(value) else f"{value:.3g}"


def main(argv=None):
    parser = argparse.ArgumentParser("python -m lab.studies.faults", description=__doc__.splitlines()[0],
                                     allow_abbrev=False)
    parser.add_argument("--iterations", type=int, default=15, help="RL iterations of each run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cold", default=COLD, help="flags of the cold start")
    parser.add_argument("--flags", default=FLAGS, help="flags of all runs after the cold start")
    common.add_cells(parser, 2, RUNS)
    options = parser.parse_args(argv)
    common.check_ranges(parser, ("iterations", options.iterations, 1, 10**6), ("jobs", options.jobs, 0, 256))
    try:
        config.parse([*options.cold.split(), *options.flags.split(), "--seed", str(options.seed)])
    except ValueError as error:
        parser.error(str(error))
    requested, path = cells_of(options), options.out / "faults.jsonl"
    settings = requested[HEALTHY]
    cold = cold_folder(options.runs, settings)
    try:
        missing = common.missing_cells(path, requested, options)
    except ValueError as error:
        parser.error(str(error))
    if missing and not (cold / files.STAGES).exists():
        if error := train(cold, [*settings["cold"], "--iterations", 0], options.seed):
            parser.error(error)
    try:
        results = common.all_cells(path, requested, functools.partial(run, options.runs), options)
    except ValueError as error:
        parser.error(str(error))
    taught = lessons(results, draw(results, options.out))
    command = common.command_of(parser, options)
    text = page(results, taught, shlex.join(command))
    common.publish(options.out, "faults", command, [options.seed], {
        "faults": taught, "rules": fired(results), "settings": requested[HEALTHY],
        "curves": {name: result["curves"] for name, result in results.items() if not result["error"]}},
        [], text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
