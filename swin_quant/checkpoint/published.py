"""What the publisher of a checkpoint says of it beside the weights, as keys of our configuration.

timm's `config.json` (or, for what is in the hub's cache alone, timm itself) says how its pictures are prepared;
transformers' `config.json` has what its tensors do not tell, and `preprocessor_config.json` the preparation.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swin_quant.base.compat import import_timm
from swin_quant.base.files import read_json
from swin_quant.checkpoint.hub import WEIGHTS
from swin_quant.checkpoint.sources import timm_name

_RESAMPLING = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}  # PIL's numbers


def published(file: Path, kind: str) -> dict[str, Any]:
    """Dotted keys -> values for the checkpoint `file` of MODEL.TYPE `kind`, unchecked; empty where nobody says a thing.

    Only a file that is called as in a repository has its description beside it. A broken one is an error that names
    it: what it would have said must not be guessed instead.
    """
    if file.name not in WEIGHTS:
        return {}
    config = _described(file.with_name("config.json"))
    if "architecture" in config:
        pretrained = config.get("pretrained_cfg", config)
        given = _of_timm(_mapping(pretrained), _mapping(config.get("model_args")), kind)
    elif config.get("model_type") in ("swin", "swinv2"):
        processor = _described(file.with_name("preprocessor_config.json"))
        given = _of_transformers(config, kind) | _of_processor(processor)
    elif (name := timm_name(file)) is not None:
        given = _of_timm(import_timm().get_pretrained_cfg(name).to_dict(), {}, kind)
    else:
        given = {}
    return {key: value for key, value in given.items() if value is not None}


def _of_timm(pretrained: Mapping[str, Any], model: Mapping[str, Any], kind: str) -> dict[str, Any]:
    ratio, mode = pretrained.get("crop_pct"), pretrained.get("crop_mode", "center")
    return {
        "DATA.IMG_SIZE": _side(model.get("img_size") or _without_channels(pretrained.get("input_size"))),
        f"MODEL.{kind.upper()}.WINDOW_SIZE": _side(model.get("window_size")),
        "DATA.INTERPOLATION": pretrained.get("interpolation"),
        "DATA.MEAN": pretrained.get("mean"),
        "DATA.STD": pretrained.get("std"),
        "TEST.CROP": None if ratio is None else mode != "squash",
        "TEST.CROP_RATIO": ratio,
    }


def _of_transformers(config: Mapping[str, Any], kind: str) -> dict[str, Any]:
    node = f"MODEL.{kind.upper()}"
    more = {f"{node}.PRETRAINED_WINDOW_SIZES": config.get("pretrained_window_sizes")} if kind == "swinv2" else {}
    return {
        "DATA.IMG_SIZE": _side(config.get("image_size")),
        f"{node}.WINDOW_SIZE": _side(config.get("window_size")),
        **more,
    }


def _of_processor(processor: Mapping[str, Any]) -> dict[str, Any]:
    """ViTImageProcessor resizes to `size`, others to its shorter side and crop the centre."""
    size = processor.get("size")
    shorter = size.get("shortest_edge") if isinstance(size, dict) else None
    crop, method = _side(processor.get("crop_size")), processor.get("resample")
    crops = processor.get("do_center_crop") is True and type(crop) is int and type(shorter) is int and shorter > 0
    return {
        "DATA.INTERPOLATION": _RESAMPLING.get(method) if type(method) is int else None,
        "DATA.MEAN": processor.get("image_mean"),
        "DATA.STD": processor.get("image_std"),
        "TEST.CROP": crops if processor else None,
        "TEST.CROP_RATIO": crop / shorter if crops else None,
    }


def _described(path: Path) -> dict[str, Any]:
    return _mapping(read_json(path, "description of a checkpoint")) if path.is_file() else {}


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _without_channels(size: Any) -> Any:
    return size[1:] if isinstance(size, list | tuple) else size


def _side(size: Any) -> Any:
    """One number for a square that is given by one or both of its sides; anything else as it is, to be refused."""
    if isinstance(size, dict):
        size = [size.get("height"), size.get("width")]
    if isinstance(size, list | tuple):
        return size[0] if len(size) == 2 and size[0] == size[1] else list(size) or None
    return size
