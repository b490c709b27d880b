"""Reads untrusted ONNX files: checks them before an engine sees them, and describes their inputs and outputs.

Our own files hold metadata: preprocessing, class names, and the run card that they were made from.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from swin_quant.backends.artifact import Artifact, refuse_card
from swin_quant.backends.onnx_reader import checks
from swin_quant.backends.onnx_reader.worker import ask
from swin_quant.base.errors import SwinQuantError, UsageError, listed
from swin_quant.base.extras import library
from swin_quant.base.files import compute_data_sha256, near, read_bounded
from swin_quant.base.reading import reads
from swin_quant.base.schema import checked
from swin_quant.cards.card import RunCard, without_paths
from swin_quant.cards.paths import card_path
from swin_quant.cards.records import TypeName
from swin_quant.data.inputs import Input, Inputs
from swin_quant.data.preprocess import Preprocess
from swin_quant.quant.outputs import Output

if TYPE_CHECKING:
    from onnx import ModelProto

SOME_SIZE = (224, 224)  # the pictures to compile for, where a file takes any and none were run yet
PIXELS = "uint8"
# TensorProto's number of a type -> its name, for one of several inputs and for pictures
_INPUT_TYPES: dict[int, TypeName] = {1: "float32", 7: "int64", 6: "int32", 9: "bool"}
_PICTURE_TYPES = {1: "float32", 10: "float16", 2: PIXELS}
PREPROCESS = "swin_quant.preprocess"  # the metadata that says how pictures were prepared
_LABELS, _OPTIONS, _PRECISION = "swin_quant.labels", "swin_quant.options", "swin_quant.precision"
EXTRAS = ("probabilities", "top_classes", "top_probabilities")  # outputs beside logits, which our engines ignore


@dataclass(frozen=True)
class OnnxFile:
    """A checked file.

    `batch`: None if the file takes any. `sizes`: of the input's dimensions but batch and channels, such as (height,
    width); None if it takes any height and width. `outputs`: the names of logits, an embedding, a backbone's maps, or
    whatever a module of the user's gives. `float8`: it holds float8 tensors. `quantizers`: how many QuantizeLinear
    nodes it has. `parts`: the files of its external data. `functions`: it has functions of its own. `pixels`: the
    normalisation in a file that takes uint8 [batch, height, width, channels]. `inputs`: several by name; `input` is
    then the first, and the rest tells of one row with all.
    """

    path: Path
    input: str
    dtype: str
    batch: int | None
    channels: int
    sizes: tuple[int, ...] | None
    outputs: tuple[str, ...]
    opset: int
    quantizers: int
    metadata: Mapping[str, str]
    parts: tuple[Path, ...]
    functions: bool = False
    float8: bool = False
    pixels: Preprocess | None = None
    inputs: Inputs | None = None

    @property
    def input_names(self) -> list[str]:
        return self.inputs.names if self.inputs else [self.input]

    def shapes(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """The shape of each input, where `shape` is that of pictures or of packed inputs."""
        return {one.name: (shape[0], *one.shape) for one in self.inputs.parts} if self.inputs else {self.input: shape}

    def shape(self, batch: int) -> tuple[int, ...]:
        """The input's shape for `batch` pictures; of some size, if it takes any."""
        sizes = SOME_SIZE if self.sizes is None else self.sizes
        return (batch, *sizes, self.channels) if self.pixels else (batch, self.channels, *sizes)


@reads("ONNX file")
def open_onnx(path: str | Path) -> OnnxFile:
    """Check the ONNX file at `path` and describe it. SwinQuantError names the file and the node or tensor at fault.

    The file must have one input: [batch, channels, ...], such as pictures, float32 or float16, or [batch, height,
    width, channels], uint8, with its normalisation in the metadata; or several of fixed sizes and the types of
    `data.inputs`. One that gives maps alone may take pictures of any size. Its operators must be standard ones of
    opset 17 to 21, or its own functions; every Q/DQ node needs a constant positive scale.
    """
    path = Path(path)
    now = path.stat() if path.is_file() else None  # the reader says that it is missing
    key = path, now and now.st_mtime_ns, now and now.st_size
    found = _read(*key)
    return _read.__wrapped__(*key) if found.parts else found  # external data may have changed since


@lru_cache(maxsize=8)  # the steps of a run open one file again and again
def _read(path: Path, written: int | None, size: int | None) -> OnnxFile:
    model = read_model(path)
    with naming(path):
        return _describe(path, model)


@reads("ONNX file")
def read_model(path: str | Path) -> Any:
    """The onnx.ModelProto at `path`, with any opset and operators; every tensor is as large as it declares.

    External data is not loaded, and must be in the file's folder. SwinQuantError names the file.
    """
    onnx, path = library("onnx", "onnx"), Path(path)
    if not path.is_file():
        raise SwinQuantError(f"{path}: no such file{near(path)}")
    data = read_bounded(path, "ONNX file", 2**31 - 1)  # the limit of a protobuf message
    try:
        ask(data, infers=False)
        model = onnx.ModelProto.FromString(data)
    except ValueError as error:
        raise SwinQuantError(f"{path}: is not an ONNX file: {checks.first_line(error)}") from error
    if not model.graph.node:
        raise SwinQuantError(f"{path}: is not an ONNX file: it has no graph")
    with naming(path):
        checks.external_parts(model, path.parent)
    return model


def verified(artifact: Artifact) -> OnnxFile:
    """The ONNX file of an artifact. SwinQuantError unless its run card lists its external data and picture size."""
    file, card = open_onnx(artifact.file), card_path(artifact.file).name
    known = {other["file"] for other in artifact.record["others"]}
    if strange := [part.name for part in file.parts if part.name not in known]:
        raise SwinQuantError(f"{file.path}: its run card does not know its external data {listed(strange)}")
    size = artifact.card.preprocess.get("size")
    made = tuple(size) if isinstance(size, list | tuple) else (size, size)
    if size and file.sizes not in (None, made):
        own, other = (" x ".join(map(str, sizes or ())) for sizes in (file.sizes, made))
        raise SwinQuantError(f"{file.path}: takes pictures of {own}, but its run card {card} prepares {other}")
    record = artifact.card.wrapped.get("inputs") if artifact.card.wrapped else None
    wanted, given = Inputs.from_records(record).kinds if record else None, file.inputs.kinds if file.inputs else None
    if wanted != given:
        raise SwinQuantError(f"{file.path}: takes {listed(file.input_names, 8)}, not the inputs in its run card {card}")
    if file.pixels and file.pixels != artifact.preprocess:
        raise SwinQuantError(f"{file.path}: prepares pictures differently from its run card {card}")
    return file


def as_input(file: OnnxFile, images: Tensor) -> dict[str, np.ndarray]:
    """Pictures [B, channels, ...], or packed inputs, as the file's inputs: in their types, a fixed batch filled up with
    zeros.

    A file that takes pixels gets exactly the pixels that the pictures were normalised from, or those given, uint8 [B,
    H, W, 3]. UsageError for pictures of another size, or for more of them than a fixed batch.
    """
    if file.pixels and images.dtype == torch.uint8 and images.ndim == 4:
        images = file.pixels.normalised(images.cpu())
    sizes = (file.channels, *(images.shape[2:] if file.sizes is None else file.sizes))
    if tuple(images.shape[1:]) != sizes:
        given, wanted = ("x".join(map(str, shape)) for shape in (images.shape[1:], sizes))
        raise UsageError(f"{file.path}: takes pictures of {wanted}, not {given}: prepare them as its run card says")
    if file.batch and len(images) > file.batch:
        raise UsageError(f"{file.path}: is for batches of {file.batch}, not {len(images)}: export with a larger one")
    prepared = file.pixels.pixels(images) if file.pixels else images
    array = np.ascontiguousarray(prepared.detach().cpu().numpy().astype(file.dtype, copy=False))
    missing = (file.batch or len(array)) - len(array)
    full = np.pad(array, ((0, missing), *((0, 0),) * (array.ndim - 1))) if missing else array
    if not file.inputs:
        return {file.input: full}
    return {name: part.numpy() for name, part in file.inputs.unpack(torch.from_numpy(full)).items()}


def as_output(found: Sequence[np.ndarray], images: Tensor) -> Output:
    """float32 [B, classes], or a list of maps or of several outputs, on the images' device, without the rows that
    filled up a fixed batch. SwinQuantError for an empty one: on one thread OpenVINO swallows an operator's error."""
    if len(images) and any(np.size(part) == 0 for part in found):
        raise SwinQuantError(f"the engine failed without a word: an output is empty for {len(images)} pictures")
    parts = [torch.from_numpy(np.array(part[: len(images)], np.float32)).to(images.device) for part in found]
    return parts if len(parts) > 1 or parts[0].ndim == 4 else parts[0]


def _describe(path: Path, model: Any) -> OnnxFile:
    if model.ir_version > (known := library("onnx", "onnx").IR_VERSION):
        raise SwinQuantError(f"is of file format (IR) {model.ir_version}, newer than {known}: export it again")
    opset, external = checks.check_operators(model), checks.external_parts(model, path.parent)
    graph = checks.infer_shapes(model)
    checks.check_scales(graph, path.parent)
    held = {tensor.name for tensor in graph.initializer}
    inputs = [value for value in graph.input if value.name not in held]
    outputs = [value for value in graph.output if value.name not in EXTRAS] or list(graph.output)
    if not inputs or not outputs or outputs[0] != graph.output[0]:
        raise SwinQuantError(f"has {len(inputs)} inputs and {len(graph.output)} outputs: it needs both, logits first")
    is_one, maps = len(inputs) == 1, all(len(value.type.tensor_type.shape.dim) == 4 for value in outputs)
    found = [_describe_input(value, is_one, maps) for value in inputs]
    (dtype, batch, *sizes), several = found[0], None
    if not is_one:
        if len({each[1] for each in found}) > 1:
            raise SwinQuantError("its inputs are for batches of several sizes")
        parts = (Input(value.name, tuple(own), kind) for value, (kind, _, *own) in zip(inputs, found, strict=True))
        several = Inputs(tuple(parts))
        dtype, sizes = "float32", [*several.shape]
    metadata, pixels = {entry.key: entry.value for entry in model.metadata_props}, None
    if dtype == PIXELS:
        sizes = [sizes[-1], *sizes[:-1]]  # the channels first
        if PREPROCESS not in metadata:
            raise SwinQuantError(f"takes pixels, and does not say how it normalises them in {PREPROCESS}")
        pixels = Preprocess.from_dict(json.loads(metadata[PREPROCESS]))
    channels, *sides = sizes
    return OnnxFile(
        path=path,
        input=inputs[0].name,
        dtype=dtype,
        batch=batch,
        channels=channels,
        sizes=None if None in sides else tuple(sides),
        outputs=tuple(value.name for value in outputs),
        opset=opset,
        # 17 to 20: TensorProto's numbers of the four float8 types
        float8=any(17 <= tensor.data_type <= 20 for each in checks.graphs(graph) for tensor in each.initializer),
        quantizers=sum(node.op_type == "QuantizeLinear" for node in checks.nodes(graph)),
        metadata=metadata,
        parts=external,
        functions=bool(model.functions),
        pixels=pixels,
        inputs=several,
    )


def _describe_input(value: Any, is_one: bool, maps: bool) -> tuple[Any, ...]:
    """Type, batch and other sizes of an input; None for an open batch, as for the height and width of the only input in
    a file whose outputs are `maps`."""
    kind = (_PICTURE_TYPES if is_one else _INPUT_TYPES).get(value.type.tensor_type.elem_type)
    sizes = [size.dim_value if size.HasField("dim_value") else None for size in value.type.tensor_type.shape.dim]
    fixed = sizes[1:2] if is_one and maps and kind != PIXELS and sizes[2:] == [None, None] else sizes[1:]
    if is_one:
        wanted = "must be [batch, channels, ...] of fixed sizes, float32 or float16, or [batch, height, width, 3] uint8"
        fits = len(sizes) == 4 if kind == PIXELS else len(sizes) >= 2
    else:
        wanted = f"one of several must be [batch, ...] of fixed sizes, {' or '.join(_INPUT_TYPES.values())}"
        fits = bool(sizes) and value.name.isidentifier()
    if kind is None or not fits or None in fixed:
        given = ", ".join("?" if size is None else str(size) for size in sizes)
        raise SwinQuantError(f"its input {checks.shown(value.name)} is [{given}]: {wanted}")
    return kind, *sizes


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Put the file's name in front of the checks' errors."""
    try:
        yield
    except SwinQuantError as error:
        raise type(error)(f"{path}: {error}") from error


def write_metadata(
    model: "ModelProto", card: RunCard, precision: str, options: Mapping[str, Any], labels: Sequence[str] | None = None
) -> None:
    """Set the metadata of `model`, which was made from the checkpoint of `card`.

    The card's hash is that of its checkpoint part: without artifact, measurements, versions and date.
    """
    later = ("schema", "artifact", "results", "verification", "versions", "created")
    kept = {key: value for key, value in without_paths(card).items() if key not in later}
    entries = {
        "swin_quant.name": card.name,
        PREPROCESS: json.dumps(card.preprocess),
        "swin_quant.policy": json.dumps(card.policy),
        _PRECISION: precision,
        _OPTIONS: json.dumps(dict(options)),
        "swin_quant.run_card_sha256": compute_data_sha256(kept),
    }
    if card.checkpoint:
        entries["swin_quant.checkpoint_sha256"] = card.checkpoint["sha256"]
    if labels is not None:
        entries[_LABELS] = json.dumps(list(labels))
    for key, value in entries.items():
        model.metadata_props.add(key=key, value=value)


@reads("ONNX file", lambda artifact: artifact.file)
def read_labels(artifact: Artifact) -> list[str]:
    """The class names in an artifact's file; empty if it has none."""
    names = json.loads(open_onnx(artifact.file).metadata.get(_LABELS, "[]"))
    return checked(list[str], names, str(artifact.file), f"its metadata {_LABELS}")


@reads("ONNX file", lambda artifact: artifact.file)
def check_card(artifact: Artifact) -> None:
    """SwinQuantError where a run card contradicts its file: on the input, the output or the precision."""
    file, record = open_onnx(artifact.file).metadata, artifact.record
    options = checked(dict[str, Any], json.loads(file.get(_OPTIONS, "{}")), str(artifact.file), _OPTIONS)
    said = [(f"artifact.options.{key}", value, record["options"].get(key)) for key, value in options.items()]
    if PREPROCESS in file:
        said.append(("preprocess", json.loads(file[PREPROCESS]), artifact.card.preprocess))
    if _PRECISION in file:
        said.append(("artifact.precision", file[_PRECISION], record["precision"]))
    for key, inside, own in said:
        if inside != own:
            refuse_card(artifact, key, inside)
