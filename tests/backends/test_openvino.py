"""OpenVINO runs a file as written, in the float type asked for, and reports which operators are int8."""

import gc
import signal

import numpy as np
import onnx
import pytest
import torch

from swin_quant.backends import engine_loader
from swin_quant.backends.openvino import engine as openvino
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.score.options import EngineOptions


@pytest.fixture(scope="module")
def load():
    return engine_loader("openvino")


@pytest.fixture
def images():
    return torch.randn(3, 3, 8, 8)


@pytest.mark.slow
def test_a_signal_after_the_last_engine_has_gone_is_heard(load, small_net, artifact_of, images):
    """On CPUs with AMX the library makes signals arrive on its own stack, which it used to free with the last
    engine."""
    engine = load(artifact_of(small_net()))
    engine(images)
    del engine
    gc.collect()
    heard = []
    before = signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))
    signal.raise_signal(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, before)
    assert heard == [1]


def test_results_do_not_change_under_the_caller(load, small_net, artifact_of, images):
    engine = load(artifact_of(small_net()), EngineOptions(threads=1))
    first = engine(images)
    kept = first.clone()
    engine(images.flip(0))
    assert torch.equal(first, kept)


def test_bfloat16_is_said_and_is_coarser(load, small_net, artifact_of, images):
    if "bfloat16" not in openvino.float_types():
        pytest.skip("this CPU has no bfloat16, or oneDNN must not use it")
    net = small_net(int8=False)
    artifact = artifact_of(net, "float32")
    engine = load(artifact, EngineOptions(float_type="bfloat16"))
    assert engine.precision == "bfloat16" and set(engine.details["gemms"].values()) == {"bfloat16"}
    assert 1e-4 < np.abs(engine(images).numpy() - net(images)).max() < 0.5
    assert load(artifact_of(small_net()), EngineOptions(float_type="bfloat16")).precision == "int8+bfloat16"


def test_compiled_graphs_are_kept_for_the_latest_sizes_of_batch_only(load, small_net, artifact_of, images):
    net = small_net()
    engine = load(artifact_of(net), EngineOptions(threads=1))
    graphs = engine.run.__self__
    for batch in (3, 1, 2, 1):
        assert np.abs(engine(images[:batch]).numpy() - net(images[:batch])).max() < 1e-3
    assert list(graphs.compiled) == [(2, 3, 8, 8), (1, 3, 8, 8)]


def test_a_type_that_the_cpu_has_not_is_refused(load, small_net, artifact_of, monkeypatch):
    monkeypatch.setattr(openvino, "float_types", lambda: ["float32"])
    with pytest.raises(UsageError, match="this CPU does not run bfloat16: choose float32"):
        load(artifact_of(small_net()), EngineOptions(float_type="bfloat16"))


class Marked:
    """The softmax of the means of pictures, with a 5 in the column that the largest value names."""

    def proto(self):
        floats, whole = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64
        nodes = [
            onnx.helper.make_node("ReduceMax", ["images"], ["most"], keepdims=0),
            onnx.helper.make_node("Cast", ["most"], ["column"], to=whole),
            onnx.helper.make_node("Reshape", ["column", "one"], ["place"]),
            onnx.helper.make_node("ReduceMean", ["images", "axes"], ["means"], keepdims=0),
            onnx.helper.make_node("ScatterElements", ["means", "place", "five"], ["marked"], axis=1, name="mark"),
            onnx.helper.make_node("Softmax", ["marked"], ["logits"], axis=-1),
        ]
        ends = [
            onnx.helper.make_tensor_value_info("images", floats, ["batch", 3, 8, 8]),
            onnx.helper.make_tensor_value_info("logits", floats, ["batch", 3]),
        ]
        held = {"one": np.array([1, 1]), "axes": np.array([2, 3]), "five": np.array([[5]], np.float32)}
        tensors = [onnx.numpy_helper.from_array(value, name) for name, value in held.items()]
        graph = onnx.helper.make_graph(nodes, "marked", ends[:1], ends[1:], tensors)
        return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_node_that_fails_is_heard_with_any_number_of_threads(load, artifact_of, threads):
    """With one thread OpenVINO 2026.4 drops the exception, and the outputs are those of the batch before."""
    engine = load(artifact_of(Marked(), "float32"), EngineOptions(threads=threads))
    images = torch.rand(2, 3, 8, 8)
    images[0, 0, 0, 0] = 2.5
    wanted = images.mean((2, 3))
    wanted[0, 2] = 5
    torch.testing.assert_close(engine(images), wanted.softmax(-1))
    images[0, 0, 0, 0] = 700.5
    with pytest.raises(
        SwinQuantError, match="openvino cannot run it: .*(indices|node failed, its output logits)"
    ) as caught:
        engine(images)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [0xA5, 0x5A])
def test_an_output_that_looks_unwritten_is_not_taken_for_it(load, artifact_of, value):
    same = np.full(4, value, np.uint8).view(np.float32)[0]
    engine = load(artifact_of(Copied(), "float32"), EngineOptions(threads=1))
    images = torch.full((2, 3, 8, 8), float(same))
    assert torch.equal(engine(images), images[:, :, 0, 0])


class Copied:
    """The first pixel of each picture."""

    def proto(self):
        ends = [
            onnx.helper.make_tensor_value_info("images", onnx.TensorProto.FLOAT, ["batch", 3, 8, 8]),
            onnx.helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, ["batch", 3]),
        ]
        index = onnx.numpy_helper.from_array(np.array(0), "first")
        nodes = [onnx.helper.make_node("Gather", ["images", "first"], ["rows"], axis=2)]
        nodes += [onnx.helper.make_node("Gather", ["rows", "first"], ["logits"], axis=2)]
        graph = onnx.helper.make_graph(nodes, "copied", ends[:1], ends[1:], [index])
        return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10)
