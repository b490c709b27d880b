"""The difference of logits against NumPy, and which reference and tolerance an engine is judged by."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swin_quant.backends.registry import engines
from swin_quant.score.difference import difference
from swin_quant.score.engine import Engine
from swin_quant.score.run_engines import Inferred
from swin_quant.verbs.verify import compare, failures, is_quantized, tolerance_of

FLOAT32 = Engine("torch", "float32", None, torch.nn.Identity())
SIMULATED = Engine("torch fake-quant", "int8", "qdq", torch.nn.Identity())


@given(st.integers(0, 2**32 - 1), st.integers(1, 9), st.integers(2, 7))
def test_the_difference_against_numpy(seed, pictures, classes):
    random = np.random.default_rng(seed)
    reference = random.normal(0, 3, (pictures, classes)).astype(np.float32)
    logits = (reference + random.normal(0, 0.5, reference.shape)).astype(np.float32)
    delta = np.abs(logits.astype(np.float64) - reference)
    found = difference(torch.from_numpy(logits), torch.from_numpy(reference))
    assert found["mean"] == pytest.approx(delta.mean()) and found["max"] == pytest.approx(delta.max())
    assert found["step"] == pytest.approx(np.abs(reference).max() / 127)
    assert found["agreement"] == pytest.approx(100 * np.mean(logits.argmax(1) == reference.argmax(1)))
    ratio = np.sum(reference.astype(np.float64) ** 2) / np.sum(delta**2)
    assert found["sqnr_db"] == pytest.approx(10 * np.log10(ratio), abs=1e-6)


def test_equal_logits_have_no_sqnr():
    logits = torch.tensor([[1.0, -2.0]])
    assert difference(logits, logits) == {"mean": 0, "max": 0, "step": 2 / 127, "agreement": 100, "sqnr_db": None}


def judged(precision, off_simulated, off_float, engine="onnxruntime"):
    """The records of an engine whose logits are so far from fake-quant's and from float32's."""
    engine_ = Engine(engine, precision, "qdq" if is_quantized(precision) else None, torch.nn.Identity())
    base = torch.tensor([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]])
    logits = {"e": [base], "float32": [base - off_float], "int8 qdq": [base - off_simulated]}
    references = {"float32": FLOAT32, "int8 qdq": SIMULATED}
    return compare({"e": engine_}, {"e": engine}, references, Inferred(["a", "b"], torch.tensor([0, 1]), logits, []))


def test_a_quantized_artifact_is_judged_by_fake_quant_and_told_against_float():
    first, second = judged("int8", off_simulated=0.01, off_float=9.0)
    assert (first["reference"], first["passed"]) == ("torch fake-quant", True)
    assert (second["reference"], second["passed"], second["tolerance"]) == ("torch float32", None, None)
    assert second["mean"] == pytest.approx(9.0) and failures([first, second]) == []
    failed = judged("int8", off_simulated=0.03, off_float=0.0)
    assert failures(failed) == ["onnxruntime: mean |Δlogit| against torch fake-quant is 0.03, not below 0.02"]


def test_a_float_artifact_is_judged_by_float():
    (record,) = judged("float32", off_simulated=9.0, off_float=0.0005)
    assert record["reference"] == "torch float32" and record["passed"]
    assert len(failures(judged("float32", off_simulated=0.0, off_float=0.002))) == 1
    assert judged("bfloat16", 0.0, 0.02)[0]["passed"] and not judged("bfloat16", 0.0, 0.06)[0]["passed"]


def test_a_half_precision_body_is_allowed_its_rounding():
    assert tolerance_of("openvino", "int8+bfloat16") == tolerance_of("openvino", "bfloat16")
    assert tolerance_of("openvino", "int8+bfloat16") > tolerance_of("openvino", "int8")
    assert tolerance_of("openvino", "float32", "float16") > tolerance_of("openvino", "float32", "float32")
    assert judged("W4A8", 0.01, 9.0)[0]["reference"] == "torch fake-quant"


def test_tolerances_are_those_of_fastertransformer_for_its_backend_and_there_for_every_engine():
    assert tolerance_of("fastertransformer", "int8") == 0.1 and tolerance_of("fastertransformer", "float16") == 0.01
    assert all(engine.tolerances for engine in engines().values())
