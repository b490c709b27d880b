"""The facts in a package, as data: its model's description, preprocessing, engine settings and manifest."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from swin_quant.backends.artifact import Artifact, get_policy_name
from swin_quant.backends.description import VERSION, ModelDescription, described
from swin_quant.backends.onnx_reader.file import OnnxFile, verified
from swin_quant.backends.onnxruntime import SKIP_QDQ
from swin_quant.backends.openvino.operators import find_libraries, has_operators
from swin_quant.backends.registry import backends, engine_loader, takers
from swin_quant.backends.releases import requirements
from swin_quant.backends.saturation import exact_session, may_saturate
from swin_quant.base.errors import UsageError
from swin_quant.base.extras import library
from swin_quant.base.reading import reads
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
        return requirements(self.artifact.card, record["precision"], record["options"])

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
