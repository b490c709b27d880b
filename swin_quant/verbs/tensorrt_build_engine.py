"""Build a TensorRT engine for this GPU from an exported ONNX file, report what runs in int8, and verify it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from swin_quant.base.errors import SwinQuantError, UsageError, listed
from swin_quant.base.files import ensure_writable_dir
from swin_quant.base.progress import log
from swin_quant.cli import shared
from swin_quant.cli.flags import Flag
from swin_quant.report.table import print_table
from swin_quant.verbs.verify import PICTURES, VerifyOptions, failures, verify_artifact

if TYPE_CHECKING:
    from swin_quant.backends.artifact import Artifact
    from swin_quant.backends.tensorrt.layers import LayerReport
    from swin_quant.base.distributed import World
    from swin_quant.data.pictures import Pictures

EXAMPLES = """examples:
  swin-quant tensorrt build-engine out/swin_tiny_int8.onnx --data-path imagenet
  swin-quant tensorrt build-engine out/swin_tiny_int8.onnx --max-batch 64 --timing-cache trt.cache --no-verify
The trtexec line of the same build is printed first, also where TensorRT is not installed. The engine's logits are
compared with the checkpoint's at the end, as `verify` does; exit code 1 says that they are too far off."""


@dataclass(frozen=True)
class BuildEngineOptions:
    """The ONNX file, the batches of its engine, and how the engine is verified."""

    model: Annotated[str, Flag("exported file; its run card lies beside it", "MODEL.onnx", place=True)]
    output: Annotated[str | None, Flag("folder of MODEL_sm<NN>.engine (default: the model's)", "DIR")] = None
    min_batch: Annotated[int, Flag("smallest batch", "N")] = 1
    opt_batch: Annotated[int, Flag("batch it is tuned for", "N")] = 8
    max_batch: Annotated[int, Flag("largest batch", "N")] = 32
    workspace: Annotated[int | None, Flag("limit of scratch memory (default: none)", "MIB")] = None
    timing_cache: Annotated[str | None, Flag("kernel timings to start from, and to keep", "FILE")] = None
    allow_float32: Annotated[bool, Flag("take an int8 graph whose float part is float32")] = False
    no_verify: Annotated[bool, Flag("leave verification out; no pictures are needed then")] = False
    checkpoint: shared.MadeFrom = None
    pictures: shared.Evenly = PICTURES
    place: shared.PictureOptions = shared.PictureOptions()
    device: shared.AnyDevice = "auto"


def build_engine(options: BuildEngineOptions) -> tuple[Artifact, LayerReport, Pictures | None]:
    """The engine, in which type each of its layers runs, and the pictures to compare it on: None where nobody asked.

    The command of NVIDIA's own tool is logged first, also where TensorRT is missing. Pictures and checkpoint that
    are not there are refused before anything is built.
    """
    from swin_quant.backends.open_artifact import open_artifact
    from swin_quant.backends.tensorrt import host
    from swin_quant.backends.tensorrt.build import build
    from swin_quant.backends.tensorrt.plan import SUFFIX, BuildOptions, default_output, make_plan
    from swin_quant.exported import find_checkpoint, no_checkpoint

    cache = Path(options.timing_cache) if options.timing_cache else None
    batches = (options.min_batch, options.opt_batch, options.max_batch)
    wanted = BuildOptions(*batches, options.workspace, cache, options.allow_float32)
    model, shown = Path(options.model), None
    artifact = open_artifact(model)
    plan = make_plan(artifact, wanted)
    place = Path(options.output) / model.name if options.output else model
    log.info("the same by NVIDIA's tool: %s", plan.trtexec(place.with_suffix(SUFFIX)))
    host.tensorrt()
    gpu = host.find_gpu()
    if not options.no_verify:
        if not options.place.data_path and not options.place.images:
            raise UsageError(
                "the engine is verified on real pictures: give --data-path DIR or --images PLACE ..., or --no-verify"
            )
        shown = options.place.open()
        if find_checkpoint(artifact, options.checkpoint) is None:
            why = no_checkpoint(artifact)
            raise SwinQuantError(f"{model}: nothing to compare the engine with: {why}, or ‹no_verify›")
    if options.output:
        ensure_writable_dir(options.output)
    return *build(plan, default_output(place, gpu)), shown


def run(options: BuildEngineOptions, world: World) -> None:
    from swin_quant.report.engines import products_table, verification_table

    if not world.is_main:
        return
    place = replace(options.place, batch=min(options.place.batch, options.max_batch))
    engine = shared.EngineFlags(("tensorrt",))
    how = VerifyOptions(options.model, options.checkpoint, options.pictures, engine, place)
    artifact, layers, pictures = build_engine(options)
    print_table(products_table(layers))
    if lost := layers.lost:
        types = " and ".join(dict.fromkeys(row.wanted for row in lost))
        log.warning("%s in the graph, not in the engine: %s", types, listed(row.name for row in lost))
    log.info("engine: %s", artifact.file)
    if pictures is None:
        log.warning("not verified: compare it on this GPU before it is used: `swin-quant verify %s`", artifact.file)
        return
    # Fused attention has been wrong, and silently, on GPUs that a library was not tested on (TRT#4837). The engine took
    # minutes: an error here must not hide it.
    records = verify_artifact(artifact, lambda: pictures, how, world)
    print_table(verification_table(records))
    if failed := failures(records):
        raise SwinQuantError(
            f"{artifact.file}: verification failed: {'; '.join(failed)}: do not use this engine: build it with "
            "another TensorRT, or from an export with precision float, which tells whose fault it is"
        )
