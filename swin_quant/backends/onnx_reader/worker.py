"""Parses foreign ONNX graphs and infers their shapes in a process of its own, which a hostile graph alone can crash.

The parent starts this file as a script when it first needs it. The worker ends with its parent, or when a request
crashes it, takes too long or takes too much memory. The next request then starts another worker.
"""

import os
import signal
import subprocess
import sys
import threading
from multiprocessing.connection import Connection, Pipe
from typing import Any

MAX_FIELDS = 600_000  # messages and texts; a Swin-L has a third of that
_SECONDS, _BYTES, _TIMES = 30, 768 << 20, 4  # limits of one request: the last one for each byte of its model
_lock = threading.Lock()
_worker: tuple[subprocess.Popen[bytes], Connection, int] | None = None  # with the process id of its owner


def ask(model: bytes, infers: bool = True) -> bytes:
    """Parse a serialized model and, if `infers`, return it with functions inlined and shapes inferred.

    Raises:
        ValueError: it is no ONNX model, has too many fields, takes much more memory than its size, crashes the
            library or, if `infers`, contradicts itself.
    """
    global _worker
    with _lock:
        if _worker is None or _worker[2] != os.getpid() or _worker[0].poll() is not None:  # a fork has its own worker
            here, there = Pipe()
            env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # "": any current folder
            command, none = [sys.executable, "-P", __file__, str(there.fileno())], subprocess.DEVNULL
            how: dict[str, Any] = {"stdin": none, "stdout": none, "stderr": none, "pass_fds": [there.fileno()]}
            _worker = subprocess.Popen(command, env=env, **how), here, os.getpid()
            there.close()
        process, pipe, _ = _worker
        try:
            pipe.send(infers)
            pipe.send_bytes(model)
            fault, answer = pipe.recv_bytes(), pipe.recv_bytes()
        except BaseException as error:  # interrupted: its answer must not reach the next request
            ended = _end(process)
            if isinstance(error, OSError | EOFError):
                raise ValueError(f"the ONNX library does not survive it ({ended})") from error
            raise
    if fault:
        raise ValueError(fault.decode(errors="replace"))
    return answer


def _end(process: "subprocess.Popen[bytes]") -> str:
    """End the worker and say how it ended."""
    try:
        process.wait(timeout=1)
    except subprocess.TimeoutExpired:  # it still computes an answer that nobody wants
        process.kill()
    if (code := process.wait()) == -signal.SIGPROF:
        return f"no end in {_SECONDS} s"
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _serve(pipe: Connection) -> None:
    import resource

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    before, most = resource.getrlimit(resource.RLIMIT_DATA)
    while True:
        try:
            infers, model = pipe.recv(), pipe.recv_bytes()
        except EOFError:
            return
        allowed = _BYTES + _TIMES * len(model)
        resource.setrlimit(resource.RLIMIT_DATA, (allowed if most < 0 else min(allowed, most), most))  # -1: no limit
        signal.setitimer(signal.ITIMER_PROF, _SECONDS)  # seconds of CPU; the signal ends the process even in C++
        try:
            fault, answer = b"", _compute(model, infers)
        except Exception as error:  # noqa: BLE001  the parent reports it
            fault, answer = str(error).encode(errors="replace") or type(error).__name__.encode(), b""
        signal.setitimer(signal.ITIMER_PROF, 0)
        del model  # free it before the next one
        pipe.send_bytes(fault)
        pipe.send_bytes(answer)
        resource.setrlimit(resource.RLIMIT_DATA, (before, most))  # while the next model arrives


def _compute(content: bytes, infers: bool) -> bytes:
    from onnx import ModelProto, inliner, shape_inference

    model = ModelProto.FromString(content)
    _check(model)
    if not infers:
        return b""
    model = inliner.inline_local_functions(model) if model.functions else model
    model = shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
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
