"""Analyse a model before quantization: operators, targets, shapes, risks, limits, replacements.

Risks are numbers out of reach of half precision or INT8: by the weights, by calibrated ranges, or by a few pictures.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from swin_quant.base.errors import listed
from swin_quant.models.classifier import Architecture
from swin_quant.models.registry import blocks_of
from swin_quant.operators.replacements import REPLACEMENTS, Replacing, chosen, compare
from swin_quant.operators.roofline import Limit, Machine, limits
from swin_quant.operators.support import KINDS, Status, chosen_targets, status_of
from swin_quant.operators.trace import Call, Shape, Variation, trace, training_only, variations
from swin_quant.quant.advice import Advice
from swin_quant.quant.calibration import LARGEST_HALF
from swin_quant.quant.outlier_channels import UNREACHED
from swin_quant.quant.quantizer import Quantizer, Role, named_nodes
from swin_quant.quant.ranges import range_of
from swin_quant.quant.watch import eval_mode, watching

WIDE_WEIGHTS = (
    "output channels of {count} weights stand out, {most} times the median: take a range for each channel, not one for "
    "the tensor"
)
SQUARE_OVERFLOWS = 256.0  # the square of a larger value overflows float16
_PRODUCTS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._BatchNorm)


@dataclass(frozen=True)
class Operator:
    """All calls of one operator: their sums, and the largest call as an example."""

    name: str
    calls: int
    macs: int
    parameters: int
    bytes: int
    example: Call

    @property
    def shapes(self) -> str:
        """The shapes of the example's inputs and outputs."""
        return f"{_shown(self.example.inputs)} -> {_shown(self.example.outputs)}"


@dataclass(frozen=True)
class Checked:
    """A replacement that was run: the calls that it replaced, and the largest difference of the output."""

    name: str
    what: str
    calls: int
    difference: float


@dataclass(frozen=True)
class Analysis:
    """`statuses`: status by operator and target; `titles`: each target's title. `limits` are computed from the peaks of
    `machine`, not measured. `replaced`: the replacements applied before tracing. `weighed`: whether `risks` saw the
    weights. `depending`: nodes of a graph whose shape or flow depends on data. `types`: the types in which bytes are
    counted."""

    name: str
    images: Shape
    parameters: int
    calls: Sequence[Call]
    titles: Mapping[str, str]
    sources: Mapping[str, Mapping[str, str]]
    statuses: Mapping[str, Mapping[str, Status]]
    variations: Sequence[Variation] = ()
    training_only: Mapping[str, Sequence[str]] = field(default_factory=dict)
    risks: Sequence[Advice] = ()
    pictures: int = 0
    weighed: bool = True
    machine: Machine | None = None
    limits: Sequence[Limit] = ()
    checked: Sequence[Checked] = ()
    replaced: Sequence[str] = ()
    depending: Sequence[str] = ()
    types: str = "float32"

    @property
    def macs(self) -> int:
        return sum(call.macs for call in self.calls)

    @property
    def operators(self) -> list[Operator]:
        """The calls by operator: most MACs first, then most bytes."""
        by_name: dict[str, list[Call]] = {}
        for call in self.calls:
            by_name.setdefault(call.name, []).append(call)
        found = [
            Operator(
                name,
                len(part),
                sum(call.macs for call in part),
                sum(call.parameters for call in part),
                sum(call.bytes for call in part),
                max(part, key=lambda call: (call.macs, call.bytes)),
            )
            for name, part in by_name.items()
        ]
        return sorted(found, key=lambda one: (-one.macs, -one.bytes, one.name))

    def to_dict(self) -> dict[str, Any]:
        """The analysis for JSON."""
        return {
            "name": self.name,
            "images": list(self.images),
            "parameters": self.parameters,
            "macs": self.macs,
            "replaced": list(self.replaced),
            "operators": [
                {
                    "name": one.name,
                    "calls": one.calls,
                    "macs": one.macs,
                    "parameters": one.parameters,
                    "bytes": one.bytes,
                    "shapes": one.shapes,
                    "targets": {name: asdict(status) for name, status in self.statuses.get(one.name, {}).items()},
                }
                for one in self.operators
            ],
            "calls": [asdict(call) for call in self.calls],
            "targets": {
                name: {"title": title, "sources": dict(self.sources.get(name, {})), **self.counts(name)}
                for name, title in self.titles.items()
            },
            "shapes": [asdict(one) for one in self.variations],
            "depending": list(self.depending),
            "training_only": {kind: list(names) for kind, names in self.training_only.items()},
            "risks": [asdict(advice) for advice in self.risks],
            "pictures": self.pictures,
            "weights": self.weighed,
            "roofline": {
                "computed, not measured": True,
                "machine": asdict(self.machine) if self.machine else None,
                "blocks": [asdict(one) | {"gain": one.gain, "fused_gain": one.fused_gain} for one in self.limits],
            },
            "replacements": [asdict(one) for one in self.checked],
        }

    def counts(self, target: str) -> dict[str, int]:
        """The number of operators with each kind of status on `target`."""
        kinds = [of[target].kind for of in self.statuses.values()]
        return {kind: kinds.count(kind) for kind in KINDS}


def analyze_module(
    model: nn.Module,
    images: Sequence[int],
    name: str,
    machine: Machine,
    pictures: Tensor | None = None,
    *,
    targets: Sequence[str] = (),
    replace: Sequence[str] = (),
    check: bool = False,
) -> Analysis:
    """Analyse a model for pictures of shape `images`, [B, in, H, W], in evaluation mode; the model is not changed.

    `machine`: peaks that limits are computed from. `pictures`, preprocessed, show risks that weights do not. `targets`:
    all by default. `replace`: replacements (`operators.replacements`) to apply first. `check`: run every replacement on
    the model, with `pictures` or noise, and compare the outputs. NotTraceable names the module that cannot be traced.
    """
    tables, wanted = chosen_targets(targets), chosen(replace)
    calls = trace(model, images, partial(Replacing, wanted))
    blocks, network = _blocks(model, calls)
    statuses = {
        call.name: {key: status_of(table, call.name, network) for key, table in tables.items()} for call in calls
    }
    has_weights = not any(parameter.is_meta for parameter in model.parameters())
    return Analysis(
        name,
        tuple(images),
        sum(parameter.numel() for parameter in model.parameters()),
        calls,
        {key: table.title for key, table in tables.items()},
        {key: table.sources for key, table in tables.items()},
        statuses,
        variations(model, images, trace(model, images) if replace else calls),
        training_only(model),
        _risks(model, pictures) if has_weights else (),
        0 if pictures is None else len(pictures),
        has_weights,
        machine,
        limits(calls, blocks, machine),
        _checked(model, images, pictures) if check else (),
        list(replace),
    )


def _blocks(model: nn.Module, calls: Sequence[Call]) -> tuple[list[str], str | None]:
    """Names of the blocks, and of the architecture; the blocks of an unknown model are the layers of its lists."""
    known = getattr(model, "architecture", None)
    if isinstance(known, Architecture) and (blocks := blocks_of(model)):
        return list(blocks), known.name
    parts = dict.fromkeys(".".join(call.module.split(".")[:2]) for call in calls if call.module)
    return list(parts), known.name if isinstance(known, Architecture) else None


def _risks(model: nn.Module, pictures: Tensor | None) -> list[Advice]:
    found = [*by_weights(model)]
    if named_nodes(model):
        found += by_ranges(model)
    if pictures is not None:
        with eval_mode(model):
            found += by_pictures(model, pictures.to(_device(model)))
    return found


def _checked(model: nn.Module, images: Sequence[int], pictures: Tensor | None) -> list[Checked]:
    if pictures is None:
        pictures = torch.randn(tuple(images), generator=torch.Generator().manual_seed(0))
    with eval_mode(model):
        found = compare(model, pictures.to(_device(model)), REPLACEMENTS)
    return [Checked(name, REPLACEMENTS[name].what, *found[name]) for name in REPLACEMENTS]


def _device(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def _shown(shapes: Sequence[Shape]) -> str:
    most = 3
    texts = ["x".join(map(str, shape)) or "scalar" for shape in shapes[:most]]
    return ", ".join(texts) + (f" and {len(shapes) - most} more" if len(shapes) > most else "")


@dataclass(frozen=True)
class ChannelSizes:
    """The largest values of channels that stand out: `dead` counts those of 0, `wide` has the largest by the median."""

    dead: dict[str, int] = field(default_factory=dict)
    wide: dict[str, float] = field(default_factory=dict)

    def look(self, name: str, size: Tensor) -> None:
        """Take in the largest value of each channel, float [channels]."""
        if gone := int((size == 0).sum()):
            self.dead[name] = gone
        middle = size.median()
        if len(size) > 1 and middle > 0 and (times := float(size.max() / middle)) > UNREACHED:
            self.wide[name] = times


def told(kind: str, text: str, found: Collection[str], warns: bool = False) -> Iterator[Advice]:
    """The advice on what was `found`, if anything was.

    `text` may give their {count}, {some} of them or, where each has a number, the one that is {most}.
    """
    if found:
        name = max(found, key=found.__getitem__) if isinstance(found, Mapping) else ""
        most = f"{name} most, {found[name]:.4g}" if isinstance(found, Mapping) else ""
        yield Advice(kind, text.format(count=len(found), some=listed(found, 2), most=most), tuple(found), warns)


def by_weights(model: nn.Module) -> Iterator[Advice]:
    """Risks in the weights."""
    sizes = ChannelSizes()
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, _PRODUCTS) and isinstance(weight, Tensor) and not weight.is_meta:
            sizes.look(name, weight.detach().flatten(1).abs().amax(1).float())
    over = [
        name
        for name, parameter in model.named_parameters()
        if not parameter.is_meta and parameter.numel() and float(parameter.detach().abs().max()) > LARGEST_HALF
    ]
    yield from told("weights-beyond-half", "{count} parameters exceed the largest float16: {some}", over, warns=True)
    yield from told("dead-channels", "dead output channels (weights of 0) in {count} layers: {most}", sizes.dead)
    yield from told("outlier-weights", WIDE_WEIGHTS, sizes.wide)


def by_ranges(model: nn.Module) -> Iterator[Advice]:
    """Risks in a calibrated checkpoint's ranges; none without ranges."""
    nodes: Mapping[str, Quantizer] = {
        name: node
        for name, node in named_nodes(model).items()
        if node.amax is not None and node.role is not Role.GEMM_WEIGHT
    }
    largest = {name: abs(range_of(node).amax) for name, node in nodes.items()}
    beyond = {name: value for name, value in largest.items() if value > LARGEST_HALF}
    yield from told("beyond-half", "ranges of {count} nodes exceed the largest float16: {most}", beyond, warns=True)
    dead = [name for name, value in largest.items() if value == 0]
    yield from told("dead", "{count} nodes saw only zeros in calibration: {some}", dead, warns=True)
    yield from _of_norms({name: value for name, value in largest.items() if nodes[name].role is Role.NORM_INPUT})


def by_pictures(model: nn.Module, images: Tensor) -> Iterator[Advice]:
    """Risks in a forward pass of `images`, [B, in, H, W]."""
    largest: dict[str, float] = {}
    inputs: dict[str, float] = {}
    flat: dict[str, float] = {}
    sizes = ChannelSizes()
    modules: dict[str, nn.Module] = {
        name: module for name, module in model.named_modules() if isinstance(module, (*_PRODUCTS, *_NORMS))
    }

    def look(name: str, module: nn.Module, args: tuple[Any, ...], y: Tensor) -> None:
        largest[name] = float(y.abs().max())
        channels = y.movedim(1, -1) if y.dim() == 4 and isinstance(module, (*_PRODUCTS[1:], *_NORMS[1:])) else y
        sizes.look(name, channels.flatten(0, -2).abs().amax(0).float())
        if isinstance(module, nn.LayerNorm):
            inputs[name] = float(args[0].abs().max())
            least = float(args[0].float().var(-1, unbiased=False).min())
            if least < 10 * module.eps:
                flat[name] = least

    with watching(modules, look), torch.no_grad():
        model(images)
    beyond = {name: value for name, value in largest.items() if value > LARGEST_HALF}
    yield from told("beyond-half", "{count} layers exceed the largest float16: {most}", beyond, warns=True)
    yield from _of_norms(inputs)
    if flat:
        name = min(flat, key=flat.__getitem__)
        text = f"{len(flat)} LayerNorms see variances like their eps, {name} {flat[name]:.2g}: noise grows there"
        yield Advice("flat-norm", text, tuple(flat))
    yield from told("dead-channels", "channels of {count} layers are 0 on every picture: {most}", sizes.dead)
    text = "channels of {count} outputs stand out, {most} times the median: the pass equalize may help"
    yield from told("outliers", text, sizes.wide)


def _of_norms(inputs: Mapping[str, float]) -> Iterator[Advice]:
    """`inputs`: the largest input of each LayerNorm."""
    risky = {name: value for name, value in inputs.items() if value > SQUARE_OVERFLOWS}
    text = "squares of {count} LayerNorms' inputs overflow float16, {most}: keep their variance in float32"
    yield from told("norm-variance", text, risky, warns=True)
