"""The default policy of `quantize` on CPUs whose int8 products saturate."""

import platform
import subprocess
import sys

import pytest
import torch

from swin_quant.backends.openvino import operators
from swin_quant.base.compat import import_timm

AVX2 = {"avx2": True, "avx_vnni": False, "avx512_vnni": False, "amx_int8": False}
SAFE = "--policy cpu --wprec 7"
DEIT = ["MODEL.TIMM.OPTIONS", '{"depth": 2}']


@pytest.fixture
def planned(run, micro, pictures, tmp_path, monkeypatch):
    """planned(capabilities, *words) -> the calibration that a dry run prints on such a CPU, and what it warns of."""

    def plan(capabilities, *words, model=(micro / "swin.pth", "--cfg", micro / "swin.yaml")):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
        given = [*model, "--data-path", pictures, "--pictures", 8, "--output", tmp_path / "out", "--dry-run"]
        done = run("quantize", *given, *words).ok()
        return done.out.splitlines()[0], done.err

    return plan


def test_weights_get_7_bits_where_products_of_8_would_saturate(planned):
    calibration, said = planned(AVX2, "--for", "openvino")
    assert f"{SAFE} " in calibration + " " and "this CPU has no VNNI: weights get 7 bits" in said
    assert "--policy cpu keeps 8" in said
    calibration, _ = planned(AVX2, "--for", "openvino", "--off", "layers.0.*")
    assert "--wprec 7" in calibration and "--off 'layers.0.*'" in calibration


def test_they_keep_8_bits_elsewhere_and_where_that_is_asked_for(planned):
    for capabilities, words in (
        (AVX2 | {"avx512_vnni": True}, "--for openvino"),
        ({}, "--for openvino"),
        (AVX2, "--for openvino --policy cpu"),
        (AVX2, "--for openvino --policy cpu --wprec 8"),
        (AVX2, "--for openvino --tune"),
        (AVX2, "--for onnxruntime"),
        (AVX2, "--for torchscript"),
    ):
        calibration, said = planned(capabilities, *words.split())
        assert "--wprec 7" not in calibration and "7 bits" not in said


@pytest.mark.parametrize(
    ("name", "words", "policy"),
    [
        (
            "deit_tiny_patch16_224",
            [
                "--cfg",
                "timm:deit_tiny_patch16_224",
                "--opts",
                "MODEL.NUM_CLASSES",
                3,
                "MODEL.TIMM.OPTIONS",
                '{"depth": 2}',
            ],
            "cpu-operators --wprec 7",
        ),
        ("swin_tiny_patch4_window7_224", [], "cpu-operators"),
    ],
)
def test_with_compiled_operators_only_networks_with_other_products_get_7_bits(
    planned, tmp_path, monkeypatch, name, words, policy
):
    """At published sizes: a ViT's patch embedding and head are int8 outside the operators, a Swin's are float."""
    monkeypatch.setattr(operators, "are_faster_here", lambda *_: True)
    options = {"depth": 2} if name.startswith("deit") else {}  # the width is published
    torch.save(import_timm().create_model(name, num_classes=3, **options).state_dict(), tmp_path / f"{name}.pth")
    calibration, _ = planned(AVX2, "--for", "openvino", model=[tmp_path / f"{name}.pth", *words])
    assert f"--policy {policy} --output" in calibration.replace(" --pictures 8", "")


@pytest.mark.nightly
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="other CPUs have no such kernels")
def test_on_such_a_cpu_the_file_is_verified(micro, pictures, tmp_path, monkeypatch):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    words = ["--data-path", pictures, "--pictures", 8, "--for", "openvino", "--output", tmp_path, "--device", "cpu"]
    words = [sys.executable, "-m", "swin_quant", "quantize", micro / "swin.pth", "--cfg", micro / "swin.yaml", *words]
    done = subprocess.run([*map(str, words)], capture_output=True, text=True)
    assert done.returncode == 0 and "saturate at 16 bits" not in done.stderr, done.stderr
    assert [file.name for file in tmp_path.glob("*.onnx")] == ["swin_micro_w7a8_openvino.onnx"]
