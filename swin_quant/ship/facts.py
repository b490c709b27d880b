"""The facts that a package states about its model, as data: inputs, outputs, preprocessing, labels."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swin_quant.backends.artifact import Artifact
from swin_quant.backends.onnx_reader.file import OnnxFile, read_model, verified
from swin_quant.backends.onnxruntime import SKIP_QDQ
from swin_quant.backends.openvino.operators import has_operators, libraries_of
from swin_quant.backends.registry import backends, takers
from swin_quant.backends.saturation import exact_session, may_saturate
from swin_quant.base.errors import UsageError
from swin_quant.base.extras import library
from swin_quant.base.reading import reads
from swin_quant.cards.paths import card_path
from swin_quant.config.outputs import LOGITS
from swin_quant.data.preprocess import FLOORED, SHORTER, Preprocess

SCHEMA = "swin-quant/package/1"
MODEL = "model.onnx"  # the name that Triton looks for; OpenVINO Model Server takes it
OPERATORS = "operators"  # the folder of the file with compiled operators, their library and its sources
VERSION = 1  # the model's, in a repository
_TYPES = {"FLOAT": "float32", "FLOAT16": "float16", "UINT8": "uint8", "INT64": "int64"}  # ONNX's -> numpy's


@dataclass(frozen=True)
class GraphEnd:
    """An input or output of the graph: numpy's name for its type, and its sizes without the batch."""

    name: str
    type: str
    shape: tuple[int, ...]

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "type": self.type, "shape": list(self.shape)}


@dataclass(frozen=True)
class PackageFacts:
    """The content of a package. `name` is fit for a folder and a URL; `batch`: None for any.

    `library`: the compiled operators of the file, if it has some and they are compiled here.
    """

    name: str
    artifact: Artifact
    file: OnnxFile
    preprocess: Preprocess
    input: GraphEnd
    outputs: tuple[GraphEnd, ...]
    labels: tuple[str, ...]
    library: Path | None = None

    @property
    def batch(self) -> int | None:
        return self.file.batch

    @property
    def on_gpu(self) -> bool:
        """Whether the file was exported for an engine that runs on GPUs alone."""
        backend = backends().get(self.artifact.record["options"].get("target", ""))
        return backend is not None and backend.home == "cuda"

    @property
    def folder(self) -> str:
        """The model's folder, relative to the package."""
        return f"models/{self.name}"

    @property
    def model(self) -> str:
        return f"{self.folder}/{VERSION}/{MODEL}"

    @property
    def session(self) -> dict[str, str]:
        """The settings of an ONNX Runtime session, equal to those of our own engine."""
        exact = exact_session("onnxruntime", self.artifact)
        return dict(entry.split("=") for entry in (exact, SKIP_QDQ if self.file.float8 else None) if entry)

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
            "crop": p.size if p.crop else None,
            **({"crop_offset": "rounded down"} if p.crop and p.shape == FLOORED else {}),
            "interpolation": p.interpolation,
            "colours": "RGB",
            "scale": 255,
            "mean": list(p.mean),
            "std": list(p.std),
            "layout": "NHWC" if self.file.pixels else "NCHW",
            "type": self.input.type,
        }

    def manifest(self) -> dict[str, Any]:
        """package.json without the hashes of the files."""
        record = self.artifact.record
        return {
            "schema": SCHEMA,
            "name": self.name,
            "model": self.model,
            "precision": record["precision"],
            "policy": self.artifact.card.policy["name"] if self.artifact.card.policy else None,
            "quantized": self.file.quantizers > 0,
            "session": self.session,
            "batch": self.batch,
            "input": self.input.to_dict(),
            "outputs": [port.to_dict() for port in self.outputs],
            "labels": f"{self.folder}/labels.txt" if self.labels else None,
            **({"operators": OPERATORS} if self.library else {}),
        }


@reads("artifact", lambda artifact, *_: artifact.file)
def facts_of(artifact: Artifact, labels: Sequence[str] = ()) -> PackageFacts:
    """The facts of an ONNX artifact; `labels`: the names of its classes, if it has any.

    UsageError for another kind of artifact, for one that gives maps, and for preprocessing to pictures of any size.
    """
    kind = artifact.record["backend"]
    if kind != "onnx":
        raise UsageError(f"{artifact.file}: is of {kind}: only ONNX files are packaged: export with ‹backend› onnx")
    file = verified(artifact)
    preprocess = Preprocess.from_dict(artifact.card.preprocess)
    if file.sizes is None or not preprocess.is_square:
        what = "resizes only the shorter side" if preprocess.shape == SHORTER else "takes pictures of any size"
        raise UsageError(f"{card_path(artifact.file)}: {what}: only classifiers and embeddings are packaged")
    ours = has_operators(artifact) and not artifact.record["others"]
    if file.functions and artifact.record["options"].get("target") == "openvino" and not ours:
        raise UsageError(
            f"{artifact.file}: has operators for a plugin, whose functions OpenVINO's own reader does not take: export "
            "it without ‹plugin›"
        )
    graph = read_model(file.path).graph
    (picture,) = [_port(value) for value in graph.input if value.name == file.input]
    outputs = tuple(_port(value) for value in graph.output)
    named = tuple(labels) if file.outputs == (LOGITS,) else ()
    library = next(map(Path, libraries_of(artifact)), None) if ours else None
    return PackageFacts(fit_name(artifact.card.name), artifact, file, preprocess, picture, outputs, named, library)


def _port(value: Any) -> GraphEnd:
    onnx = library("onnx", "onnx")
    kind = value.type.tensor_type
    type_ = {getattr(onnx.TensorProto, word): name for word, name in _TYPES.items()}.get(kind.elem_type)
    if type_ is None:
        raise UsageError(f"output {value.name!r:.60}: only those of {', '.join(_TYPES.values())} are packaged")
    shape = tuple(size.dim_value for size in kind.shape.dim)[1:]
    if not all(shape):
        raise UsageError(f"output {value.name!r:.60} has sizes of its own for each picture: cannot be packaged")
    return GraphEnd(value.name, type_, shape)


def fit_name(name: str) -> str:
    """A name that folders, URLs and Triton accept."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", name).strip(".-") or "model"
