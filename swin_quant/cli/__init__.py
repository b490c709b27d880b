"""The command line: one module a command, found by name, imported only when it is called for."""

import os
import sys
from collections.abc import Sequence

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # C++ stack dumps say nothing that our one line does not

COMMANDS = {
    "calibrate": "float checkpoint + pictures -> calibrated INT8 checkpoint + run card",
    "finetune": "QAT: calibrated checkpoint + pictures -> fine-tuned INT8 checkpoint + run card",
    "train": "float training from scratch or from weights -> checkpoint + run card",
    "evaluate": "accuracy and latency of a checkpoint: float32, half precision, INT8",
    "report": "the accuracy-delta table of any number of run cards",
    "nodes": "every quantizer node: state, bits, granularity, range, shape",
    "demo": "train, calibrate and score a micro Swin on handwritten digits, without downloads",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0 done, 1 failed, 2 bad usage, 130 interrupted."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        from swin_quant import __version__

        print(__version__)
        return 0
    from swin_quant.cli.session import run_command

    return run_command(arguments[0], arguments[1:])


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {help}" for name, help in COMMANDS.items()]
    return "\n".join(
        [
            "swin-quant: Swin Transformer V1 and V2 to INT8, with accuracy that was measured",
            "",
            "usage: swin-quant COMMAND [options]      swin-quant COMMAND --help",
            "",
            *lines,
        ]
    )
