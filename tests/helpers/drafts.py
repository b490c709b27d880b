"""An ONNX graph under construction: `add` a node and get its output."""

import numpy as np
from onnx import helper, numpy_helper


class Draft:
    """A graph whose floats are of the type `body`."""

    def __init__(self, body=np.float32):
        self.body, self.nodes, self.constants = body, [], {}

    def const(self, name, value):
        self.constants[name] = np.asarray(value)
        return name

    def floats(self, name, value):
        return self.const(name, np.asarray(value, self.body))

    def add(self, op, inputs, name, outputs=None, **attributes):
        outputs = outputs or [f"{name}.out"]
        self.nodes.append(helper.make_node(op, inputs, outputs, name=name, **attributes))
        return outputs[0]

    def pair(self, x, name, kind=np.int8, zero=0, scale=0.05):
        ends = [self.floats(f"{name}.scale", scale), self.const(f"{name}.zero", np.asarray(zero, kind))]
        return self.add("DequantizeLinear", [self.add("QuantizeLinear", [x, *ends], name), *ends], f"{name}.dq")

    def linear(self, x, name, weight, steps=None, scale=0.05):
        """x times a weight [in, out]; with `steps`, of its columns, the weight is int8, and so is x, by `scale`."""
        if steps is None:
            return self.add("MatMul", [x, self.floats(f"{name}.weight", weight)], name)
        x = self.pair(x, f"{name}._input_quantizer", scale=scale)
        stored = [
            self.const(f"{name}.weight", np.round(weight / steps).astype(np.int8)),
            self.floats(f"{name}.weight.scale", steps),
            self.const(f"{name}.weight.zero", np.zeros(len(steps), np.int8)),
        ]
        return self.add("MatMul", [x, self.add("DequantizeLinear", stored, f"{name}._weight_quantizer", axis=1)], name)

    def model(self, inputs, outputs, opset=20, body=None):
        """The onnx.ModelProto. `inputs`, `outputs`: shapes by name, of the type `body`, else the graph's."""
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(body or self.body))
        ends = [
            [helper.make_tensor_value_info(name, kind, shape) for name, shape in one.items()]
            for one in (inputs, outputs)
        ]
        held = [numpy_helper.from_array(value, name) for name, value in self.constants.items()]
        graph = helper.make_graph(self.nodes, "draft", *ends, held)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
