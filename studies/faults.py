"""Reading the curves: real runs, each broken in one place by a patched function, beside the healthy one.

All begin from one short cold start and play from one seed; the product has no flag for any of these faults.
Each has a rule, in code, that tells it from the curves of its run and the healthy one's; the rule is put to
all runs, so that one that always says yes is seen. Two of them gcd.py itself stops: for these its check is
out of the way, and its message beside. Left out: faults of an engine or a world.

    python -m studies.faults --jobs 2     # results/studies/faults.json, .svg and .md; 15 minutes on two cores
"""

import argparse
import contextlib
import functools
import io
import math
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch

import config
import gcd
import judge
import update
from algorithms import rewards
from bench.intervals import markdown, mean_known
from lm import engine
from run import files
from studies import common

PAGE = common.ROOT / "studies" / "faults.page.md"
RUNS = common.ROOT / "runs" / "faults"
HEALTHY, CHECKED = "healthy", ", checked"
# Rewards are 0 or 1, so that groups can be equal, and divided by the group's std, so that noise can be
# amplified; groups that teach nothing stay in the update, so that its tokens can be counted
COLD = "--demonstrations 3000 --judge-demonstrations 800"
FLAGS = ("--tasks 8 --group-size 8 --normalize-std --invalid-penalty 0 --dynamic-sampling keep "
         "--judge-turns 48 --judge-weight 0.3")
REPORTED_AT = 1.5             # what the temperature of the reported logprobs is multiplied with
NOISE = 1e-4                  # of a reward; a tenth of a thousandth of what a won episode earns
TOO_FAST = 10                 # times the learning rate
LATE = 5                      # the last iterations, over which a curve's end is a mean
CURVES = {                    # what is drawn: {metric: its title}
    "rollout/success": "success", "rollout/turns": "turns", "rollout/invalid_frac": "invalid turns",
    "rollout/truncated_frac": "cut responses", "rollout/zero_variance_frac": "equal groups",
    "trained_share": "trained / sampled tokens", "policy/entropy_nats": "entropy, nats",
    "policy/logprob_gap_max_nats": "largest logprob gap, nats", "policy/clip_frac": "clipped tokens",
    "policy/grad_norm": "gradient norm", "judge/auc": "judge AUC, labels",
    "judge/auc_oracle": "judge AUC, oracle"}


# The faults: each patches one place for as long as it is entered

def stop_untrained():
    """A response's stop token carries no loss, as where pads are masked by an id that is the stop's too."""
    samples_of = update.samples_of

    def without_stops(episode, make=update.Sample):
        samples = samples_of(episode, make)
        for sample in samples:
            ends = [t for t, (now, after) in enumerate(zip(sample.sampled, [*sample.sampled[1:], False]))
                    if now and not after]
            for t, turn in zip(ends, sample.turns, strict=True):
                if not turn.truncated:                       # a cut response has none
                    sample.sampled[t], sample.advantage[t], sample.logprob_old[t] = False, 0.0, 0.0
        return samples

    return mock.patch.object(update, "samples_of", without_stops)


def logprobs_of_another_temperature():
    """The sampler draws at one temperature and reports logprobs at another."""
    sample_tokens = engine.sample_tokens

    def misreported(logits_BV, uniform_B, temperature=1.0):
        token_B, _ = sample_tokens(logits_BV, uniform_B, temperature)
        logprob_BV = (logits_BV.float() / ((temperature or 1.0) * REPORTED_AT)).log_softmax(-1)
        return token_B, logprob_BV.gather(1, token_B[:, None])[:, 0]

    return mock.patch.object(engine, "sample_tokens", misreported)


def environment_trained():
    """The mask of what was sampled is true on the environment's answers too, with the advantage of the
    response before; no sampler has logprobs of them."""
    samples_of = update.samples_of

    def all_sampled(episode, make=update.Sample):
        samples = samples_of(episode, make)
        for sample in samples:
            for t in range(sample.sampled.index(True), len(sample.ids)):
                if not sample.sampled[t]:
                    sample.sampled[t], sample.advantage[t] = True, sample.advantage[t - 1]
        return samples

    return mock.patch.object(update, "samples_of", all_sampled)


def equal_groups_amplified():
    """Rewards have a little noise (as of a term that is never quite equal), so no group's are equal, and the
    division by the group's std makes of it advantages as large as those of winning."""
    write_rewards, rng = rewards.write_rewards, torch.Generator().manual_seed(0)

    def with_noise(episodes, settings):
        write_rewards(episodes, settings)
        for episode, noise in zip(episodes, torch.rand(len(episodes), generator=rng).tolist()):
            episode.reward += NOISE * noise

    return mock.patch.object(rewards, "write_rewards", with_noise)


def too_fast():
    """The learning rate is many times what was tuned."""
    decay = gcd.decay
    return mock.patch.object(gcd, "decay", lambda config, i: TOO_FAST * decay(config, i))


def judge_knows_the_outcome():
    """A judge's question comes after the whole episode, and what is right is its outcome: nothing that could
    be known at the turn that it is about."""
    questions = judge.questions

    def after_the_end(chat, episodes, chosen, world):
        judged = questions(chat, episodes, chosen, world)
        for question in judged:
            question.prompt_ids = judge.prompt_ids(chat, question.episode.turns[-1])
            question.label = "good" if question.episode.won else "bad"
        return judged

    return mock.patch.object(judge, "questions", after_the_end)


# What is taken out of the way where gcd.py itself would stop

def unchecked():
    """No sampler-trainer difference is too large."""
    return mock.patch.object(gcd, "LOGPROB_GAP_LIMIT", math.inf)


def rescored():
    """Old logprobs are the trainer's own, as in bfloat16, so that nothing is held against the sampler's."""
    train = gcd.train

    def with_its_own(run, i, samples, reference):
        update.rescore(run.model, samples, run.objective())
        return train(run, i, samples, reference)

    return mock.patch.object(gcd, "train", with_its_own)


# How each is told: a rule on the curves of a run, beside the healthy run's

def early(curves, name):
    """A metric's mean over the first LATE iterations; nan where none of them has it."""
    return mean_or_nan(curves[name][:LATE])


def late(curves, name):
    """Its mean over the last LATE iterations."""
    return mean_or_nan(curves[name][-LATE:])


def mean_or_nan(values):
    """The mean of what was measured; nan where nothing was, which no rule takes for a sign."""
    mean = mean_known(values)
    return math.nan if mean is None else mean


@dataclass(frozen=True, slots=True)
class Fault:
    """What is broken, and how that is told."""

    broken: str               # in words
    patch: object             # () -> what is entered while it is broken
    past: object              # the same for the check of gcd.py that stops such a run; None: nothing stops it
    told: object              # the rule: (curves, healthy) -> bool
    tell: str                 # the rule in words
    signs: tuple              # the curves to look at
    note: str = ""            # what else is to be known of the rule


FAULTS = {
    "stop": Fault(
        "stop token untrained", stop_untrained, None,
        lambda curves, healthy: early(curves, "trained_share") < 0.99,
        "fewer tokens are trained than were sampled, from the first iteration on",
        ("trained_share", "policy/entropy_nats", "policy/grad_norm")),
    "temperature": Fault(
        "logprobs of another temperature", logprobs_of_another_temperature, unchecked,
        lambda curves, healthy: early(curves, "policy/logprob_gap_max_nats") > gcd.LOGPROB_GAP_LIMIT,
        "on equal weights sampler and trainer differ by more than rounding",
        ("policy/logprob_gap_max_nats", "policy/clip_frac", "policy/entropy_nats")),
    "environment": Fault(
        "environment tokens trained", environment_trained, rescored,
        lambda curves, healthy: early(curves, "trained_share") > 1.01,
        "more tokens are trained than were sampled, from the first iteration on",
        ("trained_share", "policy/clip_frac", "policy/grad_norm")),
    "noise": Fault(
        "noise of equal groups amplified", equal_groups_amplified, None,
        lambda curves, healthy: max(curves["rollout/zero_variance_frac"]) == 0.0
        < mean_or_nan(healthy["rollout/zero_variance_frac"]),
        "no group is ever equal, although rewards are won or lost",
        ("rollout/zero_variance_frac", "policy/grad_norm", "rollout/success")),
    "rate": Fault(
        "learning rate too high", too_fast, None,
        lambda curves, healthy: early(curves, "policy/clip_frac") > 3 * early(healthy, "policy/clip_frac")
        and late(curves, "rollout/success") < late(healthy, "rollout/success") / 2
        and early(curves, "policy/logprob_gap_max_nats") < gcd.LOGPROB_GAP_LIMIT,
        "thrice as many tokens are clipped and success falls below half, while logprobs are right",
        ("policy/clip_frac", "policy/entropy_nats", "rollout/success")),
    "leak": Fault(
        "judge knows the outcome", judge_knows_the_outcome, None,
        lambda curves, healthy: late(curves, "judge/auc") > late(healthy, "judge/auc") + 0.1
        and late(curves, "rollout/success") > late(healthy, "rollout/success") / 2,
        "the judge soon tells its labels nearly without a mistake, while play goes on as in the healthy run",
        ("judge/auc", "judge/auc_oracle", "rollout/success"),
        "This rule was made after the run of seed 0: the one predicted, on the AUC by labels less that by "
        "the oracle, said no.")}


# Cells

def cells_of(options):
    """{name: settings} of the runs: the healthy one, the broken ones, and those that gcd.py's check stops."""
    common_to_all = {"seed": options.seed, "cold": options.cold.split(), "flags": options.flags.split()}
    names = [(HEALTHY, False), *((name, False) for name in FAULTS),
             *((name, True) for name, fault in FAULTS.items() if fault.past)]
    return {name + CHECKED * checked: {
        "fault": name, "checked": checked, "iterations": 1 if checked else options.iterations} | common_to_all
        for name, checked in names}


def run(runs, name, settings):
    """A cell: its run of gcd.py from the cold start in `runs`. Returns its curves and, if gcd.py stopped it,
    why. ValueError where one ends that should not, or goes on that should."""
    fault = FAULTS.get(settings["fault"])
    with contextlib.ExitStack() as broken:
        for patch in (fault.patch, not settings["checked"] and fault.past) if fault else ():
            if patch:
                broken.enter_context(patch())
        flags = ["--model", cold_folder(runs, settings) / files.CHECKPOINT, "--demonstrations", 0]
        flags += [*settings["flags"], "--iterations", settings["iterations"]]
        error = train(runs / name, flags, settings["seed"])
    if bool(error) != settings["checked"]:
        raise ValueError(f"{name}: {error or 'gcd.py found nothing wrong'}")
    lines = files.iterations_in(files.read_lines(runs / name / files.METRICS)[0])
    return {"error": error, "curves": {metric: [value_of(line, metric) for line in lines]
                                       for metric in CURVES}}


def value_of(line, metric):
    """A metric of an iteration's line; None where it was not measured."""
    if metric != "trained_share":
        return line.get(metric)
    return (line["policy/tokens"] * line["policy/steps"] / line["rollout/response_tokens"]
            if line.get("policy/tokens") else None)


def cold_folder(runs, settings):
    """The run of the cold start, which all other runs of these settings begin from."""
    return runs / shlex.join(["cold", str(settings["seed"]), *settings["cold"]]).replace(" ", "_")


def train(out, flags, seed):
    """One run of gcd.py, silent. Returns "" or the error with which it ended."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        status = gcd.main([*map(str, flags), "--seed", str(seed), "--out", str(out), "--overwrite",
                           "--evaluate", "none", "--device", "cpu"])
    if status == 130:
        raise KeyboardInterrupt
    return said.getvalue().strip().splitlines()[-1].removeprefix("gcd.py: error: ") if status else ""


# What came out

def fired(results):
    """{run: the faults whose rule says yes of it}, of all runs that went on."""
    runs = {name: result["curves"] for name, result in results.items() if not result["error"]}
    return {name: [key for key, fault in FAULTS.items() if fault.told(curves, runs[HEALTHY])]
            for name, curves in runs.items()}


def lessons(results, pictures):
    """For each fault what the gallery shows of it, see report/gallery.py."""
    says, healthy = fired(results), results[HEALTHY]["curves"]
    found = []
    for name, fault in FAULTS.items():
        curves = results[name]["curves"]
        others = [FAULTS[key].broken for key in says[name] if key != name]
        wrong = [run for run in says if name in says[run] and run != name]
        words = [f"{CURVES[sign]} {path_of(curves, sign)} (healthy {path_of(healthy, sign)})"
                 for sign in fault.signs]
        doubts = [f"Of this run the rule of \"{other}\" says yes too." for other in others]
        doubts += [f"Its rule also says yes of: {', '.join(wrong)}."] if wrong else []
        doubts += [fault.note] if fault.note else []
        what = " ".join(fault.patch.__doc__.split())
        found.append({"title": fault.broken, "what": what, "tell": fault.tell, "told": name in says[name],
                      "found": " ".join([f"Means of the first and the last {LATE} iterations: "
                                         f"{'; '.join(words)}.", *doubts]),
                      "error": results.get(name + CHECKED, {}).get("error", ""), "picture": pictures[name]})
    return found


def path_of(curves, metric):
    """A curve in words: its first iterations' mean and its last ones'."""
    return " to ".join("not measured" if math.isnan(value) else f"{value:.3g}"
                       for value in (early(curves, metric), late(curves, metric)))


def draw(results, out):
    """faults.svg, each fault's signs, and a picture of all curves for each fault: {name: the file's name}."""
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
    """One curve, of the broken run beside the healthy one; framed where it is one to look at."""
    lowest = 1e-7 if "gap" in metric else -math.inf                   # its axis is logarithmic
    for label, of_run, colour in (("healthy", healthy, "tab:gray"), ("broken", curves, "tab:red")):
        values = [math.nan if value is None else max(value, lowest) for value in of_run[metric]]
        dots = "." if None in of_run[metric] else ""                  # a lone value is no line
        axis.plot(values, f"{dots}-", color=colour, linewidth=1.3, markersize=3, label=label)
    axis.locator_params(nbins=4)
    axis.locator_params("x", integer=True)
    if math.isfinite(lowest):
        axis.set(yscale="log", ylim=(lowest / 3, 30), yticks=(1e-6, 1e-4, 1e-2, 1))
    axis.set_title(CURVES[metric], fontsize=8.5, fontweight="bold" if sign else "normal")
    axis.tick_params(labelsize=7)
    for spine in axis.spines.values():
        spine.set(linewidth=2 if sign else 0.8, color="tab:red" if sign else "black")


def page(results, taught, command):
    """The page's text, from its template beside this file."""
    says = fired(results)
    told = "\n".join(f"**{row['title'].capitalize()}.** {row['what']} Told by: {row['tell']}. "
                     f"{'It is' if row['told'] else 'It is NOT'}. {row['found']}"
                     + (f" gcd.py itself stops such a run: `{row['error']}`." if row["error"] else "")
                     + f"\n\n![{row['title']}]({row['picture']})\n" for row in taught)
    rules = markdown(["run", *(f"rule of {name}" for name in FAULTS)], [
        [name, *("yes" if key in says[name] else "" for key in FAULTS)] for name in says])
    ends = markdown(["last iterations", *says], [
        [title, *(number(late(results[name]["curves"], metric)) for name in says)]
        for metric, title in CURVES.items()])
    return PAGE.read_text(encoding="utf-8").format(
        command=command, told=told, rules="\n".join(rules), ends="\n".join(ends),
        gap=number(ahead(results["leak"]) - ahead(results[HEALTHY])),
        right=sum(row["told"] for row in taught), of=len(taught),
        alone=sum(says[name] == [name] for name in FAULTS),
        healthy="no rule says yes" if not says[HEALTHY] else f"rules say yes: {', '.join(says[HEALTHY])}")


def ahead(result):
    """By how much the judge is better by its labels than by the oracle, at the end."""
    return late(result["curves"], "judge/auc") - late(result["curves"], "judge/auc_oracle")


def number(value):
    """A mean for a table; a dash where nothing was measured."""
    return "–" if math.isnan(value) else f"{value:.3g}"


def main(argv=None):
    parser = argparse.ArgumentParser("python -m studies.faults", description=__doc__.splitlines()[0],
                                     allow_abbrev=False)
    parser.add_argument("--iterations", type=int, default=15, help="of RL in each run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="runs at once")
    parser.add_argument("--cold", default=COLD, help="flags of the cold start")
    parser.add_argument("--flags", default=FLAGS, help="flags of all runs after it")
    parser.add_argument("--runs", type=Path, default=RUNS, help="folder of the runs")
    parser.add_argument("--out", type=Path, default=common.OUT, help="folder of faults.json, .svg and .md")
    options = parser.parse_args(argv)
    for name in ("iterations", "jobs"):
        if getattr(options, name) < 1:
            parser.error(f"--{name}={getattr(options, name)}: expected at least 1")
    try:
        config.parsed([*options.cold.split(), *options.flags.split(), "--seed", str(options.seed)])
    except ValueError as error:
        parser.error(str(error))
    wanted, path = cells_of(options), options.out / "faults.jsonl"
    settings = wanted[HEALTHY]
    cold = cold_folder(options.runs, settings)
    if common.missing(path, wanted) and not (cold / files.STAGES).exists():
        if error := train(cold, [*settings["cold"], "--iterations", 0], options.seed):
            parser.error(error)
    results = common.cells(path, wanted, functools.partial(run, options.runs), options.jobs)
    taught = lessons(results, draw(results, options.out))
    changed = [word for name in ("iterations", "seed", "cold", "flags") for word in (
        f"--{name}", str(getattr(options, name))) if getattr(options, name) != parser.get_default(name)]
    command = ["python", "-m", "studies.faults", *changed]
    common.publish(options.out, "faults", command, [options.seed], {
        "faults": taught, "rules": fired(results), "settings": wanted[HEALTHY],
        "curves": {name: result["curves"] for name, result in results.items() if not result["error"]}}, [],
        page(results, taught, shlex.join(command)))
    print(page(results, taught, shlex.join(command)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
