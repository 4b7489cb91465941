"""The runs of studies/origin.py: which there are, how a base is made, what GRPO or another makes of it.

A base is gcd.py's cold start in envs/strings.py, GRPO is gcd.py, reward 0 or 1 and nothing else. A result is
plain numbers: how many of EACH responses to each problem are right. Left out: what follows from them.
"""

import itertools
import math
from collections import Counter
from pathlib import Path
from unittest import mock

import torch

import update
from envs.strings import AXES, LETTERS, NAMES, Game, Problem
from lm.engine import Sampling, answer
from rollout import Seat
from run import files
from run.parallel import stream
from run.setup import Run
from studies import common
from studies import runs as studied

RUNS = common.ROOT / "runs" / "studies" / "origin"
RHOS, MIDDLE, SEEDS, FEW = (0.0, 0.001, 0.01, 0.1), 0.01, range(5), range(3)
EACH, SLOTS = 256, 1024                  # responses to each problem, and at once
KS = [2**i for i in range(9)]            # of pass@k
# Tuned on seed 90: pretraining until "id" is nearly perfect, RL's learning rate on composition
WORLD = ("--env", "strings", "--evaluate", "none", "--device", "cpu")
PRETRAINING = ("--demonstrations", 50000, "--cold-start-batch", 24, "--cold-start-lr", 4e-3)
ALONG, STEPS = (400, 600, 900, 1300), 2 * 2083      # steps of pretraining: the model is kept; in all
RL = ("--iterations", 120, "--lr", 3e-4)
RATE, BATCH, PASSES = 4e-3, 24, 4        # of what is imitated instead of RL: of 3e-4, 1e-3, 4e-3 the best
SFT, REJECTION, LARGER = "SFT on the axis", "rejection fine-tuning", "GRPO, groups of 32"
INSTEAD = (SFT, REJECTION, LARGER)
AGENT = ("household", "L2", 80, 64)      # world, split of types that RL never trains on, iterations, trials
# The toy: 8 possible responses to each problem, one of them right
TOY = ("--letters", 2, "--length", 3, "--k", 1, "--problems", 6)
TOY_PRETRAINING = ("--demonstrations", 300, "--cold-start-batch", 8, "--cold-start-lr", 3e-3)
TOY_GROUP, BETA = 16, 0.5
TOY_RL = ("--admissible-only", "--group-size", TOY_GROUP, "--minibatches", 1, "--iterations", 300,
          "--lr", 1e-3)
KINDS = {"k1 in the reward": ("--kl", "reward"), "k3 in the loss": ("--kl", "loss"),
         "k1, reward over its std": ("--kl", "reward", "--normalize-std"), "no KL": ()}


# Which there are

def cells_of(whole, seeds):
    """{name: settings} of the cells to be run; a cell's base comes before what is made of it."""
    found = []
    for seed, rho in itertools.product(seeds, RHOS if whole else (MIDDLE,)):
        for positions in ("rotary", "none") if whole else ("rotary",):
            base = {"rho": rho, "positions": positions, "seed": seed}
            axes = AXES if positions == "rotary" else ("length",)
            found += [{"what": "base"} | base]
            found += [{"what": "GRPO", "axis": axis} | base for axis in axes]
            if positions == "rotary" and rho == MIDDLE:
                found += [{"what": "saturation", "steps": steps} | base for steps in (*ALONG, 0)]
                found += [{"what": how, "axis": axis} | base for how in INSTEAD for axis in AXES
                          if whole and seed in FEW]
        if rho == MIDDLE:
            found += [{"what": "toy", "kind": kind, "seed": seed} for kind in KINDS]
            found += [{"what": "agent", "seed": seed}] if whole and seed in FEW else []
    return {name_of(settings): settings for settings in found}


def name_of(settings):
    """A cell's name."""
    return ", ".join(f"{key} {value}" if key != "what" else value for key, value in settings.items())


def flags_of(settings):
    """The flags that a cell shares with its base."""
    if settings["what"] == "toy":
        return [*WORLD, "--seed", settings["seed"], *TOY]
    return [*WORLD, "--seed", settings["seed"], "--rho", settings["rho"],
            "--positions", settings["positions"]]


def value_of(flags, name):
    """What a tuple of flags says of one."""
    return flags[flags.index(name) + 1]


def base_of(settings, runs):
    """The folder of the run that pretrained a cell's base."""
    if settings["what"] == "toy":
        return runs / f"toy, seed {settings['seed']}"
    return runs / "rho {rho:g}, {positions}, seed {seed}".format(**settings)


def pretrain(folder, settings):
    """Make the base of a cell, in the folder of that name, with models kept along the way."""
    length = TOY_PRETRAINING if settings["what"] == "toy" else PRETRAINING
    step, done = Run.step, itertools.count(1)

    def keeping(run, *arguments):
        metrics = step(run, *arguments)
        if (n := next(done)) in ALONG:
            run.keep(n)
        return metrics

    with mock.patch.object(Run, "step", keeping):        # RL's models alone are kept by a flag
        common.train([*flags_of(settings), *length, "--iterations", 0, "--overwrite"], Path(folder))


def run(name, settings, runs, results):
    """A cell's result. results: the file of those that there are."""
    what = settings["what"]
    if what == "agent":
        return agent(settings["seed"], runs / "agent")
    base = base_of(settings, runs)
    if what == "base":
        splits = ("id", *AXES) if settings["positions"] == "rotary" else ("id", "length")
        actor = load(base / files.CHECKPOINT, settings)
        right = {split: right_responses(actor, split) for split in splits}
        drawn = value_of(RL, "--iterations") * actor.config.tasks * actor.config.group_size
        return {"right": {split: [len(of) for of in found] for split, found in right.items()},
                "rare": {split: rare(actor, split, found, drawn) for split, found in right.items()}}
    if what == "toy":
        return toy(settings, base / files.CHECKPOINT, runs / name)
    if what == "saturation":
        steps = settings["steps"]                       # 0: all
        kept = base / files.KEPT / f"{steps:05d}" if steps else base / files.CHECKPOINT
        before = [len(of) for of in right_responses(load(kept, settings), "id")]
        trained, _ = grpo(settings | {"axis": "id"}, kept, runs / name)
        return {"before": before, "after": [len(of) for of in right_responses(trained, "id")]}
    first, base = load(base / files.CHECKPOINT, settings), base / files.CHECKPOINT
    if what in (SFT, REJECTION):
        samples = (shown if what == SFT else chosen)(first, grpo_tokens(settings, results))
        tokens = imitate(first, samples)
        return {"right": {settings["axis"]: [len(of) for of in right_responses(first, settings["axis"])]},
                "tokens": tokens}
    more = ("--tasks", 4, "--group-size", 32) if what == LARGER else ()
    trained, lines = grpo(settings, base, runs / name, more)
    right = right_responses(trained, settings["axis"])
    drawn = sum(line["rollout/episodes"] for line in lines)
    return {"right": {settings["axis"]: [len(of) for of in right],
                      "id": [len(of) for of in right_responses(trained, "id", EACH // 16)]},
            "tokens": sum(line["rollout/response_tokens"] for line in lines),
            "success": [line["rollout/success"] for line in lines[::10]],
            "rare": rare(first, settings["axis"], right, drawn)}


def load(folder, settings):
    """A model as an actor in the cell's world."""
    axis = ["--split", settings["axis"]] if "axis" in settings else []
    return common.actor(folder, [*flags_of(settings), *axis])


def grpo(settings, base, out, more=()):
    """GRPO on a cell's axis from a base. Returns the actor that it makes, and its metrics' lines."""
    flags = [*flags_of(settings), "--split", settings["axis"], *RL, *more]
    common.train([*flags, "--model", base, "--demonstrations", 0, "--overwrite"], out)
    lines = files.iterations_in(files.read_lines(out / files.METRICS)[0])
    return load(out / files.CHECKPOINT, settings), lines


# What is measured of a model

def prompt_of(actor, task):
    """The ids of a task's prompt."""
    return list(actor.chat.observe(Game().reset(task), True))


def respond(actor, tasks, each, seed=0):
    """So many responses to each task, lists of engine.Response; a model's draws depend on the seed alone."""
    prompts = [prompt_of(actor, task) for task in tasks]
    streams = [[stream(seed, i, j) for j in range(each)] for i in range(len(tasks))]
    sampling = Sampling(1.0, actor.config.max_response_tokens)
    return answer(actor.model, prompts, streams, actor.chat.stop_ids, sampling, SLOTS)


def is_right(actor, task, response):
    """Whether a response would win."""
    command = actor.chat.parse(actor.chat.decode(response.ids))[0]
    return not response.truncated and command is not None and task.problem.right(command)


def right_responses(actor, split, each=EACH):
    """For each problem of a split the ids of those of its responses that are right."""
    tasks = actor.config.world.split(split)
    return [[response.ids for response in responses if is_right(actor, task, response)]
            for task, responses in zip(tasks, respond(actor, tasks, each))]


def rare(base, split, right, drawn):
    """How many of the right responses, and of the different ones among them, the base gives with a
    probability below 1 / drawn: so rarely that RL, which drew so many, would not be expected to have met
    them. The base's own are counted, too: a long tail of responses is nothing new."""
    prompts = [prompt_of(base, task) for task in base.config.world.split(split)]
    counts = [(sample_of(prompt, ids), n) for prompt, found in zip(prompts, right)
              for ids, n in sorted(Counter(map(tuple, found)).items())]
    scores = update.score(base.model, [sample for sample, _ in counts], update.Objective())
    below = [n for (_, n), score in zip(counts, scores) if sum(score) < -math.log(drawn)]
    return {"right": sum(n for _, n in counts), "different": len(counts), "below": sum(below),
            "different_below": len(below)}


def sample_of(prompt, response, episode=0, allowed=()):
    """A response to a prompt as a Sample that is to be imitated, or scored."""
    ids, n = [*prompt, *response], len(response)
    return update.Sample(ids, [False] * len(prompt) + [True] * n, [0.0] * len(prompt) + [1.0] * n, None,
                         episode, allowed=dict(enumerate(allowed, len(prompt))))


# What one would do instead of GRPO

def tasks_of(actor):
    """The axis' training tasks, as GRPO sees them."""
    draw = actor.config.world.train
    return itertools.chain.from_iterable(draw("part", start, 1000) for start in itertools.count(0, 1000))


def grpo_tokens(settings, results):
    """How many tokens GRPO sampled where a cell does something instead."""
    name, lines = name_of(settings | {"what": "GRPO"}), files.read_lines(results)[0]
    return next(line["result"]["tokens"] for line in lines if line["cell"] == name)


def shown(actor, tokens):
    """Solutions of the axis' tasks, with as many tokens in all as GRPO sampled."""
    samples = []
    for task in tasks_of(actor):
        solution = actor.chat.respond(task.problem.response)
        samples.append(sample_of(prompt_of(actor, task), solution, len(samples)))
        tokens -= sum(samples[-1].sampled)
        if tokens <= 0:
            return samples


def chosen(actor, tokens):
    """The right ones among as many responses of the base as GRPO drew, up to PASSES times, while they have
    fewer tokens than GRPO sampled."""
    each = actor.config.group_size
    tasks = list(itertools.islice(tasks_of(actor), actor.config.tasks * value_of(RL, "--iterations")))
    found = [sample_of(prompt_of(actor, task), response.ids)
             for task, responses in zip(tasks, respond(actor, tasks, each, seed=1))
             for response in responses if is_right(actor, task, response)]
    passes = min(PASSES, tokens // max(1, sum(sum(sample.sampled) for sample in found)))
    return found * max(1, passes)


def imitate(actor, samples):
    """Cross-entropy on the samples, in place, at RATE, which decays to 0. Returns their tokens."""
    optimizer, objective = update.adam(actor.model), update.Objective()
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(0)).tolist()
    batches = [order[i:i + BATCH] for i in range(0, len(order), BATCH)]
    for i, batch in enumerate(batches):
        update.update(actor.model, optimizer, [samples[k] for k in batch], objective,
                      RATE * (1 - i / len(batches)))
    return sum(sum(sample.sampled) for sample in samples)


# The same question to the agent

def agent(seed, root):
    """Of so many trials of 64 tasks of the types that RL never trains on, how many are won: by the cold
    start, and after GRPO."""
    world, split, iterations, trials = AGENT
    found = studied.runs_of(world, ["grpo"], [seed], iterations=iterations, root=root)
    studied.make(found, 1)
    result, after = {}, {"base": (studied.COLD, 0), "GRPO": ("grpo", iterations)}
    for name, (arm, done) in after.items():
        actor = found[arm, seed].actor(done)
        tasks = actor.config.world.split(split)[:64]
        episodes = actor.play([Seat(task, i, stream(seed, i, j))
                               for i, task in enumerate(tasks) for j in range(trials)])
        result[name] = [sum(episode.won for episode in episodes[i:i + trials])
                        for i in range(0, len(episodes), trials)]
    return result


# The toy

def toy(settings, base, out):
    """Every response's probability, before GRPO and after it, of every problem that it trains on."""
    flags = [*flags_of(settings), *TOY_RL, *KINDS[settings["kind"]]]
    if KINDS[settings["kind"]]:
        flags += ["--kl-coef", BETA]
    common.train([*flags, "--model", base, "--demonstrations", 0, "--overwrite"], out)
    problems = [problem for problem in toy_problems() if problem.part > 1]
    before, after = (common.actor(folder, flags) for folder in (base, out / files.CHECKPOINT))
    return {"problems": [{"problem": str(problem), "right": problem.responses().index(problem.response),
                          "before": listed(before, problem), "after": listed(after, problem)}
                         for problem in problems]}


def toy_problems():
    """All of the toy's."""
    letters = LETTERS[:value_of(TOY, "--letters")]
    texts = itertools.product(letters, repeat=value_of(TOY, "--length"))
    return [Problem("id", "".join(text), (name,), letters) for text in texts for name in NAMES]


def listed(actor, problem):
    """The log of each possible response's probability, among those possible; they add up to 1."""
    prompt, possible, samples = actor.chat.message(str(problem), first=True), problem.responses(), []
    for text in possible:
        ids, restriction = actor.chat.respond(text), actor.chat.restriction(possible)
        for token in ids:
            restriction.take(token)
        samples.append(sample_of(prompt, ids, allowed=restriction.allowed))
    return [sum(scores) for scores in update.score(actor.model, samples, update.Objective())]
