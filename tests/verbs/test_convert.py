"""swin-quant convert: the same weights in other formats and types."""

import json

import pytest
import safetensors.torch
import torch

from swin_quant.base.files import sha256_of
from swin_quant.checkpoint import read_state_dict


@pytest.mark.parametrize("name", ["small.safetensors", "small.pth"])
def test_half_precision_weights_are_the_rounded_ones(run, micro, tmp_path, name):
    run("convert", "--cfg", micro / "swin.yaml", "--checkpoint", micro / "swin.pth", "--to", tmp_path / name,
        "--dtype", "float16").ok()  # fmt: skip
    state, _ = read_state_dict(tmp_path / name)
    original, _ = read_state_dict(micro / "swin.pth")
    assert state.keys() == original.keys()
    for key, value in original.items():
        assert torch.equal(state[key], value.half() if value.is_floating_point() else value), key
    card = json.loads((tmp_path / name).with_suffix(".json").read_text())
    assert card["checkpoint"]["file"] == name and card["results"] == []


def test_timm_reads_what_safetensors_reads(run, micro, tmp_path):
    file = tmp_path / "weights.safetensors"
    assert run("convert", "--cfg", micro / "swin.yaml", "--checkpoint", micro / "swin.pth", "--to", file).code == 0
    assert "layers.0.blocks.0.attn.qkv.weight" in safetensors.torch.load_file(file)


def test_the_source_is_never_overwritten(run, micro, tmp_path):
    file = tmp_path / "x.pth"
    file.write_bytes((micro / "swin.pth").read_bytes())
    done = run("convert", "--cfg", micro / "swin.yaml", "--checkpoint", file, "--to", file)
    assert "is the checkpoint that is read" in done.error(2)
    assert file.read_bytes() == (micro / "swin.pth").read_bytes()


def test_the_run_card_of_the_source_is_never_overwritten(run, micro, tmp_path):
    run("convert", "--cfg", micro / "swin.yaml", micro / "swin.pth", "--to", tmp_path / "x.pth").ok()
    card = (tmp_path / "x.json").read_bytes()
    done = run("convert", tmp_path / "x.pth", "--to", tmp_path / "x.safetensors")
    assert "x.json is the run card of" in done.error(2)
    assert (tmp_path / "x.json").read_bytes() == card and not (tmp_path / "x.safetensors").exists()


def test_an_unknown_format_is_refused(run, micro, tmp_path):
    done = run("convert", "--cfg", micro / "swin.yaml", "--checkpoint", micro / "swin.pth", "--to", tmp_path / "x.bin")
    assert "must end in .pth or .safetensors" in done.error(2)


def test_a_weight_beyond_float16_is_named(run, micro, tmp_path):
    state, _ = read_state_dict(micro / "swin.pth")
    state["head.weight"][0, 0] = 1e6
    big = tmp_path / "big.pth"
    torch.save({"model": state}, big)
    done = run("convert", "--cfg", micro / "swin.yaml", "--checkpoint", big, "--to", tmp_path / "x.safetensors",
               "--dtype", "float16")  # fmt: skip
    assert "head.weight does not fit into torch.float16" in done.error(1)
    assert not (tmp_path / "x.safetensors").exists()


@pytest.mark.slow
def test_corrected_weights_are_no_float_baseline_of_themselves(run, micro, pictures, tmp_path):
    """The original of both files is the float file that was calibrated."""
    (tmp_path / "mine.yaml").write_text("passes: [gptq]\n")
    told = ["--cfg", micro / "swin.yaml", "--data-path", pictures, "--device", "cpu"]
    passes = ["--pictures", 4, "--passes", tmp_path / "mine.yaml", "--policy", "qdq", "--wprec", 4, "--no-eval"]
    assert run("calibrate", micro / "swin.pth", *told, *passes, "--output", tmp_path).code == 0
    assert run("convert", tmp_path / "swin_micro_calib.pth", "--to", tmp_path / "x.pth").code == 0
    done = run("evaluate", tmp_path / "x.pth", *told, "--half", "none")
    assert done.code == 0 and "corrected float32" in done.out, done
    results = json.loads((tmp_path / "x.json").read_text())["results"]
    assert [result["weights"] for result in results] == ["original", "ptq"]


@pytest.mark.slow
def test_what_its_weights_saw_stays_known(run, micro, pictures, tmp_path):
    """The card keeps `equalize` even though logits equal the original's, since maps of stages may not."""
    (tmp_path / "mine.yaml").write_text("passes: [equalize, {name: range_search, pictures: 4, rounds: 1}]\n")
    told = ["--cfg", micro / "swin.yaml", "--data-path", pictures, "--device", "cpu", "--no-eval", "--pictures", 4]
    passes = ["--passes", tmp_path / "mine.yaml", "--policy", "cpu"]
    assert run("calibrate", micro / "swin.pth", *told, *passes, "--output", tmp_path).code == 0
    assert run("convert", tmp_path / "swin_micro_calib.pth", "--to", tmp_path / "x.pth").code == 0
    card = json.loads((tmp_path / "x.json").read_text())
    assert [one["name"] for one in card["calibration"]["passes"]] == ["equalize"]
    assert card["source"]["sha256"] == sha256_of(micro / "swin.pth")
