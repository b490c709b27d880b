"""Translate how transformers' processors prepare pictures into keys of our configuration.

A processor resizes, crops, rescales (times `rescale_factor`, 1 / 255) and normalises, each step as `do_...` says. The
last two are one step of ours: a pixel of 0 to 255 becomes (pixel / 255 - MEAN) / STD.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

from swin_quant.base.errors import UsageError
from swin_quant.checkpoint.publishers import FRAMED, PROCESSORS, Processor, entries, side

_RESAMPLING = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}  # PIL's numbers
_WARPS = 384  # from this size on ConvNext's processor crops nothing
_CLASS = re.compile(r"(\w+?)(ImageProcessor|FeatureExtractor)(Fast|Pil)?")

Prepared = tuple[dict[str, Any], dict[str, tuple[str, ...]]]


def prepared_by_processor(description: Mapping[str, Any], where: str) -> Prepared:
    """Dotted keys -> values, and refusals -> the keys that lift them, of a preprocessor_config.json called `where`."""
    name = description.get("image_processor_type") or description.get("feature_extractor_type") or "ViTImageProcessor"
    match = _CLASS.fullmatch(str(name))
    known = PROCESSORS.get(match[1]) if match else None
    if known is None:
        return {}, {f"{where}: {name!r:.60} is no processor that is known here": ("TEST.CROP",)}
    options = {key: value for key, value in description.items() if value is not None}
    method = options.get("resample", known.resample)
    keys = {"DATA.INTERPOLATION": _RESAMPLING.get(method, method) if type(method) is int else method}
    keys |= _levels(options, known, where)
    try:
        return keys | _frame(options, known), {}
    except _Unlike as problem:
        return keys, {f"{where}: {problem}": FRAMED}


class _Unlike(Exception):
    """A resize or crop that is not supported; the message says which."""


def _levels(options: Mapping[str, Any], known: Processor, where: str) -> dict[str, Any]:
    """MEAN and STD of rescaling by k / 255 and of normalising, (k * pixel / 255 - mean) / std."""
    factor = options.get("rescale_factor", 1 / 255) if options.get("do_rescale", True) else 1
    if type(factor) not in (int, float) or not 0 < factor < math.inf:
        raise UsageError(f"{where}: rescale_factor must be a positive number, not {factor!r:.60}")
    scale = 1.0 if math.isclose(255 * factor, 1, rel_tol=1e-9) else 255 * factor
    if not options.get("do_normalize", True):
        mean, std = [0.0] * 3, [1.0] * 3
    else:
        usual = (("image_mean", known.mean), ("image_std", known.std))
        mean, std = (_channels(options.get(key, default)) for key, default in usual)
    are_numbers = all(isinstance(x, list) and all(type(each) in (int, float) for each in x) for x in (mean, std))
    if scale == 1 or not are_numbers:
        return {"DATA.MEAN": mean, "DATA.STD": std}  # other types are refused when the keys are set
    return {"DATA.MEAN": [value / scale for value in mean], "DATA.STD": [value / scale for value in std]}


def _channels(value: Any) -> Any:
    return [value] * 3 if type(value) in (int, float) else entries(value)


def _frame(options: Mapping[str, Any], known: Processor) -> dict[str, Any]:
    """The input size, and the keys that resize and crop a picture to it."""
    crop = side(options.get("crop_size", known.crop_size)) if options.get("do_center_crop", known.crops) else None
    if not options.get("do_resize", True):
        raise _Unlike("do_resize is false, and pictures of any other size are resized here")
    size = options.get("size", known.size)
    if type(size) is int and not options.get("default_to_square", known.to_square):
        size = {"shortest_edge": size}
    squashed = not (isinstance(size, Mapping) and {key for key in size if size[key] is not None} == {"shortest_edge"})
    resized = side(size) if squashed else size["shortest_edge"]
    ratio = options.get("crop_pct", known.crop_pct)
    if known.crop_pct and not squashed and type(resized) is int:
        crop, resized, squashed = (resized, int(resized / ratio), False) if resized < _WARPS else (None, resized, True)
    if type(resized) is not int or not 0 < resized < 2**16:
        raise _Unlike(f"size {size!r:.80} is no square and no shorter side, as pictures are resized here")
    if crop is None and not squashed:
        raise _Unlike(
            f"size {size!r:.80} without do_center_crop keeps the shape of pictures, and the input is a square"
        )
    if crop is None or (crop == resized and squashed):
        return {"DATA.IMG_SIZE": resized, "TEST.CROP": False, "TEST.SHAPE": "square"}
    if type(crop) is not int or not 0 < crop <= resized:
        raise _Unlike(f"crop_size {crop!r:.80} is no square inside of the {resized} that pictures are resized to")
    if squashed and (resized - crop) % 4 == 3:
        raise _Unlike(f"crop_size {crop} lies half a pixel off the centre of the square of {resized}")
    shape = "squashed" if squashed else "floored"
    return {"DATA.IMG_SIZE": crop, "TEST.CROP": True, "TEST.CROP_RATIO": ratio_of(crop, resized), "TEST.SHAPE": shape}


def ratio_of(crop: int, resized: int) -> float:
    """A ratio for which int(crop / ratio) is `resized`: rounding must not lose a pixel."""
    ratio = crop / resized
    return ratio if int(crop / ratio) == resized else math.nextafter(ratio, 0)
