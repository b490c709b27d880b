"""Every way in and out of a weights file: Microsoft's, timm's, FasterTransformer's, safetensors, our own."""

from swin_quant.checkpoint.load import is_calibrated, load_calibrated, load_float
from swin_quant.checkpoint.read import Source, read_state_dict
from swin_quant.checkpoint.save import calibrated_state, save_calibrated, save_float

__all__ = [
    "Source",
    "calibrated_state",
    "is_calibrated",
    "load_calibrated",
    "load_float",
    "read_state_dict",
    "save_calibrated",
    "save_float",
]
