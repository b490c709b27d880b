"""Traces a model into a TorchScript file: nodes become torch's fake-quantize operators, plugins take some operators."""

import copy
import io
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from swin_quant.backends.artifact import Artifact, apply_for_engine, file_stem, finish_artifact
from swin_quant.backends.torchscript.engine import call, check, define, written
from swin_quant.base.errors import UsageError
from swin_quant.base.files import atomic_write_bytes, ensure_writable_dir
from swin_quant.cards.card import RunCard
from swin_quant.models.classifier import Classifier
from swin_quant.operators.plugins import Plugging, parse_plugins
from swin_quant.operators.replacements import Replacing, check_used, chosen
from swin_quant.quant.fake_quant import FP8
from swin_quant.quant.quantizer import Quantizer, State, named_nodes


class Off(nn.Identity):
    """A node that the policy leaves out."""

    state = State.OFF


class FakeQuantize(nn.Module):
    """A node as `aten::fake_quantize_per_tensor_affine`, or `per_channel` along dimension 0 of a weight [out, ...]."""

    state = State.QUANTIZE

    def __init__(self, node: Quantizer, weight: Tensor | None) -> None:
        super().__init__()
        qmin, qmax = node.grid
        span = node.range_for() if weight is None else node.range_for(weight)
        self.scale: Tensor = nn.Buffer((span.detach() / qmax).flatten() if span.dim() else span.detach() / qmax)
        self.zero_point = 0 if node.setting.symmetric else -qmin
        self.least, self.most = (qmin, qmax) if node.setting.symmetric else (0, qmax - qmin)

    def forward(self, x: Tensor) -> Tensor:
        if self.scale.dim():
            zeros = torch.zeros_like(self.scale, dtype=torch.int32)
            return torch.fake_quantize_per_channel_affine(x, self.scale, zeros, 0, self.least, self.most)
        return torch.fake_quantize_per_tensor_affine(x, float(self.scale), self.zero_point, self.least, self.most)


def spell_out(model: nn.Module) -> None:
    """Replace the model's nodes by torch's fake-quantize operators, in place."""
    for name, node in named_nodes(model).items():
        owner, _, own = name.rpartition(".")
        layer = model.get_submodule(owner)
        weight = layer.weight if own == "_weight_quantizer" and isinstance(layer.weight, Tensor) else None
        layer.add_module(own, FakeQuantize(node, weight) if node.setting.enabled else Off())


EXAMPLE = 2  # pictures to trace with: a trace of one picture may fix the batch at 1


@dataclass(frozen=True)
class TorchScriptOptions:
    """Options of the export. `precision` float leaves every node out; `replace`, `plugin`: as in the ONNX export."""

    precision: str = "int8"
    replace: tuple[str, ...] = ()
    plugin: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        chosen(self.replace)
        check(parse_plugins(self.plugin, self.replace))


def export(
    model: Classifier, card: RunCard, folder: str | Path, options: TorchScriptOptions = TorchScriptOptions()
) -> Artifact:
    """Write `<NAME>[_embedding]_<int8|w4a8|fp32>.torchscript.pt` and its run card, under the card's policy.

    UsageError for a model of pictures of any size, for float8 nodes, and for a plugin that the model never calls.
    """
    folder = ensure_writable_dir(folder)
    if model.takes_any_size:
        raise UsageError(
            f"{card.name}: TorchScript keeps the size of the pictures that it was traced with: give logits"
        )
    faults = {"float8 fake-quantize": lambda node: node.setting.format == FP8}
    precision = apply_for_engine(model, card, options.precision, "TorchScript", faults)
    replacing, plugins = Replacing(chosen(options.replace)), parse_plugins(options.plugin, options.replace)
    define(plugins)
    plugging = Plugging(plugins, call)
    copied = copy.deepcopy(model).cpu().eval().requires_grad_(False)
    spell_out(copied)
    content = io.BytesIO()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # torch warns that TorchScript is deprecated, and of every Python number
        images = torch.zeros(EXAMPLE, *model.input_shape)
        torch.jit.save(torch.jit.trace(_Inside(copied, replacing, plugging), images, check_trace=False), content)
    check_used(options.replace, replacing, plugging)
    file = folder / f"{file_stem(model, card, precision)}.torchscript.pt"
    atomic_write_bytes(file, content.getvalue())
    recorded = {**asdict(options), "replace": list(options.replace), "plugin": list(options.plugin)}
    return written(finish_artifact(file, card, "torchscript", precision, recorded))


def _sized(images: Tensor, shape: list[int]) -> Tensor:
    """`images`. ValueError for another size: scripted into the file, because a trace drops the network's own check."""
    if list(images.shape[1:]) != shape:
        raise ValueError(f"pictures {images.shape}: each must be {shape}")
    return images


_checked: Callable[[Tensor, list[int]], Tensor] = torch.jit.script_if_tracing(_sized)


class _Inside(nn.Module):
    """A network that runs with replaced and plugged operators."""

    def __init__(self, network: Classifier, replacing: Replacing, plugging: Plugging) -> None:
        super().__init__()
        self.network, self.replacing, self.plugging = network, replacing, plugging
        self.shape = list(network.input_shape)

    def forward(self, images: Tensor) -> Tensor:
        images = _checked(images, self.shape)
        with self.replacing, self.plugging:
            return self.network(images)
