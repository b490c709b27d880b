"""OpenVINO runs a file as written, in the float type asked for, and reports which operators are int8."""

import gc
import signal
import sys

import numpy as np
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


@pytest.mark.parametrize("int8", [True, False])
def test_the_result_is_that_of_the_formulas(load, small_net, artifact_of, images, int8):
    net = small_net(int8=int8)
    engine = load(artifact_of(net, "int8" if int8 else "float32"), EngineOptions(threads=1))
    assert np.abs(engine(images).numpy() - net(images)).max() < 1e-3


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


@pytest.mark.parametrize("batch", ["batch", 4], ids=["any batch", "fixed batch"])
def test_it_reports_which_products_run_in_int8(load, small_net, artifact_of, images, batch):
    engine = load(artifact_of(small_net(batch=batch)), EngineOptions(threads=1))
    engine(images)
    details = dict(engine.details)
    assert (details["int8_gemms"], details["all_gemms"]) == (3, 5)
    eight = {name for name, kind in details["gemms"].items() if kind == "int8"}
    assert eight == {"fc1.MatMul", "fc2.MatMul", "attn.qk"}
    assert details["library"].startswith("openvino ") and (details["threads"], details["float_type"]) == (1, "float32")


def test_a_float_file_runs_nothing_in_int8(load, small_net, artifact_of):
    details = load(artifact_of(small_net(int8=False), "float32"), EngineOptions(threads=1)).details
    assert set(details["gemms"].values()) == {"float32"} and details["all_gemms"] == 5


def test_under_a_limit_without_half_types_there_is_float32_alone(monkeypatch):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert openvino.float_types() == ["float32"]


def test_bfloat16_is_said_and_is_coarser(load, small_net, artifact_of, images):
    if "bfloat16" not in openvino.float_types():
        pytest.skip("this CPU has no bfloat16, or oneDNN must not use it")
    net = small_net(int8=False)
    artifact = artifact_of(net, "float32")
    engine = load(artifact, EngineOptions(float_type="bfloat16"))
    assert engine.precision == "bfloat16" and set(engine.details["gemms"].values()) == {"bfloat16"}
    assert 1e-4 < np.abs(engine(images).numpy() - net(images)).max() < 0.5
    assert load(artifact_of(small_net()), EngineOptions(float_type="bfloat16")).precision == "int8+bfloat16"


def test_float32_is_the_default_whatever_the_library_prefers(load, small_net, artifact_of):
    engine = load(artifact_of(small_net(int8=False), "float32"), EngineOptions())
    assert engine.precision == "float32" and engine.details["float_type"] == "float32"


def test_compiled_graphs_are_kept_for_the_latest_sizes_of_batch_only(load, small_net, artifact_of, images):
    net = small_net()
    engine = load(artifact_of(net), EngineOptions(threads=1))
    graphs = engine.run.args[0]
    for batch in (3, 1, 2, 1):
        assert np.abs(engine(images[:batch]).numpy() - net(images[:batch])).max() < 1e-3
    assert list(graphs.compiled) == [(2, 3, 8, 8), (1, 3, 8, 8)]


def test_a_fixed_batch_takes_fewer_pictures_and_not_more(load, small_net, artifact_of, images):
    net = small_net(batch=4)
    engine = load(artifact_of(net), EngineOptions())
    assert np.abs(engine(images).numpy() - net(images)).max() < 1e-3
    with pytest.raises(UsageError, match="a batch of 6 is above its limit of 4 pictures"):
        engine(torch.cat([images, images]))


@pytest.mark.parametrize(
    "options, text", [({"optimize": False}, "always rewrites"), ({"device": "cuda"}, "not on cuda")]
)
def test_what_it_has_not_is_refused(load, small_net, artifact_of, options, text):
    with pytest.raises(UsageError, match=text):
        load(artifact_of(small_net()), EngineOptions(**options))


def test_a_type_that_the_cpu_has_not_is_refused(load, small_net, artifact_of, monkeypatch):
    monkeypatch.setattr(openvino, "float_types", lambda: ["float32"])
    with pytest.raises(UsageError, match="this CPU does not run bfloat16: choose float32"):
        load(artifact_of(small_net()), EngineOptions(float_type="bfloat16"))


def test_what_the_library_refuses_is_one_line(load, small_net, artifact_of):
    import onnx
    from onnx import TensorProto, helper

    artifact = artifact_of(small_net(int8=False), "float32")
    model = onnx.load(artifact.file)
    model.graph.node[-1].output[0] = "before"
    model.graph.initializer.append(helper.make_tensor("square", TensorProto.FLOAT, [1, 1], [1.0]))
    model.graph.node.append(helper.make_node("Det", ["square"], ["one"]))  # an operator that it lacks
    model.graph.node.append(helper.make_node("Add", ["before", "one"], ["logits"]))
    artifact.file.write_bytes(model.SerializeToString())
    with pytest.raises(SwinQuantError, match="openvino cannot load it: ") as caught:
        load(artifact, EngineOptions())
    assert "\n" not in str(caught.value) and "Det" in str(caught.value)


def test_a_missing_library_names_the_extra(load, small_net, artifact_of, monkeypatch):
    artifact = artifact_of(small_net())
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(UsageError, match=r"pip install .* -e '\.\[openvino\]'"):
        load(artifact, EngineOptions())
