"""The options of `search`: its budget, what is timed, the pictures; and whether such a search was done before."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from swin_quant.base.errors import UsageError
from swin_quant.base.progress import log
from swin_quant.cli import shared
from swin_quant.cli.flags import Flag, Rare
from swin_quant.quant import SEARCHED_ON

if TYPE_CHECKING:
    from swin_quant.backends.backend import Backend
    from swin_quant.cards.card import RunCard
    from swin_quant.quant.distance import Loss
    from swin_quant.quant.policy import Policy

MAX_DROP = 0.1  # points that a policy may lose, where no budget is given
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

    UsageError for a limit that no policy keeps, or that every policy keeps.
    """

    TITLE = "budget"
    max_drop: Annotated[float | None, Flag(f"expected drop of top-1 accuracy (default {MAX_DROP})", "POINTS")] = None
    min_agreement: Annotated[float | None, Rare("top-1 agreement with float", "PERCENT")] = None
    min_sqnr: Annotated[float | None, Rare("SQNR of the logits", "DB")] = None
    max_ms: Annotated[float | None, Rare("latency of a batch on the engine", "MS")] = None

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            most = _LIMITS[name][1]
            if value is not None and not (0 <= value <= most and value < math.inf):
                raise UsageError(f"‹{name}› {value:g}: must be a number from 0 " + ("up", "to 100")[most < math.inf])

    @property
    def or_default(self) -> Budget:
        """These limits; a drop of `MAX_DROP` where none of the loss is given."""
        return self if replace(self, max_ms=None) != Budget() else replace(self, max_drop=MAX_DROP)

    def allows(self, loss: Loss) -> bool:
        return (
            (self.max_drop is None or loss.most_drop <= self.max_drop)
            and (self.min_agreement is None or loss.agreement >= self.min_agreement)
            and (self.min_sqnr is None or loss.sqnr_db >= self.min_sqnr)
        )

    def tell_if_few(self, pictures: int) -> None:
        """Warn where so many pictures may show no difference and still hide the drop."""
        if (drop := self.max_drop) and pictures * drop < _FEW:
            needed = math.ceil(_FEW / max(drop, 1e-6))
            log.warning(
                "%d pictures hardly tell a drop of %g points: give %d or more (‹pictures›)", pictures, drop, needed
            )

    def __str__(self) -> str:
        return ", ".join(_LIMITS[name][0].format(value) for name, value in asdict(self).items() if value is not None)


@dataclass(frozen=True)
class TimingOptions:
    """How policies are timed on an engine."""

    TITLE = "timing"
    threads: Annotated[int | None, Rare("threads of the engine (default: its own choice)", "N")] = None
    float_type: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        Rare("type of float layers (default float32; GPUs float16)"),
    ] = None


@dataclass(frozen=True)
class MeasuredOptions(shared.LoadingOptions):
    """The pictures on which losses are measured, and the batch that is timed."""

    batch: Annotated[int | None, Flag("pictures of a batch that is timed (default 1)", "N")] = None
    pictures: Annotated[int, Flag("how many; a quarter chooses, the others confirm", "N")] = SEARCHED_ON
    split: Annotated[str, Flag("pictures to draw them from")] = "train"

    def keys(self) -> dict[str, Any]:
        return {key: value for key, value in super().keys().items() if key != "DATA.BATCH_SIZE"}


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """Which checkpoint a policy is searched for, on which engine, and within which budget."""

    checkpoint: shared.Calibrated = None
    engine: Annotated[str, Flag("engine that is timed", "NAME")]
    model: shared.ModelOptions = shared.ModelOptions()
    budget: Budget = Budget()
    data: MeasuredOptions = MeasuredOptions()
    policy: shared.PolicyOptions = shared.PolicyOptions()
    timing: TimingOptions = TimingOptions()
    run: shared.RunOptions = shared.RunOptions()
    output: shared.Output = None
    json: shared.Json = None


def timed_backend(engine: str, device: str) -> Backend:
    """The backend of an engine that is timed on a device. UsageError for another, and one that is not installed."""
    from swin_quant.backends.registry import targets

    known = {name: one for name, one in targets().items() if one.runs_its_export and one.is_fast_on(device)}
    if engine not in known:
        raise UsageError(f"‹engine› {engine}: latency is measured on {', '.join(known)}")
    if not known[engine].is_installed:
        raise UsageError(f"‹engine› {engine}: is not installed: {known[engine].remedy}")
    return known[engine]


def policy_file(folder: str | Path, name: str, engine: str) -> Path:
    """The file of the policy that is found for a model of that name."""
    return Path(folder) / f"{name}_auto_{engine}.yaml"


def found_before(card: RunCard | None, asked: SearchOptions, file: Path) -> Policy | None:
    """The policy that an earlier search within the same budget wrote to `file`; None where there is none."""
    from swin_quant.quant.policy import load_policy

    key = asked.engine, asked.data.batch or 1, str(asked.budget.or_default)
    known = [one for one in card.searches if (one["engine"], one["batch"], one["budget"]) == key] if card else []
    policy = load_policy(str(file)) if known and known[-1]["met"] and file.is_file() else None
    return policy if policy and policy.sha256 == known[-1].get("policy_sha256") else None
