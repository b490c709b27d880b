"""Engines on a GPU: float32 as on a CPU, float16 close to it, fake-quant with a CPU's levels, and the emulator."""

import pytest
import torch
from decibels import sqnr

from swin_quant.backends.fastertransformer import emulator
from swin_quant.backends.fastertransformer.export import FasterTransformerOptions, export
from swin_quant.backends.open_artifact import open_artifact
from swin_quant.cards.card import RunCard
from swin_quant.quant.policy import load_policy
from swin_quant.score.engine import half_type, torch_engines
from swin_quant.score.options import EngineOptions

KINDS = pytest.mark.parametrize("kind", ["swin", "swinv2"])


def logits(model, device, images):
    """Logits on the CPU by label, for float32, half precision and fake-quant."""
    engines = torch_engines(model.to(device), device, half_type("auto", device), [load_policy("ft-mode1")])
    with torch.inference_mode():
        return {label: engine(images.to(device)).float().cpu() for label, engine in engines.items()}


@KINDS
def test_engines_give_the_logits_of_a_cpu(gpu, calibrated, images, kind):
    ours, theirs = (logits(calibrated(kind), device, images) for device in (gpu, torch.device("cpu")))
    half = "float16" if gpu.type == "cuda" else "bfloat16"
    assert list(ours) == ["float32", half, "int8 ft-mode1"]
    found = {label: sqnr(theirs["float32"], ours[label]) for label in ("float32", half)}
    found["int8"] = sqnr(theirs["int8 ft-mode1"], ours["int8 ft-mode1"])
    print(f"{kind}: dB of float32 {found['float32']:.0f}, {half} {found[half]:.0f}, int8 {found['int8']:.0f}")
    assert found["float32"] > 70 and found[half] > 20
    # A value on a tie may be rounded the other way, which changes later values, but less than quantization itself.
    assert found["int8"] > sqnr(theirs["float32"], theirs["int8 ft-mode1"]) + 3


@KINDS
def test_fastertransformer_s_emulator_computes_on_a_gpu_what_it_does_on_a_cpu(gpu, calibrated, images, tmp_path, kind):
    card = RunCard("tiny", {}, {}, policy=load_policy("ft-mode1").to_dict())
    file = export(calibrated(kind), card, tmp_path, FasterTransformerOptions()).file
    options = (EngineOptions(device="cuda" if gpu.type == "cuda" else "cpu"), EngineOptions())
    with torch.inference_mode():
        ours, theirs = (
            emulator.load(open_artifact(file), each)(images.to(each.device)).float().cpu() for each in options
        )
    assert sqnr(theirs, ours) > 30
