"""Weights as INT4: the levels that the graph holds as int8, two in a byte."""

from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir as ir


def _block(values: "ir.TensorProtocol", scale: "ir.TensorProtocol | None") -> int:
    """How many values [in, out] share a scale [in / block, out]; 0 where it is of whole rows."""
    shape = scale.shape.numpy() if scale is not None else ()
    return values.shape.numpy()[0] // shape[0] if len(shape) > 1 else 0


def store_int4(model: "ir.Model", nodes: Collection[str]) -> None:
    """Change the type of the stored levels of these weight nodes, all of them from -8 to 7, in place.

    Their zero points go: none is zero, and one would have to be INT4 as well.
    """
    import ml_dtypes
    import onnx_ir as ir

    for name in nodes:
        value = model.graph.initializers[f"{name}.values"]
        if value.const_value is None:
            raise ValueError(f"{name}: its levels are not in the graph")
        value.const_value = ir.Tensor(value.const_value.numpy().astype(ml_dtypes.int4), name=value.name)
        value.type = ir.TensorType(ir.DataType.INT4)
        for reader, _ in list(value.uses()):
            zero_point = reader.inputs[2] if len(reader.inputs) > 2 else None
            scale = reader.inputs[1]
            if block := _block(value.const_value, scale.const_value if scale is not None else None):
                reader.attributes["block_size"] = ir.AttrInt64("block_size", block)
            reader.resize_inputs(2)
            if zero_point is not None and not zero_point.uses():
                del model.graph.initializers[str(zero_point.name)]
