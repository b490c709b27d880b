"""swin-quant build-engine, with a stand-in for TensorRT, from files that `export` wrote."""

import functools
import importlib
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from commands import command

import swin_quant as sq
from swin_quant.backends.open_artifact import open_artifact
from swin_quant.backends.tensorrt import host
from swin_quant.backends.tensorrt.engine import Session, load
from swin_quant.cards.card import RunCard
from swin_quant.score.options import EngineOptions


@pytest.fixture(scope="module")
def exported(calibrated_32, tmp_path_factory):
    """exported(policy) -> the artifact for TensorRT under it, beside a copy of its calibrated checkpoint."""
    folder = Path(shutil.copytree(calibrated_32.parent, tmp_path_factory.mktemp("engine") / "exported"))

    @functools.cache
    def make(policy):
        words = ["export", folder / calibrated_32.name, "--for", "tensorrt", "--policy", policy, "--output", folder]
        command(*words, "--quiet")
        return folder / f"micro_{'fp8' if 'fp8' in policy else 'int8'}_tensorrt.onnx"

    return make


@pytest.fixture
def onnx_file(exported, tmp_path):
    """The int8 artifact, alone with its card in the test's own folder."""
    shutil.copy(exported("qdq").with_suffix(".json"), tmp_path)
    return Path(shutil.copy(exported("qdq"), tmp_path))


@pytest.fixture
def trt(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "standin")
    monkeypatch.delitem(sys.modules, "tensorrt", raising=False)
    module = importlib.import_module("tensorrt")
    monkeypatch.setitem(sys.modules, "tensorrt", module)
    module.become("11.4.1")
    monkeypatch.setattr(host, "find_gpu", lambda: host.Gpu(torch.device("cpu"), "Stand-in GPU", "8.9"))
    monkeypatch.setattr(host, "current_stream", lambda device: 1)
    return module


@pytest.mark.slow
def test_from_an_export_to_an_engine_that_scores_like_the_model(run, trt, calibrated_32, onnx_file):
    done = run("build-engine", onnx_file, "--max-batch", 16, "--no-verify").ok()
    assert "trtexec --onnx=" in done.err and "--maxShapes=images:16x3x32x32" in done.err
    engine = load(open_artifact(onnx_file.with_name(f"{onnx_file.stem}_sm89.engine")), EngineOptions(device="cuda"))
    images = torch.randn(3, 3, 32, 32)
    expected = sq.load(calibrated_32, policy="qdq")(images)
    assert engine.max_batch == 16
    assert (engine(images) - expected).square().sum() < 1e-2 * expected.square().sum()
    names = engine.details["gemms"]
    assert names["layers.0.blocks.1.attn.qkv"] == "int8" and engine.details["int8_gemms"] == len(names) - 2
    assert f"products: int8 {len(names) - 2}" in done.out.replace("float16 2, ", "")


def test_without_tensorrt_the_trtexec_line_is_all_there_is(run, onnx_file, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    before = sorted(onnx_file.parent.iterdir())
    done = run("build-engine", onnx_file, "--output", onnx_file.with_name("x.engine"))
    said = done.err.splitlines()
    assert done.code == 2 and said[0].startswith("the same by NVIDIA's tool: trtexec") and "x.engine" in said[0]
    assert len(said) == 2 and "pip install tensorrt-cu" in said[1]
    assert sorted(onnx_file.parent.iterdir()) == before


def test_without_a_gpu(run, trt, onnx_file, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "tensorrt", trt)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no NVIDIA GPU" in run("build-engine", onnx_file, "--quiet").error(2)


def test_what_is_missing_is_named_before_anything_is_built(run, trt, onnx_file, pictures, tmp_path):
    assert "has no run card" in run("build-engine", shutil.copy(onnx_file, tmp_path / "alone.onnx")).error(1)
    for words, code, says in (
        (["--min-batch", 9], 2, "in growing order"),
        ([], 2, "verified on real pictures: give --data-path DIR"),
        (["--data-path", pictures], 1, "nothing to compare the engine with"),
    ):
        assert says in run("build-engine", onnx_file, "--quiet", *words).error(code)
    assert not list(tmp_path.glob("*.engine"))


@pytest.mark.slow
@pytest.mark.parametrize("honest", [True, False])
def test_an_engine_is_verified_when_it_is_built(run, trt, exported, pictures, tmp_path, monkeypatch, honest):
    """Fused attention once computed something else on one GPU: no error, wrong logits (TRT#4837)."""
    compute = Session.__call__
    if not honest:
        monkeypatch.setattr(Session, "__call__", lambda self, images: compute(self, images).flip(1))
    words = ("--output", tmp_path, "--data-path", pictures, "--pictures", 4, "--opt-batch", 2, "--max-batch", 2)
    done = run("build-engine", exported("tensorrt-fp8"), *words)
    engine = tmp_path / "micro_fp8_tensorrt_sm89.engine"
    records = RunCard.read(engine.with_suffix(".json")).verification
    assert [record["passed"] for record in records] == [honest, None] and records[0]["pictures"] == 4
    assert done.code == (0 if honest else 1)
    if honest:
        report = json.loads(engine.with_suffix(".layers.json").read_text())
        assert report["float8_wanted"] > 0 and report["float8_lost"] == 0
    else:
        said = "verification failed: tensorrt: mean |Δlogit| against torch fake-quant"
        assert said in done.err.splitlines()[-1]
