"""Look up operators in the tables of configs/targets. An operator in no table is not known."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

from swin_quant.base.errors import UsageError, offered
from swin_quant.base.files import shipped_files
from swin_quant.base.schema import checked
from swin_quant.base.yaml_file import read_yaml

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


def get_status(target: Target, operator: str, network: str | None, is_onnx: bool = False) -> Status:
    """How `target` takes an operator of torch, or of ONNX with `is_onnx`, in the architecture `network`."""
    if target.networks is not None and network not in target.networks:
        return Status(UNSUPPORTED, target.whole, "; ".join(target.sources.values()))
    source = "; ".join(target.sources.values())
    tables = ((SUPPORTED, target.supported), (REPLACED, target.expanded), (UNSUPPORTED, target.unsupported))
    if target.reads == "torch":
        if is_onnx:
            return Status(NOT_KNOWN)
        if instead := target.replaced.get(operator):
            return Status(REPLACED, instead.by, target.sources.get(instead.source, instead.source))
        kind = next((kind for kind, names in tables if operator in names and kind != REPLACED), NOT_KNOWN)
        return Status(kind, "", source if kind != NOT_KNOWN else "")
    parts = (operator,) if is_onnx else exporter().writes.get(operator, ())
    kinds = [next((kind for kind, names in tables if part in names), NOT_KNOWN) for part in parts]
    if UNSUPPORTED in kinds:
        return Status(UNSUPPORTED, " + ".join(parts), source)
    if not kinds or NOT_KNOWN in kinds:
        return Status(NOT_KNOWN, " + ".join(part for part, kind in zip(parts, kinds, strict=True) if kind == NOT_KNOWN))
    whole = len(parts) == 1 and kinds == [SUPPORTED]
    return Status(SUPPORTED if whole else REPLACED, " + ".join(parts), source)


def unknown_everywhere(statuses: Mapping[str, Mapping[str, Status]]) -> list[str]:
    """Operators that no table knows; `statuses`: operator -> target -> status."""
    return [name for name, of in statuses.items() if of and all(status.kind == NOT_KNOWN for status in of.values())]
