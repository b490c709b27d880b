"""export of an ONNX file of ours: an engine, with a stand-in for TensorRT."""

import importlib
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import onnx
import pytest
import torch
from commands import command

from swin_quant.backends.onnx.export import OnnxOptions, export
from swin_quant.backends.open_artifact import open_artifact
from swin_quant.backends.tensorrt import host
from swin_quant.backends.tensorrt.engine import Session, load
from swin_quant.cards.card import RunCard
from swin_quant.config import load_config
from swin_quant.data.preprocess import Preprocess
from swin_quant.quant.calibration import Method, calibrate
from swin_quant.quant.policy import dequantize, load_policy, quantize
from swin_quant.score.options import EngineOptions

TENSORRT = ("--for", "tensorrt")


@pytest.fixture(scope="module")
def exported(tmp_path_factory, micro, tiny_model, use_policy):
    """A calibrated micro model and its ONNX artifact for TensorRT."""
    cfg = load_config(micro / "swin.yaml")
    model = use_policy(tiny_model("swin", EMBED_DIM=32, DEPTHS=[2], NUM_HEADS=[2], WINDOW_SIZE=4), "qdq")
    calibrate(model, [torch.randn(4, 3, 32, 32)], Method("max"))
    preprocess = Preprocess.from_config(cfg).to_dict()
    card = RunCard("micro", {}, preprocess, policy=load_policy("qdq").to_dict())
    artifact = export(model, card, tmp_path_factory.mktemp("onnx"), OnnxOptions(target="tensorrt"))
    return model, artifact.file


@pytest.fixture
def onnx_file(exported, tmp_path):
    """A copy of the artifact in the test's own folder."""
    for part in exported[1].parent.iterdir():
        shutil.copy(part, tmp_path)
    return tmp_path / exported[1].name


@pytest.fixture
def trt(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "standin")
    monkeypatch.delitem(sys.modules, "tensorrt", raising=False)
    module = importlib.import_module("tensorrt")
    monkeypatch.setitem(sys.modules, "tensorrt", module)
    module.become("11.4.1")
    monkeypatch.setattr(host, "find_gpu", lambda: host.Gpu(torch.device("cpu"), "Stand-in GPU", "8.9"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=1))
    return module


def test_from_an_export_to_an_engine_that_scores_like_the_model(run, trt, exported, onnx_file):
    done = run("export", onnx_file, *TENSORRT, "--max-batch", 16).ok()
    assert "trtexec --onnx=" in done.err and "--maxShapes=images:16x3x32x32" in done.err
    engine = load(open_artifact(onnx_file.with_name(f"{onnx_file.stem}_sm89.engine")), EngineOptions(device="cuda"))
    model, _ = exported
    images = torch.randn(3, 3, 32, 32)
    quantize(model)
    with torch.inference_mode():
        expected = model(images)
    dequantize(model)
    assert engine.max_batch == 16
    assert (engine(images) - expected).square().sum() < 1e-2 * expected.square().sum()
    names = engine.details["gemms"]
    assert names["layers.0.blocks.1.attn.qkv"] == "int8" and engine.details["int8_gemms"] == len(names) - 2
    assert f"products: int8 {len(names) - 2}" in done.out.replace("float16 2, ", "")


def test_products_that_fall_back_are_said(run, trt, onnx_file):
    products = [node.name for node in onnx.load(onnx_file).graph.node if node.op_type == "MatMul"]
    trt.FALLBACK.add(next(name for name in products if "fc1" in name))
    done = run("export", onnx_file, *TENSORRT)
    assert "int8 in the graph, not in the engine: layers.0.blocks.0.mlp.fc1" in done.err
    report = json.loads(onnx_file.with_name(f"{onnx_file.stem}_sm89.layers.json").read_text())
    assert report["int8_lost"] == 1


def test_without_tensorrt_the_trtexec_line_is_all_there_is(run, onnx_file, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    before = sorted(onnx_file.parent.iterdir())
    done = run("export", onnx_file, *TENSORRT, "--output", onnx_file.parent / "out")
    said = done.err.splitlines()
    assert done.code == 2 and said[0].startswith("the same by NVIDIA's tool: trtexec") and "/out/" in said[0]
    assert len(said) == 2 and "pip install tensorrt-cu" in said[1]
    assert sorted(onnx_file.parent.iterdir()) == before


def test_without_a_gpu(run, trt, onnx_file, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "tensorrt", trt)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no NVIDIA GPU" in run("export", onnx_file, *TENSORRT, "--quiet").error(2)


def test_bad_usage(run, onnx_file, tmp_path):
    assert "has no run card" in run("export", shutil.copy(onnx_file, tmp_path / "alone.onnx"), *TENSORRT).error(1)
    assert "in growing order" in run("export", onnx_file, *TENSORRT, "--min-batch", 9).error(2)
    assert "--policy: is for a checkpoint" in run("export", onnx_file, *TENSORRT, "--policy", "qdq").error(2)
    engine = run("export", "x.pth", *TENSORRT, "--max-batch", 64).error(2)
    assert "--max-batch and the other options of an engine: are for an exported ONNX file" in engine


@pytest.fixture(scope="module")
def calibrated_export(calibrated, tmp_path_factory):
    """An artifact whose checkpoint is found, in float8."""
    folder = tmp_path_factory.mktemp("export")
    command("export", calibrated, *TENSORRT, "--policy", "tensorrt-fp8", "--output", folder, "--quiet")
    return folder / "swin_micro_fp8_tensorrt.onnx"


def test_an_engine_is_verified(run, trt, calibrated_export, pictures, tmp_path):
    done = run("export", calibrated_export, *TENSORRT, "--output", tmp_path, "--opt-batch", 2, "--max-batch", 2).ok()
    engine = tmp_path / "swin_micro_fp8_tensorrt_sm89.engine"
    assert f"next: swin-quant verify {engine} --data-path DIR" in done.err
    run("verify", engine, "--data-path", pictures, "--pictures", 4).ok()
    records = RunCard.read(engine.with_suffix(".json")).verification
    assert [record["passed"] for record in records] == [True, None] and records[0]["pictures"] == 4
    report = json.loads(engine.with_suffix(".layers.json").read_text())
    assert report["float8_wanted"] > 0 and report["float8_lost"] == 0


def test_an_engine_that_computes_something_else_is_told_and_its_card_knows(
    run, trt, calibrated_export, pictures, tmp_path, monkeypatch
):
    """Fused attention did this on one GPU: no error, wrong logits (TRT#4837)."""
    honest = Session.__call__
    monkeypatch.setattr(Session, "__call__", lambda self, images: honest(self, images).flip(1))
    run("export", calibrated_export, *TENSORRT, "--output", tmp_path).ok()
    done = run("verify", tmp_path / "swin_micro_fp8_tensorrt_sm89.engine", "--data-path", pictures, "--pictures", 4)
    assert done.code == 1
    assert "verification failed: tensorrt: mean |Δlogit| against torch fake-quant" in done.err.splitlines()[-1]
    records = RunCard.read(tmp_path / "swin_micro_fp8_tensorrt_sm89.json").verification
    assert records[0]["passed"] is False
