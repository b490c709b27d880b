"""The inputs and outputs of an artifact as data: the one description for `serve` and the packages for model servers."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from swin_quant.backends.artifact import Artifact
from swin_quant.backends.onnx_reader.file import read_model, verified
from swin_quant.base.errors import UsageError
from swin_quant.base.extras import library
from swin_quant.cards.paths import card_path
from swin_quant.config.outputs import FEATURES, LOGITS

ANY = -1  # a size that differs from picture to picture, as Triton and KServe write it
VERSION = 1  # the model's, in URLs and repositories
# numpy's names of types -> those of the KServe v2 protocol, which are Triton's, too, behind TYPE_.
DATATYPES = {"float32": "FP32", "float16": "FP16", "uint8": "UINT8", "int64": "INT64"}


@dataclass(frozen=True)
class GraphEnd:
    """An input or output: numpy's name for its type, and its sizes without the batch; some may be ANY."""

    name: str
    type: str
    shape: tuple[int, ...]

    @property
    def datatype(self) -> str:
        """The type as the KServe v2 protocol names it."""
        return DATATYPES[self.type]

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "type": self.type, "shape": list(self.shape)}


@dataclass(frozen=True)
class ModelDescription:
    """A model as clients see it. `name` is fit for a folder and a URL; `batch`: None for any.

    The first output is the model's own: logits or an embedding; or all of them are its maps. `labels`: the names of its
    classes.
    """

    name: str
    input: GraphEnd
    outputs: tuple[GraphEnd, ...]
    labels: tuple[str, ...] = ()
    batch: int | None = None

    @property
    def output(self) -> GraphEnd:
        return self.outputs[0]

    @property
    def classifies(self) -> bool:
        return self.output.name == LOGITS

    @property
    def sides(self) -> tuple[int, ...]:
        """Height and width of its pictures; ANY if they may be of any size."""
        return self.input.shape[:2] if self.input.type == "uint8" else self.input.shape[1:]

    @property
    def takes_any_size(self) -> bool:
        return ANY in self.sides

    def metadata(self, platform: str) -> dict[str, Any]:
        """The answer to GET /v2/models/NAME, by the KServe v2 protocol."""

        def tensor(end: GraphEnd) -> dict[str, Any]:
            return {"name": end.name, "datatype": end.datatype, "shape": [self.batch or -1, *end.shape]}

        return {
            "name": self.name,
            "versions": [str(VERSION)],
            "platform": platform,
            "inputs": [tensor(self.input)],
            "outputs": [tensor(end) for end in self.outputs],
        }

    def triton(self, backend: str, max_batch: int, delay_us: int, instances: int, gpu: bool = False) -> dict[str, Any]:
        """Triton's configuration of the model: dynamic batching if it takes any batch, labels for its classification
        extension."""
        lead = [] if self.batch is None else [self.batch]

        def tensor(end: GraphEnd) -> dict[str, Any]:
            return {"name": end.name, "data_type": f"TYPE_{end.datatype}", "dims": [*lead, *end.shape]}

        labelled = {"label_filename": "labels.txt"} if self.labels else {}
        batching = {"dynamic_batching": {"max_queue_delay_microseconds": delay_us}} if not lead else {}
        return {
            "name": self.name,
            "backend": backend,
            "max_batch_size": 0 if lead else max_batch,
            "input": [tensor(self.input)],
            "output": [tensor(end) | (labelled if end == self.output else {}) for end in self.outputs],
            "instance_group": [{"count": instances, "kind": f"KIND_{'GPU' if gpu else 'CPU'}"}],
            **batching,
        }


def described(
    artifact: Artifact, labels: Sequence[str] = (), name: str | None = None, width: int | None = None
) -> ModelDescription:
    """The description of a model. `labels`: its class names; `name` None: its card's.

    `width`: the numbers that it gives for a picture, needed for files other than ONNX. UsageError for an artifact that
    takes pictures of one size and is prepared by a card that keeps theirs, for maps in a file other than ONNX, and for
    an end of a type that no server knows.
    """
    preprocess = artifact.preprocess
    # A name that folders, URLs and Triton accept
    fit = re.sub(r"[^A-Za-z0-9_.-]+", "_", name or artifact.card.name).strip(".-") or "model"
    file = verified(artifact) if artifact.record["backend"] == "onnx" else None
    if not preprocess.is_square and (file is None or file.sizes is not None):
        fault = "prepares pictures of several sizes, and the model takes one"
        raise UsageError(f"{card_path(artifact.file)}: {fault}: export again")
    if file is None:
        kind = str(artifact.card.config["MODEL"].get("OUTPUT_KIND", LOGITS))
        if kind == FEATURES:
            remedy = "export with ‹backend› onnx"
            raise UsageError(f"{artifact.file}: maps are served and packaged from ONNX files: {remedy}")
        is_bytes = bool(artifact.record["options"].get("uint8_input"))
        taken = GraphEnd("images", "uint8", (*preprocess.sides, 3)) if is_bytes else None
        taken = taken or GraphEnd("images", "float32", (3, *preprocess.sides))
        return ModelDescription(fit, taken, (GraphEnd(kind, "float32", (width or len(labels),)),), tuple(labels))
    graph = read_model(file.path).graph
    (taken,) = (_end(value) for value in graph.input if value.name == file.input)
    outputs = tuple(map(_end, graph.output))
    return ModelDescription(fit, taken, outputs, tuple(labels) if file.outputs == (LOGITS,) else (), file.batch)


def _end(value: Any) -> GraphEnd:
    onnx, kind = library("onnx", "onnx"), value.type.tensor_type
    types = {onnx.helper.np_dtype_to_tensor_dtype(np.dtype(name)): name for name in DATATYPES}
    if (type_ := types.get(kind.elem_type)) is None:
        raise UsageError(f"output {value.name!r:.60}: only those of {', '.join(DATATYPES)} are served")
    return GraphEnd(value.name, type_, tuple(size.dim_value or ANY for size in kind.shape.dim)[1:])
