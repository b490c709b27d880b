"""An obstacle that would stop a run after minutes is named before the first picture is read."""

import functools
import shutil
import sys

import pytest

from swin_quant.backends.backend import Exports
from swin_quant.base.errors import SwinQuantError
from swin_quant.verbs import quantize_steps
from swin_quant.verbs.search_costs import Losses


@pytest.fixture
def quantize(run, micro, pictures, tmp_path, monkeypatch):
    """quantize(flag, ...) -> how it ended; a calibration would be a failure of its own."""

    @functools.wraps(quantize_steps.calibrate)
    def too_late(*_, **__):
        raise SwinQuantError("it calibrates already")

    monkeypatch.setattr(quantize_steps, "calibrate", too_late)
    model = [micro / "swin.pth", "--cfg", micro / "swin.yaml", "--device", "cpu", "--pictures", 8]
    return lambda *words: run("quantize", *model, "--data-path", pictures, "--output", tmp_path / "out", *words)


def test_a_calibration_begins_where_nothing_is_wrong(quantize):
    assert "it calibrates already" in quantize("--for", "onnxruntime").err


@pytest.mark.parametrize("package", ["onnx", "onnxscript"])
def test_a_package_that_the_export_imports(quantize, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    line = quantize("--for", "onnxruntime").error(2)
    assert f"{package} cannot be imported" in line and "[onnx]" in line


def test_a_missing_plot_library_is_named_before_training(run, calibrated, scoring_flags, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    line = run("finetune", calibrated, *scoring_flags, "--plot", "svg", "--output", tmp_path / "out").error(2)
    assert "[logs]" in line and not list(tmp_path.glob("out/*"))


def test_a_folder_of_pictures_that_is_not_there(quantize, tmp_path, monkeypatch):
    """The choice of a policy may compile operators, which takes a while."""
    monkeypatch.setattr(Exports, "policies_for", lambda *_: pytest.fail("it chooses a policy already"))
    assert "no pictures: give --data-path DIR" in quantize("--for", "openvino", "--data-path", "").error(2)
    line = quantize("--for", "openvino", "--data-path", tmp_path / "nowhere").error(1)
    assert f"{tmp_path / 'nowhere'}: no such file or folder" in line and "--data-path" in line


@pytest.mark.parametrize("flag", ["--output", "--json"])
def test_a_place_that_cannot_be_written(quantize, tmp_path, flag):
    (tmp_path / "file").touch()
    line = quantize("--for", "onnxruntime", flag, tmp_path / "file" / "x").error(1)
    assert str(tmp_path / "file" / "x") in line and "cannot be" in line


def test_labels_that_do_not_fit(quantize, pictures, tmp_path):
    """The calibration needs none, the score behind it does."""
    data = shutil.copytree(pictures, tmp_path / "data")
    for number in range(3):
        shutil.copytree(data / "val" / "cat", data / "val" / f"more{number}")
    line = quantize("--for", "onnxruntime", "--data-path", data).error(1)
    assert "val" in line and "classes" in line


def test_too_few_pictures_for_the_budget(quantize, run, calibrated, pictures, tmp_path, monkeypatch):
    """Before a calibration, and in a search of its own before the first forward."""

    def too_early(*_):
        raise SwinQuantError("it computes already")

    done = quantize("--for", "onnxruntime", "--policy", "auto", "--max-drop", 0.05)
    assert "1024 pictures hardly tell a drop of 0.05 points: give 2000 or more" in done.err, done
    assert done.err.index("hardly tell") < done.err.index("it calibrates already")
    monkeypatch.setattr(Losses, "__init__", too_early)
    copy = shutil.copytree(calibrated.parent, tmp_path / "copy") / calibrated.name
    words = ["--data-path", pictures, "--engine", "onnxruntime", "--max-drop", 5, "--pictures", 8, "--device", "cpu"]
    done = run("search", copy, *words, "--output", tmp_path / "found")
    assert done.err.index("8 pictures hardly tell") < done.err.index("it computes already")


def test_int4_weights_of_a_policy_that_has_none(quantize):
    assert "policy onnxruntime has no weights of 4 bits" in quantize("--for", "onnxruntime", "--int4-weights").error(2)
    assert "means nothing to --for tensorrt" in quantize("--for", "tensorrt", "--int4-weights").error(2)
    planned = quantize("--for", "onnxruntime", "--policy", "w4a16", "--int4-weights", "--dry-run").out.splitlines()
    assert ["--int4-weights" in line for line in planned] == [False, True, False, False]
