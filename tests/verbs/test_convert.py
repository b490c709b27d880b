"""swin-quant convert: the same weights in other formats and types."""

import json

import pytest
import safetensors.torch
import torch

from swin_quant.base.files import compute_sha256
from swin_quant.checkpoint import read_state_dict


@pytest.fixture
def convert(run, micro, tmp_path):
    """convert(checkpoint, name, flags ...): write a checkpoint to a file of that name."""
    return lambda checkpoint, name, *flags: run(
        "convert", "--cfg", micro / "swin.yaml", checkpoint, "--to", tmp_path / name, *flags
    )


@pytest.mark.parametrize("name", ["small.safetensors", "small.pth"])
def test_half_precision_weights_are_the_rounded_ones(convert, micro, tmp_path, name):
    convert(micro / "swin.pth", name, "--dtype", "float16").ok()
    state, _ = read_state_dict(tmp_path / name)
    original, _ = read_state_dict(micro / "swin.pth")
    assert state.keys() == original.keys()
    for key, value in original.items():
        assert torch.equal(state[key], value.half() if value.is_floating_point() else value), key
    card = json.loads((tmp_path / name).with_suffix(".json").read_text())
    assert card["checkpoint"]["file"] == name and card["results"] == []


def test_timm_reads_what_safetensors_reads(convert, micro, tmp_path):
    convert(micro / "swin.pth", "weights.safetensors").ok()
    assert "layers.0.blocks.0.attn.qkv.weight" in safetensors.torch.load_file(tmp_path / "weights.safetensors")


def test_neither_the_source_nor_its_run_card_is_overwritten(run, convert, micro, tmp_path, snapshot):
    convert(micro / "swin.pth", "x.pth").ok()
    before = snapshot(tmp_path)
    for name, says in (("x.pth", "is the checkpoint that is read"), ("x.safetensors", "x.json is the run card of")):
        assert says in run("convert", tmp_path / "x.pth", "--to", tmp_path / name).error(2)
    assert snapshot(tmp_path) == before


def test_a_weight_beyond_float16_is_named(convert, micro, tmp_path):
    state, _ = read_state_dict(micro / "swin.pth")
    state["head.weight"][0, 0] = 1e6
    big = tmp_path / "big.pth"
    torch.save({"model": state}, big)
    done = convert(big, "x.safetensors", "--dtype", "float16")
    assert "head.weight does not fit into torch.float16" in done.error(1)
    assert not (tmp_path / "x.safetensors").exists()


@pytest.mark.slow
def test_passes_that_changed_the_weights_stay_in_the_card(run, float_flags, micro, card_of, tmp_path):
    """The card keeps `equalize` even though logits equal the original's, since maps of stages may not."""
    (tmp_path / "mine.yaml").write_text("passes: [equalize, {name: range_search, pictures: 4, rounds: 1}]\n")
    words = ["--pictures", 4, "--passes", tmp_path / "mine.yaml", "--policy", "cpu", "--output", tmp_path]
    run("calibrate", *float_flags, *words).ok()
    run("convert", tmp_path / "swin_micro_calib.pth", "--to", tmp_path / "x.pth").ok()
    card = card_of(tmp_path / "x.pth")
    assert [one["name"] for one in card["calibration"]["passes"]] == ["equalize"]
    assert card["source"]["sha256"] == compute_sha256(micro / "swin.pth")
