"""GRPO with NTHR: a lower penalty for tokens of lost episodes that resemble tokens of won ones.

NTHR (arXiv:2505.18830) is defined for single answers. Our choice for agents, which the papers do not cover: a
"response" is all sampled tokens of an episode, its label is whether the episode was won, and its group is the
episodes of the task. Groups without both labels keep GRPO's advantages.
Shapes: N sampled tokens of a group, V columns of the vocabulary, d hidden size, E episodes.
"""

import math
from dataclasses import dataclass

import torch

import batching
import update
from algorithms import grpo, rewards
from infra import parallel
from infra.flags import setting
from lm import logprobs
from lm.restrict import restricted


@dataclass(frozen=True)
class Settings(grpo.Settings):
    """GRPO's flags and NTHR's threshold."""

    nthr_beta: float = setting(1.0, "threshold, times the smallest mean score of a won episode", low=0)


def prediction_error(logits_NV, target_N, columns):
    """Return g = e_y - pi per token in some columns of the vocabulary: the gradient of log pi by the logits.

    columns: int, V* = the tokens of the group's responses, which include the targets. pi is not renormalized
    to them. With every column, g h^T is the gradient of log pi(y) by the weights of an untied output layer.
    """
    hit_NV = target_N[:, None] == columns
    assert hit_NV.any(1).all(), f"targets {target_N[~hit_NV.any(1)].tolist()} not among the columns"
    return hit_NV.float() - logits_NV.float().softmax(-1)[:, columns]


def nthr_scores(hidden_Nd, error_NV, episode_N, won_E, beta=1.0):
    """Score each token by how much an update on the won episodes' tokens changes its logprob.

        s(token) = sum over tokens k of won episodes of <g_k, g> <h_k, h> = g^T M h,  M = sum_k g_k h_k^T
        tau = beta * min over won episodes of the mean of s over their tokens

    One task group: hidden_Nd is the last hidden state that predicted each token, error_NV its
    prediction_error, both of the sampling policy; episode_N indexes won_E. A won episode's own tokens count
    in its s, as in the equation; the paper's text has "other correct responses". Returns score_N and tau (inf
    if no won episode has tokens).
    """
    won_N = won_E[episode_N]
    pull_Vd = error_NV[won_N].T @ hidden_Nd[won_N]
    score_N = ((error_NV @ pull_Vd) * hidden_Nd).sum(1)
    count_E = torch.bincount(episode_N, minlength=len(won_E))
    mean_E = score_N.new_zeros(len(won_E)).index_add_(0, episode_N, score_N) / count_E.clamp(min=1)
    known = mean_E[won_E & (count_E > 0)]
    return score_N, beta * float(known.min()) if len(known) else math.inf


def nthr_weights(hidden_Nd, error_NV, episode_N, won_E, beta=1.0):
    """Factor on each token's advantage: 2 |1/2 - p| for tokens of lost episodes that score above tau, else 1.

    p: share of won episodes; at 1/2 those tokens are dropped, at 0 and 1 all factors are 1. The paper's
    rewards are 0 or 1, so a lost answer's advantage is negative; here others' penalties can make it positive,
    and it is lowered as well.
    Arguments as in nthr_scores. Returns weight_N.
    """
    score_N, threshold = nthr_scores(hidden_Nd, error_NV, episode_N, won_E, beta)
    weak_N = ~won_E[episode_N] & (score_N > threshold)
    return torch.where(weak_N, 2 * abs(0.5 - float(won_E.float().mean())), 1.0)


def hidden_and_error(model, samples, columns, objective):
    """Per sample: hidden_Nd, lm_head's input for each sampled token, and error_NV, both in fp32."""
    device = batching.device_of(model)
    column_V = torch.tensor(columns, dtype=torch.long, device=device)

    def head(hidden_Nd, lm_head, target_N, allowed):
        logits_NV = restricted(lm_head(hidden_Nd).float() / objective.temperature, allowed)
        return hidden_Nd.float(), prediction_error(logits_NV, target_N, column_V)

    def of_batch(batch):
        micro = batching.collate(batch, model)
        read = logprobs.in_chunks(head, micro.target_N, micro.allowed)
        outputs = model(micro.ids_1M, micro.attention, micro.column_N, read)
        counts = [sum(sample.sampled) for sample in batch]
        return zip(*(output.split(counts) for output in outputs))

    return update.per_sample(model, samples, objective, of_batch)


class Method(grpo.Method):
    """GRPO's advantages, times `nthr_weights` per token in groups with both won and lost episodes."""

    Settings = Settings
    kl_in_reward = False

    def assign(self, episodes):
        """Write the token advantages. Needs the sampling policy's weights: call it before the first step."""
        super().assign(episodes)
        groups = rewards.groups_of(episodes).values()
        mixed = [group for group in groups if len({e.won for e in group}) == 2]
        sums = {"groups": len(groups), "mixed": len(mixed), "lost": 0, "weakened": 0}
        for group in batching.pad_to_all_ranks(mixed):       # FSDP: equal numbers of forwards on all ranks
            self._weaken(group, sums)
        total = parallel.all_sum(sums)
        return {"nthr/mixed_frac": total["mixed"] / max(total["groups"], 1),
                "nthr/weakened_frac": total["weakened"] / max(total["lost"], 1)}

    def _weaken(self, group, sums):
        """Write the token advantages of one mixed group, which may be empty, and add to the counts."""
        turns = [turn for episode in group for turn in episode.turns]
        columns = sorted({token for turn in turns for token in turn.response_ids})
        samples = [sample for episode in group for sample in batching.samples_of(episode)]
        outputs = hidden_and_error(self.model, samples, columns, self.objective)
        if not outputs:
            return
        hidden_Nd, error_NV = (torch.cat(of_samples) for of_samples in zip(*outputs))
        owners = [e for e, episode in enumerate(group) for turn in episode.turns for _ in turn.response_ids]
        episode_N = torch.tensor(owners, device=hidden_Nd.device)
        won_E = torch.tensor([episode.won for episode in group], device=hidden_Nd.device)
        weight_N = nthr_weights(hidden_Nd, error_NV, episode_N, won_E, self.settings.nthr_beta)
        sums["lost"] += int((~won_E[episode_N]).sum())
        sums["weakened"] += int((weight_N < 1).sum())
        weights = iter(weight_N.tolist())
        for turn in turns:
            turn.token_advantage = [turn.advantage * next(weights) for _ in turn.response_ids]
