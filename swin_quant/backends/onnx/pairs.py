"""Writes Q/DQ pairs, and the operators around them, so that every engine computes what fake-quant does."""

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir

from swin_quant.backends.backend import OnnxTarget

_AVERAGES = ("ReduceMean", "GlobalAveragePool", "AveragePool")
_KEEPING = frozenset({"MaxPool", "Relu", "Reshape", "Flatten", "Transpose"})
_BY_CHANNEL = frozenset(("Add", "Sub", "Mul", "Div", "BatchNormalization"))
# Before opset 18 their axes are attributes.
REDUCTIONS = frozenset(
    f"Reduce{kind}" for kind in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "SumSquare")
)


def finish_pairs(graph: ir.Graph, wants: OnnxTarget) -> None:
    """Apply every rewrite of this file, for a target."""
    share_pairs(graph)
    raise_pairs(graph)
    pad_in_convolutions(graph)
    keep_reduced(graph)
    gather_in_a_row(graph)
    keep_integer(graph)
    fit_biases(graph)
    give_shared_biases(graph)
    if not wants.symmetric:
        make_unsigned(graph, shared=wants.unsigned)
    for name, value in list(graph.initializers.items()):
        if not value.uses() and not value.is_graph_output():
            del graph.initializers[name]


def share_pairs(graph: ir.Graph) -> None:
    """Keep one pair where several nodes of equal scale and zero point see one tensor, as behind an addition."""
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


def fit_biases(graph: ir.Graph) -> None:
    """Raise the scale of a channel whose weights are so near zero that its bias would not fit int32.

    ONNX Runtime rounds biases to int32, by the product of both scales, and saturates them without a word: a SHViT
    had 27 dB beside the same file without its optimizer, and has 44. By the larger scale a rounded weight shifts an
    output by at most 255 / 2**31 of the bias. Weights that several nodes read stay as they are.
    """
    for node in graph:
        if node.op_type not in ("Conv", "Gemm") or len(node.inputs) < 3:
            continue
        data, weight, bias = _dequantizer(node.inputs[0]), _dequantizer(node.inputs[1]), node.inputs[2]
        if data is None or weight is None or bias is None or not bias.is_initializer():
            continue
        levels, scale = weight.inputs[:2]
        if levels is None or scale is None or not levels.is_initializer() or len(levels.uses()) * len(scale.uses()) > 1:
            continue
        values, was, step = (constant(one).numpy() for one in (levels, scale, data.inputs[1]))
        least = np.abs(constant(bias).numpy().astype(np.float64)) / (step.max() * 2.0**30)
        now = np.maximum(was, least if was.ndim else least.max()).astype(was.dtype)
        if values.dtype == np.int8 and (now > was).any():
            shape = [1] * values.ndim
            shape[weight.attributes.get_int("axis", 1)] = -1
            values = np.rint(values * (was / now).reshape(shape if was.ndim else ())).astype(np.int8)
            levels.const_value, scale.const_value = ir.tensor(values), ir.tensor(now)


def give_shared_biases(graph: ir.Graph) -> None:
    """Give an int8 convolution without a bias one of 1e-30, which changes no value, where several nodes read it.

    OpenVINO 2026.4 multiplies such an output by its scale twice where an addition reads it and the shapes are open: a
    PoolFormer then gave zeros, with fixed shapes it had 31 dB.
    """
    for node in graph:
        weight = _dequantizer(node.inputs[1]) if node.op_type == "Conv" else None
        if weight is None or len(node.outputs[0].uses()) < 2 or constant(weight.inputs[1]).dtype != ir.DataType.FLOAT:
            continue
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        if bias is not None and (bias.const_value is None or constant(bias).numpy().any()):
            continue
        tiny = np.full(constant(weight.inputs[0]).shape[0], 1e-30, np.float32)
        given = ir.Value(name=f"{node.name}.no_bias", const_value=ir.tensor(tiny))
        graph.register_initializer(given)
        node.resize_inputs(3)
        node.replace_input_with(2, given)


def raise_pairs(graph: ir.Graph) -> None:
    """Move a pair from behind a max pooling, or behind the reshape of an average, to before it.

    The values stay: rounding keeps their order, and a reshape keeps them. OpenVINO does not move pairs: it would pool
    the largest map of a ResNet in float, and feed its head float values.
    """
    for pool in list(graph):
        average = pool.inputs[0].producer() if pool.op_type == "Reshape" and pool.inputs[0] else None
        is_crossed = pool.op_type == "MaxPool" or (average is not None and average.op_type in _AVERAGES)
        quantize = _only_reader(pool.outputs[0]) if is_crossed else None
        back = _only_reader(quantize.outputs[0]) if quantize and quantize.op_type == "QuantizeLinear" else None
        if quantize is None or back is None or back.outputs[0].is_graph_output() or len(pool.outputs) > 1:
            continue
        back.outputs[0].replace_all_uses_with(pool.outputs[0])
        quantize.replace_input_with(0, pool.inputs[0])
        pool.replace_input_with(0, back.outputs[0])
        graph.remove([quantize, back])
        graph.insert_before(pool, [quantize, back])


def pad_in_convolutions(graph: ir.Graph) -> None:
    """Let convolutions pad by themselves where they alone read a tensor with zeros around it, also through a pair.

    A pair keeps zeros. ONNX Runtime would run the convolution before the padding in float, since no pair follows it.
    """
    for pad in list(graph):
        added, source = _zeros_around(pad), pad.inputs[0] if pad.inputs else None
        if added is None or source is None:
            continue
        quantize = _only_reader(pad.outputs[0])
        is_pair = quantize is not None and quantize.op_type == "QuantizeLinear"
        back = _only_reader(quantize.outputs[0]) if quantize is not None and is_pair else pad
        readers = [reader for reader, _ in back.outputs[0].uses()] if back else []
        if not readers or not all(reader.op_type == "Conv" and _get_pads(reader) is not None for reader in readers):
            continue
        for reader in readers:
            both = [own + more for own, more in zip(_get_pads(reader) or (), added, strict=True)]
            reader.attributes["pads"] = ir.AttrInt64s("pads", both)
        pad.outputs[0].replace_all_uses_with(source)
        graph.remove(pad, safe=True)


def _zeros_around(node: ir.Node) -> list[int] | None:
    """The zeros that a padding adds at the start of each spatial dimension, then at the end of each."""
    if node.op_type != "Pad" or len(node.inputs) > 3 or node.outputs[0].is_graph_output():
        return None
    mode = node.attributes.get_string("mode", "constant")
    amounts, *fill = node.inputs[1:]
    if mode != "constant" or any(one is not None and one.const_value is None for one in (amounts, *fill)):
        return None
    pads = constant(amounts).numpy().tolist()
    half = len(pads) // 2
    is_zero = all(one is None or not constant(one).numpy().any() for one in fill)
    is_around = half > 2 and not any(pads[:2] + pads[half : half + 2]) and min(pads) >= 0
    return pads[2:half] + pads[half + 2 :] if is_zero and is_around else None


def _get_pads(convolution: ir.Node) -> list[int] | None:
    """The zeros that a convolution adds by itself; None if it finds them by its size."""
    if convolution.attributes.get_string("auto_pad", "NOTSET") != "NOTSET":
        return None
    if "pads" in convolution.attributes:
        return [*convolution.attributes["pads"].as_ints()]
    weight = convolution.inputs[1]
    return [0] * 2 * (len(weight.shape) - 2) if weight is not None and weight.shape is not None else None


def keep_reduced(graph: ir.Graph) -> None:
    """Reduce with the dimension kept, then drop it, where channels are scaled or shifted before or behind a reduction.

    OpenVINO 2026.4 moves a scale of each channel behind the reduction, computes it and the pair behind it within the
    reduction, and takes both by the position that the channels had before a dimension went: in front of the classifier
    that costs 30 dB of a LeViT, and 36 dB of a SwiftFormer.
    """
    for node in list(graph):
        keeps = node.attributes.get_int("keepdims", 1)
        if node.op_type not in REDUCTIONS or keeps or len(node.inputs) < 2 or node.inputs[1] is None:
            continue
        result, origin = node.outputs[0], _origin(node.inputs[0], lambda one: one.op_type in _KEEPING)
        is_scaled = origin is not None and _scales(origin)
        if origin is not None and origin.op_type == "LayerNormalization":
            is_scaled = len(origin.inputs) < 3 or origin.inputs[2] is None  # a shift keeps the scale where it is
        is_scaled = is_scaled or any(reader.op_type in _BY_CHANNEL for reader, _ in result.uses())
        if result.is_graph_output() or not is_scaled:
            continue
        drop = ir.Node("", "Squeeze", [result, node.inputs[1]], metadata_props=dict(node.metadata_props))
        result.replace_all_uses_with(drop.outputs[0])
        drop.replace_input_with(0, result)
        drop.outputs[0].type, result.shape = result.type, None
        node.attributes["keepdims"] = ir.AttrInt64("keepdims", 1)
        graph.insert_after(node, drop)


def gather_in_a_row(graph: ir.Graph) -> None:
    """Gather by a list of indices, then reshape, in place of a table of indices, as overlapping windows have it.

    OpenVINO 2026.4 moves the scales of a convolution's channels across a gather, and across one by a table with a wrong
    rank: it then cannot compile the network, a HaloNet.
    """
    for node in list(graph):
        data, table = (*node.inputs, None, None)[:2]
        if node.op_type != "Gather" or data is None or data.shape is None or not _variable(node):
            continue
        if table is None or table.const_value is None:
            continue
        indices = constant(table).numpy()
        axis = node.attributes.get_int("axis", 0)
        behind = [size if isinstance(size, int) else -1 for size in data.shape[axis + 1 :]]
        if indices.ndim < 2 or axis < 0 or behind.count(-1) > 1:
            continue
        shape = np.asarray([*[0] * axis, *indices.shape, *behind])
        one_row, wanted = (
            ir.Value(name=f"val_{node.name}_{what}", const_value=ir.tensor(value))
            for what, value in (("indices", indices.flatten()), ("shape", shape))
        )
        for value in (one_row, wanted):
            graph.register_initializer(value)
        result = node.outputs[0]
        spread = ir.Node("", "Reshape", [result, wanted], metadata_props=dict(node.metadata_props))
        result.replace_all_uses_with(spread.outputs[0], replace_graph_outputs=True)
        spread.replace_input_with(0, result)
        spread.outputs[0].type, spread.outputs[0].shape, result.shape = result.type, result.shape, None
        node.replace_input_with(1, one_row)
        graph.insert_after(node, spread)


def make_unsigned(graph: ir.Graph, shared: bool) -> None:
    """Turn int8 pairs before convolutions into uint8 pairs around 128, where an engine needs that: the values stay.

    Behind a concatenation OpenVINO 2026.4 gives int8 another scale on the branches, and loses 20 to 30 dB; before a
    pooling that rounds its size up it loses 12 dB of a SqueezeNet; its transposed convolutions of int8 give other
    numbers from one compilation to the next. `shared`: pairs that others read as well. ONNX Runtime itself does this
    only for a pair with one reader; a convolution or addition that reads both types then runs in float, as in every
    linear bottleneck of a MobileNet.
    """
    middle = ir.Value(name="val_middle", const_value=ir.tensor(np.asarray(np.uint8(128)), name="val_middle"))
    for node in graph:
        back = _only_reader(node.outputs[0]) if node.op_type == "QuantizeLinear" else None
        if back is None or (zero := constant(node.inputs[2])).dtype != ir.DataType.INT8 or zero.numpy().ndim:
            continue
        users = [reader for reader, _ in back.outputs[0].uses()]
        readers = [user.op_type for user in users]
        # Constant scales and shifts, as in a batch norm that folds into no layer, are moved across a concatenation
        origin = _origin(node.inputs[0], lambda one: one.op_type in _KEEPING or _scales(one))
        is_joined = not {*readers} <= {"MatMul", "Gemm"} and origin is not None and origin.op_type == "Concat"
        is_ceiled = any(one.op_type == "MaxPool" and one.attributes.get_int("ceil_mode", 0) for one in users)
        if is_joined or is_ceiled or "ConvTranspose" in readers or (shared and len(readers) > 1 and "Conv" in readers):
            for one in (node, back):
                one.replace_input_with(2, middle)
    if middle.uses():
        graph.register_initializer(middle)


def _scales(node: ir.Node) -> bool:
    """Whether an operator multiplies its only variable by constants, or adds them."""
    return node.op_type in _BY_CHANNEL and len(_variable(node)) == 1


def _variable(node: ir.Node) -> list[ir.Value]:
    return [one for one in node.inputs if one is not None and one.const_value is None]


def _origin(value: ir.Value | None, through: Callable[[ir.Node], bool]) -> ir.Node | None:
    """The operator that made a value, behind the ones that are looked `through`."""
    node = value.producer() if value else None
    while node is not None and through(node):
        node = _variable(node)[0].producer()
    return node


def keep_integer(graph: ir.Graph) -> None:
    """Give the bias behind a product of two pairs two dimensions, [1, out]: broadcasting gives the same sum.

    ONNX Runtime merges a product of known shape and a one-dimensional bias into a float Gemm before it looks for
    integer products. A batch that is fixed on loading makes the shape known.
    """
    for node in graph:
        makers = [value.producer() for value in node.inputs if value is not None] if node.op_type == "Add" else []
        product = next((maker for maker in makers if maker is not None and maker.op_type == "MatMul"), None)
        if product is None or not all(map(_dequantizer, product.inputs)):
            continue
        for bias in node.inputs:
            if bias is None or not bias.is_initializer() or len(bias.uses()) > 1:
                continue
            if (values := constant(bias).numpy()).ndim == 1:
                bias.const_value = ir.tensor(values[None], name=bias.name)
                bias.shape = ir.Shape(constant(bias).shape)


def _dequantizer(value: ir.Value | None) -> ir.Node | None:
    """The operator that dequantizes a value; None if none does."""
    maker = value.producer() if value is not None else None
    return maker if maker is not None and maker.op_type == "DequantizeLinear" else None


def constant(value: ir.Value | None) -> Any:
    """The tensor of a value that is an initializer."""
    if value is None or value.const_value is None:
        raise ValueError(f"{value} is no constant")
    return value.const_value


def _only_reader(value: ir.Value) -> ir.Node | None:
    """The only operator that reads a value; None if several do, or if the value is an output of the graph."""
    readers = [reader for reader, _ in value.uses()]
    return readers[0] if len(readers) == 1 and not value.is_graph_output() else None
