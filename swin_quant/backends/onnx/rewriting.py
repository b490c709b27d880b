"""Rewrites an architecture for export by named rewrites that keep its function; undoes them in tensors of a file."""

import importlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from swin_quant.backends.artifact import Artifact
from swin_quant.backends.onnx.options import OnnxOptions
from swin_quant.base.errors import UsageError
from swin_quant.config.load import from_dict
from swin_quant.models.classifier import Classifier
from swin_quant.models.registry import build_model

Restore = Callable[[Tensor], Tensor]
_OURS = "swin_quant.backends.onnx"


@dataclass(frozen=True)
class Rewriter:
    """The rewrites of an architecture, which its `Architecture` finds as REWRITER in a module.

    `table`: name -> a change in place of the lowered model (`layers`). They apply in this order; none changes a value
    beyond the rounding of float32, or an int8 value of a weight.
    `network`: makes the network to export, pictures [B, in, S, S] -> logits [B, classes], both of the given type.
    `builds_on`: the first rewrite, which all the others need.
    `constants`: rewrites that store computable values, for targets that want that.
    `unfused`: rewrites for targets that fuse no attention. `for_half`: rewrites that float16 needs.
    `plugins`: operator -> the change that makes calls of a plugin's operator (`operators/plugins`). Its second argument
    is as that of `apply`; modules that it makes have the operator's name as `operator`.
    `halve`: makes a rewritten model float16, except the layers around the nodes in `beyond_half`.
    `stem`: the float convolution without padding that reads the pictures, into which their normalisation can be folded.
    `restore`: (model, names of rewrites) -> module -> the function that undoes the rewrites in the module's tensor, or
    None if nothing can.
    `translations`: the ONNX form of the architecture's own operators, as torch's exporter takes it.
    """

    table: Mapping[str, Callable[[nn.Module], None]]
    network: Callable[[Any, torch.dtype], nn.Module]
    builds_on: str | None = None
    constants: frozenset[str] = frozenset()
    unfused: frozenset[str] = frozenset()
    for_half: frozenset[str] = frozenset()
    plugins: Mapping[str, Callable[[nn.Module, Callable[[], bool] | None], None]] = field(default_factory=dict)
    halve: Callable[[Any, Iterable[str]], None] | None = None
    stem: str | None = None
    restore: Callable[[Any, Collection[str]], Mapping[str, Restore | None]] | None = None
    translations: Callable[[], Mapping[Any, Callable[..., Any]]] | None = None

    def chosen(self, options: OnnxOptions) -> frozenset[str]:
        """The names of the rewrites that apply. UsageError for an unknown name, or one without those that it needs."""
        everything = frozenset(self.table)
        if options.rewrites is None:
            kept_out = (frozenset() if options.stores_constants else self.constants) | (
                self.unfused if options.fuses_attention else frozenset()
            )
            names = everything - kept_out
        else:
            names = options.rewrites
        if unknown := sorted(names - everything):
            raise UsageError(f"no rewrite {unknown[0]!r}: there are {', '.join(self.table) or 'none'}")
        if names and self.builds_on and self.builds_on not in names:
            raise UsageError(f"rewrite {min(names)} builds on {self.builds_on}: give both")
        if options.floats == "float16":
            self._check_half(names)
        return names

    def _check_half(self, names: frozenset[str]) -> None:
        if self.halve is None:
            raise UsageError("float16: this architecture has no rewrites that set types of layers: choose float32")
        if not self.for_half <= names:
            needed = " and ".join(name for name in self.table if name in self.for_half)
            raise UsageError(f"float16 needs the rewrites {needed}: they set types of layers")

    def apply(
        self,
        model: nn.Module,
        names: Iterable[str],
        plugged: Collection[str] = (),
        is_compiled: Callable[[str], bool] | None = None,
    ) -> None:
        """Apply the rewrites `names`, in the order of the table, then the changes for the operators `plugged`.

        With `is_compiled` these leave alone what their operator does not compute fast, and all where it says no to it.
        """
        for name, rewrite in self.table.items():
            if name in names:
                with torch.no_grad():
                    rewrite(model)
        for operator, change in self.plugins.items():
            if operator in plugged:
                change(model, partial(is_compiled, operator) if is_compiled else None)


class Cast(nn.Module):
    """A float32 model with pictures and logits of another type."""

    def __init__(self, model: Classifier, io_type: torch.dtype) -> None:
        super().__init__()
        self.model, self.io_type = model, io_type

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images.float()).to(self.io_type)


def as_it_is(model: Classifier, io_type: torch.dtype) -> nn.Module:
    """The model itself, or with casts around it."""
    return model if io_type is torch.float32 else Cast(model, io_type)


NO_REWRITES = Rewriter({}, as_it_is)


def rewriter_of(model: Classifier) -> Rewriter:
    """The rewriter of the model's architecture; NO_REWRITES if it has none, or the model has no known architecture."""
    name = model.architecture.rewrites if model.architecture else None
    if name is None:
        return NO_REWRITES
    return importlib.import_module(name if "." in name else f"{_OURS}.{name}").REWRITER


def restoring(artifact: Artifact) -> Mapping[str, Restore | None]:
    """Module -> the function from its tensor in the file to the trained model's; None if they cannot be compared.

    Modules that are not named have the same tensor in both.
    """
    model = build_model(from_dict(artifact.card.config, str(artifact.file)))
    restore = rewriter_of(model).restore
    if restore:
        return restore(model, frozenset(artifact.record["options"].get("rewrites", ())))
    return dict.fromkeys(holding_activations(model))


def holding_activations(model: nn.Module) -> list[str]:
    """timm's norms that hold their activation: in a file the activation's output is named as the norm's."""
    norms = {name: module for name, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)}
    return [name for name, module in norms.items() if any(True for _ in module.children())]
