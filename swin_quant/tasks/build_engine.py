"""From an exported ONNX file to a TensorRT engine for this GPU, which is then compared with what it was made from."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from swin_quant.backends.artifact import Artifact, open_artifact
from swin_quant.backends.tensorrt import host
from swin_quant.backends.tensorrt.build import build
from swin_quant.backends.tensorrt.layers import LayerReport
from swin_quant.backends.tensorrt.plan import SUFFIX, BuildOptions, default_output, make_plan
from swin_quant.base.distributed import World
from swin_quant.base.errors import SwinQuantError
from swin_quant.base.files import ensure_writable_dir
from swin_quant.base.progress import log
from swin_quant.cards.records import VerificationRecord
from swin_quant.data.pictures import Pictures
from swin_quant.exported import find_checkpoint, no_checkpoint
from swin_quant.score.options import EngineOptions
from swin_quant.verbs.verify import Verifying, verify_artifact


@dataclass(frozen=True)
class BuiltEngine:
    """An engine, in which type each of its layers runs, and the pictures to compare it on: None where nobody asked."""

    artifact: Artifact
    layers: LayerReport
    pictures: Pictures | None = None


def build_engine(
    model: str | Path,
    options: BuildOptions,
    folder: str | None = None,
    pictures: Callable[[], Pictures] | None = None,
    checkpoint: str | None = None,
) -> BuiltEngine:
    """The engine, in `folder` or beside `model`, to be compared on `pictures` with `checkpoint`: `verify_engine`.

    What NVIDIA's own tool would be told is logged first, also where TensorRT is missing. Pictures and checkpoint that
    are not there are told before anything is built.
    """
    model = Path(model)
    artifact = open_artifact(model)
    plan = make_plan(artifact, options)
    place = Path(folder) / model.name if folder else model
    log.info("the same by NVIDIA's tool: %s", plan.trtexec(place.with_suffix(SUFFIX)))
    host.tensorrt()
    gpu = host.find_gpu()
    shown = pictures() if pictures else None
    if shown is not None and find_checkpoint(artifact, checkpoint) is None:
        raise SwinQuantError(f"{model}: nothing to compare the engine with: {no_checkpoint(artifact)}, or ‹no_verify›")
    if folder:
        ensure_writable_dir(folder)
    return BuiltEngine(*build(plan, default_output(place, gpu)), shown)


def verify_engine(
    built: BuiltEngine,
    how: Verifying = Verifying(),  # noqa: B008
    world: World = World(),  # noqa: B008
) -> list[VerificationRecord] | None:
    """How far its logits are from what they should be; None where nobody asked.

    Fused attention has been wrong, and silently, on GPUs that a library was not tested on (TRT#4837).
    """
    shown = built.pictures
    if shown is None:
        return None
    how = replace(how, engines=("tensorrt",), options=EngineOptions(device="cuda"))
    return verify_artifact(built.artifact, lambda: shown, how, world)
