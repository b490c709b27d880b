"""The model repository's configuration for Triton Inference Server, OpenVINO Model Server and KServe.

Sources: Triton's model_configuration.md and model_config.proto, OpenVINO Model Server's parameters.md and schema.cpp,
KServe's serving.kserve.io/v1beta1. All of them look for `models/NAME/1/model.onnx`.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from swin_quant.base.errors import UsageError
from swin_quant.ship.facts import PackageFacts
from swin_quant.ship.texts import template

MOST = 4096  # pictures in a batch, and copies of a model
_TENSORRT = {"optimization": {"execution_accelerators": {"gpu_execution_accelerator": [{"name": "tensorrt"}]}}}
_ENUMS = ("data_type", "kind")  # keys whose words are no texts


@dataclass(frozen=True)
class Serving:
    """How a server runs the model: batches of up to `max_batch` pictures that wait at most `delay_us` microseconds,
    in `instances` copies. UsageError for an impossible number."""

    max_batch: int = 32
    delay_us: int = 2000
    instances: int = 1

    def __post_init__(self) -> None:
        for name, least in (("max_batch", 1), ("instances", 1), ("delay_us", 0)):
            value = getattr(self, name)
            if not least <= value <= (MOST if least else 10**7):
                raise UsageError(f"‹{name}› {value}: must be from {least} to {MOST if least else 10**7}")


def triton(facts: PackageFacts, serving: Serving) -> str:
    """config.pbtxt."""
    numbers = serving.max_batch, serving.delay_us, serving.instances
    config = facts.served.triton("onnxruntime", *numbers, facts.on_gpu)
    return as_text(config | (_TENSORRT if facts.on_gpu else {}))


def as_text(message: Mapping[str, Any]) -> str:
    """A message in protobuf's text format."""
    return "\n".join(_lines(message)) + "\n"


def _lines(message: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """The lines of a message."""
    for key, value in message.items():
        entries = value if isinstance(value, list) else [value]
        if not isinstance(entries[0], dict):
            words = [word if key in _ENUMS else json.dumps(word) for word in entries]
            yield f"{indent}{key}: " + (f"[ {', '.join(words)} ]" if isinstance(value, list) else words[0])
            continue
        for entry in entries:
            yield f"{indent}{key} {{"
            yield from _lines(entry, indent + "  ")
            yield indent + "}"


def openvino_model_server(facts: PackageFacts, serving: Serving) -> str:
    """ovms.json. The server merges no requests; it runs several at a time, each of any number of pictures.

    By default OpenVINO runs float layers in bfloat16 on many CPUs, and in int8 if their weights are: the file says no.
    """
    about = {"name": facts.served.name, "folder": facts.folder, "instances": serving.instances}
    return template("ovms.template.json").substitute(about, requests=2 * serving.instances)


def kserve(facts: PackageFacts, serving: Serving) -> str:
    """kserve.yaml: an InferenceService on KServe's Triton runtime, for a volume claim that holds `models/`."""
    name = re.sub(r"[^a-z0-9]+", "-", facts.served.name.lower()).strip("-")[:50].strip("-") or "model"
    resources = "limits: {nvidia.com/gpu: 1}" if facts.on_gpu else "requests: {cpu: '2', memory: 2Gi}"
    about = {"name": name if name[0].isalpha() else f"model-{name}", "resources": resources}
    return template("kserve.template.yaml").substitute(about)
