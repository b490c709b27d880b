"""`sensitivity` in memory."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from swin_quant.base.distributed import World
from swin_quant.base.errors import UsageError
from swin_quant.cards.costs import SensitivityRecord
from swin_quant.checkpoint.range_bits import check_bits
from swin_quant.config.outputs import need_logits
from swin_quant.data.picture_set import PictureSet, Source, batches
from swin_quant.model import Model
from swin_quant.quant.policies import load_policy
from swin_quant.quant.policy import Policy
from swin_quant.report.costs import KINDS, CostRow, profile_table, rows_of, sensitivity_table
from swin_quant.report.table import ReportTable, html_table, terminal
from swin_quant.tasks.sensitivity import Sampling, measure, measure_batches, recorded_as

_WIDTH, _TOP = 140, 8


@dataclass(frozen=True)
class Costs:
    """What each node and group costs; printed, it is the table of `swin-quant sensitivity`."""

    record: SensitivityRecord

    def rows(self, kind: str = "node") -> list[CostRow]:
        """The groups of a kind (role, stage, block, layer, node), those first that cost most."""
        return rows_of(self.record, [kind])

    def __str__(self) -> str:
        return "\n".join(terminal(table, _WIDTH) for table in self._tables())

    def _repr_html_(self) -> str:
        return "".join(map(html_table, self._tables()))

    def _tables(self) -> list[ReportTable[Any]]:
        tables: list[ReportTable[Any]] = [sensitivity_table(self.record, KINDS, _TOP)]
        return [*tables, profile_table(self.record)] if self.record["profile"] else tables


def sensitivity(model: Model | nn.Module, pictures: Source, policy: str | Policy | None = None) -> Costs:
    """The loss with only a node quantized, and with all but it, for every node and group of the calibrated `model`.

    `policy` None is the model's own. `pictures` need no labels; of a place on disk 64 are taken, unless it says how
    many, by its seed and 1: another draw than the same seed calibrates by, which may share some. The result goes into
    the model's card as well. SwinQuantError where an enabled node has no range.
    """
    model = model if isinstance(model, Model) else Model(model)
    if model.card.config:
        need_logits(model.config, "sensitivity")
    chosen = load_policy(policy) if isinstance(policy, str) else policy or model.policy
    if chosen is None:
        raise UsageError(f"{model.name}: has no policy: name one, or calibrate the model")
    if model.is_calibrated:
        check_bits(model.module, model.card, [chosen], model.name)
    if isinstance(pictures, PictureSet):
        pictures = pictures.of_split("train")
        opened = pictures.open()
        count = pictures.count or min(Sampling.count, len(opened))
        sampling = Sampling(count, pictures.split or "", pictures.seed + 1)
        record = measure(model.module, chosen, opened, model.preprocess, sampling, World(device=model.device))
    else:
        found = measure_batches(model.module, chosen, _numbered(pictures, model))
        record = recorded_as(found, chosen, None)
    model.card = replace(model.card, sensitivity=record)
    return Costs(record)


def _numbered(source: Iterable[Any], model: Model) -> Iterator[tuple[int, Tensor]]:
    for number, batch in enumerate(batches(source, labelled=False, prepared=model.prepared)):
        yield number, batch.images.to(model.device)
