"""Finishes the graph that is stored: folds constants, lowers it to opset 17, names operators and tensors by module."""

import ast
from collections import defaultdict
from collections.abc import Collection

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnx_ir.passes.common as common
from onnxscript import optimizer, rewriter
from onnxscript.rewriter.rules.common import materialize_reshape_shape_rule

from swin_quant.backends.backend import OnnxTarget
from swin_quant.backends.onnx.pairs import REDUCTIONS, constant, finish_pairs
from swin_quant.backends.onnx.stacks import sum_unstacked
from swin_quant.base.errors import UsageError

_ROLES = {("QuantizeLinear", 2): "zero_point", ("DequantizeLinear", 2): "zero_point", ("Reshape", 1): "shape"}
_SCOPES = "pkg.torch.onnx.name_scopes"  # the exporter's note of an operator's modules, outermost first


def finish(model: ir.Model, opset: int, wants: OnnxTarget = OnnxTarget("portable"), asked: bool = True) -> int:
    """Fold, name and bring to `opset`, in place. Every parameter keeps the name that it has in the trained model.

    Returns the opset: 18 for a graph that 17 cannot hold; UsageError for such a graph if 17 was `asked` for.
    """
    simplify(model)
    if wants.reshaped:
        _keep_batches(model.graph)
    finish_pairs(model.graph, wants)
    newer = [node.op_type for node in model.graph if not node.domain and not _fits_17(node)] if opset == 17 else []
    if newer and asked:
        raise UsageError(f"opset 17: has no {newer[0]} as this network needs it: choose ‹opset› 18")
    opset = 18 if newer else opset
    if opset == 17:
        _lower_to_17(model)
    _name_everything(model.graph)
    return opset


def simplify(model: ir.Model) -> None:
    """Inline, fold small constants, merge reshapes: onnxscript's optimizer without its sharing of equal parameters.

    Two nodes of equal range keep a scale each, under its own name; only unnamed constants are shared.
    """
    common.InlinePass()(model)
    for _ in range(2):
        # A Gather's biases are many times as large as their table; a Split is not folded anyway, but gets a line of log
        optimizer.fold_constants_ir(
            model, should_fold=lambda node: False if node.op_type in ("Gather", "Split") else None
        )
        rewriter.rewrite(model, [materialize_reshape_shape_rule])  # the only one of fifty rules that our graphs need
    common.RemoveUnusedNodesPass()(model)
    common.RemoveUnusedFunctionsPass()(model)  # type: ignore[no-untyped-call]  # onnx_ir gives it no types
    common.RemoveUnusedOpsetsPass()(model)
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    _share_constants(model.graph)
    common.CommonSubexpressionEliminationPass()(model)
    sum_unstacked(model.graph)
    common.RemoveUnusedNodesPass()(model)


def store_int4(model: ir.Model, nodes: Collection[str]) -> None:
    """Store the levels, -8 to 7, of these weight nodes as INT4, in place.

    Their zero points are dropped: they are 0, which is the default, and would have to be INT4, too.
    """
    for name in nodes:
        value = model.graph.initializers[f"{name}.values"]
        levels = constant(value).numpy()
        value.const_value = ir.Tensor(levels.astype(ml_dtypes.int4), name=value.name)
        value.type = ir.TensorType(ir.DataType.INT4)
        for reader, _ in list(value.uses()):
            zero_point = reader.inputs[2] if len(reader.inputs) > 2 else None
            scale = constant(reader.inputs[1]).numpy()
            if scale.ndim > 1:  # [in / block, out]
                reader.attributes["block_size"] = ir.AttrInt64("block_size", len(levels) // len(scale))
            reader.resize_inputs(2)
            if zero_point is not None and not zero_point.uses():
                del model.graph.initializers[str(zero_point.name)]


def _keep_batches(graph: ir.Graph) -> None:
    """Let each Reshape that keeps the batch copy it from its input.

    The exporter writes -1, which takes what is left: a file reshaped to larger pictures would take one for several. It
    goes to the end, where the next product has another number of channels: OpenVINO counts no values of other shapes.
    """
    for number, node in enumerate(graph):
        x, shape = node.inputs[:2] if node.op_type == "Reshape" else (None, None)
        y = node.outputs[0]
        if x is None or shape is None or shape.const_value is None or not x.shape or not y.shape:
            continue
        first, *others = shape.const_value.numpy().tolist()
        if first == -1 and 0 not in others and x.shape[0] == y.shape[0]:
            copied = ir.Value(name=f"val_batch_{number}", const_value=ir.tensor(np.array([0, *others[:-1], -1])))
            graph.register_initializer(copied)
            node.replace_input_with(1, copied)
            node.attributes.pop("allowzero", None)
            if shape.name is not None and not shape.uses() and shape.name in graph.initializers:
                del graph.initializers[shape.name]


def _fits_17(node: ir.Node) -> bool:
    if node.op_type in REDUCTIONS:
        return all(value is None or value.const_value is not None for value in node.inputs[1:])
    if node.op_type == "Split" and "num_outputs" in node.attributes:  # opset 17 splits into equal parts alone
        axis = node.attributes.get_int("axis", 0)
        size = node.inputs[0].shape[axis] if node.inputs[0] is not None and node.inputs[0].shape is not None else None
        return isinstance(size, int) and size % len(node.outputs) == 0
    try:
        old, new = (onnx.defs.get_schema(node.op_type, opset, "") for opset in (17, 18))
    except onnx.defs.SchemaError:
        return False
    is_alike = {*node.attributes} <= {*old.attributes} and len(node.inputs) <= old.max_input
    return new.since_version < 18 or (is_alike and not node.op_type.startswith("Scatter"))


def _lower_to_17(model: ir.Model) -> None:
    """Lower a graph from opset 18 to 17, in place: axes of reductions become attributes, splits lose `num_outputs`.

    torch's exporter starts at 18, and onnx's converter cannot read axes that are initializers.
    """
    for node in model.graph:
        if node.op_type in REDUCTIONS:
            if len(node.inputs) > 1 and node.inputs[1] is not None:
                axes = constant(node.inputs[1]).numpy().flatten().tolist()
                node.attributes["axes"] = ir.AttrInt64s("axes", axes)
            node.resize_inputs(1)
            node.attributes.pop("noop_with_empty_axes", None)
        elif node.op_type == "Split":
            node.attributes.pop("num_outputs", None)  # opsets 13 to 17 split into equal parts by default
    model.opset_imports[""] = 17
    common.RemoveUnusedNodesPass()(model)


def _name_everything(graph: ir.Graph) -> None:
    """Name operators and their outputs `<module>.<operator>`, and unnamed constants after their reader, in place."""
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
            role = _ROLES.get((reader.op_type, place), f"constant_{place}")
            value.name = _unique(role if others else f"{reader.name}.{role}", taken)
    for value in (*graph.inputs, *graph.outputs, *(output for node in graph for output in node.outputs)):
        value.metadata_props.clear()
    graph.metadata_props.clear()


def _module(node: ir.Node) -> str:
    """The innermost module of an operator; for an operator that an optimizer made, the module of the one before it."""
    if _SCOPES in node.metadata_props:
        return ast.literal_eval(node.metadata_props[_SCOPES])[-2]
    before = next((value.producer() for value in node.inputs if value is not None and value.producer()), None)
    return before.meta.get("module", "") if before else ""


def _unique(name: str, taken: dict[str, int]) -> str:
    taken[name] += 1
    return name if taken[name] == 1 else f"{name}_{taken[name]}"


def _share_constants(graph: ir.Graph) -> None:
    """Keep one initializer for all equal constants that are no parameters.

    Each weight keeps its own zero point: where int8 products would saturate, ONNX Runtime turns a weight and its zero
    point into uint8 (`session.x64quantprecision`), and cannot load a file in which two weights share one.
    """
    seen: dict[tuple[object, ...], ir.Value] = {}
    for name, value in list(graph.initializers.items()):
        if not name.startswith("val_"):
            continue
        reader, _ = next(iter(value.uses()))
        values, tensor = reader.inputs[0], constant(value)
        if reader.op_type == "DequantizeLinear" and values is not None and values.is_initializer():
            continue
        kept = seen.setdefault((tensor.dtype, tuple(tensor.shape), tensor.tobytes()), value)
        if kept is not value:
            value.replace_all_uses_with(kept)
            del graph.initializers[name]
