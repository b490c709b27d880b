"""Counts the products of an ONNX graph: which can run in int8 or float8, and what stays float. Nothing runs."""

import itertools
import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from swin_quant.backends.onnx_reader.checks import STANDARD, first_line, label, shown, without_data
from swin_quant.backends.onnx_reader.worker import InferenceError, ask
from swin_quant.base.errors import SwinQuantError

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

FLOAT8 = "float8"
QUANTIZED = ("int8", FLOAT8)  # types of a product's inputs; INT4 weights are multiplied as int8
_PRODUCTS = frozenset({"MatMul", "Gemm", "Conv", "Einsum"})
_INTEGER_PRODUCTS = frozenset({"QLinearMatMul", "MatMulInteger", "QLinearConv", "ConvInteger", "QGemm"})
_PAIRS = ("QuantizeLinear", "DequantizeLinear")
# Operators that move values and compute nothing: an integer tensor stays one through them. Casts change its float type.
_MOVES = frozenset({"Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Slice", "Split", "Gather"})
_THROUGH = _MOVES | {"Cast"}
_QUIET = _PRODUCTS | _INTEGER_PRODUCTS | _THROUGH | {*_PAIRS, "Constant", "Shape", "Concat", "Expand"}
_SYMMETRIC = ("int8", "float8e4m3fn", "unknown")
_WIDE = ("uint16", "int16")  # pairs of these make no int8 product
_REACH = 64  # the most nodes followed in a row
_SCOPE = re.compile(r"'([^', ]+)'")
_SCOPES = "pkg.torch.onnx.name_scopes"
_TYPES = {"FLOAT": "float32", "DOUBLE": "float64"}  # all other types keep ONNX's name, in lower case
_TAIL = re.compile(r"\.(weight|bias)(_\w+)?$|\.?_(input|weight|aftergemm)_quantizer.*$")


@dataclass(frozen=True)
class Gemm:
    """A product of two tensors. `kind`: linear (one side constant), matmul (both vary) or conv.

    `format`: int8 or float8 if both inputs are dequantized from it, int8 for an integer operator, else None. `inputs`:
    each input's int8, int4, float8 or float type.
    """

    node: "NodeProto"
    name: str
    kind: str
    format: str | None
    inputs: tuple[str, str]

    @property
    def int8(self) -> bool:
        return self.format == "int8"


@dataclass(frozen=True)
class Inspection:
    """The products of a graph. `body`: the type of most results; `pairs`: Q and DQ nodes; `asymmetric`: those that are
    not int8 or float8 E4M3 with zero point 0; `float_ops`: how often each other operator computes."""

    opset: int
    body: str
    gemms: list[Gemm]
    float_ops: dict[str, int]
    pairs: tuple[int, int]
    asymmetric: list[str]

    def to_dict(self) -> dict[str, Any]:
        """The report in JSON's types."""
        return {
            "opset": self.opset,
            "body": self.body,
            "quantize_linear": self.pairs[0],
            "dequantize_linear": self.pairs[1],
            "int8_gemms": sum(gemm.int8 for gemm in self.gemms),
            "float8_gemms": sum(gemm.format == FLOAT8 for gemm in self.gemms),
            "gemms": [
                {"node": gemm.node.name, "op": gemm.node.op_type, "inputs": list(gemm.inputs)}
                | {"name": gemm.name, "kind": gemm.kind, "int8": gemm.int8}
                for gemm in self.gemms
            ],
            "asymmetric": self.asymmetric,
            "float_ops": self.float_ops,
        }


def inspect_model(model: "ModelProto") -> Inspection:
    """Analyse the main graph of a model. SwinQuantError if it is empty or out of order."""
    graph = _Graph(model)
    gemms = graph.gemms()
    bodies = Counter(graph.types.get(gemm.node.output[0], "unknown") for gemm in gemms)
    counts = Counter(node.op_type for node in graph.nodes if not graph.constant.issuperset(node.output))
    every = Counter(node.op_type for node in graph.nodes)
    return Inspection(
        opset=next((entry.version for entry in model.opset_import if entry.domain in STANDARD), 0),
        body=bodies.most_common(1)[0][0] if bodies else "unknown",
        gemms=gemms,
        float_ops={shown(op): count for op, count in counts.most_common() if op not in _QUIET},
        pairs=(every[_PAIRS[0]], every[_PAIRS[1]]),
        asymmetric=[label(node) for node in graph.nodes if node.op_type in _PAIRS and not graph.is_symmetric(node)],
    )


class _Graph:
    """The main graph of a model with functions inlined: maker and type of each tensor, and the constants."""

    def __init__(self, model: "ModelProto") -> None:
        if not model.graph.node or not model.graph.output:
            raise SwinQuantError("the ONNX graph is empty: it has no node or no output")
        graph = _inferred(model).graph
        self.nodes = list(graph.node)
        self.values: dict[str, Any] = {tensor.name: tensor for tensor in graph.initializer}
        self.makers: dict[str, NodeProto] = {}
        self.constant = set(self.values)
        known = {*self.values, *(value.name for value in graph.input), ""}
        for node in self.nodes:  # in an order in which no walk can go in circles
            if unknown := [name for name in node.input if name not in known]:
                raise SwinQuantError(f"node {label(node)} uses {shown(unknown[0])!r} before anything makes it")
            if twice := [name for name in node.output if name and name in known]:
                raise SwinQuantError(f"node {label(node)} makes {shown(twice[0])!r} a second time")
            known.update(node.output)
            self.makers.update(dict.fromkeys(node.output, node))
            is_opaque = any(one.HasField("g") for one in node.attribute)
            if node.op_type == "Constant" or (any(node.input) and not self.varying(node) and not is_opaque):
                self.constant.update(node.output)
                tensors = [one.t for one in node.attribute if node.op_type == "Constant" and one.name == "value"]
                self.values.update({name: tensor for tensor in tensors for name in node.output})
        values = (*graph.input, *graph.value_info, *graph.output)
        self.types = {value.name: _type_name(value.type.tensor_type.elem_type) for value in values}
        self.types |= {name: _type_name(tensor.data_type) for name, tensor in self.values.items()}

    def varying(self, node: "NodeProto") -> list[str]:
        """The inputs that depend on the picture."""
        return [name for name in node.input if name and name not in self.constant]

    def gemms(self) -> list[Gemm]:
        """Products in graph order, except products of constants alone, which any engine folds."""
        return [
            self._gemm(node)
            for node in self.nodes
            if node.op_type in _PRODUCTS | _INTEGER_PRODUCTS and self.varying(node) and node.output
            if node.op_type in _INTEGER_PRODUCTS or len(node.input) >= 2
        ]

    def is_symmetric(self, node: "NodeProto") -> bool:
        """Whether a Q/DQ node is int8 or float8 E4M3 with zero point 0; zero points in other files are not read."""
        stored = node.output[:1] if node.op_type == "QuantizeLinear" else node.input[:1]
        zeros = [self.values[name] for name in node.input[2:3] if name in self.values]
        return all(self.types.get(name, "unknown") in _SYMMETRIC for name in stored) and not any(
            zero.raw_data.strip(b"\0") or any(zero.int32_data) for zero in zeros
        )

    def _gemm(self, node: "NodeProto") -> Gemm:
        name = self._module(node)
        if node.op_type in _INTEGER_PRODUCTS:
            return Gemm(node, name, "conv" if "Conv" in node.op_type else "linear", "int8", ("int8", "int8"))
        sides = node.input[:2]
        pairs = [self._dequantize(side) for side in sides]
        one, other = (self._kind(side, pair) for side, pair in zip(sides, pairs, strict=True))
        formats = {
            FLOAT8 if kind == FLOAT8 else "int8" if pair and kind not in _WIDE else None
            for kind, pair in zip((one, other), pairs, strict=True)
        }
        is_linear = any(side in self.constant for side in sides)
        kind = "conv" if node.op_type == "Conv" else "linear" if is_linear else "matmul"
        return Gemm(node, name, kind, formats.pop() if len(formats) == 1 else None, (one, other))

    def _dequantize(self, tensor: str) -> "NodeProto | None":
        """The DequantizeLinear before `tensor`, if any, looking through moves and Casts."""
        node = self.makers.get(tensor)
        for _ in range(_REACH):
            if node is None or node.op_type not in _THROUGH or not node.input:
                break
            node = self.makers.get(node.input[0])
        return node if node is not None and node.op_type == "DequantizeLinear" and len(node.input) > 1 else None

    def _kind(self, tensor: str, pair: "NodeProto | None") -> str:
        if pair is None:
            return self.types.get(tensor, "unknown")
        stored = self.types.get(pair.input[0], "unknown")
        if stored in _WIDE:
            return stored
        return "int4" if stored in ("int4", "uint4") else FLOAT8 if stored.startswith("float8") else "int8"

    def _module(self, node: "NodeProto") -> str:
        """The module's name from the node's weight (`layers.0.blocks.1.attn.qkv`), else from the scopes that torch's
        exporter recorded, else the node's own name."""
        for name in self._weights(node):
            if "." in name and (stem := _TAIL.sub("", name)) != name:
                return stem
        scopes = [entry.value for entry in node.metadata_props if entry.key == _SCOPES]
        parts = _SCOPE.findall(scopes[0]) if scopes else []
        return ".".join(parts[-2:]) or label(node)

    def _weights(self, node: "NodeProto") -> list[str]:
        """The names of the constants that a node reads, and of what they are made of."""
        names, pending = list[str](), [name for name in node.input if name in self.constant]
        for name in itertools.islice(pending, _REACH):  # it grows
            maker = self.makers.get(name)
            names.append(name if maker is None else maker.name)
            pending += filter(None, maker.input if maker is not None else ())
        return names


def _inferred(model: "ModelProto") -> "ModelProto":
    """A copy without the data of large tensors, with functions inlined and shapes inferred as far as possible."""
    copy = type(model)()
    copy.CopyFrom(model)
    try:
        return type(model).FromString(ask(without_data(copy).SerializeToString(), "lenient"))
    except InferenceError as error:
        if model.functions:
            raise SwinQuantError(f"its functions cannot be inlined: {first_line(error)}") from error
        return copy  # inference fails on some foreign graphs: then only the shapes are unknown


def _type_name(number: int) -> str:
    from onnx import TensorProto

    name = TensorProto.DataType.Name(number) if number in TensorProto.DataType.values() else "unknown"
    return _TYPES.get(name, name.lower())
