"""Checks of an algorithm by its contract (`algorithms.Method`): of its loss, its critic, and what it writes.

Each names the first mistake in a line, "" if there is none.
"""

import inspect
import sys

import torch

RATIOS = ("token", "turn", "episode")
PLAIN = {type(None), bool, int, float, str, bytes}
GROUPS_OF_THE_RUN = ("policy", "judge", "rollout", "time", "memory")       # of metrics, "group/name"


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
