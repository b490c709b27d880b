"""Replaced operators and plugins in exported files: they are in the graph, and the file computes what it did."""

import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from swin_quant.backends.onnx.export import OnnxOptions, export
from swin_quant.backends.onnx_file import open_onnx
from swin_quant.backends.openvino import engine as openvino_engine
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.engines.options import EngineOptions

SPECS = (
    "roll=swin_quant::Roll",
    "relu=swin_quant::Relu",
    "layer_norm=my.domain::Norm",
    "window_partition=my.domain::Windows",
)
IMAGES = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="session")
def plain(exported):
    """The file as it is exported otherwise."""
    return exported("swinv2", precision="float")


@pytest.fixture(scope="session")
def plugged(exported):
    return exported("swinv2", precision="float", plugin=SPECS)


def operators(artifact):
    return {(node.domain, node.op_type) for node in onnx.load(artifact.file).graph.node}


@pytest.mark.slow
def test_plugins_are_nodes_of_their_domain_and_the_file_runs(plain, plugged, run):
    model = onnx.load(plugged.file)
    assert {("swin_quant", "Roll"), ("my.domain", "Norm"), ("my.domain", "Windows")} <= operators(plugged)
    assert not {("", "LayerNormalization")} & operators(plugged)
    (roll, *_) = [node for node in model.graph.node if node.op_type == "Roll"]
    attributes = {one.name: onnx.helper.get_attribute_value(one) for one in roll.attribute}
    assert attributes["dims"] == [1, 2] and attributes["shifts"] == [-2, -2]
    found, wanted = run(plugged.file, IMAGES)["logits"], run(plain.file, IMAGES)["logits"]
    np.testing.assert_allclose(found, wanted, atol=2e-5)
    checked = open_onnx(plugged.file)
    assert checked.functions and checked.batch is None
    assert list(plugged.record["options"]["plugin"]) == list(SPECS)


@pytest.mark.slow
def test_int8_beside_plugins(exported, run):
    """What is quantized stays so: the same scales, the same answers but for sums in another order."""
    plain, plugged = exported("swin"), exported("swin", plugin=SPECS[:1])
    kinds = [node.op_type for node in onnx.load(plugged.file).graph.node]
    assert kinds.count("Roll") == 2 and "QuantizeLinear" in kinds
    assert np.abs(run(plugged.file, IMAGES)["logits"] - run(plain.file, IMAGES)["logits"]).mean() < 0.02


@pytest.mark.slow
def test_replacements_leave_their_operator_out_of_the_graph(plain, exported, run):
    replaced = exported("swinv2", precision="float", replace=("roll", "qkv_split", "gather", "reshape"))
    model = onnx.load(replaced.file)
    kinds = {node.op_type for node in model.graph.node}
    assert {"Slice", "Concat"} <= kinds and not {"GatherND", "Squeeze", "Unsqueeze"} & kinds and not model.functions
    np.testing.assert_allclose(run(replaced.file, IMAGES)["logits"], run(plain.file, IMAGES)["logits"], atol=2e-5)


@pytest.mark.parametrize(
    "options, said",
    [
        ({"plugin": ("roll:my.Roll",)}, "must be OPERATOR=DOMAIN::NAME"),
        ({"plugin": ("gelu=my::Gelu",)}, "'gelu': there are roll, relu, layer_norm, window_partition"),
        ({"plugin": ("roll=my::Op", "relu=my::Op")}, "roll is my::Op already"),
        ({"plugin": ("roll=my::A", "roll=my::B")}, "is named twice"),
        ({"plugin": ("roll=ai.onnx::Roll",)}, "the domain ai.onnx is not yours"),
        ({"plugin": ("roll=my::Roll",), "replace": ("roll",)}, "is replaced as well"),
        ({"replace": ("rol",)}, "there are pool1d"),
    ],
)
def test_names_that_are_malformed_or_clash(options, said):
    with pytest.raises(UsageError, match=said):
        OnnxOptions(**options)


@pytest.mark.slow
def test_a_plugin_without_a_node(calibrated, tmp_path):
    model, card = calibrated("swin")
    with pytest.raises(UsageError, match="plugin relu: the model calls none of it"):
        export(model, card, tmp_path, OnnxOptions(precision="float", plugin=("relu=my::Relu",)))
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    """The compiled plugins, by g++ alone: CMake's own checks would take as long as the compilation."""
    pytest.importorskip("openvino")
    if not shutil.which("g++"):
        pytest.skip("no compiler here (g++)")
    script = Path(__file__).parents[3] / "plugins" / "openvino" / "build.sh"
    folder = tmp_path_factory.mktemp("plugins")
    environment = os.environ | {"PYTHON": __import__("sys").executable, "NO_CMAKE": "1", "CXX": "g++"}
    subprocess.run([script, folder], check=True, env=environment, capture_output=True, timeout=600)
    return folder / "libswin_quant_plugins.so"


@pytest.mark.slow
def test_compiled_plugins_of_openvino(exported, library, run):
    """The four steps: declared, computed, registered, used; and the file without the library, by its functions."""
    artifact = exported("swinv2", precision="float", plugin=SPECS[:2])
    wanted = run(artifact.file, IMAGES)["logits"]
    with_library = openvino_engine.load(artifact, EngineOptions(threads=1, extensions=(str(library),)))
    np.testing.assert_allclose(with_library(IMAGES).numpy(), wanted, atol=2e-5)
    core = openvino_engine._core(os.getpid(), (str(library),))
    kinds = {
        (op.get_type_name(), op.get_type_info().version_id) for op in core.read_model(str(artifact.file)).get_ops()
    }
    assert {("Roll", "swin_quant"), ("Relu", "swin_quant")} <= kinds
    without = openvino_engine.load(artifact, EngineOptions(threads=1))
    np.testing.assert_allclose(without(IMAGES).numpy(), wanted, atol=2e-5)


def test_a_library_that_is_none(plugged, tmp_path):
    pytest.importorskip("openvino")
    file = tmp_path / "libnone.so"
    with pytest.raises(UsageError, match="libnone.so: no such file"):
        openvino_engine.load(plugged, EngineOptions(extensions=(str(file),)))
    file.write_bytes(b"no library")
    with pytest.raises(SwinQuantError, match="libnone.so: openvino cannot load it as an extension"):
        openvino_engine.load(plugged, EngineOptions(extensions=(str(file),)))
