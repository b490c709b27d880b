"""Runs ONNX's shape inference in a process of its own, so that a hostile graph can crash only that process.

The parent starts this file as a script when it first needs it. A request and its answer are a length, then bytes. The
worker ends with its parent, or when a request crashes it, takes too long or takes too much memory. The next request
then starts another worker.
"""

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from typing import BinaryIO, cast

_SECONDS, _BYTES = 30, 768 << 20  # limits of one request
_START = (
    "import json, runpy, sys; sys.path[:] = json.loads(sys.argv[1]); runpy.run_path(sys.argv[2], run_name='__main__')"
)


class InferenceError(Exception):
    """The library's objection to a graph, or the way in which the worker ended."""


def infer(model: bytes, *, strict: bool, inline: bool = False) -> bytes:
    """`model`, serialized, with the shapes of its tensors added.

    `inline`: the model's own functions are inlined first. `strict`: InferenceError for a graph that contradicts itself;
    otherwise its shapes stay unknown. InferenceError also where the library crashes.
    """
    request = json.dumps({"strict": strict, "inline": inline}).encode()
    with _lock:
        worker = _running()
        try:
            into, out_of = cast(BinaryIO, worker.stdin), cast(BinaryIO, worker.stdout)
            _send(into, request)
            _send(into, model)
            good, answer = _receive(out_of), _receive(out_of)
        except (OSError, EOFError) as error:
            raise InferenceError(f"the ONNX library does not survive it ({_end()})") from error
        except BaseException:  # interrupted: its answer must not reach the next request
            worker.kill()
            raise
    if not good:
        raise InferenceError(answer.decode(errors="replace"))
    return answer


_lock = threading.Lock()
_worker: subprocess.Popen[bytes] | None = None
_owner = 0  # process id: a forked process must not use its parent's worker


def _running() -> subprocess.Popen[bytes]:
    global _worker, _owner
    if _worker is None or _owner != os.getpid() or _worker.poll() is not None:
        # "" is the current folder, which may hold anything.
        path = json.dumps([entry for entry in sys.path if entry])
        command = [sys.executable, "-I", "-c", _START, path, os.path.abspath(__file__)]
        _worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        _owner = os.getpid()
    return _worker


@atexit.register
def _end() -> str:
    """End the worker and say how it ended."""
    global _worker
    worker, _worker = _worker, None
    if worker is None or _owner != os.getpid():
        return ""
    for pipe in (worker.stdin, worker.stdout):
        try:
            cast(BinaryIO, pipe).close()
        except OSError:  # the worker ended before it read everything
            pass
    code = worker.wait()
    if code == -signal.SIGPROF:
        return f"no end in {_SECONDS} s"
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _send(pipe: BinaryIO, data: bytes) -> None:
    pipe.write(len(data).to_bytes(8, "little"))
    pipe.write(data)
    pipe.flush()


def _receive(pipe: BinaryIO) -> bytes:
    size = pipe.read(8)
    data = pipe.read(int.from_bytes(size, "little"))
    if len(size) < 8 or len(data) < int.from_bytes(size, "little"):
        raise EOFError
    return data


def _serve() -> None:
    import resource

    from onnx import ModelProto, inliner, shape_inference

    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the library may print
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (_BYTES, _BYTES))
    while True:
        try:
            options, model = json.loads(_receive(requests)), _receive(requests)
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, _SECONDS)  # seconds of CPU; the signal ends the process even in C++
        try:
            parsed = ModelProto.FromString(model)
            parsed = inliner.inline_local_functions(parsed) if options["inline"] else parsed
            strict = options["strict"]
            try:
                parsed = shape_inference.infer_shapes(parsed, check_type=strict, strict_mode=strict, data_prop=strict)
            except Exception:
                if strict:
                    raise
            good, data = b"1", parsed.SerializeToString()
        except Exception as error:  # noqa: BLE001  the parent reports it
            good, data = b"", str(error).encode(errors="replace")
        signal.setitimer(signal.ITIMER_PROF, 0)
        _send(answers, good)
        _send(answers, data)


if __name__ == "__main__":
    _serve()
