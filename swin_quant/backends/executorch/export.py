"""Writes an ExecuTorch program: nodes become quantize/dequantize pairs, which XNNPACK fuses into int8 products.

XNNPACK 1.5 has two kinds of int8 products. If a layer's input and result are quantized, both have one fixed range. If
only the weight is, XNNPACK finds the range of each token of the input as it runs, and the result is float. It has no
product of a fixed range with a float result: such a layer computes in float, on the rounded values.
"""

import copy
import json
import logging
import re
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from swin_quant.backends.artifact import Artifact, apply_card_policy, finish_artifact
from swin_quant.base.errors import SwinQuantError, UsageError, listed
from swin_quant.base.extras import library
from swin_quant.base.files import atomic_write_bytes, ensure_writable_dir
from swin_quant.base.progress import log
from swin_quant.cards.card import RunCard
from swin_quant.config.outputs import FEATURES, LOGITS
from swin_quant.data.class_names import english_of
from swin_quant.models.classifier import Classifier
from swin_quant.operators.replacements import Replacement, Replacing, chosen
from swin_quant.quant.fake_quant import FP8, TINY_AMAX, to_levels
from swin_quant.quant.layer import QuantConv2d, QuantizedLayer, weighted_layers
from swin_quant.quant.policy import dequantize, enabled_nodes, quantize, refuse_blocks
from swin_quant.quant.quantizer import Quantizer, Role, State, named_nodes
from swin_quant.score.engine import precision_of

ABOUT = "swin_quant"  # the program's method that gives the facts about it, as JSON
_PAIRS = torch.ops.quantized_decomposed
_INT8 = (-128, 127, torch.int8)


class PlainNode(nn.Identity):
    """A node that the program leaves out."""

    state = State.OFF


class FixedPair(nn.Module):
    """An activation's node as an int8 pair of a fixed range; a zero point of 0 to 255 becomes one of -128 to 127."""

    state = State.QUANTIZE

    def __init__(self, node: Quantizer) -> None:
        super().__init__()
        qmin, qmax = node.grid
        self.scale = float(node.range_for().detach() / qmax)
        self.zero_point = 0 if node.setting.symmetric else -128 - qmin

    def forward(self, x: Tensor) -> Tensor:
        how = (self.scale, self.zero_point, *_INT8)
        return _PAIRS.dequantize_per_tensor(_PAIRS.quantize_per_tensor(x, *how), *how)


class TokenPair(PlainNode):
    """The input of a linear, rounded to int8 by the range of each token, or by that of the whole map before a
    convolution."""

    def __init__(self, by_token: bool) -> None:
        super().__init__()
        self.by_token = by_token

    def forward(self, x: Tensor) -> Tensor:
        if not self.by_token:
            how = (*_PAIRS.choose_qparams(x, -128, 127, 1e-12, torch.int8), *_INT8)
            return _PAIRS.dequantize_per_tensor.tensor(_PAIRS.quantize_per_tensor.tensor(x, *how), *how)
        how = (*_PAIRS.choose_qparams_per_token_asymmetric(x, torch.int8), *_INT8)
        return _PAIRS.dequantize_per_token(_PAIRS.quantize_per_token(x, *how), *how, torch.float32)


class RowLevels(nn.Module):
    """A weight's node with the int8 levels of its weight [out, ...] and a scale for each row.

    `plain`: it gives a constant of the rounded values instead, for layers that XNNPACK multiplies in float.
    """

    state = State.QUANTIZE

    def __init__(self, node: Quantizer, weight: Tensor, plain: bool) -> None:
        super().__init__()
        levels, scale = to_levels(weight.detach(), node.range_for(weight).detach(), *node.grid)
        scale = torch.where(scale > 0, scale, 1.0)  # XNNPACK takes no scale of 0
        self.plain = plain
        self.values: Tensor
        self.scale: Tensor
        self.zeros: Tensor
        self.register_buffer("values", levels * scale if plain else levels.to(torch.int8))
        self.register_buffer("scale", scale.flatten().expand(len(weight)).contiguous())
        self.register_buffer("zeros", torch.zeros(len(weight), dtype=torch.int64))

    def forward(self, weight: Tensor) -> Tensor:
        return (
            self.values if self.plain else _PAIRS.dequantize_per_channel(self.values, self.scale, self.zeros, 0, *_INT8)
        )


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
    choose_nodes(model, card, options.precision)
    precision = precision_of(model) if enabled_nodes(model) else "float32"
    recorded = {**asdict(options), "batch": options.batch or 1}
    labels = card.class_names if model.output_kind == LOGITS and len(card.class_names) == model.classes else ()
    about = {"name": card.name, "precision": precision, "preprocess": card.preprocess, "options": recorded}
    about |= {"labels": [english_of(name) for name in labels]}
    images = torch.zeros(recorded["batch"], *model.input_shape)
    try:
        program = lowered_program(model, images, json.dumps(about))
        with _quiet():
            content = program.to_executorch().buffer
    except Exception as error:  # of torch.export, of ExecuTorch's verifier, of an operator without a kernel
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise SwinQuantError(f"{card.name}: ExecuTorch cannot take this network: {said:.300}") from error
    kind = "" if model.output_kind == LOGITS else f"_{model.output_kind}"
    file = folder / f"{card.name}{kind}_{'fp32' if precision == 'float32' else precision.lower()}.pte"
    products = products_of(program.exported_program().graph_module)
    atomic_write_bytes(file, content)
    plain = [name for name, type_ in products.items() if type_ != "int8"]
    said = f"; in float: {listed(plain, 4)}" if plain else ""
    log.info("XNNPACK: %d of %d linears and convolutions in int8%s", len(products) - len(plain), len(products), said)
    return finish_artifact(file, card, "executorch", precision, recorded | {"products": products})


def choose_nodes(model: Classifier, card: RunCard, precision: str) -> None:
    """Apply the policy of `card`, none for float. UsageError, with their names, for nodes that XNNPACK cannot have."""
    apply_card_policy(model, card, precision)
    quantize(model)  # refuses nodes without a range
    dequantize(model)
    refuse_blocks(model, "ExecuTorch")
    nodes = enabled_nodes(model)
    activations = {key: node.setting for key, node in nodes.items() if node.role is not Role.GEMM_WEIGHT}
    for lacking, wrong in {
        "float8": [key for key, node in nodes.items() if node.setting.format == FP8],
        "ranges (amax) of 0": [key for key, node in nodes.items() if not (node.range_for() > TINY_AMAX).all()],
        "activations of other than 8 bits": [key for key, setting in activations.items() if setting.bits != 8],
        "activations of a narrow range": [key for key, setting in activations.items() if setting.narrow_range],
    }.items():
        if wrong:
            raise UsageError(f"{card.name}: XNNPACK has no {lacking}: {listed(wrong, 3)}: choose ‹policy› executorch")


def lowered_program(model: Classifier, images: Tensor, about: str) -> Any:
    """A copy of the model for pictures [batch, ...], as an EdgeProgramManager whose parts XNNPACK runs where it can.

    `about`: the text that the program's method `swin_quant` returns. Where XNNPACK has no int8 for a layer, its weight
    becomes float, and the program is traced again.
    """
    with _quiet(), torch.no_grad():
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
        from executorch.exir import to_edge_transform_and_lower
        from executorch.exir.pass_base import ExportedProgramPassBase, ExportedProgramPassResult
        from executorch.exir.passes.constant_prop_pass import constant_prop_pass

        class Folding(ExportedProgramPassBase):  # type: ignore[misc]  # position biases, and all else that no picture changes
            def call(self, program: Any) -> Any:
                return ExportedProgramPassResult(constant_prop_pass(program), True)

        plain: set[str] = set()
        while True:
            copied = copy.deepcopy(model).cpu().eval().requires_grad_(False)
            spell_out(copied, plain)
            traced = torch.export.export(_Respelled(copied), (images,), strict=False)
            if not (found := _without_int8(traced) - plain):
                break
            plain |= found
        return to_edge_transform_and_lower(
            traced, [Folding()], partitioner=[XnnpackPartitioner()], constant_methods={ABOUT: about}
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings of torch and of ExecuTorch's libraries, which say nothing about the model."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def spell_out(model: nn.Module, plain: Collection[str] = ()) -> None:
    """Replace the model's nodes by pairs, in place; the weights of the layers `plain` stay float."""
    nodes = named_nodes(model)
    made: dict[str, nn.Module] = {
        name: FixedPair(node) if node.setting.enabled else PlainNode()
        for name, node in nodes.items()
        if node.role is not Role.GEMM_WEIGHT
    }
    for name, layer in weighted_layers(model).items():
        owner, _, _ = name.rpartition(".")
        if not nodes[name].setting.enabled:
            made[name] = PlainNode()
            continue
        if (bias := layer.effective_bias()) is not None and bias is not layer.bias:  # XNNPACK takes stored ones alone
            layer.register_buffer("whole_bias", bias.detach())
            layer.effective_bias = lambda own=layer: own.whole_bias  # type: ignore[method-assign, misc]
        is_fixed = layer._input_quantizer.setting.enabled
        is_plain = owner in plain or not _has_int8(layer, is_fixed)
        made[name] = RowLevels(nodes[name], layer.weight, is_plain)
        if not is_fixed and not is_plain:
            made[f"{owner}._input_quantizer"] = TokenPair(isinstance(layer, nn.Linear))
    for name, module in made.items():
        owner, _, own = name.rpartition(".")
        model.get_submodule(owner).add_module(own, module)


def _has_int8(layer: QuantizedLayer, is_fixed: bool) -> bool:
    """Whether XNNPACK has an int8 product for a kind of layer; `is_fixed`: with a fixed range of its input."""
    if isinstance(layer, QuantConv2d):
        return layer.padding_mode == "zeros" and (is_fixed or layer.groups == 1)
    return isinstance(layer, nn.Linear)


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
            found.add(_layer_of(node))
    return found


def _layer_of(node: Any) -> str:
    """The name of the module that called an operator of a traced graph."""
    stack = [str(path) for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
    return stack[-1].removeprefix("network.") if stack and stack[-1] else str(node.name)


def products_of(graph: Any) -> dict[str, str]:
    """Linear or convolution of a lowered graph, by its layer's name -> `int8` or `float32`."""
    inner = [part.original_module.graph_module for part in graph.children() if hasattr(part, "original_module")]
    found = {}
    for part in (graph, *inner):
        for node in part.graph.nodes:
            if re.search(r"aten\.(linear|convolution|addmm|mm)\.", str(node.target)):
                sources = [str(getattr(one, "target", "")) for one in node.args[:2]]
                is_int8 = part is not graph and all("dequantize" in one for one in sources)
                found[_layer_of(node)] = "int8" if is_int8 else "float32"
    return found


def _matmul_by_bmm(a: Tensor, b: Tensor) -> Any:
    """A product of batches as `bmm` between reshapes: torch's decomposition expands both, which XNNPACK does not."""
    if a.dim() != b.dim() or a.dim() < 4 or a.shape[:-2] != b.shape[:-2]:
        return NotImplemented
    return torch.bmm(a.flatten(0, -3), b.flatten(0, -3)).reshape(*a.shape[:-1], b.shape[-1])


def _unbind_by_slices(x: Tensor, dim: int = 0) -> Any:
    """unbind as slices and reshapes: XNNPACK has no select."""
    shape = [*x.shape[: dim % x.dim()], *x.shape[dim % x.dim() + 1 :]]
    return tuple(x.narrow(dim, place, 1).reshape(shape) for place in range(x.shape[dim]))


_OWN = Replacement({"matmul": _matmul_by_bmm, "unbind": _unbind_by_slices}, "operators that XNNPACK has")


class _Respelled(nn.Module):
    """A network whose operators are replaced by ones that XNNPACK runs."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.replacing = Replacing({**chosen(("roll", "patch_merging")), "xnnpack": _OWN})

    def forward(self, images: Tensor) -> Tensor:
        with self.replacing:
            return self.network(images)
