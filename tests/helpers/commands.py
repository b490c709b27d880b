"""Fixtures that run commands, in this process or in forks of it, and functions and commands on several ranks."""

import functools
import logging
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from next_lines import check_next_lines

from swin_quant.base.distributed import process_group
from swin_quant.base.errors import SwinQuantError
from swin_quant.cli import main
from swin_quant.cli.commands import FRONT_DOOR


class Reached(Exception):
    """The step of a verb that a test is about was reached; its work is another test's."""


def command(*words) -> None:
    """Run a command that succeeds: for fixtures of a module or a session, which cannot have `run`."""
    assert main([*map(str, words)]) == 0


@dataclass(frozen=True)
class Done:
    """The end of a command."""

    code: int
    out: str
    err: str

    def ok(self) -> "Done":
        """The end itself, after checking that it is no failure."""
        assert self.code == 0, self
        return self

    def error(self, code: int) -> str:
        """The one line of a failure with this exit code."""
        assert self.code == code, self
        assert self.err.count("\n") == 1 and self.err.startswith("error"), self.err
        assert "Traceback" not in self.err and "bug of swin-quant" not in self.err, self.err
        return self.err


@pytest.fixture(autouse=True)
def process_left_alone():
    """A command sets up logging and signals for its process, which here runs all tests."""
    log, terminate, noisy = logging.getLogger("swin_quant"), signal.getsignal(signal.SIGTERM), logging.raiseExceptions
    before, silenced = (log.handlers, log.level, log.propagate), logging.root.manager.disable
    yield
    log.handlers, log.level, log.propagate = before
    logging.disable(silenced)
    logging.raiseExceptions = noisy
    signal.signal(signal.SIGTERM, terminate)


@pytest.fixture
def run(capsys) -> Callable[..., Done]:
    """run("calibrate", "--cfg", ...) in this process; the command `main.py` is FasterTransformer's entry point."""

    def go(command, *arguments) -> Done:
        capsys.readouterr()
        words = [str(argument) for argument in arguments]
        code = main([*FRONT_DOOR.split(), *words]) if command == "main.py" else main([command, *words])
        done = Done(code, *capsys.readouterr())
        check_next_lines(done.out + done.err)
        return done

    return go


@dataclass
class Child:
    """A forked process that runs a command; its output goes to files."""

    pid: int
    folder: Path
    code: int = 0

    def poll(self) -> Done | None:
        """The exit code, a signal as a negative number; None while it runs."""
        if self.pid:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if not pid:
                return None
            self.pid, self.code = 0, os.waitstatus_to_exitcode(status)
        out, err = (Path(self.folder, name).read_text() for name in ("out", "err"))
        return Done(self.code, out, err)

    def wait(self, seconds: float = 600.0) -> Done:
        """The exit code; the test fails if the process does not end in time, which counts as a hang."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if done := self.poll():
                return done
            time.sleep(0.02)
        pytest.fail(f"still running after {seconds} s: {Path(self.folder, 'err').read_text()}")


def after_one_batch(do) -> None:
    """Let calibration in this process take one batch, then call `do`."""
    from swin_quant.data.loader import DrawnBatches

    original = DrawnBatches.__iter__

    def batches(*arguments):
        yield next(original(*arguments))
        do()

    DrawnBatches.__iter__ = batches


def free_port() -> str:
    """A port on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def meeting(world: int) -> dict[str, str]:
    """The environment that a launcher gives all ranks; each needs its RANK, too."""
    return {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}


@pytest.fixture
def fork(tmp_path_factory):
    """fork(words, environment, before) -> Child that calls before() and then `swin-quant words`.

    A fork of this process has torch imported, which would take each child 3 seconds.
    """
    children = []

    def start(words, environment=None, before=None) -> Child:
        folder = tmp_path_factory.mktemp("child")
        sys.stdout.flush()
        if pid := os.fork():
            children.append(Child(pid, folder))
            return children[-1]
        code = 99
        try:
            for number, name in ((1, "out"), (2, "err")):
                os.dup2(os.open(folder / name, os.O_CREAT | os.O_WRONLY | os.O_APPEND), number)
                setattr(sys, f"std{name}", os.fdopen(number, "w", buffering=1, closefd=False))
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.environ.update(environment or {})
            torch.set_num_threads(1)  # a fork lacks this process's threads, and would wait for them
            if before:
                before()
            words = [str(word) for word in words]
            code = main([*FRONT_DOOR.split(), *words[1:]]) if words[0] == "main.py" else main(words)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    yield start
    for child in children:
        if child.pid:
            os.kill(child.pid, signal.SIGKILL)
            os.waitpid(child.pid, 0)


@pytest.fixture
def forked(fork):
    """forked(world, command, ..., before=None, code=None) -> the end of each rank, with exit code `code` if that is
    given; `before(rank)` runs in each."""

    def go(world, *words, before=None, code=None) -> list[Done]:
        common = meeting(world)
        ranks = [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]
        hooks = [before and functools.partial(before, rank) for rank in range(world)]
        children = [fork(words, ranks[rank] if world > 1 else None, hooks[rank]) for rank in range(world)]
        ends = [child.wait() for child in children]
        assert code is None or {done.code for done in ends} == {code}, ends
        return ends

    return go


@pytest.fixture
def ranks():
    """ranks(function) -> the result of function(world) on each of two ranks, or the text of its SwinQuantError."""
    context = multiprocessing.get_context("fork")  # a fork has torch imported

    def work(function, rank, common, queue):
        os.environ |= common | {"RANK": str(rank)}
        try:
            with process_group("cpu") as world:
                result = function(world)
        except SwinQuantError as error:
            result = str(error)
        except Exception as error:  # else its result is waited for
            result = repr(error)
        queue.put((rank, result))

    def go(function):
        common, queue = meeting(2), context.Queue()
        processes = [context.Process(target=work, args=(function, rank, common, queue)) for rank in range(2)]
        for process in processes:
            process.start()
        results = dict(queue.get(timeout=600) for _ in processes)
        for process in processes:
            process.join(timeout=600)
        assert [process.exitcode for process in processes] == [0, 0]
        return [results[0], results[1]]

    return go


def is_said(result):
    """Whether the verdict ends what is printed, in narrow lines, and stands in the notebook's tables."""
    lines = str(result).replace("\\\n", "").splitlines()  # a long command is broken
    at = next(number for number, line in enumerate(lines) if line.startswith("deploy:"))
    assert lines[-1].startswith("next:") and max(map(len, lines[:at])) <= 100
    page = result._repr_html_()
    return "<table>" in page and page.count("deploy") and result.verdict.deploy in str(result)
