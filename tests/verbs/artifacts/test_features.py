"""Maps and embeddings by commands, for a model calibrated as a classifier, or as a backbone on pictures of mixed
sizes."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from commands import command
from PIL import Image
from served import posted

from swin_quant.backends.open_artifact import open_artifact
from swin_quant.verbs.serve import load_service


@pytest.fixture
def wide(tmp_path):
    """Pictures of several sizes under train/, none square."""
    for number, (width, height) in enumerate([(40, 24), (33, 47), (64, 36), (40, 24)]):
        file = tmp_path / "wide" / "train" / "x" / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        values = np.random.default_rng(number).integers(0, 255, (height, width, 3))
        Image.fromarray(values.astype(np.uint8)).save(file)
    return tmp_path / "wide"


def test_a_backbone_calibrated_on_mixed_sizes_is_exported_verified_and_run(exports, wide, tmp_path):
    out, images = tmp_path / "out", ["--images", wide / "train" / "x"]
    words = ["--cfg", exports.config, "--data-path", wide, "--output-kind", "features", "--pictures", 4]
    words += ["--policy", "cpu", "--opts", "TEST.SHAPE", "whole", "--output", out]
    command("calibrate", exports.checkpoint.with_name("micro.pth"), *words)
    card = json.loads((out / "micro_calib.json").read_text())
    assert card["config"]["MODEL"]["OUTPUT_KIND"] == "features" and card["preprocess"]["shape"] == "whole"
    assert card["calibration"]["batch_size"] == 1 and card["calibration"]["pictures"] == 4
    command("export", out / "micro_calib.pth", "--for", "openvino", "--saturation-safe", "--output", out)
    file = out / "micro_features_w7a8_openvino.onnx"
    command("verify", file, "--engine", "onnxruntime", "openvino", *images)
    records = json.loads(file.with_suffix(".json").read_text())["verification"]
    assert {record["agreement"] for record in records} == {None} and min(record["cosine"] for record in records) > 0.99
    places, found = sorted((wide / "train" / "x").iterdir()), {}
    command("package", file, "--output", out / "package")
    serve_describes_it_as_its_package(file, out / "package")
    infer = [sys.executable, out / "package" / "infer.py", *places]
    for engine in ("onnxruntime", "openvino"):
        saved = out / f"{engine}.npz"
        done = subprocess.run([*infer, "--engine", engine, "--save", saved], capture_output=True, text=True, cwd="/")
        assert done.returncode == 0, done.stderr
        assert "1.png: features0 [32, 12, 9], features1 [64, 6, 5]\n" in done.stdout
        packaged = np.load(saved)
        assert packaged["features0_1"].shape == (32, 12, 9) and packaged["features1_2"].shape == (64, 5, 8)
        found = found or dict(packaged)
        assert set(packaged) == set(found)
        for name in packaged:
            noise, signal = np.square(packaged[name] - found[name]).sum(), np.square(found[name]).sum()
            assert noise < signal / 100, (engine, name)  # 20 dB: engines round int8 products differently


def serve_describes_it_as_its_package(file, package):
    """By tritonclient's messages, every output by its name; the answer to a picture has the maps of the engine."""
    served = load_service(open_artifact(file), "onnxruntime")
    about = json.loads((package / "package.json").read_text())
    assert [end.to_dict() for end in served.model.outputs] == about["outputs"]
    assert (about["input"], about["extras"]) == (served.model.input.to_dict(), [])
    assert about["outputs"][0] == {"name": "features0", "type": "float32", "shape": [32, -1, -1]}
    assert "dims: [ 3, -1, -1 ]" in (package / "models" / served.model.name / "config.pbtxt").read_text()
    images = torch.randn(2, 3, 24, 36)
    body = {"inputs": [{"name": "images", "datatype": "FP32", "shape": [2, 3, 24, 36], "data": images.tolist()}]}
    (answer,) = posted(served, (f"/v2/models/{served.model.name}/infer", {"json": body}))
    outputs = answer.json()["outputs"]
    for output, due in zip(outputs, served.run(images), strict=True):
        assert output["shape"] == list(due.shape)
        np.testing.assert_allclose(output["data"], due.flatten(), rtol=1e-4, atol=1e-4)


def test_fastertransformer_has_classifiers_only(exports, tmp_path, run):
    words = ["--for", "fastertransformer", "--output-kind", "features", "--output", tmp_path]
    said = "--for fastertransformer runs Swin V1 and V2 as classifiers only"
    done = run("export", exports.checkpoint, *words)
    assert done.code == 2 and said in done.err.splitlines()[-1]
