"""How many quantized products engines run in int8, counted on their own graphs: static and dynamic files."""

import onnx
import pytest
from nightly import share

from swin_quant.report.engines import Verification
from swin_quant.report.graph import IntegerProducts, by_engine, integer_products


@pytest.mark.slow
@pytest.mark.parametrize("kind, policy", share([("swin", "onnxruntime"), ("swin", "cpu"), ("swinv2", "qdq")], 3))
def test_every_quantized_product_is_an_integer_one_in_plain_sessions(kind, policy, exported):
    """ONNX Runtime once merged linears of a fixed batch into float Gemms: 48 of 63 of Swin-T."""
    static, dynamic = (by_engine(exported(kind, policy, batch=batch).file) for batch in (2, None))
    assert len(static) == 2 and len(dynamic) == 4  # two engines; a dynamic file is also counted with a batch of 1
    products = 3 * (4 if policy == "cpu" else 6) + 1  # three blocks and a patch merging
    for found in (*static.values(), *dynamic.values()):
        assert (found.quantized, found.integer, found.floats) == (products, products, ())


@pytest.mark.slow
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
    (said,) = Verification([record | {"quantized_products": found.quantized}], None).failures
    assert "is called int8, and onnxruntime runs it in float" in said


def test_products_are_counted_by_name():
    found = integer_products(["a", "b", "c"], {"a": "int8", "b": "float32", "c": "float32", "head": "float32"})
    assert found == IntegerProducts(3, 1, ("b", "c")) and found.is_float
    assert str(found) == "1 of 3 quantized products run in int8; in float: b, c"
    assert not IntegerProducts(63, 48).is_float
