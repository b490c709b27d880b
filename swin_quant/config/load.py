"""Find and read configuration files, `--opts` and flags into one checked, frozen tree; convert it to plain data and
back.

Shipped files are found by name; a file inherits from the files that its BASE names. Every key must be known, every
value of its key's type, and nothing is evaluated: yacs would evaluate text, and accept None for any key; here text is
read as the type of its key.
"""

import difflib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, reduce
from operator import getitem
from pathlib import Path
from types import GenericAlias
from typing import Annotated, Any

from yacs.config import CfgNode

from swin_quant.base.errors import UsageError, did_you_mean, listed
from swin_quant.base.files import configs_dir, near
from swin_quant.base.schema import Must, allow, checked, plain, show, within
from swin_quant.base.yaml_file import read_yaml
from swin_quant.config import outputs, timm
from swin_quant.config.defaults import BUILT_IN, architecture, default_config, defaults, families
from swin_quant.config.family import check_values
from swin_quant.config.sides import SIZE, shortest

_SHIPPED = ("swin", "swinv2", "demo")
_MAX_FILES = 32
_NOUNS = {str: "text", list: "a list", bool: "a switch", type(None): "nothing"}  # the content itself is not shown
# A value of the key's type, for defaults that do not show it.
_EXAMPLES: dict[str, Any] = {
    "AUG.CUTMIX_MINMAX": (0.0, 1.0),
    "MODEL.FEATURES.STAGES": [0],
    "TRAIN.LR_SCHEDULER.MULTISTEPS": [0],
}
_OPTIONAL = ("AUG.CUTMIX_MINMAX", "AUG.AUTO_AUGMENT")
_SIZE = "DATA.IMG_SIZE"
_Text = Annotated[str, Must(lambda text: "\0" not in text, "without NUL")]


def load_config(
    path: str | Path, opts: Sequence[str] = (), overrides: Mapping[str, Any] | None = None, whole: bool = True
) -> CfgNode:
    """Defaults <- BASE files <- the file <- opts <- overrides, checked and frozen.

    `opts` alternates keys and values as typed by the user, `overrides` maps dotted keys to values (leave out flags
    that were not given). BASE is resolved here, so the returned tree stands by itself. Raises UsageError, which names
    the key and the file, `--opts` or the command line. Unless `whole`, the tree is neither checked nor frozen.
    """
    cfg = default_config()
    for file, tree in layers(Path(path)):
        merge(cfg, tree, str(file))
    merge(cfg, keys_and_values(opts), "‹opts›")
    merge(cfg, overrides or {}, "command line")
    return _whole(cfg, str(path), keys_and_values(opts) | dict(overrides or {})) if whole else cfg


def _whole(cfg: CfgNode, source: str, given: Mapping[str, Any]) -> CfgNode:
    """The tree, checked and frozen; errors name the keys among those that the user has `given` over `source`."""
    try:
        check_geometry(cfg, source)
    except UsageError as error:
        told = listed([key for key in given if key in str(error)])
        raise UsageError(str(error).replace(source, f"{source} with your {told}", 1) if told else str(error)) from error
    cfg.freeze()
    return cfg


def keys_and_values(opts: Sequence[str]) -> dict[str, str]:
    """Keys and values that alternate, as typed by the user. UsageError for a key without a value."""
    if len(opts) % 2:
        raise UsageError(
            f"‹opts› takes pairs KEY VALUE, but got {len(opts)} word{'s' * (len(opts) > 1)}: {' '.join(opts)}"
        )
    return dict(zip(opts[::2], opts[1::2], strict=True))


def keys_set_in(path: str | Path) -> set[str]:
    """The dotted keys that a configuration file and its BASE files set; for `timm:NAME`, the keys of the model."""
    keys = {key for _, tree in layers(Path(path)) for key, _ in leaves(tree)} - {"BASE"}
    return {key for key in keys if key.startswith("MODEL.")} if timm.named(path) else keys


def from_dict(mapping: Mapping[str, Any], source: str, overrides: Mapping[str, Any] | None = None) -> CfgNode:
    """A tree of `to_dict` over the defaults, and `overrides` over it, checked and frozen; `source` is for errors."""
    cfg = default_config()
    merge(cfg, mapping, source)
    merge(cfg, overrides or {}, "command line")
    return _whole(cfg, source, overrides or {})


def to_dict(cfg: CfgNode) -> dict[str, Any]:
    """The tree as plain dicts, lists, numbers and strings, for JSON."""
    found: dict[str, Any] = plain(cfg)
    return found


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


_FILE = re.compile(r"(?!\.{1,2}$)[^/\\\x00-\x1f\ud800-\udfff]{1,200}")
_FOLDER = re.compile(r"[^\x00-\x1f\ud800-\udfff]{0,200}")
_Rate = Annotated[float, within(least=0, below=1)]
_KINDS: dict[str, Any] = {
    "DATA.INTERPOLATION": Annotated[str, allow(("bicubic", "bilinear", "lanczos", "nearest"))],
    "DATA.CACHE_MODE": Annotated[str, allow(("no", "full", "part"))],
    "DATA.IMG_SIZE": SIZE,
    "DATA.SCORED": Annotated[int, within(least=0)],
    "DATA.BATCH_SIZE": Annotated[int, within(least=1, most=2**20)],
    "MODEL.NUM_CLASSES": Annotated[int, within(least=1, most=2**20)],
    "MODEL.DROP_RATE": _Rate,
    "MODEL.DROP_PATH_RATE": _Rate,
    "MODEL.LABEL_SMOOTHING": _Rate,
    "MODEL.NAME": Annotated[
        str, Must(lambda text: bool(_FILE.fullmatch(text)), "a name for a file: no slashes, 1 to 200 characters")
    ],
    **outputs.KINDS,
    "TAG": Annotated[
        str, Must(lambda text: bool(_FOLDER.fullmatch(text)), "a name for a folder: up to 200 characters of UTF-8")
    ],
}


def check_geometry(cfg: CfgNode, source: str) -> None:
    """Refuse values that no model can be built from; `source` is the file that the UsageError names."""
    kinds = {"MODEL.TYPE": Annotated[str, allow(families())], **_KINDS}
    check_values(kinds, dict(leaves(cfg)), source)
    families()[cfg.MODEL.TYPE].check(cfg, source)


def check_channels(cfg: CfgNode) -> None:
    """UsageError for a model that does not take pictures as they are read, in three colours."""
    if (channels := architecture(cfg).get("IN_CHANS", 3)) != 3:
        raise UsageError(f"IN_CHANS is {channels}, but pictures are read in red, green and blue: it must be 3")


def find_config(name_or_path: str | Path) -> Path:
    """An existing file, `timm:NAME`, or else the shipped configuration of that name (its file without `.yaml`)."""
    if os.path.isfile(name_or_path) or timm.named(name_or_path) is not None:
        return Path(name_or_path)
    shipped = shipped_configs()
    if str(name_or_path) in shipped:
        return shipped[str(name_or_path)]
    name, is_file = Path(name_or_path).name.removesuffix(".yaml"), str(name_or_path).endswith((".yaml", ".yml"))
    families = {known.split("_patch")[0] for known in shipped}
    family = difflib.get_close_matches(name.split("_patch")[0], families, n=1)
    alike = [known for known in shipped if known.split("_patch")[0] in family]
    close = difflib.get_close_matches(name, alike, n=3) or alike or list(shipped)
    meant = (near(name_or_path) if is_file else "") or f"; there is {listed(close)}"
    raise UsageError(f"no such file or shipped configuration: {name_or_path}{meant}")


def shipped_configs() -> dict[str, Path]:
    """Name -> file of the configurations that come with the package."""
    files = [file for folder in _SHIPPED for file in sorted((configs_dir() / folder).glob("[!_]*.yaml"))]
    return {file.stem: file for file in files}


def layers(
    path: Path, above: tuple[Path, ...] = (), read: list[Path] | None = None
) -> Iterator[tuple[Path, Mapping[Any, Any]]]:
    """Yield (file, content) in merge order: the files of BASE, recursively, then the file itself.

    `above`: the files whose BASE leads here; `read`: all files so far.
    """
    read = [] if read is None else read
    if (name := timm.named(path)) is not None:
        yield path, timm.read_timm_config(name)
        return
    tree = read_yaml(path, "configuration file")
    if not isinstance(tree, dict):
        raise UsageError(f"{path}: must hold KEY: value lines, not {_NOUNS.get(type(tree), 'a number')}")
    resolved = path.resolve()
    if resolved in above:
        raise UsageError(f"BASE goes in a circle: {' -> '.join(map(str, (*above, resolved)))}")
    read.append(path)
    if len(read) > _MAX_FILES:
        raise UsageError(f"{read[0]}: BASE pulls in more than {_MAX_FILES} files, the last is {path}")
    base = tree.pop("BASE", None) or []
    names = checked(list[str], [base] if isinstance(base, str) else base, str(path), "BASE", error=UsageError)
    for name in filter(None, names):
        if not os.path.isfile(path.parent / name):
            raise UsageError(f"{path}: BASE names {name}, but there is no such file in {path.parent}")
        if not (path.parent / name).resolve().is_relative_to(read[0].parent.resolve().parent):
            raise UsageError(
                f"{path}: BASE names {name}, which leads away from {read[0]}: put it into its folder, or beside that"
            )
        yield from layers(path.parent / name, (*above, resolved), read)
    yield path, tree


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of everything that is not a section."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


@cache
def _keys(known: tuple[str, ...]) -> tuple[dict[str, Any], set[str]]:
    """Every key of the tree with its type, and the names of sections, among them those of the `known` families."""
    optional = {
        f"MODEL.{families()[name].section}.{key}": v for name in known for key, v in families()[name].optional.items()
    }
    examples = dict(leaves(defaults())) | _EXAMPLES | optional
    types = {key: _kind(value) for key, value in examples.items()} | {_SIZE: int | list[int]}
    types |= {key: types[key] | None for key in (*_OPTIONAL, *optional)}
    return types, {key.rsplit(".", n)[0] for key in types for n in range(1, key.count(".") + 1)}


def _kind(example: Any) -> Any:
    """The annotation of values like this one."""
    if isinstance(example, list | tuple):
        entry = _kind(example[0])
        return GenericAlias(list, entry) if isinstance(example, list) else GenericAlias(tuple, (entry,) * len(example))
    return _Text if isinstance(example, str) else type(example)


def value_at(cfg: CfgNode, place: str) -> Any:
    """The value of a dotted key."""
    return reduce(getitem, place.split("."), cfg)


def merge(cfg: CfgNode, tree: Mapping[Any, Any], source: str, prefix: str = "") -> None:
    """Write `tree` into `cfg`: nested sections or dotted keys, every key known and every value of its key's type."""
    types, known_sections = _keys(tuple(families()))
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if key in known_sections and isinstance(value, Mapping):
            merge(cfg, value, source, f"{key}.")
        elif key in known_sections:
            raise UsageError(f"{source}: {key} is a section of keys, not {show(value)}")
        elif key == "BASE" and isinstance(value, list) and not any(value):
            continue
        elif key == "BASE":
            raise UsageError(f"{source}: BASE works only in a YAML file")
        elif key not in types:
            hint = did_you_mean(key.upper(), [*types, *sorted(known_sections)])
            raise UsageError(f"{source}: unknown key {show(key)[1:-1]}{hint}")
        else:
            *sections, leaf = key.split(".")
            found = checked(types[key], value, source, key, text=True, error=UsageError)
            reduce(getitem, sections, cfg)[leaf] = shortest(found) if key == _SIZE else found
