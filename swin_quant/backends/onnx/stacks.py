"""Sums of stacked tensors without the stack, as networks with selective kernels weigh their branches."""

from functools import reduce

import numpy as np
import onnx_ir as ir

from swin_quant.backends.onnx.pairs import constant


def sum_unstacked(graph: ir.Graph) -> None:
    """Add tensors one by one where their stack, or its product with weights, is only summed over the new dimension.

    OpenVINO keeps channels last between convolutions: it would copy the branches of an SKNet into the stack's order.
    """
    for stack in list(graph):
        parts, axis = _get_stacked(stack)
        if not parts or stack.outputs[0].is_graph_output():
            continue
        sums = [_get_sum(reader, stack.outputs[0], axis, len(parts)) for reader, _ in stack.outputs[0].uses()]
        if None in sums:
            continue
        for total, weights in filter(None, sums):
            made: list[ir.Node] = []

            def add(kind: str, *inputs: ir.Value, to: list[ir.Node] = made, at: ir.Node = total) -> ir.Value:
                to.append(ir.Node("", kind, inputs, metadata_props=dict(at.metadata_props)))
                return to[-1].outputs[0]

            terms = parts
            if weights is not None:
                terms = []
                for place, part in enumerate(parts):
                    index = ir.Value(name=f"val_{total.name}_{place}", const_value=ir.tensor(np.asarray(place)))
                    graph.register_initializer(index)
                    terms.append(add("Mul", part, add("Gather", weights, index)))
                    made[-2].attributes["axis"] = ir.AttrInt64("axis", axis)
            found, was = reduce(lambda left, right: add("Add", left, right), terms), total.outputs[0]
            found.type, found.shape = was.type, was.shape
            was.replace_all_uses_with(found, replace_graph_outputs=True)
            graph.insert_before(total, made)


def _get_stacked(node: ir.Node) -> tuple[list[ir.Value], int]:
    """The tensors that a node stacks, at least two, and the new dimension; none for any other node."""
    axis, makers = node.attributes.get_int("axis", 0), [one.producer() for one in node.inputs if one is not None]
    parts = [one.inputs[0] for one in makers if one is not None and _reads_axis(one, "Unsqueeze", axis)]
    is_stack = node.op_type == "Concat" and axis > 0 and 1 < len(parts) == len(makers)
    return [one for one in parts if one is not None] if is_stack else [], axis


def _get_sum(node: ir.Node, stack: ir.Value, axis: int, count: int) -> tuple[ir.Node, ir.Value | None] | None:
    """The sum that a reader of a stack is, or its product's only reader, with the product's weights; else None."""
    if _reads_axis(node, "ReduceSum", axis) and not node.attributes.get_int("keepdims", 1):
        return node, None
    readers = [one for one, _ in node.outputs[0].uses()]
    weights = [one for one in node.inputs if one is not None and one is not stack]
    if node.op_type != "Mul" or len(weights) != 1 or len(readers) != 1 or node.outputs[0].is_graph_output():
        return None
    sizes, rank = weights[0].shape, len(stack.shape or ())
    found = _get_sum(readers[0], node.outputs[0], axis, count)
    fits = sizes is not None and len(sizes) == rank > axis and sizes[axis] == count
    return (found[0], weights[0]) if fits and found and found[1] is None else None


def _reads_axis(node: ir.Node, kind: str, axis: int) -> bool:
    """Whether a node is of a kind, and its second input is this axis alone."""
    axes = node.inputs[1] if node.op_type == kind and len(node.inputs) > 1 else None
    return axes is not None and axes.const_value is not None and constant(axes).numpy().flatten().tolist() == [axis]
