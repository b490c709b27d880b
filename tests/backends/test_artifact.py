"""Artifacts are finished or absent, and have a card with their hash."""

import pytest

from swin_quant.backends.artifact import finish_artifact, read_artifact
from swin_quant.base.errors import SwinQuantError
from swin_quant.cards.card import RunCard


@pytest.fixture
def artifact(tmp_path):
    file, other = tmp_path / "x.onnx", tmp_path / "x.data"
    file.write_bytes(b"graph")
    other.write_bytes(b"weights")
    return finish_artifact(file, RunCard("x", {}, {}), "onnx", "int8", {"opset": 20}, [other])


def test_an_artifact_is_opened_with_its_record(artifact):
    record = read_artifact(artifact.file).record
    assert record["backend"] == "onnx" and record["options"] == {"opset": 20} and record["precision"] == "int8"


def renamed(file):
    file.with_suffix(".json").rename(file.with_name("y.json"))
    file.rename(file.with_name("y.onnx"))
    file.write_bytes(b"graph")


REFUSED = {
    "no card": (lambda file: file.with_suffix(".json").unlink(), "x.onnx", "has no run card"),
    "another file": (lambda file: file.write_bytes(b"other"), "x.onnx", "x.onnx: is not the file of its run card"),
    "another part": (lambda file: file.with_name("x.data").write_bytes(b"other"), "x.onnx", "x.data: is not the file"),
    "no part": (lambda file: file.with_name("x.data").unlink(), "x.onnx", "x.data: is missing"),
    "another card": (renamed, "y.onnx", "is the run card of x.onnx, not of y.onnx"),
    "a folder": (lambda file: None, "", "is a directory: give the artifact file$"),
    "nothing": (lambda file: None, "gone.onnx", "gone.onnx: no such artifact"),
    "a checkpoint": (lambda file: RunCard("x", {}, {}).write(file.with_suffix(".json")), "x.onnx", "of a checkpoint"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_whole_artifact_is_refused(artifact, case):
    change, name, said = REFUSED[case]
    change(artifact.file)
    with pytest.raises(SwinQuantError, match=said):
        read_artifact(artifact.file.with_name(name) if name else artifact.file.parent)


def test_the_log_names_the_policy_whose_file_is_replaced(artifact, caplog):
    caplog.set_level("INFO", "swin_quant")
    rules = {"cpu": [{"enable": "a"}], "qdq": [{"enable": "b"}]}
    for name, told in (("cpu", ""), ("cpu", ""), ("qdq", "x.onnx replaces the file of policy cpu")):
        caplog.clear()
        card = RunCard("x", {}, {}, policy={"name": name, "rules": rules[name]})
        finish_artifact(artifact.file, card, "onnx", "int8", {})
        assert told in caplog.text and bool(told) == bool(caplog.text)
