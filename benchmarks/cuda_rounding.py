"""Find for cuda_accuracy.py what makes the CUDA engine's logits differ from fake-quant's, one thing at a time.

Each of `CHANGES` is a context in which fake-quant of a model rounds one thing as the engine does, or sums in another
precision; `in_float32` instead replaces the engine's halves by float32.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swin_quant.backends.cuda.kernels import attention
from swin_quant.score.engine import HALF_TYPES

SUMS, ALL = "sums of linears in float64", "all four"
# Modules after which the residual stream, and V2's branches before their norms, go to memory.
READ = re.compile(r".*(layernorm_input[12]_quantizer|add2_residual_input_quantizer|downsample\.norm)")
WRITTEN = re.compile(r"patch_embed|layers\.\d+\.(blocks\.\d+|downsample)")
LINEAR = F.linear


def half(x: Tensor) -> Tensor:
    return x.half().float()


@contextmanager
def stream(model: nn.Module) -> Iterator[None]:
    """The residual stream, and the norms' inputs on branches, in float16."""
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if READ.fullmatch(name):
                made = module.register_forward_pre_hook(lambda _, given: tuple(map(half, given)))
                hooks.callback(made.remove)
            elif WRITTEN.fullmatch(name):
                made = module.register_forward_hook(lambda _, given, result: half(result))
                hooks.callback(made.remove)
        yield


@contextmanager
def probabilities(model: nn.Module) -> Iterator[None]:
    """exp of the logits in float16, divided by their sum after the product with v."""

    def softmax(logits: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
        powers = (logits - logits.amax(dim, keepdim=True)).exp()
        return half(powers) / powers.sum(dim, keepdim=True)

    with patch.object(Tensor, "softmax", softmax):
        yield


@contextmanager
def position_bias(model: nn.Module) -> Iterator[None]:
    """The position bias of attention in float16."""
    kind = type(model.layers[0].blocks[0].attn)  # type: ignore[index,union-attr]
    exact = kind.relative_position_bias
    with patch.object(kind, "relative_position_bias", lambda self: half(exact(self))):
        yield


@contextmanager
def patches(model: nn.Module) -> Iterator[None]:
    """Pictures, and the patch embedding's weights, in float16."""
    embedding = model.get_submodule("patch_embed")
    weight = embedding.get_parameter("proj.weight")
    exact = weight.data
    hook = embedding.register_forward_pre_hook(lambda _, given: tuple(map(half, given)))
    weight.data = half(exact)
    try:
        yield
    finally:
        weight.data = exact
        hook.remove()


@contextmanager
def all_four(model: nn.Module) -> Iterator[None]:
    with stream(model), probabilities(model), position_bias(model), patches(model):
        yield


@contextmanager
def exact_sums(model: nn.Module) -> Iterator[None]:
    """The same arithmetic with exact sums: only the last bit differs."""

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return LINEAR(x.double(), weight.double(), None if bias is None else bias.double()).float()

    with patch.object(F, "linear", linear):
        yield


CHANGES: Mapping[str, Callable] = {
    "residual stream in float16": stream,
    "probabilities in float16": probabilities,
    "position bias in float16": position_bias,
    "pictures and their weights in float16": patches,
    ALL: all_four,
    SUMS: exact_sums,
}


@contextmanager
def in_float32() -> Iterator[None]:
    """Inside the context, everything exported and run has float32 instead of half precision."""
    wide = SimpleNamespace(**vars(torch) | {"float16": torch.float32})
    with patch.dict(HALF_TYPES, float16=torch.float32), patch.object(attention, "torch", wide):
        yield
