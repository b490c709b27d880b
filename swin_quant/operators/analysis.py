"""What is known of a model before it is deployed, in one object: operators, targets, shapes, risks, limits."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from swin_quant.operators.roofline import Limit, Machine
from swin_quant.operators.support import KINDS, Status
from swin_quant.operators.trace import Call, Shape
from swin_quant.operators.variation import Variation
from swin_quant.quant.advice import Advice


@dataclass(frozen=True)
class Operator:
    """All calls of one operator: sums, and the largest of its calls as an example."""

    name: str
    calls: int
    macs: int
    parameters: int
    bytes: int
    example: Call

    @property
    def shapes(self) -> str:
        """Of the example: what goes in, and what comes out."""
        return f"{_shown(self.example.inputs)} -> {_shown(self.example.outputs)}"


@dataclass(frozen=True)
class Checked:
    """A replacement that was run: the calls that it stood for, and the largest difference of the output."""

    name: str
    what: str
    calls: int
    difference: float


@dataclass(frozen=True)
class Analysis:
    """`statuses`: operator -> target -> status; `titles`: target -> its name for people. `limits` are computed from
    the peaks of `machine`, not measured. `replaced`: the replacements that were applied before tracing.
    `weighed`: whether there were weights to look at for `risks`. `depending`: what of a graph depends on data. `types`:
    what bytes are counted in.
    """

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
        """By MACs, then bytes, most first."""
        return operators_of(self.calls)

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
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
        """Kind of status -> how many operators have it on `target`."""
        kinds = [of[target].kind for of in self.statuses.values()]
        return {kind: kinds.count(kind) for kind in KINDS}


def operators_of(calls: Sequence[Call]) -> list[Operator]:
    """Calls of one name together."""
    by_name: dict[str, list[Call]] = {}
    for call in calls:
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


def _shown(shapes: Sequence[Shape]) -> str:
    most = 3
    texts = ["x".join(map(str, shape)) or "scalar" for shape in shapes[:most]]
    return ", ".join(texts) + (f" and {len(shapes) - most} more" if len(shapes) > most else "")
