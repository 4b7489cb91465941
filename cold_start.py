"""Stage 1: imitate an expert's episodes, then its judgements too, so that RL has something to reinforce.

Demonstrations are the search expert's (ALFWorld's texts) or gold paths (ScienceWorld), replayed through the very
`Conversation` that RL plays in, and imitated through `update()` itself. Which kind of cold start it is comes from
the flags: none (--demonstrations 0), plain (--judge-demonstrations 0), with generative judge examples, or with value
examples (--judge-kind value); with RLVMR's tags set by rule (--prompt tags); with instructions (--instructions).
Left out: rejection sampling of the model's own episodes.

Read `cold_start`, then `demonstrate` and `imitate`.
"""

import math
import random
from collections import Counter

import torch
from tqdm import tqdm

import correction
import judge
import parallel
import rollout
import update
from envs import EpisodeLost, experts, make_envs
from envs.splits import make_tasks
from parallel import generator, stream

DEMONSTRATION, QUESTIONS, ORDER = 2, 3, 4      # what a random stream is for: the second number of its name
# Where demonstrations begin in the endless sequence of training tasks: generated rooms are then others than RL's; real
# games and ScienceWorld's variations are few, and the two share them, as in the paper.
FIRST = 5_000_000
SEARCHES = ("go", "open", "examine", "look", "teleport")


def cold_start(run):
    """Imitate the expert: the policy first, then policy and judge together.

    Jointly from scratch the judge learns and the policy starves, so the judge comes second.
    """
    config = run.config
    episodes, advantages = shown_to_all(run, FIRST, config.demonstrations, config.mistake_rate)
    policy = [s for i, (e, a) in enumerate(zip(episodes, advantages))
              for s in update.demonstration(update.samples_of(e, a, i))]
    done = imitate(run, policy, len(episodes), config.cold_start_epochs, "cold start: policy", 0)
    policy_and_judge = policy + judge_questions(run)
    imitate(run, policy_and_judge, len(episodes), config.judge_epochs, "cold start: policy and judge", done)


# Demonstrations

def shown_to_all(run, first, n, mistake_rate):
    """`demonstrate` on rank 0, for all: engines may die and endpoints fall silent on one rank and not on another."""
    shown = parallel.on_main(lambda: demonstrate(run, first, n, mistake_rate))
    if run.config.thoughts == "endpoint":
        run.log_endpoint()
    return shown


class Expert:
    """Who shows how it is done: the search expert where texts are ALFWorld's, gold paths in ScienceWorld."""

    def __init__(self, run):
        config = run.config
        if config.env == "scienceworld":
            from envs import scienceworld
            self.env, self.prior, self.show = run.envs[0], None, scienceworld.demonstrate
            return
        # the built-in game plays ALFWorld's own games word for word, thousands of times faster
        self.env, self.show = make_envs("household", 1)[0], experts.demonstrate
        tasks = make_tasks("household", config.games, config.train_types, config.seed)
        self.prior = experts.learn_prior(tasks.train("all", FIRST, 400))


def demonstrate(run, first, n, mistake_rate):
    """n episodes of the expert on training tasks that it won and that fit; per turn 1.0, or 0.0 where the turn is a
    mistake that is not to be imitated."""
    config, expert = run.config, Expert(run)
    episodes, advantages, counts = [], [], Counter()
    restarts = getattr(expert.env, "restarts", 0)           # of a real engine
    bar = tqdm(run.tasks.train(config.cold_start_types, first, n), desc="demonstrations", leave=False)
    for i, task in enumerate(bar):
        seed = stream(config.seed, DEMONSTRATION, first + i)
        try:
            shown = expert.show(expert.env, task, expert.prior, seed, mistake_rate, config.max_turns)
        except EpisodeLost:
            counts["lost"] += 1
            continue
        counts[f"tries {shown.tries}"] += 1
        if not shown.won:
            counts["not won"] += 1
            continue
        instruction = correction.random_instruction(random.Random(seed)) if config.instructions else ""
        seat = rollout.Seat(task, i, 0, instruction)
        episode = replay(run.chat, seat, shown, config.history)
        if config.thoughts == "endpoint":
            written = run.endpoint.ask(judge.thought_questions(episode))
            thoughts = [correction.plain_text(text or "") for text in written]      # a tag in one would end the response
            counts["thoughts not written"] += thoughts.count("")                    # these are the template's
            episode = replay(run.chat, seat, shown, config.history, thoughts)
        if max(len(turn.prompt_ids) + len(turn.response_ids) for turn in episode.turns) <= config.context:
            episodes.append(episode)
            advantages.append(imitated(episode, shown.mistakes, instruction if config.instructions else None))
        else:
            counts["too long"] += 1
    if restarts := getattr(expert.env, "restarts", 0) - restarts:
        counts["restarts"] = restarts
    run.log({"phase": "demonstrations", "asked": n, "kept": len(episodes)} | counts)
    if not episodes:
        raise ValueError(f"--demonstrations={n}: none was won in --max-turns={config.max_turns} within "
                         f"--context={config.context} tokens: {dict(counts)}")
    return episodes, advantages


def imitated(episode, mistakes, instruction):
    """What each turn weighs: mistakes are left out, all of them (None), or those that the instruction names.

    With instructions the other mistakes are imitated: only so do the words of one mean anything.
    """
    if instruction is None:
        return [0.0 if mistake else 1.0 for mistake in mistakes]
    named = correction.forbidden(instruction, episode)
    return [0.0 if mistake and wrong else 1.0 for mistake, wrong in zip(mistakes, named)]


class Recorded:
    """A recorded episode as an environment: it answers as the one did in which the expert played.

    Real engines are slow, and to play a demonstration once is enough.
    """

    def __init__(self, shown):
        self.replies = iter(shown.replies)

    def reset(self, task, seed=0):
        return next(self.replies)

    def step(self, command):
        return next(self.replies)


def replay(chat, seat, shown, history, thoughts=None):
    """An expert's commands as an Episode, exactly as if the model had sampled them."""
    talk = rollout.Conversation(seat, Recorded(shown), chat, history).begin()
    thoughts = thoughts or [None] * len(shown.commands)
    for command, thought in zip(shown.commands, thoughts, strict=True):
        ids = chat.respond(command, rule_tag(talk.episode, command), thought)
        talk.act(rollout.Response(ids, [], False), len(shown.commands), math.inf)
    return talk.episode


def rule_tag(episode, command):
    """RLVMR's tag for a demonstrated turn, by rule (its own are GPT-4o's): planning first, reflection after a refused
    turn, explore for a search not made before, else monitor."""
    if not episode.turns:
        return "planning"
    if not episode.turns[-1].valid:
        return "reflection"
    new = all(turn.action != command for turn in episode.turns)
    return "explore" if new and command.split(" ")[0] in SEARCHES else "monitor"


def judge_questions(run):
    """Labelled turns, as many good as bad, of demonstrations with more mistakes: else few turns would be bad."""
    config, n = run.config, run.config.judge_demonstrations
    if not n:
        return []
    episodes, _ = shown_to_all(run, FIRST + config.demonstrations, n, mistake_rate=0.25)
    seed = stream(config.seed, QUESTIONS)
    asked = parallel.gather(run.endpoint_labels(episodes if parallel.is_main() else [], 2 * n, seed))[0]
    writes = "endpoint" in config.judge_labels and run.chat.writes and config.judge_kind == "generative"
    room = config.question_room + (0 if writes else config.judge_response_tokens)
    places = judge.candidates(episodes, config.judge_labels, room, 0, asked, config.label_agreement)
    chosen = judge.choose(places, config.judge_labels, n // 2, seed)
    if config.judge_kind == "value":
        return judge.value_samples(run.chat, episodes, chosen)
    judged, written = judge.questions(run.chat, episodes, chosen), None
    if writes:                                               # critic data, as the paper has DeepSeek-V3 write it
        written = parallel.on_main(lambda: judge.written_answers(episodes, judged, run.endpoint))
        run.log_endpoint()
    samples, n_written = judge.demonstrations(run.chat, judged, written, config.judge_response_tokens)
    run.log({"phase": "judge demonstrations", "asked": n, "kept": len(samples), "written": n_written})
    return samples


# Imitation

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
        metrics = run.step(mine, objective, rate)
        if step % 20 == 0 or step == total - 1:
            bar.set_postfix(nll=f"{metrics['policy/nll_nats']:.3f}")
            run.log({"phase": "cold_start", "stage": name, "step": done + step,
                     "cold_start/loss": metrics["policy/nll_nats"], "cold_start/judge_loss": metrics["judge/nll_nats"],
                     "cold_start/grad_norm": metrics["policy/grad_norm"]})
        run.stop_if_asked({"iteration": None})      # nothing to resume from
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
