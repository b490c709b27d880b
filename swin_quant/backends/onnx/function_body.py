"""The nodes of an ONNX function that stands for a plugin's node, written one after another."""

from collections.abc import Callable, Sequence
from math import pi
from typing import Any

import onnx

from swin_quant.operators.plugins import Node

_HAS_GELU = 20  # the first opset that does


class FunctionBody:
    """The nodes of the function that `calls` share, in order."""

    def __init__(self, opset: int, calls: Sequence[Node]) -> None:
        self.opset, self.calls, self.attributes = opset, calls, calls[0].attributes
        self.nodes: list[onnx.NodeProto] = []

    def __call__(
        self, op: str, *inputs: str, refer: dict[str, tuple[str, str]] | None = None, **attributes: Any
    ) -> str:
        """Add a node; returns its output's name. `refer`: attribute -> the function's attribute, and its type."""
        out = f"v{len(self.nodes)}"
        node = onnx.helper.make_node(op, inputs, [out], **attributes)
        for name, (own, kind) in (refer or {}).items():
            attribute = node.attribute.add()
            attribute.name, attribute.ref_attr_name = name, own
            attribute.type = getattr(onnx.AttributeProto, kind)
        self.nodes.append(node)
        return out

    def whole(self, *values: int) -> str:
        """These whole numbers, as a list."""
        return self("Constant", value_ints=list(values))

    def number(self, value: float) -> str:
        """A scalar, float32 or int64."""
        return self("Constant", value_int=value) if isinstance(value, int) else self("Constant", value_float=value)

    def given(self, attribute: str, kind: str) -> str:
        """An attribute of the function: INT, INTS or FLOATS."""
        return self("Constant", refer={f"value_{kind.lower()}": (attribute, kind)})

    def at(self, values: str, place: int) -> str:
        """One of several values, as a list."""
        return self("Slice", values, self.whole(place), self.whole(place + 1))

    def size(self, x: str, dimension: int) -> str:
        return self.at(self("Shape", x), dimension)

    def norm(self, x: str, gain: str, offset: str) -> str:
        return self("LayerNormalization", x, gain, offset, refer={"epsilon": ("epsilon", "FLOAT")})

    def normed(self, x: str, norm: Sequence[str], inner: Callable[[str], str]) -> str:
        """`inner` of x with its norm (gain and offset) before it, or behind it with `norm_last`."""
        if self.attributes["norm_last"]:
            return self.norm(inner(x), *norm)
        return inner(self.norm(x, *norm))

    def linear(self, y: str, scale: str, zero: str, weight: str, scales: str, bias: str) -> str:
        y = self("DequantizeLinear", self("QuantizeLinear", y, scale, zero), scale, zero)
        product = self("MatMul", y, self("DequantizeLinear", weight, scales, axis=1))
        return self("Add", product, self("Unsqueeze", bias, self.whole(0)))  # as `keep_integer` has it

    def activation(self, x: str, name: str) -> str:
        """The activation of `swin/int8_operators` of this name."""
        if name == "relu":
            return self("Relu", x)
        if name in ("silu", "quick_gelu"):
            inner = x if name == "silu" else self("Mul", x, self.number(1.702))
            return self("Mul", x, self("Sigmoid", inner))
        if self.opset >= _HAS_GELU:
            return self("Gelu", x, approximate="tanh") if name == "gelu_tanh" else self("Gelu", x)
        if name == "gelu_tanh":
            cube = self("Mul", self("Mul", x, x), self("Mul", x, self.number(0.044715)))
            curve = self("Tanh", self("Mul", self("Add", x, cube), self.number((2 / pi) ** 0.5)))
        else:
            curve = self("Erf", self("Div", x, self.number(2**0.5)))
        return self("Mul", self("Mul", x, self("Add", curve, self.number(1.0))), self.number(0.5))
