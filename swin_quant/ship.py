"""Packages: a folder that runs an artifact without this package, written as a whole or not at all.

Sources of the servers' files: Triton's model_configuration.md and model_config.proto, OpenVINO Model Server's
parameters.md and schema.cpp, KServe's serving.kserve.io/v1beta1. All of them look for `models/NAME/1/model.onnx`.
"""

import contextlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from string import Template
from typing import Any

import torch

from swin_quant.backends import releases
from swin_quant.backends.artifact import Artifact, get_policy_name
from swin_quant.backends.description import ANY, VERSION, GraphEnd, ModelDescription, described
from swin_quant.backends.onnx_reader.file import OnnxFile, verified
from swin_quant.backends.onnxruntime import SKIP_QDQ
from swin_quant.backends.openvino.engine import without_functions
from swin_quant.backends.openvino.operators import find_libraries, has_operators, sources
from swin_quant.backends.registry import backends, engine_loader, takers
from swin_quant.backends.saturation import exact_session, may_saturate
from swin_quant.base import __version__
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.base.extras import library
from swin_quant.base.files import compute_sha256, configs_dir, ensure_writable_dir, json_text, read_json, reason
from swin_quant.base.reading import reads
from swin_quant.base.schema import check_limits
from swin_quant.cards.card import without_paths
from swin_quant.data.preprocess import FLOORED, Preprocess

SCHEMA = "swin-quant/package/1"
MODEL = "model.onnx"  # the name that Triton looks for; OpenVINO Model Server takes it
PROGRAM = "model.pte"
OPERATORS = "operators"  # the folder of the file with compiled operators, their library and its sources


@dataclass(frozen=True)
class PackageFacts:
    """The content of a package.

    `file`: the ONNX graph; None for an ExecuTorch program, which no server runs. `library`: the compiled operators of
    the file, if it has some and they are compiled here.
    """

    artifact: Artifact
    file: OnnxFile | None
    preprocess: Preprocess
    served: ModelDescription
    library: Path | None = None

    @property
    def on_gpu(self) -> bool:
        """Whether the file was exported for an engine that runs on GPUs alone."""
        backend = backends().get(self.artifact.record["options"].get("target", ""))
        return backend is not None and backend.home == "cuda"

    @property
    def folder(self) -> str:
        """The model's folder, relative to the package."""
        return f"models/{self.served.name}"

    @property
    def model(self) -> str:
        return f"{self.folder}/{VERSION}/{MODEL}" if self.file else PROGRAM

    @property
    def labels(self) -> str:
        """The file of class names, relative to the package."""
        return f"{self.folder}/labels.txt" if self.file else "labels.txt"

    @property
    def engine(self) -> str:
        """The engine of `infer.py`: ExecuTorch for a program, OpenVINO for a file for it, else ONNX Runtime."""
        if self.file is None:
            return "executorch"
        return "openvino" if self.artifact.record["options"].get("target") == "openvino" else "onnxruntime"

    @property
    def session(self) -> dict[str, str]:
        """The settings of an ONNX Runtime session, equal to those of our own engine."""
        exact = exact_session("onnxruntime", self.artifact)
        skipping = SKIP_QDQ if self.file and self.file.float8 else None
        return dict(entry.split("=") for entry in (exact, skipping) if entry)

    @property
    def releases(self) -> dict[str, str]:
        """Engine -> its releases that run the file, as pip reads them."""
        record = self.artifact.record
        if self.file is None:
            return {"executorch": ">=1.5"}  # the release that the exporter is of
        return releases.requirements(self.artifact.card, record["precision"], record["options"])

    @property
    def saturates_in(self) -> list[str]:
        """The engines in which int8 products of this model saturate on CPUs without VNNI."""
        return [engine.name for engine in takers("onnx") if may_saturate(engine.name, self.artifact)]

    def preprocessing(self) -> dict[str, Any]:
        """All steps from a picture to the model's input, in the words of the reference implementation."""
        p = self.preprocess
        return {
            **({"upright": True} if p.upright else {}),
            "resize": p.resized,
            **({"covers": True} if p.covers else {}),
            "crop": p.size if p.crop and p.is_square else None,
            **({"crop_offset": "rounded down"} if p.crop and p.shape == FLOORED else {}),
            "interpolation": p.interpolation,
            "colours": "RGB",
            "scale": 255,
            "mean": list(p.mean),
            "std": list(p.std),
            "layout": "NHWC" if self.file and self.file.pixels else "NCHW",
            "type": self.served.input.type,
        }

    def manifest(self) -> dict[str, Any]:
        """package.json without the hashes of the files."""
        record = self.artifact.record
        # The OpenVINO that the compiled operators are for: another one may crash.
        openvino = library("openvino", "openvino").__version__ if self.library else None
        return {
            "schema": SCHEMA,
            "name": self.served.name,
            "model": self.model,
            "precision": record["precision"],
            "policy": self.artifact.card.policy["name"] if self.artifact.card.policy else None,
            "quantized": self.file.quantizers > 0 if self.file else get_policy_name(self.artifact) is not None,
            "engine": self.engine,
            "session": self.session,
            "releases": self.releases,
            "batch": self.served.batch,
            "input": self.served.input.to_dict(),
            "outputs": [end.to_dict() for end in self.served.outputs],
            "extras": [end.name for end in self.served.outputs if self.file and end.name not in self.file.outputs],
            "labels": self.labels if self.served.labels else None,
            **({"operators": OPERATORS, "operators_for": openvino} if openvino else {}),
        }


@reads("artifact", lambda artifact, *_: artifact.file)
def collect_facts(artifact: Artifact, labels: Sequence[str] = ()) -> PackageFacts:
    """The facts of an ONNX file or an ExecuTorch program; `labels`: the names of its classes, if it has any.

    UsageError for another kind of artifact, and for one that `described` refuses.
    """
    kind = artifact.record["backend"]
    if kind == "executorch":
        preprocess, engine = artifact.preprocess, engine_loader(kind)(artifact)
        width = engine(torch.zeros(1, 3, *preprocess.sides)).shape[1]
        served = replace(described(artifact, labels, width=width), batch=engine.max_batch)
        return PackageFacts(artifact, None, preprocess, served)
    if kind != "onnx":
        said = "only ONNX files and ExecuTorch programs are packaged: export with ‹backend› onnx"
        raise UsageError(f"{artifact.file}: is of {kind}: {said}")
    file, served = verified(artifact), described(artifact, labels)
    ours = has_operators(artifact) and not artifact.record["others"]
    if file.functions and artifact.record["options"].get("target") == "openvino" and not ours:
        raise UsageError(
            f"{artifact.file}: has operators for a plugin, whose functions OpenVINO's own reader does not take: export "
            "it without ‹plugin›"
        )
    library = next(map(Path, find_libraries(artifact)), None) if ours else None
    return PackageFacts(artifact, file, artifact.preprocess, served, library)


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
_EXACT_OPERATORS = """\
`infer.py` on OpenVINO runs the model in `operators/`, whose products are exact on every CPU: this is about the plain
one in `models/`, which servers and ONNX Runtime run.
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
    saturation += _EXACT_OPERATORS if saturation and facts.library else ""
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


def _shown(served: ModelDescription, end: GraphEnd) -> str:
    sizes = ", ".join([str(served.batch or "batch"), *("any" if size == ANY else str(size) for size in end.shape)])
    return f"`{end.name}`, {end.type} [{sizes}]"


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


def kserve(facts: PackageFacts) -> str:
    """kserve.yaml: an InferenceService on KServe's Triton runtime, for a volume claim that holds `models/`."""
    name = re.sub(r"[^a-z0-9]+", "-", facts.served.name.lower()).strip("-")[:50].strip("-") or "model"
    resources = "limits: {nvidia.com/gpu: 1}" if facts.on_gpu else "requests: {cpu: '2', memory: 2Gi}"
    about = {"name": name if name[0].isalpha() else f"model-{name}", "resources": resources}
    return template("kserve.template.yaml").substitute(about)


MANIFEST = "package.json"
_NOT_COPIED = ("__pycache__", "*.template.*")
_FOR_ONNX = ("cpp", "Dockerfile")


def write_package(facts: PackageFacts, serving: Serving, folder: str | Path, overwrite: bool = False) -> Path:
    """Write the package into `folder`, which must not exist, be empty or, with `overwrite`, be a package.

    The package is written beside `folder` and renamed when it is complete; an interrupt at any moment leaves the
    former folder. SwinQuantError for a disk that fails, or a model that was replaced meanwhile.
    """
    target = Path(os.path.abspath(folder))
    check_place(target, overwrite)
    ensure_writable_dir(target.parent)
    made, old = (target.with_name(f".{target.name}.{secrets.token_hex(8)}.{word}") for word in ("tmp", "old"))
    try:
        made.mkdir()
        _fill(made, facts, serving)
        try:
            if target.exists():
                target.rename(old)
            made.rename(target)
        finally:  # after an error or an interrupt between the two
            if old.exists() and not target.exists():
                old.rename(target)
    except OSError as error:
        raise SwinQuantError(f"{folder}: the package cannot be written: {reason(error)}") from error
    finally:
        for left in (made, old):
            with contextlib.suppress(OSError):
                shutil.rmtree(left)
    return Path(folder)


def check_place(folder: Path, overwrite: bool) -> None:
    """UsageError if `folder` has content, unless it is a package and `overwrite` is set."""
    if not folder.exists() and not folder.is_symlink():
        return
    if not folder.is_dir() or folder.is_symlink():
        raise UsageError(f"{folder}: is no folder: give ‹output› another name")
    if not any(folder.iterdir()):
        return
    if not overwrite:
        raise UsageError(f"{folder}: is there already: give ‹output› another name, or ‹overwrite› to replace a package")
    manifest = folder / MANIFEST
    if not manifest.is_file() or read_json(manifest, "package's manifest").get("schema") != SCHEMA:
        raise UsageError(f"{folder}: holds something else than a package, which is not overwritten: give another name")


def _fill(folder: Path, facts: PackageFacts, serving: Serving) -> None:
    model, record = folder / facts.model, facts.artifact.record
    model.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(facts.artifact.file, model)
    for other in record["others"]:
        shutil.copyfile(facts.artifact.file.with_name(other["file"]), model.with_name(other["file"]))
    copied = {model: record["sha256"]} | {model.with_name(one["file"]): one["sha256"] for one in record["others"]}
    if changed := [copy.name for copy, sha256 in copied.items() if compute_sha256(copy) != sha256]:
        raise SwinQuantError(f"{facts.artifact.file}: {changed[0]} was replaced while it was packaged: try again")
    if facts.file and facts.file.functions and not record["others"]:  # OpenVINO's own reader knows no functions
        if facts.library:  # a copy of the model, the library, and sources with the script that builds it anew
            place = folder / OPERATORS
            place.mkdir()
            shutil.copyfile(model, place / MODEL)
            shutil.copyfile(facts.library, place / "libswin_quant_plugins.so")
            for file in sources().iterdir():
                if file.suffix in (".hpp", ".cpp", ".sh"):
                    shutil.copyfile(file, place / file.name)
        model.write_bytes(without_functions(model))
    left = shutil.ignore_patterns(*_NOT_COPIED, *(() if facts.file else _FOR_ONNX))
    shutil.copytree(configs_dir() / "package", folder, dirs_exist_ok=True, ignore=left)
    needs_torch = "" if facts.file else "torch\n"  # ExecuTorch's runtime for Python takes its tensors
    texts = {
        "preprocess.json": json_text(facts.preprocessing()),
        "card.json": json_text(without_paths(facts.artifact.card)),
        "README.md": readme(facts, __version__),
        "requirements.txt": f"numpy\npillow\n{needs_torch}{facts.engine}{facts.releases[facts.engine]}\n",
    }
    if facts.file:
        entries = (f"{{{json.dumps(key)}, {json.dumps(value)}}}" for key, value in facts.session.items())
        numbers = serving.max_batch, serving.delay_us, serving.instances
        config = facts.served.triton("onnxruntime", *numbers, facts.on_gpu) | (_TENSORRT if facts.on_gpu else {})
        # The server merges no requests; it runs several at a time, each of any number of pictures. By default OpenVINO
        # runs float layers in bfloat16 on many CPUs, and in int8 if their weights are: the file says no.
        about = {"name": facts.served.name, "folder": facts.folder, "instances": serving.instances}
        texts |= {
            "cpp/settings.h": _SETTINGS.format(entries=", ".join(entries)),
            f"{facts.folder}/config.pbtxt": as_text(config),
            "ovms.json": template("ovms.template.json").substitute(about, requests=2 * serving.instances),
            "kserve.yaml": kserve(facts),
        }
    if labels := facts.served.labels:
        texts[facts.labels] = "".join(f"{label}\n" for label in labels)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8", errors="backslashreplace")  # a card may hold any characters
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    hashes = {path.relative_to(folder).as_posix(): compute_sha256(path) for path in files}
    (folder / MANIFEST).write_text(json_text({**facts.manifest(), "files": hashes}))
