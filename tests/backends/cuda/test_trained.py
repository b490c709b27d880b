"""The trained checkpoints of a checkout, run by the kernels: equal to fake-quant and FasterTransformer's emulator with
the same ranges."""

from pathlib import Path

import pytest
import torch

from swin_quant.backends.cuda.export import CudaOptions, export
from swin_quant.cards.card import RunCard
from swin_quant.checkpoint import load_float
from swin_quant.config import load_config
from swin_quant.models import build_model
from swin_quant.quant.calibration import calibrate
from swin_quant.quant.policy import apply_policy, dequantize, load_policy, quantize
from tests.backends.cuda.test_interpreted import interpret

FOLDER = Path(__file__).parents[3] / "examples" / "checkpoints"
FORMS = {"swin": ("cuda", "ft-mode1", "ft-mode2"), "swinv2": ("cuda", "ft-mode1")}


def digits(count):
    """Handwritten digits as pictures of 32 x 32, in which a trained network finds edges."""
    from sklearn.datasets import load_digits

    grey = torch.tensor(load_digits().images[:count], dtype=torch.float32)[:, None] / 16
    return torch.nn.functional.interpolate(grey, 32, mode="bilinear").repeat(1, 3, 1, 1) * 4 - 2


@pytest.mark.nightly
@pytest.mark.parametrize("kind", FORMS)
def test_trained_networks_by_interpreted_kernels(emulator_of, kind, tmp_path):
    model = build_model(load_config(FOLDER / f"{kind}_micro_cifar10.yaml"))
    load_float(model, FOLDER / f"{kind}_micro_cifar10.safetensors")
    apply_policy(model, load_policy("ft-mode1"))
    pictures = digits(9)
    calibrate(model, [pictures[:8]])
    images = pictures[8:]
    files, expected, noise = {}, {}, {}
    for policy in FORMS[kind]:
        apply_policy(model, load_policy(policy))
        card = RunCard("micro", {}, {}, policy=load_policy(policy).to_dict())
        files[policy] = export(model, card, tmp_path / policy, CudaOptions()).file
        if policy.startswith("ft"):
            expected[policy] = emulator_of(model, policy, fused=True, misread=False).features(images)
        else:
            quantize(model)
            with torch.inference_mode():
                expected[policy] = model(images)
                dequantize(model)
                noise[policy] = (model(images) - expected[policy]).abs().mean()
    interpret(files.values(), images, tmp_path)
    for policy, file in files.items():
        name, logits, pooled = torch.load(f"{file}.found")
        assert name == "cuda (interpreted)"
        if policy.startswith("ft"):
            assert torch.equal(pooled.half(), expected[policy]), policy
        else:
            # Between float16 and float32 one level in twelve moves, which adds as much noise as rounding itself.
            assert (logits - expected[policy]).abs().mean() < noise[policy]
