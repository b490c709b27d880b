"""An artifact of a wrapped module beside fake-quant, on its engine: it counts as done if it loses no more."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from swin_quant.backends import engine_loader
from swin_quant.backends.artifact import Artifact
from swin_quant.backends.backend import Backend
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.base.progress import log
from swin_quant.cards.card import update
from swin_quant.cards.paths import card_path
from swin_quant.cards.records import VerificationRecord
from swin_quant.config.outputs import LOGITS, say
from swin_quant.exported import choose_engine
from swin_quant.model import Model
from swin_quant.models.classifier import Classifier
from swin_quant.quant.distance import decibels, noise
from swin_quant.quant.policy import policy_from_dict
from swin_quant.quant.quantizer import named_nodes
from swin_quant.quant.watch import watching
from swin_quant.score.engine import HALF_TYPES, Engine, torch_engines
from swin_quant.score.options import EngineOptions
from swin_quant.score.run_engines import compare_batches, difference
from swin_quant.verbs.verify import get_tolerance, magnitude

MARGIN_DB = 3.0
EXACT_DB, HALF_DB = 60.0, 40.0  # left by rounding in float32 and in half types: no engine has to have more
INPUTS, VALUES = 16, 1 << 22  # at most: a few seconds of a large network


class Likeness(NamedTuple):
    """An output on an engine and in fake-quant: SQNR in dB against float.

    `spare_db`: the distance of the engine above what fake-quant less the margin and chance allow; negative: it fails.
    """

    output: str
    sqnr_db: float
    fake_quant_db: float
    spare_db: float


def compared(artifact: Artifact, model: Model, module: Classifier, target: Backend) -> Artifact:
    """`artifact`, made of `module`, with the comparison in its card; a line says the result.

    SwinQuantError, and the files are removed, where the engine cannot run it, or an output is more than `MARGIN_DB` and
    what chance explains below fake-quant; where int8 products saturate on this CPU, the file stays, with a warning, and
    passes as in `verify`. A line says where there is no engine to compare on.
    """
    try:
        if target.load is not None and not target.runs_its_export:
            raise UsageError(f"{target.name} builds its engine from this file")
        name = choose_engine(artifact, target.name if target.load is not None else None)  # else any that is here
    except UsageError as error:
        log.info("%s: not compared with fake-quant: %s", artifact.file, error)
        return artifact
    images, what = choose_inputs(model, module, artifact)
    quantized = artifact.card.policy and policy_from_dict(artifact.card.policy, artifact.card.name)
    references = list(torch_engines(module, torch.device("cpu"), None, [quantized] if quantized else []).values())
    try:
        engine = engine_loader(name)(artifact, EngineOptions())
        with torch.inference_mode():
            found, exact, expected = (_parts(one, images) for one in (engine, references[0], references[-1]))
    except SwinQuantError:
        _remove(artifact)
        raise
    is_half = artifact.record["options"].get("float_type") in HALF_TYPES
    outputs = module.output_names or (say(module.output_kind),)
    rows = likenesses(outputs, found, expected, exact, HALF_DB if is_half else EXACT_DB)
    worst = min(rows, key=lambda row: row.spare_db)
    beside = "fake-quant" if references[-1].policy else "float32"
    said = f"{name} {worst.sqnr_db:.1f} dB, {beside} {worst.fake_quant_db:.1f} dB SQNR ({worst.output}) on {what}"
    has_logits = module.output_kind == LOGITS
    beside_fake_quant = difference(found[0], expected[0]) if has_logits else compare_batches([found], [expected])
    is_saturated, limit = worst.spare_db < 0 and bool(engine.details.get("caution")), None
    if is_saturated:  # it is right on CPUs with VNNI: it passes as in `verify`
        limit = get_tolerance(name, engine.precision, artifact.record["options"].get("float_type"))
        limit *= magnitude(expected[0]) if has_logits else 1.0
    passed = beside_fake_quant["mean"] < limit if limit is not None else worst.spare_db >= 0
    if not passed and not is_saturated:
        _remove(artifact)
        raise SwinQuantError(
            f"{artifact.file}: computes something else than fake-quant, and is not kept: {said}: export it for another "
            "engine or under another ‹policy›; ‹compared› False keeps it"
        )
    if passed:
        log.info("compared: %s%s", said, "; its int8 products saturate on this CPU" if is_saturated else "")
    else:
        told = "%s: is not to be deployed on this CPU, where its int8 products saturate: %s; ‹saturation_safe› makes a "
        log.warning(told + "file whose products cannot", artifact.file, said)
    record: VerificationRecord = {
        "engine": engine.name,
        "precision": engine.precision,
        "policy": engine.policy,
        "reference": references[-1].name,
        "pictures": len(images),
        "pictures_sha256": hashlib.sha256(images.numpy().tobytes()).hexdigest(),
        "tolerance": limit,
        "passed": passed,
        **beside_fake_quant,  # type: ignore[typeddict-item]
    }
    card = update(card_path(artifact.file), artifact.card, lambda card: card.with_verification(record))
    return replace(artifact, card=card)


def likenesses(
    names: Sequence[str], found: Sequence[Tensor], expected: Sequence[Tensor], exact: Sequence[Tensor], most_db: float
) -> list[Likeness]:
    """A likeness for each output: `found` on the engine, `expected` of fake-quant, `exact` in float.

    A mean of N squares is known to a share of sqrt(2 / N): two of these are chance.
    """
    rows = []
    for name, one, other, right in zip(names, found, expected, exact, strict=True):
        own, theirs = (decibels(*noise(part.double(), right.double())) for part in (one, other))
        chance = 10 * math.log10(1 + 2 * math.sqrt(2 / max(right.numel(), 1)))
        spare = own - min(theirs, most_db) + MARGIN_DB + chance
        rows.append(Likeness(name, own, min(theirs, most_db), -math.inf if math.isnan(spare) else spare))
    return rows


def choose_inputs(model: Model, module: Classifier, artifact: Artifact) -> tuple[Tensor, str]:
    """Inputs to compare on, and what they are: some that calibrated the model, else noise in the range of its input."""
    count = max(1, min(INPUTS, VALUES // math.prod(module.input_shape)))
    what = f"{count} inputs of seeded noise"
    if model.examples is not None:
        images = model.examples[:count]
        what = f"{len(images)} inputs that calibrated it"
    elif module.inputs:
        images = module.inputs.noise(count)
    else:
        images = torch.randn(count, *module.input_shape, generator=torch.Generator().manual_seed(0))
        if (amax := input_amax(module)) is not None:
            images, what = images.clamp(-3, 3) * amax / 3, f"{what} up to {amax:.3g}, as calibrated"
    if artifact.record["options"].get("uint8_input"):  # rounded to pixels, as it takes them
        images = artifact.preprocess.normalised(artifact.preprocess.pixels(images))
    return images, what


def input_amax(module: Classifier) -> float | None:
    """The range that calibration found for the input itself; None where no node sees it."""
    given = torch.zeros(1, *module.input_shape)
    found: list[float] = []

    def see(name: str, node: Any, inputs: tuple[Any, ...], output: Any) -> None:
        if inputs[0] is given and node.amax is not None:
            found.append(float(node.amax.max()))

    with torch.inference_mode(), watching(named_nodes(module), see):
        module(given)
    return max(found, default=None)


def _parts(engine: Engine, images: Tensor) -> list[Tensor]:
    """All outputs of an engine for all inputs."""
    batches = [engine(part) for part in images.split(engine.max_batch or len(images))]
    listed = [[found] if isinstance(found, Tensor) else list(found) for found in batches]
    return [torch.cat(parts) for parts in zip(*listed, strict=True)]


def _remove(artifact: Artifact) -> None:
    """Take the artifact back, its card first: without one it was never finished."""
    parts = [artifact.file.with_name(other["file"]) for other in artifact.record["others"]]
    for file in (card_path(artifact.file), artifact.file, *parts):
        file.unlink(missing_ok=True)
