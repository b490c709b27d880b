"""The report on an ONNX graph for a terminal: a line for each block, then the patterns that engines do not fuse."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from swin_quant.backends.onnx_reader.inspect.attention import Verdict
from swin_quant.backends.onnx_reader.inspect.gemms import FLOAT8, QUANTIZED, Gemm
from swin_quant.backends.onnx_reader.inspect.report import Inspection
from swin_quant.backends.products import IntegerProducts
from swin_quant.base.errors import listed, one_line
from swin_quant.report.table import Column, ReportTable, field, folded, styled, terminal

Line = tuple[str, str]  # text and style


@dataclass(frozen=True)
class BlockRow:
    """The products of a block, and its attention if it has one. `why`: the reason that it is not one int8 kernel."""

    block: str
    gemms: list[Gemm]
    verdict: Verdict | None
    why: str

    @property
    def floats(self) -> str:
        """The products that are not quantized, by their names without the block's."""
        names = (gemm.name for gemm in self.gemms if gemm.format is None)
        return listed((name.split(f"{self.block}.")[-1].rsplit("/", 2)[-1] for name in names), 6)


def _pattern(row: BlockRow) -> str | None:
    return row.verdict.pattern if row.verdict else None


def _style(row: BlockRow) -> str:
    if row.verdict is None:
        return ""
    return "green" if row.verdict.pattern in ("fusible int8", "fusible float8") else "yellow"


def _share(row: BlockRow, format: str) -> str | None:
    """The number of products in a format, as 3/8; None for none, but int8 shows 0 where float8 has none either."""
    counts = Counter(gemm.format for gemm in row.gemms)
    return f"{counts[format]}/{len(row.gemms)}" if counts[format] or (format, counts[FLOAT8]) == ("int8", 0) else None


COLUMNS: tuple[Column[BlockRow], ...] = (
    Column("block", "block", field("block"), fold=True),
    Column("int8", "int8", lambda row: _share(row, "int8"), may_lack=True),
    Column("float8", "float8", lambda row: _share(row, FLOAT8), may_lack=True),
    Column("float_products", "float products", field("floats"), fold=True, blank=""),
    Column("attention", "attention", _pattern, blank="", style=_style),
    Column("why", "why not one int8 kernel", field("why"), fold=True, blank=""),
)


def inspection_text(
    report: Inspection, width: int, color: bool = False, engines: Mapping[str, IntegerProducts] = MappingProxyType({})
) -> str:
    """The whole report for a terminal of `width` columns; `engines`: what they run in int8, by `products.by_engine`."""
    counts = Counter(gemm.format for gemm in report.gemms)
    kinds = " and ".join(f"{counts[kind]} of {len(report.gemms)} products {kind}" for kind in QUANTIZED if counts[kind])
    head = (
        f"opset {report.opset}, {report.body} body; {kinds or 'no product quantized'}; "
        f"{report.pairs[0]} QuantizeLinear, {report.pairs[1]} DequantizeLinear"
    )
    ran = [(f"{name}: {one}", "yellow" if one.integer < one.quantized else "green") for name, one in engines.items()]
    above, below = _folded([(head, "bold"), *ran], width, color), _folded(_findings(report), width, color)
    return above + terminal(ReportTable(COLUMNS, _rows(report)), width, color) + below


def _rows(report: Inspection) -> list[BlockRow]:
    verdicts = {verdict.attention.block or verdict.attention.name: verdict for verdict in report.verdicts}
    rows = []
    for block in dict.fromkeys((*report.blocks, *verdicts)):
        verdict = verdicts.get(block)
        float_model = verdict is not None and verdict.fusible and not report.pairs[0]
        why = next(iter(verdict.failed.values()), "") if verdict and not float_model else ""
        rows.append(BlockRow(block, report.blocks.get(block, []), verdict, why))
    return rows


def _findings(report: Inspection) -> Iterator[Line]:
    yield f"float ops: {_counts(report.float_ops)}", ""
    yield f"layout ops: {_counts(report.layout_ops)}", ""
    for finding in report.findings:
        yield f"{finding.backend}: {finding.rule}: {listed(finding.nodes, 3)}", "yellow"
        yield f"    {finding.why} [{finding.source}]", "dim"
    for sentence in report.unrecognised:
        yield f"not recognised: {sentence}", "yellow"


def _folded(lines: Iterator[Line] | list[Line], width: int, color: bool) -> str:
    each = ((line, style) for text, style in lines for line in folded(one_line(text), width))
    return "".join(f"{styled(line, style if color else '')}\n" for line, style in each)


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{op} {count}" for op, count in counts.items()) or "none"
