"""Plans a build without a GPU: checks the ONNX file, the profile and the output, and gives the `trtexec` line."""

import shlex
from dataclasses import dataclass
from pathlib import Path

from swin_quant.backends.artifact import Artifact
from swin_quant.backends.onnx_reader.file import OnnxFile, read_model, verified
from swin_quant.backends.onnx_reader.products import Inspection, inspect_model
from swin_quant.backends.tensorrt.host import Gpu
from swin_quant.base.errors import UsageError, listed
from swin_quant.base.files import ensure_writable_dir
from swin_quant.base.progress import log
from swin_quant.base.reading import reads
from swin_quant.cards.card import RunCard
from swin_quant.cards.paths import card_path

SUFFIX = ".engine"


@dataclass(frozen=True)
class BuildOptions:
    """Options of an engine that is built from an exported ONNX file.

    Args:
        min_batch: TensorRT: smallest batch (default 1)
        opt_batch: TensorRT: batch it is tuned for (default 8)
        max_batch: TensorRT: largest batch (default 32)
        workspace: TensorRT: limit of scratch memory in MiB (default: none)
        timing_cache: TensorRT: file of kernel timings to start from, and to keep
        allow_float32: TensorRT: take an int8 graph whose float part is float32
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
