"""Export a calibrated model to what will be deployed: FasterTransformer's weights, a file for an engine, an engine."""

import contextlib
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Annotated, Any, Literal

from swin_quant.arguments import checked
from swin_quant.backends.saturation import at_risk, warn
from swin_quant.backends.tensorrt.build import BuildOptions
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
from swin_quant.verbs.export_target import ExportTarget, check_model

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
    build: Annotated[BuildOptions, Fields(BuildOptions, "TensorRT engine, made of an ONNX file")] = BuildOptions(),
    saturation_safe: Annotated[bool, Parameter(parse=False)] = False,
    compared: Annotated[bool, Parameter(parse=False)] = True,
    **options: Annotated[Any, Parameter(parse=False)],
) -> Exported:
    """Export a calibrated model for a backend: writes the file to deploy, and its run card.

    The file has the model's policy, or the one that is named. Only a shipped policy that the backend cannot run is
    replaced by the backend's best, with a warning. The bits are the policy's: calibrate under another for fewer. The
    file of a wrapped module is run once, and removed where it is more than 3 dB worse than fake-quant; a warning says
    so where the reason is this CPU, whose int8 products saturate without VNNI.

    TensorRT takes two steps: `--for tensorrt` writes an ONNX file of a checkpoint on any machine, and an engine of that
    ONNX file on the GPU that will run it.

    Args:
        model: A calibrated model, which is saved in the folder first if it is in no file; a calibrated checkpoint, ours
            or FasterTransformer's; or an ONNX file that was exported for TensorRT.
        backend: backend that will run it: onnx, onnxruntime, openvino, tensorrt, fastertransformer, cuda, torchscript,
            executorch
        folder: folder of the results (default: output/<NAME>; of an engine: its ONNX file's)
        policy: Default: see above.
        precision: float: the float model, to compare with
        float_type: type of float layers (default: float32; for GPUs float16; bfloat16: cuda alone)
        batch: ONNX, executorch: fix the batch size (executorch: 1 by default); fastertransformer, cuda: largest batch
        sm: fastertransformer: compute capability (default 80)
        fix_gelu_bias: fastertransformer: store the biases of Swin-L where its kernel looks for them
        opset: ONNX: 17 to 20 (default: the oldest that runs as fast; 21 with INT4 weights)
        int4_weights: ONNX: store 4-bit weights as INT4, of a model that has some (policy w4a16 or w4a8)
        replace: ONNX: write these operators in another form: roll, gather, ... (docs/analyze.md)
        plugin: ONNX: write an operator as one of your own: OP=DOMAIN::NAME (docs/custom_operators.md)
        plain: openvino: standard operators alone, none that is compiled
        npu: onnx: a form for NPUs, of one picture (docs/devices.md)
        uint8_input: ONNX, cuda: the file takes uint8 pixels [batch, S, S, 3], and normalises them itself
        softmax: ONNX: probabilities as a further output
        top_k: ONNX: the N best classes and their probabilities as further outputs
        labels: ONNX: text file of class names, one a line, to store in the file
        tune: openvino: time several policies and operators here, and keep the fastest (a minute)
        check: fastertransformer: read the result back, and compare it with the model
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
    check_model(target.backend, cfg if isinstance(model, ModelFile) else model.card.config)
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
            what = f"was not written by `save` of {model.name}"
            raise UsageError(f"{place}: {what}: give another folder, or save it first")
    return model.save(place)


def refuse_changed(model: Model) -> None:
    """UsageError where the weights of a model are no longer those of its file: results would be the file's."""
    if model.is_changed:
        raise UsageError(f"{model.name}: its weights were changed since {model.file}: `save` it to another file first")
