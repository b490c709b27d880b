"""`verify` and `predict`: does an artifact compute what its model computes, and what is in a picture?"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from swin_quant.base.distributed import world_on
from swin_quant.base.errors import UsageError
from swin_quant.cards.records import VerificationRecord
from swin_quant.data.named import NamedPictures
from swin_quant.data.picture_set import PictureSet
from swin_quant.exported import Exported
from swin_quant.model import Model
from swin_quant.quant.eval_mode import eval_mode
from swin_quant.report.table import html_table, terminal
from swin_quant.report.verification import table_of
from swin_quant.score.options import EngineOptions
from swin_quant.tasks.predict import Guess, answering_artifact, answering_model
from swin_quant.tasks.predict import predict as answers
from swin_quant.tasks.verify import Verifying, failures, verify_artifact

_WIDTH = 140


@dataclass(frozen=True)
class Verification:
    """How far the logits of an artifact are from its checkpoint's; printed, it is the table of `swin-quant verify`."""

    records: Sequence[VerificationRecord]

    @property
    def failures(self) -> list[str]:
        """What is not within its tolerance, in words; empty where all is well."""
        return failures(list(self.records))

    def __bool__(self) -> bool:
        return not self.failures

    def __str__(self) -> str:
        return terminal(table_of(self.records), _WIDTH)

    def _repr_html_(self) -> str:
        return html_table(table_of(self.records))


def verify(exported: Exported, pictures: PictureSet, engine: str | None = None, *, device: str = "cpu") -> Verification:
    """Compare an artifact with the checkpoint that it was made from, on pictures; the result goes into its run card.

    `device`: cpu or cuda, torch's current GPU, of both. UsageError for pictures that are nowhere on disk: a run card
    says which they were.
    """
    if not isinstance(pictures, PictureSet):
        raise UsageError("pictures: `verify` compares on pictures of a place on disk: give sq.pictures(PLACE)")
    count = pictures.count or Verifying.count
    how = Verifying([engine] if engine else None, EngineOptions(device=device), count=count)
    return Verification(verify_artifact(exported.artifact, pictures.open, how, world_on(device)))


def predict(
    model: Model | Exported,
    images: str | Path | Sequence[str | Path],
    top: int = 5,
    engine: str | None = None,
    *,
    device: str = "cpu",
) -> dict[str, list[Guess]]:
    """The `top` most probable classes of each picture: files, folders or patterns. What cannot be read is left out.

    `device`: that of an artifact's engine, cpu or cuda, torch's current GPU; a model runs where it is.
    """
    places = [images] if isinstance(images, (str, Path)) else list(images)
    network = [] if isinstance(model, Exported) else [model.module]
    if isinstance(model, Exported):
        by = answering_artifact(model.artifact, [engine] if engine else None, EngineOptions(device=device))
    elif engine:
        raise UsageError(f"{model.name}: engine {engine} runs artifacts: export the model first")
    else:
        policies = [model.policy] if model.policy and model.is_calibrated else []
        how = (model.preprocess, model.classes, policies)
        by = answering_model(model.module, model.name, *how, names=model.class_names)
    with eval_mode(*network):
        return answers(by, NamedPictures(places), top).answers
