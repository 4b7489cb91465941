"""A run and how it is set up: the model is loaded, games are started, the checkpoint is checked.

The user's mistakes surface in `prepare`, before any work. Left out: what a run does (gcd.py, cold_start.py,
evaluation.py), its flags (config.py), and its model (models.py).
"""

import os
import random
import socket
import sys
import time
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch

import envs
import judge
import labels
import models
import resume
import rollout
import update
from config import DAGGER_ROUND, MOST_ROUNDS, PROTOCOLS, REFILL_TASKS
from envs import _checks
from infra import checkpoint, files, job, parallel, plugins, sinks
from infra.endpoint import Endpoint
from infra.errors import reported
from infra.flags import flag_of
from infra.progress import progress
from infra.signals import Interrupted
from infra.streams import LORA, generator
from lm import lora
from lm import model as decoder
from lm.chat import Chat
from lm.engine import Sampling, Slots
from lm.optim import adamw


@dataclass(slots=True)
class Run:
    """A run: model, optimizer, chat, games, and the folder that it writes to."""

    config: object                # config.Config
    ranks: job.Ranks
    model: torch.nn.Module        # to train
    sampler: torch.nn.Module      # to generate: the model itself or, if it is sharded, an unsharded copy that
                                  # `update_sampler` fills
    optimizer: torch.optim.Optimizer
    objective: update.Objective   # the loss by the flags
    chat: Chat
    games: list                   # one per slot: what `rollout.play` plays in
    out: Path                     # absolute: a game may change the working directory
    should_stop: object           # true once the run was asked to stop: see signals.Stop
    identity: dict                # what its checkpoint and metrics share: see resume.begin
    # RL iterations that the resumed checkpoint has done (0: only its cold start); None: none is resumed, or
    # its cold start has not ended
    done: int | None = None
    endpoint: Endpoint | None = None                       # the large model's server, if any
    sink: object = None           # what --log sends metrics to: sink(metrics, iteration); rank 0 only
    instruction: str = ""         # of prompt-based correction: precedes the first observation
    origin: dict = field(default_factory=dict)             # see files.origin_of; rank 0 only
    seconds: dict = field(default_factory=dict)            # {stage: seconds} of ended stages
    stage: str = ""                                        # the current stage, and when it began
    began: float = 0.0
    iteration: int | None = None                           # of RL, during RL
    cold_progress: dict = field(default_factory=dict)      # the cold start's, in the last checkpoint
    slots: Slots | None = None                             # the sampler's cache, one row per game
    waits: dict = field(default_factory=dict)              # seconds spent waiting in `play`, by cause
    warned: set = field(default_factory=set)               # kinds of warnings given
    base: object = None           # folder of the model that the adapters belong to, with --save-adapter

    @property
    def environment(self):
        """The environment that is played."""
        return self.config.environment

    def log(self, record):
        """Append a record to metrics.jsonl (rank 0), synced to the disk; in RL with the iteration, and then
        its "group/name" numbers go to the log that --log names, too.
        """
        if self.ranks.rank == 0:
            now = {} if self.iteration is None else {"iteration": self.iteration}
            files.append(self.out / files.METRICS, record | now)
            if self.sink and now:
                self.sink({name: number for name, number in record.items()
                           if "/" in name and number == number}, self.iteration)         # no NaN

    def store(self, episodes, head, credited=False):
        """Label episodes that have no labels and append them to episodes.jsonl (rank 0).

        head: entries that precede each episode's. credited: with their advantages.
        """
        for episode in episodes if self.ranks.rank == 0 else ():
            labels.oracle_labels(episode, self.environment)
            if all(turn.label is None for turn in episode.turns):
                labels.label_turns(episode, self.config.judge_labels, self.environment)
            files.append(self.out / files.EPISODES, head | files.episode_record(episode, credited))

    def save_rollouts(self, episodes, i):
        """Write all ranks' episodes of iteration i to OUT/rollouts."""
        records = sum(parallel.all_gather([files.rollout_record(episode) for episode in episodes]), [])
        if self.ranks.rank == 0:
            files.write_lines(self.out / files.ROLLOUTS / f"{i:05d}.jsonl", records)

    def save(self, state):
        """Replace the checkpoint in OUT. state: progress, in addition to the run's identity and settings."""
        state = state | self.played_as() | {
            "seconds": self.spent(), "place": resume.place_of(self.ranks),
            "algorithm": self.config.algorithm.state,
            "unmerged": models.unmerged(dict(self.model.named_parameters()))}
        if self.config.save_adapter:                    # first: the checkpoint of a finished run is the last
            adapters = parallel.full_weights(self.model, "lora_")
            checkpoint.replace((self.out / files.ADAPTER).resolve(), lambda new: parallel.on_rank0(
                lambda: lora.save(adapters, new, self.base)))
        checkpoint.save_checkpoint(self.out / files.CHECKPOINT, self.model, self.optimizer, state,
                                   models.save_merged, self.chat.tokenizer.save_pretrained,
                                   self.config.algorithm.critic)

    def played_as(self):
        """The run's identity, and how it prompts its model: what is stored beside a model."""
        return self.identity | {"instruction": self.instruction, "settings": self.config.settings(),
                                "style": self.chat.style}

    def keep(self, done):
        """Save the model after `done` iterations in OUT/kept, next to earlier ones."""
        def fill(new):
            models.save_merged(self.model, new)
            parallel.on_rank0(lambda: save_beside(new))

        def save_beside(new):
            self.chat.tokenizer.save_pretrained(new)
            files.write_json(new / files.STATE, self.played_as())

        checkpoint.replace((self.out / files.KEPT / f"{done:05d}").resolve(), fill)

    def update_sampler(self):
        """Give the sampler the model's weights. All ranks call it."""
        parallel.copy_weights(self.model, self.sampler)

    def spent(self):
        """{stage: seconds} so far, including those before a --resume."""
        now = self.seconds.get(self.stage, 0.0) + time.perf_counter() - self.began
        return self.seconds | {self.stage: now}

    def sampling(self, **changes):
        """lm.engine.Sampling by the flags, with these changes."""
        return replace(Sampling(self.config.temperature, self.config.max_response_tokens), **changes)

    def shard(self, model, frozen=False):
        """Shard a model over the ranks, by the flags."""
        return models.sharded(model, self.config, self.ranks, self.chat.small, frozen)

    def play(self, specs, sampling, name, max_turns=None, overrides=None):
        """Play episodes with the sampler's weights and a progress bar; see `rollout.play`."""
        config = self.config
        with progress(total=len(specs), desc=name, unit="episode", leave=False,
                      disable=self.ranks.rank > 0) as bar:
            return rollout.play(self.sampler, self.chat, self.games, specs, sampling,
                                max_turns or config.max_turns, config.context, history=config.history,
                                on_truncation=config.on_truncation, on_end=lambda episode: bar.update(),
                                should_stop=self.should_stop, admissible_only=config.admissible_only,
                                waits=self.waits, overrides=overrides, slots=self.slots)

    def save_batch(self, samples):
        """Store samples whose loss or gradient was not finite, for inspection."""
        batch = [asdict(replace(sample, turns=[])) for sample in samples]
        with suppress(OSError, RuntimeError):                # the error that it explains says more
            torch.save(batch, self.out / f"nonfinite_batch_rank{self.ranks.rank}.pt")

    def warn_once(self, kind, message):
        """Print a warning on rank 0, once for each kind of warning."""
        if kind not in self.warned:
            self.warned.add(kind)
            parallel.print0(message, file=sys.stderr)

    def endpoint_labels(self, episodes, n, seed, max_tokens):
        """Ask the large model to label at most n turns; see judge.endpoint_labels. Logs the counts."""
        config = self.config
        given = parallel.collective(lambda: judge.endpoint_labels(
            episodes, self.endpoint, n, seed, config.judge_labels, max_tokens))
        values = [*given.values()]
        self.log({"phase": "labels"} | parallel.all_sum({
            "judge/asked": len(values), "judge/asked_good": values.count("good"),
            "judge/asked_unreadable": values.count(None)}))
        self.log_endpoint()
        return given

    def log_endpoint(self):
        """Log the large model's request counts so far, over all ranks."""
        if self.endpoint:
            counts = parallel.all_sum(dict(self.endpoint.counts))
            self.log({"phase": "endpoint"} | {f"endpoint/{key}": count for key, count in counts.items()})

    def stop_if_asked(self, state):
        """Raise Interrupted, with the state to save or None, on every rank if any was asked to stop."""
        if parallel.any_rank(self.should_stop):
            raise Interrupted(state)


def check_tasks(config, world_size):
    """ValueError, which says what to set, unless the iterations' tasks can be shared by so many ranks."""
    tasks, size = config.tasks, config.group_size
    if not (config.iterations and tasks % world_size):
        return
    wrong = "fewer than" if tasks < world_size else "not a multiple of"
    more = -(-tasks // world_size) * world_size
    fewer = max(n for n in range(1, tasks + 1) if tasks % n == 0 and n < world_size)
    smaller, rest = divmod(tasks * size, more)
    same = f" --group-size {smaller}, for as many episodes" if smaller > 1 and not rest else ""
    raise ValueError(f"--tasks={tasks}: {wrong} the {world_size} ranks, each of which plays whole groups: "
                     f"--tasks {more}{same}; or start {fewer} ranks (torchrun --nnodes times "
                     "--nproc-per-node)")


def train_tasks(environment, types, start, n):
    """Environment.train_tasks. PluginError if it returns anything but n Tasks."""
    tasks = environment.train_tasks(types, start, n)
    plugins.refuse(_checks.wrong_tasks(tasks, n), environment, f"train_tasks({types!r}, {start}, {n})")
    return tasks


def split_tasks(environment, name):
    """Environment.split_tasks. PluginError unless it returns Tasks, one at least, each with its own id."""
    tasks = environment.split_tasks(name)
    wrong = _checks.wrong_tasks(tasks) or _checks.repeated_id(tasks)
    plugins.refuse(wrong, environment, f"split_tasks({name!r})")
    return tasks


def drawn_tasks(config, split):
    """The tasks to play in a split: all, --evaluate-tasks of them, or the protocol's, which may repeat."""
    tasks, n = split_tasks(config.environment, split), config.evaluate_tasks
    if draws := PROTOCOLS[config.protocol].draws:
        return random.Random(config.seed).choices(tasks, k=draws)
    return random.Random(0).sample(tasks, n) if 0 < n < len(tasks) else tasks


def episodes_at_once(config, ranks):
    """The most episodes that a rank plays at once: --slots, or fewer if neither an iteration (even with
    --iterations 0) nor a DAgger round nor a split has as many.
    """
    in_training = config.tasks * config.group_size, min(config.dagger, DAGGER_ROUND)
    return min(config.slots, -(-max(*in_training, most_evaluated(config)) // ranks.world_size))


def most_evaluated(config):
    """The most episodes that a split has in one mode."""
    plays = PROTOCOLS[config.protocol].plays
    return max((plays * len(drawn_tasks(config, split)) for split in config.splits), default=0)


def make_games(environment, n, resources):
    """Environment.make; `resources` close the games. PluginError if it returns anything but n Games."""
    games = environment.make(n)
    wrong = _checks.wrong_games(games, n) or plugins.wrong_calls(games[0], envs.GAME)
    plugins.refuse(wrong, environment, f"make({n})")
    for game in games:
        resources.callback(reported(game.close, "a game's close"))
    return games


def check_first_prompts(config, tasks, game, chat, instruction):
    """ValueError if a task's first prompt leaves no room, or lists no command where one is needed."""
    for task in tasks:
        first = rollout.Conversation(rollout.EpisodeSpec(task, 0, 0, instruction=instruction), game, chat,
                                     config.history)
        while not first.started:
            try:
                first.start()
            except envs.EpisodeLost as loss:
                first = rollout.restarted(first, loss)
        rollout.check_first_prompt(task, first.prompt, config.max_response_tokens, config.context)
        if config.admissible_only:
            first.restriction()


def prepare(config, ranks, should_stop, resources):
    """Set up a run: everything is made, loaded and checked before anything is trained or overwritten.

    Flags and files are checked first, quick checks before slow ones; the first game is started last.

    resources: an ExitStack that holds what the run opens, and the lock of OUT. ValueError for settings that
    cannot work together with the model, the environment or what OUT holds. All ranks call this.
    """
    out, environment = Path(config.out), config.environment
    check_command(config)
    check_tasks(config, ranks.world_size)
    parallel.on_rank0(lambda: resources.enter_context(files.locked(out)) and None)
    holder = parallel.on_rank0(lambda: files.lock_text(out))
    parallel.collective(lambda: files.check_shared(out, holder))
    parallel.on_rank0(lambda: files.remove_leftovers(out))
    environment.versions()                                        # ValueError if a package is missing
    endpoint = Endpoint(config.endpoint, config.endpoint_model, config.endpoint_key_variable,
                        config.endpoint_cache, config.endpoint_limit,
                        should_stop=should_stop) if config.endpoint else None
    if endpoint:
        resources.callback(endpoint.close)
    source, state = resume.starting_point(config, out, ranks)
    previous = state or resume.state_beside(source)               # of the run that trained the model, if any
    keeps = source and (config.correction != "off" or not config.iterations)  # else RL has none
    instruction = resume.instruction_of(source, previous, config.env) if keeps else ""
    if config.correction != "off" and 0 < config.iterations < config.correction_every and not (
            instruction or state):
        raise ValueError(f"--correction-every={config.correction_every}: above --iterations="
                         f"{config.iterations}, so no instruction is made")
    chat = models.open_chat(config, source, ranks) if source else None
    trains = config.demonstrations or config.iterations
    tasks = train_tasks(environment, config.train_types, 0, 1) if trains else []
    if config.iterations:                            # the last one of RL, too: the sequence must not end
        last = config.iterations * config.tasks - 1
        if config.dynamic_sampling == "refill":
            last += (MOST_ROUNDS - 1) * REFILL_TASKS
        train_tasks(environment, config.train_types, last, 1)
    if config.demonstrations and config.cold_start_types != config.train_types:
        tasks = [*tasks, *train_tasks(environment, config.cold_start_types, 0, 1)]
    tasks = [*tasks, *(split_tasks(environment, split)[0] for split in config.splits)]  # one of every kind
    check_copies(config, source, tasks)
    with nullcontext(source) if source else models.fresh_folder(config, out) as folder:
        chat = chat or models.open_chat(config, folder, ranks)
        resources.enter_context(models.threads_for(chat))
        models.check_verdict(config, chat)
        model = models.load_model(config, folder, ranks, chat.small, state)
    if config.device == "auto" and ranks.device.type == "cpu":
        parallel.print0(f"--device=auto: torch {torch.__version__} sees no CUDA device; this runs on the CPU",
                        file=sys.stderr)
    if source:
        models.check_vocabulary(config, source, previous, chat.tokenizer)      # may read hundreds of games
    here = os.getcwd()
    games = make_games(environment, episodes_at_once(config, ranks), resources)
    check_first_prompts(config, tasks, games[0], chat, instruction)
    if config.dagger:
        rollout.OnlineExpert(environment, rollout.EpisodeSpec(tasks[0], 0, 0)).begin()
    os.chdir(here)                                                # a game may have changed it
    if warning := models.context_warning(config, chat, model.config.max_position_embeddings):
        parallel.print0(warning, file=sys.stderr)
    dtype = getattr(torch, config.dtype)
    sampler = parallel.unsharded_copy(
        model, lambda: models.choose_trained(decoder.Model(model.config), config), dtype)
    if sampler is not model:
        sampler.fuse()
    slots = Slots(sampler, len(games), config.context, chat.stop_ids,
                  Sampling(config.temperature, config.max_response_tokens))
    identity = parallel.on_rank0(lambda: resume.begin(config, out, state, previous, resources))
    sink = sinks.opened(config.log, out.absolute(), identity["run"], config.settings(), state, resources)
    return Run(config, ranks, model, sampler, adamw(model), objective_of(config), chat, games, out.absolute(),
               should_stop, identity, state and state["iteration"], endpoint, sink, instruction, slots=slots,
               seconds=dict(state.get("seconds", {}) if state else {}),
               cold_progress=dict(state.get("cold") or {} if state else {}),
               base=config.model and Path(config.model).resolve())


def rank_name():
    """This rank, for messages."""
    return f"rank {parallel.rank_and_size()[0]} on {socket.gethostname()}"


def check_command(config):
    """ValueError, naming a flag and two ranks, unless all ranks have the same settings, but for where files
    lie: on one of several machines the job's script may be an older one.
    """
    settings = config.settings()
    for name in ("out", "model", *config.environment.sources):
        settings.pop(name, None)
    if found := first_difference(settings):
        name, (first, ours), (other, theirs) = found
        raise ValueError(f"{flag_of(name)}: {ours} for {first}, {theirs} for {other}; every rank needs the "
                         "same command")


def check_copies(config, source, tasks):
    """ValueError, naming the machines, unless all ranks see the same --model, plug-ins and games: each reads
    its own rows of the weights, so that of differing copies it would train a mixture.

    source: the model's folder, or None. tasks: some tasks, whose games are compared by content.
    """
    names = ("*.safetensors", "*.json") if source and parallel.is_distributed() else ()
    paths = sorted(path for name in names for path in source.glob(name))
    mine = {f"--model={config.model}": [(path.name, checkpoint.fingerprint(path)) for path in paths],
            "the code: its commit": files.commit(),
            f"--env={config.env}: its games": config.environment.tasks_hash(tasks)} | {
        f"--{flag}={getattr(config, flag)}": digest for flag, digest in resume.plugin_hashes(config).items()}
    if found := first_difference(mine):
        what, (first, _), (other, _) = found
        raise ValueError(f"{what}: not the same for {other} as for {first}; every rank needs equal files")


def first_difference(mine):
    """A key of the dict `mine` whose values differ between ranks, with (rank's name, value) of rank 0 and of
    a rank that differs; None if all agree.
    """
    (first, ours), *others = parallel.all_gather((rank_name(), mine))
    return next(((key, (first, ours.get(key)), (other, theirs.get(key))) for other, theirs in others
                 for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)), None)


def objective_of(config):
    """update.Objective by the flags."""
    names = ("sampler_cap", "clip_low", "clip_high", "dual_clip", "entropy_coef", "reduction", "judge_weight",
             "temperature", "max_grad_norm", "microbatch_tokens")
    return update.Objective(config.algorithm.loss, config.algorithm.ratio,
                            **{name: getattr(config, name) for name in names},
                            longest=config.max_turns * config.max_response_tokens,
                            value_judge=config.judge_kind == "value",
                            kl_coef=config.kl_coef if config.kl == "loss" else 0.0)


def begin_adapters(run, first):
    """Merge the cold start's adapters when RL begins, at iteration 0: RL's first model is that without its
    own adapters. With --save-adapter it is saved in OUT/reference.
    """
    if first == 0:
        lora.merge(run.model, generator(run.config.seed, LORA, 1))
    if run.config.save_adapter:
        run.base = save_reference(run).resolve()


def save_reference(run):
    """Save the model without its adapters in OUT/reference, and return the folder."""
    folder = run.out / files.REFERENCE
    frozen = [pair for pair in run.model.named_parameters() if "lora_" not in pair[0]]
    checkpoint.replace(folder.resolve(), lambda new: decoder.save_pretrained(run.model, new, frozen))
    return folder


def kl_reference(run, first):
    """The model that --kl compares with: RL's first one, frozen. With --lora it is the run's own without its
    adapters (see update.write_reference); else a copy, which OUT/reference holds for --resume.

    first: the iteration with which RL begins here; from 1 on the copy is read from there.
    """
    if run.config.lora:
        return run.model
    folder = save_reference(run) if first == 0 else run.out / files.REFERENCE
    model = run.shard(decoder.open_pretrained(folder), frozen=True)
    parallel.collective(lambda: decoder.load_weights(model, folder))
    parallel.offload(model)
    return model
