"""Backends: what a calibrated model is exported to, and what runs the result. One protocol for all.

An exporter is a function `export(model, card, folder, options) -> Artifact`, an engine a function
`load(artifact, options) -> Engine`. The tables name their modules, imported when they are asked for: a backend whose
library is not installed costs nothing until then. Backends do not import each other; what several need lies beside
them: `artifact` (files and their run cards), `onnx_file` and `onnx_checks` (ONNX files that nobody has vouched for),
`onnx_metadata`, `onnx_inspect`, `details` (what an engine says of itself), `saturation` (CPUs whose int8 products
saturate).
"""

import importlib
from collections.abc import Callable

from swin_quant.base.errors import UsageError

EXPORTERS = {
    "fastertransformer": "swin_quant.backends.fastertransformer.export",
    "onnx": "swin_quant.backends.onnx.export",
}
ENGINES = {
    "fastertransformer": "swin_quant.backends.fastertransformer.engine",
    "onnxruntime": "swin_quant.backends.onnxruntime",
    "openvino": "swin_quant.backends.openvino",
    "tensorrt": "swin_quant.backends.tensorrt",
}
ONNX_ENGINES = ("tensorrt", "onnxruntime", "openvino")


def exporter(name: str) -> Callable:
    """The `export` of a backend. UsageError names those there are."""
    return _find(EXPORTERS, name, "backend").export


def engine_loader(name: str) -> Callable:
    """The `load` of an engine. UsageError names those there are."""
    return _find(ENGINES, name, "engine").load


def _find(table: dict[str, str], name: str, kind: str):
    if name not in table:
        raise UsageError(f"no {kind} {name!r}: there are {', '.join(table)}")
    return importlib.import_module(table[name])
