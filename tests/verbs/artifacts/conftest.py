"""A calibrated micro model and two exports of it: FasterTransformer's weights and an int8 ONNX file.

Beside them a hand-made ONNX classifier with logits known by arithmetic: the mean of each channel times a matrix.
"""

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from commands import command
from PIL import Image

from swin_quant.backends.artifact import finish_artifact
from swin_quant.cards.card import RunCard
from swin_quant.data.preprocess import IMAGENET_MEAN, IMAGENET_STD


@dataclass(frozen=True)
class Exports:
    """Files of one calibrated checkpoint; `onnx` and `ft` are in folders below it."""

    checkpoint: Path
    onnx: Path
    ft: Path
    config: Path

    def within(self, folder: Path) -> "Exports":
        """The same files in a copy of the folder."""
        root = self.checkpoint.parent
        return Exports(*(folder / path.relative_to(root) for path in vars(self).values()))


@pytest.fixture(scope="session")
def _exports(calibrated_32) -> Exports:
    folder = calibrated_32.parent
    command("export", calibrated_32, "--for", "fastertransformer", "--output", folder / "ft", "--quiet")
    command("export", calibrated_32, "--for", "onnx", "--policy", "qdq", "--output", folder / "onnx", "--quiet")
    (ft,), (onnx,) = (folder / "ft").glob("*.safetensors"), (folder / "onnx").glob("*.onnx")
    return Exports(calibrated_32, onnx, ft, folder / "micro.yaml")


@pytest.fixture
def exports(_exports, tmp_path) -> Exports:
    """A copy of them, which a test may add to and damage."""
    return _exports.within(Path(shutil.copytree(_exports.checkpoint.parent, tmp_path / "exports")))


MATRIX = np.array([[3.0, -1.0, 0.5], [-2.0, 1.0, 0.0], [0.0, 2.0, -1.0]], dtype=np.float32)  # [channel, class]
BIAS = np.array([0.1, 0.0, -0.2], dtype=np.float32)


@pytest.fixture(scope="session")
def arithmetic():
    """arithmetic(file) -> the logits, float64 [3], of the hand-made classifier for a 32 x 32 picture."""

    def logits(file):
        pixels = (np.asarray(Image.open(file).convert("RGB")) / 255 - IMAGENET_MEAN) / IMAGENET_STD
        return pixels.mean((0, 1)) @ MATRIX + BIAS

    return logits


@pytest.fixture(scope="session")
def _hand_made(calibrated_32, tmp_path_factory) -> Path:
    from onnx import TensorProto, checker, helper, numpy_helper, save

    card = RunCard.read(calibrated_32.with_suffix(".json"))
    nodes = [
        helper.make_node("GlobalAveragePool", ["images"], ["mean"]),
        helper.make_node("Flatten", ["mean"], ["flat"]),
        helper.make_node("Gemm", ["flat", "matrix", "bias"], ["logits"]),
    ]
    images = helper.make_tensor_value_info("images", TensorProto.FLOAT, ["batch", 3, 32, 32])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 3])
    weights = [numpy_helper.from_array(MATRIX, "matrix"), numpy_helper.from_array(BIAS, "bias")]
    graph = helper.make_graph(nodes, "means", [images], [logits], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    model.metadata_props.add(key="swin_quant.labels", value=json.dumps(["cat", "dog", "fox"]))
    checker.check_model(model)
    file = tmp_path_factory.mktemp("hand") / "means.onnx"
    save(model, file)
    finish_artifact(file, RunCard("the means", card.config, card.preprocess), "onnx", "float32", {})
    return file


@pytest.fixture
def hand_made(_hand_made, tmp_path) -> Path:
    """means.onnx, for any batch, with class names in the file, and its card, which has the micro model's config and
    names no checkpoint: a copy, which a test may add to and damage."""
    return Path(shutil.copytree(_hand_made.parent, tmp_path / "hand")) / _hand_made.name


@pytest.fixture(scope="session")
def exported(_hand_made) -> Path:
    return _hand_made


@pytest.fixture(scope="session")
def packaged(tmp_path_factory, exported) -> Path:
    folder = tmp_path_factory.mktemp("packaged") / "package"
    command("package", exported, "--output", folder, "--quiet")
    return folder


@pytest.fixture
def remade(exported, tmp_path):
    """remade(model, precision, options, FIELD=value ...) -> an artifact like `exported`, with another model or card."""

    def make(model=None, precision="float32", options=None, **card):
        file = tmp_path / "means.onnx"
        onnx.save(model or onnx.load(exported), file)
        card = replace(RunCard.read(exported.with_suffix(".json")), **card)
        return finish_artifact(file, card, "onnx", precision, options or {})

    return make
