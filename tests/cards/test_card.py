"""A run card stays the same through writing and reading, and a foreign or broken one is refused by its key."""

import copy
import dataclasses
import hashlib
import json
from datetime import datetime, timezone
from pathlib import Path

import pytest
from cards_of_results import ARTIFACT, CALIBRATION, TRAINING, VERIFICATION

from swin_quant.base.errors import SwinQuantError
from swin_quant.cards.card import SCHEMA, RunCard, verify_checkpoint
from swin_quant.cards.records import Result
from tests.helpers import refusals

DATASET = {"name": "cifar10", "split": "val", "pictures": 5000, "sha256": "0" * 64}
HERE = Path(__file__).parent
CARDS = [*HERE.glob("*.json"), *(HERE.parents[1] / "examples").rglob("*.json")]
RESULT = Result("fake-quant", "int8", "ft-mode1", DATASET, 5000, 70.5, 98.0, 0.9, 32, "cpu", sqnr_db=35.6)


def card(**changes) -> RunCard:
    base = {
        "name": "swin_micro",
        "config": {"MODEL": {"TYPE": "swin", "SWIN": {"DEPTHS": [2, 2]}}},
        "preprocess": {"size": 32},
        "source": {"file": "swin_micro.pth", "sha256": "a" * 64, "format": "pth, microsoft names"},
        "checkpoint": {"file": "swin_micro_calib.pth", "sha256": "b" * 64},
        "policy": {"name": "qdq", "rules": []},
        "calibration": {**CALIBRATION, "files": ["a/é.png", "b.png"]},
    }
    return RunCard(**{**base, **changes})


def written(path) -> dict:
    card().with_result(RESULT).write(path)
    return json.loads(path.read_text())


def refused(path, content, *words) -> None:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    assert len(refusals.refused(lambda: RunCard.read(path), str(path), *words)) < 700


def test_a_card_comes_back_as_it_was(tmp_path):
    made = card().with_result(RESULT)
    made.write(tmp_path / "x.json")
    assert RunCard.read(tmp_path / "x.json") == made
    assert made.measured() == [RESULT]
    assert json.loads((tmp_path / "x.json").read_text())["schema"] == SCHEMA == "swin-quant/run-card/1"
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.json"]


def test_a_card_of_a_float_run_has_less_in_it(tmp_path):
    before = datetime.now(timezone.utc).replace(microsecond=0)
    made = RunCard("x", {}, {})
    assert before <= datetime.fromisoformat(made.created) <= datetime.now(timezone.utc)
    made.write(tmp_path / "x.json")
    assert RunCard.read(tmp_path / "x.json") == made


def test_a_newer_result_of_the_same_thing_takes_the_place_of_the_older():
    def same(**changes):
        return dataclasses.replace(RESULT, **changes)

    others = [
        same(engine="onnxruntime"),
        same(precision="float32"),
        same(policy="ft-mode2"),
        same(policy=None),
        same(dataset={**DATASET, "sha256": "f" * 64}),
    ]
    made = card()
    for result in [RESULT, *others]:
        made = made.with_result(result)
    newer = same(acc1=12.0, note="again")
    assert made.with_result(newer).measured() == [newer, *others]
    assert made.measured() == [RESULT, *others], "a card is not changed"
    assert made.with_result(RESULT).measured() == [RESULT, *others]


def test_results_of_policies_of_one_name_are_told_apart_by_their_rules():
    one, other = (dataclasses.replace(RESULT, policy_sha256=letter * 64) for letter in "ab")
    made = card().with_result(one).with_result(other)
    assert made.measured() == [one, other]
    renamed = dataclasses.replace(one, policy="called otherwise", acc1=1.0)
    assert made.with_result(renamed).measured() == [renamed, other], "the rules are what a policy is"


WRONG = {
    "calibration.batches": ("10", "calibration.batches"),
    "versions.torch": (2, "versions.torch"),
    "results": ({}, "results"),
    "results.0.acc1": ("70", "results[0].acc1"),
    "schema": ("swin-quant/run-card/0", "run-card/0"),
    "name": ("../escape", "name"),
    "config": ([], "config"),
    "policy": ("ft-mode1", "policy"),
    "policy.name": (None, "policy.name"),
    "source.sha256": ("xyz", "source.sha256"),
    "source.file": ("/etc/passwd", "source.file"),
    "checkpoint.file": ("a\\b", "checkpoint.file"),
    "checkpoint.sha256": (None, "checkpoint.sha256"),
    "calibration.percentile": (True, "calibration.percentile"),
    "calibration.files": (["a", 3], "calibration.files[1]"),
    "results.0.acc5": (None, "results[0].acc5"),
    "results.0.dataset.pictures": (1.5, "results[0].dataset.pictures"),
    "results.0.note": ("x" * 10, None),
    "created": ("yesterday", "created"),
}


@pytest.mark.parametrize("key", WRONG)
def test_a_wrong_value_is_refused_by_its_key(tmp_path, key):
    content = written(tmp_path / "x.json")
    value, word = WRONG[key]
    *parents, last = key.split(".")
    place = content
    for parent in parents:
        place = place[int(parent) if parent.isdigit() else parent]
    place[last] = value
    if word is None:  # the control: a change that is allowed
        (tmp_path / "x.json").write_text(json.dumps(content))
        assert RunCard.read(tmp_path / "x.json").results[0]["note"] == value
    else:
        refused(tmp_path / "x.json", content, word)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("target", []),
        ("float_type", 16),
        ("batch", "2"),
        ("saturation_safe", 1),
        ("saturation_safe", [2]),
        ("plugin", [1]),
    ],
)
def test_options_of_an_artifact_that_are_read_again_have_types(tmp_path, option, value):
    content = card(artifact=ARTIFACT | {"options": {"own": [1], "batch": None, "target": "openvino"}}).to_dict()
    (tmp_path / "x.json").write_text(json.dumps(content))
    assert RunCard.read(tmp_path / "x.json").artifact["options"]["own"] == [1]
    content["artifact"]["options"][option] = value
    refused(tmp_path / "x.json", content, f"artifact.options.{option}")


def test_what_a_card_cannot_be_without(tmp_path):
    content = written(tmp_path / "x.json")
    for key in ("name", "config", "preprocess", "versions", "created"):
        less = {name: value for name, value in content.items() if name != key}
        refused(tmp_path / "x.json", less, key)
    for key in ("engine", "precision", "policy", "dataset", "pictures", "acc1", "acc5", "loss", "batch_size", "device"):
        less = copy.deepcopy(content)
        del less["results"][0][key]
        refused(tmp_path / "x.json", less, f"results[0].{key}")


@pytest.mark.parametrize("file", CARDS, ids=lambda path: path.name)
def test_a_card_of_every_version_is_read_and_rewritten_without_loss(tmp_path, file):
    old = json.loads(file.read_text())
    read = RunCard.read(file)
    read.with_result(RESULT).write(tmp_path / "x.json")
    new = json.loads((tmp_path / "x.json").read_text())
    assert new["results"].pop() == dataclasses.asdict(RESULT)
    assert {key: new[key] for key in old} == old
    later = {"verification", "sensitivity", "searches", "class_names", "wrapped"}
    assert new.keys() - old.keys() <= later
    assert len(read.measured()) == len(old["results"]) > 0


def test_a_key_that_is_not_known_is_refused(tmp_path):
    for place in ("", "calibration", "source"):
        content = written(tmp_path / "x.json")
        (content[place] if place else content)["novel"] = 1
        refused(tmp_path / "x.json", content, f"unknown key '{place}{'.' * bool(place)}novel'")


def test_a_card_of_a_newer_format_says_to_update(tmp_path):
    newer = {**written(tmp_path / "x.json"), "schema": "swin-quant/run-card/2"}
    refused(tmp_path / "x.json", newer, "run-card/2", "run-card/1", "needs a newer swin-quant")
    refused(tmp_path / "x.json", {"schema": "other/run-card/2"}, "is not a run card")
    for other in ([], {"name": "x"}):
        refused(tmp_path / "x.json", other, "is not a run card: a card is a mapping with a key schema")


def test_a_newer_verification_takes_the_place_of_one_of_the_same_engine_and_reference(tmp_path):
    record = VERIFICATION | {"sqnr_db": float("inf")}
    card = RunCard("x", {}, {}).with_verification(record).with_verification({**record, "engine": "onnxruntime"})
    card = card.with_verification({**record, "mean": 0.2, "passed": False})
    card.write(tmp_path / "x.json")
    read = RunCard.read(tmp_path / "x.json").verification
    assert [(one["engine"], one["mean"], one["sqnr_db"]) for one in read] == [
        ("onnxruntime", 0.01, None),
        ("openvino", 0.2, None),
    ]
    content = json.loads((tmp_path / "x.json").read_text())
    content["verification"][0]["passed"] = "yes"
    refused(tmp_path / "x.json", content, "verification[0].passed")


@pytest.mark.parametrize(
    "content", ["", "null", "[]", "{}", '"x"', "<html>", '{"schema": 1}', '{"schema": "' + "s" * 100_000 + '"}']
)
def test_what_is_no_card_is_refused(tmp_path, content):
    refused(tmp_path / "x.json", content)


@pytest.mark.parametrize("depth", [400, 900, 100_000])
def test_a_deeply_nested_card_ends_in_a_sentence_or_a_card(tmp_path, depth):
    text = json.dumps({**written(tmp_path / "x.json"), "config": {"a": "here"}})
    (tmp_path / "x.json").write_text(text.replace('"here"', "[" * depth + "]" * depth))
    try:
        RunCard.read(tmp_path / "x.json")
    except SwinQuantError as error:
        assert str(tmp_path / "x.json") in str(error)


def test_a_checkpoint_that_was_replaced_is_noticed(tmp_path):
    path = tmp_path / "x_calib.pth"
    path.write_bytes(b"weights")
    right = hashlib.sha256(b"weights").hexdigest()
    made = card(checkpoint={"file": path.name, "sha256": right})
    verify_checkpoint(made, path)
    path.write_bytes(b"Weights")
    with pytest.raises(SwinQuantError, match=f"{path}: .*{right[:12]}"):
        verify_checkpoint(made, path)
    with pytest.raises(SwinQuantError, match="no such|cannot be read"):
        verify_checkpoint(made, tmp_path / "gone.pth")
    with pytest.raises(SwinQuantError, match="records no checkpoint"):
        verify_checkpoint(card(checkpoint=None), path)


def test_an_exported_file_in_place_of_its_checkpoint_is_called_so(tmp_path):
    path = tmp_path / "x.onnx"
    path.write_bytes(b"graph")
    artifact = ARTIFACT | {"sha256": hashlib.sha256(b"graph").hexdigest()}
    made = card(checkpoint={"file": "x_calib.pth", "sha256": "0" * 64}, artifact=artifact)
    with pytest.raises(SwinQuantError, match="is an exported file: give its checkpoint, x_calib.pth"):
        verify_checkpoint(made, path)


def located(path, **more):
    return {"file": Path(path).name, "sha256": "c" * 64, "path": str(path), **more}


def test_places_of_files_are_absolute_in_memory_and_relative_in_the_file(tmp_path):
    root = tmp_path.resolve()
    training = {**TRAINING, "start": located(root / "ptq" / "x.pth"), "teacher": located(root / "t.pth", format="pth")}
    made = card(source=located(root / "in" / "x.pth", format="pth"), checkpoint=located(root / "out" / "x_calib.pth"))
    made = dataclasses.replace(made, training=training)
    (root / "out" / "onnx").mkdir(parents=True)
    made.write(root / "out" / "onnx" / "x.json")
    content = json.loads((root / "out" / "onnx" / "x.json").read_text())
    assert (content["source"]["path"], content["checkpoint"]["path"]) == ("../../in/x.pth", "../x_calib.pth")
    assert content["training"]["start"]["path"] == "../../ptq/x.pth"
    assert content["training"]["teacher"]["path"] == "../../t.pth"
    assert str(root) not in json.dumps(content)
    assert RunCard.read(root / "out" / "onnx" / "x.json") == made
    (root / "out").rename(root / "moved")
    assert RunCard.read(root / "moved" / "onnx" / "x.json").checkpoint["path"] == str(root / "moved" / "x_calib.pth")


def test_a_place_that_would_tell_of_the_machine_is_not_written(tmp_path):
    for far in ("/etc/x.pth", str(tmp_path.resolve() / ("d" * 200) / ("e" * 200) / "x.pth"), "/tmp/a\\b/x.pth"):
        card(source=located(far, format="pth")).write(tmp_path / "x.json")
        assert "path" not in json.loads((tmp_path / "x.json").read_text())["source"]
    (tmp_path / "1/2/3/4/5").mkdir(parents=True)
    for deep, written_there in (("1/2/3/4", True), ("1/2/3/4/5", False)):
        card(source=located(tmp_path.resolve() / "x.pth", format="pth")).write(tmp_path / deep / "x.json")
        assert ("path" in json.loads((tmp_path / deep / "x.json").read_text())["source"]) is written_there


@pytest.mark.parametrize(
    "path",
    [
        *"/etc/passwd ../../../../../x.pth a/../b.pth .. a//b.pth a\\b.pth ./x.pth".split(),
        *("", "a\nb.pth", "../" * 4 + "x" * 256, 3),
    ],
)
def test_a_place_must_be_relative_and_plain(tmp_path, path):
    content = written(tmp_path / "x.json")
    content["source"]["path"] = path
    refused(tmp_path / "x.json", content, "path")
