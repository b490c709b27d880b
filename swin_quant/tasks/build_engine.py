"""From an exported ONNX file to a TensorRT engine for this GPU."""

from pathlib import Path

from swin_quant.backends.artifact import Artifact, open_artifact
from swin_quant.backends.tensorrt import host
from swin_quant.backends.tensorrt.build import build
from swin_quant.backends.tensorrt.layers import LayerReport
from swin_quant.backends.tensorrt.plan import SUFFIX, BuildOptions, default_output, make_plan
from swin_quant.base.files import ensure_writable_dir
from swin_quant.base.progress import log


def build_engine(model: str | Path, options: BuildOptions, folder: str | None = None) -> tuple[Artifact, LayerReport]:
    """The engine, in `folder` or beside `model`, and in which type each of its layers runs.

    What NVIDIA's own tool would be told is logged first, also where TensorRT is missing.
    """
    model = Path(model)
    plan = make_plan(open_artifact(model), options)
    place = Path(folder) / model.name if folder else model
    log.info("the same by NVIDIA's tool: %s", plan.trtexec(place.with_suffix(SUFFIX)))
    host.tensorrt()
    if folder:
        ensure_writable_dir(folder)
    return build(plan, default_output(place, host.find_gpu()))
