"""Reading and writing weights: Microsoft's, timm's, FasterTransformer's and safetensors files, and our own."""

from swin_quant.checkpoint.load import load_calibrated, load_float
from swin_quant.checkpoint.opened import OpenedCheckpoint, Source, open_checkpoint, read_state_dict
from swin_quant.checkpoint.save import save_calibrated, save_float

__all__ = [
    "OpenedCheckpoint",
    "Source",
    "load_calibrated",
    "load_float",
    "open_checkpoint",
    "read_state_dict",
    "save_calibrated",
    "save_float",
]
