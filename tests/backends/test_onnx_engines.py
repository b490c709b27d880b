"""ONNX Runtime and OpenVINO run a file as written, in the types that they report."""

import numpy as np
import onnx
import pytest
import torch

from swin_quant.backends import engine_loader
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.score.options import EngineOptions

LIMITS = {"onnxruntime": 1e-4, "openvino": 1e-3}  # the largest difference of a logit
ONE_THREAD = EngineOptions(threads=1)


@pytest.fixture(params=LIMITS)
def name(request):
    return request.param


@pytest.fixture
def load(name):
    return engine_loader(name)


@pytest.fixture
def images():
    return torch.randn(3, 3, 8, 8)


@pytest.mark.parametrize(
    "name, options",
    [("onnxruntime", ONE_THREAD), ("onnxruntime", EngineOptions(threads=1, optimize=False)), ("openvino", ONE_THREAD)],
    indirect=["name"],
)
@pytest.mark.parametrize("int8", [True, False])
def test_the_result_is_that_of_the_formulas(load, name, options, small_net, artifact_of, images, int8):
    net = small_net(int8=int8)
    logits = load(artifact_of(net, "int8" if int8 else "float32"), options)(images)
    assert logits.dtype == torch.float32 and logits.shape == (3, 5)
    assert np.abs(logits.numpy() - net(images)).max() < LIMITS[name]


@pytest.mark.parametrize("batch", ["batch", 4], ids=["any batch", "fixed batch"])
def test_it_reports_which_products_run_in_int8(load, name, small_net, artifact_of, images, batch):
    engine = load(artifact_of(small_net(batch=batch)), ONE_THREAD)
    engine(images)
    details = dict(engine.details)
    assert (details["int8_gemms"], details["all_gemms"]) == (3, 5)
    eight = {product for product, kind in details["gemms"].items() if kind == "int8"}
    assert eight == {"fc1", "fc2", "attn.qk"}
    assert details["library"].startswith(f"{name} ") and details["opset"] == 20
    assert (details["threads"], details["float_type"]) == (1, "float32")
    if name == "onnxruntime":
        assert details["device"] == "cpu"
        assert {product: kind for product, kind in details["gemms"].items() if product not in eight} == {
            "attn.av": "float32",
            "head": "float32",
        }


def test_a_fixed_batch_takes_fewer_pictures_and_not_more(load, name, small_net, artifact_of, images):
    net = small_net(batch=4)
    engine = load(artifact_of(net), EngineOptions())
    assert np.abs(engine(images).numpy() - net(images)).max() < LIMITS[name]
    with pytest.raises(UsageError, match="a batch of 6 is above its limit of 4 pictures"):
        engine(torch.cat([images, images]))


@pytest.mark.parametrize(
    "name, options, text",
    [
        ("onnxruntime", {"float_type": "bfloat16"}, "float32 on a CPU, not in bfloat16"),
        ("onnxruntime", {"device": "cuda"}, "not on cuda"),
        ("openvino", {"optimize": False}, "always rewrites"),
        ("openvino", {"device": "cuda"}, "not on cuda"),
    ],
    indirect=["name"],
)
def test_what_it_has_not_is_refused(load, small_net, artifact_of, options, text):
    with pytest.raises(UsageError, match=text):
        load(artifact_of(small_net()), EngineOptions(**options))


def test_what_the_library_refuses_is_one_line(load, name, small_net, artifact_of):
    artifact = artifact_of(small_net(int8=False), "float32")
    model = onnx.load(artifact.file)
    if name == "onnxruntime":
        model.graph.node[0].op_type = lacked = "FutureOperator"
    else:
        lacked = "Det"
        model.graph.node[-1].output[0] = "before"
        model.graph.initializer.append(onnx.helper.make_tensor("square", onnx.TensorProto.FLOAT, [1, 1], [1.0]))
        model.graph.node.append(onnx.helper.make_node(lacked, ["square"], ["one"]))
        model.graph.node.append(onnx.helper.make_node("Add", ["before", "one"], ["logits"]))
    artifact.file.write_bytes(model.SerializeToString())
    with pytest.raises(SwinQuantError, match=f"{name} cannot load it: ") as caught:
        load(artifact, EngineOptions())
    assert "\n" not in str(caught.value) and lacked in str(caught.value)


def test_precision_and_policy_are_those_of_the_export(small_net, artifact_of):
    load = engine_loader("onnxruntime")
    engine = load(artifact_of(small_net()), EngineOptions())
    assert (engine.name, engine.precision, engine.policy, engine.max_batch) == ("onnxruntime", "int8", "qdq", None)
    engine = load(artifact_of(small_net(int8=False), "float32"), EngineOptions())
    assert (engine.precision, engine.policy) == ("float32", None)
    engine = load(artifact_of(small_net()), EngineOptions(optimize=False))
    assert engine.details["int8_gemms"] == 0


def test_a_float16_file_is_given_float16(small_net, artifact_of, images):
    net = small_net(int8=False, dtype=np.float16)
    engine = engine_loader("onnxruntime")(artifact_of(net, "float16"), EngineOptions())
    assert np.abs(engine(images).numpy() - net(images)).max() < 0.05
    with pytest.raises(UsageError, match="takes pictures of 3x8x8, not 3x9x9"):
        engine(torch.zeros(1, 3, 9, 9))
