"""Optimizers: AdamW, and Muon for the cold start of a small model.

Left out: learning-rate schedules (the caller sets the learning rate at each step).
"""

import torch

from infra import parallel


def adamw(model, exclude=()):
    """AdamW over a model's parameters except `exclude`; the caller sets the learning rate before each step.

    On CUDA it is fused, which needs no temporary tensors.
    """
    excluded = {id(parameter) for parameter in exclude}
    device = next(model.parameters()).device
    return torch.optim.AdamW([p for p in model.parameters() if id(p) not in excluded], lr=0.0,
                             betas=(0.9, 0.999), weight_decay=0.0,
                             fused=True if device.type == "cuda" else None)


class Muon:
    """Muon for the layers' matrices and AdamW for all other parameters, as one optimizer.

    A model trained from scratch needs fewer steps with it (lab/results/tries_alfworld.md). It is torch's
    Muon, with the step size matched to AdamW's (arXiv:2502.16982 Eq. 4), so that one learning rate serves
    both. A sharded matrix is gathered, updated in full on each rank, and sharded again.
    """

    def __init__(self, model):
        self.matrices = [p for p in model.model.layers.parameters() if p.dim() == 2]
        self.full = [parallel.full_tensor(p) for p in self.matrices]
        self.parts = (torch.optim.Muon(self.full, lr=0.0, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
                      adamw(model, exclude=self.matrices))
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    def step(self):
        """Update the parameters from their gradients."""
        for matrix, full in zip(self.matrices, self.full):
            full.grad = None if matrix.grad is None else parallel.full_tensor(matrix.grad)
        for part in self.parts:
            part.step()
        for matrix, full in zip(self.matrices, self.full):
            parallel.copy_full_tensor(matrix, full)

    def zero_grad(self, set_to_none=True):
        """Set all gradients to None."""
        for parameter in (*self.matrices, *self.full, *self.parts[1].param_groups[0]["params"]):
            parameter.grad = None

    def state_dict(self):
        """The state as unsharded CPU tensors, equal on every rank; it loads at any number of ranks."""
        return [{key: parallel.full_tensor(value).cpu() for key, value in part.state[parameter].items()}
                for part, parameter in self._parameters()]

    def load_state_dict(self, saved):
        """Load the `state_dict` of a Muon of the same model."""
        for (part, parameter), state in zip(self._parameters(), saved, strict=True):
            if part.defaults.get("fused"):        # a fused AdamW counts steps on the parameter's device
                state = {key: tensor.to(parameter.device) for key, tensor in state.items()}
            part.state[parameter] = {key: parallel.shard_like(parameter, t) for key, t in state.items()}

    def _parameters(self):
        """(optimizer part, parameter) pairs in a fixed order."""
        return [(part, parameter) for part in self.parts for group in part.param_groups
                for parameter in group["params"]]
