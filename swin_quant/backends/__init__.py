"""Backends: what a calibrated model is exported to, and what runs it. One descriptor each, one protocol for all.

Each package holds a `BACKEND` (`backend`), which `registry` finds: an exporter is a function `export(model, card,
folder, options) -> Artifact`, an engine a function `load(artifact, options) -> Engine`. Both are imported when they are
called for: a backend whose library is not installed costs nothing until then. Backends do not import each other; what
several need lies beside them: `artifact` (files and their run cards), `onnx_reader` (ONNX files that nobody has vouched
for), `details` (what an engine says of itself), `saturation` (CPUs whose int8 products saturate).
"""

from swin_quant.backends.registry import engine_loader, exporter

__all__ = ["engine_loader", "exporter"]
