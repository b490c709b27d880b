"""Export a calibrated model to ONNX: rewrite the model, let torch's dynamo exporter write it, name, check and store."""

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from swin_quant.backends.artifact import Artifact, apply_card_policy, finish_artifact
from swin_quant.backends.onnx.functions import add_functions
from swin_quant.backends.onnx.graph import finish
from swin_quant.backends.onnx.layers import takes_offset
from swin_quant.backends.onnx.network import (
    check_ends,
    get_rewriter,
    list_added_output_names,
    make_example_inputs,
    network,
    set_forward,
)
from swin_quant.backends.onnx.operators import translations
from swin_quant.backends.onnx.options import FP8_OPSET, INT4_BITS, OPSETS, OnnxOptions
from swin_quant.backends.onnx.pairs import constant
from swin_quant.backends.onnx_reader import metadata
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
from swin_quant.quant.policy import enabled_nodes
from swin_quant.quant.quantizer import Quantizer, Role
from swin_quant.score.engine import get_precision

if TYPE_CHECKING:
    import onnx_ir as ir
    from onnx import ModelProto


ONE_FILE_LIMIT = (1 << 31) - (1 << 20)  # protobuf's 2 GB, less 1 MB for the graph itself


def store(model: "ModelProto", file: Path) -> list[Path]:
    """Write `file` atomically; returns the files beside it. Weights moved into `<file>.data` are cut from `model`."""
    is_large = sum(len(tensor.raw_data) for tensor in model.graph.initializer) > ONE_FILE_LIMIT
    others = [_split_off(model, file.with_name(file.name + ".data"))] if is_large else []
    atomic_write_bytes(file, model.SerializeToString())
    return others


def _split_off(model: "ModelProto", data: Path) -> Path:
    import onnx.external_data_helper as external

    blobs, offset = [], 0
    for tensor in model.graph.initializer:
        if len(tensor.raw_data) >= 1024:
            blobs.append(tensor.raw_data)
            external.set_external_data(tensor, data.name, offset=offset, length=len(tensor.raw_data))
            tensor.ClearField("raw_data")
            offset += len(blobs[-1])
    atomic_write_bytes(data, b"".join(blobs))
    return data


def store_int4(model: "ir.Model", nodes: Collection[str]) -> None:
    """Store the levels, -8 to 7, of these weight nodes as INT4, in place.

    Their zero points are dropped: they are 0, which is the default, and would have to be INT4, too.
    """
    import ml_dtypes
    import onnx_ir as ir

    for name in nodes:
        value = model.graph.initializers[f"{name}.values"]
        levels = constant(value).numpy()
        value.const_value = ir.Tensor(levels.astype(ml_dtypes.int4), name=value.name)
        value.type = ir.TensorType(ir.DataType.INT4)
        for reader, _ in list(value.uses()):
            zero_point = reader.inputs[2] if len(reader.inputs) > 2 else None
            scale = constant(reader.inputs[1]).numpy()
            if scale.ndim > 1:  # [in / block, out]
                reader.attributes["block_size"] = ir.AttrInt64("block_size", len(levels) // len(scale))
            reader.resize_inputs(2)
            if zero_point is not None and not zero_point.uses():
                del model.graph.initializers[str(zero_point.name)]


__all__ = ["OnnxOptions", "export"]

FAULTS: dict[str, Callable[[Quantizer], bool]] = {
    "have no range (amax), run `swin-quant calibrate`": lambda node: node.amax is None,
    "have no lower end (bounds) for their zero point, calibrate again": (
        lambda node: not node.setting.symmetric and node.bounds is None
    ),
    "have a range (amax) of 0, NaN or infinity, calibrate again on pictures that reach them": (
        lambda node: not (torch.isfinite(used := _amax(node)) & (used > TINY_AMAX)).all()
    ),
    "have fewer than 8 bits, or 9 to 15, which ONNX has for weights alone": (
        lambda node: node.setting.bits not in (8, 16) and node.role is not Role.GEMM_WEIGHT
    ),
    "have a narrow range, which ONNX has for weights alone": (
        lambda node: node.setting.narrow_range and node.role is not Role.GEMM_WEIGHT
    ),
}


# Opset -> the oldest file format that allows it (onnx/docs/Versioning.md): old runtimes refuse newer formats.
_IR_VERSIONS = {17: 8, 18: 8, 19: 9, 20: 9, 21: 10}


_PARTS = {"mlp": "MLPs", "token_branch": "attentions"}  # what operators may compute with all that is around it


def _amax(node: Quantizer) -> Tensor:
    return node.range if node.setting.symmetric else node.range_for()


def _labels(model: Classifier, card: RunCard) -> list[str] | None:
    """The card's class names, in English; None if it has none for this model."""
    has = model.output_kind == LOGITS and len(card.class_names) == model.classes
    return [get_english_names(name) for name in card.class_names] if has else None


def export(model: Classifier, card: RunCard, folder: str | Path, options: OnnxOptions = OnnxOptions()) -> Artifact:
    """Write `<NAME>_<int8|w4a16|int4|fp8|fp32|fp16>[_<target>].onnx` and its run card, under the card's policy.

    `model` has the ranges of its nodes, and comes back with the policy applied and every node off. Every refusal comes
    before the file is written.
    """
    onnx = library("onnx", "onnx")
    library("onnxscript", "onnx")
    folder = ensure_writable_dir(_in_text(folder))
    if options.labels and len(options.labels) != model.classes:
        raise UsageError(f"‹labels›: {len(options.labels)} labels for {model.classes} classes: give one each, in order")
    rewriter = get_rewriter(model)
    rewrites = rewriter.chosen(options)
    choose_nodes(model, card, options)
    options = replace(options, wide=any(node.setting.bits > 8 for node in enabled_nodes(model).values()))
    newest = has_fp8(model) or _has_tanh_gelu(model) or options.npu  # NPUs take GELU as one operator alone
    if options.opset is None and not options.wide and newest:
        options = replace(options, opset=options.version if options.int4_weights else OPSETS[-1])
    beyond_half = card.calibration["beyond_half"] if card.calibration else ()
    preprocess = Preprocess.from_dict(card.preprocess) if options.uint8_input else None
    check_ends(model, options, preprocess)
    images = make_example_inputs(model, options, options.batch or 2)
    exported = network(model, options, preprocess, beyond_half)
    taken = Counter(getattr(module, "operator", None) for module in exported.modules())
    if options.compiled:  # from here on they are as if they had been asked for
        options = replace(options, plugin=tuple(one for one in options.compiled if one.partition("=")[0] in taken))
    outputs = [*list_output_names(model), *list_added_output_names(options)]
    own = rewriter.translations() if rewriter.translations else {}
    int4 = int4_nodes(model, card, options)
    proto = to_onnx(exported, images, options, int4, outputs, own, any_size=model.takes_any_size)
    (opset,) = [one.version for one in proto.opset_import if not one.domain]
    recorded = recorded_options(options, rewrites) | {"opset": opset} | {SAFE_ON: safe_on(model)}
    found = rewriter.counted(model) if rewriter.counted and options.wants.compiled and not options.plain else {}
    if found := {name: count for name, count in found.items() if count}:
        recorded["compiled"] = {name: f"{taken[name]} of {count}" for name, count in found.items()}
        log.info("compiled: %s", ", ".join(f"{recorded['compiled'][name]} {_PARTS[name]}" for name in found))
    quantized = get_precision(model)
    precision = quantized if enabled_nodes(model) else options.floats
    metadata.write(proto, card, precision, recorded, options.labels or _labels(model, card))
    kind = "" if model.output_kind == LOGITS else f"_{model.output_kind}"
    called = "int4" if options.int4_weights else quantized.lower()
    file = folder / f"{card.name}{kind}_{options.suffix(called)}.onnx"
    if options.npu:
        _check_npu(card.name, proto)
    others = store(proto, file)
    onnx.checker.check_model(str(file), full_check=True)
    recorded[RUNS_ON] = requirements(card, precision, recorded)
    return finish_artifact(file, card, "onnx", precision, recorded, others)


def _check_npu(name: str, proto: "ModelProto") -> None:
    """UsageError, with nodes and reasons, for a graph that breaks the rules of an NPU."""
    copied = type(proto).FromString(proto.SerializeToString())
    if found := [str(one) for target in NPUS for one in misfits(copied, target)]:
        raise UsageError(f"{name}: ‹npu›: {listed(dict.fromkeys(found), 3)}: this network has no form for NPUs here")


def _in_text(folder: str | Path) -> str | Path:
    """`folder`. UsageError for a path that is not UTF-8: ONNX takes no other."""
    try:
        str(folder).encode()
    except UnicodeEncodeError:
        raise UsageError(f"‹output› {ascii(str(folder))}: is no UTF-8, and ONNX takes no other path") from None
    return folder


def choose_nodes(model: Classifier, card: RunCard, options: OnnxOptions) -> None:
    """Apply the policy of `card`, none for float. An error names the nodes that Q/DQ cannot express."""
    policy = apply_card_policy(model, card, options.precision)
    if options.precision == "float":
        return
    nodes = enabled_nodes(model)
    for fault, is_at_fault in FAULTS.items():
        if names := [name for name, node in nodes.items() if is_at_fault(node)]:
            raise SwinQuantError(f"{card.name}: {len(names)} of {len(nodes)} nodes {fault}: {listed(names, 3)}")
    if options.wants.symmetric:
        centred = {f"{name}._input_quantizer" for name, layer in model.named_modules() if takes_offset(layer)}
        if names := [name for name, node in nodes.items() if not node.setting.symmetric and name not in centred]:
            raise UsageError(
                f"{card.name}: {options.target} takes no zero points but those that a linear's bias can hold, and "
                f"policy {policy} has them at {listed(names, 3)}: choose a ‹policy› without"
            )
        if names := [name for name, node in nodes.items() if node.setting.bits > 8]:
            raise UsageError(
                f"{card.name}: {options.target} takes no 16 bits, and policy {policy} has them at "
                f"{listed(names, 3)}: choose a ‹policy› without"
            )
    _check_blocks(card.name, nodes, options)
    names = [name for name, node in nodes.items() if node.setting.format == FP8]
    if names and not options.wants.fp8:
        raise UsageError(
            f"{card.name}: {options.target} takes no float8, and policy {policy} has it at "
            f"{listed(names, 3)}: choose a ‹policy› without"
        )
    if names and options.opset and options.version < FP8_OPSET:
        raise UsageError(f"opset {options.opset}: float8 of policy {policy} needs {FP8_OPSET} or later")


def _check_blocks(name: str, nodes: Mapping[str, Quantizer], options: OnnxOptions) -> None:
    """UsageError for weights in blocks that are not stored as INT4: before opset 21 Q/DQ has no blocks."""
    wide = [
        name
        for name, node in nodes.items()
        if node.setting.block and not (options.int4_weights and node.setting.bits <= INT4_BITS)
    ]
    if wide:
        how = "give ‹int4_weights›" if not options.int4_weights else f"they have more than {INT4_BITS} bits"
        raise UsageError(f"{name}: weights in blocks are for INT4 files, and {listed(wide, 3)} have them: {how}")


def _has_tanh_gelu(model: nn.Module) -> bool:
    """Whether a GELU is computed by tanh, of which ONNX Runtime makes one operator only where the file has one."""
    return any(getattr(module, "approximate", None) == "tanh" for module in model.modules())


def has_fp8(model: nn.Module) -> bool:
    """Whether an enabled node is float8."""
    return any(node.setting.format == FP8 for node in enabled_nodes(model).values())


def int4_nodes(model: nn.Module, card: RunCard, options: OnnxOptions) -> list[str]:
    """The weight nodes to store as INT4. UsageError if the options ask for INT4 and the policy gives no such node."""
    if not options.int4_weights:
        return []
    weights = {name: node for name, node in enabled_nodes(model).items() if node.role is Role.GEMM_WEIGHT}
    if found := [name for name, node in weights.items() if node.setting.bits <= INT4_BITS]:
        return found
    policy = card.policy["name"] if card.policy else "none"
    raise UsageError(f"‹int4_weights›: policy {policy} has no weights of {INT4_BITS} bits: give ‹policy› w4a16 or w4a8")


def list_output_names(model: Classifier) -> list[str]:
    """The names of the graph's outputs: `logits`, `embedding`, `features0` to `features3` by stage, or the model's."""
    if model.output_kind != FEATURES:
        return [model.output_kind]
    return list(model.output_names) or [f"{FEATURES}{stage}" for stage in model.output_stages]


def _first_cause(error: BaseException) -> str:
    """The first line of the error that an error of the exporter came from."""
    while error.__cause__ is not None:
        error = error.__cause__
    return first_line(error)[:300]


def to_onnx(
    model: nn.Module,
    images: Mapping[str, Tensor],
    options: OnnxOptions,
    int4: Collection[str] = (),
    outputs: Sequence[str] = (LOGITS,),
    own: Mapping[Any, Callable[..., Any]] = MappingProxyType({}),
    any_size: bool = False,
) -> "ModelProto":
    """The graph of `model` as traced with inputs by name; by default `images` [batch, in, H, W] -> `logits` [batch,
    classes].

    `int4`: weight nodes whose values are stored in 4 bits. `own`: translations of the architecture's own operators.
    `any_size`: the graph takes any height and width.
    """
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
    shapes = (open_sizes,) * len(images) if open_sizes else None
    with warnings.catch_warnings(), torch.no_grad():
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
                dynamic_shapes=shapes,
                input_names=list(images),
                output_names=list(outputs),
                custom_translation_table=translations(options.version) | dict(own),
            )
        except torch.onnx.OnnxExporterError as error:
            raise SwinQuantError(f"torch's exporter to ONNX: {_first_cause(error)}") from error
    if program is None:
        raise SwinQuantError("torch's exporter wrote no graph")
    check_used(options.replace, replacing, plugging)
    asked = options.opset is not None
    wants = options.wants
    opset = finish(program.model, options.version, wants.unsigned, not wants.symmetric, asked, wants.reshaped)
    store_int4(program.model, int4)
    proto = program.model_proto
    proto.graph.ClearField("value_info")  # readers infer shapes themselves
    if not options.batch and any(one.type.tensor_type.shape.dim[0].HasField("dim_value") for one in proto.graph.input):
        raise SwinQuantError("torch's exporter can write this model for one batch size alone: give it by ‹batch› N")
    add_functions(proto, plugging.nodes, opset)
    proto.ir_version = _IR_VERSIONS[opset]
    proto.producer_name, proto.producer_version = "swin_quant", __version__
    return proto


def recorded_options(options: OnnxOptions, rewrites: Iterable[str]) -> dict[str, Any]:
    """The options as a run card keeps them."""
    given = {key: value for key, value in asdict(options).items() if key not in ("labels", "wide")}
    given |= {"replace": list(options.replace), "plugin": list(options.plugin)}
    return given | {"opset": options.version, "float_type": options.floats, "rewrites": sorted(rewrites)}
