"""Maps and embeddings by commands, for a model calibrated as a classifier, or as a backbone on pictures of mixed
sizes."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from served import posted

from swin_quant.backends.open_artifact import open_artifact
from swin_quant.cli import main
from swin_quant.verbs.service import load_service


@pytest.fixture
def wide(tmp_path):
    """Pictures of several sizes under train/, none square."""
    for number, (width, height) in enumerate([(40, 24), (33, 47), (64, 36), (40, 24)]):
        file = tmp_path / "wide" / "train" / "x" / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        values = np.random.default_rng(number).integers(0, 255, (height, width, 3))
        Image.fromarray(values.astype(np.uint8)).save(file)
    return tmp_path / "wide"


@pytest.mark.slow
def test_a_backbone_calibrated_on_mixed_sizes_is_exported_verified_and_run(exports, wide, tmp_path):
    out, images = tmp_path / "out", ["--images", str(wide / "train" / "x")]
    calibration = ["--output-kind", "features", "--opts", "TEST.SHAPE", "whole", "--pictures", "4", "--policy", "cpu"]
    float_file = str(exports.checkpoint.with_name("micro.pth"))
    assert main(["calibrate", float_file, "--cfg", str(exports.config), "--data-path", str(wide), *calibration,
                 "--output", str(out)]) == 0  # fmt: skip
    card = json.loads((out / "micro_calib.json").read_text())
    assert card["config"]["MODEL"]["OUTPUT_KIND"] == "features" and card["preprocess"]["shape"] == "whole"
    assert card["calibration"]["batch_size"] == 1 and card["calibration"]["pictures"] == 4
    assert main(["export", str(out / "micro_calib.pth"), "--for", "openvino", "--output", str(out)]) == 0
    file = str(out / "micro_features_int8_openvino.onnx")
    assert main(["verify", file, "--engine", "onnxruntime", "openvino", *images]) == 0
    records = json.loads((out / "micro_features_int8_openvino.json").read_text())["verification"]
    assert {record["agreement"] for record in records} == {None} and min(record["cosine"] for record in records) > 0.99
    assert main(["predict", file, *images[1:], "--logits", str(out)]) == 0
    found = np.load(out / "micro_features_int8_openvino_features.npz")
    assert found["features0_1"].shape == (32, 12, 9) and found["features1_2"].shape == (64, 5, 8)
    assert main(["package", file, "--output", str(out / "package")]) == 0
    serve_describes_it_as_its_package(file, out / "package")
    command = [sys.executable, out / "package" / "infer.py", *sorted((wide / "train" / "x").iterdir())]
    for engine in ("onnxruntime", "openvino"):
        saved = out / f"{engine}.npz"
        done = subprocess.run([*command, "--engine", engine, "--save", saved], capture_output=True, text=True, cwd="/")
        assert done.returncode == 0, done.stderr
        assert "1.png: features0 [32, 12, 9], features1 [64, 6, 5]\n" in done.stdout
        packaged = np.load(saved)
        assert set(packaged) == set(found) - {"names", "labels"}
        for name in packaged:
            noise, signal = np.square(packaged[name] - found[name]).sum(), np.square(found[name]).sum()
            assert noise < signal / 100, (engine, name)  # 20 dB: engines round int8 products differently


def serve_describes_it_as_its_package(file, package):
    """By tritonclient's messages, every output by its name; the answer to a picture has the maps of the engine."""
    pytest.importorskip("starlette")
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


@pytest.mark.nightly
def test_an_embedding_of_what_was_calibrated_as_a_classifier(exports, pictures, tmp_path, capsys):
    out = tmp_path / "out"
    exporting = ["--for", "onnxruntime", "--output-kind", "embedding", "--output", str(out)]
    assert main(["export", str(exports.checkpoint), *exporting]) == 0
    file = str(out / "micro_embedding_int8_onnxruntime.onnx")
    assert main(["verify", file, "--data-path", str(pictures), "--checkpoint", str(exports.checkpoint)]) == 0
    assert main(["predict", file, "--data-path", str(pictures), "--logits", str(out)]) == 0
    assert np.load(out / "micro_embedding_int8_onnxruntime_embedding.npz")["embedding"].shape == (7, 64)
    assert main(["predict", file, str(pictures / "val")]) == 2
    assert "predict is about logits, and this model gives embedding" in capsys.readouterr().err


@pytest.mark.slow
def test_fastertransformer_has_classifiers_only(exports, tmp_path, capsys):
    exporting = ["--for", "fastertransformer", "--output-kind", "features", "--output", str(tmp_path)]
    assert main(["export", str(exports.checkpoint), *exporting]) == 2
    assert "FasterTransformer has kernels of Swin V1 and V2 as classifiers only" in capsys.readouterr().err
