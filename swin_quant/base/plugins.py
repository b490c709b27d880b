"""Objects that installed packages announce as entry points of a group."""

from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from typing import Any

from swin_quant.base.progress import log


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
