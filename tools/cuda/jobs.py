"""Run jobs one after another in another process: a job that hangs, dies, or corrupts its GPU fails alone.

Processes start fresh; a script must guard its calls by `if __name__ == "__main__"`.
"""

import multiprocessing
import os
import signal
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from typing import Any

import torch

from swin_quant.base.errors import SwinQuantError


class JobFailed(SwinQuantError):
    """A job has no result; the message says why in a line."""


class JobProcess:
    """Runs `work(job)` for each job in one process, which is replaced if a job kills it.

    `work`, jobs and results must be picklable. The state that `work` keeps between jobs is lost with the process.
    """

    def __init__(self, work: Callable[[Any], Any]) -> None:
        self._work, self._context = work, multiprocessing.get_context("spawn")  # a fresh program, without our memory
        self._pool: ProcessPoolExecutor | None = None
        self._process = 0

    def do(self, job: Any, seconds: float) -> Any:
        """The result of a job. A SwinQuantError or UsageError of `work` is raised here.

        JobFailed for any other error, and if the job takes more than `seconds`.
        """
        if self._pool is None:  # Ctrl-C is for the parent, which ends the process
            ignored = signal.SIGINT, signal.SIG_IGN
            self._pool = ProcessPoolExecutor(1, self._context, initializer=signal.signal, initargs=ignored)
            self._process = self._pool.submit(os.getpid).result()
        try:
            result, fault, is_lost = self._pool.submit(_do, self._work, job).result(seconds)
        except (TimeoutError, BrokenProcessPool) as error:
            self.close()
            is_late = isinstance(error, TimeoutError)
            raise JobFailed(f"took more than {seconds:.0f} s" if is_late else "ended its process") from None
        if is_lost:
            self.close()
        if fault is not None:
            raise fault
        return result

    def close(self) -> None:
        """End the process, if there is one."""
        if self._pool is not None:
            with suppress(ProcessLookupError):
                os.kill(self._process, signal.SIGKILL)  # a process inside a driver ignores every other signal
            self._pool.shutdown()
            self._pool = None


def _do(work: Callable[[Any], Any], job: Any) -> tuple[Any, SwinQuantError | None, bool]:
    """In the process: the result or the fault, and whether the GPU is lost, as after a bad access."""
    result, fault, is_lost = None, None, False
    try:
        result = work(job)
    except SwinQuantError as error:
        fault = error
    except Exception as error:
        fault = JobFailed(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    if torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            is_lost = True
    return result, fault, is_lost
