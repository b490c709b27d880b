"""Other packages: optional libraries, imported when they are needed, and objects that packages announce."""

import importlib
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any

from swin_quant.base.errors import UsageError
from swin_quant.base.progress import log


def installing(extra: str) -> str:
    """The command that installs one of pyproject.toml's extras. The package is on no index: it works in a checkout."""
    return f"pip install -c constraints.txt -e '.[{extra}]' in the checkout"


def library(name: str, extra: str) -> ModuleType:
    """The module `name`, which comes with the package's `extra`. UsageError says how to install it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(f"{name} cannot be imported ({error}): {installing(extra)}") from error


def announced(group: str, what: str, fits: Callable[[Any], bool]) -> Iterator[tuple[str, Any]]:
    """(who, object) for each entry point that can be imported and `fits`; a warning for one that does not, which is
    left out.

    `what` is the noun for messages: a foreign package's fault must not keep ours from running.
    """
    for entry in entry_points(group=group):
        who = f"entry point {entry.name} of {entry.dist.name if entry.dist else 'a package'}"
        try:
            found = entry.load()
        except Exception as error:  # noqa: BLE001 a foreign module may raise anything
            log.warning("%s: left out, it cannot be imported: %s", who, error)
            continue
        if fits(found):
            yield who, found
        else:
            log.warning("%s: left out, it is no %s", who, what)
