"""Compare an artifact with the checkpoint it was exported from, on real pictures: pass or fail for each engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swin_quant.arguments import checked
from swin_quant.backends.registry import engine_named
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.base.files import check_writable
from swin_quant.base.progress import log
from swin_quant.cards.card import RunCard, update
from swin_quant.cards.paths import card_path
from swin_quant.cards.records import VerificationRecord
from swin_quant.cli import shared
from swin_quant.cli.output import Printed, tell
from swin_quant.config.outputs import LOGITS, classes_of
from swin_quant.report.table import ReportTable

if TYPE_CHECKING:
    from swin_quant.backends.artifact import Artifact
    from swin_quant.base.distributed import World
    from swin_quant.data.picture_set import Source
    from swin_quant.data.pictures import Pictures
    from swin_quant.exported import Exported
    from swin_quant.model import Model
    from swin_quant.score.engine import Engine
    from swin_quant.score.run_engines import Inferred

PICTURES = 64
EXAMPLES = """examples:
  swin-quant verify out/my_int8.onnx --data-path imagenet
  swin-quant verify out/my_int8.onnx --engine openvino --images cat.jpg 'holiday/*.jpg'

A quantized artifact passes when its mean |Δlogit| against fake-quant is below the engine's tolerance, a float one when
that against the float model is. Exit code 1 says that an engine failed."""


@dataclass(frozen=True)
class VerifyOptions:
    """The artifact to verify, the engines that run it, and the pictures."""

    artifact: shared.ArtifactFile
    checkpoint: shared.MadeFrom = None
    pictures: shared.Evenly = PICTURES
    engines: shared.EngineFlags = shared.EngineFlags()
    place: shared.PictureOptions = shared.PictureOptions()
    json: shared.Json = None
    device: shared.AnyDevice = "auto"


@dataclass(frozen=True)
class Verification(Printed):
    """How far the logits of an artifact are from its checkpoint's; printed, it is the table of `swin-quant verify`."""

    records: Sequence[VerificationRecord]

    @property
    def failures(self) -> list[str]:
        """A clause for each engine that is not within its tolerance; empty if all are."""
        return failures(self.records)

    def __bool__(self) -> bool:
        return not self.failures

    def tables(self) -> list[ReportTable[VerificationRecord]]:
        from swin_quant.report.engines import verification_table

        return [verification_table(self.records)]


@checked
def verify(
    exported: Exported | str | Path, pictures: Source, engine: str | None = None, *, device: str = "cpu"
) -> Verification:
    """Compare an artifact with the checkpoint that it was made from, on pictures; the result goes into its run card.

    `pictures` need no labels; of a place on disk 64 are taken, unless it says how many. `device`: cpu or cuda, torch's
    current GPU, of both. The artifact of a wrapped module is compared with the model in memory, or with the one
    that `artifact(file, module)` loads.
    """
    from swin_quant.base.distributed import world_on
    from swin_quant.data.picture_set import PictureSet, source_of
    from swin_quant.exported import Exported, subject_of

    found, source = subject_of(exported), source_of(pictures)
    if not isinstance(found, Exported):
        raise UsageError(f"{found.name}: is a model, and `verify` compares an artifact with it: export it first")
    engines = shared.EngineFlags((engine,) if engine else ())
    count = source.count if isinstance(source, PictureSet) else None
    shown = source.of_split("val").open if isinstance(source, PictureSet) else source
    options = VerifyOptions(str(found.file), pictures=count or PICTURES, engines=engines)
    return Verification(verify_artifact(found.artifact, shown, options, world_on(device), found.origin))


def verify_artifact(
    artifact: Artifact,
    pictures: Callable[[], Pictures] | Iterable[Any],
    options: VerifyOptions,
    world: World,
    origin: Model | None = None,
) -> list[VerificationRecord]:
    """Compare the artifact with its checkpoint, and keep the records in its run card; `failures` names the engines that
    failed.

    SwinQuantError where the checkpoint is not found. `pictures`: batches, or a function that opens them when everything
    else is in order; `origin`: the model of a wrapped module.
    """
    from swin_quant.data.picture_set import batches
    from swin_quant.data.pictures import Pictures
    from swin_quant.exported import (
        config_of,
        find_checkpoint,
        load_engines,
        load_origin,
        names_of_engines,
        prepared_by,
        preprocess_of,
    )
    from swin_quant.quant.watch import eval_mode
    from swin_quant.score.baseline import Baseline, engines_beside, unnamed_baseline
    from swin_quant.score.run_engines import infer, infer_batches

    place = options.place
    names = names_of_engines(artifact, options.engines.engine)
    check_writable(card_path(artifact.file))  # which gets the records
    cfg = config_of(artifact)
    checkpoint = find_checkpoint(artifact, options.checkpoint)
    origin, policies = load_origin(artifact, cfg, checkpoint, world, origin)
    shown = pictures() if callable(pictures) else pictures
    policies = policies if is_quantized(artifact.record["precision"]) else []
    is_given = origin.original is not None and not artifact.card.has_own_weights
    baseline = Baseline(origin.original, whose=None) if is_given else unnamed_baseline(artifact.card)
    references = engines_beside(origin.module, world.device, None, policies, baseline)
    engines = load_engines(artifact, names, options.engines.options(world.device.type))
    everything = references | engines
    with eval_mode(origin.module):
        if isinstance(shown, Pictures):
            inferred = infer(
                everything,
                shown,
                preprocess_of(artifact),
                classes_of(cfg),
                batch_size=place.batch,
                workers=place.workers,
                count=options.pictures,
                max_unreadable=place.max_unreadable,
                device=world.device,
            )
        else:
            given = batches(shown, False, prepared_by(artifact))
            inferred = infer_batches(everything, given, classes_of(cfg), world.device)
    float_type = artifact.record["options"].get("float_type")
    has_logits = cfg.MODEL.OUTPUT_KIND == LOGITS
    records = compare(engines, dict(zip(engines, names, strict=True)), references, inferred, float_type, has_logits)
    counts = _integer_products(artifact, engines)
    records = [{**record, **counts.get(record["engine"], {})} for record in records]  # type: ignore[typeddict-item]
    update(card_path(artifact.file), artifact.card, lambda card: reduce(RunCard.with_verification, records, card))
    return records


def _integer_products(artifact: Artifact, engines: Mapping[str, Engine]) -> dict[str, dict[str, int]]:
    """Engine -> the counts of its record, for an ONNX file with quantized products."""
    from swin_quant.report.graph import integer_products, quantized_products

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


def tolerance_of(engine: str, precision: str, float_type: str | None = None) -> float:
    """The mean |Δlogit| below which an artifact passes on the engine of that name.

    `precision` is the engine's (int8, int8+bfloat16, float16, ...), `float_type` what the artifact was exported in:
    weights and scales that were rounded to half stay so on an engine that computes in float32.
    """
    from swin_quant.score.engine import HALF_TYPES

    limits = engine_named(engine).tolerances
    if limits is None:
        raise SwinQuantError(f"engine {engine} says no tolerances: there is nothing to verify it against")
    base = limits.quantized if is_quantized(precision) else limits.float32
    is_half = float_type in HALF_TYPES or precision.rpartition("+")[2] in HALF_TYPES
    return max(base, limits.half) if is_half else base


def is_quantized(precision: str) -> bool:
    """Whether logits are to be compared with fake-quant's rather than the float model's."""
    from swin_quant.score.engine import HALF_TYPES

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
    from swin_quant.data.sampling import digest
    from swin_quant.score.difference import difference, difference_of_outputs
    from swin_quant.score.engine import EAGER, FAKE_QUANT

    records: list[VerificationRecord] = []
    logits = inferred.logits if has_logits else {}
    for key, engine in engines.items():
        wanted = [FAKE_QUANT, EAGER] if is_quantized(engine.precision) else [EAGER]
        found = [(label, reference) for label, reference in references.items() if reference.name in wanted]
        for label, reference in sorted(found, key=lambda pair: wanted.index(pair[1].name)):
            criterion = reference.name == wanted[0]
            tolerance = tolerance_of(keys[key], engine.precision, float_type) if criterion else None
            measured = (
                difference(logits[key], logits[label])
                if has_logits
                else difference_of_outputs(inferred.outputs[key], inferred.outputs[label])
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
    from swin_quant.report.graph import IntegerProducts

    counts = {
        record["engine"]: IntegerProducts(record["quantized_products"], record["int8_products"])
        for record in records
        if record.get("quantized_products")
    }
    return [
        f"is called int8, and {name} runs it in float: {found} (`swin-quant inspect` names the others)"
        for name, found in counts.items()
        if found.is_float
    ] + [
        f"{record['engine']}: mean |Δlogit| against {record['reference']} is {record['mean']:.4g}, "
        f"not below {record['tolerance']:g}"
        for record in records
        if record["passed"] is False
    ]


def verified(options: VerifyOptions, world: World) -> tuple[Artifact, list[VerificationRecord]]:
    """The artifact that options name, and how far it is from its checkpoint; nothing is printed."""
    from swin_quant.backends.open_artifact import open_artifact

    artifact = open_artifact(options.artifact)
    return artifact, verify_artifact(artifact, options.place.open, options, world)


def run(options: VerifyOptions, world: World) -> None:
    shared.one_process(world, "verify")
    artifact, records = verified(options, world)
    log.info("run card: %s", card_path(artifact.file))
    tell(options.json, Verification(records).show, records)
    refuse_failed(artifact, records)


def refuse_failed(artifact: Artifact, records: Sequence[VerificationRecord]) -> None:
    """SwinQuantError where an engine is not within its tolerance."""
    if failed := failures(records):
        raise SwinQuantError(f"{artifact.file}: verification failed: {'; '.join(failed)}")
