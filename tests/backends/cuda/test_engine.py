"""Whole networks, also inside: against fake-quant, and against FasterTransformer's emulator to the last integer."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from swin_quant.backends.cuda.engine import inside, load
from swin_quant.backends.cuda.gpu import gpu_errors, name_here
from swin_quant.backends.open_artifact import open_artifact
from swin_quant.base.distributed import World
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.quant.policy import dequantize, load_policy, quantize
from swin_quant.score.options import EngineOptions
from swin_quant.verbs.align_sides import artifact_side, compare, model_side
from tests.backends.conftest import pictures

FT = [("swin", "ft-mode1"), ("swin", "ft-mode2"), ("swinv2", "ft-mode1")]


def fake_quant(model, images):
    quantize(model)
    with torch.inference_mode():
        return model(images)


@pytest.mark.parametrize("kind", ["swin", "swinv2"])
@pytest.mark.parametrize(
    ("precision", "float_type", "limit"),
    [("float", "float16", 0.002), ("float", "bfloat16", 0.03), ("int8", "bfloat16", 0.03)],
)
def test_half_precision_alone_and_around_int8(exported, kind, precision, float_type, limit):
    """Bfloat16 has three bits less; an export recommends it for a stream with values beyond float16."""
    artifact, model = exported(kind, precision=precision, float_type=float_type)
    engine, images = load(artifact), pictures(3, seed=2)
    assert (engine.precision, engine.policy) == (("int8", "cuda") if precision == "int8" else (float_type, None))
    assert engine.details["float_type"] == float_type
    quantize(model) if precision == "int8" else dequantize(model)
    with torch.inference_mode():
        assert (engine(images) - model(images)).abs().mean() < limit


@pytest.mark.parametrize(("kind", "policy"), FT)
def test_it_computes_what_fastertransformer_does_exactly(exported, emulator_of, kind, policy):
    """Features, and the residual stream after each part, are equal to the bit; the head has its own order of sums."""
    artifact, model = exported(kind, policy)
    emulator, stream = emulator_of(model, policy, fused=True, misread=False), {}
    engine, images = load(artifact), pictures(4, seed=3)
    logits = engine(images)
    (bound,) = engine.run._bound.values()
    assert torch.equal(bound.buffers["pooled"].half(), emulator.features(images, stream.__setitem__))
    torch.testing.assert_close(logits, emulator(images), atol=2e-3, rtol=1e-3)
    found, shapes = inside(artifact, EngineOptions())(images), {}
    parts = ["patch_embed", "layers.0.blocks.0", "layers.0.blocks.1", "layers.0.downsample", "layers.1.blocks.0"]
    assert list(found) == parts
    for name in parts:
        model.get_submodule(name).register_forward_hook(lambda m, i, y, name=name: shapes.update({name: y.shape}))
    with torch.inference_mode():
        model(images)
    for name in parts:
        assert found[name].shape == shapes[name] and torch.equal(found[name].half(), stream[name].flatten(1, 2)), name


@pytest.mark.parametrize("kind", ["swin", "swinv2"])
def test_layers_of_both_kinds_in_one_network(exported, kind):
    """Each product is int8 or half by its own nodes: int8 qkv before half attention, half fc1, int8 fc2."""
    mixed = load_policy("cuda").off(
        "layers.0.blocks.0.attn.m*_input_quantizer", "*.blocks.1.mlp.fc1.*", "layers.1.*.attn.proj.*"
    )
    artifact, model = exported(kind, mixed)
    engine, expected = load(artifact), fake_quant(model, pictures(2))
    gemms = engine.details["gemms"]
    assert gemms["layers.0.blocks.0.attn.q k"] == gemms["layers.0.blocks.1.mlp.fc1"] == "float16"
    assert gemms["layers.0.blocks.0.attn.qkv"] == gemms["layers.0.blocks.1.mlp.fc2"] == "int8"
    assert (engine(pictures(2)) - expected).abs().mean() < 0.02


def test_a_picture_does_not_depend_on_its_batch(exported):
    engine = load(exported()[0])
    images = pictures(5)
    with torch.inference_mode():  # the state after one call serves the next, outside of inference mode
        expected = engine(images)
    # On some CPUs float products of few rows are summed in another order, and a value between two levels may move.
    torch.testing.assert_close(engine(images)[1:2], engine(images[1:2]), rtol=0, atol=0.01)
    assert torch.equal(engine(images), expected)


@pytest.mark.parametrize("kind", ["swin", "swinv2"])
@pytest.mark.parametrize("policy", ["cuda", "cuda-fp8"])
def test_a_nan_in_a_picture_stays_in_that_picture(exported, kind, policy):
    """In float8 its logits are NaN. int8 has none: patch merging reads it as 0."""
    images = pictures(3)
    clean = load(exported(kind, policy)[0])(images)
    images[1, 0, 0, 0] = float("nan")
    got = load(exported(kind, policy)[0])(images)
    assert torch.equal(got[[0, 2]], clean[[0, 2]]) and not torch.equal(got[1], clean[1])
    assert got[1].isnan().all() == (policy == "cuda-fp8")


@pytest.mark.parametrize(("channels", "heads"), [(32, [2, 4]), (96, [4, 8]), (64, [1, 2]), (96, [1, 2]), (128, [1, 2])])
def test_heads_of_other_widths_and_positions(exported, channels, heads):
    """Heads of 16 and 24 channels are padded to 32, of 96 to 128; an absolute position embedding is added."""
    for kind in ("swin", "swinv2"):
        artifact, model = exported(kind, keys={"EMBED_DIM": channels, "NUM_HEADS": heads, "APE": True})
        expected = fake_quant(model, pictures(2))
        dequantize(model)
        with torch.inference_mode():
            noise = (expected - model(pictures(2))).abs().mean()
        assert (load(artifact)(pictures(2)) - expected).abs().mean() < 2 * noise


def test_what_it_says_of_itself(exported):
    engine = load(exported()[0])
    assert engine.name == "cuda (emulated)" and engine.precision == "int8" and engine.policy == "cuda"
    assert engine.max_batch == 256 and engine.device == "cpu"
    assert engine.details["int8_gemms"] == 3 * 5 + 1 and engine.details["all_gemms"] == 3 * 6 + 1 + 2
    assert "references" in engine.details["library"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (EngineOptions(device="cuda"), "torch finds no GPU here"),
        (EngineOptions(float_type="bfloat16"), "was exported with float16: export it again"),
        (EngineOptions(optimize=False), "no run without optimization"),
    ],
)
def test_what_it_cannot_do(exported, monkeypatch, options, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match=message):
        load(exported()[0], options)


@pytest.fixture
def gpu_is(monkeypatch):
    """gpu_is(name, capability, sms): torch finds this GPU."""

    def found(name, capability, sms=1):
        answers = {
            "is_available": True,
            "current_device": 1,
            "get_device_name": name,
            "get_device_capability": divmod(capability, 10),
            "get_device_properties": SimpleNamespace(multi_processor_count=sms),
        }
        for question, answer in answers.items():
            monkeypatch.setattr(torch.cuda, question, lambda *_, answer=answer: answer)

    return found


@pytest.fixture
def h100(gpu_is, monkeypatch):
    """An H100 for torch and Triton; its driver's only answer can be replaced."""
    triton = pytest.importorskip("triton")
    gpu_is("NVIDIA H100", 90)
    driver = SimpleNamespace(get_current_device=lambda: 1)
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    return driver


@pytest.mark.parametrize(
    ("compiler", "said"),
    [(None, "Failed to find C compiler"), ("false", "non-zero exit status 1"), ("/no/cc", "/no/cc")],
)
def test_a_machine_without_a_c_compiler(exported, h100, monkeypatch, tmp_path, compiler, said):
    """Or without Python's headers: Triton builds its launcher with both."""
    from triton.runtime.build import compile_module_from_src

    artifact = exported()[0]
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CC", compiler) if compiler else monkeypatch.delenv("CC", raising=False)
    if not compiler:
        monkeypatch.setenv("PATH", str(tmp_path))
    h100.get_current_device = lambda: compile_module_from_src("int x;", "launcher")
    message = f"Triton cannot build what launches kernels .*{said}.*: install a C compiler .* headers .python3-dev.$"
    with pytest.raises(SwinQuantError, match=message):
        load(artifact, EngineOptions(device="cuda"))
    with pytest.raises(SwinQuantError, match=message), gpu_errors("a batch of 8", torch.device("cuda")):
        h100.get_current_device()  # in Triton 3.6 each kernel has a launcher


@pytest.mark.parametrize("batch", [None, 0, True, "8"])
def test_a_run_card_without_a_batch(exported, batch):
    artifact = exported()[0]
    artifact.record["options"]["batch"] = batch
    with pytest.raises(SwinQuantError, match="safetensors: its run card names no batch that it takes; export again$"):
        load(artifact)


@pytest.mark.parametrize(
    ("gpu", "capability", "policy", "said"),
    [
        ("Tesla T4", 75, "cuda", "7.5, and the CUDA engine needs 8.0 or above$"),
        ("NVIDIA A10", 86, "cuda-fp8", "8.6, and float8 needs 8.9 or above: export with policy cuda, in int8$"),
    ],
)
def test_a_gpu_that_is_too_old(exported, gpu_is, gpu, capability, policy, said):
    gpu_is(gpu, capability)
    with pytest.raises(UsageError, match=f"^{gpu}: is of compute capability {said}"):
        load(exported(policy=policy)[0], EngineOptions(device="cuda"))


KNOWN = [
    ("NVIDIA A100-SXM4-40GB", 80, 108, "a100"),
    ("NVIDIA A100-PCIE-40GB", 80, 108, "a100"),
    ("NVIDIA A100-SXM4-80GB", 80, 108, "a100_80gb"),
    ("NVIDIA A100 80GB PCIe", 80, 108, "a100_80gb"),
    ("NVIDIA A10", 86, 72, "a10"),
    ("NVIDIA L4", 89, 58, "l4"),
    ("NVIDIA L40S", 89, 142, "l40s"),
    ("NVIDIA H100 80GB HBM3", 90, 132, "h100"),
    ("NVIDIA H200", 90, 132, "h200"),
    ("NVIDIA B200", 100, 148, "b200"),
    ("NVIDIA GeForce RTX 4090", 89, 128, "rtx4090"),
    ("NVIDIA GeForce RTX 5090", 120, 170, "rtx5090"),
]
OTHER = [
    ("NVIDIA L40", 89, 142, "l40s"),
    ("NVIDIA RTX 4000 SFF Ada Generation", 89, 48, "l4"),
    ("NVIDIA RTX A1000", 86, 18, "a10"),
    ("NVIDIA A100X", 80, 108, "a100"),
    ("NVIDIA B300", 103, 148, "b200"),
    ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 120, 188, "rtx5090"),
]


@pytest.mark.parametrize(("gpu", "capability", "sms", "machine"), KNOWN + OTHER)
def test_whose_fusions_a_gpu_takes(gpu_is, caplog, gpu, capability, sms, machine):
    """For another GPU, those of the nearest by compute capability, then multiprocessors, which is named."""
    gpu_is(gpu, capability, sms)
    with caplog.at_level("INFO"):
        assert name_here() == machine
    said = f"{gpu}: no file of configs/machines is for it; fusions and tiles are those of the nearest, {machine}"
    assert caplog.messages == ([said] if (gpu, capability, sms, machine) in OTHER else [])


@pytest.fixture
def sides(exported):
    """sides(kind, policy, **options) -> fake-quant, and the engine."""

    def make(kind, policy, **options):
        artifact, model = exported(kind, policy, **options)
        return model_side(model, [load_policy(policy)], World(), "model"), artifact_side(artifact)

    return make


# tensorrt-fp8 has probabilities in float8 too, with a fixed range
@pytest.mark.parametrize("policy", ["cuda", "qdq", "cuda-fp8", "tensorrt-fp8"])
@pytest.mark.parametrize("kind", ["swin", "swinv2"])
def test_every_part_is_that_of_fake_quant(sides, kind, policy):
    below = 20 if policy.endswith("fp8") else 30  # a value on a tie may take either level: their distance
    found = compare(*sides(kind, policy), [pictures(3, seed=2)], below)
    rows = {row.name: row for row in found.rows}
    blocks = {"layers.0.blocks.0", "layers.0.blocks.1", "layers.1.blocks.0"}
    assert blocks | {"patch_embed", "layers.0.downsample", "logits"} <= rows.keys()
    assert found.first is None and rows["patch_embed"].sqnr_db > 55


def test_a_part_that_differs_is_found(sides):
    model, engine = sides("swin", "cuda")
    with torch.no_grad():
        model.model.get_submodule("layers.0.blocks.1.mlp.fc2").weight.mul_(-9)
    found = compare(model, engine, [pictures(3)])
    assert found.first.name == "layers.0.blocks.1"


FORMS = [("swin", "ft-mode1"), ("swin", "ft-mode2"), ("swinv2", "ft-mode1"), ("swin", "cuda"), ("swinv2", "cuda")]
FORMS += [("swin", "cuda-fp8"), ("swinv2", "tensorrt-fp8")]
CHILD = """
import sys, torch
from swin_quant.backends.cuda.engine import load
from swin_quant.backends.open_artifact import open_artifact

torch.set_num_threads(1)
for file in sys.argv[2:]:
    engine = load(open_artifact(file))
    logits = engine(torch.load(sys.argv[1]))
    (bound,) = engine.run._bound.values()
    torch.save((engine.name, logits, bound.buffers["pooled"]), f"{file}.found")
"""


@pytest.mark.nightly
def test_kernels_compute_what_their_references_do(exported, tmp_path):
    """FasterTransformer's arithmetic to the last bit; `cuda` except for sums of floats in another order and, in int8,
    GELU's polynomial: both move values next to a tie by a level."""
    pytest.importorskip("triton")
    files, images = {}, pictures(2, seed=4)
    for form in FORMS:
        file = exported(*form)[0].file
        folder = tmp_path / "-".join(form)
        folder.mkdir()  # where no other export overwrites it
        for part in (file.with_suffix(".json"), file):
            files[form] = part.rename(folder / part.name)
    torch.save(images, tmp_path / "images.pt")
    words = [sys.executable, "-c", CHILD, str(tmp_path / "images.pt"), *map(str, files.values())]
    subprocess.run(words, check=True, env=os.environ | {"TRITON_INTERPRET": "1"}, timeout=600)
    for (_, policy), file in files.items():
        name, logits, pooled = torch.load(f"{file}.found")
        assert name == "cuda (interpreted)"
        engine = load(open_artifact(file))
        expected = engine(images)
        (bound,) = engine.run._bound.values()
        if policy.startswith("ft"):
            assert torch.equal(pooled.half(), bound.buffers["pooled"].half())
        bound = 0.001 if policy.startswith("ft") else 0.02 if policy == "cuda" else 0.01
        assert (logits - expected).abs().mean() < bound
