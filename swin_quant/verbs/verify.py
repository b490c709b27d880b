"""Compare an artifact with the checkpoint it was exported from, on real pictures: pass or fail for each engine."""

from collections.abc import Mapping
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Annotated, Any, Literal

from torch import Tensor

from swin_quant.arguments import checked
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
    is_checkpoint,
    list_engine_names,
    load_engines,
    load_origin,
    open_subject,
    prepared_by,
    read_config,
)
from swin_quant.model import Model
from swin_quant.quant.watch import eval_mode
from swin_quant.report.engines import Verification
from swin_quant.report.graph import integer_products, quantized_products
from swin_quant.score.baseline import Baseline, engines_beside, unnamed_baseline
from swin_quant.score.engine import EAGER, FAKE_QUANT, HALF_TYPES, Engine, is_float
from swin_quant.score.options import EngineOptions
from swin_quant.score.run_engines import Inferred, compare_batches, difference, infer, infer_batches

PICTURES, BATCH = 16, 8  # the mean difference on 16 of Swin-T is within 1 % of that on 128
EXAMPLES = """swin-quant verify out/my_int8.onnx --data-path imagenet
swin-quant verify out/my_int8.onnx --engine openvino --images cat.jpg 'holiday/*.jpg'"""


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
    float one when that against the float model is. Where the mean |logit| is below 1, the tolerance is multiplied by
    it. The result goes into the artifact's run card. An artifact of a wrapped module is compared with the model in
    memory, or with the one that `artifact(file, module)` loads.

    Args:
        artifact: an exported file; its run card lies beside it
        pictures: A place on disk, of which 16 are taken, evenly spread, or batches.
        engine: engines that run it (default: the one it was exported for, else all)
        checkpoint: the checkpoint that was exported (default: searched for)
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
    is_file = isinstance(artifact, str | Path) and Path(artifact).is_file()
    is_model = is_file and is_checkpoint(str(artifact))  # which is refused unread
    found = artifact if is_model else open_subject(artifact)
    if not isinstance(found, Exported):
        name = found.name if isinstance(found, Model) else found
        raise UsageError(f"{name}: is a model, and `verify` compares an artifact with it: export it first")
    exported, world = found.artifact, world_on(device)
    names = list_engine_names(exported, (engine,) if isinstance(engine, str) else engine)
    check_writable(card_path(exported.file))  # which gets the records
    cfg = read_config(exported)
    origin, policies = load_origin(exported, cfg, find_checkpoint(exported, checkpoint), world, found.origin)
    source = resolve_source(pictures)
    opened = source.with_default_split("val").open() if isinstance(source, PictureSet) else None
    policies = [] if is_float(exported.record["precision"]) else policies
    is_given = origin.original is not None and not exported.card.has_own_weights
    baseline = Baseline(origin.original, whose=None) if is_given else unnamed_baseline(exported.card)
    references = engines_beside(origin.module, world.device, None, policies, baseline)
    options = EngineOptions(threads, float_type, world.device.type, extensions=extension)
    engines = load_engines(exported, names, options)
    everything = references | engines
    as_loaded = {key: replace(one, run=one.run_open) for key, one in engines.items() if one.run_open}
    classes, with_open_shapes = count_classes(cfg), dict[str, list[Any]]()
    with eval_mode(origin.module):
        if isinstance(source, PictureSet) and opened is not None:
            how = replace(source, batch=source.batch or BATCH, count=source.count or PICTURES)
            given = opened, exported.preprocess, classes, how, world.device
            inferred = infer(everything, *given)
            try:
                with_open_shapes = infer(as_loaded, *given).outputs if as_loaded else {}
            except SwinQuantError as error:
                log.warning("with open shapes, as other programs load it: %s", error)
        else:
            some = batches(source, False, prepared_by(exported))  # type: ignore[arg-type]
            inferred = infer_batches(everything, some, classes, world.device)
    kind = exported.record["options"].get("float_type")
    keys = dict(zip(engines, names, strict=True))
    has_logits = cfg.MODEL.OUTPUT_KIND == LOGITS
    records = compare(engines, keys, references, inferred, kind, has_logits)
    if with_open_shapes and all(record["passed"] is not False for record in records):
        found_open = replace(inferred, outputs=inferred.outputs | with_open_shapes)
        for record in compare(as_loaded, keys, references, found_open, kind, has_logits):
            if record["passed"] is False:
                told = "%s: %s computes something else (mean |Δlogit| %.3g) where shapes are left open: fix them "
                told += "before it compiles the file, as this command and packages do"
                log.warning(told, exported.file, record["engine"], record["mean"])
    for loaded in engines.values():  # of an ONNX file with quantized products
        if exported.record["backend"] == "onnx" and "gemms" in loaded.details:
            products = quantized_products(exported.file, in_functions="extensions" not in loaded.details)
            counts = integer_products(products, loaded.details["gemms"])
            for record in records if counts.quantized else []:
                if record["engine"] == loaded.name:
                    record |= {"int8_products": counts.integer, "quantized_products": counts.quantized}
    update(card_path(exported.file), exported.card, lambda card: reduce(RunCard.with_verification, records, card))
    log.info("run card: %s", card_path(exported.file))
    cautions = [loaded.details["caution"] for loaded in engines.values() if loaded.details.get("caution")]
    return Verification(records, exported.file, cautions)


def get_tolerance(engine: str, precision: str, float_type: str | None = None) -> float:
    """The mean |Δlogit| below which an artifact passes on the engine of that name.

    `precision` is the engine's (int8, int8+bfloat16, float16, ...), `float_type` what the artifact was exported in:
    weights and scales that were rounded to half stay so on an engine that computes in float32.
    """
    limits = engine_named(engine).tolerances
    if limits is None:
        raise SwinQuantError(f"engine {engine} says no tolerances: there is nothing to verify it against")
    base = limits.float32 if is_float(precision) else limits.quantized
    is_half = float_type in HALF_TYPES or precision.rpartition("+")[2] in HALF_TYPES
    return max(base, limits.half) if is_half else base


def magnitude(logits: Tensor) -> float:
    """The mean |logit|, at most 1: limits are absolute, but small logits, as of random weights, need smaller ones."""
    return min(1.0, logits.abs().double().mean().item())


def compare(
    engines: Mapping[str, Engine],
    keys: Mapping[str, str],
    references: Mapping[str, Engine],
    inferred: Inferred,
    float_type: str | None = None,
    has_logits: bool = True,
) -> list[VerificationRecord]:
    """A record for each engine and reference, the one that is the criterion first and with its tolerance.

    The criterion is fake-quant for a quantized artifact, which is then compared with float32 as well, float32 for a
    float one. `keys` gives an engine's name by its key in `engines`; `float_type` is that of the artifact.
    """
    records: list[VerificationRecord] = []
    logits = inferred.logits if has_logits else {}
    for key, engine in engines.items():
        wanted = [EAGER] if is_float(engine.precision) else [FAKE_QUANT, EAGER]
        found = [(label, reference) for label, reference in references.items() if reference.name in wanted]
        for label, reference in sorted(found, key=lambda pair: wanted.index(pair[1].name)):
            is_criterion = reference.name == wanted[0]
            tolerance = get_tolerance(keys[key], engine.precision, float_type) if is_criterion else None
            if has_logits:
                measured = difference(logits[key], logits[label])
                tolerance = tolerance and tolerance * magnitude(logits[label])
            else:
                measured = compare_batches(inferred.outputs[key], inferred.outputs[label])
            record: VerificationRecord = {
                "engine": engine.name,
                "precision": engine.precision,
                "policy": engine.policy,
                "reference": f"{reference.name} {label}" if reference.name == EAGER else reference.name,
                "pictures": len(inferred.names),
                "pictures_sha256": digest(inferred.names),
                "tolerance": tolerance,
                "passed": measured["mean"] < tolerance or not measured["mean"] if tolerance is not None else None,
                **measured,  # type: ignore[typeddict-item]
            }
            records.append(record)
    return records
