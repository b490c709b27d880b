"""How far an artifact is from its checkpoint: the records of a verification, and whether they pass."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from swin_quant.backends.registry import engine_named
from swin_quant.base.errors import SwinQuantError
from swin_quant.cards.records import VerificationRecord
from swin_quant.data.sampling import digest
from swin_quant.report.engines import verification_table
from swin_quant.report.graph import IntegerProducts
from swin_quant.report.printed import Printed
from swin_quant.report.table import ReportTable
from swin_quant.score.difference import compare_batches, difference
from swin_quant.score.engine import EAGER, FAKE_QUANT, HALF_TYPES, Engine
from swin_quant.score.run_engines import Inferred


@dataclass(frozen=True)
class Verification(Printed):
    """How far the logits of an artifact are from its checkpoint's; printed, it is a table."""

    records: Sequence[VerificationRecord]
    file: Path

    @property
    def failures(self) -> list[str]:
        """A clause for each engine that is not within its tolerance; empty if all are."""
        return failures(self.records)

    def __bool__(self) -> bool:
        return not self.failures

    def check(self) -> None:
        """SwinQuantError where an engine is not within its tolerance."""
        if self.failures:
            raise SwinQuantError(f"{self.file}: verification failed: {'; '.join(self.failures)}")

    def tables(self) -> list[ReportTable[VerificationRecord]]:
        return [verification_table(self.records)]

    def to_json(self) -> Sequence[VerificationRecord]:
        """The records, as in the run card."""
        return self.records


def get_tolerance(engine: str, precision: str, float_type: str | None = None) -> float:
    """The mean |Δlogit| below which an artifact passes on the engine of that name.

    `precision` is the engine's (int8, int8+bfloat16, float16, ...), `float_type` what the artifact was exported in:
    weights and scales that were rounded to half stay so on an engine that computes in float32.
    """
    limits = engine_named(engine).tolerances
    if limits is None:
        raise SwinQuantError(f"engine {engine} says no tolerances: there is nothing to verify it against")
    base = limits.quantized if is_quantized(precision) else limits.float32
    is_half = float_type in HALF_TYPES or precision.rpartition("+")[2] in HALF_TYPES
    return max(base, limits.half) if is_half else base


def is_quantized(precision: str) -> bool:
    """Whether logits are to be compared with fake-quant's rather than the float model's."""
    return precision != "float32" and precision not in HALF_TYPES


def compare(
    engines: Mapping[str, Engine],
    keys: Mapping[str, str],
    references: Mapping[str, Engine],
    inferred: Inferred,
    float_type: str | None = None,
    has_logits: bool = True,
) -> list[VerificationRecord]:
    """A record for each engine and reference, the one that is the criterion first and with its tolerance.

    That is fake-quant for a quantized artifact, which is then compared with float32 as well, float32 for a float one.

    `keys` gives an engine's name by its key in `engines`; `inferred` has the logits of all by their keys;
    `float_type` is that of the artifact; `has_logits`: outputs are compared as logits.
    """
    records: list[VerificationRecord] = []
    logits = inferred.logits if has_logits else {}
    for key, engine in engines.items():
        wanted = [FAKE_QUANT, EAGER] if is_quantized(engine.precision) else [EAGER]
        found = [(label, reference) for label, reference in references.items() if reference.name in wanted]
        for label, reference in sorted(found, key=lambda pair: wanted.index(pair[1].name)):
            criterion = reference.name == wanted[0]
            tolerance = get_tolerance(keys[key], engine.precision, float_type) if criterion else None
            measured = (
                difference(logits[key], logits[label])
                if has_logits
                else compare_batches(inferred.outputs[key], inferred.outputs[label])
            )
            records.append(
                {
                    "engine": engine.name,
                    "precision": engine.precision,
                    "policy": engine.policy,
                    "reference": f"{reference.name} {label}" if reference.name == EAGER else reference.name,
                    "pictures": len(inferred.names),
                    "pictures_sha256": digest(inferred.names),
                    "tolerance": tolerance,
                    "passed": measured["mean"] < tolerance if tolerance is not None else None,
                    **measured,  # type: ignore[typeddict-item]
                }
            )
    return records


def failures(records: Sequence[VerificationRecord]) -> list[str]:
    """A clause for each engine that runs quantized products in float, and each record beyond its tolerance."""
    counts = {
        record["engine"]: IntegerProducts(record["quantized_products"], record["int8_products"])
        for record in records
        if record.get("quantized_products")
    }
    return [
        f"is called int8, and {name} runs it in float: {found} (`swin-quant show` names the others)"
        for name, found in counts.items()
        if found.is_float
    ] + [
        f"{record['engine']}: mean |Δlogit| against {record['reference']} is {record['mean']:.4g}, "
        f"not below {record['tolerance']:g}"
        for record in records
        if record["passed"] is False
    ]
