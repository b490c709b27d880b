"""The budget of a search, and its result: the policy as YAML, its table and verdict."""

import math
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import yaml

from swin_quant.backends.backend import Backend
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.base.files import atomic_write_bytes, finite
from swin_quant.base.progress import log
from swin_quant.cards.records import FloatLayerRecord, TriedPolicies, TriedRecord
from swin_quant.quant.distance import Loss
from swin_quant.quant.policy import load_policy
from swin_quant.report.nodes import Search
from swin_quant.report.verdict import search_verdict
from swin_quant.verbs.search_costs import Layer, Losses, without
from swin_quant.verbs.timing import Timer

_FEW = 100  # pictures times points: a sample of fewer may show no difference and still hide the drop
_LIMITS = {  # the words for each, and the largest number that says something
    "max_drop": ("expected drop of top-1 at most {:g} points", 100.0),
    "min_agreement": ("agreement at least {:g} %", 100.0),
    "min_sqnr": ("SQNR at least {:g} dB", math.inf),
    "max_ms": ("at most {:g} ms", math.inf),
}


@dataclass(frozen=True)
class Budget:
    """Limits of a policy's loss and latency; None: no limit. The drop counts with two standard errors.

    Args:
        max_drop: largest drop of top-1 accuracy, in points (default 0.1)
        min_agreement: smallest share of pictures with the same top-1 as float, in percent
        min_sqnr: smallest SQNR of the logits, in dB
        max_ms: largest latency of a batch on the engine, in milliseconds

    Raises:
        UsageError: A limit that no policy keeps, or that every policy keeps.
    """

    max_drop: float | None = None
    min_agreement: float | None = None
    min_sqnr: float | None = None
    max_ms: float | None = None

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            most = _LIMITS[name][1]
            if value is not None and not (0 <= value <= most and value < math.inf):
                raise UsageError(f"‹{name}› {value:g}: must be a number from 0 " + ("up", "to 100")[most < math.inf])

    @property
    def or_default(self) -> "Budget":
        """These limits; a drop of 0.1 points where none of the loss is given."""
        return self if replace(self, max_ms=None) != Budget() else replace(self, max_drop=0.1)

    def allows(self, loss: Loss) -> bool:
        return (
            (self.max_drop is None or loss.most_drop <= self.max_drop)
            and (self.min_agreement is None or loss.agreement >= self.min_agreement)
            and (self.min_sqnr is None or loss.sqnr_db >= self.min_sqnr)
        )

    def tell_if_few(self, pictures: int) -> None:
        """Warn where so many pictures may show no difference and still hide the drop."""
        if (drop := self.max_drop) and pictures * drop < _FEW:
            told = "%d pictures hardly tell a drop of %g points: give %d or more (‹pictures›)"
            log.warning(told, pictures, drop, math.ceil(_FEW / max(drop, 1e-6)))

    def __str__(self) -> str:
        return ", ".join(_LIMITS[name][0].format(value) for name, value in asdict(self).items() if value is not None)


def policy_file(folder: str | Path, name: str, engine: str) -> Path:
    """The file of the policy that is found for a model of that name."""
    return Path(folder) / f"{name}_auto_{engine}.yaml"


def write_found(
    timer: Timer, losses: Losses, left_float: Sequence[Layer], loss: Loss, budget: Budget, folder: str | Path
) -> Search:
    """Time the policy that was found and write it, with the reason of each layer in a comment."""
    base, found, engine = timer.base, without(timer.base, left_float), timer.backend.name
    base_ms, float_ms = timer.reference
    count = len(losses.nodes(found))
    ms = float_ms if not count else base_ms * timer.ratio(found) if left_float else base_ms
    measured = {base: (losses.confirm(base), base_ms), found: (loss, ms)}
    rows = [(one.name, len(losses.nodes(one)), *figures) for one, figures in measured.items()]
    rows.append(("float", 0, Loss(math.inf, 0.0, 100.0, 0.0), float_ms))
    file = policy_file(folder, timer.model.name, engine)
    description = (
        f"Found for {engine}, batch {timer.batch}: {budget}. It is {found.name}. Confirmed on {losses.pictures} "
        f"pictures{losses.split and ' of '}{losses.split}: {loss.figures}; {ms:.3f} ms."
    )
    text = yaml.safe_dump(replace(found, name=file.stem, description=description).to_dict(), sort_keys=False, width=110)
    for layer in left_float:
        text += f"# {layer.name} is float: {layer.sqnr_db:.1f} dB alone; int8 saves {layer.saved_ms:.4f} ms there\n"
    atomic_write_bytes(file, text.encode())
    log.info("policy: %s", file)
    policy = load_policy(str(file))
    record: TriedPolicies = {
        "engine": engine,
        "batch": timer.batch,
        "budget": str(budget),
        "met": budget.allows(loss) and (budget.max_ms is None or ms <= budget.max_ms),
        "pictures": losses.pictures,
        "tried": [
            TriedRecord(
                policy=name,
                nodes=nodes,
                loss=finite(one.record()),
                ms=time,
                found=name == found.name,
                front=not any(other.kl < one.kl and faster <= time for *_, other, faster in rows),
            )
            for name, nodes, one, time in sorted(rows, key=lambda row: row[-1])
        ],
        "left_float": [FloatLayerRecord(layer=one.name, sqnr_db=finite(one.sqnr_db), saved_ms=one.saved_ms)
                       for one in left_float],
        "cost_ms": ms - base_ms,
    }  # fmt: skip
    if count:
        record["policy_sha256"] = policy.sha256
    float_type = timer.options.float_type or timer.backend.float_form
    return Search(policy, file, record, search_verdict(record, file, str(timer.model.checkpoint), float_type))


def refuse_useless(found: Search, target: Backend, checkpoint: Path) -> None:
    """SwinQuantError where a search kept no budget, or left every layer float."""
    if not found:
        raise SwinQuantError(f"{found.unmet} ({found.verdict.summary})")
    if not next(one["nodes"] for one in found.record["tried"] if one["found"]):
        raise SwinQuantError(
            f"within the budget ({found.record['budget']}) every layer stays float: loosen it, or deploy the float "
            f"model: `swin-quant export {shlex.quote(str(checkpoint))} --for {target.name} --precision float`"
        )
