"""Run jobs one after another in another process: a job that hangs, dies, or corrupts its GPU fails alone.

Processes start fresh, without the user's script.
"""

import multiprocessing
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from swin_quant.base.errors import SwinQuantError

_JOIN_S = 5.0


class JobFailed(SwinQuantError):
    """A job has no result; the message says why in a line."""


class JobProcess:
    """Runs `work(job)` for each job in one process, which is replaced if a job kills it.

    `work`, jobs and results must be picklable. The state that `work` keeps between jobs is lost with the process.
    """

    def __init__(self, work: Callable[[Any], Any]) -> None:
        self._work, self._context = work, multiprocessing.get_context("spawn")
        self._process: Any = None
        self._pipe: Any = None

    def do(self, job: Any, seconds: float) -> Any:
        """The result of a job. JobFailed if it takes more than `seconds`, the start of the process included."""
        if self._process is None:
            self._pipe, theirs = self._context.Pipe()
            self._process = self._context.Process(target=_serve, args=(theirs, self._work))
            with without_script():
                self._process.start()
            theirs.close()  # or the end of the process would not end the pipe
        try:
            self._pipe.send(job)
            if not self._pipe.poll(seconds):
                self.close()
                raise JobFailed(f"took more than {seconds:.0f} s")
            result, error, is_lost = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(_JOIN_S)
            code = self._process.exitcode
            self.close()
            raise JobFailed(f"its process ended, exit code {code}") from None
        if is_lost:
            self.close()
        if error is not None:
            raise JobFailed(error)
        return result

    def close(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            self._process.kill()  # a process inside a driver ignores every other signal
            self._process.join(_JOIN_S)
            self._pipe.close()
            self._process = None


def is_gpu_lost() -> bool:
    """Whether this process has lost the GPU: after a bad access every call repeats the error."""
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def _serve(pipe: Connection, work: Callable[[Any], Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes: the parent ends this one
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        result, fault = None, None
        try:
            result = work(job)
        except Exception as error:
            fault = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        pipe.send((result, fault, is_gpu_lost()))


@contextmanager
def without_script() -> Iterator[None]:
    """Processes spawned inside do not run the script again that has no `if __name__ == "__main__"`: it would run as a
    whole, and start processes in its turn. A script with that line may register plugins, which the processes need."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None) if main.__spec__ is None else None
    guarded = True
    with suppress(OSError):
        guarded = file is None or "__main__" in Path(file).read_text(encoding="utf-8", errors="replace")
    if guarded:
        yield
        return
    del main.__file__
    try:
        yield
    finally:
        main.__file__ = file
