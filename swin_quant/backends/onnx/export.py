"""Export a calibrated model to ONNX: rewrite the model, let torch's dynamo exporter write it, name, check and store."""

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from swin_quant.backends.artifact import Artifact, apply_card_policy, finish_artifact
from swin_quant.backends.onnx.network import check_ends, example, get_rewriter, network, set_forward
from swin_quant.backends.onnx.operators import translations
from swin_quant.backends.onnx.options import FP8_OPSET, INT4_BITS, OPSETS, OnnxOptions
from swin_quant.backends.onnx.tracing import short_traces
from swin_quant.backends.onnx_reader.file import write_metadata
from swin_quant.backends.onnx_reader.npu_rules import NPUS, misfits
from swin_quant.backends.releases import RUNS_ON, requirements
from swin_quant.backends.saturation import SAFE_ON, safe_on
from swin_quant.base import __version__
from swin_quant.base.errors import SwinQuantError, UsageError, first_line, listed
from swin_quant.base.extras import library
from swin_quant.base.files import atomic_write_bytes, ensure_writable_dir
from swin_quant.base.progress import log
from swin_quant.cards.card import RunCard
from swin_quant.config.outputs import FEATURES, LOGITS
from swin_quant.data.class_names import get_english_names
from swin_quant.data.preprocess import Preprocess
from swin_quant.models.classifier import Classifier
from swin_quant.operators.plugins import Plugging, parse_plugins
from swin_quant.operators.replacements import Replacing, check_used, chosen
from swin_quant.quant.fake_quant import FP8, TINY_AMAX
from swin_quant.quant.layer import QuantLinear
from swin_quant.quant.policy import enabled_nodes
from swin_quant.quant.quantizer import Quantizer, Role
from swin_quant.score.engine import get_precision

if TYPE_CHECKING:
    from onnx import ModelProto

__all__ = ["OnnxOptions", "export"]
ONE_FILE_LIMIT = (1 << 31) - (1 << 20)  # protobuf's 2 GB, less 1 MB for the graph itself


def store(model: "ModelProto", file: Path) -> list[Path]:
    """Write `file` atomically; returns the files beside it. Weights moved into `<file>.data` are cut from `model`."""
    import onnx.external_data_helper as external

    others = []
    if sum(len(tensor.raw_data) for tensor in model.graph.initializer) > ONE_FILE_LIMIT:
        data, blobs, offset = file.with_name(file.name + ".data"), [], 0
        for tensor in model.graph.initializer:
            if len(tensor.raw_data) >= 1024:
                blobs.append(tensor.raw_data)
                external.set_external_data(tensor, data.name, offset=offset, length=len(tensor.raw_data))
                tensor.ClearField("raw_data")
                offset += len(blobs[-1])
        atomic_write_bytes(data, b"".join(blobs))
        others = [data]
    atomic_write_bytes(file, model.SerializeToString())
    return others


FAULTS: dict[str, Callable[[Quantizer], bool]] = {
    "have no range (amax), run `swin-quant calibrate`": lambda node: node.amax is None,
    "have no lower end (bounds) for their zero point, calibrate again": (
        lambda node: not node.setting.symmetric and node.bounds is None
    ),
    "have a range (amax) of 0, NaN or infinity, calibrate again on pictures that reach them": (
        lambda node: (
            not (
                torch.isfinite(used := node.range if node.setting.symmetric else node.range_for()) & (used > TINY_AMAX)
            ).all()
        )
    ),
    "have fewer than 8 bits, or 9 to 15, which ONNX has for weights alone": (
        lambda node: node.setting.bits not in (8, 16) and node.role is not Role.GEMM_WEIGHT
    ),
    "have a narrow range, which ONNX has for weights alone": (
        lambda node: node.setting.narrow_range and node.role is not Role.GEMM_WEIGHT
    ),
}
_PARTS = {"mlp": "MLPs", "token_branch": "attentions"}  # what operators may compute with all that is around it


def export(model: Classifier, card: RunCard, folder: str | Path, options: OnnxOptions = OnnxOptions()) -> Artifact:
    """Write `<NAME>_<int8|w4a16|int4|fp8|fp32|fp16>[_<target>].onnx` and its run card, under the card's policy.

    `model` has the ranges of its nodes, and comes back with the policy applied and every node off. Every refusal comes
    before the file is written.
    """
    onnx = library("onnx", "onnx")
    library("onnxscript", "onnx")
    folder = ensure_writable_dir(folder)
    if options.labels and len(options.labels) != model.classes:
        raise UsageError(f"‹labels›: {len(options.labels)} labels for {model.classes} classes: give one each, in order")
    rewriter = get_rewriter(model)
    if options.float_type is None and options.floats == "float16" and rewriter.halve is None:
        told = "%s: float layers are float32 in this file, since float16 is for Swin classifiers alone: "
        told += "its engine needs ‹allow_float32›, and " if options.precision == "int8" else ""
        log.warning(told + "it may be slower than a float16 model", card.name)
        options = replace(options, float_type="float32")
    rewrites = rewriter.chosen(options)
    choose_nodes(model, card, options)
    settings = [node.setting for node in enabled_nodes(model).values()]
    options = replace(options, wide=any(setting.bits > 8 for setting in settings))
    # ONNX Runtime makes one operator of a tanh GELU only where the file has one; NPUs take GELU as one operator alone
    has_tanh_gelu = any(getattr(module, "approximate", None) == "tanh" for module in model.modules())
    newest = any(setting.format == FP8 for setting in settings) or has_tanh_gelu or options.npu
    if options.opset is None and not options.wide and newest:
        options = replace(options, opset=options.version if options.int4_weights else OPSETS[-1])
    beyond_half = card.calibration["beyond_half"] if card.calibration else ()
    preprocess = Preprocess.from_dict(card.preprocess) if options.uint8_input else None
    check_ends(model, options, preprocess)
    images = example(model, options, options.batch or 2)
    inputs = {"images": images.permute(0, 2, 3, 1).to(torch.uint8) if options.uint8_input else images}
    inputs = model.inputs.unpack(images) if model.inputs else inputs
    exported = network(model, options, preprocess, beyond_half)
    taken = Counter[str](getattr(module, "operator", "") for module in exported.modules())
    if options.compiled:  # from here on they are as if they had been asked for
        options = replace(options, plugin=tuple(one for one in options.compiled if one.partition("=")[0] in taken))
    outputs = [model.output_kind]
    if model.output_kind == FEATURES:
        outputs = list(model.output_names) or [f"{FEATURES}{stage}" for stage in model.output_stages]
    outputs += ["probabilities"] * options.softmax + ["top_classes", "top_probabilities"] * bool(options.top_k)
    int4, own = int4_nodes(model, card, options), rewriter.translations()
    proto = to_onnx(exported, inputs, options, int4, outputs, own, model.takes_any_size)
    (opset,) = [one.version for one in proto.opset_import if not one.domain]
    recorded = {key: value for key, value in asdict(options).items() if key not in ("labels", "wide")}
    recorded |= {"replace": list(options.replace), "plugin": list(options.plugin), "float_type": options.floats}
    recorded |= {"rewrites": sorted(rewrites), "opset": opset, SAFE_ON: safe_on(model)}
    if rewriter.find_left and options.wants.compiled and not options.plain and settings:
        record_compiled(recorded, taken, rewriter.find_left(exported))
    quantized = get_precision(model)
    precision = quantized if settings else options.floats
    labels = options.labels
    if not labels and model.output_kind == LOGITS and len(card.class_names) == model.classes:
        labels = tuple(map(get_english_names, card.class_names))
    write_metadata(proto, card, precision, recorded, labels)
    kind = "" if model.output_kind == LOGITS else f"_{model.output_kind}"
    called = "int4" if options.int4_weights else quantized.lower()
    file = folder / f"{card.name}{kind}_{options.suffix(called)}.onnx"
    if options.npu:
        if wrong := [one for target in NPUS for one in misfits(proto, target)]:
            why = listed(dict.fromkeys(wrong), 3)
            raise UsageError(f"{card.name}: ‹npu›: {why}: this network has no form for NPUs here")
    others = store(proto, file)
    onnx.checker.check_model(str(file), full_check=True)
    recorded[RUNS_ON] = requirements(card, precision, recorded)
    return finish_artifact(file, card, "onnx", precision, recorded, others)


def record_compiled(recorded: dict[str, Any], taken: Mapping[str, int], left: Mapping[str, Mapping[str, int]]) -> None:
    """Record how many parts of a network are compiled, `taken`, and why others are `left` plain, by operator."""
    counts = {name: taken.get(name, 0) + sum(reasons.values()) for name, reasons in left.items()}
    if counts := {name: count for name, count in counts.items() if count}:
        recorded["compiled"] = {name: f"{taken.get(name, 0)} of {count}" for name, count in counts.items()}
        log.info("compiled: %s", ", ".join(f"{recorded['compiled'][name]} {_PARTS[name]}" for name in counts))
    if plain := {name: dict(reasons) for name, reasons in left.items() if reasons}:
        recorded["left_plain"] = plain
        for name, reasons in plain.items():
            log.info("plain %s: %s", _PARTS[name], ", ".join(f"{count} {why}" for why, count in reasons.items()))


def choose_nodes(model: Classifier, card: RunCard, options: OnnxOptions) -> None:
    """Apply the policy of `card`, none for float. An error names the nodes that Q/DQ cannot express."""
    policy = apply_card_policy(model, card, options.precision)
    if options.precision == "float":
        return
    nodes = enabled_nodes(model)
    for fault, is_at_fault in FAULTS.items():
        if names := [name for name, node in nodes.items() if is_at_fault(node)]:
            raise SwinQuantError(f"{card.name}: {len(names)} of {len(nodes)} nodes {fault}: {listed(names, 3)}")
    lacking: dict[str, list[str]] = {}  # what the target does not take -> the nodes that have it
    if options.wants.symmetric:
        linears = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, QuantLinear)]
        centred = {f"{name}._input_quantizer" for name, one in linears if not one._aftergemm_quantizer.setting.enabled}
        lacking[f"zero points but those that a linear's bias can hold, and policy {policy} has them"] = [
            name for name, node in nodes.items() if not node.setting.symmetric and name not in centred
        ]
        wide = [name for name, node in nodes.items() if node.setting.bits > 8]
        lacking[f"16 bits, and policy {policy} has them"] = wide
    float8 = [name for name, node in nodes.items() if node.setting.format == FP8]
    lacking[f"float8, and policy {policy} has it"] = [] if options.wants.fp8 else float8
    for what, names in lacking.items():
        if names:
            where = f"at {listed(names, 3)}: choose a ‹policy› without"
            raise UsageError(f"{card.name}: {options.target} takes no {what} {where}")
    most = INT4_BITS if options.int4_weights else 0  # before opset 21 Q/DQ has no blocks
    if names := [name for name, node in nodes.items() if node.setting.block and node.setting.bits > most]:
        how = f"they have more than {INT4_BITS} bits" if options.int4_weights else "give ‹int4_weights›"
        raise UsageError(f"{card.name}: weights in blocks are for INT4 files, and {listed(names, 3)} have them: {how}")
    if float8 and options.opset and options.version < FP8_OPSET:
        raise UsageError(f"opset {options.opset}: float8 of policy {policy} needs {FP8_OPSET} or later")


def int4_nodes(model: nn.Module, card: RunCard, options: OnnxOptions) -> list[str]:
    """The weight nodes to store as INT4. UsageError if the options ask for INT4 and the policy gives no such node."""
    if not options.int4_weights:
        return []
    weights = {name: node for name, node in enabled_nodes(model).items() if node.role is Role.GEMM_WEIGHT}
    if found := [name for name, node in weights.items() if node.setting.bits <= INT4_BITS]:
        return found
    policy = card.policy["name"] if card.policy else "none"
    raise UsageError(f"‹int4_weights›: policy {policy} has no weights of {INT4_BITS} bits: give ‹policy› w4a16 or w4a8")


def to_onnx(
    model: nn.Module,
    images: Mapping[str, Tensor],
    options: OnnxOptions,
    int4: Collection[str],
    outputs: Sequence[str],
    own: Mapping[Any, Callable[..., Any]],
    any_size: bool,
) -> "ModelProto":
    """The graph of `model` as traced with inputs by name, such as `images` [batch, in, H, W], to the named `outputs`.

    `int4`: weight nodes whose values are stored in 4 bits. `own`: translations of the architecture's own operators.
    `any_size`: the graph takes any height and width.
    """
    from onnx.helper import find_min_ir_version_for

    from swin_quant.backends.onnx.functions import add_functions
    from swin_quant.backends.onnx.graph import finish, store_int4

    replacing, plugging = Replacing(chosen(options.replace)), Plugging(parse_plugins(options.plugin, options.replace))
    if options.replace or options.plugin:
        kind = type(model)

        def forward(self: nn.Module, images: Tensor) -> Any:
            with replacing, plugging:
                return kind.forward(self, images)

        set_forward(model, forward)
    open_sizes = {} if options.batch else {0: torch.export.Dim("batch")}
    if any_size and not options.uint8_input:
        open_sizes |= {2: torch.export.Dim("height", min=4), 3: torch.export.Dim("width", min=4)}
    with warnings.catch_warnings(), torch.no_grad(), short_traces():
        warnings.simplefilter("ignore")
        try:
            program: Any = torch.onnx.export(
                model,
                tuple(images.values()),
                dynamo=True,
                external_data=False,
                verbose=False,
                opset_version=max(options.version, 18),  # the exporter's lowest
                optimize=False,
                dynamic_shapes=(open_sizes,) * len(images) if open_sizes else None,
                input_names=list(images),
                output_names=list(outputs),
                custom_translation_table=translations(options.version, options.wants.channels_last) | dict(own),
            )
        except torch.onnx.OnnxExporterError as error:
            cause: BaseException = error
            while cause.__cause__ is not None:
                cause = cause.__cause__
            raise SwinQuantError(f"torch's exporter to ONNX: {first_line(cause)[:300]}") from error
    if program is None:
        raise SwinQuantError("torch's exporter wrote no graph")
    check_used(options.replace, replacing, plugging)
    opset = finish(program.model, options.version, options.wants, asked=options.opset is not None)
    store_int4(program.model, int4)
    proto = program.model_proto
    proto.graph.ClearField("value_info")  # readers infer shapes themselves
    if not options.batch and any(one.type.tensor_type.shape.dim[0].HasField("dim_value") for one in proto.graph.input):
        raise SwinQuantError("torch's exporter can write this model for one batch size alone: give it by ‹batch› N")
    add_functions(proto, plugging.nodes, opset)
    proto.ir_version = find_min_ir_version_for(proto.opset_import, True)  # old runtimes refuse newer file formats
    proto.producer_name, proto.producer_version = "swin_quant", __version__
    return proto
