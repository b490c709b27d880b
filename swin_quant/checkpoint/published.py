"""Read the publisher's description of a checkpoint into keys of our configuration.

It is in the file (Microsoft's pickled `config`, metadata of safetensors) or beside it: transformers' or timm's
`config.json`, `preprocessor_config.json`. timm itself describes a file in the hub's cache that has neither. The tables
of `publishers` say of every key whether it is used, ignored, refused, or named in a warning.
"""

import contextlib
import json
import re
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from swin_quant.base.compat import import_timm
from swin_quant.base.errors import SwinQuantError, UsageError, listed
from swin_quant.base.files import read_json
from swin_quant.base.progress import log
from swin_quant.base.schema import show
from swin_quant.checkpoint import publishers
from swin_quant.checkpoint.geometry import Geometry, changes_model
from swin_quant.checkpoint.opened import Source
from swin_quant.checkpoint.publishers import Only, Sets, Table, prepared_by_processor, side
from swin_quant.checkpoint.sources import WEIGHTS, timm_name
from swin_quant.config import default_config
from swin_quant.config.defaults import defaults
from swin_quant.config.sides import holds_squares
from swin_quant.config.timm import prepared
from swin_quant.config.values import leaves, merge, value_at

_SWINS = {"swin": "swin", "swinv2": "swinv2", "donut-swin": "swin"}  # model_type of transformers -> ours
_GEOMETRY = {"window_size": 7, "patch_size": 4, "depths": [2, 2, 6, 2]}  # transformers' defaults
_INNER = ("backbone_config", "encoder")  # where a larger model of transformers describes its Swin
_SMALL = 32  # pixels: Microsoft's code crops no picture up to this size, whatever TEST.CROP says
_TIMMS = {"pretrained_cfg", "model_args", "num_classes", "num_features", "input_size", "mean"}
_TRAINERS = re.compile(r"checkpoint-\d+")  # a folder of transformers' trainer; its processor may lie one above
_FLAT = {"img_size", "window_size", "embed_dim"}  # a pickled config with any of these holds a builder's arguments
_PREPARED = ("crop_pct", "interpolation", "mean", "std")  # keys of timm's pretrained_cfg, and of its trainer
_NAMED = {  # our key -> the key in a processor's description, the key in timm's
    "DATA.IMG_SIZE": ("size", "input_size"),
    "DATA.INTERPOLATION": ("resample", "interpolation"),
    "DATA.MEAN": ("image_mean", "mean"),
    "DATA.STD": ("image_std", "std"),
    "TEST.CROP": ("do_center_crop", "crop_mode"),
    "TEST.CROP_RATIO": ("crop_size", "crop_pct"),
    "TEST.SHAPE": ("size", "crop_mode"),
}


@dataclass
class Description:
    """A publisher's description of one file.

    Attributes:
        keys: dotted keys of our configuration -> values.
        where: the same keys -> the file and key that hold the value.
        refusals: a problem in words -> the keys that settle it if the user sets them.
        unknown: keys that are in no table.
        timm: timm's description as it was read.
    """

    keys: dict[str, Any] = field(default_factory=dict)
    where: dict[str, str] = field(default_factory=dict)
    refusals: dict[str, tuple[str, ...]] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    timm: Mapping[str, Any] = field(default_factory=dict)

    @property
    def named(self) -> str | None:
        """timm's name of the architecture."""
        name = self.timm.get("architecture")
        return name if isinstance(name, str) else None

    def say(self, place: str, value: Any, where: str) -> None:
        """Record a value unless it is None; two different values are a refusal that the user can lift."""
        if value is not None and self.keys.setdefault(place, value) != value:
            self.refusals[f"{self.where[place]} gives {place} {self.keys[place]}, {where} {value}"] = (place,)
        if value is not None:
            self.where.setdefault(place, where)

    def read(self, table: Table, values: Mapping[str, Any], where: str, node: str) -> None:
        """Apply the rule of `table` to each key of `values`."""
        for key, value in values.items():
            rule, place = table.get(key), f"{where}: {show(key)[1:-1]}"
            value = value if _is_plain(value) else type(value).__name__
            if isinstance(rule, Sets) and (ours := rule.place.format(node=node)) in _known_places():
                self.say(ours, rule.read(value), place)
            elif isinstance(rule, Only) and value not in rule.values:
                usual = " or ".join(show(each) for each in rule.values if each is not None) or "none"
                self.refusals[f"{place} is {show(value)}, and only {usual} is supported"] = rule.unless
            elif key not in table or (isinstance(rule, Sets) and value not in (None, [], 0)):  # of another version
                self.unknown.append(place)

    def add(self, other: "Description") -> None:
        """Take over what another description of the file says."""
        for place, value in other.keys.items():
            self.say(place, value, other.where[place])
        self.refusals.update(other.refusals)
        self.unknown.extend(other.unknown)
        self.timm = other.timm or self.timm

    def find_contradiction(self, determined: Geometry, explicit: Set[str]) -> str | None:
        """The first key of the architecture whose value contradicts the tensors, as a sentence."""
        sized = {"IMG_SIZE": self.keys["DATA.IMG_SIZE"]} if "DATA.IMG_SIZE" in self.keys else {}
        for place, value in self.keys.items():
            key = place.rpartition(".")[2]
            if place not in explicit and key in determined and changes_model({**sized, **determined}, key, value):
                return f"{self.where[place]} gives {place} {show(value)}, and the tensors tell {show(determined[key])}"
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
    described, beside, problem = Description(), Description(), ""
    _read_file(described, source, node)
    try:
        _read_repository(beside, file, node)
        if file.name not in WEIGHTS and (other := beside.find_contradiction(determined, explicit)):
            unlike = f"describes another model than {file.name} is, and is left unread: {other}"
            problem = f"{file.with_name('config.json')}: {unlike}"
    except SwinQuantError as error:
        if file.name in WEIGHTS:
            raise
        problem = f"{error}; it is left unread"
    if problem:
        log.warning("%s", problem)
    else:
        described.add(beside)
    if not described.keys and (name := timm_name(file)) is not None:
        usual = import_timm().get_pretrained_cfg(name).to_dict() | {"num_classes": None}  # a copy's head is its own
        _read_timm(described, usual, f"timm's {name}", node)
    cfg, places = default_config(), [place for place in described.keys if place not in explicit]
    for place in places:
        merge(cfg, {place: described.keys[place]}, described.where[place])
    for problem, unless in described.refusals.items():
        if not {*unless} & (explicit | settled):
            raise UsageError(problem + (f": set {' or '.join(unless)} to settle it" if unless else ""))
    if described.unknown:
        log.warning("%s: no such key is known here, so it is ignored", listed(described.unknown, 8))
    described.keys = {place: value_at(cfg, place) for place in places}
    if other := described.find_contradiction(determined, explicit):
        raise UsageError(f"{file}: {other}: set that key to settle it")
    return described


def _read_file(described: Description, source: Source, node: str) -> None:
    """Read the notes that the file holds beside its tensors."""
    config, where = source.notes.get("config"), f"{source.path}: config"
    if isinstance(config, Mapping):
        if _FLAT & config.keys():
            described.read(publishers.ARGUMENTS, config, where, node)
        elif "MODEL" in config:
            # Keys of DATA, MODEL and TEST by dotted names, of the model's section by their own; others are of training
            tree = {section: _mapping(config.get(section)) for section in ("DATA", "MODEL", "TEST")}
            keys = {key: value for key, value in leaves(tree) if key.count(".") == 1}
            keys |= _mapping(tree["MODEL"].get(node.rpartition(".")[2]))
            size = keys.get("DATA.IMG_SIZE")
            if type(size) is int and size <= _SMALL and "TEST.CROP" in keys:
                keys["TEST.CROP"] = False
            described.read(publishers.MICROSOFT, keys, where, node)
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
    metadata: dict[str, Any] = dict(source.notes.get("metadata", {}))  # of safetensors, where all values are text
    for key, text in source.notes.get("metadata", {}).items():
        with contextlib.suppress(ValueError, RecursionError):
            metadata[key] = json.loads(text)
    for key in ("config", "config.json"):
        metadata |= _mapping(metadata.get(key))
    if any(key in metadata for key in ("pretrained_cfg", "architecture", "input_size")):
        metadata.pop("format", None)
        _read_timm(described, metadata, f"metadata of {source.path}", node)
    elif metadata.get("model_type") in _SWINS:
        _read_transformers(described, metadata, f"metadata of {source.path}", node)


def _read_repository(described: Description, file: Path, node: str) -> None:
    """Read the descriptions beside the file."""
    path = file.with_name("config.json")
    config = description_in(path)
    if inner := next((own for own in map(_mapping, map(config.get, _INNER)) if own.get("model_type") in _SWINS), None):
        named = {key: value for key, value in inner.items() if key not in ("id2label", "label2id", "num_labels")}
        _read_transformers(described, named, str(path), node)
        log.warning("%s: is of a larger model around a Swin: how its pictures are prepared is not read", path)
    elif config.get("model_type") in _SWINS:
        _read_transformers(described, config, str(path), node)
        above = (file.parent.parent,) if _TRAINERS.fullmatch(file.parent.name) else ()
        beside = [folder / "preprocessor_config.json" for folder in (file.parent, *above)]
        if (processor := next(filter(Path.is_file, beside), None)) is not None:
            values = description_in(processor)
            described.read(publishers.PROCESSOR, values, str(processor), node)
            preparation, refusals = prepared_by_processor(values, str(processor))
            for place, value in preparation.items():
                described.say(place, value, f"{processor}: {_NAMED[place][0]}")
            described.refusals.update(refusals)
        else:
            told = "pictures are prepared as Microsoft's Swins take them; give ‹cfg› for others"
            log.warning("%s: has no preprocessor_config.json beside it: %s", path, told)
    elif _is_timm_config(config) or ("architecture" in config and file.name in WEIGHTS):
        _read_timm(described, config, str(path), node)
    elif config and file.name in WEIGHTS:
        log.warning("%s: describes neither a Swin nor a model of timm, and is ignored", path)


def _read_transformers(described: Description, config: Mapping[str, Any], where: str, node: str) -> None:
    described.say("MODEL.TYPE", _SWINS[config["model_type"]], f"{where}: model_type")
    depths, windows = config.get("depths"), config.get("pretrained_window_sizes")
    if isinstance(depths, list) and isinstance(windows, list):  # by default there are four, of which it reads the first
        config = {**config, "pretrained_window_sizes": windows[: len(depths)]}
    size = publishers.side(config.get("image_size"))
    window, patch, stages = (config.get(key, own) for key, own in _GEOMETRY.items())
    are_sizes = isinstance(size, list) and all(type(one) is int and one > 0 for one in (window, patch, *size))
    is_known = are_sizes and len(size) == 2 and isinstance(stages, list)
    if isinstance(size, list) and not (is_known and holds_squares(window, size, patch, len(stages))):
        problem = (
            f"{where}: image_size is {size}, and transformers cuts other windows than we do where a map is not larger "
            "than a window along both sides, or holds no whole windows"
        )
        described.refusals[problem] = ("DATA.IMG_SIZE",)
    names = config.get("id2label")
    if "num_labels" not in config and isinstance(names, Mapping):
        described.say("MODEL.NUM_CLASSES", len(names), f"{where}: id2label")
    described.read(publishers.TRANSFORMERS, config, where, node)


def _read_timm(described: Description, config: Mapping[str, Any], where: str, node: str) -> None:
    """Read either layout of timm's description: one mapping, or `pretrained_cfg` and `model_args` apart."""
    described.timm = config
    for key in ("pretrained_cfg", "model_args"):
        if not isinstance(config.get(key, {}), Mapping | None):
            raise UsageError(f"{where}: {key} must be a mapping, not {show(config[key])}")
    arguments, weights = config.get("model_args") or {}, config.get("pretrained_cfg") or config
    top = {key: value for key, value in config.items() if key not in ("pretrained_cfg", "model_args")}
    whole = {**weights, **top}  # in the order that timm merges them
    described.read(publishers.TIMM, whole, where, node)
    if not node.endswith(".TIMM"):
        described.read(publishers.ARGUMENTS, arguments, f"{where}: model_args", node)
    else:
        if options := {key: value for key, value in arguments.items() if key != "img_size"}:
            described.say(f"{node}.OPTIONS", json.dumps(options), f"{where}: model_args")
        described.say("DATA.IMG_SIZE", side(arguments.get("img_size")), f"{where}: model_args: img_size")
    sized = {"input_size": None} if arguments.get("img_size") and whole.get("fixed_input_size") else {}
    for place, value in prepared(whole | sized).items():
        described.say(place, value, f"{where}: {_NAMED[place][1]}")


def description_in(path: Path) -> dict[str, Any]:
    """The mapping in a JSON file beside a checkpoint; empty if there is no such file, or it holds something else."""
    return _mapping(read_json(path, "description of a checkpoint")) if path.is_file() else {}


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def timm_architecture(source: Source) -> Any:
    """The architecture in timm's description of a file, in its metadata or beside it; None if there is none."""
    described = Description()
    _read_file(described, source, "MODEL.TIMM")
    config = described.timm or description_in(source.path.with_name("config.json"))
    return config.get("architecture") if _is_timm_config(config) or source.path.name in WEIGHTS else None


def _is_timm_config(config: Mapping[str, Any]) -> bool:
    return "pretrained_cfg" in config or ("architecture" in config and bool(_TIMMS & config.keys()))


@cache
def _known_places() -> frozenset[str]:
    return frozenset(key for key, _ in leaves(defaults()))


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | Mapping)
