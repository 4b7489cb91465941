"""Tests of named random streams: they do not collide, and every purpose of a run has a number of its own.

    python -m pytest tests/infra/test_streams.py

Oracle: splitmix64's published output.
"""

import ast
from pathlib import Path

import pytest
import torch

from infra import streams

ROOT = Path(__file__).resolve().parents[2]
PURPOSES = {name: number for name, number in vars(streams).items()
            if name.isupper() and isinstance(number, int) and name != "MASK64"}


def stream_calls(path):
    """The calls of `stream` and `generator` in a file, as syntax trees."""
    return [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            and node.func.id in ("stream", "generator")]


def named_purpose(call):
    """The second argument of a call if it is an upper-case name, else None."""
    second = call.args[1] if len(call.args) > 1 else None
    return second.id if isinstance(second, ast.Name) and second.id.isupper() else None


def test_no_two_purposes_share_a_number():
    assert len(PURPOSES) >= 9 and len({*PURPOSES.values()}) == len(PURPOSES), PURPOSES


def test_every_purpose_in_use_is_in_the_registry():
    used = {path.name: {named_purpose(call) for call in stream_calls(path)} - {None}
            for path in ROOT.glob("*.py")}
    assert used["gcd.py"] == {"ROLLOUT", "JUDGE", "CREDIT"}                  # the test sees the calls
    assert set().union(*used.values()) == {*PURPOSES}


def test_purposes_are_imported_and_not_defined_again():
    """A constant of that name, or an import of it from elsewhere, would replace the registry's."""
    for path in ROOT.glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        defined = {node.id for node in ast.walk(tree)
                   if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        elsewhere = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
                     and node.module != "infra.streams" for alias in node.names}
        assert not {*PURPOSES} & (defined | elsewhere), path.name


def test_streams_are_splitmix64_and_do_not_collide():
    assert streams.stream(0) == 0xE220A8397B1DCDAF >> 1    # the published first output of seed 0
    names = {streams.stream(seed, i, j) for seed in range(10) for i in range(100) for j in range(100)}
    names |= {streams.stream(seed) for seed in range(10)} | {streams.stream(0, i) for i in range(100)}
    assert len(names) == 100_110 and max(names) < 2**63
    assert streams.stream(1, 2) != streams.stream(2, 1)
    with pytest.raises(TypeError):
        streams.stream(0, "train")


def test_a_generator_repeats_its_stream():
    paths = ((1,), (1,), (1, 0), (2,))
    draws = [torch.rand(4, generator=streams.generator(3, *path)).tolist() for path in paths]
    assert draws[0] == draws[1] and len({tuple(draw) for draw in draws}) == 3
