"""Read files, `--opts` and flags into one checked, frozen tree; convert it to plain data and back."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from yacs.config import CfgNode

from swin_quant.base.errors import UsageError
from swin_quant.base.schema import Must, one_of, within
from swin_quant.config import outputs
from swin_quant.config.defaults import BUILT_IN, architecture, default_config, families
from swin_quant.config.family import check_values
from swin_quant.config.files import layers
from swin_quant.config.sides import SIZE
from swin_quant.config.timm import named
from swin_quant.config.values import leaves, merge


def load_config(
    path: str | Path, opts: Sequence[str] = (), overrides: Mapping[str, Any] | None = None, whole: bool = True
) -> CfgNode:
    """Defaults <- BASE files <- the file <- opts <- overrides, checked and frozen.

    `opts` alternates keys and values as typed by the user, `overrides` maps dotted keys to values (leave out flags
    that were not given). BASE is resolved here, so the returned tree stands by itself. Raises UsageError, which names
    the key and the file, `--opts` or the command line. Unless `whole`, the tree is neither checked nor frozen.
    """
    cfg = default_config()
    for file, tree in layers(Path(path), (), []):
        merge(cfg, tree, str(file))
    if len(opts) % 2:
        raise UsageError(f"‹opts› takes pairs KEY VALUE, but got {len(opts)} words: {' '.join(opts)}")
    merge(cfg, dict(zip(opts[::2], opts[1::2], strict=True)), "‹opts›")
    merge(cfg, overrides or {}, "command line")
    if whole:
        check_geometry(cfg, str(path))
        cfg.freeze()
    return cfg


def keys_set_in(path: str | Path) -> set[str]:
    """The dotted keys that a configuration file and its BASE files set; for `timm:NAME`, the keys of the model."""
    keys = {key for _, tree in layers(Path(path), (), []) for key, _ in leaves(tree)} - {"BASE"}
    return {key for key in keys if key.startswith("MODEL.")} if named(path) else keys


def from_dict(mapping: Mapping[str, Any], source: str, overrides: Mapping[str, Any] | None = None) -> CfgNode:
    """A tree written by `to_dict`, over the defaults, and `overrides` over it; checked and frozen like a file.

    `source` names it in errors.
    """
    cfg = default_config()
    merge(cfg, mapping, source)
    merge(cfg, overrides or {}, "command line")
    check_geometry(cfg, source)
    cfg.freeze()
    return cfg


def to_dict(cfg: CfgNode) -> dict[str, Any]:
    """The tree as plain dicts, lists, numbers and strings, for JSON."""
    plain = {key: to_dict(value) if isinstance(value, CfgNode) else value for key, value in cfg.items()}
    return {key: list(value) if isinstance(value, tuple) else value for key, value in plain.items()}


def portable_config(cfg: CfgNode) -> dict[str, Any]:
    """The config as a run card keeps it: without the folders of the machine it ran on."""
    data = to_dict(cfg)
    for family in families().values():  # a reader without that package would not know the section
        if family.name not in (cfg.MODEL.TYPE, *(family.name for family in BUILT_IN)):
            del data["MODEL"][family.section]
    data["DATA"]["DATA_PATH"] = Path(cfg.DATA.DATA_PATH).name
    data["DATA"]["SCORED"], data["OUTPUT"] = 0, ""
    for key in ("RESUME", "PRETRAINED"):
        data["MODEL"][key] = Path(cfg.MODEL[key]).name
    return data


def _spelt(pattern: str) -> Callable[[str], bool]:
    return lambda text: re.fullmatch(pattern, text) is not None


_FILE = _spelt(r"(?!\.{1,2}$)[^/\\\x00-\x1f\ud800-\udfff]{1,200}")
_FOLDER = _spelt(r"[^\x00-\x1f\ud800-\udfff]{0,200}")
_Rate = Annotated[float, within(least=0, below=1)]
_KINDS: dict[str, Any] = {
    "DATA.INTERPOLATION": Annotated[str, one_of(("bicubic", "bilinear", "lanczos", "nearest"))],
    "DATA.CACHE_MODE": Annotated[str, one_of(("no", "full", "part"))],
    "DATA.IMG_SIZE": SIZE,
    "DATA.SCORED": Annotated[int, within(least=0)],
    "DATA.BATCH_SIZE": Annotated[int, within(least=1, most=2**20)],
    "MODEL.NUM_CLASSES": Annotated[int, within(least=1, most=2**20)],
    "MODEL.DROP_RATE": _Rate,
    "MODEL.DROP_PATH_RATE": _Rate,
    "MODEL.LABEL_SMOOTHING": _Rate,
    "MODEL.NAME": Annotated[str, Must(_FILE, "a name for a file: no slashes, 1 to 200 characters")],
    **outputs.KINDS,
    "TAG": Annotated[str, Must(_FOLDER, "a name for a folder: up to 200 characters of UTF-8")],
}


def check_geometry(cfg: CfgNode, source: str) -> None:
    """Refuse values that no model can be built from; `source` is the file that the UsageError names."""
    kinds = {"MODEL.TYPE": Annotated[str, one_of(families())], **_KINDS}
    check_values(kinds, dict(leaves(cfg)), source)
    families()[cfg.MODEL.TYPE].check(cfg, source)


def check_channels(cfg: CfgNode) -> None:
    """UsageError for a model that does not take pictures as they are read, in three colours."""
    if (channels := architecture(cfg).get("IN_CHANS", 3)) != 3:
        raise UsageError(f"IN_CHANS is {channels}, but pictures are read in red, green and blue: it must be 3")
