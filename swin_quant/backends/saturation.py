"""CPUs whose int8 products saturate, weights that avoid it, and the warning for a file that runs on such a CPU.

Without VNNI the kernels of OpenVINO (oneDNN) and ONNX Runtime (MLAS) multiply uint8 activations by int8 weights and add
each pair of products in 16 bits (vpmaddubsw). 2 * 255 * 127 is 64,770 and silently becomes 32,767. Weights of 7 bits
avoid it: 2 * 255 * 64 is 32,640. Symmetric int8 activations do not: both libraries add 128 to them.
"""

import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from swin_quant.backends.artifact import Artifact
from swin_quant.backends.backend import Backend, function
from swin_quant.backends.registry import engine_named, engines, takers
from swin_quant.base.cpu import within
from swin_quant.base.errors import UsageError
from swin_quant.base.progress import tell_once
from swin_quant.quant.fake_quant import FP8
from swin_quant.quant.policy import Policy, Rule, enabled_nodes
from swin_quant.quant.quantizer import Role
from swin_quant.score.engine import HALF_TYPES

SAFE_BITS = 7
SAFE_WEIGHTS = Rule(nodes=("role:gemm_weight",), bits=SAFE_BITS)
SAFE_ON = "saturation_safe"  # an artifact's option: the engines on which it cannot saturate; old files lack it
_FLOAT_PRECISIONS = ("float32", *HALF_TYPES, FP8)
_DOT_PRODUCTS = ("dot", "i8mm")  # ARM's instructions, which add in 32 bits


def saturates(engine: str) -> bool | None:
    """Whether `engine` saturates int8 products of full range on this CPU; None: unknown."""
    found = engine_named(engine).saturation
    if found is None:
        return False
    cpu: Mapping[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()  # torch has it since 2.10
    if any(cpu.get(name) for name in _DOT_PRODUCTS):
        return False
    if "avx2" not in cpu:
        return None
    limit = next(filter(None, map(os.environ.get, found.limits)), "")
    return not any(cpu.get(name) for name in within(limit) if name != "avx2")


def needs_safe_weights(engine: str | None, config: Mapping[str, Any]) -> bool:
    """Whether only weights of SAFE_BITS keep the products of a configuration's model in `engine` exact on this CPU."""
    found = engine_named(engine).saturation if engine else None
    if engine is None or found is None or found.exact_kernels or not saturates(engine):
        return False
    return not (found.all_compiled and function(found.all_compiled)(config))


def at_risk(target: Backend) -> tuple[str, ...]:
    """Engines that `target` exports for and whose int8 products saturate on some CPUs."""
    exported_for = [target] if target.load or not target.exports else takers(target.exports.artifact)
    return tuple(engine.name for engine in exported_for if engine.saturation)


def without_saturation(policy: Policy) -> Policy:
    """`policy` with 7-bit weights, and "saturation-safe" in its name. UsageError for a policy with float8."""
    if policy.has_float8:
        why = "has nodes in float8, which cannot saturate: it is for policies of int8 alone"
        raise UsageError(f"‹saturation_safe›: policy {policy.name} {why}")
    if SAFE_WEIGHTS in policy.rules:
        return policy
    return replace(policy.and_then(SAFE_WEIGHTS), name=f"{policy.name} saturation-safe")


def safe_on(model: nn.Module) -> list[str]:
    """Engines on which `model`, with its policy applied, cannot saturate on any CPU.

    ONNX Runtime multiplies two activations as uint8 by uint8, exactly; OpenVINO as uint8 by 8-bit int8. Products of
    float8, and of quantized weights with float activations, are float products.
    """
    nodes = [node for node in enabled_nodes(model).values() if node.setting.format != FP8]
    known = {name: engine.saturation for name, engine in engines().items() if engine.saturation}
    if all(node.role is Role.GEMM_WEIGHT for node in nodes):
        return list(known)
    if any(node.role is Role.GEMM_WEIGHT and node.setting.bits > SAFE_BITS for node in nodes):
        return []
    products = any(node.role in (Role.MATMUL_INPUT, Role.SOFTMAX_OUTPUT) for node in nodes)
    return [name for name, found in known.items() if found.exact_products or not products]


def may_saturate(engine: str, artifact: Artifact) -> bool:
    """Whether `artifact` saturates in `engine`, with default settings, on CPUs without VNNI."""
    record, safe = artifact.record, artifact.record["options"].get(SAFE_ON)
    if engine_named(engine).saturation is None or record["precision"] in _FLOAT_PRECISIONS:
        return False
    return record["precision"] == "int8" if safe is None else engine not in safe


def exact_session(engine: str, artifact: Artifact) -> str | None:
    """The setting, if `engine` has one, that makes its products in `artifact` exact on every CPU.

    It changes nothing where nothing saturates. None for old files without SAFE_ON, which do not load with it.
    """
    found = engine_named(engine).saturation
    known = SAFE_ON in artifact.record["options"]
    return found.exact_kernels if found and known and may_saturate(engine, artifact) else None


def exact_kernels(engine: str, artifact: Artifact) -> str | None:
    """`exact_session` if this CPU needs it, else None."""
    return exact_session(engine, artifact) if saturates(engine) else None


def caution(engine: str, artifact: Artifact) -> str | None:
    """A warning if `artifact` gives other results, or is slower, in `engine` on this CPU than with VNNI; else None."""
    if not may_saturate(engine, artifact) or not saturates(engine):
        return None
    found = engine_named(engine).saturation
    if found and found.exact_operators and function(found.exact_operators)(artifact):
        return None
    checkpoint = "FILE" if artifact.card.checkpoint is None else artifact.card.checkpoint["file"]
    remedy = f"`swin-quant export {checkpoint} --for {engine} --saturation-safe`"
    if artifact.card.wrapped:
        remedy = f'`sq.export(model, "{engine}", saturation_safe=True)`'
    if setting := exact_kernels(engine, artifact):
        return (
            f"{engine}: this CPU has no VNNI: {artifact.file.name} runs on slower kernels, which do not saturate "
            f"({setting}: set it in sessions of your own); {remedy} makes a file for the fast ones"
        )
    return (
        f"{engine}: this CPU has no VNNI: int8 products of {artifact.file.name} saturate at 16 bits, which costs "
        f"accuracy: {remedy} makes a file whose products cannot"
    )


def warn(engine: str, artifact: Artifact) -> str | None:
    """Log the warning of `caution`, if any, once for each file, and return it."""
    said = caution(engine, artifact)
    if said:
        tell_once(said, logging.WARNING)
    return said
