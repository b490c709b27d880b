"""The facts in a package, as data: its model's description, preprocessing, engine settings and manifest."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swin_quant.backends.artifact import Artifact
from swin_quant.backends.description import VERSION, ModelDescription, described
from swin_quant.backends.onnx_reader.file import OnnxFile, verified
from swin_quant.backends.onnxruntime import SKIP_QDQ
from swin_quant.backends.openvino.operators import has_operators, libraries_of
from swin_quant.backends.registry import backends, takers
from swin_quant.backends.releases import requirements
from swin_quant.backends.saturation import exact_session, may_saturate
from swin_quant.base.errors import UsageError
from swin_quant.base.extras import library
from swin_quant.base.reading import reads
from swin_quant.data.preprocess import FLOORED, Preprocess

SCHEMA = "swin-quant/package/1"
MODEL = "model.onnx"  # the name that Triton looks for; OpenVINO Model Server takes it
OPERATORS = "operators"  # the folder of the file with compiled operators, their library and its sources


@dataclass(frozen=True)
class PackageFacts:
    """The content of a package.

    `library`: the compiled operators of the file, if it has some and they are compiled here.
    """

    artifact: Artifact
    file: OnnxFile
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
        return f"{self.folder}/{VERSION}/{MODEL}"

    @property
    def engine(self) -> str:
        """The engine of `infer.py`: OpenVINO for a file that was exported for it, else ONNX Runtime."""
        return "openvino" if self.artifact.record["options"].get("target") == "openvino" else "onnxruntime"

    @property
    def session(self) -> dict[str, str]:
        """The settings of an ONNX Runtime session, equal to those of our own engine."""
        exact = exact_session("onnxruntime", self.artifact)
        return dict(entry.split("=") for entry in (exact, SKIP_QDQ if self.file.float8 else None) if entry)

    @property
    def releases(self) -> dict[str, str]:
        """Engine -> its releases that run the file, as pip reads them."""
        record = self.artifact.record
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
            "layout": "NHWC" if self.file.pixels else "NCHW",
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
            "quantized": self.file.quantizers > 0,
            "engine": self.engine,
            "session": self.session,
            "releases": self.releases,
            "batch": self.served.batch,
            "input": self.served.input.to_dict(),
            "outputs": [end.to_dict() for end in self.served.outputs],
            "extras": [end.name for end in self.served.outputs if end.name not in self.file.outputs],
            "labels": f"{self.folder}/labels.txt" if self.served.labels else None,
            **({"operators": OPERATORS, "operators_for": openvino} if openvino else {}),
        }


@reads("artifact", lambda artifact, *_: artifact.file)
def facts_of(artifact: Artifact, labels: Sequence[str] = ()) -> PackageFacts:
    """The facts of an ONNX artifact; `labels`: the names of its classes, if it has any.

    UsageError for another kind of artifact, and for one that `described` refuses.
    """
    kind = artifact.record["backend"]
    if kind != "onnx":
        raise UsageError(f"{artifact.file}: is of {kind}: only ONNX files are packaged: export with ‹backend› onnx")
    file, served = verified(artifact), described(artifact, labels)
    ours = has_operators(artifact) and not artifact.record["others"]
    if file.functions and artifact.record["options"].get("target") == "openvino" and not ours:
        raise UsageError(
            f"{artifact.file}: has operators for a plugin, whose functions OpenVINO's own reader does not take: export "
            "it without ‹plugin›"
        )
    library = next(map(Path, libraries_of(artifact)), None) if ours else None
    return PackageFacts(artifact, file, Preprocess.from_dict(artifact.card.preprocess), served, library)
