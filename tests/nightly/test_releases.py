"""The matrix of releases: a cell says right, wrong or refused. `make nightly` runs its short form."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return __import__("releases")


def test_a_page_says_which_release_is_wrong_and_which_refuses(script, tmp_path):
    def row(**given):
        return script.Row(**{"model": "V1", "form": "onnxruntime", "engine": "openvino"} | given)

    rows = [
        row(release="2024.6.0", db=-3.5),
        row(release="2024.6.0", db=41.0, batch=4),
        row(release="2023.3.0", error="no such operator"),
        row(release="2023.3.0", form="float", weights="none", db=59.0),
    ]
    script.page(rows, tmp_path / "page.md")
    lines = (tmp_path / "page.md").read_text().splitlines()
    (wrong,) = [line.split(" | ") for line in lines if line.startswith("2024.6.0 |")]
    (refused,) = [line.split(" | ") for line in lines if line.startswith("2023.3.0 |")]
    titles = ["release", *script.COLUMNS, "integer"]
    assert dict(zip(titles, wrong, strict=True))["int8, any batch"] == "**-3.5**"
    assert dict(zip(titles, wrong, strict=True))[f"batch {script.BATCH}"] == "41.0"
    found = dict(zip(titles, refused, strict=True))
    assert (found["int8, any batch"], found["float, opset 17"], found["maps"]) == ("refused", "**59.0**", "-")
    assert "- 2023.3.0: `no such operator`" in lines
    assert len((tmp_path / "page.csv").read_text().splitlines()) == 1 + len(rows)


def test_an_error_has_its_reason_and_no_path_of_a_machine(script, tmp_path, capsys, monkeypatch):
    """As ONNX Runtime 1.16 says it, with the file's path and a place in sources that were somewhere else."""
    file = tmp_path / "V1_qdq_20_None_column.onnx"
    reason = "ONNX Runtime only supports released opset versions. Opset 20 is under development."

    def refuse(path, packages):
        place = "/onnxruntime_src/core/graph/model_load_utils.h:46 void ort::Validate(const map<string, int>&, int)"
        raise RuntimeError(
            f"[ONNXRuntimeError] : 1 : FAIL : Load model from {path} failed:{place} {reason} {'x' * 300}"
        )

    monkeypatch.setattr(script, "_onnxruntime", refuse)
    monkeypatch.setitem(sys.modules, "numpy", SimpleNamespace(load=lambda path: None))
    script.judge("onnxruntime", str(tmp_path), str(tmp_path), [file.stem])
    said = json.loads(capsys.readouterr().out)["error"]
    assert said == f"[ONNXRuntimeError] : 1 : FAIL : Load model from the file failed: {reason}"


def test_the_latest_patch_of_each_minor_release_is_tried(script):
    assert script.latest(["1.18.0", "1.17.3", "1.17.1", "1.9.0", "1.16.3"], "1.16") == ["1.16.3", "1.17.3", "1.18.0"]
