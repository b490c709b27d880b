"""The notebooks of examples/ as a reader runs them, on a micro model: cell by cell, showing each cell's last value."""

import ast
import json
import shutil
from functools import partial
from pathlib import Path

import pytest

from swin_quant.config import load_config

BOOKS = sorted((Path(__file__).parents[1] / "examples" / "notebooks").glob("*.ipynb"))


@pytest.fixture
def at_hand(micro, pictures, tmp_path, monkeypatch):
    """The notebooks' environment: a checkpoint, enough pictures for 80 and 64 others, a folder."""
    data = tmp_path / "data"
    shutil.copytree(pictures, data)
    for copy in range(1, 12):
        for file in list((pictures / "train").rglob("*.png")):
            shutil.copy(file, data / "train" / file.parent.name / f"{copy}_{file.name}")
    (tmp_path / "out").mkdir()
    for name, place in {"CHECKPOINT": micro / "swin.pth", "DATA": data, "OUT": tmp_path / "out"}.items():
        monkeypatch.setenv(name, str(place))
    known = partial(load_config, micro / "swin.yaml")
    monkeypatch.setattr("swin_quant.checkpoint.identify.config_for", lambda _, keys=None: known(overrides=keys))
    return tmp_path / "out"


def code_of(book):
    return ["".join(cell["source"]) for cell in json.loads(book.read_text())["cells"] if cell["cell_type"] == "code"]


def test_there_are_notebooks_without_old_results():
    assert BOOKS
    for book in BOOKS:
        cells = json.loads(book.read_text())["cells"]
        assert not [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")], book.name


@pytest.mark.slow
@pytest.mark.parametrize("book", BOOKS, ids=lambda book: book.stem)
def test_every_cell_of_a_notebook_runs(book, at_hand):
    for engine in ("onnxruntime", "openvino") if "export" in book.stem else ():
        pytest.importorskip(engine)
    names = {}
    for number, source in enumerate(code_of(book)):
        body = ast.parse(source).body
        last = body.pop() if isinstance(body[-1], ast.Expr) else None
        exec(compile(ast.Module(body, []), f"{book.name}, cell {number}", "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), f"{book.name}, cell {number}", "eval"), names)
            assert value is None or getattr(value, "_repr_html_", value.__repr__)()
    assert any(at_hand.iterdir()), "something is saved"
