"""Requests and answers of the KServe v2 protocol (kserve/open-inference-protocol, HTTP/REST), in JSON and with Triton's
extension for binary tensors (extension_binary_data)."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from swin_quant.backends.description import ANY, DATATYPES, VERSION, ModelDescription
from swin_quant.data.prepared import fault
from swin_quant.data.preprocess import MAX_SIZE, Preprocess
from swin_quant.quant.outputs import Output, list_tensors
from swin_quant.serving.batcher import Refused

LENGTH = "Inference-Header-Content-Length"
MOST_LISTS = 2**16  # lists and objects in JSON: Python's reader takes 64 bytes of memory for an empty one
_TYPES = {DATATYPES[name]: np.dtype(name).newbyteorder("<") for name in DATATYPES}


@dataclass(frozen=True)
class InferRequest:
    """`images`: prepared, float32 [n, 3, H, W]. `outputs`: the names asked for, and whether each is binary."""

    images: Tensor
    id: str | None
    outputs: dict[str, bool]


def read_request(
    body: bytes, headers: Mapping[str, str], model: ModelDescription, preprocess: Preprocess, most: int
) -> InferRequest:
    """Read a request for at most `most` pictures: FP32 or FP16 [n, 3, H, W], prepared, or UINT8 [n, H, W, 3], pixels.

    Raises:
        Refused: with the fault of the request in one line.
    """
    length = headers.get(LENGTH.lower(), str(len(body)))
    if not (length.isascii() and length.isdigit() and len(length) < 12 and int(length) <= len(body)):
        raise Refused(400, f"{LENGTH} must be a number of bytes of the body")
    text, raw = body[: int(length)], body[int(length) :]
    if text.count(b"[") + text.count(b"{") > MOST_LISTS:
        raise Refused(400, f"the JSON has more than {MOST_LISTS:,} lists: send data as a flat list, or binary")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Refused(400, "the body is not JSON") from error
    if not isinstance(content, dict) or not isinstance(content.get("inputs"), list):
        raise Refused(400, "the body must be an object with inputs, a list")
    inputs, name, id_ = content["inputs"], model.input.name, content.get("id")
    if len(inputs) != 1 or not isinstance(inputs[0], dict) or inputs[0].get("name") != name:
        raise Refused(400, f"there must be one input, called {name}")
    if id_ is not None and not (isinstance(id_, str) and len(id_) <= 256):
        raise Refused(400, "id must be a text of at most 256 characters")
    known, records = [end.name for end in model.outputs], content.get("outputs")
    if records is None:
        outputs = dict.fromkeys(known, _parameters(content).get("binary_data_output") is True)
    else:
        records = records if isinstance(records, list) and all(isinstance(one, dict) for one in records) else []
        names = [one.get("name") for one in records]
        if not names or any(one not in known or names.count(one) > 1 for one in names[: len(known) + 1]):
            raise Refused(400, f"outputs must be some of {', '.join(known)}")
        if any("classification" in _parameters(one) for one in records):
            raise Refused(400, "classification is not supported: ask for logits, or send a picture to /predict")
        outputs = {one["name"]: _parameters(one).get("binary_data") is True for one in records}
    return InferRequest(_read_images(inputs[0], raw, model, preprocess, most), id_, outputs)


def _read_images(
    record: dict[str, Any], raw: bytes, model: ModelDescription, preprocess: Preprocess, most: int
) -> Tensor:
    name, type_, shape = model.input.name, record.get("datatype"), record.get("shape")
    shapes = {"FP32": [3, *model.sides], "FP16": [3, *model.sides], "UINT8": [*model.sides, 3]}
    sides = {
        kind: ", ".join(f"1 to {MAX_SIZE}" if size == ANY else str(size) for size in shapes[kind]) for kind in shapes
    }
    takes = " or ".join(f"{kind} [n, {sides[kind]}]" for kind in shapes)
    if not isinstance(type_, str) or type_ not in shapes:
        raise Refused(400, f"{name}: datatype is {type_!r:.20}: must be {takes}")
    if (
        not isinstance(shape, list)
        or [type(size) for size in shape] != [int] * 4
        or not all(
            1 <= size <= MAX_SIZE if due == ANY else size == due
            for size, due in zip(shape[1:], shapes[type_], strict=True)
        )
    ):
        raise Refused(400, f"{name}: {type_} {shape!r:.80} came: must be {takes}")
    if not 1 <= shape[0] <= most:
        raise Refused(400, f"{name}: {shape[0]} pictures: must be 1 to {most}")
    values = _read_values(record, raw, _TYPES[type_], name)
    if values.size != math.prod(shape):
        raise Refused(400, f"{name}: {values.size} values for the shape {shape}, which has {math.prod(shape)}")
    if list(values.shape) not in ([values.size], shape):
        raise Refused(400, f"{name}: data must be numbers, flat or nested as the shape says")
    tensor = torch.from_numpy(values.reshape(shape))
    if type_ == "UINT8":
        return preprocess.normalised(tensor)
    tensor = tensor.float()
    if not bool(torch.isfinite(tensor).all()):
        raise Refused(400, f"{name}: holds NaN or infinity")
    if problem := fault(tensor, preprocess):
        raise Refused(400, f"{name}: {problem}, or UINT8")
    return tensor


def _read_values(record: dict[str, Any], raw: bytes, kind: "np.dtype[Any]", name: str) -> np.ndarray:
    size, data = _parameters(record).get("binary_data_size"), record.get("data")
    if size is not None:
        if type(size) is not int or size != len(raw) or size % kind.itemsize:
            raise Refused(400, f"{name}: binary_data_size is {size!r:.20}, but {len(raw)} bytes came of {kind}")
        return np.frombuffer(raw, kind).copy()
    if not isinstance(data, list):
        raise Refused(400, f"{name}: data must be a list, or binary_data_size must say how many bytes follow")
    try:
        values = np.array(data, np.float64)
    except (ValueError, TypeError, OverflowError) as error:
        raise Refused(400, f"{name}: data must be numbers, flat or nested as the shape says") from error
    if kind.kind == "u" and not ((values >= 0) & (values <= 255) & (values % 1 == 0)).all():
        raise Refused(400, f"{name}: data of UINT8 must be whole numbers from 0 to 255")
    with np.errstate(over="ignore"):  # a number that is too large becomes infinity
        return values.astype(kind)


def _parameters(record: Mapping[str, Any]) -> Mapping[str, Any]:
    found = record.get("parameters")
    return found if isinstance(found, dict) else {}


def write_answer(model: ModelDescription, values: Output, request: InferRequest) -> tuple[bytes, dict[str, str]]:
    """Return body and headers of the answer. `values`: the model's own outputs, float32 [n, width], or maps."""
    given, abouts, blobs = compute_outputs(model, values), [], []
    for name, is_binary in request.outputs.items():
        array = given[name]
        about: dict[str, Any] = {"name": name, "datatype": DATATYPES[array.dtype.name], "shape": list(array.shape)}
        if is_binary:
            blobs.append(array.astype(_TYPES[about["datatype"]]).tobytes())
            about["parameters"] = {"binary_data_size": len(blobs[-1])}
        else:
            check_finite(array)
            about["data"] = array.ravel().tolist()
        abouts.append(about)
    content = {"model_name": model.name, "model_version": str(VERSION), "outputs": abouts}
    text = json.dumps(content | ({} if request.id is None else {"id": request.id})).encode()
    if not blobs:
        return text, {"Content-Type": "application/json"}
    return b"".join((text, *blobs)), {"Content-Type": "application/octet-stream", LENGTH: str(len(text))}


def compute_outputs(model: ModelDescription, values: Output) -> dict[str, np.ndarray]:
    """Return each output by name; those beside logits are computed from logits, as the file's graph does."""
    parts = list_tensors(values)
    found = dict(zip([end.name for end in model.outputs], parts, strict=not model.classifies))
    if model.classifies and len(model.outputs) > 1:
        found["probabilities"] = shares = parts[0].float().softmax(1)
        count = next((end.shape[0] for end in model.outputs if end.name == "top_classes"), 0)
        found["top_probabilities"], found["top_classes"] = shares.topk(count, dim=1)
    return {end.name: np.ascontiguousarray(found[end.name].cpu().numpy(), end.type) for end in model.outputs}


def check_finite(values: Tensor | np.ndarray) -> None:
    """Refuse an engine's answer that holds NaN or infinity, which JSON cannot express."""
    if not bool(np.isfinite(np.asarray(values)).all()):
        raise Refused(500, "the engine gave NaN or infinity: its type is too narrow for this model")
