"""`align`: where do two models, artifacts or dumps part?"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeAlias

from swin_quant.base.distributed import World, world_on
from swin_quant.data.picture_set import PictureSet, batches
from swin_quant.data.prepared import Prepared
from swin_quant.exported import Exported
from swin_quant.model import Model
from swin_quant.quant.eval_mode import eval_mode
from swin_quant.report.alignment import table_of
from swin_quant.report.table import html_table, terminal
from swin_quant.score.alignment import Differences
from swin_quant.score.options import EngineOptions
from swin_quant.tasks import align as task

_WIDTH = 140
Sided: TypeAlias = "Model | Exported | str | Path"


class Alignment(Differences):
    """How far two sides are apart, tensor by tensor; printed, it is the table of `swin-quant align`."""

    def __str__(self) -> str:
        return terminal(table_of(self), _WIDTH)

    def _repr_html_(self) -> str:
        return html_table(table_of(self))


def align(
    a: Sided,
    b: Sided,
    images: PictureSet | Iterable[Any] = (),
    *,
    engine: str | None = None,
    below: float | None = None,
    device: str = "cpu",
) -> Alignment:
    """Compare two sides layer by layer: `Model`s (quantized if calibrated), exported artifacts (on `engine`), or the
    place of a checkpoint, an artifact or a dump (.npz, or a folder of .npy).

    `device`: cpu or cuda, torch's current GPU, of artifacts and places; a model runs where it is.

    `images`: pictures, or batches of tensors [B, 3, H, W]; a dump that holds `images` brings its own. The rows are in
    the order computed; `first` is the first tensor whose SQNR is below `below` dB (default: 60 of two float sides, 30
    of two quantized ones, 15 of one of each).
    """
    sides = _side(a, engine, device), _side(b, engine, device)
    with eval_mode(*(each.module for each in (a, b) if isinstance(each, Model))):
        if isinstance(images, PictureSet):
            opened = images.open()
            count = images.count or len(opened)
            found = task.batches_of(opened, task.preprocessing_of(*sides), count, 8)
            return _printed(task.align(*sides, (batch for batch, _ in found), below))
        known = next((side.preprocess for side in sides if side.preprocess), None)
        given = batches(images, labelled=False, prepared=Prepared(known))
        return _printed(task.align(*sides, (batch.images for batch in given), below))


def _printed(found: Differences) -> Alignment:
    return Alignment(found.a, found.b, found.rows, found.below, found.pictures, found.only)


def _side(each: Sided, engine: str | None, device: str) -> task.Side:
    if isinstance(each, Exported):
        return task.of_artifact(each.artifact, engine, EngineOptions(device=device))
    if isinstance(each, Model):
        policies = [each.policy] if each.policy and each.is_calibrated else []
        preprocess = each.preprocess if each.card.preprocess else None
        return task.of_model(each.module, policies, World(device=each.device), each.name, preprocess)
    return task.side_of(each, options=EngineOptions(device=device), world=world_on(device))
