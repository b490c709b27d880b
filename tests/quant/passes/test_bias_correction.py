"""Bias correction: means by brute force, and what it is worth at few bits."""

import pytest
import torch

from swin_quant.models.registry import exchanges_of, outputs_of, units_of
from swin_quant.quant.calibration import calibrate
from swin_quant.quant.check import distance
from swin_quant.quant.passes.bias_correction import BiasOptions, run
from swin_quant.quant.passes.kind import Workpiece
from swin_quant.quant.policies import load_policy
from swin_quant.quant.policy import apply_policy, dequantize, quantize


@pytest.fixture
def images():
    return torch.randn(16, 3, 32, 32, generator=torch.Generator().manual_seed(7))


def piece_of(model, images):
    return Workpiece(model, images.split(8), units=units_of(model), exchanges=exchanges_of(model),
                     outputs=outputs_of(model))  # fmt: skip


def after_units(model, images):
    """float64 [units, channels] means of what each unit gives, by plain hooks."""
    means = []
    hooks = [
        unit.register_forward_hook(lambda m, i, y: means.append(y.double().flatten(0, -2).mean(0)))
        for unit in units_of(model).values()
    ]
    with torch.inference_mode():
        found = model(images)
    for hook in hooks:
        hook.remove()
    return means, found


@pytest.mark.parametrize("kind", ["swin", "swinv2"])
def test_means_of_unit_outputs_and_logits_come_nearer_to_float(kind, tiny_model, images):
    model = tiny_model(kind)
    apply_policy(model, load_policy("qdq").bits("role:gemm_weight", 4).bits("role:activation", 4))
    calibrate(model, images.split(8))
    wanted, expected = after_units(model, images)
    quantize(model)
    before, rough = after_units(model, images)
    dequantize(model)
    run(piece_of(model, images), BiasOptions())
    quantize(model)
    after, corrected = after_units(model, images)
    dequantize(model)
    far = [(b - w).norm() for b, w in zip(before, wanted, strict=True)]
    near = [(a - w).norm() for a, w in zip(after, wanted, strict=True)]
    assert sum(near) < 0.7 * sum(far)
    assert distance(corrected, expected)[1] > distance(rough, expected)[1]


def test_the_last_bias_of_a_unit_takes_what_is_left(tiny_model, images):
    """fc2's bias is added to what a block of V1 gives: there the mean error of the first block is gone."""
    model = tiny_model("swin")
    apply_policy(model, load_policy("qdq").bits("role:activation", 4))
    calibrate(model, images.split(8))
    wanted, _ = after_units(model, images)
    run(piece_of(model, images), BiasOptions())
    quantize(model)
    found, _ = after_units(model, images)
    dequantize(model)
    assert torch.allclose(found[0], wanted[0], atol=1e-5)


def test_only_biases_change(tiny_model, images, use_policy):
    model = use_policy(tiny_model("swinv2"), "ft-mode1")
    calibrate(model, images.split(8))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    run(piece_of(model, images), BiasOptions(sequential=False))
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed and all(name.endswith("bias") for name in changed)


def test_batches_of_any_size_give_the_same(tiny_model, images, use_policy):
    states = []
    for size in (8, 3):
        model = use_policy(tiny_model("swin"), "ft-mode1")
        calibrate(model, images.split(8))
        run(Workpiece(model, images.split(size), units=units_of(model), outputs=outputs_of(model)), BiasOptions())
        states.append(model.state_dict())
    assert all(torch.allclose(value, states[1][name], atol=1e-5) for name, value in states[0].items())
