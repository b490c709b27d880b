"""The KServe v2 inference protocol (Open Inference Protocol, HTTP/REST), with Triton's extensions for binary data and
for classification.

Pure functions from bytes to tensors and back. Sources: kserve/open-inference-protocol, Triton's extension_binary_data
and extension_classification. Long lists of numbers are counted before they are read, then read and written a piece at a
time: Python's own reader accepts ten million lists and answers no other request meanwhile.
"""

import json
import math
import re
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from swin_quant.backends.description import ANY, DATATYPES, VERSION, GraphEnd, ModelDescription
from swin_quant.data.prepared import fault
from swin_quant.data.preprocess import MAX_SIZE, Preprocess
from swin_quant.quant.outputs import Output, parts_of
from swin_quant.serving.limits import Refused

MOST_BESIDE = 2**16  # bytes of JSON beside the list of numbers
CUT: list[Any] = []  # replaces the list that was cut out
_LIST = re.compile(rb'"data"\s*:\s*(?=\[)')
_PIECE = 2**14  # bytes at a time: a fraction of a millisecond
_STRETCH = 2**20  # bytes at a time for work that takes a nanosecond a byte
_BRACKETS = bytes.maketrans(b"[]", b"  ")
_NO_STRUCTURE = bytes(set(range(256)) - set(b"[],"))


def cut_data(text: bytes) -> tuple[bytes, bytes]:
    """The JSON with CUT in place of the first list called data, and the list. Refused if too much JSON is beside it."""
    found, data = _LIST.search(text, 0, MOST_BESIDE), b""
    if found:
        start = found.end()
        ends = [place for sign in (b'"', b"{", b"}") if (place := text.find(sign, start)) >= 0]  # never in numbers
        end = text.rfind(b"]", start, min(ends, default=len(text))) + 1
        if not end:
            raise Refused(400, "data must be numbers")
        text, data = text[:start] + b"[]" + text[end:], text[start:end]
    if len(text) > MOST_BESIDE:
        raise Refused(400, f"the body is not JSON of at most {MOST_BESIDE:,} bytes beside its data")
    return text, data


def read_numbers(text: bytes, shape: Sequence[int], kind: "np.dtype[Any]") -> np.ndarray:
    """The numbers of a list, flat or nested as `shape`. Refused for another count, and for anything but numbers.

    An integer `kind` refuses numbers that are not whole or do not fit.
    """
    wanted, found = math.prod(shape), _count(text, b",") + 1
    if found != wanted:
        found = found if text.strip(b"[] \t\r\n") else 0
        raise Refused(400, f"{found} values for the shape {list(shape)}, which has {wanted}")
    if not _is_nested(text, shape):
        raise Refused(400, "data must be numbers, flat or nested as the shape says")
    values, place = np.empty(wanted, kind), 0
    for piece in _pieces(text):
        try:
            numbers = np.array(json.loads(b"[" + piece.translate(_BRACKETS) + b"]"), np.float64)
        except (ValueError, TypeError, OverflowError) as error:
            raise Refused(400, "data must be numbers") from error
        if kind.kind == "u" and not ((numbers >= 0) & (numbers <= np.iinfo(kind).max) & (numbers % 1 == 0)).all():
            raise Refused(400, f"data of {kind.name.upper()} must be whole numbers from 0 to {np.iinfo(kind).max}")
        with np.errstate(over="ignore"):  # a number that is too large becomes infinity
            values[place : place + len(numbers)] = numbers
        place += len(numbers)
        time.sleep(0)  # lets another thread have the interpreter's lock
    return values


def written_numbers(values: np.ndarray) -> bytes:
    """The values as a flat list in JSON."""
    pieces = []
    for place in range(0, len(values), _PIECE // 16):
        pieces.append(json.dumps(values[place : place + _PIECE // 16].tolist())[1:-1].encode())
        time.sleep(0)
    return b"[" + b", ".join(pieces) + b"]"


def _count(text: bytes, sign: bytes) -> int:
    return sum(text.count(sign, start, start + _STRETCH) for start in range(0, len(text), _STRETCH))


def _is_nested(text: bytes, shape: Sequence[int]) -> bool:
    """Whether the brackets nest as `shape`, perhaps with the last dimensions flat."""
    lists = _count(text, b"[")
    for depth in range(len(shape)):
        outer, row = shape[:depth], math.prod(shape[depth:])
        if lists == sum(math.prod(outer[:level]) for level in range(depth + 1)):
            expected = b"[" + b"," * (row - 1) + b"]"
            for size in reversed(outer):
                expected = b"[" + b",".join([expected] * size) + b"]"
            stretches = (text[start : start + _STRETCH] for start in range(0, len(text), _STRETCH))
            return b"".join(stretch.translate(None, _NO_STRUCTURE) for stretch in stretches) == expected
    return False


def _pieces(text: bytes) -> Iterator[bytes]:
    """The text in pieces, cut at commas. Refused if one number is longer than a piece."""
    start = 0
    while start < len(text):
        end = text.find(b",", start + _PIECE, start + 2 * _PIECE)
        if end < 0:
            end = len(text)
        if end - start > 2 * _PIECE:
            raise Refused(400, "data must be numbers")
        yield text[start:end]
        start = end + 1


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
    text, data = cut_data(body[:size])
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
    elif record.get("data") == CUT:
        values = read_numbers(data, shape, _TYPES[type_])
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
    """Whether the model takes a picture of these sizes; for ANY, whether a picture can have them."""
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
            lists.append(json.dumps(array.ravel().tolist()).encode() if is_text else written_numbers(array.ravel()))
        abouts.append(about)
    head, *rest = json.dumps({**content, "outputs": abouts}).encode().split(_EMPTY)
    text = b"".join((head, *(_DATA + numbers_ + more for numbers_, more in zip(lists, rest, strict=True))))
    if not blobs:
        return text, {"Content-Type": "application/json"}
    return b"".join((text, *blobs)), {"Content-Type": BINARY, LENGTH: str(len(text))}


def outputs_of(model: ModelDescription, values: Output) -> dict[str, np.ndarray]:
    """Every output by its name; outputs beside logits are computed from these, as the file's graph does."""
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
