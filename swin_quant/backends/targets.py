"""What `export --backend` can be asked for, as data."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PRECISIONS = ("int8", "float")


@dataclass(frozen=True)
class Target:
    """What `--backend` names: an exporter, and the built-in policies that fit, best first.

    `flags` maps our options to the exporter's, `fixed` are options that make the target. With `only`, no policy but
    those can be run there. `saturates`: engines of it whose int8 products saturate on some CPUs.
    """

    exporter: str
    flags: Mapping[str, str]
    policies: tuple[str, ...]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    only: bool = False
    saturates: tuple[str, ...] = ()


_ONNX = {"precision": "precision", "opset": "opset", "float_type": "float_type", "batch": "batch",
         "labels": "labels"}  # fmt: skip
_FASTERTRANSFORMER = {"kind": "kind", "sm": "sm", "batch": "max_batch", "fix_gelu_bias": "fix_gelu_bias",
                      "check": "check"}  # fmt: skip
TARGETS = {
    "fastertransformer": Target("fastertransformer", _FASTERTRANSFORMER, ("ft-mode1", "ft-mode2"), only=True),
    "onnx": Target("onnx", _ONNX, ("qdq",), {"target": "portable"}, saturates=("onnxruntime", "openvino")),
    "onnxruntime": Target("onnx", _ONNX, ("qdq",), {"target": "onnxruntime"}, saturates=("onnxruntime",)),
    "openvino": Target("onnx", _ONNX, ("cpu", "qdq"), {"target": "openvino"}, saturates=("openvino",)),
    "tensorrt": Target("onnx", _ONNX, ("tensorrt", "qdq"), {"target": "tensorrt"}),
}
