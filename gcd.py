"""Train a language-model agent in a text environment: cold start, RL with a self-judge (GCD), evaluation.

    python gcd.py                                   # everything: small model, generated rooms
    python gcd.py --algo gigpo --no-gcd --out runs/gigpo    # another algorithm, without the judge in RL
    torchrun --nproc-per-node gpu gcd.py --model DIR     # a Qwen2, 2.5, 3 or Llama folder on all GPUs
    python gcd.py --help all                        # every flag, with its meaning and unit

Start reading at `iteration`, one iteration of RL, and continue with the functions that it calls, in the order
below. Each stage writes to --out as it goes: `checkpoint/` (a Hugging Face folder), `metrics.jsonl`,
`episodes.jsonl`, `evaluation.json` and, at the end, `stages.json`; `python -m report` draws them. As a
library: `load` and `train`. Left out: learning-rate schedules other than linear warm-up and decay.
"""

import copy
import itertools
import math
import sys
import threading
import time
from contextlib import ExitStack, chdir, redirect_stderr, redirect_stdout
from datetime import datetime, timezone
from pathlib import Path
from random import Random

from config import MOST_ROUNDS, OF_TRAINING, REFILL_TASKS, WHERE, arguments, parse, parse_or_exit

if __name__ == "__main__":
    parse_or_exit()                    # answers --help and wrong flags, before the imports below load torch

import batching
import correction
import judge
import labels
import update
from agent import load
from algorithms import rewards
from cold_start import cold_start
from envs import EpisodeLost
from envs._terminal import Printed
from evaluation import evaluation
from infra import checkpoint, files, job, memory, parallel, plugins
from infra.errors import EXPECTED, one_line
from infra.progress import progress, timed
from infra.signals import Interrupted, Stop, speaks_for_machine
from infra.streams import CREDIT, JUDGE, ROLLOUT, stream
from lm.optim import trained
from rollout import EpisodeSpec, counts_of, shares_of
from session import begin_adapters, kl_reference, prepare, train_tasks

__all__ = ["load", "train", "main"]

# Largest difference between the sampler's and the trainer's logprobs, in nats, that a float32 run accepts.
# Rounding reached 3e-4, in one of 500,000 tokens of a sharp model (1e-13 in float64); errors reach 0.1 and
# more.
LOGPROB_GAP_LIMIT = 2e-3
FAR = 0.1             # policy/approx_kl_nats (how far an iteration's steps move its policy) from which on
                      # success may collapse
FIRST_STEPS = 5       # iterations in which AdamW's steps may be too large, whatever the gradient
DETAIL_EVERY = 5      # iterations between storing a group's episodes, and between comparing the two gradients


def iteration(run, i, reference):
    """One iteration of RL: play, judge, assign credit, update. Returns its metrics.

    run: a session.Run, with the settings, the model and its sampler, the games and --out. reference: the
    model that the KL compares with, or None.
    """
    config, seconds = run.config, {}
    with timed(seconds, "time/rollout_s"):
        episodes, played = collect(run, i)
    with timed(seconds, "time/judge_s"):
        questions, judge_samples, metrics = judge_turns(run, i, episodes) if config.gcd else ([], [], {})
        if config.correction != "off":
            correction.correct(run, i, questions)            # the instruction of the next iterations
    with timed(seconds, "time/update_s"):
        credited = [*episodes]                      # `assign` may append earlier ones: examples/replay.py
        metrics |= assign_credit(run, i, credited, reference)
        kept = drop_zero_advantage_groups(run, credited)
        samples = [sample for episode in kept for sample in batching.samples_of(episode)]
        samples += judge_samples if config.judge_weight else []      # at lambda 0 the update never sees them
        metrics |= optimize(run, i, samples, reference)
    metrics |= rollout_metrics(run, played) | memory.peaks(run.ranks.device)
    advise(run, i, credited, metrics)
    store(run, i, episodes)
    return metrics | seconds | {f"time/rollout_{name}_s": spent for name, spent in run.waits.items()}


def collect(run, i):
    """Play this rank's episodes of iteration i with the model's weights of now. Returns the episodes to learn
    from, and all that were played; the two differ only with --dynamic-sampling refill.
    """
    run.update_sampler()
    run.waits.clear()
    run.slots.most_tokens = 0                                # of all that is played in this iteration
    if run.config.dynamic_sampling == "refill":
        episodes, played = refilled(run, i)
    else:
        episodes = played = run.play(episode_specs(run, i), run.sampling(), f"iteration {i}")
    run.stop_if_asked({"iteration": i})          # then some are missing; --resume repeats the iteration
    first = run.ranks.rank * (run.config.tasks // run.ranks.world_size) * run.config.group_size
    for k, episode in enumerate(episodes, first):    # only now, since a refill drops some
        episode.index = k              # over all ranks; decides its minibatch, and which turns are judged
    return episodes, played


def refilled(run, i):
    """`collect` with --dynamic-sampling refill, DAPO's dynamic sampling (arXiv:2503.14476): play up to
    MOST_ROUNDS rounds, until this rank has its share of groups with unequal rewards. Returns the episodes of
    these groups (if there are none, the first that were played), and all that were played.
    """
    algorithm, kept, played = run.config.algorithm, [], []
    for refill_round in range(MOST_ROUNDS):
        name = f"refill {refill_round}" if refill_round else f"iteration {i}"
        specs = episode_specs(run, i, refill_round)
        fresh = run.play(specs, run.sampling(), name)
        if run.should_stop:
            break
        played += fresh
        rewards.write_rewards(fresh, algorithm.settings)
        equal = algorithm.zero_variance_groups(fresh)
        kept += [episode for episode in fresh if episode.group not in equal]
        if len(kept) >= len(specs):
            break
    return kept[:len(specs)] or played[:len(specs)], played


def episode_specs(run, i, refill_round=0):
    """This rank's episodes of an iteration: whole groups, each member with a random stream of its own.

    Refill's further rounds have tasks of their own, so that the first ones go on through all tasks.
    """
    config, per_rank = run.config, run.config.tasks // run.ranks.world_size
    first = run.ranks.rank * per_rank
    start = i * config.tasks + refill_round * REFILL_TASKS
    tasks = train_tasks(run.environment, config.train_types, start + first, per_rank)
    return [EpisodeSpec(task, refill_round * config.tasks + first + g,
                        stream(config.seed, ROLLOUT, i, refill_round, first + g, member),
                        instruction=run.instruction)
            for g, task in enumerate(tasks) for member in range(config.group_size)]


def judge_turns(run, i, episodes):
    """GCD: label turns, and ask the model about some. Returns the questions with its answers, samples of
    these for `optimize`, and metrics over all ranks.
    """
    config, seed = run.config, stream(run.config.seed, JUDGE, i)
    candidates = judge_candidates(run, i, episodes, seed)
    chosen = judge.choose(candidates, config.judge_labels, config.judge_turns // 2, seed)
    if not chosen:
        run.warn_once("no turn was judged", judge.why_none(candidates, config.judge_labels))
    questions = judge.questions(run.chat, episodes, chosen, run.environment)
    if config.judge_kind == "value":
        samples = judge.value_samples(questions)
        judge.write_value_verdicts(
            questions, update.value_head_probabilities(run.model, samples, run.objective))
    else:
        ask(run, questions, seed)
        trained = questions      # without gradient, too: the judge weighs less as more questions are settled
        if config.judge_redraw:
            questions = redraw(run, episodes, candidates, chosen, questions, seed)
            trained = [question for question in questions if question.has_gradient]
        samples = judge.samples(trained, config.judge_normalize_std)
    records = sum(parallel.all_gather(judge.verdict_records(questions)), [])
    return questions, samples, judge.metrics(records)


def judge_candidates(run, i, episodes, seed):
    """The turns of all ranks that may be judged in iteration i, see judge.candidates."""
    config, ranks, by_endpoint = run.config, run.ranks, None
    if config.judge_labels in labels.OF_ENDPOINT:
        share = len(range(ranks.rank, config.judge_turns, ranks.world_size))         # of this rank
        own_seed = stream(seed, 2, ranks.rank)                   # 2, and 3 in redraw: see infra/streams.py
        by_endpoint = run.endpoint_labels(episodes, share, own_seed, config.question_room)
        run.stop_if_asked({"iteration": i})      # labels may be missing; --resume repeats the iteration
    own = judge.candidates(episodes, config.judge_labels, config.question_room, run.environment, by_endpoint)
    return sum(parallel.all_gather(own), [])


def ask(run, questions, seed):
    """Let the model answer the questions; answers, rewards and verdicts are written to them."""
    config = run.config
    sampling = run.sampling(max_response_tokens=config.judge_response_tokens)
    judge.answer_questions(run.sampler, run.chat, questions, config.judge_group_size, sampling, seed,
                           judge.ANSWERS_PER_SLOT * config.slots)


def redraw(run, episodes, candidates, chosen, questions, seed):
    """--judge-redraw: ask about other turns in place of those whose answers all earn the same, until none is
    wanted or left, or MOST_ROUNDS rounds were asked. Returns all questions.
    """
    config = run.config
    for k in range(1, MOST_ROUNDS):
        found = parallel.all_sum(sum(question.has_gradient for question in questions))
        pairs = (config.judge_turns - found) // 2                                           # still wanted
        if not (chosen and pairs):
            break
        drawn = {(e, t) for e, t, _ in chosen}
        candidates = [candidate for candidate in candidates if candidate[:2] not in drawn]
        chosen = judge.choose(candidates, config.judge_labels, pairs, stream(seed, 3, k))
        fresh = judge.questions(run.chat, episodes, chosen, run.environment, k * config.judge_turns)
        ask(run, fresh, seed)
        questions = questions + fresh
    return questions


def assign_credit(run, i, episodes, reference):
    """Write what each episode earned; the algorithm writes the turns' advantages. Returns its metrics."""
    config, algorithm = run.config, run.config.algorithm
    algorithm.rng = Random(stream(config.seed, CREDIT, i))
    algorithm.lr_factor = lr_factor(config, i)
    rewards.write_rewards(episodes, algorithm.settings)
    if config.kl == "reward":
        rescored = config.dtype != "float32"
        update.write_kl(run.model, reference, episodes, run.objective, config.kl_coef, rescored)
    metrics = algorithm.assign_checked(episodes)
    if config.kl == "reward":
        algorithm.subtract_kl(episodes)
    return metrics


def drop_zero_advantage_groups(run, episodes):
    """The episodes without the groups in which every advantage is 0; with --dynamic-sampling keep, a KL or an
    entropy bonus all of them.

    Those groups have no gradient; left out, their tokens are not in the loss's divisor, so that the other
    groups weigh more (as in DAPO).
    """
    config = run.config
    if config.dynamic_sampling == "keep" or config.kl != "none" or config.entropy_coef:
        return episodes
    groups = {episode.group for episode in episodes if any_advantage([episode])}
    return [episode for episode in episodes if episode.group in groups]


def any_advantage(episodes):
    """Whether any turn or token has a nonzero advantage."""
    return any(turn.advantage or any(turn.token_advantage or ()) for e in episodes for turn in e.turns)


def lr_factor(config, i):
    """The factor on all learning rates in iteration i: linear warm-up, (i + 1) / (warmup + 1) up to 1, times
    linear decay, 1 - i / iterations (with lr_decay).
    """
    decay = 1 - i / config.iterations if config.lr_decay else 1.0
    return decay * min(1.0, (i + 1) / (config.warmup + 1))


def optimize(run, i, samples, reference):
    """Take an iteration's optimizer steps. Returns the mean of their metrics.

    In a float32 run pi_old is the sampler's policy. In bf16 the sampler's logprobs are some 0.02 nats off, so
    it is the trainer's: the first step takes it from its own forward (logprob_old None: ratio 1), and for
    later steps it is computed here, before the weights change. The gap between sampler and trainer is that of
    the first step, when both have the same weights. ValueError if a float32 run's is larger than rounding.
    """
    config, objective = run.config, run.objective
    first, *later = batching.minibatches(samples, config.minibatches)
    if config.kl == "loss":
        update.write_reference(run.model, reference, samples, objective)
    if config.dtype != "float32":
        update.rescore(run.model, update.with_gradient(itertools.chain(*later), objective), objective)
        for sample in first:
            sample.logprob_sampler, sample.logprob_old = sample.logprob_old, None     # the forward's own
    rate, steps, gap = config.lr * lr_factor(config, i), [], {}
    for minibatch in (first, *later):
        compare = not steps and i % DETAIL_EVERY == 0
        if metrics := update.update(run.model, run.optimizer, minibatch, objective, rate, compare):
            gap = gap or checked_gap(metrics, config.dtype)
            steps.append(metrics)
    if not steps:                    # no rank had a sample: no group has an advantage, no turn was judged
        unknown = ("entropy_nats", "clip_frac", "approx_kl_nats", "grad_norm", "logprob_gap_nats",
                   "logprob_gap_max_nats")
        return {f"policy/{key}": math.nan for key in unknown} | {"policy/steps": 0}
    return update.mean_of(steps) | gap | {"policy/steps": len(steps), "policy/lr": rate}


def checked_gap(metrics, dtype):
    """The gaps in a step's metrics (nan: none). ValueError if a float32 run's is larger than rounding."""
    for kind in update.KINDS:
        largest = metrics[f"{kind}/logprob_gap_max_nats"]
        if dtype == "float32" and largest > LOGPROB_GAP_LIMIT:
            raise ValueError(f"{kind}: sampler and trainer differ by {largest:.2e} nats on equal weights; at "
                             f"most {LOGPROB_GAP_LIMIT:g} is rounding. (An algorithm's assign must leave the "
                             "model and its episodes' tokens and logprobs as they are.)")
    return {key: value for key, value in metrics.items() if "/logprob_gap" in key}


def rollout_metrics(run, episodes):
    """Metrics of all episodes played in an iteration, over all ranks."""
    algorithm = run.config.algorithm
    equal = algorithm.zero_variance_groups(episodes) if algorithm.groups else ()
    used, room = run.slots.usage
    counts = parallel.all_sum(counts_of(episodes) | {
        "reward": sum(e.reward for e in episodes), "equal": sum(e.group in equal for e in episodes),
        "used": used, "room": room})
    shares = shares_of(counts)
    keys = ("success", "turns", "invalid_frac", "repeated_frac", "truncated_frac", "score_100")
    metrics = {f"rollout/{key}": shares[key] for key in keys if key in shares}
    if algorithm.groups:
        metrics["rollout/zero_variance_frac"] = counts["equal"] / counts["episodes"]
    metrics |= {f"rollout/{key}": counts[key] for key in ("episodes", "response_tokens", "restarts")}
    metrics |= {"memory/cache_tokens": counts["used"],
                "memory/cache_used_frac": counts["used"] / counts["room"]}
    return metrics | {"rollout/reward": counts["reward"] / counts["episodes"],
                      "time/game_ms": 1000 * counts["game_s"] / max(counts["turns"], 1)}


def advise(run, i, episodes, metrics):
    """Warn, once of each kind, where a run learns nothing, may forget its cold start, or loses games."""
    config, cut = run.config, metrics["rollout/truncated_frac"] > 0.5
    unequal = metrics.get("rollout/zero_variance_frac", 1) < 1
    may_learn = metrics["rollout/success"] or config.kl != "none" or config.entropy_coef
    idle = (unequal or not may_learn) and not parallel.any_rank(any_advantage(episodes))
    if idle and unequal:
        run.warn_once("not written", f"RL: in iteration {i} no turn has an advantage, although rewards "
                      f"within groups differ: does --algo={config.algo} write each turn.advantage?")
    elif idle:
        ways = {"more --max-response-tokens or --context (most were cut)": cut,
                "more --demonstrations": run.environment.expert,
                "--admissible-only": not (config.admissible_only or run.environment.templates)}
        hints = " or ".join(way for way, applies in ways.items() if applies)
        run.warn_once("no advantage", f"RL: in iteration {i} nothing was won and no turn has an advantage, "
                      "so the policy learns nothing" + f": {hints} may help" * bool(hints))
    elif cut:
        run.warn_once("cut", f"RL: in iteration {i} most episodes had a response or a conversation that was "
                      "too long: more --max-response-tokens or --context may help")
    if metrics.get("judge/unreadable_frac") == 1:
        run.warn_once("unreadable", f"GCD: in iteration {i} no verdict can be read, so the judge learns "
                      "nothing: more --judge-demonstrations may help")
    if lost := metrics["rollout/restarts"]:
        why = next((f": {episode.lost}" for episode in episodes if episode.lost), "")
        run.warn_once("restarts", f"RL: in iteration {i} games were lost, and begun again, {lost} times{why}")
    if (moved := metrics["policy/approx_kl_nats"]) > FAR:
        why = f" or --warmup {FIRST_STEPS}: AdamW's first steps are large, whatever the gradient" * (
            i < FIRST_STEPS and not config.warmup)
        run.warn_once("moved far", f"RL: the steps of iteration {i} began {moved:.2f} nats a token from its "
                      f"policy, in the mean. If success falls, try a lower --lr{why}")


def store(run, i, episodes):
    """Every few iterations, store rank 0's group with the largest advantages for the report; with
    --save-rollouts, all episodes of every iteration, too.
    """
    if run.config.save_rollouts:
        run.save_rollouts(episodes, i)
    if i % DETAIL_EVERY and i != run.config.iterations - 1:
        return
    strength = {group: sum(max(abs(turn.advantage) for turn in episode.turns) for episode in members)
                for group, members in rewards.groups_of(episodes).items()}
    strongest = max(strength, key=strength.get)
    run.store([episode for episode in episodes if episode.group == strongest],
              {"phase": "rl", "iteration": i, "split": "train"}, credited=True)


def reinforcement(run):
    """The RL stage: iterations from 0 or, with --resume, from the checkpoint's."""
    config, algorithm, first = run.config, run.config.algorithm, run.done or 0
    algorithm.begin_checked(run.model, run.objective, config.minibatches, run.shard)
    if first:
        # A copy of what is needed, since a file that stays mapped cannot be removed from an NFS disk.
        algorithm.state |= copy.deepcopy(checkpoint.load_trainer(
            run.out / files.CHECKPOINT, run.model, run.optimizer, algorithm.critic).get("algorithm", {}))
    else:
        run.optimizer.state.clear()                  # the cold start's moments belong to another objective
    if config.lora:
        begin_adapters(run, first)
    reference = kl_reference(run, first) if config.kl != "none" and first < config.iterations else None
    if config.keep_checkpoints and first == 0:
        run.keep(0)
    for i in (bar := progress(range(first, config.iterations), desc="RL", unit="iteration", initial=first,
                          total=config.iterations, disable=run.ranks.rank > 0)):
        run.iteration = i
        metrics = iteration(run, i, reference)
        run.log({"phase": "rl"} | metrics)
        bar.set_postfix(success=f"{metrics['rollout/success']:.2f}", turns=f"{metrics['rollout/turns']:.1f}")
        if config.keep_checkpoints and (i + 1) % config.keep_checkpoints == 0:
            run.keep(i + 1)
        run.stop_if_asked({"iteration": i + 1})
        if (i + 1) % config.checkpoint_every == 0 and i + 1 < config.iterations:   # run_stages saves the last
            run.save({"iteration": i + 1})
    run.iteration = None


def run_stages(run):
    """Run the stages that the flags ask for: cold start, RL, evaluation; a checkpoint after the first two."""
    config = run.config
    run.origin = files.origin_of(config, run.identity["cold_start_types"]) if run.ranks.rank == 0 else {}
    run.stop_if_asked(None)
    run.log({**run.identity, "config": config.settings(), **run.origin,
             "parameters": sum(p.numel() for p in run.model.parameters()),
             "trained_parameters": sum(p.numel() for p in trained(run.model)),
             "started": datetime.now(timezone.utc).isoformat(timespec="seconds")})
    stages = {"cold_start": cold_start if config.demonstrations and run.done is None else None,
              "rl": reinforcement if config.iterations else None,
              "evaluation": evaluation if config.splits else None}
    for name, stage in stages.items():
        if stage:
            run.stage, run.began = name, time.perf_counter()
            result = stage(run)
            if name != "evaluation":
                run.save({"iteration": config.iterations if name == "rl" else 0})
            run.seconds = run.spent()
    if run.ranks.rank == 0:
        files.write_json(run.out / files.STAGES, run.seconds)
    for split in config.splits:
        line = "{success:.1%} [{low:.1%}, {high:.1%}], {games} games, {n} plays".format(
            **result[split]["sampled"])
        parallel.print0(f"{split}: success {line}")


def run_or_stop(run):
    """Run all stages; if the run is asked to stop, save and say what is saved. Returns the exit status."""
    folder = run.out / files.CHECKPOINT
    try:
        run_stages(run)
        return 0
    except Interrupted as stopped:
        state = stopped.state
    except update.NonFinite as error:
        run.save_batch(error.samples)
        raise
    if state is not None:
        run.save(state)
    name = f"{run.config.out}/{files.CHECKPOINT}"
    saved = "nothing to save yet" if not folder.is_dir() else f"{name} holds the model"
    if run.stage == "rl" and state:
        saved += f" after {state['iteration']} of {run.config.iterations} iterations; --resume continues"
    if run.stage == "cold_start" and run.cold_progress:
        saved += f" after {run.cold_progress['steps']} steps of its cold start; --resume continues"
    parallel.print0(f"stopped; {saved}", file=sys.stderr)
    return 130


def run_all(config, resources):
    """Connect, set up, and run all stages. Returns the exit status. resources: the caller's ExitStack."""
    should_stop = Stop()                                     # hears signals while ranks connect, too
    resources.push(job.on_exit)
    with plugins.blamed(EpisodeLost):
        ranks = job.setup(config.device, within=config.shard_within)
        return run_or_stop(prepare(config, ranks, should_stop, resources))


def attempt(config, resources):
    """Set up and run everything. An error is printed as one line, and one rank's error ends all ranks."""
    out = Path(config.out).absolute()                 # a game may change the working directory
    try:
        status = run_all(config, resources)
        if status == 0 and (config.demonstrations or config.iterations):
            parallel.print0(f"{config.out}/{files.CHECKPOINT} holds the model; python -m report {config.out} "
                            "shows its training")
        return status
    except KeyboardInterrupt:
        status = stopped_at_once()
    except EXPECTED as error:
        first = job.failure(error)       # if another rank failed first, this error follows from that
        why = f"{first}, so this one ends" if first else one_line(error, out, known=EpisodeLost)
        if job.is_news(why, first or hasattr(error, "rank")):
            print(f"gcd.py: error: {why}\n", end="", file=sys.stderr)   # one write: ranks share it
        status = 1
    except Exception as error:
        job.on_exit(type(error), error, None)         # before games are closed: the other ranks wait
        raise
    return job.abort(status)


def stopped_at_once():
    """Say so; the exit status."""
    if speaks_for_machine():
        print("stopped at once; what was saved before is there", file=sys.stderr)
    return 130


def train(**settings):
    """The command as a function: train(iterations=2, gcd=False) is `gcd.py --iterations 2 --no-gcd`.

    Starts no process; under torchrun each rank calls it. Returns the trained Agent, on the CPU, which plays
    under the same settings, but at `play`'s temperature. ValueError for wrong settings, before any work;
    KeyboardInterrupt, after saving, if the run was interrupted.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     beginner = train(out=folder, demonstrations=8, iterations=1, tasks=2, gcd=False,
    ...                      judge_demonstrations=0, evaluate="none")
    >>> beginner.model.config.hidden_size
    64
    """
    config = parse(arguments(settings))
    folder = Path(config.out).absolute() / files.CHECKPOINT
    trains = config.demonstrations or config.iterations       # else a model is only evaluated
    if not (trains or config.model or config.resume and folder.is_dir()):
        raise ValueError("--demonstrations=0 with --iterations=0: expected a --model to evaluate")
    with ExitStack() as resources, Stop.restored(), chdir("."):         # back from where a game may have gone
        status = run_all(config, resources)
    if status:                                          # after the block, in which any error ends all ranks
        raise KeyboardInterrupt
    given = {name: value for name, value in settings.items()
             if name not in ("temperature", *WHERE, *OF_TRAINING)}
    return load(folder if folder.is_dir() else config.model, **given)


def main(argv=None):
    """The command. Exit status 0; 1 for an error after the start, 2 for a wrong flag, 130 if interrupted."""
    config = parse_or_exit(argv)
    with redirect_stdout(Printed(sys.stdout)), redirect_stderr(Printed(sys.stderr)):
        try:
            with ExitStack() as resources:
                status = attempt(config, resources)
        except KeyboardInterrupt:                                   # while games were closed
            status = job.abort(stopped_at_once())
        if left := [thread.name for thread in threading.enumerate()
                    if not thread.daemon and thread is not threading.main_thread()]:
            print(f"gcd.py: waits for threads that are no daemons, as a game's may be: {', '.join(left)}",
                  file=sys.stderr)
        return status


if __name__ == "__main__":
    sys.exit(main())
