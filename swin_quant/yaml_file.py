"""Reading YAML that a user wrote: bounded, as data, never evaluated. Errors are one line with file and place."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from swin_quant.errors import UsageError

_MAX_BYTES = 1 << 20


def read_yaml(path: Path, what: str) -> Any:
    """The content of `path`; `what` names its kind in errors, e.g. "configuration file". Raises UsageError."""
    if path.suffix not in (".yaml", ".yml"):
        raise UsageError(f"{path}: a {what} ends in .yaml or .yml")
    if not os.path.isfile(path):
        raise UsageError(f"{path}: no such {what}")
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise UsageError(f"{path}: larger than 1 MB, this is no {what}")
        return yaml.safe_load(content)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
        raise UsageError(f"{path}: not valid YAML{where}: {problem}") from error


def shipped_or_file(name_or_path: str, shipped: Iterable[Path], what: str) -> Path:
    """The file among `shipped` of that name (its stem), else the YAML file of the user's that it names."""
    names = {path.stem: path for path in shipped}
    path = names.get(name_or_path, Path(name_or_path))
    if path.suffix not in (".yaml", ".yml"):
        raise UsageError(f"no {what} {name_or_path!r}: give {', '.join(names)} or a .yaml file")
    return path
