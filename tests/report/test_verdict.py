"""The verdict says what to deploy, what it costs and wins beside the same engine's float, and the next command."""

import dataclasses
import json
import shlex
import subprocess
from pathlib import Path

import numpy as np
import pytest
from cards_of_results import ARTIFACT, INT8, OWN, TORCH, TRAINING, card_of

from swin_quant.backends.registry import engines, targets
from swin_quant.cards.records import ORIGINAL, PTQ, QAT
from swin_quant.cli.command import Command
from swin_quant.quant.policy import load_policy
from swin_quant.report import verdict as verdict_module
from swin_quant.report.verdict import (
    FLOAT,
    artifact_verdict,
    card_verdict,
    loss_in_words,
    search_verdict,
    training_verdict,
)

FILE, CHECKPOINT = Path("my out/x_int8_openvino.onnx"), Path("my out/x_calib.pth")
WRAPPED = {"shape": [3, 32, 32], "stem": False, "output": None, "outputs": ["logits"], "classes": 10}
LOST = dataclasses.replace(INT8, acc1=77.0, delta_acc1=-3.0)


def said_of(*results):
    return artifact_verdict(card_of(*results), FILE, CHECKPOINT, "data")


def parsed(command):
    """The options of a command as it would be typed."""
    program, name, *words = shlex.split(command)
    assert program == "swin-quant"
    return Command(name).parse(words)


def test_three_lines_at_80_columns_with_the_same_engine_s_float():
    """Torch's float is faster here than int8 on OpenVINO, and is not what INT8 replaces."""
    verdict = said_of(TORCH, OWN, INT8)
    first, *said, last = verdict.text(80).splitlines()
    assert first == f"deploy: {FILE}" and max(map(len, said)) <= 80
    assert " ".join(line.strip() for line in said) == (
        "result: no loss that 5,000 pictures can show (-0.10 ±0.10 points of top-1); 2.0 times as fast as float32 on "
        "openvino (0.70 ms, 1.40)"
    )
    assert parsed(last.removeprefix("next:").strip())["artifact"] == str(FILE)
    assert verdict.speedup == 2.0 and json.loads(json.dumps(verdict.to_dict()))["delta_acc1_se"] == 0.1
    assert all(text in verdict._repr_html_() for text in (FILE.name, "2.0 times", "swin-quant serve"))


def test_a_float_model_that_guesses_shows_no_loss():
    chance = [dataclasses.replace(one, acc1=0.1, delta_acc1=None) for one in (TORCH, OWN)]
    card = card_of(*chance, dataclasses.replace(INT8, acc1=0.1, delta_acc1=0.0, delta_acc1_se=0.0))
    card = dataclasses.replace(card, config={"MODEL": {"NUM_CLASSES": 1000}})
    summary = artifact_verdict(card, FILE, CHECKPOINT, "data").summary
    assert "the loss cannot be measured: float32 is right about 5 of 5,000, and guessing among 1,000" in summary
    few = {"pictures": 8, "acc1": 0.0}
    none = dataclasses.replace(TORCH, **few), dataclasses.replace(INT8, **few, delta_acc1=0.0, delta_acc1_se=0.0)
    card = dataclasses.replace(card_of(*none), config={"MODEL": {"NUM_CLASSES": 1000}})
    assert "right about 0 of 8, and guessing" in artifact_verdict(card, FILE, CHECKPOINT, "data").summary


def test_of_two_data_sets_the_one_with_more_pictures_decides_and_is_named():
    few = {"pictures": 50, "acc1": 10.0, "ms_per_picture": 0.1}
    others = [dataclasses.replace(one, dataset=one.dataset | {"name": "mine"}, **few) for one in (TORCH, OWN, INT8)]
    said = said_of(*others, TORCH, OWN, INT8)
    assert said.summary == f"on cifar10/val: {said_of(TORCH, OWN, INT8).summary}" and said.ms == INT8.ms_per_picture


def test_a_long_command_is_broken_within_80_columns_so_that_a_shell_joins_it():
    checkpoint = Path("my own folder of runs", "swin_tiny_patch4_window7_224_calib.pth")
    much = artifact_verdict(card_of(TORCH, LOST), FILE, checkpoint, "a --b")
    assert max(map(len, much.text(80).splitlines())) <= 80
    _, command = much.text(80).split("next:   ")
    assert len(command.splitlines()) > 1
    joined = subprocess.run(["sh", "-c", f"printf '%s\\n' {command}"], capture_output=True, text=True, check=True)
    assert joined.stdout.splitlines() == shlex.split(much.next)


def test_a_loss_beyond_chance_is_called_one_and_a_large_one_leads_to_a_search():
    lost = dataclasses.replace(INT8, acc1=79.5, delta_acc1=-0.5)
    assert "costs 0.50 ±0.10 points of top-1 on 5,000 pictures" in said_of(TORCH, lost).summary
    much = said_of(TORCH, LOST)
    asked = parsed(much.next)
    assert (asked["checkpoint"], asked["engine"], asked["path"]) == (str(CHECKPOINT), "openvino", "data")


@pytest.mark.parametrize(
    ("searched", "trained", "name"),
    [(None, False, "search"), ("onnxruntime", False, "search"), ("openvino", False, "finetune"),
     ("openvino", True, "serve")],
)  # fmt: skip
def test_what_was_tried_is_not_advised_again(searched, trained, name):
    card = card_of(TORCH, LOST)
    record = {"engine": searched, "batch": 1, "budget": "", "met": True, "pictures": 8, "tried": []}
    start = {"start": {"file": CHECKPOINT.name, "sha256": "b" * 64}}
    tried = {"searches": [record] if searched else [], "training": TRAINING | start if trained else None}
    card = dataclasses.replace(card, **tried)
    advised = artifact_verdict(card, FILE, CHECKPOINT, "data").next
    assert advised.split()[1] == name
    parsed(advised)


@pytest.mark.parametrize(
    ("lost", "pictures", "is_shown"),
    [(50, 50, True), (-50, 50, True), (1, 1, False), (1, 50, False), (0, 50, False), (10, 50, True)],
)
def test_pictures_that_all_change_alike_have_no_error_and_are_no_proof_of_no_loss(lost, pictures, is_shown):
    """Brute force over the paired outcomes: the standard error of n equal differences is 0."""
    changes = np.array([-100.0 * np.sign(lost)] * abs(lost) + [0.0] * (pictures - abs(lost)))
    delta, error = changes.mean(), changes.std() / pictures**0.5
    said = loss_in_words(delta, error, pictures)
    assert said.startswith("no loss") is not is_shown


def test_files_of_a_card_are_named_as_seen_from_the_folder_of_the_page():
    scored = dataclasses.replace(card_of(TORCH, OWN, INT8), artifact={**ARTIFACT, "options": {"target": "openvino"}})
    assert card_verdict(scored, Path("out/int8/x.json"), Path("out")).deploy == "int8/x.onnx"
    assert card_verdict(card_of(TORCH), Path("x.json"), Path()) is None, "a card without an artifact has no verdict"


def test_where_float_is_faster_on_the_engine_it_is_what_to_deploy():
    verdict = said_of(TORCH, OWN, dataclasses.replace(INT8, ms_per_picture=2.8))
    assert verdict.deploy == FLOAT and "slower than float32 on openvino" in verdict.summary
    assert parsed(verdict.next)["precision"] == "float"
    assert "as fast as float32" in said_of(TORCH, OWN, dataclasses.replace(INT8, ms_per_picture=1.42)).summary


@pytest.mark.parametrize("is_saturating", [False, True])
def test_a_file_that_is_not_verified_or_ruined_is_not_what_to_deploy(is_saturating, monkeypatch):
    monkeypatch.setattr(verdict_module, "saturates", lambda engine: is_saturating)
    row = {"engine": INT8.engine, "precision": INT8.precision, "policy": INT8.policy, "tolerance": 0.1, "passed": False}
    row |= {"mean": 1.0, "max": 2.0, "agreement": 30.0, "reference": "fake-quant", "pictures": 8}
    row |= {"pictures_sha256": "a" * 64, "sqnr_db": 1.0, "step": 0.01}
    made = {**ARTIFACT, "options": {"target": "openvino", "saturation_safe": []}}
    wrong = dataclasses.replace(card_of(TORCH, OWN, INT8), verification=[row], artifact=made)
    verdict = artifact_verdict(wrong, FILE, CHECKPOINT, "data")
    assert verdict.deploy == FLOAT and verdict.summary.startswith("NOT verified, the engine computes something else")
    asked = parsed(verdict.next)
    assert asked["saturation_safe"] if is_saturating else asked["precision"] == "float"
    ruined = card_of(TORCH, OWN, dataclasses.replace(INT8, acc1=31.6, delta_acc1=-48.4))
    verdict = artifact_verdict(ruined, FILE, CHECKPOINT, "data")
    assert verdict.deploy == FLOAT and verdict.next.startswith("swin-quant search ")
    wrapped = dataclasses.replace(ruined, wrapped=WRAPPED)
    verdict = artifact_verdict(wrapped, FILE, CHECKPOINT, "data")
    assert verdict.next == 'sq.search(model, pictures, "openvino", budget=sq.Budget(max_drop=1))'


def test_what_needs_a_checkpoint_that_is_gone_is_not_advised():
    slow, lost = dataclasses.replace(INT8, ms_per_picture=2.8), dataclasses.replace(INT8, acc1=77.0, delta_acc1=-3.0)
    for int8, command in ((slow, "show"), (lost, "serve")):
        verdict = artifact_verdict(card_of(TORCH, OWN, int8), FILE, None, "data")
        assert verdict.next.startswith(f"swin-quant {command} ") and parsed(verdict.next)


def test_what_was_not_measured_is_not_said():
    assert said_of(TORCH) is None, "nothing quantized was scored"
    simulated = dataclasses.replace(INT8, engine="torch fake-quant")
    assert said_of(TORCH, simulated) is None, "no engine ran it"
    alone = said_of(INT8)
    assert "not known" in alone.summary and "no float was timed" in alone.summary and alone.speedup is None


def training(ptq_delta, policy="cpu", scored=True):
    """A card of QAT under a policy; its start, `scored` or not, stands in another folder."""
    float32 = dataclasses.replace(TORCH, weights=ORIGINAL)
    int8 = dataclasses.replace(INT8, engine="torch fake-quant", policy="cpu", policy_sha256="a" * 64)
    ptq = dataclasses.replace(int8, weights=PTQ, acc1=79.0)
    qat = dataclasses.replace(ptq, weights=QAT, acc1=79.0 + ptq_delta, delta_ptq=ptq_delta, delta_ptq_se=0.1)
    card = card_of(float32, qat, *([ptq] * scored))
    start = {"file": "x_calib.pth", "sha256": "b" * 64, "path": "/there/x_calib.pth"}
    record = {**TRAINING, "start": start, "ranges": {"weights": None, "activations": None}}
    trained = dataclasses.replace(card, training=record, policy=load_policy(policy).to_dict())
    return training_verdict(trained, Path("out/x_qat.pth"))


@pytest.mark.parametrize(
    ("delta", "says", "file"),
    [
        (0.5, "deploy QAT", "out/x_qat.pth"),
        (0.1, "PTQ is as good: keep it", "/there/x_calib.pth"),
        (-0.5, "PTQ is better: keep it", "/there/x_calib.pth"),
    ],
)
def test_qat_is_held_against_ptq_with_the_error_of_their_own_difference(delta, says, file):
    verdict = training(delta)
    assert verdict.summary.startswith(f"float32 80.00, PTQ 79.00, QAT {79 + delta:.2f} % top-1; QAT - PTQ {delta:+.2f}")
    assert verdict.summary.endswith(f"±0.10 points on 5,000 pictures: {says}") and verdict.deploy == file
    asked = parsed(verdict.next)
    assert asked["checkpoint"] == file and str(asked["folder"]) == str(Path(file).parent)
    assert "cpu" in targets()[asked["backend"]].exporting.policies


def test_qat_beside_no_ptq_is_held_against_float():
    verdict = training(0.5, scored=False)
    assert verdict.deploy == "out/x_qat.pth"
    assert (
        verdict.summary
        == "float32 80.00, QAT 79.50 % top-1; no loss that 5,000 pictures can show (-0.10 ±0.10 points of top-1)"
    )


@pytest.mark.parametrize(
    ("policy", "able"),
    [
        (load_policy("qdq").bits("*", 4), {"torchscript"}),
        (load_policy("qdq").bits("role:gemm_weight", 4), {"onnxruntime"}),
        (load_policy("w4a16"), {"onnxruntime"}),
        (load_policy("ft-mode2"), {"onnxruntime", "openvino"}),
        (load_policy("cuda-fp8"), {"onnx", "tensorrt", "cuda", "onnxruntime"}),
    ],
    ids=lambda one: getattr(one, "name", ""),
)
def test_what_was_trained_is_exported_for_a_backend_that_takes_its_bits(policy, able):
    verdict = training(0.5, policy=policy)
    is_simulated, then = able == {"torchscript"}, parsed(verdict.next)
    assert then["precision"] == "float" if is_simulated else then["backend"] in able
    assert ("no engine computes with" in verdict.summary) is is_simulated
    assert ("deploy QAT" in verdict.summary, verdict.deploy == FLOAT) == (not is_simulated, is_simulated)


@pytest.mark.parametrize("name", ["ExecuTorch", "openvino", "onnxruntime"])
def test_an_engine_is_named_as_its_flag_takes_it(name):
    advised = said_of(TORCH, *(dataclasses.replace(one, engine=name) for one in (OWN, INT8))).next
    assert name.lower() in engines() and parsed(advised)["engine"] == name.lower()


def found(ms=0.5, float_ms=1.0, met=True, drop=0.05):
    loss = {"sqnr_db": 36.0, "kl": 1e-4, "agreement": 99.0, "drop": drop, "drop_error": 0.02}
    exact = {"sqnr_db": None, "kl": 0.0, "agreement": 100.0, "drop": 0.0}
    tried = [
        {"policy": "mine", "nodes": 10, "loss": loss, "ms": ms, "found": True, "front": True},
        {"policy": "float", "nodes": 0, "loss": exact, "ms": float_ms, "found": False, "front": True},
    ]
    record = {"engine": "openvino", "batch": 1, "budget": "drop at most 0.1 points", "met": met, "pictures": 1024}
    return search_verdict({**record, "tried": tried}, Path("out/x_auto_openvino.yaml"), "out/x_calib.pth", "float32")


def test_a_search_ends_with_the_policy_and_the_command_that_exports_it():
    verdict = found()
    assert verdict.deploy == "out/x_auto_openvino.yaml"
    assert "2.0 times as fast as float32 on openvino" in verdict.summary
    assert "costs 0.05 ±0.02 expected points of top-1 on 1,024 pictures, SQNR 36.0 dB" in verdict.summary
    assert parsed(verdict.next)["policy"] == (verdict.deploy,)
    assert "no loss that 1,024 pictures can show" in found(drop=0.03).summary
    assert found(float_ms=0.4).deploy == FLOAT and parsed(found(float_ms=0.4).next)["precision"] == "float"
    assert found(met=False).summary.startswith("the budget is NOT met (drop at most 0.1 points)")
    assert "no latency was measured" in found(ms=None, float_ms=None).summary
