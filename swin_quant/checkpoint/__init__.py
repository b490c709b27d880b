"""Reading and writing weights: Microsoft's, timm's, FasterTransformer's and safetensors files, and our own."""

from swin_quant.checkpoint.load import load_calibrated, load_float
from swin_quant.checkpoint.opened import (
    Checkpoint,
    OpenedCheckpoint,
    Source,
    made_before,
    open_checkpoint,
    read_state_dict,
)
from swin_quant.checkpoint.save import calibrated_bytes, save_calibrated, save_float

__all__ = [
    "Checkpoint",
    "OpenedCheckpoint",
    "Source",
    "calibrated_bytes",
    "load_calibrated",
    "load_float",
    "made_before",
    "open_checkpoint",
    "read_state_dict",
    "save_calibrated",
    "save_float",
]
