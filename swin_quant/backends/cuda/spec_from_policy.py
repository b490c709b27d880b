"""The engine's spec of a model under its policy, or a one-line error that names what no kernel computes."""

from collections.abc import Mapping
from dataclasses import replace
from math import prod

from torch import nn

from swin_quant.backends.cuda.launches import build_program
from swin_quant.backends.cuda.spec import NetworkSpec
from swin_quant.base.errors import UsageError, listed
from swin_quant.config.outputs import LOGITS
from swin_quant.models.layers import LayerNorm, Swin
from swin_quant.models.swin_v2 import get_version
from swin_quant.quant import INT8_MODES
from swin_quant.quant.fake_quant import FP8
from swin_quant.quant.layer import made_factors
from swin_quant.quant.policy import load_policy, settings_for
from swin_quant.quant.quantizer import Quantizer, Role, named_nodes

EPSILON = 1e-5
LARGEST_WINDOW = 32  # 1024 tokens: the most products whose int8 sums are exact in float32
LARGEST_HEAD_DIM = 128
ADDRESSED = 2**31 - 1
CHANNELS = 32  # products of bytes take channels in multiples of this


def spec_for(
    model: nn.Module, precision: str = "int8", float_type: str = "float16", pixels: bool = False
) -> NetworkSpec:
    """The spec of a model under its applied policy; with precision float, the policy is ignored.

    UsageError for another network than a Swin classifier, and for a geometry or policy that the engine does not run.
    """
    if not isinstance(model, Swin) or model.output_kind != LOGITS:
        raise UsageError("the CUDA engine runs Swin V1 and V2 as classifiers only: export to another backend")
    plain = NetworkSpec(
        model.geometry,
        get_version(model),
        float_type=float_type,
        pixels=pixels,
        exit_factors=bool(made_factors(model)),
    )
    spec = plain if precision == "float" else _make_quantized_spec(model, plain)
    check_geometry(spec)
    if spec.exit_factors and spec.is_ft:
        raise UsageError(
            f"`equalize` put factors in front of the last norm, where {spec.arithmetic} has none: calibrate the float "
            f"checkpoint under {spec.arithmetic}"
        )
    if spec.pixels and spec.is_ft:
        raise UsageError(
            f"‹uint8_input›: {spec.arithmetic} rounds normalised pictures: give ‹policy› cuda, or no pixels"
        )
    if odd := [name for name, norm in model.named_modules() if isinstance(norm, LayerNorm) and norm.eps != EPSILON]:
        raise UsageError(f"the CUDA engine's norms have an epsilon of {EPSILON:g}: {listed(odd, 2)} have not")
    return spec


def check_geometry(spec: NetworkSpec) -> None:
    """UsageError with the reason if no kernels exist for these sizes."""
    g = spec.geometry
    widest = max(spec.head_dim(stage) for stage in range(len(g.depths)))
    hidden = any(spec.hidden(stage) % CHANNELS for stage in range(len(g.depths)))
    need = f"{spec.format} products need"
    reasons = {
        f"EMBED_DIM {g.embed_dim}: {need} a multiple of {CHANNELS}": spec.quantized and g.embed_dim % CHANNELS,
        f"MLP_RATIO {g.mlp_ratio}: {need} hidden channels in multiples of {CHANNELS}": spec.quantized and hidden,
        f"WINDOW_SIZE {g.window}: at most {LARGEST_WINDOW}": g.window > LARGEST_WINDOW,
        f"heads of {widest} channels: at most {LARGEST_HEAD_DIM}": widest > LARGEST_HEAD_DIM,
        "maps in parts (whole_windows): those of classifiers only": g.whole_windows,
    }
    for reason, holds in reasons.items():
        if holds:
            raise UsageError(f"the CUDA engine cannot run this model: {reason}")


def check_batch(spec: NetworkSpec, batch: int) -> None:
    """UsageError for a batch with a tensor too large for the kernels' int32 addresses."""
    # for one picture: all grow with the batch
    largest = max(prod(buffer.shape) for buffer in build_program(spec, 1).buffers.values())
    if batch > (most := ADDRESSED // largest):
        raise UsageError(f"‹batch› {batch}: kernels address {ADDRESSED + 1} values of a tensor: at most {most} here")


def _make_quantized_spec(model: Swin, plain: NetworkSpec) -> NetworkSpec:
    nodes, version = named_nodes(model), plain.version
    enabled = {name: node for name, node in nodes.items() if node.setting.enabled}
    if not enabled:
        raise UsageError("an int8 export needs a policy that quantizes something: give ‹policy› cuda")
    if shifted := [name for name, node in enabled.items() if not node.setting.symmetric]:
        raise UsageError(f"the CUDA engine's int8 has no zero points: {listed(shifted, 2)} have; give ‹policy› cuda")
    if other := [name for name, node in enabled.items() if node.setting.bits != 8]:
        bits = enabled[other[0]].setting.bits
        raise UsageError(f"the CUDA engine multiplies int8 by int8: {listed(other, 2)} have {bits} bits; give 8")
    if floating := [name for name, node in enabled.items() if node.setting.format == FP8]:
        if integer := [name for name, node in enabled.items() if node.setting.format != FP8]:
            raise UsageError(
                "the CUDA engine multiplies in one format, int8 or fp8: the policy has "
                f"{listed(floating, 1)} in fp8 and {listed(integer, 1)} in int8; give ‹policy› cuda or cuda-fp8"
            )
    if narrow := [
        name for name, node in enabled.items() if node.setting.narrow_range and node.role is not Role.GEMM_WEIGHT
    ]:
        raise UsageError(f"the CUDA engine's int8 begins at -128: {listed(narrow, 2)} have a narrow range")
    for mode, name in INT8_MODES.items():
        wanted = {node for node, setting in settings_for(model, load_policy(name)).items() if setting.enabled}
        if wanted == enabled.keys() and not floating and not any(node.setting.per_channel for node in enabled.values()):
            if version == 2 and mode == 2:
                raise UsageError("Swin V2 under ft-mode2: FasterTransformer's kernels ignore it there; give ft-mode1")
            if plain.float_type != "float16":
                raise UsageError(f"‹float_type› {plain.float_type}: {name} is FasterTransformer's, in float16")
            return replace(plain, arithmetic=name, quantized=frozenset(plain.products()))
    quantized = frozenset(product for product in plain.products() if _is_quantized(product, enabled, version))
    known = {node for product in quantized for node in list_operand_nodes(product, version)}
    if others := [name for name in enabled if name not in known | list_value_nodes(quantized)]:
        raise UsageError(
            f"the CUDA engine rounds operands of products and nothing else: it cannot quantize "
            f"{listed(others, 2)}; give ‹policy› cuda, or ft-mode1 for FasterTransformer's arithmetic"
        )
    return replace(plain, quantized=quantized, format=FP8 if floating else "int8")


def list_operand_nodes(product: str, version: int) -> tuple[str, ...]:
    """The nodes of a product's two operands under arithmetic `cuda`; for `a v` those of probabilities and values."""
    at, _, last = product.rpartition(".")
    if last == "q k":
        q = "mha" if version == 2 else "matmul"
        return tuple(f"{at}.{q}_{x}_input_quantizer" for x in "qk")
    if last == "a v":
        return tuple(f"{at}.matmul_{x}_input_quantizer" for x in "av")
    return f"{product}._input_quantizer", f"{product}._weight_quantizer"


def list_value_nodes(quantized: frozenset[str]) -> set[str]:
    """Nodes of values that are stored in bytes even if their product is half: q, k and v are one tensor."""
    attentions = (product.removesuffix("q k") for product in quantized if product.endswith("q k"))
    return {f"{at}matmul_v_input_quantizer" for at in attentions}


def _is_quantized(product: str, enabled: Mapping[str, Quantizer], version: int) -> bool:
    """Whether both operands of a product are quantized. UsageError if only one is."""
    first, second = list_operand_nodes(product, version)
    if product.endswith("a v"):
        q, _ = list_operand_nodes(f"{product.removesuffix('a v')}q k", version)
        if (second in enabled) != (q in enabled):
            raise UsageError(f"the CUDA engine keeps q, k and v in one type: quantize all of {q}, k and v or none")
        return first in enabled and second in enabled
    if (first in enabled) != (second in enabled):
        one, other = (first, second) if first in enabled else (second, first)
        raise UsageError(f"the CUDA engine has no product of two types: quantize {other} as well as {one}, or neither")
    return first in enabled
