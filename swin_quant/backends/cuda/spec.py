"""What the engine is to compute, without a single weight: geometry, arithmetic, and which products are quantized.

Names of products are those of their layers, and `q k` and `a v` in an attention.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from swin_quant.models.geometry import Geometry
from swin_quant.quant.fake_quant import FP8
from swin_quant.score.engine import HALF_TYPES

ARITHMETICS = ("cuda", "ft-mode1", "ft-mode2")
LEAST_HEAD_DIM = 32  # of an int8 product; narrower heads are filled up with zeros
REDUCTION = "downsample.reduction"


@dataclass(frozen=True)
class NetworkSpec:
    """A Swin of `version` 1 or 2.

    `arithmetic`: `cuda` computes all that is no product in float, products that are `quantized` with operands of
    `format`, int8 or fp8 (E4M3); `ft-mode1` and `ft-mode2` are FasterTransformer's, in int8. The rest is in
    `float_type`, float16 or bfloat16. `pixels`: pictures are uint8 [batch, S, S, in], which the patch embedding's
    weights normalise. `exit_factors`: what enters the last norm is multiplied channel by channel.
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
        """Of products that are quantized."""
        return torch.float8_e4m3fn if self.format == FP8 else torch.int8

    @property
    def is_ft(self) -> bool:
        """Whether it rounds where FasterTransformer's kernels do."""
        return self.arithmetic != "cuda"

    def channels(self, stage: int) -> int:
        return self.geometry.embed_dim * 2**stage

    def hidden(self, stage: int) -> int:
        """Channels between fc1 and fc2."""
        return int(self.channels(stage) * self.geometry.mlp_ratio)

    def head_dim(self, stage: int) -> int:
        """Of the model; the engine computes with `padded_head_dim`."""
        return self.channels(stage) // self.geometry.heads[stage]

    def padded_head_dim(self, stage: int) -> int:
        """The next power of two, 32 at least."""
        return max(LEAST_HEAD_DIM, 1 << (self.head_dim(stage) - 1).bit_length())

    def attention_width(self, stage: int) -> int:
        """Channels of q, of k, and of v, with the zeros that heads are filled up with."""
        return self.geometry.heads[stage] * self.padded_head_dim(stage)

    def linears(self) -> Iterator[str]:
        """Every linear of blocks and mergings."""
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

    def kind(self, product: str) -> str:
        """The type of a product's operands."""
        return self.format if product in self.quantized else self.float_type


def spec_of(geometry: Geometry, version: int, precision: str = "int8", float_type: str = "float16") -> NetworkSpec:
    """The spec of a network whose products are quantized as policies `cuda` and `cuda-fp8` have them, or all in half.

    `precision`: int8, fp8 or float.
    """
    spec = NetworkSpec(geometry, version, float_type=float_type)
    if precision == "float":
        return spec
    chosen = (name for name in spec.products() if not name.endswith("a v"))
    return replace(spec, quantized=frozenset(chosen), format=precision)
