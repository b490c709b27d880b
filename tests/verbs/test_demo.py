"""swin-quant demo, shortened, as the first line of the README's way from a fresh clone to a service that answers.

A shell runs the README's lines unchanged; `make demo` trains all its epochs unless shortened.
"""

import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch
from shown import ROOT

POLICIES = [None, None, "ft-mode1", "ft-mode2"]
SECTION = re.search(r"## A running service\n(.*?)\n## ", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)[1]
LINES = [line for block in re.findall(r"```bash\n(.*?)```", SECTION, re.DOTALL) for line in block.splitlines()]
# Replace the environment that `make` would fill from the network with this one, and the demo with one epoch of a model
# of two blocks.
OURS = """#!/bin/sh
[ "$1" = demo ] && set -- "$@" --epochs 1
exec {python} -m swin_quant "$@"
"""


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A stranger's clone; this one where CI has run the demo's every epoch (DEMO names its log)."""
    if "DEMO" in os.environ:
        return ROOT
    folder = tmp_path_factory.mktemp("stranger") / "swin-quant"
    if not shutil.which("make"):
        pytest.skip("needs make")
    if subprocess.run(["git", "clone", "--quiet", "--local", ROOT, folder], capture_output=True).returncode:
        others = shutil.ignore_patterns(".*", "out", "build", "dist", "__pycache__")  # sources of no repository
        shutil.copytree(ROOT, folder, ignore=others)
    command = folder / ".venv" / "bin" / "swin-quant"
    command.parent.mkdir(parents=True)
    command.write_text(OURS.format(python=sys.executable))
    command.chmod(0o755)
    (folder / ".venv" / ".installed").touch()
    config = folder / "configs" / "demo" / "swin_digits.yaml"
    small = config.read_text().replace("[2, 2, 2, 2]", "[1, 1]").replace("[1, 2, 4, 8]", "[1, 2]")
    config.write_text(small)
    return folder


def test_a_missing_extra_is_named_before_training(run, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    done = run("demo", "--output", tmp_path / "out")
    assert ".[demo]" in done.error(2) and "1. train" not in done.err and not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def how(clone):
    """The clone's folder, environment and shell for `subprocess.run`."""
    environment = os.environ | {"PYTHONPATH": str(clone), "OMP_NUM_THREADS": "1"}
    return {"cwd": clone, "env": environment, "text": True, "shell": True}


@pytest.fixture(scope="module")
def demo(clone, how):
    """The folder of the demo's files and its log, by the README's first line."""
    if "DEMO" in os.environ:
        return clone / "out" / "demo", (ROOT / os.environ["DEMO"]).read_text()
    done = subprocess.run(LINES[0], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **how)
    assert done.returncode == 0, done.stdout
    return clone / "out" / "demo", done.stdout


@pytest.mark.slow
def test_the_demo_leaves_what_it_promises(demo):
    folder, log = demo
    names = ["swin_micro_digits.pth", "swin_micro_digits_calib.json", "swin_micro_digits_calib.pth"]
    assert {*names, "training.png"} <= {file.name for file in folder.iterdir()}
    weights = torch.load(folder / names[0], weights_only=True)["model"]
    calibrated = torch.load(folder / names[2], weights_only=True)
    assert all(torch.equal(calibrated[key], value) for key, value in weights.items())
    card = json.loads((folder / names[1]).read_text())
    assert [result["policy"] for result in card["results"]] == POLICIES
    assert [result["precision"] for result in card["results"]] == ["float32", "bfloat16", "int8", "int8"]
    assert all(result["pictures"] == 355 for result in card["results"])  # a fifth of each class
    assert card["results"][0]["acc1"] > 13  # one epoch is better than chance, 10 with a standard error of 1.6
    assert card["calibration"]["pictures"] == 80 and card["calibration"]["split"] == "train"
    assert "swin_micro_digits" in log and "int8" in log
    assert re.findall(r"^(\d)\. ", log, re.MULTILINE) == ["1", "2", "3", "4", "5"]
    assert "warning:" not in log and "no float was timed" not in log
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
        assert len(scored) == (importlib.util.find_spec(engine) is not None)


@pytest.mark.parametrize(("flags", "says"), [(["--epochs", 0], "--epochs 0"), (["--model", "resnet"], "resnet")])
def test_bad_flags(run, tmp_path, flags, says):
    assert says in run("demo", "--output", tmp_path, *flags).error(2)


@pytest.mark.slow
def test_a_stranger_gets_from_the_readme_to_answers(demo, how):
    for needed in ("openvino", "uvicorn", "prometheus_client"):
        pytest.importorskip(needed)
    if not shutil.which("curl"):
        pytest.skip("needs curl")
    with socket.socket() as probe:  # port 8000 may be taken here
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    _, serve, ask = LINES
    with subprocess.Popen(f"exec {serve} --port {port}", **how) as service:
        try:
            end = time.monotonic() + 60
            while not listens(port) and service.poll() is None and time.monotonic() < end:
                time.sleep(0.1)
            done = subprocess.run(ask.replace("localhost:8000", f"127.0.0.1:{port}"), capture_output=True, **how)
            answer = json.loads(done.stdout)
            assert [len(one["name"]) for one in answer["classes"]] == [1] * 5 and answer["model"] == "swin_micro_digits"
            assert sum(one["probability"] for one in answer["classes"]) <= 1.0001
        finally:
            service.send_signal(signal.SIGTERM)
    assert service.returncode == 0


def listens(port):
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True
