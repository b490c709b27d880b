"""Equalize channels by factors and offsets that keep a network's function.

A range per tensor is as wide as its widest channel, at the cost of all others. Where a factor per channel can move from
one side of a place to the other (`places.Exchange`), it is SmoothQuant's, with several strengths a: max|x_c| ** a /
max|w_c| ** (1 - a). (Xiao et al., "SmoothQuant", 2023; Nagel et al., "Data-Free Quantization Through Weight
Equalization and Bias Correction", 2019.) Where an offset can move, channels are centred around zero (Li et al.,
"RepQ-ViT", 2023, moves both into the norm). A change is kept only if it measurably improves the quantized unit's
output, and does not harm it on other pictures.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from swin_quant.base.schema import SelfChecked, counted, within
from swin_quant.quant.layer import channels_last
from swin_quant.quant.passes import Pass, PassContext
from swin_quant.quant.passes.places import Exchange, Part, recentre, rescale
from swin_quant.quant.passes.trial import Trial, Values, copy_state, describe_gains, enabled_in, gain_db, restore
from swin_quant.quant.passes.units import UnitRun, inside, through
from swin_quant.quant.quantizer import Quantizer, Role
from swin_quant.quant.watch import watching

# Times the median channel. In four trained micro models, V1 and V2, none exceeds 3.5, except 5.1 in the last stage of a
# V2, whose cure costs a multiplication.
OUTLIER = 5.0
LOOKED_AT = 8  # pictures that show where channels stand out
NO_GAIN = "no unit gains"  # start of the note if nothing changed
_BETTER = 0.97  # share of the error before: a smaller gain may be chance
_WORSE = 1.25  # times the error before, on other pictures: less may be chance, for half of the pictures give the ranges
_LARGEST = 2.0**12  # largest factor
_SMALLEST = 2.0**-12  # of the largest channel: the least size that channels count with


@dataclass(frozen=True)
class EqualizeOptions(SelfChecked):
    """`alpha`: the strengths to try; `pictures` to measure on; `only_outliers`: skip units without outlier channels."""

    alpha: Annotated[tuple[Annotated[float, within(least=0, most=1)], ...], counted(1, 64)] = (0.5, 0.7)
    pictures: Annotated[int, within(least=1)] = 32
    only_outliers: bool = False


@dataclass(frozen=True)
class Spread:
    """The channels of the exchange `place`. `low` and `high`: smallest and largest value of each channel of the scaled
    side, [channels].

    `answer`: the sizes of the partner's channels; `columns`: the largest magnitude of the weights that read each
    channel. `level`: the size of the median channel relative to its peers or partner, in the head where it is farthest
    from 1.
    """

    place: Exchange
    low: Tensor
    high: Tensor
    answer: Tensor | None
    columns: Tensor | None
    level: float

    def size(self, centred: bool) -> Tensor:
        """The largest magnitude of each channel."""
        return (self.high - self.low) / 2 if centred else torch.maximum(-self.low, self.high)

    @property
    def times(self) -> float:
        """The largest channel's size relative to the median channel's, or to the partner's if heads share factors.

        If larger: the same ratio for the weights that read a channel, or for the level of all channels.
        """
        size, answer = self.size(False), self.answer
        shown = _times(size, answer if self.place.heads and answer is not None else size)
        columns = 1.0 if self.columns is None else _times(self.columns, self.columns)
        return max(shown, columns, self.level, 1 / self.level)

    @property
    def stands_out(self) -> bool:
        """Whether a channel is an outlier; the limit is doubled if a cure costs a multiplication."""
        return self.times > (2 * OUTLIER if self.place.exit else OUTLIER)


@dataclass(frozen=True)
class Choice:
    """The change at an exchange."""

    centred: bool = False
    alpha: float | None = None


def factors(size: Tensor, other: Tensor | None, alpha: float, relative: bool = True) -> Tensor:
    """SmoothQuant's factor of each channel [channels], float64: size ** alpha / other ** (1 - alpha).

    Without another side: the factors that make channels equal, to the power of alpha. `relative` to the median channel.
    Factors have eight bits, so that a measurement's last bits do not matter. A channel of zeros keeps its size.
    """
    size = size.double()
    alive = size > 0
    size = size.clamp_min(size.max().item() * _SMALLEST)
    found = size**alpha
    if other is not None:
        other = other.double()
        alive &= other > 0
        found = found / other.clamp_min(other.max().item() * _SMALLEST) ** (1 - alpha)
    if not alive.any():
        return torch.ones_like(size)
    if relative:
        found = found / found[alive].median()
    mantissa, exponent = torch.frexp(torch.where(alive, found, 1.0).clamp(1 / _LARGEST, _LARGEST))
    return torch.ldexp((mantissa * 256).round() / 256, exponent)


def run(context: PassContext, options: EqualizeOptions) -> str:
    """Equalize `context.model`: residual streams, then unit after unit, with the activations of the new streams.

    Units with outlier channels come first: a stream is measured at its readers, whose outlier rows would look like
    outlier channels of the stream.
    """
    gains: dict[str, float] = {}
    streams = any(exchange.stream for exchange in open_exchanges(context))
    if streams:
        _equalize_units(context, replace(options, only_outliers=True), gains)
    along_streams = 0.0
    seen = measure(context, LOOKED_AT) if options.only_outliers else []
    wanted = any(spread.stands_out and spread.place.stream for spread in seen) or not options.only_outliers
    spreads = [spread for spread in measure(context, options.pictures) if spread.place.stream] if wanted else []
    if any(spread.stands_out or not options.only_outliers for spread in spreads):
        # By the output of the last unit: all readers of a stream share a factor a channel, and a unit's own output does
        # not show the gain of later units.
        behind = next((spread.place.exit for spread in spreads if spread.place.exit), [*context.units][-1])
        whole, images = _UpTo(context.model, context.model.get_submodule(behind)), context.first(options.pictures)
        along_streams = _equalize(context, UnitRun("", whole, images, through(whole, images), whole), spreads, options)
    if along_streams > 0:
        context = replace(context)  # same function, other inputs and outputs of units
    if along_streams > 0 or not (streams and options.only_outliers):
        _equalize_units(context, options, gains)
    notes = [f"residual streams gain {along_streams:.1f} dB"] if along_streams > 0 else []
    if any(gains.values()):
        notes += [describe_gains(gains, len(context.units))]
    return "; ".join(notes or [NO_GAIN])


def _equalize_units(context: PassContext, options: EqualizeOptions, gains: dict[str, float]) -> None:
    """Equalize unit after unit, and add each one's gain in dB to `gains`."""
    own = [exchange for exchange in open_exchanges(context) if not exchange.stream]
    wanted = set(context.units)
    if options.only_outliers:  # no other unit is run: its exchanges move nothing of theirs
        found = measure(context, LOOKED_AT)
        names = {spread.place.scaled.name for spread in found if spread.stands_out and not spread.place.stream}
        wanted = {unit for unit in context.units if any(inside(name, unit) for name in names)}
    for step in context.walk(context.first(options.pictures), "equalize") if wanted else ():
        if step.name not in wanted:
            continue
        wanted.remove(step.name)
        places = [exchange for exchange in own if inside(exchange.scaled.name, step.name)]
        spreads = _spreads(context.model, step.unit, places, step.inputs)
        if options.only_outliers and len(context.units) == 1:  # each trial runs the whole network: minutes, not seconds
            spreads = [spread for spread in spreads if spread.stands_out]
        if any(spread.stands_out or not options.only_outliers for spread in spreads):
            gains[step.name] = gains.get(step.name, 0.0) + _equalize(context, step, spreads, options)
        if not wanted:
            break


class _UpTo(nn.Module):
    """A network up to its unit `last`: maps pictures [B, 3, H, W] to that unit's output."""

    def __init__(self, model: nn.Module, last: nn.Module) -> None:
        super().__init__()
        self.model, self.last = model, (last,)  # in a tuple, or its parameters would have two names

    def forward(self, images: Tensor) -> Tensor:
        found: list[Tensor] = []
        with watching({"last": self.last[0]}, lambda name, module, inputs, y: found.append(y)):
            self.model(images)
        return found[0]


def open_exchanges(context: PassContext) -> list[Exchange]:
    """The exchanges that the policy allows. FasterTransformer's kernels, whose policies round the results of products,
    have no multiplication at an exit."""
    closed = any(node.role is Role.GEMM_OUTPUT for node in enabled_in(context.model))
    return [exchange for exchange in context.exchanges if not (closed and exchange.exit)]


def measure(context: PassContext, pictures: int) -> list[Spread]:
    """The channels of every open exchange on the first pictures, measured once as long as no weight is written."""
    model = context.model
    state = pictures, sum(parameter._version for parameter in model.parameters())
    if state not in context.measured:
        context.measured.clear()
        context.measured[state] = _spreads(model, model, open_exchanges(context), context.first(pictures))
    return context.measured[state]


def _times(size: Tensor, like: Tensor) -> float:
    median = like[like > 0].median().item() if (like > 0).any() else 0.0
    return size.max().item() / median if median else 1.0


@dataclass(frozen=True)
class OutlierChannels:
    """Channels `times` as large as others at the module `place`; `cure`: the layers between which size can move."""

    place: str
    times: float
    cure: tuple[str, ...]


def outlier_channels(context: PassContext) -> list[OutlierChannels]:
    """Outlier channels that an exchange could cure, each module that shows some once."""
    found: dict[str, float] = {}
    for spread in measure(context, LOOKED_AT):
        name = spread.place.scaled.name
        if spread.stands_out:
            found[name] = max(spread.times, found.get(name, 0.0))
    cures: dict[str, tuple[str, ...]] = {}
    for exchange in context.exchanges:
        parts = (*exchange.before, *exchange.after, *([exchange.offset] if exchange.offset else []))
        owners = dict.fromkeys(part.name.rpartition(".")[0] for part in parts)
        cures.setdefault(exchange.scaled.name, tuple(owners))
    return [OutlierChannels(name, times, cures[name]) for name, times in found.items()]


def _equalize(context: PassContext, step: UnitRun, spreads: Sequence[Spread], options: EqualizeOptions) -> float:
    """Choose the change at each place of a unit; returns the gain at its output in dB, NaN if that is not finite."""
    trial = Trial(step, context.method.name)
    if not trial.nodes:
        return 0.0
    original = copy_state(step.unit)
    plain = (Choice(),) * len(spreads)

    def error(choices: Sequence[Choice]) -> float:
        _apply(context.model, step.unit, original, spreads, choices)
        return trial.error()

    found = {plain: error(plain)}
    for alpha in options.alpha:  # all at once: one place may hide another
        for centred in (False, True):
            together = tuple(Choice(centred and spread.place.offset is not None, alpha) for spread in spreads)
            found.setdefault(together, error(together))
    best = min(found, key=found.__getitem__)
    for index, place in enumerate(spread.place for spread in spreads):
        strengths = options.alpha[:1] if place.partner else options.alpha  # a partner needs one
        choices = [Choice(), *(Choice(alpha=alpha) for alpha in strengths if place.before)]
        if place.offset:
            choices.append(Choice(centred=True))
        for choice in choices:
            other = (*best[:index], choice, *best[index + 1 :])
            if other not in found:
                found[other] = error(other)
            if found[other] < found[best] * _BETTER:
                best = other
    before, after = found[plain], found[best]
    better = after < before * _BETTER and _holds_elsewhere(context, step, spreads, original, best)
    _apply(context.model, step.unit, original, spreads, best if better else plain)
    return gain_db(before, after) if better or after == math.inf else 0.0


def _holds_elsewhere(
    context: PassContext, step: UnitRun, spreads: Sequence[Spread], original: Values, choices: Sequence[Choice]
) -> bool:
    """Whether `choices` do no harm on pictures that gave neither factors nor ranges: each half judges the other's. A
    channel that these pictures hardly show gets a factor by which it leaves its range on all others."""
    middle = len(step.inputs) // 2
    halves = [
        replace(step, inputs=step.inputs[part], outputs=step.outputs[part])
        for part in (slice(0, middle), slice(middle, None))
    ]
    if not middle:  # a single picture
        return True
    before = after = 0.0
    for given, judged in (halves, halves[::-1]):
        trial = Trial(given, context.method.name, judged)
        restore(step.unit, original)
        spreads = _spreads(context.model, step.unit, [spread.place for spread in spreads], given.inputs)
        before += trial.error()
        _apply(context.model, step.unit, original, spreads, choices)
        after += trial.error()
    return after <= before * _WORSE


@torch.no_grad()
def _apply(
    model: nn.Module, unit: nn.Module, original: Values, spreads: Sequence[Spread], choices: Sequence[Choice]
) -> None:
    """Change the unit's original parameters by `choices`."""
    restore(unit, original)
    for spread, choice in zip(spreads, choices, strict=True):
        place = spread.place
        if choice.centred:
            recentre(model, place, (spread.low + spread.high) / 2)
        if choice.alpha is None:
            continue
        size = spread.size(choice.centred)
        if place.heads and spread.answer is not None:
            each = _heads(model, place, size, spread.answer)
            found = factors(each, None, 1.0, relative=False).repeat_interleave(len(size) // len(each))
        elif place.partner:  # activations on both sides meet in the middle
            found = factors(size, spread.answer, 0.5, relative=False)
        else:
            found = factors(size, _columns(model, place), choice.alpha)
            if not 1 / OUTLIER <= spread.level <= OUTLIER:
                found = found * 2.0 ** round(math.log2(spread.level))
        rescale(model, place, found)


def _heads(model: nn.Module, exchange: Exchange, size: Tensor, answer: Tensor) -> Tensor:
    """The size of each head's median channel relative to the partner's, [heads]; one value for V1."""
    heads = int(model.get_submodule(exchange.heads).heads) if exchange.heads else 1  # type: ignore[arg-type]
    found: Tensor = size.view(heads, -1).median(1).values / answer.median()
    return found.nan_to_num(1.0, posinf=1.0)


def _columns(model: nn.Module, exchange: Exchange) -> Tensor | None:
    """The largest magnitude of the weights that read each channel, [channels]; None if no weight does."""
    if exchange.partner or not exchange.after:
        return None
    columns = [part.cut(model.get_parameter(part.name)).transpose(0, part.dim).flatten(1) for part in exchange.after]
    return torch.stack([column.detach().abs().amax(1) for column in columns]).amax(0)


def _spreads(model: nn.Module, unit: nn.Module, places: Sequence[Exchange], inputs: Sequence[Tensor]) -> list[Spread]:
    if not places:
        return []
    parts = [part for place in places for part in (place.scaled, place.partner, *place.peers, *place.also) if part]
    modules = {part.name: model.get_submodule(part.name) for part in parts}
    owners = {  # the modules whose channels these are; for a quantizer, its layer
        name: model.get_submodule(name.rpartition(".")[0]) if isinstance(module, Quantizer) else module
        for name, module in modules.items()
    }
    low: dict[str, Tensor] = {}
    high: dict[str, Tensor] = {}

    def look(name: str, module: nn.Module, inputs: tuple[Any, ...], y: Tensor) -> None:
        y = channels_last(owners[name], y.detach())
        small, large = torch.aminmax(y.flatten(0, -2).float(), dim=0)
        low[name] = torch.minimum(low[name], small) if name in low else small
        high[name] = torch.maximum(high[name], large) if name in high else large

    with watching(modules, look):
        through(unit, inputs)

    def size(part: Part) -> Tensor:
        return torch.maximum(-part.cut(low[part.name], 0), part.cut(high[part.name], 0))

    spreads = []
    for place in places:
        own, answer = size(place.scaled), size(place.partner) if place.partner else None
        if answer is not None:
            levels = _heads(model, place, own, answer)
        else:
            peers = torch.stack([size(part).median() for part in place.peers or (place.scaled,)])
            levels = (own.median() / peers.log().mean().exp())[None]
        alive = levels[(levels > 0) & levels.isfinite()]
        level = alive[alive.log().abs().argmax()].item() if len(alive) else 1.0
        shown = (place.scaled, *place.also)
        least = torch.stack([part.cut(low[part.name], 0) for part in shown]).amin(0)
        most = torch.stack([part.cut(high[part.name], 0) for part in shown]).amax(0)
        spreads.append(Spread(place, least, most, answer, _columns(model, place), level))
    return spreads


PASS = Pass(run, EqualizeOptions, keeps_function=True)
