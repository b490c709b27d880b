"""Commands that make files in a folder, one after another: what was done before in the same way is not done again."""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict

from swin_quant.base.arguments import as_command
from swin_quant.base.errors import SwinQuantError
from swin_quant.base.files import get_sha256, read_json, write_json
from swin_quant.base.progress import log
from swin_quant.base.schema import checked
from swin_quant.cards.card import RunCard
from swin_quant.cards.paths import card_path
from swin_quant.data.picture_set import PictureSet


class StepRecord(TypedDict):
    """One step: the words of its command, what it read, and the file that it wrote or measured with its SHA-256.

    Words name files without their folders, so that the output folder may be moved: hashes say what is in them.
    """

    words: list[str]
    inputs: dict[str, str]
    file: str
    sha256: str


class Steps:
    """Runs commands, and says of each whether it was done before: with these words and inputs, and its file is there.

    Args:
        file: The record of the steps in their folder; None: nothing was done before, as of models in memory.
        count: Their number.
        is_dry: Print the commands, and do nothing.
    """

    def __init__(self, file: Path | None, count: int, is_dry: bool) -> None:
        self.file, self.count, self.is_dry, self.number = file, count, is_dry, 0
        self.has_begun = False  # what stands behind a step that runs is done again, too
        self.records: list[StepRecord] = []
        if file and file.is_file():
            self.records = checked(list[StepRecord], read_json(file, "record of steps"), str(file))

    def run(
        self,
        function: Callable[..., Any],
        arguments: Mapping[str, Any],
        inputs: Mapping[str, str],
        file: Path,
        *more: str,
        then: Callable[[Any], None] | None = None,
        has_results: Callable[[RunCard], Any] = lambda _: True,
        replaces: bool = False,
    ) -> tuple[Path, Any]:
        """Run a step if it was not done.

        Args:
            function: The verb.
            arguments: Its arguments; a record of steps needs those of its command.
            inputs: Hashes of what it reads.
            file: What it is expected to write, or what it measures.
            more: Further words of the command.
            then: Called with the result; an error means that the step is not done.
            has_results: Whether the run card beside the file holds what the step writes into it.
            replaces: Say that a file which is there, and its results, are replaced.

        Returns:
            The file, and the function's result; None where it did not run.
        """
        self.number += 1
        name = function.__name__

        def work() -> tuple[Path, Any]:
            result = function(**arguments)
            if then:
                then(result)
            return Path(getattr(result, "file", None) or file), result

        if self.file is None:
            log.info("%d/%d %s", self.number, self.count, name)
            return work()
        command = as_command(name, function, *more, **arguments)
        told = {key: _without_reading(value) for key, value in arguments.items() if key != "folder"}
        words = [word.rpartition("/")[2] for word in shlex.split(as_command(name, function, **told))[1:]]
        before = [one for one in self.records if one["words"][0] == name]
        done = next((one for one in before if (one["words"], one["inputs"]) == (words, inputs)), None)
        there = self.file.parent / Path(done["file"]).name if done else file
        if done and not self.has_begun and _is_there(there, done["sha256"], has_results):
            self._say(command, "done before")
            return there, None
        self.has_begun = True
        old = [*before[-1]["words"], *before[-1]["inputs"].items()] if before else []
        changed = [word for word in words if word not in old] + [key for key in inputs if (key, inputs[key]) not in old]
        lost = f"replaces {file} and its results" if replaces and file.is_file() else ""
        again = f"done again, changed: {', '.join(dict.fromkeys(changed))}" if old and changed else ""
        self._say(command, lost if self.is_dry else "; ".join(filter(None, (again, lost))))
        if self.is_dry:
            return file, None
        try:
            made, result = work()
        except KeyboardInterrupt as stop:
            stop.args = stop.args or ("nothing half-written is left, and the same command goes on with this step",)
            raise
        record = StepRecord(words=words, inputs=dict(inputs), file=made.name, sha256=get_sha256(made))
        replaced = [one for one in before if one["words"] == words or one["file"] == made.name]
        self.records = [*(one for one in self.records if one not in replaced), record]
        write_json(self.file, self.records)
        return made, result

    def _say(self, command: str, state: str) -> None:
        if self.is_dry:
            print(command + (f"    # {state.removesuffix(' before')}" if state else ""))
        else:
            log.info("%d/%d %s%s", self.number, self.count, command, state and f": {state}")


def _is_there(file: Path, sha256: str, has_results: Callable[[RunCard], Any]) -> bool:
    """Whether a file is as a step left it, and so is its run card."""
    if not file.is_file() or get_sha256(file) != sha256:
        return False
    try:
        return file.suffix == ".yaml" or bool(has_results(RunCard.read(card_path(file))))
    except SwinQuantError:  # the card is missing or damaged
        return False


def _without_reading(value: Any) -> Any:
    """Pictures without what changes no result: their hash stands for the path, and any worker reads the same."""
    if not isinstance(value, PictureSet):
        return value
    return replace(value, path="", workers=None, cache_mode=None, max_unreadable=None)


def hash_files(*files: Path) -> dict[str, str]:
    """The hash of each file by its name; without those that are not made yet."""
    return {file.name: get_sha256(file) for file in files if file.is_file()}
