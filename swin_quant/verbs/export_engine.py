"""A TensorRT engine for this GPU from an exported ONNX file, and the type in which each of its products runs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swin_quant.backends.tensorrt import host
from swin_quant.backends.tensorrt.build import SUFFIX, BuildOptions, build, default_output, make_plan
from swin_quant.backends.tensorrt.layers import LayerReport
from swin_quant.base.errors import UsageError, listed
from swin_quant.base.files import ensure_writable_dir
from swin_quant.base.progress import log
from swin_quant.exported import Exported, artifact
from swin_quant.loading import ModelFile
from swin_quant.report.engines import products_table
from swin_quant.report.next_command import DIR, fill
from swin_quant.report.printed import Printed
from swin_quant.report.table import WIDE, ReportTable


@dataclass(frozen=True, repr=False)
class BuiltEngine(Printed, Exported):
    """An engine, and the type in which each of its products runs, which is printed as a table."""

    layers: LayerReport = LayerReport([], 0, [])

    def tables(self) -> list[ReportTable[Any]]:
        return [products_table(self.layers)]

    def show(self, otherwise: int = WIDE) -> None:
        """Print the table; messages name the file and the next step."""
        super().show(otherwise)
        log.info("engine: %s", self.file)
        log.info("next: %s", fill("swin-quant verify {file} --data-path {data}", file=self.file, data=DIR))

    def to_json(self) -> dict[str, Any]:
        """The file, and the types of its products."""
        return {"file": str(self.file), **self.layers.to_dict()}


def find_onnx(given: Any) -> Exported | None:
    """The exported ONNX file that is given in place of a model."""
    if isinstance(given, Exported):
        return given
    file = str(given.checkpoint if isinstance(given, ModelFile) else given)
    if not file.endswith(".onnx"):
        return None
    if isinstance(given, ModelFile) and given != ModelFile(given.checkpoint, device=given.device):
        raise UsageError(f"{file}: is exported already: leave the options of models out")
    return artifact(file)


def build_engine(exported: Exported, folder: str | Path | None, options: BuildOptions) -> BuiltEngine:
    """Build the engine of an exported ONNX file in `folder` (None: its own).

    The trtexec line of the same build is printed first, also where TensorRT is not installed. Nothing says that the
    engine computes the same: fused attention has been wrong, and silently, on GPUs that a library was not tested on
    (TRT#4837), so `verify` comes next.
    """
    plan = make_plan(exported.artifact, options)
    place = Path(folder) / exported.file.name if folder else exported.file
    log.info("the same by NVIDIA's tool: %s", plan.trtexec(place.with_suffix(SUFFIX)))
    host.tensorrt()
    output = default_output(place, host.find_gpu())
    ensure_writable_dir(output.parent)
    made, layers = build(plan, output)
    if lost := layers.lost:
        types = " and ".join(dict.fromkeys(row.wanted for row in lost))
        log.warning("%s in the graph, not in the engine: %s", types, listed(row.name for row in lost))
    return BuiltEngine(made, layers=layers)
