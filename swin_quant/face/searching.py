"""`search` in memory."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from swin_quant.base.errors import UsageError
from swin_quant.base.files import ensure_writable_dir
from swin_quant.base.progress import log
from swin_quant.data.picture_set import PictureSet, Source, batches
from swin_quant.data.prepared import Prepared
from swin_quant.model import Model
from swin_quant.quant.names import SEARCHED_ON
from swin_quant.quant.policies import load_policy
from swin_quant.quant.policy import Policy, apply_policy
from swin_quant.quant.search import Budget, SearchResult, TriedPolicy
from swin_quant.report.costs import search_table
from swin_quant.report.table import ReportTable, html_table, terminal
from swin_quant.score.options import EngineOptions
from swin_quant.tasks.measured_on import MeasuredOn, of_pictures
from swin_quant.tasks.measuring import Measuring
from swin_quant.tasks.search import PolicySearch, search_record
from swin_quant.tasks.search import search as find
from swin_quant.tasks.sensitivity import Sampling
from swin_quant.verbs.export import file_of, refuse_changed

_WIDTH = 140


@dataclass(frozen=True)
class Search:
    """What a search found; false where the budget cannot be met. Printed, it is the table of `swin-quant search`."""

    asked: PolicySearch
    result: SearchResult

    @property
    def policy(self) -> Policy:
        """The fastest within the budget, or the best there was; `file` says why each of its layers stays float."""
        return self.result.policy

    @property
    def file(self) -> Path:
        """The policy's YAML."""
        return self.result.file

    @property
    def tried(self) -> tuple[TriedPolicy, ...]:
        """All that was measured: loss, and milliseconds of a batch (None where no latency is); the fastest first."""
        return self.result.candidates

    @property
    def front(self) -> tuple[TriedPolicy, ...]:
        """Those than which none is faster and as near to float."""
        return tuple(one for one in self.tried if one.on_front)

    def __bool__(self) -> bool:
        return self.result.met

    def __str__(self) -> str:
        return terminal(self._table(), _WIDTH)

    def _repr_html_(self) -> str:
        return html_table(self._table())

    def _table(self) -> ReportTable[TriedPolicy]:
        return search_table(self.result, self.asked.limits, f"{self.asked.of.engine}, batch {self.asked.of.batch}")


def search(
    model: Model,
    pictures: Source,
    engine: str = "openvino",
    folder: str | Path = "out",
    policy: str | Policy | None = None,
    *,
    max_drop: float | None = None,
    min_agreement: float | None = None,
    min_sqnr: float | None = None,
    max_ms: float | None = None,
    batch: int = 1,
    threads: int | None = None,
    float_type: str | None = None,
    device: str = "cpu",
    rounds: int = 5,
    seconds: float = 0.5,
) -> Search:
    """Find the policy that keeps a budget at the least latency on `engine`, as `swin-quant search` does, and apply it.

    The layers of `policy` are switched, None: the engine's best. `max_drop`: points of top-1 expected to be lost,
    `min_agreement`: percent, `min_sqnr`: dB, `max_ms`: of a `batch`. `pictures` need no labels; of a place on disk
    1,024 are taken, unless it says how many, by its seed and 1: another draw than the same seed calibrates by,
    which may share some. Of training pictures, and of others that no split is
    named of, the drop counts twice. The policy, its
    reasons and what was measured lie in `folder`, where a search that was cut off goes on; a model that is in no
    file yet is saved there first. Where the budget cannot be met, the model keeps its policy, and a warning says
    so. UsageError for a model that is not calibrated, and for an engine whose latency cannot be measured here; for
    "fastertransformer" the mode is found that keeps the budget and leaves the fewest nodes float, without latency.
    """
    if not model.is_calibrated:
        raise UsageError(f"{model.name}: is a float model: calibrate it first")
    refuse_changed(model)
    base = load_policy(policy) if isinstance(policy, str) else policy
    options = EngineOptions(threads=threads, float_type=float_type, device=device)
    if isinstance(pictures, PictureSet):
        pictures = pictures.of_split("train")
    sampling = _sampling(pictures)
    of = Measuring(model.config, "", engine, Path(folder), base, batch, sampling, options, rounds, seconds)
    asked = PolicySearch(of, Budget(max_drop, min_agreement, min_sqnr), max_ms)  # what is wrong is said before work
    if isinstance(pictures, PictureSet):
        shown = of_pictures(pictures.open(), sampling, model.preprocess)._replace(place=Path(pictures.path).name)
    else:
        shown = _of_batches(pictures, model.prepared)
    checkpoint = str(file_of(model, ensure_writable_dir(folder)))
    asked = replace(asked, of=replace(of, checkpoint=checkpoint, pictures=shown))
    result = find(asked)
    model.card = model.card.with_search(search_record(asked, result))
    if result.met:
        apply_policy(model.module, result.policy)
        model.card = replace(model.card, policy=result.policy.to_dict())
    else:
        log.warning("the budget cannot be met (%s): the best that was found is %s; the model keeps its policy",
                    asked.limits, result.file)  # fmt: skip
    return Search(asked, result)


def _sampling(pictures: Source) -> Sampling:
    """The split is empty where nobody said of which pictures are."""
    if not isinstance(pictures, PictureSet):
        return Sampling(split="")
    return Sampling(pictures.count or SEARCHED_ON, pictures.split or "", pictures.seed + 1)


def _of_batches(source: Iterable[Any], prepared: Prepared) -> MeasuredOn:
    """They have no names: their values tell them from others."""
    seen, images = hashlib.sha256(), list[Tensor]()
    for batch in batches(source, labelled=False, prepared=prepared):
        images.append(batch.images.cpu())
        seen.update(images[-1].numpy(force=True).tobytes())
    if not images:
        raise UsageError("pictures: there is no batch to measure with")
    return MeasuredOn(images, [seen.hexdigest()])
