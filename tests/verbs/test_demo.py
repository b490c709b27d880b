"""swin-quant demo, and the README's way from its files to a service that answers."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from commands import free_port
from shown import ROOT

from swin_quant.backends.openvino import operators
from swin_quant.base.cpu import BFLOAT16_FEATURES, features

POLICIES = [None, "ft-mode1", "ft-mode2"]
SHORT = """
import importlib, sys
from functools import partial
from swin_quant.cli import main
demo = importlib.import_module("swin_quant.verbs.demo")
demo.finetune = partial(demo.finetune, changes={"epoch_pictures": 320})
sys.exit(main(sys.argv[1:]))
"""
SECTION = re.search(r"## A running service\n(.*?)\n## ", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)[1]
LINES = [line for block in re.findall(r"```bash\n(.*?)```", SECTION, re.DOTALL) for line in block.splitlines()]


def test_a_missing_extra_is_named_before_training(run, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    done = run("demo", "--output", tmp_path / "out")
    assert ".[demo]" in done.error(2) and "1. train" not in done.err and not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def demo(tmp_path_factory, operators_folder):
    """The folder in which a demo of one epoch ran, and its log; in CI with compiled operators, as a user runs it. The
    training at four bits, whose steps are slow, sees 320 pictures."""
    words = [sys.executable, "-c", SHORT, "demo", "--output", "out/demo", "--epochs", "1"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(operators_folder)}
    if os.environ.get("CI") == "true":
        del environment[operators.SWITCH]
    folder = tmp_path_factory.mktemp("demo")
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(words, cwd=folder, env=environment, **how)
    assert done.returncode == 0, done.stdout
    return folder, done.stdout


def test_the_demo_leaves_what_it_promises(demo):
    folder, log = demo[0] / "out" / "demo", demo[1]
    names = ["swin_micro_digits.pth", "swin_micro_digits_calib.json", "swin_micro_digits_calib.pth"]
    assert {*names} <= {file.name for file in folder.iterdir()}
    weights = torch.load(folder / names[0], weights_only=True)["model"]
    calibrated = torch.load(folder / names[2], weights_only=True)
    assert all(torch.equal(calibrated[key], value) for key, value in weights.items())
    card = json.loads((folder / names[1]).read_text())
    assert [one["policy"] for one in card["results"] if one["precision"] != "bfloat16"] == POLICIES
    half = ["bfloat16"] if features(BFLOAT16_FEATURES) else []
    assert [result["precision"] for result in card["results"]] == ["float32", *half, "int8", "int8"]
    assert all(result["pictures"] == 355 for result in card["results"])  # a fifth of each class
    assert card["results"][0]["acc1"] > 13  # one epoch is better than chance, 10 with a standard error of 1.6
    assert card["calibration"]["pictures"] == 80 and card["calibration"]["split"] == "train"
    assert card["class_names"] == list("0123456789")
    assert "swin_micro_digits" in log and "int8" in log
    assert re.findall(r"^(\d)\. ", log, re.MULTILINE) == ["1", "2", "3", "4", "5"]
    warnings = [line for line in log.splitlines() if "warning:" in line and "this CPU has no VNNI" not in line]
    assert not warnings and "no float was timed" not in log
    assert re.search(r"^deploy: .*\nresult: .* of top-1.*\n(?:  .*\n)*next: +swin-quant ", log, re.MULTILINE), log
    tuned = json.loads((folder / "w4a4" / "swin_micro_digits_qat.json").read_text())
    calibrated, learned = (
        next(one for one in json.loads((folder / "w4a4" / f"swin_micro_digits_{what}.json").read_text())["results"]
             if one["policy"] == "w4a4" and one["weights"] == weights)
        for what, weights in (("calib", None), ("qat", "qat"))
    )  # fmt: skip
    assert tuned["training"]["best_epoch"] is not None and calibrated["pictures"] == learned["pictures"] == 355
    for engine in ("onnxruntime", "openvino"):
        scored = [json.loads(file.read_text())["results"] for file in (folder / engine).glob("*.json")]
        kinds = [{one["policy"] is None for one in results if one["engine"] == engine} for results in scored]
        assert kinds == [{True, False}] * len(scored)  # the engine's float, and int8
        assert len(scored) == 1


@pytest.mark.parametrize(("flags", "says"), [(["--epochs", 0], "--epochs 0"), (["--model", "resnet"], "resnet")])
def test_bad_flags(run, tmp_path, flags, says):
    assert says in run("demo", "--output", tmp_path, *flags).error(2)


def test_the_lines_of_the_readme_behind_the_demo_give_answers(demo):
    """A shell runs them, on a port that is free."""
    if not shutil.which("curl"):
        pytest.skip("needs curl")
    port = free_port()
    how = {"cwd": demo[0], "env": os.environ | {"PYTHONPATH": str(ROOT)}, "text": True, "shell": True}
    _, serve, ask = LINES
    serve = serve.replace(".venv/bin/swin-quant", f"exec {sys.executable} -m swin_quant")
    with subprocess.Popen(f"{serve} --port {port}", **how) as service:
        try:
            ask = ask.replace("curl ", "curl --retry 60 --retry-delay 1 --retry-connrefused ")
            done = subprocess.run(ask.replace("localhost:8000", f"127.0.0.1:{port}"), capture_output=True, **how)
            answer = json.loads(done.stdout)
            assert [len(one["name"]) for one in answer["classes"]] == [1] * 5 and answer["model"] == "swin_micro_digits"
            assert sum(one["probability"] for one in answer["classes"]) <= 1.0001
        finally:
            service.send_signal(signal.SIGTERM)
    assert service.returncode == 0
