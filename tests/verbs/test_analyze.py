"""`analyze`: the report, its JSON, and the input that it refuses."""

import json

import pytest
import torch
from torch import nn

import swin_quant as sq


def test_the_report_fits_80_columns_and_says_what_it_computed(run, micro):
    done = run("analyze", micro / "swin.pth", "--cfg", micro / "swin.yaml", "--check-replacements").ok()
    assert max(map(len, done.out.splitlines())) <= 80
    assert done.out.startswith("swin_micro, pictures 1 x 3 x 32 x 32: ")
    text = " ".join(done.out.split())
    assert "batch: may vary" in text and "size: fixed" in text
    assert "control flow does not depend on data" in text and "equal to the bit" in text


def test_as_json_after_replacements(run, micro):
    done = run("analyze", "--cfg", micro / "swinv2.yaml", "--replace", "roll", "--target", "tensorrt", "--json")
    report = json.loads(done.out)
    assert report["replaced"] == ["roll"] and list(report["targets"]) == ["tensorrt"]
    names = [one["name"] for one in report["operators"]]
    assert "roll" not in names and "linear" in names
    assert report["macs"] == sum(one["macs"] for one in report["operators"]) > 0


def test_bad_input_is_one_line(run, micro):
    for words, said in (
        (["--replace", "rol"], "--replace 'rol'; did you mean roll?"),
        (["--target", "tvm"], "--target 'tvm': there are cuda, "),
        (["--check-replacements"], "give a checkpoint"),
        (["x.onnx"], "x.onnx: is an ONNX file, which `swin-quant show` reads"),
    ):
        assert said in run("analyze", "--cfg", micro / "swin.yaml", *words).error(2)


def test_a_model_of_ones_own_from_python():
    found = sq.analyze(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), torch.randn(2, 3, 8, 8), check_replacements=True)
    assert "conv2d" in str(found) and "<table" in found._repr_html_()
    assert all(one["calls"] == 0 for one in found.to_dict()["replacements"])
    with pytest.raises(sq.UsageError, match="does not say the size of its pictures"):
        sq.analyze(nn.ReLU())
    with pytest.raises(sq.UsageError, match=r"images of shape \(3, 8, 8\): must be \[B, 3, H, W\]"):
        sq.analyze(nn.ReLU(), (3, 8, 8))
