"""Measurements stored in a file as they come, so that an interrupted run does not repeat them."""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swin_quant.base.errors import SwinQuantError
from swin_quant.base.files import finite, read_json, write_json
from swin_quant.base.progress import log
from swin_quant.base.reading import reads
from swin_quant.base.schema import checked


@dataclass(frozen=True)
class JournalFile:
    """The content of the file."""

    subject: dict[str, Any]
    entries: dict[str, Any]


class Journal:
    """Results by name in a JSON file, all for the same `subject`: plain data that describes the measurement.

    A file for another subject, or an unreadable one, is started again, with a warning.
    """

    def __init__(self, path: str | os.PathLike[str], subject: dict[str, Any]) -> None:
        self.path, self.subject = Path(path), plain(subject)
        self.entries: dict[str, Any] = self._earlier()
        self.found = len(self.entries)

    def remember(self, name: str, kind: Any, measure: Callable[[], Any]) -> Any:
        """The result of `measure()`, from now or an earlier run: plain data of a `kind` (`schema.checked`)."""
        known = self.known(name, kind)
        return self.keep({name: measure()}, kind)[name] if known is None else known

    def known(self, name: str, kind: Any) -> Any:
        """The stored result; None if there is none, or none of that kind."""
        try:
            return checked(kind, self.entries[name], str(self.path), name) if name in self.entries else None
        except SwinQuantError as error:
            log.warning("%s; measured anew", error)
            return None

    def keep(self, results: Mapping[str, Any], kind: Any) -> dict[str, Any]:
        """Store results; returns them as plain data."""
        kept = plain(dict(results))
        self.entries |= kept
        write_json(self.path, {"subject": self.subject, "entries": self.entries})
        return {name: checked(kind, value, str(self.path), name) for name, value in kept.items()}

    def _earlier(self) -> dict[str, Any]:
        if not self.path.exists():
            return {}
        try:
            content = read_journal(self.path)
        except SwinQuantError as error:
            log.warning("%s; begun anew", error)
            return {}
        if content.subject != self.subject:
            log.warning("%s: is of another run; begun anew", self.path)
            return {}
        return content.entries


@reads("journal")
def read_journal(path: str | os.PathLike[str]) -> JournalFile:
    """A journal's file. SwinQuantError for any other file."""
    found: JournalFile = checked(JournalFile, read_json(path, "journal"), str(path))
    return found


def plain(value: Any) -> Any:
    """`value` as it comes back from a JSON file."""
    return json.loads(json.dumps(finite(value)))
