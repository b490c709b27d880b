"""Read the publisher's description of a checkpoint into keys of our configuration.

It is in the file (Microsoft's pickled `config`, timm's `args`) or beside it: transformers' or timm's `config.json`,
`preprocessor_config.json`. timm itself describes a file in the hub's cache that has neither. Tables say which keys set
one of ours, and of which one value is supported; other keys change nothing that is computed.

A processor of transformers resizes, crops, rescales (times `rescale_factor`, 1 / 255) and normalises, each step as
`do_...` says. The last two are one step of ours: a pixel of 0 to 255 becomes (pixel / 255 - MEAN) / STD.
"""

import json
import logging
import math
import re
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from swin_quant.base.compat import import_timm
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.base.files import read_json
from swin_quant.base.progress import log, tell_once
from swin_quant.base.schema import show
from swin_quant.checkpoint.geometry import Geometry
from swin_quant.checkpoint.opened import Source
from swin_quant.checkpoint.sources import WEIGHTS, timm_name
from swin_quant.config import default_config
from swin_quant.config.defaults import defaults
from swin_quant.config.load import leaves, merge, value_at
from swin_quant.config.timm import prepared

_RESAMPLING = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}  # PIL's numbers
_CLASS = re.compile(r"(\w+?)(ImageProcessor|FeatureExtractor)(Fast|Pil)?")

HOW_PREPARED = ("TEST.CROP", "TEST.CROP_RATIO", "TEST.SHAPE", "DATA.INTERPOLATION", "DATA.MEAN", "DATA.STD")
_FRAMED = ("TEST.CROP", "TEST.SHAPE")

_OWN = "embed_dim depths num_heads mlp_ratio qkv_bias qk_scale pretrained_window_sizes in_chans ape patch_norm".split()
# key -> ours; {node} stands for MODEL.SWIN or MODEL.SWINV2. The first are one number, or both sides
_SIZES = {"patch_size": "{node}.PATCH_SIZE", "window_size": "{node}.WINDOW_SIZE"}
_SIZES |= {"image_size": "DATA.IMG_SIZE", "img_size": "DATA.IMG_SIZE"}
SETS = _SIZES | {key: f"{{node}}.{key.upper()}" for key in _OWN}
SETS |= {"num_channels": "{node}.IN_CHANS", "use_absolute_embeddings": "{node}.APE"}
SETS |= {"num_labels": "MODEL.NUM_CLASSES", "num_classes": "MODEL.NUM_CLASSES"}
_ONLY: Mapping[str, tuple[Any, ...]] = {  # key -> the values that our networks and preprocessing support
    "path_norm": (True,),
    "hidden_act": ("gelu", "gelu_python"),
    "layer_norm_eps": (1e-5,),
    "problem_type": (None, "single_label_classification"),
    "act_layer": (None, "gelu"),
    "norm_before_mlp": (None, "ln"),
    "norm_layer": (None, "layernorm", "LayerNorm"),
    "global_pool": (None, "avg"),
    "crop_mode": (None, "center", "squash"),
    **dict.fromkeys(("label_offset", "crop_border_pixels"), (None, 0)),
    **dict.fromkeys(("head_dim", "quantization_config", "size_divisor"), (None,)),
    **dict.fromkeys(("always_partition", "rescale_offset", "do_flip_channel_order", "do_grayscale"), (None, False)),
    **dict.fromkeys(("do_pad", "do_thumbnail", "do_align_long_axis"), (None, False)),
}
_UNLESS = {  # key -> keys of ours: if the user sets one, other values are no matter
    "problem_type": ("MODEL.OUTPUT_KIND",),
    "rescale_offset": ("DATA.MEAN", "DATA.STD"),
    **dict.fromkeys(
        ("crop_mode", "crop_border_pixels", "size_divisor", "do_pad", "do_thumbnail", "do_align_long_axis"), _FRAMED
    ),
}
# Arguments of builders that matter in training alone, and the steps of processors that are read
_IDLE = re.compile(
    r"\w*drop\w*_rate|weight_init|use_checkpoint|fused_window_process|(strict|dynamic)_img_size|"
    r"do_(resize|rescale|normalize|center_crop|convert_rgb|reduce_labels|pooling)"
)
_SWINS = {"swin": "swin", "swinv2": "swinv2", "donut-swin": "swin"}  # model_type of transformers -> ours
_INNER = ("backbone_config", "encoder")  # where a larger model of transformers describes its Swin
_SMALL = 32  # pixels: Microsoft's code crops no picture up to this size, whatever TEST.CROP says
_DERIVED = ("MLP_RATIO", "PRETRAINED_WINDOW_SIZES")  # tensors tell other values for the same model
_PREPARED = ("crop_pct", "interpolation", "mean", "std")  # keys of timm's pretrained_cfg, and of its trainer


@dataclass
class Description:
    """A publisher's description of one file.

    Attributes:
        keys: dotted keys of our configuration -> values.
        where: the same keys -> the file and key that hold the value.
        refusals: a problem in words -> the keys that settle it if the user sets them.
        named: timm's name of the architecture.
    """

    keys: dict[str, Any] = field(default_factory=dict)
    where: dict[str, str] = field(default_factory=dict)
    refusals: dict[str, tuple[str, ...]] = field(default_factory=dict)
    named: str | None = None

    def say(self, place: str, value: Any, where: str) -> None:
        """Record a value unless it is None; two different values are a refusal that the user can lift."""
        value = list(value) if isinstance(value, tuple) else value
        if value is not None and self.keys.setdefault(place, value) != value:
            self.refusals[f"{self.where[place]} gives {place} {self.keys[place]}, {where} {value}"] = (place,)
        if value is not None:
            self.where.setdefault(place, where)

    def say_all(self, values: Mapping[str, Any], where: str) -> None:
        """Record the values of several keys."""
        for place, value in values.items():
            self.say(place, value, where)

    def read(self, values: Mapping[str, Any], where: str, node: str, whole: bool = False) -> None:
        """Take each key of `values` that sets one of ours, and refuse values that are not supported; `whole`: any other
        key is unknown, else only a step of a processor."""
        for key, value in values.items():
            place = f"{where}: {show(key)[1:-1]}"
            ours = SETS.get(key, "").format(node=node)
            if ours in _known_places():
                self.say(ours, side(value) if key in _SIZES else value, place)
            elif key in _ONLY and value not in _ONLY[key]:
                usual = " or ".join(show(each) for each in _ONLY[key] if each is not None) or "none"
                self.refusals[f"{place} is {show(value)}, and only {usual} is supported"] = _UNLESS.get(key, ())
            elif (whole or key.startswith("do_")) and not _IDLE.fullmatch(key) and key not in _ONLY and value:
                log.warning("%s: no such key is known here, so it is ignored", place)

    def find_contradiction(self, determined: Geometry, explicit: Set[str]) -> str | None:
        """The first key of the architecture whose value contradicts the tensors, as a sentence."""
        for place, value in self.keys.items():
            key = place.rpartition(".")[2]
            told = determined.get(key, value)
            size = determined.get("IMG_SIZE", self.keys.get("DATA.IMG_SIZE"))
            patch = determined.get("PATCH_SIZE", 1)
            is_clipped = key == "WINDOW_SIZE" and type(size) is int and told == size // patch  # to the map
            if place not in explicit and key not in _DERIVED and told != value and not is_clipped:
                return f"{self.where[place]} gives {place} {show(value)}, and the tensors tell {show(told)}"
        return None


def published(
    source: Source, determined: Geometry, explicit: Set[str] = frozenset(), settled: Set[str] = frozenset()
) -> Description:
    """The description of a checkpoint of geometry `determined`, without the keys that the user set (`explicit`).

    A key that the user set, or that a configuration file has `settled`, lifts a refusal. A file without a repository's
    usual name may lie beside another file's description: if that contradicts the tensors, it is left unread, with a
    warning. Values have the types of their keys.

    Raises:
        UsageError: a description that contradicts the tensors or itself, or asks for something unsupported.
    """
    node, file = f"MODEL.{str(determined['TYPE']).upper()}", source.path
    described, problem = Description(), ""
    try:
        _read_repository(described, file, node)
        if file.name not in WEIGHTS and (other := described.find_contradiction(determined, explicit)):
            unlike = f"describes another model than {file.name} is, and is left unread: {other}"
            problem = f"{file.with_name('config.json')}: {unlike}"
    except SwinQuantError as error:
        if file.name in WEIGHTS:
            raise
        problem = f"{error}; it is left unread"
    if problem:
        log.warning("%s", problem)
        described = Description()
    _read_file(described, source, node)
    if not described.keys and (name := timm_name(file)) is not None:
        usual = import_timm().get_pretrained_cfg(name).to_dict() | {"num_classes": None}  # a copy's head is its own
        _read_timm(described, usual, f"timm's {name}", node)
    cfg, places = default_config(), [place for place in described.keys if place not in explicit]
    for place in places:
        merge(cfg, {place: described.keys[place]}, described.where[place])
    for problem, unless in described.refusals.items():
        if not {*unless} & (explicit | settled):
            raise UsageError(problem + (f": set {' or '.join(unless)} to settle it" if unless else ""))
    described.keys = {place: value_at(cfg, place) for place in places}
    if other := described.find_contradiction(determined, explicit):
        raise UsageError(f"{file}: {other}: set that key to settle it")
    return described


def _read_file(described: Description, source: Source, node: str) -> None:
    """Read the notes that the file holds beside its tensors."""
    config, where = source.notes.get("config"), f"{source.path}: config"
    if isinstance(config, Mapping) and "MODEL" in config:
        # Keys of DATA, MODEL and TEST by dotted names, of the model's section by their own; others are of training
        tree = {section: _mapping(config.get(section)) for section in ("DATA", "MODEL", "TEST")}
        keys = {key: value for key, value in leaves(tree) if key.count(".") == 1}
        own = _mapping(tree["MODEL"].get(node.rpartition(".")[2]))
        described.read({key.lower(): value for key, value in own.items()}, where, node, whole=True)
        size = keys.get("DATA.IMG_SIZE")
        if type(size) is int and size <= _SMALL and "TEST.CROP" in keys:
            keys["TEST.CROP"] = False
        wanted = (*HOW_PREPARED, "DATA.IMG_SIZE", "MODEL.TYPE", "MODEL.NUM_CLASSES")
        described.say_all({key: keys[key] for key in wanted if key in keys}, where)
    args, name = source.notes.get("args"), source.notes.get("arch")
    if isinstance(args, Mapping) and isinstance(name, str) and "crop_pct" in args:
        # Arguments of timm's training script; None or "" means the default of the architecture
        timm = import_timm()
        usual = timm.get_pretrained_cfg(name).to_dict() if timm.is_model(name) else {}
        size = args.get("img_size")
        own = {"input_size": None if size is None else [3, size, size], "num_classes": None}
        own |= {key: args[key] for key in (*own, *_PREPARED) if args.get(key) not in (None, "")}
        kept = {key: usual[key] for key in (*_PREPARED, "input_size", "crop_mode") if key in usual}
        layout = {
            "architecture": name,
            "pretrained_cfg": kept | {key: value for key, value in own.items() if value is not None},
            "model_args": args.get("model_kwargs"),
        }
        _read_timm(described, layout, f"{source.path}: args", node)


def _read_repository(described: Description, file: Path, node: str) -> None:
    """Read the descriptions beside the file."""
    path = file.with_name("config.json")
    config = description_in(path)
    if inner := next((own for own in map(_mapping, map(config.get, _INNER)) if own.get("model_type") in _SWINS), None):
        heads = ("id2label", "label2id", "num_labels")
        named = {key: value for key, value in inner.items() if key not in heads}
        _read_transformers(described, named, str(path), node)
        log.warning("%s: is of a larger model around a Swin: how its pictures are prepared is not read", path)
    elif config.get("model_type") in _SWINS:
        _read_transformers(described, config, str(path), node)
        if (processor := file.with_name("preprocessor_config.json")).is_file():
            values = description_in(processor)
            described.read(values, str(processor), node)
            _read_processor(described, values, str(processor))
        else:
            told = "pictures are prepared as Microsoft's Swins take them; give ‹cfg› for others"
            tell_once(f"{path}: has no preprocessor_config.json beside it: {told}", logging.WARNING, waits=True)
    elif isinstance(config.get("architecture"), str):
        _read_timm(described, config, str(path), node)
    elif config and file.name in WEIGHTS:
        log.warning("%s: describes neither a Swin nor a model of timm, and is ignored", path)


def _read_transformers(described: Description, config: Mapping[str, Any], where: str, node: str) -> None:
    described.say("MODEL.TYPE", _SWINS[config["model_type"]], f"{where}: model_type")
    depths, windows = config.get("depths"), config.get("pretrained_window_sizes")
    if isinstance(depths, list) and isinstance(windows, list):  # by default there are four, of which it reads the first
        config = {**config, "pretrained_window_sizes": windows[: len(depths)]}
    size = side(config.get("image_size"))
    if isinstance(size, list):
        problem = f"{where}: image_size is {size}, and transformers may cut windows of such pictures in another way"
        described.refusals[problem] = ("DATA.IMG_SIZE",)
    names = config.get("id2label")
    if "num_labels" not in config and isinstance(names, Mapping):
        described.say("MODEL.NUM_CLASSES", len(names), f"{where}: id2label")
    described.read(config, where, node)


def _read_timm(described: Description, config: Mapping[str, Any], where: str, node: str) -> None:
    """Read either layout of timm's description: one mapping, or `pretrained_cfg` and `model_args` apart."""
    name = config.get("architecture")
    described.named = described.named or (name if isinstance(name, str) else None)
    for key in ("pretrained_cfg", "model_args"):
        if not isinstance(config.get(key, {}), Mapping | None):
            raise UsageError(f"{where}: {key} must be a mapping, not {show(config[key])}")
    arguments, weights = config.get("model_args") or {}, config.get("pretrained_cfg") or config
    top = {key: value for key, value in config.items() if key not in ("pretrained_cfg", "model_args")}
    whole = {**weights, **top}  # in the order that timm merges them
    if node.endswith(".TIMM"):
        whole.pop("global_pool", None)  # the architecture has its own
    described.read(whole, where, node)
    if not node.endswith(".TIMM"):
        described.read(arguments, f"{where}: model_args", node, whole=True)
    else:
        elsewhere = ("img_size", "num_classes", "in_chans")  # other keys of the config, and weights, tell them
        if options := {key: value for key, value in arguments.items() if key not in elsewhere}:
            described.say(f"{node}.OPTIONS", json.dumps(options), f"{where}: model_args")
        described.say("DATA.IMG_SIZE", side(arguments.get("img_size")), f"{where}: model_args: img_size")
    sized = {"input_size": None} if arguments.get("img_size") and whole.get("fixed_input_size") else {}
    described.say_all(prepared(whole | sized), where)


def description_in(path: Path) -> dict[str, Any]:
    """The mapping in a JSON file beside a checkpoint; empty if there is no such file, or it holds something else."""
    return _mapping(read_json(path, "description of a checkpoint")) if path.is_file() else {}


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def timm_architecture(source: Source) -> Any:
    """The architecture in timm's description of a file, in the file or beside it; None if there is none."""
    args = source.notes.get("args")
    trained = source.notes.get("arch") if isinstance(args, Mapping) and "crop_pct" in args else None
    return trained or description_in(source.path.with_name("config.json")).get("architecture")


@cache
def _known_places() -> frozenset[str]:
    return frozenset(key for key, _ in leaves(defaults()))


def side(size: Any) -> Any:
    """One number for a square given by one or both sides; height and width in a list; anything else unchanged."""
    if isinstance(size, Mapping) and set(size) == {"height", "width"}:
        size = [size["height"], size["width"]]
    if isinstance(size, list | tuple):
        return size[0] if size and all(each == size[0] for each in size) and len(size) <= 2 else list(size)
    return size


# Defaults of transformers' processors: of all, and of each by the name of its class, less ImageProcessor or
# FeatureExtractor.
_USUAL: Mapping[str, Any] = {
    "do_resize": True,
    "size": 224,
    "default_to_square": True,  # if a size is one number
    "do_center_crop": False,
    "crop_size": 224,
    "resample": 3,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}
_CLIP = {
    "size": {"shortest_edge": 224},
    "default_to_square": False,
    "do_center_crop": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
_PROCESSORS: Mapping[str, Mapping[str, Any]] = {
    "ViT": {"resample": 2},
    "DeiT": {"size": 256, "do_center_crop": True},
    "Bit": _CLIP,
    "CLIP": _CLIP,
}


def _read_processor(described: Description, values: Mapping[str, Any], where: str) -> None:
    """Read how a preprocessor_config.json prepares pictures."""
    name = values.get("image_processor_type") or values.get("feature_extractor_type") or "ViTImageProcessor"
    match = _CLASS.fullmatch(str(name))
    own = _PROCESSORS.get(match[1]) if match else None
    if own is None:
        described.refusals[f"{where}: {name!r:.60} is no processor that is known here"] = ("TEST.CROP",)
        return
    options = {**_USUAL, **own, **{key: value for key, value in values.items() if value is not None}}
    method = options["resample"]
    keys = {"DATA.INTERPOLATION": _RESAMPLING.get(method, method) if type(method) is int else method}
    frame = _frame(options)
    described.say_all(keys | _levels(options, where) | frame, where)
    if not frame:
        said = ", ".join(f"{key} {options[key]!r:.80}" for key in ("do_resize", "size", "do_center_crop", "crop_size"))
        described.refusals[f"{where}: pictures are not resized so here: {said}"] = _FRAMED


def _levels(options: Mapping[str, Any], where: str) -> dict[str, Any]:
    """MEAN and STD of rescaling by k / 255 and of normalising, (k * pixel / 255 - mean) / std."""
    factor = options["rescale_factor"] if options["do_rescale"] else 1
    if type(factor) not in (int, float) or not 0 < factor < math.inf:
        raise UsageError(f"{where}: rescale_factor must be a positive number, not {factor!r:.60}")
    scale = 1.0 if math.isclose(255 * factor, 1, rel_tol=1e-9) else 255 * factor
    values: Any = (options["image_mean"], options["image_std"]) if options["do_normalize"] else (0.0, 1.0)
    mean, std = ([each] * 3 if type(each) in (int, float) else each for each in values)
    are_numbers = all(isinstance(x, list) and all(type(each) in (int, float) for each in x) for x in (mean, std))
    if scale == 1 or not are_numbers:
        return {"DATA.MEAN": mean, "DATA.STD": std}  # other types are refused when the keys are set
    return {"DATA.MEAN": [value / scale for value in mean], "DATA.STD": [value / scale for value in std]}


def _frame(options: Mapping[str, Any]) -> dict[str, Any]:
    """The input size, and the keys that resize and crop a picture to it; empty for a way that is not supported: to
    another shape than a square, not at all, or half a pixel off the centre."""
    crop, size = side(options["crop_size"]) if options["do_center_crop"] else None, options["size"]
    if type(size) is int and not options["default_to_square"]:
        size = {"shortest_edge": size}
    squashed = not (isinstance(size, Mapping) and {key for key in size if size[key] is not None} == {"shortest_edge"})
    resized = side(size) if squashed else size["shortest_edge"]
    are_sizes = all(type(one) is int and 0 < one < 2**16 for one in (resized, resized if crop is None else crop))
    if not options["do_resize"] or not are_sizes:
        return {}
    if crop is None or (crop == resized and squashed):
        return {"DATA.IMG_SIZE": resized, "TEST.CROP": False, "TEST.SHAPE": "square"} if squashed else {}
    if crop > resized or (squashed and (resized - crop) % 4 == 3):
        return {}
    shape, ratio = "squashed" if squashed else "floored", crop / resized
    ratio = ratio if int(crop / ratio) == resized else math.nextafter(ratio, 0)  # rounding must not lose a pixel
    return {"DATA.IMG_SIZE": crop, "TEST.CROP": True, "TEST.CROP_RATIO": ratio, "TEST.SHAPE": shape}
