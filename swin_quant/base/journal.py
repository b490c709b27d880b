"""What was measured, kept in a file as it comes, so that a run which is cut off does not measure it again."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from swin_quant.base.errors import SwinQuantError
from swin_quant.base.files import finite, read_json, write_json
from swin_quant.base.progress import log


class Journal:
    """Results by name in a JSON file, all of them of the same `subject`: plain data that says what was measured.

    A file of another subject, or one that cannot be read, is begun anew, with a warning.
    """

    def __init__(self, path: str | os.PathLike[str], subject: dict[str, Any]) -> None:
        self.path, self.subject = Path(path), json.loads(json.dumps(finite(subject)))
        self.entries: dict[str, Any] = self._earlier()
        self.found = len(self.entries)

    def remember(self, name: str, measure: Callable[[], Any]) -> Any:
        """What `measure()` gave, now or in an earlier run: plain data."""
        if name not in self.entries:
            self.entries[name] = json.loads(json.dumps(finite(measure())))
            self.write()
        return self.entries[name]

    def write(self) -> None:
        write_json(self.path, {"subject": self.subject, "entries": self.entries})

    def _earlier(self) -> dict[str, Any]:
        if not self.path.exists():
            return {}
        try:
            content = read_json(self.path, "journal")
            if content["subject"] == self.subject and isinstance(content["entries"], dict):
                return dict(content["entries"])
            log.warning("%s: is of another run: begun anew", self.path)
        except (SwinQuantError, TypeError, KeyError) as error:
            log.warning("%s: begun anew: %s", self.path, error)
        return {}
