"""Parses foreign ONNX graphs and infers their shapes in a process of its own, which a hostile graph alone can crash.

The parent starts this file as a script when it first needs it. The worker ends with its parent, or when a request
crashes it, takes too long or takes too much memory. The next request then starts another worker.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from multiprocessing.connection import Connection, Pipe
from typing import Any

MAX_FIELDS = 600_000  # messages and texts; a Swin-L has a third of that
_SECONDS, _BYTES, _TIMES = 30, 768 << 20, 4  # limits of one request: the last one for each byte of its model
_START = (
    "import json, runpy, sys; sys.path[:] = json.loads(sys.argv[1]); runpy.run_path(sys.argv[2], run_name='__main__')"
)


class InferenceError(Exception):
    """The library's objection to a graph, or the way in which the worker ended."""


_lock = threading.Lock()
_worker: tuple[subprocess.Popen[bytes], Connection, int] | None = None  # with the process id of its owner


def ask(model: bytes, task: str) -> bytes:
    """Parse a serialized model and, unless `task` is "parse", return it with functions inlined and shapes inferred.

    Raises:
        InferenceError: it is no ONNX model, has too many fields, takes much more memory than its size, crashes the
            library or, if `task` is "strict", contradicts itself; for "lenient" its shapes stay unknown.
    """
    global _worker
    with _lock:
        if _worker is None or _worker[2] != os.getpid() or _worker[0].poll() is not None:  # a fork has its own worker
            here, there = Pipe()
            path = json.dumps([entry for entry in sys.path if entry])  # "" is the current folder, of anyone
            command = [sys.executable, "-I", "-c", _START, path, os.path.abspath(__file__), str(there.fileno())]
            none = subprocess.DEVNULL
            process = subprocess.Popen(command, pass_fds=[there.fileno()], stdin=none, stdout=none, stderr=none)
            there.close()
            _worker = process, here, os.getpid()
        process, pipe, _ = _worker
        try:
            pipe.send_bytes(f"{task} {len(model)}".encode())  # its limit holds while the model arrives
            pipe.send_bytes(model)
            fault, answer = pipe.recv_bytes(), pipe.recv_bytes()
        except (OSError, EOFError) as error:
            raise InferenceError(f"the ONNX library does not survive it ({_end(process)})") from error
        except BaseException:  # interrupted: its answer must not reach the next request
            _end(process)
            raise
    if fault:
        raise InferenceError(fault.decode(errors="replace"))
    return answer


def _end(process: "subprocess.Popen[bytes]") -> str:
    """End the worker and say how it ended."""
    try:
        code = process.wait(timeout=1)
    except subprocess.TimeoutExpired:  # it still computes an answer that nobody wants
        process.kill()
        code = process.wait()
    if code == -signal.SIGPROF:
        return f"no end in {_SECONDS} s"
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _serve(pipe: Connection) -> None:
    import resource

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    most = resource.getrlimit(resource.RLIMIT_DATA)[1]
    while True:
        try:
            task, size = pipe.recv_bytes().decode().split()
            allowed = _BYTES + _TIMES * int(size)
            resource.setrlimit(
                resource.RLIMIT_DATA, (allowed if most == resource.RLIM_INFINITY else min(allowed, most), most)
            )
            model = pipe.recv_bytes()
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, _SECONDS)  # seconds of CPU; the signal ends the process even in C++
        try:
            fault, answer = b"", _compute(model, task)
        except Exception as error:  # noqa: BLE001  the parent reports it
            fault, answer = str(error).encode(errors="replace") or type(error).__name__.encode(), b""
        signal.setitimer(signal.ITIMER_PROF, 0)
        del model  # free it before the next one
        pipe.send_bytes(fault)
        pipe.send_bytes(answer)


def _compute(content: bytes, task: str) -> bytes:
    from onnx import ModelProto, inliner, shape_inference

    model = ModelProto.FromString(content)
    _check(model)
    if task == "parse":
        return b""
    model = inliner.inline_local_functions(model) if model.functions else model
    strict = task == "strict"
    try:
        model = shape_inference.infer_shapes(model, check_type=strict, strict_mode=strict, data_prop=strict)
    except Exception:
        if strict:
            raise
    _check(model)
    return model.SerializeToString()


def _check(model: Any) -> None:
    """ValueError for too many fields, and for a text that is not UTF-8."""
    pending, count = [model], 0
    while pending:
        for field, value in pending.pop().ListFields():
            if field.type not in (field.TYPE_MESSAGE, field.TYPE_STRING):
                continue
            several = value if hasattr(value, "append") else (value,)
            count += len(several)
            if count > MAX_FIELDS:
                raise ValueError(f"it holds more than {MAX_FIELDS:,} fields: no Swin has that")
            if field.type == field.TYPE_MESSAGE:
                pending += several
            elif any(isinstance(text, bytes) for text in several):  # protobuf does not decode it, then
                raise ValueError("a text in it is not UTF-8")


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[-1])))
