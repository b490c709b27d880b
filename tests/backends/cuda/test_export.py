"""An export refuses pictures, batches and ranges in one line; a changed, cut or forged file is refused in one line."""

import json

import pytest
import torch
from cards_of_results import CALIBRATION
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from swin_quant.backends.cuda.engine import load
from swin_quant.backends.cuda.export import CudaOptions, export, read_network
from swin_quant.backends.cuda.sessions import as_input
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.cards.card import RunCard
from swin_quant.data.preprocess import Preprocess
from swin_quant.quant.calibration import calibrate
from swin_quant.quant.policy import apply_policy, load_policy, quantize
from tests.backends.conftest import MICRO, pictures
from tests.backends.cuda.conftest import PREPROCESS

BLOCK = "layers.0.blocks.1."
QKV_HALF = load_policy("cuda").off("*.attn.m*_input_quantizer")


def card(preprocess=PREPROCESS, **calibration):
    return RunCard("micro", {}, preprocess.to_dict(), calibration=CALIBRATION | calibration)


@pytest.mark.parametrize("kind", ["swin", "swinv2"])
@pytest.mark.parametrize(
    ("node", "policy", "options"),
    [
        ("layernorm_input1_quantizer", "cuda", {}),
        ("add1_residual_input_quantizer", "cuda", {}),
        ("add2_local_input_quantizer", "ft-mode1", {}),
        ("add2_residual_input_quantizer", "cuda", {"precision": "float"}),
        ("mlp.fc2._input_quantizer", "cuda", {"precision": "float"}),
        ("mlp.fc2._input_quantizer", load_policy("cuda").off("*.fc2.*"), {}),
        ("attn.matmul_v_input_quantizer", QKV_HALF, {}),
    ],
)
def test_values_beyond_float16_where_it_is_kept(calibrated, tmp_path, caplog, kind, node, policy, options):
    model, found = calibrated(kind, policy), card(beyond_half=[f"{BLOCK}attn.softmax_input_quantizer", BLOCK + node])
    said, is_ft = f"calibration saw values beyond float16 (65504) in {BLOCK}{node}", policy == "ft-mode1"
    ft = ", and ft-mode1 is FasterTransformer's, in float16: give policy cuda"
    refused = ft if is_ft else ", which the CUDA engine keeps in it: give float_type bfloat16, or none"
    with pytest.raises(SwinQuantError) as error:
        export(model, found, tmp_path, CudaOptions(**options, float_type="float16"))
    assert str(error.value) == said + refused and not list(tmp_path.iterdir())
    if not is_ft:
        made = export(model, found, tmp_path, CudaOptions(**options))
        assert made.record["options"]["float_type"] == "bfloat16" and f"{said}: the residual" in caplog.text
        caplog.clear()
        assert export(model, found, tmp_path, CudaOptions(**options, float_type="bfloat16")) and not caplog.text


def test_a_sum_beyond_float16_at_the_end_of_a_stage(tiny_model, tmp_path, caplog):
    """No node sees it: the branch and the stream that it adds are within float16."""
    model = tiny_model("swin", **MICRO)
    for block in model.layers[0].blocks:
        block.mlp.fc2.bias.data[0] = 40000.0
    apply_policy(model, load_policy("cuda"))
    images = pictures(8)
    calibration = calibrate(model, [images])
    stream = f"{BLOCK}add2_residual_input_quantizer"
    assert calibration.beyond_half == [stream] and calibration.largest[stream] < 65504
    engine = load(export(model, card(beyond_half=calibration.beyond_half), tmp_path))
    assert engine.details["float_type"] == "bfloat16" and stream in caplog.text
    in_float16 = load(export(model, card(), tmp_path))
    quantize(model)
    with torch.inference_mode():
        expected = model(images)
    off = [((run(images) - expected).abs().mean() / expected.std()).item() for run in (engine, in_float16)]
    assert off[0] < 0.2 and not off[1] < 0.5  # also true for NaN


@pytest.mark.parametrize("node", ["mlp.fc2._input_quantizer", "attn.matmul_v_input_quantizer", "attn.softmax_input"])
def test_values_beyond_float16_where_bytes_saturate(calibrated, tmp_path, node):
    """Or where sums are float32."""
    made = export(calibrated("swin"), card(beyond_half=[BLOCK + node]), tmp_path)
    assert made.record["options"]["float_type"] == "float16"


@pytest.mark.parametrize(("keys", "preprocess"), [({"IN_CHANS": 1}, {}), ({}, {"shape": "shorter"})])
def test_pixels_that_are_none_of_rgb_pictures_of_one_size(tiny_model, tmp_path, keys, preprocess):
    given = card(Preprocess(**PREPROCESS.to_dict() | preprocess))
    with pytest.raises(UsageError, match="^uint8_input: is for RGB pictures of one size, which this model does not"):
        export(tiny_model("swin", **MICRO, **keys), given, tmp_path, CudaOptions("float", uint8_input=True))
    assert not list(tmp_path.iterdir())


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
    "unknown products": ({"quantized": ["layers.9.blocks.0.attn.qkv"]}, "names products that this Swin has not"),
    "values without logits": ({"quantized": ["layers.0.blocks.0.attn.a v"]}, "quantized names products"),
    "half of FasterTransformer": ({"arithmetic": "ft-mode1", "quantized": []}, "has no such products"),
    "an unknown format": ({"format": "fp4"}, "format"),
    "another format": ({"format": "fp8"}, "weight is int8 .*, must be uint8"),
    "pixels of no preprocessing": ({"preprocess": {}}, "preprocess"),
    "pixels of another size": (
        {"preprocess": PREPROCESS.to_dict() | {"size": 9}},
        "preprocess is of other pictures than geometry",
    ),
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


@pytest.fixture
def pixels():
    return torch.randint(0, 256, (3, 8, 8, 3), generator=torch.Generator().manual_seed(5), dtype=torch.uint8)


@pytest.mark.parametrize("float_type", ["float16", "bfloat16"])
def test_pixels_give_the_logits_of_normalised_pictures(exported, pixels, float_type):
    """In half precision: rounding activations to int8 would hide rounding errors of the folding."""
    options = {"precision": "float", "float_type": float_type}
    whole, folded = (load(exported(uint8_input=uint8, **options)[0]) for uint8 in (False, True))
    images = PREPROCESS.normalised(pixels)
    expected, got = whole(images), folded(images)
    assert (got - expected).abs().mean() < {"float16": 0.002, "bfloat16": 0.02}[float_type] * expected.std()
    assert torch.equal(folded(pixels), got)  # decoded pixels


def test_pictures_become_pixels_where_they_are(exported):
    """Pictures on a GPU stay there; from the meta device no value could come to the CPU."""
    network = load(exported(uint8_input=True)[0]).run.network
    given = as_input(network, torch.empty(2, 3, 8, 8, device="meta"))
    assert given.is_meta and given.dtype == torch.uint8 and given.shape == (2, 8, 8, 3)


def test_the_file_says_that_it_takes_pixels(exported):
    artifact, _ = exported(uint8_input=True)
    assert artifact.file.name == "micro_int8_uint8_cuda.safetensors" and artifact.record["options"]["uint8_input"]
    assert load(artifact).run.network.preprocess == PREPROCESS
    artifact.card.preprocess["mean"] = [0.5, 0.5, 0.5]
    with pytest.raises(SwinQuantError, match="prepares pictures differently from its run card"):
        load(artifact)


def test_pixels_where_they_are_not_taken(exported, pixels):
    engine = load(exported()[0])
    with pytest.raises(UsageError, match="takes normalised pictures, not pixels: export with uint8_input"):
        engine(pixels)
    with pytest.raises(UsageError, match="takes pictures of 8 x 8 x 3, not 3 x 8 x 8"):
        engine(pixels.permute(0, 3, 1, 2))
    with pytest.raises(UsageError, match="uint8_input: ft-mode1 rounds normalised pictures"):
        exported(policy="ft-mode1", uint8_input=True)
