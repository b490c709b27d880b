"""A network as the engine runs it: its spec with every tensor and scalar that the launches name.

For FasterTransformer's arithmetic, biases and norms are rounded to float16, and so are weights before they are
quantized; sums of products are rounded to int8.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from swin_quant.backends.cuda.kernels.gemm import gelu_table
from swin_quant.backends.cuda.packing import Packing
from swin_quant.backends.cuda.spec import REDUCTION, NetworkSpec
from swin_quant.base.errors import SwinQuantError, listed
from swin_quant.data.preprocess import Preprocess
from swin_quant.models.layers import Swin
from swin_quant.models.swin_v2 import LARGEST_LOGIT_SCALE
from swin_quant.quant.layer import QuantLinear


@dataclass(frozen=True)
class Network:
    """`tensors`, on the CPU, and `scalars`, by the names that the launches of `spec` use.

    `preprocess`: how a network that takes pixels normalises them.
    """

    spec: NetworkSpec
    tensors: dict[str, Tensor] = field(repr=False)
    scalars: dict[str, float] = field(repr=False)
    preprocess: Preprocess | None = None


@torch.no_grad()
def pack(model: Swin, spec: NetworkSpec, preprocess: Preprocess | None = None) -> Network:
    """The network of a calibrated model. `preprocess`, for a spec that takes pixels, is folded into the weights.

    SwinQuantError for a node without a range, and for values that overflow half precision.
    """
    packing = FtPacking(model, spec) if spec.is_ft else Packing(model, spec, preprocess)
    packing.whole()
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in packing.tensors.items()}
    if beyond := [name for name, tensor in tensors.items() if not is_finite(tensor)]:
        raise SwinQuantError(f"{listed(beyond, 2)}: NaN, or beyond {spec.float_type}: the CUDA engine cannot run this")
    return Network(spec, tensors, packing.scalars, preprocess)


def is_finite(tensor: Tensor) -> bool:
    """Whether a tensor of any type holds neither NaN nor Inf; torch's isfinite does not take float8."""
    return bool(tensor.float().isfinite().all() if tensor.is_floating_point() else True)


class FtScales:
    """Scales as FasterTransformer computes them. `ranges`: |amax| of each node of a block or of its stage's
    `downsample`."""

    def __init__(self, ranges: Mapping[str, float]) -> None:
        self._ranges = ranges

    def amax(self, node: str) -> float:
        return _stored(self._ranges[node])

    def step(self, node: str) -> float:
        """The factor from an int8 value to the real value."""
        return _stored(self._ranges[node] / 127)

    def levels(self, node: str) -> float:
        """The factor from a real value to int8."""
        return _stored(127 / self._ranges[node])

    def weight(self, layer: str) -> float:
        return self.amax(f"{layer}._weight_quantizer")

    def gemm(self, layer: str) -> float:
        """The factor from an int32 sum to int8."""
        given, weight, result = (
            self._ranges[f"{layer}.{node}_quantizer"] for node in ("_input", "_weight", "_aftergemm")
        )
        return _stored(given * weight / (127 * result))

    def logits(self, q: str, k: str) -> float:
        """The factor from an int32 sum of q and k to a real logit: float32 product, divided in double."""
        return _stored(float(np.float32(self.amax(q)) * np.float32(self.amax(k))) / (127 * 127))

    def softmax(self, node: str) -> float:
        """The factor from a probability to int8."""
        return _stored(127 / self.amax(node))

    def context(self, attention: str, v: str, result: str) -> float:
        """The factor from an int32 sum of probabilities and values to int8."""
        product = float(np.float32(self.amax(attention)) * np.float32(self.amax(v)))
        return _stored(product / (127 * self.amax(result)))


def _stored(value: float) -> float:
    return float(np.float32(value))


def as_half(value: float) -> float:
    """A scale as a float16 kernel sees it."""
    return float(np.float16(value))


class FtPacking(Packing):
    """Arithmetic `ft-mode1` or `ft-mode2`, with one range a node."""

    def __init__(self, model: Swin, spec: NetworkSpec) -> None:
        super().__init__(model, spec)
        self.scales = FtScales({name: self.amax(name) for name, node in self.nodes.items() if node.setting.enabled})
        self.is_wide = spec.arithmetic == "ft-mode2"

    def linear(self, name: str, layer: QuantLinear, stage: int = 0) -> None:
        super().linear(name, layer, stage)
        wide = self.is_wide and name.endswith((".fc2", REDUCTION))
        self.scalars[f"{name}.product_levels"] = self._wide_levels(name) if wide else self.scales.gemm(name)

    def quantized(self, name: str, layer: QuantLinear) -> tuple[Tensor, Tensor]:
        amax = self.amax(f"{name}._weight_quantizer")
        whole = (layer.weight.half().double() * 127 / amax).float().round().clamp(-128, 127)
        return whole, torch.full((len(whole),), self._step_of_sums(name))

    def levels(self, node: str) -> float:
        return self.scales.levels(node)

    def step(self, node: str) -> float:
        return self.scales.step(node)

    def attention_scales(self, at: str, attn: Any, stage: int) -> tuple[float, float]:
        v2 = self.spec.version == 2
        q, k, v, a, result = (
            f"{at}{x}_input_quantizer" for x in ("matmul_q", "matmul_k", "matmul_v", "matmul_a", "proj.")
        )
        if v2:
            columns = [torch.full((self.spec.channels(stage),), x) for x in (*map(self.levels, (q, k, v)),)]
            steps = [torch.full((self.spec.channels(stage),), x) for x in (*map(self.step, (q, k, v)),)]
            both = (self.padded(torch.cat(x), stage) for x in (columns, steps))
            self._float(f"{at}qkv.before", torch.stack(tuple(both)))
            q, k = (f"{at}mha_{x}_input_quantizer" for x in "qk")
        self.levels_of_qkv(at, [self.levels(node) for node in (q, k, v)], stage)
        self.scalars[f"{at}softmax_levels"] = self.scales.softmax(a)
        logits = self.scales.logits(q, k) * self.own_scale(attn)
        return logits, self.scales.context(a, v, result)

    def lengths_of_q(self, attn: Any) -> Tensor:
        return attn.logit_scale.half().clamp(max=LARGEST_LOGIT_SCALE).float().exp().half().flatten()

    def mlp(self, at: str, mlp: Any) -> None:
        super().mlp(at, mlp)
        step, levels = (self.scales.step(f"{at}fc1._aftergemm_quantizer"), self.levels(f"{at}fc2._input_quantizer"))
        self.tensors[f"{at}fc1.gelu"] = gelu_table(step, mlp.fc1.bias.half(), levels)
        del self.tensors[f"{at}fc1.scale"], self.tensors[f"{at}fc1.bias"], self.scalars[f"{at}fc2.input_levels"]

    def _float(self, name: str, tensor: Tensor) -> None:
        """Round norms and biases to float16; the head, outside FasterTransformer's op, stays float32."""
        halved = name.endswith(("bias", "norm1.weight", "norm2.weight", "norm.weight")) and not name.startswith("head.")
        super()._float(name, tensor.half() if halved else tensor)

    def _step_of_sums(self, name: str) -> float:
        """The factor from a product's rounded sums to real values, in the precision of the kernel that reads them."""
        if self.is_wide and name.endswith((".fc2", REDUCTION)):
            return 1.0 if name.endswith(REDUCTION) else self.scales.weight(name) / 127
        step = self.scales.step(f"{name}._aftergemm_quantizer")
        in_half = name.endswith(("attn.proj", "mlp.fc2")) and self.spec.version == 2
        return as_half(step) if in_half else step

    def _wide_levels(self, name: str) -> float:
        """Mode 2: the factor for int32 sums of fc2 and the reduction, which are not rounded to int8."""
        if name.endswith(REDUCTION):
            return 1 / self.levels(f"{name}._input_quantizer") * (self.scales.weight(name) / 127)
        return self.scales.amax(f"{name}._input_quantizer") / 127
