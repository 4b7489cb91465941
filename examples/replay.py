"""GRPO that learns again from episodes that it has won before: an algorithm with a memory, in one file.

    A   = R - mean_g R                of this iteration's episodes, as in GRPO
    A_t = w min(pi / mu, 2)           of each token of --replays earlier won ones, w = --replay-weight

mu is the policy that sampled the earlier episode and pi the one before this iteration's steps. So pi / mu is
a truncated importance weight (losses.sampler_weight), and the loss clips what the steps change of pi.

    python gcd.py --algo examples/replay.py --env examples/lamps.py --iterations 10 --evaluate dev
"""

import statistics
from dataclasses import dataclass

import torch

import losses
import update
from algorithms import grpo
from batching import samples_of
from envs import Task
from infra import parallel
from infra.flags import setting
from rollout import Episode, Turn

KEPT = 256             # episodes in the memory, at most
CAP = 2.0


@dataclass(frozen=True)
class Settings(grpo.Settings):
    """GRPO's flags, and two more."""

    replays: int = setting(16, "earlier won episodes that an iteration learns from again", low=0)
    replay_weight: float = setting(0.5, "their advantage, before the importance weight", low=0)


def record_of(episode):
    """What the memory keeps of an episode: of each turn the tokens, and the logprobs that it had then."""
    return [[turn.prompt_ids, turn.response_ids, turn.logprob_old, turn.allowed] for turn in episode.turns]


def episode_of(record, number, index):
    """An episode of its own group, with what the update reads of it."""
    turns = [Turn("", prompt_ids, response_ids, logprob_old, "", None, True, "", allowed=allowed)
             for prompt_ids, response_ids, logprob_old, allowed in record]
    return Episode(Task(f"replay {number}", "train", "", None), -1 - number, index, turns, won=True)


class Method(grpo.Method):
    """GRPO with replay. The memory is in `state`: equal on all ranks, saved, and restored by --resume."""

    Settings = Settings
    kl_in_reward = False                  # a replayed episode has no reward that a KL could be part of

    def assign(self, episodes):
        """Write GRPO's advantages, and add this rank's share of the replayed episodes with theirs."""
        metrics, memory = super().assign(episodes), self.state.get("won", [])
        drawn = self.rng.sample(memory, min(self.settings.replays, len(memory)))
        won = sum(parallel.all_gather([record_of(episode) for episode in episodes if episode.won]), [])
        self.state["won"] = (memory + won)[-KEPT:]
        rank, world_size = parallel.rank_and_size()
        first = 1 + int(parallel.all_max(max(episode.index for episode in episodes)))     # that is free
        replayed = [episode_of(record, k, first + k) for k, record in enumerate(drawn)
                    if k % world_size == rank]
        weights = sum(parallel.all_gather(self._weights(replayed)), [])
        episodes += replayed
        return metrics | {"replay/episodes": len(drawn),
                          "replay/importance": statistics.fmean(weights) if weights else float("nan")}

    def _weights(self, replayed):
        """Write the old logprobs and advantages of replayed episodes. Returns their tokens' weights."""
        samples, weights = [sample for episode in replayed for sample in samples_of(episode)], []
        for sample, logprob in zip(samples, update.logprobs(self.model, samples, self.objective)):
            now = iter([number for number, sampled in zip(logprob, sample.sampled) if sampled])
            for turn in sample.turns:
                then, turn.logprob_old = turn.logprob_old, [next(now) for _ in turn.response_ids]
                weight_N, _ = losses.sampler_weight(torch.tensor(turn.logprob_old), torch.tensor(then), CAP)
                turn.token_advantage = (self.settings.replay_weight * weight_N).tolist()
                weights += weight_N.tolist()
        return weights
