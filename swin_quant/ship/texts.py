"""The texts of a package that depend on its model: README.md, settings, requirements, and files of model servers.

Sources of the servers' files: Triton's model_configuration.md and model_config.proto, OpenVINO Model Server's
parameters.md and schema.cpp, KServe's serving.kserve.io/v1beta1. All of them look for `models/NAME/1/model.onnx`."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from string import Template
from typing import Any

from swin_quant.backends.description import ANY, GraphEnd, ModelDescription
from swin_quant.backends.saturation import exact_session
from swin_quant.base.files import configs_dir
from swin_quant.base.schema import check_limits
from swin_quant.ship.facts import PackageFacts

_BATCHING = """\
Triton merges waiting requests into batches. OpenVINO Model Server does not: it runs several side by side, each of any
number of pictures.
"""
_FIXED = "The file is for batches of {batch} alone, so that no server can merge requests: export it for any batch.\n"

_OPERATORS = """\
| `operators/` | the model for OpenVINO with its compiled operators, which `infer.py` runs there; their \
library, for the OpenVINO and the CPU that made this package; `sh operators/build.sh operators` builds it for those at \
hand. The model in `models/`, which servers run, is plain |
"""
_SATURATES = """
## CPUs without VNNI

There int8 products of this model saturate at 16 bits in {engines}: nothing fails, and accuracy suffers. Run it on CPUs
with VNNI, or package a file of `swin-quant export --saturation-safe`.
"""
_EXACT = """\
In ONNX Runtime `session.x64quantprecision=1` takes slower kernels that do not saturate: `infer.py` and `cpp/` set it.
Triton passes no such setting on to its ONNX Runtime, neither in KServe; OpenVINO has none.
"""
_SETTINGS = """\
// The session settings of this model, as in package.json.
#pragma once
#include <utility>
#include <vector>

static const std::vector<std::pair<const char*, const char*>> SETTINGS = {{{entries}}};
"""


def template(name: str) -> Template:
    """A template of configs/package."""
    return Template((configs_dir() / "package" / name).read_text(encoding="utf-8"))


def readme(facts: PackageFacts, version: str) -> str:
    """README.md; `version` is swin-quant's."""
    about, served = facts.manifest(), facts.served
    outputs = facts.file.outputs if facts.file else [served.output.name]
    kind = "maps" if len(outputs) > 1 or len(served.output.shape) > 1 else f"an {outputs[0]}"
    policy = f", policy {about['policy']}" if about["policy"] else ""
    saturation = _SATURATES.format(engines=" and ".join(facts.saturates_in)) if facts.saturates_in else ""
    saturation += _EXACT if saturation and exact_session("onnxruntime", facts.artifact) else ""
    return template("README.template.md" if facts.file else "README.executorch.template.md").substitute(
        name=served.name,
        version=version,
        what=f"A model in {about['precision']}{policy}" + ("" if served.classifies else f", which gives {kind}"),
        model=facts.model,
        input=_shown(served, served.input),
        outputs=", ".join(_shown(served, end) for end in served.outputs),
        answers="classes with names" if served.labels else "classes" if served.classifies else kind,
        sides=" HEIGHT WIDTH" if served.takes_any_size else "",
        labels=f"| `{facts.labels}` | names of the classes, one a line |\n" if served.labels else "",
        input_name=served.input.name,
        operators=_OPERATORS if facts.library else "",
        saturation=saturation,
        batching=_BATCHING if served.batch is None else _FIXED.format(batch=served.batch),
        output_name=served.output.name,
        release=facts.releases.get("executorch", ""),
        shape=", ".join(str(size) for size in (served.batch, *served.input.shape)),
    )


def settings(facts: PackageFacts) -> str:
    """cpp/settings.h."""
    entries = ", ".join(f"{{{json.dumps(key)}, {json.dumps(value)}}}" for key, value in facts.session.items())
    return _SETTINGS.format(entries=entries)


def _shown(served: ModelDescription, end: GraphEnd) -> str:
    sizes = ", ".join([str(served.batch or "batch"), *("any" if size == ANY else str(size) for size in end.shape)])
    return f"`{end.name}`, {end.type} [{sizes}]"


def requirements(facts: PackageFacts) -> str:
    """requirements.txt of infer.py, with its engine."""
    torch = "" if facts.file else "torch\n"  # ExecuTorch's runtime for Python takes its tensors
    return f"numpy\npillow\n{torch}{facts.engine}{facts.releases[facts.engine]}\n"


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
        check_limits(self, {"max_batch": (1, MOST), "instances": (1, MOST), "delay_us": (0, 10**7)})


def triton(facts: PackageFacts, serving: Serving) -> str:
    """config.pbtxt."""
    numbers = serving.max_batch, serving.delay_us, serving.instances
    config = facts.served.triton("onnxruntime", *numbers, facts.on_gpu)
    return as_text(config | (_TENSORRT if facts.on_gpu else {}))


def as_text(message: Mapping[str, Any], indent: str = "") -> str:
    """A message in protobuf's text format."""
    text = ""
    for key, value in message.items():
        entries = value if isinstance(value, list) else [value]
        if isinstance(entries[0], dict):
            text += "".join(f"{indent}{key} {{\n{as_text(one, indent + '  ')}{indent}}}\n" for one in entries)
            continue
        words = [word if key in _ENUMS else json.dumps(word) for word in entries]
        text += f"{indent}{key}: " + (f"[ {', '.join(words)} ]\n" if isinstance(value, list) else f"{words[0]}\n")
    return text


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
