"""Analyse a model before anything is quantized: operators, targets, shapes, precision risks, limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.base.reading import reads
from swin_quant.cli import shared
from swin_quant.cli.flags import Flag
from swin_quant.cli.output import Printed, tell
from swin_quant.config.sides import sides
from swin_quant.report.table import ReportTable

if TYPE_CHECKING:
    from torch import Tensor, nn
    from yacs.config import CfgNode

    from swin_quant.base.distributed import World
    from swin_quant.checkpoint import Checkpoint
    from swin_quant.model import Model
    from swin_quant.operators.analysis import Analysis

EXAMPLES = """examples:
  swin-quant analyze swin_tiny_patch4_window7_224.pth
  swin-quant analyze --cfg swin_tiny_patch4_window7_224 --machine a100          (shapes alone need no weights)
  swin-quant analyze my.pth --cfg my.yaml --data-path imagenet --pictures 4 --check-replacements
  swin-quant analyze out/my_int8.onnx --batch 8 --target onnxruntime openvino      (the graph alone)
  swin-quant analyze out/my_calib.pth --replace roll gather --target tensorrt --json report.json"""
MACHINE = "t4"


@dataclass(frozen=True)
class LookedAtOptions:
    """Pictures for the risks that weights do not show."""

    TITLE = "pictures, for risks that weights do not show"
    data_path: Annotated[str | None, Flag("folder of pictures, or with val/ or its zip; or: digits", "DIR")] = None
    zip: Annotated[bool, Flag("val.zip of DIR, though a folder lies beside it")] = False
    pictures: Annotated[int, Flag("how many are looked at", "N")] = 8


@dataclass(frozen=True)
class AnalyzeOptions:
    """The model to analyse, and the batch, targets and machine for it."""

    checkpoint: Annotated[
        str | None,
        Flag("checkpoint, float or calibrated, or timm:NAME, hf:NAME; or an ONNX file", "CHECKPOINT", or_flag=True),
    ] = None
    model: shared.ModelOptions = shared.ModelOptions()
    batch: Annotated[int, Flag("pictures at a time", "N")] = 1
    target: Annotated[tuple[str, ...], Flag("only these targets (default: all that are known)", "NAME")] = ()
    machine: Annotated[
        str,
        Flag("the GPU whose peaks give the limits: t4, a100, h200, ... or a YAML file", "NAME|FILE"),
    ] = MACHINE
    replace: Annotated[
        tuple[str, ...], Flag("replace these operators by equivalent ones first: roll, gather, ...", "NAME")
    ] = ()
    check_replacements: Annotated[
        bool, Flag("run each equivalent replacement on the model and compare the outputs")
    ] = False
    place: LookedAtOptions = LookedAtOptions()
    json: shared.Json = None


@dataclass(frozen=True)
class Analyzed(Printed):
    """The analysis of a model; printed, it is the report of `swin-quant analyze`. `found` holds it as data."""

    found: Analysis

    def to_dict(self) -> dict[str, Any]:
        """The analysis for JSON."""
        return self.found.to_dict()

    def text(self, width: int, color: bool = False) -> str:
        from swin_quant.report.graph import analysis_text

        return analysis_text(self.found, width, color)

    def tables(self) -> list[ReportTable[Any]]:
        from swin_quant.report.graph import sections

        return [section.table for section in sections(self.found) if section.table]


def analyze(
    model: Model | nn.Module,
    images: Tensor | Sequence[int] | None = None,
    *,
    machine: str = MACHINE,
    targets: Sequence[str] | None = None,
    replace: Sequence[str] = (),
    check_replacements: bool = False,
) -> Analyzed:
    """Operators, targets, shapes, precision risks and limits of `model`: one of ours, of timm's or of your own.

    `images`: preprocessed pictures [B, 3, H, W], which show risks that weights do not; or their shape alone; None: one
    picture of the size that a `Model` says. SwinQuantError names the module that cannot be traced.
    """
    from torch import Tensor

    from swin_quant.model import Model
    from swin_quant.operators.analysis import analyze_module
    from swin_quant.operators.roofline import load_machine

    name = model.name if isinstance(model, Model) else type(model).__name__
    if images is None:
        if not isinstance(model, Model):
            raise UsageError(
                f"{name}: does not say the size of its pictures: give images, or their shape (1, 3, 224, 224)"
            )
        images = (1, 3, *model.preprocess.sides)
    if isinstance(images, Tensor) and isinstance(model, Model):
        images = model.prepared(images)
    pictures, shape = (images, tuple(images.shape)) if isinstance(images, Tensor) else (None, tuple(images))
    if len(shape) != 4:
        raise UsageError(f"images of shape {shape}: must be [B, 3, H, W]")
    module, peaks = model.module if isinstance(model, Model) else model, load_machine(machine)
    return Analyzed(
        analyze_module(
            module, shape, name, peaks, pictures, targets=targets or (), replace=replace, check=check_replacements
        )
    )


def analyze_checkpoint(
    cfg: CfgNode,
    checkpoint: Checkpoint | None = None,
    pictures: Tensor | None = None,
    batch: int = 1,
    machine: str = MACHINE,
    **how: Any,
) -> Analysis:
    """Analyse the model that `cfg` describes, with the weights and ranges of `checkpoint` if there is one.

    `how`: the keywords of `analyze_module`.
    """
    from swin_quant.loading import model_or_shapes
    from swin_quant.operators.analysis import analyze_module
    from swin_quant.operators.roofline import load_machine

    model = model_or_shapes(cfg, checkpoint)
    shape = (batch, model.in_chans, *sides(cfg.DATA.IMG_SIZE))
    return analyze_module(model, shape, cfg.MODEL.NAME, load_machine(machine), pictures, **how)


@reads("ONNX file")
def analyze_onnx(path: Path, batch: int = 1, targets: Sequence[str] = ()) -> Analysis:
    """Analyse the graph of any ONNX file for `batch` pictures, without running it. SwinQuantError names the file."""
    from swin_quant.backends.onnx_reader.calls import counted
    from swin_quant.operators.analysis import Analysis
    from swin_quant.operators.support import chosen_targets, status_of
    from swin_quant.operators.trace import Variation

    tables = chosen_targets(targets)
    found = counted(path, batch)
    follows = Variation("batch", False, 0, f"the file says {batch}")
    if found.open_batch:
        pairs = zip(found.calls, counted(path, batch + 1).calls, strict=True)
        follows = Variation("batch", True, sum(a.inputs != b.inputs or a.outputs != b.outputs for a, b in pairs))
    return Analysis(
        path.name,
        found.images,
        found.parameters,
        found.calls,
        {key: table.title for key, table in tables.items()},
        {key: table.sources for key, table in tables.items()},
        {
            name: {key: status_of(table, name, None, of_onnx=True) for key, table in tables.items()}
            for name in dict.fromkeys(call.name for call in found.calls)
        },
        [follows],
        weighed=False,
        depending=found.depending,
        types="the types of the file",
    )


def run(options: AnalyzeOptions, world: World) -> None:
    shared.one_process(world, "analyze")
    found = Analyzed((_of_file if str(options.checkpoint).endswith(".onnx") else _of_model)(options))
    tell(options.json, lambda: found.show(80), found.to_dict())


def _of_file(options: AnalyzeOptions) -> Analysis:
    file = str(options.checkpoint)
    if options.model.cfg or options.replace or options.check_replacements or options.place.data_path:
        raise UsageError(f"{file}: is an ONNX file, whose graph is analysed alone: give a checkpoint for more")
    return analyze_onnx(Path(file), options.batch, options.target)


def _of_model(options: AnalyzeOptions) -> Analysis:
    from swin_quant.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(options.checkpoint) if options.checkpoint else None
    cfg = shared.config_of(checkpoint, options.model)
    if options.check_replacements and not checkpoint:
        raise UsageError("--check-replacements runs the model: give a checkpoint")
    if options.place.data_path and not checkpoint:
        raise UsageError("--data-path: pictures show nothing without weights: give a checkpoint")
    return analyze_checkpoint(
        cfg,
        checkpoint,
        _pictures(options.place, cfg) if options.place.data_path else None,
        options.batch,
        options.machine,
        targets=options.target,
        replace=options.replace,
        check=options.check_replacements,
    )


def _pictures(place: LookedAtOptions, cfg: CfgNode) -> Tensor:
    """A sample of the pictures, preprocessed: [N, 3, S, S]. SwinQuantError if none can be read."""
    from swin_quant.data.loader import load_batches
    from swin_quant.data.preprocess import Preprocess
    from swin_quant.data.sampling import sample
    from swin_quant.data.sources import open_pictures

    opened = open_pictures(str(place.data_path), "val", zip_mode=place.zip)
    indices = sample(len(opened), min(place.pictures, len(opened)), cfg.SEED)
    (batch,) = load_batches(opened, Preprocess.from_config(cfg), [indices])
    if not len(batch.images):
        raise SwinQuantError(f"none of {len(indices)} pictures of ‹data_path› can be read")
    return batch.images
