"""The KServe v2 inference protocol (Open Inference Protocol, HTTP/REST) with its binary data extension.

Pure functions from bytes to tensors and back. Sources: kserve/open-inference-protocol, Triton's extension_binary_data.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from swin_quant.data.prepared import fault
from swin_quant.data.preprocess import Preprocess
from swin_quant.serving import numbers
from swin_quant.serving.limits import Refused

INPUT = "images"
LENGTH = "Inference-Header-Content-Length"
BINARY = "application/octet-stream"
_TYPES: dict[str, np.dtype[Any]] = {"FP32": np.dtype("<f4"), "UINT8": np.dtype("u1")}


@dataclass(frozen=True)
class InferRequest:
    """`images`: prepared, float32 [n, 3, S, S]; the client's `id`; `binary`: whether it wants binary outputs."""

    images: Tensor
    id: str | None
    binary: bool


def metadata(name: str, output: str, width: int, preprocess: Preprocess) -> dict[str, Any]:
    """The answer to GET /v2/models/NAME."""
    side = preprocess.size
    return {
        "name": name,
        "versions": ["1"],
        "platform": "swin_quant",
        "inputs": [{"name": INPUT, "datatype": "FP32", "shape": [-1, 3, side, side]}],
        "outputs": [{"name": output, "datatype": "FP32", "shape": [-1, width]}],
    }


def parse(body: bytes, headers: Mapping[str, str], preprocess: Preprocess, output: str, most: int) -> InferRequest:
    """A request for at most `most` pictures: FP32 [n, 3, S, S], prepared, or UINT8 [n, S, S, 3], pixels.

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
    inputs = _get(content, "inputs", list, "the body")
    if len(inputs) != 1 or not isinstance(inputs[0], dict) or inputs[0].get("name") != INPUT:
        raise Refused(400, f"there must be one input, called {INPUT}")
    record, id_ = inputs[0], content.get("id")
    if id_ is not None and not (isinstance(id_, str) and len(id_) <= 256):
        raise Refused(400, "id must be a text of at most 256 characters")
    images = _images(record, data, memoryview(body)[size:], preprocess, most)
    return InferRequest(images, id_, _wants_binary(content, output))


def _images(record: dict[str, Any], data: bytes, raw: memoryview, preprocess: Preprocess, most: int) -> Tensor:
    type_, shape, side = record.get("datatype"), record.get("shape"), preprocess.size
    shapes = {"FP32": [3, side, side], "UINT8": [side, side, 3]}
    if not isinstance(type_, str) or type_ not in shapes:
        raise Refused(400, f"{INPUT}: datatype must be FP32, [n, 3, {side}, {side}], or UINT8, [n, {side}, {side}, 3]")
    if not isinstance(shape, list) or any(type(size) is not int for size in shape) or shape[1:] != shapes[type_]:
        raise Refused(400, f"{INPUT}: shape of {type_} must be whole numbers: {['n', *shapes[type_]]}")
    if not 1 <= shape[0] <= most:
        raise Refused(400, f"{INPUT}: {shape[0]} pictures: must be 1 to {most}")
    parameters = record.get("parameters") or {}
    size = parameters.get("binary_data_size") if isinstance(parameters, dict) else None
    if size is not None:
        values = _binary(raw, size, _TYPES[type_])
        if values.size != math.prod(shape):
            raise Refused(400, f"{INPUT}: {values.size} values for the shape {shape}, which has {math.prod(shape)}")
    elif record.get("data") == numbers.CUT:
        values = numbers.read(data, shape, _TYPES[type_])
    else:
        raise Refused(400, f"{INPUT}: data must be a list, or binary_data_size must say how many bytes follow")
    tensor = torch.from_numpy(values.reshape(shape))
    if type_ == "UINT8":
        images = torch.empty(shape[0], 3, side, side)
        for image, pixels in zip(images, tensor, strict=True):  # one by one, which needs little memory besides
            image[:] = preprocess.normalised(pixels[None])[0]
        return images
    if not bool(torch.isfinite(tensor).all()):
        raise Refused(400, f"{INPUT}: holds NaN or infinity")
    if problem := fault(tensor, preprocess):
        raise Refused(400, f"{INPUT}: {problem}, or UINT8")
    return tensor


def _binary(raw: memoryview, size: Any, kind: np.dtype[Any]) -> np.ndarray:
    if type(size) is not int or size != len(raw) or size % kind.itemsize:
        raise Refused(400, f"{INPUT}: binary_data_size is {size!r:.20}, but {len(raw)} bytes came of {kind}")
    return np.frombuffer(raw, kind).copy()


def _wants_binary(content: dict[str, Any], output: str) -> bool:
    outputs = content.get("outputs")
    if outputs is None:
        parameters = content.get("parameters")
        return isinstance(parameters, dict) and parameters.get("binary_data_output") is True
    names = [one.get("name") if isinstance(one, dict) else None for one in outputs] if isinstance(outputs, list) else []
    if names != [output]:
        raise Refused(400, f"there is one output, called {output}")
    parameters = outputs[0].get("parameters")
    return isinstance(parameters, dict) and parameters.get("binary_data") is True


def answer(name: str, output: str, values: Tensor, request: InferRequest) -> tuple[bytes, dict[str, str]]:
    """Body and headers of the answer: outputs float32 [n, width]."""
    array = np.ascontiguousarray(values.cpu().numpy(), _TYPES["FP32"])
    about: dict[str, Any] = {"name": output, "datatype": "FP32", "shape": list(array.shape)}
    content: dict[str, Any] = {"model_name": name, "model_version": "1"}
    if request.id is not None:
        content["id"] = request.id
    content["outputs"] = [about]
    if not request.binary:
        check_finite(values)
        about["data"], end = [], b"[]}]}"
        text = json.dumps(content).encode().removesuffix(end) + numbers.written(array.ravel()) + end[2:]
        return text, {"Content-Type": "application/json"}
    about["parameters"] = {"binary_data_size": array.nbytes}
    head = json.dumps(content).encode()
    return head + array.tobytes(), {"Content-Type": BINARY, LENGTH: str(len(head))}


def check_finite(values: Tensor) -> None:
    """Refused if an engine's answer holds NaN or infinity, which JSON has no words for."""
    if not bool(values.isfinite().all()):
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
