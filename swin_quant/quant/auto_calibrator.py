"""Calibrator auto: each node gets the range method with the least error at the output of its unit.

It goes unit by unit: first it finds the best method for all nodes of a unit together, then each node in turn tries the
others. The error at the node itself says little: a method may clip the values that matter, or values that softmax
ignores. At the end the logits are compared, so that no single method is better on these pictures.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from swin_quant.quant.calibration import Calibration, Method, search_ranges
from swin_quant.quant.check import compare, compute_logits
from swin_quant.quant.passes import PassContext
from swin_quant.quant.passes.trial import quantized, squared_error
from swin_quant.quant.passes.units import inside, walk
from swin_quant.quant.policy import enabled_nodes
from swin_quant.quant.quantizer import Quantizer, Role
from swin_quant.quant.range_methods import RANGE_METHODS
from swin_quant.quant.ranges import Range, keeping_ranges

PICTURES = 16  # each unit runs on them some dozens of times
_BETTER = 0.995  # share of the error before: a smaller gain may be chance
_SAME = 0.01  # share of the width: nearer ranges count as equal
_Methods = Mapping[str, str]
_Ranges = Mapping[str, Mapping[str, Range]]


@dataclass(frozen=True)
class MethodChoice:
    """The chosen methods, the logits' SQNR in dB with them and with each single method, and the number of
    `pictures`."""

    method: Method
    sqnr_db: float
    singles: Mapping[str, float]
    pictures: int


def choose_methods(context: PassContext, calibration: Calibration) -> MethodChoice | None:
    """Choose methods for the enabled activation nodes of `context.model`; all other nodes get the best single method.

    The network is calibrated and keeps its ranges; `calibration` must hold histograms. None if no such node is enabled,
    or there is no picture.
    """
    model, images = context.model, context.first(PICTURES)
    nodes = {name: node for name, node in enabled_nodes(model).items() if node.role is not Role.GEMM_WEIGHT}
    if not nodes or not images:
        return None
    expected = compute_logits(model, images)
    ranges = {name: search_ranges(model, calibration, context.method.alone(name), nodes) for name in RANGE_METHODS}
    alike: dict[str | None, dict[str, str]] = {name: dict.fromkeys(nodes, name) for name in RANGE_METHODS}
    if len({node.setting.bits for node in nodes.values()}) > 1:
        alike[None] = {name: context.method.alone(None).for_bits(node.setting.bits) for name, node in nodes.items()}

    def sqnr(methods: _Methods) -> float:
        with keeping_ranges(nodes.values()):
            _give(nodes, ranges, methods)
            return compare(model, images, expected)[1]

    singles = {name: sqnr(methods) for name, methods in alike.items()}
    best = max(singles, key=singles.__getitem__)
    with keeping_ranges(nodes.values()):
        _give(nodes, ranges, alike[best])
        mixed = {**alike[best], **_choose_unit_methods(context, nodes, ranges, images)}
    found, reached = (mixed, gain) if (gain := sqnr(mixed)) > singles[best] else (alike[best], singles[best])
    default = replace(context.method.alone(best), by_node={})
    own = {name: method for name, method in found.items() if method != default.for_bits(nodes[name].setting.bits)}
    named = {name or "by bits": value for name, value in singles.items()}
    return MethodChoice(replace(default, by_node=own), reached, named, sum(map(len, images)))


def _choose_unit_methods(
    context: PassContext, nodes: Mapping[str, Quantizer], ranges: _Ranges, images: list[Tensor]
) -> _Methods:
    """The method of each node inside a unit."""
    found: dict[str, str] = {}
    units = context.units or {"": context.model}
    for step in walk(context.model, units, images):
        mine = {name: node for name, node in nodes.items() if inside(name, step.name)}
        if not mine:
            continue

        def error(methods: _Methods, mine: Mapping[str, Quantizer] = mine) -> float:
            _give(mine, ranges, methods)
            return squared_error(quantized(step.unit, step.inputs), step.outputs)  # noqa: B023

        errors = {method: error(dict.fromkeys(mine, method)) for method in ranges}
        first = min(errors, key=errors.__getitem__)
        chosen, least = dict.fromkeys(mine, first), errors[first]
        for name, node in mine.items():
            for method in _others(ranges, name, node, first):
                now = error({**chosen, name: method})
                if now < least * _BETTER:
                    chosen, least = {**chosen, name: method}, now
        found |= chosen
        _give(mine, ranges, chosen)
    return found


def _others(ranges: _Ranges, name: str, node: Quantizer, present: str) -> Iterator[str]:
    """The methods whose ranges for a node differ from the present one and from each other."""
    seen = [ranges[present][name].ends_on(node)]
    for method in ranges:
        ends = ranges[method][name].ends_on(node)
        width = max(ranges[method][name].width_on(node), 1e-30)
        if all(max(abs(a - b) for a, b in zip(ends, other, strict=True)) > _SAME * width for other in seen):
            seen.append(ends)
            yield method


def _give(nodes: Mapping[str, Quantizer], ranges: _Ranges, methods: _Methods) -> None:
    for name, node in nodes.items():
        ranges[methods[name]][name].give(node)
