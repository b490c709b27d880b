"""Engines on the same file: ONNX Runtime at each level, OpenVINO, and polygraphy's lint."""

import os
import subprocess
import sys

import onnx
import pytest
from nightly import share
from vnni import exact_int8

from swin_quant.backends.openvino.engine import _core
from swin_quant.report.engines import Verification
from swin_quant.report.graph import IntegerProducts, by_engine, integer_products

KINDS = pytest.mark.parametrize("kind", share(["swin", "swinv2"], 2))
# ONNX Runtime's remedy for CPUs whose int8 products saturate: it turns weights and their zero points into uint8.
EXACT = {"session.x64quantprecision": "1"}


@KINDS
@pytest.mark.parametrize(
    ("level", "entries"),
    share([("ENABLE_ALL", {}), ("ENABLE_BASIC", {}), ("ENABLE_EXTENDED", {}), ("ENABLE_ALL", EXACT)], 3),
)
@exact_int8
def test_onnx_runtime_at_every_level(kind, level, entries, exported, run, images, assert_quantized_alike):
    assert_quantized_alike(run(exported(kind).file, images, level, entries)["logits"], kind)


@pytest.mark.parametrize("kind", ["swin", "swinv2"])
def test_openvino(kind, exported, images, assert_quantized_alike, exact_on):
    pytest.importorskip("openvino")
    exact_on("openvino")
    compiled = _core(os.getpid()).compile_model(str(exported(kind).file), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    assert_quantized_alike(compiled(images.numpy())[0], kind)


@pytest.mark.parametrize("precision", ["int8", pytest.param("float", marks=pytest.mark.kernels)])
def test_gelu_is_one_operator_of_onnx_runtime_at_the_default_opset(precision, exported, optimized, count):
    """The exporter's own order of it stays five operators."""
    file = exported("swin", precision=precision).file
    ops = count(optimized(file))
    assert onnx.load(file).opset_import[0].version == 17
    assert ops["Gelu"] + ops["BiasGelu"] == 3 and "Erf" not in ops  # one in each block


@KINDS
@pytest.mark.parametrize("target", ["portable", "tensorrt"])
def test_onnx_checker_with_strict_shape_inference(kind, target, exported):
    model = onnx.load(exported(kind, "qdq" if target == "portable" else "tensorrt", target=target).file)
    onnx.checker.check_model(model, full_check=True)
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True, check_type=True, data_prop=True).graph
    known = {info.name for info in (*inferred.value_info, *inferred.output)}
    assert {name for node in model.graph.node for name in node.output} <= known
    names = [node.name for node in model.graph.node]
    assert len(set(names)) == len(names)


@pytest.mark.nightly
@KINDS
def test_polygraphy_finds_nothing_wrong(kind, exported):
    pytest.importorskip("polygraphy")
    pytest.importorskip("onnx_graphsurgeon")
    main = "import sys; from polygraphy.tools import main; sys.exit(main())"
    command = [sys.executable, "-c", main, "check", "lint", str(exported(kind).file)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "PASSED" in done.stdout + done.stderr, done.stdout + done.stderr


@pytest.mark.parametrize("kind, policy", share([("swin", "onnxruntime"), ("swin", "cpu"), ("swinv2", "qdq")], 3))
def test_every_quantized_product_is_an_integer_one_in_plain_sessions(kind, policy, exported):
    """ONNX Runtime once merged linears of a fixed batch into float Gemms: 48 of 63 of Swin-T."""
    static, dynamic = (by_engine(exported(kind, policy, batch=batch).file) for batch in (2, None))
    assert len(static) == 2 and len(dynamic) == 4  # two engines; a dynamic file is also counted with a batch of 1
    products = 3 * (4 if policy == "cpu" else 6) + 1  # three blocks and a patch merging
    for found in (*static.values(), *dynamic.values()):
        assert (found.quantized, found.integer, found.floats) == (products, products, ())


def test_a_file_that_runs_in_float_is_not_called_int8(exported, tmp_path):
    """Biases of one dimension: what ONNX Runtime made of a fixed batch, and what is said of it."""
    model = onnx.load(exported("swin", "onnxruntime", batch=2).file)
    for tensor in model.graph.initializer:
        if tensor.name.endswith(".bias") and len(tensor.dims) == 2:
            tensor.dims[:] = tensor.dims[1:]
    file = tmp_path / "flat.onnx"
    onnx.save(model, file)
    (found,) = by_engine(file, ("onnxruntime",)).values()
    assert found.is_float and found.floats and f"{found.integer} of {found.quantized}" in str(found)
    record = {"engine": "onnxruntime", "passed": True, "int8_products": found.integer}
    (said,) = Verification([record | {"quantized_products": found.quantized}], file).failures
    assert "is called int8, and onnxruntime runs it in float" in said


def test_products_are_counted_by_name():
    found = integer_products(["a", "b", "c"], {"a": "int8", "b": "float32", "c": "float32", "head": "float32"})
    assert found == IntegerProducts(3, 1, ("b", "c")) and found.is_float
    assert str(found) == "1 of 3 quantized products run in int8; in float: b, c"
    assert not IntegerProducts(63, 48).is_float
