"""What a plugin's node computes, as a function of ONNX in the same file: where no plugin is, engines run that."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from swin_quant.base.errors import UsageError
from swin_quant.operators.plugins import Node, Plugin

if TYPE_CHECKING:
    from onnx import FunctionProto, ModelProto, NodeProto

_END = 2**62


class _Body:
    """Nodes of a function, one after the other."""

    def __init__(self) -> None:
        self.nodes: list[NodeProto] = []

    def __call__(
        self, op: str, *inputs: str, refer: dict[str, tuple[str, str]] | None = None, **attributes: Any
    ) -> str:
        """Add a node; its output's name. `refer`: attribute -> the function's own attribute, and its type."""
        import onnx

        out = f"v{len(self.nodes)}"
        node = onnx.helper.make_node(op, inputs, [out], **attributes)
        for name, (own, kind) in (refer or {}).items():
            attribute = node.attribute.add()
            attribute.name, attribute.ref_attr_name = name, own
            attribute.type = getattr(onnx.AttributeProto, kind)
        self.nodes.append(node)
        return out

    def whole(self, *values: int) -> str:
        return self("Constant", value_ints=list(values))


def _roll(body: _Body, inputs: Sequence[str], nodes: Sequence[Node]) -> tuple[str, list[str]]:
    dims = nodes[0].attributes["dims"]
    if other := next((node.attributes["dims"] for node in nodes if node.attributes["dims"] != dims), None):
        raise UsageError(
            f"‹plugin› roll: this model rolls dimensions {dims} and {other}, and a function of ONNX joins along fixed "
            "ones: use ‹replace› roll"
        )
    x = inputs[0]
    shifts = body("Constant", refer={"value_ints": ("shifts", "INTS")})
    shape = body("Shape", x)
    for place, dim in enumerate(dims):
        axis = body.whole(dim)
        shift = body("Slice", shifts, body.whole(place), body.whole(place + 1))
        length = body("Slice", shape, axis, body.whole(dim + 1))
        cut = body("Mod", body("Neg", shift), length)
        head = body("Slice", x, cut, body.whole(_END), axis)
        x = body("Concat", head, body("Slice", x, body.whole(0), cut, axis), axis=dim)
    return x, ["shifts", "dims"]


def _relu(body: _Body, inputs: Sequence[str], nodes: Sequence[Node]) -> tuple[str, list[str]]:
    return body("Relu", *inputs), []


def _layer_norm(body: _Body, inputs: Sequence[str], nodes: Sequence[Node]) -> tuple[str, list[str]]:
    refer = {"axis": ("axis", "INT"), "epsilon": ("epsilon", "FLOAT")}
    return body("LayerNormalization", *inputs, refer=refer), ["axis", "epsilon"]


def _window_partition(body: _Body, inputs: Sequence[str], nodes: Sequence[Node]) -> tuple[str, list[str]]:
    (x,) = inputs
    window = body("Reshape", body("Constant", refer={"value_int": ("window", "INT")}), body.whole(1))
    shape = body("Shape", x)
    batch, height, width, channels = (body("Slice", shape, body.whole(i), body.whole(i + 1)) for i in range(4))
    rows, columns = body("Div", height, window), body("Div", width, window)
    six = body("Concat", batch, rows, window, columns, window, channels, axis=0)
    x = body("Transpose", body("Reshape", x, six), perm=[0, 1, 3, 2, 4, 5])
    return body("Reshape", x, body("Concat", body.whole(-1), body("Mul", window, window), channels, axis=0)), ["window"]


_BODIES: dict[str, Callable[[_Body, Sequence[str], Sequence[Node]], tuple[str, list[str]]]] = {
    "roll": _roll,
    "relu": _relu,
    "layer_norm": _layer_norm,
    "window_partition": _window_partition,
}


def function_of(plugin: Plugin, nodes: Sequence[Node], opset: int) -> "FunctionProto":
    """The function behind the nodes of a plugin. UsageError where one function cannot be all of them."""
    import onnx

    body = _Body()
    inputs = [f"x{place}" for place in range(len(nodes[0].inputs))]
    output, attributes = _BODIES[plugin.operator](body, inputs, nodes)
    opsets = [onnx.helper.make_opsetid("", opset)]
    doc = f"{plugin.operator}: what it computes, for engines that have no plugin for it"
    return onnx.helper.make_function(
        plugin.domain, plugin.name, inputs, [output], body.nodes, opsets, attributes, doc_string=doc
    )


def add_functions(proto: "ModelProto", nodes: Sequence[tuple[Plugin, Node]], opset: int) -> None:
    """Add the functions of the plugins' nodes that the graph of `proto` still has, in place."""
    used = {(node.domain, node.op_type) for node in proto.graph.node}
    for plugin in dict.fromkeys(plugin for plugin, _ in nodes):
        if (plugin.domain, plugin.name) in used:
            proto.functions.append(function_of(plugin, [node for one, node in nodes if one == plugin], opset))
