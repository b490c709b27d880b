"""Snapshots: the state that a run needs to go on as if it had never stopped.

A snapshot is written whole or not at all, and read without running code that it may hold. The newest `keep` stay; if
the newest is damaged, the one before is used.
"""

import io
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from swin_quant.base.errors import SwinQuantError
from swin_quant.base.files import atomic_write_bytes, ensure_writable_dir
from swin_quant.base.progress import log
from swin_quant.base.reading import reading
from swin_quant.checkpoint.read import read_pickled

FORMAT = "swin-quant/snapshot/1"
BEST = "best.pt"
Check = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Snapshots:
    """The snapshots of one run, in a folder of their own: `step_<number>.pt` and `best.pt`."""

    folder: Path
    keep: int = 2

    def newest_first(self) -> list[Path]:
        return sorted(self.folder.glob("step_*.pt"), reverse=True)

    def save(self, step: int, content: dict[str, Any]) -> None:
        """Write the snapshot of a step, then remove all but the newest `keep`."""
        ensure_writable_dir(self.folder)
        _write(self.folder / f"step_{step:09d}.pt", content)
        for old in self.newest_first()[self.keep :]:
            old.unlink(missing_ok=True)

    def save_best(self, content: dict[str, Any]) -> None:
        ensure_writable_dir(self.folder)
        _write(self.best_file, content)

    @property
    def best_file(self) -> Path:
        return self.folder / BEST

    def best(self, like: Mapping[str, Tensor], epoch: int) -> dict[str, Tensor] | None:
        """The best weights so far, with the names and shapes of `like`; None without readable ones of `epoch`.

        A run that goes on from an older snapshot does not know a later epoch."""

        def check(content: dict[str, Any]) -> None:
            check_weights(content.get("model"), like)
            if content.get("epoch") != epoch:
                raise ValueError(f"it is of epoch {content.get('epoch')!s:.20}, not {epoch}")

        found = next(self._readable([self.best_file], check), None) if self.best_file.exists() else None
        return found and found["model"]

    def newest(self, check: Check = lambda content: None) -> dict[str, Any] | None:
        """The newest readable snapshot that passes `check`, with a warning for every newer one; None without snapshots.

        SwinQuantError if all snapshots are damaged.
        """
        files = self.newest_first()
        content = next(self._readable(files, check), None)
        if files and content is None:
            raise SwinQuantError(f"{self.folder}: no snapshot can be read: start again with ‹overwrite›")
        return content

    def _readable(self, files: list[Path], check: Check) -> Iterator[dict[str, Any]]:
        for file in files:
            try:
                with reading(file, "snapshot"):
                    content = _read(file)
                    check(content)
            except SwinQuantError as error:
                log.warning("%s is damaged and is passed over (%s)", file, str(error).removeprefix(f"{file}: "))
            else:
                yield content

    def sweep(self) -> None:
        """Remove the half-written files of a killed run."""
        for file in self.folder.glob(".*.tmp"):
            file.unlink(missing_ok=True)

    def clear(self) -> None:
        """Remove every snapshot."""
        for file in [*self.newest_first(), self.best_file]:
            file.unlink(missing_ok=True)


def random_states() -> dict[str, Any]:
    """The states of python's, numpy's and torch's generators as plain data and tensors."""
    algorithm, keys, *rest = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (algorithm, np.asarray(keys).tolist(), *rest),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def set_random_states(states: dict[str, Any]) -> None:
    """Set the states that `random_states` returned."""
    random.setstate(states["python"])
    algorithm, keys, *rest = states["numpy"]
    np.random.set_state((algorithm, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.device_count() == len(states["cuda"]):
        torch.cuda.set_rng_state_all(states["cuda"])


def _write(path: Path, content: dict[str, Any]) -> None:
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, **content}, buffer)
    atomic_write_bytes(path, buffer.getbuffer())


def _read(path: Path) -> dict[str, Any]:
    content = read_pickled(path)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError("it is no snapshot of this version")
    return content


def check_weights(weights: Any, like: Mapping[str, Tensor]) -> None:
    """ValueError unless `weights` are tensors of the names and shapes of `like`."""
    if not isinstance(weights, dict) or weights.keys() != like.keys():
        raise ValueError("its weights are those of another model")
    for name, value in weights.items():
        if not isinstance(value, Tensor) or value.shape != like[name].shape:
            raise ValueError(f"its {name} is that of another model")
