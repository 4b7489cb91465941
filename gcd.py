"""Cold start → reinforcement learning with a self-judge (GCD) → evaluation, of a language-model agent in a text world.

    python gcd.py                                   # everything, small model, generated rooms, CPU
    python gcd.py --algo gigpo --no-gcd             # another algorithm, without the judge
    torchrun --nproc-per-node 8 gcd.py --model DIR  # a Hugging Face Qwen2/Qwen2.5 folder on eight GPUs
    python gcd.py --help                            # every flag, with its meaning and unit

Read `main`, then `iteration`: one training step, named calls only. Each stage writes to --out as it goes:
`checkpoint/` (a Hugging Face folder), `metrics.jsonl`, `episodes.jsonl`, `evaluation.json` and, at the end,
`stages.json`; `report.py` draws them.
Left out: everything that no experiment here turns: other optimizers, schedules, loggers.
"""

import contextlib
import json
import math
import os
import platform
import random
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
import cold_start
import correction
import credit
import judge
import model as qwen
import parallel
import rollout
import update
from config import Config, changed, parse
from envs import EpisodeLost, engine_versions, games, make_envs, rooms
from envs.splits import games_hash
from parallel import stream


# What a random stream is for: the second number of its name, after the seed (cold_start.py has 2, 3 and 4)
ROLLOUT, JUDGE, EVALUATION, CORRECTION = 5, 6, 8, 9
PROTOCOL = {"verl-agent": 50, "rlvmr": 30}      # turns of others' evaluations, each of 128 games at temperature 0.4


# The run: what every stage needs, made once

@dataclass(slots=True)
class Run:
    """The model and its optimizer, the chat, the environments, and where to write."""

    config: Config
    ranks: parallel.Ranks
    tasks: object                 # envs.splits.Tasks or its like
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    chat: rollout.Chat
    envs: list
    out: Path
    asked_to_stop: list           # signals received; looked at between steps
    endpoint: object = None       # endpoint.Endpoint, where one is asked
    critic: object = None         # credit.Critic, with PPO
    instruction: correction.Instruction | None = None      # of prompt-based correction, once there is one
    origin: dict = field(default_factory=dict)             # `origin_of` it, on rank 0
    seconds: dict = field(default_factory=dict)            # {stage: seconds} of those that have ended
    stage: str = ""                                        # the one under way, and when it began
    began: float = 0.0

    def log(self, row):
        """Append one object to metrics.jsonl, on disk before anything else happens."""
        if self.ranks.rank == 0:
            append(self.out / "metrics.jsonl", row)

    def save(self, state):
        instruction = asdict(self.instruction) if self.instruction else None
        critic = (self.critic.model, self.critic.optimizer) if self.critic else None
        state = state | {"instruction": instruction, "settings": asdict(self.config), "seconds": self.spent()}
        parallel.save_checkpoint(self.out / "checkpoint", self.model, self.optimizer, state,
                                 qwen.save_pretrained, self.chat.tokenizer.save_pretrained, critic)

    def spent(self):
        """Seconds of each stage so far, those before a --resume included."""
        return self.seconds | {self.stage: self.seconds.get(self.stage, 0.0) + time.perf_counter() - self.began}

    def sampling(self, **changes):
        values = dict(temperature=self.config.temperature, max_response_tokens=self.config.max_response_tokens)
        return rollout.Sampling(**values | changes)

    def play(self, seats, sampling, name, max_turns=None):
        """Play the seats with the current weights (inside `gathered`), behind a progress bar."""
        config = self.config
        with tqdm(total=len(seats), desc=name, unit="episode", leave=False, disable=self.ranks.rank > 0) as bar:
            return rollout.play(self.model, self.chat, self.envs, seats, sampling, max_turns or config.max_turns,
                                config.context, config.history, config.on_truncation, lambda episode: bar.update())

    def step(self, samples, objective, rate):
        """One optimizer step; a batch that is not finite is stored before every rank stops."""
        try:
            return update.update(self.model, self.optimizer, samples, objective, rate)
        except update.NonFinite:
            torch.save([asdict(s) for s in samples], self.out / f"nonfinite_batch_rank{self.ranks.rank}.pt")
            raise

    def endpoint_labels(self, episodes, n, seed):
        """The large model's labels of at most n turns, counted in the log; None where no label needs it."""
        if "endpoint" not in self.config.judge_labels:
            return None
        config = self.config
        asked = parallel.together(lambda: judge.endpoint_labels(episodes, self.endpoint, n, seed, config.judge_labels,
                                                                config.label_agreement))
        self.log({"phase": "labels"} | parallel.all_sum(judge.asked_counts(asked)))
        self.log_endpoint()
        return asked

    def log_endpoint(self):
        """What came of all questions to the large model so far, over all ranks."""
        if self.endpoint:
            counts = parallel.all_sum(dict(self.endpoint.counts))
            self.log({"phase": "endpoint"} | {f"endpoint/{key}": count for key, count in counts.items()})

    def stop_if_asked(self, state):
        """Between steps: if any rank was asked to stop, save a checkpoint (unless state is None) and stop on all."""
        if not parallel.any_rank(bool(self.asked_to_stop)):
            return
        if state is not None:
            self.save(state)
        folder = self.out / "checkpoint"
        raise Interrupted(f"stopped; {folder} holds the model" if folder.is_dir() else "stopped; nothing to save yet")


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


def small_model_words(config, tasks):
    """The phrases that are one token each in the small model's vocabulary: the game's, and those of the methods."""
    if config.env == "scienceworld":
        from envs import scienceworld
        words = scienceworld.words(tasks.train("all", 0, 60), 1500)
    elif config.games:
        words = rooms.phrases(numbered=False) + games.names(tasks.train("all", 0, 400))
    else:
        words = rooms.phrases()
    words = [*words, judge.QUESTION["plain"], *judge.ANSWERS]
    if config.prompt == "tags" or config.algo == "rlvmr":
        words += [f"<{tag}>" for tag in rollout.TAGS]
    return words + correction.instruction_phrases() if config.instructions else words


def small_model_folder(config, tasks, folder):
    """Write the small default model, freshly initialised, as a Hugging Face folder."""
    words = small_model_words(config, tasks)
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
    tasks, out = config.world(), Path(config.out)
    if config.tasks % ranks.world:
        raise ValueError(f"--tasks={config.tasks}: not a multiple of the {ranks.world} ranks (no group straddles two)")
    first = tasks.train(config.train_types, 0, 1) if config.demonstrations or config.iterations else []
    first += [tasks.split(split)[0] for split in config.splits]
    endpoint = make_endpoint(config)
    if not (found := parallel.find_checkpoint(out / "checkpoint")):
        parallel.refuse_other_folder(out / "checkpoint")
    source, state = Path(config.model) if config.model else None, {}
    if config.resume:
        source = found
        if source is None:
            raise ValueError(f"--resume: {out / 'checkpoint'} holds no checkpoint")
        state = parallel.read_trainer(found)["state"]
        check_resumed(config, state)
    envs = make_envs(config.env, config.slots)
    with tempfile.TemporaryDirectory() as fresh:
        if source is None:
            small_model_folder(config, tasks, fresh)
        head = True if config.judge_kind == "value" else None
        model = qwen.load_pretrained(source or fresh, torch.float32, ranks.device, head)
        tokenizer = qwen.load_tokenizer(source or fresh)
    if config.context > model.config.max_position_embeddings:
        longest = model.config.max_position_embeddings
        raise ValueError(f"--context={config.context}: {source}/config.json allows {longest}")
    chat = rollout.Chat(tokenizer, style_of(config, tokenizer), config.show_admissible)
    if config.thoughts == "endpoint" and not chat.writes:
        raise ValueError(f"--thoughts=endpoint: prompts of style {chat.style} hold no thoughts here")
    if config.correction != "off" and not chat.writes and len(chat.encode(correction.instruction_phrases()[0])) > 1:
        raise ValueError(f"--correction={config.correction}: this model's cold start had no --instructions, so it knows none")
    if config.correction != "off" and config.correction_from == "critiques" and not chat.writes:
        raise ValueError("--correction-from=critiques: this model writes no sentences; counts is what it can do")
    model = parallel.shard(model, ranks, getattr(torch, config.dtype))
    for task in first:
        prompt = rollout.Conversation(rollout.Seat(task, 0, 0), envs[0], chat, config.history).begin().prompt
        rollout.check_room(task, prompt, config.max_response_tokens, config.context)
    out.mkdir(parents=True, exist_ok=True)
    if ranks.rank == 0:
        set_aside(out, ["stages.json"] if config.resume else
                  ["stages.json", "evaluation.json", "metrics.jsonl", "episodes.jsonl"])
        for name in ("metrics.jsonl", "episodes.jsonl"):
            end_line(out / name)
    kept = source and (config.correction != "off" or not config.iterations)      # RL without correction is without it
    return Run(config, ranks, tasks, model, adam(model), chat, envs, out, asked_to_stop, endpoint,
               instruction=instruction_in(source) if kept else None, seconds=dict(state.get("seconds", {})))


EVALUATION_ONLY = ("protocol", "top_p", "top_k", "correction_at_evaluation")


def check_resumed(config, state):
    """ValueError unless a checkpoint's RL can go on as these flags say. How it is evaluated may differ."""
    done = state["iteration"]
    if done is None:
        raise ValueError(f"--resume: {config.out} stopped within its cold start; run it again without --resume")
    if 0 < config.iterations < done:
        raise ValueError(f"--iterations={config.iterations}: --resume finds {done} done in {config.out}")
    decays = config.lr_decay and 0 < done < config.iterations             # over so many iterations as it was begun with
    apart = EVALUATION_ONLY if decays else (*EVALUATION_ONLY, "iterations")
    if other := changed(state.get("settings", {}), config, apart):
        said = "; ".join(f"{name} was {then}, is {now}" for name, (then, now) in other.items())
        raise ValueError(f"--resume: {config.out} was made with other settings: {said}")


def instruction_in(source):
    """The instruction that a checkpoint's model was last given, if it was trained with correction."""
    state = parallel.read_trainer(source)["state"] if (source / parallel.TRAINER_FILE).is_file() else {}
    return correction.Instruction(**state["instruction"]) if state.get("instruction") else None


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.999), weight_decay=0.0)


def style_of(config, tokenizer):
    """The prompt style: RLVMR's tags where they are rewarded, else by what the model is.

    A small model speaks as its cold start did: with tags if they are words of its vocabulary, and only then.
    """
    small = rollout.is_small(tokenizer)
    knows_tags = small and len(tokenizer.encode(f"<{rollout.TAGS[0]}>")) == 1
    style = config.prompt
    if style == "auto":
        style = "tags" if config.algo == "rlvmr" or knows_tags else "plain" if small else "think"
    if style == "plain" and not small:
        raise ValueError("--prompt=plain: the small model's style; expected think or tags")
    if style == "tags" and small and not knows_tags:
        raise ValueError(f"--prompt={config.prompt} --algo={config.algo}: this model's cold start had no tags, so it knows "
                         "none (--prompt tags there)")
    return style


def make_endpoint(config):
    """The client of the large model, if one is named; a missing package or key is an error here."""
    if not config.endpoint:
        return None
    from endpoint import Endpoint
    return Endpoint(config.endpoint, config.endpoint_model, config.endpoint_key_variable, config.endpoint_cache,
                    config.endpoint_limit)


def set_aside(folder, names):
    """What an earlier run left under these names is kept beside, as NAME.old, and not mixed with what comes."""
    for name in names:
        if (folder / name).exists():
            os.replace(folder / name, folder / f"{name}.old")


def end_line(path):
    """What a killed run left of its last line stays a line of its own: nothing is glued to it."""
    if path.exists() and not path.read_bytes().endswith(b"\n"):
        with open(path, "a") as file:
            file.write("\n")


def versions(env):
    import transformers
    return {"python": platform.python_version(), "torch": torch.__version__,
            "transformers": transformers.__version__, "machine": f"{platform.machine()}, {os.cpu_count()} cores"
            } | engine_versions(env)


def hashes(config, tasks):
    """Which games a run has: games_hash of each split that it evaluates and, as "train", of all that RL may play, in
    order."""
    played = config.iterations * config.tasks * (4 if config.dynamic_sampling == "refill" else 1)
    train = {"train": games_hash(tasks.train(config.train_types, 0, played))} if played else {}
    return {split: games_hash(tasks.split(split)) for split in config.splits} | train


def origin_of(config, tasks):
    """What a run was made with, for its files: versions, commit and games."""
    return {"versions": versions(config.env), "commit": commit(), "games": games_of(config), "games_hash": hashes(config, tasks)}


def commit():
    """The commit of the code, "+" if changed since; empty outside a git checkout."""
    try:
        git = ["git", "-C", str(Path(__file__).parent)]
        head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        dirty = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
        return head.stdout.strip() + ("+" if dirty.stdout.strip() else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


# Stage 2: reinforcement learning

def seats_of(run, iteration, round=0):
    """This rank's episodes of an iteration: whole groups, every member on a random stream of its own."""
    config, ranks = run.config, run.ranks
    per_rank = config.tasks // ranks.world
    first = ranks.rank * per_rank
    start = (iteration * 4 + round if config.dynamic_sampling == "refill" else iteration) * config.tasks
    tasks = run.tasks.train(config.train_types, start + first, per_rank)
    instruction = run.instruction.text if run.instruction else ""
    return [rollout.Seat(task, round * config.tasks + first + i,
                         stream(config.seed, ROLLOUT, iteration, round, first + i, member), instruction)
            for i, task in enumerate(tasks) for member in range(config.group_size)]


def estimator_of(config):
    """The flags that `credit` needs."""
    return credit.Estimator(**{f.name: getattr(config, f.name) for f in fields(credit.Estimator)})


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
        clip_low=config.clip_low, clip_high=config.clip_high, dual_clip=config.dual_clip,
        reduction=config.reduction, longest=config.max_turns * config.max_response_tokens,
        kl_coef=config.kl_coef if config.kl == "loss" else 0.0,
        judge_weight=config.judge_weight, judge_grad_cap=config.judge_grad_cap, temperature=config.temperature,
        max_grad_norm=config.max_grad_norm, microbatch_tokens=config.microbatch_tokens, value_clip=config.value_clip)


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
        kept += [episode for episode, equal in zip(more, credit.rewards(more, estimator_of(config))[1].tolist()) if not equal]
        if len(kept) >= wanted:
            break
    return kept[:wanted] or played[:wanted], played


def judge_turns(run, iteration, episodes, first):
    """GCD: turns of this iteration → labels → questions → answers. The choice is made over all ranks.

    Returns the judged turns (answered, with the generative judge) and their samples for the update.
    """
    config, seed = run.config, stream(run.config.seed, JUDGE, iteration)
    asked = run.endpoint_labels(episodes, config.judge_turns // run.ranks.world, stream(seed, 2, run.ranks.rank))
    places = parallel.gather(judge.candidates(episodes, config.judge_labels, config.question_room, first, asked,
                                              config.label_agreement))
    chosen = judge.choose(sum(places, []), config.judge_labels, config.judge_turns // 2, seed)
    judged = judge.questions(run.chat, episodes, chosen, first)
    if config.judge_kind == "value":
        return judged, judge.value_samples(run.chat, episodes, chosen, first)
    sampling = run.sampling(max_response_tokens=config.judge_response_tokens)
    judge.judge(run.model, run.chat, judged, config.judge_group_size, sampling, seed, config.slots)
    return judged, judge.samples(judged)


def judge_metrics(run, judged, samples, episodes):
    """What this iteration's judging came to, over all ranks."""
    if run.config.judge_kind == "generative":
        rows = judge.verdicts_of(judged, episodes)
    else:
        probabilities = update.judgements(run.model, samples, objective_of(run.config))
        rows = judge.value_verdicts(judged, episodes, probabilities)
    return judge.metrics(sum(parallel.gather(rows), []))


def iteration(run, i, reference):
    """One iteration: play, judge, give credit, update. Returns its metrics."""
    config, clock = run.config, Clock()
    judged, questions = [], []
    with parallel.gathered(run.model):
        episodes, played = collect(run, i)
        clock.lap("rollout")
        first = run.ranks.rank * (config.tasks // run.ranks.world) * config.group_size
        if config.gcd:                                                    # here, while weights are whole
            judged, questions = judge_turns(run, i, episodes, first)
        correct(run, i, episodes, judged)
        clock.lap("judge")
    metrics = judge_metrics(run, judged, questions, episodes) if config.gcd else {}
    if run.critic:
        samples, advantage_S, noted = with_critic(run, i, episodes, first)
    else:
        samples, advantage_S, noted = with_groups(run, episodes, first, reference)
    if config.judge_weight:                                  # at 0 the update never sees the judge
        samples += questions
    metrics |= noted | train(run, i, samples, reference)
    clock.lap("update")
    store(run, i, episodes, credit.by_episode(episodes, advantage_S), judged)
    return metrics | rollout_metrics(run, played) | clock.laps


def with_groups(run, episodes, first, reference):
    """Credit by comparison within groups: samples of the episodes that teach something, advantage_S, metrics."""
    config = run.config
    advantage_S, metrics = credit.advantages(episodes, estimator_of(config))
    silent_E = credit.silent(episodes, advantage_S)
    if config.kl == "reward":
        turns_E = torch.tensor([len(e.turns) for e in episodes])
        advantage_S = advantage_S - kl_penalty(run, reference, episodes).repeat_interleave(turns_E)
    drop = config.dynamic_sampling != "keep" and config.kl == "none"
    samples = [s for k, (e, own) in enumerate(zip(episodes, credit.by_episode(episodes, advantage_S)))
               if not (drop and silent_E[k]) for s in update.samples_of(e, own, first + k)]
    if config.nthr:
        won = {first + k: e.won for k, e in enumerate(episodes)}
        group = {first + k: e.group for k, e in enumerate(episodes)}
        samples, weakened = update.nthr(run.model, samples, won, group, objective_of(config), config.nthr_beta)
        metrics |= weakened
    return samples, advantage_S, metrics


def with_critic(run, i, episodes, first):
    """PPO: samples with advantages against the critic's values, which then takes its own steps on the returns."""
    config, objective = run.config, objective_of(run.config)
    valued, advantage_S, metrics = credit.ppo_samples(run.critic, episodes, estimator_of(config), objective, first)
    rate = config.critic_lr * (1 - i / config.iterations) if config.lr_decay else config.critic_lr
    steps = []
    for part in range(config.minibatches):
        mine = [v for v in valued if v.sample.episode % config.minibatches == part]
        if parallel.any_rank(bool(mine)):
            samples, targets, old = [v.sample for v in mine], [v.target for v in mine], [v.value_old for v in mine]
            steps.append(update.update_critic(run.critic.model, run.critic.optimizer, samples, targets, old, objective, rate))
    metrics |= {key: sum(step[key] for step in steps) / len(steps) for key in steps[0]}
    return [v.sample for v in valued], advantage_S, metrics


def correct(run, i, episodes, judged):
    """Prompt-based correction: every few iterations, a new instruction from the turns that the judge found bad."""
    config = run.config
    if config.correction == "off" or (i + 1) % config.correction_every:
        return
    seed = stream(config.seed, CORRECTION, i)
    bad = correction.found_bad(judged, episodes)
    instruction = correction.new_instruction(run.model, run.chat, bad, i, config.correction == "irrelevant", run.endpoint,
                                             run.sampling(), seed, config.slots, config.correction_from == "counts")
    if instruction:
        run.instruction = instruction
        run.log({"phase": "correction"} | asdict(instruction))
        run.log_endpoint()


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
            steps.append(run.step(part, objective, rate))
            if len(steps) == 1 and config.dtype == "float32":
                gap = {k: v for k, v in steps[0].items() if k.startswith("policy/logprob_gap")}
                check_gap(steps[0]["policy/logprob_gap_max_nats"], config.logprob_gap_limit)
    if not steps:                                            # every group's rewards were equal: nothing to learn
        unknown = ("entropy_nats", "clip_frac", "grad_norm", "logprob_gap_nats", "logprob_gap_max_nats")
        return {f"policy/{key}": math.nan for key in unknown} | {"policy/steps": 0}
    keys = dict.fromkeys(key for step in steps for key in step)
    known = {key: [step[key] for step in steps if not math.isnan(step.get(key, math.nan))] for key in keys}
    mean = {key: sum(values) / len(values) if values else math.nan for key, values in known.items()}
    return mean | gap | {"policy/steps": len(steps), "policy/lr": rate}


def check_gap(gap, limit):
    if gap > limit:
        raise ValueError(f"--logprob-gap-limit={limit:g}: sampler and trainer differ by {gap:.2e} nats on equal weights")


def rollout_metrics(run, episodes):
    """Shares over all ranks of all that was played in an iteration."""
    reward_E, equal_E = credit.rewards(episodes, estimator_of(run.config))
    own = rollout.summary(episodes) | {"reward": float(reward_E.sum()), "equal": float(equal_E.sum())}
    counts = parallel.all_sum(own)
    shares = rollout.success_rate(counts)
    keys = ("success", "turns", "invalid_frac", "repeated_frac", "truncated_frac")
    return {f"rollout/{key}": shares[key] for key in keys} | {
        "rollout/reward": counts["reward"] / counts["episodes"], "rollout/episodes": counts["episodes"],
        "rollout/zero_variance_frac": counts["equal"] / counts["episodes"],
        "rollout/response_tokens": counts["response_tokens"], "rollout/restarts": counts["restarts"]} | (
        {"rollout/score_100": shares["score_100"]} if "score_100" in shares else {})


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
    if config.algo == "ppo":
        run.critic = new_critic(run)
    if config.resume:
        first = parallel.read_trainer(run.out / "checkpoint")["state"]["iteration"]
        # a critic that RL has not touched yet is new on either side
        critic = (run.critic.model, run.critic.optimizer) if first and run.critic else None
        parallel.load_trainer(run.out / "checkpoint", run.model, run.optimizer, critic)
    if first == 0:
        run.optimizer.state.clear()                          # the cold start's moments are of another objective
    reference = frozen_copy(run, first) if config.kl != "none" else None
    for i in (bar := tqdm(range(first, config.iterations), desc="RL", unit="iteration", initial=first,
                          total=config.iterations, disable=run.ranks.rank > 0)):
        metrics = iteration(run, i, reference)
        run.log({"phase": "rl", "iteration": i} | metrics)
        bar.set_postfix(success=f"{metrics['rollout/success']:.2f}", turns=f"{metrics['rollout/turns']:.1f}")
        run.stop_if_asked({"iteration": i + 1})
        if (i + 1) % config.checkpoint_every == 0:
            run.save({"iteration": i + 1})


def new_critic(run):
    """PPO's critic: the model that RL starts from with a head of zeros, so that its first values are 0."""
    with tempfile.TemporaryDirectory() as folder:
        weights = parallel.full_weights(run.model)
        parallel.on_main(lambda: qwen.save_pretrained(run.model, folder, state=weights))
        folder = parallel.gather(folder)[0]
        model = qwen.load_pretrained(folder, torch.float32, run.ranks.device, value_head=True)
        torch.nn.init.zeros_(model.value_head.weight)        # a judge's classifier may have been there
        torch.nn.init.zeros_(model.value_head.bias)
        parallel.any_rank(True)                              # all have read it before rank 0's folder goes
    model = parallel.shard(model, run.ranks, getattr(torch, run.config.dtype))
    return credit.Critic(model, adam(model))


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
    """Each split once per mode; the headline is one sampled pass: temperature 1 over every game, or the protocol's."""
    config, started, splits = run.config, time.perf_counter(), {}
    modes = {"full": MODES, "sampled": {"sampled": 1.0}}.get(config.protocol, {"sampled": 0.4})
    for name in config.splits:
        tasks, splits[name] = evaluation_tasks(run, name), {}
        for m, (mode, temperature) in enumerate(modes.items()):
            instruction = run.instruction.text if run.instruction and config.correction_at_evaluation else ""
            seats = [rollout.Seat(task, g, stream(config.seed, EVALUATION, m, g), instruction)
                     for g, task in enumerate(tasks)]
            mine = seats[run.ranks.rank::run.ranks.world]
            sampling = run.sampling(temperature=temperature, top_p=config.top_p, top_k=config.top_k)
            with parallel.gathered(run.model):
                episodes = run.play(mine, sampling, f"{name} {mode}", PROTOCOL.get(config.protocol)) if mine else []
            splits[name][mode] = rollout.success_rate(parallel.all_sum(rollout.summary(episodes)))
            if mode == "sampled":
                store_episodes(run, episodes[::max(1, len(episodes) // 12)][:12], {"phase": "evaluation", "split": name})
            run.stop_if_asked(None)
    if run.ranks.rank == 0:
        write_json(run.out / "evaluation.json", {
            **run.origin, "games_hash": {split: run.origin["games_hash"][split] for split in splits}, "splits": splits,
            "seed": config.seed, "protocol": config.protocol, "temperature": modes["sampled"],
            "instruction": instruction if splits else "", "seconds": time.perf_counter() - started})
    return splits


def evaluation_tasks(run, split):
    """Every game of a split once, or, as verl-agent and RLVMR evaluate, 128 drawn with replacement."""
    tasks = run.tasks.split(split)
    return random.Random(run.config.seed).choices(tasks, k=128) if run.config.protocol in PROTOCOL else tasks


def games_of(config):
    """What was played, in words: numbers on generated rooms are not ALFWorld scores."""
    if config.env == "scienceworld":
        return "ScienceWorld" + (f", tasks {config.task_ids}" if config.task_ids else "")
    return f"real ALFWorld games, {config.env} engine" if config.games else "generated rooms"


def store(run, i, episodes, advantages, judged):
    """Every few iterations, one group with what was thought of it, for the report."""
    if i % run.config.episodes_every and i != run.config.iterations - 1:
        return
    of_turn = {(one.episode, one.turn): one for one in judged}
    kept = max({e.group for e in episodes},
               key=lambda g: sum((e.group == g) * max(map(abs, own)) for e, own in zip(episodes, advantages)))
    keep = [k for k, e in enumerate(episodes) if e.group == kept]
    store_episodes(run, [episodes[k] for k in keep], {"phase": "rl", "iteration": i, "split": "train"},
                   [advantages[k] for k in keep],
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
                          "valid": turn.valid, "label": one.label if one else labels[t], "tag": turn.tag,
                          "advantage": advantages[k][t] if advantages else None,
                          "oracle": oracle[t], "verdicts": one.verdicts if one else [],
                          "judge_reward": sum(one.rewards) / len(one.rewards) if one else None})
        append(run.out / "episodes.jsonl", head | {
            "task_id": episode.task.id, "task_type": episode.task.task_type, "group": episode.group,
            "won": episode.won, "score_100": episode.score_100, "restarts": episode.restarts, "turns": turns,
            "final_observation": episode.final_observation})


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
        with contextlib.suppress(OSError):                   # the terminal may be what has gone
            print("\nstopping after this step (again: at once)", file=sys.stderr)

    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, note)
    return asked


def main(argv=None):
    config = parse(argv)
    asked_to_stop = listen()
    torch.set_num_threads(config.threads)
    run = None
    try:
        ranks = parallel.setup(config.device)
        run = prepare(config, ranks, asked_to_stop)
        run.origin = origin_of(config, run.tasks) if ranks.rank == 0 else {}
        run.log({"config": asdict(config), **run.origin, "parameters": sum(p.numel() for p in run.model.parameters()),
                 "started": datetime.now(timezone.utc).isoformat(timespec="seconds")})
        stages = {"cold_start": cold_start.cold_start if config.demonstrations and not config.resume else None,
                  "rl": reinforce if config.iterations else None,
                  "evaluation": evaluation if config.splits else None}
        for name, stage in stages.items():
            if stage:
                run.stage, run.began = name, time.perf_counter()
                result = stage(run)
                if name != "evaluation":
                    run.save({"iteration": config.iterations if name == "rl" else 0})
                run.seconds = run.spent()
        if ranks.rank == 0:
            write_json(run.out / "stages.json", run.seconds)
        for split in config.splits:
            own = result[split]["sampled"]
            parallel.print0(f"{split}: success {own['success']:.1%} [{own['low']:.1%}, {own['high']:.1%}], n {own['n']}")
    except Interrupted as stopped:
        print(stopped, file=sys.stderr)
        return 130
    except (ValueError, OSError, FloatingPointError, EpisodeLost) as error:
        print(f"gcd.py: error: {error}", file=sys.stderr)
        return 1
    finally:
        if run:
            for held in (*run.envs, *([run.endpoint] if run.endpoint else [])):
                held.close()
        parallel.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
