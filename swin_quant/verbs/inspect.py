"""Report on an ONNX file: which products are int8, what stays float, and how many run in int8 on each engine."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from swin_quant.backends.onnx_reader.npu_rules import NPUS
from swin_quant.backends.registry import engines_for
from swin_quant.base.errors import SwinQuantError
from swin_quant.base.progress import log
from swin_quant.base.reading import reading
from swin_quant.cli import shared
from swin_quant.cli.flags import Flag
from swin_quant.cli.output import tell
from swin_quant.report.table import print_fitted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from swin_quant.backends.onnx_reader.npu_rules import Misfit
    from swin_quant.report.graph import IntegerProducts

EXAMPLES = """examples:
  swin-quant inspect out/swin_tiny_int8.onnx
  swin-quant inspect out/swin_tiny_int8.onnx --engine onnxruntime --json report.json
  swin-quant inspect some_swin_of_timm.onnx                                 (any ONNX file)
  swin-quant inspect some_swin_of_timm.onnx --for qnn                       (what an NPU takes, docs/devices.md)"""


@dataclass(frozen=True)
class InspectOptions:
    """The file to inspect, and the engine to ask."""

    model: Annotated[str, Flag(metavar="MODEL.onnx", place=True)]
    engine: Annotated[
        str | None,
        Flag("count what this engine alone runs in int8 (default: all)", choices=partial(engines_for, "onnx")),
    ] = None
    npu: Annotated[
        str | None,
        Flag("list the nodes that an NPU does not take, by its makers' rules", name="--for", choices=tuple(NPUS)),
    ] = None
    json: shared.Json = None


def run(options: InspectOptions) -> None:
    from swin_quant.backends.onnx_reader.file import read_model
    from swin_quant.backends.onnx_reader.npu_rules import misfits
    from swin_quant.backends.onnx_reader.products import inspect_model
    from swin_quant.report.graph import by_engine, inspection_text

    file, asked = Path(options.model), (options.engine,) if options.engine else ()
    try:
        with reading(options.model, "ONNX file"):
            model = read_model(file)
            report = inspect_model(model)
            unfit = misfits(model, options.npu) if options.npu else []
    except SwinQuantError as error:
        named = str(error).startswith(options.model)
        raise error if named else SwinQuantError(f"{options.model}: {error}") from error
    functions = {(one.domain, one.name) for one in model.functions}
    calls = Counter(node.op_type for node in model.graph.node if (node.domain, node.op_type) in functions)
    if calls:
        shown = ", ".join(f"{name} {count}" for name, count in calls.items())
        log.info("operators: %s: reported as their plain nodes; a compiled library runs each as one", shown)
    counts: dict[str, IntegerProducts] = {}
    try:
        counts = {} if options.npu else by_engine(file, asked)
    except SwinQuantError as error:  # another tool's file, which our engines do not take
        log.warning("products were not counted on engines: %s", error)
    found = {"file": file.name, **report.to_dict(), "engines": {name: asdict(one) for name, one in counts.items()}}
    if options.npu:
        found["npu"] = {"for": options.npu, **asdict(NPUS[options.npu]), "misfits": [asdict(one) for one in unfit]}
        tell(options.json, lambda: print(npu_text(options.npu or "", unfit)), found)
        return
    tell(options.json, lambda: print_fitted(partial(inspection_text, report, engines=counts)), found)


def npu_text(target: str, unfit: Sequence[Misfit]) -> str:
    """Whether a file keeps the rules of a target: the nodes that do not, and the sources of the rules."""
    rules = NPUS[target]
    verdict = f"{len(unfit)} nodes do not fit" if unfit else "fits"
    lines = [f"{target} ({rules.what}): {verdict}", *map(str, unfit), *(f"source: {one}" for one in rules.sources)]
    return "\n".join(lines)
