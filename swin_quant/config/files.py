"""Find and read configuration files: shipped ones by name, inheritance through BASE."""

import difflib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from swin_quant.base.errors import UsageError, listed
from swin_quant.base.files import configs_dir
from swin_quant.base.schema import checked
from swin_quant.base.yaml_file import read_yaml
from swin_quant.config import timm

_SHIPPED = ("swin", "swinv2", "demo")
_MAX_FILES = 32
_NOUNS = {str: "text", list: "a list", bool: "a switch", type(None): "nothing"}  # the content itself is not shown


def find_config(name_or_path: str | Path) -> Path:
    """An existing file, `timm:NAME`, or else the shipped configuration of that name (its file without `.yaml`)."""
    if os.path.isfile(name_or_path) or timm.named(name_or_path) is not None:
        return Path(name_or_path)
    shipped = shipped_configs()
    if str(name_or_path) in shipped:
        return shipped[str(name_or_path)]
    name = Path(name_or_path).name.removesuffix(".yaml")
    families = {known.split("_patch")[0] for known in shipped}
    near = difflib.get_close_matches(name.split("_patch")[0], families, n=1)
    alike = [known for known in shipped if known.split("_patch")[0] in near]
    close = difflib.get_close_matches(name, alike, n=3) or alike or list(shipped)
    raise UsageError(f"no such file or shipped configuration: {name_or_path}; there is {listed(close)}")


def shipped_configs() -> dict[str, Path]:
    """Name -> file of the configurations that come with the package."""
    files = [file for folder in _SHIPPED for file in sorted((configs_dir() / folder).glob("[!_]*.yaml"))]
    return {file.stem: file for file in files}


def layers(path: Path, above: tuple[Path, ...], read: list[Path]) -> Iterator[tuple[Path, Mapping[Any, Any]]]:
    """Yield (file, content) in merge order: the files of BASE, recursively, then the file itself."""
    if (name := timm.named(path)) is not None:
        yield path, timm.tree_of(name)
        return
    tree = _read(path)
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


def _read(path: Path) -> dict[Any, Any]:
    tree = read_yaml(path, "configuration file")
    if not isinstance(tree, dict):
        raise UsageError(f"{path}: must hold KEY: value lines, not {_NOUNS.get(type(tree), 'a number')}")
    return tree
