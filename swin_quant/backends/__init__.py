"""Backends: the formats that a calibrated model is exported to, and the engines that run them.

Each package holds its descriptor `BACKEND` (`backend`), which `registry` finds. An exporter is a function
`export(model, card, folder, options) -> Artifact`, an engine a function `load(artifact, options) -> Engine`. Both are
imported on first use, so that a backend whose library is not installed costs nothing. Backends do not import each
other. Shared code lies beside them: `artifact` (files and their run cards, facts about an engine), `onnx_reader`
(untrusted ONNX files), `saturation` (CPUs whose int8 products saturate).
"""

from swin_quant.backends.registry import engine_loader

__all__ = ["engine_loader"]
