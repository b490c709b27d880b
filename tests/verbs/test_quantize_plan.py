"""The default policy of `quantize` on CPUs whose int8 products saturate."""

import platform
import subprocess
import sys

import pytest
import torch

AVX2 = {"avx2": True, "avx_vnni": False, "avx512_vnni": False, "amx_int8": False}
SAFE = "--policy cpu --saturation-safe"


@pytest.fixture
def planned(run, micro, pictures, tmp_path, monkeypatch):
    """planned(capabilities, *words) -> the calibration that a dry run prints on such a CPU, and what it warns of."""

    def plan(capabilities, *words, config="swin"):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
        model = [micro / f"{config}.pth", "--cfg", micro / f"{config}.yaml", "--data-path", pictures]
        done = run("quantize", *model, "--pictures", 8, "--output", tmp_path / "out", *words, "--dry-run").ok()
        return done.out.splitlines()[0], done.err

    return plan


def test_weights_get_7_bits_where_products_of_8_would_saturate(planned):
    calibration, said = planned(AVX2, "--for", "openvino")
    assert f"{SAFE} " in calibration + " " and "this CPU has no VNNI: weights get 7 bits" in said
    assert "--policy cpu keeps 8" in said
    calibration, _ = planned(AVX2, "--for", "openvino", "--off", "layers.0.*")
    assert "--saturation-safe" in calibration and "--off 'layers.0.*'" in calibration


@pytest.mark.parametrize(
    ("capabilities", "words"),
    [
        (AVX2 | {"avx512_vnni": True}, "--for openvino"),
        ({}, "--for openvino"),
        (AVX2, "--for openvino --policy cpu"),
        (AVX2, "--for openvino --policy cpu --wprec 8"),
        (AVX2, "--for openvino --tune"),
        (AVX2, "--for onnxruntime"),
        (AVX2, "--for torchscript"),
    ],
)
def test_they_keep_8_bits_elsewhere_and_where_that_is_asked_for(planned, capabilities, words):
    calibration, said = planned(capabilities, *words.split())
    assert "--saturation-safe" not in calibration and "7 bits" not in said


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="other CPUs have no such kernels")
def test_on_such_a_cpu_the_file_is_verified(micro, pictures, tmp_path, monkeypatch):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    words = ["--data-path", pictures, "--pictures", 8, "--for", "openvino", "--output", tmp_path, "--device", "cpu"]
    words = [sys.executable, "-m", "swin_quant", "quantize", micro / "swin.pth", "--cfg", micro / "swin.yaml", *words]
    done = subprocess.run([*map(str, words)], capture_output=True, text=True)
    assert done.returncode == 0 and "saturate at 16 bits" not in done.stderr, done.stderr
    assert [file.name for file in tmp_path.glob("*.onnx")] == ["swin_micro_w7a8_openvino.onnx"]
