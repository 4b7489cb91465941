"""The predictions of lab.bench.memory against a run of a small model at real prompts on this CPU.

The small model plays real ALFWorld games under Qwen2.5's tokenizer: whatever it answers, the expert's next
command is carried out; a response ends at a random twelfth of the vocabulary. Then comes the forward and
backward pass of the largest microbatch. Compared are the decode steps and the peaks of rollout and update,
which the meter predicts for messages of these games' lengths and drawn responses; and the tokens of all
messages, which envs/lengths.json predicts from other games.
The process starts itself again with an allocator that gives freed memory back (ALLOCATOR).

    python -m lab.bench.memory_check      # Linux, a minute; writes lab/results/memory_check.json
"""

import argparse
import os
import platform
import random
import statistics
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import rollout
from infra import files
from infra.streams import stream
from lab.bench import lengths, memory, simulation
from lab.bench.study import ROOT, parse_clean
from lm import model as decoder
from lm.chat import Chat
from lm.engine import Sampling, Slots

OUT = ROOT / "lab" / "results" / "memory_check.json"
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}          # glibc's
SHAPE = decoder.ModelConfig(2048, 64, 192, 5, 4, 4, 32, tie_word_embeddings=True)
SETTINGS = SimpleNamespace(tasks=20, group_size=1, slots=6, context=8192, max_response_tokens=64,
                           max_turns=7, minibatches=1, microbatch_tokens=6000)
# A geometric length's coefficient of variation is 1, as that of a lognormal with this spread
WORK = simulation.Work(response=12.0, spread=0.83, judged=0)
FIRST_TASK, SEEDS = 1000, 4             # not the games of envs/lengths.json; simulations to average over


class OfGames:
    """Messages of given lengths, a list for each task."""

    def __init__(self, lengths_of_games):
        self.lengths = lengths_of_games

    def draw(self, task, rng):
        """Those of the task's episode."""
        return list(self.lengths[(task - 1) % len(self.lengths)])


class Replayed:
    """A game that gives the replies of a recorded episode, task.problem, whatever the command."""

    def reset(self, task, seed=0):
        """The first reply."""
        self.left = list(task.problem)
        return self.left.pop(0)

    def step(self, command):
        """The next reply; after the last one, the episode is over."""
        return self.left.pop(0) if self.left else lengths.EXAMPLE._replace(done=True)


class Unread(Chat):
    """A chat in which every response is a command, and the model's vocabulary is small, to be quick: token
    ids are taken modulo its size, so that messages are as long as Qwen2.5's tokenizer makes them.
    """

    def observe(self, *message):
        """Ids of a message."""
        return [token % SHAPE.vocab_size for token in super().observe(*message)]

    def parse(self, text):
        """Any command: the game ignores it."""
        return "look", None


def games_and_chat(games, tokenizer):
    """The replies of each game's episode, and the chat."""
    environment = lengths.environment_of("household", games)
    tokenizer = decoder.load_tokenizer(Path(tokenizer))
    chat = Unread(tokenizer, "think", True, environment)
    return lengths.episodes(environment, environment.train_tasks("all", FIRST_TASK, SETTINGS.tasks)), chat


def predicted(recorded, chat):
    """{"decode steps", "rollout bytes", "update bytes", "message tokens"}, means over simulations."""
    found = []
    of_games = [[len(chat.observe(reply, not t)) for t, reply in enumerate(replies)] for replies in recorded]
    with mock.patch.object(simulation, "Messages", lambda work: OfGames(of_games)):
        for seed in range(SEEDS):
            with FakeTensorMode():
                model = decoder.Model(SHAPE)
                playing, _, episodes, slots = memory.rollout_bytes(model, SETTINGS, 1, WORK, seed)
                samples = simulation.samples_of(episodes, WORK, random.Random(seed), 0)
                batch, _ = memory.largest_microbatch(samples, SETTINGS)
                found.append({"decode steps": slots.steps, "rollout bytes": playing,
                              "update bytes": memory.update_bytes(model, batch)})
    messages, rng = simulation.Messages(WORK), random.Random(0)
    drawn = [sum(messages.draw(task, rng)[:SETTINGS.max_turns]) for task in range(1000)]
    return {key: statistics.fmean(one[key] for one in found) for key in found[0]} | {
        "message tokens": SETTINGS.tasks * statistics.fmean(drawn)}


def measured(recorded, chat):
    """The same of this process."""
    specs = [rollout.EpisodeSpec(rollout.Task(str(i), "train", "", replies), i, stream(0, i), i)
             for i, replies in enumerate(recorded)]
    model = decoder.Model(SHAPE).requires_grad_(False)
    decoder.init_weights(model, 0)
    chat.stop_ids = tuple(random.Random(0).sample(range(SHAPE.vocab_size),
                                                  round(SHAPE.vocab_size / WORK.response)))
    chat.end_ids = [*chat.stop_ids[:1]]
    play(model, chat, specs[:2], 2)                                     # loads libraries at first use
    (episodes, steps), playing = peak_of(lambda: play(model, chat, specs, SETTINGS.max_turns))
    model.requires_grad_(True)
    samples = simulation.samples_of(episodes, WORK, random.Random(0), 0)
    batch, _ = memory.largest_microbatch(samples, SETTINGS)
    memory.update_bytes(model, batch[:1])
    _, training = peak_of(lambda: memory.update_bytes(model, batch))
    return {"decode steps": steps, "rollout bytes": playing, "update bytes": training,
            "message tokens": sum(len(sample.ids) - sum(sample.sampled) for sample in samples)}


def play(model, chat, specs, turns):
    """Play with the product's engine. Returns the episodes, and how many steps it took."""
    sampling = Sampling(1.0, SETTINGS.max_response_tokens)
    n = min(SETTINGS.slots, len(specs))
    slots = Slots(model, n, SETTINGS.context, chat.stop_ids, sampling)
    episodes = rollout.play(model, chat, [Replayed() for _ in range(n)], specs, sampling, turns,
                            SETTINGS.context, on_truncation="invalid", slots=slots)
    return episodes, slots.steps


def peak_of(action):
    """What an action returns, and the bytes by which this process grew at most meanwhile."""
    Path("/proc/self/clear_refs").write_text("5")                       # resets the high-water mark
    before = status("VmRSS")
    result = action()
    return result, status("VmHWM") - before


def status(name):
    """A field of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))


def compared(games=lengths.GAMES, tokenizer=lengths.TOKENIZER):
    """{quantity: {"predicted", "measured", "ratio"}}."""
    given = games_and_chat(games, tokenizer)
    ours, theirs = predicted(*given), measured(*given)
    return {key: {"predicted": ours[key], "measured": theirs[key], "ratio": ours[key] / theirs[key]}
            for key in ours}


def main(argv=None):
    parser = argparse.ArgumentParser("python -m lab.bench.memory_check", description=__doc__.splitlines()[0])
    parser.add_argument("--dry", action="store_true", help="print only")
    options = parse_clean(parser, argv)
    if not ALLOCATOR.items() <= os.environ.items():                # it is read when a process starts
        os.execve(sys.executable, [sys.executable, "-m", "lab.bench.memory_check", *sys.argv[1:]],
                  os.environ | ALLOCATOR)
    found = compared()
    for key, one in found.items():
        print(f"{key}: predicted {one['predicted']:.0f}, measured {one['measured']:.0f}, "
              f"ratio {one['ratio']:.3f}")
    if not options.dry:
        files.write_json(OUT, {"what": "the meter's predictions against a run on a CPU",
                               "command": "python -m lab.bench.memory_check", "commit": options.commit,
                               "torch": torch.__version__, "machine": platform.machine(), "found": found})


if __name__ == "__main__":
    main()
