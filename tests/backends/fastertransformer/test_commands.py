"""export_ft.py on our checkpoints, and on FasterTransformer's own, which have no run card."""

import json

import pytest
import torch
import yaml

from swin_quant.backends.fastertransformer.emulator import load
from swin_quant.backends.open_artifact import open_artifact
from swin_quant.cli import main

ARCHITECTURE = {"PATCH_SIZE": 2, "EMBED_DIM": 32, "DEPTHS": [2, 1], "NUM_HEADS": [1, 2], "WINDOW_SIZE": 2}
MORE = {"swin": {}, "swinv2": {"PRETRAINED_WINDOW_SIZES": [0, 0]}}


@pytest.fixture
def export(tmp_path, calibrated, capsys):
    """export("--flag ...", kind, wrap) -> exit code and output of an export of a checkpoint as FasterTransformer saves
    it: bare, or by its QAT."""

    def make(flags, kind="swin", wrap=False, backend="fastertransformer", **keys):
        known = ARCHITECTURE | MORE[kind] | keys
        model = {"TYPE": kind, "NAME": f"their_{kind}", "NUM_CLASSES": 5, kind.upper(): known}
        config, file = tmp_path / f"{kind}.yaml", tmp_path / f"{kind}.pth"
        config.write_text(yaml.safe_dump({"DATA": {"IMG_SIZE": 8}, "MODEL": model}))
        state = calibrated(kind, **keys).state_dict()
        torch.save({"model": state, "epoch": 4} if wrap else state, file)
        files = f"--cfg {config} --checkpoint {file} --output {tmp_path}/out"
        return main(f"export --for {backend} {files} {flags}".split()), capsys.readouterr()

    return make


@pytest.mark.parametrize(("kind", "wrap"), [("swin", False), ("swin", True), ("swinv2", False)])
def test_a_checkpoint_of_fastertransformer_s(export, calibrated, kind, wrap):
    code, done = export("--policy ft-mode1 --check --sm 75", kind, wrap)
    assert code == 0 and "largest difference" in done.err
    artifact = open_artifact(done.out.strip())
    assert artifact.file.name == f"their_{kind}_int8_sm75.safetensors"
    images = torch.randn(4, 3, 8, 8)
    with torch.inference_mode():
        expected = calibrated(kind)(images)
    assert (load(artifact)(images) - expected).abs().mean() < 0.1 * expected.std()


def test_a_float_export(export):
    code, done = export("--precision float --float-type float16 --check", "swinv2")
    manifest = open_artifact(done.out.strip()).file.with_name("their_swinv2_float16_sm80_manifest.json")
    manifest = json.loads(manifest.read_text())
    assert code == 0 and manifest["target"]["op"] == "SwinTransformer"
    assert len(manifest["entries"]) == 3 * 15 + 2 * 5 + 6


def test_fix_gelu_bias(export):
    flags = "--policy ft-mode1 --fix-gelu-bias"
    code, done = export(flags)
    assert code == 2 and "--fix-gelu-bias: it has 256 hidden channels at most" in done.err
    code, done = export(flags, MLP_RATIO=68.0)
    assert code == 0 and open_artifact(done.out.strip()).record["options"]["fix_gelu_bias"] is True
    code, done = export(flags, backend="onnx")
    assert code == 2 and "--fix-gelu-bias: means nothing to --for onnx" in done.err
