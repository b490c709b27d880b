"""A small attention network written twice: as an ONNX graph, float or with Q/DQ, and in NumPy; and micro Swins."""

from copy import deepcopy
from dataclasses import dataclass

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

    def __post_init__(self):
        random = np.random.default_rng(0)
        tokens = 3 * PATCH**2
        shapes = {"fc1": (tokens, HIDDEN), "fc2": (HIDDEN, DIM), "head": (DIM, CLASSES)}
        self.weights = {name: random.standard_normal(shape) / shape[0] ** 0.5 for name, shape in shapes.items()}
        self.biases = {name: random.standard_normal(shape[1]) for name, shape in shapes.items()}

    def steps(self, name):
        """The scale of each column of a weight."""
        return (np.abs(self.weights[name]).max(0) / LARGEST).astype(self.dtype)

    def __call__(self, images):
        """The logits by NumPy, in float64."""
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

    def proto(self):
        """onnx.ModelProto."""
        from drafts import Draft

        d = Draft(self.dtype)

        def linear(name, x):
            how = {"steps": self.steps(name), "scale": SCALES[name]} if self.int8 else {}
            x = d.linear(x, name, self.weights[name], **how)
            return d.add("Add", [x, d.floats(f"{name}.bias", self.biases[name])], f"{name}.Add")

        x = d.add("Reshape", ["images", d.const("shape", np.array([0, -1, 3 * PATCH**2]))], "tokens")
        x = linear("fc2", d.add("Relu", [linear("fc1", x)], "relu"))
        q, k = x, d.add("Transpose", [x], "k.T", perm=[0, 2, 1])
        if self.int8:
            q, k = (d.pair(part, name, scale=SCALES[name]) for name, part in (("q", q), ("k", k)))
        shares = d.add("Softmax", [d.add("MatMul", [q, k], "attn.qk")], "softmax", axis=-1)
        x = d.add("MatMul", [shares, x], "attn.av")
        axes = ([d.const("axes", np.array([1]))], {}) if self.opset >= 18 else ([], {"axes": [1]})
        x = d.add("ReduceMean", [x, *axes[0]], "mean", keepdims=0, **axes[1])
        d.add("MatMul", [x, d.floats("head.weight", self.weights["head"])], "head", ["logits"])
        sides = [3, self.side, self.side]
        return d.model({"images": [self.batch, *sides]}, {"logits": [self.batch, CLASSES]}, self.opset)


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
