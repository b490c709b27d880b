"""From a trained model to the one that is exported: nodes lowered, rewrites applied, float types set."""

import copy
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from swin_quant.backends.onnx.ends import fold_normalisation, with_ends
from swin_quant.backends.onnx.layers import lower, match_scales
from swin_quant.backends.onnx.options import OnnxOptions
from swin_quant.backends.onnx.rewriting import rewriter_of
from swin_quant.config.outputs import FEATURES
from swin_quant.data.preprocess import Preprocess
from swin_quant.models.classifier import Classifier
from swin_quant.operators.plugins import plugins_of


def network(
    model: Classifier, options: OnnxOptions, preprocess: Preprocess | None, beyond_half: Iterable[str] = ()
) -> nn.Module:
    """A copy of `model`, whose policy is applied and whose nodes have ranges, as it is exported, on the CPU.

    `preprocess` is what the pictures went through of a model that is to take them as bytes. `beyond_half` names the
    nodes whose values overflow float16.
    """
    rewriter = rewriter_of(model)
    names = rewriter.chosen(options)
    model = copy.deepcopy(model).cpu().eval()
    folded = options.uint8_input and rewriter.stem is not None and options.floats == "float32"
    if folded and preprocess:
        fold_normalisation(model.get_submodule(rewriter.stem or ""), preprocess)
    lower(model, options.is_symmetric)
    rewriter.apply(model, names, plugins_of(options.plugin))
    if options.floats == "float16" and rewriter.halve:
        rewriter.halve(model, beyond_half)
    exported = rewriter.network(model, getattr(torch, options.io_type)).eval().requires_grad_(False)
    match_scales(exported, example(model, options, 1))
    with_ends(exported, options, preprocess, folded)
    return exported


def example(model: Classifier, options: OnnxOptions, batch: int) -> Tensor:
    """Black pictures [batch, in, S, S]; of a model that takes any size, of a size without meaning, not square."""
    side = model.image_size
    height, width = (side + 1, side + 6) if model.output_kind == FEATURES else (side, side)
    shape = batch, model.in_chans, height, width
    return torch.zeros(shape, dtype=getattr(torch, options.io_type))


def pictures_of(model: Classifier, options: OnnxOptions, batch: int) -> Tensor:
    """The same as the exported graph takes them: uint8 [batch, S, S, 3] where its input is that."""
    images = example(model, options, batch)
    return images.permute(0, 2, 3, 1).to(torch.uint8) if options.uint8_input else images
