"""Stage 1, the cold start: imitate an expert's episodes and judgements, so that RL has something to
reinforce.

The expert's demonstrations are replayed through the same `Conversation` that RL plays in, and imitated
through the same `update`. Flags choose the kind: none (--demonstrations 0), plain (--judge-demonstrations 0),
with judge questions answered in words or by a value head (--judge-kind value), with RLVMR's tags by rule
(--prompt tags), with instructions, with DAgger (--dagger). Left out: rejection sampling of the model's own
episodes.
"""

import itertools
import math
import random
from collections import Counter
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import torch

import batching
import correction
import envs
import judge
import labels
import rollout
import update
from config import DAGGER_ROUND, QUESTION_TOKENS
from envs import _checks
from infra import checkpoint, files, parallel, plugins
from infra.progress import progress
from infra.signals import Interrupted
from infra.streams import COLD_START_ORDER, DAGGER, DAGGER_ORDER, DEMONSTRATIONS, QUESTIONS, generator, stream
from lm.engine import Response
from lm.optim import Muon
from session import train_tasks

# Index of the first demonstrated task. RL counts from 0: generated rooms never repeat; real games, which
# are few, do
FIRST_DEMONSTRATION = 5_000_000
JUDGE_MISTAKES = 0.25        # injected mistakes per command in episodes that are judged


def cold_start(run):
    """Imitate the expert: first the policy, then policy and judge together. Trained together from the start,
    the judge's questions take over and the policy learns little.

    A stop saves a checkpoint between steps, from which --resume continues. Within a DAgger round nothing is
    saved, and --resume continues from the last saved round.
    """
    config = run.config
    optimizer = Muon(run.model) if run.chat.small else run.optimizer     # RL begins with a fresh AdamW
    steps_done, rounds_done = (run.cold_progress.get(name, 0) for name in ("steps", "rounds"))
    if run.cold_progress:
        restore(run, optimizer)

    def stop_unsaved(step):
        run.stop_if_asked(None)

    if rounds_done:                 # resumed between DAgger rounds: the first part has ended
        policy_steps, stop = steps_done - steps_before_round(run, rounds_done), stop_unsaved
    else:
        episodes = demonstrate_on_rank0(run, FIRST_DEMONSTRATION, config.demonstrations, config.mistake_rate,
                                        lambda: run.stop_if_asked(None))
        policy_samples = imitation_samples(episodes)
        batches = batches_of(run, policy_samples, len(episodes), config.cold_start_epochs)
        policy_steps, stop = len(batches), partial(save_or_stop, run, optimizer)
        imitate(run, optimizer, batches[steps_done:], policy_steps, "cold start: policy", steps_before=0,
                first=min(steps_done, policy_steps), stop=stop)
    question_samples = judge_samples(run, lambda: stop(max(policy_steps, steps_done)))
    first = max(0, steps_done - policy_steps)
    if config.dagger:
        if not rounds_done:
            save(run, optimizer, 0, policy_steps)
        batches = dagger(run, question_samples, optimizer, policy_steps)
        n, stop = steps_before_round(run, len(rounds_of(config))), stop_unsaved
    else:
        batches = batches_of(run, policy_samples + question_samples, len(episodes), config.judge_epochs)
        n, batches = len(batches), batches[first:]
    imitate(run, optimizer, batches, n, "cold start: policy and judge", steps_before=policy_steps,
            first=first, stop=stop)


def steps_before_round(run, rounds):
    """Optimizer steps taken in the first `rounds` DAgger rounds."""
    return sum(steps_of(run, size) for _, size in rounds_of(run.config)[:rounds])


def save(run, optimizer, rounds, step):
    """Save a checkpoint after `rounds` DAgger rounds and `step` steps of the cold start."""
    muon = None if optimizer is run.optimizer else optimizer.state_dict()
    run.cold_progress |= {"rounds": rounds, "steps": step}
    run.save({"iteration": None, "cold": run.cold_progress | {"muon": muon}})


def save_or_stop(run, optimizer, step):
    """Save a checkpoint after `step` steps and stop, if asked to; a large model's is saved regularly, too."""
    stops = parallel.any_rank(run.should_stop)
    if stops or not run.chat.small and step and step % run.config.checkpoint_every == 0:
        save(run, optimizer, 0, step)
    if stops:
        raise Interrupted(None)


def restore(run, optimizer):
    """Restore the optimizer from a checkpoint made by `save`."""
    muon = run.cold_progress.pop("muon")
    if optimizer is run.optimizer:
        checkpoint.load_trainer(run.out / files.CHECKPOINT, run.model, optimizer)
    else:
        optimizer.load_state_dict(muon)


def imitation_samples(episodes):
    """Samples to imitate: no old policy, and targets compete with all tokens, possible commands or not."""
    return [replace(sample, logprob_old=None, allowed={}) for episode in episodes
            for sample in batching.samples_of(episode)]


def rounds_of(config):
    """[(index of the first episode, number of episodes)] of the DAgger rounds."""
    return [(k, min(DAGGER_ROUND, config.dagger - k)) for k in range(0, config.dagger, DAGGER_ROUND)]


def dagger(run, question_samples, optimizer, policy_steps):
    """A variant of DAgger (arXiv:1011.0686): yield batches from episodes that learner and expert share.

    In each episode a share of the turns, drawn uniformly from [0, 1], is played by the learner and the rest
    by the expert, who is so imitated in states that the learner's own mistakes lead to. DAgger imitates the
    expert's command in every visited state; here a turn in which the learner gave another command has weight
    0. The judge's questions are spread over all rounds. optimizer: to save with the model. policy_steps:
    those before the first round.
    """
    config, ranks, rounds = run.config, run.ranks, rounds_of(run.config)
    first_task = FIRST_DEMONSTRATION + config.demonstrations + config.judge_demonstrations
    resumed = run.cold_progress.get("rounds", 0)
    for i, (k, n) in list(enumerate(rounds))[resumed:]:
        step = policy_steps + steps_before_round(run, i)
        if i > resumed and i % config.checkpoint_every == 0:
            save(run, optimizer, i, step)
        run.update_sampler()
        tasks = train_tasks(run.environment, config.cold_start_types, first_task + k, n)
        players = [DaggerPlayer(rollout.EpisodeSpec(task, j, stream(config.seed, DAGGER, k + j), j), run)
                   for j, task in enumerate(tasks) if j % ranks.world_size == ranks.rank]
        overrides = {player.spec.index: player.override for player in players}
        episodes = run.play([player.spec for player in players], run.sampling(), f"DAgger round {i}",
                            overrides=overrides)
        run.stop_if_asked(None)
        for episode, player in zip(episodes, players, strict=True):
            for turn, label in zip(episode.turns, player.expert_labels, strict=True):
                turn.advantage = float((turn.action, turn.tag) == label)
        shares = rollout.shares_of(parallel.all_sum(rollout.counts_of(episodes)))
        run.log({"phase": "dagger", "round": i, "step": step,
                 "success": shares["success"], "invalid_frac": shares["invalid_frac"]})
        pending = [sample for sample in question_samples if sample.episode % len(rounds) == i]
        rng = generator(config.seed, DAGGER_ORDER, k)         # equal on all ranks, and so are the batches
        order = torch.randperm(n, generator=rng)
        batches = shuffled_batches(pending, steps_of(run, n), rng, ranks)
        for sample in imitation_samples(episodes):
            batches[order[sample.episode] % len(batches)].append(sample)
        yield from batches


class DaggerPlayer:
    """One DAgger episode: the expert's command at each turn, and whether the expert plays it.

    expert_labels: (command, tag) of the expert for each turn so far.
    """

    def __init__(self, spec, run):
        self.spec, self.chat, self.search_verbs = spec, run.chat, run.environment.search_verbs
        self.expert = rollout.OnlineExpert(run.environment, spec)
        self.rng = random.Random(stream(spec.stream, DAGGER))           # the expert has a stream of its own
        self.share, self.expert_labels = self.rng.random(), []

    def override(self, conversation):
        """Token ids of the expert's response to the coming turn; None: the learner plays it."""
        command = self.expert.command(conversation)
        if not conversation.episode.turns:                     # it starts, or starts again
            self.expert_labels = []
        tag = rule_tag(conversation.episode, command, self.search_verbs)
        self.expert_labels.append((command, tag if self.chat.style == "tags" else None))
        ids = self.chat.respond(command, tag)
        read = self.chat.parse(self.chat.decode(ids))[0]
        plugins.refuse(f"its response, {command!a}, is read as {read!a}" if read != command else "",
                       self.expert.environment, f"online_expert, task {self.spec.task.id}")
        return None if self.rng.random() < self.share else ids


def demonstrate_on_rank0(run, first, n, mistake_rate, stop, required=True):
    """Run `demonstrate` on rank 0 and give the result to all ranks, which could differ if an engine or a
    request failed on one. stop(): called afterwards; raises if the run was asked to stop.
    """
    episodes = parallel.on_rank0(lambda: demonstrate(run, first, n, mistake_rate, required))
    stop()
    if run.config.thoughts == "endpoint":
        run.log_endpoint()
    return episodes


def demonstrate(run, first, n, mistake_rate, required=True):
    """Episodes of the expert on n training tasks from number `first` on: those won that fit the context.

    A turn's advantage is its weight in the imitation: 1, or 0 for an injected mistake. required: ValueError
    if no episode remains.
    """
    config, search_verbs = run.config, run.environment.search_verbs
    expert = run.environment.expert([*map(rollout.limited, run.games)])
    wrong = _checks.wrong_expert(expert) or plugins.wrong_calls(expert, envs.EXPERT)
    plugins.refuse(wrong, run.environment, "expert")
    episodes, counts, restarts = [], Counter(), expert.restarts
    tasks = train_tasks(run.environment, config.cold_start_types, first, n)
    for i, task in enumerate(progress(tasks, desc="demonstrations", leave=False)):
        if run.should_stop:
            return episodes
        seed = stream(config.seed, DEMONSTRATIONS, first + i)
        rng = random.Random(stream(seed, 1))                   # the expert may have a Random(seed)
        try:
            demonstration = expert.show(task, seed, mistake_rate, config.max_turns)
        except envs.EpisodeLost:
            counts["lost"] += 1
            continue
        except Exception as error:
            error.add_note(f"expert.show, task {task.id}")
            raise
        plugins.refuse(_checks.wrong_demonstration(demonstration), expert, f"expert.show, task {task.id}")
        counts[f"tries {demonstration.tries}"] += 1
        if not demonstration.won:
            counts["not won"] += 1
            continue
        instruction = correction.random_instruction(rng) if config.instructions else None
        spec = rollout.EpisodeSpec(task, i, 0, len(episodes), instruction or "")
        episode = replay(run.chat, spec, demonstration, config.history, search_verbs)
        if config.thoughts == "endpoint":
            pending = [judge.transcript(episode, t, judge.THINK_AHEAD) for t in range(len(episode.turns))]
            thoughts = [correction.plain_text(text or "") for text in run.endpoint.ask(pending)]
            counts["thoughts not written"] += thoughts.count("")            # they are the template's
            episode = replay(run.chat, spec, demonstration, config.history, search_verbs, thoughts)
        if max(turn.tokens for turn in episode.turns) > config.context:
            counts["too long"] += 1
            continue
        write_imitation_weights(episode, demonstration.mistakes, instruction)
        episodes.append(episode)
    if restarts := expert.restarts - restarts:
        counts["restarts"] = restarts
    report_kept(run, n, tasks, episodes, counts, required)
    return episodes


def report_kept(run, n, tasks, episodes, counts, required):
    """Log how many demonstrations were kept, and why others were not; warn if few were, or if one is too
    long. ValueError if none is left and one is required.
    """
    config = run.config
    run.log({"phase": "demonstrations", "asked": n, "kept": len(episodes)} | counts)
    if 0 < len(episodes) < n / 2:
        given = f"--{'' if required else 'judge-'}demonstrations={n}"
        run.warn_once("few demonstrations", f"{given}: {few_kept(config, counts, tasks, episodes)}")
    longest = max((len(turn.response_ids) for episode in episodes for turn in episode.turns), default=0)
    if longest > config.max_response_tokens:
        run.warn_once("long response", f"--max-response-tokens={config.max_response_tokens}: a demonstration "
                      f"has a response of {longest} tokens; such a response cannot be given by the model")
    if required and not episodes:
        raise ValueError(f"--demonstrations={n}: none was won in --max-turns={config.max_turns} within "
                         f"--context={config.context} tokens: {dict(counts)}")


def few_kept(config, counts, tasks, episodes):
    """How many demonstrations were kept, why the others were not, of which task types none was, and what may
    help, a sentence. counts: as metrics.jsonl has them.
    """
    why = [f"{counts[name]} {name}" for name in ("not won", "too long", "lost") if counts[name]]
    types = sorted({task.task_type for task in tasks} - {episode.task.task_type for episode in episodes})
    flags = [flag for name, flag in (("not won", f"--max-turns (now {config.max_turns})"),
                                     ("too long", f"--context (now {config.context})")) if counts[name]]
    return (f"only {len(episodes)} kept; {', '.join(why)}"
            + (f"; none of {', '.join(types)}" if types else "")
            + (f"; a larger {' or '.join(flags)} may help" if flags else ""))


def write_imitation_weights(episode, mistakes, instruction):
    """Write each turn's weight: 0 for an injected mistake, else 1.

    instruction: None, in a cold start without --instructions: every mistake gets 0. Else only one that the
    instruction forbids gets 0; the others are imitated, so that the model learns what an instruction changes.
    """
    named = [True] * len(mistakes) if instruction is None else correction.forbidden(instruction, episode)
    for turn, mistake, wrong in zip(episode.turns, mistakes, named, strict=True):
        turn.advantage = 0.0 if mistake and wrong else 1.0


def replay(chat, spec, demonstration, history, search_verbs, thoughts=None):
    """A demonstration as an Episode, as if the model had sampled its commands. thoughts: one per command."""
    recorded = SimpleNamespace(send=lambda *pending: None, receive=iter(demonstration.replies).__next__)
    conversation = rollout.Conversation(spec, recorded, chat, history).start()
    commands = demonstration.commands
    for command, thought in zip(commands, thoughts or [None] * len(commands), strict=True):
        ids = chat.respond(command, rule_tag(conversation.episode, command, search_verbs), thought)
        conversation.act(Response(ids, [], False), len(commands), math.inf)
        read = conversation.episode.turns[-1].action
        plugins.refuse(f"the response that demonstrates {command!a} is read as {read!a}" if read != command
                       else "", chat.environment, f"task {spec.task.id}")
    return conversation.episode


def rule_tag(episode, command, search_verbs):
    """RLVMR's tag for a demonstrated turn, by rule (its own are GPT-4's).

    planning at the first turn; reflection after a refused turn; explore for a search command (by its first
    word) that was not given before; else monitor.
    """
    if not episode.turns:
        return "planning"
    if not episode.turns[-1].valid:
        return "reflection"
    new = all(turn.action != command for turn in episode.turns)
    return "explore" if new and command.split(" ")[0] in search_verbs else "monitor"


def judge_samples(run, stop):
    """Judge samples from n = --judge-demonstrations further episodes: at most n questions, about equally many
    good and bad turns. More mistakes are injected there, because few turns would be bad otherwise. stop: see
    `demonstrate_on_rank0`.
    """
    config, n = run.config, run.config.judge_demonstrations
    if not (n and (config.judge_epochs or config.dagger)):        # DAgger's rounds show them, too
        return []

    def stop_if_asked():                            # the large model's answers may then be missing
        if parallel.any_rank(run.should_stop):
            stop()

    episodes = demonstrate_on_rank0(run, FIRST_DEMONSTRATION + config.demonstrations, n, JUDGE_MISTAKES,
                                    stop, required=False)
    if not episodes:
        run.warn_once("no judge demonstration", f"--judge-demonstrations={n}: none was won in --max-turns="
                      f"{config.max_turns} within --context={config.context} tokens; no question is shown")
        return []
    seed, by_endpoint, asks = stream(config.seed, QUESTIONS), None, config.judge_labels in labels.OF_ENDPOINT
    writes = asks and not run.chat.bare and config.judge_kind == "generative"
    needed = len(judge.question_message(run.chat)) + len(judge.verdict_ids(run.chat, "good"))
    max_tokens = config.question_room if writes or config.judge_kind == "value" else (
        config.context - max(QUESTION_TOKENS, needed))                         # of a bare verdict
    if asks:
        given = run.endpoint_labels(episodes if parallel.is_rank0() else [], 2 * n, seed, max_tokens)
        by_endpoint = parallel.from_rank0(given)
        stop_if_asked()
    candidates = judge.candidates(episodes, config.judge_labels, max_tokens, run.environment, by_endpoint)
    chosen = judge.choose(candidates, config.judge_labels, n // 2, seed)
    if not chosen:
        run.warn_once("no judge question", judge.why_none(
            candidates, config.judge_labels, f"--judge-demonstrations={n}: no question is shown",
            "--judge-demonstrations 0"))
    questions, written = judge.questions(run.chat, episodes, chosen, run.environment), None
    if writes:       # critic data, which the paper has DeepSeek-V3 write
        prompts = [judge.transcript(question.episode, question.t) for question in questions]
        written = parallel.on_rank0(lambda: run.endpoint.ask(prompts))
        run.log_endpoint()
        stop_if_asked()
    if config.judge_kind == "value":
        samples, n_written = judge.value_samples(questions), 0
    else:
        samples, n_written = judge.demonstrations(run.chat, questions, written,
                                                  config.judge_response_tokens)
    run.log({"phase": "judge demonstrations", "asked": n, "kept": len(samples), "written": n_written})
    return samples


def batches_of(run, samples, n_episodes, epochs):
    """This rank's batches of several epochs; each holds pairs of a good and a bad judge question. An epoch's
    order is of its seed and number alone, so the second part of a cold start repeats the first's order.
    """
    n = steps_of(run, n_episodes)
    return [batch for epoch in range(epochs)
            for batch in shuffled_batches(samples, n, generator(run.config.seed, COLD_START_ORDER, epoch),
                                          run.ranks)]


def steps_of(run, n_episodes):
    """Optimizer steps in an epoch of n_episodes episodes."""
    return max(1, n_episodes // run.config.cold_start_batch)


def imitate(run, optimizer, batches, n, name, steps_before, first, stop):
    """Imitate a rank's `batches` by cross-entropy: what remains of a part of n steps, from step `first` on.

    steps_before: of earlier parts. stop: called after each step with the number of steps so far.
    """
    config = run.config
    objective = update.Objective(
        judge_weight=config.judge_cold_start_weight, value_judge=config.judge_kind == "value",
        max_grad_norm=config.max_grad_norm, microbatch_tokens=config.microbatch_tokens)
    bar = progress(batches, desc=name, unit="step", initial=first, total=n, disable=run.ranks.rank > 0)
    for step, batch in enumerate(bar, first):
        rate = config.cold_start_lr * (1 - step / n)
        metrics = update.update(run.model, optimizer, batch, objective, rate)
        if step % 20 == 0 or step == n - 1:
            bar.set_postfix(nll=f"{metrics['policy/nll_nats']:.3f}")
            run.log({"phase": "cold_start", "stage": name, "step": steps_before + step,
                     "cold_start/loss": metrics["policy/nll_nats"],
                     "cold_start/judge_loss": metrics["judge/nll_nats"],
                     "cold_start/grad_norm": metrics["policy/grad_norm"]})
        stop(steps_before + step + 1)


def shuffled_batches(samples, n, rng, ranks):
    """This rank's share of samples that all ranks have, shuffled into n batches by whole episodes, and by
    judge pairs (neighbours in the list). rng: the same on all ranks, whose shares are equally large.
    """
    batches = [[] for _ in range(n)]
    for kind in update.KINDS:
        of_kind = [sample for sample in samples if sample.kind == kind]
        groups = [list(group) for _, group in itertools.groupby(of_kind, lambda sample: sample.episode)]
        for i, k in enumerate(torch.randperm(len(groups), generator=rng).tolist()):
            if i // n % ranks.world_size == ranks.rank:
                batches[i % n] += groups[k]
    return batches
