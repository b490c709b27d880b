"""Reports on a graph: the int8 products of an ONNX file, and the analysis of a model before anything is quantized."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from swin_quant.backends.backend import function
from swin_quant.backends.onnx_reader.file import open_onnx, read_model
from swin_quant.backends.onnx_reader.npu_rules import NPUS
from swin_quant.backends.onnx_reader.products import QUANTIZED, Inspection, inspect_model
from swin_quant.backends.registry import takers
from swin_quant.base.errors import listed, one_line
from swin_quant.base.extras import library
from swin_quant.operators.analysis import (
    NOT_KNOWN,
    REPLACED,
    SUPPORTED,
    UNSUPPORTED,
    Analysis,
    Checked,
    Operator,
    unknown_everywhere,
)
from swin_quant.operators.trace import sentence
from swin_quant.report.table import Column, ReportTable, bullets, field, figure, folded, print_fitted, styled, terminal

INT8 = "int8"
_ENOUGH = 0.5  # the share of quantized products that have to run in integers for a file to be called int8


@dataclass(frozen=True)
class IntegerProducts:
    """`quantized`: the products that a file quantizes; `integer`: how many run in int8; `floats`: names of others."""

    quantized: int
    integer: int
    floats: tuple[str, ...] = ()

    @property
    def is_float(self) -> bool:
        """Whether most of what is quantized runs in float."""
        return self.integer < _ENOUGH * self.quantized

    def __str__(self) -> str:
        rest = f"; in float: {listed(self.floats, 3)}" if self.floats else ""
        return f"{self.integer} of {self.quantized} quantized products run in int8{rest}"


def quantized_products(file: Path, in_functions: bool = True) -> list[str]:
    """The names of the products of an ONNX file whose inputs are both int8.

    `in_functions` False leaves out the products of its local functions, which an engine runs as compiled operators.
    """
    model = read_model(file)
    if not in_functions:
        del model.functions[:]
    return [gemm.node for gemm in inspect_model(model).gemms if gemm.format == INT8]


def integer_products(quantized: list[str], ran: Mapping[str, str]) -> IntegerProducts:
    """`ran`: product -> the type that an engine runs it in, as `Engine.details["gemms"]` has it."""
    floats = [name for name in quantized if ran.get(name, INT8) != INT8]
    integer = sum(kind == INT8 for kind in ran.values())
    return IntegerProducts(len(quantized), min(integer, len(quantized)), tuple(floats))


def by_engine(file: Path, engines: tuple[str, ...] = ()) -> dict[str, IntegerProducts]:
    """`<engine> <version>, <batch>` -> the counts of a file on each installed engine that runs ONNX, with its defaults.

    A file for any batch is counted as it is, and with a batch of 1 that is fixed before loading. SwinQuantError where
    an engine cannot load the file.
    """
    quantized = quantized_products(file)
    if not quantized:
        return {}
    opened = open_onnx(file)
    sizes: Mapping[str, Any] = {f"batch {opened.batch}": None} if opened.batch else {"any batch": None, "batch 1": 1}
    return {
        f"{one.name} {library(one.name, '').__version__.partition('-')[0]}, {what}": integer_products(
            quantized, function(one.products)(opened, batch)
        )
        for one in takers("onnx")
        if one.products and one.is_installed and (not engines or one.name in engines)
        for what, batch in sizes.items()
    }


@dataclass(frozen=True)
class GraphReport:
    """The products of an ONNX file, and how many run in int8 on each engine."""

    file: Path
    report: Inspection
    engines: Mapping[str, IntegerProducts]
    npu: str | None = None
    misfits: Sequence[str] = ()

    def show(self) -> None:
        """Print it as wide as the terminal; for an NPU, whether the file keeps its rules and which nodes do not."""
        if self.npu:
            rules, count = NPUS[self.npu], len(self.misfits)
            print(f"{self.npu} ({rules.what}): {f'{count} nodes do not fit' if count else 'fits'}")
            print(*self.misfits, *(f"source: {one}" for one in rules.sources), sep="\n")
        else:
            print_fitted(self.text)

    def text(self, width: int, color: bool = False) -> str:
        """The whole report for a terminal of `width` columns."""
        report = self.report
        counts = Counter(gemm.format for gemm in report.gemms)
        kinds = [f"{counts[kind]} of {len(report.gemms)} products {kind}" for kind in QUANTIZED if counts[kind]]
        head = (
            f"opset {report.opset}, {report.body} body; {' and '.join(kinds) or 'no product quantized'}; "
            f"{report.pairs[0]} QuantizeLinear, {report.pairs[1]} DequantizeLinear"
        )
        styles = {key: "yellow" if one.integer < one.quantized else "green" for key, one in self.engines.items()}
        ran = [(f"{key}: {one}", styles[key]) for key, one in self.engines.items()]
        products = listed((gemm.name for gemm in report.gemms if gemm.format is None), 12) or "none"
        floats = ", ".join(f"{op} {count}" for op, count in report.float_ops.items()) or "none"
        lines = [(head, "bold"), *ran, (f"float products: {products}", ""), (f"float ops: {floats}", "")]
        if report.asymmetric:
            needed = "not int8 with zero point 0, which TensorRT needs"
            lines.append((f"{needed}: {listed(report.asymmetric, 3)}", "yellow"))
        each = ((line, style) for text, style in lines for line in folded(one_line(text), width))
        return "".join(f"{styled(line, style if color else '')}\n" for line, style in each)

    def to_json(self) -> dict[str, Any]:
        """The inspection, with the counts by engine."""
        counts = {name: asdict(one) for name, one in self.engines.items()}
        found = {"file": self.file.name, **self.report.to_dict(), "engines": counts}
        if self.npu:
            found["npu"] = {"for": self.npu, **asdict(NPUS[self.npu]), "misfits": self.misfits}
        return found


MARKS = {SUPPORTED: "yes", REPLACED: "other", UNSUPPORTED: "no", NOT_KNOWN: "?"}
_STYLES = {SUPPORTED: "green", REPLACED: "", UNSUPPORTED: "red", NOT_KNOWN: "yellow"}
_LEGEND = "yes: has it; other: computes it by other operators of its own; no: has it not; ?: not known, by our tables"


def _same(row: Checked) -> str:
    if not row.calls:
        return "not called for"
    return "equal to the bit" if row.difference == 0 else f"differs by {row.difference:.2g} at most"


OPERATORS: tuple[Column[Operator], ...] = (
    Column("name", "operator", field("name"), fold=True),
    figure("calls", "calls", field("calls")),
    figure("macs", "GMACs", lambda row: row.macs / 1e9 or None, "{:.4g}"),
    Column("shapes", "shapes of the largest", field("shapes"), fold=True),
)
CHECKED: tuple[Column[Checked], ...] = (
    Column("name", "replacement", field("name")),
    Column("what", "what", field("what"), fold=True),
    figure("calls", "calls", field("calls")),
    Column("difference", "output", _same),
)


def sections(analysis: Analysis) -> Iterator[tuple[str, ReportTable[Any] | None, Sequence[str]]]:
    """All sections in order: a heading, and a table, sentences, or both below it."""

    def make_column(key: str, title: str) -> Column[Operator]:
        title = re.sub(r" |(?<=[a-z])(?=[A-Z])", "\n", title)  # a word on each line makes seven columns fit
        kinds = {name: statuses[key].kind for name, statuses in analysis.statuses.items()}
        return Column(key, title, lambda row: MARKS[kinds[row.name]], style=lambda row: _STYLES[kinds[row.name]])

    yield "operators", ReportTable(OPERATORS, analysis.operators), ()
    unknown = unknown_everywhere(analysis.statuses)
    known = [f"known to none of the tables: {', '.join(unknown)}"] if unknown else []
    columns = [OPERATORS[0], *(make_column(key, title) for key, title in analysis.titles.items())]
    yield "targets", ReportTable(columns, analysis.operators, [_LEGEND]), known
    flow = "nothing asks for a value: control flow does not depend on data"
    yield "shapes and control flow", None, [*map(sentence, analysis.variations), flow]
    if analysis.checked:
        yield "equivalent replacements", ReportTable(CHECKED, analysis.checked), ()


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
    for title, table, sentences in sections(analysis):
        parts.append(f"\n{styled(title, 'bold' if color else '')}\n")
        parts.append(terminal(table, width, color) if table else "")
        parts.extend(f"{line}\n" for line in bullets(sentences, width, color))
    return "".join(parts)
