"""The Q/DQ pairs of a stored graph where engines take them best: each value stays what it was."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import onnx_ir as ir

_AVERAGES = ("ReduceMean", "GlobalAveragePool", "AveragePool")


def share_pairs(graph: "ir.Graph") -> None:
    """One pair where several nodes of equal scale and zero point see one tensor, as behind an addition."""
    first: dict[tuple[object, ...], ir.Node] = {}
    for node in list(graph):
        if node.op_type != "QuantizeLinear":
            continue
        scale, zero = (constant(value) for value in node.inputs[1:3])
        key = id(node.inputs[0]), scale.dtype, scale.tobytes(), zero.dtype, zero.tobytes()
        kept = first.setdefault(key, node)
        if kept is not node:
            pair = [[reader for reader, _ in one.outputs[0].uses()][0] for one in (node, kept)]
            pair[0].outputs[0].replace_all_uses_with(pair[1].outputs[0])
            graph.remove([pair[0], node], safe=True)
    _drop_unread(graph)


def raise_pairs(graph: "ir.Graph") -> None:
    """A pair behind a max pooling moves before it: rounding keeps order, so that the values are the same. And so does
    one behind the reshape of an average.

    OpenVINO moves none across. It would pool, and write what is pooled, in float, twice the largest map of a ResNet,
    and give what its head reads in float.
    """
    for pool in list(graph):
        quantize = _only_reader(pool.outputs[0]) if _is_crossed(pool) else None
        back = _only_reader(quantize.outputs[0]) if quantize and quantize.op_type == "QuantizeLinear" else None
        if quantize is None or back is None or back.outputs[0].is_graph_output() or len(pool.outputs) > 1:
            continue
        back.outputs[0].replace_all_uses_with(pool.outputs[0])
        quantize.replace_input_with(0, pool.inputs[0])
        pool.replace_input_with(0, back.outputs[0])
        graph.remove([quantize, back])
        graph.insert_before(pool, [quantize, back])


def _is_crossed(node: "ir.Node") -> bool:
    if node.op_type == "Reshape":
        source = node.inputs[0].producer() if node.inputs[0] else None
        return source is not None and source.op_type in _AVERAGES
    return node.op_type == "MaxPool"


def make_unsigned(graph: "ir.Graph") -> None:
    """Pairs of int8 that a convolution and others read become pairs of uint8 around 128: the same values.

    ONNX Runtime does so by itself where one operator reads a pair. It leaves the others, and then a convolution or an
    addition between the two types in float, as every linear bottleneck of a MobileNet has them.
    """
    import numpy as np
    import onnx_ir as ir

    middle = ir.Value(name="val_middle", const_value=ir.tensor(np.asarray(np.uint8(128)), name="val_middle"))
    for node in graph:
        back = _only_reader(node.outputs[0]) if node.op_type == "QuantizeLinear" else None
        if back is None or (zero := constant(node.inputs[2])).dtype != ir.DataType.INT8 or zero.numpy().ndim:
            continue
        readers = [reader.op_type for reader, _ in back.outputs[0].uses()]
        if len(readers) > 1 and "Conv" in readers:
            for one in (node, back):
                one.replace_input_with(2, middle)
    if middle.uses():
        graph.register_initializer(middle)
    _drop_unread(graph)


def keep_integer(graph: "ir.Graph") -> None:
    """The bias behind a product of two pairs gets two dimensions, [1, out]: the same sum, by broadcasting.

    ONNX Runtime merges a product of known shape and a bias of one dimension into a float Gemm, before it looks for
    integer products. A batch that is fixed on loading makes the shape known.
    """
    import onnx_ir as ir

    for node in graph:
        if node.op_type != "Add" or not all(map(_is_dequantized, _factors(node))):
            continue
        for bias in node.inputs:
            if (
                bias is not None
                and bias.is_initializer()
                and len(bias.uses()) == 1
                and constant(bias).numpy().ndim == 1
            ):
                bias.const_value = ir.tensor(constant(bias).numpy()[None], name=bias.name)
                bias.shape = ir.Shape(constant(bias).shape)


def _factors(addition: "ir.Node") -> "list[ir.Value | None]":
    """Both inputs of the product that an addition reads; [None] where it reads none."""
    makers = [value.producer() for value in addition.inputs if value is not None]
    return next((list(maker.inputs) for maker in makers if maker is not None and maker.op_type == "MatMul"), [None])


def _is_dequantized(value: "ir.Value | None") -> bool:
    maker = value.producer() if value is not None else None
    return maker is not None and maker.op_type == "DequantizeLinear"


def constant(value: "ir.Value | None") -> Any:
    """The tensor of a value that is an initializer."""
    if value is None or value.const_value is None:
        raise ValueError(f"{value} is no constant")
    return value.const_value


def _only_reader(value: "ir.Value") -> "ir.Node | None":
    """The operator that alone reads a value; None if there are others, or it is a result of the graph."""
    readers = [reader for reader, _ in value.uses()]
    return readers[0] if len(readers) == 1 and not value.is_graph_output() else None


def _drop_unread(graph: "ir.Graph") -> None:
    for name, value in list(graph.initializers.items()):
        if not value.uses() and not value.is_graph_output():
            del graph.initializers[name]
