"""Where a network can be rewritten without changing what it computes, as data that an architecture gives.

Names are patterns over dotted names, as in the registry of models: a star stands for one word.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn

from swin_quant.base.patterns import filled, matched
from swin_quant.quant.factors import ChannelFactors
from swin_quant.quant.layer import QuantizedLayer


@dataclass(frozen=True)
class Part:
    """The `index`-th of `of` equal parts, along `dim`, of a parameter; or of the channels that a module gives."""

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
    """Channels whose size, or whose zero, is free: what is taken on one side is given back on the other.

    The parameters `before` may be divided by a factor a channel and those `after` multiplied by it. An `offset`, a
    parameter that is added, may lose a number a channel which the layers `into` get back in their biases, times their
    weights; with none, that number has no effect at all. `shown`: the module in whose output the channels are seen,
    `answered` the one in which those of the other side are, where that is no weight. `heads`: a module whose `heads`
    groups of channels take one factor each, which gives them the size of what `answered` shows. `peers`: channels that
    share ranges with those `shown`, which are brought to their level if they are all far from it. `also`: where else
    the channels are seen. `stream`: they are those of a residual stream: what units take and give changes with them.
    `exit`: a `ChannelFactors` behind them all, which multiplies by the factor what leaves the stream, and so costs a
    multiplication.
    """

    shown: Part
    before: tuple[Part, ...] = ()
    after: tuple[Part, ...] = ()
    answered: Part | None = None
    offset: Part | None = None
    into: tuple[str, ...] = ()
    heads: str | None = None
    peers: tuple[Part, ...] = ()
    also: tuple[Part, ...] = ()
    stream: bool = False
    exit: str | None = None


def of_norm(norm: str, linears: tuple[str, ...]) -> Exchange:
    """A norm, and the linears that alone read what it gives."""
    return Exchange(
        shown=Part(norm),
        before=(Part(f"{norm}.weight"), Part(f"{norm}.bias")),
        after=tuple(Part(f"{linear}.weight", dim=1) for linear in linears),
        offset=Part(f"{norm}.bias"),
        into=linears,
    )


def found(exchanges: tuple[Exchange, ...], model: nn.Module) -> Iterator[Exchange]:
    """The exchanges of a model by full names; without the parameters that it lacks, nor a side that it lacks."""
    parameters = dict(model.named_parameters())
    modules = dict(model.named_modules())
    for one in _by_name(exchanges, model):
        before = tuple(part for part in one.before if part.name in parameters)
        after = tuple(part for part in one.after if part.name in parameters)
        offset = one.offset if one.offset and one.offset.name in parameters else None
        if not all(_has_bias(modules.get(layer)) for layer in one.into):
            offset = None
        if before or offset:
            yield replace(one, before=before, after=after, offset=offset)


def without_weights(exchanges: tuple[Exchange, ...], model: nn.Module) -> list[str]:
    """The modules that could take a factor a channel, had they weights of their own: norms without them."""
    parameters = dict(model.named_parameters())
    before = [[part.name for part in one.before] for one in _by_name(exchanges, model) if one.before]
    return list(dict.fromkeys(names[0].rpartition(".")[0] for names in before if not parameters.keys() & set(names)))


def _by_name(exchanges: tuple[Exchange, ...], model: nn.Module) -> Iterator[Exchange]:
    for exchange in exchanges:
        for name, _ in model.named_modules():
            words = matched(exchange.shown.name, name)
            if words is not None:
                yield _named(exchange, words)


def _named(exchange: Exchange, words: tuple[str, ...]) -> Exchange:
    def part(one: Part) -> Part:
        return replace(one, name=filled(one.name, words))

    return replace(
        exchange,
        shown=part(exchange.shown),
        before=tuple(map(part, exchange.before)),
        after=tuple(map(part, exchange.after)),
        answered=part(exchange.answered) if exchange.answered else None,
        offset=part(exchange.offset) if exchange.offset else None,
        into=tuple(filled(layer, words) for layer in exchange.into),
        heads=filled(exchange.heads, words) if exchange.heads else None,
        peers=tuple(map(part, exchange.peers)),
        also=tuple(map(part, exchange.also)),
    )


def _has_bias(layer: nn.Module | None) -> bool:
    return isinstance(layer, QuantizedLayer) and layer.bias is not None


def along(values: Tensor, tensor: Tensor, dim: int) -> Tensor:
    """`values` [channels] in a shape that multiplies `tensor` along `dim`."""
    shape = [1] * tensor.dim()
    shape[dim] = -1
    return values.to(tensor.dtype).view(shape)


@torch.no_grad()
def rescale(model: nn.Module, exchange: Exchange, factors: Tensor) -> None:
    """Divide `before` by `factors` [channels], multiply `after` and what is at the `exit` by them, in place."""
    for parts, each in ((exchange.before, 1 / factors), (exchange.after, factors)):
        for part in parts:
            values = part.cut(model.get_parameter(part.name))
            values.mul_(along(each, values, part.dim))
    if exchange.exit is not None:
        leaving = cast(ChannelFactors, model.get_submodule(exchange.exit))
        before = next(model.parameters()).new_ones(len(factors)) if leaving.weight is None else leaving.weight
        leaving.give(before * factors.to(before.dtype))


def take_back(model: nn.Module, exchange: Exchange) -> None:
    """Leave nothing at the exit: a network of the same function, as it was before."""
    if exchange.exit is not None:
        leaving = cast(ChannelFactors, model.get_submodule(exchange.exit))
        if leaving.weight is not None:
            rescale(model, exchange, 1 / leaving.weight.detach().double())
            leaving.give(None)


@torch.no_grad()
def recentre(model: nn.Module, exchange: Exchange, middle: Tensor) -> None:
    """Take `middle` [channels] off the offset, and give it back behind, in place."""
    if exchange.offset is None:
        return
    values = exchange.offset.cut(model.get_parameter(exchange.offset.name))
    values.sub_(middle.to(values.dtype))
    for name in exchange.into:
        layer = cast(QuantizedLayer, model.get_submodule(name))
        layer.shift_bias(layer.weight.double() @ middle.double())
