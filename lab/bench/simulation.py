"""A rollout without a model: its decode steps, the lengths of its rows and its cache, by event simulation.

`rollout.play`, the engine's rows and its cache are the product's own. Only three things are drawn instead of
computed: the tokens of the messages and the number of turns, from recorded episodes (`envs.MessageLengths`),
and the length of each response. The model runs on "meta" or fake tensors, where a prefill or a decode step
is larger than those before, so that the bytes of its tensors can be counted (lab/bench/memory.py).
Left out: truncated responses, and games that answer late.
"""

import itertools
import json
import math
import random
from dataclasses import dataclass

import batching
import rollout
from envs import MessageLengths, Reply, Task
from lab.bench import lengths
from lm.engine import TICK, Response, Sampling, Slots, bucket, reusable_prefix


@dataclass(frozen=True)
class Work:
    """The load of an iteration."""

    response: float = 150.0             # tokens of a response, in the mean; an assumption
    spread: float | None = 0.5          # standard deviation of their logarithm: lognormal lengths; None:
                                        # exponential, as of a model that may stop at any token
    turns: int | None = None            # of every episode; None: as the recorded ones, which an expert played
    recorded: str = "alfworld"          # the episodes that messages are drawn from
    style: str = "think listed"         # of the prompts
    judged: int = 32                    # judged turns
    question: int = 52                  # tokens of a question, template included, under Qwen2.5's tokenizer
    answers: int = 8                    # per judged turn

    def response_tokens(self, rng, longest):
        """The length of one response."""
        if self.spread is None:
            drawn = rng.expovariate(1 / self.response)
        else:
            drawn = rng.lognormvariate(math.log(self.response) - self.spread**2 / 2, self.spread)
        return min(max(1, round(drawn)), longest - 1)


class Messages:
    """Draws the tokens of each message of an episode, with what surrounds its text."""

    def __init__(self, work):
        self.recorded, self.work = MessageLengths(work.recorded), work
        self.first, self.later = json.loads(lengths.OUT.read_text())["frames"][work.recorded][work.style]

    def draw(self, task, rng):
        """Those of an episode; equal tasks (any seed) have equal first messages. rng: for the rest."""
        turns = self.work.turns or len(rng.choice(self.recorded.episodes)[0])
        drawn = self.recorded.draw(random.Random(task), turns, "listed" in self.work.style)
        return [drawn[0] + self.first, *(n + self.later for n in drawn[1:])]


class Game:
    """A game whose observation says how many tokens the next message has."""

    def __init__(self, messages, rng):
        self.messages, self.rng = messages, rng

    def reset(self, task, seed=0):
        """Start an episode of drawn length."""
        self.task, self.left = task, self.messages.draw(task.problem, self.rng)
        return self.step("")

    def step(self, command):
        """The next message; after the last one, the episode is won."""
        if not self.left:
            return Reply("0 0", won=True, done=True)
        return Reply(f"{self.task.problem} {self.left.pop(0)}")


class Chat:
    """Messages as token ids: all of an episode's are the number of its task."""

    noop_message, stop_ids = "", ()

    def observe(self, reply, first=False, instruction=""):
        """As many ids as the game says."""
        task, n = map(int, reply.observation.split())
        return [task] * n

    def closed(self, ids):
        """The ids: there is no end token."""
        return ids

    def decode(self, ids):
        """No text."""
        return ""

    def parse(self, text):
        """A command."""
        return "go", None


class Simulated(Slots):
    """Slots that draw how long each response is, and run the model only to count bytes, if at all.

    The tokens of a response are all equal, and equal no other's: episodes have only prompts in common.
    read: tokens whose keys and values the decode steps read, over all steps. prefilled: tokens of prompts, in
    so many prefills.
    """

    def __init__(self, model, n, context, sampling, work, rng, runs):
        self.work, self.rng, self.runs, self.left, self.drawn = work, rng, runs, {}, {}
        self.ids = itertools.count(10**6)                   # tasks are fewer
        self.read = self.prefilled = self.prefills = self.largest_prefill = self.largest_step = 0
        super().__init__(model, n, context, (), sampling)

    def begin(self, rows, prompts, streams, share=False, restrictions=None):
        """Make room for prompts and responses, and draw the responses' lengths."""
        reused = [reusable_prefix(self.cached[row], prompt) for row, prompt in zip(rows, prompts)]
        new = {(tuple(prompt) if not n else row): len(prompt) - n
               for row, prompt, n in zip(rows, prompts, reused)}             # a group's members: once
        tokens = sum(new.values())
        self.prefilled += tokens
        self.prefills += 1
        size = tokens if self.varlen else tokens * max(map(len, prompts))
        if self.runs and size > self.largest_prefill:
            self.largest_prefill = size
            self.prefill(rows, prompts, share)
        else:
            self.reserve(rows, prompts, reused)
        for row, prompt in zip(rows, prompts):
            self.running[row] = prompt, len(prompt), self.steps
            self.drawn[row] = self.work.response_tokens(self.rng, self.sampling.max_response_tokens)
            self.left[row] = self.drawn[row] - 1                             # `begin` draws the first

    def tick(self):
        """TICK steps of all running responses; fewer if none may be longer, on a CPU if all end sooner."""
        rows, longest = max(self.running, default=-1) + 1, max(self.left.values(), default=0)
        most = longest if self.device.type == "cpu" else self.sampling.max_response_tokens - 1
        steps = min(TICK, most) if rows else 0
        context = bucket(max((self.length_bound(row, 1) for row in self.running), default=1), 16)
        size = rows if self.varlen else rows * self.cache.room
        if self.runs and steps and size > 1.1 * self.largest_step:
            self.largest_step = size
            self.step(slice(0, rows), self.context if self.varlen else context)
        for row, (_, length, _) in self.running.items():
            n, run = min(steps, self.left[row]), self.drawn[row] - 1 - self.left[row]
            self.read += n * (length + run) + n * (n + 1) // 2
            self.left[row] -= n
        self.steps += steps

    def pop_finished(self):
        """The responses that have ended."""
        finished = []
        for row in sorted(row for row, left in self.left.items() if not left):
            prompt, *_ = self.running.pop(row)
            del self.left[row]
            ids = [next(self.ids)] * self.drawn.pop(row)
            self.cached[row] = prompt + ids[:-1]
            finished.append((row, Response(ids, [0.0] * len(ids), False)))
        return finished

    def move(self, source, target):
        """Move a row, and what was drawn for it."""
        super().move(source, target)
        for drawn in (self.left, self.drawn):
            if source in drawn and source != target:
                drawn[target] = drawn.pop(source)


def play(model, settings, ranks, work, seed=0, runs=False):
    """Play a rank's episodes of an iteration. Returns them, and the Simulated slots.

    settings: tasks, group_size, context, max_response_tokens, max_turns and slots, as of config.Config. runs:
    whether to run the model where a prefill or a step is larger than before.
    """
    rng, tasks = random.Random(seed), settings.tasks // ranks
    specs = [rollout.EpisodeSpec(Task(str(task), "train", "", task), task - 1, 0, index)
             for index, task in enumerate(task for task in range(1 + seed * tasks, 1 + (seed + 1) * tasks)
                                          for _ in range(settings.group_size))]
    n, sampling = min(settings.slots, len(specs)), Sampling(1.0, settings.max_response_tokens)
    slots = Simulated(model, n, settings.context, sampling, work, rng, runs)
    messages = Messages(work)
    episodes = rollout.play(None, Chat(), [Game(messages, rng) for _ in range(n)], specs, sampling,
                            settings.max_turns, settings.context, slots=slots)
    return episodes, slots


def samples_of(episodes, work, rng, longest):
    """The Samples that an iteration trains on: the episodes', and the judge's answers about drawn turns."""
    samples, turns = [], []
    for episode in episodes:
        for turn in episode.turns:
            turn.advantage = 1.0
            turns.append((episode, turn))
        samples += batching.samples_of(episode)
    for episode, turn in rng.sample(turns, min(work.judged, len(turns))):
        prompt = turn.prompt_ids + turn.response_ids + [-1 - episode.index] * work.question
        for answer in range(work.answers):
            n = work.response_tokens(rng, longest)
            numbers = [0.0] * len(prompt) + [1.0] * n
            samples.append(batching.Sample(prompt + [-9 - answer] * n, [x > 0 for x in numbers], numbers,
                                           numbers, episode.index, "judge"))
    return samples
