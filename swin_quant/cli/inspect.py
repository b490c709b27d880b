"""swin-quant inspect."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from swin_quant.backends.registry import engines_for
from swin_quant.base.errors import SwinQuantError, listed
from swin_quant.base.files import write_json

if TYPE_CHECKING:
    from swin_quant.backends.onnx_inspect import Inspection
    from swin_quant.base.distributed import World

HELP = "What is in an ONNX file: which products are int8, which attention fuses, what an engine will not fuse, and why."
EXAMPLES = """examples:
  swin-quant inspect out/swin_tiny_int8.onnx
  swin-quant inspect out/swin_tiny_int8.onnx --backend tensorrt --json report.json
  swin-quant inspect some_swin_of_timm.onnx                                 (any ONNX file; what is unknown is said)"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL.onnx")
    parser.add_argument(
        "--backend", choices=engines_for("onnx"), help="only what this engine will not fuse (default: all)"
    )
    parser.add_argument("--json", metavar="FILE", help="also write the whole report there")


def run(args: argparse.Namespace, world: World) -> None:
    from swin_quant.backends.onnx_file import read_model
    from swin_quant.backends.onnx_inspect import inspect_model
    from swin_quant.base.progress import log

    if not world.is_main:
        return
    try:
        report = inspect_model(read_model(Path(args.model)), [args.backend] if args.backend else None)
    except SwinQuantError as error:
        named = str(error).startswith(args.model)
        raise error if named else SwinQuantError(f"{args.model}: {error}") from error
    if args.json:
        write_json(args.json, {"file": Path(args.model).name, **report.to_dict()})
        log.info("report: %s", args.json)
    _print(report)


def _print(report: Inspection) -> None:
    from rich.console import Console
    from rich.text import Text

    screen = Console()
    if not screen.is_terminal:
        screen.width = 140  # a file or a pipe has room for whole names

    def say(text: str, style: str = "") -> None:
        screen.print(Text(text, style=style))

    int8 = sum(gemm.int8 for gemm in report.gemms)
    say(
        f"opset {report.opset}, {report.body} body; {int8} of {len(report.gemms)} products int8; "
        f"{report.pairs[0]} QuantizeLinear, {report.pairs[1]} DequantizeLinear",
        "bold",
    )
    screen.print(_table(report))
    say(f"float ops: {_counts(report.float_ops)}")
    say(f"layout ops: {_counts(report.layout_ops)}")
    for finding in report.findings:
        say(f"{finding.backend}: {finding.rule}: {listed(finding.nodes, 3)}", "yellow")
        say(f"    {finding.why} [{finding.source}]", "dim")
    for sentence in report.unrecognised:
        say(f"not recognised: {sentence}", "yellow")


def _table(report: Inspection):
    """A line for each block: its products by type, and the pattern of its attention."""
    from rich.table import Table
    from rich.text import Text

    verdicts = {verdict.attention.block or verdict.attention.name: verdict for verdict in report.verdicts}
    table = Table(box=None, pad_edge=False)
    for title in ("block", "int8", "float products", "attention", "why not one int8 kernel"):
        table.add_column(title, overflow="fold")
    for block in dict.fromkeys((*report.blocks, *verdicts)):
        gemms = report.blocks.get(block, [])
        floats = [_part(gemm.name, block) for gemm in gemms if not gemm.int8]
        verdict = verdicts.get(block)
        float_model = not report.pairs[0] and verdict and verdict.fusible
        why = next(iter(verdict.failed.values()), "") if verdict and not float_model else ""
        style = "" if not verdict else "green" if verdict.pattern == "fusible int8" else "yellow"
        pattern = Text(verdict.pattern if verdict else "", style=style)
        table.add_row(block, f"{sum(g.int8 for g in gemms)}/{len(gemms)}", listed(floats, 6), pattern, Text(why))
    return table


def _part(name: str, block: str) -> str:
    """The part of a name that its block does not say."""
    return name.split(f"{block}.")[-1].rsplit("/", 2)[-1]


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{op} {count}" for op, count in counts.items()) or "none"
