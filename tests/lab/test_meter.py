"""Tests that lab/bench/memory.py counts allocated bytes, and that a run that does not fit is rejected early.

    python -m pytest tests/lab/test_meter.py
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from infra.memory import check_memory, state_bytes
from lab.bench import memory
from lm import attention, lora
from lm import model as qwen
from lm.optim import adamw, trained

ROOT = Path(__file__).resolve().parents[2]
MB = 2**20


@pytest.mark.fast
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_tensor_counts_while_it_is_referenced_and_its_views_never_count(device):
    before = torch.zeros(MB, device=device)
    with memory.Meter() as meter:
        view = before[1:].t()                                        # of an earlier tensor
        assert meter.now == 0
        a = before + 1
        kept = a.view(2, -1)[0]
        assert meter.now == meter.peak == 4 * MB
        b = a * 2
        del a                                                        # `kept` is a view of it
        assert meter.now == 8 * MB
        del b, kept
        assert meter.now == 0 and meter.peak == 8 * MB
    assert len(view) == MB - 1


@pytest.mark.fast
def test_backward_is_counted_too():
    weight = torch.zeros(256, 256, device="meta", requires_grad=True)
    with memory.Meter() as meter:
        x = torch.zeros(1024, 256, device="meta")
        loss = (x @ weight).exp().sum()                              # exp saves its output, mm its input
        assert meter.now == 2 * MB + 4
        loss.backward()
        assert meter.now == 2 * MB + 4 - MB + MB // 4               # output freed, gradient allocated


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_real_update_allocates_the_predicted_bytes():
    """Within 15 %; the allocator's settings make it return freed memory, so that it is nearly exact."""
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536",
                        "OMP_NUM_THREADS": "1"}
    ran = subprocess.run([sys.executable, "-m", "lab.bench.memory", "--cpu"], cwd=ROOT, env=env, text=True,
                         capture_output=True, check=True)
    predicted, measured = map(int, re.findall(r"\d+", ran.stdout))
    assert predicted > 500 and measured == pytest.approx(predicted, rel=0.15), ran.stdout


def test_the_stored_table_is_current_and_meets_the_goal():
    """1.5B on one GPU of 80 GB and 7B on eight take under 60 GB each, at 16 x 8 episodes of 30 turns."""
    if not attention.varlen(torch.device("meta"), torch.bfloat16, 128):
        pytest.skip("this torch has no variable-length attention to count with")
    stored = json.loads(memory.OUT.read_text())
    found = memory.table(memory.Work(), memory.Machine())
    sizes = found["settings"]["tasks"], found["settings"]["group_size"], memory.Work().most_turns
    assert sizes == (16, 8, 30)
    for row, current in zip(stored["rows"], found["rows"], strict=True):
        for key in ("now", "before", "seconds"):
            assert row[key] == pytest.approx(current[key], rel=0.02), (
                f"{row['row']}: run python -m lab.bench.memory")
        assert max(row["now"].values()) < 60e9
        assert max(row["before"].values()) > 80e9


@pytest.mark.fast
def test_state_bytes_are_those_of_a_model_and_its_optimizer():
    model = torch.nn.Linear(300, 300)
    optimizer, n = torch.optim.AdamW(model.parameters()), sum(p.numel() for p in model.parameters())
    model(torch.zeros(1, 300)).sum().backward()
    optimizer.step()
    moments = sum(t.numel() for s in optimizer.state.values() for t in s.values() if t.dim())
    state = state_bytes(n, 1, torch.float32)
    assert state == {"master weights": 4 * n, "Adam's moments": 4 * moments, "gradients": 2 * 4 * n,
                     "sampler": 0}
    assert state_bytes(n, 1, torch.float32, trained=300) == {
        "master weights": 4 * n, "Adam's moments": 8 * 300, "gradients": 8 * 300, "sampler": 0}
    assert state_bytes(n, 1, torch.float32, trained=300, adapters=True) == {
        "master weights": 4 * (n + 300), "Adam's moments": 8 * 300, "gradients": 8 * 300, "sampler": 4 * n}
    halves = state_bytes(n, 2, torch.bfloat16)
    assert halves == {"master weights": 2 * n, "Adam's moments": 2 * moments, "gradients": 4 * n,
                      "sampler": 2 * n}


@pytest.mark.fast
def test_adapters_are_counted_as_an_update_with_them_allocates_them():
    """Moments and gradients of the adapters alone; nothing is allocated for the frozen weights."""
    model = qwen.Model(qwen.ModelConfig(50, 64, 128, 2, 4, 2, 16))
    before = memory.numbers(model.parameters())
    lora.add(model, 4, torch.Generator())
    adapters = memory.numbers(model.parameters()) - before
    assert adapters == 4 * 2 * ((64 + 64) + 2 * (64 + 32) + (64 + 64) + 3 * (64 + 128))
    optimizer = adamw(model)
    model(torch.arange(9)[None]).sum().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    optimizer.step()
    moments = [t for state in optimizer.state.values() for t in state.values() if t.dim()]
    state = state_bytes(before, 1, torch.float32, memory.numbers(trained(model)), adapters=True)
    assert state["Adam's moments"] == 4 * memory.numbers(moments) == 8 * adapters
    assert state["gradients"] == 2 * 4 * memory.numbers(gradients)
    assert state["master weights"] == 4 * memory.numbers(model.parameters())


@pytest.mark.fast
def test_a_model_that_does_not_fit_is_rejected_with_its_size(monkeypatch):
    card = SimpleNamespace(total_memory=24e9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    with pytest.raises(ValueError, match=r"--dtype=float32: .* 1\.5 billion parameters take 30 GB on each of "
                                         r"1 ranks, which has 24; --dtype bfloat16, or more ranks"):
        check_memory(int(1.5e9), 1, torch.float32, cuda)
    check_memory(int(1.5e9), 1, torch.float32, cpu)
    check_memory(int(1.5e9), 2, torch.float32, cuda)
    check_memory(int(1e9), 1, torch.bfloat16, cuda)
    check_memory(int(1.5e9), 1, torch.float32, cuda, trained=int(2e7), adapters=True)
    with pytest.raises(ValueError, match="3.5 billion parameters take 28 GB"):
        check_memory(int(3.5e9), 1, torch.float32, cuda, trained=int(2e7), adapters=True)
