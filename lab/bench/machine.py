"""The processor that a benchmark ran on, for its result file: a ratio of times is a machine's."""

from pathlib import Path

import torch


def this_cpu():
    """{"name", "capability", "threads"}: the processor's name by Linux, else "unknown"; the instructions that
    torch's own kernels use (ATEN_CPU_CAPABILITY lowers them); torch's threads.
    """
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {"name": names[0] if names else "unknown", "capability": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads()}
