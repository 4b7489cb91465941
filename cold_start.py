"""Stage 1: imitate an expert's episodes, then its judgements too, so that RL has something to reinforce.

Demonstrations are those of the world's expert, replayed through the very `Conversation` that RL plays in, and
imitated through `update()` itself. Flags say which kind of cold start it is: none (--demonstrations 0), plain
(--judge-demonstrations 0), with generative judge examples, or with value examples (--judge-kind value); with
RLVMR's tags by rule (--prompt tags); with instructions; with practice beside the expert (--dagger). Left out:
rejection sampling of the model's episodes.
"""

import itertools
import math
import random
from collections import Counter
from copy import copy
from dataclasses import replace
from types import SimpleNamespace

import torch
from tqdm import tqdm

import correction
import judge
import rollout
import update
from envs import EpisodeLost
from lm.engine import Response
from run import files, parallel
from run.parallel import generator, stream

# What a random stream is for: the second number of its name
DEMONSTRATION, QUESTIONS, ORDER, PRACTICE = 2, 3, 4, 9
# Where demonstrations begin among training tasks: other tasks than RL's; real games are few and shared
FIRST = 5_000_000
ROUND = 512            # episodes of practice that are played with the same weights


def cold_start(run):
    """Imitate the expert: the policy first, then policy and judge. Joint from scratch the policy starves.

    With --dagger it is saved between rounds of practice, and resumed there.
    """
    config, learner = run.config, run
    if run.chat.small:
        learner = copy(run)
        learner.optimizer = update.Muon(run.model)           # this stage's own; RL's begins anew
    if run.cold:
        done = run.cold["steps"] - begun(run)
        resume(run, learner)
    else:
        episodes = shown_to_all(run, FIRST, config.demonstrations, config.mistake_rate)
        policy = samples_of(episodes)
        batches = batches_of(run, policy, len(episodes), config.cold_start_epochs)
        imitate(learner, batches, len(batches), "cold start: policy", 0)
        done = len(batches)
    judged = judge_questions(run)
    if config.dagger:
        batches, n = practice(run, judged, learner, done), begun(run, len(rounds_of(config)))
    else:
        batches = batches_of(run, policy + judged, len(episodes), config.judge_epochs)
        n = len(batches)
    imitate(learner, batches, n, "cold start: policy and judge", done, begun(run))


def begun(run, rounds=None):
    """The steps of so many rounds of practice; None: of those that had been when the run was resumed."""
    rounds = run.cold.get("rounds", 0) if rounds is None else rounds
    return sum(steps_of(run, size) for _, size in rounds_of(run.config)[:rounds])


def save(run, learner, rounds, step):
    """A checkpoint after so many rounds of practice, and steps of the cold start."""
    of_muon = None if learner is run else learner.optimizer.saved()
    run.cold |= {"rounds": rounds, "steps": step}                        # the learner's, too
    run.save({"iteration": None, "cold": run.cold | {"muon": of_muon}})


def resume(run, learner):
    """The optimizer as such a checkpoint has it."""
    of_muon = run.cold.pop("muon")
    if learner is run:
        parallel.load_trainer(run.out / files.CHECKPOINT, run.model, run.optimizer)
    else:
        learner.optimizer.load(of_muon)


def samples_of(episodes):
    """Episodes as what is to be imitated: from all that could be said, and there is no old policy."""
    return [replace(sample, logprob_old=None, allowed={}) for episode in episodes
            for sample in update.samples_of(episode)]


def rounds_of(config):
    """(place of the first, how many) of the episodes of each round of practice."""
    return [(k, min(ROUND, config.dagger - k)) for k in range(0, config.dagger, ROUND)]


def practice(run, judged, learner, done):
    """DAgger (arXiv:1011.0686), batch by batch: the learner plays, the expert beside it.

    Of each episode a share of the turns, drawn between 0 and 1, is the learner's and the rest the expert's;
    imitated is what the expert would do, where that was done; other turns weigh nothing. So states are met to
    which the learner's own mistakes lead. The judge's questions are spread over all rounds. learner: the run
    with the optimizer that steps; done: steps of earlier stages.
    """
    config, ranks, rounds = run.config, run.ranks, rounds_of(run.config)
    first = FIRST + config.demonstrations + config.judge_demonstrations
    resumed = run.cold.get("rounds", 0)
    for i, (k, n) in list(enumerate(rounds))[resumed:]:
        step = done + begun(run, i)
        if i > resumed and i % config.checkpoint_every == 0:
            save(run, learner, i, step)
        parallel.copy_weights(run.model, run.sampler)
        tasks = run.world.train(config.cold_start_types, first + k, n)
        coached = [Coached(rollout.Seat(task, j, stream(config.seed, PRACTICE, k + j), j), run)
                   for j, task in enumerate(tasks) if j % ranks.world == ranks.rank]
        coaches = {one.seat.index: one.speak for one in coached}
        episodes = run.play([one.seat for one in coached], run.sampling(), f"practice {i}", coaches=coaches)
        run.stop_if_asked(stopped(run))
        for episode, one in zip(episodes, coached, strict=True):
            for turn, advice in zip(episode.turns, one.advice, strict=True):
                turn.advantage = float((turn.action, turn.tag) == advice)
        shares = rollout.success_rate(parallel.all_sum(rollout.summary(episodes)))
        run.log({"phase": "practice", "round": i, "step": step,
                 "success": shares["success"], "invalid_frac": shares["invalid_frac"]})
        questions = [sample for sample in judged if sample.episode // ranks.world % len(rounds) == i]
        rng = generator(config.seed, PRACTICE, k)             # the same on every rank, and so the batches
        place, batches = torch.randperm(n, generator=rng), shuffled_batches(questions, steps_of(run, n), rng)
        for sample in samples_of(episodes):
            batches[place[sample.episode] % len(batches)].append(sample)
        yield from batches


class Coached:
    """An episode of practice: what the expert would do at each turn, and whether it does."""

    def __init__(self, seat, run):
        self.seat, self.chat, self.searches, self.advice = seat, run.chat, run.world.searches, []
        self.coach, self.rng = run.world.coach(seat.task, seat.stream), random.Random(seat.stream)
        self.share = self.rng.random()

    def speak(self, conversation):
        """The ids of the expert's response to the turn that comes, or None: the learner is to speak."""
        turns = conversation.episode.turns
        if not turns:
            self.advice = []                     # it begins, or begins again
        self.coach.see(conversation.reply.observation, (turns[-1].action or "") if turns else None)
        command = self.coach.advice()
        tag = rule_tag(conversation.episode, command, self.searches)
        self.advice.append((command, tag if self.chat.style == "tags" else None))
        return None if self.rng.random() < self.share else self.chat.respond(command, tag)


def shown_to_all(run, first, n, mistake_rate):
    """`demonstrate` on rank 0, for all: engines die and endpoints fall silent on one rank, not on another."""
    shown = parallel.on_main(lambda: demonstrate(run, first, n, mistake_rate))
    run.stop_if_asked(None)
    if run.config.thoughts == "endpoint":
        run.log_endpoint()
    return shown


def demonstrate(run, first, n, mistake_rate):
    """Episodes of the world's expert on n training tasks: those that it won and that fit. A turn's advantage
    is its weight in the imitation: 1, or 0 for a mistake that is not to be imitated."""
    config, expert = run.config, run.world.expert(run.envs)
    episodes, counts, restarts = [], Counter(), expert.restarts
    bar = tqdm(run.world.train(config.cold_start_types, first, n), desc="demonstrations", leave=False)
    for i, task in enumerate(bar):
        if run.asked_to_stop:
            return episodes
        seed = stream(config.seed, DEMONSTRATION, first + i)
        try:
            shown = expert.show(task, seed, mistake_rate, config.max_turns)
        except EpisodeLost:
            counts["lost"] += 1
            continue
        counts[f"tries {shown.tries}"] += 1
        if not shown.won:
            counts["not won"] += 1
            continue
        instruction = correction.random_instruction(random.Random(seed)) if config.instructions else None
        seat = rollout.Seat(task, i, 0, len(episodes), instruction or "")
        episode = replay(run.chat, seat, shown, config.history, run.world.searches)
        if config.thoughts == "endpoint":
            asked = [judge.told(episode, t, judge.THINK_AHEAD) for t in range(len(episode.turns))]
            thoughts = [correction.plain_text(text or "") for text in run.endpoint.ask(asked)]
            counts["thoughts not written"] += thoughts.count("")            # they are the template's
            episode = replay(run.chat, seat, shown, config.history, run.world.searches, thoughts)
        if max(len(turn.prompt_ids) + len(turn.response_ids) for turn in episode.turns) > config.context:
            counts["too long"] += 1
            continue
        write_weights(episode, shown.mistakes, instruction)
        episodes.append(episode)
    if restarts := expert.restarts - restarts:
        counts["restarts"] = restarts
    run.log({"phase": "demonstrations", "asked": n, "kept": len(episodes)} | counts)
    if not episodes:
        raise ValueError(f"--demonstrations={n}: none was won in --max-turns={config.max_turns} within "
                         f"--context={config.context} tokens: {dict(counts)}")
    return episodes


def write_weights(episode, mistakes, instruction):
    """What each turn weighs: mistakes are left out, all of them (None), or those that the instruction names.
    The others are then imitated: only so do its words mean anything."""
    named = [True] * len(mistakes) if instruction is None else correction.forbidden(instruction, episode)
    for turn, mistake, wrong in zip(episode.turns, mistakes, named, strict=True):
        turn.advantage = 0.0 if mistake and wrong else 1.0


def replay(chat, seat, shown, history, searches, thoughts=None):
    """An expert's commands as an Episode, as if the model had sampled them: played against their record.

    searches: first words of commands that look for something, for `rule_tag`. thoughts: one per command.
    """
    recorded = SimpleNamespace(send=lambda *asked: None, receive=iter(shown.replies).__next__)
    conversation = rollout.Conversation(seat, recorded, chat, history).begin()
    for command, thought in zip(shown.commands, thoughts or [None] * len(shown.commands), strict=True):
        ids = chat.respond(command, rule_tag(conversation.episode, command, searches), thought)
        conversation.act(Response(ids, [], False), len(shown.commands), math.inf)
    return conversation.episode


def rule_tag(episode, command, searches):
    """RLVMR's tag for a demonstrated turn, by rule (its own are GPT-4o's): planning first, reflection after a
    refused turn, explore for a search not made before, else monitor."""
    if not episode.turns:
        return "planning"
    if not episode.turns[-1].valid:
        return "reflection"
    new = all(turn.action != command for turn in episode.turns)
    return "explore" if new and command.split(" ")[0] in searches else "monitor"


def judge_questions(run):
    """Labelled turns, as many good as bad, of demonstrations with more mistakes: else few would be bad."""
    config, n = run.config, run.config.judge_demonstrations
    if not n:
        return []
    episodes = shown_to_all(run, FIRST + config.demonstrations, n, mistake_rate=0.25)
    seed = stream(config.seed, QUESTIONS)
    asked = parallel.gather(run.endpoint_labels(episodes if parallel.is_main() else [], 2 * n, seed))[0]
    writes = "endpoint" in config.judge_labels and run.chat.writes and config.judge_kind == "generative"
    room = config.question_room + (0 if writes else config.judge_response_tokens)
    places = judge.candidates(episodes, config.judge_labels, room, run.world, asked, config.label_agreement)
    chosen = judge.choose(places, config.judge_labels, n // 2, seed)
    judged, written = judge.questions(run.chat, episodes, chosen, run.world), None
    if config.judge_kind == "value":
        return judge.value_samples(judged)
    if writes:       # critic data, as the paper has DeepSeek-V3 write it; paid for where not asked before
        asked = [judge.told(question.episode, question.t) for question in judged]
        written = parallel.on_main(lambda: run.endpoint.ask(asked))
        run.log_endpoint()
    samples, n_written = judge.demonstrations(run.chat, judged, written, config.judge_response_tokens)
    run.log({"phase": "judge demonstrations", "asked": n, "kept": len(samples), "written": n_written})
    return samples


def batches_of(run, samples, n_episodes, epochs):
    """Epochs of samples in batches, a good and a bad judge question in one step."""
    n = steps_of(run, n_episodes)
    return [batch for epoch in range(epochs)
            for batch in shuffled_batches(samples, n, generator(run.config.seed, ORDER, epoch))]


def steps_of(run, n_episodes):
    """The steps of an epoch of so many episodes."""
    return max(1, n_episodes // run.config.cold_start_batch)


def stopped(run):
    """What is to be saved of a cold start that is stopped: the model, which cannot be resumed; None where
    there is a checkpoint that can."""
    return None if run.cold else {"iteration": None}


def imitate(run, batches, n, name, done, begun=0):
    """Cross-entropy on n batches, of which `begun` have been. done: steps of earlier stages, so that the log
    counts on."""
    config, ranks = run.config, run.ranks
    objective = update.Objective(
        judge_weight=config.judge_cold_start_weight, max_grad_norm=config.max_grad_norm,
        microbatch_tokens=config.microbatch_tokens)
    bar = tqdm(batches, desc=name, unit="step", initial=begun, total=n, disable=ranks.rank > 0)
    for step, batch in enumerate(bar, begun):
        mine = [s for s in batch if s.episode % ranks.world == ranks.rank]
        metrics = run.step(mine, objective, config.cold_start_lr * (1 - step / n))
        if step % 20 == 0 or step == n - 1:
            bar.set_postfix(nll=f"{metrics['policy/nll_nats']:.3f}")
            run.log({"phase": "cold_start", "stage": name, "step": done + step,
                     "cold_start/loss": metrics["policy/nll_nats"],
                     "cold_start/judge_loss": metrics["judge/nll_nats"],
                     "cold_start/grad_norm": metrics["policy/grad_norm"]})
        run.stop_if_asked(stopped(run))


def shuffled_batches(samples, n, rng):
    """Samples in n batches, whole episodes and judge pairs (neighbours in the list), in an order from rng."""
    batches = [[] for _ in range(n)]
    for kind in ("policy", "judge"):
        of_kind = [sample for sample in samples if sample.kind == kind]
        groups = [list(group) for _, group in itertools.groupby(of_kind, lambda sample: sample.episode)]
        for i, k in enumerate(torch.randperm(len(groups), generator=rng).tolist()):
            batches[i % n] += groups[k]
    return batches
