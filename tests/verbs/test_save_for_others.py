"""model.save for other tools: the same weights in other formats and types."""

import json

import pytest
import safetensors.torch
import torch

import swin_quant as sq
from swin_quant.base.files import compute_sha256
from swin_quant.checkpoint import read_state_dict


@pytest.mark.parametrize("name", ["small.safetensors", "small.pth"])
def test_half_precision_weights_are_the_rounded_ones(model, micro, tmp_path, name):
    model.save(tmp_path / name, dtype="float16")
    state, _ = read_state_dict(tmp_path / name)
    original, _ = read_state_dict(micro / "swin.pth")
    assert state.keys() == original.keys()
    for key, value in original.items():
        assert torch.equal(state[key], value.half() if value.is_floating_point() else value), key
    card = json.loads((tmp_path / name).with_suffix(".json").read_text())
    assert card["checkpoint"]["file"] == name and card["results"] == []
    assert card["source"]["sha256"] == compute_sha256(micro / "swin.pth")


def test_timm_reads_what_safetensors_reads(model, tmp_path):
    model.save(tmp_path / "weights.safetensors")
    assert "layers.0.blocks.0.attn.qkv.weight" in safetensors.torch.load_file(tmp_path / "weights.safetensors")


def test_mindspore_s_names_are_read_again(model, tmp_path):
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(sq.load(model.save(tmp_path / "x.ckpt"))(images), model(images))


def test_neither_its_own_file_nor_its_card_is_overwritten(model, tmp_path):
    file = model.save(tmp_path / "x.pth")
    before = {one: one.read_bytes() for one in tmp_path.iterdir()}
    for name in ("x.pth", "x.ckpt"):
        with pytest.raises(sq.UsageError, match="or its run card would be lost"):
            sq.load(file).save(tmp_path / name, dtype="float16")
    assert {one: one.read_bytes() for one in tmp_path.iterdir()} == before


def test_a_weight_beyond_float16_is_named(model, tmp_path):
    with torch.no_grad():
        model.module.head.weight[0, 0] = 1e6
    with pytest.raises(sq.SwinQuantError, match=r"head.weight does not fit into torch.float16"):
        model.save(tmp_path / "x.safetensors", dtype="float16")
    assert not list(tmp_path.iterdir())


@pytest.fixture
def after_passes(model, pictures, tmp_path):
    """after_passes(passes, policy) -> x.pth, the float weights of what these passes calibrated."""

    def made(passes, policy):
        sq.calibrate(model, sq.pictures(pictures, "train", 4), policy, passes=passes)
        calibrated = model.save(tmp_path / "made_calib.pth")
        return sq.load(calibrated).save(tmp_path / "x.pth", dtype="float32")

    return made


@pytest.mark.slow
def test_corrected_weights_are_no_float_baseline_of_themselves(run, after_passes, scoring_flags, tmp_path):
    """The original of both files is the float file that was calibrated."""
    done = run("evaluate", after_passes(["gptq"], sq.policy("qdq").bits("role:gemm_weight", 4)), *scoring_flags)
    assert done.code == 0 and "corrected float32" in done.out, done
    results = json.loads((tmp_path / "x.json").read_text())["results"]
    assert [result["weights"] for result in results] == ["original", "ptq"]


@pytest.mark.slow
def test_passes_that_changed_the_weights_stay_in_the_card(after_passes, micro, card_of):
    """The card keeps `equalize` even though logits equal the original's, since maps of stages may not."""
    card = card_of(after_passes(["equalize", {"name": "range_search", "pictures": 4, "rounds": 1}], "cpu"))
    assert [one["name"] for one in card["calibration"]["passes"]] == ["equalize"] and card["policy"] is None
    assert card["source"]["sha256"] == compute_sha256(micro / "swin.pth")
