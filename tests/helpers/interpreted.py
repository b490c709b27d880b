"""Kernels on the CPU, in a process of its own: Triton interprets only what was imported with TRITON_INTERPRET set, and
then all of it, which no other test is to see. Run as a script it is that process."""

import importlib
import os
import pickle
import subprocess
import sys
import traceback


class Interpreter:
    """`run(operation, outputs, arguments)` launches an operation's kernel; tensors come back by pickle."""

    def __init__(self):
        environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen([sys.executable, __file__], stdin=pipe, stdout=pipe, env=environment)

    def run(self, operation, outputs, arguments):
        """What the kernel writes into the arguments named `outputs`, which themselves stay as they are."""
        pickle.dump((operation, outputs, arguments), self.process.stdin)
        self.process.stdin.flush()
        results, trouble = pickle.load(self.process.stdout)
        assert not trouble, trouble
        return results

    def close(self):
        self.process.kill()
        self.process.wait()


def _serve(requests, answers):
    while True:
        try:
            operation, outputs, arguments = pickle.load(requests)
        except EOFError:
            return
        try:
            importlib.import_module(f"swin_quant.backends.cuda.kernels.{operation}").launch(**arguments)
            answer = {name: arguments[name] for name in outputs}, None
        except Exception:
            answer = None, traceback.format_exc()
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    channel, sys.stdout = sys.stdout.buffer, sys.stderr
    _serve(sys.stdin.buffer, channel)
