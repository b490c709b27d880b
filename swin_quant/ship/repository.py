"""One model repository, and what Triton Inference Server, OpenVINO Model Server and KServe want to know of it.

Sources: Triton's model_configuration.md and model_config.proto, OpenVINO Model Server's parameters.md and schema.cpp,
KServe's serving.kserve.io/v1beta1. `models/NAME/1/model.onnx` is what all of them look for.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

from swin_quant.base.errors import UsageError
from swin_quant.ship.facts import GraphEnd, PackageFacts

MOST = 4096  # pictures in a batch, copies of a model
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
    """How a server is to run the model: `max_batch` pictures at a time, waiting at most `delay_us` microseconds for
    more, in `instances` copies. UsageError for an impossible number."""

    max_batch: int = 32
    delay_us: int = 2000
    instances: int = 1

    def __post_init__(self) -> None:
        for name, least in (("max_batch", 1), ("instances", 1), ("delay_us", 0)):
            value = getattr(self, name)
            if not least <= value <= (MOST if least else 10**7):
                raise UsageError(f"‹{name}› {value}: must be from {least} to {MOST if least else 10**7}")


def triton(facts: PackageFacts, serving: Serving) -> str:
    """config.pbtxt: dynamic batching where the file takes any batch, labels for Triton's classification extension."""
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
        accelerator = (
            'execution_accelerators {\n    gpu_execution_accelerator [\n      { name: "tensorrt" }\n    ]\n  }'
        )
        parts.append(f"optimization {{\n  {accelerator}\n}}")
    return "\n".join(parts) + "\n"


def _tensor(port: GraphEnd, lead: tuple[int, ...]) -> str:
    sizes = ", ".join(map(str, (*lead, *port.shape)))
    return f'    name: "{port.name}"\n    data_type: {TYPES[port.type]}\n    dims: [ {sizes} ]'


def openvino_model_server(facts: PackageFacts, serving: Serving) -> str:
    """Its configuration file. It merges no requests: several run at a time, and a request may hold several pictures."""
    config: dict[str, Any] = {
        "name": facts.name,
        "base_path": f"/{facts.folder}",
        "target_device": "CPU",
        # Left alone, OpenVINO runs what is not int8 in bfloat16 on many CPUs, and in int8 where weights alone are.
        "plugin_config": {
            "PERFORMANCE_HINT": "THROUGHPUT",
            "INFERENCE_PRECISION_HINT": "f32",
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
            "NUM_STREAMS": str(serving.instances),
        },
        "nireq": 2 * serving.instances,
    }
    return json.dumps({"model_config_list": [{"config": config}]}, indent=2) + "\n"


def kserve(facts: PackageFacts, serving: Serving) -> str:
    """An InferenceService on KServe's own Triton runtime, for a claim that holds `models/`."""
    name = re.sub(r"[^a-z0-9]+", "-", facts.name.lower()).strip("-")[:50].strip("-") or "model"
    resources = {"limits": {"nvidia.com/gpu": 1}} if facts.on_gpu else {"requests": {"cpu": "2", "memory": "2Gi"}}
    service = {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": {"name": name if name[0].isalpha() else f"model-{name}"},
        "spec": {
            "predictor": {
                "minReplicas": 1,
                "model": {
                    "modelFormat": {"name": "triton", "version": "2"},
                    "runtime": "kserve-tritonserver",
                    "protocolVersion": "v2",
                    "storageUri": "pvc://models/models",
                    "resources": resources,
                },
            }
        },
    }
    import yaml

    return yaml.safe_dump(service, sort_keys=False)
