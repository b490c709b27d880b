"""Files for this machine: the fastest of several forms, timed where it will run; a TensorRT engine for this GPU."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from swin_quant.backends.artifact import Artifact
from swin_quant.backends.backend import function
from swin_quant.backends.registry import artifact_engine
from swin_quant.backends.tensorrt import host
from swin_quant.backends.tensorrt.build import SUFFIX, BuildOptions, build, default_output, make_plan
from swin_quant.backends.tensorrt.layers import LayerReport, LayerRow
from swin_quant.base.cpu import cpu_kind, usable_cores
from swin_quant.base.errors import SwinQuantError, UsageError, listed
from swin_quant.base.files import ensure_writable_dir, one_at_a_time
from swin_quant.base.progress import log
from swin_quant.cards.card import RunCard
from swin_quant.cards.paths import card_path
from swin_quant.config.outputs import LOGITS, need_logits
from swin_quant.exported import Exported, artifact
from swin_quant.loading import ModelFile
from swin_quant.models.classifier import Classifier
from swin_quant.quant.policy import Policy, apply_policy, dequantize, is_builtin, load_policy, policy_from_dict
from swin_quant.report.table import Column, Printed, ReportTable, field
from swin_quant.report.verdict import DIR, fill
from swin_quant.score.engine import Engine
from swin_quant.score.options import EngineOptions
from swin_quant.score.run_engines import difference
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
