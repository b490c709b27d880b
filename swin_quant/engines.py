"""The engines that torch itself provides: the float model, its half-precision form, and the fake-quantized one."""

import torch
from torch import Tensor, nn

from swin_quant.errors import UsageError
from swin_quant.evaluate import Engine
from swin_quant.quant.policy import dequantize, enabled_nodes, quantize
from swin_quant.quant.quantizer import Role

FAKE_QUANT = "torch fake-quant"
EAGER = "torch"
HALF_TYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def half_type(name: str, device: torch.device) -> str | None:
    """`auto` is float16 on a GPU and bfloat16 on a CPU; `none` leaves the half-precision engine out."""
    if name == "auto":
        return "float16" if device.type == "cuda" else "bfloat16"
    if name == "none":
        return None
    if name not in HALF_TYPES:
        raise UsageError(f"--half {name}: must be auto, none, {' or '.join(HALF_TYPES)}")
    return name


def torch_engines(model: nn.Module, device: torch.device, half: str | None) -> dict[str, Engine]:
    """Engines by precision, float32 first; the quantized one is there if the model's policy enables a node.

    Half precision is autocast: matmuls in half, residual stream, LayerNorm and softmax in float32.
    """

    def float32(images: Tensor) -> Tensor:
        dequantize(model)
        return model(images)

    def half_precision(images: Tensor) -> Tensor:
        dequantize(model)
        with torch.autocast(device.type, HALF_TYPES[half or ""]):
            return model(images)

    def quantized(images: Tensor) -> Tensor:
        quantize(model)
        try:
            return model(images)
        finally:
            dequantize(model)

    engines: dict[str, Engine] = {"float32": float32}
    if half:
        engines[half] = half_precision
    if enabled_nodes(model):
        quantize(model)  # an uncalibrated node is refused before any picture is read
        dequantize(model)
        engines[precision_of(model)] = quantized
    return engines


def precision_of(model: nn.Module) -> str:
    """`int8` where every enabled node has 8 bits, `W4A8` for weights and activations, `mixed` for anything else."""
    bits: dict[bool, set[int]] = {True: set(), False: set()}
    for node in enabled_nodes(model).values():
        bits[node.role is Role.GEMM_WEIGHT].add(node.bits)
    if bits[True] | bits[False] == {8}:
        return "int8"
    if any(len(kind) > 1 for kind in bits.values()):
        return "mixed"
    weights, activations = (min(kind, default=32) for kind in (bits[True], bits[False]))
    return f"W{weights}A{activations}"
