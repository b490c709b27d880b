"""Makes the network to export from a trained model: nodes lowered, rewrites applied, float types set, ends added.

Each architecture has named rewrites that keep its function, and undoes them in the tensors of a file. The network's
ends are its input and outputs: it may take pictures as bytes, and give probabilities or the best classes, too.
"""

import copy
import importlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from swin_quant.backends.artifact import Artifact
from swin_quant.backends.backend import function
from swin_quant.backends.onnx.layers import lower, match_scales
from swin_quant.backends.onnx.options import REWRITTEN, OnnxOptions
from swin_quant.base.errors import UsageError, offered
from swin_quant.config.load import from_dict
from swin_quant.config.outputs import LOGITS
from swin_quant.data.preprocess import Preprocess
from swin_quant.models.captured import CapturedNetwork
from swin_quant.models.classifier import Classifier
from swin_quant.models.registry import build_model
from swin_quant.operators.plugins import parse_plugins

Restore = Callable[[Tensor], Tensor]


def network(
    model: Classifier, options: OnnxOptions, preprocess: Preprocess | None, beyond_half: Iterable[str] = ()
) -> nn.Module:
    """A copy of `model` on the CPU, ready for export. The policy of `model` is applied, and its nodes have ranges.

    `preprocess`: the normalisation to put into a network that takes bytes. `beyond_half`: the nodes whose values
    overflow float16.
    """
    rewriter = get_rewriter(model)
    names = rewriter.chosen(options)
    model = copy.deepcopy(model).cpu().eval()
    stem = rewriter.stem if options.uint8_input and options.floats == "float32" else None
    if stem and preprocess:
        fold_normalisation(model.get_submodule(stem), preprocess)
    lower(model, options.wants.symmetric, model.parameters_read)
    if options.compiled and not model.inputs:
        kind = rewriter.measured_as or (model.architecture.family.name if model.architecture else "")
        rewriter.apply(
            model, names, parse_plugins(options.compiled), partial(function(options.wants.are_compiled), kind)
        )
    else:
        plugins = parse_plugins(options.plugin)
        if idle := sorted(REWRITTEN & plugins.keys() - rewriter.plugins.keys()):
            raise UsageError(f"‹plugin› {idle[0]}: the model never calls it: leave it out")
        rewriter.apply(model, names, plugins)
    if options.floats == "float16" and rewriter.halve:
        rewriter.halve(model, beyond_half)
    exported = rewriter.network(model, getattr(torch, options.io_type)).eval().requires_grad_(False)
    match_scales(exported, example(model, options, 1))
    with_ends(exported, options, preprocess, folded=stem is not None)
    if model.inputs:
        set_forward(exported, cast("CapturedNetwork", model).by_name)
    return exported


def example(model: Classifier, options: OnnxOptions, batch: int) -> Tensor:
    """Black pictures [batch, *input_shape]; where it takes any size, of an arbitrary one that is not square."""
    shape = model.input_shape
    if model.takes_any_size:
        shape = (*shape[:-2], shape[-2] + 1, shape[-1] + 6)
    return torch.zeros(batch, *shape, dtype=getattr(torch, options.io_type))


def check_ends(model: Classifier, options: OnnxOptions, preprocess: Preprocess | None) -> None:
    """UsageError for input or outputs that this model cannot have."""
    if model.inputs and (options.has_ends or options.replace or options.plugin):
        raise UsageError(
            "this model takes several inputs: leave out ‹plugin›, ‹replace›, ‹uint8_input›, ‹softmax› and ‹top_k›"
        )
    if (options.softmax or options.top_k) and model.output_kind != LOGITS:
        raise UsageError(f"‹softmax› and ‹top_k› need logits, and this model gives {model.output_kind}")
    if options.top_k and options.top_k > model.classes:
        raise UsageError(f"‹top_k› {options.top_k}: the model has {model.classes} classes")
    if options.uint8_input and preprocess and (not preprocess.is_square or model.in_chans != len(preprocess.mean)):
        raise UsageError("‹uint8_input›: is for RGB pictures of one size, which this model does not take")


def with_ends(model: nn.Module, options: OnnxOptions, preprocess: Preprocess | None, folded: bool) -> None:
    """Give the network its ends, in place.

    With `uint8_input` it takes decoded pictures, uint8 [B, S, S, 3]. `folded`: its weights normalise them, else
    operators do.
    """
    if not options.has_ends:
        return
    kind = type(model)
    given = (preprocess.mean, preprocess.std) if preprocess else ((0.0,), (1.0,))
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in given)

    def forward(self: nn.Module, images: Tensor) -> Any:
        if options.uint8_input:
            images = images.permute(0, 3, 1, 2).float()
            images = images if folded else (images / 255 - mean) / std
        logits = kind.forward(self, images)
        shares = logits.float().softmax(1)
        best = shares.topk(options.top_k, dim=1) if options.top_k else ()
        extras = [shares] * options.softmax + ([best[1], best[0]] if best else [])
        return (logits, *extras) if extras else logits

    set_forward(model, forward)


def set_forward(model: nn.Module, forward: Callable[..., Any], name: str = "forward") -> None:
    """Give one module another forward, or method `name`, in place; a wrapper would change the names of modules."""
    kind = type(model)
    model.__class__ = cast("type[nn.Module]", type(kind.__name__, (kind,), {name: forward}))


def fold_normalisation(convolution: nn.Module, preprocess: Preprocess) -> None:
    """Fold the normalisation into an unpadded convolution, in place: it then takes pixels, 0 to 255."""
    if not isinstance(convolution, nn.Conv2d) or any(convolution.padding):
        raise ValueError("only a convolution without padding can normalise: padded zeros are no pixels")
    both = (preprocess.mean, preprocess.std)
    mean, std = (torch.tensor(values, dtype=torch.float64).view(1, -1, 1, 1) for values in both)
    weight = convolution.weight.detach().double()
    bias = 0 if convolution.bias is None else convolution.bias.detach().double()
    convolution.bias = nn.Parameter((bias - (weight * mean / std).sum((1, 2, 3))).float(), requires_grad=False)
    convolution.weight = nn.Parameter((weight / (255 * std)).float(), requires_grad=False)


@dataclass(frozen=True)
class OperatorRewrite:
    """Lets parts of a rewritten model call a plugin's operator.

    `part`: the attribute of a module that the operator computes, of a `kind`, in modules of type `holder`.
    `fault`: the reason why the operator cannot compute a module's part; None if it can.
    `is_fast`: whether the compiled operator is fast for it; asked only where there is no fault.
    `make`: module -> its new part, which calls the operator, and has the operator's name as `operator`.
    `calls`: a method of the module that calls the part, by its name, in place of another one.
    """

    part: str
    fault: Callable[[Any], str | None]
    is_fast: Callable[[Any], bool]
    make: Callable[[Any], nn.Module]
    holder: type[nn.Module] = nn.Module
    kind: type[nn.Module] = nn.Module
    calls: tuple[str, Callable[..., Any]] | None = None

    def apply(self, model: nn.Module, plugin: str, is_compiled: Callable[[str], bool] | None = None) -> None:
        """Change all modules, in place. UsageError for one that the operator cannot compute.

        With `is_compiled`, asked where it matters, only those for which the compiled operator is fast.
        """
        found = {
            f"{name}.{self.part}".lstrip("."): module
            for name, module in model.named_modules()
            if isinstance(module, self.holder) and isinstance(getattr(module, self.part, None), self.kind)
        }
        faults = {name: self.fault(module) for name, module in found.items()}
        if is_compiled:
            found = {name: module for name, module in found.items() if not faults[name] and self.is_fast(module)}
            if not found or not is_compiled(plugin):
                return
        for name, module in found.items():
            if faults[name]:
                raise UsageError(f"‹plugin› {plugin}: {name} {faults[name]}")
            setattr(module, self.part, self.make(module))
            if self.calls:
                set_forward(module, self.calls[1], self.calls[0])


@dataclass(frozen=True)
class Rewriter:
    """The rewrites of an architecture, which its `Architecture` finds as REWRITER in a module.

    `table`: name -> a change in place of the lowered model (`layers`). They apply in this order; none changes a value
    beyond the rounding of float32, or an int8 value of a weight.
    `network`: makes the network to export, pictures [B, in, S, S] -> logits [B, classes], both of the given type.
    `builds_on`: the first rewrite, which all the others need.
    `constants`: rewrites that store computable values, for targets that want that.
    `unfused`: rewrites for targets that fuse no attention. `for_half`: rewrites that float16 needs. `for_npu`: those of
    the form for NPUs alone.
    `plugins`: operator -> an `OperatorRewrite`, or something else with its `apply`.
    `halve`: makes a rewritten model float16, except the layers around the nodes in `beyond_half`.
    `stem`: the float convolution without padding that reads the pictures, into which their normalisation can be folded.
    `restore`: (model, names of rewrites) -> module -> the function that undoes the rewrites in the module's tensor, or
    None if nothing can.
    `translations`: the ONNX form of the architecture's own operators, as torch's exporter takes it.
    `find_left`: exported network -> why parts that an operator may compute stayed plain, and how many, by operator.
    `measured_as`: the architecture whose measurements hold for it, if not its own.
    """

    table: Mapping[str, Callable[[nn.Module], None]]
    network: Callable[[Any, torch.dtype], nn.Module]
    builds_on: str | None = None
    constants: frozenset[str] = frozenset()
    unfused: frozenset[str] = frozenset()
    for_half: frozenset[str] = frozenset()
    for_npu: frozenset[str] = frozenset()
    plugins: Mapping[str, Any] = field(default_factory=dict)
    halve: Callable[[Any, Iterable[str]], None] | None = None
    stem: str | None = None
    restore: Callable[[Any, Collection[str]], Mapping[str, Restore | None]] | None = None
    translations: Callable[[], Mapping[Any, Callable[..., Any]]] = dict
    find_left: Callable[[nn.Module], Mapping[str, Mapping[str, int]]] | None = None
    measured_as: str | None = None

    def chosen(self, options: OnnxOptions) -> frozenset[str]:
        """The names of the rewrites that apply. UsageError for an unknown name, or one without those that it needs."""
        names = frozenset(self.table) if options.rewrites is None else options.rewrites
        if options.rewrites is None:
            names -= self.unfused if options.npu or options.wants.fuses_attention else frozenset()
            names -= frozenset() if options.wants.constants else self.constants
            names -= frozenset() if options.npu else self.for_npu
        if unknown := sorted(names - frozenset(self.table)):
            raise UsageError(f"no rewrite {unknown[0]!r}{offered(unknown[0], self.table)}")
        if names and self.builds_on and self.builds_on not in names:
            raise UsageError(f"rewrite {min(names)} builds on {self.builds_on}: give both")
        if options.floats == "float16" and self.halve is None:
            raise UsageError(
                "float16: this architecture has no rewrites that set types of layers: give ‹float_type› float32"
            )
        if options.floats == "float16" and not self.for_half <= names:
            needed = " and ".join(name for name in self.table if name in self.for_half)
            raise UsageError(f"float16 needs the rewrites {needed}: they set types of layers")
        return names

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
                change.apply(model, operator, is_compiled)


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


def get_rewriter(model: Classifier) -> Rewriter:
    """The rewriter of the model's architecture, or that of captured networks; one without rewrites if it has none."""
    name = model.architecture.rewrites if model.architecture else None
    if name is None and isinstance(model, CapturedNetwork):
        name = "branches"
    if name is None:
        return Rewriter({}, as_it_is)
    return importlib.import_module(name if "." in name else f"swin_quant.backends.onnx.{name}").REWRITER


def restoring(artifact: Artifact) -> Mapping[str, Restore | None]:
    """Module -> the function from its tensor in the file to the trained model's; None if they cannot be compared.

    Modules that are not named have the same tensor in both.
    """
    model = build_model(from_dict(artifact.card.config, str(artifact.file)))
    if restore := get_rewriter(model).restore:
        return restore(model, frozenset(artifact.record["options"].get("rewrites", ())))
    # timm's norms that hold their activation: in a file the activation's output is named as the norm's
    norms = {name: module for name, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)}
    return dict.fromkeys(name for name, module in norms.items() if [*module.children()])
