"""swin-quant bench: the float baselines are always timed, and engines that cannot be compared are refused in one
line."""

import csv
import os
import shutil
import signal
import tempfile
import time
from functools import partial
from pathlib import Path

import pytest

from swin_quant.backends.backend import Backend
from swin_quant.cli import main

QUICK = ("--rounds", 1, "--seconds", 0.001, "--threads", 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, calibrated):
    """An int8 export for ONNX Runtime beside a copy of its checkpoint."""
    folder = tmp_path_factory.mktemp("bench")
    for suffix in (".pth", ".json"):
        shutil.copy(calibrated.with_suffix(suffix), folder)
    words = ("--checkpoint", folder / calibrated.name, "--for", "onnxruntime", "--output", folder, "--quiet")
    assert main(["export", *map(str, words)]) == 0
    return folder


@pytest.fixture
def artifact(folder):
    return next(folder.glob("*_int8*.onnx"))


@pytest.mark.slow
def test_an_artifact_is_measured_beside_its_float_models(run, artifact, pictures, tmp_path, engines_here):
    words = ("--batch", 2, *QUICK, "--data-path", pictures, "--output", tmp_path)
    done = run("bench", artifact, *words).ok()
    rows = list(csv.DictReader((tmp_path / "bench.csv").open()))
    names = [row["candidate"] for row in rows]
    assert names[:2] == ["torch float32", "onnxruntime float32"] and names[2].startswith("onnxruntime int8 ")
    assert rows[2]["baseline"] == "onnxruntime float32" and float(rows[2]["speedup"]) > 0
    assert 0 < int(rows[2]["int8_gemms"]) < int(rows[2]["all_gemms"]) and rows[1]["int8_gemms"] == "0"
    assert float(rows[1]["sqnr_db"]) > 80 > float(rows[2]["sqnr_db"]) > 5
    assert float(rows[2]["file_mb"]) < float(rows[1]["file_mb"])
    assert all(float(row["peak_mb"]) > 0 and row["acc1"] for row in rows)
    for name in names:
        assert name in done.out and name in (tmp_path / "bench.md").read_text()
    assert "7 pictures of" in done.out and "int8 instructions" in done.out


@pytest.mark.slow
def test_the_checkpoint_must_be_found(run, artifact, tmp_path):
    for file in (artifact, artifact.with_suffix(".json")):
        shutil.copy(file, tmp_path)
    error = run("bench", tmp_path / artifact.name, *QUICK).error(2)
    assert "is neither beside it nor in the folder above: name it with --checkpoint" in error


@pytest.mark.parametrize(
    "words, text",
    [
        (("--engine", "nowhere"), "no engine 'nowhere'"),
        (("--engine", "fastertransformer"), "fastertransformer does not run onnx artifacts"),
        (("--engine", "tensorrt"), "tensorrt does not run onnx artifacts"),
        (("--batch", 0), "--batch 0: must be at least 1"),
        (("--threads", 0), "--threads 0: must be at least 1"),
        (("--pictures", 0), "--pictures 0"),
    ],
)
def test_what_cannot_be_done_is_refused(run, artifact, words, text):
    assert text in run("bench", artifact, *QUICK, *words).error(2)


def test_an_engine_that_is_not_installed_says_which_extra(run, artifact, monkeypatch):
    monkeypatch.setattr(Backend, "is_installed", False)
    line = run("bench", artifact, "--engine", "openvino", *QUICK).error(2)
    assert "pip install -c constraints.txt -e '.[openvino]' in the checkout" in line


@pytest.mark.slow
def test_ctrl_c_ends_all_processes_and_leaves_nothing(fork, artifact, tmp_path):
    words = ("bench", artifact, "--batch", 1, "--rounds", 1000, "--seconds", 1, "--threads", 1, "--quiet")
    child = fork(words, {"TMPDIR": str(tmp_path)}, partial(setattr, tempfile, "tempdir", None))
    try:
        started = wait_for(lambda: children_of(child.pid))
    finally:
        os.kill(child.pid, signal.SIGINT)
    done = child.wait()
    assert (done.code, done.err) == (130, "error: interrupted; nothing half-written is left\n")
    assert wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in started))
    assert list(tmp_path.iterdir()) == []


def children_of(pid):
    """The bench's child processes that compute, without multiprocessing's helper."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [child for child in found if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]


def wait_for(condition):
    """Return what `condition` gives once it is true; after ten minutes, fail."""
    end = time.monotonic() + 600
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return found
