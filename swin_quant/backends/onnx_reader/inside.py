"""Copies of exported ONNX files that also give the output of every module of the trained model.

The exporter names an operator and its output `<module>.<operator>`: a module's output is that of its last operator.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from swin_quant.backends.artifact import Artifact
from swin_quant.backends.onnx_reader.checks import infer_shapes
from swin_quant.backends.onnx_reader.file import OnnxFile, read_model, verified
from swin_quant.base.extras import library
from swin_quant.base.reading import reads

_FLOATS = (1, 10)  # onnx.TensorProto's FLOAT, FLOAT16
# (the file, its copy with more outputs than logits, their names) -> images -> these outputs by name
Start = Callable[[OnnxFile, OnnxFile, list[str]], Callable[[Tensor], Mapping[str, np.ndarray]]]


def find_module_outputs(model: Any, inputs: Sequence[str]) -> dict[str, str]:
    """Module -> the last float tensor inside it that depends on an input; modules in the order in which they end."""
    graph = infer_shapes(model)
    floats = {value.name for value in (*graph.value_info, *graph.output) if value.type.tensor_type.elem_type in _FLOATS}
    alive, found = set(inputs), dict[str, str]()
    moved: dict[str, str] = {}  # output of a Q/DQ pair, which may have been moved before a max pooling -> its node
    for node in model.graph.node:  # not the inferred graph's nodes, where a plugin's functions are inlined
        if not alive.intersection(node.input):
            continue
        alive.update(node.output)
        # A compiled branch gives the sum that its block has
        words = node.name.split(".")[: -2 if node.op_type.endswith(("Branch", "Mlp")) else -1]
        if node.op_type == "DequantizeLinear" and words and words[-1] == "_input_quantizer":
            moved[node.output[0]] = ".".join(words)
        elif node.op_type == "MaxPool" and node.input[0] in moved:
            found[moved[node.input[0]]] = node.output[0]  # in the trained model the node saw the pooled values
            continue
        if not words or node.output[0] not in floats:
            continue
        for length in range(1, len(words) + 1):
            module = ".".join(words[:length])
            found.pop(module, None)  # put in anew, behind the modules that ended before
            found[module] = node.output[0]
    return found


@reads("ONNX file", lambda artifact, start: artifact.file)
def inside(artifact: Artifact, start: Start) -> Callable[[Tensor], dict[str, Tensor]]:
    """A function from images [B, 3, S, S] to the output of each module, float32, by its name.

    `start` loads a temporary copy of the file in which every module's output is a graph output; fusions stop at them.
    """
    onnx = library("onnx", "onnx")
    file = verified(artifact)
    model = read_model(file.path)
    tensors = find_module_outputs(model, file.input_names)
    names = list(dict.fromkeys(tensors.values()))
    if any(part.stat().st_size for part in file.parts):
        onnx.load_external_data_for_model(model, str(file.path.parent))
    held = {value.name for value in model.graph.output}
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in held)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, file.path.name)
        copy.write_bytes(model.SerializeToString())
        run = start(file, replace(file, path=copy, parts=()), names)

    def compute_outputs(images: Tensor) -> dict[str, Tensor]:
        found = run(images)
        outputs = {module: torch.from_numpy(found[name]).float() for module, name in tensors.items()}
        batch = file.batch or len(images)  # a fixed batch was filled up with zeros
        return {name: x[: len(x) * len(images) // batch] if x.dim() else x for name, x in outputs.items()}

    return compute_outputs
