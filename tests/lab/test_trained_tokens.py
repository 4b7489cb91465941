"""Tests of lab/bench/trained_tokens.py: what it trains, what it counts, and its table.

    python -m pytest tests/lab/test_trained_tokens.py
"""

from dataclasses import replace

import pytest
import torch

import update
from lab.bench import trained_tokens
from lm import model as decoder

TINY = replace(trained_tokens.SHAPE, vocab_size=50, hidden_size=36, intermediate_size=48, num_hidden_layers=6,
               head_dim=4)
MATRICES = 2 * (36 * 36) + 2 * (36 * 12) + 3 * (36 * 48)          # numbers in a layer's matrices
PLACES = 2 * (36 + 36) + 2 * (36 + 12) + 3 * (36 + 48)            # and the sum of their sides


def test_the_shape_is_smollm2s():
    """134.5 million parameters by its model card; Qwen2's biases of q, k and v are 30 x 960 more."""
    assert decoder.count_parameters(trained_tokens.SHAPE) == 134_515_008 + 30 * (576 + 2 * 192)


@pytest.mark.slow
def test_each_way_takes_its_steps_on_all_tokens_but_the_first(monkeypatch):
    seconds, metrics, step = iter(range(10**6)), [], update.update
    monkeypatch.setattr(trained_tokens.time, "process_time", lambda: next(seconds))     # a step takes 1 s
    monkeypatch.setattr(update, "update", lambda *given, **named: metrics.append(step(*given, **named)))
    found = trained_tokens.measure("", TINY, sequences=3, tokens=9, repeats=2)
    assert [entry["policy/tokens"] for entry in metrics] == [24] * 6 * 3          # the first is not measured
    full, full_bf16, adapters, _, last, _ = found["rows"]
    assert [row["way"] for row in found["rows"]] == [*trained_tokens.WAYS]
    assert full_bf16["way"] == "--dtype bfloat16" and not torch.distributed.is_initialized()
    assert full["trained_parameters"] == found["parameters"] == decoder.count_parameters(TINY)
    assert full_bf16["trained_parameters"] == found["parameters"]
    assert adapters["trained_parameters"] == 16 * 6 * PLACES
    assert last["trained_parameters"] == 4 * (MATRICES + 36 + 2 * 12 + 2 * 36) + 36
    for row in found["rows"]:
        assert row["tokens_per_cpu_s"]["seeds"] == {0: 24, 1: 24} and row["times_full"]["mean"] == 1
    lines = trained_tokens.table(found).splitlines()
    assert len(lines) == 2 + 6 and "24.0 ± 0.0 | 41.7 | 1.00 ± 0.00" in lines[2]
    assert torch.get_num_threads() == 1
