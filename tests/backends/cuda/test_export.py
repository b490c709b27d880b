"""An export refuses pictures, batches and ranges in one line, before it writes anything."""

import pytest
import torch

from swin_quant.backends.cuda.engine import load
from swin_quant.backends.cuda.export import CudaOptions, export
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.cards.card import RunCard
from swin_quant.data.preprocess import Preprocess
from swin_quant.quant.calibration import calibrate
from swin_quant.quant.policy import apply_policy, load_policy, quantize
from tests.backends.conftest import MICRO, pictures

CALIBRATION = {
    "method": "max", "percentile": None, "exact": False, "batches": 1, "batch_size": 1, "seed": 0, "split": "train",
    "augment": False, "pictures": 1, "pictures_sha256": "0" * 64, "files": [], "unreadable": [], "dead_nodes": [],
}  # fmt: skip
PREPROCESS = Preprocess(size=8, crop=False, interpolation="bicubic", mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
BLOCK = "layers.0.blocks.1."
QKV_HALF = load_policy("cuda").off("*.attn.m*_input_quantizer")


def card(preprocess=PREPROCESS, **calibration):
    return RunCard("micro", {}, preprocess.to_dict(), calibration=CALIBRATION | {"beyond_half": []} | calibration)


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


def test_a_batch_above_what_kernels_address(tiny_model, tmp_path):
    """4096 pictures have one value too many between fc1 and fc2, the widest tensor: 64 x 64 tokens of 128 each."""
    model = tiny_model("swin", **MICRO | {"IMG_SIZE": 128})
    with pytest.raises(
        UsageError, match="^batch 4096: kernels address 2147483648 values of a tensor: at most 4095 here"
    ):
        export(model, card(), tmp_path, CudaOptions("float", batch=4096))
    assert not list(tmp_path.iterdir())
    assert export(model, card(), tmp_path, CudaOptions("float", batch=4095)).record["options"]["batch"] == 4095
