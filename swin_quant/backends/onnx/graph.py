"""The graph as it is stored: constants folded, operators and tensors named after the modules that they came from."""

import ast
from collections import defaultdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import onnx_ir as ir


_AVERAGES = ("ReduceMean", "GlobalAveragePool", "AveragePool")
_SCOPES = "pkg.torch.onnx.name_scopes"  # the exporter's note of an operator's modules, outermost first
_AXES_ARE_ATTRIBUTES = ("ReduceMean", "ReduceL2")  # before opset 18


def finish(model: "ir.Model", opset: int, unsigned: bool = False) -> None:
    """Fold, name and bring to `opset`, in place. Every parameter keeps the name that it has in the trained model.

    `unsigned`: as `OnnxTarget` has it.
    """
    simplify(model)
    share_pairs(model.graph)
    raise_pairs(model.graph)
    keep_integer(model.graph)
    if unsigned:
        make_unsigned(model.graph)
    if opset == 17:
        lower_to_17(model)
    name_everything(model.graph)


def simplify(model: "ir.Model") -> None:
    """Inline, fold small constants, merge reshapes: onnxscript's optimizer, less its sharing of equal parameters.

    Two nodes of equal range keep a scale each, under its own name; what is shared is constants that nobody named.
    """
    import onnx_ir.passes.common as common
    from onnxscript import optimizer, rewriter
    from onnxscript.rewriter.rules.common import materialize_reshape_shape_rule

    common.InlinePass()(model)
    for _ in range(2):
        optimizer.fold_constants_ir(model, should_fold=_small_enough)
        rewriter.rewrite(model, [materialize_reshape_shape_rule])  # of its fifty the one that any graph of ours needs
    common.RemoveUnusedNodesPass()(model)
    common.RemoveUnusedFunctionsPass()(model)  # type: ignore[no-untyped-call]  # onnx_ir gives it no types
    common.RemoveUnusedOpsetsPass()(model)
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    _share_constants(model.graph)
    common.CommonSubexpressionEliminationPass()(model)
    common.RemoveUnusedNodesPass()(model)


def _small_enough(node: "ir.Node") -> bool | None:
    """Tables of position biases stay tables: what is looked up in them is many times as large."""
    return False if node.op_type == "Gather" else None


def lower_to_17(model: "ir.Model") -> None:
    """From opset 18: axes of reductions become attributes, equal splits say their lengths.

    torch's exporter starts at 18, and onnx's converter does not read axes that are initializers.
    """
    import onnx_ir as ir
    import onnx_ir.passes.common as common

    for node in model.graph:
        if node.op_type in _AXES_ARE_ATTRIBUTES:
            axes = constant(node.inputs[1]).numpy().flatten().tolist()
            node.resize_inputs(1)
            node.attributes["axes"] = ir.AttrInt64s("axes", axes)
            node.attributes.pop("noop_with_empty_axes", None)
        elif node.op_type == "Split":
            node.attributes.pop("num_outputs", None)  # opset 13 to 17: without lengths, into equal parts
    model.opset_imports[""] = 17
    common.RemoveUnusedNodesPass()(model)


def name_everything(graph: "ir.Graph") -> None:
    """Operators are called `<module>.<operator>`, as is what they return; unnamed constants after who reads them."""
    taken: dict[str, int] = defaultdict(int)
    fixed = {value.name for value in (*graph.inputs, *graph.outputs)}
    for node in graph:
        module = _module(node)
        name = _unique(f"{module}.{node.op_type}" if module else node.op_type, taken)
        node.metadata_props.clear()
        node.meta["module"], node.name, node.doc_string = module, name, None
        for index, value in enumerate(node.outputs):
            if value.name not in fixed:
                value.name = name if len(node.outputs) == 1 else f"{name}.{index}"
    for value in list(graph.initializers.values()):
        value.metadata_props.clear()
        if str(value.name).startswith("val_"):
            (reader, place), *others = value.uses()
            role = _role(reader.op_type, place)
            value.name = _unique(role if others else f"{reader.name}.{role}", taken)
    for value in (*graph.inputs, *graph.outputs, *(output for node in graph for output in node.outputs)):
        value.metadata_props.clear()
    graph.metadata_props.clear()


def _module(node: "ir.Node") -> str:
    """The innermost module of an operator; of one that an optimizer made, that of the operator before it."""
    if _SCOPES in node.metadata_props:
        return ast.literal_eval(node.metadata_props[_SCOPES])[-2]
    before = next((value.producer() for value in node.inputs if value is not None and value.producer()), None)
    return before.meta.get("module", "") if before else ""


def _role(op_type: str, place: int) -> str:
    names = {"QuantizeLinear": {2: "zero_point"}, "DequantizeLinear": {2: "zero_point"}, "Reshape": {1: "shape"}}
    return names.get(op_type, {}).get(place, f"constant_{place}")


def _unique(name: str, taken: dict[str, int]) -> str:
    taken[name] += 1
    return name if taken[name] == 1 else f"{name}_{taken[name]}"


def _share_constants(graph: "ir.Graph") -> None:
    """One initializer for all equal constants that are nobody's parameter.

    Each weight keeps a zero point of its own: ONNX Runtime makes uint8 of both, on CPUs whose products of int8 would
    saturate (`session.x64quantprecision`), and does not load a file where two weights share one.
    """
    seen: dict[tuple[object, ...], ir.Value] = {}
    for name, value in list(graph.initializers.items()):
        if name.startswith("val_") and not _is_of_a_weight(value):
            tensor = constant(value)
            key = tensor.dtype, tuple(tensor.shape), tensor.tobytes()
            if key in seen:
                value.replace_all_uses_with(seen[key])
                del graph.initializers[name]
            else:
                seen[key] = value


def _is_of_a_weight(zero_point: "ir.Value") -> bool:
    reader, _ = next(iter(zero_point.uses()))
    values = reader.inputs[0]
    return reader.op_type == "DequantizeLinear" and values is not None and values.is_initializer()


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
