"""Cold start → RL with a self-judge (GCD) → evaluation, of a language-model agent in a text world.

    python gcd.py                                   # everything, small model, generated rooms, CPU
    python gcd.py --algo gigpo --no-gcd             # another algorithm, without the judge
    torchrun --nproc-per-node 8 gcd.py --model DIR  # a Hugging Face Qwen2, 2.5 or 3 folder on eight GPUs
    python gcd.py --help                            # every flag, with its meaning and unit

Read `iteration`, one training step in named calls; then what it calls, from here down. Each stage writes to
--out as it goes: `checkpoint/` (a Hugging Face folder), `metrics.jsonl`, `episodes.jsonl`, `evaluation.json`
and, at the end, `stages.json`; `python -m report` draws them. Left out: other optimizers, schedules, loggers.
"""

import math
import sys
import time
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from datetime import datetime, timezone

from tqdm import tqdm

import correction
import judge
import update
from algorithms import rewards
from cold_start import cold_start
from config import parse
from evaluation import evaluation
from rollout import Seat, success_rate, summary
from run import files, parallel
from run.ending import MISTAKES, Interrupted, Stop, Unbreakable, one_line
from run.parallel import stream
from run.setup import frozen_copy, prepare

# What a random stream is for: the second number of its name (cold_start.py has 2 to 4 and 9, evaluation.py 8)
ROLLOUT, JUDGE = 5, 6
# Nats between sampler and trainer that stop a float32 run. Rounding came to 3e-4, in one of 500,000 tokens of
# a sharp model (1e-13 in float64), an error to 0.1 and more.
LOGPROB_GAP_LIMIT = 2e-3
LOOK_EVERY = 5        # iterations between what is dear: a group's episodes stored, the two gradients compared


def iteration(run, i, reference):
    """One iteration: play, judge, give credit, update. Returns its metrics."""
    config, times = run.config, [time.perf_counter()]
    parallel.copy_weights(run.model, run.sampler)
    run.waits.clear()
    episodes, played = collect(run, i)
    times.append(time.perf_counter())
    judged, questions = judge_turns(run, i, episodes) if config.gcd else ([], [])
    correction.correct(run, i, judged)
    times.append(time.perf_counter())
    metrics = judge_metrics(run, judged, questions) if config.gcd else {}
    metrics |= give_credit(run, i, episodes, reference)
    samples = [sample for episode in teaching(run, episodes) for sample in update.samples_of(episode)]
    samples += questions if config.judge_weight else []      # at 0 the update never sees the judge
    metrics |= train(run, i, samples, reference)
    times.append(time.perf_counter())
    store(run, i, episodes)
    names = ("time/rollout_s", "time/judge_s", "time/update_s")
    seconds = {name: end - start for name, start, end in zip(names, times, times[1:])}
    seconds |= {f"time/rollout_{name}_s": spent for name, spent in run.waits.items()}
    return metrics | rollout_metrics(run, played) | seconds


def collect(run, i):
    """This rank's episodes of an iteration: those to learn from, and all that were played.

    They differ with --dynamic-sampling refill: groups whose rewards differ, of up to 4 rounds, until there
    are enough (each rank fills its own share).
    """
    config, kept, played = run.config, [], []
    wanted = config.tasks // run.ranks.world * config.group_size
    for round in range(4 if config.dynamic_sampling == "refill" else 1):
        name = f"refill {round}" if round else f"iteration {i}"
        fresh = run.play(seats_of(run, i, round), run.sampling(), name)
        if run.asked_to_stop:                    # then these are not all; the iteration will be begun again
            break
        rewards.write_rewards(fresh, config.algorithm.settings)
        played += fresh
        equal = config.algorithm.without_spread(fresh)
        kept += [episode for episode in fresh if episode.group not in equal]
        if len(kept) >= wanted:
            break
    run.stop_if_asked({"iteration": i})
    episodes = (kept[:wanted] or played[:wanted]) if config.dynamic_sampling == "refill" else played
    for k, episode in enumerate(episodes):
        episode.index = run.ranks.rank * wanted + k
    return episodes, played


def seats_of(run, i, round):
    """This rank's episodes of an iteration: whole groups, every member on a random stream of its own."""
    config, per_rank = run.config, run.config.tasks // run.ranks.world
    first = run.ranks.rank * per_rank
    start = (i * 4 + round if config.dynamic_sampling == "refill" else i) * config.tasks
    instruction = run.instruction.text if run.instruction else ""
    tasks = run.world.train(config.train_types, start + first, per_rank)
    return [Seat(task, round * config.tasks + first + g,
                 stream(config.seed, ROLLOUT, i, round, first + g, member), instruction=instruction)
            for g, task in enumerate(tasks) for member in range(config.group_size)]


def judge_turns(run, i, episodes):
    """GCD: turns → labels → questions → answers. Returns the judged turns, and their samples for `train`."""
    config, ranks, seed = run.config, run.ranks, stream(run.config.seed, JUDGE, i)
    asked = run.endpoint_labels(episodes, config.judge_turns // ranks.world, stream(seed, 2, ranks.rank))
    places = parallel.gather(judge.candidates(episodes, config.judge_labels, config.question_room, run.world,
                                              asked, config.label_agreement))
    chosen = judge.choose(sum(places, []), config.judge_labels, config.judge_turns // 2, seed)
    judged = judge.questions(run.chat, episodes, chosen, run.world)
    if config.judge_kind == "value":
        return judged, judge.value_samples(judged)
    sampling = run.sampling(max_response_tokens=config.judge_response_tokens)
    judge.judge(run.sampler, run.chat, judged, config.judge_group_size, sampling, seed, config.slots)
    return judged, judge.samples(judged, config.judge_normalize_std)


def judge_metrics(run, judged, samples):
    """What this iteration's judging came to, over all ranks."""
    if run.config.judge_kind == "generative":
        records = judge.verdicts_of(judged)
    else:
        records = judge.value_verdicts(judged, update.judgements(run.model, samples, run.objective()))
    return judge.metrics(sum(parallel.gather(records), []))


def give_credit(run, i, episodes, reference):
    """The algorithm writes every turn's advantage. Returns its metrics."""
    config = run.config
    if config.kl == "reward":
        rescored = config.dtype != "float32"
        update.write_kl(run.model, reference, episodes, run.objective(), config.kl_coef, rescored)
    metrics = config.algorithm.assign(episodes, decay(config, i))
    if config.kl == "reward":
        config.algorithm.penalize(episodes)
    return metrics


def teaching(run, episodes):
    """The episodes that the update gets: without --kl none of a group in which no turn has an advantage."""
    if run.config.dynamic_sampling == "keep" or run.config.kl != "none":
        return episodes
    loud = {episode.group for episode in episodes for turn in episode.turns if turn.advantage}
    return [episode for episode in episodes if episode.group in loud]


def decay(config, i):
    """What the learning rates of iteration i are multiplied with."""
    return 1 - i / config.iterations if config.lr_decay else 1.0


def train(run, i, samples, reference):
    """The optimizer steps of an iteration. Returns the mean of their metrics, but the gap of the first: only
    there have sampler and trainer the same weights."""
    config, objective = run.config, run.objective()
    if config.dtype != "float32":                            # the sampler's are 0.03 nats off in bf16
        gap = update.rescore(run.model, update.loud(samples, objective), objective)
    if config.kl == "loss":
        update.write_reference(run.model, reference, samples, objective)
    rate, steps = config.lr * decay(config, i), []
    for part in update.minibatches(samples, config.minibatches):
        if parallel.any_rank(bool(part)):
            steps.append(run.step(part, objective, rate, compare=not steps and i % LOOK_EVERY == 0))
            if len(steps) == 1 and config.dtype == "float32":
                gap = {key: value for key, value in steps[0].items() if key.startswith("policy/logprob_gap")}
                if (largest := gap["policy/logprob_gap_max_nats"]) > LOGPROB_GAP_LIMIT:
                    raise ValueError(f"sampler and trainer differ by {largest:.2e} nats on equal weights; at "
                                     f"most {LOGPROB_GAP_LIMIT:g} is rounding")
    if not steps:                                    # every group's rewards were equal: nothing to learn
        unknown = ("entropy_nats", "clip_frac", "grad_norm", "logprob_gap_nats", "logprob_gap_max_nats")
        return {f"policy/{key}": math.nan for key in unknown} | {"policy/steps": 0}
    return update.mean_of(steps) | gap | {"policy/steps": len(steps), "policy/lr": rate}


def rollout_metrics(run, episodes):
    """Shares over all ranks of all that was played in an iteration; of groups, where there are any."""
    algorithm = run.config.algorithm
    equal = algorithm.without_spread(episodes) if algorithm.groups else ()
    counts = parallel.all_sum(summary(episodes) | {
        "reward": sum(e.reward for e in episodes), "equal": sum(e.group in equal for e in episodes)})
    shares = success_rate(counts)
    keys = ("success", "turns", "invalid_frac", "repeated_frac", "truncated_frac", "score_100")
    metrics = {f"rollout/{key}": shares[key] for key in keys if key in shares}
    if algorithm.groups:
        metrics["rollout/zero_variance_frac"] = counts["equal"] / counts["episodes"]
    metrics |= {f"rollout/{key}": counts[key] for key in ("episodes", "response_tokens", "restarts")}
    return metrics | {"rollout/reward": counts["reward"] / counts["episodes"]}


def store(run, i, episodes):
    """Every few iterations, the group with the strongest advantages, for the report."""
    if i % LOOK_EVERY and i != run.config.iterations - 1:
        return
    strength = {group: sum(max(abs(turn.advantage) for turn in episode.turns) for episode in members)
                for group, members in rewards.groups_of(episodes).items()}
    strongest = max(strength, key=strength.get)
    run.store([episode for episode in episodes if episode.group == strongest],
              {"phase": "rl", "iteration": i, "split": "train"}, credited=True)


def reinforce(run):
    """The RL stage: iterations from where the checkpoint stopped (0, or with --resume later)."""
    config, algorithm, first = run.config, run.config.algorithm, 0
    algorithm.begin(run.model, run.objective(), config.minibatches, run.shard)
    if run.done is not None:
        first = run.done
        critic = algorithm.critic if first else None         # one that RL has not touched yet is new again
        parallel.load_trainer(run.out / files.CHECKPOINT, run.model, run.optimizer, critic)
    if first == 0:
        run.optimizer.state.clear()                  # the cold start's moments are of another objective
    reference = frozen_copy(run, first) if config.kl != "none" else None
    if config.keep_checkpoints and first == 0:
        run.keep(0)
    for i in (bar := tqdm(range(first, config.iterations), desc="RL", unit="iteration", initial=first,
                          total=config.iterations, disable=run.ranks.rank > 0)):
        run.iteration = i
        metrics = iteration(run, i, reference)
        run.log({"phase": "rl", "iteration": i} | metrics)
        bar.set_postfix(success=f"{metrics['rollout/success']:.2f}", turns=f"{metrics['rollout/turns']:.1f}")
        if config.keep_checkpoints and (i + 1) % config.keep_checkpoints == 0:
            run.keep(i + 1)
        run.stop_if_asked({"iteration": i + 1})
        if (i + 1) % config.checkpoint_every == 0:
            run.save({"iteration": i + 1})
    run.iteration = None


def run_stages(run):
    """Cold start, RL, evaluation: those that the flags ask for; a checkpoint after each of the first two."""
    config = run.config
    run.origin = files.origin_of(config, run.identity["cold_start_types"]) if run.ranks.rank == 0 else {}
    run.stop_if_asked(None)
    run.log({**run.identity, "config": config.settings(), **run.origin,
             "parameters": sum(p.numel() for p in run.model.parameters()),
             "started": datetime.now(timezone.utc).isoformat(timespec="seconds")})
    stages = {"cold_start": cold_start if config.demonstrations and run.done is None else None,
              "rl": reinforce if config.iterations else None,
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
        line = "{success:.1%} [{low:.1%}, {high:.1%}], n {n}".format(**result[split]["sampled"])
        parallel.print0(f"{split}: success {line}")
    return 0


def finish(run):
    """All stages, or as far as they got when the run was asked to stop: then save, and say what is saved."""
    folder, state = run.out / files.CHECKPOINT, None
    try:
        return run_stages(run)
    except Interrupted as stopped:
        state = stopped.state
    if state is not None:
        run.save(state)
    saved = "nothing to save yet" if not folder.is_dir() else f"{folder} holds the model"
    if run.stage == "rl" and state:
        saved += f" after {state['iteration']} of {run.config.iterations} iterations; --resume goes on"
    if run.stage == "cold_start" and run.cold:
        saved += f" after {run.cold['rounds']} rounds of practice; --resume goes on"
    parallel.print0(f"stopped; {saved}", file=sys.stderr)
    return 130


def attempt(config, held):
    """All of a run, from its set-up on. What ends it early is said at once: one rank's end is all ranks'."""
    try:
        asked_to_stop = Stop()
        return finish(prepare(config, parallel.setup(config.device), asked_to_stop, held))
    except KeyboardInterrupt:
        print("stopped at once; what was saved before is there", file=sys.stderr)
        status = 130
    except MISTAKES as error:
        first = parallel.failed_rank()               # then this error is only what came of its
        why = one_line(error, config.out) if first is None else f"rank {first} failed, so this one ends"
        print(f"gcd.py: error: {why}", file=sys.stderr)
        status = 1
    return parallel.fail(status)


def main(argv=None):
    """The command: exit status 0, 1 for a mistake that was found late, 130 when it was interrupted."""
    config = parse(argv)
    with redirect_stdout(Unbreakable(sys.stdout)), redirect_stderr(Unbreakable(sys.stderr)):
        with ExitStack() as held:
            held.push(parallel.leave)
            return attempt(config, held)


if __name__ == "__main__":
    sys.exit(main())
