"""Export a calibrated model to what will be deployed: FasterTransformer's weights, a file for an engine, an engine."""

import contextlib
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Annotated, Any, Literal

from swin_quant.arguments import checked
from swin_quant.backends.saturation import at_risk, warn
from swin_quant.backends.tensorrt.plan import BuildOptions
from swin_quant.base.arguments import Fields, Parameter
from swin_quant.base.distributed import one_process
from swin_quant.base.errors import SwinQuantError, UsageError, listed
from swin_quant.base.files import ensure_writable_dir, read_lines
from swin_quant.cards.card import RunCard
from swin_quant.cards.paths import card_path
from swin_quant.checkpoint.ranges import check_bits
from swin_quant.exported import Exported, open_model
from swin_quant.loading import ModelFile, giving
from swin_quant.model import Model, place_for
from swin_quant.policies import Policies, PolicyChoice, one_policy
from swin_quant.quant.policy import apply_policy, settings_for
from swin_quant.quant.quantizer import named_nodes
from swin_quant.verbs.export_compared import compared as beside_fake_quant
from swin_quant.verbs.export_here import build_engine, check_tunable, find_onnx, tuned_forms, write_fastest
from swin_quant.verbs.export_target import ExportTarget

EXAMPLES = """swin-quant export out/my_calib.pth --for openvino --output out/openvino
swin-quant export out/my_calib.pth --for openvino --precision float --output out/openvino
swin-quant export out/my_calib.pth --for fastertransformer --sm 80 --check --output out/ft
swin-quant export theirs_calib.pth --for onnx --policy qdq --off role:matmul_input --output out
swin-quant export out/my_int8_tensorrt.onnx --for tensorrt --max-batch 64 --timing-cache trt.cache"""


@checked
def export(
    model: Annotated[Model | Exported | str | Path | ModelFile, Fields(ModelFile, "model", ("checkpoint",))],
    backend: Annotated[str, Parameter(name="--for")],
    folder: Annotated[str | Path | None, Parameter(name="--output")] = None,
    policy: Annotated[Policies, Fields(PolicyChoice, "policy: which nodes are quantized, and how")] = None,
    *,
    precision: Literal["int8", "float"] = "int8",
    float_type: Literal["float32", "float16", "bfloat16"] | None = None,
    batch: int | None = None,
    sm: int | None = None,
    fix_gelu_bias: bool = False,
    opset: int | None = None,
    int4_weights: bool = False,
    replace: tuple[str, ...] = (),
    plugin: tuple[str, ...] = (),
    plain: bool = False,
    npu: bool = False,
    uint8_input: bool = False,
    softmax: bool = False,
    top_k: int | None = None,
    labels: str | Path | Sequence[str] | None = None,
    tune: bool = False,
    check: bool = False,
    build: Annotated[BuildOptions, Fields(BuildOptions, "engine of an exported ONNX file")] = BuildOptions(),
    saturation_safe: Annotated[bool, Parameter(parse=False)] = False,
    compared: Annotated[bool, Parameter(parse=False)] = True,
    **options: Annotated[Any, Parameter(parse=False)],
) -> Exported:
    """Export a model for a backend: a file and its run card, which is what was calibrated and scored.

    The policy is the model's. A backend that does not take it gets its own best, which a warning names: every node has
    a range. A policy of your own, or of training, always stays. In Python a model that is in no file yet is saved in
    the folder first: an artifact is verified against its checkpoint. That of a wrapped module is compared with
    fake-quant on its engine, and removed where an output is more than 3 dB below.

    An ONNX file that was exported for TensorRT becomes an engine for this GPU, with a table of the types in which its
    products run; `verify` says whether it computes the same.

    Args:
        model: A calibrated model or checkpoint, ours or FasterTransformer's; an exported ONNX file.
        backend: backend that will run it: onnx, onnxruntime, openvino, tensorrt, fastertransformer, cuda, torchscript,
            executorch
        folder: folder for the artifact and its run card (default: output/<NAME>; of an engine: its ONNX file's)
        policy: Default: see above.
        precision: float: the baseline
        float_type: type of float layers (default: float32; for GPUs float16; bfloat16: cuda)
        batch: ONNX, executorch: only batches of N (executorch: default 1); fastertransformer, cuda: up to N
        sm: fastertransformer: compute capability (default 80)
        fix_gelu_bias: fastertransformer: undo its misreading of more than 4096 biases (Swin-L)
        opset: ONNX: 17 to 20 (default: the oldest that costs nothing; 21 with --int4-weights)
        int4_weights: ONNX: store weights of at most 4 bits as INT4 (policies w4a16, w4a8)
        replace: ONNX: equivalent operators for some: roll, gather, ... (docs/analyze.md)
        plugin: ONNX: operators as nodes of a domain of your own: OP=DOMAIN::NAME (docs/custom_operators.md)
        plain: openvino: no compiled operators
        npu: onnx: for NPUs: one picture, no tensor above rank 5 (docs/devices.md)
        uint8_input: pictures are uint8 [batch, S, S, 3], which the file normalises (ONNX, cuda)
        softmax: ONNX: give probabilities, too
        top_k: ONNX: give the N best classes and theirs, too
        labels: ONNX: file of class names, one a line, to travel in the file
        tune: openvino: try policies and operators here, keep the fastest (a minute)
        check: fastertransformer: read the export back and compare it with the model
        build: How a TensorRT engine is built.
        saturation_safe: Weights of 7 bits for CPUs without VNNI.
        compared: Compare that of a wrapped module with fake-quant.
        options: Further options of the backend's exporter.

    Returns:
        The artifact.

    Raises:
        SwinQuantError: A node that is on has no range, or the check fails.
        UsageError: Options that the backend lacks.
    """
    one_process("export")
    names = read_lines(str(labels), "list of class names") if isinstance(labels, str | Path) else labels
    given: dict[str, Any] = {"float_type": float_type, "batch": batch, "sm": sm, "fix_gelu_bias": fix_gelu_bias}
    given |= {"opset": opset, "int4_weights": int4_weights, "replace": replace or None, "plugin": plugin or None}
    given |= {"plain": plain, "npu": npu, "uint8_input": uint8_input, "softmax": softmax, "top_k": top_k}
    given |= {"labels": names and tuple(names), "check": check, **options}
    if isinstance(policy, PolicyChoice):
        saturation_safe = policy.saturation_safe
        policy = None if policy == PolicyChoice(saturation_safe=True) else policy
    if backend == "tensorrt" and (found := find_onnx(model)):
        others = {"policy": policy, "tune": tune, "precision": precision != "int8", **given}
        if wrong := [name for name, value in others.items() if value]:
            raise UsageError(f"‹{wrong[0]}›: is for a checkpoint, and {found.file} is exported already: leave it out")
        return build_engine(found, folder, build)
    if build != BuildOptions():
        raise UsageError("‹max_batch› and the other options of an engine: are for an exported ONNX file: give that")
    asked = one_policy(policy)
    target = ExportTarget.parse(backend, precision, given, saturation_safe)
    is_file = isinstance(model, ModelFile)
    if isinstance(model, ModelFile):
        opened, cfg = model.need_checkpoint(), model.config()  # refused before a policy is chosen
        file: Path | None = opened.file
        folder, card = folder or Path("output", cfg.MODEL.NAME), opened.card
    else:
        model = open_model(model)
        folder, card, file = folder or Path("output", model.name), model.card, model.file
    if tune:
        check_tunable(target, asked, card)
    forms = tuned_forms(target) if tune else [(target.policy(card, file, asked), ())]
    policies = [used for used, _ in forms]
    if isinstance(model, ModelFile):
        subject = model.load(policies)
        subject.card = giving(subject.card, cfg)
        module = subject.network
    else:
        subject = model
        nodes, settings = named_nodes(subject.module), settings_for(subject.module, policies[0]).items()
        if without := [name for name, setting in settings if setting.enabled and nodes[name].amax is None]:
            raise SwinQuantError(
                f"{subject.name}: {listed(without, 2)} of policy {policies[0].name} have no range: calibrate it, or "
                "export it with ‹precision› float"
            )
        file = ensure_saved(subject, ensure_writable_dir(folder))
        module = deepcopy(subject.network).cpu().eval()  # the caller's keeps its policy and its place
    assert file is not None
    if tune:
        made = write_fastest(target, module, subject.card, file, folder)
    else:
        if not is_file:
            check_bits(subject.module, subject.card, policies, subject.name)
            apply_policy(module, policies[0])
        made = target.write(module, subject.card, file, folder, policies[0])
        if subject.card.wrapped and compared:
            made = beside_fake_quant(made, subject, module, target.backend)
    for engine in at_risk(target.backend):
        warn(engine, made)
    return Exported(made, subject if subject.card.wrapped else None)


def ensure_saved(model: Model, folder: Path) -> Path:
    """The checkpoint that `model` is in; it is saved in `folder` where there is none yet.

    UsageError where its weights were changed since, and where a file lies there that is not a save of this model.
    """
    refuse_changed(model)
    if model.file:
        return model.file
    is_float, name = not model.is_calibrated, f"{model.name}_float.pth"
    place = folder / name if is_float else place_for(folder, model.module, model.card)
    if place.exists() or card_path(place).exists():
        owner = ""
        with contextlib.suppress(SwinQuantError):
            owner = RunCard.read(card_path(place)).name
        if owner != model.name:
            raise UsageError(
                f"{place}: was not written by `save` of {model.name}: give another folder, or save it first"
            )
    return model.save(place)


def refuse_changed(model: Model) -> None:
    """UsageError where the weights of a model are no longer those of its file: results would be the file's."""
    if model.is_changed:
        raise UsageError(f"{model.name}: its weights were changed since {model.file}: `save` it to another file first")
