"""The flags of gcd.py: the fields of `Config` that have a help text, and those of algorithm and environment.

    python gcd.py --help                             # the flags of the default run that are often given
    python gcd.py --help all                         # all of its flags
    python gcd.py --algo ppo --env alfworld --help   # the flags of another run

A value comes from the command line, else from the environment's defaults, --variant code, the algorithm's,
the preset's, or `Config`'s (the small model's, tuned on split dev). A mistake is one line that names the
flag, before any model is loaded.
"""

import contextlib
import difflib
import importlib.util
import json
import os
import re
import sys
from collections import ChainMap
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import SimpleNamespace

import envs
from envs import _checks
from envs._terminal import printed
from infra import files, plugins
from infra.endpoint import checked_url, without_path
from infra.flags import Parser, flag_of, is_used, make_settings, parse_known, setting
from infra.lazy import deferred
from infra.signals import speaks_for_machine
from labels import LABELS, OF_ENDPOINT, OF_ORACLE
from lm import smollm2

# Modules that wait until they are used: --help and wrong flags are answered without them
HEAVY = ("torch", "losses", "infra.parallel")
with deferred(*HEAVY):
    import algorithms


DAGGER_ROUND = 512   # most episodes that the cold start's expert and learner play with the same weights
MOST_ROUNDS = 4      # in an iteration: of play with --dynamic-sampling refill, of --judge-redraw
REFILL_TASKS = 1_000_000      # refill round r of an iteration has tasks from number r times this on
# Decide other defaults, so by flags alone: no plug-in's default can change them
CHOSEN_FIRST = ("algo", "env", "preset", "model", "variant", "endpoint")
QUESTION_TOKENS = 64     # of --context, kept free for the judge's question: at most so many of Qwen's
# When a flag is read at all, and the error where it is not
NEEDS_WRITER = (lambda values: bool(values["model"]), "for a model that writes (--model)")
NEEDS_KL = (lambda values: values["kl"] != "none", "only with --kl loss or reward")
NEEDS_NO_DAGGER = (lambda values: not values["dagger"], "only without --dagger")
NEEDS_CORRECTION = (lambda values: values["correction"] != "off", "only with --correction")
NEEDS_ENDPOINT = (lambda values: bool(values["endpoint"]), "only with --endpoint")
NEEDS_BF16 = (lambda values: values["dtype"] == "bfloat16", "only with --dtype bfloat16")
NEEDS_LORA = (lambda values: values["lora"] and values["model"], "only with --lora, of a --model")
NEEDS_ANSWERS = (lambda values: values["model"] and values["judge_kind"] == "generative",
                 "only with --judge-kind generative, for a model that writes (--model)")
NEEDS_GENERATIVE = (lambda values: values["judge_kind"] == "generative", "only with --judge-kind generative")


@dataclass(frozen=True, slots=True)
class Protocol:
    """How an evaluation plays a split."""

    temperatures: dict        # {mode: temperature}
    plays: int = 1            # of each game in each mode
    draws: int = 0            # games drawn with replacement; 0: all games
    turns: int = 0            # at most in an episode; 0: --max-turns


PROTOCOLS = {"full": Protocol({"sampled": 1.0, "greedy": 0.0, "t0.4": 0.4}),
             "sampled": Protocol({"sampled": 1.0}),
             "eight": Protocol({"sampled": 1.0, "t0.4": 0.4}, plays=8),
             "verl-agent": Protocol({"sampled": 0.4}, draws=128, turns=50),
             "rlvmr": Protocol({"sampled": 0.4}, draws=128, turns=30)}


@dataclass(frozen=True)
class Config:
    """Every setting of a run. Those without a help text are no flags: presets set them."""

    preset: str = setting("auto", "small: these defaults; paper: arXiv:2509.23870 App. B, where it says; "
                          "auto: paper where --model is a Hugging Face model, else small",
                          ("auto", "small", "paper"))
    out: str = setting("runs/default", "folder that everything is written to")
    resume: bool = setting(False, "continue from the checkpoint in --out, of the cold start or of RL")
    overwrite: bool = setting(False, "start over if --out holds a run, which is set aside as OUT.old-1; with "
                              "--resume, only if that run cannot be continued")
    seed: int = setting(0, "fixes weights, tasks and every random draw, at any number of ranks (except which "
                        "turns a large model labels, and --dynamic-sampling refill)", low=0, high=99)
    device: str = setting("auto", "where tensors live; auto: on a GPU if there is one, those of a small "
                          "model on the CPU", ("auto", "cpu", "cuda"))
    dtype: str = setting("float32", "compute dtype; weights stay float32", ("float32", "bfloat16"))
    shard_within: str = setting("all", "the ranks that share a copy of the weights: all, or those of a node, "
                                "so that weights are gathered within machines and only gradients are "
                                "exchanged between them", ("all", "node"), rare=True)
    checkpoint_every: int = setting(20, "iterations, DAgger rounds or, of a large model, steps of the cold "
                                    "start, between checkpoints", low=1, rare=True)
    keep_checkpoints: int = setting(0, "iterations between models kept in OUT/kept, from 0 on; 0: none",
                                    low=0, rare=True)
    save_rollouts: bool = setting(False, "also store every episode, with token ids and "
                                  "logprobs, in OUT/rollouts/ITERATION.jsonl", rare=True)
    log: str = setting("none", "also send each iteration's metrics to tensorboard (files in OUT/tensorboard) "
                       "or wandb", ("none", "tensorboard", "wandb"))
    env: str = setting("household", "environment: a file of envs/, or a path to one; NAME:VALUE gives its "
                       "first setting", section="environment")
    train_types: str = setting("part", "task types of RL: all, or part (without L2's)", ("part", "all"))
    max_turns: int = setting(20, "turns in an episode", low=1, high=10**4)
    model: str = setting("", "Hugging Face folder of a Qwen2, Qwen3 or Llama model to start from, or "
                         "smollm2; empty: a fresh small model",
                         section="model")
    hidden_size: int = setting(64, "width of the fresh small model", low=16, high=4096)
    layers: int = setting(3, "layers of the fresh small model", low=1, high=64)
    positions: str = setting("rotary", "position encoding of the fresh small model", ("rotary", "none"),
                             rare=True)
    untied: bool = setting(False, "give the fresh small model an output layer of its own, not the embedding",
                           rare=True)
    lora: int = setting(0, "rank of LoRA adapters (alpha 32) of the layers' matrices, which alone are "
                        "trained; 0: none", low=0, high=4096)
    train_layers: int = setting(0, "train only this many layers, the last, and the final norm; 0: the whole "
                                "model", low=0, high=1000)
    save_adapter: bool = setting(False, "also save the adapter, as peft loads it, in OUT/adapter, and RL's "
                                 "first model, to which it belongs, in OUT/reference", needs=NEEDS_LORA)
    context: int = setting(1024, "tokens an episode may have, prompt and response; by default at most the "
                           "positions of --model", low=32, high=10**6)
    prompt: str = setting("auto", "prompt style; auto: by model and algorithm",
                          ("auto", "plain", "think", "tags"))
    show_admissible: bool = setting(True, "list the admissible commands in prompts; not of --prompt plain",
                                    needs=NEEDS_WRITER)
    history: int = setting(0, "past exchanges in a prompt; 0: all, append-only", low=0)
    demonstrations: int = setting(3000, "expert episodes imitated; 0: no cold start", low=0,
                                  section="cold start")
    cold_start_types: str = setting("all", "task types of the demonstrations: all, or part (without L2's); "
                                    "--preset paper: as --train-types", ("part", "all"))
    thoughts: str = setting("template", "a template's sentence, or a large model's (--endpoint)",
                            ("template", "endpoint"), needs=NEEDS_WRITER, rare=True)
    instructions: bool = setting(False, "instructions in a random half of the demonstrations, for "
                                 "--correction", rare=True)
    mistake_rate: float = setting(0.05, "share of mistakes injected; recoveries are imitated", low=0,
                                  high=0.5, rare=True)
    dagger: int = setting(0, "episodes of the cold start's second part, which learner and expert play "
                          "together (DAgger); 0: imitate the demonstrations again", low=0)
    cold_start_epochs: int = setting(1, "epochs of policy imitation", low=0, rare=True)
    cold_start_lr: float = setting(3e-3, "learning rate, decayed linearly in each part, toward 0", low=0)
    cold_start_batch: int = setting(4, "episodes per step", low=1, rare=True)
    judge_demonstrations: int = setting(2000, "most judge questions in the second part, and number of the "
                                         "further episodes that they are about; 0: policy only", low=0)
    judge_epochs: int = setting(1, "epochs of the second part: policy and judge together", low=0,
                                needs=NEEDS_NO_DAGGER, rare=True)
    judge_cold_start_weight: float = setting(0.5)              # of the judge's loss in it
    tasks: int = setting(16, "tasks in an iteration (over all ranks)", low=1, high=10**4,
                         section="rollout")
    group_size: int = setting(8, "episodes per task", low=1, high=10**4)
    slots: int = setting(128, "episodes played at once on a rank", low=1, high=10**4, rare=True)
    temperature: float = setting(1.0, "of sampling in training", low=0.01)
    max_response_tokens: int = setting(16, "tokens in a response", low=1)
    admissible_only: bool = setting(False, "sample only commands that are admissible now")
    on_truncation: str = setting("fail")    # a response that is cut ends the episode ("invalid": is refused)
    algo: str = setting("grpo", "algorithm: a file of algorithms/, or a path to one", section="RL")
    iterations: int = setting(80, "RL iterations; 0: none", low=0)
    minibatches: int = setting(4, "optimizer steps per iteration, cut by episodes", low=1)
    lr: float = setting(6e-4, "learning rate, which --warmup and --lr-decay scale", low=0)
    warmup: int = setting(0, "iterations of linear warm-up of the learning rate", low=0)
    lr_decay: bool = setting(True, "let it fall linearly, toward 0, over the iterations; --preset paper: it "
                             "stays", rare=True)
    clip_low: float = setting(0.2, "pi / pi_old is clipped below at 1 - this", low=0)
    clip_high: float = setting(0.28, "pi / pi_old is clipped above at 1 + this", low=0)
    dual_clip: float = setting(0.0)             # loss at most this times |A| where A < 0 (verl: 3); 0: none
    entropy_coef: float = setting(0.0)          # this times the entropy is subtracted from the policy's loss
    sampler_cap: float = setting(2.0, "a token's loss is weighted by pi_old / pi_sampler, at most this; 0: "
                                 "not weighted", low=0, needs=NEEDS_BF16, rare=True)
    reduction: str = setting("token", "how the tokens' losses are averaged", ("token", "episode", "constant"))
    kl: str = setting("none", "KL to RL's first model: k3 in the loss, or k1 in the reward",
                      ("none", "loss", "reward"))
    kl_coef: float = setting(0.01, "its coefficient", low=0, needs=NEEDS_KL)
    dynamic_sampling: str = setting("drop", "groups without advantages: keep, drop (not with --kl, which "
                                    f"gives them a gradient), or also refill ({MOST_ROUNDS} rounds)",
                                    ("keep", "drop", "refill"))
    max_grad_norm: float = setting(1.0, "a step's gradient is scaled down to this norm; 0: never", low=0)
    microbatch_tokens: int = setting(2048, "tokens in a forward pass to train, a common prefix once; few fit "
                                     "a CPU's cache", low=16, rare=True)
    checkpoint_activations: str = setting("auto", "compute layers again in backward: a third more time, a "
                                          "fraction of the memory; auto: on CUDA, unless the model is small",
                                          ("auto", "on", "off"), needs=NEEDS_WRITER, rare=True)
    gcd: bool = setting(True, "train the judge in RL, together with the policy", section="GCD")
    judge_kind: str = setting("generative", "verdicts in words, or by a value head (BCE)",
                              ("generative", "value"))
    judge_labels: str = setting("dense", f"good and bad turns: {', '.join(LABELS)}, or the environment's")
    judge_turns: int = setting(32, "turns judged per iteration (over all ranks), half of them good", low=2)
    judge_group_size: int = setting(8, "answers to each question", low=2)
    judge_normalize_std: bool = setting(False, "divide an answer's advantage by the std over its question's",
                                        needs=NEEDS_GENERATIVE, rare=True)
    judge_redraw: bool = setting(False, "ask about other turns in place of those whose answers earn the "
                                 f"same: up to {MOST_ROUNDS} rounds of questions", needs=NEEDS_GENERATIVE,
                                 rare=True)
    judge_weight: float = setting(0.1, "lambda; 0: the judge is only logged, the policy unchanged bit for "
                                  "bit", low=0)
    judge_response_tokens: int = setting(4, "tokens in an answer", low=2, needs=NEEDS_ANSWERS)
    correction: str = setting("off", "put an instruction before later tasks: from mistakes that the judge "
                              "found (its critiques, or counts where verdicts are one word: small model, "
                              "--prompt plain), or (control) irrelevant text of equal length",
                              ("off", "critiques", "irrelevant"), section="correction and large models")
    correction_every: int = setting(10, "iterations between new instructions", low=1, needs=NEEDS_CORRECTION)
    correction_at_evaluation: bool = setting(True, "keep the instruction at evaluation", rare=True)
    endpoint: str = setting("", "URL of a large model's OpenAI-compatible server, such as "
                            "https://api.deepseek.com/v1")
    endpoint_model: str = setting("deepseek-chat", "the model's name there", needs=NEEDS_ENDPOINT)
    endpoint_key_variable: str = setting("OPENAI_API_KEY", "environment variable that holds the key",
                                         needs=NEEDS_ENDPOINT)
    endpoint_cache: str = setting("runs/endpoint.jsonl", "cache of answers, so that no question is paid "
                                  "twice", needs=NEEDS_ENDPOINT)
    endpoint_limit: int = setting(10000, "most requests of a process, retries and redirects included; 0: "
                                  "only cached answers", low=0, needs=NEEDS_ENDPOINT)
    evaluate: str = setting("auto", "splits, such as L0,L1; auto: those that fit --train-types; none",
                            section="evaluation")
    evaluate_tasks: int = setting(0, "tasks of each split to play, drawn once, the same for every "
                                  "seed; 0: all", low=0, rare=True)
    protocol: str = setting("full", "full: every game once at temperatures 1, 0.4 and 0; sampled: at 1; "
                            "eight: eight times at 1 and at 0.4; verl-agent (and GiGPO), rlvmr: 128 drawn "
                            "with replacement, at 0.4, in 50 or 30 turns",
                            (*PROTOCOLS,))
    algorithm: algorithms.Method = None           # made from --algo and its flags; it alone changes in a run
    environment: envs.Environment = None          # made from --env and its flags

    def __post_init__(self):
        """ValueError for settings that contradict each other."""
        algorithm, algo, labels = self.algorithm, f"--algo {self.algo}", self.judge_labels
        refuse(wrong := _checks.wrong_declared(self.environment), f"--env={self.env}: {wrong}")
        rules = self.environment.labels
        wrong = plugins.wrong_calls(SimpleNamespace(**rules), dict.fromkeys(rules, ["episode"]))
        refuse(wrong, f"--env={self.env}: labels: {wrong}")
        for split in self.splits:
            refuse(split not in self.environment.splits,
                   f"--evaluate={self.evaluate}: no split {split!r} ({', '.join(self.environment.splits)})")
        draws = PROTOCOLS[self.protocol].draws
        refuse(not self.out, "--out=: expected a folder")
        refuse(self.evaluate_tasks and draws, f"--evaluate-tasks={self.evaluate_tasks}: "
               f"--protocol {self.protocol} draws its own {draws} games")
        refuse(self.hidden_size % 8, f"--hidden-size={self.hidden_size}: expected a multiple of 8")
        refuse(self.minibatches > self.tasks * self.group_size,
               f"--minibatches={self.minibatches}: more than {self.tasks * self.group_size} episodes")
        refuse(self.admissible_only and self.environment.templates,
               f"--admissible-only: {self.env} lists templates of commands, not all that are possible")
        refuse(self.max_response_tokens >= self.context,
               f"--max-response-tokens={self.max_response_tokens}: not below --context={self.context}")
        refuse(self.gcd and self.question_room <= 0, f"--judge-response-tokens={self.judge_response_tokens}: "
               f"leaves no room for a question in --context={self.context}")
        refuse(self.log != "none" and not importlib.util.find_spec(self.log),
               f"--log={self.log}: not installed; pip install {self.log}")
        refuse(self.endpoint and not self.endpoint_cache, "--endpoint-cache=: expected a file")
        if self.endpoint:
            checked_url(self.endpoint)
        refuse(not re.fullmatch(r"[A-Z_][A-Z0-9_]*", self.endpoint_key_variable),
               "--endpoint-key-variable: expected the name of an environment variable in capitals, such as "
               "OPENAI_API_KEY; what was given is none, and not repeated: it may be the key itself")
        refuse(wrong := algorithms.wrong_loss(algorithm), f"--algo={self.algo}: {wrong}")
        refuse(self.lora and self.train_layers,
               f"--lora={self.lora}: not with --train-layers={self.train_layers}; each says what is trained")
        refuse(self.lora and self.judge_kind == "value",
               f"--lora={self.lora}: not with --judge-kind=value; it would freeze the value head")
        refuse(self.lora and algorithm.trains_critic,
               f"--lora={self.lora}: not with {algo}, which trains a second network")
        refuse(algorithm.ratio == "episode" and self.history, f"--history={self.history}: {algo} has one "
               "ratio for an episode, which must then be one sample; expected 0, or a ratio for each turn")
        refuse(self.warmup >= self.iterations > 0,
               f"--warmup={self.warmup}: not below --iterations={self.iterations}")
        refuse(algorithm.groups and self.iterations and self.group_size < 2,
               f"--group-size={self.group_size}: {algo} compares the episodes of a group")
        refuse(self.dynamic_sampling != "keep" and not algorithm.groups,
               f"--dynamic-sampling={self.dynamic_sampling}: {algo} compares no groups; expected keep")
        refuse(self.dynamic_sampling == "refill" and (self.kl != "none" or not algorithm.allows_refill),
               f"--dynamic-sampling=refill: looks for unequal rewards alone; not with {algo} --kl {self.kl}")
        refuse(self.kl == "reward" and not algorithm.kl_in_reward, f"--kl=reward: not with {algo}; loss is")
        refuse(self.kl != "none" and not self.kl_coef, "--kl-coef=0: expected a number above 0; or --kl none")
        refuse(algorithm.tags and self.prompt not in ("tags", "auto"),
               f"--prompt={self.prompt}: {algo} needs tags")
        known = (*LABELS, *self.environment.labels)
        refuse(self.judge_demonstrations == 1,
               "--judge-demonstrations=1: expected 0, or at least 2: half of the questions are on good turns")
        refuse(self.judge_turns % 2, f"--judge-turns={self.judge_turns}: expected an even number: half of "
               "the judged turns are good")
        refuse(labels not in known, f"--judge-labels={labels}: expected one of {', '.join(known)}")
        refuse(self.judge_redraw and labels == "endpoint", "--judge-redraw: --judge-labels endpoint asks for "
               "the labels of --judge-turns turns, and no others are left to draw")
        refuse(same := sorted({*LABELS} & {*self.environment.labels}),
               f"--env={self.env}: labels: {', '.join(same)} is a kind of the run's own; rename it")
        asks = self.demonstrations and self.judge_demonstrations
        refuse((self.gcd or asks) and labels in OF_ORACLE and self.environment.oracle is None,
               f"--judge-labels={labels}: {self.env} has no oracle")
        refuse(self.demonstrations and self.environment.expert is None,
               f"--demonstrations={self.demonstrations}: {self.env} has no expert; 0 starts RL from scratch")
        refuse(self.dagger and self.environment.online_expert is None,
               f"--dagger={self.dagger}: {self.env} has no online_expert, which follows the learner's play")
        refuse(self.dagger and not (self.demonstrations and self.cold_start_epochs),
               f"--dagger={self.dagger}: needs --demonstrations and --cold-start-epochs first")
        refuse(self.dagger and (self.instructions or self.thoughts == "endpoint"),
               f"--dagger={self.dagger}: not with --instructions, nor with --thoughts endpoint")
        labelled = (self.gcd or asks) and labels in OF_ENDPOINT
        wanting = [flag for flag, on in (("--thoughts=endpoint", self.thoughts == "endpoint"),
                                         (f"--judge-labels={labels}", labelled)) if on]
        refuse(wanting and not self.endpoint, f"{' '.join(wanting)}: needs --endpoint")
        learns = self.demonstrations or self.iterations
        refuse(self.endpoint and learns and not wanting and self.correction == "off",
               "--endpoint: nothing asks it; expected --judge-labels endpoint or rule+endpoint, --thoughts "
               "endpoint, or --correction")
        refuse(self.correction != "off" and not (self.gcd and self.judge_kind == "generative"),
               f"--correction={self.correction}: needs --gcd and --judge-kind generative (verdicts)")
        fresh = self.correction != "off" and not self.model
        refuse(fresh and not (self.instructions and self.demonstrations),
               f"--correction={self.correction}: needs --instructions in --demonstrations, by which a fresh "
               "small model learns to follow one")

    @property
    def compares_gradients(self):
        """Whether the policy's and the judge's gradients are at times computed apart, see gcd.optimize."""
        return bool(self.iterations and self.gcd and self.judge_weight)

    @property
    def question_room(self):
        """A turn can be judged if its conversation has fewer tokens than this: the context less question and
        answer, of which a value head needs none.
        """
        return self.context + 1 if self.judge_kind == "value" else (
            self.context - self.judge_response_tokens - QUESTION_TOKENS)

    @property
    def evaluation_turns(self):
        """The most turns in an episode of the evaluation."""
        return PROTOCOLS[self.protocol].turns or self.max_turns

    @property
    def splits(self):
        """The splits to evaluate."""
        if self.evaluate == "none":
            return []
        if self.evaluate == "auto":
            return self.environment.unseen_splits()
        return [*dict.fromkeys(self.evaluate.split(","))]

    def settings(self):
        """All settings, including the algorithm's and the environment's, as a flat dict to store: without the
        endpoint's path, which can hold a key.
        """
        common = {name: value for name, value in vars(self).items()
                  if name not in ("algorithm", "environment")} | {"endpoint": without_path(self.endpoint)}
        return common | asdict(self.algorithm.settings) | asdict(self.environment.settings)


def refuse(wrong, message):
    """Raise ValueError with this message if `wrong`."""
    if wrong:
        raise ValueError(message)


# Settings of a Config that only plays, whatever the model was trained with: nothing of training is checked
PLAYS_ONLY = {"demonstrations": 0, "dagger": 0, "iterations": 0, "minibatches": 1, "gcd": False, "kl": "none",
              "correction": "off", "dynamic_sampling": "keep"}
# The flags that are refused under these, or in fp32
OF_TRAINING = tuple(f.name for f in fields(Config)
                    if f.metadata.get("needs") in (NEEDS_KL, NEEDS_CORRECTION, NEEDS_BF16))
# Settings of place and speed, which may differ when a run is resumed or a table is filled
WHERE = ("out", "resume", "overwrite", "model", "evaluate", "device", "shard_within", "slots",
         "microbatch_tokens", "checkpoint_activations", "checkpoint_every", "keep_checkpoints",
         "save_adapter", "save_rollouts", "log", "endpoint_key_variable", "endpoint_cache", "endpoint_limit")
# Of these, what changes the last digits, and so the run
ROUNDING = ("slots", "microbatch_tokens", "shard_within")


def changed(then, config, ignored=()):
    """{name: (then, now)} of settings that differ between a dict and a Config, except WHERE and `ignored`.

    A plug-in counts as the same under its name and under a path that ends in it, an endpoint under each path
    of its server.
    """
    def same(name):
        normal = plugins.name_of if name in ("env", "algo") else lambda value: value
        return normal(then[name]) == normal(now[name])

    if "endpoint" in then:
        then = then | {"endpoint": without_path(then["endpoint"])}
    now = config.settings()
    return {name: (value, now[name]) for name, value in then.items()
            if name in now and name not in (*WHERE, *ignored) and not same(name)}


# The paper's settings. It says: 300 demonstrations, 100 judge examples, 5 epochs, lr 1e-5, 8 x 2 per batch;
# 16 x 8 episodes of at most 30 turns, lr 1e-6, 200 iterations at 1.5B (100 at 7B). The rest is verl-agent's
# or ours: see docs/equations.md.
PAPER = dict(
    demonstrations=300, judge_demonstrations=100, cold_start_lr=1e-5, cold_start_epochs=0, judge_epochs=5,
    cold_start_batch=16, judge_cold_start_weight=1.0, max_turns=30, iterations=200, minibatches=8, lr=1e-6,
    critic_lr=1e-5, lr_decay=False, clip_low=0.2, clip_high=0.2, dual_clip=3.0, entropy_coef=0.001,
    normalize_std=True, kl="loss", kl_coef=0.01, success_reward=10.0, invalid="format", invalid_penalty=0.1,
    invalid_unit="turn", dynamic_sampling="keep", max_response_tokens=512, judge_response_tokens=512,
    context=16384, microbatch_tokens=16384, dtype="bfloat16", on_truncation="invalid")


def parse_or_exit(argv=None):
    """Command line to Config. A wrong flag or value ends the program with one line and exit status 2, Ctrl-C
    with 130: nothing has begun.
    """
    with printed("gcd.py"):
        try:
            return parse(argv)
        except KeyboardInterrupt:
            sys.exit(130)
        except (ValueError, OSError) as error:
            if speaks_for_machine():
                print(f"gcd.py: error: {error}; see --help".replace("\n", "\\n"), file=sys.stderr)
            sys.exit(2)


def arguments(settings):
    """Settings as arguments: {"iterations": 2, "gcd": False} gives ["--iterations=2", "--no-gcd"]."""
    def argument(name, value):
        if isinstance(value, bool):
            return flag_of(name) if value else flag_of(f"no_{name}")
        return f"{flag_of(name)}={value}"

    return [argument(name, value) for name, value in settings.items()]


def find_algorithm(name):
    """The algorithm, a class `Method`, that --algo gives by name or path. ValueError if none is."""
    with deferred(*HEAVY):
        return plugins.find(algorithms, algorithms.Method, "--algo", name)


def find_environment(name):
    """The environment, a class `Environment`, that --env gives by name or path. ValueError if none is."""
    with deferred(*HEAVY):
        return plugins.find(envs, envs.Environment, "--env", name)


def parse(argv=None):
    """Command line to Config; ValueError for a wrong flag or value. --help prints and exits.

    The flags --algo and --env are read first, then the flags that those two bring.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    chosen = {"algo": Config.algo, "env": Config.env} | parse_known("gcd.py", argv, Config)[0]
    chosen["env"], given = environment_in(chosen["env"])
    argv += arguments(given)
    algorithm, environment = find_algorithm(chosen["algo"]), find_environment(chosen["env"])
    sources = {"run": Config, f"--algo {chosen['algo']}": algorithm.Settings,
               f"--env {chosen['env']}": environment.Settings}
    names = [f.name for settings in sources.values() for f in fields(settings)]
    refuse(twice := {name for name in names if names.count(name) > 1},
           f"{' '.join([*sources][1:])}: have settings of the same name: {', '.join(sorted(twice))}")
    flags, unknown = parse_known("gcd.py", argv, *sources.values())
    if unknown:
        flag = unknown[0].partition("=")[0]                  # its value may be a key, too
        raise ValueError(f"{flag}: {why_unknown(flag, [*sources.values()])}")
    if flags.get("help") and flags.get("model") == smollm2.NAME:
        del flags["model"]                                   # which may have to be converted
    if "model" in flags:
        try:
            flags["model"] = smollm2.named(flags["model"])
        except OSError as error:
            raise ValueError(f"--model={flags['model']}: {error}") from None
    values = values_of(flags, sources.values(), algorithm, environment)
    if which := values.pop("help", ""):
        parser = Parser("gcd.py", description="Cold start, RL with a self-judge (GCD), evaluation.",
                        epilog="" if which == "all" else "These are the flags most often given; --help all "
                        "lists all.")
        for section, settings in sources.items():
            parser.add(settings, section, values, which == "all")
        parser.print_help()
        raise SystemExit(0)
    for f in (f for settings in sources.values() for f in fields(settings)):
        if f.name in flags and not is_used(f.metadata, values):
            raise ValueError(f"{flag_of(f.name)}: {f.metadata['needs'][1]}")     # its value may be a key
    if wrong := other_shape(flags):
        raise ValueError(wrong)
    with plugins.blamed(), defaults_blamed(flags, algorithm, environment):
        values["algorithm"] = algorithm(make_settings(algorithm.Settings, values))
        settings = make_settings(environment.Settings, values)
        values["environment"] = environment(settings, values["train_types"], values["seed"])
        for plugin in (values["algorithm"], values["environment"]):
            plugins.refuse("" if hasattr(plugin, "settings") else "it does not call super().__init__", plugin,
                           "__init__")
        return make_settings(Config, values)


@contextlib.contextmanager
def defaults_blamed(flags, algorithm, environment):
    """A block whose errors say so if their value was not given: a default of one of these, or of the run."""
    try:
        yield
    except plugins.PluginError:
        raise
    except ValueError as error:
        name = str(error).partition("=")[0].removeprefix("--").replace("-", "_")
        for plugin, defaults in ((environment, environment.defaults), (algorithm, inherited(algorithm))):
            if name in {*defaults, *(f.name for f in fields(plugin.Settings))} and name not in flags:
                raise ValueError(f"{error} (a default of {plugins.origin_of(plugin)})") from None
        if name in [f.name for f in fields(Config)] and name not in flags:
            raise ValueError(f"{error} ({flag_of(name)} was not given)") from None
        raise


def other_shape(flags):
    """Which flag of a fresh small model contradicts --model's config.json; "" if none does."""
    if not (shape := shape_in(flags["model"]) if flags.get("model") else {}):
        return ""
    rope = shape.get("rope_parameters")
    none = isinstance(rope, dict) and rope.get("rope_type") == "none"
    there = {"hidden_size": shape.get("hidden_size"), "layers": shape.get("num_hidden_layers"),
             "positions": "none" if none else "rotary", "untied": not shape.get("tie_word_embeddings")}
    for name, value in there.items():
        if value is not None and flags.get(name, value) != value:
            return f"{flag_of(name)}={flags[name]}: --model={flags['model']} has {value}"
    return ""


def environment_in(env):
    """The environment that --env names, and the settings in it: NAME:VALUE is {"env": NAME}, with VALUE for
    the first of the environment's own settings.
    """
    name, colon, value = env.partition(":")
    if not colon or not name.isidentifier() or env.endswith(".py"):
        return env, {}
    first = next(iter(fields(find_environment(name).Settings)), None)
    refuse(first is None, f"--env={env}: {name} has no settings, so nothing follows its name")
    return name, {"env": name, first.name: value}


def inherited(algorithm):
    """What an algorithm and its base classes change of the run's other defaults."""
    without_groups = {} if algorithm.groups else algorithms.WITHOUT_GROUPS
    return ChainMap(*(vars(base).get("defaults", {}) for base in algorithm.__mro__), without_groups)


def values_of(flags, sources, algorithm, environment):
    """The value of every setting: the flag's if it is given, else the last applicable default."""
    values = {f.name: f.default for settings in sources for f in fields(settings)}
    preset, model = flags.get("preset", "auto"), flags.get("model")
    planned = preset != "auto" and model and not os.path.isfile(Path(model) / "tokenizer.json")     # to come
    small = not model or not planned and is_small(model)
    writes = not (small or planned)
    if preset == "auto":
        preset = "paper" if writes else "small"
    changes = {"device": "cpu"} if small else {}
    changes |= {"on_truncation": "invalid"} if writes else {}        # at first such a model talks
    changes |= inherited(algorithm)
    if preset == "paper":                # its labels are the rule's and DeepSeek-V3's, which is --endpoint's
        labels = "rule+endpoint" if flags.get("endpoint") else "rule+oracle" if environment.oracle else "rule"
        given = dict(inherited(algorithm)) | environment.defaults | flags
        types = given.get("train_types", Config.train_types)
        changes = PAPER | dict(judge_labels=labels, cold_start_types=types) | changes
    changes |= algorithm.code_defaults if flags.get("variant") == "code" else {}
    changes |= environment.defaults
    for plugin, defaults in ((algorithm, inherited(algorithm)), (environment, environment.defaults)):
        if wrong := [name for name in defaults if name not in values or name in CHOSEN_FIRST]:
            why = "is chosen before defaults are known" if wrong[0] in values else "is no setting of the run"
            raise ValueError(f"{plugins.origin_of(plugin)}: class {plugin.__name__}: defaults: "
                             f"{wrong[0]!r} {why}")
    changes = {name: value for name, value in changes.items() if name in values}
    values |= changes
    longest = shape_in(model).get("max_position_embeddings") if model and not planned else None
    if type(longest) is int:
        values["context"] = min(values["context"], longest)
    return values | flags | {"preset": preset}


def shape_in(folder):
    """The config.json of a model folder, a dict; {} if it is none or is not readable."""
    with contextlib.suppress(ValueError, OSError):                       # ModelConfig.load says what is wrong
        shape = files.read_json(Path(folder) / "config.json")
        return shape if isinstance(shape, dict) else {}
    return {}


def is_small(folder):
    """Whether a model folder has the small model's tokenizer, from its file alone."""
    path = Path(folder) / "tokenizer.json"
    try:
        text = path.read_text(encoding="utf-8")
        added = {token["content"] for token in json.loads(text).get("added_tokens", ())}
        return {"<|user|>", "<|im_end|>"} <= added
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise ValueError(f"--model={folder}: {files.not_found(path)}") from None
    except OSError as error:
        raise ValueError(f"--model={folder}: {error.filename}: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"--model={folder}: tokenizer.json is not a tokenizer: {error}") from None


def flags_of(settings):
    """The settings of a run, {name: value}, that are flags and that the run read. Of a plug-in's file all are
    kept: the file is not imported, because looking at a run must run no code that it names. Without one,
    those that are no flags any more are left out.
    """
    sources, foreign = [Config], False
    for find, kind in ((find_algorithm, "algo"), (find_environment, "env")):
        if (name := str(settings.get(kind))).endswith(".py"):
            foreign = True
            continue
        try:
            sources.append(find(name).Settings)
        except ValueError:                                   # of a run of another version
            foreign = True
    known = {f.name: f for source in sources for f in fields(source)}
    values = {name: f.default for name, f in known.items()} | settings

    def kept(name):
        if name not in known:
            return foreign
        return known[name].metadata.get("help") and is_used(known[name].metadata, values)

    return {name: value for name, value in settings.items() if kept(name)}


def why_unknown(flag, settings):
    """Explain an unknown flag: another algorithm's, another environment's, a setting without a flag, or
    nobody's. settings: the dataclasses whose flags are known.
    """
    name, owners, settings = flag.replace("--no-", "--"), [], [*settings]
    for kind, package, base, find in (("algo", algorithms, algorithms.Method, find_algorithm),
                                      ("env", envs, envs.Environment, find_environment)):
        for owner in plugins.names(package, base):
            with contextlib.suppress(ValueError):            # a broken file has no flags
                settings.append(find(owner).Settings)
                if name in (flag_of(f.name) for f in fields(settings[-1]) if f.metadata.get("help")):
                    owners.append(f"--{kind} {owner}")
    if owners:
        return f"not read here, but with {' or '.join(owners)}"
    known = {flag_of(f.name): f for source in settings for f in fields(source)}
    if name in known and "help" not in known[name].metadata:
        return "a field without a help text; infra.flags.setting(default, help) makes it a flag"
    if name in known:
        return "a setting, but no flag: --preset and --variant set it"
    near = difflib.get_close_matches(name, known, 1, 0.8)
    return f"no such flag; did you mean {near[0]}?" if near else "no such flag"
