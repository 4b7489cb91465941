"""Proves envs/tools.py: schemas, the check of arguments, and an answer to whatever a model calls.

    python -m pytest tests/envs/test_tools.py

Oracles: transformers' get_json_schema, the package jsonschema, and the rules of two complete environments,
the shop of examples/ and the calculator of examples/, by brute force.
"""

import functools
import json
import re
from enum import Enum
from typing import Any, Literal

import pytest
import torch
from tiny_runs import ROOT, module_of

import config
import envs
from envs import Task, _checks
from envs.tools import (
    CALL,
    Game,
    ToolEnvironment,
    ToolError,
    call,
    calls_in,
    parameters_of,
    phrases,
    read_call,
    schemas,
    wrong_value,
)

SHOP, CALCULATOR = module_of("examples/shop.py"), module_of("examples/calculator.py")


# Schemas

def test_schemas_are_transformers_of_the_public_methods_in_their_order():
    from transformers.utils import get_json_schema
    tools = schemas(SHOP.Shop)
    assert tools == [get_json_schema(getattr(SHOP.Shop, name)) for name in ("search", "stock", "buy")]
    assert parameters_of(tools)["buy"] == {
        "type": "object", "required": ["article", "count"], "properties": {
            "article": {"type": "integer", "description": "the article's number"},
            "count": {"type": "integer", "description": "how many"}}}


class Colour:
    pass


class Size(Enum):
    SMALL = "s"


def game_of(method):
    """A Game class with one tool, named `paint`."""
    method.__name__ = "paint"
    return type("Painter", (Game,), {"paint": method})


def documented(method):
    """A method with a docstring that describes x."""
    method.__doc__ = "Paint.\n\nArgs:\n    x: what\n"
    return game_of(method)


def undescribed(self, x: int):
    """Paint."""


def unhinted(self, x):
    pass


def custom(self, x: Colour):
    pass


def nested(self, x: list[Colour]):
    pass


def unknown(self, x: "Nowhere"):  # noqa: F821
    pass


def variable(self, *x: int):
    pass


def keywords(self, **x: int):
    pass


def undocumented(self, x: int):
    pass


async def late(self):
    """Paint."""


def typed(self, x: int):
    """Paint.

    Args:
        x (int): what
    """


def sized(self, x: Size):
    pass


def optional_size(self, x: list[Size] | None = None):
    pass


def numbered(self, x: dict[int, str]):
    pass


def pair(self, x: tuple[int, int] | None = None):
    pass


def sound(self, x: torch.Tensor):
    pass


def of_texts(self, x: dict[str, Literal["a", 3]] | None = None):
    pass


def replaces(name, method):
    """A Game class with a tool, and with a method in place of one of Game's."""
    return type("Desk", (Game,), {"paint": undescribed, name: method})


@pytest.mark.parametrize("game, message", [
    (documented(unhinted), "tool paint, argument x: has no type hint"),
    (documented(custom), "tool paint, argument x: its type hint .*Colour has no JSON schema"),
    (documented(nested), "tool paint, argument x: its type hint list.*Colour.* has no JSON schema"),
    (documented(unknown), "tool paint, argument x: its type hint 'Nowhere' has no JSON schema"),
    (documented(variable), r"tool paint, argument \*x: int: cannot be passed by its name"),
    (documented(keywords), r"tool paint, argument \*\*x: int: cannot be passed by its name"),
    (documented(sized), "tool paint, argument x: its type hint .*Size has an Enum, .*; use Literal$"),
    (documented(optional_size), r"tool paint, argument x: its type hint list\[.*Size\].* has an Enum"),
    (documented(numbered), r"tool paint, argument x: .* hint dict\[int, str\] .*; use dict\[str, ...\]$"),
    (documented(pair), r"tool paint, argument x: .* tuple\[int, int\] \| None has a tuple, .*; use list$"),
    (documented(sound), r"tool paint, argument x: .* torch.Tensor has torch.Tensor, which no value .* is$"),
    (replaces("close", lambda self, number: ""), r"method close: it has the parameters \(self, number\); "),
    (replaces("step", lambda self, direction: ""), r"method step: .*; expected \(self, command\), as in "),
    (replaces("step", lambda self: ""), "method step: it has the parameters"),
    (replaces("finish", lambda self, text: ""), "method finish: it has the parameters"),
    (replaces("reset", lambda self: ""), "method reset: it has the parameters"),
    (type("Desk", (Game,), {"close": lambda self, number: ""}), "method close: it has the parameters"),
    (replaces("begin", lambda self, level, seed: ""), "method begin: it has the parameters"),
    (game_of(typed), "tool paint: .*no description for the argument 'x'; expected a section \"Args:\" with a "
                     "line \"NAME: text\" for each, without a type$"),
    (game_of(undescribed), "tool paint: .*no description for the argument 'x'; expected a section"),
    (game_of(undocumented), "tool paint: .*it has no docstring"),
    (type("Mail", (Game,), {"send": undescribed}), "tool send: a game's own attribute has this name"),
    (type("Meal", (Game,), {"done": undescribed}), "tool done: a game's own attribute has this name"),
    (game_of(late), r"tool paint: expected a plain method, def paint\(self, ...\)"),
    *((type("Painter", (Game,), {"paint": kind(undescribed)}), "tool paint: expected a plain method")
      for kind in (staticmethod, classmethod, functools.cache)),
    (type("Empty", (Game,), {"SIZE": 3, "Colour": Colour}), "Empty has no public method, and so no tool")])
def test_a_tool_whose_schema_cannot_be_made_is_refused_by_name(game, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        schemas(game)
    with pytest.raises(ValueError):
        game()


def test_helpers_are_no_tools_and_inherited_tools_are():
    class Cheap(SHOP.Shop):
        def _helper(self):
            pass

        def close(self):
            super().close()

        def begin(self, _, seed=3):
            return super().begin(_, seed)

        def reset(self, *given, **named):
            return super().reset(*given, **named)

    class Kind(Cheap):
        def refund(self):
            """Pay back."""

    assert schemas(Cheap) == schemas(SHOP.Shop)
    assert [*parameters_of(schemas(Kind))] == ["search", "stock", "buy", "refund"]


def test_a_dict_whose_keys_are_texts_is_a_type_hint():
    (schema,) = schemas(documented(of_texts))
    assert schema["function"]["parameters"]["properties"]["x"]["additionalProperties"]["enum"] == ["a", 3]


def test_a_game_need_not_call_the_constructor_of_its_base_class():
    class Shelf(Open):
        def __init__(self, size):
            self.size = size

    game = Shelf(3)
    game.reset(Task("a", "train", "paint", None))
    assert game.step(call("paint", x=[], y={}, z=0)).observation == "painted"


# What an environment declares

def environment_of(**declared):
    """A ToolEnvironment with the other methods that it needs."""
    methods = {"make": undescribed, "train_tasks": undescribed, "split_tasks": undescribed}
    return type("Environment", (ToolEnvironment,), methods | declared)()


ONE = [{"type": "function", "function": {"name": "bake", "parameters": {"type": "object", "properties": {}}}}]


@pytest.mark.parametrize("returned, message", [
    (ONE, ""), ((*ONE,), ""),
    (SHOP.Shop, "tools: it returned <class 'shop.Shop'>; expected a list of schemas, as envs.tools.schemas("),
    (None, "tools: it returned None; expected a list"), ([], "tools: it returned []; expected a list"),
    (ONE[0], "tools: it returned {'type': 'function'"), (["bake"], "tools: it has 'bake'; expected schemas"),
    ([ONE[0]["function"]], "tools: it has {'name': 'bake'"),
    ([{"function": {"name": "bake"}}], "tools: it has {"),
    ([{"function": {"name": "bake", "parameters": {}}}], "tools: it has")])
def test_what_tools_returns_is_checked(returned, message):
    wrong = _checks.wrong_declared(environment_of(tools=lambda self: returned))
    assert wrong.startswith(message) and bool(wrong) == bool(message)


def test_an_environment_with_tools_has_to_define_them(tmp_path):
    """It used to train without any, and nothing told so."""
    assert _checks.wrong_declared(environment_of()).startswith("tools: it returned []")
    path = tmp_path / "shop_without.py"
    text = (ROOT / "examples" / "shop.py").read_text(encoding="utf-8")
    assert "    def tools(self):" in text
    path.write_text(text.replace("    def tools(self):", "    def _tools(self):"), encoding="utf-8")
    with pytest.raises(ValueError, match=f"^--env={re.escape(str(path))}: class Environment: lacks tools"):
        config.parse(["--env", str(path)])


# Arguments

class Wide(Game):
    def paint(self, x: str, a: int, b: float, c: bool, d: Literal["x", 3], e: Literal["s"], f: list[int],
              g: int | str, h: dict[str, int], i: int | None = None,
              j: list[list[str]] | bool = True):
        """Paint.

        Args:
            x: a text
            a: an integer
            b: a number
            c: whether
            d: one of two
            e: one of one
            f: integers
            g: an integer or a text
            h: integers by name
            i: an integer, if any
            j: texts, or whether
        """


VALUES = ["", "x", "s", 0, 3, -7, 2.5, 1e18, True, False, None, [], [1], [1, "a"], [1, "a", 2], [[]], [["a"]],
          [["a"], 3], {}, {"a": 1}, {"a": "b"}, [None], [True], "\U0001f600", 2**40]


@pytest.mark.parametrize("name", "xabcdefghij")
def test_a_value_is_right_where_jsonschema_says_so(name):
    """By draft 4, in which 3.0 is no integer. "nullable" is OpenAPI's."""
    jsonschema = pytest.importorskip("jsonschema", reason="needs: pip install jsonschema")
    schema = parameters_of(schemas(Wide))["paint"]["properties"][name]
    validator = jsonschema.Draft4Validator(schema)
    for value in VALUES:
        right = validator.is_valid(value) or value is None and schema.get("nullable", False)
        assert (wrong_value(value, schema) == "") == right, (value, schema)


def test_numbers_and_texts_that_python_cannot_pass_on_are_refused():
    number, text = {"type": "number"}, {"type": "string"}
    for value in (float("inf"), float("nan"), 2**63, -2**63, 10**400):
        assert "expected a number of at most 63 bits" in wrong_value(value, number)
    assert wrong_value(2**63 - 1, number) == "" and wrong_value("é\0", text) == ""
    for value, schema in (("\ud800", text), ({"\ud800": 1}, {"type": "object"})):
        assert "expected text without unpaired surrogates" in wrong_value(value, schema)


class Open(Game):
    def begin(self, task, seed):
        return "Hello."

    def paint(self, x: list, y: dict, z: Any):
        """Paint.

        Args:
            x: a list
            y: an object
            z: whatever
        """
        return "painted"


@pytest.mark.parametrize("argument", "xyz")
def test_an_argument_that_is_nested_too_deeply_is_refused(argument):
    """json.loads reads it, up to some thousand levels; the check's calls may not have as many."""
    game = Open()
    game.reset(Task("a", "train", "paint", None))
    right = {"x": "[]", "y": "{}", "z": "0"}
    for depth, answer in ((9, "painted"), (600, f"error: paint: argument {argument} is nested too deeply")):
        deep = '{"a": ' * depth + "0" + "}" * depth if argument == "y" else "[" * depth + "]" * depth
        given = ", ".join(f'"{name}": {text}' for name, text in (right | {argument: deep}).items())
        reply = game.step(f'<tool_call>{{"name": "paint", "arguments": {{{given}}}}}')
        assert (reply.observation, reply.taken) == (answer, depth == 9)


# Calls

@pytest.fixture
def shop():
    game, (task,) = SHOP.Shop(), SHOP.Environment().train_tasks("part", 3, 1)
    game.reset(task)
    yield game
    game.close()


WRONG_CALLS = [
    ("", "not JSON: Expecting value at character 0"), ("{", "not JSON: Expecting property name"),
    ('{"name": "stock", "arguments": {"article": 1', "not JSON: Expecting ',' delimiter at character 44"),
    ('{"name": "stock", "argu', "not JSON: Unterminated string"), ("null", f"expected {CALL}"),
    ("[" * 100_000, "not JSON that can be read"), ("1" * 5000, "not JSON that can be read"),
    ("[]", f"expected {CALL}"),
    ('{"name": "stock"}', f"expected {CALL}"), ('{"name": "stock", "arguments": []}', f"expected {CALL}"),
    ('{"name": "stock", "arguments": {}, "id": 1}', f"expected {CALL}"),
    ('{"name": "steal", "arguments": {}}', "no tool 'steal'; expected one of search, stock, buy"),
    ('{"name": "close", "arguments": {}}', "no tool 'close'"),
    ('{"name": "_rows", "arguments": {}}', "no tool '_rows'"),
    ('{"name": ["buy"], "arguments": {}}', "no tool ['buy']"),
    ('{"name": null, "arguments": {}}', "no tool None"),
    ('{"name": "buy", "arguments": {"article": 1}}', "buy: argument count is missing"),
    ('{"name": "stock", "arguments": {"article": 1, "self": 2}}', "stock: no argument 'self'; expected"),
    ('{"name": "stock", "arguments": {"article": "1"}}', 'stock: argument article is "1"; expected integer'),
    ('{"name": "stock", "arguments": {"article": true}}', "argument article is true; expected integer"),
    ('{"name": "stock", "arguments": {"article": 1.5}}', "stock: argument article is 1.5; expected integer"),
    ('{"name": "stock", "arguments": {"article": NaN}}', "stock: argument article is NaN; expected integer"),
    ('{"name": "stock", "arguments": {"article": 1e999}}', "argument article is Infinity; expected integer"),
    ('{"name": "stock", "arguments": {"article": 99999999999999999999}}', "expected a number of at most 63"),
    ('{"name": "search", "arguments": {"name": "\\ud800"}}', "expected text without unpaired surrogates"),
    ('{"name": "search", "arguments": {"name": "x\' or 1=1 --"}}', "the shop has no such article"),
    ('{"name": "stock", "arguments": {"article": -1}}', "the shop has no such article")]


@pytest.mark.parametrize("text, answer", WRONG_CALLS)
def test_a_wrong_call_is_answered_and_changes_nothing(shop, text, answer):
    """Also if it is cut short. The turn is invalid; a right call after it is made."""
    right = call("search", name="cup")
    expected = shop.step(right)
    assert expected.taken and not expected.observation.startswith("error")
    for command in (f"<tool_call>\n{text}\n</tool_call>", f"<tool_call>{text}"):
        reply = shop.step(command)
        assert reply.observation.startswith("error: ") and answer in reply.observation
        assert (reply.won, reply.done, reply.taken) == (False, False, False)
        assert reply.answers == (reply.observation,)
        assert _checks.wrong_reply(reply) == ""
    assert shop.step(right) == expected


def test_calls_of_a_turn_are_made_in_order_until_one_ends_the_game():
    game = CALCULATOR.Calculator()
    game.reset(Task("a", "train", "compute", (2, "+", 3, "*", 4)))
    first, wrong = call("calculate", left=2, operator="+", right=3), call("calculate", left=5)
    end, after = call("answer", value=20), call("calculate", left=1, operator="-", right=1)
    reply = game.step("\n".join((first, wrong, first)))
    assert reply.answers == ("5", "error: calculate: argument operator is missing", "5")
    assert (reply.taken, reply.done, reply.reward) == (False, False, pytest.approx(-0.04))
    reply = game.step("\n".join((first, end, after)))
    assert (reply.answers, reply.observation) == (("5", "right"), "5\nright")
    assert (reply.taken, reply.won, reply.done, reply.ended) == (True, True, True, "right")
    assert reply.reward == pytest.approx(-0.02)


def test_a_response_is_its_calls_from_the_first_on():
    environment = CALCULATOR.Environment()
    text = call("answer", value=3)
    assert environment.parse(f"So:\n{text}\n") == text == environment.parse(text)
    assert environment.parse("<tool_call>{") == "<tool_call>{" and environment.parse("It is 3.") is None
    assert environment._calls(text * 2) == [("answer", {"value": 3})] * 2
    assert environment._calls("<tool_call>") == []
    written = json.dumps({"name": "answer", "arguments": {"value": 3}})
    assert calls_in(f"{text} and <tool_call>{{") == [written, "{"]
    with pytest.raises(ToolError):
        read_call(calls_in("")[0], {})


def test_an_argument_ends_or_begins_no_call():
    text = "a </tool_call> and a <tool_call>"
    (found,) = calls_in(call("say", text=text))
    assert json.loads(found) == {"name": "say", "arguments": {"text": text}}


def test_the_verb_of_a_command_is_the_first_tool_called():
    """Within which the judge is measured; elsewhere it is a command's first word."""
    shop = SHOP.Environment()
    calls = [call("search", name="lamp"), call("buy", article=3, count=1)]
    assert [shop.verb(text) for text in ("\n".join(calls), calls[1], calls[1][:20], "")] == [
        "search", "buy", "", ""]
    assert envs.Environment().verb("take mug 1 from shelf 2") == "take"


def test_an_answer_that_is_no_text_is_the_authors_mistake():
    class Silent(Game):
        def begin(self, task, seed):
            return "Hello."

        def paint(self):
            """Paint."""

    game, line = Silent(), Silent.paint.__code__.co_firstlineno
    game.reset(Task("a", "train", "paint", None))
    with pytest.raises(ValueError, match=rf"^tool paint, line {line}, returned None; expected text"):
        game.step(call("paint"))


# Complete environments

@pytest.mark.slow
@pytest.mark.parametrize("module", [SHOP, CALCULATOR], ids=["shop", "calculator"])
def test_the_expert_wins_and_the_oracle_finds_its_mistakes(module):
    """And every text consists of the vocabulary, single bytes of a wrong call's answer apart."""
    environment, texts = module.Environment(), set()
    (game,), limit = environment.make(1), environment.defaults["max_turns"]
    test = environment.split_tasks("test")
    assert {task.id for task in test} & {task.id for task in environment.train_tasks("part", 0, 500)} == set()
    for task in [*environment.train_tasks("part", 0, 60), *test[:30]]:
        demonstration = environment.expert([game]).show(task, 0, 0.0, limit)
        assert demonstration.won and not _checks.wrong_demonstration(demonstration)
        assert set(environment.oracle(demonstration.observations, demonstration.commands)) == {"good"}
        assert demonstration == environment.expert([game]).show(task, 0, 0.0, limit)
        texts |= {*demonstration.observations, *demonstration.commands}
        clumsy = environment.expert([game]).show(task, 1, 0.4, limit)
        labels = environment.oracle(clumsy.observations, clumsy.commands)
        assert labels == ["bad" if mistake else "good" for mistake in clumsy.mistakes]
    start = game.reset(task).observation
    for command in ("<tool_call>{", ""):
        assert environment.oracle([start, "x"], [command]) == ["bad"]
    for phrase in sorted(environment.vocabulary(), key=len, reverse=True):
        texts = {text.replace(phrase, "") for text in texts}
    assert texts == {""}
    assert len(set(environment.vocabulary())) == len(environment.vocabulary())


@pytest.mark.parametrize("also", [call("search", name="hat"), "<tool_call>{"], ids=["right", "wrong"])
def test_after_several_calls_in_a_turn_the_shops_oracle_knows_no_more(shop, also):
    """It used to learn none of their answers, and to call a second search good and what follows it bad."""
    environment, (task,) = SHOP.Environment(), SHOP.Environment().train_tasks("part", 3, 1)
    replies, search = [shop.reset(task)], call("search", name=task.problem[0])
    commands = [call("stock", article=10), f"{search}\n{also}", search, search]
    replies += [shop.step(command) for command in commands]
    labels = environment.oracle([reply.observation for reply in replies], commands)
    assert labels == ["bad", "bad", None, None]


def test_several_calls_in_a_turn_of_the_calculator_are_right_together():
    """The first used to be held against the whole turn, and against all turns after it."""
    environment = CALCULATOR.Environment()
    first, second, answer = (call(name, **arguments)
                             for name, arguments in CALCULATOR.right_calls((2, "+", 3, "*", 4)))
    for commands, labels in (([f"{first}\n{second}", answer], ["good", "good"]),
                             ([f"{first}\n{first}", first, f"{second}\n{answer}"], ["bad", "good", "good"])):
        assert environment.oracle(["Compute (2 + 3) * 4."], commands) == labels


@pytest.mark.slow
def test_only_the_right_purchase_fills_an_order():
    """Brute force over the articles and counts of a shop: exactly one purchase wins."""
    for task in SHOP.Environment().train_tasks("part", 0, 8):
        game, wins = SHOP.Shop(), []
        rows, (name, count) = SHOP.articles_of(task), task.problem
        enough = [row for row in rows if row[1] == name and row[3] >= count]
        for row in rows:
            for n in (-1, 0, *SHOP.COUNTS):
                game.reset(task)
                reply = game.step(call("buy", article=row[0], count=n))
                assert reply.done and reply.ended in ("bought", "bought the wrong thing", "not in stock")
                assert reply.won == (reply.ended == "bought")
                assert (reply.ended == "not in stock") == (n < 1 or n > row[3])
                wins += [(row[0], n)] if reply.won else []
        assert wins == [(min(enough, key=lambda row: row[2])[0], count)]
        game.close()


def test_held_out_orders_are_never_trained_on():
    environment = SHOP.Environment()
    pairs = {split: {task.problem for task in environment.split_tasks(split)} for split in ("dev", "test")}
    trained = {task.problem for types in ("all", "part") for task in environment.train_tasks(types, 0, 2000)}
    assert pairs["dev"] <= trained and not pairs["test"] & trained and len(pairs["test"]) == 12


def test_values_that_are_not_ascii_are_no_phrases():
    """The small model spells them in bytes."""
    class Bank:
        def pay(self, account: Literal["rent", "caf\u00e9"]):
            """Pay.

            Args:
                account: which
            """

    assert "rent" in phrases(schemas(Bank)) and all(phrase.isascii() for phrase in phrases(schemas(Bank)))


def test_phrases_join_to_the_calls():
    parts = phrases(schemas(SHOP.Shop))
    text = call("buy", article=7, count=2)
    assert re.sub("|".join(map(re.escape, sorted(parts, key=len, reverse=True))), "", text) == "72"


def test_a_call_without_arguments_is_a_phrase_where_none_is_required():
    class Bank(Game):
        def pay(self, count: int = 1, account: str = "rent"):
            """Pay.

            Args:
                count: how often
                account: which
            """

        def owe(self, count: int):
            """Owe.

            Args:
                count: how often
            """

        def close_all(self):
            """Close all."""

    parts = phrases(schemas(Bank))
    assert [name for name in ("pay", "owe", "close_all") if call(name) in parts] == ["pay", "close_all"]
    assert len({*parts}) == len(parts)
