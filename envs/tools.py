"""Base classes of environments in which a command is one call or several calls of Python functions.

The public methods of a `Game` are its tools. Their type hints and docstrings (Google's style, with a section
"Args:") become JSON schemas, which the chat template of a model shows it. The model then writes, as Qwen2.5
and Qwen3 do,

    <tool_call>
    {"name": "buy", "arguments": {"article": 104, "count": 2}}
    </tool_call>

once or several times in a response. Calls are made in order until one ends the game, and each is answered. A
call that cannot be made has an answer as well, "error: ...", changes nothing, and makes its turn invalid. The
small model writes the same text, with a token for each part of it (`phrases`), and reads the answers as plain
observations. Left out: tools that run at the same time, and calls that are not JSON.
"""

import inspect
import json
from enum import EnumMeta
from functools import lru_cache
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from . import Environment, Reply

START, END = "<tool_call>", "</tool_call>"
KINDS = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "null": type(None),
         "array": list, "object": dict}
JSON_TYPES = int, float, str, bool, type(None), list, dict, Any, UnionType
# What a run or `Game` itself looks up in a game, so that no tool can be called so
TAKEN = "won", "done", "ended", "reward", "send", "receive", "time_limit_s"
CALL = 'a JSON object {"name": TOOL, "arguments": {...}}'


class ToolError(Exception):
    """Raised by a tool that refuses a call; the model reads the message. Other errors are mistakes."""


class Game:
    """Base class of a game. A subclass has `begin` and, as its other public methods, the tools.

    A tool returns its answer as text. It may call `finish`, and add to `self.reward`, the reward of the turn.
    Helpers begin with an underscore.
    """

    def __init__(self):
        schemas(type(self))              # ValueError now rather than at a call; a subclass need not call this

    def begin(self, task, seed):
        """Start a task; returns the first observation. Equal for the same task and seed."""
        raise NotImplementedError

    def finish(self, won, ended=""):
        """End the episode after the current call. ended: why, in a word or two."""
        self.won, self.done, self.ended = won, True, ended

    def reset(self, task, seed=0):
        """Start a task, see envs.Game."""
        self.won, self.done, self.ended, self.reward = False, False, "", 0.0
        return Reply(self.begin(task, seed))

    def step(self, command):
        """Make the calls in a command, see envs.Game."""
        self.reward, answers = 0.0, []
        for text in calls_in(command):
            if not self.done:
                answers.append(self._answer(text))
        texts = tuple(text for text, _ in answers)
        return Reply("\n".join(texts), (), self.won, self.done, taken=all(made for _, made in answers),
                     reward=self.reward, ended=self.ended, answers=texts)

    def _answer(self, text):
        """(answer, whether the call was made) for the text of a call."""
        try:
            name, arguments = read_call(text, parameters_of(schemas(type(self))))
            answer = getattr(self, name)(**arguments)
        except ToolError as error:
            return f"error: {error}", False
        if not isinstance(answer, str):
            line = inspect.unwrap(getattr(type(self), name)).__code__.co_firstlineno
            raise ValueError(f"tool {name}, line {line}, returned {answer!r:.60}; expected text")
        return answer, True

    def close(self):
        """Free what the game uses."""


class ToolEnvironment(Environment):
    """Base class of an environment of such games. A subclass also defines `tools`: schemas(its Game)."""

    _required = (*Environment._required, "tools")
    noop_message = "No tool was called."

    def parse(self, text):
        """The calls in a response: all from the first one on; None without any."""
        start = text.find(START)
        return text[start:].strip() if start >= 0 else None

    def verb(self, command):
        """The first tool that is called; "" if the call cannot be made."""
        return next((name for name, _ in self._calls(command)), "")

    def _calls(self, command):
        """[(tool, arguments)] of a command, for an oracle; [] if any of them cannot be made."""
        try:
            return [read_call(text, parameters_of(self.tools())) for text in calls_in(command)]
        except ToolError:
            return []

    def vocabulary(self):
        """The parts of calls, and of what is answered to a wrong one."""
        return [self.noop_message, "error: ", *phrases(self.tools())]


def call(name, /, **arguments):
    """The text of a call, as an expert makes it and as Qwen's chat templates write it; an argument's "<" is
    escaped, so that it ends or begins no call.
    """
    text = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return "\n".join([START, text.replace("<", "\\u003c"), END])


def calls_in(command):
    """The texts of the calls in a command; a last one may be cut short."""
    return [text.partition(END)[0].strip() for text in command.split(START)[1:]] or [""]


def parameters_of(tools):
    """{tool: the schema of its arguments} of a list of schemas."""
    return {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}


def read_call(text, parameters):
    """(name, arguments) of a call. ToolError if it is not JSON, or not as the tool's schema has it.

    parameters: see `parameters_of`.
    """
    try:
        given = json.loads(text, parse_constant=float)
    except json.JSONDecodeError as error:
        raise ToolError(f"not JSON: {error.msg} at character {error.pos}; expected {CALL}") from None
    except (ValueError, RecursionError):                       # thousands of digits, or of brackets
        raise ToolError(f"not JSON that can be read; expected {CALL}") from None
    if not (isinstance(given, dict) and {*given} == {"name", "arguments"}
            and isinstance(given["arguments"], dict)):
        raise ToolError(f"expected {CALL}")
    name, arguments = given["name"], given["arguments"]
    if not isinstance(name, str) or name not in parameters:
        raise ToolError(f"no tool {name!r:.60}; expected one of {', '.join(parameters)}")
    schema = parameters[name]
    for argument in schema.get("required", ()):
        if argument not in arguments:
            raise ToolError(f"{name}: argument {argument} is missing")
    for argument, value in arguments.items():
        if argument not in schema["properties"]:
            raise ToolError(f"{name}: no argument {argument!r:.60}; "
                            f"expected {', '.join(schema['properties']) or 'none'}")
        try:
            wrong = wrong_value(value, schema["properties"][argument])
        except RecursionError:                                 # hundreds of brackets
            wrong = "is nested too deeply"
        if wrong:
            raise ToolError(f"{name}: argument {argument} {wrong}")
    return name, arguments


def wrong_value(value, schema):
    """What is wrong with a JSON value under a schema that get_json_schema makes; "" if nothing is.

    A number must be finite and of at most 63 bits. An integer is written without a point, as in JSON Schema's
    draft 4.
    """
    if value is None and schema.get("nullable"):
        return ""
    what = f"is {json.dumps(value):.60}"
    if "anyOf" in schema:
        reasons = [wrong_value(value, choice) for choice in schema["anyOf"]]
        return "" if "" in reasons else f"{what}; expected another type"
    kinds = schema.get("type", [*KINDS])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not any(isinstance(value, KINDS[kind]) and isinstance(value, bool) == (kind == "boolean")
               for kind in kinds):
        return f"{what}; expected {' or '.join(kinds)}"
    if isinstance(value, (int, float)) and not abs(value) < 2**63:                     # also refuses NaN
        return f"{what}; expected a number of at most 63 bits"
    if isinstance(value, str) and value != value.encode("utf-8", "replace").decode("utf-8"):
        return f"{what}; expected text without unpaired surrogates"
    if "enum" in schema and value not in schema["enum"]:
        return f"{what}; expected one of {', '.join(map(json.dumps, schema['enum']))}"
    parts = []
    if isinstance(value, list):
        parts = [(item, schema.get("items", {})) for item in value]
    elif isinstance(value, dict):
        parts = [*((key, {}) for key in value),
                 *((item, schema.get("additionalProperties", {})) for item in value.values())]
    return next(filter(None, (wrong_value(*part) for part in parts)), "")


# Schemas

@lru_cache(None)
def schemas(game):
    """The JSON schemas of the tools of a Game class, in the order of their definition, as a list.

    ValueError, which names tool and argument, where one cannot be made.
    """
    for name, base in inspect.getmembers(Game, inspect.isfunction):
        if not name.startswith("_") and (wrong := wrong_override(getattr(game, name, base), base)):
            raise ValueError(f"method {name}: {wrong}; a tool cannot be called so")
    members = {name: value for cls in reversed(game.__mro__) for name, value in vars(cls).items()
               if not name.startswith("_") and not hasattr(Game, name)}
    names = [name for name in members if callable(tool := getattr(game, name)) and not inspect.isclass(tool)]
    if not names:
        raise ValueError(f"{game.__name__} has no public method, and so no tool")
    if wrong := [name for name in names if not inspect.isfunction(members[name])
                 or inspect.iscoroutinefunction(members[name])]:
        raise ValueError(f"tool {wrong[0]}: expected a plain method, def {wrong[0]}(self, ...); if it is no "
                         f"tool, call it _{wrong[0]}")
    if taken := [name for name in names if name in TAKEN]:
        raise ValueError(f"tool {taken[0]}: a game's own attribute has this name; call it otherwise")
    return [schema_of(getattr(game, name)) for name in names]


def wrong_override(method, base):
    """What is wrong with the parameters of a method that replaces one of Game's; "" if nothing is.

    It can be called as that is, and has no parameter of another name unless it begins with an underscore.
    """
    signature, expected = inspect.signature(method), inspect.signature(base)
    others = [parameter.name for parameter in signature.parameters.values()
              if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
              and not parameter.name.startswith("_") and parameter.name not in expected.parameters]
    try:
        signature.bind(*expected.parameters)
    except TypeError:
        others.append("")
    return f"it has the parameters {signature}; expected {expected}, as in envs.tools.Game" if others else ""


def schema_of(tool):
    """transformers' schema of a function, {"type": "function", "function": {...}}. ValueError: see above."""
    from transformers.utils import get_json_schema
    parameters = [*inspect.signature(tool).parameters.values()][1:]                      # without self
    for parameter in parameters:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ValueError(f"tool {tool.__name__}, argument {parameter}: cannot be passed by its name")
    try:
        schema, hints = get_json_schema(tool), get_type_hints(tool)
    except Exception as error:                   # transformers' own, or what a hint raises that is none
        reason = " ".join(str(error).split())
    else:
        for parameter in parameters:
            if wrong := never_passed(hints[parameter.name]):
                raise ValueError(f"tool {tool.__name__}, argument {parameter.name}: its type hint "
                                 f"{inspect.formatannotation(parameter.annotation)} {wrong}")
        return schema
    for parameter in parameters:
        try:
            get_json_schema(function_of(parameter, tool))
        except Exception:
            reason = f"its type hint {inspect.formatannotation(parameter.annotation)} has no JSON schema"
            if parameter.annotation is parameter.empty:
                reason = "has no type hint"
            raise ValueError(f"tool {tool.__name__}, argument {parameter.name}: {reason}") from None
    if "no description for the argument" in reason:             # also where it is written "x (int): text"
        reason += '; expected a section "Args:" with a line "NAME: text" for each, without a type'
    raise ValueError(f"tool {tool.__name__}: {reason}")


def never_passed(hint):
    """What in a type hint has a schema but is never passed, since a tool gets the values of JSON as they are;
    "" if nothing is.
    """
    kind = get_origin(hint) or hint
    if isinstance(kind, EnumMeta):
        return "has an Enum, which no value of JSON is; use Literal"
    if kind is tuple:
        return "has a tuple, which no value of JSON is; use list"
    if isinstance(kind, type) and kind not in JSON_TYPES:
        return f"has {inspect.formatannotation(kind)}, which no value of JSON is"
    if kind is dict and get_args(hint) and get_args(hint)[0] is not str:
        return "has keys that are no text, which JSON has not; use dict[str, ...]"
    parts = () if kind is Literal else get_args(hint)
    return next(filter(None, map(never_passed, parts)), "")


def function_of(parameter, tool):
    """A documented function of one parameter of `tool`, by which one finds out if its hint is to blame."""
    def function():
        pass

    function.__doc__ = f"A function.\n\nArgs:\n    {parameter.name}: an argument"
    function.__annotations__ = {parameter.name: parameter.annotation}
    function.__signature__ = inspect.Signature([parameter])
    function.__wrapped__ = tool                                  # whose globals resolve hints that are texts
    return function


def phrases(tools):
    """The texts between the values of a call with all arguments and of one with none, and the values that are
    listed: tokens for the small model, which spells texts that are not ASCII in bytes.
    """
    found = []
    for tool in (schema["function"] for schema in tools):
        properties = tool["parameters"]["properties"]
        slots = (f'"{name}": ' + ('"\0"' if schema.get("type") == "string" else "\0")
                 for name, schema in properties.items())
        text = f'{START}\n{{"name": "{tool["name"]}", "arguments": {{{", ".join(slots)}}}}}\n{END}'
        found += text.split("\0")
        if not tool["parameters"].get("required"):
            found.append(call(tool["name"]))
        found += [str(value) for schema in properties.values() for value in schema.get("enum", ())]
    return [text for text in dict.fromkeys(found) if text.isascii()]
