"""End every failure in one line on standard error and an exit code; a traceback only if asked for."""

import contextlib
import errno
import io
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TextIO

from termcolor import colored

from swin_quant.base.errors import SwinQuantError
from swin_quant.base.files import reason

_AGAIN_SECONDS = 0.05
_SAID_AFTER = 1.0


@contextmanager
def interrupts() -> Iterator[None]:
    """Inside the context, both signals raise KeyboardInterrupt in the main thread; an ignored signal stays ignored.

    The import machinery would turn an interrupt into another error, or print it and go on, and so would finalizers:
    there it is postponed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    listened = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, _interrupt) for number in (*listened, signal.SIGALRM)}
    read, write = socket.socketpair()
    write.setblocking(False)
    wakeup = signal.set_wakeup_fd(write.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(read, set(listened)), daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        write.close()
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            if handler is not None:  # set by another library, unknown to python
                signal.signal(number, handler)


def _watch(read: socket.socket, listened: set[signal.Signals]) -> None:
    """Say what a stopped command still ends, where that takes more than a second; then a second signal ends the
    process, also inside a library that runs no handler. Launchers send two signals at once: an early second one is the
    first."""
    is_stopping = is_said = False
    with read:
        while True:
            read.settimeout(_SAID_AFTER if is_stopping and not is_said else None)
            try:
                came = read.recv(64)
            except TimeoutError:
                is_said = True
                progress = sys.modules.get("swin_quant.base.progress")
                what = progress.works[-1] if progress and progress.works else "the step in work"
                with contextlib.suppress(OSError):
                    print(f"stopping: {what} ends first; a second signal ends it at once", file=sys.stderr, flush=True)
                continue
            if not came:  # the command has ended
                return
            handlers = map(signal.getsignal, listened & {*came})
            if any(getattr(one, "__module__", "").startswith("swin_quant") for one in handlers):
                if is_said:
                    os._exit(INTERRUPTED)
                is_stopping = True


def _interrupt(number: int, frame: FrameType | None) -> None:
    while frame:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if file.startswith("<frozen importlib") or file == weakref.__file__ or name == "__del__":
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_SECONDS)  # comes back as SIGALRM
            return
        frame = frame.f_back
    raise KeyboardInterrupt


INTERRUPTED = 130
_NO_OUTPUT = "standard output cannot be written"


def guarded(work: Callable[[], int], verbose: bool = False) -> int:
    """The exit code of `work()`: its own, or that of its exception. `verbose` adds tracebacks."""
    while (handle := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass  # a closed standard stream is open to nowhere, or the next opened file would take its place
    os.close(handle)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors="backslashreplace")  # a path need not be text
    code = _outcome(work, verbose)
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of our output has seen enough
        _drop(sys.stdout)
    except OSError as error:
        _drop(sys.stdout)
        if code == 0:
            _complain(f"{_NO_OUTPUT}: {reason(error)}", False)
        code = code or 1
    try:
        sys.stderr.flush()
    except OSError:
        _drop(sys.stderr)
    return code


def _outcome(work: Callable[[], int], verbose: bool) -> int:
    try:
        with interrupts():
            code = work()
    except (SystemExit, BrokenPipeError):  # --help is done; rich raises SystemExit when its reader has seen enough
        return 0
    except KeyboardInterrupt as stop:
        _complain(f"interrupted; {stop.args[0] if stop.args else 'nothing half-written is left'}", verbose)
        return INTERRUPTED
    except SwinQuantError as error:
        _complain(str(error), verbose)
        return error.exit_code
    except Exception as error:  # noqa: BLE001
        _complain(_in_words(error, verbose), verbose)
        return 1
    if progress := sys.modules.get("swin_quant.base.progress"):  # `--help` does without it
        progress.print_waiting()
    return code


def _in_words(error: Exception, verbose: bool) -> str:
    if isinstance(error, ModuleNotFoundError) and not str(error.name).startswith("swin_quant"):
        remedy = "pip install -c constraints.txt -e . in the checkout; `swin-quant doctor`"
        return f"{error.name} is not installed: {remedy}"
    if isinstance(error, MemoryError):  # outside a command (`memory_errors_named`)
        return "out of memory"
    if isinstance(error, OSError) and error.filename is not None:
        return f"{os.fsdecode(error.filename)}: {reason(error)}"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EBADF, errno.EIO):
        return f"{_NO_OUTPUT}: {reason(error)}"
    where = "" if verbose else "; this is a bug of swin-quant: --verbose shows where"
    return f"{type(error).__name__}: {error}{where}"


def _complain(message: str, verbose: bool) -> None:
    rank = os.environ.get("RANK")
    where = f" (rank {rank})" if rank and os.environ.get("WORLD_SIZE", "1") != "1" else ""
    line = " ".join(message.split())
    try:
        if verbose and sys.exc_info()[0] is not None:
            traceback.print_exc()
        print(colored(f"error{where}:", "red", attrs=["bold"], force_color=None), line, file=sys.stderr, flush=True)
    except OSError:  # the message cannot be printed; the exit code remains
        _drop(sys.stderr)
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # torchrun's last lines then say why a rank failed
        told = f"error{where}: {line}"
        found = {"message": told, "extraInfo": {"py_callstack": told, "timestamp": str(int(time.time()))}}
        with contextlib.suppress(OSError):
            Path(file).write_text(json.dumps({"message": found}), encoding="utf-8")


def _drop(stream: TextIO) -> None:
    """Send the rest of a stream nowhere: the interpreter would complain about it at its end."""
    with contextlib.suppress(OSError, ValueError):  # no file behind the stream
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
