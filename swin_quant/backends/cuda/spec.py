"""What the engine is to compute, without a single weight: geometry, arithmetic, and which products are int8.

Names of products are those of their layers, and `q k` and `a v` in an attention.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from swin_quant.engines.engine import HALF_TYPES
from swin_quant.models.geometry import Geometry

ARITHMETICS = ("cuda", "ft-mode1", "ft-mode2")
LEAST_HEAD_DIM = 32  # of an int8 product; narrower heads are filled up with zeros
REDUCTION = "downsample.reduction"


@dataclass(frozen=True)
class NetworkSpec:
    """A Swin of `version` 1 or 2.

    `arithmetic`: `cuda` computes all that is no product in float, products of what is in `int8` with int8 operands;
    `ft-mode1` and `ft-mode2` are FasterTransformer's. The rest is in `float_type`, float16 or bfloat16.
    """

    geometry: Geometry
    version: int
    arithmetic: str = "cuda"
    int8: frozenset[str] = frozenset()
    float_type: str = "float16"

    @property
    def half(self) -> torch.dtype:
        return HALF_TYPES[self.float_type]

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
        """Every product that may be int8."""
        for name in self.linears():
            yield name
            if name.endswith("attn.qkv"):
                yield from (f"{name.removesuffix('qkv')}{product}" for product in ("q k", "a v"))

    def kind(self, product: str) -> str:
        """The type of a product's operands."""
        return "int8" if product in self.int8 else self.float_type


def spec_of(geometry: Geometry, version: int, precision: str = "int8", float_type: str = "float16") -> NetworkSpec:
    """The spec of a network whose products are int8 as policy `cuda` has them, or all in half precision.

    `precision`: int8 or float.
    """
    spec = NetworkSpec(geometry, version, float_type=float_type)
    chosen = (name for name in spec.products() if precision == "int8" and not name.endswith("a v"))
    return NetworkSpec(geometry, version, int8=frozenset(chosen), float_type=float_type)
