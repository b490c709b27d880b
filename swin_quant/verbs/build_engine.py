"""Build a TensorRT engine for this GPU from an exported ONNX file, report what runs in int8, and verify it."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from swin_quant.backends.open_artifact import open_artifact
from swin_quant.backends.tensorrt import host
from swin_quant.backends.tensorrt.build import build
from swin_quant.backends.tensorrt.layers import LayerReport
from swin_quant.backends.tensorrt.plan import SUFFIX, BuildOptions, default_output, make_plan
from swin_quant.base.arguments import Fields, Parameter
from swin_quant.base.distributed import one_process
from swin_quant.base.errors import SwinQuantError, UsageError, listed
from swin_quant.base.files import ensure_writable_dir
from swin_quant.base.progress import log
from swin_quant.data.picture_set import PictureSet, Source, resolve_source
from swin_quant.exported import Exported, find_checkpoint, no_checkpoint
from swin_quant.report.engines import products_table
from swin_quant.report.printed import Printed
from swin_quant.report.table import ReportTable
from swin_quant.verbs.verification import Verification
from swin_quant.verbs.verify import verify

EXAMPLES = """swin-quant build-engine out/swin_tiny_int8.onnx --data-path imagenet
swin-quant build-engine out/swin_tiny_int8.onnx --max-batch 64 --timing-cache trt.cache --no-verify"""


@dataclass(frozen=True)
class BuiltEngine(Printed):
    """An engine, the type in which each of its products runs, and how far its logits are from the checkpoint's."""

    exported: Exported
    layers: LayerReport
    verification: Verification | None = None

    def tables(self) -> list[ReportTable[Any]]:
        return [products_table(self.layers), *(self.verification.tables() if self.verification else [])]

    def to_json(self) -> dict[str, Any]:
        """The file, the types of its products, and the records of its verification."""
        records = list(self.verification.records) if self.verification else None
        return {"file": str(self.exported.file), **self.layers.to_dict(), "verification": records}

    def check(self) -> None:
        """SwinQuantError where the logits are too far off."""
        if self.verification is not None and self.verification.failures:
            raise SwinQuantError(
                f"{self.exported.file}: verification failed: {'; '.join(self.verification.failures)}: do not use this "
                "engine: build it with another TensorRT, or from an export with precision float, which tells whose "
                "fault it is"
            )


def build_engine(
    exported: Exported | str | Path,
    pictures: Annotated[Source | None, Fields(PictureSet, "pictures")] = None,
    *,
    folder: Annotated[str | Path | None, Parameter(name="--output")] = None,
    min_batch: int = 1,
    opt_batch: int = 8,
    max_batch: int = 32,
    workspace: int | None = None,
    timing_cache: str | Path | None = None,
    allow_float32: bool = False,
    no_verify: bool = False,
    checkpoint: str | Path | None = None,
) -> BuiltEngine:
    """Build a TensorRT engine for this GPU from an exported ONNX file, report what runs in int8, and verify it.

    The trtexec line of the same build is printed first, also where TensorRT is not installed. The engine's logits are
    compared with the checkpoint's at the end, as `verify` does: fused attention has been wrong, and silently, on GPUs
    that a library was not tested on (TRT#4837). Exit code 1 says that they are too far off.

    Args:
        exported: an exported ONNX file; its run card lies beside it
        pictures: Pictures to compare logits on, of which 64 are taken, evenly spread.
        folder: folder of MODEL_sm<NN>.engine (default: the model's)
        min_batch: smallest batch
        opt_batch: batch it is tuned for
        max_batch: largest batch
        workspace: limit of scratch memory in MiB (default: none)
        timing_cache: file of kernel timings to start from, and to keep
        allow_float32: take an int8 graph whose float part is float32
        no_verify: leave verification out; no pictures are needed then
        checkpoint: the checkpoint that was exported (default: looked for)

    Returns:
        The engine, the types of its products, and its verification.

    Raises:
        SwinQuantError: The build fails, or there is nothing to compare the engine with.
        UsageError: TensorRT or a GPU is missing, or no pictures are given.
    """
    one_process("build-engine")
    model = exported.file if isinstance(exported, Exported) else Path(exported)
    artifact = exported.artifact if isinstance(exported, Exported) else open_artifact(model)
    cache = Path(timing_cache) if timing_cache else None
    plan = make_plan(artifact, BuildOptions(min_batch, opt_batch, max_batch, workspace, cache, allow_float32))
    place = Path(folder) / model.name if folder else model
    log.info("the same by NVIDIA's tool: %s", plan.trtexec(place.with_suffix(SUFFIX)))
    host.tensorrt()
    gpu = host.find_gpu()
    if not no_verify:  # refused before minutes of building
        if pictures is None:
            raise UsageError(
                "the engine is verified on real pictures: give ‹data_path› DIR or ‹images› PLACE ..., or ‹no_verify›"
            )
        if isinstance(source := resolve_source(pictures), PictureSet):
            source.with_default_split("val").open()
        if find_checkpoint(artifact, checkpoint) is None:
            why = no_checkpoint(artifact)
            raise SwinQuantError(f"{model}: nothing to compare the engine with: {why}, or ‹no_verify›")
    if folder:
        ensure_writable_dir(folder)
    made, layers = build(plan, default_output(place, gpu))
    if lost := layers.lost:
        types = " and ".join(dict.fromkeys(row.wanted for row in lost))
        log.warning("%s in the graph, not in the engine: %s", types, listed(row.name for row in lost))
    log.info("engine: %s", made.file)
    engine = BuiltEngine(Exported(made), layers)
    if no_verify or pictures is None:
        log.warning("not verified: compare it on this GPU before it is used: `swin-quant verify %s`", made.file)
        return engine
    try:
        return replace(engine, verification=verify(engine.exported, source, "tensorrt", checkpoint=checkpoint))
    except SwinQuantError:
        engine.show()  # building took minutes: an error here must not hide what was built
        raise
