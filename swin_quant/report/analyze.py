"""An analysis for a terminal and as Markdown: operators, targets, shapes, risks, limits, replacements."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from swin_quant.base.errors import listed
from swin_quant.operators.analysis import Analysis, Checked, Operator
from swin_quant.operators.roofline import Limit
from swin_quant.operators.support import NOT_KNOWN, REPLACED, SUPPORTED, UNSUPPORTED, Status, unknown_everywhere
from swin_quant.operators.variation import sentence, training_sentence
from swin_quant.report.table import Column, ReportTable, bullets, escaped, field, figure, markdown, styled, terminal

MARKS = {SUPPORTED: "yes", REPLACED: "other", UNSUPPORTED: "no", NOT_KNOWN: "?"}
_STYLES = {SUPPORTED: "green", REPLACED: "", UNSUPPORTED: "red", NOT_KNOWN: "yellow"}
_LEGEND = "yes: has it; other: computes it by other operators of its own; no: has it not; ?: not known, by our tables"

OPERATORS: tuple[Column[Operator], ...] = (
    Column("name", "operator", field("name"), fold=True),
    figure("calls", "calls", field("calls")),
    figure("macs", "GMACs", lambda row: row.macs / 1e9 or None, "{:.4g}"),
    figure("parameters", "M params", lambda row: row.parameters / 1e6 or None, "{:.4g}"),
    figure("bytes", "MB", lambda row: row.bytes / 1e6, "{:.1f}"),
    Column("shapes", "shapes of the largest", field("shapes"), fold=True),
)
LIMITS: tuple[Column[Limit], ...] = (
    Column("block", "block", field("block"), fold=True),
    figure("macs", "GMACs", lambda row: row.macs / 1e9, "{:.3f}"),
    figure("bytes", "MB", lambda row: row.bytes / 1e6, "{:.1f}"),
    figure("float_us", "float µs", field("float_us"), "{:.1f}"),
    figure("int8_us", "int8 µs", field("int8_us"), "{:.1f}"),
    figure("gain", "at most", lambda row: row.gain, "{:.2f}x"),
    figure("fused_gain", "if fused", lambda row: row.fused_gain, "{:.2f}x"),
    Column("bound", "bound", field("bound")),
)
CHECKED: tuple[Column[Checked], ...] = (
    Column("name", "replacement", field("name")),
    Column("what", "what", field("what"), fold=True),
    figure("calls", "calls", field("calls")),
    Column("difference", "output", lambda row: _same(row)),
)


def _same(row: Checked) -> str:
    if not row.calls:
        return "not called for"
    return "equal to the bit" if row.difference == 0 else f"differs by {row.difference:.2g} at most"


@dataclass(frozen=True)
class TargetRow:
    """An operator, and its status on each target."""

    name: str
    calls: int
    of: dict[str, Status]


@dataclass(frozen=True)
class ReportSection:
    """A heading, and a table or sentences below it."""

    title: str
    table: ReportTable[Any] | None = None
    sentences: Sequence[str] = ()


def sections(analysis: Analysis, full: bool = False) -> Iterator[ReportSection]:
    """All sections in order. `full` adds the sources, and the replacement of every operator that a target replaces."""
    yield ReportSection("operators", ReportTable(OPERATORS, analysis.operators, _remarks(analysis)))
    yield ReportSection(
        "targets",
        _targets(analysis, " " if full else "\n"),
        [*_unknown(analysis), *(_details(analysis) if full else ())],
    )
    if analysis.depending:
        depends = f"control flow or shapes depend on data: {listed(analysis.depending)}"
    else:
        depends = "nothing asks for a value: control flow does not depend on data"
    training = training_sentence({name: list(calls) for name, calls in analysis.training_only.items()})
    shapes = [*map(sentence, analysis.variations), depends, f"needed by training alone: {training}"]
    yield ReportSection("shapes and control flow", None, shapes)
    risks = [f"{'warning: ' if one.warns else ''}{one.text}" for one in analysis.risks]
    if analysis.weighed and not risks:
        risks = ["none found"]
    yield ReportSection("precision risks", None, [*risks, _looked_at(analysis)])
    if analysis.machine:
        remarks = [
            f"computed from the peaks of {analysis.machine.description} ({analysis.machine.source}), never measured",
            "at most: every call on its own; if fused: all but matrix products cost nothing",
            "bound: what limits the products in float",
        ]
        yield ReportSection("roofline", ReportTable(LIMITS, analysis.limits, remarks, lambda row: _bold(row)))
    if analysis.checked:
        yield ReportSection("equivalent replacements", ReportTable(CHECKED, analysis.checked))


def _bold(row: Limit) -> str:
    return "bold" if row.block == "all" else ""


def head(analysis: Analysis) -> str:
    """The model in a line."""
    shape = " x ".join(map(str, analysis.images))
    after = f"; after {', '.join(analysis.replaced)}" if analysis.replaced else ""
    return (
        f"{analysis.name}, pictures {shape}: {analysis.parameters / 1e6:.2f} M parameters, {analysis.macs / 1e9:.3f} "
        f"GMACs, {len(analysis.calls)} calls of {len(analysis.operators)} operators{after}"
    )


def analysis_text(analysis: Analysis, width: int, color: bool = False) -> str:
    """The sections for a terminal of `width` columns."""
    parts = ["\n".join(bullets([head(analysis)], width))[2:] + "\n"]
    for section in sections(analysis):
        parts.append(f"\n{styled(section.title, 'bold' if color else '')}\n")
        parts.append(terminal(section.table, width, color) if section.table else "")
        parts.extend(f"{line}\n" for line in bullets(section.sentences, width, color))
    return "".join(parts)


def analysis_markdown(analysis: Analysis, level: int = 2) -> str:
    """Markdown with headings from `level`, and all sources."""
    parts = [f"{'#' * level} {escaped(analysis.name)}\n\n{escaped(head(analysis))}.\n"]
    for section in sections(analysis, full=True):
        parts.append(f"\n{'#' * (level + 1)} {section.title}\n\n")
        parts.append(markdown(section.table) if section.table else "")
        parts.extend(f"* {escaped(line)}\n" for line in section.sentences)
    return "".join(parts)


def _remarks(analysis: Analysis) -> list[str]:
    return [f"MB: what calls read and write in {analysis.types}, one at a time, weights too; a view moves nothing"]


def _targets(analysis: Analysis, between: str) -> ReportTable[TargetRow]:
    rows = [TargetRow(one.name, one.calls, dict(analysis.statuses[one.name])) for one in analysis.operators]
    columns: list[Column[TargetRow]] = [Column("name", "operator", field("name"), fold=True)]
    for key, title in analysis.titles.items():
        columns.append(
            Column(key, _broken(title, between), _mark(key), style=lambda row, key=key: _STYLES[row.of[key].kind])  # type: ignore[misc]
        )
    return ReportTable(columns, rows, [_LEGEND])


def _broken(title: str, between: str) -> str:
    """A title with a word on each line, which makes seven columns fit; Markdown has no lines in cells."""
    return title if between == " " else re.sub(r" |(?<=[a-z])(?=[A-Z])", between, title)


def _mark(key: str) -> Callable[[TargetRow], str]:
    return lambda row: MARKS[row.of[key].kind]


def _unknown(analysis: Analysis) -> list[str]:
    found = unknown_everywhere(analysis.statuses)
    return [f"known to none of the tables: {', '.join(found)}"] if found else []


def _details(analysis: Analysis) -> Iterator[str]:
    for key, title in analysis.titles.items():
        of = {name: statuses[key] for name, statuses in analysis.statuses.items()}
        if len({status.by for status in of.values()}) == 1 and (only := next(iter(of.values()))).kind == UNSUPPORTED:
            yield f"{title}: {only.by}"
            continue
        by = [f"{name} by {status.by}" for name, status in of.items() if status.kind == REPLACED]
        yield f"{title}: {'; '.join(by) or 'nothing is replaced'}. Sources: {'; '.join(analysis.sources[key].values())}"


def _looked_at(analysis: Analysis) -> str:
    if not analysis.weighed:
        return "not looked for: there are no weights"
    pictures = f", {analysis.pictures} pictures" if analysis.pictures else "; pictures, where they are given, show more"
    return f"looked at: weights, calibrated ranges if there are any{pictures}"
