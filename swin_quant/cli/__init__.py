"""The command line: one module a command, found by name and imported only when the command is called."""

import os
import shutil
import sys
import textwrap
from collections.abc import Sequence

from swin_quant.base import __version__
from swin_quant.base.cpu import reproducible

SECTIONS = {
    "the main way": {
        "quantize": "float checkpoint + pictures -> artifact for an engine, verified and scored, in one go",
        "calibrate": "float checkpoint + pictures -> calibrated INT8 checkpoint + run card",
        "evaluate": "accuracy and latency of a checkpoint or of artifacts on their engines, the float model first",
        "export": "calibrated checkpoint -> FasterTransformer, ONNX, ONNX Runtime, OpenVINO, TensorRT, CUDA",
        "verify": "an artifact against its checkpoint on real pictures: logits within tolerance or not",
        "predict": "the most probable classes of pictures, from a checkpoint or an artifact; or its logits",
        "report": "the accuracy-delta table of any number of run cards",
    },
    "make": {
        "finetune": "QAT: calibrated checkpoint + pictures -> fine-tuned INT8 checkpoint + run card",
        "train": "float training from scratch or from weights -> checkpoint + run card",
        "convert": "a float checkpoint in another format or type: Microsoft, timm, safetensors -> .pth or .safetensors",
    },
    "measure": {
        "bench": "latency, memory and agreement of artifacts on their engines, the float model on each beside them",
        "sensitivity": "the cost of each node and group of nodes: alone, and left out; in dB, KL and agreement",
        "search": "the policy that keeps the loss within a budget at the least measured latency, as YAML",
        "align": "two engines, checkpoints or dumps, layer by layer: the first that differs; or one training step",
    },
    "deploy": {
        "package": "ONNX artifact -> a folder that runs without torch: Python, C++, Docker, Triton, OpenVINO, KServe",
        "serve": "an artifact over HTTP on this machine: KServe v2 protocol, dynamic batching, metrics",
        "tensorrt build-engine": "ONNX file -> TensorRT engine for this GPU, and which layers really run in int8",
        "cuda tune": "the fastest tiles of the CUDA engine's kernels on this GPU, in a file beside the artifact",
    },
    "look": {
        "analyze": "operators, MACs, shapes, precision risks, limits and replacements, before anything is quantized",
        "nodes": "every quantizer node: state, bits, granularity, range, shape",
        "policies": "the built-in policies: the purpose of each, and the backends that take it",
        "inspect": "an ONNX file: int8 products, attention patterns, what an engine will not fuse and why",
        "cuda plan": "the most that INT8 can give on a GPU, launch by launch: computed, without the GPU",
    },
    "FasterTransformer": {
        "ft export": "calibrated checkpoint -> FasterTransformer's weights, manifest and loader",
        "ft gemms": "the int8 GEMMs of a model and batch, with the entries of FasterTransformer's tuner files",
    },
    "begin": {
        "demo": "train, calibrate and score a micro Swin on handwritten digits, without downloads",
        "doctor": "obstacles on this machine, and how to mend them; with --all everything it has",
        "completion": "the script by which bash or zsh completes our commands and flags",
    },
}
COMMANDS = {name: help for section in SECTIONS.values() for name, help in section.items()}
GROUPS = {name.split()[0] for name in COMMANDS if " " in name}


os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # C++ stack dumps add nothing to our one line
_WIDE = 140  # columns of help in a pipe


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0 done, 1 failed, 2 bad usage, 130 interrupted."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    reproducible()
    try:
        from swin_quant.cli.guard import guarded

        return guarded(lambda: _main(arguments), "--verbose" in arguments)
    except KeyboardInterrupt:  # before or after our handler was set
        print("error: interrupted", file=sys.stderr)
        return 130


def _main(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(__version__)
        return 0
    from swin_quant.cli.session import run

    if arguments[0].startswith(("--local-rank=", "--local_rank=")):  # torch.distributed.launch puts it first
        arguments = [*arguments[1:2], arguments[0], *arguments[2:]]
    if arguments[0] in GROUPS and (len(arguments) == 1 or arguments[1] in ("-h", "--help")):
        print(_usage(arguments[0]))
        return 0 if len(arguments) > 1 else 2
    name, rest = (" ".join(arguments[:2]), arguments[2:]) if arguments[0] in GROUPS else (arguments[0], arguments[1:])
    return run(name, rest)


def _usage(group: str = "") -> str:
    prog = f"swin-quant {group}".strip()
    width, columns = max(map(len, COMMANDS)), shutil.get_terminal_size((_WIDE, 0)).columns
    indent, lines = " " * (width + 4), []
    for title, commands in SECTIONS.items():
        shown = {name: help for name, help in commands.items() if name.startswith(f"{group} " if group else "")}
        heads = {f"  {name:<{width}}  ": help for name, help in shown.items()}
        entries = [
            textwrap.fill(h, columns, initial_indent=head, subsequent_indent=indent) for head, h in heads.items()
        ]
        lines += [f"{title}:", *entries, ""] if shown else []
    return "\n".join(
        [
            "swin-quant: Swin Transformer V1 and V2 to INT8, with accuracy that was measured",
            "",
            f"usage: {prog} COMMAND [options]      {prog} COMMAND --help",
            "",
            *lines[:-1],
        ]
    )
