"""The scripts in examples/ as a reader runs them, with a micro model for a named checkpoint."""

import runpy
import shutil
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "examples"
SCRIPTS = {
    "calibrate.py": ["{model}", "{data}", "{out}/x.pth"],
    "deploy.py": ["{model}", "{data}", "onnxruntime", "{out}"],
    "own_policy.py": ["{model}", "{data}"],
    "own_model.py": [],
    "methods.py": ["{model}", "{data}", "4"],
    "segmentation.py": ["2"],
}


def test_every_script_is_tried():
    assert {path.name for path in FOLDER.glob("*.py")} == set(SCRIPTS)


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script(script, micro, pictures, tmp_path, monkeypatch, capsys):
    data = tmp_path / "data"
    shutil.copytree(pictures, data)
    for copy in range(1, 8):  # the scripts take 80 pictures
        for file in list((pictures / "train").rglob("*.png")):
            shutil.copy(file, data / "train" / file.parent.name / f"{copy}_{file.name}")
    places = {"model": micro / "swin.pth", "data": data, "out": tmp_path / "out"}
    (tmp_path / "out").mkdir()
    monkeypatch.setattr("swin_quant.checkpoint.identify.config_for", lambda *_: config(micro))
    monkeypatch.setattr(sys, "argv", [script, *(word.format(**places) for word in SCRIPTS[script])])
    runpy.run_path(str(FOLDER / script), run_name="__main__")
    assert capsys.readouterr().out


def config(micro):
    from swin_quant.config import load_config

    return load_config(micro / "swin.yaml")
