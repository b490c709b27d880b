"""Writing a graph to disk: one file, unless protobuf's limit of 2 GB forces the weights into a second one."""

from pathlib import Path
from typing import TYPE_CHECKING

from swin_quant.base.files import atomic_write_bytes

if TYPE_CHECKING:
    from onnx import ModelProto

ONE_FILE_LIMIT = (1 << 31) - (1 << 20)  # protobuf's 2 GB, less room for what is not weights


def store(model: "ModelProto", file: Path) -> list[Path]:
    """Write `file`, atomically; returns the files beside it. `model` loses weights that went into `<file>.data`."""
    others = []
    if _weight_bytes(model) > ONE_FILE_LIMIT:
        others.append(_split_off(model, file.with_name(file.name + ".data")))
    atomic_write_bytes(file, model.SerializeToString())
    return others


def _weight_bytes(model: "ModelProto") -> int:
    return sum(len(tensor.raw_data) for tensor in model.graph.initializer)


def _split_off(model: "ModelProto", data: Path) -> Path:
    import onnx.external_data_helper as external

    blobs, offset = [], 0
    for tensor in model.graph.initializer:
        if len(tensor.raw_data) >= 1024:
            blobs.append(tensor.raw_data)
            external.set_external_data(tensor, data.name, offset=offset, length=len(tensor.raw_data))
            tensor.ClearField("raw_data")
            offset += len(blobs[-1])
    atomic_write_bytes(data, b"".join(blobs))
    return data
