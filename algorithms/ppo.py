"""PPO: a critic estimates values, and a turn's advantage is estimated by GAE (arXiv:1707.06347).

The critic is a second model with a value head, trained along with the policy. No groups: 128 tasks are played
once each.

    paper   GAE over turns: V before a turn's response, gamma 1, no bootstrap at the end, because the turn
            limit is part of the task; every token of a turn has the turn's advantage
    code    verl-agent's: each turn on its own, A = R - V at every token (gamma = lambda = 1 within the
            response), where R is the episode's success reward minus this turn's own penalty
"""

import math
from dataclasses import dataclass, replace

import torch

import algorithms
import batching
import update
from algorithms import rewards
from infra import parallel
from infra.flags import setting
from lm import model as decoder
from lm.optim import adamw


@dataclass(frozen=True)
class Settings(rewards.Settings):
    """PPO's flags."""

    variant: str = setting("paper", "GAE over turns, or verl-agent's code: each token against its episode's "
                           "success", ("paper", "code"))
    gae_lambda: float = setting(0.95, "lambda of GAE over turns", low=0, high=1, needs=(
        lambda values: values["variant"] == "paper", "only with --variant paper"))
    critic_lr: float = setting(3e-3, "learning rate of the critic", low=0)
    value_clip: float = setting(0.5, "a value that moved toward its target by more in an iteration has no "
                                "gradient; 0: no clip", low=0)


@dataclass(slots=True)
class ValueSample(batching.Sample):
    """A sample of the policy with the critic's value and its target for each sampled token."""

    value: list[float] = None     # V before each sampled token
    target: list[float] = None    # one per sampled token; nan: no target


def gae(reward_S, value_S, turns_E, lam=0.95):
    """Generalized advantage estimation (arXiv:1506.02438) over an episode's turns, and the critic's targets.

        delta_t = r_t + V_{t+1} - V_t,  A_t = sum_k lam^k delta_{t+k}         Eq. 16 with gamma = 1
        return_t = A_t + V_t

    value_S: V before the turn's response; V after the last turn is 0, won or not, because the turn limit is
    part of the task. Returns advantage_S and return_S. Applied to the tokens of one response, with the reward
    at the last token and lam = 1, this is verl-agent's A = R - V.
    """
    next_S = value_S.roll(-1)
    next_S[(turns_E.cumsum(0) - 1)[turns_E > 0]] = 0.0
    delta_S = reward_S + next_S - value_S
    advantage_S = rewards.discounted_returns(delta_S, turns_E, lam)       # the same sum, of deltas with lam
    return advantage_S, advantage_S + value_S


def clipped_value_loss(value_N, value_old_N, return_N, clip):
    """Half the squared error of the critic or, if larger, that of its clipped value.

        L = 0.5 * max((V - R)^2, (V_old + clip(V - V_old, -clip, clip) - R)^2)    as in PPO2 and verl

    clip 0: no clipping. Returns loss_N and clipped_N (bool: the clipped term is active, the gradient is 0).
    """
    free_N = (value_N - return_N).square()
    if clip == 0:
        return 0.5 * free_N, torch.zeros_like(free_N, dtype=torch.bool)
    bound_N = (value_old_N + (value_N - value_old_N).clamp(-clip, clip) - return_N).square()
    # within the range the clipped value is V itself, but for rounding
    clipped_N = (bound_N > free_N) & ((value_N - value_old_N).abs() > clip)
    return 0.5 * torch.maximum(free_N, bound_N), clipped_N


def explained_variance(value_N, return_N):
    """1 - Var(R - V) / Var(R): 1 is a perfect critic, 0 a constant one; nan if all returns are equal."""
    if len(return_N) == 0 or (return_N == return_N[0]).all():
        return math.nan
    return float(1 - (return_N - value_N).var(correction=0) / return_N.var(correction=0))


def new_critic(policy, shard):
    """Return a copy of the policy with a value head of zeros (its first values are 0), and its optimizer."""
    with torch.device("meta"):
        model = decoder.Model(replace(policy.config, value_head=True))
    model, weights = shard(model), dict(policy.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():     # the policy may have a judge's value head
            if name in decoder.VALUE_HEAD:
                parameter.zero_()
            else:
                parallel.copy_part(parameter, weights[name])
    optimizer = adamw(model)
    parallel.offload(model)
    return model, optimizer


def values(critic, samples, objective):
    """V before each sampled token: one list per sample."""
    def of_batch(batch):
        positions = [[t - 1 for t, sampled in enumerate(sample.sampled) if sampled] for sample in batch]
        return update.values_at(critic, batch, positions).split([len(of_sample) for of_sample in positions])

    return [value_N.tolist() for value_N in update.per_sample(critic, samples, objective, of_batch)]


def value_targets(sample):
    """(position, target, old value) of each sampled token that has a target; position: that of its logits."""
    positions = [t - 1 for t, sampled in enumerate(sample.sampled) if sampled]
    triples = zip(positions, sample.target, sample.value, strict=True)
    return [(t, target, value) for t, target, value in triples if not math.isnan(target)]


def update_critic(critic, optimizer, samples, objective, value_clip, lr):
    """Take one optimizer step on the clipped value loss of ValueSamples, mean over the targets of all ranks.

    Returns metrics, equal on all ranks. Raises update.NonFinite.
    """
    with_targets = [sample for sample in samples if value_targets(sample)]
    sums = dict.fromkeys(("loss", "clipped", "value"), 0.0)
    units = max(parallel.all_sum(float(sum(len(value_targets(sample)) for sample in with_targets))), 1.0)

    def loss_of(batch):
        targets = [value_targets(sample) for sample in batch]
        value_N = update.values_at(critic, batch, [[t for t, _, _ in of_sample] for of_sample in targets])
        numbers = [(target, value) for of_sample in targets for _, target, value in of_sample]
        return_N, old_N = torch.tensor(numbers, device=value_N.device).unbind(1)
        loss_N, clipped_N = clipped_value_loss(value_N, old_N, return_N, value_clip)
        sums["clipped"] += float(clipped_N.sum())
        sums["value"] += float(value_N.detach().sum())
        loss = loss_N.sum() / units
        sums["loss"] += float(loss.detach())
        return loss

    for batch in batching.equal_microbatches(with_targets, objective.microbatch_tokens):
        (loss_of(batch) if batch else update.empty_loss(critic, "value")).backward()
    grads, total = parallel.pop_grads(critic), parallel.all_sum(sums)
    norm = parallel.norm(grads)
    update.check_finite(samples, {"critic loss": total["loss"], "gradient norm": norm})
    update.step(critic, optimizer, [(1.0, grads)], norm, objective.max_grad_norm, lr)
    return {"critic/loss": total["loss"], "critic/clip_frac": total["clipped"] / units,
            "critic/grad_norm": norm, "critic/value_mean": total["value"] / units}


def value_metrics(samples):
    """Metrics: the share of the returns' variance that the values explain, over the targets of all ranks."""
    pairs = [(value, target) for sample in samples for _, target, value in value_targets(sample)]
    of_all_ranks = [pair for rank_pairs in parallel.all_gather(pairs) for pair in rank_pairs]
    value_N, return_N = torch.tensor(of_all_ranks, dtype=torch.double).reshape(-1, 2).unbind(1)
    return {"critic/explained_variance": explained_variance(value_N, return_N)}


class Method(algorithms.Method):
    """PPO with a critic of its own."""

    Settings = Settings
    groups = False
    kl_in_reward = False
    trains_critic = True

    def begin(self, model, objective, minibatches, shard):
        """Create the critic."""
        super().begin(model, objective, minibatches, shard)
        self.critic = new_critic(model, shard)

    def assign(self, episodes):
        """Write advantages from the critic's values, whitened over all ranks; then train the critic."""
        with parallel.onloaded(self.model, *self.critic):
            return self._assign(episodes)

    def _assign(self, episodes):
        """`assign`, with the critic on the device."""
        samples = [sample for e in episodes for sample in batching.samples_of(e, make=ValueSample)]
        for sample, value in zip(samples, values(self.critic[0], samples, self.objective)):
            sample.value = value
        value_N = torch.tensor([v for sample in samples for v in sample.value])
        tokens_S = torch.tensor([len(turn.response_ids) for e in episodes for turn in e.turns]).long()
        credit = self._by_token if self.settings.variant == "code" else self._by_turn
        targets = credit(episodes, value_N, tokens_S).split([len(sample.value) for sample in samples])
        for sample, target_N in zip(samples, targets):
            sample.target = target_N.tolist()
        metrics, steps = value_metrics(samples), []
        clip, rate = self.settings.value_clip, self.settings.critic_lr * self.lr_factor
        for part in batching.minibatches(samples, self.minibatches):
            if parallel.any_rank(part):
                steps.append(update_critic(*self.critic, part, self.objective, clip, rate))
        return metrics | update.mean_of(steps)

    def _by_turn(self, episodes, value_N, tokens_S):
        """Write GAE over turns. Returns target_N, with targets at each turn's first token only, else nan."""
        won_E, turns_E, _, valid_S = rewards.episode_tensors(episodes, self.settings)
        reward_S = rewards.turn_rewards(won_E, valid_S, turns_E, self.settings)
        reward_S = reward_S + rewards.own_turn_rewards(episodes)
        first_S = tokens_S.cumsum(0) - tokens_S
        advantage_S, return_S = gae(reward_S, value_N[first_S], turns_E, lam=self.settings.gae_lambda)
        moments = parallel.all_sum(rewards.moments(advantage_S))
        rewards.write_advantages(episodes, rewards.whitened(advantage_S, moments))
        return torch.full_like(value_N, math.nan).index_copy(0, first_S, return_S)

    def _by_token(self, episodes, value_N, tokens_S):
        """Write verl-agent's A = R - V at every token. Returns target_N, which is R."""
        target_N = rewards.grouped_rewards(episodes, self.settings)[0].repeat_interleave(tokens_S)
        turns = [turn for episode in episodes for turn in episode.turns]
        for turn, advantage_N in zip(turns, (target_N - value_N).split(tokens_S.tolist())):
            turn.token_advantage = advantage_N.tolist()
        rewards.whiten_tokens(episodes)
        return target_N
