"""Finds the products that an engine really runs in int8, from the engine inspector's JSON.

The inspector lists layers as they run: fused, renamed, with reformats between them. A layer's `Metadata` names the ONNX
nodes in it ("[ONNX Layer: name]", control characters between them). The type of a product is read from the kernel's
name, or, if that names none, from the types of weights and inputs. TensorRT 10 writes "Format/Datatype", TensorRT 11
"DataType" (guide "Migrating IEngineInspector usage").
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from swin_quant.backends.onnx_reader.products import QUANTIZED, Gemm
from swin_quant.base.errors import SwinQuantError

# A kernel's name holds its operand types (i8i8_i8i32, imma, f16f16_f16f32, h1688, tf32, f32f32); the first match wins.
_KERNELS: tuple[tuple[str, str], ...] = (
    (r"i8i8|s8s8|i8f|i8816|i16832|imma|int8", "int8"),
    (r"e4m3|fp8", "float8"),
    (r"bf16", "bfloat16"),
    (r"f16f16|h16816|h1688|hmma|fp16|h884", "float16"),
    (r"tf32|f32f32|s1688|sgemm|fp32", "float32"),
)
_TYPES: tuple[tuple[str, str], ...] = (
    (r"int8", "int8"),
    (r"fp8|float8", "float8"),
    (r"bf16|bfloat", "bfloat16"),
    (r"half|fp16|float16", "float16"),
    (r"float|fp32", "float32"),
)
_NODE = re.compile(r"\[ONNX Layer: ([^\]\x1e\x1f]+)\]")
_REFORMAT = re.compile(r"reformat|copy", re.IGNORECASE)
UNKNOWN = "unknown"
LAYERS = ".layers.json"  # the ending of the report's file, behind the engine's name


@dataclass(frozen=True)
class LayerRow:
    """One product of the ONNX graph and its layer in the engine; `layer` is None if no layer names the product."""

    name: str
    kind: str
    wanted: str
    ran: str
    layer: str | None
    kernel: str | None


@dataclass(frozen=True)
class LayerReport:
    """All products, the number of layers, and the names of layers that only move data."""

    rows: list[LayerRow]
    layers: int
    reformats: list[str]

    def counts(self) -> dict[str, Any]:
        """How many products run in each type, and how many that should be int8 or float8 do not."""
        wanted, lost = Counter(row.wanted for row in self.rows), Counter(row.wanted for row in self.lost)
        return {
            "ran": dict(Counter(row.ran for row in self.rows)),
            **{f"{kind}_wanted": wanted[kind] for kind in QUANTIZED if kind == "int8" or wanted[kind]},
            **{f"{kind}_lost": lost[kind] for kind in QUANTIZED if kind == "int8" or wanted[kind]},
            "layers": self.layers,
            "reformats": len(self.reformats),
        }

    @property
    def lost(self) -> list[LayerRow]:
        """Products that are int8 or float8 in the graph, and of another type in the engine."""
        return [row for row in self.rows if row.wanted in QUANTIZED and row.ran not in (row.wanted, UNKNOWN)]

    def to_dict(self) -> dict[str, Any]:
        """The report in JSON's types."""
        return {**self.counts(), "gemms": [asdict(row) for row in self.rows], "reformat_layers": self.reformats}


def read_layers(text: str, gemms: Iterable[Gemm]) -> LayerReport:
    """Match the inspector's JSON with the products of the graph. SwinQuantError for any other text."""
    home: dict[str, tuple[str, str, str]] = {}  # ONNX node -> its layer's name, kernel and type
    reformats = []
    try:
        layers = json.loads(text)["Layers"]
        for entry in layers:
            entry = {"Name": entry} if isinstance(entry, str) else entry  # built without detailed verbosity
            name, kernel = str(entry.get("Name", "")), str(entry.get("TacticName", ""))
            weights = entry.get("Weights")
            types = [weights.get("Type") if isinstance(weights, dict) else None]
            types += [one.get("DataType") or one.get("Format/Datatype") for one in entry.get("Inputs", ())]
            ran = _first(_KERNELS, kernel) or (_first(_TYPES, str(types[0])) if types[0] else None)
            ran = ran or next((_first(_TYPES, str(one or "")) or UNKNOWN for one in types[1:]), UNKNOWN)
            # A layer without metadata is named after its nodes: `a + b`
            nodes = _NODE.findall(str(entry.get("Metadata", ""))) or [part.strip() for part in name.split(" + ")]
            home |= dict.fromkeys(nodes, (name, kernel, ran))
            if _REFORMAT.search(str(entry.get("LayerType", ""))) or name.startswith("Reformatting CopyNode"):
                reformats.append(name)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SwinQuantError(f"TensorRT's engine inspector wrote something else than layers: {text[:80]!r}") from error
    rows = []
    for gemm in gemms:
        wanted = gemm.format or next((kind for kind in gemm.inputs if kind not in QUANTIZED), UNKNOWN)
        product = gemm.name if gemm.kind != "matmul" else gemm.node or gemm.name
        layer, by, ran = home.get(gemm.node, (None, None, UNKNOWN))
        rows.append(LayerRow(product, gemm.kind, wanted, ran, layer, by))
    return LayerReport(rows, len(layers), reformats)


def _first(table: Sequence[tuple[str, str]], text: str) -> str | None:
    return next((kind for pattern, kind in table if re.search(pattern, text, re.IGNORECASE)), None)
