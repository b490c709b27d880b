"""Every command behind `next:` works, as it is printed: for each engine, for few bits, for a module of one's own."""

import html
import os
import re
import shlex
import signal
import time

import pytest
from next_lines import FOLDER, next_commands
from nightly import share
from torch import nn

import swin_quant as sq
from swin_quant.data.preprocess import IMAGENET_MEAN, IMAGENET_STD

pytestmark = pytest.mark.slow
QUICK = {"search": "--pictures 8 --batch 4"}
FAR = "_tensorrt.onnx --for tensorrt"  # needs what no machine without a GPU has; the error names it


@pytest.fixture
def follow(run, fork, pictures):
    """follow(words) -> what a next command printed; a service is asked whether it listens, and stopped."""

    def go(words):
        program, name, *rest = words
        assert program == "swin-quant"
        rest = [str(pictures) if word == FOLDER else word for word in rest]
        if name == "serve":
            served = fork([name, *rest, "--port", "0"])
            end, said = time.monotonic() + 120, served.folder / "err"
            while not (said.exists() and "/predict" in said.read_text()) and time.monotonic() < end:
                assert served.poll() is None
                time.sleep(0.1)
            signal.pidfd_send_signal(os.pidfd_open(served.pid), signal.SIGTERM)
            return served.wait().ok()
        done = run(name, *rest, *QUICK.get(name, "").split())
        if FAR in " ".join(rest):
            assert done.code == 2 and "tensorrt" in done.err.splitlines()[-1].lower(), done
            return done
        return done.ok()

    return go


def followed(follow, printed, least=1):
    """Follow every next command, and those that they lead to; returns the names of all."""
    names = []
    waiting = next_commands(printed)
    assert len(waiting) >= least, printed
    while waiting:
        words = waiting.pop(0)
        names.append(words[1])
        done = follow(words)
        waiting += next_commands(done.out + done.err) if len(names) < 6 else []
    return names


def test_after_a_calibration(run, follow, float_flags, tmp_path):
    done = run("calibrate", *float_flags, "--output", tmp_path / "my out").ok()
    assert followed(follow, done.err) == ["evaluate"]


@pytest.mark.nightly  # those of an export follow a training, below
@pytest.mark.parametrize("backend", ["openvino", "tensorrt", "onnx", "onnxruntime", "torchscript", "executorch"])
def test_after_an_export(run, follow, calibrated, backend, tmp_path):
    if backend == "executorch":
        pytest.importorskip(backend)
    how = {"executorch": ["--policy", "executorch"], "openvino": ["--saturation-safe"]}  # else `verify` fails on AVX2
    policy = how.get(backend, [])
    done = run("export", calibrated, "--for", backend, "--output", tmp_path / "my out", *policy).ok()
    assert followed(follow, done.err)


@pytest.mark.parametrize("backend", ["fastertransformer", "cuda"])
def test_after_an_export_for_a_gpu(run, follow, calibrated_32, backend, tmp_path):
    done = run("export", calibrated_32, "--for", backend, "--output", tmp_path).ok()
    assert followed(follow, done.err) == ["verify"]


def test_after_training(run, follow, calibrated, scoring_flags, tmp_path):
    words = [*scoring_flags, "--epochs", 1, "--set", "augment.crop=padded", "--batch", 2, "--output", tmp_path / "out"]
    done = run("finetune", calibrated, *words).ok()
    assert followed(follow, done.out)[0] == "export"


def test_after_quantize_and_on_its_page(run, follow, micro, pictures, tmp_path, monkeypatch):
    words = [micro / "swin.pth", "--cfg", micro / "swin.yaml", "--data-path", pictures, "--pictures", 8]
    done = run("quantize", *words, "--for", "onnxruntime", "--output", tmp_path / "out", "--device", "cpu").ok()
    followed(follow, done.out)
    run("report", tmp_path / "out", "--html", tmp_path / "page.html").ok()
    page = (tmp_path / "page.html").read_text()
    assert str(tmp_path) not in page
    cells = re.findall(r'<td data-title="next"[^>]*>(.*?)</td>', page)
    monkeypatch.chdir(tmp_path)  # where the page lies
    for cell in cells:
        follow(shlex.split(html.unescape(re.sub("<[^>]+>", "", cell))))
    assert cells


@pytest.mark.parametrize("knows", share([True, False], 2), ids=["with preprocessing", "without"])
def test_after_quantizing_a_wrapped_module(follow, tensors, tmp_path, knows):
    """Its float is scored on the same engine; served is what pictures can be prepared for."""
    how = sq.Preprocess(32, False, "bicubic", IMAGENET_MEAN, IMAGENET_STD) if knows else None
    layers = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)
    model = sq.wrap(nn.Sequential(*layers), 32, preprocess=how)
    made = sq.quantize(model, tensors("train"), "onnxruntime", tmp_path / "my out", scored_on=tensors("val"))
    assert made.verdict.float_ms and "no float" not in made.verdict.summary
    if not made.verdict.next.startswith("sq."):
        follow(shlex.split(made.verdict.next))
        assert made.verdict.next.split()[1] == ("serve" if knows else "evaluate")
    else:
        exec(made.verdict.next, {"sq": sq, "model": model})
