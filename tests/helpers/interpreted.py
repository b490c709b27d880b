"""Run kernels on the CPU in a separate process. Triton interprets only code imported with TRITON_INTERPRET set, and
then all of it, which must not affect other tests. As a script, this file is that process."""

import io
import os
import pickle
import subprocess
import sys
import traceback

import torch


class Interpreter:
    """`run(operation, outputs, arguments)` launches an operation's kernel; tensors come back by pickle."""

    def __init__(self):
        environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen([sys.executable, __file__], stdin=pipe, stdout=pipe, env=environment)

    def run(self, operation, outputs, arguments):
        """The results in the arguments named `outputs`, which are not changed themselves."""
        _send((operation, outputs, arguments), self.process.stdin)
        results, trouble = _receive(self.process.stdout)
        assert not trouble, trouble
        return results

    def close(self):
        self.process.kill()
        self.process.wait()


def _send(message, pipe):
    """Send as torch saves: pickle alone does not know float8."""
    saved = io.BytesIO()
    torch.save(message, saved)
    pickle.dump(saved.getvalue(), pipe)
    pipe.flush()


def _receive(pipe):
    return torch.load(io.BytesIO(pickle.load(pipe)), weights_only=False)


def _serve(requests, answers):
    from swin_quant.backends.cuda.kernels import KERNELS

    while True:
        try:
            operation, outputs, arguments = _receive(requests)
        except EOFError:
            return
        try:
            tiles = arguments.pop("tiles", None)
            KERNELS[operation](**arguments).launch(tiles)
            answer = {name: arguments[name] for name in outputs}, None
        except Exception:
            answer = None, traceback.format_exc()
        _send(answer, answers)


if __name__ == "__main__":
    channel, sys.stdout = sys.stdout.buffer, sys.stderr
    _serve(sys.stdin.buffer, channel)
