"""Which CPUs saturate, which weights cannot, and the warnings for files that would."""

from itertools import product

import numpy as np
import pytest
import torch

from swin_quant.backends import saturation
from swin_quant.backends.saturation import SAFE_BITS, caution, exact_kernels, safe_on, saturates
from swin_quant.quant.fake_quant import grid
from swin_quant.quant.policy import Rule, apply_policy, load_policy

AVX2 = {"avx2": True, "avx_vnni": False, "avx512_vnni": False, "amx_int8": False}
BOTH = ("onnxruntime", "openvino")


@pytest.fixture
def cpu(monkeypatch):
    """cpu(capabilities, limit="") sets the CPU that torch reports, and oneDNN's environment variable to `limit`."""

    def pretend(capabilities, limit=""):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
        monkeypatch.delenv("DNNL_MAX_CPU_ISA", raising=False)

    return pretend


def pairs(bits):
    """All sums of two products u8 * s8 at the ends of their grids, for weights of so many bits."""
    return [a * v + b * w for a, b in product((0, 255), repeat=2) for v, w in product(grid(bits), repeat=2)]


def test_safe_bits_are_the_most_whose_pairs_of_products_fit_16_bits():
    low, high = np.iinfo(np.int16).min, np.iinfo(np.int16).max
    assert low <= min(pairs(SAFE_BITS)) and max(pairs(SAFE_BITS)) <= high
    assert max(pairs(SAFE_BITS + 1)) > high


@pytest.mark.parametrize(
    ("capabilities", "limit", "onnxruntime", "openvino"),
    [
        (AVX2, "", True, True),
        (AVX2 | {"avx_vnni": True}, "", False, False),
        (AVX2 | {"avx512_vnni": True}, "", False, False),
        (AVX2 | {"amx_int8": True}, "", False, False),
        (AVX2 | {"avx_vnni": True, "avx512_vnni": True}, "AVX2", False, True),
        (AVX2 | {"avx_vnni": True, "avx512_vnni": True}, "avx512_core", False, True),
        (AVX2 | {"avx_vnni": True, "avx512_vnni": True}, "AVX2_VNNI", False, False),
        (AVX2 | {"avx512_vnni": True}, "AVX2_VNNI", False, True),
        (AVX2 | {"avx512_vnni": True}, "AVX512_CORE_VNNI", False, False),
        (AVX2 | {"amx_int8": True}, "DEFAULT", False, False),
        ({"dot": True, "i8mm": False}, "", False, False),
        ({"dot": False, "neon": True}, "", None, None),
        ({}, "", None, None),
    ],
)
def test_what_a_cpu_does_is_asked_of_it_and_of_onednn_s_limit(cpu, capabilities, limit, onnxruntime, openvino):
    cpu(capabilities, limit)
    assert (saturates("onnxruntime"), saturates("openvino")) == (onnxruntime, openvino)


def test_a_torch_that_cannot_say_is_unknown(monkeypatch):
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    assert saturates("openvino") is None


@pytest.mark.parametrize(
    ("policy", "bits", "engines"),
    [
        ("cpu", 8, []),
        ("cpu", 7, [*BOTH]),
        ("qdq", 7, ["onnxruntime"]),
        ("cpu", 4, [*BOTH]),
        ("float", 8, [*BOTH]),
        ("w4a16", 8, [*BOTH]),
    ],
)
def test_a_model_is_safe_by_its_weights_and_in_openvino_without_products_of_activations(
    tiny_model, policy, bits, engines
):
    model = tiny_model("swin")
    apply_policy(model, load_policy(policy).and_then(Rule(nodes=("role:gemm_weight",), bits=bits)))
    assert safe_on(model) == engines


@pytest.mark.parametrize("engine", BOTH)
def test_a_caution_names_file_engine_and_flag_where_products_saturate(cpu, artifact_of, small_net, engine):
    cpu(AVX2)
    recorded = ({}, {saturation.SAFE_ON: []}, {saturation.SAFE_ON: [engine]})
    old, unsafe, safe = (caution(engine, artifact_of(small_net(), options=options)) for options in recorded)
    assert safe is None
    for said in (old, unsafe):
        assert said.startswith(f"{engine}: ") and "x.onnx" in said and "\n" not in said
        assert f"`swin-quant export FILE --for {engine} --saturation-safe`" in said
    assert "saturate at 16 bits" in old
    assert ("slower kernels" if engine == "onnxruntime" else "saturate at 16 bits") in unsafe
    assert caution(engine, artifact_of(small_net(int8=False), "float32")) is None
    cpu(AVX2 | {"avx_vnni": True})
    assert caution(engine, artifact_of(small_net())) is None
    cpu({})
    assert caution(engine, artifact_of(small_net())) is None


def test_a_file_is_warned_of_once(cpu, artifact_of, small_net, caplog):
    cpu(AVX2)
    assert [bool(saturation.warn("openvino", artifact_of(small_net()))) for _ in range(2)] == [True, True]
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("precision", "safe", "warned"),
    [("mixed", [], BOTH), ("W4A8", ["onnxruntime"], ("openvino",)), ("W4A16", [*BOTH], ()), ("fp8", [], ())],
)
def test_files_of_other_bits_are_warned_of_by_the_products_in_them(
    cpu, artifact_of, small_net, precision, safe, warned
):
    cpu(AVX2)
    artifact = artifact_of(small_net(), precision, options={saturation.SAFE_ON: safe})
    assert tuple(engine for engine in BOTH if caution(engine, artifact)) == warned


def test_exact_kernels_are_for_files_that_saturate_and_that_the_runtime_can_load_so(cpu, artifact_of, small_net):
    cpu(AVX2)
    assert [
        exact_kernels("onnxruntime", artifact_of(small_net(), options=options))
        for options in ({saturation.SAFE_ON: []}, {saturation.SAFE_ON: ["onnxruntime"]}, {})
    ] == ["session.x64quantprecision=1", None, None]
    cpu(AVX2 | {"avx512_vnni": True})
    assert not exact_kernels("onnxruntime", artifact_of(small_net(), options={saturation.SAFE_ON: []}))
