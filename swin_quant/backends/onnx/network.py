"""Makes the network to export from a trained model: nodes lowered, rewrites applied, float types set, ends added.

Its ends are its input and outputs: it may take pictures as bytes, and give probabilities or the best classes, too.
"""

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from swin_quant.backends.onnx.layers import lower, match_scales
from swin_quant.backends.onnx.options import OnnxOptions
from swin_quant.backends.onnx.rewriting import rewriter_of
from swin_quant.base.errors import UsageError
from swin_quant.config.outputs import LOGITS
from swin_quant.data.preprocess import Preprocess
from swin_quant.models.captured import CapturedNetwork
from swin_quant.models.classifier import Classifier
from swin_quant.operators.plugins import plugins_of


def network(
    model: Classifier, options: OnnxOptions, preprocess: Preprocess | None, beyond_half: Iterable[str] = ()
) -> nn.Module:
    """A copy of `model` on the CPU, ready for export. The policy of `model` is applied, and its nodes have ranges.

    `preprocess`: the normalisation to put into a network that takes bytes. `beyond_half`: the nodes whose values
    overflow float16.
    """
    rewriter = rewriter_of(model)
    names = rewriter.chosen(options)
    model = copy.deepcopy(model).cpu().eval()
    folded = options.uint8_input and rewriter.stem is not None and options.floats == "float32"
    if folded and preprocess:
        fold_normalisation(model.get_submodule(rewriter.stem or ""), preprocess)
    lower(model, options.is_symmetric, model.parameters_read)
    if options.compiled:
        kind = model.architecture.family.name if model.architecture else ""
        rewriter.apply(model, names, plugins_of(options.compiled), partial(options.are_compiled, kind))
    else:
        rewriter.apply(model, names, plugins_of(options.plugin))
    if options.floats == "float16" and rewriter.halve:
        rewriter.halve(model, beyond_half)
    exported = rewriter.network(model, getattr(torch, options.io_type)).eval().requires_grad_(False)
    match_scales(exported, example(model, options, 1))
    with_ends(exported, options, preprocess, folded)
    if model.inputs:
        set_forward(exported, cast("CapturedNetwork", model).by_name)
    return exported


def example(model: Classifier, options: OnnxOptions, batch: int) -> Tensor:
    """Black pictures [batch, *input_shape]; where it takes any size, of an arbitrary one that is not square."""
    shape = model.input_shape
    if model.takes_any_size:
        shape = (*shape[:-2], shape[-2] + 1, shape[-1] + 6)
    return torch.zeros(batch, *shape, dtype=getattr(torch, options.io_type))


def pictures_of(model: Classifier, options: OnnxOptions, batch: int) -> dict[str, Tensor]:
    """The inputs that the exported graph takes: black pictures `images`, as `example` or uint8 [batch, S, S, 3]."""
    images = example(model, options, batch)
    if model.inputs:
        return model.inputs.unpack(images)
    return {"images": images.permute(0, 2, 3, 1).to(torch.uint8) if options.uint8_input else images}


def check_ends(model: Classifier, options: OnnxOptions, preprocess: Preprocess | None) -> None:
    """UsageError for input or outputs that this model cannot have."""
    if model.inputs and (options.has_ends or options.replace or options.plugin):
        raise UsageError("this model takes several inputs: leave out operators, and other inputs and outputs")
    if (options.softmax or options.top_k) and model.output_kind != LOGITS:
        raise UsageError(f"‹softmax› and ‹top_k› are of logits, and this model gives {model.output_kind}")
    if options.top_k and options.top_k > model.classes:
        raise UsageError(f"‹top_k› {options.top_k}: the model has {model.classes} classes")
    if options.uint8_input and preprocess and (not preprocess.is_square or model.in_chans != len(preprocess.mean)):
        raise UsageError("‹uint8_input›: is for RGB pictures of one size, which this model does not take")


def with_ends(model: nn.Module, options: OnnxOptions, preprocess: Preprocess | None, folded: bool) -> None:
    """Give the network its ends, in place.

    With `uint8_input` it takes decoded pictures, uint8 [B, S, S, 3]. `folded`: its weights normalise them, else
    operators do.
    """
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

    if options.has_ends:
        set_forward(model, forward)


def set_forward(model: nn.Module, forward: Callable[..., Any], name: str = "forward") -> None:
    """Give one module another forward, or method `name`, in place; a wrapper would change the names of modules."""
    kind = type(model)
    model.__class__ = cast("type[nn.Module]", type(kind.__name__, (kind,), {name: forward}))


def fold_normalisation(convolution: nn.Module, preprocess: Preprocess) -> None:
    """Fold the normalisation into an unpadded convolution, in place: it then takes pixels, 0 to 255."""
    if not isinstance(convolution, nn.Conv2d) or any(convolution.padding):
        raise ValueError("only a convolution without padding can normalise: padded zeros are no pixels")
    given = (preprocess.mean, preprocess.std)
    mean, std = (torch.tensor(values, dtype=torch.float64).view(1, -1, 1, 1) for values in given)
    weight = convolution.weight.detach().double()
    bias = 0 if convolution.bias is None else convolution.bias.detach().double()
    convolution.bias = nn.Parameter((bias - (weight * mean / std).sum((1, 2, 3))).float(), requires_grad=False)
    convolution.weight = nn.Parameter((weight / (255 * std)).float(), requires_grad=False)


def names_of_ends(options: OnnxOptions) -> list[str]:
    """The names of the outputs behind the model's own."""
    return ["probabilities"] * options.softmax + ["top_classes", "top_probabilities"] * bool(options.top_k)
