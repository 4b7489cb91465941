"""New tokens per second of multi-turn episodes: our slot engine against transformers' generate.

transformers is given the whole conversation anew each turn. Same weights, same episodes, same number of turns
and the same limit on a response, one run; the model is untrained. The observations are those of expert
episodes in generated rooms, whatever the model answers, so prompts grow as they do in training. Left out:
GPUs, and engines made for serving.

    python -m bench.rollout [--episodes 64] [--turns 20] [--threads 1] [--hidden-size 64]
"""

import argparse
import json
import tempfile
import time
from contextlib import contextmanager

import torch
import transformers

import rollout
from envs import Reply
from envs.alfred import expert, rooms
from envs.alfred.game import Game
from lm import model as qwen
from lm.chat import Chat
from lm.engine import Sampling
from run.parallel import stream

RESPONSE_TOKENS = 6      # about what a command and its stop token take
CONTEXT = 4096


class Recorded:
    """An environment that answers with a recorded episode's observations, whatever the command."""

    def __init__(self, observations):
        self.observations = observations

    def reset(self, task, seed=0):
        """The first observation."""
        self.turn = 0
        return Reply(self.observations[0], [], False, False)

    def step(self, command):
        """The next; after the last, the first again."""
        self.turn += 1
        return Reply(self.observations[self.turn % len(self.observations)], [], False, False)


def recorded(n):
    """Observations of n expert episodes and their tasks."""
    tasks = rooms.tasks("dev")[:n]
    prior = expert.learn_prior([rooms.task("train", i) for i in range(100)])
    shown = [expert.demonstrate(Game(), task, prior, seed=i) for i, task in enumerate(tasks)]
    return tasks, [demonstration.observations for demonstration in shown]


@contextmanager
def counted(model):
    """A list to which every forward adds how many positions it ran, padding included."""
    run = []
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: run.append((args or [kwargs["input_ids"]])[0].numel()), with_kwargs=True)
    yield run
    hook.remove()


def ours(model, chat, tasks, observations, turns):
    """Seconds, new tokens and positions run of one play() of all episodes."""
    seats = [rollout.Seat(task, i, stream(0, i)) for i, task in enumerate(tasks)]
    sampling = Sampling(max_response_tokens=RESPONSE_TOKENS)
    envs = [Recorded(o) for o in observations]
    with counted(model) as run:
        started = time.perf_counter()
        episodes = rollout.play(model, chat, envs, seats, sampling, turns, CONTEXT, on_truncation="invalid")
        return time.perf_counter() - started, rollout.summary(episodes)["response_tokens"], sum(run)


@torch.no_grad()
def theirs(model, chat, observations, turns):
    """The same with transformers: each turn, generate from the whole conversation, left-padded."""
    pad, new = chat.tokenizer.pad_token_id, 0
    prompts = [chat.message(o[0], first=True) for o in observations]
    with counted(model) as run:
        started = time.perf_counter()
        for turn in range(1, turns + 1):
            new += say(model, chat, prompts, pad)
            prompts = [p + chat.message(seen[turn % len(seen)]) for p, seen in zip(prompts, observations)]
        return time.perf_counter() - started, new, sum(run)


def say(model, chat, prompts, pad):
    """One `generate` from the prompts, to which the responses are added; how many tokens these have."""
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
    """The same random weights as ours and as transformers' model, and their chat."""
    with tempfile.TemporaryDirectory() as folder:
        vocabulary = len(qwen.save_small_tokenizer(rooms.phrases(), folder))
        shape = qwen.ModelConfig(vocabulary, hidden_size, 3 * hidden_size, 3, 4, 4, hidden_size // 2,
                                 max_position_embeddings=CONTEXT, tie_word_embeddings=True)
        model = qwen.Model(shape)
        qwen.init_weights(model, 0)
        qwen.save_pretrained(model, folder)
        peer = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        return model, peer, Chat(qwen.load_tokenizer(folder), "plain")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--hidden-size", type=int, default=64)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, peer, chat = both_models(args.hidden_size)
    tasks, observations = recorded(args.episodes)
    ours(model, chat, tasks[:4], observations[:4], 2)          # warm up both
    theirs(peer, chat, observations[:4], 2)
    our_s, our_tokens, _ = ours(model, chat, tasks, observations, args.turns)
    their_s, their_tokens, _ = theirs(peer, chat, observations, args.turns)
    print(json.dumps({
        "what": "new tokens/s, multi-turn episodes", "ours": round(our_tokens / our_s),
        "transformers": round(their_tokens / their_s),
        "ratio": round(our_tokens / our_s / (their_tokens / their_s), 2),
        "episodes": args.episodes, "turns": args.turns,
        "hidden_size": args.hidden_size, "threads": args.threads, "torch": torch.__version__,
        "transformers_version": transformers.__version__}))


if __name__ == "__main__":
    main()
