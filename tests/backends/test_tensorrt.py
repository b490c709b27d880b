"""TensorRT: engines built, read back and run, by a stand-in with the documented API that computes with ONNX Runtime."""

import importlib
import json
import re
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from drafts import Draft
from onnx import TensorProto, helper, numpy_helper

from swin_quant.backends import engine_loader
from swin_quant.backends.artifact import finish_artifact
from swin_quant.backends.onnx_reader.products import inspect_model
from swin_quant.backends.open_artifact import open_artifact
from swin_quant.backends.tensorrt import host
from swin_quant.backends.tensorrt.build import BuildOptions, build, make_plan
from swin_quant.backends.tensorrt.engine import load
from swin_quant.backends.tensorrt.layers import read_layers
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.cards.card import RunCard
from swin_quant.score.options import EngineOptions

GPU = host.Gpu(torch.device("cpu"), "Stand-in GPU", "8.6")
ON_GPU = EngineOptions(device="cuda")


@pytest.fixture(params=["10.13.3", "11.4.1"])
def trt(request, monkeypatch):
    """The stand-in as `tensorrt`, in either version; its GPU memory is the CPU's."""
    return _stand_in(monkeypatch, request.param)


@pytest.fixture
def trt10(monkeypatch):
    return _stand_in(monkeypatch, "10.13.3")


def _stand_in(monkeypatch, version):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "standin")
    monkeypatch.delitem(sys.modules, "tensorrt", raising=False)
    module = importlib.import_module("tensorrt")
    monkeypatch.setitem(sys.modules, "tensorrt", module)  # undone after the test
    module.become(version)
    monkeypatch.setattr(host, "find_gpu", lambda: GPU)
    stream = type("Stream", (), {"cuda_stream": 4711})
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    return module


def graph(body=np.float16, quantized=True, batch="batch"):
    """A classifier of [batch, 3, 4, 4]: two int8 products around a float `body`; float32 in and out."""
    random, d = np.random.default_rng(0), Draft(body)

    def product(x, name, rows, columns):
        weight = random.standard_normal((rows, columns)) / rows**0.5
        how = {"steps": np.abs(weight).max(0) / 127, "scale": 3 / 127} if quantized else {}
        return d.linear(x, f"layers.0.blocks.0.mlp.{name}", weight, **how)

    x = d.add("Reshape", ["images", d.const("shape", np.array([0, 48]))], "flatten")
    x = product(d.add("Cast", [x], "cast", to=helper.np_dtype_to_tensor_dtype(np.dtype(body))), "fc1", 48, 16)
    x = product(d.add("Relu", [x], "act"), "fc2", 16, 5)
    d.add("Cast", [x], "out", ["logits"], to=TensorProto.FLOAT)
    model = d.model({"images": [batch, 3, 4, 4]}, {"logits": [batch, 5]}, body=np.float32)
    onnx.checker.check_model(model, full_check=True)
    return model


@pytest.fixture
def exported(tmp_path):
    """exported(graph(...)) -> a finished ONNX artifact."""

    def make(model, precision="int8", backend="onnx"):
        file = tmp_path / "x.onnx"
        onnx.save(model, file)
        card = RunCard("x", {}, {}, policy={"name": "qdq", "rules": []})
        return finish_artifact(file, card, backend, precision, {"opset": 20, "target": "tensorrt"})

    return make


def built(artifact, **options):
    output = artifact.file.with_name("x_sm86.engine")
    return build(make_plan(artifact, BuildOptions(**options)), output)


def test_an_engine_gives_the_logits_of_its_onnx_file_on_the_callers_stream(trt, exported):
    artifact = exported(graph())
    made, _ = built(artifact, max_batch=8)
    engine = engine_loader("tensorrt")(open_artifact(made.file), ON_GPU)
    session = onnxruntime.InferenceSession(artifact.file, providers=["CPUExecutionProvider"])
    for batch, dtype in ((1, torch.float32), (8, torch.float32), (3, torch.float16)):
        images = torch.randn(batch, 3, 4, 4).to(dtype)
        logits = engine(images.permute(0, 1, 3, 2))  # not contiguous
        (expected,) = session.run(None, {"images": images.permute(0, 1, 3, 2).float().numpy()})
        assert logits.dtype == torch.float32 and np.array_equal(logits.numpy(), expected)
    assert trt.STREAMS == [4711] * 3
    assert (engine.name, engine.precision, engine.policy, engine.max_batch) == ("tensorrt", "int8", "qdq", 8)
    assert engine.details["library"] == f"tensorrt {trt.__version__}" and engine.details["device"] == "Stand-in GPU"
    assert engine.details["int8_gemms"] == engine.details["all_gemms"] == 2


def test_the_card_is_the_checkpoints_and_says_what_the_engine_depends_on(trt, exported, tmp_path):
    artifact = exported(graph())
    made, _ = built(artifact, min_batch=2, opt_batch=4, max_batch=8, workspace=64, timing_cache=tmp_path / "c")
    card = open_artifact(made.file).card
    assert card.policy == artifact.card.policy and card.artifact["backend"] == "tensorrt"
    options = card.artifact["options"]
    assert (options["tensorrt"], options["gpu"], options["compute_capability"]) == (
        trt.__version__, "Stand-in GPU", "8.6")  # fmt: skip
    assert options["profile"] == {"min": [2, 3, 4, 4], "opt": [4, 3, 4, 4], "max": [8, 3, 4, 4]}
    assert options["onnx"]["sha256"] == artifact.record["sha256"] and options["timing_cache"] == "c"
    assert trt.BUILDS[0]["limits"] == {trt.MemoryPoolType.WORKSPACE: 64 << 20}
    assert trt.BUILDS[0]["verbosity"] == "DETAILED"
    assert open_artifact(artifact.file).record["sha256"]  # the ONNX file and its card are unchanged


def test_batches_outside_the_profile(trt10, exported):
    made, _ = built(exported(graph()), min_batch=4, opt_batch=4, max_batch=8)
    engine = load(made, ON_GPU)
    images = torch.randn(8, 3, 4, 4)
    assert torch.equal(engine(images[:3]), engine(images)[:3])  # padded, the surplus dropped
    with pytest.raises(UsageError, match="a batch of 9 is above its limit of 8"):
        engine(torch.zeros(9, 3, 4, 4))
    with pytest.raises(UsageError, match="takes pictures of 3x4x4, not 3x5x4"):
        engine(torch.zeros(1, 3, 5, 4))


@pytest.mark.parametrize("key, value, said", [
    ("tensorrt", "10.0.1", "was built with TensorRT 10.0.1, here is 10.13.3: build it again"),
    ("compute_capability", "9.0", "compute capability 9.0, here is 8.6: build it again"),
])  # fmt: skip
def test_an_engine_of_another_library_or_gpu_is_refused(trt10, exported, key, value, said):
    made, _ = built(exported(graph()))
    made.record["options"][key] = value
    with pytest.raises(UsageError, match=said):
        load(made, ON_GPU)


@pytest.mark.parametrize("options, said", [
    (EngineOptions(), "runs on a GPU, not on cpu"),
    (EngineOptions(device="cuda", float_type="float16"), "float_type cannot be chosen"),
    (EngineOptions(device="cuda", optimize=False), "optimize cannot be chosen"),
])  # fmt: skip
def test_options_that_an_engine_does_not_have_are_refused(trt10, exported, options, said):
    made, _ = built(exported(graph()))
    with pytest.raises(UsageError, match=said):
        load(made, options)


def test_a_graph_with_zero_points_is_refused_by_name(trt10, exported):
    model = graph()
    for tensor in model.graph.initializer:
        if tensor.name == "layers.0.blocks.0.mlp.fc2._input_quantizer.zero":
            tensor.CopyFrom(numpy_helper.from_array(np.array(14, np.uint8), tensor.name))
    with pytest.raises(UsageError, match=r"no zero points.*blocks.0.mlp.fc2._input_quantizer.*export --for tensorrt"):
        make_plan(exported(model), BuildOptions())


def test_an_int8_graph_in_a_float32_body_is_refused_unless_asked_for(trt10, exported, caplog):
    artifact = exported(graph(body=np.float32))
    with pytest.raises(UsageError, match="float32.*slower than a float16 model: `export --for tensorrt`"):
        make_plan(artifact, BuildOptions())
    assert built(artifact, allow_float32=True)[0].file.is_file()
    make_plan(exported(graph(np.float32, quantized=False), "float32"), BuildOptions())
    assert "no baseline for speed" in caplog.text


def test_the_layer_report_says_what_fell_back(trt, exported):
    trt.FALLBACK.add("layers.0.blocks.0.mlp.fc2")
    made, report = built(exported(graph()))
    assert [(row.name, row.wanted, row.ran) for row in report.rows] == [
        ("layers.0.blocks.0.mlp.fc1", "int8", "int8"),
        ("layers.0.blocks.0.mlp.fc2", "int8", "float16"),
    ]
    assert [row.name for row in report.lost] == ["layers.0.blocks.0.mlp.fc2"]
    assert report.reformats == ["Reformatting CopyNode for flatten"] and report.layers == 3
    ran = {"int8": 1, "float16": 1}
    assert report.counts() == {"ran": ran, "int8_wanted": 2, "int8_lost": 1, "layers": 3, "reformats": 1}
    stored = json.loads(made.file.with_name("x_sm86.layers.json").read_text())
    assert stored["int8_lost"] == 1 and stored["gemms"][1]["kernel"].startswith("sm80_xmma_gemm_f16f16")
    assert load(made, ON_GPU).details["int8_gemms"] == 1


def test_parser_errors_name_the_node_in_one_line(trt, exported):
    trt.UNSUPPORTED.add("Relu")
    with pytest.raises(SwinQuantError) as caught:
        built(exported(graph()))
    assert re.search(r"x.onnx: TensorRT 1.* cannot read it: node act \(Relu\): No importer registered for op: Relu",
                     str(caught.value)) and "\n" not in str(caught.value)  # fmt: skip


def test_a_build_that_fails_says_what_tensorrt_said_and_leaves_nothing(trt10, exported):
    artifact = exported(graph())
    before = sorted(artifact.file.parent.iterdir())
    trt10.FAIL_BUILD.append("[gemm.cpp] Could not find any\n implementation for node fc1")
    with pytest.raises(SwinQuantError, match="cannot build this graph: .*Could not find any implementation for node"):
        built(artifact)
    assert sorted(artifact.file.parent.iterdir()) == before


def test_a_timing_cache_is_kept_and_added_to(trt10, exported, tmp_path):
    cache = tmp_path / "cache"
    built(exported(graph()), timing_cache=cache)
    assert cache.read_text().splitlines() == ["cache 10.13.3", "timed 0"]
    built(exported(graph()), timing_cache=cache)
    assert cache.read_text().splitlines() == ["cache 10.13.3", "timed 0", "timed 1"]


def test_a_broken_engine_is_refused(trt10, exported):
    made, _ = built(exported(graph()))
    made.file.write_bytes(b"not an engine")
    with pytest.raises(SwinQuantError, match="TensorRT cannot read it: Magic tag does not match"):
        load(made, ON_GPU)


def test_the_trtexec_line_says_the_same(exported, tmp_path):
    options = BuildOptions(1, 2, 4, workspace=32, timing_cache=Path("my cache"))
    line = make_plan(exported(graph()), options).trtexec(Path("x.engine"))
    assert line == (
        f"trtexec --onnx={tmp_path}/x.onnx --saveEngine=x.engine --stronglyTyped --minShapes=images:1x3x4x4 "
        "--optShapes=images:2x3x4x4 --maxShapes=images:4x3x4x4 --profilingVerbosity=detailed "
        "--memPoolSize=workspace:32 '--timingCacheFile=my cache'"
    )


def test_a_missing_library_or_gpu_is_one_line_that_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(UsageError, match="TensorRT cannot be imported.*pip install tensorrt-cu"):
        host.tensorrt()
    old = type(sys)("tensorrt")
    old.__version__, old.ICudaEngine = "8.4.1", type("ICudaEngine", (), {})
    monkeypatch.setitem(sys.modules, "tensorrt", old)
    with pytest.raises(UsageError, match="TensorRT 8.4.1 has no named tensors: pip install --upgrade"):
        host.tensorrt()
    old.BuilderFlag, old.NetworkDefinitionCreationFlag = type("Flag", (), {"FP16": 0}), type("Flag", (), {})
    with pytest.raises(UsageError, match="TensorRT 8.4.1 cannot build strongly typed networks: install 10 or 11"):
        host.strongly_typed(old)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="no NVIDIA GPU: torch"):
        host.find_gpu()


@pytest.mark.parametrize("layer, ran", [
    ({"TacticName": "sm80_xmma_gemm_i8i8_i8i32_f32_tn_n"}, "int8"),
    ({"TacticName": "sm80_xmma_gemm_f32f32_tf32f32_f32_nn", "Inputs": [{"Format/Datatype": "Int8"}]}, "float32"),
    ({"TacticName": "ampere_h16816gemm_256x128_ldg8_nn_v1"}, "float16"),
    ({"TacticName": "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn"}, "bfloat16"),
    ({"TacticName": "_gemm_mha_v2_0x1", "Inputs": [{"DataType": "Int8"}]}, "int8"),
    ({"TacticName": "0x0", "Inputs": [{"Format/Datatype": "Row major linear FP16 format"}]}, "float16"),
    ({"Weights": {"Type": "Int8"}, "Inputs": [{"DataType": "Float"}]}, "int8"),
    ({}, "unknown"),
])  # fmt: skip
def test_the_type_of_a_product_is_read_from_its_kernel_first(layer, ran):
    gemms = inspect_model(graph()).gemms
    metadata = f"[ONNX Layer: {gemms[0].node}]\x1e[ONNX Layer: act]"
    layers = {"Layers": [{"Name": "fused", "LayerType": "fusion", "Metadata": metadata, **layer}]}
    row, missing = read_layers(json.dumps(layers), gemms).rows
    assert (row.layer, row.ran) == ("fused", ran)
    assert (missing.layer, missing.ran) == (None, "unknown")
