"""What is wrong with what an environment, a game or an expert returned: what came and what was expected, in a
clause; "" if nothing is. The contracts themselves are in __init__.py.
"""

from collections import Counter
from dataclasses import fields
from itertools import product
from math import inf

from . import Demonstration, Reply, Task

MOST_REWARD = 1e9      # advantages are computed in fp32, which still holds sums of its square


def wrong_reply(reply, first=False):
    """What is wrong with a Reply: what came, and what was expected; "" if nothing is. first: to a reset."""
    if not isinstance(reply, Reply):
        return f"it returned {reply!r:.60}; expected a Reply"
    score = reply.score_100
    expected = {
        "observation": (isinstance(reply.observation, str), "text"),
        "admissible": (is_texts(reply.admissible), "a list of texts"),
        "won": (isinstance(reply.won, bool), "True or False, Python's own"),
        "done": (isinstance(reply.done, bool), "True or False, Python's own"),
        "objects": (is_texts(reply.objects), "a tuple of texts"),
        "score_100": (score is None or isinstance(score, (int, float)) and -100 <= score <= 100,
                      "a number from -100 to 100, or None"),
        "taken": (reply.taken is None or isinstance(reply.taken, bool), "True, False or None"),
        "reward": (isinstance(reply.reward, (int, float)) and abs(reply.reward) <= MOST_REWARD,
                   f"a Python number, of at most {MOST_REWARD:g} either way"),
        "ended": (isinstance(reply.ended, str), "text"),
        "answers": (is_texts(reply.answers), "a tuple of texts")}
    at_once = "done is True; expected False before the first command" if first and reply.done else ""
    return next((f"{name} is {getattr(reply, name)!r:.60}; expected {kind}"
                 for name, (right, kind) in expected.items() if not right), at_once)


def is_texts(value):
    """Whether a value is a list or tuple of texts."""
    return isinstance(value, (list, tuple)) and all(isinstance(text, str) for text in value)


def wrong_demonstration(demonstration):
    """What is wrong with a Demonstration, what came and what was expected; "" if nothing is."""
    if not isinstance(demonstration, Demonstration):
        return f"it returned {demonstration!r:.60}; expected a Demonstration"
    replies, commands, mistakes = demonstration.replies, demonstration.commands, demonstration.mistakes
    for name, given in (("replies", replies), ("commands", commands), ("mistakes", mistakes)):
        if not isinstance(given, (list, tuple)):
            return f"{name} is {given!r:.60}; expected a list"
    if not is_texts(commands) or len(replies) != len(commands) + 1 or len(mistakes) != len(commands):
        return (f"{len(commands)} commands, {len(replies)} replies, {len(mistakes)} mistakes; expected "
                "texts, one reply more, and as many mistakes")
    found = ((i, wrong_reply(reply, i == 0)) for i, reply in enumerate(replies))
    if wrong := next((f"reply {i}: {wrong}" for i, wrong in found if wrong), ""):
        return wrong
    if over := [i for i, reply in enumerate(replies[:-1]) if reply.done]:
        return f"reply {over[0]} is done, and {len(commands) - over[0]} commands follow; expected none"
    return "it is won without a command; expected at least one" if replies[0].won else ""


def wrong_tasks(tasks, n=None):
    """What is wrong with a list of n tasks (None: at least one); "" if nothing is."""
    right = isinstance(tasks, (list, tuple)) and all(isinstance(task, Task) for task in tasks)
    if right and (len(tasks) == n if n is not None else tasks):
        return next((f"it returned {task!r:.60}; expected text in id, split and task_type" for task in tasks
                     if not is_texts([task.id, task.split, task.task_type])), "")
    return f"it returned {tasks!r:.60}; expected a list of {'Tasks' if n is None else f'{n} Tasks'}"


def repeated_id(tasks):
    """Which id several of a split's tasks have; "" if none."""
    number = Counter(task.id for task in tasks)
    return next((f"{n} tasks have the id {name!r}" for name, n in number.items() if n > 1), "")


def wrong_games(games, n):
    """What is wrong with a list of n games; "" if nothing is."""
    if not (isinstance(games, (list, tuple)) and len(games) == n):
        return f"it returned {games!r:.60}; expected a list of {n} games"
    for game, name in product(games, ("reset", "step", "close")):
        if not callable(getattr(game, name, None)):
            return f"it returned games of class {type(game).__name__}, which has no method {name}"
    limits = [getattr(game, "time_limit_s", None) for game in games]
    if wrong := [limit for limit in limits if not (limit is None or isinstance(limit, (int, float))
                                                   and 0 < limit < inf)]:
        return f"it returned games whose time_limit_s is {wrong[0]!r:.60}; expected a number of seconds"
    if len({id(game) for game in games}) < n:
        return f"it returned a game more than once; expected {n} games, which are played at the same time"
    return ""


def wrong_expert(expert):
    """What is wrong with what `Environment.expert` returned; "" if nothing is."""
    of_class = f"it returned an expert of class {type(expert).__name__}, which has no"
    if not callable(getattr(expert, "show", None)):
        return f"{of_class} method show"
    return "" if isinstance(getattr(expert, "restarts", None), int) else f"{of_class} number `restarts`"


def wrong_online_expert(expert):
    """What is wrong with what `Environment.online_expert` returned; "" if nothing is."""
    return next((f"it returned an expert of class {type(expert).__name__}, which has no method {name}"
                 for name in ("observe", "command") if not callable(getattr(expert, name, None))), "")


def wrong_vocabulary(phrases):
    """What is wrong with an environment's phrases; "" if nothing is."""
    if not is_texts(phrases):
        return f"it returned {phrases!r:.60}; expected a list of texts"
    wrong = [phrase for phrase in phrases if not (phrase and phrase.isascii())]
    return f"it has {wrong[0]!r:.60}; expected nonempty ASCII texts" if wrong else ""


def wrong_tools(tools, some=False):
    """What is wrong with an environment's list of tools; "" if nothing is. some: there has to be one."""
    expected = "as envs.tools.schemas(GAME) returns for the class GAME"
    if not isinstance(tools, (list, tuple)) or some and not tools:
        return f"it returned {tools!r:.60}; expected a list of schemas, {expected}"
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        parts = (function.get("name"), function.get("parameters")) if isinstance(function, dict) else ("", "")
        if not (isinstance(parts[0], str) and isinstance(parts[1], dict)
                and isinstance(parts[1].get("properties"), dict)):
            return f"it has {tool!r:.60}; expected schemas, {expected}"
    return ""


def wrong_declared(environment):
    """What is wrong with the values that an environment declares, and its tools; "" if nothing is."""
    if wrong := wrong_tools(environment.tools(), some="tools" in environment._required):
        return f"tools: {wrong}"
    if not is_texts(unseen := environment.unseen_splits()):
        return f"unseen_splits returned {unseen!r:.60}; expected a list of texts"
    settings = {f.name: f.type in (str, "str") for f in fields(environment.settings)}
    for name, values, kind, right in (
            ("splits", environment.splits, "a text, and none of train, auto and none",
             lambda value: isinstance(value, str) and value not in ("train", "auto", "none")),
            ("captions", environment.captions.values(), "a text", lambda value: isinstance(value, str)),
            ("labels", environment.labels, "a text", lambda value: isinstance(value, str)),
            ("labels", environment.labels.values(), "a function of an episode", callable),
            ("sources", environment.sources, "the name of a text setting", settings.get),
            ("free_settings", environment.free_settings, "the name of a setting", settings.__contains__)):
        if wrong := [value for value in values if not right(value)]:
            return f"{name} has {wrong[0]!r:.60}; expected {kind}"
    return ""
