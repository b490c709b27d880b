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


def test_the_source_is_never_overwritten(convert, micro, tmp_path):
    file = tmp_path / "x.pth"
    file.write_bytes((micro / "swin.pth").read_bytes())
    assert "is the checkpoint that is read" in convert(file, "x.pth").error(2)
    assert file.read_bytes() == (micro / "swin.pth").read_bytes()


def test_the_run_card_of_the_source_is_never_overwritten(run, convert, micro, tmp_path):
    convert(micro / "swin.pth", "x.pth").ok()
    card = (tmp_path / "x.json").read_bytes()
    done = run("convert", tmp_path / "x.pth", "--to", tmp_path / "x.safetensors")
    assert "x.json is the run card of" in done.error(2)
    assert (tmp_path / "x.json").read_bytes() == card and not (tmp_path / "x.safetensors").exists()


def test_a_weight_beyond_float16_is_named(convert, micro, tmp_path):
    state, _ = read_state_dict(micro / "swin.pth")
    state["head.weight"][0, 0] = 1e6
    big = tmp_path / "big.pth"
    torch.save({"model": state}, big)
    done = convert(big, "x.safetensors", "--dtype", "float16")
    assert "head.weight does not fit into torch.float16" in done.error(1)
    assert not (tmp_path / "x.safetensors").exists()


@pytest.fixture
def after_passes(run, float_flags, tmp_path):
    """after_passes(passes, flags ...) -> x.pth, converted from what these passes calibrated."""

    def made(passes, *flags):
        (tmp_path / "mine.yaml").write_text(f"passes: {passes}\n")
        words = ["--pictures", 4, "--passes", tmp_path / "mine.yaml", "--output", tmp_path]
        run("calibrate", *float_flags, *words, *flags).ok()
        run("convert", tmp_path / "swin_micro_calib.pth", "--to", tmp_path / "x.pth").ok()
        return tmp_path / "x.pth"

    return made


@pytest.mark.slow
def test_corrected_weights_are_no_float_baseline_of_themselves(run, after_passes, scoring_flags, tmp_path):
    """The original of both files is the float file that was calibrated."""
    done = run("evaluate", after_passes("[gptq]", "--policy", "qdq", "--wprec", 4), *scoring_flags)
    assert done.code == 0 and "corrected float32" in done.out, done
    results = json.loads((tmp_path / "x.json").read_text())["results"]
    assert [result["weights"] for result in results] == ["original", "ptq"]


@pytest.mark.slow
def test_passes_that_changed_the_weights_stay_in_the_card(after_passes, micro, card_of):
    """The card keeps `equalize` even though logits equal the original's, since maps of stages may not."""
    passes = "[equalize, {name: range_search, pictures: 4, rounds: 1}]"
    card = card_of(after_passes(passes, "--policy", "cpu"))
    assert [one["name"] for one in card["calibration"]["passes"]] == ["equalize"]
    assert card["source"]["sha256"] == compute_sha256(micro / "swin.pth")
