"""Analyse a model before quantization: operators, targets, shapes, replacements.

Operators are looked up in the tables of configs/targets. An operator in no table is not known.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from swin_quant.base.errors import UsageError, offered
from swin_quant.base.files import shipped_files
from swin_quant.base.schema import checked
from swin_quant.base.yaml_file import read_yaml
from swin_quant.models.classifier import Architecture
from swin_quant.operators.replacements import REPLACEMENTS, Replacing, chosen, compare
from swin_quant.operators.trace import Call, Shape, Variation, trace, variations
from swin_quant.quant.watch import eval_mode

SUPPORTED, REPLACED, UNSUPPORTED, NOT_KNOWN = "supported", "replaced", "unsupported", "not known"
KINDS = (SUPPORTED, REPLACED, UNSUPPORTED, NOT_KNOWN)
_EXPORTER = "onnx"  # the table from torch's operators to ONNX, which is no target


@dataclass(frozen=True)
class Status:
    """How a target takes an operator. `by`: the operators that it computes instead; `source`: where that is
    documented."""

    kind: str
    by: str = ""
    source: str = ""


@dataclass(frozen=True)
class Instead:
    """The operators that a target computes instead; `source`: a key of the table's sources."""

    by: str
    source: str


@dataclass(frozen=True)
class Target:
    """A compiler's or framework's table: operators of ONNX or torch (`reads`) that it supports, `expanded` into others,
    or `replaced` by its own. `networks`: the only architectures that it runs, None for any; `whole` says so in
    words."""

    title: str
    reads: Literal["onnx", "torch"]
    sources: dict[str, str]
    supported: tuple[str, ...] = ()
    unsupported: tuple[str, ...] = ()
    expanded: tuple[str, ...] = ()
    replaced: dict[str, Instead] = field(default_factory=dict)
    networks: tuple[str, ...] | None = None
    whole: str = ""
    notes: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Exporter:
    """The table of torch's exporter: the ONNX operators that it writes for each operator of torch."""

    description: str
    sources: dict[str, str]
    writes: dict[str, tuple[str, ...]]


@cache
def targets() -> dict[str, Target]:
    """Every table by the name of its file."""
    files = [path for path in shipped_files("targets") if path.stem != _EXPORTER]
    return {path.stem: checked(Target, read_yaml(path, "table of operators"), str(path)) for path in files}


@cache
def exporter() -> Exporter:
    """The table of torch's exporter."""
    (path,) = (path for path in shipped_files("targets") if path.stem == _EXPORTER)
    return checked(Exporter, read_yaml(path, "table of operators"), str(path))


def chosen_targets(names: Sequence[str] = ()) -> dict[str, Target]:
    """The tables of these names; all tables without one. UsageError for a name that has no table."""
    known = targets()
    for name in names:
        if name not in known:
            raise UsageError(f"‹target› {name!r:.60}{offered(name, known)}")
    return {name: known[name] for name in names} if names else dict(known)


def get_status(target: Target, operator: str, network: str | None) -> Status:
    """How `target` takes an operator of torch in the architecture `network`."""
    if target.networks is not None and network not in target.networks:
        return Status(UNSUPPORTED, target.whole, "; ".join(target.sources.values()))
    source = "; ".join(target.sources.values())
    tables = ((SUPPORTED, target.supported), (REPLACED, target.expanded), (UNSUPPORTED, target.unsupported))
    if target.reads == "torch":
        if instead := target.replaced.get(operator):
            return Status(REPLACED, instead.by, target.sources.get(instead.source, instead.source))
        kind = next((kind for kind, names in tables if operator in names and kind != REPLACED), NOT_KNOWN)
        return Status(kind, "", source if kind != NOT_KNOWN else "")
    parts = exporter().writes.get(operator, ())
    kinds = [next((kind for kind, names in tables if part in names), NOT_KNOWN) for part in parts]
    if UNSUPPORTED in kinds:
        return Status(UNSUPPORTED, " + ".join(parts), source)
    if not kinds or NOT_KNOWN in kinds:
        return Status(NOT_KNOWN, " + ".join(part for part, kind in zip(parts, kinds, strict=True) if kind == NOT_KNOWN))
    whole = len(parts) == 1 and kinds == [SUPPORTED]
    return Status(SUPPORTED if whole else REPLACED, " + ".join(parts), source)


def unknown_everywhere(statuses: Mapping[str, Mapping[str, Status]]) -> list[str]:
    """Operators that no table knows; `statuses`: operator -> target -> status."""
    return [name for name, found in statuses.items() if found and all(one.kind == NOT_KNOWN for one in found.values())]


@dataclass(frozen=True)
class Operator:
    """All calls of one operator: their MACs, and the call with the most as an example."""

    name: str
    calls: int
    macs: int
    example: Call

    @property
    def shapes(self) -> str:
        """The shapes of the example's inputs and outputs, three of each."""
        sides = []
        for shapes in (self.example.inputs, self.example.outputs):
            more = f" and {len(shapes) - 3} more" if len(shapes) > 3 else ""
            sides.append(", ".join("x".join(map(str, shape)) or "scalar" for shape in shapes[:3]) + more)
        return " -> ".join(sides)


@dataclass(frozen=True)
class Checked:
    """A replacement that was run: the calls that it replaced, and the largest difference of the output."""

    name: str
    what: str
    calls: int
    difference: float


@dataclass(frozen=True)
class Analysis:
    """`statuses`: status by operator and target; `titles`: each target's title. `replaced`: the replacements applied
    before tracing."""

    name: str
    images: Shape
    parameters: int
    calls: Sequence[Call]
    titles: Mapping[str, str]
    sources: Mapping[str, Mapping[str, str]]
    statuses: Mapping[str, Mapping[str, Status]]
    variations: Sequence[Variation] = ()
    checked: Sequence[Checked] = ()
    replaced: Sequence[str] = ()

    @property
    def macs(self) -> int:
        return sum(call.macs for call in self.calls)

    @property
    def operators(self) -> list[Operator]:
        """The calls by operator, most MACs first."""
        by_name: dict[str, list[Call]] = {}
        for call in self.calls:
            by_name.setdefault(call.name, []).append(call)
        found = [
            Operator(name, len(part), sum(call.macs for call in part), max(part, key=lambda call: call.macs))
            for name, part in by_name.items()
        ]
        return sorted(found, key=lambda one: (-one.macs, one.name))

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
            "replacements": [asdict(one) for one in self.checked],
        }

    def counts(self, target: str) -> dict[str, int]:
        """The number of operators with each kind of status on `target`."""
        kinds = [found[target].kind for found in self.statuses.values()]
        return {kind: kinds.count(kind) for kind in KINDS}


def analyze_module(
    model: nn.Module,
    images: Sequence[int],
    name: str,
    pictures: Tensor | None = None,
    *,
    targets: Sequence[str] = (),
    replace: Sequence[str] = (),
    check: bool = False,
) -> Analysis:
    """Analyse a model in evaluation mode for pictures of shape `images`, [B, in, H, W]; the model is not changed.

    Args:
        model: Any module.
        images: The shape of its input.
        name: The model's name in the report.
        pictures: Preprocessed pictures for `check`; noise by default.
        targets: Names of tables; all by default.
        replace: Replacements (`operators.replacements`) to apply first.
        check: Run every replacement on the model and compare the outputs.

    Returns:
        The analysis.

    Raises:
        NotTraceable: A module cannot be traced; the message names it.
    """
    tables = chosen_targets(targets)
    calls = trace(model, images, partial(Replacing, chosen(replace)))
    known = getattr(model, "architecture", None)
    network = known.name if isinstance(known, Architecture) else None
    checked: list[Checked] = []
    if check:
        if pictures is None:
            pictures = torch.randn(tuple(images), generator=torch.Generator().manual_seed(0))
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        with eval_mode(model):
            found = compare(model, pictures.to(device), REPLACEMENTS)
        checked = [Checked(name, one.what, *found[name]) for name, one in REPLACEMENTS.items()]
    return Analysis(
        name,
        tuple(images),
        sum(parameter.numel() for parameter in model.parameters()),
        calls,
        {key: table.title for key, table in tables.items()},
        {key: table.sources for key, table in tables.items()},
        {call.name: {key: get_status(table, call.name, network) for key, table in tables.items()} for call in calls},
        variations(model, images, trace(model, images) if replace else calls),
        checked,
        list(replace),
    )
