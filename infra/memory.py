"""Bytes of device memory: what a run occupies throughout, which is refused if a GPU has less, and the most
that it had. lab/bench/memory.py counts the rest.
"""

import torch

from infra import parallel


def peaks(device):
    """Metrics of a GPU's memory since the last call, the largest over the ranks: what tensors held at most,
    and what torch's allocator had reserved for them. {} on a CPU.
    """
    if device.type != "cuda":
        return {}
    found = {"memory/peak_gb": torch.cuda.max_memory_allocated(device) / 1e9,
             "memory/reserved_gb": torch.cuda.max_memory_reserved(device) / 1e9}
    torch.cuda.reset_peak_memory_stats(device)
    return {name: parallel.all_max(size) for name, size in found.items()}


def state_bytes(parameters, ranks, dtype, trained=None, adapters=False, copies=1, compared=True):
    """Return {name: bytes per rank} of training a model with AdamW in compute dtype `dtype`.

    parameters: number of its parameters. ranks: those that share a copy of the weights. trained: number of
    parameters that are trained (None: all); with `adapters` they are not among `parameters`. copies: of the
    weights, each on ranks of its own. compared: whether the policy's and the judge's gradients are computed
    separately at times, so that there are two sets.

    Where nothing is trained (0), there are no moments and no gradients. Left out: models that are offloaded
    meanwhile (the KL's reference; PPO's critic and its state).
    """
    compute, trained = torch.finfo(dtype).bits // 8, parameters if trained is None else trained
    samples_itself = ranks * copies == 1 and dtype == torch.float32       # without a copy
    numbers = parameters + adapters * trained
    return {"master weights": 4 * numbers / ranks,
            "Adam's moments": 8 * trained / ranks, "gradients": 4 * (1 + compared) * trained / ranks,
            "sampler": 0 if samples_itself else compute * numbers}


def check_memory(state, parameters, ranks, dtype, device):
    """ValueError if a model's `state`, {name: bytes}, exceeds the GPU's memory. Only CUDA is checked."""
    if device.type != "cuda":
        return
    required, available = sum(state.values()), torch.cuda.get_device_properties(device).total_memory
    if required > available:
        advice = ["--dtype bfloat16"] * (dtype == torch.float32)
        advice += ["more ranks"] * ("master weights" in state)
        every = state.get("Adam's moments", 0) > state.get("master weights", 0)       # weight is trained
        advice += ["--lora without a critic"] * every
        raise ValueError(f"--dtype={str(dtype).removeprefix('torch.')}: "
                         f"{', '.join(name for name, size in state.items() if size)} of "
                         f"{parameters / 1e9:.1f} billion parameters take {required / 1e9:.0f} GB on each of "
                         f"{ranks} ranks, which has {available / 1e9:.0f}; "
                         f"{', or '.join(advice) or 'expected a smaller model'}")
