"""The configuration tree: defaults, YAML files with inheritance, and checks that name the key and the file.

Keys, defaults and merge order are FasterTransformer's (FasterTransformer spec, section 7): defaults, then the files
named by BASE, then the file itself, then `--opts`, then single command-line flags. yacs carries the tree; reading and
type checks are done here, because yacs evaluates strings and would take None for anything.
"""

import difflib
import math
import os
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from yacs.config import CfgNode

from swin_quant.errors import UsageError, listed

_SWIN = {
    "PATCH_SIZE": 4,
    "IN_CHANS": 3,
    "EMBED_DIM": 96,
    "DEPTHS": [2, 2, 6, 2],
    "NUM_HEADS": [3, 6, 12, 24],
    "WINDOW_SIZE": 7,
    "MLP_RATIO": 4.0,
    "QKV_BIAS": True,
    "APE": False,
    "PATCH_NORM": True,
}
_DEFAULTS: dict[str, Any] = {
    "BASE": [""],
    "DATA": {
        "BATCH_SIZE": 128,
        "DATA_PATH": "",
        "DATASET": "imagenet",
        "IMG_SIZE": 224,
        "INTERPOLATION": "bicubic",
        "ZIP_MODE": False,
        "CACHE_MODE": "part",
        "PIN_MEMORY": True,
        "NUM_WORKERS": 8,
        "MASK_PATCH_SIZE": 32,
        "MASK_RATIO": 0.6,
    },
    "MODEL": {
        "TYPE": "swin",
        "NAME": "swin_tiny_patch4_window7_224",
        "PRETRAINED": "",
        "RESUME": "",
        "NUM_CLASSES": 1000,
        "DROP_RATE": 0.0,
        "DROP_PATH_RATE": 0.1,
        "LABEL_SMOOTHING": 0.1,
        "SWIN": {**_SWIN, "QK_SCALE": None},
        "SWINV2": {**_SWIN, "PRETRAINED_WINDOW_SIZES": [0, 0, 0, 0]},
    },
    "TRAIN": {
        "START_EPOCH": 0,
        "EPOCHS": 300,
        "WARMUP_EPOCHS": 20,
        "WEIGHT_DECAY": 0.05,
        "BASE_LR": 5e-4,
        "WARMUP_LR": 5e-7,
        "MIN_LR": 5e-6,
        "CLIP_GRAD": 5.0,
        "AUTO_RESUME": True,
        "ACCUMULATION_STEPS": 1,
        "USE_CHECKPOINT": False,
        "LAYER_DECAY": 1.0,
        "LR_SCHEDULER": {
            "NAME": "cosine",
            "DECAY_EPOCHS": 30,
            "DECAY_RATE": 0.1,
            "WARMUP_PREFIX": True,
            "GAMMA": 0.1,
            "MULTISTEPS": [],
        },
        "OPTIMIZER": {"NAME": "adamw", "EPS": 1e-8, "BETAS": (0.9, 0.999), "MOMENTUM": 0.9},
    },
    "AUG": {
        "COLOR_JITTER": 0.4,
        "AUTO_AUGMENT": "rand-m9-mstd0.5-inc1",
        "REPROB": 0.25,
        "REMODE": "pixel",
        "RECOUNT": 1,
        "MIXUP": 0.8,
        "CUTMIX": 1.0,
        "CUTMIX_MINMAX": None,
        "MIXUP_PROB": 1.0,
        "MIXUP_SWITCH_PROB": 0.5,
        "MIXUP_MODE": "batch",
    },
    "TEST": {"CROP": True, "SEQUENTIAL": False, "SHUFFLE": False},
    "AMP_ENABLE": True,
    "AMP_OPT_LEVEL": "",
    "ENABLE_AMP": False,
    "OUTPUT": "",
    "TAG": "default",
    "SAVE_FREQ": 1,
    "PRINT_FREQ": 10,
    "SEED": 0,
    "LOCAL_RANK": 0,
    "EVAL_MODE": False,
    "THROUGHPUT_MODE": False,
    "FUSED_WINDOW_PROCESS": False,
    "FUSED_LAYERNORM": False,
}
# A value of the type where the default does not show it.
_EXAMPLES: dict[str, Any] = {
    "MODEL.SWIN.QK_SCALE": 1.0,
    "AUG.CUTMIX_MINMAX": (0.0, 1.0),
    "TRAIN.LR_SCHEDULER.MULTISTEPS": [0],
}
_OPTIONAL = {"MODEL.SWIN.QK_SCALE", "AUG.CUTMIX_MINMAX", "AUG.AUTO_AUGMENT"}
_NOUNS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text (in quotes if it reads as another)",
}
_CHOICES = {
    "MODEL.TYPE": ("swin", "swinv2"),
    "DATA.INTERPOLATION": ("bicubic", "bilinear", "lanczos", "nearest"),
    "DATA.CACHE_MODE": ("no", "full", "part"),
}
_RATES = ("MODEL.DROP_RATE", "MODEL.DROP_PATH_RATE", "MODEL.LABEL_SMOOTHING")
_POSITIVE = ("DATA.IMG_SIZE", "DATA.BATCH_SIZE", "MODEL.NUM_CLASSES")
_POSITIVE_IN_MODEL = ("PATCH_SIZE", "IN_CHANS", "EMBED_DIM", "DEPTHS", "NUM_HEADS", "WINDOW_SIZE", "MLP_RATIO")
_PER_STAGE = ("DEPTHS", "NUM_HEADS", "PRETRAINED_WINDOW_SIZES")
_SHIPPED = ("swin", "swinv2", "demo")
_MAX_BYTES = 1 << 20
_MAX_FILES = 32
_show = reprlib.Repr()  # of values in one-line messages
_show.maxstring = _show.maxother = 80


def default_config() -> CfgNode:
    """The tree of FasterTransformer spec, section 7.2, as a fresh, unfrozen node.

    SWIN_MLP, SWIN_MOE, SIMMIM and TRAIN.MOE are left out: no model of ours reads them, so setting them is an error.
    """
    return CfgNode(_DEFAULTS)


def load_config(path: str | Path, opts: Sequence[str] = (), overrides: Mapping[str, Any] | None = None) -> CfgNode:
    """Defaults <- BASE files <- the file <- opts <- overrides, checked and frozen.

    `opts` alternates keys and values as typed by the user, `overrides` maps dotted keys to values (leave out flags
    that were not given). BASE is resolved here, so the returned tree stands by itself. Raises UsageError, which names
    the key and the file, `--opts` or the command line.
    """
    cfg = default_config()
    for file, tree in _layers(Path(path), (), []):
        _merge(cfg, tree, str(file))
    if len(opts) % 2:
        raise UsageError(f"--opts takes pairs KEY VALUE, but got {len(opts)} words: {' '.join(opts)}")
    _merge(cfg, dict(zip(opts[::2], opts[1::2], strict=True)), "--opts")
    _merge(cfg, overrides or {}, "command line")
    check_geometry(cfg, str(path))
    cfg.freeze()
    return cfg


def from_dict(mapping: Mapping[str, Any], source: str) -> CfgNode:
    """A tree written by `to_dict`, over the defaults; checked and frozen like a file. `source` names it in errors."""
    cfg = default_config()
    _merge(cfg, mapping, source)
    check_geometry(cfg, source)
    cfg.freeze()
    return cfg


def to_dict(cfg: CfgNode) -> dict[str, Any]:
    """The tree as plain dicts, lists, numbers and strings, for JSON."""
    plain = {key: to_dict(value) if isinstance(value, CfgNode) else value for key, value in cfg.items()}
    return {key: list(value) if isinstance(value, tuple) else value for key, value in plain.items()}


def architecture(cfg: CfgNode) -> CfgNode:
    """The node of the model in use: MODEL.SWIN or MODEL.SWINV2."""
    return cfg.MODEL[cfg.MODEL.TYPE.upper()]


def configs_dir() -> Path:
    """The folder of the shipped configurations: inside an installed wheel, beside the package in a checkout."""
    package = Path(__file__).resolve().parent
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def find_config(name_or_path: str | Path) -> Path:
    """An existing file, or else the shipped configuration of that name (its file name without `.yaml`)."""
    if os.path.isfile(name_or_path):
        return Path(name_or_path)
    files = [file for folder in _SHIPPED for file in sorted((configs_dir() / folder).glob("[!_]*.yaml"))]
    shipped = {file.stem: file for file in files}
    if str(name_or_path) in shipped:
        return shipped[str(name_or_path)]
    name = Path(name_or_path).name.removesuffix(".yaml")
    close = difflib.get_close_matches(name, shipped, n=3) or list(shipped)
    raise UsageError(f"no such file or shipped configuration: {name_or_path}; there is {listed(close)}")


def _layers(path: Path, above: tuple[Path, ...], read: list[Path]) -> Iterator[tuple[Path, Mapping[Any, Any]]]:
    """Yield (file, content) in merge order: the files of BASE, recursively, then the file itself."""
    tree = _read(path)
    resolved = path.resolve()
    if resolved in above:
        raise UsageError(f"BASE goes in a circle: {' -> '.join(map(str, (*above, resolved)))}")
    read.append(path)
    if len(read) > _MAX_FILES:
        raise UsageError(f"{read[0]}: BASE pulls in more than {_MAX_FILES} files, the last is {path}")
    base = tree.pop("BASE", None) or []
    names = [base] if isinstance(base, str) else base
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UsageError(f"{path}: BASE must be a list of file names, not {_show.repr(base)}")
    for name in filter(None, names):
        if not os.path.isfile(path.parent / name):
            raise UsageError(f"{path}: BASE names {name}, but there is no such file in {path.parent}")
        yield from _layers(path.parent / name, (*above, resolved), read)
    yield path, tree


def _read(path: Path) -> dict[Any, Any]:
    """One YAML file as a mapping; its content is data and is never evaluated."""
    if path.suffix not in (".yaml", ".yml"):
        raise UsageError(f"{path}: a configuration is a .yaml or .yml file")
    try:
        if not os.path.isfile(path):
            raise UsageError(f"{path}: no such configuration file")
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise UsageError(f"{path}: larger than {_MAX_BYTES} bytes, this is no configuration file")
        tree = yaml.safe_load(content)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark else ""
        what = getattr(error, "problem", None) or str(error).partition("\n")[0]
        raise UsageError(f"{path}: not valid YAML{where}: {what}") from error
    if not isinstance(tree, dict):
        raise UsageError(f"{path}: must hold KEY: value lines, not {_show.repr(tree)}")
    return tree


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of everything that is not a section."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


_TYPES = dict(_leaves(_DEFAULTS)) | _EXAMPLES
_SECTIONS = {key.rsplit(".", n)[0] for key in _TYPES for n in range(1, key.count(".") + 1)}


def _merge(cfg: CfgNode, tree: Mapping[Any, Any], source: str, prefix: str = "") -> None:
    """Write `tree` into `cfg`: nested sections or dotted keys, every key known and every value of its key's type."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if key in _SECTIONS and isinstance(value, Mapping):
            _merge(cfg, value, source, f"{key}.")
        elif key in _SECTIONS:
            raise UsageError(f"{source}: {key} is a section of keys, not {_show.repr(value)}")
        elif key == "BASE" and isinstance(value, list) and not any(value):
            continue
        elif key == "BASE":
            raise UsageError(f"{source}: BASE works only in a YAML file")
        elif key not in _TYPES:
            close = difflib.get_close_matches(key.upper(), [*_TYPES, *sorted(_SECTIONS)], n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise UsageError(f"{source}: unknown key {_show.repr(key)[1:-1]}{hint}")
        else:
            *sections, leaf = key.split(".")
            node = cfg
            for section in sections:
                node = node[section]
            node[leaf] = _typed(key, value, source)


def _typed(key: str, value: Any, source: str) -> Any:
    """`value` as the type of `key`."""
    example = _TYPES[key]
    optional = key in _OPTIONAL
    if optional and (value is None or (isinstance(value, str) and value.lower() in ("none", "null"))):
        return None
    try:
        return _convert(value, example)
    except (ValueError, OverflowError) as error:
        form = {list: "a list, each entry ", tuple: "a pair, each "}.get(type(example), "")
        noun = form + _NOUNS[type(example[0] if form else example)]
        either = " or None" if optional else ""
        raise UsageError(f"{source}: {key} must be {noun}{either}, not {_show.repr(value)}") from error


def _convert(value: Any, example: Any) -> Any:
    """`value` as the type of `example`; text is read as that type (`1e-8` in YAML is text), nothing is evaluated."""
    kind = type(example)
    if kind in (list, tuple):
        if isinstance(value, str) and (inside := re.fullmatch(r"\s*(?:\[(.*)\]|\((.*)\))\s*", value)):
            value = [entry for entry in (inside[1] or inside[2] or "").split(",") if entry.strip()]
        if not isinstance(value, list | tuple) or (kind is tuple and len(value) != len(example)):
            raise ValueError(value)
        return kind(_convert(entry, example[0]) for entry in value)
    if isinstance(value, str) and kind is bool:
        value = {"true": True, "false": False}.get(value.strip().lower())
    elif isinstance(value, str) and kind is not str:
        value = kind(value)
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind or (kind is float and not math.isfinite(value)):
        raise ValueError(value)
    return value


def check_geometry(cfg: CfgNode, source: str) -> None:
    """Refuse values that no Swin can be built from; `source` is the file that the UsageError names.

    Stage i works at R_i = IMG_SIZE / PATCH_SIZE / 2^i and in windows of min(WINDOW_SIZE, R_i) (FasterTransformer spec,
    section 1.2): R_i must be a multiple of its window, and even where patches are merged.
    """
    _check_values(cfg, source)
    node, swin = f"MODEL.{cfg.MODEL.TYPE.upper()}", architecture(cfg)
    size, patch = cfg.DATA.IMG_SIZE, swin.PATCH_SIZE
    _need(size % patch == 0, source, f"DATA.IMG_SIZE {size} is not a multiple of {node}.PATCH_SIZE {patch}")
    resolution, channels = size // patch, swin.EMBED_DIM
    for stage, heads in enumerate(swin.NUM_HEADS):
        here = f"stage {stage}, {resolution} x {resolution} (DATA.IMG_SIZE {size}, {node}.PATCH_SIZE {patch})"
        window = min(swin.WINDOW_SIZE, resolution)
        _need(resolution % window == 0, source, f"{node}.WINDOW_SIZE {swin.WINDOW_SIZE} does not divide {here}")
        alone = cfg.MODEL.TYPE == "swinv2" and window == 1 and swin.PRETRAINED_WINDOW_SIZES[stage] == 0
        _need(not alone, source, f"a window of 1 has no relative coordinates: {here}; choose a larger DATA.IMG_SIZE")
        problem = f"{node}.NUM_HEADS {heads} does not divide the {channels} channels of stage {stage}"
        _need(channels % heads == 0, source, f"{problem} ({node}.EMBED_DIM {swin.EMBED_DIM} x 2^{stage})")
        last = stage == len(swin.NUM_HEADS) - 1
        _need(last or resolution % 2 == 0, source, f"patches of an odd resolution cannot be merged: {here}")
        resolution, channels = resolution // 2, channels * 2


def _check_values(cfg: CfgNode, source: str) -> None:
    """What each key, and the lists of one entry a stage, must hold on their own."""
    values = dict(_leaves(cfg))
    for key, choices in _CHOICES.items():
        _need(values[key] in choices, source, f"{key} is {values[key]!r}, but must be one of {', '.join(choices)}")
    for key in _RATES:
        _need(0 <= values[key] < 1, source, f"{key} is {values[key]}, but must be at least 0 and below 1")
    name = cfg.MODEL.NAME
    usable = re.fullmatch(r"[^/\\\x00-\x1f]{1,200}", name) and name not in (".", "..")
    _need(bool(usable), source, f"MODEL.NAME {_show.repr(name)} cannot name a file: no slashes, 1 to 200 characters")
    node, swin = f"MODEL.{cfg.MODEL.TYPE.upper()}", architecture(cfg)
    for key in (*_POSITIVE, *(f"{node}.{key}" for key in _POSITIVE_IN_MODEL)):
        least = min(values[key], default=0) if isinstance(values[key], list) else values[key]
        _need(least > 0, source, f"{key} is {values[key]}, but must be positive")
    lists = {f"{node}.{key}": swin[key] for key in _PER_STAGE if key in swin}
    shown = ", ".join(f"{key} {entries}" for key, entries in lists.items())
    _need(len(set(map(len, lists.values()))) == 1, source, f"one entry a stage is needed in each of {shown}")
    pretrained = swin.get("PRETRAINED_WINDOW_SIZES", [])
    problem = f"{node}.PRETRAINED_WINDOW_SIZES is {pretrained}, but each must be 0 (none) or at least 2"
    _need(all(window == 0 or window > 1 for window in pretrained), source, problem)


def _need(holds: bool, source: str, problem: str) -> None:
    if not holds:
        raise UsageError(f"{source}: {problem}")
