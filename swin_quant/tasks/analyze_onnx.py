"""`analyze` of an ONNX file, whoever wrote it: what its graph says, without running it."""

from collections.abc import Sequence
from pathlib import Path

from swin_quant.backends.onnx_reader.calls import CountedGraph, counted
from swin_quant.backends.onnx_reader.precision import by_file
from swin_quant.base.reading import reads
from swin_quant.operators.analysis import Analysis
from swin_quant.operators.support import chosen_targets, status_of
from swin_quant.operators.variation import Variation


@reads("ONNX file")
def analyze_onnx(path: Path, batch: int = 1, targets: Sequence[str] | None = None) -> Analysis:
    """Analyse the file at `path` for `batch` pictures. SwinQuantError names the file and what is wrong with it."""
    tables = chosen_targets(targets)
    found = counted(path, batch)
    names = dict.fromkeys(call.name for call in found.calls)
    return Analysis(
        path.name,
        found.images,
        found.parameters,
        found.calls,
        {key: table.title for key, table in tables.items()},
        {key: table.sources for key, table in tables.items()},
        {name: {key: status_of(one, name, None, of_onnx=True) for key, one in tables.items()} for name in names},
        [_batch(path, found, batch)],
        risks=[*by_file(path)],
        depending=found.depending,
        types="the types of the file",
    )


def _batch(path: Path, found: CountedGraph, batch: int) -> Variation:
    if not found.open_batch:
        return Variation("batch", False, 0, f"the file says {batch}")
    other = counted(path, batch + 1).calls
    changed = sum(a.inputs != b.inputs or a.outputs != b.outputs for a, b in zip(found.calls, other, strict=True))
    return Variation("batch", True, changed)
