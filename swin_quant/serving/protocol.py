"""Requests and answers of the KServe v2 protocol (kserve/open-inference-protocol, HTTP/REST), in JSON and with Triton's
extension for binary tensors (extension_binary_data). UsageError says what is wrong with a request."""

import json
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NotRequired, TypeAlias, TypedDict

import numpy as np
import torch
from torch import Tensor

from swin_quant.backends.description import ANY, DATATYPES, VERSION, ModelDescription
from swin_quant.base.errors import UsageError
from swin_quant.base.schema import check_record, within
from swin_quant.data.prepared import fault
from swin_quant.data.preprocess import MAX_SIZE, Preprocess
from swin_quant.quant.outputs import Output, list_tensors

LENGTH = "Inference-Header-Content-Length"
MOST_LISTS = 2**16  # lists and objects in JSON: Python's reader takes 64 bytes of memory for an empty one
_Size: TypeAlias = Annotated[int, within(least=1)]


class _Named(TypedDict):
    name: str
    parameters: NotRequired[dict[str, Any]]


class _Input(_Named):
    datatype: Literal["FP32", "FP16", "UINT8"]
    shape: tuple[_Size, _Size, _Size, _Size]
    data: NotRequired[Any]


class _Request(TypedDict):
    inputs: tuple[_Input]
    id: NotRequired[str]
    outputs: NotRequired[list[_Named]]
    parameters: NotRequired[dict[str, Any]]


def read_request(
    body: bytes, headers: Mapping[str, str], model: ModelDescription, preprocess: Preprocess, most: int
) -> tuple[Tensor, str | None, dict[str, bool]]:
    """Read a request for at most `most` pictures: FP32 or FP16 [n, 3, H, W], prepared, or UINT8 [n, H, W, 3], pixels.

    Returns:
        The prepared images, float32 [n, 3, H, W]; the request's id; and whether each output that it asks for is binary.
    """
    length = headers.get(LENGTH.lower(), str(len(body)))
    if not (length.isdecimal() and len(length) < 12 and int(length) <= len(body)):
        raise UsageError(f"{LENGTH} must be a number of bytes of the body")
    text, raw = body[: int(length)], body[int(length) :]
    if text.count(b"[") + text.count(b"{") > MOST_LISTS:
        raise UsageError(f"the JSON has more than {MOST_LISTS:,} lists: send data as a flat list, or binary")
    try:
        content = check_record(_Request, json.loads(text), "the body", lenient=True, error=UsageError)
    except (ValueError, RecursionError) as error:
        raise UsageError("the body is not JSON") from error
    known, is_binary = [end.name for end in model.outputs], content.get("parameters", {}).get("binary_data_output")
    outputs: dict[str, bool] = {}
    for one in content.get("outputs", [{"name": name, "parameters": {"binary_data": is_binary}} for name in known]):
        how = one.get("parameters", {})
        if one["name"] not in known or "classification" in how:
            raise UsageError(f"outputs must be some of {', '.join(known)}; classification is not supported")
        outputs[one["name"]] = how.get("binary_data") is True
    return _read_images(content["inputs"][0], raw, model, preprocess, most), content.get("id"), outputs


def _read_images(record: _Input, raw: bytes, model: ModelDescription, preprocess: Preprocess, most: int) -> Tensor:
    name, kind, shape = record["name"], record["datatype"], record["shape"]
    due = (*model.sides, 3) if kind == "UINT8" else (3, *model.sides)
    fits = [size == wanted or (wanted == ANY and size <= MAX_SIZE) for size, wanted in zip(shape[1:], due, strict=True)]
    if name != model.input.name or shape[0] > most or not all(fits):
        sizes = ", ".join(f"1 to {MAX_SIZE}" if wanted == ANY else str(wanted) for wanted in due)
        taken = f"{model.input.name}, {kind} [1 to {most}, {sizes}]"
        raise UsageError(f"{name:.80}, {kind} {list(shape)}, came: the one input must be {taken}")
    type_ = next(np.dtype(one).newbyteorder("<") for one, datatype in DATATYPES.items() if datatype == kind)
    size = record.get("parameters", {}).get("binary_data_size")
    if size is not None and size != len(raw):
        raise UsageError(f"{name}: binary_data_size is {size!r:.20}, but {len(raw)} bytes came")
    try:
        given = np.array(record.get("data"), np.float64) if size is None else np.frombuffer(raw, type_)
        with np.errstate(over="ignore", invalid="ignore"):  # a number that is too large becomes infinity
            values = given.astype(type_)
        is_exact = kind != "UINT8" or bool((values == given).all())
        if not is_exact or values.size != math.prod(shape) or values.shape not in ((values.size,), shape):
            raise ValueError("another number of values, or no bytes")
    except (ValueError, TypeError, OverflowError) as error:
        numbers = "whole numbers from 0 to 255" if kind == "UINT8" else "numbers"
        raise UsageError(f"{name}: data must be {math.prod(shape)} {numbers}, flat or nested as the shape") from error
    tensor = torch.from_numpy(values.reshape(shape))
    if kind == "UINT8":
        return preprocess.normalised(tensor)
    tensor = tensor.float()
    problem = fault(tensor, preprocess) if bool(tensor.isfinite().all()) else "holds NaN or infinity"
    if problem:
        raise UsageError(f"{name}: {problem}, or UINT8")
    return tensor


def write_answer(
    model: ModelDescription, values: Output, id_: str | None, outputs: Mapping[str, bool]
) -> tuple[bytes, dict[str, str]]:
    """Return body and headers of the answer. `values`: the model's own outputs, float32 [n, width], or maps; `outputs`:
    the names asked for, and whether each is binary."""
    ends, parts = {end.name: end for end in model.outputs}, list_tensors(values)
    abouts, blobs = list[dict[str, Any]](), list[bytes]()
    found = dict(zip(ends, parts, strict=not model.classifies))
    if model.classifies and len(ends) > 1:  # outputs beside logits are computed from these, as the file's graph does
        found["probabilities"] = shares = parts[0].float().softmax(1)
        count = ends["top_classes"].shape[0] if "top_classes" in ends else 0
        found["top_probabilities"], found["top_classes"] = shares.topk(count, dim=1)
    for name, is_binary in outputs.items():
        array = np.ascontiguousarray(found[name].cpu().numpy(), ends[name].type)
        abouts.append({"name": name, "datatype": DATATYPES[array.dtype.name], "shape": list(array.shape)})
        if is_binary:
            blobs.append(array.astype(array.dtype.newbyteorder("<")).tobytes())
            abouts[-1]["parameters"] = {"binary_data_size": len(blobs[-1])}
        else:
            abouts[-1]["data"] = array.ravel().tolist()
    content = {"model_name": model.name, "model_version": str(VERSION), "outputs": abouts}
    text = json.dumps(content | ({} if id_ is None else {"id": id_}), allow_nan=False).encode()
    if not blobs:
        return text, {"Content-Type": "application/json"}
    return b"".join((text, *blobs)), {"Content-Type": "application/octet-stream", LENGTH: str(len(text))}
