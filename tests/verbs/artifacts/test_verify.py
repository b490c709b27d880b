"""`verify` passes an artifact that computes its checkpoint, and fails with one line for any other."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vnni import exact_int8

from swin_quant.backends.artifact import finish_artifact
from swin_quant.backends.registry import engines
from swin_quant.cards.card import RunCard
from swin_quant.report.engines import Verification
from swin_quant.score.engine import Engine, is_float
from swin_quant.score.run_engines import Inferred, difference
from swin_quant.verbs.verify import compare, get_tolerance

FILE = Path("x.onnx")


@pytest.fixture
def verify(run, pictures):
    return lambda *words: run("verify", *words, "--data-path", pictures, "--device", "cpu")


def records(artifact):
    return RunCard.read(artifact.with_suffix(".json")).verification


@exact_int8
def test_every_engine_against_fake_quant_and_float(verify, exports):
    done = verify(exports.onnx).ok()
    found = records(exports.onnx)
    assert [(r["engine"], r["reference"], r["passed"]) for r in found] == [
        ("onnxruntime", "torch fake-quant", True), ("onnxruntime", "torch float32", None),
        ("openvino", "torch fake-quant", True), ("openvino", "torch float32", None)]  # fmt: skip
    for simulated, against_float in (found[:2], found[2:]):
        assert simulated["mean"] < against_float["mean"] / 3  # it is far nearer to fake-quant than to float
        assert simulated["max"] >= simulated["mean"] and simulated["pictures"] == 7 and simulated["policy"] == "qdq"
    assert done.out.count("pass") == 2 and "FAIL" not in done.out


def test_the_emulator_of_fastertransformer(verify, exports):
    assert verify(exports.ft).code == 0
    simulated, against_float = records(exports.ft)
    assert simulated["passed"] and 0.05 < simulated["tolerance"] < 0.1 and against_float["tolerance"] is None
    assert 0 < simulated["mean"] < 0.1 and simulated["policy"] == "ft-mode1"


def test_a_file_with_other_logits_fails_and_the_difference_is_printed(verify, exports, hand_made):
    """The hand-made classifier poses as the float export of the micro checkpoint."""
    file = shutil.copy(hand_made, exports.onnx.parent / "forged.onnx")
    card = RunCard.read(exports.checkpoint.with_suffix(".json"))
    artifact = finish_artifact(file, dataclasses.replace(card, policy=None), "onnx", "float32", {})
    line = verify(artifact.file, "--engine", "onnxruntime").err.splitlines()[-1]
    assert line.startswith("error") and "forged.onnx: verification failed: onnxruntime: mean |Δlogit|" in line
    (record,) = records(artifact.file)
    assert record["passed"] is False and record["reference"] == "torch float32" and f"{record['mean']:.4g}" in line
    assert verify(artifact.file, "--engine", "onnxruntime").code == 1


def test_a_second_verification_replaces_the_first_and_keeps_results(verify, run, exports, pictures):
    run("evaluate", exports.ft, "--data-path", pictures, "--half", "none", "--device", "cpu")
    verify(exports.ft)
    verify(exports.ft, "--pictures", 3)
    card = RunCard.read(exports.ft.with_suffix(".json"))
    assert [r["pictures"] for r in card.verification] == [3, 3] and len(card.results) == 2
    rows = json.loads(run("report", exports.ft.with_suffix(".json"), "--json").ok().out)["rows"]
    (row,) = [row for row in rows if row["engine"].endswith("(emulated)")]
    assert row["verified"] in (True, "yes")


def test_flags_that_do_not_fit(verify, exports):
    for flags, code, message in (
        (["--images", "x.png"], 2, "--data-path and --images both name the pictures"),
        (["--pictures", "0"], 2, "--pictures 0: must be at least 1"),
        (["--split", "test"], 1, "has no folder test"),
        (["--checkpoint", "gone.pth"], 1, "gone.pth"),
    ):
        assert message in verify(exports.ft, *flags).error(code)


def test_without_pictures_or_without_a_checkpoint(run, verify, exports, hand_made):
    assert "give --data-path DIR or --images" in run("verify", exports.ft).error(2)
    exports.checkpoint.unlink()
    message = verify(exports.onnx).error(1)
    assert "nothing to compare with: its micro_calib.pth is neither beside it" in message
    assert "its run card names no checkpoint" in verify(hand_made).error(1)


def test_too_many_unreadable_pictures(run, exports, own_pictures):
    next((own_pictures / "val").rglob("*.png")).write_bytes(b"broken")
    words = ("verify", exports.ft, "--data-path", own_pictures)
    assert "1 of 7 pictures are unreadable" in run(*words).error(1)
    assert run(*words, "--max-unreadable", 0.5).code == 0
    assert records(exports.ft)[0]["pictures"] == 6 and np.isfinite(records(exports.ft)[0]["mean"])


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


def judged(precision, off_simulated, off_float, engine="onnxruntime", size=1.0):
    """The records of an engine with logits at given distances from fake-quant's and from float32's."""
    engine_ = Engine(engine, precision, None if is_float(precision) else "qdq", torch.nn.Identity())
    base = size * torch.tensor([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]])
    logits = {"e": [base], "float32": [base - off_float], "int8 qdq": [base - off_simulated]}
    references = {"float32": FLOAT32, "int8 qdq": SIMULATED}
    return compare({"e": engine_}, {"e": engine}, references, Inferred(["a", "b"], torch.tensor([0, 1]), logits, []))


def test_a_quantized_artifact_is_judged_by_fake_quant_and_told_against_float():
    first, second = judged("int8", off_simulated=0.01, off_float=9.0)
    assert (first["reference"], first["passed"]) == ("torch fake-quant", True)
    assert (second["reference"], second["passed"], second["tolerance"]) == ("torch float32", None, None)
    assert second["mean"] == pytest.approx(9.0) and Verification([first, second], FILE)
    (failed,) = Verification(judged("int8", off_simulated=0.03, off_float=0.0), FILE).failures
    assert failed == "onnxruntime: mean |Δlogit| against torch fake-quant is 0.03, not below 0.02"


def test_small_logits_have_a_small_limit():
    """As of an untrained network: 0.01 is a fifth of them."""
    record, _ = judged("int8", off_simulated=0.01, off_float=0.01, size=0.025)
    assert not record["passed"] and record["tolerance"] == pytest.approx(0.02 * 0.04)
    assert judged("int8", off_simulated=0.0005, off_float=0.01, size=0.025)[0]["passed"]
    assert judged("int8", off_simulated=0.01, off_float=0.01, size=100.0)[0]["tolerance"] == 0.02
    assert judged("int8", off_simulated=0.0, off_float=0.0, size=0.0)[0]["passed"], "a head of zeros"


def test_a_float_artifact_is_judged_by_float_and_half_precision_is_allowed_its_rounding():
    (record,) = judged("float32", off_simulated=9.0, off_float=0.0005)
    assert record["reference"] == "torch float32" and record["passed"]
    assert len(Verification(judged("float32", off_simulated=0.0, off_float=0.002), FILE).failures) == 1
    assert judged("bfloat16", 0.0, 0.02)[0]["passed"] and not judged("bfloat16", 0.0, 0.06)[0]["passed"]
    assert get_tolerance("openvino", "int8+bfloat16") == get_tolerance("openvino", "bfloat16")
    assert get_tolerance("openvino", "bfloat16") > get_tolerance("openvino", "int8")
    assert get_tolerance("openvino", "float32", "float16") > get_tolerance("openvino", "float32", "float32")
    assert judged("W4A8", 0.01, 9.0)[0]["reference"] == "torch fake-quant"


def test_tolerances_are_those_of_fastertransformer_for_its_backend_and_there_for_every_engine():
    assert get_tolerance("fastertransformer", "int8") == 0.1 and get_tolerance("fastertransformer", "float16") == 0.01
    assert all(engine.tolerances for engine in engines().values())
