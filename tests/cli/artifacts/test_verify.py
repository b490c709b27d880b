"""swin-quant verify: an artifact that computes its checkpoint passes, one that does not fails with one line."""

import dataclasses
import shutil

import numpy as np
import pytest

from swin_quant.backends.artifact import finish_artifact
from swin_quant.cards.card import RunCard
from swin_quant.cards.records import Result
from swin_quant.score import run_engines


@pytest.fixture
def verify(run, pictures):
    return lambda *words: run("verify", *words, "--data-path", pictures, "--device", "cpu")


def records(artifact):
    return RunCard.read(artifact.with_suffix(".json")).verification


@pytest.mark.slow
def test_every_engine_against_fake_quant_and_float(verify, exports):
    done = verify(exports.onnx)
    assert done.code == 0, done.err
    found = records(exports.onnx)
    assert [(r["engine"], r["reference"], r["passed"]) for r in found] == [
        ("onnxruntime", "torch fake-quant", True), ("onnxruntime", "torch float32", None),
        ("openvino", "torch fake-quant", True), ("openvino", "torch float32", None)]  # fmt: skip
    for simulated, against_float in (found[:2], found[2:]):
        assert simulated["mean"] < against_float["mean"] / 3  # it computes fake-quant, not merely something near
        assert simulated["max"] >= simulated["mean"] and simulated["pictures"] == 7 and simulated["policy"] == "qdq"
    assert done.out.count("pass") == 2 and "FAIL" not in done.out


def test_the_emulator_of_fastertransformer(verify, exports):
    assert verify(exports.ft).code == 0
    simulated, against_float = records(exports.ft)
    assert simulated["passed"] and simulated["tolerance"] == 0.1 and against_float["tolerance"] is None
    assert 0 < simulated["mean"] < 0.1 and simulated["policy"] == "ft-mode1"


def test_what_computes_something_else_fails_and_says_by_how_much(verify, exports, hand_made):
    """The hand-made classifier, passed off as the float export of the micro checkpoint."""
    file = shutil.copy(hand_made, exports.onnx.parent / "forged.onnx")
    card = RunCard.read(exports.checkpoint.with_suffix(".json"))
    artifact = finish_artifact(file, dataclasses.replace(card, policy=None), "onnx", "float32", {})
    line = verify(artifact.file, "--engine", "onnxruntime").err.splitlines()[-1]
    assert line.startswith("error") and "forged.onnx: verification failed: onnxruntime: mean |Δlogit|" in line
    (record,) = records(artifact.file)
    assert record["passed"] is False and record["reference"] == "torch float32" and f"{record['mean']:.4g}" in line
    assert verify(artifact.file, "--engine", "onnxruntime").code == 1


def test_named_pictures_and_a_share_of_them(run, exports, pictures):
    done = run("verify", exports.ft, "--images", pictures / "train", "--pictures", 5)
    assert done.code == 0 and records(exports.ft)[0]["pictures"] == 5


def test_a_second_verification_replaces_the_first_and_keeps_results(verify, run, exports, pictures):
    run("evaluate", exports.ft, "--data-path", pictures, "--half", "none", "--device", "cpu")
    verify(exports.ft)
    verify(exports.ft, "--pictures", 3)
    card = RunCard.read(exports.ft.with_suffix(".json"))
    assert [r["pictures"] for r in card.verification] == [3, 3] and len(card.results) == 2
    done = run("report", exports.ft.with_suffix(".json"))
    assert "verified: mean |Δlogit| against torch fake-quant on 3 pictures" in " ".join(done.out.split())


def test_what_another_process_measured_meanwhile_stays(verify, exports, monkeypatch):
    path = exports.ft.with_suffix(".json")
    data = {"name": "animals", "split": "val", "pictures": 7, "sha256": None}
    theirs = RunCard.read(path).with_result(Result("openvino", "int8", None, data, 7, 50.0, 100.0, 0.7, 1, "cpu"))
    infer = run_engines.infer
    monkeypatch.setattr(run_engines, "infer", lambda *args, **how: (theirs.write(path), infer(*args, **how))[1])
    assert verify(exports.ft, "--pictures", 2).code == 0
    card = RunCard.read(path)
    assert [result.engine for result in card.measured()] == ["openvino"] and len(card.verification) == 2


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--images", "x.png"], 2, "--data-path and --images both name the pictures"),
        (["--pictures", "0"], 2, "--pictures 0: must be at least 1"),
        (["--split", "test"], 1, "has no folder test"),
        (["--checkpoint", "gone.pth"], 1, "gone.pth"),
    ],
)
def test_flags_that_do_not_fit(verify, exports, flags, code, message):
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


@pytest.mark.slow
def test_float8_is_run_by_the_engines_that_take_it(run, exports, pictures, tmp_path):
    for words in (["--for", "onnx"], ["--for", "tensorrt"]):
        told = ["--checkpoint", exports.checkpoint, "--policy", "tensorrt-fp8", "--output", tmp_path, *words]
        assert run("export", *told, "--quiet").code == 0
    for file in (tmp_path / "micro_fp8.onnx", tmp_path / "micro_fp8_tensorrt.onnx"):
        shown = ("--data-path", pictures, "--device", "cpu")
        assert run("verify", file, *shown).code == 0
        assert [(r["engine"], r["precision"], r["passed"]) for r in records(file)] == [
            ("onnxruntime", "fp8", True), ("onnxruntime", "fp8", None)]  # fmt: skip
        assert run("evaluate", file, *shown).code == 0
        result = RunCard.read(file.with_suffix(".json")).results[-1]
        assert (result["engine"], result["precision"], result["policy"]) == ("onnxruntime", "fp8", "tensorrt-fp8")
        said = run("verify", file, *shown, "--engine", "openvino", "--quiet").error(2)
        assert "openvino is not given float8" in said
