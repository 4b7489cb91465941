"""Every setting of a run: each field of `Config` is a flag of gcd.py, with its meaning and unit on its line.

    python gcd.py --help                    # all of them
    python gcd.py --preset paper --algo ppo # the paper's settings, and what PPO changes of them

Defaults come first from `Config` (the small model's, tuned on `dev`), then from `PAPER`, then from `ALGO` (and, in `parse`,
what ScienceWorld and `--ppo-form verl-agent` need), then from the command line. Mistakes are ValueErrors that name the
flag, before anything is loaded.
"""

import argparse
import math
import re
from dataclasses import asdict, dataclass, field, fields

import judge
from envs.splits import make_tasks


def opt(default, help, choices=None, low=-math.inf, high=math.inf, read=None):
    """One flag: its default, its meaning and unit, and how its text is read where the type alone does not say."""
    return field(default=default, metadata={"help": help, "choices": choices, "low": low, "high": high, "read": read})


def exchanges(text):
    """--history's number; "full" is 0."""
    return 0 if text == "full" else int(text)


@dataclass(frozen=True)
class Config:
    """Every setting of a run; each field is a flag. The defaults are the small model's, tuned on `dev`."""

    preset: str = opt("small", "small: these defaults; paper: the settings of arXiv:2509.23870 App. B",
                      ("small", "paper"))
    out: str = opt("runs/default", "folder that everything is written to")
    resume: bool = opt(False, "continue the RL stage of --out where its checkpoint stopped")
    seed: int = opt(0, "fixes weights, tasks and every draw, at any number of ranks (but what a large model is asked, and "
                    "--dynamic-sampling refill, are each rank's own)", low=0, high=99)
    # the world
    env: str = opt("household", "the built-in game, or a real engine", ("household", "alfworld", "scienceworld"))
    games: str = opt("", "real ALFWorld games: a json_2.1.1 folder or games.jsonl.gz; empty: generated rooms (or, in "
                     "ScienceWorld, the computed splits, and else a folder with L0_idx.json and the like)")
    task_ids: str = opt("", "ScienceWorld: only these tasks, e.g. 5,6,7; empty: all")
    train_types: str = opt("part", "task types of RL: all, or the part that leaves those of L2 out", ("part", "all"))
    max_turns: int = opt(20, "turns in an episode", low=1)
    # the model
    model: str = opt("", "Hugging Face Qwen2 folder or checkpoint to start from; empty: the small model, fresh")
    hidden_size: int = opt(64, "width of the fresh small model", low=16)
    layers: int = opt(3, "layers of the fresh small model", low=1)
    device: str = opt("auto", "auto | cpu | cuda", ("auto", "cpu", "cuda"))
    dtype: str = opt("float32", "compute dtype; weights stay float32", ("float32", "bfloat16"))
    threads: int = opt(1, "CPU threads per process (more slow the small model down)", low=1)
    context: int = opt(1024, "tokens an episode may have, prompt and response", low=32)
    prompt: str = opt("auto", "plain: command only; think: <think> and <action>; tags: RLVMR's; auto: by model and algo",
                      ("auto", "plain", "think", "tags"))
    show_admissible: bool = opt(True, "list what is possible in prompts (of think and tags, not in the small model's)")
    history: int = opt(0, "past exchanges shown in a prompt; full (or 0): all, append-only", low=0, read=exchanges)
    # cold start
    demonstrations: int = opt(4500, "expert episodes to imitate; 0: no cold start", low=0)
    cold_start_types: str = opt("all", "task types it sees; all, or the small model could not know L2's words",
                                ("part", "all"))
    thoughts: str = opt("template", "thoughts in demonstrations (think, tags): a set sentence, or asked of --endpoint",
                        ("template", "endpoint"))
    instructions: bool = opt(False, "show instructions in a random half of the demonstrations, for --correction")
    mistake_rate: float = opt(0.05, "share of injected mistakes in demonstrations (their recoveries are imitated)",
                              low=0, high=0.5)
    cold_start_epochs: int = opt(1, "epochs of policy imitation", low=0)
    cold_start_lr: float = opt(3e-3, "its learning rate, decayed linearly to 0", low=0)
    cold_start_batch: int = opt(4, "episodes per step", low=1)
    judge_demonstrations: int = opt(2000, "judge questions in the second stage; 0: policy only", low=0)
    judge_epochs: int = opt(1, "epochs of the second stage: policy and judge together", low=0)
    judge_cold_start_weight: float = opt(0.5, "weight of the judge's loss in it", low=0)
    # rollouts
    tasks: int = opt(16, "tasks in an iteration (over all ranks)", low=1)
    group_size: int = opt(8, "episodes per task", low=1)
    slots: int = opt(128, "episodes played at once on a rank; in ScienceWorld each has a JVM of 0.3 GB, 16 by default", low=1)
    temperature: float = opt(1.0, "of sampling in training", low=0.01)
    max_response_tokens: int = opt(16, "tokens in a response", low=1)
    on_truncation: str = opt("fail", "a response cut at its length ends the episode as failed, or is an invalid turn",
                             ("fail", "invalid"))
    # RL
    algo: str = opt("grpo", "advantages: grpo, gigpo, rlvmr or ppo; the last three set other defaults too (see ALGO)",
                    ("grpo", "gigpo", "rlvmr", "ppo"))
    iterations: int = opt(80, "RL iterations; 0: none", low=0)
    minibatches: int = opt(4, "optimizer steps per iteration, cut by episodes", low=1)
    lr: float = opt(6e-4, "learning rate", low=0)
    lr_decay: bool = opt(True, "linear decay to 0 over the iterations")
    clip_low: float = opt(0.2, "ratio clipped below at 1 - this", low=0, high=1)
    clip_high: float = opt(0.28, "ratio clipped above at 1 + this", low=0)
    dual_clip: float = opt(0.0, "loss at most this times |A| where A < 0 (verl: 3); 0: no bound", low=0)
    baseline: str = opt("episode", "group mean (and std) over episodes, or over turns as verl-agent's code",
                        ("episode", "turn"))
    normalize_std: bool = opt(False, "divide advantages by the group's std (GiGPO: on both levels)")
    step_gamma: float = opt(0.95, "GiGPO: discount of a turn's return", low=0, high=1)
    step_weight: float = opt(1.0, "GiGPO: omega; RLVMR: 1 - alpha (paper) or w (code)", low=0)
    anchor: str = opt("state", "GiGPO: turns that share a state: the last observation with news, or the raw one",
                      ("state", "raw"))
    composition: str = opt("paper", "RLVMR: convex mix, tags over the batch (paper); sum, tags by task (code)",
                           ("paper", "code"))
    tag_rewards: str = opt("paper", "RLVMR: explore names something new, reflection is followed by an admissible action "
                           "(paper), or: an action not given before, another than the refused one (code)", ("paper", "code"))
    gae_lambda: float = opt(0.95, "PPO: lambda of GAE over turns", low=0, high=1)
    critic_lr: float = opt(3e-3, "PPO: learning rate of the critic", low=0)
    value_clip: float = opt(0.5, "PPO: a value moves at most this far in an iteration; 0: no clip", low=0)
    ppo_form: str = opt("turn", "PPO: GAE over turns, or verl-agent's: each token against the episode's success "
                        "less its own turn's penalty",
                        ("turn", "verl-agent"))
    nthr: bool = opt(False, "weaken tokens of lost episodes that pull at won ones (NTHR, arXiv:2505.18830)")
    nthr_beta: float = opt(1.0, "NTHR: threshold, times the smallest mean score of a won episode", low=0)
    reduction: str = opt("token", "loss mean over tokens, over episodes, or Dr. GRPO's constant",
                         ("token", "episode", "constant"))
    kl: str = opt("none", "KL to the model RL started from: none, k3 in the loss, k1 in the reward (reverse KL)",
                  ("none", "loss", "reward"))
    kl_coef: float = opt(0.01, "its coefficient", low=0)
    success_reward: float = opt(1.0, "reward of a won episode")
    invalid: str = opt("admissible", "invalid is a turn whose command is not admissible, or (verl-agent's code) without one",
                       ("admissible", "format"))
    invalid_penalty: float = opt(0.1, "taken off for invalid turns", low=0)
    invalid_unit: str = opt("share", "times the share of invalid turns; for each such turn; or from that turn's own row and "
                            "return alone (verl-agent's code; with --baseline turn or --composition code, always with --ppo-form "
                            "verl-agent)", ("share", "turn", "own"))
    dynamic_sampling: str = opt("drop", "groups that teach nothing: keep, drop (not with --kl, which teaches there "
                                "too), or drop and refill (GRPO; up to 4 rounds)",
                                ("keep", "drop", "refill"))
    max_grad_norm: float = opt(1.0, "gradient clipping; 0: none", low=0)
    microbatch_tokens: int = opt(2048, "tokens in one forward and backward, padding included; small ones stay in a CPU's "
                                 "cache", low=16)
    logprob_gap_limit: float = opt(1e-4, "nats; a larger sampler-trainer difference stops a float32 run", low=0)
    # GCD
    gcd: bool = opt(True, "train the judge beside the policy")
    judge_kind: str = opt("generative", "the judge answers in words, or a value head classifies (BCE)",
                          ("generative", "value"))
    judge_labels: str = opt("dense", "which turns are good and bad", judge.LABELS)
    label_agreement: str = opt("add-good", "rule+endpoint: how the two labels must agree", judge.AGREEMENTS)
    judge_turns: int = opt(32, "turns judged per iteration (over all ranks), half of them good", low=2)
    judge_group_size: int = opt(8, "answers to each question", low=2)
    judge_weight: float = opt(0.1, "lambda; 0: the judge is logged only, the policy is plain GRPO bit for bit", low=0)
    judge_grad_cap: float = opt(0.0, "judge gradient norm at most this times the policy's; 0: no cap", low=0)
    judge_response_tokens: int = opt(4, "tokens in an answer", low=2)
    # prompt-based correction
    correction: str = opt("off", "put an instruction before later tasks: from the mistakes that the judge found, or an "
                          "irrelevant one of equal length (control)", ("off", "critiques", "irrelevant"))
    correction_from: str = opt("auto", "made from written critiques, from counts of mistakes by kind, or (auto) from what the "
                               "model can do: a small one cannot write", ("auto", "critiques", "counts"))
    correction_every: int = opt(10, "iterations between new instructions", low=1)
    correction_at_evaluation: bool = opt(True, "keep the instruction at evaluation")
    # a large model, asked over HTTP
    endpoint: str = opt("", "base URL of an OpenAI-compatible server, e.g. https://api.deepseek.com/v1; empty: none")
    endpoint_model: str = opt("deepseek-chat", "model that it is asked for")
    endpoint_key_variable: str = opt("OPENAI_API_KEY", "environment variable that holds the key")
    endpoint_cache: str = opt("runs/endpoint.jsonl", "answers, kept so that no question is paid twice")
    endpoint_limit: int = opt(10000, "requests of a process at most, retries included; 0: the cache only", low=0)
    # evaluation and files
    evaluate: str = opt("auto", "splits, e.g. L0,L1 or dev; auto: all that the training leaves unseen; none")
    protocol: str = opt("full", "full: every game once, at temperatures 1, 0.4 and 0; sampled: at 1 alone; verl-agent, rlvmr: "
                        "128 games drawn with replacement, temperature 0.4, 50 or 30 turns",
                        ("full", "sampled", "verl-agent", "rlvmr"))
    top_p: float = opt(1.0, "of evaluation at temperature 1 and 0.4; rejected in training", low=0.01, high=1)
    top_k: int = opt(0, "likewise; 0: all tokens", low=0)
    checkpoint_every: int = opt(20, "iterations between checkpoints", low=1)
    episodes_every: int = opt(5, "iterations between stored episodes (one group)", low=1)

    def __post_init__(self):
        for f in fields(self):
            value, meta = getattr(self, f.name), f.metadata
            flag = "--" + f.name.replace("_", "-")
            if meta["choices"] and value not in meta["choices"]:
                raise ValueError(f"{flag}={value}: expected one of {', '.join(meta['choices'])}")
            if f.type in (int, float) and not (math.isfinite(value) and meta["low"] <= value <= meta["high"]):
                raise ValueError(f"{flag}={value}: expected {meta['low']:g} to {meta['high']:g}")
        self.check_methods()
        for split in self.splits:
            if split not in ("dev", "L0", "L1", "L2"):
                raise ValueError(f"--evaluate={self.evaluate}: no split {split!r} (dev, L0, L1, L2)")
        if self.minibatches > self.tasks * self.group_size:
            raise ValueError(f"--minibatches={self.minibatches}: more than {self.tasks * self.group_size} episodes")
        if self.iterations and (self.top_p < 1 or self.top_k):
            raise ValueError(f"--top-p={self.top_p} --top-k={self.top_k}: for evaluation only (--iterations 0), because "
                             "the update scores the full distribution")
        if self.max_response_tokens >= self.context:
            raise ValueError(f"--max-response-tokens={self.max_response_tokens}: not below --context={self.context}")
        if self.gcd and self.question_room <= 0:
            raise ValueError(f"--judge-response-tokens={self.judge_response_tokens}: leaves no room for a question in "
                             f"--context={self.context}")
        if not re.fullmatch(r"[A-Z_][A-Z0-9_]*", self.endpoint_key_variable):
            raise ValueError("--endpoint-key-variable: expected the name of an environment variable in capitals, such as "
                             "OPENAI_API_KEY; what was given is none and is not repeated here, for it may be the key itself")

    def check_methods(self):
        """Settings that contradict each other."""
        def refuse(wrong, message):
            if wrong:
                raise ValueError(message)
        asks = [flag for flag, on in (("--thoughts=endpoint", self.thoughts == "endpoint"),
                                      (f"--judge-labels={self.judge_labels}", "endpoint" in self.judge_labels)) if on]
        refuse(asks and not self.endpoint, f"{' '.join(asks)}: needs --endpoint")
        refuse(self.algo != "ppo" and self.iterations and self.group_size < 2,
               f"--group-size={self.group_size}: {self.algo} compares the episodes of a group")
        refuse(self.algo == "ppo" and self.kl == "reward", "--kl=reward: not with --algo ppo; --kl loss is")
        for flag, asked in (("--nthr", self.nthr), ("--baseline=turn", self.baseline == "turn"),
                            ("--normalize-std", self.normalize_std),
                            ("--dynamic-sampling=drop", self.dynamic_sampling == "drop")):
            refuse(self.algo == "ppo" and asked, f"{flag}: compares the episodes of a group; not with --algo ppo")
        refuse(self.algo == "ppo" and self.ppo_form == "verl-agent" and self.invalid_unit != "own",
               f"--invalid-unit={self.invalid_unit}: --ppo-form verl-agent takes a penalty from its own turn (own)")
        refuse(0 < self.dual_clip <= 1, f"--dual-clip={self.dual_clip:g}: expected 0 (none) or more than 1")
        refuse(self.dynamic_sampling == "refill" and (self.algo != "grpo" or self.kl != "none"),
               "--dynamic-sampling=refill: looks for groups of unequal rewards; with --algo grpo and --kl none only")
        by_turn = {"ppo": self.ppo_form == "verl-agent", "rlvmr": self.composition == "code"}.get(
            self.algo, self.baseline == "turn")
        refuse(self.invalid_unit == "own" and not (by_turn and self.dynamic_sampling != "refill"),
               "--invalid-unit=own: compares turns; with --baseline turn, --composition code (rlvmr) or --ppo-form verl-agent "
               "(ppo), and not with --dynamic-sampling refill")
        refuse(self.algo == "rlvmr" and self.composition == "paper" and not self.normalize_std,
               "--no-normalize-std: the paper's RLVMR divides by the std; --composition code need not")
        refuse(self.algo == "rlvmr" and self.baseline == "turn",
               "--baseline=turn: RLVMR's episode statistics are its composition's; --composition code counts turns")
        refuse(self.env == "scienceworld" and self.gcd and self.judge_labels in ("oracle", "rule+oracle"),
               f"--judge-labels={self.judge_labels}: the oracle knows ALFWorld only; dense, rule or an endpoint's")
        refuse(self.algo == "rlvmr" and self.prompt not in ("tags", "auto"), f"--prompt={self.prompt}: rlvmr needs tags")
        refuse(self.algo == "rlvmr" and self.composition == "paper" and self.step_weight > 1,
               f"--step-weight={self.step_weight}: 1 - alpha is at most 1")
        refuse(self.correction != "off" and not (self.gcd and self.judge_kind == "generative"),
               f"--correction={self.correction}: needs the generative judge (--gcd), whose verdicts it counts")
        only = [number for number in self.task_ids.split(",") if number]
        refuse(not all(number.strip().isdecimal() for number in only), f"--task-ids={self.task_ids}: expected e.g. 5,6,7")
        self.world()                                         # refuses what the environment does not know

    @property
    def question_room(self):
        """Tokens that an episode may have, if it is to be put before the judge: less the question's (amply) and the answer."""
        return self.context - self.judge_response_tokens - 64

    @property
    def splits(self):
        if self.evaluate == "none":
            return []
        if self.evaluate != "auto":
            return self.evaluate.split(",")
        return self.world().unseen()

    def world(self):
        """The tasks to train on and to evaluate."""
        only = tuple(int(number) for number in self.task_ids.split(",") if number)
        return make_tasks(self.env, self.games, self.train_types, self.seed, only)


# Settings that say where and how fast, not what: a run may go on, and a table be filled, with others.
WHERE = ("out", "resume", "model", "evaluate", "device", "threads", "slots", "microbatch_tokens", "checkpoint_every",
         "episodes_every", "endpoint_key_variable", "endpoint_cache", "endpoint_limit")


def changed(then, config, apart=()):
    """Where the settings of an earlier run, a dict, differ from a Config: {name: (then, now)}, WHERE and `apart` left out."""
    now = asdict(config)
    return {name: (value, now[name]) for name, value in then.items()
            if name in now and name not in (*WHERE, *apart) and value != now[name]}


# The paper's settings. It says: 300 demonstrations, 100 judge examples, 5 epochs, lr 1e-5, 8 x 2 per batch; 16 x 8
# episodes of at most 30 turns, lr 1e-6, 200 iterations at 1.5B (100 at 7B). The rest is verl-agent's.
PAPER = dict(
    demonstrations=300, judge_demonstrations=100, cold_start_lr=1e-5, cold_start_epochs=0, judge_epochs=5,
    cold_start_batch=16, judge_cold_start_weight=1.0, max_turns=30, iterations=200, minibatches=8, lr=1e-6, critic_lr=1e-5,
    lr_decay=False, clip_low=0.2, clip_high=0.2, dual_clip=3.0, normalize_std=True, kl="loss", kl_coef=0.01, success_reward=10.0,
    invalid="format", invalid_penalty=0.1, invalid_unit="turn", dynamic_sampling="keep", max_response_tokens=512,
    judge_response_tokens=512, judge_labels="rule+oracle", context=16384, microbatch_tokens=16384, dtype="bfloat16",
    on_truncation="invalid")


# What an algorithm changes of the defaults. PPO: 128 tasks x 1 (no groups to compare). RLVMR: alpha = 0.5.
ALGO = dict(
    grpo={}, gigpo=dict(normalize_std=True), rlvmr=dict(normalize_std=True, step_weight=0.5),
    ppo=dict(tasks=128, group_size=1, dynamic_sampling="keep", normalize_std=False))


def paper(chosen):
    """PAPER with what depends on other flags: a cold start that leaves L2's types out where RL does, and the labels.

    The paper's are the rule's and DeepSeek-V3's: those of --endpoint, where there is one.
    """
    labels = "rule" if chosen.env == "scienceworld" else PAPER["judge_labels"]
    return PAPER | dict(judge_labels="rule+endpoint" if chosen.endpoint else labels, cold_start_types=chosen.train_types)


def parse(argv=None):
    """Command line → Config. Every field is a flag; an unknown flag or a value out of range is an error."""
    parser = argparse.ArgumentParser(prog="gcd.py", allow_abbrev=False, description=__doc__.splitlines()[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for f in fields(Config):
        kind = {"action": argparse.BooleanOptionalAction} if f.type is bool else {"type": f.metadata["read"] or f.type}
        parser.add_argument("--" + f.name.replace("_", "-"), default=f.default, help=f.metadata["help"], **kind)
    chosen = parser.parse_known_args(argv)[0]
    if chosen.env == "scienceworld":
        parser.set_defaults(slots=16)
    parser.set_defaults(**((paper(chosen) if chosen.preset == "paper" else {}) | ALGO.get(chosen.algo, {})))
    if chosen.algo == "ppo" and chosen.ppo_form == "verl-agent":
        parser.set_defaults(invalid_unit="own")
    try:
        return Config(**vars(parser.parse_args(argv)))
    except ValueError as error:
        parser.error(str(error))
