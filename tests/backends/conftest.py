"""A small attention network written twice: as an ONNX graph, float or with Q/DQ, and in NumPy; and micro Swins."""

from copy import deepcopy
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from swin_quant.backends.artifact import finish_artifact
from swin_quant.cards.card import RunCard
from swin_quant.quant.calibration import calibrate
from swin_quant.quant.policy import apply_policy, load_policy

SIDE, PATCH, DIM, HIDDEN, CLASSES = 8, 2, 8, 16, 5
SCALES = {"fc1": 4 / 127, "fc2": 3 / 127, "q": 5 / 127, "k": 10 / 127}
LARGEST = 63  # the largest level of weights and of k: larger ones saturate on CPUs without VNNI (saturation.py)

# Two stages, windows of 2 on 4 x 4 and 2 x 2 tokens: shifted and plain blocks, a mask and a patch merging.
MICRO = {"IMG_SIZE": 8, "DEPTHS": [2, 1], "NUM_HEADS": [1, 2], "WINDOW_SIZE": 2, "NUM_CLASSES": 5}
MORE = {"swin": {}, "swinv2": {"PRETRAINED_WINDOW_SIZES": [0, 0]}}


def pictures(count, size=8, seed=1):
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="session")
def calibrated(tiny_model):
    """make("swin" | "swinv2", policy, KEY=value ...) -> a random micro model with ranges and a policy applied.

    `policy` is a built-in name, or a policy.
    """
    made = {}

    def make(kind="swin", policy="ft-mode1", **keys):
        which = kind, repr(keys)
        if which not in made:
            model = tiny_model(kind, **(MICRO | MORE[kind] | keys))
            apply_policy(model, load_policy("ft-mode1"))
            calibrate(model, [pictures(8, model.input_shape[1])])
            made[which] = model
        model = deepcopy(made[which])
        apply_policy(model, load_policy(policy) if isinstance(policy, str) else policy)
        return model

    return make


@dataclass
class SmallNet:
    """Tokens of 2 x 2 pixels; fc1, ReLU, fc2; one attention, its q k^T on int8; mean; head. `int8` False: no Q/DQ."""

    int8: bool = True
    opset: int = 20
    batch: int | str = "batch"
    dtype: type = np.float32
    side: int = SIDE
    nodes: list = field(default_factory=list)
    tensors: dict = field(default_factory=dict)

    def __post_init__(self):
        random = np.random.default_rng(0)
        tokens = 3 * PATCH**2
        shapes = {"fc1": (tokens, HIDDEN), "fc2": (HIDDEN, DIM), "head": (DIM, CLASSES)}
        self.weights = {name: random.standard_normal(shape) / shape[0] ** 0.5 for name, shape in shapes.items()}
        self.biases = {name: random.standard_normal(shape[1]) for name, shape in shapes.items()}

    def steps(self, name):
        """The scale of each column of a weight."""
        return (np.abs(self.weights[name]).max(0) / LARGEST).astype(self.dtype)

    # numpy, in float64

    def __call__(self, images):
        tokens = np.asarray(images, np.float64).reshape(len(images), -1, 3 * PATCH**2)
        x = self._linear("fc2", np.maximum(self._linear("fc1", tokens), 0))
        attention = np.exp(self._on_grid("q", x) @ self._on_grid("k", x).swapaxes(1, 2))
        x = attention / attention.sum(-1, keepdims=True) @ x
        return x.mean(1) @ self.weights["head"]

    def _on_grid(self, name, x):
        return np.clip(np.round(x / SCALES[name]), -128, 127) * SCALES[name] if self.int8 else x

    def _linear(self, name, x):
        weight, steps = self.weights[name], self.steps(name).astype(np.float64)
        weight = np.round(weight / steps) * steps if self.int8 else weight
        return self._on_grid(name, x) @ weight + self.biases[name]

    # the graph

    def proto(self):
        """onnx.ModelProto."""
        import onnx
        from onnx import helper

        self.nodes, self.tensors = [], {}
        tokens = self._node("Reshape", "images", self._tensor("shape", np.array([0, -1, 3 * PATCH**2])), out="tokens")
        x = self._node("Relu", self._graph_linear("fc1", tokens))
        x = self._graph_linear("fc2", x)
        q, k = self._pair("q", x), self._pair("k", self._node("Transpose", x, perm=[0, 2, 1]))
        attention = self._node("Softmax", self._node("MatMul", q, k, name="attn.qk"), axis=-1)
        x = self._node("MatMul", attention, x, name="attn.av")
        x = self._node("ReduceMean", x, *self._mean_axes(), keepdims=0, **self._mean_attributes())
        self._node("MatMul", x, self._tensor("head.weight", self.weights["head"]), name="head", out="logits")
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(self.dtype))
        graph = helper.make_graph(
            self.nodes,
            "small",
            [helper.make_tensor_value_info("images", kind, [self.batch, 3, self.side, self.side])],
            [helper.make_tensor_value_info("logits", kind, [self.batch, CLASSES])],
            [onnx.numpy_helper.from_array(value, name) for name, value in self.tensors.items()],
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=10)

    def _mean_axes(self):
        return [self._tensor("axes", np.array([1]))] if self.opset >= 18 else []

    def _mean_attributes(self):
        return {} if self.opset >= 18 else {"axes": [1]}

    def _tensor(self, name, value):
        kept = np.int8 if value.dtype == np.int8 else np.int64 if value.dtype == np.int64 else self.dtype
        self.tensors[name] = np.asarray(value, kept)
        return name

    def _node(self, kind, *inputs, out=None, name=None, **attributes):
        from onnx import helper

        out = out or f"{name or kind}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [out], name=name or out, **attributes))
        return out

    def _pair(self, name, x):
        if not self.int8:
            return x
        scale = self._tensor(f"{name}.scale", np.array(SCALES[name]))
        zero = self._tensor(f"{name}.zero", np.array(0, np.int8))
        quantized = self._node("QuantizeLinear", x, scale, zero, name=f"{name}._quantizer.Q")
        return self._node("DequantizeLinear", quantized, scale, zero, name=f"{name}._quantizer.DQ")

    def _graph_linear(self, name, x):
        weight = self.weights[name]
        if self.int8:
            steps = self.steps(name)
            stored = self._tensor(f"{name}.weight", np.round(weight / steps).astype(np.int8))
            scale = self._tensor(f"{name}.weight.scale", steps)
            zero = self._tensor(f"{name}.weight.zero", np.zeros(len(steps), np.int8))
            weight = self._node("DequantizeLinear", stored, scale, zero, axis=1, name=f"{name}._weight_quantizer.DQ")
        else:
            weight = self._tensor(f"{name}.weight", weight)
        x = self._node("MatMul", self._pair(name, x), weight, name=f"{name}.MatMul")
        return self._node("Add", x, self._tensor(f"{name}.bias", self.biases[name]), name=f"{name}.Add")


@pytest.fixture(scope="session")
def small_net():
    """small_net(int8=True, batch="batch", ...) -> SmallNet."""
    return SmallNet


@pytest.fixture
def write_onnx(tmp_path):
    """write_onnx(proto or bytes, name="x.onnx") -> its path."""

    def write(content, name="x.onnx"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.SerializeToString())
        return path

    return write


@pytest.fixture
def artifact_of(write_onnx):
    """artifact_of(net, precision="int8", size=8, options={}) -> Artifact of its graph, with a run card."""

    def make(net, precision="int8", size=SIDE, name="x.onnx", options={}):  # noqa: B006
        card = RunCard("small", {}, {"size": size}, policy={"name": "qdq"} if precision == "int8" else None)
        return finish_artifact(write_onnx(net.proto(), name), card, "onnx", precision, options)

    return make
