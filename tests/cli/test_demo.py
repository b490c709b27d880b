"""swin-quant demo, cut short: the files that it promises and the table; `make demo` runs all of its epochs."""

import json
import re

import pytest
import torch

POLICIES = [None, None, "ft-mode1", "ft-mode2"]


@pytest.mark.slow
def test_one_epoch(run, tmp_path):
    done = run("demo", "--epochs", 1, "--output", tmp_path)
    assert done.code == 0, done
    names = ["swin_micro_digits.pth", "swin_micro_digits_calib.json", "swin_micro_digits_calib.pth"]
    assert {*names, "training.png"} <= {file.name for file in tmp_path.iterdir()}
    weights = torch.load(tmp_path / names[0], weights_only=True)["model"]
    calibrated = torch.load(tmp_path / names[2], weights_only=True)
    assert all(torch.equal(calibrated[key], value) for key, value in weights.items())
    card = json.loads((tmp_path / names[1]).read_text())
    assert [result["policy"] for result in card["results"]] == POLICIES
    assert [result["precision"] for result in card["results"]] == ["float32", "bfloat16", "int8", "int8"]
    assert all(result["pictures"] == 355 for result in card["results"])  # every fifth of each class
    assert card["results"][0]["acc1"] > 20  # one epoch is better than chance
    assert card["calibration"]["pictures"] == 80 and card["calibration"]["split"] == "train"
    assert "swin_micro_digits" in done.out and "int8" in done.out
    assert re.findall(r"^(\d)\. ", done.err, re.MULTILINE) == ["1", "2", "3"]


@pytest.mark.parametrize(("flags", "says"), [(["--epochs", 0], "--epochs 0"), (["--model", "resnet"], "resnet")])
def test_bad_flags(run, tmp_path, flags, says):
    assert says in run("demo", "--output", tmp_path, *flags).error(2)
