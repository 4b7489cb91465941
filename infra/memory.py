"""Bytes of device memory that a run occupies throughout; lab/bench/memory.py counts the rest."""

import torch


def state_bytes(parameters, ranks, dtype):
    """Return {name: bytes per rank} of training `parameters` parameters with AdamW in compute dtype `dtype`.

    There are two sets of gradients, because the policy's and the judge's are computed separately, to be
    compared. Left out: models that are offloaded meanwhile (the KL's reference; PPO's critic and its state).
    """
    compute = torch.finfo(dtype).bits // 8
    samples_itself = ranks == 1 and dtype == torch.float32       # no separate copy of the weights to generate
    return {"master weights": 4 * parameters / ranks, "Adam's moments": 8 * parameters / ranks,
            "gradients": 8 * parameters / ranks, "sampler": 0 if samples_itself else compute * parameters}


def check_memory(parameters, ranks, dtype, device):
    """ValueError if `state_bytes` exceeds the GPU's memory. Devices other than CUDA are not checked."""
    if device.type != "cuda":
        return
    required = sum(state_bytes(parameters, ranks, dtype).values())
    if required > (available := torch.cuda.get_device_properties(device).total_memory):
        raise ValueError(f"--dtype={str(dtype).removeprefix('torch.')}: weights, gradients and moments of "
                         f"{parameters / 1e9:.1f} billion parameters take {required / 1e9:.0f} GB on each of "
                         f"{ranks} ranks, which has {available / 1e9:.0f}; --dtype bfloat16, or more ranks")
