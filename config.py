"""The flags of gcd.py: each field of `Config` with a help text; the algorithm and the world bring their own.

    python gcd.py --help                             # those of the default run
    python gcd.py --algo ppo --env alfworld --help   # those of another

Defaults come first from `Config` (the small model's, tuned on `dev`), then from the preset, the algorithm,
the world, and the command line. Mistakes are one line that names the flag, before anything is loaded.
"""

import contextlib
import json
import re
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import algorithms
import envs
import judge
from run.flags import Parser, flag_of, given, made_of, needed, opt


def exchanges(text):
    """--history's number; "full" is 0."""
    return 0 if text == "full" else int(text)


# What a flag needs to be read at all, and what is said where it would not be
WRITES = (lambda values: bool(values["model"]), "for a model that writes (--model)")
KL = (lambda values: values["kl"] != "none", "only with --kl loss or reward")
SHOWS = (lambda values: not values["dagger"], "only without --dagger")
CORRECTS = (lambda values: values["correction"] != "off", "only with --correction")
ASKS = (lambda values: bool(values["endpoint"]), "only with --endpoint")
ANSWERS = (lambda values: values["judge_kind"] == "generative", "only with --judge-kind generative")


@dataclass(frozen=True)
class Config:
    """Every setting of a run, the small model's by default; those without a help text are set by presets."""

    preset: str = opt("auto", "small: these defaults; paper: the settings of arXiv:2509.23870 App. B; auto: "
                      "paper where --model is a Hugging Face model, else small", ("auto", "small", "paper"))
    out: str = opt("runs/default", "folder that everything is written to")
    resume: bool = opt(False, "go on where --out's checkpoint stopped, in RL or between rounds of practice")
    overwrite: bool = opt(False, "begin anew where --out holds a run, which is set aside as OUT.old-1; with "
                          "--resume, only where that cannot go on")
    seed: int = opt(0, "fixes weights, tasks and every draw, at any number of ranks (but what a large model "
                    "is asked, and --dynamic-sampling refill, are each rank's own)", low=0, high=99)
    device: str = opt("auto", "where tensors live", ("auto", "cpu", "cuda"))
    dtype: str = opt("float32", "compute dtype; weights stay float32", ("float32", "bfloat16"))
    checkpoint_every: int = opt(20, "iterations, or rounds of practice, between checkpoints", low=1)
    keep_checkpoints: int = opt(0, "iterations between models kept in OUT/kept, from 0 on; 0: none", low=0)
    env: str = opt("household", "the world: a file of envs/", section="world")
    train_types: str = opt("part", "task types of RL: all, or part: without L2's", ("part", "all"))
    max_turns: int = opt(20, "turns in an episode", low=1, high=10**4)
    model: str = opt("", "Hugging Face Qwen2 or Qwen3 folder to begin from; empty: a new small one",
                     section="model")
    hidden_size: int = opt(64, "width of the fresh small model", low=16, high=4096)
    layers: int = opt(3, "layers of the fresh small model", low=1, high=64)
    positions: str = opt("rotary", "how the fresh small model tells positions", ("rotary", "none"))
    context: int = opt(1024, "tokens an episode may have, prompt and response", low=32, high=10**6)
    prompt: str = opt("auto", "style; auto: by model and algorithm", ("auto", "plain", "think", "tags"))
    show_admissible: bool = opt(True, "list what is possible in prompts", needs=WRITES)
    history: int = opt(0, "past exchanges in a prompt; full (or 0): all, append-only", low=0, read=exchanges)
    demonstrations: int = opt(3000, "expert episodes imitated; 0: no cold start", low=0, section="cold start")
    cold_start_types: str = opt("all", "task types that the expert shows: all, or part: without L2's; paper: "
                                "those of --train-types", ("part", "all"))
    thoughts: str = opt("template", "a set sentence, or --endpoint's", ("template", "endpoint"), needs=WRITES)
    instructions: bool = opt(False, "instructions in a random half of the demonstrations, for --correction")
    mistake_rate: float = opt(0.05, "share of mistakes injected; recoveries are imitated", low=0, high=0.5)
    dagger: int = opt(0, "episodes that the learner plays in the second stage, the expert beside it; 0: the "
                      "demonstrations are shown again", low=0)
    cold_start_epochs: int = opt(1, "epochs of policy imitation", low=0)
    cold_start_lr: float = opt(3e-3, "its learning rate, decayed linearly to 0", low=0)
    cold_start_batch: int = opt(4, "episodes per step", low=1)
    judge_demonstrations: int = opt(2000, "judge questions in the second stage; 0: policy only", low=0)
    judge_epochs: int = opt(1, "epochs of the second stage: policy and judge together", low=0, needs=SHOWS)
    judge_cold_start_weight: float = opt(0.5)              # of the judge's loss in it
    tasks: int = opt(16, "tasks in an iteration (over all ranks)", low=1, high=10**4,
                     section="rollout")
    group_size: int = opt(8, "episodes per task", low=1, high=10**4)
    slots: int = opt(128, "episodes played at once on a rank", low=1, high=10**4)
    temperature: float = opt(1.0, "of sampling in training", low=0.01)
    max_response_tokens: int = opt(16, "tokens in a response", low=1)
    admissible_only: bool = opt(False, "a response can give no command but those that are possible now")
    on_truncation: str = opt("fail")  # a response cut at its length ends the episode, or is an "invalid" turn
    algo: str = opt("grpo", "how episodes become advantages: a file of algorithms/", section="RL")
    iterations: int = opt(80, "RL iterations; 0: none", low=0)
    minibatches: int = opt(4, "optimizer steps per iteration, cut by episodes", low=1)
    lr: float = opt(6e-4, "learning rate", low=0)
    lr_decay: bool = opt(True)              # linear, to 0 over the iterations
    clip_low: float = opt(0.2)              # ratio clipped below at 1 - this
    clip_high: float = opt(0.28)            # ratio clipped above at 1 + this
    dual_clip: float = opt(0.0)             # loss at most this times |A| where A < 0 (verl: 3); 0: no bound
    reduction: str = opt("token", "how tokens' losses become one", ("token", "episode", "constant"))
    kl: str = opt("none", "to RL's first model: k3 in loss, k1 in reward", ("none", "loss", "reward"))
    kl_coef: float = opt(0.01, "its coefficient", low=0, needs=KL)
    dynamic_sampling: str = opt("drop", "groups that teach nothing: keep, drop (not with --kl, which still "
                                "teaches), or also refill (4 rounds)", ("keep", "drop", "refill"))
    max_grad_norm: float = opt(1.0)         # gradient clipping; 0: none
    microbatch_tokens: int = opt(2048, "tokens in a forward, padding too; few stay in a CPU's cache", low=16)
    checkpoint_activations: str = opt("auto", "compute layers again in backward: a third more time, "
                                      "a fraction of the memory; auto: on CUDA, unless the model is small",
                                      ("auto", "on", "off"), needs=WRITES)
    gcd: bool = opt(True, "train the judge beside the policy", section="GCD")
    judge_kind: str = opt("generative", "it answers in words, or a value head (BCE)", ("generative", "value"))
    judge_labels: str = opt("dense", f"good and bad turns: {', '.join(judge.LABELS)}, or a kind of the world")
    label_agreement: str = opt("add-good", "rule+endpoint: how both must agree", judge.AGREEMENTS, needs=ASKS)
    judge_turns: int = opt(32, "turns judged per iteration (over all ranks), half of them good", low=2)
    judge_group_size: int = opt(8, "answers to each question", low=2)
    judge_normalize_std: bool = opt(False, "divide an answer's advantage by the std over its question's",
                                    needs=ANSWERS)
    judge_weight: float = opt(0.1, "lambda; 0: the judge is logged, the policy the same bit for bit", low=0)
    judge_grad_cap: float = opt(0.0, "judge gradient norm at most this times the policy's; 0: no cap", low=0)
    judge_response_tokens: int = opt(4, "tokens in an answer", low=2, needs=WRITES)
    correction: str = opt("off", "an instruction before later tasks: from mistakes that the judge found, or "
                          "(control) an irrelevant one of equal length", ("off", "critiques", "irrelevant"),
                          section="correction and large models")
    correction_from: str = opt("auto", "from written critiques, counts by kind, or (auto) as the model can: "
                               "a small one cannot write", ("auto", "critiques", "counts"), needs=CORRECTS)
    correction_every: int = opt(10, "iterations between new instructions", low=1, needs=CORRECTS)
    correction_at_evaluation: bool = opt(True, "keep the instruction at evaluation", needs=CORRECTS)
    endpoint: str = opt("", "URL of a large model's OpenAI-compatible server: https://api.deepseek.com/v1")
    endpoint_model: str = opt("deepseek-chat", "model that it is asked for", needs=ASKS)
    endpoint_key_variable: str = opt("OPENAI_API_KEY", "environment variable that holds the key", needs=ASKS)
    endpoint_cache: str = opt("runs/endpoint.jsonl", "answers: no question is paid twice", needs=ASKS)
    endpoint_limit: int = opt(10000, "requests of a process, retries too; 0: cache only", low=0, needs=ASKS)
    evaluate: str = opt("auto", "splits: L0,L1; auto: those unseen in training; none", section="evaluation")
    protocol: str = opt("full", "every game once at temperatures 1, 0.4 and 0; sampled: at 1 alone; eight: "
                        "eight times at 1 and at 0.4; verl-agent, rlvmr: 128 drawn with replacement, at 0.4, "
                        "in 50 or 30 turns", ("full", "sampled", "eight", "verl-agent", "rlvmr"))
    algorithm: algorithms.Method = None           # the object that --algo and its flags make
    world: envs.World = None                      # and --env

    def __post_init__(self):
        """ValueError for settings that do not go together."""
        algorithm, algo, labels = self.algorithm, f"--algo {self.algo}", self.judge_labels
        for split in self.splits:
            refuse(split not in self.world.splits,
                   f"--evaluate={self.evaluate}: no split {split!r} ({', '.join(self.world.splits)})")
        refuse(self.hidden_size % 8, f"--hidden-size={self.hidden_size}: expected a multiple of 8")
        refuse(self.minibatches > self.tasks * self.group_size,
               f"--minibatches={self.minibatches}: more than {self.tasks * self.group_size} episodes")
        refuse(self.admissible_only and self.world.templates,
               f"--admissible-only: {self.env} lists templates of commands, not all that are possible")
        refuse(self.max_response_tokens >= self.context,
               f"--max-response-tokens={self.max_response_tokens}: not below --context={self.context}")
        refuse(self.gcd and self.question_room <= 0, f"--judge-response-tokens={self.judge_response_tokens}: "
               f"leaves no room for a question in --context={self.context}")
        refuse(not re.fullmatch(r"[A-Z_][A-Z0-9_]*", self.endpoint_key_variable),
               "--endpoint-key-variable: expected the name of an environment variable in capitals, such as "
               "OPENAI_API_KEY; what was given is none, and not repeated: it may be the key itself")
        refuse(algorithm.groups and self.iterations and self.group_size < 2,
               f"--group-size={self.group_size}: {algo} compares the episodes of a group")
        refuse(self.dynamic_sampling != "keep" and not algorithm.groups,
               f"--dynamic-sampling={self.dynamic_sampling}: {algo} compares no groups; expected keep")
        refuse(self.dynamic_sampling == "refill" and (self.kl != "none" or not algorithm.reward_alone),
               f"--dynamic-sampling=refill: looks for unequal rewards alone; not with {algo} --kl {self.kl}")
        refuse(self.kl == "reward" and not algorithm.kl_in_reward, f"--kl=reward: not with {algo}; loss is")
        refuse(algorithm.tags and self.prompt not in ("tags", "auto"),
               f"--prompt={self.prompt}: {algo} needs tags")
        known = (*judge.LABELS, *self.world.labels)
        refuse(labels not in known, f"--judge-labels={labels}: expected one of {', '.join(known)}")
        refuse(self.gcd and "oracle" in labels and self.world.oracle is None,
               f"--judge-labels={labels}: {self.env} has no oracle")
        refuse(self.demonstrations and self.world.expert is None,
               f"--demonstrations={self.demonstrations}: {self.env} has no expert; 0 starts RL from nothing")
        refuse(self.dagger and self.world.coach is None,
               f"--dagger={self.dagger}: {self.env} has no expert that goes on from what another has played")
        refuse(self.dagger and not (self.demonstrations and self.cold_start_epochs),
               f"--dagger={self.dagger}: needs --demonstrations and --cold-start-epochs first")
        refuse(self.dagger and (self.instructions or self.thoughts == "endpoint"),
               f"--dagger={self.dagger}: not with --instructions, nor with --thoughts endpoint")
        wanting = [flag for flag, on in (("--thoughts=endpoint", self.thoughts == "endpoint"),
                                         (f"--judge-labels={labels}", "endpoint" in labels)) if on]
        refuse(wanting and not self.endpoint, f"{' '.join(wanting)}: needs --endpoint")
        refuse(self.correction != "off" and not (self.gcd and self.judge_kind == "generative"),
               f"--correction={self.correction}: needs --gcd and --judge-kind generative (verdicts)")

    @property
    def question_room(self):
        """Tokens that an episode may have, to be judged: all but the question's (amply) and the answer's."""
        return self.context - self.judge_response_tokens - 64

    @property
    def splits(self):
        """The splits to evaluate."""
        if self.evaluate == "none":
            return []
        return self.world.unseen() if self.evaluate == "auto" else self.evaluate.split(",")

    def settings(self):
        """All settings, the algorithm's and the world's too, as a flat dict: what a run's files say of it."""
        common = {name: value for name, value in vars(self).items() if name not in ("algorithm", "world")}
        return common | asdict(self.algorithm.settings) | asdict(self.world.settings)


def refuse(wrong, message):
    """ValueError with this message if something is wrong."""
    if wrong:
        raise ValueError(message)


# Settings that say where and how fast, not what: a run may go on, and a table be filled, with others.
WHERE = ("out", "resume", "overwrite", "model", "evaluate", "device", "slots", "microbatch_tokens",
         "checkpoint_activations", "checkpoint_every", "keep_checkpoints", "endpoint_key_variable",
         "endpoint_cache", "endpoint_limit")


def changed(then, config, apart=()):
    """Where a run's settings, a dict, differ from a Config, but in WHERE and `apart`: {name: (then, now)}."""
    now = config.settings()
    return {name: (value, now[name]) for name, value in then.items()
            if name in now and name not in (*WHERE, *apart) and value != now[name]}


# The paper's settings. It says: 300 demonstrations, 100 judge examples, 5 epochs, lr 1e-5, 8 x 2 per batch;
# 16 x 8 episodes of at most 30 turns, lr 1e-6, 200 iterations at 1.5B (100 at 7B). The rest is verl-agent's.
PAPER = dict(
    demonstrations=300, judge_demonstrations=100, cold_start_lr=1e-5, cold_start_epochs=0, judge_epochs=5,
    cold_start_batch=16, judge_cold_start_weight=1.0, max_turns=30, iterations=200, minibatches=8, lr=1e-6,
    critic_lr=1e-5, lr_decay=False, clip_low=0.2, clip_high=0.2, dual_clip=3.0, normalize_std=True, kl="loss",
    kl_coef=0.01, success_reward=10.0, invalid="format", invalid_penalty=0.1, invalid_unit="turn",
    dynamic_sampling="keep", max_response_tokens=512, judge_response_tokens=512, context=16384,
    microbatch_tokens=16384, dtype="bfloat16", on_truncation="invalid")


def parse(argv=None):
    """Command line -> Config. A flag that nothing reads, or a wrong value, ends the program with one line."""
    try:
        return parsed(argv)
    except ValueError as error:
        Parser("gcd.py").error(str(error))


def parsed(argv):
    """First the flags that choose an algorithm and a world, then what these bring, then all defaults."""
    chosen = {"algo": Config.algo, "env": Config.env} | given("gcd.py", argv, Config)[0]
    algorithm, world = algorithms.find(chosen["algo"]), envs.find(chosen["env"])
    shelves = {"run": Config, f"--algo {chosen['algo']}": algorithm.Settings,
               f"--env {chosen['env']}": world.Settings}
    names = [f.name for settings in shelves.values() for f in fields(settings)]
    refuse(twice := {name for name in names if names.count(name) > 1},
           f"{' '.join([*shelves][1:])}: names two settings alike: {', '.join(sorted(twice))}")
    flags, unknown = given("gcd.py", argv, *shelves.values())
    if unknown:
        raise ValueError(f"{unknown[0]}: {why_unknown(unknown[0])}")
    values = values_of(flags, shelves.values(), algorithm, world)
    if values.pop("help", False):
        parser = Parser("gcd.py", description="Cold start, RL with a self-judge, evaluation; these flags:")
        for section, settings in shelves.items():
            parser.add(settings, section, values)
        parser.print_help()
        raise SystemExit(0)
    for f in (f for settings in shelves.values() for f in fields(settings)):
        if f.name in flags and not needed(f.metadata, values):
            raise ValueError(f"{flag_of(f.name)}: {f.metadata['needs'][1]}")     # its value may be a key
    values["algorithm"] = algorithm(made_of(algorithm.Settings, values))
    values["world"] = world(made_of(world.Settings, values), values["train_types"], values["seed"])
    return made_of(Config, values)


def values_of(flags, shelves, algorithm, world):
    """The value of every setting: the flag's, where one was given, else the last default that there is."""
    values = {f.name: f.default for settings in shelves for f in fields(settings)}
    preset = flags.get("preset", "auto")
    if preset == "auto":
        preset = "paper" if flags.get("model") and not is_small(flags["model"]) else "small"
    changes = algorithm.defaults | world.defaults
    if preset == "paper":                # its labels are the rule's and DeepSeek-V3's, which is --endpoint's
        labels = "rule+endpoint" if flags.get("endpoint") else "rule+oracle" if world.oracle else "rule"
        types = flags.get("train_types", Config.train_types)
        changes = PAPER | dict(judge_labels=labels, cold_start_types=types) | changes
    changes |= algorithm.code_defaults if flags.get("variant") == "code" else {}
    changes = {name: value for name, value in changes.items() if name in values}
    return values | changes | flags | {"preset": preset}


def is_small(folder):
    """Whether a model's folder has the small model's tokenizer, by its file: so early nothing is loaded."""
    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"--model={folder}: {path}: not found")
    try:
        text = path.read_text(encoding="utf-8")
        return "<|user|>" in {token["content"] for token in json.loads(text).get("added_tokens", ())}
    except OSError as error:
        raise ValueError(f"--model={folder}: {error.filename}: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"--model={folder}: tokenizer.json is not a tokenizer: {error}") from None


def flags_of(settings):
    """Those of a run's settings, {name: value}, that are flags which it read: others are set by presets, or
    read by nothing in such a run."""
    shelves = [Config]
    for find, kind in ((algorithms.find, "algo"), (envs.find, "env")):
        with contextlib.suppress(ValueError):                # of a run of another version
            shelves.append(find(str(settings.get(kind))).Settings)
    known = {f.name: f for shelf in shelves for f in fields(shelf)}
    values = {name: f.default for name, f in known.items()} | settings
    return {name: value for name, value in settings.items() if name not in known
            or known[name].metadata.get("help") and needed(known[name].metadata, values)}


def why_unknown(flag):
    """What a flag that this run does not have is: another algorithm's, another world's, or nobody's."""
    name, owners = flag.partition("=")[0].replace("--no-", "--"), []
    for kind, shelf in (("algo", algorithms), ("env", envs)):
        for owner in shelf.names():
            with contextlib.suppress(ValueError):            # a broken file has no flags
                if name in (flag_of(f.name) for f in fields(shelf.find(owner).Settings)):
                    owners.append(f"--{kind} {owner}")
    return f"not read here, but with {' or '.join(owners)}" if owners else "no such flag"
