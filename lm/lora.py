"""LoRA, arXiv:2106.09685 §4.1: y = W x + b + ALPHA / rank * B A x, of which only A and B are trained.

Names, shapes and files are those of the package peft. Left out: dropout, adapters of embedding and lm_head.
"""

from contextlib import contextmanager

import torch
from safetensors.torch import save_file
from torch import nn

from infra import files
from infra.parallel import copy_part, full_tensor
from lm.model import Linear

ALPHA = 32


class LoRALinear(Linear):
    """A linear layer with an adapter, A [rank, in] and B [out, rank], that is on or off."""

    def __init__(self, base, rank):
        super().__init__(base.in_features, base.out_features, base.bias is not None, device="meta")
        self.weight, self.bias, self.enabled = base.weight, base.bias, True
        self.lora_A = nn.Parameter(base.weight.new_zeros(rank, base.in_features))
        self.lora_B = nn.Parameter(base.weight.new_zeros(base.out_features, rank))

    def forward(self, x):
        y = super().forward(x)
        return y + ALPHA / len(self.lora_A) * (x @ self.lora_A.T) @ self.lora_B.T if self.enabled else y


def add(model, rank, generator):
    """Freeze a model, and give each linear layer of its blocks an adapter that changes nothing yet.

    A model without weights needs `start` once it has some.
    """
    model.requires_grad_(False)
    for name, layer in [*model.model.layers.named_modules()]:
        if isinstance(layer, Linear):
            model.model.layers.set_submodule(name, LoRALinear(layer, rank))
    start(model, generator)


@torch.no_grad()
def merge(model, generator):
    """Add each adapter to its matrix, and start a new one."""
    for layer in adapted(model):
        _, full = next(merged(dict(layer.named_parameters())))
        copy_part(layer.weight, full)
    start(model, generator)


@torch.no_grad()
def start(model, generator):
    """Give the adapters the values of new ones: B is 0 and A uniform in +-in^-0.5, as in peft."""
    for layer in adapted(model):
        uniform = torch.empty(layer.lora_A.shape, device="cpu").uniform_(-1, 1, generator=generator)
        copy_part(layer.lora_A, uniform * layer.in_features ** -0.5)
        layer.lora_B.zero_()


def adapted(model):
    """The layers of a model that have an adapter, in order."""
    return [module for module in model.modules() if isinstance(module, LoRALinear)]


def merged(weights):
    """Yield (name, tensor) of the model without adapters that computes the same. weights: {name: tensor}."""
    for name, weight in weights.items():
        a, b = (weights.get(f"{name.removesuffix('weight')}lora_{matrix}") for matrix in "AB")
        if "lora_" not in name:
            yield name, weight if a is None else (
                full_tensor(weight) + ALPHA / len(a) * (full_tensor(b) @ full_tensor(a)))


@contextmanager
def disabled(model):
    """Yield the model with its adapters off: what it was when they were new."""
    layers = adapted(model)
    for layer in layers:
        layer.enabled = False
    try:
        yield model
    finally:
        for layer in layers:
            layer.enabled = True


def save(weights, folder, base):
    """Write the adapters among full weights as peft's files. base: folder of the model without them."""
    found = {f"base_model.model.{name}.weight": weights[name] for name in weights if "lora_" in name}
    files.write_json(folder / "adapter_config.json", {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": len([*found.values()][0]), "lora_alpha": ALPHA,
        "base_model_name_or_path": str(base), "target_modules": sorted({k.split(".")[-3] for k in found})})
    save_file(found, folder / "adapter_model.safetensors", metadata={"format": "pt"})
