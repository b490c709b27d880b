"""ONNX Runtime runs a file as written, in the types that it reports."""

import sys

import numpy as np
import pytest
import torch

from swin_quant.backends import engine_loader
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.score.options import EngineOptions

INT8 = {"fc1.MatMul": "int8", "fc2.MatMul": "int8", "attn.qk": "int8", "attn.av": "float32", "head": "float32"}


@pytest.fixture(scope="module")
def load():
    return engine_loader("onnxruntime")


@pytest.fixture
def images():
    return torch.randn(3, 3, 8, 8)


@pytest.mark.parametrize("optimize", [True, False])
@pytest.mark.parametrize("int8", [True, False])
def test_the_result_is_that_of_the_formulas(load, small_net, artifact_of, images, int8, optimize):
    net = small_net(int8=int8)
    engine = load(artifact_of(net, "int8" if int8 else "float32"), EngineOptions(threads=1, optimize=optimize))
    logits = engine(images)
    assert logits.dtype == torch.float32 and logits.shape == (3, 5)
    assert np.abs(logits.numpy() - net(images)).max() < 1e-4


@pytest.mark.parametrize("batch", ["batch", 4], ids=["any batch", "fixed batch"])
def test_it_reports_which_products_run_in_int8(load, small_net, artifact_of, batch):
    engine = load(artifact_of(small_net(batch=batch)), EngineOptions(threads=1))
    details = dict(engine.details)
    assert details["gemms"] == INT8
    assert (details["int8_gemms"], details["all_gemms"]) == (3, 5)
    assert details["library"].startswith("onnxruntime ") and details["opset"] == 20
    assert (details["device"], details["threads"], details["float_type"]) == ("cpu", 1, "float32")


def test_without_optimization_nothing_runs_in_int8(load, small_net, artifact_of):
    assert load(artifact_of(small_net()), EngineOptions(optimize=False)).details["int8_gemms"] == 0


def test_precision_and_policy_are_those_of_the_export(load, small_net, artifact_of):
    engine = load(artifact_of(small_net()), EngineOptions())
    assert (engine.name, engine.precision, engine.policy, engine.max_batch) == ("onnxruntime", "int8", "qdq", None)
    engine = load(artifact_of(small_net(int8=False), "float32"), EngineOptions())
    assert (engine.precision, engine.policy) == ("float32", None)


def test_a_fixed_batch_takes_fewer_pictures_and_not_more(load, small_net, artifact_of, images):
    net = small_net(batch=4)
    engine = load(artifact_of(net), EngineOptions())
    assert np.abs(engine(images).numpy() - net(images)).max() < 1e-4
    with pytest.raises(UsageError, match="a batch of 6 is above its limit of 4 pictures"):
        engine(torch.cat([images, images]))


def test_a_float16_file_is_given_float16(load, small_net, artifact_of, images):
    net = small_net(int8=False, dtype=np.float16)
    assert np.abs(load(artifact_of(net, "float16"), EngineOptions())(images).numpy() - net(images)).max() < 0.05


def test_pictures_of_another_size_are_refused(load, small_net, artifact_of):
    with pytest.raises(UsageError, match="takes pictures of 3x8x8, not 3x9x9"):
        load(artifact_of(small_net()), EngineOptions())(torch.zeros(1, 3, 9, 9))


@pytest.mark.parametrize(
    "options, text",
    [({"float_type": "bfloat16"}, "float32 on a CPU, not in bfloat16"), ({"device": "cuda"}, "not on cuda")],
)
def test_what_it_has_not_is_refused(load, small_net, artifact_of, options, text):
    with pytest.raises(UsageError, match=text):
        load(artifact_of(small_net()), EngineOptions(**options))


def test_what_the_runtime_refuses_is_one_line(load, small_net, artifact_of, tmp_path):
    net = small_net(int8=False)
    artifact = artifact_of(net, "float32")
    import onnx

    model = onnx.load(artifact.file)
    model.graph.node[0].op_type = "FutureOperator"
    artifact.file.write_bytes(model.SerializeToString())
    with pytest.raises(SwinQuantError, match="onnxruntime cannot load it: ") as caught:
        load(artifact, EngineOptions())
    assert "\n" not in str(caught.value)


def test_a_missing_library_names_the_extra(load, small_net, artifact_of, monkeypatch):
    artifact = artifact_of(small_net())
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(UsageError, match=r"pip install .* -e '\.\[onnx\]'"):
        load(artifact, EngineOptions())
