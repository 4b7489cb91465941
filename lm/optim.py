"""Optimizers: AdamW, and Muon for the cold start of a small model, over the parameters that are trained.

Left out: learning-rate schedules (the caller sets the learning rate at each step).
"""

import math

import torch

from infra import parallel
from lm.model import slow_bf16


def train_last(model, n):
    """Freeze a model except for its last n blocks, its final norm and a value head.

    The embedding and lm_head are frozen, tied or not: a tied one would also change what the frozen blocks
    read. ValueError if the model has fewer blocks.
    """
    if n > (blocks := len(model.model.layers)):
        raise ValueError(f"--train-layers={n}: the model has {blocks} layers")
    model.requires_grad_(False)
    heads = [model.value_head] if model.config.value_head else []
    for part in (*model.model.layers[-n:], model.model.norm, *heads):
        part.requires_grad_(True)


def trained(model):
    """The parameters of a model that are not frozen."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def adamw(model, exclude=()):
    """AdamW over a model's trained parameters except `exclude`; the caller sets each step's learning rate.

    On CUDA it is fused, which needs no temporary tensors.
    """
    excluded = {id(parameter) for parameter in exclude}
    device = next(model.parameters()).device
    return torch.optim.AdamW([p for p in trained(model) if id(p) not in excluded], lr=0.0,
                             betas=(0.9, 0.999), weight_decay=0.0,
                             fused=True if device.type == "cuda" else None)


class Orthogonal(torch.optim.Optimizer):
    """Muon's step for matrices W, with the step size matched to AdamW's (arXiv:2502.16982 Eq. 4):

        B = .95 B + .05 g,   W -= lr .2 sqrt(longer side) `orthogonalized`(.05 g + .95 B)

    As torch.optim.Muon with adjust_lr_fn="match_rms_adamw" and no weight decay, and equal to it bit for bit
    where `product_dtype` is bfloat16; torch's is always. The caller sets the learning rate before each step.
    All ranks create one together.
    """

    def __init__(self, matrices):
        super().__init__(matrices, {"lr": 0.0})
        self.dtype = product_dtype(matrices[0].device)

    @torch.no_grad()
    def step(self):
        """Update the matrices that have gradients."""
        for group in self.param_groups:
            for matrix in (matrix for matrix in group["params"] if matrix.grad is not None):
                state = self.state[matrix]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(matrix)
                average = state["momentum_buffer"].lerp_(matrix.grad, 0.05)
                direction = orthogonalized(matrix.grad.lerp(average, 0.95), self.dtype)
                matrix.add_(direction, alpha=-group["lr"] * 0.2 * math.sqrt(max(matrix.shape)))


def orthogonalized(matrix, dtype):
    """U V^T of the matrix U S V^T, roughly: five Newton-Schulz steps bring the singular values that are near
    the largest to between .5 and 1.5 (Jordan et al. 2024, kellerjordan.github.io/posts/muon).

    dtype: of the products and of what is returned.
    """
    x = matrix.to(dtype)
    x = x.T if (tall := len(matrix) > matrix.shape[1]) else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=-4.775, alpha=2.0315), x, beta=3.4445)
    return x.T if tall else x


def product_dtype(device):
    """bfloat16, or float32 on CPUs if it is faster on any rank's: each updates whole matrices, all alike."""
    on_cpu = device.type == "cpu"
    return torch.float32 if on_cpu and parallel.any_rank(slow_bf16()) else torch.bfloat16


class Muon:
    """Muon (`Orthogonal`) for the layers' matrices and AdamW for all other parameters, as one optimizer.

    A model trained from scratch needs fewer steps with it (lab/results/tries_alfworld.md), and one learning
    rate serves both. A sharded matrix is gathered, updated in full on each rank, and sharded again.
    """

    def __init__(self, model):
        self.matrices = [p for p in trained(model.model.layers) if p.dim() == 2]
        self.full = [parallel.full_tensor(p) for p in self.matrices]
        self.parts = [Orthogonal(self.full)]
        if len(trained(model)) > len(self.matrices):         # not so if adapters alone are trained
            self.parts.append(adamw(model, exclude=self.matrices))
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    def step(self):
        """Update the parameters from their gradients."""
        for matrix, full in zip(self.matrices, self.full):
            full.grad = None if matrix.grad is None else parallel.full_tensor(matrix.grad)
        for part in self.parts:
            part.step()
        for matrix, full in zip(self.matrices, self.full):
            parallel.copy_part(matrix, full)

    def zero_grad(self, set_to_none=True):
        """Set all gradients to None."""
        for parameter in (*self.matrices, *(p for group in self.param_groups for p in group["params"])):
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
            for key, tensor in state.items():               # copied, else a file stays mapped
                like = parameter if tensor.shape == parameter.shape else tensor
                part.state[parameter][key] = torch.zeros_like(like, requires_grad=False)
                parallel.copy_part(part.state[parameter][key], tensor)

    def _parameters(self):
        """(optimizer part, parameter) pairs in a fixed order."""
        return [(part, parameter) for part in self.parts for group in part.param_groups
                for parameter in group["params"]]
