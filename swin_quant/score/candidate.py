"""A candidate of a bench, and the process that it has for itself, so that the peak memory is its own."""

import logging
import multiprocessing
import signal
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
from swin_quant.score.latency import milliseconds

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
