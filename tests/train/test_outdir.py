"""Two writers: the second is refused. Other processes are forks of this one."""

import errno
import fcntl
import json
import multiprocessing
import os
import signal
import time
from contextlib import nullcontext

import pytest

from swin_quant.base.distributed import World
from swin_quant.base.errors import SwinQuantError
from swin_quant.train.outdir import NAME, only_writer

FORK = multiprocessing.get_context("fork")


def take(folder, answers, seconds=0.0):
    try:
        with only_writer(folder, World()):
            answers.put("mine")
            time.sleep(seconds)
    except SwinQuantError as error:
        answers.put(str(error))


@pytest.fixture
def other(tmp_path):
    """other(seconds) -> the result of another process that wants the folder for `seconds`, and the process."""
    processes = []

    def start(seconds=0.0):
        answers = FORK.Queue()
        processes.append(FORK.Process(target=take, args=(tmp_path / "out", answers, seconds)))
        processes[-1].start()
        return answers.get(timeout=600), processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.join()


def test_a_second_writer_is_refused_with_the_owner_s_name(tmp_path, other):
    with only_writer(tmp_path / "out", World()):
        line, _ = other()
        assert f"another training (process {os.getpid()} on " in line and "another output" in line
        with only_writer(tmp_path / "out", World()):
            pass
        assert other()[0] == line  # a folder locked twice stays locked in between
    answer, process = other()
    process.join()
    assert answer == "mine" and list((tmp_path / "out").iterdir()) == []


def test_the_lock_of_a_dead_owner_counts_for_nothing(tmp_path, other):
    answer, owner = other(seconds=600)
    assert answer == "mine"
    with pytest.raises(SwinQuantError, match=f"process {owner.pid} on"), only_writer(tmp_path / "out", World()):
        pass
    os.kill(owner.pid, signal.SIGKILL)
    owner.join()
    assert (tmp_path / "out" / NAME).exists()
    with only_writer(tmp_path / "out", World()):
        assert json.loads((tmp_path / "out" / NAME).read_text())["pid"] == os.getpid()


def test_where_there_are_no_locks_the_pid_decides(tmp_path, monkeypatch):
    def lockf(handle, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", lockf)
    out = tmp_path / "out"
    out.mkdir()
    dead = FORK.Process(target=int)
    dead.start()
    dead.join()
    for owner, free in (({"pid": dead.pid}, True), ({"pid": os.getppid()}, False), ({"host": "other"}, False)):
        (out / NAME).write_text(json.dumps({"pid": 1, "host": os.uname().nodename} | owner))
        refused = nullcontext() if free else pytest.raises(SwinQuantError, match="if it is no more, remove")
        with refused, only_writer(out, World()):
            pass


def test_a_lock_file_of_other_content_is_no_obstacle(tmp_path):
    for content in ("", "{", "[]", '{"pid": "x", "host": 1}', "\0" * 2000):
        (tmp_path / NAME).write_text(content)
        with only_writer(tmp_path, World()):
            assert json.loads((tmp_path / NAME).read_text())["pid"] == os.getpid()
