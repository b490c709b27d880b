"""An index over an ONNX graph: maker and users of each tensor, constants, and each node's module."""

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from swin_quant.backends.onnx_reader.checks import first_line, without_data
from swin_quant.backends.onnx_reader.worker import InferenceError, infer
from swin_quant.base.errors import SwinQuantError

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto, TensorProto

# Ops that move values and compute nothing: an integer tensor stays one through them.
MOVES = frozenset({"Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Slice", "Split", "Gather"})
_REACH = 64  # the most nodes followed in a row: no exporter moves one value so often
# Our exporter names a module layers.0.blocks.1, timm's by TorchScript /layers/layers.0/blocks/blocks.1.
_BLOCK = re.compile(r"layers[._](\d+)\b.*?blocks[._](\d+)(?![\d])")
_STAGE = re.compile(r"layers[._](\d+)(?!\d).*?downsample")
_SCOPE = re.compile(r"'([^', ]+)'")
_SCOPES = "pkg.torch.onnx.name_scopes"
_TYPES = {"FLOAT": "float32", "DOUBLE": "float64"}  # all other types keep ONNX's name, in lower case
_TAIL = re.compile(r"\.(weight|bias)(_\w+)?$|\.?_(input|weight|aftergemm)_quantizer.*$")


@dataclass(frozen=True)
class Graph:
    """One graph without its sub-graphs. `shapes` has None for an open dimension; `types` are torch's names."""

    nodes: list["NodeProto"]
    producer: dict[str, "NodeProto"]
    consumers: dict[str, list["NodeProto"]]
    values: dict[str, "TensorProto"]
    constant: frozenset[str]
    shapes: dict[str, tuple[int | None, ...]]
    types: dict[str, str]
    outputs: frozenset[str]
    opsets: dict[str, int] = field(default_factory=dict)
    _known: dict[str, bool] = field(default_factory=dict, repr=False)

    def label(self, node: "NodeProto") -> str:
        """The node's name, else its op and output."""
        return (node.name or f"{node.op_type} -> {node.output[0]}")[:160]

    def variable_inputs(self, node: "NodeProto") -> list[str]:
        """Inputs that depend on the picture."""
        return [name for name in node.input if name and name not in self.constant]

    def after(self, tensor: str, passing: frozenset[str] = MOVES) -> Iterator["NodeProto"]:
        """Nodes that use `tensor`; in place of a user whose op is in `passing`, the nodes behind it."""
        pending, seen = [tensor], {tensor}
        for name in pending:  # it grows
            for node in self.consumers.get(name, ()):
                if node.op_type in passing and name == node.input[0]:
                    pending += [output for output in node.output if output not in seen]
                    seen.update(node.output)
                else:
                    yield node

    def before(self, tensor: str, passing: frozenset[str] = MOVES) -> "NodeProto | None":
        """The node that makes `tensor`, looking through ops of `passing`; None for an input or an initializer."""
        node = self.producer.get(tensor)
        for _ in range(_REACH):
            if node is None or node.op_type not in passing or not node.input:
                break
            node = self.producer.get(node.input[0])
        return node

    def not_zero(self, names: Iterable[str]) -> bool:
        """Whether any of these constants holds another value than 0; external data is not read."""
        return any(map(self._not_zero, names))

    def _not_zero(self, name: str) -> bool:
        if name not in self._known:  # many nodes may share a large one
            held = self.values.get(name)
            self._known[name] = held is not None and bool(
                held.raw_data.strip(b"\0") or any(held.int32_data) or any(held.int64_data)
            )
        return self._known[name]

    def one_value(self, tensor: str) -> bool:
        """Whether a tensor holds a single value; True if its shape is unknown."""
        return all(size == 1 for size in self.shapes.get(tensor, ()))

    def block(self, node: "NodeProto") -> str | None:
        """`layers.0.blocks.1` or `layers.0.downsample`, from the names around the node; None if none names a block."""
        for text in self._names_around(node):
            if found := _BLOCK.search(text):
                return f"layers.{found[1]}.blocks.{found[2]}"
            if found := _STAGE.search(text):
                return f"layers.{found[1]}.downsample"
        return None

    def module(self, node: "NodeProto") -> str:
        """The module's name from the node's weight (`layers.0.blocks.1.attn.qkv`), else from the scopes that torch's
        exporter recorded, else the node's own name.
        """
        for name in self._initializers_of(node):
            if "." in name and (stem := _TAIL.sub("", name)) != name:
                return stem
        scopes = [entry.value for entry in node.metadata_props if entry.key == _SCOPES]
        parts = _SCOPE.findall(scopes[0]) if scopes and not _BLOCK.search(node.name) else []
        return ".".join(parts[-2:]) or self.label(node)

    def _names_around(self, node: "NodeProto") -> Iterator[str]:
        yield node.name
        yield from self._initializers_of(node)
        yield from (entry.value for entry in node.metadata_props)
        yield from node.output
        for name in self.variable_inputs(node):  # quantizers in front of an attention's matmuls are named after it
            if (before := self.producer.get(name)) is not None:
                yield before.name
                yield from before.input

    def _initializers_of(self, node: "NodeProto") -> Iterator[str]:
        pending = list(dict.fromkeys(name for name in node.input if name in self.constant))
        seen = set(pending)
        for name in itertools.islice(pending, _REACH):  # it grows
            if (before := self.producer.get(name)) is not None:
                yield before.name
                pending += [source for source in before.input if source and source not in seen]
                seen.update(before.input)
            else:
                yield name


def index(model: "ModelProto") -> Graph:
    """Index the main graph of `model`, local functions inlined. SwinQuantError if it is empty or out of order."""
    if not model.graph.node or not model.graph.output:
        raise SwinQuantError("the ONNX graph is empty: it has no node or no output")
    values = {tensor.name: tensor for tensor in model.graph.initializer}
    model = _inferred(model)
    graph, nodes = model.graph, list(model.graph.node)
    _check(nodes, {*values, *(info.name for info in graph.input)}, model)
    producer: dict[str, Any] = {}
    consumers: dict[str, list[Any]] = {}
    constant = set(values)
    for node in nodes:
        producer.update({name: node for name in node.output if name})
        for name in dict.fromkeys(node.input):
            consumers.setdefault(name, []).append(node)
        inputs = [name for name in node.input if name]
        if node.op_type == "Constant":
            values.update((node.output[0], a.t) for a in node.attribute if a.name == "value" and a.HasField("t"))
            constant.update(node.output)
        elif inputs and all(name in constant for name in inputs) and not any(a.HasField("g") for a in node.attribute):
            constant.update(node.output)
    shapes, types = _declared(graph, values)
    opsets = {entry.domain: entry.version for entry in model.opset_import}
    outputs = frozenset(info.name for info in graph.output)
    return Graph(nodes, producer, consumers, values, frozenset(constant), shapes, types, outputs, opsets)


def _inferred(model: "ModelProto") -> "ModelProto":
    """A copy without the data of large tensors, with functions inlined and shapes inferred as far as possible."""
    copy = type(model)()
    copy.CopyFrom(model)
    try:
        return type(model).FromString(infer(without_data(copy).SerializeToString(), strict=False, inline=True))
    except InferenceError as error:
        if model.functions:
            raise SwinQuantError(f"its functions cannot be written out: {first_line(error)}") from error
        return copy  # inference fails on some foreign graphs: then only the shapes are unknown


def _check(nodes: Iterable["NodeProto"], known: set[str], model: "ModelProto") -> None:
    """SwinQuantError unless every tensor is made once, before it is used: no walk can then go in circles."""
    for node in nodes:
        name = (node.name or node.op_type)[:80]
        if unknown := [tensor for tensor in node.input if tensor and tensor not in known]:
            raise SwinQuantError(f"node {name} uses {unknown[0]!r:.80} before anything makes it")
        if twice := [tensor for tensor in node.output if tensor and tensor in known]:
            raise SwinQuantError(f"node {name} makes {twice[0]!r:.80} a second time")
        if not node.output or not node.output[0] or sum(map(bool, node.input)) < _least_inputs(node, model):
            raise SwinQuantError(f"node {name} lacks inputs or outputs of a {node.op_type:.40}")
        known.update(node.output)


def _least_inputs(node: "NodeProto", model: "ModelProto") -> int:
    """How many inputs an ONNX operator needs, in the model's opset or, if that lacks it, in the newest."""
    from onnx import defs

    version = next((entry.version for entry in model.opset_import if entry.domain == node.domain), 1)
    for opset in ({"max_inclusive_version": version}, {}):
        if defs.has(node.op_type, domain=node.domain, **opset):
            return defs.get_schema(node.op_type, domain=node.domain, **opset).min_input
    return 0


def _declared(
    graph: Any, values: Mapping[str, "TensorProto"]
) -> tuple[dict[str, tuple[int | None, ...]], dict[str, str]]:
    """Shapes and types of tensors, as far as the graph and shape inference give them."""
    shapes, types = {}, {}
    for info in (*graph.input, *graph.value_info, *graph.output):
        tensor = info.type.tensor_type
        types[info.name] = _type(tensor.elem_type)
        if tensor.HasField("shape"):
            shapes[info.name] = tuple(d.dim_value if d.HasField("dim_value") else None for d in tensor.shape.dim)
    for name, value in values.items():
        types[name], shapes[name] = _type(value.data_type), tuple(value.dims)
    return shapes, types


def _type(number: int) -> str:
    from onnx import TensorProto

    name = TensorProto.DataType.Name(number) if number in TensorProto.DataType.values() else "unknown"
    return _TYPES.get(name, name.lower())
