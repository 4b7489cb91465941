"""A run made ready: the model made or loaded, the environments started; `Run` holds them.

Mistakes of the user surface in `prepare`, before any work. Left out: what a run does (gcd.py, cold_start.py,
evaluation.py), and its flags (config.py).
"""

import math
import secrets
import shutil
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from tqdm import tqdm

import correction
import judge
import rollout
import update
from config import changed
from lm import model as qwen
from lm.chat import TAGS, Chat, is_small
from lm.engine import Sampling
from run import files, parallel
from run.ending import Interrupted
from run.endpoint import Endpoint
from run.memory import check_room


@dataclass(slots=True)
class Run:
    """The model and its optimizer, the chat, the environments, and where to write."""

    config: object                # config.Config
    ranks: parallel.Ranks
    model: torch.nn.Module        # to train
    sampler: torch.nn.Module      # to generate: `parallel.copy_weights` brings it to the model's weights
    optimizer: torch.optim.Optimizer
    chat: Chat
    envs: list
    out: Path
    asked_to_stop: object         # whether it was: see Stop; looked at between steps, and turns
    identity: dict                # what its checkpoint and its metrics share, see `begin`
    done: int | None = None       # iterations that the checkpoint resumed had done; None: not resumed
    endpoint: Endpoint | None = None                       # where one is asked
    instruction: correction.Instruction | None = None      # of prompt-based correction, once there is one
    origin: dict = field(default_factory=dict)             # files.origin_of it, on rank 0
    seconds: dict = field(default_factory=dict)            # {stage: seconds} of those that have ended
    stage: str = ""                                        # the one under way, and when it began
    began: float = 0.0
    iteration: int | None = None                           # of RL, while it is under way
    cold: dict = field(default_factory=dict)               # of a cold start: what its last checkpoint says
    waits: dict = field(default_factory=dict)              # seconds that `play` waited for what, so far

    @property
    def world(self):
        """What is played."""
        return self.config.world

    def log(self, record):
        """Append one object to metrics.jsonl, on disk before anything else happens."""
        if self.ranks.rank == 0:
            now = {} if self.iteration is None else {"iteration": self.iteration}
            files.append(self.out / files.METRICS, record | now)

    def store(self, episodes, head, credited=False):
        """Append episodes to episodes.jsonl, with their labels."""
        for episode in episodes if self.ranks.rank == 0 else ():
            judge.oracle_labels(episode, self.world)
            if all(turn.label is None for turn in episode.turns):
                judge.labels_of(episode, self.config.judge_labels, self.world)
            files.append(self.out / files.EPISODES, head | files.episode_record(episode, credited))

    def save(self, state):
        """Replace the checkpoint in --out."""
        instruction = asdict(self.instruction) if self.instruction else None
        state = state | self.identity | {"instruction": instruction, "settings": self.config.settings(),
                                         "seconds": self.spent()}
        parallel.save_checkpoint(self.out / files.CHECKPOINT, self.model, self.optimizer, state,
                                 qwen.save_pretrained, self.chat.tokenizer.save_pretrained,
                                 self.config.algorithm.critic)

    def keep(self, done):
        """Keep the model as it is after `done` iterations, beside those of other iterations."""
        weights, folder = parallel.full_weights(self.model), self.out / files.KEPT / f"{done:05d}"

        def fill(written):
            qwen.save_pretrained(self.model, written, state=weights)
            self.chat.tokenizer.save_pretrained(written)

        parallel.on_main(lambda: parallel.replace(folder.resolve(), fill))

    def spent(self):
        """Seconds of each stage so far, those before a --resume included."""
        now = self.seconds.get(self.stage, 0.0) + time.perf_counter() - self.began
        return self.seconds | {self.stage: now}

    def sampling(self, **changes):
        """How responses are drawn, by the flags and these changes."""
        return replace(Sampling(self.config.temperature, self.config.max_response_tokens), **changes)

    def objective(self):
        """The flags that `update` needs, by its names for them."""
        config = self.config
        names = ("clip_low", "clip_high", "dual_clip", "reduction", "judge_weight", "judge_grad_cap",
                 "temperature", "max_grad_norm", "microbatch_tokens")
        return update.Objective(**{name: getattr(config, name) for name in names},
                                longest=config.max_turns * config.max_response_tokens,
                                kl_coef=config.kl_coef if config.kl == "loss" else 0.0)

    def shard(self, model, frozen=False):
        """A model over the ranks, by the flags."""
        return sharded(model, self.config, self.ranks, self.chat.small, frozen)

    def play(self, seats, sampling, name, max_turns=None, coaches=None):
        """Play the seats with the sampler's weights, behind a progress bar."""
        config, hidden = self.config, self.ranks.rank > 0
        with tqdm(total=len(seats), desc=name, unit="episode", leave=False, disable=hidden) as bar:
            return rollout.play(self.sampler, self.chat, self.envs, seats, sampling,
                                max_turns or config.max_turns, config.context, config.history,
                                config.on_truncation, lambda episode: bar.update(), self.asked_to_stop,
                                config.admissible_only, self.waits, coaches)

    def step(self, samples, objective, rate, compare=False):
        """One optimizer step; a batch that is not finite is stored before every rank stops."""
        try:
            return update.update(self.model, self.optimizer, samples, objective, rate, compare)
        except update.NonFinite:
            batch = [asdict(replace(sample, turns=[])) for sample in samples]
            torch.save(batch, self.out / f"nonfinite_batch_rank{self.ranks.rank}.pt")
            raise

    def endpoint_labels(self, episodes, n, seed):
        """The large model's labels of at most n turns, counted in the log; None where no label needs it."""
        config = self.config
        if "endpoint" not in config.judge_labels:
            return None
        asked = parallel.together(lambda: judge.endpoint_labels(
            episodes, self.endpoint, n, seed, config.judge_labels, config.label_agreement))
        words = [*asked.values()]
        self.log({"phase": "labels"} | parallel.all_sum({
            "judge/asked": len(words), "judge/asked_good": words.count("good"),
            "judge/asked_unreadable": words.count(None)}))
        self.log_endpoint()
        return asked

    def log_endpoint(self):
        """What came of all questions to the large model so far, over all ranks."""
        if self.endpoint:
            counts = parallel.all_sum(dict(self.endpoint.counts))
            self.log({"phase": "endpoint"} | {f"endpoint/{key}": count for key, count in counts.items()})

    def stop_if_asked(self, state):
        """Where any rank was asked to stop, stop on all: Interrupted, with the state to save (None: none)."""
        if parallel.any_rank(bool(self.asked_to_stop)):
            raise Interrupted(state)


def prepare(config, ranks, asked_to_stop, held):
    """Everything a run needs, made or loaded. held: an ExitStack, which keeps the lock of --out."""
    out, world = Path(config.out), config.world
    if config.tasks % ranks.world:
        raise ValueError(f"--tasks={config.tasks}: not a multiple of the {ranks.world} ranks (whole groups)")
    parallel.on_main(lambda: held.enter_context(files.held(out)) and None)
    train = world.train(config.train_types, 0, 1) if config.demonstrations or config.iterations else []
    tasks = train + [world.split(split)[0] for split in config.splits]        # a task of every kind of work
    endpoint = Endpoint(config.endpoint, config.endpoint_model, config.endpoint_key_variable,
                        config.endpoint_cache, config.endpoint_limit) if config.endpoint else None
    source, state = starting_point(config, out)
    before = state or state_in(source)                            # what the model's own run says of it
    envs, fresh = world.make(config.slots), out / f"fresh{ranks.rank}"
    for held_open in (*envs, *([endpoint] if endpoint else [])):
        held.callback(held_open.close)
    try:
        if source is None:
            small_model_folder(config, fresh)
        parameters = qwen.count_parameters(qwen.ModelConfig.load(source or fresh))
        check_room(parameters, ranks.world, getattr(torch, config.dtype), ranks.device)
        head = True if config.judge_kind == "value" else None
        model = qwen.load_pretrained(source or fresh, torch.float32, ranks.device, head)
        tokenizer = qwen.load_tokenizer(source or fresh)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    if (largest := max(tokenizer.get_vocab().values())) >= model.config.vocab_size:
        raise ValueError(f"{source}/tokenizer.json: has a token {largest}, and config.json a vocab_size of "
                         f"{model.config.vocab_size}")
    if config.context > (longest := model.config.max_position_embeddings):
        raise ValueError(f"--context={config.context}: {source}/config.json allows {longest}")
    chat = chat_of(config, tokenizer)
    if chat.small:
        torch.set_num_threads(1)                              # more are slower with matrices of its size
    if source and chat.small and not state:                   # what is resumed has this run's settings
        check_words(config, source, tokenizer)
    model = sharded(model, config, ranks, chat.small)
    for task in tasks:
        first = rollout.Conversation(rollout.Seat(task, 0, 0), envs[0], chat, config.history).begin()
        rollout.check_room(task, first.prompt, config.max_response_tokens, config.context)
        if config.admissible_only:
            first.restriction()                                   # ValueError where nothing is listed
    kept = source and (config.correction != "off" or not config.iterations)   # RL without correction has none
    instruction = instruction_in(source, before) if kept else None
    identity = parallel.on_main(lambda: begin(config, out, state, before, held))
    sampler = parallel.plain_copy(model, lambda: qwen.Model(model.config), getattr(torch, config.dtype))
    return Run(config, ranks, model, sampler, update.adam(model), chat, envs, out, asked_to_stop, identity,
               state and state["iteration"], endpoint, instruction=instruction,
               seconds=dict(state.get("seconds", {}) if state else {}),
               cold=dict(state.get("cold") or {} if state else {}))


def sharded(model, config, ranks, small, frozen=False):
    """A model over the ranks, in the run's compute dtype, its layers computed again in backward or not."""
    auto = ranks.device.type == "cuda" and not small
    model.recompute_layers({"auto": auto, "on": True, "off": False}[config.checkpoint_activations])
    return parallel.shard(model, ranks, getattr(torch, config.dtype), frozen)


def starting_point(config, out):
    """The folder of the model to start from (None: a fresh one), and the state of a checkpoint resumed, or
    None. With --resume and --overwrite a run goes on where it can, and begins anew where it cannot."""
    found = parallel.find_checkpoint(out / files.CHECKPOINT)
    if config.resume:
        try:
            if found is None:
                raise ValueError(f"--resume: {out / files.CHECKPOINT} holds no checkpoint")
            state = parallel.read_trainer(found)["state"]
            check_state(found / parallel.TRAINER_FILE, state)
            if stranger := parallel.on_main(lambda: not_its_own(config, out, state)):
                raise ValueError(f"--resume: {stranger}")                  # on every rank
            check_resumed(config, state)
            return found, state
        except ValueError as cannot:
            if not config.overwrite:
                raise
            if found:
                parallel.print0(f"{cannot}; so it begins anew", file=sys.stderr)
    if not config.overwrite and parallel.on_main(lambda: files.holds_run(out)):
        raise ValueError(f"--out={out}: holds a run; --resume goes on with it, --overwrite sets it aside and "
                         "begins anew")
    return Path(config.model) if config.model else None, None


def begin(config, out, state, before, held):
    """On rank 0, before the first line is written: what --out holds goes on, or is set aside under another
    name. Returns the run's identity: a name of its own, the hash of the weights that it began with, and the
    task types of the cold start behind it (None: there was none, or nobody knows). before: the state of the
    run that the model is of."""
    if state:
        files.go_on(out, state["iteration"] or 0, (state.get("cold") or {}).get("steps", math.inf))
        return {key: state.get(key) for key in ("run", "start", "cold_start_types")}
    start = qwen.weights_hash(config.model) if config.model else None
    if files.holds_run(out):
        aside = files.set_aside(out)
        print(f"the run that {out} held is now {aside}", file=sys.stderr)
        held.enter_context(files.held(out))
    types = config.cold_start_types if config.demonstrations else before.get("cold_start_types")
    return {"run": secrets.token_hex(8), "start": start, "cold_start_types": types}


def not_its_own(config, out, state):
    """What is not of the run that a checkpoint is of: the metrics beside it, or the --model given; or ""."""
    first = next((line for line in files.read_lines(out / files.METRICS)[0] if isinstance(line, dict)), {})
    if (logged := first.get("run")) != (saved := state.get("run")):
        return f"{out / files.METRICS} is of run {logged}, the checkpoint of run {saved}"
    there = state.get("start") and config.model and Path(config.model).is_dir()
    if there and state["start"] != qwen.weights_hash(config.model):
        return f"{out} began with other weights than --model={config.model} holds"
    return ""


def check_state(path, state):
    """ValueError unless what a run puts into a checkpoint is of the types that it puts there."""
    kinds = {"iteration": int | None, "settings": dict, "seconds": dict, "instruction": dict | None}
    for name, kind in kinds.items():
        if name not in state or not isinstance(state[name], kind):
            raise ValueError(f"{path}: not a run's: its {name} is {state.get(name)!r:.60}")
    cold = state.get("cold")
    if cold and not (isinstance(cold, dict) and "muon" in cold and
                     all(isinstance(cold.get(name), int) for name in ("rounds", "steps"))):
        raise ValueError(f"{path}: not a run's: its cold is {cold!r:.60}")


def check_resumed(config, state):
    """ValueError unless a checkpoint's RL can go on as these flags say. How it is evaluated may differ."""
    done = state["iteration"]
    if done is None and not state.get("cold"):
        raise ValueError(f"--resume: {config.out} stopped in its cold start, before practice; --overwrite "
                         "begins it anew")
    done = done or 0
    if 0 < config.iterations < done:
        raise ValueError(f"--iterations={config.iterations}: --resume finds {done} done in {config.out}")
    apart = ["protocol", "correction_at_evaluation"]
    if not (config.lr_decay and 0 < done < config.iterations):       # a decay is over as many as at its start
        apart.append("iterations")
    if other := changed(state.get("settings", {}), config, apart):
        differences = "; ".join(f"{name} was {then}, is {now}" for name, (then, now) in other.items())
        raise ValueError(f"--resume: {config.out} was made with other settings: {differences}")


def state_in(source):
    """The run's state that lies beside a model; {} where none does."""
    here = source and (source / parallel.TRAINER_FILE).is_file()
    return parallel.read_trainer(source)["state"] if here else {}


def instruction_in(source, state):
    """The instruction that a checkpoint's model was last given, if it was trained with correction."""
    try:
        return correction.Instruction(**state["instruction"]) if state.get("instruction") else None
    except TypeError as error:
        raise ValueError(f"{source / parallel.TRAINER_FILE}: its instruction is none: {error}") from None


def small_model_folder(config, folder):
    """Write the small default model, fresh; each phrase of the world and the methods is one of its tokens."""
    folder.mkdir(exist_ok=True)
    words = [*config.world.words(), judge.QUESTION["plain"], *judge.ANSWERS]
    if config.prompt == "tags" or config.algorithm.tags:
        words += [f"<{tag}>" for tag in TAGS]
    words += correction.instruction_phrases() if config.instructions else []
    vocabulary = qwen.save_small_tokenizer(words, folder)
    model = qwen.Model(qwen.ModelConfig(
        vocab_size=len(vocabulary), hidden_size=config.hidden_size, intermediate_size=3 * config.hidden_size,
        num_hidden_layers=config.layers, num_attention_heads=4, num_key_value_heads=4,
        head_dim=config.hidden_size // 2, max_position_embeddings=max(config.context, 1024),
        tie_word_embeddings=True, rope=config.positions == "rotary"))
    qwen.init_weights(model, config.seed)
    qwen.relate_names(model, vocabulary)
    qwen.begin_to_copy(model)
    qwen.save_pretrained(model, folder)


def chat_of(config, tokenizer):
    """The chat, in the style of --prompt; "auto": RLVMR's tags where they are rewarded, else as the model is.

    A small model has tags if its cold start had. ValueError for flags that ask for words that it has not.
    """
    small, style = is_small(tokenizer), config.prompt
    knows_tags = small and len(tokenizer.encode(f"<{TAGS[0]}>")) == 1
    if style == "auto":
        style = "tags" if config.algorithm.tags or knows_tags else "plain" if small else "think"
    if style == "plain" and not small:
        raise ValueError("--prompt=plain: the small model's style; expected think or tags")
    if style == "tags" and small and not knows_tags:
        raise ValueError(f"--prompt={config.prompt} --algo={config.algo}: this model's cold start had no "
                         "tags, so it knows none (--prompt tags there)")
    chat = Chat(tokenizer, style, config.show_admissible, config.world.nothing)
    if config.thoughts == "endpoint" and not chat.writes:
        raise ValueError(f"--thoughts=endpoint: prompts of style {style} hold no thoughts here")
    if config.correction != "off" and not chat.writes:
        if len(chat.encode(correction.instruction_phrases()[0])) > 1:
            raise ValueError(f"--correction={config.correction}: this model's cold start had no "
                             "--instructions, so it knows none")
        if config.correction_from == "critiques":
            raise ValueError("--correction-from=critiques: this model writes no sentences; it can be counted")
    return chat


def check_words(config, source, tokenizer):
    """ValueError where a small model's tokens are the words of another world than it is to play. That it was
    trained in this one is known by its checkpoint: ScienceWorld plays games to tell its words."""
    state = parallel.read_trainer(source)["state"] if (source / parallel.TRAINER_FILE).is_file() else {}
    if (state.get("settings") or {}).get("env") == config.env:
        return
    words = config.world.words()
    strange = [word for word in words if len(tokenizer.encode(word)) > 1]
    if len(strange) > len(words) / 20:                        # real games' are of some, by the seed
        raise ValueError(f"--model={source}: has the vocabulary of another world: {strange[0]!r}, of --env "
                         f"{config.env}, is none of its tokens")


def frozen_copy(run, first):
    """The KL's reference: the model as RL found it, kept in --out so that --resume has the same."""
    folder = run.out / "reference"
    if first == 0:
        weights = parallel.full_weights(run.model)
        folder.mkdir(exist_ok=True)
        parallel.on_main(lambda: qwen.save_pretrained(run.model, folder, state=weights))
    here = run.ranks.rank == 0              # other machines may lack the folder; `shard` sends the weights
    model = qwen.load_pretrained(folder) if here else qwen.Model(run.model.config)
    model = run.shard(model, frozen=True)
    parallel.put_away(model)
    return model
