"""Places where a network can be rewritten without changing its function, as an architecture's data.

Names are patterns over dotted names, as in the registry of models: a star stands for one word between dots.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from swin_quant.quant.layer import ChannelFactors, QuantizedLayer


@dataclass(frozen=True)
class Part:
    """The `index`-th of `of` equal parts, along `dim`, of a parameter or of a module's output channels."""

    name: str
    dim: int = 0
    index: int = 0
    of: int = 1

    def cut(self, tensor: Tensor, dim: int | None = None) -> Tensor:
        """The part, as a view of `tensor`."""
        dim = self.dim if dim is None else dim
        size = tensor.shape[dim] // self.of
        return tensor.narrow(dim, self.index * size, size)


@dataclass(frozen=True)
class Exchange:
    """Channels whose size, or whose zero, is free: one side loses a factor or an offset, and the other gets it back.

    The parameters `before` may be divided by a factor a channel if those `after` are multiplied by it. A number a
    channel may be subtracted from the parameter `offset`, which is added, if the layers `into` get it back in their
    biases, times their weights; without such layers it has no effect.

    `scaled`: the module whose output shows the channels. `partner`: the module that shows the other side's, unless they
    are a weight's. `heads`: a module whose `heads` groups of channels take one factor each, which gives them the size
    of `partner`. `peers`: channels that share ranges with `scaled`; all of `scaled` is brought to their level if it is
    far from them. `also`: other modules that show the channels. `stream`: the channels are those of a residual stream,
    so that inputs and outputs of units change. `exit`: a `ChannelFactors` after the stream, which multiplies its output
    by the factor and costs a multiplication.
    """

    scaled: Part
    before: tuple[Part, ...] = ()
    after: tuple[Part, ...] = ()
    partner: Part | None = None
    offset: Part | None = None
    into: tuple[str, ...] = ()
    heads: str | None = None
    peers: tuple[Part, ...] = ()
    also: tuple[Part, ...] = ()
    stream: bool = False
    exit: str | None = None


def make_norm_exchange(norm: str, linears: tuple[str, ...]) -> Exchange:
    """A norm, and the linears that alone read its output."""
    return Exchange(
        scaled=Part(norm),
        before=(Part(f"{norm}.weight"), Part(f"{norm}.bias")),
        after=tuple(Part(f"{linear}.weight", dim=1) for linear in linears),
        offset=Part(f"{norm}.bias"),
        into=linears,
    )


def found(exchanges: tuple[Exchange, ...], model: nn.Module) -> Iterator[Exchange]:
    """The exchanges of a model by full names, without parameters and sides that it lacks."""
    parameters = dict(model.named_parameters())
    modules = dict(model.named_modules())
    named = ((one, matched(one.scaled.name, name)) for one in exchanges for name in modules)
    for one in (_named(each, words) for each, words in named if words is not None):
        before = tuple(part for part in one.before if part.name in parameters)
        after = tuple(part for part in one.after if part.name in parameters)
        offset = one.offset if one.offset and one.offset.name in parameters else None
        for layer in map(modules.get, one.into):  # it needs a bias, which nothing else reads
            if not isinstance(layer, QuantizedLayer) or layer.bias is None or "bias" in layer.shared_parameters:
                offset = None
        if before or offset:
            yield replace(one, before=before, after=after, offset=offset)


def _named(one: Any, words: tuple[str, ...]) -> Any:
    """An exchange, or a part of one, with the words in place of the stars of its names."""
    if isinstance(one, Exchange | Part):
        return replace(one, **{field.name: _named(getattr(one, field.name), words) for field in fields(one)})
    if isinstance(one, tuple):
        return tuple(_named(each, words) for each in one)
    return filled(one, words) if isinstance(one, str) else one


@torch.no_grad()
def rescale(model: nn.Module, exchange: Exchange, factors: Tensor) -> None:
    """Divide `before` by `factors` [channels], and multiply `after` and `exit` by them, in place."""
    for parts, each in ((exchange.before, 1 / factors), (exchange.after, factors)):
        for part in parts:
            values = part.cut(model.get_parameter(part.name))
            values.transpose(part.dim, -1).mul_(each.to(values.dtype))
    if exchange.exit is not None:
        leaving = cast(ChannelFactors, model.get_submodule(exchange.exit))
        before = next(model.parameters()).new_ones(len(factors)) if leaving.weight is None else leaving.weight
        leaving.give(before * factors.to(before.dtype))


def take_back(model: nn.Module, exchange: Exchange) -> None:
    """Undo the factors at the exit; the network's function stays."""
    if exchange.exit is not None:
        leaving = cast(ChannelFactors, model.get_submodule(exchange.exit))
        if leaving.weight is not None:
            rescale(model, exchange, 1 / leaving.weight.detach().double())
            leaving.give(None)


@torch.no_grad()
def recentre(model: nn.Module, exchange: Exchange, middle: Tensor) -> None:
    """Subtract `middle` [channels] from the offset, and add it to the later biases, in place."""
    if exchange.offset is None:
        return
    values = exchange.offset.cut(model.get_parameter(exchange.offset.name))
    values.sub_(middle.to(values.dtype))
    for name in exchange.into:
        layer = cast(QuantizedLayer, model.get_submodule(name))
        layer.shift_bias(layer.weight.double() @ middle.double())


def matched(pattern: str, name: str) -> tuple[str, ...] | None:
    """The words in `name` for the stars of `pattern`; None if it does not match."""
    match = re.fullmatch(re.escape(pattern).replace(r"\*", r"([^.]+)"), name)
    return match and match.groups()


def filled(pattern: str, words: Sequence[str]) -> str:
    """`pattern` with the words in place of its stars."""
    left = iter(words)
    return re.sub(r"\*", lambda star: next(left), pattern)
