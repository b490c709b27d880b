"""CPUs whose int8 products saturate, the weights that cannot make them, and the sentence for who runs a file there.

Without VNNI the kernels of OpenVINO (oneDNN) and ONNX Runtime (MLAS) multiply activations, uint8, by weights, int8, and
add the products in pairs of 16 bits (vpmaddubsw). 2 * 255 * 127 is 64,770 and becomes 32,767; nothing is said. Weights
of 7 bits are the remedy: 2 * 255 * 64 is 32,640. Symmetric int8 activations are no way out: both libraries add 128.
"""

import os
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn

from swin_quant.backends.artifact import Artifact
from swin_quant.backends.backend import Backend
from swin_quant.backends.registry import engine_named, engines, takers
from swin_quant.base.errors import UsageError
from swin_quant.base.progress import log
from swin_quant.quant.fake_quant import FP8
from swin_quant.quant.policy import Policy, Rule, enabled_nodes
from swin_quant.quant.quantizer import Role
from swin_quant.score.engine import HALF_TYPES

SAFE_BITS = 7
SAFE_WEIGHTS = Rule(nodes=("role:gemm_weight",), bits=SAFE_BITS)
SAFE_ON = "saturation_safe"  # an artifact's option: the engines whose products of it cannot saturate; none in old files

_OF_FLOATS = ("float32", *HALF_TYPES, FP8)  # precisions of artifacts
_DOT_PRODUCTS = ("dot", "i8mm")  # of ARM, into 32 bits
_VNNI = ("avx_vnni", "avx512_vnni", "amx_int8")
# What oneDNN uses when its environment variable forbids later instructions; of levels that are not here, all.
_LIMITS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("sse41", "avx", "avx2", "avx512_core"), ()),
    **dict.fromkeys(("avx2_vnni", "avx2_vnni_2"), ("avx_vnni",)),
    **dict.fromkeys(("avx512_core_vnni", "avx512_core_bf16"), ("avx512_vnni",)),
}


def saturates(engine: str) -> bool | None:
    """Whether int8 products of full range saturate on this CPU in `engine`; None: unknown."""
    found = engine_named(engine).saturation
    if found is None:
        return False
    cpu: Mapping[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()  # torch has it since 2.10
    if any(cpu.get(name) for name in _DOT_PRODUCTS):
        return False
    if "avx2" not in cpu:
        return None
    limit = next(filter(None, map(os.environ.get, found.limits)), "")
    return not any(cpu.get(name) for name in _LIMITS.get(limit.lower(), _VNNI))


def at_risk(target: Backend) -> tuple[str, ...]:
    """The engines, among those that `target` exports for, whose int8 products saturate on some CPUs."""
    exported_for = [target] if target.load or not target.exports else takers(target.exports.artifact)
    return tuple(engine.name for engine in exported_for if engine.saturation)


def without_saturation(policy: Policy) -> Policy:
    """`policy` with weights that cannot saturate, under a name that says so. UsageError for one with float8."""
    if policy.has_float8:
        raise UsageError(
            f"‹saturation_safe›: policy {policy.name} has nodes in float8, which cannot saturate: it is for "
            "policies of int8 alone"
        )
    if SAFE_WEIGHTS in policy.rules:
        return policy
    return replace(policy.and_then(SAFE_WEIGHTS), name=f"{policy.name} saturation-safe")


def safe_on(model: nn.Module) -> list[str]:
    """The engines whose products of `model`, its policy applied, cannot saturate on any CPU.

    Products of two activations are uint8 by uint8, exact, in ONNX Runtime, and uint8 by int8 of 8 bits in OpenVINO.
    Float8, and weights alone, are multiplied as floats.
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
    """Whether products of `artifact` saturate in `engine` on CPUs without VNNI, left as it is."""
    record, safe = artifact.record, artifact.record["options"].get(SAFE_ON)
    if engine_named(engine).saturation is None or record["precision"] in _OF_FLOATS:
        return False
    return record["precision"] == "int8" if safe is None else engine not in safe


def exact_session(engine: str, artifact: Artifact) -> str | None:
    """The setting with which `engine`, if it has one, multiplies in `artifact` exactly on every CPU.

    Where nothing saturates it changes nothing. Files of before we knew of it cannot be loaded so.
    """
    found = engine_named(engine).saturation
    known = SAFE_ON in artifact.record["options"]
    return found.exact_kernels if found and known and may_saturate(engine, artifact) else None


def exact_kernels(engine: str, artifact: Artifact) -> str | None:
    """`exact_session` where this CPU needs it."""
    return exact_session(engine, artifact) if saturates(engine) else None


def caution(engine: str, artifact: Artifact) -> str | None:
    """A sentence if `artifact` runs on this CPU, in `engine`, with other results or more slowly than with VNNI."""
    if not may_saturate(engine, artifact) or not saturates(engine):
        return None
    remedy = f"`export --for {engine} --saturation-safe`"
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
    """Log what `caution` says, if anything, and return it."""
    if said := caution(engine, artifact):
        log.warning("%s", said)
    return said
