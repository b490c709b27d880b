"""The KServe v2 inference protocol (Open Inference Protocol, HTTP/REST), with Triton's extensions for binary data and
for classification.

Pure functions from bytes to tensors and back. Sources: kserve/open-inference-protocol, Triton's extension_binary_data
and extension_classification.
"""

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from swin_quant.backends.description import ANY, DATATYPES, VERSION, GraphEnd, ModelDescription
from swin_quant.data.prepared import fault
from swin_quant.data.preprocess import MAX_SIZE, Preprocess
from swin_quant.quant.outputs import Output, parts_of
from swin_quant.serving import numbers
from swin_quant.serving.limits import Refused

LENGTH = "Inference-Header-Content-Length"
BINARY = "application/octet-stream"
EXTENSIONS = ["binary_tensor_data", "classification", "model_configuration", "statistics"]
_DATA, _EMPTY = b'"data": ', b'"data": []'  # lists are written apart, and put into the JSON
_TYPES = {DATATYPES[name]: np.dtype(name).newbyteorder("<") for name in DATATYPES}


@dataclass(frozen=True)
class WantedOutput:
    """An output that a client asks for. `classes`: how many of its largest numbers, in words; 0: all, as numbers."""

    name: str
    binary: bool
    classes: int = 0


@dataclass(frozen=True)
class InferRequest:
    """`images`: prepared, float32 [n, 3, H, W]; the client's `id`; the outputs in the order asked for."""

    images: Tensor
    id: str | None
    outputs: tuple[WantedOutput, ...]


def parse(
    body: bytes, headers: Mapping[str, str], model: ModelDescription, preprocess: Preprocess, most: int
) -> InferRequest:
    """A request for at most `most` pictures: FP32 or FP16 [n, 3, H, W], prepared, or UINT8 [n, H, W, 3], pixels.

    Refused names the fault of the request in a line.
    """
    length = headers.get(LENGTH.lower())
    size = len(body) if length is None else _whole(length, len(body))
    text, data = numbers.cut(body[:size])
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        place = f", at its character {error.pos}" if isinstance(error, json.JSONDecodeError) and not data else ""
        raise Refused(400, f"the body is not JSON{place}") from error
    inputs, name = _get(content, "inputs", list, "the body"), model.input.name
    if len(inputs) != 1 or not isinstance(inputs[0], dict) or inputs[0].get("name") != name:
        raise Refused(400, f"there must be one input, called {name}")
    record, id_ = inputs[0], content.get("id")
    if id_ is not None and not (isinstance(id_, str) and len(id_) <= 256):
        raise Refused(400, "id must be a text of at most 256 characters")
    wanted = _wanted(content, model.outputs)
    return InferRequest(_images(record, data, memoryview(body)[size:], model, preprocess, most), id_, wanted)


def _images(
    record: dict[str, Any], data: bytes, raw: memoryview, model: ModelDescription, preprocess: Preprocess, most: int
) -> Tensor:
    name, type_, shape, sides = model.input.name, record.get("datatype"), record.get("shape"), model.sides
    shapes = {"FP32": [3, *sides], "FP16": [3, *sides], "UINT8": [*sides, 3]}
    takes = " or ".join(f"{kind} [n, {', '.join(map(_size, one))}]" for kind, one in shapes.items())
    if not isinstance(type_, str) or type_ not in shapes:
        raise Refused(400, f"{name}: datatype is {type_!r:.20}: must be {takes}")
    if not isinstance(shape, list) or not _fits(shape[1:], shapes[type_]) or type(shape[0]) is not int:
        raise Refused(400, f"{name}: {type_} {shape!r:.80} came: must be {takes}")
    if not 1 <= shape[0] <= most:
        raise Refused(400, f"{name}: {shape[0]} pictures: must be 1 to {most}")
    parameters = record.get("parameters") or {}
    size = parameters.get("binary_data_size") if isinstance(parameters, dict) else None
    if size is not None:
        values = _binary(raw, size, _TYPES[type_], name)
        if values.size != math.prod(shape):
            raise Refused(400, f"{name}: {values.size} values for the shape {shape}, which has {math.prod(shape)}")
    elif record.get("data") == numbers.CUT:
        values = numbers.read(data, shape, _TYPES[type_])
    else:
        raise Refused(400, f"{name}: data must be a list, or binary_data_size must say how many bytes follow")
    tensor = torch.from_numpy(values.reshape(shape))
    if type_ == "UINT8":
        images = torch.empty(shape[0], 3, *shape[1:3])
        for image, pixels in zip(images, tensor, strict=True):  # one by one, which needs little memory besides
            image[:] = preprocess.normalised(pixels[None])[0]
        return images
    tensor = tensor.float()
    if not bool(torch.isfinite(tensor).all()):
        raise Refused(400, f"{name}: holds NaN or infinity")
    if problem := fault(tensor, preprocess):
        raise Refused(400, f"{name}: {problem}, or UINT8")
    return tensor


def _fits(sizes: list[Any], wanted: list[int]) -> bool:
    """Whether the sizes of a picture are those that the model takes, or for ANY, those that some picture has."""
    return len(sizes) == len(wanted) and all(
        type(size) is int and (1 <= size <= MAX_SIZE if due == ANY else size == due)
        for size, due in zip(sizes, wanted, strict=True)
    )


def _size(size: int) -> str:
    return f"1 to {MAX_SIZE}" if size == ANY else str(size)


def _binary(raw: memoryview, size: Any, kind: np.dtype[Any], name: str) -> np.ndarray:
    if type(size) is not int or size != len(raw) or size % kind.itemsize:
        raise Refused(400, f"{name}: binary_data_size is {size!r:.20}, but {len(raw)} bytes came of {kind}")
    return np.frombuffer(raw, kind).copy()


def _wanted(content: dict[str, Any], outputs: Sequence[GraphEnd]) -> tuple[WantedOutput, ...]:
    """The outputs that a request names, else every one."""
    known = [end.name for end in outputs]
    records = content.get("outputs")
    if records is None:
        all_binary = _parameters(content).get("binary_data_output") is True
        return tuple(WantedOutput(name, all_binary) for name in known)
    names = [one.get("name") if isinstance(one, dict) else None for one in records] if isinstance(records, list) else []
    if not names or len(names) > len(known) or any(name not in known for name in names):
        raise Refused(400, f"outputs must be some of {', '.join(known)}")
    wanted = []
    for record, parameters in ((one, _parameters(one)) for one in records):
        count = parameters.get("classification", 0)
        if type(count) is not int or not 0 <= count < 2**31:
            raise Refused(400, f"{record['name']}: classification must be a whole number of classes")
        (end,) = [one for one in outputs if one.name == record["name"]]
        if count and len(end.shape) != 1:
            raise Refused(400, f"{end.name}: classification is of outputs with one number a class, and this is a map")
        wanted.append(WantedOutput(record["name"], parameters.get("binary_data") is True, count))
    return tuple(wanted)


def _parameters(record: Mapping[str, Any]) -> Mapping[str, Any]:
    found = record.get("parameters")
    return found if isinstance(found, dict) else {}


def answer(model: ModelDescription, values: Output, request: InferRequest) -> tuple[bytes, dict[str, str]]:
    """Body and headers of the answer: the outputs asked for, made from the model's own: float32 [n, width], or maps."""
    content: dict[str, Any] = {"model_name": model.name, "model_version": str(VERSION)}
    if request.id is not None:
        content["id"] = request.id
    given = outputs_of(model, values)
    abouts, lists, blobs = [], [], []
    for wanted in request.outputs:
        array = given[wanted.name]
        if wanted.classes or not wanted.binary:
            check_finite(array)
        labels = model.labels if wanted.name == model.output.name else ()
        array = _in_words(array, wanted.classes, labels) if wanted.classes else array
        is_text = array.dtype == object
        type_ = "BYTES" if is_text else DATATYPES[array.dtype.name]
        about: dict[str, Any] = {"name": wanted.name, "datatype": type_, "shape": list(array.shape)}
        if wanted.binary:
            blobs.append(b"".join(map(_framed, array.ravel())) if is_text else array.astype(_TYPES[type_]).tobytes())
            about["parameters"] = {"binary_data_size": len(blobs[-1])}
        else:
            about["data"] = []
            lists.append(json.dumps(array.ravel().tolist()).encode() if is_text else numbers.written(array.ravel()))
        abouts.append(about)
    head, *rest = json.dumps({**content, "outputs": abouts}).encode().split(_EMPTY)
    text = b"".join((head, *(_DATA + numbers_ + more for numbers_, more in zip(lists, rest, strict=True))))
    if not blobs:
        return text, {"Content-Type": "application/json"}
    return b"".join((text, *blobs)), {"Content-Type": BINARY, LENGTH: str(len(text))}


def outputs_of(model: ModelDescription, values: Output) -> dict[str, np.ndarray]:
    """Every output by its name; those beside logits are what the file's graph makes of these."""
    parts = parts_of(values)
    found = dict(zip([end.name for end in model.outputs], parts, strict=not model.classifies))
    if model.classifies and len(model.outputs) > 1:
        found["probabilities"] = shares = parts[0].float().softmax(1)
        count = next((end.shape[0] for end in model.outputs if end.name == "top_classes"), 0)
        found["top_probabilities"], found["top_classes"] = shares.topk(count, dim=1)
    return {end.name: np.ascontiguousarray(found[end.name].cpu().numpy(), end.type) for end in model.outputs}


def _in_words(values: np.ndarray, count: int, labels: Sequence[str]) -> np.ndarray:
    """[n, count] texts VALUE:INDEX:LABEL, the largest first, as Triton writes them; VALUE:INDEX without labels."""
    best = np.argsort(-values.astype(np.float64), axis=1, kind="stable")[:, :count]
    names = [f":{label}" for label in labels] or [""] * values.shape[1]
    rows = [[f"{row[i]:f}:{i}{names[i]}" for i in places] for row, places in zip(values, best, strict=True)]
    return np.array(rows, dtype=object)


def _framed(text: str) -> bytes:
    """A text of BYTES, behind its length."""
    data = text.encode()
    return struct.pack("<I", len(data)) + data


def check_finite(values: Tensor | np.ndarray) -> None:
    """Refused if an engine's answer holds NaN or infinity, which JSON has no words for."""
    if not bool(np.isfinite(np.asarray(values)).all()):
        raise Refused(500, "the engine gave NaN or infinity: its type is too narrow for this model")


def _whole(text: str, most: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 12 and int(text) <= most):
        raise Refused(400, f"{LENGTH} must be a number of bytes of the body")
    return int(text)


def _get(content: Any, key: str, kind: type, where: str) -> Any:
    found = content.get(key) if isinstance(content, dict) else None
    if not isinstance(found, kind):
        raise Refused(400, f"{where} must be an object with {key}, a {kind.__name__}")
    return found
