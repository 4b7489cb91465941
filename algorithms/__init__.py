"""What an algorithm is: it turns the rewards of episodes into the advantage of each of their turns, and may
bring its own loss.

One file is one method: its equations with their sources, its settings, which become flags of gcd.py when it
is chosen, `assign` and `loss`. `--algo NAME` is class Method of algorithms/NAME.py, `--algo path/to/file.py`
that of any file.

    python gcd.py --algo gigpo --help          # gigpo's own flags, in addition to those of every run
"""

import inspect
import sys

import torch

import losses
from algorithms import rewards
from infra import parallel, plugins

RATIOS = ("token", "turn", "episode")
WITHOUT_GROUPS = dict(tasks=128, group_size=1, dynamic_sampling="keep")    # defaults of a run without groups
PLAIN = {type(None), bool, int, float, str, bytes}
GROUPS_OF_THE_RUN = ("policy", "judge", "rollout", "time", "memory")       # of metrics, "group/name"


class Method:
    """Base class of every --algo: `assign` writes advantages, the attributes declare what else it supports.

    A public name that is not declared here is refused; a helper's name begins with an underscore. If a
    paper's released code differs from the paper, `Settings` has a field `variant`, "paper" or "code".

    loss(ratio_N, advantage_N) returns loss_N, with a gradient through ratio_N, and clipped_N (bool: a bound
    is active) of the N sampled tokens of a microbatch, the policy's and the judge's. `self.objective` has the
    run's bounds. Weights, the mean, KL and the sampler's correction are applied to it in update.token_loss.
    """

    _required = ("assign",)
    Settings = rewards.Settings  # a frozen dataclass: each field is a flag of this algorithm
    defaults = {}                # changed defaults of the run's other settings; those of base classes add up
    code_defaults = dict(success_reward=10.0, invalid="format", invalid_unit="turn")    # with --variant code
    groups = True                # True: compares a task's episodes; a group needs at least two.
                                 # False: the defaults WITHOUT_GROUPS
    allows_refill = False        # True: a group has a gradient exactly if its rewards are unequal
    tags = False                 # True: needs RLVMR's tags in the responses
    kl_in_reward = True          # True: supports --kl reward
    trains_critic = False        # True: trains a second network, `critic`
    critic = None                # (model, optimizer), if it does; set by `begin`
    state = None                 # what else it remembers from one iteration to the next; see `__init__`
    rng = None                   # a random.Random of the run's seed and the iteration, equal on all ranks
    lr_factor = 1.0              # on its own learning rates in this iteration: the run's warm-up and decay
    ratio = "token"              # what a ratio is of; "turn" or "episode": see losses.sequence_ratio
    loss = None                  # None: losses.clipped_surrogate

    def __init__(self, settings):
        """An empty `state`: a dict of numbers, texts, bytes, tensors, lists and dicts, equal on all ranks.

        Rank 0 saves it with each checkpoint, and --resume restores it before the first iteration. Other
        attributes are not saved.
        """
        self.settings, self.state = settings, {}

    def begin(self, model, objective, minibatches, shard):
        """Called once, when RL starts: the policy, update.Objective, the number of optimizer steps per
        iteration, and shard(model), which shards a model over the ranks: see `parallel.shard`."""
        self.model, self.objective, self.minibatches = model, objective, minibatches

    def begin_checked(self, *arguments):
        """`begin`. PluginError if what it made cannot be saved."""
        self.begin(*arguments)
        plugins.refuse(wrong_critic(self) or wrong_state(self.state), self, "begin")

    def assign(self, episodes):
        """Write `turn.advantage` (and `turn.token_advantage`, if tokens differ) of this rank's episodes.

        All ranks call it; no group is split over ranks. It may add episodes to the list, with a group and an
        index of their own. Returns metrics, equal on all ranks: {"group/name": number} in a group of its own.
        """
        raise NotImplementedError(type(self))

    def assign_checked(self, episodes):
        """`assign`. PluginError if it leaves no episode, an advantage is no finite number, a logprob is
        missing, a metric is no number, or the state or the critic's optimizer cannot be saved. Returns the
        metrics.
        """
        metrics = self.assign(episodes)
        for episode in episodes:
            for t, turn in enumerate(episode.turns, 1):
                if wrong := wrong_advantage(turn):
                    plugins.refuse(wrong, self, f"task {episode.task.id}, turn {t}")
        none = "" if episodes else "it left no episode; expected at least one"
        if wrong := none or wrong_metrics(metrics) or wrong_state(self.state):
            plugins.refuse(wrong, self, "assign")
        if self.critic:
            plugins.refuse(wrong_optimizer(self.critic[1]), self, "critic")
        return metrics

    def zero_variance_groups(self, episodes):
        """The groups whose compared values are all equal: if only rewards count, they have no gradient."""
        reward, group, _ = rewards.grouped_rewards(episodes, self.settings)
        return {int(number) for number in group.unique() if len(reward[group == number].unique()) == 1}

    def center_kl(self, penalty_E, group_E):
        """Subtract its baseline from each episode's KL penalty: by default the group's mean or, without
        groups, that of all episodes on all ranks.
        """
        if self.groups:
            return losses.group_relative_advantage(penalty_E, group_E)
        total = parallel.all_sum({"penalty": float(penalty_E.sum()), "episodes": len(penalty_E)})
        return penalty_E - total["penalty"] / max(total["episodes"], 1)

    def subtract_kl(self, episodes):
        """For --kl reward: subtract each episode's centered sum of `turn.kl` from its advantages.

        The task's reward is normalized without it: equal rewards add exactly 0, and no std divides the KL.
        """
        penalty_E = torch.tensor([sum(sum(turn.kl) for turn in e.turns) for e in episodes])
        centered_E = self.center_kl(penalty_E, torch.tensor([e.group for e in episodes]))
        for episode, penalty in zip(episodes, centered_E.tolist()):
            for turn in episode.turns:
                turn.advantage -= penalty
                if turn.token_advantage:
                    turn.token_advantage = [advantage - penalty for advantage in turn.token_advantage]


def wrong_loss(method):
    """What is wrong with an algorithm's `ratio` or `loss` before it is called; "" if nothing is."""
    if method.ratio not in RATIOS:
        return f"ratio is {method.ratio!r:.60}; expected one of {', '.join(RATIOS)}"
    came = f"loss is {method.loss!r:.60}"
    try:
        if method.loss is not None:
            came = f"loss{(signature := inspect.signature(method.loss))}"
            signature.bind("ratio_N", "advantage_N")
    except (TypeError, ValueError):
        return f"{came}; expected a function of ratio_N and advantage_N"
    return ""


def wrong_critic(method):
    """What is wrong with an algorithm's second network after `begin`; "" if nothing is."""
    critic, kinds = method.critic, (torch.nn.Module, torch.optim.Optimizer)
    if (critic is not None) != method.trains_critic:
        return f"trains_critic is {method.trains_critic}, and critic is {critic!r:.60}"
    if critic is None:
        return ""
    if not (isinstance(critic, tuple) and len(critic) == 2 and all(map(isinstance, critic, kinds))):
        return f"critic is {critic!r:.60}; expected (torch.nn.Module, torch.optim.Optimizer)"
    own = {*map(id, critic[0].parameters())}
    if not all(id(parameter) in own for group in critic[1].param_groups for parameter in group["params"]):
        return "the critic's optimizer has a parameter that is not the critic's"
    return ""


def wrong_optimizer(optimizer):
    """What in an optimizer's state infra.checkpoint could not restore; "" if it can."""
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if not (isinstance(value, torch.Tensor) and value.shape in ((), parameter.shape)):
                return (f"its optimizer {type(optimizer).__name__} has {key} {value!r:.60}; expected tensors "
                        "of one number or of their parameter's shape")
    return ""


def wrong_state(state):
    """What in an algorithm's state cannot be saved, or read without running code; "" if all can."""
    if type(state) is not dict:
        return f"its state is {state!r:.60}; expected a dict"
    return wrong_part(state, "state")


def wrong_part(value, name):
    """`wrong_state` of a part of a state, which is called `name`."""
    parts = {}
    if type(value) is dict and {*map(type, value)} <= {str, int}:
        parts = value
    elif type(value) in (list, tuple):
        parts = {} if {*map(type, value)} <= PLAIN else dict(enumerate(value))        # fast for a long list
    elif parallel.is_sharded(value):
        return f"its {name} is this rank's part of a tensor; expected all of it: infra.parallel.full_tensor"
    elif type(value) not in PLAIN and not isinstance(value, torch.Tensor):
        return (f"its {name} is {value!r:.60}; expected a number of Python's own, a text, bytes, a tensor, a "
                "list, or a dict with texts or numbers as keys")
    return next(filter(None, (wrong_part(part, f"{name}[{key!r:.30}]") for key, part in parts.items())), "")


def wrong_advantage(turn):
    """What is wrong with the advantage of a turn and its tokens, or with its logprobs; "" if nothing is."""
    if not is_finite(turn.advantage):
        return f"its advantage is {turn.advantage!r:.60}; expected a finite number"
    n = len(turn.response_ids)
    if not isinstance(turn.logprob_old, list) or len(turn.logprob_old) != n:
        return f"its logprob_old is {turn.logprob_old!r:.60}; expected a list of {n} numbers"
    if turn.token_advantage is None:
        return ""
    if not isinstance(turn.token_advantage, list) or len(turn.token_advantage) != n:
        return f"its token_advantage is {turn.token_advantage!r:.60}; expected a list of {n} numbers, or None"
    wrong = [number for number in turn.token_advantage if not is_finite(number)]
    return f"its token_advantage has {wrong[0]!r:.60}; expected finite numbers" if wrong else ""


def wrong_metrics(metrics):
    """What is wrong with an algorithm's metrics; "" if nothing is. NaN is allowed: it is logged as null."""
    if not isinstance(metrics, dict):
        return f"it returned {metrics!r:.60}; expected a dict of metrics, {{}} for none"
    for name, number in metrics.items():
        group, slash, rest = name.partition("/") if isinstance(name, str) else ("", "", "")
        if not (group and slash and rest) or group in GROUPS_OF_THE_RUN:
            return (f"its metric is named {name!r:.60}; expected \"group/name\", the group none of "
                    f"{', '.join(GROUPS_OF_THE_RUN)}")
        if not isinstance(number, (int, float)) or isinstance(number, bool):
            return f"its metric {name} is {number!r:.60}; expected a number"
    return ""


def is_finite(number):
    """Whether a value is a number (int or float, and no bool) that a float can hold."""
    return (isinstance(number, (int, float)) and not isinstance(number, bool)
            and abs(number) <= sys.float_info.max)
