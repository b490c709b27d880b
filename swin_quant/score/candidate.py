"""A candidate of a bench, its latency, and the process that it has for itself, so that the peak memory is its own."""

import logging
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.base.progress import log
from swin_quant.score.engine import Engine
from swin_quant.score.jobs import without_script

_ERRORS = {error.__name__: error for error in (SwinQuantError, UsageError)}


@dataclass(frozen=True)
class BenchCandidate:
    """One engine of a bench: `load`, a picklable function, makes it; `file` is its artifact.

    `baseline` names the candidate that its latency is compared with, e.g. float32 on the same engine.
    """

    name: str
    load: Callable[[], Engine]
    file: Path | None = None
    baseline: str | None = None


@dataclass(frozen=True)
class Identity:
    """The names of a loaded engine, and the memory of its process before loading, in MB."""

    engine: str
    precision: str
    policy: str | None
    before_mb: float


class Crash(SwinQuantError):
    """The process of a candidate has died: out of memory, or a fault in a library."""


class Runner:
    """The process of one candidate, as a context manager. Its errors are raised here, with the candidate's name."""

    def __init__(self, candidate: BenchCandidate, threads: int) -> None:
        self.name = candidate.name
        context = multiprocessing.get_context("spawn")  # a fresh program, without this one's memory
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, candidate.load, threads), daemon=True)
        with _interrupts_held_back(), without_script():
            self._process.start()
        theirs.close()

    def __enter__(self) -> "Runner":
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()  # at the end of its pipe the process ends
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def identity(self) -> Identity:
        """Wait until the engine is loaded."""
        return self._ask("identity")

    def time(self, batch: int, shape: Sequence[int], seconds: float) -> list[float]:
        """Milliseconds of each call on `batch` seeded inputs, for `seconds` at least, after one untimed call."""
        return self._ask("time", batch, tuple(shape), seconds)

    def peak_mb(self) -> float:
        """The largest memory (resident set) of the process so far."""
        return self._ask("peak")

    def logits(self, images: Tensor) -> Tensor:
        """float32 [B, classes] of `images` [B, *shape]."""
        return torch.from_numpy(self._ask("logits", images.numpy()))

    def details(self) -> dict[str, Any]:
        """The engine's details; may load the model again."""
        return self._ask("details")

    def _ask(self, *question: Any) -> Any:
        try:
            self._pipe.send(question)
            fault, answer = self._pipe.recv()
        except (EOFError, OSError) as error:
            self._process.join(5)
            code = self._process.exitcode
            how = f"signal {-code} ({signal.Signals(-code).name})" if code and code < 0 else f"exit code {code}"
            raise Crash(f"{self.name}: its process ended with {how}") from error
        if fault:
            raise _ERRORS.get(fault, Crash)(f"{self.name}: {answer}")
        return answer


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """A program started inside inherits the signal mask and never sees Ctrl-C; the parent ends it by its pipe."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(pipe: Connection, load: Callable[[], Engine], threads: int) -> None:
    torch.set_num_threads(threads)
    log.addHandler(logging.NullHandler())  # the warnings of engines are among their details
    engine: Engine | None = None
    identity: Identity | None = None
    while True:
        try:
            what, *arguments = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            if engine is None:
                before = memory_mb("VmRSS")
                engine = load()
                identity = Identity(engine.name, engine.precision, engine.policy, before)
            answer = identity if what == "identity" else _ANSWERS[what](engine, *arguments)
        except Exception as error:  # noqa: BLE001
            kind = next((name for name in ("UsageError", "SwinQuantError") if isinstance(error, _ERRORS[name])), "")
            text = str(error) if kind else f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            reply: tuple[str | None, Any] = (kind or "Crash", text)
        else:
            reply = (None, answer)
        try:
            pipe.send(reply)
        except OSError:  # the parent has gone
            return


def _time(engine: Engine, batch: int, shape: Sequence[int], seconds: float) -> list[float]:
    images = torch.randn(batch, *shape, generator=torch.Generator().manual_seed(0)).to(engine.device)
    with torch.inference_mode():
        engine(images)
        taken: list[float] = []
        while not taken or sum(taken) < 1000 * seconds:
            taken.append(milliseconds(engine, images))
    return taken


def _logits(engine: Engine, images: np.ndarray) -> np.ndarray:
    with torch.inference_mode():
        return engine(torch.from_numpy(images).to(engine.device)).float().cpu().numpy()


def _details(engine: Engine) -> dict[str, Any]:
    return dict(engine.details)


def _peak(engine: Engine) -> float:
    return memory_mb("VmHWM")


_ANSWERS: dict[str, Callable[..., Any]] = {"time": _time, "logits": _logits, "details": _details, "peak": _peak}


def memory_mb(field: str) -> float:
    """VmRSS (now) or VmHWM (most so far) of this process, in MB. VmHWM starts anew with each program."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{field}:"))


def milliseconds(engine: Callable[[Tensor], Tensor], images: Tensor) -> float:
    """The time of one call on `images` [B, 3, H, W], on the engine's device.

    On a GPU it is the time between two events of the stream, before the first kernel and after the last: a CPU clock
    would stop when the work is queued, not when it is done.
    """
    if not images.is_cuda:
        start = time.perf_counter()
        engine(images)
        return 1000 * (time.perf_counter() - start)
    with torch.cuda.device(images.device):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()  # otherwise work queued before would count
        first.record()
        engine(images)
        last.record()
        last.synchronize()
        return first.elapsed_time(last)


def throughput(
    engine: Callable[[Tensor], Tensor], images: Tensor, warm_up: int = 50, runs: int = 30, seconds: float = 60.0
) -> float:
    """Images/s of `engine` on `images` [B, 3, H, W]: FasterTransformer's 50 + 30 runs (docs/reference, section 2.5).

    The warm-up takes at most half of `seconds`, the timed runs the other half; each has one run at least.
    """
    with torch.inference_mode():
        _repeat(engine, images, warm_up, seconds / 2)
        done, elapsed = _repeat(engine, images, runs, seconds / 2)
    return done * len(images) / elapsed


def _repeat(engine: Callable[[Tensor], Tensor], images: Tensor, times: int, seconds: float) -> tuple[int, float]:
    _wait(images)
    start = time.perf_counter()
    done = 0
    while done < times and (done == 0 or time.perf_counter() - start <= seconds):
        engine(images)
        done += 1
    _wait(images)
    return done, time.perf_counter() - start


def _wait(images: Tensor) -> None:
    if images.is_cuda:
        torch.cuda.synchronize(images.device)
