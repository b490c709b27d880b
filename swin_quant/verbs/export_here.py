"""A file on this machine: beside fake-quant, the fastest of several forms, an engine of TensorRT for this GPU."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor

from swin_quant.backends import engine_loader
from swin_quant.backends.artifact import Artifact
from swin_quant.backends.backend import Backend, function
from swin_quant.backends.registry import artifact_engine
from swin_quant.backends.tensorrt import host
from swin_quant.backends.tensorrt.build import SUFFIX, BuildOptions, build, default_output, make_plan
from swin_quant.backends.tensorrt.layers import LayerReport, LayerRow
from swin_quant.base.cpu import cpu_kind, usable_cores
from swin_quant.base.errors import SwinQuantError, UsageError, listed
from swin_quant.base.files import ensure_writable_dir, one_at_a_time
from swin_quant.base.progress import log
from swin_quant.cards.card import RunCard, update
from swin_quant.cards.paths import card_path
from swin_quant.cards.records import VerificationRecord
from swin_quant.config.outputs import LOGITS, need_logits, say
from swin_quant.exported import Exported, artifact, choose_engine
from swin_quant.loading import ModelFile
from swin_quant.model import Model
from swin_quant.models.classifier import Classifier
from swin_quant.quant.distance import decibels, noise
from swin_quant.quant.policy import Policy, apply_policy, dequantize, is_builtin, load_policy, policy_from_dict
from swin_quant.quant.quantizer import named_nodes
from swin_quant.quant.watch import watching
from swin_quant.report.table import Column, Printed, ReportTable, field
from swin_quant.report.verdict import DIR, fill
from swin_quant.score.engine import HALF_TYPES, Engine, torch_engines
from swin_quant.score.options import EngineOptions
from swin_quant.score.run_engines import compare_batches, difference
from swin_quant.verbs.export_target import ExportTarget
from swin_quant.verbs.timing import compare_latency

BATCHES = (1, 8)
WITHIN_DB = 0.3  # of the best SQNR, what a faster file may lose


def check_tunable(target: ExportTarget, policy: str | Policy | None, card: RunCard | None, kind: str = LOGITS) -> None:
    """UsageError where nothing can be tuned: the target has no operators, options or the model choose the form."""
    options, backend = target.options, target.backend
    if backend.exporting.with_operators is None:
        raise UsageError(f"‹tune›: means nothing to ‹backend› {backend.name}")
    fixed = options.plugin or options.replace or options.int4_weights
    if target.precision == "float" or policy or target.plain or fixed:
        raise UsageError(
            "‹tune› chooses policy and operators: leave ‹policy›, ‹plugin›, ‹replace›, ‹int4_weights› and ‹plain› out"
        )
    if not backend.is_installed:
        raise UsageError(f"‹tune› times files on {backend.name}: {backend.remedy}")
    if card and not card.config.get("MODEL"):
        raise UsageError(f"‹tune›: {card.name} is a module that only Python builds: leave it out")
    need_logits(card.config["MODEL"].get("OUTPUT_KIND", kind) if card else kind, "‹tune›")
    own = policy_from_dict(card.policy, card.name) if card and card.policy else None
    if card and own and (card.is_qat or not is_builtin(own)):
        why = "the model was trained under it" if card.is_qat else "it is your own"
        raise UsageError(f"‹tune› would change policy {own.name}, and {why}: leave it out")


def tuned_forms(target: ExportTarget) -> list[tuple[Policy, tuple[str, ...]]]:
    """The policies and plugins of the files that are timed; with MLPs alone, attention is the best plain file's."""
    exports = target.backend.exporting
    best = exports.with_operators[0] if exports.with_operators else ""
    plugins = {plugin.partition("=")[0]: plugin for plugin in exports.detail.compiled}
    plain = [name for name in exports.policies if name != best]
    compiled = [
        (load_policy(plain[0] if operators == ("mlp",) else best), tuple(plugins[one] for one in operators))
        for operators in exports.detail.tuned
    ]
    return [*((load_policy(name), ()) for name in plain), *compiled]


def write_fastest(target: ExportTarget, module: Classifier, card: RunCard, file: Path, folder: str | Path) -> Artifact:
    """Write the file of least time here, the product of those at batches 1 and 8 (or the target's own).

    Only files within 0.3 dB of the best SQNR on seeded noise are compared; the card's artifact has the table, `tuned`.
    """
    types = function(target.backend.float_types)() if target.backend.float_types else [None]
    options = EngineOptions(usable_cores(), types[-1])  # the narrowest float type that it runs
    batches = (target.options.batch,) if target.options.batch else BATCHES
    images = torch.randn(max(batches), *module.input_shape, generator=torch.Generator().manual_seed(0))
    dequantize(module)
    with torch.inference_mode():
        expected = module(images)

    def sqnr(engine: Engine) -> float:
        found: float = difference(engine(images), expected)["sqnr_db"]
        return found

    engines: dict[str, Engine] = {}
    rows: list[dict[str, Any]] = []
    for policy, plugins in tuned_forms(target):
        form = replace(target, options=replace(target.options, plugin=plugins, plain=not plugins))
        apply_policy(module, policy)
        try:
            with TemporaryDirectory() as place:
                made = form.write(module, card, file, place, policy)
                engine = artifact_engine(str(made.file), target.backend, options)
            rows.append({"policy": policy.name, "plugins": list(plugins), "ms": {}, "sqnr_db": sqnr(engine)})
            engines[f"{policy.name} {plugins}"] = engine
        except (SwinQuantError, RuntimeError) as error:
            log.info("not timed: %s, %s: %s", policy.name, plugins, error)
    for batch in batches:
        for row, found in zip(rows, compare_latency(engines, batch, module.input_shape), strict=True):
            row["ms"][str(batch)] = found.ms
    log.info("%s", "\n".join(map(str, rows)))
    best = fastest(rows)
    chosen = replace(target, options=replace(target.options, plugin=tuple(best["plugins"]), plain=not best["plugins"]))
    policy = load_policy(best["policy"])
    apply_policy(module, policy)
    artifact = chosen.write(module, card, file, folder, policy)
    artifact.record["tuned"] = {"cpu": cpu_kind(), "files": rows}
    with one_at_a_time(artifact.file.parent):
        artifact.card.write(card_path(artifact.file))
    return artifact


def fastest(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The row of least time, `ms` by batch, among those within 0.3 dB of the best `sqnr_db`.

    SwinQuantError without rows: no form ran.
    """
    if not rows:
        raise SwinQuantError("‹tune›: no file could be timed here: leave it out")
    least = max(row["sqnr_db"] for row in rows) - WITHIN_DB
    return min((row for row in rows if row["sqnr_db"] >= least), key=lambda row: prod(row["ms"].values()))


_PRODUCTS: tuple[Column[LayerRow], ...] = (
    Column("name", "product", field("name"), fold=True),
    Column("wanted", "in the graph", field("wanted")),
    Column("ran", "in the engine", field("ran")),
    Column("layer", "layer", field("layer"), fold=True, blank="not found"),
)


@dataclass(frozen=True, repr=False)
class BuiltEngine(Printed, Exported):
    """An engine, and the type in which each of its products runs, which is printed as a table."""

    layers: LayerReport = LayerReport([], 0, [])

    def tables(self) -> list[ReportTable[LayerRow]]:
        counts = self.layers.counts()
        ran = ", ".join(f"{kind} {number}" for kind, number in counts["ran"].items())
        remark = f"products: {ran}; {counts['reformats']} of {counts['layers']} layers only reformat"
        rows = self.layers.rows
        return [ReportTable(_PRODUCTS, rows, [remark], style=lambda row: "" if row.wanted == row.ran else "yellow")]

    def show(self) -> None:
        """Print the table; messages name the file and the next step."""
        super().show()
        log.info("engine: %s", self.file)
        log.info("next: %s", fill("swin-quant verify {file} --data-path {data}", file=self.file, data=DIR))

    def to_json(self) -> dict[str, Any]:
        """The file, and the types of its products."""
        return {"file": str(self.file), **self.layers.to_dict()}


def find_onnx(given: Any) -> Exported | None:
    """The exported ONNX file that is given in place of a model."""
    if isinstance(given, Exported):
        return given
    file = str(given.checkpoint if isinstance(given, ModelFile) else given)
    if not file.endswith(".onnx"):
        return None
    if isinstance(given, ModelFile) and given != ModelFile(given.checkpoint, device=given.device):
        raise UsageError(f"{file}: is exported already: leave the options of models out")
    return artifact(file)


def build_engine(exported: Exported, folder: str | Path | None, options: BuildOptions) -> BuiltEngine:
    """Build the engine of an exported ONNX file in `folder` (None: its own).

    The trtexec line of the same build is printed first, also where TensorRT is not installed. Nothing says that the
    engine computes the same: fused attention has been wrong, and silently, on GPUs that a library was not tested on
    (TRT#4837), so `verify` comes next.
    """
    plan = make_plan(exported.artifact, options)
    place = Path(folder) / exported.file.name if folder else exported.file
    log.info("the same by NVIDIA's tool: %s", plan.trtexec(place.with_suffix(SUFFIX)))
    host.tensorrt()
    output = default_output(place, host.find_gpu())
    ensure_writable_dir(output.parent)
    made, layers = build(plan, output)
    if lost := layers.lost:
        types = " and ".join(dict.fromkeys(row.wanted for row in lost))
        log.warning("%s in the graph, not in the engine: %s", types, listed(row.name for row in lost))
    return BuiltEngine(made, layers=layers)


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
    what chance explains below fake-quant. A line says where there is no engine to compare on.
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
    passed = worst.spare_db >= 0
    if not passed and not engine.details.get("caution"):
        _remove(artifact)
        raise SwinQuantError(
            f"{artifact.file}: computes something else than fake-quant, and is not kept: {said}: export it for another "
            "engine or under another ‹policy›; ‹compared› False keeps it"
        )
    log.info("compared: %s", said)
    record: VerificationRecord = {
        "engine": engine.name,
        "precision": engine.precision,
        "policy": engine.policy,
        "reference": references[-1].name,
        "pictures": len(images),
        "pictures_sha256": hashlib.sha256(images.numpy().tobytes()).hexdigest(),
        "tolerance": None,
        "passed": passed,
        **compare_batches([found], [expected]),  # type: ignore[typeddict-item]
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
