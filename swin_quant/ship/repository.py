"""The model repository's configuration for Triton Inference Server, OpenVINO Model Server and KServe.

Sources: Triton's model_configuration.md and model_config.proto, OpenVINO Model Server's parameters.md and schema.cpp,
KServe's serving.kserve.io/v1beta1. All of them look for `models/NAME/1/model.onnx`.
"""

import re
from dataclasses import dataclass

from swin_quant.base.errors import UsageError
from swin_quant.ship.facts import GraphEnd, PackageFacts
from swin_quant.ship.texts import template

MOST = 4096  # pictures in a batch, and copies of a model
TYPES = {"float32": "TYPE_FP32", "float16": "TYPE_FP16", "uint8": "TYPE_UINT8", "int64": "TYPE_INT64"}

_TENSORRT = """optimization {
  execution_accelerators {
    gpu_execution_accelerator [
      { name: "tensorrt" }
    ]
  }
}"""


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
    """config.pbtxt: dynamic batching if the file takes any batch, labels for Triton's classification extension."""
    batched = facts.batch is None
    lead = () if batched else (facts.batch or 1,)
    label_file = '\n    label_filename: "labels.txt"' if facts.labels else ""
    outputs = ",\n".join(
        f"  {{\n{_tensor(port, lead)}{label_file if port.name == facts.file.outputs[0] else ''}\n  }}"
        for port in facts.outputs
    )
    parts = [
        f'name: "{facts.name}"\nbackend: "onnxruntime"\nmax_batch_size: {serving.max_batch if batched else 0}',
        f"input [\n  {{\n{_tensor(facts.input, lead)}\n  }}\n]",
        f"output [\n{outputs}\n]",
        f"instance_group [\n  {{\n    count: {serving.instances}\n    kind: KIND_{'GPU' if facts.on_gpu else 'CPU'}\n"
        "  }\n]",
    ]
    if batched:
        parts.append(f"dynamic_batching {{\n  max_queue_delay_microseconds: {serving.delay_us}\n}}")
    if facts.on_gpu:
        parts.append(_TENSORRT)
    return "\n".join(parts) + "\n"


def _tensor(port: GraphEnd, lead: tuple[int, ...]) -> str:
    sizes = ", ".join(map(str, (*lead, *port.shape)))
    return f'    name: "{port.name}"\n    data_type: {TYPES[port.type]}\n    dims: [ {sizes} ]'


def openvino_model_server(facts: PackageFacts, serving: Serving) -> str:
    """ovms.json. The server merges no requests; it runs several at a time, each of any number of pictures.

    By default OpenVINO runs float layers in bfloat16 on many CPUs, and in int8 if their weights are: the file says no.
    """
    about = {"name": facts.name, "folder": facts.folder, "instances": serving.instances}
    return template("ovms.template.json").substitute(about, requests=2 * serving.instances)


def kserve(facts: PackageFacts, serving: Serving) -> str:
    """kserve.yaml: an InferenceService on KServe's Triton runtime, for a volume claim that holds `models/`."""
    name = re.sub(r"[^a-z0-9]+", "-", facts.name.lower()).strip("-")[:50].strip("-") or "model"
    resources = "limits: {nvidia.com/gpu: 1}" if facts.on_gpu else "requests: {cpu: '2', memory: 2Gi}"
    about = {"name": name if name[0].isalpha() else f"model-{name}", "resources": resources}
    return template("kserve.template.yaml").substitute(about)
