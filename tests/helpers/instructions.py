"""Instructions that parts of kernels take, from counts of whole ones: what `tests/backends/cuda/test_instructions.py`
holds and `benchmarks/cuda_static.py` tells."""

from dataclasses import replace

from swin_quant.backends.cuda.crosscompile import kernel_of
from swin_quant.backends.cuda.launches import program_of
from swin_quant.backends.cuda.planning import spec_of_config
from swin_quant.backends.cuda.sass import LANES
from swin_quant.config import load_config
from swin_quant.config.load import find_config

MODEL, BATCH = "swin_tiny_patch4_window7_224", 32
QK = "layers.0.blocks.0.attn.q k"


def probes():
    """Launches of Swin-T by what is counted in them; those of products have the same tiles and sums."""
    spec = spec_of_config(load_config(find_config(MODEL)))
    launches = {one.name: one for one in program_of(spec, BATCH).launches}
    half = {one.name: one for one in program_of(replace(spec, quantized=spec.quantized - {QK}), BATCH).launches}
    return {
        "rounded": launches["layers.0.blocks.0.attn.qkv"],  # to int8
        "half": half["layers.0.blocks.0.attn.qkv"],
        "gelu": launches["layers.0.blocks.0.mlp.fc1"],  # GELU, to int8
        "plain": launches["layers.0.blocks.0.attn"],
        "shifted": launches["layers.0.blocks.1.attn"],
    }


def instructions(file, capability=90):
    """Instructions a thread, by what they do; None if the kernels were not counted."""
    found = {name: (kernel_of(launch).prepare(), file.of(launch, capability)) for name, launch in probes().items()}
    if not all(counts for _, counts in found.values()):
        return None

    def each(name, rows, columns):
        prepared, counts = found[name]
        tiles = prepared.constants[rows] * prepared.constants[columns] * prepared.constants.get("WINDOWS", 1)
        return counts.counts.issue * counts.warps * LANES / tiles

    rounded, half, gelu = (each(name, "BM", "BN") for name in ("rounded", "half", "gelu"))
    return {
        "GELU, an element": gelu - rounded,
        "rounding to int8, an element": rounded - half + 0.5,  # half takes an instruction for two elements
        "attention, a logit": each("plain", "BQ", "BKEYS"),
        "attention with a shift, a logit": each("shifted", "BQ", "BKEYS"),
    }
