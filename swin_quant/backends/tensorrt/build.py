"""Plans an engine without a GPU, and builds it from an ONNX artifact with TensorRT 10 or 11.

A plan checks the ONNX file, the profile and the output, and gives the `trtexec` line. The two releases are told apart
by their functions, never by version. Networks are strongly typed: the graph sets every type, and nothing here chooses a
precision (TensorRT 11 has no other mode). Sources: NVIDIA's Python API reference of 10.x and 11.x, and its guide
"Migrating from 10.x to 11.x".
"""

import shlex
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from swin_quant.backends.artifact import Artifact, finish_artifact
from swin_quant.backends.onnx_reader.file import OnnxFile, read_model, verified
from swin_quant.backends.onnx_reader.products import FLOAT8, Inspection, inspect_model
from swin_quant.backends.tensorrt import host
from swin_quant.backends.tensorrt.host import Gpu
from swin_quant.backends.tensorrt.layers import LAYERS, LayerReport, read_layers
from swin_quant.base.errors import SwinQuantError, UsageError, listed
from swin_quant.base.files import atomic_write_bytes, ensure_writable_dir, reason, write_json
from swin_quant.base.progress import log
from swin_quant.base.reading import reads
from swin_quant.cards.card import RunCard
from swin_quant.cards.paths import card_path

SUFFIX = ".engine"
_FLOAT8_FROM = (8, 9)  # the first compute capability with float8 products


@dataclass(frozen=True)
class BuildOptions:
    """Options of an engine that is built from an exported ONNX file.

    Args:
        min_batch: smallest batch
        opt_batch: batch that it is tuned for
        max_batch: largest batch
        workspace: limit of scratch memory in MiB (default: none)
        timing_cache: file that keeps times of kernels for the next build
        allow_float32: build it also where float layers are float32, which is slow
    """

    min_batch: int = 1
    opt_batch: int = 8
    max_batch: int = 32
    workspace: int | None = None
    timing_cache: Path | None = None
    allow_float32: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.min_batch <= self.opt_batch <= self.max_batch:
            raise UsageError(
                f"batches {self.min_batch}, {self.opt_batch}, {self.max_batch}: must be from 1, in growing order"
            )
        if self.workspace is not None and self.workspace < 1:
            raise UsageError(f"workspace of {self.workspace} MiB: must be 1 or more")


@dataclass(frozen=True)
class EnginePlan:
    """A checked ONNX file and the options for its engine. `shapes`: the profile's smallest, typical and largest."""

    artifact: Artifact
    file: OnnxFile
    report: Inspection
    options: BuildOptions

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        sizes, options = self.file.sizes, self.options
        fault = "pictures of any size: engines are built here for one: a classifier" if sizes is None else ""
        fault = "several inputs: engines are built here for one" if self.file.inputs else fault
        if fault or sizes is None:
            raise UsageError(f"{self.file.path}: takes {fault}")
        batches = (options.min_batch, options.opt_batch, options.max_batch)
        return [(batch, self.file.channels, *sizes) for batch in batches]

    def trtexec(self, output: Path) -> str:
        """NVIDIA's command for the same engine; TensorRT 11 accepts --stronglyTyped, and does not need it."""
        sizes = zip(("min", "opt", "max"), self.shapes, strict=True)
        shapes = [f"--{kind}Shapes={self.file.input}:{'x'.join(map(str, shape))}" for kind, shape in sizes]
        words = ["trtexec", f"--onnx={self.file.path}", f"--saveEngine={output}", "--stronglyTyped"]
        words += shapes if self.file.batch is None else []
        words += ["--profilingVerbosity=detailed"]
        words += [f"--memPoolSize=workspace:{self.options.workspace}"] if self.options.workspace else []
        words += [f"--timingCacheFile={self.options.timing_cache}"] if self.options.timing_cache else []
        return shlex.join(words)


@reads("ONNX file", lambda artifact, options: artifact.file)
def make_plan(artifact: Artifact, options: BuildOptions) -> EnginePlan:
    """Check the file, without a GPU. Errors name the file and the export that would fit."""
    if artifact.record["backend"] != "onnx":
        raise UsageError(f"{artifact.file}: is an artifact of {artifact.record['backend']}: give an exported ONNX file")
    file = verified(artifact)
    if file.batch is not None and {file.batch} != {options.min_batch, options.opt_batch, options.max_batch}:
        raise UsageError(
            f"{file.path}: is for batches of {file.batch}: give ‹min_batch›, ‹opt_batch› and ‹max_batch› {file.batch}, "
            "or export it with a batch of any size"
        )
    if file.pixels:
        raise UsageError(f"{file.path}: takes pixels: engines are built here of files that take prepared pictures")
    report = inspect_model(read_model(file.path))
    if report.body == "float32" and report.pairs[0] and not options.allow_float32:
        raise UsageError(
            f"{file.path}: what is not int8 in this graph is float32, so TensorRT would run it in float32, slower than "
            "a float16 model: `export --for tensorrt` (float16 body), or give ‹allow_float32›"
        )
    if report.asymmetric:
        raise UsageError(
            f"{file.path}: TensorRT takes no zero points, and this graph has them at {listed(report.asymmetric, 2)}: "
            "`export --for tensorrt`"
        )
    if report.body == "float32" and not report.pairs[0]:
        log.warning("%s: is a float32 graph: its engine is no baseline for speed; export float16", file.path.name)
    return EnginePlan(artifact, file, report, options)


def default_output(file: Path, gpu: Gpu) -> Path:
    """The engine's path beside the ONNX file, with the GPU's architecture: `x.onnx` -> `x_sm86.engine`."""
    return file.with_name(f"{file.stem}_sm{gpu.capability.replace('.', '')}{SUFFIX}")


def check_output(output: Path, source: Path, timing_cache: Path | None = None) -> None:
    """UsageError, before minutes of building, for a place that is not writable or has another file's run card."""
    if timing_cache is not None:
        if timing_cache.is_dir():
            raise UsageError(f"‹timing_cache› {timing_cache}: is a directory: name a file")
        taken = [path.resolve() for path in (source, card_path(source), output, card_path(output))]
        if timing_cache.resolve() in taken:
            raise UsageError(f"‹timing_cache› {timing_cache}: would be written over: name a file of its own")
        ensure_writable_dir(timing_cache.parent)
    if output.suffix != SUFFIX:
        raise UsageError(f"‹output› {output}: must end in {SUFFIX}")
    card = card_path(output)
    if card.resolve() == card_path(source).resolve():
        raise UsageError(f"‹output› {output}: its run card would overwrite that of {source.name}: choose another name")
    if card.is_file():
        recorded = RunCard.read(card).artifact
        if recorded is None or recorded["file"] != output.name:
            raise UsageError(f"‹output› {output}: {card.name} is the run card of another file: choose another name")
    ensure_writable_dir(output.parent)


def build(plan: EnginePlan, output: Path) -> tuple[Artifact, LayerReport]:
    """Build the engine, then write it, its layer report, and last its run card."""
    trt, gpu = host.tensorrt(), host.find_gpu()
    float8 = [one.name for one in plan.report.gemms if one.format == FLOAT8]
    if float8 and tuple(map(int, gpu.capability.split("."))) < _FLOAT8_FROM:
        raise UsageError(
            f"{plan.file.path}: {len(float8)} products are float8, which {gpu.name} (compute capability "
            f"{gpu.capability}) does not multiply: it begins with 8.9; export with ‹policy› tensorrt, in int8"
        )
    check_output(output, plan.file.path, plan.options.timing_cache)
    messages = host.logger(trt)
    builder = trt.Builder(messages)
    network = builder.create_network(host.strongly_typed(trt))
    _parse(trt, network, messages, plan.file.path)
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED  # layers and their types, for the report
    if plan.options.workspace:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, plan.options.workspace << 20)
    if plan.file.batch is None:
        profile = builder.create_optimization_profile()
        profile.set_shape(plan.file.input, *plan.shapes)
        if config.add_optimization_profile(profile) < 0:
            raise SwinQuantError(f"{plan.file.path}: TensorRT refuses the profile: {host.last_error(messages, 'why?')}")
    if cache_file := plan.options.timing_cache:  # measurements of another TensorRT or GPU are not used
        cache = config.create_timing_cache(_read_cache(cache_file))
        if cache is None or not config.set_timing_cache(cache, ignore_mismatch=False):
            log.warning("%s: is not a timing cache of this TensorRT and GPU: starting a new one", cache_file)
            config.set_timing_cache(config.create_timing_cache(b""), ignore_mismatch=False)
    log.info("building for %s with TensorRT %s: this takes minutes", gpu.name, trt.__version__)
    serialized = builder.build_serialized_network(network, config)
    if serialized is None:
        why = host.last_error(messages, "it does not say why; ‹verbose› shows its log")
        raise SwinQuantError(f"{plan.file.path}: TensorRT {trt.__version__} cannot build this graph: {why}")
    if cache_file:  # merged with the measurements that another build wrote into the file meanwhile
        cache = config.get_timing_cache()
        if other := config.create_timing_cache(_read_cache(cache_file)) if cache_file.is_file() else None:
            cache.combine(other, ignore_mismatch=False)  # returns False for another GPU's file, which ours replaces
        atomic_write_bytes(cache_file, bytes(cache.serialize()))
    data = bytes(serialized)
    layers = inspect_engine(trt, data, messages, plan)
    report = output.with_name(f"{output.stem}{LAYERS}")
    write_json(report, layers.to_dict())
    atomic_write_bytes(output, data)
    record, options = plan.artifact.record, plan.options
    details = {
        "tensorrt": trt.__version__,
        "gpu": gpu.name,
        "compute_capability": gpu.capability,
        "profile": dict(zip(("min", "opt", "max"), map(list, plan.shapes), strict=True)),
        "timing_cache": options.timing_cache.name if options.timing_cache else None,
        "workspace_mib": options.workspace,
        "gemms": layers.counts(),
        "onnx": {"file": record["file"], "sha256": record["sha256"], "options": record["options"]},
    }
    return finish_artifact(output, plan.artifact.card, "tensorrt", record["precision"], details, [report]), layers


def _parse(trt: ModuleType, network: Any, messages: Any, path: Path) -> None:
    parser = trt.OnnxParser(network, messages)
    if parser.parse(path.read_bytes(), str(path)):
        return
    faults = []
    for number in range(parser.num_errors):
        error = parser.get_error(number)
        node = error.node_name() if hasattr(error, "node_name") else f"number {error.node()}"
        op = f" ({error.node_operator()})" if hasattr(error, "node_operator") else ""
        faults.append(f"node {node}{op}: {' '.join(error.desc().split())}"[:300])
    why = listed(faults, 2) or host.last_error(messages, "it does not say why")
    raise SwinQuantError(f"{path}: TensorRT {trt.__version__} cannot read it: {why}")


def _read_cache(file: Path) -> bytes:
    try:
        return file.read_bytes() if file.exists() else b""
    except OSError as error:
        raise SwinQuantError(f"{file}: the timing cache cannot be read: {reason(error)}") from error


def inspect_engine(trt: ModuleType, data: bytes, messages: Any, plan: EnginePlan) -> LayerReport:
    """The engine inspector's report on the built engine's layers, matched with the products of the ONNX graph."""
    runtime = trt.Runtime(messages)
    engine = runtime.deserialize_cuda_engine(data)
    if engine is None:
        raise SwinQuantError(f"{plan.file.path}: the engine cannot be read back: {host.last_error(messages, 'why?')}")
    text = engine.create_engine_inspector().get_engine_information(trt.LayerInformationFormat.JSON)
    try:
        return read_layers(text, plan.report.gemms)
    except SwinQuantError as error:  # a missing report is no reason to lose minutes of building
        log.warning("no layer report: %s", error)
        return read_layers('{"Layers": []}', plan.report.gemms)
