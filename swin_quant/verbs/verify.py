"""Compare an artifact with the checkpoint it was exported from, on real pictures: pass or fail for each engine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Annotated, Literal

from swin_quant.arguments import checked
from swin_quant.backends.artifact import Artifact
from swin_quant.backends.registry import engine_named
from swin_quant.base.arguments import Fields
from swin_quant.base.distributed import one_process, world_on
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.base.files import check_writable
from swin_quant.base.progress import log
from swin_quant.cards.card import RunCard, update
from swin_quant.cards.paths import card_path
from swin_quant.cards.records import VerificationRecord
from swin_quant.config.outputs import LOGITS, count_classes
from swin_quant.data.picture_set import PictureSet, Source, batches, resolve_source
from swin_quant.data.sampling import digest
from swin_quant.exported import (
    Exported,
    find_checkpoint,
    list_engine_names,
    load_engines,
    load_origin,
    open_subject,
    prepared_by,
    read_config,
)
from swin_quant.quant.watch import eval_mode
from swin_quant.report.engines import verification_table
from swin_quant.report.graph import IntegerProducts, integer_products, quantized_products
from swin_quant.report.printed import Printed
from swin_quant.report.table import ReportTable
from swin_quant.score.baseline import Baseline, engines_beside, unnamed_baseline
from swin_quant.score.difference import compare_batches, difference
from swin_quant.score.engine import EAGER, FAKE_QUANT, HALF_TYPES, Engine
from swin_quant.score.options import EngineOptions
from swin_quant.score.run_engines import Inferred, infer, infer_batches

PICTURES, BATCH = 32, 8
EXAMPLES = """swin-quant verify out/my_int8.onnx --data-path imagenet
swin-quant verify out/my_int8.onnx --engine openvino --images cat.jpg 'holiday/*.jpg'"""


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


@checked
def verify(
    artifact: Exported | str | Path,
    pictures: Annotated[Source | None, Fields(PictureSet, "pictures")] = None,
    engine: str | tuple[str, ...] | None = None,
    *,
    checkpoint: str | Path | None = None,
    threads: int | None = None,
    float_type: Literal["float32", "bfloat16", "float16"] | None = None,
    extension: tuple[str, ...] = (),
    device: Literal["auto", "cpu", "cuda"] = "auto",
) -> Verification:
    """Compare an artifact with the checkpoint that it was made from, on pictures without labels.

    A quantized artifact passes when its mean |delta of logits| against fake-quant is below the engine's tolerance, a
    float one when that against the float model is. The result goes into the artifact's run card. An artifact of a
    wrapped module is compared with the model in memory, or with the one that `artifact(file, module)` loads.

    Args:
        artifact: an exported file; its run card lies beside it
        pictures: A place on disk, of which 32 pictures are taken, evenly spread, or batches.
        engine: engines that run it (default: the one it was exported for, else all)
        checkpoint: the checkpoint that was exported (default: looked for)
        threads: threads of an engine (default: its own choice)
        float_type: type of float layers, where the engine chooses
        extension: openvino: libraries with operators of your own (docs/custom_operators.md)
        device: auto: a GPU if there is one

    Returns:
        A record for each engine; false where one failed. The command then ends with exit code 1.

    Raises:
        SwinQuantError: The checkpoint is not found, or an engine cannot run the file.
    """
    one_process("verify")
    found = open_subject(artifact)
    if not isinstance(found, Exported):
        raise UsageError(f"{found.name}: is a model, and `verify` compares an artifact with it: export it first")
    exported, world = found.artifact, world_on(device)
    names = list_engine_names(exported, (engine,) if isinstance(engine, str) else engine)
    check_writable(card_path(exported.file))  # which gets the records
    cfg = read_config(exported)
    origin, policies = load_origin(exported, cfg, find_checkpoint(exported, checkpoint), world, found.origin)
    source = resolve_source(PictureSet() if pictures is None else pictures)
    opened = source.with_default_split("val").open() if isinstance(source, PictureSet) else None
    policies = policies if is_quantized(exported.record["precision"]) else []
    is_given = origin.original is not None and not exported.card.has_own_weights
    baseline = Baseline(origin.original, whose=None) if is_given else unnamed_baseline(exported.card)
    references = engines_beside(origin.module, world.device, None, policies, baseline)
    options = EngineOptions(threads, float_type, world.device.type, extensions=extension)
    engines = load_engines(exported, names, options)
    everything = references | engines
    with eval_mode(origin.module):
        if isinstance(source, PictureSet) and opened is not None:
            inferred = infer(
                everything,
                opened,
                exported.preprocess,
                count_classes(cfg),
                batch_size=source.batch or BATCH,
                workers=source.workers or 0,
                count=source.count or PICTURES,
                max_unreadable=source.max_unreadable or 0.0,
                device=world.device,
            )
        else:
            given = batches(source, False, prepared_by(exported))  # type: ignore[arg-type]
            inferred = infer_batches(everything, given, count_classes(cfg), world.device)
    kind = exported.record["options"].get("float_type")
    keys = dict(zip(engines, names, strict=True))
    records = compare(engines, keys, references, inferred, kind, cfg.MODEL.OUTPUT_KIND == LOGITS)
    counts = _integer_products(exported, engines)
    records = [{**record, **counts.get(record["engine"], {})} for record in records]  # type: ignore[typeddict-item]
    update(card_path(exported.file), exported.card, lambda card: reduce(RunCard.with_verification, records, card))
    log.info("run card: %s", card_path(exported.file))
    return Verification(records, exported.file)


def _integer_products(artifact: Artifact, engines: Mapping[str, Engine]) -> dict[str, dict[str, int]]:
    """Engine -> the counts of its record, for an ONNX file with quantized products."""
    found = {}
    for engine in engines.values():
        if artifact.record["backend"] == "onnx" and "gemms" in engine.details:
            quantized = quantized_products(artifact.file, in_functions="extensions" not in engine.details)
            found[engine.name] = integer_products(quantized, engine.details["gemms"])
    return {
        name: {"int8_products": one.integer, "quantized_products": one.quantized}
        for name, one in found.items()
        if one.quantized
    }


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
