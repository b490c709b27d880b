"""swin-quant align on artifacts: every tensor that an engine shows equals the checkpoint's, in the same layout."""

import json
from dataclasses import replace

import numpy as np
import onnx
import pytest
import torch
from vnni import exact_int8

import swin_quant as sq
from swin_quant.base.files import compute_sha256
from swin_quant.cards.card import RunCard
from swin_quant.config import load_config
from swin_quant.models import build_model

pytestmark = pytest.mark.slow


BLOCKS = ["layers.0.blocks.0", "layers.0.blocks.1", "layers.1.blocks.0"]


@pytest.fixture
def aligned(run, pictures):
    """aligned(A, B, flags ...) -> the JSON, and {tensor: SQNR in dB}, None for equal tensors."""

    def go(*words):
        done = run("align", *words, "--data-path", pictures, "--pictures", 3, "--json", "--quiet").ok()
        found = json.loads(done.out)
        return found, {row["name"]: row["sqnr_db"] for row in found["tensors"]}

    return go


@pytest.mark.parametrize("engine", ["onnxruntime", pytest.param("openvino", marks=[pytest.mark.nightly, exact_int8])])
def test_every_tensor_of_an_int8_file_is_that_of_fake_quant(aligned, exports, engine):
    found, db = aligned(exports.checkpoint, exports.onnx, "--policy", "qdq", "--engine", engine)
    assert [row["name"] for row in found["tensors"] if row["problem"]] == []
    parts = ("attn.qkv", "attn.matmul_q_input_quantizer", "attn.matmul_k_input_quantizer", "mlp.fc1", "mlp")
    wanted = {f"{block}.{part}" for block in BLOCKS for part in parts}
    assert wanted | {"patch_embed", "layers.0.downsample", "layers.0", "norm", "head", "logits"} <= db.keys()
    assert all(value is None or value > 30 for value in db.values()), db  # a few levels round differently
    assert found["first"] is None and found["below_db"] == 30


def test_a_float_file_agrees_to_the_last_bits_until_a_layer_of_it_is_changed(
    aligned, run, randomise, write_config, tmp_path
):
    cfg = ("--cfg", write_config(tmp_path, "swin", DEPTHS=[2, 1]))  # the exporter takes seconds a block
    torch.save({"model": randomise(build_model(load_config(cfg[1]))).state_dict()}, tmp_path / "x.pth")
    words = ("--checkpoint", tmp_path / "x.pth", "--precision", "float", "--output", tmp_path)
    assert run("export", "--for", "openvino", *cfg, *words).code == 0
    (file,) = tmp_path.glob("*.onnx")
    for engine in ("onnxruntime", "openvino"):
        found, db = aligned(tmp_path / "x.pth", file, "--engine", engine, *cfg)
        assert found["first"] is None and len(db) > 30 and all(value is None or value > 90 for value in db.values()), db
    found, db = aligned(file, file, "--engine", "onnxruntime", "openvino")
    assert found["first"] is None and "onnxruntime" in found["a"] and "openvino" in found["b"]
    changed(file, "layers.0.blocks.1.mlp.fc1.bias")
    found, _ = aligned(tmp_path / "x.pth", file, "--engine", "onnxruntime", *cfg)
    assert found["first"] == "forward/layers.0.blocks.1.mlp.fc1"


def changed(file, weight):
    """The file with a changed weight, and a card with its new hash."""
    model = onnx.load(file)
    (tensor,) = [each for each in model.graph.initializer if each.name == weight]
    tensor.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor) + 1, weight))
    onnx.save(model, file)
    card = RunCard.read(file.with_suffix(".json"))
    replace(card, artifact={**card.artifact, "sha256": compute_sha256(file)}).write(file.with_suffix(".json"))


def test_fastertransformers_blocks_are_those_of_fake_quant(aligned, exports):
    found, db = aligned(exports.checkpoint, exports.ft)
    assert list(db) == ["patch_embed", *BLOCKS[:2], "layers.0.downsample", *BLOCKS[2:], "norm", "logits"]
    assert all(value > 15 for value in db.values()), db


def test_a_dump_of_an_artifact_is_what_other_programs_compare_with(run, exports, pictures, tmp_path):
    words = ("--engine", "onnxruntime", "--images", pictures / "val" / "cat", "--pictures", 2)
    assert run("align", exports.onnx, *words, "--to", tmp_path / "x.npz").code == 0
    with np.load(tmp_path / "x.npz", allow_pickle=False) as arrays:
        assert arrays["input/images"].shape == (2, 3, 32, 32) and arrays["output/logits"].shape == (2, 3)
        assert "forward/layers.0.blocks.0.mlp.fc1" in arrays
    done = run("align", exports.onnx, tmp_path / "x.npz", "--engine", "onnxruntime")
    assert done.code == 0 and "no tensor of" in done.out and "equal" in done.out
    found = sq.align(exports.onnx, sq.artifact(exports.onnx), [torch.randn(2, 3, 32, 32)], engine="onnxruntime")
    assert found.first is None and "onnxruntime" in found.a and "onnxruntime" in found.b
