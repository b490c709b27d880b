"""Analyses an ONNX graph without running it: its products, its attention, and how engines will treat them."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from swin_quant.backends.onnx_reader.inspect.attention import CONDITIONS, Verdict, find_attention, judge
from swin_quant.backends.onnx_reader.inspect.gemms import FLOAT8, INTEGER_PRODUCTS, PRODUCTS, Gemm, find_gemms
from swin_quant.backends.onnx_reader.inspect.graph import Graph, index
from swin_quant.backends.onnx_reader.inspect.rules import Facts, Finding, apply_rules
from swin_quant.backends.registry import engines_for

if TYPE_CHECKING:
    from onnx import ModelProto


__all__ = ["Inspection", "inspect_model"]
LAYOUT = ("Transpose", "Reshape", "Slice", "Concat", "Gather", "Split", "Squeeze", "Unsqueeze", "Expand", "Cast")
_QUIET = {*PRODUCTS, *INTEGER_PRODUCTS, *LAYOUT, "QuantizeLinear", "DequantizeLinear", "Constant", "Identity", "Shape"}
ELSEWHERE = "(outside blocks)"


@dataclass(frozen=True)
class Inspection:
    """The report on one graph. `unrecognised`: what the analysis could not place, as sentences."""

    opset: int
    body: str
    blocks: dict[str, list[Gemm]]
    verdicts: list[Verdict]
    float_ops: dict[str, int]
    layout_ops: dict[str, int]
    pairs: tuple[int, int]
    findings: list[Finding]
    unrecognised: list[str]

    @property
    def gemms(self) -> list[Gemm]:
        return [gemm for gemms in self.blocks.values() for gemm in gemms]

    def to_dict(self) -> dict[str, Any]:
        """The report in JSON's types."""
        return {
            "opset": self.opset,
            "body": self.body,
            "quantize_linear": self.pairs[0],
            "dequantize_linear": self.pairs[1],
            "int8_gemms": sum(gemm.int8 for gemm in self.gemms),
            "float8_gemms": sum(gemm.format == FLOAT8 for gemm in self.gemms),
            "gemms": [_gemm_record(gemm) for gemm in self.gemms],
            "attention": [_verdict_record(verdict) for verdict in self.verdicts],
            "float_ops": self.float_ops,
            "layout_ops": self.layout_ops,
            "findings": [asdict(finding) for finding in self.findings],
            "unrecognised": self.unrecognised,
        }


def inspect_model(model: "ModelProto", backends: Iterable[str] | None = None) -> Inspection:
    """Analyse a model for `backends`, None for all that read ONNX. SwinQuantError for a graph without nodes."""
    graph = index(model)
    gemms = find_gemms(graph)
    attention, strange = find_attention(graph)
    verdicts = [judge(graph, one) for one in attention]
    blocks = _by_block(gemms, attention)
    counts = Counter(node.op_type for node in graph.nodes if not set(node.output) <= graph.constant)
    facts = Facts(graph, gemms, verdicts, _body(graph, gemms), counts["QuantizeLinear"] > 0)
    return Inspection(
        opset=graph.opsets.get("", graph.opsets.get("ai.onnx", 0)),
        body=facts.body,
        blocks=blocks,
        verdicts=verdicts,
        float_ops={op: n for op, n in counts.most_common() if op not in _QUIET},
        layout_ops={op: counts[op] for op in LAYOUT if counts[op]},
        pairs=(_count(graph, "QuantizeLinear"), _count(graph, "DequantizeLinear")),
        findings=apply_rules(facts, engines_for("onnx") if backends is None else backends),
        unrecognised=_unrecognised(graph, gemms, verdicts, strange, blocks),
    )


def _count(graph: Graph, op: str) -> int:
    return sum(node.op_type == op for node in graph.nodes)


def _body(graph: Graph, gemms: list[Gemm]) -> str:
    """The type of most products' results, which is that of the arithmetic around them."""
    kinds = Counter(graph.types.get(gemm.node.output[0], "unknown") for gemm in gemms)
    return kinds.most_common(1)[0][0] if kinds else "unknown"


def _by_block(gemms: list[Gemm], attention: list[Any]) -> dict[str, list[Gemm]]:
    """Block -> its products, in graph order. A product of attention without a block goes to its attention's block."""
    home = {id(node): one.block or one.name for one in attention for node in (one.scores, one.product)}
    blocks: dict[str, list[Gemm]] = {}
    for gemm in gemms:
        blocks.setdefault(gemm.block or home.get(id(gemm.node)) or ELSEWHERE, []).append(gemm)
    return blocks


def _unrecognised(
    graph: Graph, gemms: list[Gemm], verdicts: list[Verdict], strange: list[Any], blocks: dict[str, list[Gemm]]
) -> list[str]:
    said = []
    if gemms and not any(gemm.block for gemm in gemms):
        said.append("no node name says layers.N.blocks.M: products are listed without their block")
    if strange:
        names = ", ".join(map(graph.label, strange[:3]))
        said.append(f"{len(strange)} softmax without a matmul on both sides ({names})")
    if not verdicts:
        said.append("no attention (MatMul, Softmax, MatMul) was found")
    for op in sorted({node.op_type for node in graph.nodes if node.op_type in ("Attention", "MultiHeadAttention")}):
        said.append(f"op {op}: attention as one op, which is not looked into")
    foreign = Counter(f"{n.domain}.{n.op_type}" for n in graph.nodes if n.domain not in ("", "ai.onnx"))
    if foreign:
        said.append(f"ops outside of ONNX, which only some engines know: {', '.join(sorted(foreign)[:5])}")
    if nested := [n.op_type for n in graph.nodes if any(a.HasField("g") for a in n.attribute)]:
        said.append(f"{len(nested)} ops with graphs of their own ({nested[0]}), which are not looked into")
    return said


def _gemm_record(gemm: Gemm) -> dict[str, Any]:
    names = ("name", "block", "kind", "op", "int8", "weight", "output_int8")
    return {"node": gemm.node.name, **{name: getattr(gemm, name) for name in names}, "inputs": list(gemm.inputs)}


def _verdict_record(verdict: Verdict) -> dict[str, Any]:
    one = verdict.attention
    return {
        "name": one.name,
        "block": one.block,
        "pattern": verdict.pattern,
        "fusible": verdict.fusible,
        "head_size": one.head_size,
        "tokens": one.tokens,
        "conditions": {name: verdict.failed.get(name) is None for name in CONDITIONS},
        "reasons": verdict.failed,
    }
