"""The output folder of a training: full, moved away, wanted by two, left by a killed owner. No results are lost."""

import ctypes
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
from contextlib import suppress

import pytest

from swin_quant.cli import main

CLONE_NEWNS, CLONE_NEWUSER, MS_REC, MS_PRIVATE = 0x00020000, 0x10000000, 0x4000, 0x40000


@pytest.fixture
def train(commands):
    """train(out, *more) -> the arguments of a training run."""
    return lambda out, *more: [*commands.words("train", out), "--no-eval", *map(str, more)]


@pytest.fixture
def undisturbed(fork, train, commands, tmp_path):
    """The results of a run without faults, and its time."""
    began = time.monotonic()
    done = fork(train(tmp_path / "undisturbed")).wait(120)
    assert done.code == 0, done
    return commands.results("train", tmp_path / "undisturbed"), time.monotonic() - began


@pytest.fixture
def nothing_lost(fork, train, commands, undisturbed, tried):
    """nothing_lost(fault, out): the run goes on in `out` and ends as if undisturbed."""

    def check(fault, out):
        done = fork(train(out, "--continue")).wait(120)
        assert done.code == 0, done
        expected, found = undisturbed[0], commands.results("train", out)
        lost = [key for key in {**expected, **found} if expected.get(key) != found.get(key)]
        tried(fault, len(lost))
        assert not lost, lost

    return check


def chances(cases, few, seed):
    """Random numbers from 0 to 1: a `few`, or as many as there are faults to try."""
    chance = random.Random(seed)
    return [chance.random() for _ in range(max(few, cases // 4))]


def mounted(folder, kilobytes):
    """Mount a disk of some kilobytes over `folder`, visible only to this process."""
    libc = ctypes.CDLL(None, use_errno=True)

    def call(name, *arguments):
        if getattr(libc, name)(*arguments):
            raise OSError(ctypes.get_errno(), name)

    call("unshare", CLONE_NEWNS | (0 if os.geteuid() == 0 else CLONE_NEWUSER))
    call("mount", None, b"/", None, MS_REC | MS_PRIVATE, None)
    call("mount", b"none", os.fsencode(folder), b"tmpfs", 0, f"size={kilobytes}k".encode())


def on_small_disk(words, folder, kilobytes, kept, error):
    """Run a command with a small disk as its output folder; `kept` is a copy of the files left there."""
    sys.stderr = open(error, "w", buffering=1)
    try:
        mounted(folder, kilobytes)
    except OSError:
        os._exit(77)
    code = main(words)
    shutil.copytree(folder, kept)
    os._exit(code)


@pytest.mark.slow
def test_a_disk_that_is_full(train, nothing_lost, undisturbed, cases, tmp_path):
    snapshots = tmp_path / "undisturbed" / "snapshots"
    largest = max(file.stat().st_size for file in snapshots.iterdir()) // 1000
    for number, share in enumerate(chances(cases, 3, seed=3)):
        folder, kept, error = tmp_path / f"disk{number}", tmp_path / f"kept{number}", tmp_path / f"error{number}"
        folder.mkdir()
        size = int(largest * (0.2 + 3.3 * share))  # the best and two of the newest do not fit with a third
        words = (train(folder), folder, size, kept, error)
        process = multiprocessing.get_context("fork").Process(target=on_small_disk, args=words)
        process.start()
        process.join(120)
        if process.exitcode == 77:
            pytest.skip("this user may not mount")
        line = error.read_text()
        assert process.exitcode == 1 and line.count("\n") == 1, (process.exitcode, line)
        assert line.startswith("error:") and "the disk is full" in line
        nothing_lost("disk full", kept)


@pytest.mark.slow
def test_killed_again_and_again_at_random_moments(fork, train, nothing_lost, undisturbed, cases, tmp_path):
    for share in chances(cases, 3, seed=4):
        child = fork(train(tmp_path / "out", "--continue"))
        time.sleep(share * undisturbed[1])
        with suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGKILL)
        child.wait(30)
    nothing_lost("kill -9 of one process, again and again", tmp_path / "out")


@pytest.mark.slow
def test_two_writers(fork, train, nothing_lost, cases, tmp_path):
    for number in range(max(1, cases // 10)):
        out = tmp_path / f"out{number}"
        ends = [child.wait(120) for child in [fork(train(out, "--continue")) for _ in range(2)]]
        assert {done.code for done in ends} <= {0, 1} and any(done.code == 0 for done in ends), ends
        for done in ends:
            if done.code:  # the second may have started after the first had ended
                assert "another training is writing" in done.error(1)
        nothing_lost("two writers", out)
