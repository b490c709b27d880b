"""swin-quant demo, cut short: the files that it promises and the table; `make demo` runs all of its epochs."""

import importlib.util
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
    assert re.findall(r"^(\d)\. ", done.err, re.MULTILINE) == ["1", "2", "3", "4", "5"]
    tuned = json.loads((tmp_path / "w4a4" / "swin_micro_digits_qat.json").read_text())
    calibrated, learned = (
        next(one for one in json.loads((tmp_path / "w4a4" / f"swin_micro_digits_{what}.json").read_text())["results"]
             if one["policy"] == "w4a4" and one["weights"] == weights)
        for what, weights in (("calib", None), ("qat", "qat"))
    )  # fmt: skip
    assert tuned["training"]["best_epoch"] is not None and calibrated["pictures"] == learned["pictures"] == 355
    for engine in ("onnxruntime", "openvino"):
        scored = [json.loads(file.read_text())["results"] for file in (tmp_path / engine).glob("*.json")]
        assert [len([one for one in results if one["engine"] == engine]) for results in scored] == [1] * len(scored)
        assert len(scored) == (importlib.util.find_spec(engine) is not None)


@pytest.mark.parametrize(("flags", "says"), [(["--epochs", 0], "--epochs 0"), (["--model", "resnet"], "resnet")])
def test_bad_flags(run, tmp_path, flags, says):
    assert says in run("demo", "--output", tmp_path, *flags).error(2)
