"""Import timm and torchvision beside a CPU-only torch.

The torchvision wheels of the public index are linked to CUDA. Beside a CPU build of torch their C++ extension is
skipped, and registering its fake kernels then fails with `operator torchvision::nms does not exist`; timm imports
torchvision unconditionally and fails with it. Declaring the two missing schemas is enough: nothing here calls those
operators. They are declared only after exactly that error, since they would clash with an extension that does load.
"""

import importlib
import sys
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from PIL import Image

_MISSING_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_declared: torch.library.Library | None = None  # dropping the Library would undo its definitions


def import_torchvision() -> ModuleType:
    """Import torchvision; if necessary, declare the operators that its CUDA-only extension would have declared."""
    global _declared
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::nms does not exist" not in str(error):
            raise
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]
    _declared = torch.library.Library("torchvision", "DEF")
    for schema in _MISSING_SCHEMAS:
        _declared.define(schema)
    return importlib.import_module("torchvision")


def import_augmentation() -> ModuleType:
    """timm.data, whose RandAugment posterizes to 0 bits at full strength.

    That is a black picture, and Pillow made one; since version 13 it raises ValueError, one picture in hundreds.
    """
    import_timm()
    table = importlib.import_module("timm.data.auto_augment").NAME_TO_OP
    for name, operation in table.items():
        if name.startswith("Posterize") and operation is not _posterize:
            _timm_s_own[name] = operation
            table[name] = _posterize
    return importlib.import_module("timm.data")


def _posterize(image: Image.Image, bits_to_keep: int, **hints: Any) -> Image.Image:
    if bits_to_keep < 1:
        return Image.new(image.mode, image.size)
    kept: Image.Image = _timm_s_own["Posterize"](image, bits_to_keep, **hints)
    return kept


_timm_s_own: dict[str, Callable[..., Any]] = {}


def import_timm() -> ModuleType:
    """Import timm; torchvision, on which it insists, is made importable first.

    Its progress bars miss widgets in a notebook, and say so in red: nothing here shows them.
    """
    import_torchvision()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "IProgress not found")
        return importlib.import_module("timm")
