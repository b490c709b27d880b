"""The file of an export: a written file is read; a changed, cut or forged one is refused in one line."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from swin_quant.backends.cuda.file import read_network
from swin_quant.base.errors import SwinQuantError

PREPROCESS = {"size": 9, "crop": False, "interpolation": "bicubic", "mean": [0.5] * 3, "std": [0.5] * 3}


@pytest.fixture
def parts(exported):
    """The file, its tensors, and its header as data."""
    path = exported()[0].file
    with safe_open(path, "pt") as file:
        header = json.loads(file.metadata()["swin_quant"])
    return path, load_file(path), header


def rewritten(parts, tensors=None, **header):
    path, old, known = parts
    geometry = known["geometry"] | header.pop("geometry", {})
    save_file(tensors or old, path, {"swin_quant": json.dumps(known | {"geometry": geometry} | header)})
    return path


def test_what_is_written_is_read(parts):
    network = read_network(rewritten(parts))
    assert network.spec.geometry.depths == (2, 1) and len(network.spec.quantized) == 16
    weight = network.tensors["layers.0.blocks.0.attn.qkv.weight"]
    assert weight.dtype == torch.int8 and weight.shape == (96, 32) and weight.is_contiguous()


FORGED = {
    "another schema": ({"schema": "swin-quant/cuda/1"}, "is not a file of the CUDA engine of this version"),
    "another version": ({"version": 3}, "version"),
    "unknown arithmetic": ({"arithmetic": "magic"}, "arithmetic"),
    "a float type that is none": ({"float_type": "float64"}, "float_type"),
    "unknown products": (
        {"quantized": ["layers.9.blocks.0.attn.qkv"]},
        "quantized names products that this Swin has not",
    ),
    "values without logits": ({"quantized": ["layers.0.blocks.0.attn.a v"]}, "quantized names products"),
    "half of FasterTransformer": ({"arithmetic": "ft-mode1", "quantized": []}, "has no such products"),
    "an unknown format": ({"format": "fp4"}, "format"),
    "another format": ({"format": "fp8"}, "weight is int8 .*, must be uint8"),
    "pixels of no preprocessing": ({"preprocess": {}}, "preprocess"),
    "pixels of another size": ({"preprocess": PREPROCESS}, "preprocess is of other pictures than geometry"),
    "a size that is too large": ({"geometry": {"embed_dim": 10**9}}, "embed_dim"),
    "a size that is a text": ({"geometry": {"image_size": "8"}}, "image_size"),
    "no depths": ({"geometry": {"depths": []}}, "depths"),
    "a window that does not fit": ({"geometry": {"window": 3, "image_size": 16}}, "no Swin has these sizes"),
    "more heads than channels": ({"geometry": {"heads": [5, 5]}}, "no Swin has these sizes"),
    "a stage without heads": ({"geometry": {"heads": [1]}}, "no Swin has these sizes"),
    "a wide window": ({"geometry": {"window": 64, "image_size": 256}}, "WINDOW_SIZE 64"),
    "other tensors": ({"geometry": {"depths": [2, 2]}}, "missing or unknown tensors"),
    "other shapes": ({"geometry": {"classes": 6}}, "head.weight is float32"),
    "an unknown key": ({"geometry": {"shell": 1}}, "shell"),
}


@pytest.mark.parametrize("case", FORGED)
def test_forged_headers(parts, case):
    changes, message = FORGED[case]
    with pytest.raises(SwinQuantError, match=message) as error:
        read_network(rewritten(parts, **changes))
    assert str(parts[0]) in str(error.value) and "\n" not in str(error.value)


def test_other_tensors(parts):
    _, tensors, _ = parts
    weight, scale = "layers.0.blocks.0.attn.proj.weight", "layers.0.blocks.0.attn.proj.scale"
    cases = [
        ({weight: tensors[weight].float()}, "proj.weight is float32 .*, must be int8"),
        ({weight: tensors[weight][:, :16].contiguous()}, r"proj.weight is int8 \[32, 16\], must be int8 \[32, 32\]"),
        ({scale: tensors[scale] * torch.nan}, "proj.scale holds NaN or Inf"),
        ({"more": torch.zeros(1)}, "missing or unknown tensors: more"),
    ]
    for changes, message in cases:
        with pytest.raises(SwinQuantError, match=message):
            read_network(rewritten(parts, tensors | changes))


def test_float8_is_written_and_read(exported):
    path = exported(policy="cuda-fp8")[0].file
    network = read_network(path)
    weight = network.tensors["layers.0.blocks.0.attn.qkv.weight"]
    assert network.spec.format == "fp8" and weight.dtype == torch.float8_e4m3fn
    assert weight.float().abs().max() == 448  # a row's range is its largest magnitude
    with safe_open(path, "pt") as file:
        header = file.metadata()
    nan = torch.full(weight.shape, 0x7F, dtype=torch.uint8)
    save_file(load_file(path) | {"layers.0.blocks.0.attn.qkv.weight": nan}, path, header)
    with pytest.raises(SwinQuantError, match="qkv.weight holds NaN or Inf"):
        read_network(path)


def test_files_that_are_none(parts, tmp_path):
    path, tensors, _ = parts
    save_file(tensors, tmp_path / "bare.safetensors")
    (tmp_path / "cut.safetensors").write_bytes(path.read_bytes()[:-100])
    (tmp_path / "text.safetensors").write_text("not a file of tensors")
    for name in ("bare", "cut", "text"):
        with pytest.raises(SwinQuantError, match=f"{name}.safetensors"):
            read_network(tmp_path / f"{name}.safetensors")
