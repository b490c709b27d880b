"""Analyse a model before anything is quantized: operators, targets, shapes, precision risks, limits."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from torch import Tensor, nn

from swin_quant.arguments import checked
from swin_quant.base.arguments import Fields, Parameter
from swin_quant.base.distributed import one_process
from swin_quant.base.errors import UsageError
from swin_quant.config.sides import sides
from swin_quant.loading import ModelFile, model_or_shapes
from swin_quant.model import Model
from swin_quant.operators.analysis import Analysis, analyze_module
from swin_quant.report.graph import analysis_text, sections
from swin_quant.report.table import NARROW, Printed, ReportTable

EXAMPLES = """swin-quant analyze swin_tiny_patch4_window7_224.pth
swin-quant analyze --cfg swin_tiny_patch4_window7_224
swin-quant analyze my.pth --cfg my.yaml --check-replacements
swin-quant analyze out/my_calib.pth --replace roll gather --target tensorrt --json report.json"""


@dataclass(frozen=True)
class Analyzed(Printed):
    """The analysis of a model; printed, it is a report. `found` holds it as data."""

    found: Analysis
    in_pipe = NARROW

    def to_json(self) -> dict[str, Any]:
        """The analysis for JSON."""
        return self.found.to_dict()

    to_dict = to_json

    def text(self, width: int, color: bool = False) -> str:
        return analysis_text(self.found, width, color)

    def tables(self) -> list[ReportTable[Any]]:
        return [table for _, table, _ in sections(self.found) if table]


@checked
def analyze(
    model: Annotated[Model | nn.Module | ModelFile, Fields(ModelFile, "model", ("checkpoint",))],
    images: Annotated[Tensor | Sequence[int] | None, Parameter(parse=False)] = None,
    *,
    targets: Annotated[tuple[str, ...] | Sequence[str], Parameter(name="--target")] = (),
    replace: tuple[str, ...] = (),
    check_replacements: bool = False,
    batch: int = 1,
) -> Analyzed:
    """Analyse a model before anything is quantized: operators, targets, shapes.

    Args:
        model: One of ours, of timm's or of your own; a checkpoint; or a config, whose shapes need no weights.
        images: Preprocessed pictures [B, 3, H, W], which replacements are checked with; or their shape alone.
        targets: only these targets (default: all that are known)
        replace: replace these operators by equivalent ones first: roll, gather, ...
        check_replacements: run each equivalent replacement on the model and compare the outputs
        batch: pictures at a time

    Returns:
        The analysis, which prints as a report.

    Raises:
        SwinQuantError: A module cannot be traced; the message names it.
    """
    one_process("analyze")
    how: dict[str, Any] = {"targets": targets or (), "replace": replace, "check": check_replacements}
    if isinstance(model, ModelFile):
        if str(model.checkpoint).endswith(".onnx"):
            raise UsageError(f"{model.checkpoint}: is an ONNX file, which `swin-quant show` reads: give a checkpoint")
        cfg = model.config()
        if check_replacements and not model.opened:
            raise UsageError("--check-replacements runs the model: give a checkpoint")
        built = model_or_shapes(cfg, model.opened)
        made = (batch, built.in_chans, *sides(cfg.DATA.IMG_SIZE))
        return Analyzed(analyze_module(built, made, cfg.MODEL.NAME, **how))
    name = model.name if isinstance(model, Model) else type(model).__name__
    if images is None:
        if not isinstance(model, Model):
            what = "does not say the size of its pictures: give images, or their shape (1, 3, 224, 224)"
            raise UsageError(f"{name}: {what}")
        images = (batch, 3, *model.preprocess.sides)
    if isinstance(images, Tensor) and isinstance(model, Model):
        images = model.prepared(images)
    given, shape = (images, tuple(images.shape)) if isinstance(images, Tensor) else (None, tuple(images))
    if len(shape) != 4:
        raise UsageError(f"images of shape {shape}: must be [B, 3, H, W]")
    module = model.module if isinstance(model, Model) else model
    return Analyzed(analyze_module(module, shape, name, given, **how))
