"""export_ft.py on our checkpoints, and on FasterTransformer's own, which have no run card."""

import json

import pytest
import torch
import yaml

from swin_quant.backends.fastertransformer.engine import load
from swin_quant.backends.open_artifact import open_artifact
from swin_quant.cli import main

ARCHITECTURE = {"PATCH_SIZE": 2, "EMBED_DIM": 32, "DEPTHS": [2, 1], "NUM_HEADS": [1, 2], "WINDOW_SIZE": 2}
MORE = {"swin": {}, "swinv2": {"PRETRAINED_WINDOW_SIZES": [0, 0]}}


@pytest.fixture
def theirs(tmp_path, calibrated):
    """theirs("swin", wrap) -> flags for a checkpoint as FasterTransformer saves it: bare, or by its QAT."""

    def make(kind="swin", wrap=False, **keys):
        keys = ARCHITECTURE | MORE[kind] | keys
        model = {"TYPE": kind, "NAME": f"their_{kind}", "NUM_CLASSES": 5, kind.upper(): keys}
        config = tmp_path / f"{kind}.yaml"
        config.write_text(yaml.safe_dump({"DATA": {"IMG_SIZE": 8}, "MODEL": model}))
        state = calibrated(kind, **{key: keys[key] for key in keys.keys() - ARCHITECTURE.keys()}).state_dict()
        file = tmp_path / f"{kind}.pth"
        torch.save({"model": state, "epoch": 4} if wrap else state, file)
        return ["--cfg", str(config), "--checkpoint", str(file), "--output", str(tmp_path / "out")]

    return make


@pytest.mark.parametrize(("kind", "wrap"), [("swin", False), ("swin", True), ("swinv2", False)])
def test_a_checkpoint_of_fastertransformer_s(theirs, calibrated, capsys, kind, wrap):
    assert (
        main(
            [
                "export",
                "--for",
                "fastertransformer",
                *theirs(kind, wrap),
                "--policy",
                "ft-mode1",
                "--check",
                "--sm",
                "75",
            ]
        )
        == 0
    )
    done = capsys.readouterr()
    artifact = open_artifact(done.out.strip())
    assert artifact.file.name == f"their_{kind}_int8_sm75.safetensors" and "largest difference" in done.err
    images = torch.randn(4, 3, 8, 8)
    with torch.inference_mode():
        expected = calibrated(kind)(images)
    assert (load(artifact)(images) - expected).abs().mean() < 0.1 * expected.std()


def test_a_float_export(theirs, capsys):
    assert (
        main(
            [
                "export",
                "--for",
                "fastertransformer",
                *theirs("swinv2"),
                "--precision",
                "float",
                "--float-type",
                "float16",
                "--check",
            ]
        )
        == 0
    )
    file = open_artifact(capsys.readouterr().out.strip()).file
    manifest = json.loads(file.with_name("their_swinv2_float16_sm80_manifest.json").read_text())
    assert manifest["target"]["op"] == "SwinTransformer" and len(manifest["entries"]) == 3 * 15 + 2 * 5 + 6


def test_fix_gelu_bias(theirs, capsys, tmp_path):
    def run(*flags, backend="fastertransformer"):
        code = main(["export", *flags, "--for", backend, "--policy", "ft-mode1", "--fix-gelu-bias"])
        return code, capsys.readouterr()

    code, done = run(*theirs())
    assert code == 2 and "--fix-gelu-bias: it has 256 hidden channels at most" in done.err
    code, done = run(*theirs(MLP_RATIO=68.0))
    assert code == 0 and open_artifact(done.out.strip()).record["options"]["fix_gelu_bias"] is True
    code, done = run(*theirs(), backend="onnx")
    assert code == 2 and "--fix-gelu-bias: means nothing to --for onnx" in done.err
