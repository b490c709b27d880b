"""The table of rules for graphs: structures that an engine does not fuse or runs slowly, the reason, the source."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from swin_quant.backends.onnx_reader.inspect.attention import Verdict
from swin_quant.backends.onnx_reader.inspect.gemms import FLOAT8, QUANTIZED, Gemm, wrong_axis
from swin_quant.backends.onnx_reader.inspect.graph import Graph

NOT_SYMMETRIC = "not symmetric int8"
ALL: tuple[str, ...] = ()  # every engine that reads ONNX
_TRT_FACTS = "TensorRT documentation, explicit quantization"
_TRT_OPSETS = range(9, 26)


@dataclass(frozen=True)
class Facts:
    """The facts that rules look at. `body`: the type of most products' results. `quantized`: the graph has Q/DQ."""

    graph: Graph
    gemms: list[Gemm]
    verdicts: list[Verdict]
    body: str
    quantized: bool


@dataclass(frozen=True)
class PlacementRule:
    """One rule. `find` yields the names of offending nodes; `why` gives the effect and the remedy."""

    name: str
    backends: tuple[str, ...]
    find: Callable[[Facts], Iterable[str]]
    why: str
    source: str


@dataclass(frozen=True)
class Finding:
    """A rule that a graph breaks, and the nodes that break it."""

    backend: str
    rule: str
    nodes: list[str]
    why: str
    source: str


def apply_rules(facts: Facts, backends: Iterable[str]) -> list[Finding]:
    """Findings of the given backends, in the order of the table."""
    return [
        Finding(backend, rule.name, nodes, rule.why, rule.source)
        for backend in backends
        for rule in RULES
        if backend in (rule.backends or [backend]) and (nodes := list(dict.fromkeys(rule.find(facts))))
    ]


def _of_type(facts: Facts, *ops: str) -> list[Any]:
    return [node for node in facts.graph.nodes if node.op_type in ops]


def _whole(facts: Facts, holds: bool) -> list[str]:
    return ["the graph"] if holds else []


def _computed_scales(facts: Facts) -> Iterable[str]:
    graph = facts.graph
    for node in _of_type(facts, "QuantizeLinear", "DequantizeLinear"):
        if any(name and name not in graph.constant for name in node.input[1:]):
            yield graph.label(node)


def _not_symmetric(facts: Facts) -> Iterable[str]:
    graph = facts.graph
    for node in _of_type(facts, "QuantizeLinear", "DequantizeLinear"):
        kind = graph.types.get(node.output[0] if node.op_type == "QuantizeLinear" else node.input[0], "unknown")
        if kind not in ("int8", "float8e4m3fn", "unknown") or graph.not_zero(node.input[2:3]):
            yield graph.label(node)


def _channels_of_activations(facts: Facts) -> Iterable[str]:
    graph = facts.graph
    for node in _of_type(facts, "QuantizeLinear"):
        if node.input[0] not in graph.constant and not graph.one_value(node.input[1]):
            yield graph.label(node)


def _half_quantized(facts: Facts) -> Iterable[str]:
    return (gemm.name for gemm in facts.gemms if gemm.format is None and set(QUANTIZED) & set(gemm.inputs))


def _casts(facts: Facts) -> Iterable[str]:
    return (gemm.name for gemm in facts.gemms if gemm.operands and any(side.cast for side in gemm.operands))


def _residual_adds(facts: Facts) -> Iterable[str]:
    """Sums of two varying tensors outside attention with a DequantizeLinear in front of either."""
    graph = facts.graph
    inside = {id(node) for verdict in facts.verdicts for node in verdict.attention.between}
    for node in _of_type(facts, "Add"):
        inputs = graph.variable_inputs(node)
        makers = [graph.before(name) for name in inputs]
        if len(inputs) == 2 and id(node) not in inside and any(m and m.op_type == "DequantizeLinear" for m in makers):
            yield graph.label(node)


def _lone_outputs(facts: Facts) -> Iterable[str]:
    """Products whose output is quantized although no product reads it: such a pair breaks the fusion."""
    graph, products = facts.graph, {id(gemm.node) for gemm in facts.gemms}
    for gemm in facts.gemms:
        pairs = [node for node in graph.after(gemm.node.output[0]) if node.op_type == "QuantizeLinear"]
        back = [node for q in pairs for node in graph.after(q.output[0]) if node.op_type == "DequantizeLinear"]
        users = {id(user): user for node in back for user in graph.after(node.output[0])}
        if users and not set(users) & products:
            yield gemm.name


def _half_norms(facts: Facts) -> Iterable[str]:
    graph = facts.graph
    for node in _of_type(facts, "LayerNormalization"):
        stash = next((a.i for a in node.attribute if a.name == "stash_type"), 1)
        if graph.types.get(node.input[0]) == "float16" and stash != 1:
            yield graph.label(node)


def _attention(facts: Facts) -> Iterable[str]:
    return (f"{v.attention.name} ({next(iter(v.failed.values()))})" for v in facts.verdicts if not v.fusible)


def _open_masks(facts: Facts) -> Iterable[str]:
    shape = ("one constant mask", "no other op")
    return (v.attention.name for v in facts.verdicts if set(shape) & set(v.failed))


def _asymmetric_attention(facts: Facts) -> Iterable[str]:
    bad = set(_not_symmetric(facts))
    for gemm in facts.gemms:
        sides = [side.dequantize for side in gemm.operands or () if side.dequantize is not None]
        if gemm.kind == "matmul" and any(facts.graph.label(node) in bad for node in sides):
            yield gemm.name


def _gelus_in_parts(facts: Facts) -> Iterable[str]:
    """Erfs whose 1 + erf is multiplied with a half before it is with x: of that order the engine makes no operator."""
    graph = facts.graph
    for erf in _of_type(facts, "Erf"):
        sums = graph.consumers.get(erf.output[0], [])
        products = [node for one in sums for node in graph.consumers.get(one.output[0], [])]
        if not any(len(graph.variable_inputs(node)) == 2 for node in products):
            yield graph.label(erf)


RULES: tuple[PlacementRule, ...] = (
    PlacementRule("float32 body", ("tensorrt",), lambda f: _whole(f, f.quantized and f.body == "float32"),
         "networks are strongly typed: what is not int8 runs in float32, which is slow; export with a float16 body",
         "TensorRT 11 migration guide, strong typing"),
    PlacementRule("float16 body", ("onnxruntime", "openvino"), lambda f: _whole(f, f.body == "float16"),
         "a CPU casts float16 to float32 and back; export with a float32 body", "float16 is a type of GPUs"),
    PlacementRule("opset", ("tensorrt",), lambda f: _whole(f, f.graph.opsets.get("", 0) not in _TRT_OPSETS),
         "the parser reads opsets 9 to 25", "TensorRT 11 support matrix"),
    PlacementRule("opset", ("onnxruntime",), lambda f: _whole(f, f.quantized and f.graph.opsets.get("", 0) >= 21),
         "from opset 21 on, Q/DQ around a Transpose can end session creation (output_dtype INT8 does not match UINT8); "
         "export at 17 to 20", "measured with 1.31.1; onnxruntime#25526, #29192"),
    PlacementRule("computed scale", ALL, _computed_scales,
         "a scale or zero point is not a constant: the Q/DQ pair stays an op of its own", _TRT_FACTS),
    PlacementRule(NOT_SYMMETRIC, ("tensorrt",), _not_symmetric,
         "only int8 with zero point 0, and float8 E4M3, are taken", _TRT_FACTS),
    PlacementRule("float8", ("openvino", "onnxruntime"), lambda f: (g.name for g in f.gemms if FLOAT8 in g.inputs),
         "float8 is a type of GPUs: OpenVINO is not given it, ONNX Runtime rounds to it and multiplies in float32",
         "measured with 1.31.1"),
    PlacementRule("asymmetric matmul", ("openvino",), _asymmetric_attention,
         "attention matmuls of asymmetric inputs fall back to float32", "measured with 2026.4.1"),
    PlacementRule("per-channel activation", ("tensorrt",), _channels_of_activations,
         "only weights may have a scale per channel", _TRT_FACTS),
    PlacementRule("weight axis", ALL, lambda f: (g.name for g in f.gemms if wrong_axis(f.graph, g)),
         "the weight's scales are not along its output channels: the product cannot stay integer", _TRT_FACTS),
    PlacementRule("one int8 input", ALL, _half_quantized,
         "only one of both inputs has Q/DQ, or they are int8 and float8: the product runs in float", _TRT_FACTS),
    PlacementRule("cast after dequantize", ALL, _casts,
         "a Cast between DequantizeLinear and the product may break their fusion; opset 19 and up take float16 scales",
         "ONNX operators, DequantizeLinear-19"),
    PlacementRule("residual add in int8", ("tensorrt",), _residual_adds,
         "fast, but the classic loss of accuracy of vision transformers; leave residuals float unless it was measured",
         "TRT#1992, #1144, #3861"),
    PlacementRule("lone output pair", ALL, _lone_outputs,
         "the product's output is quantized and goes on in float: the pair splits its fusion; do not quantize it",
         _TRT_FACTS),
    PlacementRule("float16 norm", ("tensorrt",), _half_norms,
         "LayerNorm with float16 sums overflows on large activations; keep it in float32", "TRT#2564, #2709, #4493"),
    PlacementRule("attention not fused", ("tensorrt",), _attention,
         "becomes several kernels", "TRT#2981, #3243, #3280, #3575"),
    PlacementRule("attention not fused", ("openvino",), _open_masks,
         "softmax and both matmuls run apart: fold relative bias and shift mask into one constant",
         "measured with 2026.4.1: only blocks of that shape were fused"),
    PlacementRule("GELU in parts", ("onnxruntime",), _gelus_in_parts,
         "Div, Erf, Add, Mul stay separate ops: export at opset 20, which has Gelu, or multiply 1 + erf with x first",
         "measured with 1.31.1"),
)  # fmt: skip
