"""swin-quant evaluate ARTIFACT: float first, every engine on the same pictures, results in the artifact's card."""

import dataclasses
import importlib.util
import json
import sys

import pytest
from nightly import share

import swin_quant as sq
from swin_quant.backends.artifact import finish_artifact
from swin_quant.base.files import compute_sha256
from swin_quant.cards.card import RunCard
from swin_quant.report.verdict import FLOAT
from swin_quant.verbs import evaluation


@pytest.fixture
def evaluate(run, pictures):
    """evaluate(artifacts and flags ...) -> how it ended, on the 7 pictures of val, without the engine's own float."""
    how = ["--data-path", pictures, "--device", "cpu", "--half", "none"]
    return lambda *words: run("evaluate", *words, *how, "--no-own-float")


def measured(artifact):
    results = RunCard.read(artifact.with_suffix(".json")).measured()
    return {(result.engine, result.precision, result.policy): result for result in results}


def test_a_file_that_was_exported_again_meanwhile_keeps_its_own_card(evaluate, hand_made, monkeypatch):
    path, card = hand_made.with_suffix(".json"), RunCard.read(hand_made.with_suffix(".json"))

    score = evaluation.score_engines

    def scored(*args):
        hand_made.write_bytes(hand_made.read_bytes() + b"\x32\x01x")  # a doc string
        finish_artifact(hand_made, card, "onnx", "float32", {})
        return score(*args)

    monkeypatch.setattr(evaluation, "score_engines", scored)
    done = evaluate(hand_made, "--engine", "onnxruntime")
    assert done.code == 0 and "onnxruntime" in done.out and "of another file meanwhile" in done.err
    assert RunCard.read(path).artifact["sha256"] == compute_sha256(hand_made) and not measured(hand_made)


@pytest.mark.parametrize(("batch", "seen"), share([(8, {7}), (4, {4, 3})], 2))
def test_an_engine_s_own_float_gets_the_batches_that_int8_gets(run, exports, pictures, monkeypatch, batch, seen):
    """Filled up with zeros, 7 pictures would be timed as 8, and int8 would look faster beside them; of several batches
    only whole ones are timed, and the float file may have their size."""
    engine, sizes = pytest.importorskip("swin_quant.backends.openvino.engine"), set()
    request = engine._Graphs.request
    monkeypatch.setattr(engine._Graphs, "request", lambda graphs, shape: sizes.add(shape[0]) or request(graphs, shape))
    done = run("evaluate", exports.onnx, "--engine", "openvino", "--data-path", pictures, "--device", "cpu",
               "--batch", batch)  # fmt: skip
    assert done.code == 0 and sizes == seen, (done.err, sizes)


def test_artifacts_of_one_checkpoint_share_a_baseline_and_keep_their_own_results(evaluate, exports, pictures):
    done = evaluate(exports.onnx, exports.ft, "--batch", 4)
    assert done.code == 0, done.err
    onnx, ft = measured(exports.onnx), measured(exports.ft)
    assert list(onnx) == [("torch", "float32", None), ("onnxruntime", "int8", "qdq"), ("openvino", "int8", "qdq")]
    assert ("FasterTransformer (emulated)", "int8", "ft-mode1") in ft and len(ft) == 2
    assert ft["torch", "float32", None] == onnx["torch", "float32", None]  # from the same pass
    for result in (*list(onnx.values())[1:], *list(ft.values())[1:]):
        assert result.pictures == 7 and result.batch_size == 4 and result.ms_per_picture > 0
        assert result.delta_acc1 == pytest.approx(result.acc1 - onnx["torch", "float32", None].acc1)
        assert result.delta_acc1_se is not None and result.sqnr_db > 15
    assert "onnxruntime" in done.out and "openvino" in done.out and "FasterTransformer (emulated)" in done.out


def test_the_float_of_the_same_engine_is_scored_beside_int8(run, exports, pictures):
    """Exported anew, in place of torch's half precision; where a float file is scored as well, it is that."""
    words = ["evaluate", exports.onnx, "--engine", "onnxruntime", "--data-path", pictures, "--device", "cpu"]
    done = run(*words)
    assert done.code == 0, done
    own, int8 = [("onnxruntime", "float32", None), ("onnxruntime", "int8", "qdq")]
    found = measured(exports.onnx)
    assert list(found) == [("torch", "float32", None), own, int8]
    assert found[own].agreement == 100 and found[own].ms_per_picture > 0 and found[own].sqnr_db > 80
    lines = [line.split()[:2] for line in done.out.splitlines()]
    assert lines.index(["float32", "onnxruntime"]) + 1 == lines.index(["int8", "qdq"])
    assert not list(exports.onnx.parent.glob("*fp32*")), "it is not kept"


def test_without_the_checkpoint_there_is_accuracy_and_no_delta(evaluate, exports, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exports.checkpoint.unlink()
    source = exports.checkpoint.with_name("micro.pth")
    assert evaluate(exports.onnx, "--engine", "onnxruntime").code == 0
    assert ("torch", "float32", None) in measured(exports.onnx), "the float checkpoint does as well"
    source.unlink()
    path = exports.onnx.with_suffix(".json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "results": []}))
    done = evaluate(exports.onnx, "--engine", "onnxruntime")
    assert done.code == 0 and "no float model stands beside it" in done.err and "micro_calib.pth" in done.err
    (result,) = measured(exports.onnx).values()
    assert result.engine == "onnxruntime" and result.acc1 is not None
    assert result.agreement is result.sqnr_db is result.delta_acc1 is result.delta_acc1_se is None
    assert "there is no delta" in " ".join(done.out.split())
    assert not (tmp_path / "output").exists()


def test_a_verification_since_the_artifact_was_opened_counts(exports, pictures):
    opened, path = sq.artifact(exports.onnx), exports.onnx.with_suffix(".json")
    failed = {"engine": "onnxruntime", "precision": "int8", "policy": "qdq", "tolerance": 0.1, "passed": False}
    failed |= {"mean": 1.0, "max": 2.0, "agreement": 30.0, "reference": "fake-quant", "pictures": 8, "step": 0.01}
    RunCard.read(path).with_verification(failed | {"pictures_sha256": "a" * 64, "sqnr_db": 1.0}).write(path)
    how = {"engine": "onnxruntime", "own_float": False, "half": "none"}
    assert sq.evaluate(opened, sq.pictures(pictures, "val"), **how).verdict.deploy == FLOAT


def test_the_checkpoint_is_found_by_its_hash_not_its_name(evaluate, exports, tmp_path):
    elsewhere = exports.checkpoint.rename(tmp_path / "other_name.pth")
    assert evaluate(exports.onnx, "--engine", "onnxruntime", "--checkpoint", elsewhere).code == 0
    assert ("torch", "float32", None) in measured(exports.onnx)
    elsewhere.write_bytes(elsewhere.read_bytes() + b"0")
    line = evaluate(exports.onnx, "--checkpoint", elsewhere).error(1)
    assert "other_name.pth: is not the checkpoint that" in line


def test_flags_that_do_not_fit(evaluate, exports):
    for flags, message in (
        (["--engine", "fastertransformer"], "fastertransformer does not run onnx artifacts: use onnxruntime"),
        (["--policy", "qdq"], "--policy is not for artifacts"),
        (["--cfg", "x.yaml"], "--cfg is not for artifacts"),
        (["--img-size", "64"], "--img-size is not for artifacts"),
        (["--threads", "1025"], "--threads 1025: must be at least 1, at most 1024"),
    ):
        assert message in evaluate(exports.onnx, *flags).error(2)


def test_flags_of_artifacts_without_one(run, scoring_flags, exports):
    line = run("evaluate", *scoring_flags, "--checkpoint", exports.checkpoint, "--engine", "openvino").error(2)
    assert "--engine is not for checkpoints: name an artifact" in line


def test_an_engine_that_is_not_installed(evaluate, exports, monkeypatch):
    find = importlib.util.find_spec
    hidden = lambda name, *more: None if name == "openvino" else find(name, *more)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", hidden)
    monkeypatch.delitem(sys.modules, "openvino", raising=False)
    line = evaluate(exports.onnx, "--engine", "openvino").error(2)
    assert "engine openvino is not installed: pip install -c constraints.txt -e '.[openvino]'" in line
    assert evaluate(exports.onnx).code == 0  # the other engine is taken
    assert len(measured(exports.onnx)) == 2


def test_bad_cards(evaluate, exports):
    path = exports.onnx.with_suffix(".json")
    good = json.loads(path.read_text())
    for change, message in [
        ({"preprocess": {**good["preprocess"], "size": 64}}, "preprocess contradicts"),
        ({"preprocess": {**good["preprocess"], "std": [0, 1, 1]}}, "preprocess contradicts"),
        ({"artifact": {**good["artifact"], "backend": "abacus"}}, "artifact.backend is 'abacus': no engine runs that"),
        ({"artifact": {**good["artifact"], "sha256": "0" * 64}}, "is not the file of its run card"),
        ({"artifact": None}, "is the card of a checkpoint"),
        ({"schema": "elsewhere/1"}, "is not a run card that this version reads"),
    ]:
        path.write_text(json.dumps({**good, **change}))
        assert message in evaluate(exports.onnx).error(1)
    path.unlink()
    assert "has no run card" in evaluate(exports.onnx).error(1)


def test_a_file_of_another_image_size_than_its_card(evaluate, hand_made):
    card = RunCard.read(hand_made.with_suffix(".json"))
    config = json.loads(json.dumps(card.config))
    config["DATA"]["IMG_SIZE"] = 64
    other = dataclasses.replace(card, config=config, preprocess={**card.preprocess, "size": 64})
    other.write(hand_made.with_suffix(".json"))
    assert "takes pictures of 32 x 32, but its run card means.json prepares 64 x 64" in evaluate(hand_made).error(1)


def test_two_ranks_score_the_readable_pictures_as_one_does(run, forked, hand_made, own_pictures, arithmetic):
    files = sorted((own_pictures / "val").rglob("*.png"))
    for file in files[2:4]:
        file.write_bytes(b"no picture")
    words = ["evaluate", hand_made, "--engine", "onnxruntime", "--data-path", own_pictures, "--max-unreadable", 1,
             "--threads", 1, "--device", "cpu", "--json"]  # fmt: skip
    classes = sorted({file.parent for file in files})
    readable = [file for file in files if file not in files[2:4]]
    right = sum(arithmetic(file).argmax() == classes.index(file.parent) for file in readable)
    run(*words).ok()
    (alone,) = measured(hand_made).values()
    assert alone.acc1 == pytest.approx(100 * right / 5)
    ends = forked(2, *words)
    assert [end.code for end in ends] == [0, 0] and ends[1].out == ""
    (together,) = measured(hand_made).values()
    assert together.loss == pytest.approx(alone.loss)
    same = dataclasses.replace(together, ms_per_picture=alone.ms_per_picture, loss=alone.loss)
    assert same == alone and alone.unreadable == 2
