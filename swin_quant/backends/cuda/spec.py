"""The engine's computation without weights: geometry, arithmetic, and the quantized products.

A product is named by its layer, or `q k` and `a v` inside an attention. `spec_for` finds the spec of a model under its
policy, or raises a one-line error that names what no kernel computes.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn
from yacs.config import CfgNode

from swin_quant.base.errors import UsageError, listed
from swin_quant.config.outputs import LOGITS
from swin_quant.config.swin import SWINV2
from swin_quant.models.geometry import Geometry, read_geometry
from swin_quant.models.layers import LayerNorm, Swin
from swin_quant.models.swin_v2 import get_version
from swin_quant.quant import INT8_MODES
from swin_quant.quant.fake_quant import FP8
from swin_quant.quant.layer import made_factors
from swin_quant.quant.policy import load_policy, settings_for
from swin_quant.quant.quantizer import Role, named_nodes
from swin_quant.score.engine import HALF_TYPES

ARITHMETICS = ("cuda", "ft-mode1", "ft-mode2")
LEAST_HEAD_DIM = 32  # of an int8 product; narrower heads are padded with zeros
REDUCTION = "downsample.reduction"
EPSILON = 1e-5  # torch's LayerNorm, which the models use
LARGEST_WINDOW = 32  # 1024 tokens: the most products whose int8 sums are exact in float32
LARGEST_HEAD_DIM = 128
CHANNELS = 32  # products of bytes take channels in multiples of this
# Type of GELU's result -> its form, with the largest error over all values (kernels/jit/gemm.py).
_GELUS = {
    "int8": "erf's by a polynomial of degree 3 in the exponent, within 5.5e-5",
    "other": "erf's by a polynomial of degree 5 in the exponent, within 2.8e-7 times max(1, |x|)",
}
_GELU_OF_FT = "FasterTransformer's tanh form, from a table of int8 results for each channel"


@dataclass(frozen=True)
class NetworkSpec:
    """A Swin of `version` 1 or 2.

    `arithmetic` `cuda`: `quantized` products have operands of `format`, int8 or fp8 (E4M3), and all else is float;
    `ft-mode1` and `ft-mode2` are FasterTransformer's, in int8. `float_type`, float16 or bfloat16, is the type of the
    rest. `pixels`: pictures are uint8 [batch, S, S, in], which the patch embedding's weights normalise. `exit_factors`:
    the last norm's input is multiplied by a factor a channel.
    """

    geometry: Geometry
    version: int
    arithmetic: str = "cuda"
    quantized: frozenset[str] = frozenset()
    float_type: str = "float16"
    format: str = "int8"
    pixels: bool = False
    exit_factors: bool = False

    @property
    def half(self) -> torch.dtype:
        return HALF_TYPES[self.float_type]

    @property
    def operand(self) -> torch.dtype:
        """The type of quantized operands."""
        return torch.float8_e4m3fn if self.format == FP8 else torch.int8

    @property
    def is_ft(self) -> bool:
        """Whether it rounds where FasterTransformer's kernels do."""
        return self.arithmetic != "cuda"

    def gelu(self) -> dict[str, str]:
        """The form of GELU for each type of its results, which are operands of fc2."""
        kinds = sorted({self.kind(layer) for layer in self.linears() if layer.endswith("mlp.fc2")})
        return {kind: _GELU_OF_FT if self.is_ft else _GELUS.get(kind, _GELUS["other"]) for kind in kinds}

    def channels(self, stage: int) -> int:
        return self.geometry.embed_dim * 2**stage

    def hidden(self, stage: int) -> int:
        """Channels between fc1 and fc2."""
        return int(self.channels(stage) * self.geometry.mlp_ratio)

    def head_dim(self, stage: int) -> int:
        """Channels of a head in the model; the engine computes with `padded_head_dim`."""
        return self.channels(stage) // self.geometry.heads[stage]

    def padded_head_dim(self, stage: int) -> int:
        """The next power of two, at least 32."""
        return max(LEAST_HEAD_DIM, 1 << (self.head_dim(stage) - 1).bit_length())

    def linears(self) -> Iterator[str]:
        """Every linear of the blocks and the patch mergings."""
        for stage, depth in enumerate(self.geometry.depths):
            for block in range(depth):
                at = f"layers.{stage}.blocks.{block}."
                yield from (f"{at}{layer}" for layer in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"))
            if stage < len(self.geometry.depths) - 1:
                yield f"layers.{stage}.{REDUCTION}"

    def products(self) -> Iterator[str]:
        """Every product that may be quantized."""
        for name in self.linears():
            yield name
            if name.endswith("attn.qkv"):
                yield from (f"{name.removesuffix('qkv')}{product}" for product in ("q k", "a v"))

    def folds(self, layer: str) -> bool:
        """Whether a layer's scale and bias hold the levels of the product that reads its result: one multiply-add then
        makes levels of its sums."""
        at, _, last = layer.rpartition(".")
        read_by = {"fc1": "fc2", **({"qkv": "q k"} if self.version == 1 else {})}  # V2 normalises q and k before
        return not self.is_ft and f"{at}.{read_by.get(last)}" in self.quantized

    def kind(self, product: str) -> str:
        """The type of a product's operands."""
        return self.format if product in self.quantized else self.float_type


def make_spec_from_config(cfg: CfgNode, precision: str = "int8") -> NetworkSpec:
    """The spec of a Swin by its shapes alone, with the products of policies `cuda` and `cuda-fp8` quantized, or all in
    half. `precision`: int8, fp8 or float."""
    spec = NetworkSpec(read_geometry(cfg), 2 if cfg.MODEL.TYPE == SWINV2.name else 1)
    if precision == "float":
        return spec
    chosen = (name for name in spec.products() if not name.endswith("a v"))
    return replace(spec, quantized=frozenset(chosen), format=precision)


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
    quantized, known = set[str](), set[str]()
    for product in plain.products():
        first, second = list_operand_nodes(product, version)
        if product.endswith("a v"):
            q, _ = list_operand_nodes(f"{product.removesuffix('a v')}q k", version)
            if (second in enabled) != (q in enabled):
                raise UsageError(f"the CUDA engine keeps q, k and v in one type: quantize all of {q}, k and v or none")
        elif (first in enabled) != (second in enabled):
            one, missing = (first, second) if first in enabled else (second, first)
            how = f"quantize {missing} as well as {one}, or neither"
            raise UsageError(f"the CUDA engine has no product of two types: {how}")
        if first in enabled and second in enabled:
            quantized.add(product)
            known |= {first, second}
    if others := [name for name in enabled if name not in known | list_value_nodes(quantized)]:
        raise UsageError(
            f"the CUDA engine rounds operands of products and nothing else: it cannot quantize "
            f"{listed(others, 2)}; give ‹policy› cuda, or ft-mode1 for FasterTransformer's arithmetic"
        )
    return replace(plain, quantized=frozenset(quantized), format=FP8 if floating else "int8")


def list_operand_nodes(product: str, version: int) -> tuple[str, ...]:
    """The nodes of a product's two operands under arithmetic `cuda`; for `a v` those of probabilities and values."""
    at, _, last = product.rpartition(".")
    if last == "q k":
        q = "mha" if version == 2 else "matmul"
        return tuple(f"{at}.{q}_{x}_input_quantizer" for x in "qk")
    if last == "a v":
        return tuple(f"{at}.matmul_{x}_input_quantizer" for x in "av")
    return f"{product}._input_quantizer", f"{product}._weight_quantizer"


def list_value_nodes(quantized: Iterable[str]) -> set[str]:
    """Nodes of values that are stored in bytes even if their product is half: q, k and v are one tensor."""
    attentions = (product.removesuffix("q k") for product in quantized if product.endswith("q k"))
    return {f"{at}matmul_v_input_quantizer" for at in attentions}
