"""Writes an ExecuTorch program, and runs it by `executorch.runtime`, on this CPU as a phone does on its own.

Nodes become quantize/dequantize pairs, which XNNPACK fuses into int8 products. XNNPACK 1.5 has two kinds of these. If a
layer's input and result are quantized, both have one fixed range. If only the weight is, XNNPACK finds the range of
each token of the input as it runs, and the result is float. It has no product of a fixed range with a float result:
such a layer computes in float, on the rounded values.
"""

import copy
import json
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from swin_quant.backends.artifact import (
    Artifact,
    Details,
    apply_for_engine,
    file_stem,
    finish_artifact,
    get_policy_name,
    refuse_card,
)
from swin_quant.base.errors import SwinQuantError, UsageError, first_line, listed, one_line
from swin_quant.base.extras import library
from swin_quant.base.files import atomic_write_bytes, ensure_writable_dir
from swin_quant.base.progress import log, silence
from swin_quant.base.schema import checked
from swin_quant.cards.card import RunCard
from swin_quant.config.outputs import FEATURES, LOGITS
from swin_quant.data.class_names import get_english_names
from swin_quant.models.classifier import Classifier
from swin_quant.operators.replacements import Replacement, Replacing, chosen
from swin_quant.quant.fake_quant import FP8, TINY_AMAX, to_levels
from swin_quant.quant.layer import QuantConv2d, weighted_layers
from swin_quant.quant.quantizer import Quantizer, Role, State, named_nodes
from swin_quant.score.engine import Engine
from swin_quant.score.options import EngineOptions

ABOUT = "swin_quant"  # the program's method that gives the facts about it, as JSON
_PAIRS = torch.ops.quantized_decomposed
_INT8 = (-128, 127, torch.int8)
FAULTS: dict[str, Callable[[Quantizer], bool]] = {
    "float8": lambda node: node.setting.format == FP8,
    "ranges (amax) of 0": lambda node: not (node.range_for() > TINY_AMAX).all(),
    "activations of other than 8 bits": lambda node: node.role is not Role.GEMM_WEIGHT and node.setting.bits != 8,
    "activations of a narrow range": lambda node: node.role is not Role.GEMM_WEIGHT and node.setting.narrow_range,
}


class RoundingNode(nn.Module):
    """A node that gives `rounded` of its input and of `tensors`, its buffers; without it, the input."""

    def __init__(self, rounded: Callable[..., Tensor] | None = None, *tensors: Tensor) -> None:
        super().__init__()
        self.rounded, self.state = rounded, State.QUANTIZE if rounded else State.OFF
        for place, tensor in enumerate(tensors):
            self.register_buffer(str(place), tensor)

    def forward(self, x: Tensor) -> Tensor:
        return self.rounded(x, *self.buffers()) if self.rounded else x


def fixed(node: Quantizer) -> RoundingNode:
    """An activation's node as an int8 pair of a fixed range; a zero point of 0 to 255 becomes one of -128 to 127."""
    qmin, qmax = node.grid
    how = (float(node.range_for().detach() / qmax), 0 if node.setting.symmetric else -128 - qmin, *_INT8)
    return RoundingNode(lambda x: _PAIRS.dequantize_per_tensor(_PAIRS.quantize_per_tensor(x, *how), *how))


def by_token(x: Tensor) -> Tensor:
    """The input of a linear, rounded to int8 by the range of each token."""
    how = (*_PAIRS.choose_qparams_per_token_asymmetric(x, torch.int8), *_INT8)
    return _PAIRS.dequantize_per_token(_PAIRS.quantize_per_token(x, *how), *how, torch.float32)


def by_map(x: Tensor) -> Tensor:
    """The input of a convolution, rounded to int8 by the range of the whole map."""
    how = (*_PAIRS.choose_qparams(x, -128, 127, 1e-12, torch.int8), *_INT8)
    return _PAIRS.dequantize_per_tensor.tensor(_PAIRS.quantize_per_tensor.tensor(x, *how), *how)


def by_row(node: Quantizer, weight: Tensor, plain: bool) -> RoundingNode:
    """A weight's node: int8 levels [out, ...] with a scale for each row, or the rounded values, if `plain`."""
    levels, scale = to_levels(weight.detach(), node.range_for(weight).detach(), *node.grid)
    scale = torch.where(scale > 0, scale, 1.0)  # XNNPACK takes no scale of 0
    if plain:
        return RoundingNode(lambda weight, values: values, levels * scale)
    scales, zeros = scale.flatten().expand(len(weight)).contiguous(), torch.zeros(len(weight), dtype=torch.int64)
    dequantize = _PAIRS.dequantize_per_channel
    return RoundingNode(lambda weight, *pair: dequantize(*pair, 0, *_INT8), levels.to(torch.int8), scales, zeros)


@dataclass(frozen=True)
class ExecutorchOptions:
    """Options of the export. `precision` float leaves every node out; `batch`: pictures at a time, None: 1."""

    precision: str = "int8"
    batch: int | None = None

    def __post_init__(self) -> None:
        if self.batch is not None and (type(self.batch) is not int or self.batch < 1):
            raise UsageError(f"‹batch› {self.batch}: must be a whole number from 1: a program takes one batch size")


def export(
    model: Classifier, card: RunCard, folder: str | Path, options: ExecutorchOptions = ExecutorchOptions()
) -> Artifact:
    """Write `<NAME>[_embedding]_<int8|w4a16|fp32>.pte` and its run card, under the card's policy.

    UsageError for a model that needs open shapes or several outputs, and for nodes that XNNPACK has no int8 for.
    """
    library("executorch", "executorch")
    folder = ensure_writable_dir(folder)
    if model.takes_any_size or model.output_kind == FEATURES or model.inputs:
        raise UsageError(f"{card.name}: an ExecuTorch program takes pictures of one size and gives one output")
    precision = apply_for_engine(model, card, options.precision, "XNNPACK", FAULTS)
    recorded = {**asdict(options), "batch": options.batch or 1}
    named = card.class_names if model.output_kind == LOGITS and len(card.class_names) == model.classes else ()
    about = {"name": card.name, "labels": [get_english_names(name) for name in named], "preprocess": card.preprocess}
    about |= {"artifact.precision": precision, "artifact.options.batch": recorded["batch"]}
    try:
        with silence(), torch.no_grad():
            program = lowered(model, torch.zeros(recorded["batch"], *model.input_shape), json.dumps(about))
            content = program.to_executorch().buffer
    except Exception as error:  # of torch.export, of ExecuTorch's verifier, of an operator without a kernel
        raise SwinQuantError(f"{card.name}: ExecuTorch cannot take this network: {first_line(error, 300)}") from error
    products = products_in(program.exported_program().graph_module)
    file = folder / f"{file_stem(model, card, precision)}.pte"
    atomic_write_bytes(file, content)
    plain = [name for name, type_ in products.items() if type_ != "int8"]
    if precision == "int8":
        counts = f"{len(products) - len(plain)} of {len(products)}"
        said = f"; in float: {listed(plain, 4)}" if plain else ""
        log.info("XNNPACK: %s linears and convolutions in int8%s", counts, said)
    return finish_artifact(file, card, "executorch", precision, recorded | {"products": products})


def lowered(model: Classifier, images: Tensor, about: str) -> Any:
    """A copy of the model for pictures [batch, ...], as an EdgeProgramManager whose parts XNNPACK runs where it can.

    `about`: the text that the program's method `swin_quant` returns. Where XNNPACK has no int8 for a layer, its weight
    becomes float, and the program is traced again.
    """
    from executorch.backends.xnnpack._passes.remove_noop_expand_copy_pass import RemoveNoopExpandCopyPass
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower
    from executorch.exir.pass_base import ExportedProgramPassBase, ExportedProgramPassResult
    from executorch.exir.passes.constant_prop_pass import constant_prop_pass

    class Folding(ExportedProgramPassBase):  # type: ignore[misc]  # position biases, and all else that no picture changes
        def call(self, program: Any) -> Any:
            return ExportedProgramPassResult(constant_prop_pass(program), True)

    plain, found = set[str](), None
    while found is None or not found <= plain:
        plain |= found or set()
        copied = copy.deepcopy(model).cpu().eval().requires_grad_(False)
        spell_out(copied, plain)
        traced = torch.export.export(_Respelled(copied), (images,), strict=False)
        found = _without_int8(traced)
    passes = [Folding(), RemoveNoopExpandCopyPass()]
    return to_edge_transform_and_lower(
        traced, passes, partitioner=[XnnpackPartitioner()], constant_methods={ABOUT: about}
    )


def spell_out(model: nn.Module, plain: Collection[str]) -> None:
    """Replace the model's nodes by int8 pairs, in place; the weights of the layers `plain` stay float."""
    layers, nodes = weighted_layers(model), named_nodes(model)
    for layer in layers.values():
        if (bias := layer.effective_bias()) is not None and bias is not layer.bias:  # XNNPACK takes stored ones alone
            layer.register_buffer("whole_bias", bias.detach())
            layer.effective_bias = lambda own=layer: own.whole_bias  # type: ignore[method-assign, misc]
    for name, node in nodes.items():  # a layer's input comes before its weight
        if name not in layers or not node.setting.enabled:
            model.set_submodule(name, fixed(node) if node.setting.enabled else RoundingNode())
            continue
        layer, owner = layers[name], name.rpartition(".")[0]
        is_fixed = nodes[f"{owner}._input_quantizer"].setting.enabled
        has_int8 = isinstance(layer, nn.Linear)
        if isinstance(layer, QuantConv2d):
            has_int8 = layer.padding_mode == "zeros" and (is_fixed or layer.groups == 1)
        is_plain = owner in plain or not has_int8
        model.set_submodule(name, by_row(node, layer.weight, is_plain))
        if not is_fixed and not is_plain:
            rounded = by_token if isinstance(layer, nn.Linear) else by_map
            model.set_submodule(f"{owner}._input_quantizer", RoundingNode(rounded))


def _without_int8(traced: Any) -> set[str]:
    """The layers with int8 weights that XNNPACK multiplies in float: their input is the same for all pictures, or has a
    fixed range, and their result is not rounded right behind them."""
    found, moving = set[str](), set(traced.graph_signature.user_inputs)
    for node in traced.graph.nodes:
        if any(one.name in moving for one in node.all_input_nodes):
            moving.add(node.name)
        source, weight = (str(getattr(one, "target", "")) for one in (*node.args, None, None)[:2])
        if "dequantize_per_channel" not in weight:
            continue
        (reader, *others) = node.users
        if not others and str(reader.target) in ("aten.relu.default", "aten.hardtanh.default"):
            (reader, *others) = reader.users
        is_fixed = source.endswith("dequantize_per_tensor.default")
        if node.name not in moving or (is_fixed and (others or "quantize_per_tensor" not in str(reader.target))):
            found.add(_find_layer(node))
    return found


def _find_layer(node: Any) -> str:
    """The name of the module that called an operator of a traced graph."""
    stack = [str(path) for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
    return stack[-1].removeprefix("network.") if stack and stack[-1] else str(node.name)


def products_in(graph: Any) -> dict[str, str]:
    """Linear or convolution of a lowered graph, by its layer's name -> `int8` or `float32`."""
    inner = [part.original_module.graph_module for part in graph.children() if hasattr(part, "original_module")]
    found = {}
    for part in (graph, *inner):
        for node in part.graph.nodes:
            if re.search(r"aten\.(linear|convolution|addmm|mm)\.", str(node.target)):
                sources = [str(getattr(one, "target", "")) for one in node.args[:2]]
                is_int8 = part is not graph and all("dequantize" in one for one in sources)
                found[_find_layer(node)] = "int8" if is_int8 else "float32"
    return found


class _Respelled(nn.Module):
    """A network whose operators are replaced by ones that XNNPACK runs."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

        def slice_apart(x: Tensor, dim: int = 0) -> Any:  # XNNPACK has no select
            shape = list(x.shape)
            del shape[dim]
            return tuple(x.narrow(dim, place, 1).reshape(shape) for place in range(x.shape[dim]))

        unbind = Replacement({"unbind": slice_apart}, "unbind -> slices")
        self.replacing = Replacing({**chosen(("roll", "patch_merging")), "unbind": unbind})

    def forward(self, images: Tensor) -> Tensor:
        with self.replacing:
            return self.network(images)


NAME = "ExecuTorch"


def load(artifact: Artifact, options: EngineOptions = EngineOptions()) -> Engine:
    """The engine of an ExecuTorch program, float32 besides its int8 products. It fills up a batch to the program's.

    UsageError for another type or device, and for extensions; SwinQuantError for a file that the runtime cannot read.
    """
    if options.float_type not in (None, "float32") or options.device != "cpu" or options.extensions:
        raise UsageError(f"{NAME}: runs on a CPU here, in float32 beside int8, without ‹extension›")
    if options.threads:  # of the process: the runtime has one pool
        library("executorch.extension.pybindings.portable_lib", "executorch")._unsafe_reset_threadpool(options.threads)
    forward = _method(artifact, "forward")
    batch, *shape = forward.metadata.input_tensor_meta(0).sizes()
    version = library("executorch.version", "executorch").__version__
    known = {"library": f"executorch {version}", "float_type": "float32", "threads": options.threads}
    products = checked(dict[str, str], artifact.record["options"].get("products"), str(artifact.file), "products")

    def run(images: Tensor) -> Tensor:
        if (given := [*images.shape[1:]]) != shape:
            fault = f"takes pictures of {shape}, not {given}"
            raise UsageError(f"{artifact.file}: {fault}: prepare them as its run card says")
        filled = torch.cat([images, images.new_zeros(batch - len(images), *shape)]).float().contiguous()
        with _runtime_errors(artifact):
            logits: Tensor = forward.execute((filled,))[0]
        return logits[: len(images)]

    details = Details(known, lambda: products)
    precision, policy = artifact.record["precision"], get_policy_name(artifact)
    return Engine(NAME, precision, policy, run, max_batch=batch, sizes=(batch,), details=details)


def _method(artifact: Artifact, name: str) -> Any:
    """A method of the program. SwinQuantError for a file that the runtime cannot read."""
    runtime = library("executorch.runtime", "executorch").Runtime.get()
    with _runtime_errors(artifact):
        return runtime.load_program(artifact.file).load_method(name)


@contextmanager
def _runtime_errors(artifact: Artifact) -> Iterator[None]:
    """Inside the context, an error of the runtime, which has numbers for them, is a SwinQuantError about the file."""
    try:
        yield
    except Exception as error:
        said = f"ExecuTorch cannot run it here ({one_line(first_line(error))}): it is damaged, or of another release"
        raise SwinQuantError(f"{artifact.file}: {said}: export it again") from error


def about(artifact: Artifact) -> dict[str, Any]:
    """The facts that the export wrote into the program: name, labels, and what a run card must repeat, by its key."""
    method = _method(artifact, ABOUT)
    with _runtime_errors(artifact):
        return checked(dict[str, Any], json.loads(method.execute(())[0]), str(artifact.file), ABOUT)


def read_labels(artifact: Artifact) -> list[str]:
    """The class names in the program; empty if it has none."""
    return checked(list[str], about(artifact).get("labels", []), str(artifact.file), "its labels")


def check_card(artifact: Artifact) -> None:
    """SwinQuantError where a run card contradicts its program: on the input, the precision or the batch."""
    inside, record = about(artifact), artifact.record
    said = {"artifact.precision": record["precision"], "artifact.options.batch": record["options"].get("batch")}
    for key, value in {"preprocess": artifact.card.preprocess, **said}.items():
        if inside.get(key) != value:
            refuse_card(artifact, key, inside.get(key))
