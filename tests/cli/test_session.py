"""A command as a process: help, quiet and verbose, interruption, exit codes."""

import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext

import pytest
import torch
from commands import Done, after_one_batch

from swin_quant import __version__
from swin_quant.base.distributed import World
from swin_quant.cli import main
from swin_quant.cli.commands import COMMANDS


def test_usage_lists_the_commands(capsys):
    assert main([]) == 2
    assert main(["--help"]) == 0 and main(["-h"]) == 0
    out = capsys.readouterr().out
    assert all(out.count(f"  {command} ") == 3 for command in COMMANDS)
    assert main(["--version"]) == 0 and capsys.readouterr().out == f"{__version__}\n"


@pytest.mark.parametrize(
    "words",
    [
        ["--local-rank=0", "calibrate"],
        ["--local_rank=0", "calibrate"],
        ["calibrate", "--local_rank", 0],
        ["main.py", "--calib", "--local_rank", 0],
        ["main.py", "--calib", "--local-rank=0"],
    ],
)
def test_launchers_may_give_a_local_rank_in_both_spellings(run, float_flags, ft_flags, tmp_path, monkeypatch, words):
    """torch.distributed.launch puts it before the command."""
    monkeypatch.chdir(tmp_path)
    flags = [*ft_flags, "--int8-mode", 1] if words[0] == "main.py" else [*float_flags, "--output", tmp_path]
    assert run(*words, *flags).code == 0 and list(tmp_path.rglob("swin_micro_calib.pth"))


def test_the_list_of_commands_imports_nothing_that_takes_time():
    code = """
import sys, time
from swin_quant.cli import main
code = main(["--help"])
slow = ["torch", "torchvision", "timm", "numpy", "onnx", "onnxruntime", "openvino", "matplotlib", "cyclopts"]
print(code, [name for name in slow if name in sys.modules], time.process_time() < 1, file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.stderr == "0 [] True\n"


def test_quiet_prints_results_and_warnings_only(run, float_flags, tmp_path):
    flags = [*float_flags, "--policy", "ft-mode1", "--output", tmp_path]
    loud, quiet = run("calibrate", *flags), run("calibrate", *flags, "--quiet")
    assert "calibrated checkpoint:" in loud.err and quiet.err == "" and quiet.out
    assert "\x1b" not in loud.err + loud.out and "\r" not in loud.err  # no bars and no colours without a terminal
    weights = run("calibrate", *flags, "--quiet", "--checkpoint", tmp_path / "swin_micro_calib.pth")
    assert weights.code == 0  # a calibrated checkpoint can be calibrated again


def test_without_output_a_command_writes_beside_the_ones_before_it(run, float_flags, tmp_path, monkeypatch):
    pytest.importorskip("onnxscript")
    monkeypatch.chdir(tmp_path)
    run("calibrate", *float_flags, "--policy", "qdq").ok()
    run("export", "output/swin_micro/swin_micro_calib.pth", "--for", "onnx").ok()
    run("package", "output/swin_micro/swin_micro_int8.onnx").ok()
    assert (tmp_path / "output" / "swin_micro" / "package" / "infer.py").is_file()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_calibration_leaves_no_half_written_file(fork, float_flags, snapshot, tmp_path, number):
    out, started = tmp_path / "out", tmp_path / "started"
    out.mkdir()
    (out / "swin_micro_calib.pth").write_bytes(b"older")
    words = ["calibrate", *float_flags, "--output", out]
    child = fork(words, before=lambda: after_one_batch(lambda: started.touch() or time.sleep(600)))
    for _ in range(3000):  # up to a minute; the check below fails for a child that never begins
        if started.exists():
            break
        time.sleep(0.02)
    os.kill(child.pid, number)
    assert started.exists() and "interrupted" in child.wait().error(130)
    assert snapshot(out) == {"swin_micro_calib.pth": b"older"}


def test_a_worker_process_is_no_obstacle_to_ctrl_c(fork, float_flags, tmp_path):
    """The terminal sends SIGINT to the whole group, workers that load pictures included."""
    started = tmp_path / "started"

    def before():
        os.setpgrp()
        from swin_quant.data import loader
        from swin_quant.verbs import calibration

        loader.default_workers = lambda *_: 2
        original = calibration.track

        def track(items, *arguments):
            for item in original(items, *arguments):
                yield item
                started.touch()
                time.sleep(600)

        calibration.track = track

    child = fork(["calibrate", *float_flags, "--output", tmp_path / "out"], before=before)
    while not started.exists():
        time.sleep(0.02)
    os.killpg(child.pid, signal.SIGINT)
    assert "interrupted" in child.wait().error(130)


def test_ctrl_c_in_a_process_of_its_own_and_a_reader_that_has_seen_enough(float_flags, tmp_path):
    """A fork cannot show start-up and the end of the interpreter. `show | head -1` is no error."""
    hook = "import time, sys; from swin_quant import cli; from swin_quant.data.loader import DrawnBatches; "
    hook += "DrawnBatches.__iter__ = lambda *_: (print('started', flush=True), time.sleep(600)); "
    hook += "sys.exit(cli.main(sys.argv[1:]))"
    words = list(map(str, float_flags))
    calibrating = subprocess.Popen(
        [sys.executable, "-c", hook, "calibrate", *words, "--output", str(tmp_path / "out")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores SIGINT
    )
    line = f"{sys.executable} -m swin_quant show --cfg {words[1]} | head -1; echo ${{PIPESTATUS[0]}}"
    listing = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=600)
    assert listing.stdout.splitlines()[1] == "0" and listing.stderr == ""
    assert calibrating.stdout.readline() == "started\n"  # past the imports
    calibrating.send_signal(signal.SIGINT)
    _, err = calibrating.communicate(timeout=600)
    assert calibrating.returncode == 130 and err.count("\n") == 1 and err.startswith("error: interrupted"), err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("error", "memory"),
    [
        (MemoryError(), "memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "memory"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), "GPU memory"),
        (RuntimeError("Triton Error [CUDA]: out of memory"), "GPU memory"),
    ],
)
def test_out_of_memory_says_what_to_lower_in_the_words_of_the_command(run, float_flags, monkeypatch, error, memory):
    def much(*_, **__):
        raise error

    monkeypatch.setattr("swin_quant.verbs.calibrate.observe_batches", much)
    told = run("calibrate", *float_flags, "--policy", "qdq", "--quiet")
    assert told.error(1) == f"error: out of {memory}: lower --batch\n"
    monkeypatch.setattr("swin_quant.verbs.show.model_or_shapes", much)
    assert run("show", *float_flags[:4], "--quiet").error(1) == f"error: out of {memory}\n"


def test_a_result_is_printed_by_the_first_rank(run, monkeypatch):
    one_of_two = nullcontext(World(rank=1, size=2))
    monkeypatch.setattr("swin_quant.base.distributed.process_group", lambda *_: one_of_two)
    assert run("show", "policies") == Done(0, "", "")
