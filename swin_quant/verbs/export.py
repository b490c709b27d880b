"""Export a calibrated checkpoint to what will be deployed: FasterTransformer's weights, or ONNX for an engine."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from swin_quant.backends.backend import PRECISIONS, Backend
from swin_quant.backends.registry import targets
from swin_quant.base.errors import SwinQuantError, UsageError, listed
from swin_quant.base.files import ensure_writable_dir, read_lines
from swin_quant.base.progress import log
from swin_quant.cards.card import RunCard
from swin_quant.cards.paths import card_path
from swin_quant.cli.flags import Flag, Group, Rare
from swin_quant.cli.shared import (
    Int4Weights,
    ModelOptions,
    OnlyCpu,
    OutputKind,
    PolicyOptions,
    TargetName,
    Tune,
    config_of,
    one_process,
    opened,
)
from swin_quant.config import from_dict
from swin_quant.config.outputs import LOGITS

if TYPE_CHECKING:
    from yacs.config import CfgNode

    from swin_quant.backends.artifact import Artifact
    from swin_quant.base.distributed import World
    from swin_quant.checkpoint.opened import Checkpoint
    from swin_quant.exported import Exported
    from swin_quant.model import Model
    from swin_quant.models.classifier import Classifier
    from swin_quant.quant.policy import Policy

EXAMPLES = """examples:
  swin-quant export out/my_calib.pth --for openvino --output out/openvino
  swin-quant export out/my_calib.pth --for openvino --precision float --output out/openvino  (baseline)
  swin-quant export out/my_calib.pth --for fastertransformer --sm 80 --check --output out/ft
  swin-quant export theirs_calib.pth --for onnx --policy qdq --output out
  swin-quant export out/my_calib.pth --for onnx --policy qdq --off role:matmul_input --output out

Config, preprocessing and policy are those of the run card, so the file is what was calibrated and scored. --cfg is
for a checkpoint without a run card. A backend that does not take the card's policy gets its own best, which a warning
names: every node has a range. A policy of your own, or of training, always stays."""


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """Which checkpoint is exported, and what every target takes."""

    output: Annotated[str, Flag("folder for the artifact and its run card", "DIR")]
    checkpoint: Annotated[
        str | None, Flag("calibrated checkpoint, ours or FasterTransformer's", "CHECKPOINT", or_flag=True)
    ] = None
    model: ModelOptions = ModelOptions()
    precision: Annotated[str, Flag("float: the baseline", choices=PRECISIONS)] = "int8"
    float_type: Annotated[
        Literal["float32", "float16", "bfloat16"] | None,
        Flag("type of float layers (default: float32; for GPUs float16; bfloat16: cuda)"),
    ] = None
    batch: Annotated[int | None, Flag("ONNX: only batches of N; fastertransformer, cuda: up to N", "N")] = None
    sm: Annotated[int | None, Flag("fastertransformer: compute capability (default 80)", "NN")] = None
    fix_gelu_bias: Annotated[bool, Rare("fastertransformer: undo its misreading of more than 4096 biases (Swin-L)")] = (
        False
    )
    check: Annotated[bool, Flag("run or read back the export and compare it with the model")] = False
    policy: Annotated[PolicyOptions, Group("policy: which nodes are quantized, and how (default: see below)")] = (
        PolicyOptions()
    )
    device: OnlyCpu = "cpu"


@dataclass(frozen=True)
class OnnxFlags:
    """Options that exporters of ONNX files have."""

    TITLE = "ONNX"
    opset: Annotated[
        int | None, Rare("17 to 20 (default: the oldest that costs nothing; 21 with --int4-weights)", "N")
    ] = None
    int4_weights: Int4Weights = False
    replace: Annotated[
        tuple[str, ...], Rare("equivalent operators for some: roll, gather, ... (docs/analyze.md)", "NAME")
    ] = ()
    plugin: Annotated[
        tuple[str, ...],
        Rare("operators as nodes of a domain of your own (docs/custom_operators.md)", "OP=DOMAIN::NAME"),
    ] = ()
    plain: Annotated[bool, Flag("openvino: no compiled operators")] = False
    npu: Annotated[bool, Flag("onnx: for NPUs: one picture, no tensor above rank 5 (docs/devices.md)")] = False
    tune: Tune = False
    uint8_input: Annotated[bool, Rare("cuda, too: pictures are uint8 [batch, S, S, 3], which the file normalises")] = (
        False
    )
    softmax: Annotated[bool, Rare("give probabilities, too")] = False
    top_k: Annotated[int | None, Rare("give the N best classes and theirs, too", "N")] = None
    labels: Annotated[str | None, Flag("class names, one a line, to travel in the file", "FILE")] = None

    def given(self) -> dict[str, Any]:
        """The exporter's options, the class names read."""
        names = tuple(read_lines(self.labels, "list of class names")) if self.labels else None
        flags = {key: value for key, value in vars(self).items() if key != "tune"}
        return {**flags, "replace": self.replace or None, "plugin": self.plugin or None, "labels": names}


@dataclass(frozen=True, kw_only=True)
class ExportOptions(TargetOptions):
    """Which checkpoint is exported, for which backend."""

    backend: TargetName
    output_kind: OutputKind = None
    onnx: OnnxFlags = OnnxFlags()


def run(options: ExportOptions, world: World) -> None:
    from swin_quant.backends.saturation import at_risk, warn

    one_process(world, "export")
    target = targets()[options.backend]
    artifact, model = exported_as(options)
    if options.check and "check" not in target.exporting.flags:
        from swin_quant.verbs.export_compared import check_export

        log.info("check: %s", check_export(artifact, model))  # its engine says whether products saturate here
    else:
        for engine in at_risk(target):
            warn(engine, artifact)
    _print(artifact, target, str(options.checkpoint))


def exported_as(options: ExportOptions) -> tuple[Artifact, Classifier]:
    """The artifact that options ask for, and the model that it was made from; nothing is printed."""
    if not (checkpoint := opened(options.checkpoint)):
        raise UsageError("no checkpoint: name the calibrated one")
    cfg = config_of(checkpoint, options.model, MODEL__OUTPUT_KIND=options.output_kind)
    given = {key: getattr(options, key) for key in ("float_type", "batch", "sm", "fix_gelu_bias")}
    given |= options.onnx.given()
    given["check"] = options.check and "check" in targets()[options.backend].exporting.flags
    policy, how = options.policy, (options.precision, given, options.policy.saturation_safe, options.onnx.tune)
    chosen = None if policy == PolicyOptions(saturation_safe=True) else policy.one()  # it may change the target's own
    return export_checkpoint(checkpoint, options.backend, options.output, cfg, chosen, *how)


def _print(artifact: Artifact, target: Backend, checkpoint: str) -> None:
    record = artifact.record
    policy = f", policy {artifact.card.policy['name']}" if artifact.card.policy else ""
    log.info("%s: %s%s, %.1f MB", record["backend"], record["precision"], policy, artifact.file.stat().st_size / 1e6)
    if runs := record["options"].get("runs_on"):
        log.info("runs on %s", " and ".join(f"{engine}{releases}" for engine, releases in runs.items()))
    for other in record["others"]:
        log.info("with it: %s", artifact.file.with_name(other["file"]))
    log.info("run card: %s", card_path(artifact.file))
    print(artifact.file)
    runnable = artifact.card.policy is not None or not target.only_quantized
    runnable &= artifact.card.config["MODEL"].get("OUTPUT_KIND", LOGITS) == LOGITS  # the next steps are about logits
    for command in target.exporting.next_step if runnable else ():
        log.info("next: %s", command.format(file=artifact.file, checkpoint=Path(checkpoint)))


def export(
    model: Model | str | Path,
    backend: str,
    folder: str | Path,
    policy: str | Policy | None = None,
    *,
    precision: str = "int8",
    saturation_safe: bool = False,
    compared: bool = True,
    tune: bool = False,
    **options: Any,
) -> Exported:
    """Export `model`, as it is in memory, for a backend ("openvino", "tensorrt", "cuda", ...) into `folder`.

    `policy` None: the model's, if that backend takes it, else its best, which a warning names. `options` are those
    of `swin-quant export`: opset, float_type, batch, sm, labels, ... `tune`: times the policies and operators here,
    which takes minutes, and writes the fastest file. A model that is in no file yet is saved in the folder first: an
    artifact is verified against its checkpoint. That of a wrapped module is `compared` with fake-quant on its engine,
    and is removed with a SwinQuantError where an output is more than 3 dB below.
    """
    from swin_quant.checkpoint.ranges import check_bits
    from swin_quant.exported import Exported, model_of
    from swin_quant.quant.policy import apply_policy, load_policy
    from swin_quant.verbs.export_target import ExportTarget
    from swin_quant.verbs.export_tuned import check_tunable, tried_policies, write_fastest

    model, target = model_of(model), ExportTarget.of(backend, precision, options, saturation_safe)
    asked = load_policy(policy) if policy else None
    if tune:
        check_tunable(target, asked, model.card)
    used = tried_policies(target)[0] if tune else target.policy(model.card, model.file, asked)
    _need_ranges(model, used)
    file = file_of(model, ensure_writable_dir(folder))
    module = deepcopy(model.network).cpu().eval()  # the caller's keeps its policy and its place
    if tune:
        return Exported(write_fastest(target, module, model.card, file, folder))
    check_bits(model.module, model.card, [used], model.name)
    apply_policy(module, used)
    made = target.write(module, model.card, file, folder, used)
    if model.card.wrapped and compared:
        from swin_quant.verbs.export_compared import compared as beside_fake_quant

        made = beside_fake_quant(made, model, module, target.backend)
    return Exported(made, model if model.card.wrapped else None)


def export_checkpoint(
    checkpoint: Checkpoint,
    backend: str,
    folder: str | Path,
    cfg: CfgNode | None = None,
    policy: Policy | None = None,
    precision: str = "int8",
    options: Mapping[str, Any] | None = None,
    saturation_safe: bool = False,
    tune: bool = False,
) -> tuple[Artifact, Classifier]:
    """Export `checkpoint` for a backend, as `export` does; returns the artifact, and the model that it was made from.

    The config is that of the run card beside the checkpoint; `cfg` is for one that has none. SwinQuantError for a
    checkpoint without ranges, UsageError for options that the backend lacks.
    """
    from swin_quant.checkpoint.opened import open_checkpoint
    from swin_quant.loading import giving, load_for_scoring
    from swin_quant.verbs.export_target import ExportTarget
    from swin_quant.verbs.export_tuned import check_tunable, tried_policies, write_fastest

    target, opened = ExportTarget.of(backend, precision, options, saturation_safe), open_checkpoint(checkpoint)
    if tune:
        check_tunable(target, policy, opened.card)
    used = tried_policies(target) if tune else [target.policy(opened.card, opened.file, policy)]
    if cfg is None:
        if opened.card is None:
            raise UsageError(f"{checkpoint}: has no run card {card_path(checkpoint).name} beside it: give ‹cfg›")
        cfg = from_dict(opened.card.config, str(card_path(checkpoint)))
    model, _ = load_for_scoring(cfg, opened, used)
    given = model.network, giving(model.card, cfg), opened.file, folder
    return write_fastest(target, *given) if tune else target.write(*given, *used), model.network


def _need_ranges(model: Model, policy: Policy) -> None:
    """SwinQuantError where a node that is on has none."""
    from swin_quant.quant.policy import settings_for
    from swin_quant.quant.quantizer import named_nodes

    nodes = named_nodes(model.module)
    on = [name for name, setting in settings_for(model.module, policy).items() if setting.enabled]
    if without := [name for name in on if nodes[name].amax is None]:
        raise SwinQuantError(
            f"{model.name}: {listed(without, 2)} of policy {policy.name} have no range: calibrate it, or export it "
            "with ‹precision› float"
        )


def file_of(model: Model, folder: Path) -> Path:
    """The checkpoint that `model` is in; it is saved in `folder` where there is none yet.

    UsageError where its weights were changed since, and where a file lies there that is not a save of this model.
    """
    from swin_quant.model import place_for

    refuse_changed(model)
    if model.file:
        return model.file
    place = folder / f"{model.name}_float.pth"
    if model.is_calibrated:
        place = place_for(folder, model.module, model.card)
    if (place.exists() or card_path(place).exists()) and not _was_saved(place, model.name):
        raise UsageError(f"{place}: was not written by `save` of {model.name}: give another folder, or save it first")
    return model.save(place)


def refuse_changed(model: Model) -> None:
    """UsageError where the weights of a model are no longer those of its file: results would be the file's."""
    if model.is_changed:
        raise UsageError(f"{model.name}: its weights were changed since {model.file}: `save` it to another file first")


def _was_saved(place: Path, name: str) -> bool:
    try:
        return RunCard.read(card_path(place)).name == name
    except SwinQuantError:
        return False
