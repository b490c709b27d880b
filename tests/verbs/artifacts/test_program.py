"""An ExecuTorch program through every command: verified, scored, asked and packaged."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import command

from swin_quant.backends.executorch.export import load
from swin_quant.backends.open_artifact import open_artifact
from swin_quant.base.errors import UsageError
from swin_quant.cards.card import RunCard
from swin_quant.score.options import EngineOptions
from tests.verbs.artifacts.test_package import alone, expected

pytestmark = pytest.mark.nightly  # CI writes and runs smaller programs: tests/backends/executorch


@pytest.fixture(scope="module")
def _program(_exports) -> Path:
    pytest.importorskip("executorch.runtime")
    folder = _exports.checkpoint.parent / "executorch"
    command("export", _exports.checkpoint, "--for", "executorch", "--batch", 2, "--output", folder, "--quiet")
    (program,) = folder.glob("*.pte")
    return program


@pytest.fixture
def program(_program, exports, tmp_path) -> Path:
    """An ExecuTorch program for two pictures, in a copy of the folder of its checkpoint."""
    folder = Path(shutil.copytree(_program.parent, exports.checkpoint.parent / "executorch", dirs_exist_ok=True))
    return folder / _program.name


def test_an_executorch_program_is_verified_scored_and_asked(run, program, pictures, tmp_path):
    """Nearer to fake-quant than to float it is not: the runtime rounds inputs, too, which fake-quant leaves as they
    are."""
    assert "FAIL" not in run("verify", program, "--data-path", pictures, "--device", "cpu").ok().out
    simulated, _ = RunCard.read(program.with_suffix(".json")).verification
    assert simulated["engine"] == "ExecuTorch" and simulated["passed"] and simulated["policy"] == "executorch"
    run("evaluate", program, "--data-path", pictures, "--device", "cpu", "--no-own-float").ok()  # the demo has it
    results = [each for each in RunCard.read(program.with_suffix(".json")).results if "ExecuTorch" in each["engine"]]
    (result,) = (each for each in results if each["policy"])
    assert result["precision"] == "int8" and result["dataset"]["pictures"] == 7
    run("predict", program, "--data-path", pictures, "--json", tmp_path / "answers.json").ok()
    assert len(json.loads((tmp_path / "answers.json").read_text())["pictures"]) == 7


def test_every_product_of_the_blocks_is_int8_and_one_picture_is_answered_as_in_a_batch(program):
    artifact = open_artifact(program)
    products = artifact.record["options"]["products"]
    floats = {name for name, type_ in products.items() if type_ != "int8"}
    assert floats <= {"head", "patch_embed.proj", "patch_embed"} and len(products) - len(floats) == 3 * 4 + 1
    loaded, images = load(artifact, EngineOptions(threads=1)), torch.randn(2, 3, 32, 32)
    assert loaded.details["int8_gemms"] == 13
    torch.testing.assert_close(loaded(images[:1]), loaded(images)[:1])  # filled up to the program's batch
    with pytest.raises(UsageError, match="a batch of 3 is above its limit of 2 pictures"):
        loaded(torch.zeros(3, 3, 32, 32))


def test_a_program_is_packaged_with_its_runner_and_the_lines_for_devices(run, program, pictures, tmp_path):
    """Three pictures through a program of two give our logits to the bit; no file of another engine is there."""
    run("package", program, "--output", tmp_path / "package").ok()
    names = {"README.md", "card.json", "infer.py", "model.pte", "package.json", "preprocess.json", "preprocess.py"}
    found = {file.name for file in (tmp_path / "package").iterdir()} - {"labels.txt"}
    assert found == names | {"requirements.txt"}
    about = json.loads((tmp_path / "package" / "package.json").read_text())
    assert about["engine"] == "executorch" and about["batch"] == 2 and about["quantized"]
    text = (tmp_path / "package" / "README.md").read_text()
    assert "new long[] {2, 3, 32, 32}" in text and "shape: [2, 3, 32, 32]" in text
    files = sorted((pictures / "val").rglob("*.png"))[:3]
    words = [tmp_path / "package" / "infer.py", *files, "--threads", 1, "--save", tmp_path / "out.npy"]
    # torch, which the runtime imports, looks for onnx
    done = alone(*words, forbidden=("swin_quant", "timm"))
    assert done.returncode == 0, done.stderr
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), expected(program, "executorch", files))
    changed = about | {"releases": {"executorch": ">=99.0"}}
    (tmp_path / "package" / "package.json").write_text(json.dumps(changed))
    done = alone(*words, forbidden=("swin_quant",))
    assert done.returncode == 1 and "does not run this model: pip install 'executorch>=99.0'" in done.stderr
