"""Artifacts are finished or absent, and have a card with their hash."""

import pytest

from swin_quant.backends.artifact import finish_artifact, read_artifact
from swin_quant.base.errors import SwinQuantError
from swin_quant.cards.card import RunCard
from swin_quant.cards.records import Result


@pytest.fixture
def artifact(tmp_path):
    file, other = tmp_path / "x.onnx", tmp_path / "x.data"
    file.write_bytes(b"graph")
    other.write_bytes(b"weights")
    return finish_artifact(file, RunCard("x", {}, {}), "onnx", "int8", {"opset": 20}, [other])


def test_an_artifact_is_opened_with_its_record(artifact):
    record = read_artifact(artifact.file).record
    assert record["backend"] == "onnx" and record["options"] == {"opset": 20} and record["precision"] == "int8"


def test_an_export_that_did_not_finish_is_refused(artifact):
    artifact.file.with_suffix(".json").unlink()
    with pytest.raises(SwinQuantError, match="has no run card"):
        read_artifact(artifact.file)


@pytest.mark.parametrize("name", ["x.onnx", "x.data"])
def test_a_replaced_file_is_refused(artifact, name):
    artifact.file.with_name(name).write_bytes(b"other")
    with pytest.raises(SwinQuantError, match=f"{name}: is not the file of its run card"):
        read_artifact(artifact.file)


def test_an_export_of_other_options_says_what_it_replaces(artifact, caplog):
    card = RunCard("x", {}, {})
    finish_artifact(artifact.file, card, "onnx", "int8", {"opset": 20, "batch": None})  # batch: none before either
    assert caplog.text == ""
    data = {"name": "animals", "split": "val", "pictures": 7, "sha256": None}
    result = Result("onnxruntime", "int8", None, data, 7, 50.0, 100.0, 0.7, 1, "cpu")
    read_artifact(artifact.file).card.with_result(result).write(artifact.file.with_suffix(".json"))
    finish_artifact(artifact.file, card, "onnx", "int8", {"opset": 17, "batch": 8})
    (line,) = caplog.messages
    assert line == (f"{artifact.file}: replaces an export with opset 20 (now 17), batch None (now 8), and its results")


def test_a_missing_part_is_named(artifact):
    artifact.file.with_name("x.data").unlink()
    with pytest.raises(SwinQuantError, match="x.data: is missing"):
        read_artifact(artifact.file)


def test_the_card_of_another_artifact_is_refused(artifact):
    artifact.file.rename(artifact.file.with_name("y.onnx"))
    artifact.file.with_suffix(".json").rename(artifact.file.with_name("y.json"))
    artifact.file.with_name("x.onnx").write_bytes(b"graph")
    with pytest.raises(SwinQuantError, match="is the run card of x.onnx, not of y.onnx"):
        read_artifact(artifact.file.with_name("y.onnx"))


def test_a_folder_is_no_artifact_that_is_missing(tmp_path):
    with pytest.raises(SwinQuantError, match=f"^{tmp_path}: is a directory: give the artifact file$"):
        read_artifact(tmp_path)
    with pytest.raises(SwinQuantError, match="gone.onnx: no such artifact$"):
        read_artifact(tmp_path / "gone.onnx")


def test_the_card_of_a_checkpoint_is_no_artifact(tmp_path):
    (tmp_path / "x.pth").write_bytes(b"weights")
    RunCard("x", {}, {}).write(tmp_path / "x.json")
    with pytest.raises(SwinQuantError, match="card of a checkpoint"):
        read_artifact(tmp_path / "x.pth")
