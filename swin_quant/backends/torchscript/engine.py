"""Runs a TorchScript file in torch: the results that a compiler of the file has to match.

Such a file is code: a warning says so unless this process wrote it. Plugins' operators are registered in torch, so that
a traced graph can hold them and run without the user's library.
"""

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from swin_quant.backends.artifact import Artifact, Details, get_policy_name
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.base.files import near
from swin_quant.base.progress import log
from swin_quant.operators.plugins import Node, Plugin, parse_plugins
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
    tell(artifact)
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


def written(artifact: Artifact) -> Artifact:
    """`artifact`, noted as written by this process."""
    _known.add(artifact.record["sha256"])
    return artifact


def tell(artifact: Artifact) -> None:
    """Warn once that the file runs as code. Its run card proves nothing: it may come from the same stranger."""
    if artifact.record["sha256"] not in _known:
        _known.add(artifact.record["sha256"])
        log.warning(
            "%s: is TorchScript, which is code and runs with your rights: run only what you or somebody you trust "
            "exported",
            artifact.file,
        )


def _layer_norm(x: Tensor, scale: Tensor, bias: Tensor, axis: int, epsilon: float) -> Tensor:
    return F.layer_norm(x, x.shape[axis:], scale, bias, epsilon)


def _window_partition(x: Tensor, window: int) -> Tensor:
    cut = x.unflatten(2, (-1, window)).unflatten(1, (-1, window))  # [B, H / w, w, W / w, w, C]
    return cut.transpose(2, 3).reshape(-1, window * window, x.shape[-1])


# Operator -> its inputs and attributes, written as in torch's schemas, and the function that computes it.
SCHEMAS: dict[str, tuple[str, Callable[..., Tensor]]] = {
    "roll": ("Tensor x, int[] shifts, int[] dims", torch.roll),
    "relu": ("Tensor x", torch.relu),
    "layer_norm": ("Tensor x, Tensor scale, Tensor bias, int axis, float epsilon", _layer_norm),
    "window_partition": ("Tensor x, int window", _window_partition),
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
