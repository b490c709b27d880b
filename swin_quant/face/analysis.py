"""`analyze` in memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from swin_quant.base.errors import UsageError
from swin_quant.model import Model
from swin_quant.operators.analysis import Analysis
from swin_quant.report.analyze import analysis_text, sections
from swin_quant.report.table import html_table
from swin_quant.tasks.analyze import MACHINE, analyze_module

_WIDTH = 100


@dataclass(frozen=True)
class Analyzed:
    """What is known of a model; printed, it is the report of `swin-quant analyze`. `found` has all of it as data."""

    found: Analysis

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return self.found.to_dict()

    def __str__(self) -> str:
        return analysis_text(self.found, _WIDTH)

    def _repr_html_(self) -> str:
        return "".join(html_table(section.table) for section in sections(self.found) if section.table)


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

    `images` [B, 3, H, W], preprocessed, are looked at for risks; a shape alone is enough where weights are; None is one
    picture of a model that says how large its pictures are. SwinQuantError names the module that cannot be traced.
    """
    name = model.name if isinstance(model, Model) else type(model).__name__
    if images is None:
        if not isinstance(model, Model):
            raise UsageError(f"{name}: of what size are its pictures? Give images, or their shape (1, 3, 224, 224)")
        images = (1, 3, model.preprocess.size, model.preprocess.size)
    pictures = images if isinstance(images, Tensor) else None
    shape = tuple(images.shape) if isinstance(images, Tensor) else tuple(images)
    if len(shape) != 4:
        raise UsageError(f"images of shape {shape}: must be [B, 3, H, W]")
    if pictures is not None and isinstance(model, Model):
        model.prepared(pictures)
    module = model.module if isinstance(model, Model) else model
    return Analyzed(
        analyze_module(
            module, shape, name, pictures, machine=machine, targets=targets, replace=replace, check=check_replacements
        )  # fmt: skip
    )
