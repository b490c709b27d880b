"""Save a verb's result into the output folder, and show it: in words, or as JSON."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swin_quant.base.distributed import World
from swin_quant.base.files import atomic_write_bytes, ensure_writable_dir, json_text
from swin_quant.base.progress import log


def save(result: Any, folder: Path | None, world: World) -> None:
    """Write a result that belongs into a folder: `result.save_in(folder)`.

    Args:
        result: What a verb returned.
        folder: The output folder; None: `output/<NAME>`.
        world: Only its first rank writes.
    """
    place = folder or Path("output") / result.name
    if world.is_main:
        ensure_writable_dir(place)
    result.save_in(place, world)


def show(result: Any, json: str | None = None) -> None:
    """Show a result: `result.show()`, or its `to_json()` as the flag `--json` says.

    Args:
        result: What a verb returned.
        json: A file; "-": JSON alone, on standard output; None: words.
    """
    if json is not None:
        text = json_text(_plain(result))
        if json == "-":
            print(text, end="")
            return
        atomic_write_bytes(json, text.encode())
        log.info("JSON: %s", json)
    if hasattr(result, "show"):
        result.show()
    else:
        print(*result if isinstance(result, list | tuple) else [result], sep="\n")


def _plain(result: Any) -> Any:
    if hasattr(result, "to_json"):
        return result.to_json()
    if isinstance(result, Sequence) and not isinstance(result, str):
        return [_plain(one) for one in result]
    return str(result) if isinstance(result, Path) else result
