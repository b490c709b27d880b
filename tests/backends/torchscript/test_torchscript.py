"""Traced files compute fake-quant for any batch, and hold torch's operators and the user's."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from nightly import share

from swin_quant.backends.torchscript import export as torchscript
from swin_quant.backends.torchscript.export import TorchScriptOptions, export, load
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.cards.card import RunCard
from swin_quant.quant.calibration import Method, calibrate
from swin_quant.quant.policy import apply_policy, load_policy, quantize

IMAGES = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(5))
SPECS = ("roll=testing::Roll", "relu=testing::Relu", "layer_norm=testing::Norm")
SHALLOW = {"IMG_SIZE": 32, "WINDOW_SIZE": 4, "DEPTHS": [2, 2], "NUM_HEADS": [1, 2]}
ROOT = Path(__file__).parents[3]


@pytest.fixture
def written(tiny_model, tmp_path):
    """write("swin", policy name, TorchScriptOptions' fields, config KEYS ...) -> artifact, the model's output."""

    def write(kind="swin", policy="qdq", **options):
        stages = {"PRETRAINED_WINDOW_SIZES": [0, 0]} if kind == "swinv2" else {}
        keys = {key: options.pop(key) for key in list(options) if key.isupper()}
        model = tiny_model(kind, **SHALLOW, **stages, **keys)
        calibrate(model, [IMAGES], Method("max"))
        card = RunCard(kind, {}, {}, policy=load_policy(policy).to_dict())
        if options.get("precision") != "float":
            apply_policy(model, load_policy(policy))
            quantize(model)
        with torch.inference_mode():
            expected = model(IMAGES)
        return export(
            model, card, tmp_path / f"{len(list(tmp_path.iterdir()))}", TorchScriptOptions(**options)
        ), expected

    return write


def operators(artifact):
    return {node.kind() for node in torch.jit.load(str(artifact.file)).inlined_graph.nodes()}


@pytest.mark.parametrize(("kind", "policy"), [("swin", "qdq"), ("swin", "cpu"), ("swinv2", "ft-mode1")])
def test_it_computes_what_fake_quant_does_for_another_batch(written, kind, policy):
    """Up to a few values between two levels, which may round either way."""
    artifact, expected = written(kind, policy)
    found = load(artifact)(IMAGES)
    apart = (found - expected).abs()
    assert apart.mean() < 0.02 * expected.abs().mean() and artifact.record["precision"] == "int8"
    kinds = operators(artifact)
    assert "aten::fake_quantize_per_tensor_affine" in kinds
    assert ("aten::fake_quantize_per_channel_affine" in kinds) == (policy != "ft-mode1")


@pytest.mark.parametrize(
    "shape", share([((2, 3, 64, 64),), ((1, 3, 32, 64),), ((3, 1, 32, 32),), ((3, 32, 32, 3),)], 2)
)
def test_pictures_of_another_size_are_refused_in_the_file_as_well(written, shape):
    """The number of windows gives the batch: two pictures of 64 pixels would be answered as eight of 32."""
    artifact, _ = written("swin", precision="float")
    with pytest.raises(SwinQuantError, match=r"each must be \[3, 32, 32\]"):
        load(artifact)(torch.zeros(shape))
    with pytest.raises(torch.jit.Error, match=r"each must be \[3, 32, 32\]"):
        torch.jit.load(str(artifact.file))(torch.zeros(shape))


def test_operators_of_the_user_s_own_stand_in_the_graph_and_run_without_a_library(written):
    artifact, expected = written("swinv2", precision="float", plugin=SPECS)
    kinds = operators(artifact)
    assert {spec.partition("=")[2] for spec in SPECS} <= kinds and not {"aten::roll", "aten::layer_norm"} & kinds
    torch.testing.assert_close(load(artifact)(IMAGES), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"plugin": ("roll=my.domain::Roll",)}, "domains here have no dots"),
        ({"plugin": ("roll=my::Roll",), "replace": ("roll",)}, "is replaced as well"),
        ({"plugin": ("attention=my::Attention",)}, "attention: only ONNX files have it; traced ones have roll, relu"),
        ({"plugin": ("relu=my::Relu",)}, "relu: the model never calls it"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_written(written, tmp_path, options, said):
    with pytest.raises(UsageError, match=said):
        written("swin", precision="float", **options)
    assert not list(tmp_path.rglob("*.pt"))


def test_float8_is_refused_by_node(written):
    with pytest.raises(UsageError, match="no float8 fake-quantize: .*_quantizer"):
        written("swin", "tensorrt-fp8")


def test_a_broken_file_is_one_line(written):
    artifact, _ = written(precision="float")
    artifact.file.write_bytes(artifact.file.read_bytes()[:1000])
    with pytest.raises(SwinQuantError, match="torch cannot read it") as caught:
        load(artifact)
    assert "\n" not in str(caught.value)


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler here")
def test_a_compiled_operator_is_taken_in_place_of_ours(written, tmp_path):
    """In another process, since a library cannot be unloaded; ours would be a second function of the same name."""
    artifact, expected = written("swin", precision="float", plugin=("roll=compiled_one::Roll",))
    done = subprocess.run(
        ["bash", ROOT / "plugins" / "torch" / "build.sh", tmp_path], capture_output=True, text=True,
        env=os.environ | {"PYTHON": sys.executable, "DOMAIN": "compiled_one"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    torch.save(expected, tmp_path / "expected.pt")
    script = f"""
import torch
torch.ops.load_library({str(tmp_path / "libswin_quant_torch.so")!r})
found = torch.jit.load({str(artifact.file)!r})(torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(5)))
torch.testing.assert_close(found, torch.load({str(tmp_path / "expected.pt")!r}), rtol=1e-4, atol=1e-5)
print("alike")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "alike\n", done.stderr


def test_who_runs_a_file_is_told_that_it_is_code_but_of_one_s_own_just_written(written, monkeypatch, caplog):
    artifact, _ = written(precision="float")
    load(artifact)
    assert caplog.text == ""
    monkeypatch.setattr(torchscript, "_known", set())  # as in a new process
    load(artifact)
    load(artifact)
    (line,) = caplog.messages
    assert line.startswith(f"{artifact.file}: is TorchScript, which is code") and "\n" not in line
