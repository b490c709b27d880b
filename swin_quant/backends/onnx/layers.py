"""Linears and nodes of an exported model: they compute the trained ones' values in the fewest operators of a graph.

Each is made from a trained layer and takes its place and name. `dtype` is the float type that a layer computes in; a
layer casts its input, because layers of different types may follow each other.
"""

from collections.abc import Collection

import torch
from torch import Tensor, nn

from swin_quant.backends.onnx.operators import UINT16, dequantize, qdq
from swin_quant.base.errors import listed
from swin_quant.base.progress import log
from swin_quant.quant.calibration import LARGEST_HALF
from swin_quant.quant.fake_quant import FP8, round_to_grid_
from swin_quant.quant.layer import NODES, QuantizedLayer, Reading
from swin_quant.quant.quantizer import Quantizer
from swin_quant.quant.watch import watching

SMALLEST_SCALE = 2.0**-18  # smaller scales are subnormal in float16, and off by 1 % and more
# An integer product without a bias gets this one: OpenVINO 2023.2, 2024.5 and 2024.6 lose its scales otherwise
# (docs/results/releases.md).
TINY_BIAS = 1e-30


class Pair(nn.Module):
    """A node as one QuantizeLinear / DequantizeLinear pair: int8, uint8 with a zero point, uint16, or float8.

    It computes in the type of its scale and returns its input's type. `centred`: for engines without zero points; the
    middle of the range, `offset`, is subtracted before an int8 pair, and the reader has to add it again.
    """

    def __init__(self, node: Quantizer, centred: bool = False) -> None:
        super().__init__()
        qmin, qmax = node.grid
        self.scale: Tensor = nn.Buffer(node.range_for().detach() / qmax)
        is_wide = node.setting.bits > 8
        self.zero_point = None if (node.setting.symmetric and not is_wide) or centred else -qmin
        self.offset = (qmin + 128) * self.scale.item() if centred and not node.setting.symmetric else 0.0
        self.format = UINT16 if is_wide else node.setting.format

    def forward(self, x: Tensor) -> Tensor:
        own = x.to(self.scale.dtype)
        return qdq(own - self.offset if self.offset else own, self.scale, self.zero_point, self.format).to(x.dtype)


class StoredWeight(nn.Module):
    """A weight [out, ...] as the file stores it, with outputs in dimension `dim`: int8 or float8 and a scale, or float.

    The scale is 0-dim or [out]; for blocks of values [in, out] it is [in / block, out]; None for float.
    """

    def __init__(self, weight: Tensor, node: Quantizer | None = None, dim: int = 1) -> None:
        super().__init__()
        values, block = weight, 0
        scale: Tensor | None = None
        if node is not None and node.setting.enabled:
            (qmin, qmax), block = node.setting.levels, node.setting.block or 0
            scale = node.range_for(weight).detach() / qmax  # 0-dim or [out, 1, ...], for blocks [out, in]
            values = round_to_grid_(weight / scale, qmin, qmax)
            values = values.to(torch.float8_e4m3fn if node.setting.format == FP8 else torch.int8)
            scale = scale[:, ::block].T.contiguous() if block else scale.flatten() if scale.dim() else scale
        self.values: Tensor = nn.Buffer(values.movedim(0, dim).contiguous())
        self.scale: Tensor | None = None if scale is None else nn.Buffer(scale)
        self.dim = 0 if block else dim

    def forward(self) -> Tensor:
        return self.values if self.scale is None else dequantize(self.values, self.scale, self.dim)

    def scale_outputs(self, factors: Tensor) -> None:
        """Multiply column j by `factors[j]`, float [out]; no stored value is rounded again."""
        if self.scale is None:
            self.values = self.values * factors
        else:
            self.scale = self.scale * factors

    def raise_scales(self) -> None:
        """Double float8 scales that are subnormal in float16 until they are normal, and halve their values as often.

        A float8 has its own exponent, so that only values that become subnormal are rounded. Their error is at most
        2^-23: half a step of 2^-9, times a scale below 2^-13.
        """
        if self.scale is not None and self.values.dtype == torch.float8_e4m3fn:
            doublings = (torch.finfo(torch.float16).tiny / self.scale).log2().ceil()
            factors = torch.where(self.scale < SMALLEST_SCALE, doublings, 0).exp2()
            self.values, self.scale = (self.values.float() / factors).to(self.values.dtype), self.scale * factors


class Product(nn.Module):
    """A quantized layer of any kind: the layer's own product, with the weight [out, ...] stored quantized."""

    def __init__(self, layer: QuantizedLayer) -> None:
        super().__init__()
        weight, node, bias = layer.weight.detach(), layer._weight_quantizer, layer.effective_bias()
        self._input_quantizer = lowered(layer._input_quantizer)
        self._aftergemm_quantizer = lowered(layer._aftergemm_quantizer)
        self._weight_quantizer = StoredWeight(weight, node, layer.stored_dim) if node.setting.enabled else None
        self.weight: Tensor
        self.bias: Tensor | None
        if not node.setting.enabled:
            self.register_buffer("weight", weight.movedim(0, layer.stored_dim).contiguous())
        # Engines fuse such a bias
        self.inside = layer.output_has_bias or not layer._aftergemm_quantizer.setting.enabled
        if bias is not None:
            bias = (bias.detach() if self.inside else layer.aligned(bias.detach())).clone()
        self.register_buffer("bias", bias)
        self.product = layer.stored_product

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight if self._weight_quantizer is None else self._weight_quantizer()
        x = self._input_quantizer(x)
        if self.inside:
            return self._aftergemm_quantizer(self.product(x, weight, self.bias))
        x = self._aftergemm_quantizer(self.product(x, weight))
        return x if self.bias is None else x + self.bias


class Linear(nn.Module):
    """y = aftergemm(input(x) W) + bias. x: [..., in]; W is stored [in, out], which needs no transposition.

    `centred`: an input with the zero point c is quantized as x - c, and c W is added to the bias.
    """

    def __init__(self, layer: nn.Linear, centred: bool = False) -> None:
        super().__init__()
        weight = layer.weight.detach()
        bias = layer.effective_bias() if isinstance(layer, QuantizedLayer) else layer.bias
        if isinstance(layer, QuantizedLayer):
            self._input_quantizer = lowered(layer._input_quantizer, centred)
            self._aftergemm_quantizer = lowered(layer._aftergemm_quantizer)
            self._weight_quantizer = StoredWeight(weight, layer._weight_quantizer)
        else:
            self._input_quantizer = self._aftergemm_quantizer = nn.Identity()
            self._weight_quantizer = StoredWeight(weight)
        self.bias: Tensor | None
        self.register_buffer("bias", None if bias is None else bias.detach())
        if offset := getattr(self._input_quantizer, "offset", 0.0):
            given_back = offset * self._weight_quantizer().double().sum(0)
            self.bias = (given_back if self.bias is None else self.bias + given_back).to(weight.dtype)
        has_int8 = isinstance(self._input_quantizer, Pair) and self._weight_quantizer.values.dtype == torch.int8
        if self.bias is None and has_int8 and isinstance(self._aftergemm_quantizer, nn.Identity):
            self.bias = torch.full((len(weight),), TINY_BIAS)
        self.dtype = torch.float32

    def scale_outputs(self, factors: Tensor) -> None:
        """Multiply output j by `factors[j]`, float [out]; the int8 levels of W stay."""
        self._weight_quantizer.scale_outputs(factors)
        self.bias = None if self.bias is None else self.bias * factors

    def forward(self, x: Tensor) -> Tensor:
        x = self._aftergemm_quantizer(self._input_quantizer(x.to(self.dtype)) @ self._weight_quantizer())
        return x if self.bias is None else x + self.bias


def lowered(node: Quantizer, centred: bool = False) -> nn.Module:
    """The module for a node: a pair if the policy enables it, else an identity."""
    return Pair(node, centred) if node.setting.enabled else nn.Identity()


def lower(model: nn.Module, centred: bool = False, read: Collection[str] = ()) -> None:
    """Replace every layer with a weight, and every node, of `model`, in place. The policy must be applied.

    `centred`: no pair has a zero point; offsets stand before pairs and in the biases behind them. `read`: keys of
    parameters that the forward pass reads without their module; a float linear of these stays as it is, as does one
    that holds borrowing layers.
    """
    for prefix, parent in reversed(list(model.named_modules())):  # a layer keeps other modules that stand in it
        for name, child in list(parent.named_children()):
            own = f"{prefix}.{name}.".lstrip(".")
            stays = any(key.startswith(own) for key in read) or any(child.children())
            made: nn.Module
            if isinstance(child, nn.Linear) and (isinstance(child, QuantizedLayer) or not stays):
                made = Linear(child, centred)
            elif isinstance(child, QuantizedLayer):
                made = Product(child)
            elif isinstance(child, Quantizer) and not (isinstance(parent, QuantizedLayer) and name in NODES):
                made = lowered(child)
            else:
                continue
            for below, inner in child.named_children():
                if not hasattr(made, below):
                    made.add_module(below, inner)
            parent.add_module(name, made)
            if isinstance(reading := getattr(child, "read_by_others", None), Reading):
                made.add_module("read_by_others", reading.copies())


def fits_half(scale: Tensor) -> bool:
    """Whether float16 holds all values of a scale, 0-dim or more, without being subnormal."""
    return bool(scale.min() >= SMALLEST_SCALE and scale.max() <= LARGEST_HALF)


def match_scales(model: nn.Module, images: Tensor) -> None:
    """Give the scale of every pair the type of the pair's input for `images`, if that type can hold it."""
    unfit = []
    pairs = {name: module for name, module in model.named_modules() if isinstance(module, Pair)}

    def match(name: str, pair: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        dtype = inputs[0].dtype
        if dtype == torch.float16 and not fits_half(pairs[name].scale):
            unfit.append(name)
        else:
            pair.scale = pairs[name].scale.to(dtype)

    with torch.no_grad(), watching(pairs, match):
        model(images)
    if unfit:
        log.warning(
            "%d nodes round in float32, because float16 cannot hold their scales: %s", len(unfit), listed(unfit, 3)
        )
