"""A QAT checkpoint's original is found where its cards say, moved or not, and accepted by its hash alone."""

import dataclasses
import hashlib
import shutil

import pytest
from cards_of_results import TRAINING

from swin_quant.base.errors import SwinQuantError
from swin_quant.cards.card import RunCard
from swin_quant.cards.lineage import find_original, find_qat_start, qat_starts
from swin_quant.cards.records import CheckpointRecord
from tests.helpers.refusals import refused


def record(file, **more):
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    return {"file": file.name, "sha256": sha256, "path": str(file), **more}


@pytest.fixture
def run(tmp_path):
    """run/float.pth, run/ptq/x_calib.pth and run/qat/x_qat.pth with their cards, as commands leave them."""
    for number, name in enumerate(("float.pth", "ptq/x_calib.pth", "qat/x_qat.pth")):
        (tmp_path / "run" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / name).write_bytes(bytes([number]))
    root = tmp_path / "run"
    source = record(root / "float.pth", format="pth")
    made = RunCard("x", {}, {"size": 32}, source, policy={"name": "p", "rules": []})
    written(made, root / "ptq" / "x_calib.pth")
    trained(root, "ptq/x_calib.pth", "qat/x_qat.pth")
    return root


def written(card, file):
    dataclasses.replace(card, checkpoint=CheckpointRecord(file=file.name, sha256=record(file)["sha256"])).write(
        file.with_suffix(".json")
    )


def trained(root, start, file):
    """The card of a QAT result from `start`."""
    training = {**TRAINING, "start": record(root / start)}
    before = RunCard.read((root / start).with_suffix(".json"))
    written(dataclasses.replace(before, training=training), root / file)


def card(root, name="qat/x_qat.json"):
    return RunCard.read(root / name)


def folder(root):
    return [root / "qat"]


def test_the_original_is_where_the_card_says(run):
    assert find_original(card(run), folder(run)) == run / "float.pth"
    assert find_qat_start(card(run), folder(run)).file == run / "ptq" / "x_calib.pth"


def test_a_run_that_was_moved_as_a_whole_is_found_again(run, tmp_path):
    elsewhere = run.rename(tmp_path / "elsewhere")
    assert find_original(card(elsewhere), folder(elsewhere)) == elsewhere / "float.pth"
    assert find_qat_start(card(elsewhere), folder(elsewhere)).file == elsewhere / "ptq" / "x_calib.pth"


def test_what_lies_beside_the_card_is_found_by_name_and_taken_by_hash(run):
    shutil.move(run / "float.pth", run / "qat" / "float.pth")
    shutil.rmtree(run / "ptq")
    assert find_original(card(run), folder(run)) == run / "qat" / "float.pth"
    (run / "qat" / "float.pth").write_bytes(b"another")
    assert find_original(card(run), folder(run)) is None


def test_the_start_does_not_where_it_was_trained_or_is_of_another_original(run):
    (run / "float.pth").unlink()
    start = run / "ptq" / "x_calib.json"
    good = RunCard.read(start)
    dataclasses.replace(good, training=TRAINING).write(start)
    assert find_original(card(run), folder(run)) is None and find_qat_start(card(run), folder(run)) is None
    dataclasses.replace(good, source={**good.source, "sha256": "f" * 64}).write(start)
    assert find_original(card(run), folder(run)) is None and find_qat_start(card(run), folder(run)) is None
    start.unlink()
    assert find_original(card(run), folder(run)) is None
    with pytest.raises(SwinQuantError, match="x_calib.pth: is not the float checkpoint that the run began with"):
        find_original(card(run), [], run / "ptq" / "x_calib.pth")


def test_the_teacher_may_be_the_original(run):
    qat = card(run)
    teacher = record(run / "float.pth", format="pth")
    training = {**qat.training, "teacher": teacher, "start": None}
    source = {key: value for key, value in qat.source.items() if key != "path"}
    assert find_original(dataclasses.replace(qat, source=source, training=training), []) == run / "float.pth"


def test_qat_after_qat(run):
    """Through two starts to the calibrated checkpoint, also if only that is left of the original's weights."""
    (run / "again").mkdir()
    (run / "again" / "x_qat.pth").write_bytes(b"again")
    trained(run, "qat/x_qat.pth", "again/x_qat.pth")
    again = card(run, "again/x_qat.json")
    assert find_original(again, [run / "again"]) == run / "float.pth"
    (run / "float.pth").unlink()
    assert [start.file.name for start in qat_starts(again, [])] == ["x_qat.pth", "x_calib.pth"]
    assert find_original(again, []) == find_qat_start(again, []).file == run / "ptq" / "x_calib.pth"
    (run / "ptq" / "x_calib.pth").unlink()
    assert find_original(again, []) is None and find_qat_start(again, []) is None


def test_a_card_that_starts_from_itself_ends(run):
    qat = card(run)
    (run / "float.pth").unlink()
    itself = {**qat.checkpoint, "path": str(run / "qat" / "x_qat.pth")}
    dataclasses.replace(qat, training={**qat.training, "start": itself}).write(run / "qat" / "x_qat.json")
    assert find_original(card(run), folder(run)) is None


def test_a_given_original_is_taken_by_its_hash(run, tmp_path):
    elsewhere = shutil.move(run / "float.pth", tmp_path / "another_name.pth")
    assert find_original(card(run), [], elsewhere) == elsewhere
    wrong = tmp_path / "wrong.pth"
    wrong.write_bytes(b"wrong")
    with pytest.raises(SwinQuantError, match="float .*wrong.pth: is not .* began with, float.pth: its SHA-256 is"):
        find_original(card(run), [], wrong)
    refused(lambda: find_original(card(run), [], tmp_path / "none.pth"), "none.pth: cannot be read")
    refused(lambda: find_original(dataclasses.replace(card(run), source=None), [], wrong), "names no original")


def test_a_calibrated_file_is_given_for_the_original_where_the_run_began_with_it(run):
    """Another calibration of the same original is another file, whatever its card says."""
    start = run / "ptq" / "x_calib.pth"
    assert find_original(card(run), [], start) == start
    other = run / "ptq" / "other_calib.pth"
    other.write_bytes(b"another")
    written(RunCard.read(start.with_suffix(".json")), other)
    with pytest.raises(SwinQuantError, match="other_calib.pth: is not the float checkpoint that the run began with"):
        find_original(card(run), [], other)
