"""The cells of lab/studies/origin.py: their list, pretraining, and training with GRPO or an alternative.

A base model is gcd.py's cold start in lab/envs/strings.py; GRPO is gcd.py with a reward of 0 or 1 only. A
result is plain numbers: how many of EACH responses to each problem are correct. Left out: the analysis.
"""

import itertools
import math
from collections import Counter
from pathlib import Path
from unittest import mock

import torch

import batching
import cold_start
import update
from infra import files
from infra.streams import stream
from lab.envs.strings import AXES, HELD_OUT, LETTERS, NAMES, Game, Problem
from lab.studies import common
from lab.studies import runs as studied
from lm.engine import Sampling, answer
from lm.optim import adamw
from rollout import EpisodeSpec

RUNS = common.ROOT / "runs" / "studies" / "origin"
RHOS, MIDDLE, SEEDS, FEW = (0.0, 0.001, 0.01, 0.1), 0.01, range(5), range(3)
EACH, SLOTS = 256, 256                   # responses to each problem; engine slots (1,024 are slower)
KS = [2**i for i in range(9)]            # of pass@k
# Tuned on seed 90: pretraining until "id" is nearly perfect; RL's learning rate on composition
ENVIRONMENT = ("--env", "lab/envs/strings.py", "--evaluate", "none", "--device", "cpu")
PRETRAINING = ("--demonstrations", 50000, "--cold-start-batch", 24, "--cold-start-lr", 4e-3)
ALONG, STEPS = (400, 600, 900, 1300), 2 * 2083      # steps at which pretraining's model is kept; all steps
RL = ("--iterations", 120, "--lr", 3e-4)
RATE, BATCH, PASSES = 4e-3, 24, 4        # of fine-tuning instead of RL: the best of 3e-4, 1e-3, 4e-3
SFT, REJECTION, LARGER = "SFT on the axis", "rejection fine-tuning", "GRPO, groups of 32"
OMITTING, OMITTING_AT = "GRPO, a pair omitted", (0.0, 0.001)    # of composition's six, by the seed
INSTEAD = (SFT, REJECTION, LARGER)
# Methods of RL and colder sampling from one base, where a base of seed 90 solves 72 and 41 %
METHODS = {"GRPO": (), "RLOO": ("--algo", "rloo"), "PPO": ("--algo", "ppo"),
           "GRPO, KL .01 in the loss": ("--kl", "loss", "--kl-coef", 0.01)}
TEMPERATURES = (1.0, 0.6, 0.4, 0.2)
METHODS_AT = (("composition", 0.001), ("length", 0.1))
AGENT = ("household", "L2", 80, 64)      # environment, split of types without RL, iterations, trials
# The toy: 8 possible responses to each problem, one of them correct
TOY = ("--letters", 2, "--length", 3, "--k", 1, "--problems", 6)
TOY_PRETRAINING = ("--demonstrations", 300, "--cold-start-batch", 8, "--cold-start-lr", 3e-3)
TOY_GROUP, BETA = 16, 0.5
TOY_RL = ("--admissible-only", "--group-size", TOY_GROUP, "--minibatches", 1, "--iterations", 300,
          "--lr", 1e-3)
K1, K1_PAIRS = "k1 in the reward", "k1 in the reward, groups of 2"      # with as many responses
K3, LONGER = "k3 in the loss", ", 1,200 iterations"
SHORT = {K1: ("--kl", "reward"), K3: ("--kl", "loss"),
         "k1, reward over its std": ("--kl", "reward", "--normalize-std"), "no KL": (),
         K1_PAIRS: ("--kl", "reward", "--group-size", 2, "--tasks", 128)}
# On seed 90 k1 is 9 points from its optimum after 300 iterations, for rare responses arrive late, then .1
KINDS = SHORT | {kind + LONGER: (*SHORT[kind], "--iterations", 1200) for kind in (K1, K3, K1_PAIRS)}


# The list of cells

def cells_of(full, seeds):
    """{name: settings} of the cells to run, a base before its other cells. full: as with --all."""
    found = []
    for seed, rho in itertools.product(seeds, RHOS if full else (MIDDLE,)):
        for positions in ("rotary", "none") if full else ("rotary",):
            base = {"rho": rho, "positions": positions, "seed": seed}
            axes = AXES if positions == "rotary" else ("length",)
            found += [{"what": "base"} | base]
            found += [{"what": "GRPO", "axis": axis} | base for axis in axes]
            if positions == "rotary" and rho in OMITTING_AT:
                found += [{"what": OMITTING, "axis": "composition"} | base]
            if positions == "rotary" and rho == MIDDLE:
                found += [{"what": "saturation", "steps": steps} | base for steps in (*ALONG, 0)]
                found += [{"what": how, "axis": axis} | base for how in INSTEAD for axis in AXES
                          if full and seed in FEW]
        if rho == MIDDLE:
            found += [{"what": "toy", "kind": kind, "seed": seed} for kind in KINDS]
            found += [{"what": "agent", "seed": seed}] if full and seed in FEW else []
    return {name_of(settings): settings for settings in found} | (method_cells(seeds) if full else {})


def method_cells(seeds):
    """{name: settings} of the cells that compare methods of RL and temperatures.

    Each holds all that it compares, since pretraining again, on another machine or with other code, gives
    another base than that of a stored cell.
    """
    found = [{"what": "methods", "axis": axis, "rho": rho, "positions": "rotary", "seed": seed}
             for seed in seeds for axis, rho in METHODS_AT]
    return {name_of(settings): settings for settings in found}


def omitted_pair(seed):
    """The index in HELD_OUT of the pair that RL omits in a cell of OMITTING."""
    return seed % len(HELD_OUT)


def base_at(temperature):
    """The name of the base, sampled at a temperature, in a cell that compares methods."""
    return f"base at temperature {temperature:g}"


def name_of(settings):
    """A cell's name."""
    return ", ".join(f"{key} {value}" if key != "what" else value for key, value in settings.items())


def flags_of(settings):
    """The flags that a cell shares with its base."""
    if settings["what"] == "toy":
        return [*ENVIRONMENT, "--seed", settings["seed"], *TOY]
    return [*ENVIRONMENT, "--seed", settings["seed"], "--rho", settings["rho"],
            "--positions", settings["positions"]]


def value_of(flags, name):
    """The value of a flag in a tuple of flags."""
    return flags[flags.index(name) + 1]


def base_of(settings, runs):
    """The folder of a cell's pretraining run."""
    if settings["what"] == "toy":
        return runs / f"toy, seed {settings['seed']}"
    return runs / "rho {rho:g}, {positions}, seed {seed}".format(**settings)


def pretrain(folder, settings):
    """Pretrain the base of a cell in the folder, and keep models on the way (ALONG)."""
    length = TOY_PRETRAINING if settings["what"] == "toy" else PRETRAINING
    imitate, step, steps = cold_start.imitate, update.update, itertools.count(1)

    def imitate_and_keep(run, *arguments, **options):
        def step_and_keep(*of_step):
            metrics = step(*of_step)
            if (n := next(steps)) in ALONG:
                run.keep(n)
            return metrics

        with mock.patch.object(update, "update", step_and_keep):
            imitate(run, *arguments, **options)

    with mock.patch.object(cold_start, "imitate", imitate_and_keep):      # the flag keeps models of RL only
        common.make([*flags_of(settings), *length, "--iterations", 0, "--overwrite"], Path(folder))


def run(name, settings, runs, results):
    """Run a cell; returns its result. results: the file of stored cells."""
    kind = settings["what"]
    if kind == "agent":
        return agent(settings["seed"], runs / "agent")
    base = base_of(settings, runs)
    if kind == "base":
        splits = ("id", *AXES) if settings["positions"] == "rotary" else ("id", "length")
        actor = load(base / files.CHECKPOINT, settings)
        correct = {split: correct_responses(actor, split) for split in splits}
        drawn = value_of(RL, "--iterations") * actor.config.tasks * actor.config.group_size
        return {"right": {split: [len(of) for of in found] for split, found in correct.items()},
                "rare": {split: rare(actor, split, found, drawn) for split, found in correct.items()}}
    if kind == "toy":
        return toy(settings, base / files.CHECKPOINT, runs / name)
    if kind == "saturation":
        steps = settings["steps"]                       # 0: all
        kept = base / files.KEPT / f"{steps:05d}" if steps else base / files.CHECKPOINT
        before = [len(of) for of in correct_responses(load(kept, settings), "id")]
        trained, _ = grpo(settings | {"axis": "id"}, kept, runs / name)
        return {"before": before, "after": [len(of) for of in correct_responses(trained, "id")]}
    first, base = load(base / files.CHECKPOINT, settings), base / files.CHECKPOINT
    if kind in (SFT, REJECTION):
        samples = (solutions if kind == SFT else correct_base_samples)(first, grpo_tokens(settings, results))
        fine_tune(first, samples)
        return {"right": {settings["axis"]: [len(of) for of in correct_responses(first, settings["axis"])]}}
    if kind == "methods":
        return methods(first, settings, base, runs / name)
    more = {LARGER: ("--tasks", 4, "--group-size", 32),
            OMITTING: ("--omit-pair", omitted_pair(settings["seed"]))}.get(kind, ())
    trained, lines = grpo(settings, base, runs / name, more)
    correct = correct_responses(trained, settings["axis"])
    drawn = sum(line["rollout/episodes"] for line in lines)
    return {"right": {settings["axis"]: [len(of) for of in correct],
                      "id": [len(of) for of in correct_responses(trained, "id", EACH // 16)]},
            "tokens": sum(line["rollout/response_tokens"] for line in lines),
            "rare": rare(first, settings["axis"], correct, drawn)}


def methods(first, settings, base, out):
    """Correct responses of a base at each of TEMPERATURES, and after each of METHODS at temperature 1. first:
    the base as an actor; base: its folder."""
    axis = settings["axis"]
    right = {base_at(temperature): [len(of) for of in correct_responses(first, axis, temperature=temperature)]
             for temperature in TEMPERATURES}
    for how, flags in METHODS.items():
        trained, _ = grpo(settings, base, out / how, flags)
        right[how] = [len(of) for of in correct_responses(trained, axis)]
    return {"right": right}


def load(folder, settings):
    """Load a model as an actor in the cell's environment."""
    axis = ["--split", settings["axis"]] if "axis" in settings else []
    return common.load_actor(folder, [*flags_of(settings), *axis])


def grpo(settings, base, out, more=()):
    """Train with GRPO, or as the flags `more` say, on a cell's axis from a base. Returns the trained actor
    and its metrics' records."""
    flags = [*flags_of(settings), "--split", settings["axis"], *RL, *more]
    common.train([*flags, "--model", base, "--demonstrations", 0, "--overwrite"], out)
    lines = files.iterations_in(files.read_lines(out / files.METRICS)[0])
    return load(out / files.CHECKPOINT, settings), lines


# Measures of a model

def prompt_of(actor, task):
    """The ids of a task's prompt."""
    return list(actor.chat.observe(Game().reset(task), True))


def respond(actor, tasks, each, seed=0, temperature=1.0):
    """`each` responses to each task, lists of engine.Response; the draws depend on the seed only."""
    prompts = [prompt_of(actor, task) for task in tasks]
    streams = [[stream(seed, i, j) for j in range(each)] for i in range(len(tasks))]
    sampling = Sampling(temperature, actor.config.max_response_tokens)
    return answer(actor.model, prompts, streams, actor.chat.stop_ids, sampling, SLOTS)


def is_correct(actor, task, response):
    """Whether a response is correct and complete."""
    command = actor.chat.parse(actor.chat.decode(response.ids))[0]
    return not response.truncated and command is not None and task.problem.is_solved_by(command)


def correct_responses(actor, split, each=None, temperature=1.0):
    """For each problem of a split, the ids of its correct responses, of `each` (None: EACH) sampled ones."""
    tasks = actor.config.environment.split_tasks(split)
    return [[response.ids for response in responses if is_correct(actor, task, response)]
            for task, responses in zip(tasks, respond(actor, tasks, each or EACH, temperature=temperature))]


def rare(base, split, correct, drawn):
    """How many responses are correct ("right"), and of these how many have a base probability below 1 / drawn
    ("below").

    RL, which sampled `drawn` responses, would not be expected to have met these. Also applied to the base's
    own responses, since a long tail of responses is not new. correct: lists of ids for each problem.
    """
    prompts = [prompt_of(base, task) for task in base.config.environment.split_tasks(split)]
    counts = [(batching.sample_of(prompt, ids), n) for prompt, found in zip(prompts, correct)
              for ids, n in sorted(Counter(map(tuple, found)).items())]
    scores = update.logprobs(base.model, [sample for sample, _ in counts], update.Objective())
    below = sum(n for (_, n), score in zip(counts, scores) if sum(score) < -math.log(drawn))
    return {"right": sum(n for _, n in counts), "below": below}


# Alternatives to GRPO

def tasks_of(actor):
    """The axis' training tasks, in GRPO's order."""
    draw = actor.config.environment.train_tasks
    return itertools.chain.from_iterable(draw("part", start, 1000) for start in itertools.count(0, 1000))


def grpo_tokens(settings, results):
    """The number of tokens that GRPO sampled on the axis of an alternative's cell."""
    name, lines = name_of(settings | {"what": "GRPO"}), files.read_lines(results)[0]
    return next(line["result"]["tokens"] for line in lines if line["cell"] == name)


def solutions(actor, tokens):
    """Solutions of the axis' tasks, with as many tokens in total as GRPO sampled."""
    samples = []
    for task in tasks_of(actor):
        solution = actor.chat.respond(task.problem.response)
        samples.append(batching.sample_of(prompt_of(actor, task), solution, 1.0, len(samples)))
        tokens -= sum(samples[-1].sampled)
        if tokens <= 0:
            return samples


def correct_base_samples(actor, tokens):
    """The correct ones of as many responses of the base as GRPO sampled.

    Repeated up to PASSES times, while they have fewer tokens than GRPO sampled.
    """
    each = actor.config.group_size
    tasks = list(itertools.islice(tasks_of(actor), actor.config.tasks * value_of(RL, "--iterations")))
    found = [batching.sample_of(prompt_of(actor, task), response.ids, 1.0)
             for task, responses in zip(tasks, respond(actor, tasks, each, seed=1))
             for response in responses if is_correct(actor, task, response)]
    passes = min(PASSES, tokens // max(1, sum(sum(sample.sampled) for sample in found)))
    return found * max(1, passes)


def fine_tune(actor, samples):
    """Fine-tune on the samples with cross-entropy, in place, at RATE decayed to 0."""
    optimizer, objective = adamw(actor.model), update.Objective()
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(0)).tolist()
    batches = [order[i:i + BATCH] for i in range(0, len(order), BATCH)]
    for i, batch in enumerate(batches):
        update.update(actor.model, optimizer, [samples[k] for k in batch], objective,
                      RATE * (1 - i / len(batches)))


# The same question to the agent

def agent(seed, root):
    """Wins per task in AGENT's trials of 64 tasks, of types without RL training: cold start and GRPO."""
    environment, split, iterations, trials = AGENT
    found = studied.runs_of(environment, ["grpo"], [seed], iterations=iterations, root=root)
    studied.make(found, 1)
    result, after = {}, {"base": (studied.COLD, 0), "GRPO": ("grpo", iterations)}
    for name, (arm, done) in after.items():
        actor = found[arm, seed].actor(done)
        tasks = actor.config.environment.split_tasks(split)[:64]
        episodes = actor.play([EpisodeSpec(task, i, stream(seed, i, j))
                               for i, task in enumerate(tasks) for j in range(trials)])
        result[name] = [sum(episode.won for episode in episodes[i:i + trials])
                        for i in range(0, len(episodes), trials)]
    return result


# The toy

def toy(settings, base, out):
    """The log-probability of every response before and after GRPO, for every training problem."""
    flags = [*flags_of(settings), *TOY_RL, *KINDS[settings["kind"]]]
    if KINDS[settings["kind"]]:
        flags += ["--kl-coef", BETA]
    common.train([*flags, "--model", base, "--demonstrations", 0, "--overwrite"], out)
    problems = [problem for problem in toy_problems() if problem.part > 1]
    before, after = (common.load_actor(folder, flags) for folder in (base, out / files.CHECKPOINT))
    return {"problems": [{"problem": str(problem), "right": problem.responses().index(problem.response),
                          "before": response_logprobs(before, problem),
                          "after": response_logprobs(after, problem)}
                         for problem in problems]}


def toy_problems():
    """All problems of the toy."""
    letters = LETTERS[:value_of(TOY, "--letters")]
    texts = itertools.product(letters, repeat=value_of(TOY, "--length"))
    return [Problem("id", "".join(text), (name,), letters) for text in texts for name in NAMES]


def response_logprobs(actor, problem):
    """Log-probability of each possible response; the probabilities add up to 1."""
    prompt, possible, samples = actor.chat.message(str(problem), first=True), problem.responses(), []
    for text in possible:
        ids, restriction = actor.chat.respond(text), actor.chat.restriction(possible)
        for token in ids:
            restriction.take(token)
        allowed = dict(enumerate(restriction.allowed, len(prompt)))
        samples.append(batching.sample_of(prompt, ids, allowed=allowed))
    return [sum(scores) for scores in update.logprobs(actor.model, samples, update.Objective())]
