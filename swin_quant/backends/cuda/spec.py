"""The engine's computation without weights: geometry, arithmetic, and the quantized products.

A product is named by its layer, or `q k` and `a v` inside an attention.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from yacs.config import CfgNode

from swin_quant.config.swin import SWINV2
from swin_quant.models.geometry import Geometry, read_geometry
from swin_quant.quant.fake_quant import FP8
from swin_quant.score.engine import HALF_TYPES

ARITHMETICS = ("cuda", "ft-mode1", "ft-mode2")
LEAST_HEAD_DIM = 32  # of an int8 product; narrower heads are padded with zeros
REDUCTION = "downsample.reduction"
# Type of GELU's result -> its form, with the largest error over all values (kernels/jit/epilogue.py).
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

    def attention_width(self, stage: int) -> int:
        """Channels of q, of k and of v, padding included."""
        return self.geometry.heads[stage] * self.padded_head_dim(stage)

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


def make_spec(geometry: Geometry, version: int, precision: str = "int8", float_type: str = "float16") -> NetworkSpec:
    """The spec with the products of policies `cuda` and `cuda-fp8` quantized, or all in half.

    `precision`: int8, fp8 or float.
    """
    spec = NetworkSpec(geometry, version, float_type=float_type)
    if precision == "float":
        return spec
    chosen = (name for name in spec.products() if not name.endswith("a v"))
    return replace(spec, quantized=frozenset(chosen), format=precision)


def make_spec_from_config(cfg: CfgNode, precision: str = "int8") -> NetworkSpec:
    """The spec of a Swin by its shapes alone: every product in int8 or, with precision float, none."""
    return make_spec(read_geometry(cfg), 2 if cfg.MODEL.TYPE == SWINV2.name else 1, precision)
