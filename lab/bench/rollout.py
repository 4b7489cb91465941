"""New tokens per second of multi-turn episodes: our slot engine compared with transformers' `generate`.

`generate` gets the full conversation as its prompt in each turn. Both use the same untrained weights,
episodes, number of turns and response limit, in one run. The observations are those of expert episodes in
generated rooms, whatever the model answers, so that prompts grow as in training, on both sides alike. Left
out: GPUs, and serving engines. `lab.bench.iteration` runs both.
"""

import tempfile
import time
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import torch
import transformers

import rollout
from envs import Reply
from envs.alfred import expert, rooms
from envs.alfred.game import Game
from infra.streams import stream
from lm import model as decoder
from lm import small
from lm.chat import Chat
from lm.engine import Sampling, Slots

RESPONSE_TOKENS = 6      # about what a command and its stop token take
CONTEXT = 4096


class Recorded:
    """A game that replays a recorded episode's observations, whatever the command."""

    def __init__(self, observations):
        self.observations = observations

    def reset(self, task, seed=0):
        """The first observation."""
        self.turn = 0
        return Reply(self.observations[0], [], False, False)

    def step(self, command):
        """The next observation; after the last one, the first again."""
        self.turn += 1
        return Reply(self.observations[self.turn % len(self.observations)], [], False, False)


def recorded(n):
    """n tasks, and the list of observations of an expert episode of each."""
    tasks = rooms.tasks("dev")[:n]
    prior = expert.learn_prior([rooms.task("train", i) for i in range(100)])
    demonstrations = [expert.demonstrate(Game(), task, prior, seed=i) for i, task in enumerate(tasks)]
    return tasks, [demonstration.observations for demonstration in demonstrations]


class Taking(Chat):
    """A chat in which every response is a command, as every response of `generate`'s side is followed by the
    recorded observation: an untrained model writes none.
    """

    def parse(self, text):
        """Any command: the game ignores it."""
        return "look", None


class Conversation(rollout.Conversation):
    """One in which a response that was cut at its limit is a command, too."""

    def submit(self, response, on_truncation="fail"):
        """Submit it as one that ended by itself."""
        super().submit(replace(response, truncated=False), on_truncation)


@contextmanager
def counted(model):
    """Yield a list to which every forward pass appends its number of positions, padding included."""
    positions = []
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: positions.append((args or [kwargs["input_ids"]])[0].numel()),
        with_kwargs=True)
    yield positions
    hook.remove()


def new_slots(model, chat, n):
    """Slots that `ours` may keep from one call to the next, as a run does."""
    return Slots(model, n, CONTEXT, chat.stop_ids, Sampling(max_response_tokens=RESPONSE_TOKENS))


def ours(model, chat, tasks, observations, turns, slots):
    """(seconds, new tokens, positions computed, tokens of the last prompts) of playing all episodes with
    rollout.play.
    """
    specs = [rollout.EpisodeSpec(task, i, stream(0, i)) for i, task in enumerate(tasks)]
    sampling = Sampling(max_response_tokens=RESPONSE_TOKENS)
    games = [Recorded(o) for o in observations]
    with counted(model) as positions, mock.patch.object(rollout, "Conversation", Conversation):
        started = time.perf_counter()
        episodes = rollout.play(model, chat, games, specs, sampling, turns, CONTEXT, slots=slots)
        seconds = time.perf_counter() - started
    return (seconds, rollout.counts_of(episodes)["response_tokens"], sum(positions),
            sum(len(episode.turns[-1].prompt_ids) for episode in episodes))


@torch.no_grad()
def theirs(model, chat, observations, turns):
    """The same with transformers: each turn calls `generate` on the full conversations, left-padded."""
    pad, new = chat.tokenizer.pad_token_id, 0
    prompts = [chat.message(o[0], first=True) for o in observations]
    with counted(model) as positions:
        started = time.perf_counter()
        for turn in range(1, turns + 1):
            last = sum(map(len, prompts))
            new += extend(model, chat, prompts, pad)
            prompts = [p + chat.message(seen[turn % len(seen)]) for p, seen in zip(prompts, observations)]
        return time.perf_counter() - started, new, sum(positions), last


def extend(model, chat, prompts, pad):
    """Call `generate` once and append the responses to the prompts; returns the number of new tokens."""
    width, new = max(map(len, prompts)), 0
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    out = model.generate(ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, pad_token_id=pad,
                         max_new_tokens=RESPONSE_TOKENS, eos_token_id=list(chat.stop_ids))
    for i, ids in enumerate(out[:, width:].tolist()):
        response = ids[:next((t for t, token in enumerate(ids, 1) if token in chat.stop_ids), None)]
        prompts[i] = prompts[i] + response
        new += len(response)
    return new


def both_models(hidden_size):
    """The same random weights as our model and as transformers' model, and their Chat."""
    with tempfile.TemporaryDirectory() as folder:
        vocabulary = len(small.save_small_tokenizer(rooms.phrases(), folder))
        shape = decoder.ModelConfig(vocabulary, hidden_size, 3 * hidden_size, 3, 4, 4, hidden_size // 2,
                                    max_position_embeddings=CONTEXT, tie_word_embeddings=True)
        model = decoder.Model(shape)
        decoder.init_weights(model, 0)
        decoder.save_pretrained(model, folder)
        peer = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        return model, peer, Taking(decoder.load_tokenizer(folder), "plain")
