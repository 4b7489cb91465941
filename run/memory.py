"""What a run keeps in a device's memory all along; bench/memory.py counts the rest."""

import torch


def state_bytes(parameters, ranks, dtype):
    """{name: bytes on each rank} of so many parameters, trained by AdamW over the ranks in `dtype`.

    Gradients are two sets: the judge's and the policy's are made apart, so that they can be compared. Left
    out is what is there while these are not: the KL's reference, and PPO's critic with all of its own.
    """
    compute = torch.finfo(dtype).bits // 8
    whole = ranks == 1 and dtype == torch.float32                # then the model samples itself
    return {"master weights": 4 * parameters / ranks, "Adam's moments": 8 * parameters / ranks,
            "gradients": 8 * parameters / ranks, "sampler": 0 if whole else compute * parameters}


def check_room(parameters, ranks, dtype, device):
    """ValueError where that alone is more than a GPU has. Other devices are not asked."""
    if device.type != "cuda":
        return
    needed = sum(state_bytes(parameters, ranks, dtype).values())
    if needed > (there := torch.cuda.get_device_properties(device).total_memory):
        raise ValueError(f"--dtype={str(dtype).removeprefix('torch.')}: weights, gradients and moments of "
                         f"{parameters / 1e9:.1f} billion parameters take {needed / 1e9:.0f} GB on each of "
                         f"{ranks} ranks, which has {there / 1e9:.0f}; --dtype bfloat16, or more ranks")
