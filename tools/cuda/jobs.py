"""Run jobs one after another in another process: a job that hangs, dies, or corrupts its GPU fails alone.

Processes start fresh; a script must guard its calls by `if __name__ == "__main__"`.
"""

import multiprocessing
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch

from swin_quant.base.errors import SwinQuantError, UsageError

_JOIN_S = 5.0
_ERRORS = {error.__name__: error for error in (SwinQuantError, UsageError)}


class JobFailed(SwinQuantError):
    """A job has no result; the message says why in a line."""


class JobProcess:
    """Runs `work(job)` for each job in one process, which is replaced if a job kills it.

    `work`, jobs and results must be picklable. The state that `work` keeps between jobs is lost with the process.
    """

    def __init__(self, work: Callable[[Any], Any]) -> None:
        self._work, self._context = work, multiprocessing.get_context("spawn")  # a fresh program, without our memory
        self._process: Any = None
        self._pipe: Any = None

    def start(self) -> None:
        """Start the process, if there is none."""
        if self._process is None:
            self._pipe, theirs = self._context.Pipe()
            self._process = self._context.Process(target=_serve, args=(theirs, self._work), daemon=True)
            with _interrupts_held_back():
                self._process.start()
            theirs.close()  # or the end of the process would not end the pipe

    def do(self, job: Any, seconds: float | None = None) -> Any:
        """The result of a job. A SwinQuantError or UsageError of `work` is raised here.

        JobFailed for any other error, and if the job takes more than `seconds`, the start of the process included.
        """
        self.start()
        try:
            self._pipe.send(job)
            if not self._pipe.poll(seconds):
                self.close()
                raise JobFailed(f"took more than {seconds:.0f} s")
            result, kind, fault, is_lost = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(_JOIN_S)
            code = self._process.exitcode
            self.close()
            how = f"signal {-code} ({signal.Signals(-code).name})" if code and code < 0 else f"exit code {code}"
            raise JobFailed(f"its process ended with {how}") from None
        if is_lost:
            self.close()
        if fault is not None:
            raise _ERRORS.get(kind, JobFailed)(fault)
        return result

    def close(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            self._pipe.close()
            self._process.kill()  # a process inside a driver ignores every other signal
            self._process.join(_JOIN_S)
            self._process = None


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """A program started inside inherits the signal mask and never sees Ctrl-C; the parent ends it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


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
    while True:
        try:
            job = pipe.recv()
        except (EOFError, OSError):
            return
        result = kind = fault = None
        try:
            result = work(job)
        except Exception as error:
            kind = next((name for name in ("UsageError", "SwinQuantError") if isinstance(error, _ERRORS[name])), "")
            fault = str(error) if kind else f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        try:
            pipe.send((result, kind, fault, is_gpu_lost()))
        except OSError:  # the parent has gone
            return
