"""Traces a model into a TorchScript file, and runs it in torch: the results that a compiler of the file has to match.

Nodes become torch's fake-quantize operators, plugins take some operators. A file is code: a warning says so unless this
process wrote it. Plugins' operators are registered in torch, so that a traced graph can hold them and run without the
user's library.
"""

import copy
import io
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swin_quant.backends.artifact import (
    Artifact,
    Details,
    apply_for_engine,
    file_stem,
    finish_artifact,
    get_policy_name,
)
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.base.files import atomic_write_bytes, ensure_writable_dir, near
from swin_quant.base.progress import log
from swin_quant.cards.card import RunCard
from swin_quant.models.classifier import Classifier
from swin_quant.operators.plugins import Node, Plugging, Plugin, parse_plugins
from swin_quant.operators.replacements import Replacing, check_used, chosen
from swin_quant.quant.fake_quant import FP8
from swin_quant.quant.quantizer import Quantizer, State, named_nodes
from swin_quant.score.engine import Engine
from swin_quant.score.options import EngineOptions

NAME = "TorchScript"
_known: set[str] = set()  # hashes of the files that this process wrote or warned of


def load(artifact: Artifact, options: EngineOptions = EngineOptions()) -> Engine:
    """The engine of a TorchScript artifact, float32 on the CPU. `extensions`: libraries that define its operators.

    UsageError for another type or device, and for an extension that torch cannot load.
    """
    if options.float_type not in (None, "float32"):
        raise UsageError(f"‹float_type› {options.float_type}: a traced model is float32")
    if options.device != "cpu":
        raise UsageError(f"{NAME}: runs on a CPU here, not on {options.device}")
    if artifact.record["sha256"] not in _known:  # its run card proves nothing: it may come from the same stranger
        _known.add(artifact.record["sha256"])
        log.warning(
            "%s: is TorchScript, which is code and runs with your rights: run only what you or somebody you trust "
            "exported",
            artifact.file,
        )
    for extension in options.extensions:
        if not Path(extension).is_file():
            raise UsageError(f"‹extension› {extension}: no such file{near(extension)}")
        try:
            torch.ops.load_library(extension)
        except (OSError, RuntimeError) as error:
            raise UsageError(f"‹extension› {extension}: torch cannot load it: {str(error).splitlines()[0]}") from error
    define(parse_plugins(tuple(artifact.record["options"].get("plugin", ()))))
    if options.threads:
        torch.set_num_threads(options.threads)
    file = artifact.file
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that TorchScript is deprecated
            module = torch.jit.load(str(file), map_location="cpu").eval()
    except Exception as error:  # a broken file raises RuntimeError and others
        raise SwinQuantError(f"{file}: torch cannot read it: {str(error).strip().splitlines()[0]}") from error

    @torch.inference_mode()
    def run(images: Tensor) -> Tensor:
        try:
            logits: Tensor = module(images)
        except (RuntimeError, torch.jit.Error) as error:
            raise SwinQuantError(f"{file}: torch cannot run it: {str(error).strip().splitlines()[-1]}") from error
        return logits

    details = Details({"library": f"torch {torch.__version__}", "float_type": "float32"}, dict)
    return Engine(NAME, artifact.record["precision"], get_policy_name(artifact), run, details=details)


def _layer_norm(x: Tensor, scale: Tensor, bias: Tensor, axis: int, epsilon: float) -> Tensor:
    return F.layer_norm(x, x.shape[axis:], scale, bias, epsilon)


# Operator -> its inputs and attributes, written as in torch's schemas, and the function that computes it.
SCHEMAS: dict[str, tuple[str, Callable[..., Tensor]]] = {
    "roll": ("Tensor x, int[] shifts, int[] dims", torch.roll),
    "relu": ("Tensor x", torch.relu),
    "layer_norm": ("Tensor x, Tensor scale, Tensor bias, int axis, float epsilon", _layer_norm),
}
_ours: list[Any] = []  # torch libraries, kept alive: an operator lives as long as the library that defined it


def check(plugins: Mapping[str, Plugin]) -> None:
    """UsageError for an operator that a trace cannot hold, and for a domain that torch cannot call."""
    for operator, plugin in plugins.items():
        if operator not in SCHEMAS:
            raise UsageError(f"‹plugin› {operator}: only ONNX files have it; traced ones have {', '.join(SCHEMAS)}")
        if "." in plugin.domain:
            raise UsageError(
                f"‹plugin› {operator}={plugin.domain}::{plugin.name}: domains here have no dots: choose another"
            )


def define(plugins: Mapping[str, Plugin]) -> None:
    """Register each plugin's operator in torch unless it is there. UsageError as `check` raises it."""
    check(plugins)
    for operator, plugin in plugins.items():
        arguments, function = SCHEMAS[operator]
        if not hasattr(getattr(torch.ops, plugin.domain), plugin.name):
            library = torch.library.Library(plugin.domain, "FRAGMENT")
            library.define(f"{plugin.name}({arguments}) -> Tensor")
            library.impl(plugin.name, function, "CompositeImplicitAutograd")
            _ours.append(library)


def call(plugin: Plugin, node: Node) -> Tensor:
    """Call a plugin's operator, which a trace holds as one node."""
    function = getattr(getattr(torch.ops, plugin.domain), plugin.name)
    return function(*node.inputs, *node.attributes.values())


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
    artifact = finish_artifact(file, card, "torchscript", precision, asdict(options))
    _known.add(artifact.record["sha256"])
    return artifact


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
