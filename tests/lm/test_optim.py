"""Proves that Muon makes the documented step, and that its state loads on another device.

    python -m pytest tests/lm/test_optim.py

tests/infra/test_parallel.py tests it on two ranks.
"""

import copy

import pytest
import torch
from hand_made import PLAIN, unscored_samples

import update
from infra import parallel
from lm import optim
from lm.optim import Muon


@pytest.fixture
def samples():
    return unscored_samples()


def test_muons_first_step_has_similar_singular_values_in_all_directions(model, samples):
    """For a matrix of a layer, with U and V from the SVD of its gradient, U^T step V is diagonal.

    Its entries lie between .5 and 1.5 of lr * .2 * sqrt(longer side), while the gradient's singular values
    differ by far more. All other parameters move by lr against the sign of their gradient, as with AdamW.
    """
    optimizer, lr = Muon(model), 1e-3
    before, gradient = [p.detach().clone() for p in model.parameters()], {}
    step, named = optimizer.step, dict(model.named_parameters())
    optimizer.step = lambda: gradient.update({name: p.grad.clone() for name, p in named.items()}) or step()
    update.update(model, optimizer, samples, PLAIN, lr=lr)
    spread = []
    for (name, parameter), old in zip(model.named_parameters(), before, strict=True):
        moved = parameter.detach() - old
        if ".layers." in name and moved.dim() == 2:
            u, values, vh = torch.linalg.svd(gradient[name], full_matrices=False)
            large = values > 0.05 * values[0]                    # Muon does not bring small ones to 1
            along = u[:, large].T @ (-moved / (lr * 0.2 * max(moved.shape)**0.5)) @ vh[large].T
            assert along.diagonal().min() > 0.5 and along.diagonal().max() < 1.5
            assert (along - along.diagonal().diag()).abs().max() < 0.1                   # computed in bf16
            spread.append(values[0] / values[large][-1])
        else:
            large = gradient[name].abs() > 1e-6                                          # eps is 1e-8
            torch.testing.assert_close(moved[large], -lr * gradient[name][large].sign(), rtol=0.02, atol=1e-7)
    assert max(spread) > 5
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(24, 24), (24, 72), (72, 24)])
def test_its_steps_are_torchs_muons(shape, dtype, monkeypatch):
    """Three steps, bit for bit in bfloat16, also of small gradients. In float32 the singular values and
    vectors are the same up to bfloat16's rounding, 2^-8 in each of 15 products; a step's entries are some
    .2 lr."""
    monkeypatch.setattr(optim, "product_dtype", lambda device: dtype)
    generator = torch.Generator().manual_seed(0)
    ours, theirs = (torch.nn.Parameter(torch.ones(shape)) for _ in range(2))
    pair = (optim.Orthogonal([ours]),
            torch.optim.Muon([theirs], weight_decay=0.0, adjust_lr_fn="match_rms_adamw"))
    for _ in range(3):
        ours.grad = theirs.grad = 1e-4 * torch.randn(shape, generator=generator)
        for optimizer in pair:
            optimizer.param_groups[0]["lr"] = 1e-2
            optimizer.step()
    if dtype == torch.bfloat16:
        assert torch.equal(ours, theirs)
    moved, error = theirs.detach() - 1, (ours - theirs).detach()
    assert moved.norm() > 1e-2 and error.norm() < 15 * 2**-8 * moved.norm()


def test_products_are_in_bfloat16_only_where_that_is_fast(monkeypatch):
    cpu = torch.device("cpu")
    for slow, dtype in ((False, torch.bfloat16), (True, torch.float32)):
        monkeypatch.setattr(optim, "slow_bf16", lambda slow=slow: slow)
        assert optim.product_dtype(cpu) == dtype
        assert optim.product_dtype(torch.device("cuda")) == torch.bfloat16
    monkeypatch.setattr(optim, "slow_bf16", lambda: False)
    monkeypatch.setattr(parallel, "any_rank", lambda slow: True)                # another rank's CPU is slow
    assert optim.product_dtype(cpu) == torch.float32


@pytest.mark.parametrize("fused", [True, False])
def test_a_loaded_muon_keeps_adamws_step_count_on_the_device_that_adamw_reads(model, samples, fused):
    """Fused AdamW, as on CUDA, reads the count on the parameter's device, unfused AdamW on the CPU.

    The device is "meta" here, so that the test distinguishes the two on any machine.
    """
    optimizer = Muon(model)
    update.update(model, optimizer, samples, PLAIN, lr=1e-3)
    saved = optimizer.state_dict()
    assert {tensor.device.type for state in saved for tensor in state.values()} == {"cpu"}
    loaded = Muon(copy.deepcopy(model).to("meta"))
    loaded.parts[1].defaults["fused"] = fused
    loaded.load_state_dict(saved)
    for parameter, state in loaded.parts[1].state.items():
        assert state["exp_avg"].device == parameter.device
        assert state["step"].device.type == ("meta" if fused else "cpu")


def test_adamw_has_the_moments_decay_that_results_were_made_with(model):
    """0.9 and 0.999, without weight decay, over the parameters that are not frozen."""
    model.requires_grad_(False).model.norm.weight.requires_grad_(True)
    (group,) = optim.adamw(model).param_groups
    assert (group["betas"], group["weight_decay"], group["eps"]) == ((0.9, 0.999), 0.0, 1e-8)
    assert group["params"] == [model.model.norm.weight]
