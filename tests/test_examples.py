"""examples/: trained checkpoints load and match their cards; scripts and notebooks run as a reader runs them, with a
micro model for a named checkpoint."""

import ast
import json
import runpy
import shutil
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from nightly import share
from vnni import exact_int8

from swin_quant.cards.lineage import find_card
from swin_quant.checkpoint import load_float
from swin_quant.config import load_config
from swin_quant.models import build_model

# Top-1 in % of models trained for minutes only; the others were trained for an hour.
LEAST = {"convnext": 60, "mobilenetv3": 57, "vit": 52}
EXAMPLES = Path(__file__).parents[1] / "examples"
FOLDER = EXAMPLES / "checkpoints"
BOOKS = sorted((EXAMPLES / "notebooks").glob("*.ipynb"))


QUICK = ("resnet_micro_cifar10", "swin_micro_cifar10", "vit_micro_cifar10")
NAMES = [
    pytest.param(path.stem, marks=[pytest.mark.nightly] * (path.stem not in QUICK))
    for path in sorted(FOLDER.glob("*.safetensors"))
]


@pytest.mark.parametrize("name", NAMES)
def test_an_example_loads_and_its_card_is_its_own(name):
    file = FOLDER / f"{name}.safetensors"
    model = build_model(load_config(FOLDER / f"{name}.yaml"))
    source = load_float(model, file)
    card = find_card(str(file))
    assert card.checkpoint["sha256"] == source.sha256 and card.training["epochs"]
    measured = card.measured()[0]
    assert measured.precision == "float32" and measured.acc1 >= LEAST.get(name.partition("_")[0], 80)
    assert f"{measured.acc1:.2f} %" in (FOLDER / "README.md").read_text(), "documented as it was measured"
    assert file.stat().st_size <= 7e6
    assert model(torch.zeros(1, *model.input_shape)).isfinite().all()


SCRIPTS = {  # CI runs the first of three (`share`)
    "calibrate.py": ["{model}", "{data}", "{out}/x.pth"],
    "own_model.py": [],
    "methods.py": ["{model}", "{data}", "4"],
    "deploy.py": ["{model}", "{data}", "onnxruntime", "{out}"],
    "segmentation.py": ["2"],
    "super_resolution.py": ["{data}", "2", "{out}"],
    "own_policy.py": ["{model}", "{data}"],
}


@pytest.fixture
def place(micro, pictures, tmp_path, monkeypatch):
    """place(name) -> the checkpoint, twelve times the pictures, and an empty folder."""
    data = tmp_path / "data"
    shutil.copytree(pictures, data)
    for copy in range(1, 12):
        for file in list((pictures / "train").rglob("*.png")):
            shutil.copy(file, data / "train" / file.parent.name / f"{copy}_{file.name}")
    (tmp_path / "out").mkdir()
    known = partial(load_config, micro / "swin.yaml")
    monkeypatch.setattr("swin_quant.checkpoint.identify.config_for", lambda _, keys=None: known(overrides=keys))
    return {"model": micro / "swin.pth", "data": data, "out": tmp_path / "out"}


def test_every_script_is_tried():
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(SCRIPTS)


@pytest.mark.parametrize("script", share(SCRIPTS, 3))
def test_a_script(script, place, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [script, *(word.format(**place) for word in SCRIPTS[script])])
    runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    assert capsys.readouterr().out


def code_of(book):
    return ["".join(cell["source"]) for cell in json.loads(book.read_text())["cells"] if cell["cell_type"] == "code"]


def test_there_are_notebooks_without_old_results():
    assert BOOKS
    for book in BOOKS:
        cells = json.loads(book.read_text())["cells"]
        assert not [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")], book.name


@pytest.mark.parametrize("book", share(BOOKS, 2), ids=lambda book: book.stem)
@exact_int8
def test_every_cell_of_a_notebook_runs(book, place, monkeypatch):
    for name, key in {"CHECKPOINT": "model", "DATA": "data", "OUT": "out"}.items():
        monkeypatch.setenv(name, str(place[key]))
    names = {}
    for number, source in enumerate(code_of(book)):
        body = ast.parse(source).body
        last = body.pop() if isinstance(body[-1], ast.Expr) else None
        exec(compile(ast.Module(body, []), f"{book.name}, cell {number}", "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), f"{book.name}, cell {number}", "eval"), names)
            assert value is None or getattr(value, "_repr_html_", value.__repr__)()
    assert any(place["out"].iterdir()), "something is saved"
