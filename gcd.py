"""Cold start → GRPO with a self-judge (GCD) → evaluation, of a language-model agent in a text household.

    python gcd.py                                   # everything, small model, generated rooms, CPU
    torchrun --nproc-per-node 8 gcd.py --model DIR  # a Hugging Face Qwen2/Qwen2.5 folder on eight GPUs
    python gcd.py --help                            # every flag, with its meaning and unit

Read `main`, then `iteration`: one training step, named calls only. Each stage writes to --out as it goes:
`checkpoint/` (a Hugging Face folder), `metrics.jsonl`, `episodes.jsonl`, `evaluation.json` and, at the end,
`stages.json`; `report.py` draws them.
Left out: everything that no experiment here turns: other optimizers, schedules, loggers.
"""

import argparse
import json
import math
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime, timezone
from pathlib import Path

import torch
from tqdm import tqdm

import algorithms
import judge
import model as qwen
import parallel
import rollout
import update
from envs import experts, make_env, rooms
from envs.splits import Tasks
from parallel import generator, stream


def opt(default, help, choices=None, low=-math.inf, high=math.inf):
    """One flag: its default, and its meaning and unit."""
    return field(default=default, metadata={"help": help, "choices": choices, "low": low, "high": high})


@dataclass(frozen=True)
class Config:
    """Every setting of a run; each field is a flag. The defaults are the small model's, tuned on `dev`."""

    preset: str = opt("small", "small: these defaults; paper: the settings of arXiv:2509.23870 App. B",
                      ("small", "paper"))
    out: str = opt("runs/default", "folder that everything is written to")
    resume: bool = opt(False, "continue the RL stage of --out where its checkpoint stopped")
    seed: int = opt(0, "fixes weights, tasks and every draw, at any number of ranks", low=0, high=99)
    # the world
    env: str = opt("household", "which environment", ("household",))
    games: str = opt("", "real ALFWorld games: a json_2.1.1 folder or games.jsonl.gz; empty: generated rooms")
    train_types: str = opt("four", "task types of RL: four (cool and two objects are kept for L2) or six",
                           ("four", "six"))
    max_turns: int = opt(20, "turns in an episode", low=1)
    # the model
    model: str = opt("", "Hugging Face Qwen2 folder or checkpoint to start from; empty: the small model, fresh")
    hidden_size: int = opt(64, "width of the fresh small model", low=16)
    layers: int = opt(3, "layers of the fresh small model", low=1)
    device: str = opt("auto", "auto | cpu | cuda", ("auto", "cpu", "cuda"))
    dtype: str = opt("float32", "compute dtype; weights stay float32", ("float32", "bfloat16"))
    threads: int = opt(1, "CPU threads per process (more slow the small model down)", low=1)
    context: int = opt(1024, "tokens an episode may have, prompt and response", low=32)
    prompt: str = opt("auto", "plain: command only; think: <think>, <action> and admissible list; auto: by model",
                      ("auto", "plain", "think"))
    history: int = opt(0, "past exchanges shown in a prompt; 0: all, append-only", low=0)
    # cold start
    demonstrations: int = opt(4500, "expert episodes to imitate; 0: no cold start", low=0)
    cold_start_types: str = opt("six", "task types it sees; six, or the small model could not know L2's words",
                                ("four", "six"))
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
    group_size: int = opt(8, "episodes per task", low=2)
    slots: int = opt(128, "episodes played at once on a rank", low=1)
    temperature: float = opt(1.0, "of sampling in training", low=0.01)
    max_response_tokens: int = opt(16, "tokens in a response", low=1)
    on_truncation: str = opt("fail", "a response cut at its length ends the episode as failed, or is an invalid turn",
                             ("fail", "invalid"))
    # GRPO
    iterations: int = opt(80, "RL iterations; 0: none", low=0)
    minibatches: int = opt(4, "optimizer steps per iteration, cut by episodes", low=1)
    lr: float = opt(6e-4, "learning rate", low=0)
    lr_decay: bool = opt(True, "linear decay to 0 over the iterations")
    clip_low: float = opt(0.2, "ratio clipped below at 1 - this", low=0, high=1)
    clip_high: float = opt(0.28, "ratio clipped above at 1 + this", low=0)
    baseline: str = opt("episode", "group mean (and std) over episodes, or over turns as verl-agent's code",
                        ("episode", "turn"))
    normalize_std: bool = opt(False, "divide the advantage by the group's std")
    reduction: str = opt("token", "loss mean over tokens, over episodes, or Dr. GRPO's constant",
                         ("token", "episode", "constant"))
    kl: str = opt("none", "KL to the model RL started from: none, k3 in the loss, k1 in the reward (reverse KL)",
                  ("none", "loss", "reward"))
    kl_coef: float = opt(0.01, "its coefficient", low=0)
    success_reward: float = opt(1.0, "reward of a won episode")
    invalid_penalty: float = opt(0.1, "taken off for invalid turns", low=0)
    invalid_unit: str = opt("share", "times the share of invalid turns, or for each such turn", ("share", "turn"))
    dynamic_sampling: str = opt("drop", "groups with equal rewards: keep, drop (not with --kl, which teaches there "
                                "too), or drop and refill (up to 4 rounds)",
                                ("keep", "drop", "refill"))
    max_grad_norm: float = opt(1.0, "gradient clipping; 0: none", low=0)
    microbatch_tokens: int = opt(16384, "tokens in one forward and backward, padding included", low=16)
    logprob_gap_limit: float = opt(1e-4, "nats; a larger sampler-trainer difference stops a float32 run", low=0)
    # GCD
    gcd: bool = opt(True, "train the judge beside the policy")
    judge_labels: str = opt("dense", "which turns are good and bad", judge.LABELS)
    judge_turns: int = opt(32, "turns judged per iteration (over all ranks), half of them good", low=2)
    judge_group_size: int = opt(8, "answers to each question", low=2)
    judge_weight: float = opt(0.1, "lambda; 0: the judge is logged only, the policy is plain GRPO bit for bit", low=0)
    judge_grad_cap: float = opt(0.0, "judge gradient norm at most this times the policy's; 0: no cap", low=0)
    judge_response_tokens: int = opt(4, "tokens in an answer", low=2)
    # evaluation and files
    evaluate: str = opt("auto", "splits, e.g. L0,L1 or dev; auto: all that the training leaves unseen; none")
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

    @property
    def splits(self):
        if self.evaluate == "none":
            return []
        if self.evaluate != "auto":
            return self.evaluate.split(",")
        return Tasks(self.games, self.train_types, self.seed).unseen()


# The paper's settings. It says: 300 demonstrations, 100 judge examples, 5 epochs, lr 1e-5, 8 x 2 per batch; 16 x 8
# episodes of at most 30 turns, lr 1e-6, 200 iterations at 1.5B (100 at 7B). The rest is verl-agent's.
PAPER = dict(
    demonstrations=300, judge_demonstrations=100, cold_start_lr=1e-5, cold_start_epochs=0, judge_epochs=5,
    cold_start_batch=16, judge_cold_start_weight=1.0, max_turns=30, iterations=200, minibatches=8, lr=1e-6,
    lr_decay=False, clip_low=0.2, clip_high=0.2, normalize_std=True, kl="loss", kl_coef=0.01, success_reward=10.0,
    invalid_penalty=0.1, invalid_unit="turn", dynamic_sampling="keep", max_response_tokens=512,
    judge_response_tokens=512, judge_labels="rule+oracle", context=16384, dtype="bfloat16", on_truncation="invalid")


def parse(argv=None):
    """Command line → Config. Every field is a flag; an unknown flag or a value out of range is an error."""
    parser = argparse.ArgumentParser(prog="gcd.py", allow_abbrev=False, description=__doc__.splitlines()[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for f in fields(Config):
        kind = {"action": argparse.BooleanOptionalAction} if f.type is bool else {"type": f.type}
        parser.add_argument("--" + f.name.replace("_", "-"), default=f.default, help=f.metadata["help"], **kind)
    if parser.parse_known_args(argv)[0].preset == "paper":
        parser.set_defaults(**PAPER)
    try:
        return Config(**vars(parser.parse_args(argv)))
    except ValueError as error:
        parser.error(str(error))


# What a random stream is for: the second number of its name, after the seed
DEMONSTRATION, COLD_QUESTIONS, ORDER, ROLLOUT, JUDGE, EVALUATION = 2, 3, 4, 5, 6, 8
FIRST_DEMONSTRATION = 5_000_000      # where the cold start's tasks begin in the endless sequence, far beyond RL's


# The run: what every stage needs, made once

@dataclass(slots=True)
class Run:
    """The model and its optimizer, the chat, the environments, and where to write."""

    config: Config
    ranks: parallel.Ranks
    tasks: Tasks
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    chat: rollout.Chat
    envs: list
    out: Path
    asked_to_stop: list           # signals received; looked at between steps

    def log(self, row):
        """Append one object to metrics.jsonl, on disk before anything else happens."""
        if self.ranks.rank == 0:
            append(self.out / "metrics.jsonl", row)

    def save(self, state):
        parallel.save_checkpoint(self.out / "checkpoint", self.model, self.optimizer, state, qwen.save_pretrained,
                                 self.chat.tokenizer.save_pretrained)

    def sampling(self, **changes):
        values = dict(temperature=self.config.temperature, max_response_tokens=self.config.max_response_tokens)
        return rollout.Sampling(**values | changes)

    def play(self, seats, sampling, name):
        """Play the seats with the current weights (inside `gathered`), behind a progress bar."""
        config = self.config
        with tqdm(total=len(seats), desc=name, unit="episode", leave=False, disable=self.ranks.rank > 0) as bar:
            return rollout.play(self.model, self.chat, self.envs, seats, sampling, config.max_turns, config.context,
                                config.history, config.on_truncation, lambda episode: bar.update())


def append(path, row):
    """One JSON object, one line, flushed to the disk; what is not a number is null (NaN is no JSON)."""
    clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(clean, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:                                 # a full disk does not say which file it was
        raise OSError(error.errno, error.strerror, str(path)) from None


def small_model_folder(config, folder):
    """Write the small default model, freshly initialised, as a Hugging Face folder."""
    words = [*rooms.phrases(), judge.QUESTION["plain"], *judge.ANSWERS]
    vocabulary = qwen.save_small_tokenizer(words, folder)
    shape = qwen.ModelConfig(vocab_size=vocabulary, hidden_size=config.hidden_size,
                             intermediate_size=3 * config.hidden_size,
                             num_hidden_layers=config.layers, num_attention_heads=4, num_key_value_heads=2,
                             head_dim=config.hidden_size // 4, max_position_embeddings=max(config.context, 1024),
                             tie_word_embeddings=True)
    model = qwen.Model(shape)
    qwen.init_weights(model, config.seed)
    qwen.save_pretrained(model, folder)


def prepare(config, ranks, asked_to_stop):
    """Everything a run needs, made or loaded; mistakes of the user surface here, before any work."""
    tasks, out = Tasks(config.games, config.train_types, config.seed), Path(config.out)
    if config.tasks % ranks.world:
        raise ValueError(f"--tasks={config.tasks}: not a multiple of the {ranks.world} ranks (no group straddles two)")
    first = tasks.train(config.train_types, 0, 1) if config.demonstrations or config.iterations else []
    first += [tasks.split(split)[0] for split in config.splits]
    if not (found := parallel.find_checkpoint(out / "checkpoint")):
        parallel.refuse_other_folder(out / "checkpoint")
    source = Path(config.model) if config.model else None
    if config.resume:
        source = found
        if source is None:
            raise ValueError(f"--resume: {out / 'checkpoint'} holds no checkpoint")
    with tempfile.TemporaryDirectory() as fresh:
        if source is None:
            small_model_folder(config, fresh)
        model = qwen.load_pretrained(source or fresh, torch.float32, ranks.device)
        tokenizer = qwen.load_tokenizer(source or fresh)
    if config.context > model.config.max_position_embeddings:
        longest = model.config.max_position_embeddings
        raise ValueError(f"--context={config.context}: {source}/config.json allows {longest}")
    style = config.prompt
    if style == "auto":
        style = "plain" if rollout.is_small(tokenizer) else "think"
    model = parallel.shard(model, ranks, getattr(torch, config.dtype))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.999), weight_decay=0.0)
    chat, envs = rollout.Chat(tokenizer, style), [make_env(config.env) for _ in range(config.slots)]
    for task in first:
        seat = rollout.Seat(task, 0, 0)
        prompt = rollout.Conversation(seat, envs[0], chat, config.history).prompt
        rollout.check_room(task, prompt, config.max_response_tokens, config.context)
    out.mkdir(parents=True, exist_ok=True)
    if ranks.rank == 0:
        set_aside(out, ["stages.json"] if config.resume else
                  ["stages.json", "evaluation.json", "metrics.jsonl", "episodes.jsonl"])
    return Run(config, ranks, tasks, model, optimizer, chat, envs, out, asked_to_stop)


def set_aside(folder, names):
    """What an earlier run left under these names is kept beside, as NAME.old, and not mixed with what comes."""
    for name in names:
        if (folder / name).exists():
            os.replace(folder / name, folder / f"{name}.old")


def versions():
    import transformers
    return {"python": platform.python_version(), "torch": torch.__version__,
            "transformers": transformers.__version__, "machine": f"{platform.machine()}, {os.cpu_count()} cores"}


def commit():
    """The commit of the code, "+" if changed since; empty outside a git checkout."""
    try:
        git = ["git", "-C", str(Path(__file__).parent)]
        head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        dirty = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
        return head.stdout.strip() + ("+" if dirty.stdout.strip() else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


# Stage 1: cold start

def replay(chat, env, seat, commands, history):
    """An expert's commands as an Episode, exactly as if the model had sampled them."""
    talk = rollout.Conversation(seat, env, chat, history)
    for command in commands:
        talk.act(rollout.Response(chat.respond(command), [], False), len(commands), math.inf)
    return talk.episode


def demonstrate(run, first, n, mistake_rate):
    """n episodes of the search expert on training tasks; per turn 1.0, or 0.0 where it was an injected mistake."""
    config, env = run.config, run.envs[0]
    prior = experts.learn_prior(run.tasks.train("six", FIRST_DEMONSTRATION, 400))
    episodes, advantages = [], []
    bar = tqdm(run.tasks.train(config.cold_start_types, first, n), desc="demonstrations", leave=False,
               disable=run.ranks.rank > 0)
    for i, task in enumerate(bar):
        seed = stream(config.seed, DEMONSTRATION, first + i)
        shown = experts.demonstrate(env, task, prior, seed, mistake_rate, config.max_turns)
        episode = replay(run.chat, env, rollout.Seat(task, i, 0), shown.commands, config.history)
        last = episode.turns[-1]
        if shown.won and len(last.prompt_ids) + len(last.response_ids) <= config.context:
            episodes.append(episode)
            advantages.append([0.0 if mistake else 1.0 for mistake in shown.mistakes])
    return episodes, advantages


def judge_questions(run):
    """Labelled turns, as many good as bad, of demonstrations with more mistakes: else few turns would be bad."""
    config, n = run.config, run.config.judge_demonstrations
    if not n:
        return []
    episodes, _ = demonstrate(run, FIRST_DEMONSTRATION + config.demonstrations, n, mistake_rate=0.25)
    places = judge.candidates(episodes, config.judge_labels, room=config.context - 64)
    chosen = judge.choose(places, config.judge_labels, n // 2, stream(config.seed, COLD_QUESTIONS))
    return judge.demonstrations(run.chat, judge.questions(run.chat, episodes, chosen))


def cold_start(run):
    """Imitate the search expert through `update()` itself: the policy first, then policy and judge together.

    Jointly from scratch the judge learns and the policy starves, so the judge comes second.
    """
    config = run.config
    episodes, advantages = demonstrate(run, FIRST_DEMONSTRATION, config.demonstrations, config.mistake_rate)
    policy = [s for i, (e, a) in enumerate(zip(episodes, advantages))
              for s in update.demonstration(update.samples_of(e, a, i))]
    done = imitate(run, policy, len(episodes), config.cold_start_epochs, "cold start: policy", 0)
    policy_and_judge = policy + judge_questions(run)
    imitate(run, policy_and_judge, len(episodes), config.judge_epochs, "cold start: policy and judge", done)


def imitate(run, samples, n_episodes, epochs, name, done):
    """Epochs of cross-entropy on samples; judge questions come a good and a bad one a step, while there are any.

    done: steps of earlier stages, so that the log counts on. Returns the number of this stage's.
    """
    config, ranks = run.config, run.ranks
    objective = update.Objective(judge_weight=config.judge_cold_start_weight, max_grad_norm=config.max_grad_norm,
                                 microbatch_tokens=config.microbatch_tokens)
    steps_per_epoch = max(1, n_episodes // config.cold_start_batch)
    total = epochs * steps_per_epoch
    for step in (bar := tqdm(range(total), desc=name, unit="step", disable=ranks.rank > 0)):
        epoch, place = divmod(step, steps_per_epoch)
        if place == 0:
            batches = shuffled_batches(samples, steps_per_epoch, generator(config.seed, ORDER, epoch))
        mine = [s for s in batches[place] if s.episode % ranks.world == ranks.rank]
        rate = config.cold_start_lr * (1 - step / total)
        metrics = guarded(run, mine, objective, rate)
        if step % 20 == 0 or step == total - 1:
            bar.set_postfix(nll=f"{metrics['policy/nll_nats']:.3f}")
            run.log({"phase": "cold_start", "stage": name, "step": done + step,
                     "cold_start/loss": metrics["policy/nll_nats"], "cold_start/judge_loss": metrics["judge/nll_nats"],
                     "cold_start/grad_norm": metrics["policy/grad_norm"]})
        stop_if_asked(run, {"iteration": None})      # nothing to resume from
    return total


def shuffled_batches(samples, n, rng):
    """Samples in n batches, whole episodes (and whole judge pairs) each, in an order drawn from rng."""
    batches = [[] for _ in range(n)]
    for kind in ("policy", "judge"):
        members = {}
        for sample in samples:
            if sample.kind == kind:
                members.setdefault(sample.episode, []).append(sample)
        keys = list(members)
        for i, k in enumerate(torch.randperm(len(keys), generator=rng).tolist()):
            batches[i % n] += members[keys[k]]
    return batches


# Stage 2: reinforcement learning

def seats_of(run, iteration, round=0):
    """This rank's episodes of an iteration: whole groups, every member on a random stream of its own."""
    config, ranks = run.config, run.ranks
    per_rank = config.tasks // ranks.world
    first = ranks.rank * per_rank
    start = (iteration * 4 + round if config.dynamic_sampling == "refill" else iteration) * config.tasks
    tasks = run.tasks.train(config.train_types, start + first, per_rank)
    return [rollout.Seat(task, round * config.tasks + first + i,
                         stream(config.seed, ROLLOUT, iteration, round, first + i, member))
            for i, task in enumerate(tasks) for member in range(config.group_size)]


def credit(episodes, config):
    """Episodes → reward_E, advantage_E and which of them teach nothing (equal rewards in the group)."""
    turns_E = torch.tensor([len(e.turns) for e in episodes])
    group_E = torch.tensor([e.group for e in episodes])
    won_E = torch.tensor([e.won for e in episodes])
    invalid_E = torch.tensor([sum(not turn.valid for turn in e.turns) for e in episodes])
    reward_E = algorithms.episode_reward(won_E, invalid_E, turns_E, config.success_reward, config.invalid_penalty,
                                         config.invalid_unit)
    advantage_E = algorithms.group_relative_advantage(
        reward_E, group_E, turns_E if config.baseline == "turn" else None, config.normalize_std)
    return reward_E, advantage_E, algorithms.zero_variance(reward_E, group_E)


def kl_penalty(run, reference, episodes):
    """Each episode's sum_t (log pi_old - log pi_ref) times the coefficient: k1 in the reward, that is the reverse KL.

    Returned centred within the group, to be taken off the advantage: the task's reward alone is scaled by its std, and
    groups of equal reward keep their exact zeros there.
    """
    config, objective = run.config, objective_of(run.config)
    samples = [s for i, e in enumerate(episodes) for s in update.samples_of(e, [0.0] * len(e.turns), i)]
    if config.dtype != "float32":
        update.rescore(run.model, samples, objective)
    penalty_E = torch.zeros(len(episodes))
    for sample, ref in zip(samples, update.score(reference, samples, objective)):
        old, ref = torch.tensor(sample.logprob_old), torch.tensor(ref)
        penalty_E[sample.episode] += config.kl_coef * float(algorithms.kl_k1(old, ref).sum())
    return algorithms.group_relative_advantage(penalty_E, torch.tensor([e.group for e in episodes]))


def objective_of(config):
    """The flags that `update` needs, by its names for them."""
    return update.Objective(
        clip_low=config.clip_low, clip_high=config.clip_high, reduction=config.reduction,
        longest=config.max_turns * config.max_response_tokens,
        kl_coef=config.kl_coef if config.kl == "loss" else 0.0,
        judge_weight=config.judge_weight, judge_grad_cap=config.judge_grad_cap, temperature=config.temperature,
        max_grad_norm=config.max_grad_norm, microbatch_tokens=config.microbatch_tokens)


def collect(run, iteration):
    """This rank's episodes of an iteration: those to learn from, and all that were played.

    They differ with --dynamic-sampling refill: groups whose rewards differ, of up to 4 rounds, until there are enough
    (each rank fills its own share).
    """
    config = run.config
    played = run.play(seats_of(run, iteration), run.sampling(), f"iteration {iteration}")
    if config.dynamic_sampling != "refill":
        return played, played
    wanted, kept = config.tasks // run.ranks.world * config.group_size, []
    for round in range(4):
        more = run.play(seats_of(run, iteration, round), run.sampling(), f"refill {round}") if round else played
        played = played + more if round else played
        kept += [episode for episode, equal in zip(more, credit(more, config)[2].tolist()) if not equal]
        if len(kept) >= wanted:
            break
    return kept[:wanted] or played, played


def judge_turns(run, iteration, episodes, first):
    """GCD: turns of this iteration → labels → questions → answers. The choice is made over all ranks."""
    config, seed = run.config, stream(run.config.seed, JUDGE, iteration)
    room = config.context - config.judge_response_tokens - 64             # the question's tokens, amply
    places = parallel.gather(judge.candidates(episodes, config.judge_labels, room, first))
    chosen = judge.choose(sum(places, []), config.judge_labels, config.judge_turns // 2, seed)
    judged = judge.questions(run.chat, episodes, chosen, first)
    sampling = run.sampling(max_response_tokens=config.judge_response_tokens)
    judge.judge(run.model, run.chat, judged, config.judge_group_size, sampling, seed, config.slots)
    return judged


def iteration(run, i, reference):
    """One iteration: play, give credit, judge, update. Returns its metrics."""
    config, clock = run.config, Clock()
    with parallel.gathered(run.model):
        episodes, played = collect(run, i)
        clock.lap("rollout")
        first = run.ranks.rank * (config.tasks // run.ranks.world) * config.group_size
        judged = judge_turns(run, i, episodes, first) if config.gcd else []     # here, while weights are whole
        clock.lap("judge")
    _, advantage_E, equal_E = credit(episodes, config)
    if config.kl == "reward":
        advantage_E -= kl_penalty(run, reference, episodes)
    drop = config.dynamic_sampling != "keep" and config.kl == "none"
    taught = [(e, advantage_E[k].item(), first + k) for k, e in enumerate(episodes) if not (drop and equal_E[k])]
    samples = [s for e, a, k in taught for s in update.samples_of(e, [a] * len(e.turns), k)]
    if config.judge_weight:                                  # at 0 the update never sees the judge
        samples += judge.samples(judged)
    metrics = train(run, i, samples, reference)
    clock.lap("update")
    store(run, i, episodes, advantage_E, judged)
    if config.gcd:
        metrics |= judge.metrics(sum(parallel.gather(judge.verdicts_of(judged, episodes)), []))
    return metrics | rollout_metrics(run, played) | clock.laps


def train(run, i, samples, reference):
    """The optimizer steps of an iteration. Returns the mean of their metrics; the gap is the first step's, because
    only there have sampler and trainer the same weights."""
    config, objective = run.config, objective_of(run.config)
    if config.kl == "loss":
        for sample, ref in zip(samples, update.score(reference, samples, objective)):
            sample.logprob_ref = ref
    if config.dtype != "float32":                            # the sampler's are 0.03 nats off in bf16
        gap = update.rescore(run.model, samples, objective)
    rate = config.lr * (1 - i / config.iterations) if config.lr_decay else config.lr
    steps = []
    for part in update.minibatches(samples, config.minibatches):
        if parallel.any_rank(bool(part)):
            steps.append(guarded(run, part, objective, rate))
            if len(steps) == 1 and config.dtype == "float32":
                gap = {k: v for k, v in steps[0].items() if k.startswith("policy/logprob_gap")}
                check_gap(steps[0]["policy/logprob_gap_max_nats"], config.logprob_gap_limit)
    if not steps:                                            # every group's rewards were equal: nothing to learn
        unknown = ("entropy_nats", "clip_frac", "grad_norm", "logprob_gap_nats", "logprob_gap_max_nats")
        return {f"policy/{key}": math.nan for key in unknown} | {"policy/steps": 0}
    keys = dict.fromkeys(key for step in steps for key in step)
    known = {key: [step[key] for step in steps if key in step] for key in keys}
    mean = {key: sum(values) / len(values) for key, values in known.items()}
    return mean | gap | {"policy/steps": len(steps), "policy/lr": rate}


def check_gap(gap, limit):
    if gap > limit:
        raise ValueError(f"--logprob-gap-limit={limit:g}: sampler and trainer differ by {gap:.2e} nats on equal weights")


def guarded(run, samples, objective, rate):
    """update(), but a batch that is not finite is stored before every rank stops."""
    try:
        return update.update(run.model, run.optimizer, samples, objective, rate)
    except update.NonFinite:
        torch.save([asdict(s) for s in samples], run.out / f"nonfinite_batch_rank{run.ranks.rank}.pt")
        raise


def rollout_metrics(run, episodes):
    """Shares over all ranks of all that was played in an iteration."""
    reward_E, _, equal_E = credit(episodes, run.config)
    own = rollout.summary(episodes) | {"reward": float(reward_E.sum()), "equal": float(equal_E.sum())}
    counts = parallel.all_sum(own)
    shares = rollout.success_rate(counts)
    keys = ("success", "turns", "invalid_frac", "repeated_frac", "truncated_frac")
    return {f"rollout/{key}": shares[key] for key in keys} | {
        "rollout/reward": counts["reward"] / counts["episodes"], "rollout/episodes": counts["episodes"],
        "rollout/zero_variance_frac": counts["equal"] / counts["episodes"],
        "rollout/response_tokens": counts["response_tokens"]}


class Clock:
    """Seconds by stage."""

    def __init__(self):
        self.laps, self.last = {}, time.perf_counter()

    def lap(self, name):
        now = time.perf_counter()
        self.laps[f"time/{name}_s"], self.last = now - self.last, now


def reinforce(run):
    """The RL stage: iterations from where the checkpoint stopped (0, or with --resume later)."""
    config, first = run.config, 0
    if config.resume:
        first = parallel.load_trainer(run.out / "checkpoint", run.model, run.optimizer)["iteration"]
        if first is None:
            raise ValueError(f"--resume: {config.out} stopped within its cold start; run it again without --resume")
    if first == 0:
        run.optimizer.state.clear()                          # the cold start's moments are of another objective
    reference = frozen_copy(run, first) if config.kl != "none" else None
    for i in (bar := tqdm(range(first, config.iterations), desc="RL", unit="iteration", initial=first,
                          total=config.iterations, disable=run.ranks.rank > 0)):
        metrics = iteration(run, i, reference)
        run.log({"phase": "rl", "iteration": i} | metrics)
        bar.set_postfix(success=f"{metrics['rollout/success']:.2f}", turns=f"{metrics['rollout/turns']:.1f}")
        stop_if_asked(run, {"iteration": i + 1})
        if (i + 1) % config.checkpoint_every == 0:
            run.save({"iteration": i + 1})


def frozen_copy(run, first):
    """The KL's reference: the model as RL found it, saved in --out when RL began, so that --resume has the same."""
    folder = run.out / "reference"
    if first == 0:
        weights = parallel.full_weights(run.model)
        folder.mkdir(exist_ok=True)
        parallel.on_main(lambda: qwen.save_pretrained(run.model, folder, state=weights))
    reference = qwen.load_pretrained(folder, torch.float32, run.ranks.device)
    return parallel.shard(reference, run.ranks, getattr(torch, run.config.dtype)).requires_grad_(False)


# Stage 3: evaluation

MODES = {"sampled": 1.0, "greedy": 0.0, "t0.4": 0.4}


def evaluation(run):
    """Every task of each split once per mode; the headline is one sampled pass at temperature 1."""
    started, splits = time.perf_counter(), {}
    for name in run.config.splits:
        tasks, splits[name] = run.tasks.split(name), {}
        for m, (mode, temperature) in enumerate(MODES.items()):
            seats = [rollout.Seat(task, g, stream(run.config.seed, EVALUATION, m, g)) for g, task in enumerate(tasks)]
            mine = seats[run.ranks.rank::run.ranks.world]
            sampling = run.sampling(temperature=temperature, top_p=run.config.top_p, top_k=run.config.top_k)
            with parallel.gathered(run.model):
                episodes = run.play(mine, sampling, f"{name} {mode}") if mine else []
            splits[name][mode] = rollout.success_rate(parallel.all_sum(rollout.summary(episodes)))
            if mode == "sampled":
                store_episodes(run, episodes[:12], {"phase": "evaluation", "split": name})
            stop_if_asked(run, None)
    if run.ranks.rank == 0:
        games = "real ALFWorld games" if run.config.games else "generated rooms"
        write_json(run.out / "evaluation.json", {"splits": splits, "games": games, "seed": run.config.seed,
                                                 "seconds": time.perf_counter() - started})
    return splits


def store(run, i, episodes, advantage_E, judged):
    """Every few iterations, one group with what was thought of it, for the report."""
    if i % run.config.episodes_every and i != run.config.iterations - 1:
        return
    of_turn = {(one.episode, one.turn): one for one in judged}
    kept = max({e.group for e in episodes}, key=lambda g: sum((e.group == g) * abs(float(a))
                                                              for e, a in zip(episodes, advantage_E)))
    keep = [k for k, e in enumerate(episodes) if e.group == kept]
    store_episodes(run, [episodes[k] for k in keep], {"phase": "rl", "iteration": i, "split": "train"},
                   [float(advantage_E[k]) for k in keep],
                   [{t: of_turn.get((k, t)) for t in range(len(episodes[k].turns))} for k in keep])


def store_episodes(run, episodes, head, advantages=None, judged=None):
    """Append episodes to episodes.jsonl: what was seen, said, meant and thought of it, turn by turn."""
    if run.ranks.rank:
        return
    for k, episode in enumerate(episodes):
        oracle, labels = judge.oracle_labels(episode), judge.labels_of(episode, run.config.judge_labels)
        turns = []
        for t, turn in enumerate(episode.turns):
            one = judged[k][t] if judged else None
            turns.append({"observation": turn.observation, "response": turn.response, "action": turn.action,
                          "valid": turn.valid, "label": labels[t], "advantage": advantages[k] if advantages else None,
                          "oracle": oracle[t], "verdicts": one.verdicts if one else [],
                          "judge_reward": sum(one.rewards) / len(one.rewards) if one else None})
        append(run.out / "episodes.jsonl", head | {
            "task_id": episode.task.id, "task_type": episode.task.task_type, "group": episode.group,
            "won": episode.won, "turns": turns, "final_observation": episode.final_observation})


def write_json(path, value):
    """Written beside and renamed: a reader sees the old file or the new one."""
    beside = path.with_name(path.name + ".new")
    beside.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    os.replace(beside, path)


# Stopping early

class Interrupted(Exception):
    """Ctrl-C (or SIGTERM) was pressed and what there was has been saved."""


def listen():
    """Catch Ctrl-C and SIGTERM: the first one is noted in the returned list, a second one stops at once."""
    asked = []

    def note(signum, frame):
        if asked:
            raise KeyboardInterrupt
        asked.append(signum)
        print("\nstopping after this step (again: at once)", file=sys.stderr)

    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, note)
    return asked


def stop_if_asked(run, state):
    """Between steps: if any rank was asked to stop, save a checkpoint (unless state is None) and stop on all."""
    if not parallel.any_rank(bool(run.asked_to_stop)):
        return
    if state is not None:
        run.save(state)
    raise Interrupted(f"stopped; {run.out / 'checkpoint'} holds the model")


def main(argv=None):
    config = parse(argv)
    asked_to_stop = listen()
    torch.set_num_threads(config.threads)
    try:
        ranks = parallel.setup(config.device)
        run = prepare(config, ranks, asked_to_stop)
        run.log({"config": asdict(config), "versions": versions(), "commit": commit(),
                 "started": datetime.now(timezone.utc).isoformat(timespec="seconds")})
        stages = {"cold_start": cold_start if config.demonstrations and not config.resume else None,
                  "rl": reinforce if config.iterations else None,
                  "evaluation": evaluation if config.splits else None}
        seconds = {}
        for name, stage in stages.items():
            if stage:
                started = time.perf_counter()
                result = stage(run)
                if name != "evaluation":
                    run.save({"iteration": config.iterations if name == "rl" else 0})
                seconds[name] = time.perf_counter() - started
        if ranks.rank == 0:
            write_json(run.out / "stages.json", seconds)
        for split in config.splits:
            own = result[split]["sampled"]
            parallel.print0(f"{split}: success {own['success']:.1%} [{own['low']:.1%}, {own['high']:.1%}], n {own['n']}")
    except Interrupted as stopped:
        print(stopped, file=sys.stderr)
        return 130
    except (ValueError, OSError, FloatingPointError) as error:
        print(f"gcd.py: error: {error}", file=sys.stderr)
        return 1
    finally:
        parallel.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
